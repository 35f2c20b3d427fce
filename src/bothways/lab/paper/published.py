"""Published figures: tables 1 to 8 of Devlin et al. 2018 (arXiv 1810.04805v2), and of its
successors those on pre-training.

The tables are in published.json; null is a value that the paper omits. All values but
perplexities are percentages, as in the papers. Table 5 gives accuracy for MRPC, which is not one of
the columns of GLUE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Published:
    """A row of one of the paper's tables.

    Attributes:
        system: name of the system.
        table: name of the table and the data set, such as "Table 1, test".
        values: values by column, without those that the paper omits.
    """

    system: str
    table: str
    values: Mapping[str, float]


_FILE = resources.files("bothways.lab.paper") / "published.json"
TABLES: dict[str, tuple[Published, ...]] = {
    name: tuple(
        Published(
            system,
            table["table"],
            {
                column: value
                for column, value in zip(table["columns"], values, strict=True)
                if value is not None
            },
        )
        for table in entries
        for system, values in table["rows"].items()
    )
    for name, entries in json.loads(_FILE.read_text(encoding="utf8")).items()
}
"""The published rows by the name of the experiment."""

AVERAGED = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
"""The columns of table 1 whose mean is its average: MNLI counts twice, WNLI is excluded."""
