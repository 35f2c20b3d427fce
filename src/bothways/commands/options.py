"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

TrainedTask = Annotated[
    str,
    Parameter(
        help="classify, regress, multilabel, choice, tag, answer, rerank, or another usual name of "
        "one of them, such as sentiment, ner or qa."
    ),
]
Device = Annotated[str, Parameter(help="auto, cpu, cuda or cuda:N.")]
TextColumn = Annotated[
    str | None,
    Parameter(
        help="Column of the text, or of the first of two (for rerank the query); default: as in "
        "training."
    ),
]
NewTextColumn = Annotated[
    str | None,
    Parameter(help="Column of the text, or of the first of two; without a header its number."),
]
SecondColumn = Annotated[str | None, Parameter(help="The column of the second text.")]
LabelColumn = Annotated[str | None, Parameter(help="The column of the label.")]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "int8"],
    Parameter(
        help="Precision of matrix products: fp32 gives equal results on every machine, auto uses "
        "bf16 where the hardware supports it. int8 is faster and less exact on a CPU: `bothways "
        "evaluate --precision int8` compares it with fp32 in accuracy and speed."
    ),
]
RuntimeChoice = Annotated[
    Literal["torch", "onnxruntime", "openvino"],
    Parameter(
        help="What computes the model: this library, or onnxruntime or OpenVINO for a folder that "
        "`bothways export` wrote."
    ),
]
FineRecipe = Annotated[
    Literal["modern", "paper"],
    Parameter(
        help="modern is AdamW; paper is Adam without bias correction, as BERT's own code has it."
    ),
]


def _check_names(kind: object, names: str | Iterable[str] | None) -> None:
    """Raise ValueError for an unknown option."""
    for name in [names] if isinstance(names, str) else names or ():
        if name.startswith("-") and name != "-":
            raise ValueError(f"Unknown option: {name}")


INPUTS = Parameter(negative_iterable="", allow_leading_hyphen=True, validator=_check_names)
"""File names as arguments of a command, including "-"."""


@Parameter(name="*")
@dataclass(frozen=True)
class PartOptions:
    """Options of predictions in parts (`--out DIR`)."""

    keep: Annotated[
        tuple[str, ...],
        Parameter(
            negative_iterable="",
            help="With --out DIR: a column to copy to the output, such as a key; old=new renames "
            "it. May be repeated.",
        ),
    ] = ()
    format: Annotated[
        Literal["jsonl", "parquet", "npy"] | None,
        Parameter(
            help="With --out DIR: of the parts. Default: npy for vectors, parquet if the input is "
            "or if vectors have columns to keep, else jsonl."
        ),
    ] = None
    rows: Annotated[int, Parameter(help="With --out DIR: rows of a part.")] = 4096
    rejects: Annotated[
        bool,
        Parameter(
            negative="",
            help="With --out DIR: write rows that cannot be read or predicted to DIR/_rejects "
            "instead of ending at the first.",
        ),
    ] = False
    processes: Annotated[
        int | None,
        Parameter(help="With --out DIR: processes that predict; default: 1, on Ray all it has."),
    ] = None
    threads: Annotated[
        int | None,
        Parameter(help="With --out DIR: of each process; default: all cores, shared; on Ray 1."),
    ] = None
    ray: Annotated[
        str | None,
        Parameter(
            help="With --out DIR: predict on a Ray cluster: auto, ray://HOST:10001, or local."
        ),
    ] = None
