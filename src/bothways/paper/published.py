"""Published figures as data: tables 1 to 5 and 7 of Devlin et al. 2018 (arXiv 1810.04805v2).

All values are percentages, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A row of one of the paper's tables.

    Attributes:
        system: name of the system.
        table: the table and the data set, such as "Table 1, test".
        values: values by column, without those that the paper omits.
    """

    system: str
    table: str
    values: Mapping[str, float]


def _rows(
    table: str, columns: tuple[str, ...], rows: Mapping[str, tuple[float | None, ...]]
) -> tuple[Published, ...]:
    return tuple(
        Published(
            system, table, {c: v for c, v in zip(columns, values, strict=True) if v is not None}
        )
        for system, values in rows.items()
    )


AVERAGED = ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE")
"""The columns of table 1 whose mean is its average: MNLI counts twice, WNLI is left out."""

GLUE = (
    *_rows(
        "Table 1, test",
        (*AVERAGED, "average"),
        {
            "pre-OpenAI SOTA": (80.6, 80.1, 66.1, 82.3, 93.2, 35.0, 81.0, 86.0, 61.7, 74.0),
            "BiLSTM+ELMo+Attn": (76.4, 76.1, 64.8, 79.8, 90.4, 36.0, 73.3, 84.9, 56.8, 71.0),
            "OpenAI GPT": (82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0, 75.1),
            "BERT-Base": (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4, 79.6),
            "BERT-Large": (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1, 82.1),
        },
    ),
    # Table 5 gives accuracy for MRPC, which is not one of the columns.
    *_rows("Table 5, dev", ("MNLI-m", "QNLI", "SST-2"), {"BERT-Base": (84.4, 88.4, 92.7)}),
)

SQUAD = (
    *_rows(
        "Table 2, dev",
        ("1.1 EM", "1.1 F1"),
        {
            "BERT-Base": (80.8, 88.5),
            "BERT-Large": (84.1, 90.9),
            "BERT-Large, 7 models": (85.8, 91.8),
            "BERT-Large + TriviaQA": (84.2, 91.1),
            "BERT-Large, 7 models + TriviaQA": (86.2, 92.2),
        },
    ),
    *_rows(
        "Table 2, test",
        ("1.1 EM", "1.1 F1"),
        {
            "human": (82.3, 91.2),
            "BERT-Large + TriviaQA": (85.1, 91.8),
            "BERT-Large, 7 models + TriviaQA": (87.4, 93.2),
        },
    ),
    *_rows(
        "Table 3, dev", ("2.0 EM", "2.0 F1"), {"human": (86.3, 89.0), "BERT-Large": (78.7, 81.9)}
    ),
    *_rows(
        "Table 3, test", ("2.0 EM", "2.0 F1"), {"human": (86.9, 89.5), "BERT-Large": (80.0, 83.1)}
    ),
)

SWAG = _rows(
    "Table 4",
    ("dev", "test"),
    {
        "ESIM+GloVe": (51.9, 52.7),
        "ESIM+ELMo": (59.1, 59.2),
        "OpenAI GPT": (None, 78.0),
        "BERT-Base": (81.6, None),
        "BERT-Large": (86.6, 86.3),
        "human, expert": (None, 85.0),
        "human, five annotations": (None, 88.0),
    },
)

NER = _rows(
    "Table 7",
    ("dev", "test"),
    {
        "ELMo": (95.7, 92.2),
        "CVT": (None, 92.6),
        "CSE": (None, 93.1),
        "BERT-Large, fine-tuned": (96.6, 92.8),
        "BERT-Base, fine-tuned": (96.4, 92.4),
        "BERT-Base, embeddings": (91.0, None),
        "BERT-Base, second-to-last layer": (95.6, None),
        "BERT-Base, last layer": (94.9, None),
        "BERT-Base, weighted sum of the last four": (95.9, None),
        "BERT-Base, concatenation of the last four": (96.1, None),
        "BERT-Base, weighted sum of all twelve": (95.5, None),
    },
)
