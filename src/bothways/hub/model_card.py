"""The model card: `README.md` of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bothways._version import __version__
from bothways.families.family import Architecture

_PIPELINES = {
    "labels": "text-classification",
    "tags": "token-classification",
    "span": "question-answering",
    "choice": "multiple-choice",
    "masked": "fill-mask",
    "causal": "text-generation",
}
"""The Hub's names for what a head does; the first one that a model has is its tag."""
_LIMITS = "## Limits\n\n"
UNSEEN = "Language and domain are those of its data; other languages and domains were not measured."
"""The first limit of every trained model."""


@dataclass(frozen=True)
class Card:
    """The content of a model card.

    Attributes:
        title: one line.
        summary: the purpose of the model and what it was trained on.
        settings: the settings of its training, with seeds.
        metrics: the metrics that it reached.
        data: the data that it was trained and evaluated on, with digests.
        limits: what it cannot be relied on for, one sentence each.
    """

    title: str = "A BERT encoder"
    summary: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    limits: Sequence[str] = ()


def render_card(card: Card, architecture: Architecture) -> str:
    """Return the card as Markdown, with the header that the Hub reads."""
    tags = (name for kind, name in _PIPELINES.items() if kind in architecture.heads)
    library = "bothways" if architecture.own else "transformers"
    header = [
        "---",
        f"library_name: {library}",
        f"pipeline_tag: {next(tags, 'feature-extraction')}",
        "tags:",
        "- bothways",
        "---",
    ]
    limits = "".join(f"- {_line(limit)}\n" for limit in card.limits)
    body = [
        f"# {_line(card.title)}",
        card.summary,
        _usage(architecture),
        _table("Metrics", {name: f"{value:.4g}" for name, value in card.metrics.items()}),
        (_LIMITS + limits).rstrip() if limits else "",
        _table("Data", card.data),
        _table("Settings", card.settings),
        _table("Versions", _versions(architecture)),
    ]
    return "\n".join(header) + "\n\n" + "\n\n".join(part for part in body if part) + "\n"


def with_first_limit(card: str, limit: str) -> str:
    """Return a rendered card with another limit in front of the others."""
    return card.replace(_LIMITS, f"{_LIMITS}- {limit}\n", 1)


def _usage(architecture: Architecture) -> str:
    if architecture.own:
        code = 'from bothways import load_model\n\nmodel = load_model("…").model'
        note = "transformers has no class for this model and does not open the folder."
        return f"```python\n{code}\n```\n\n{note}"
    name = architecture.name
    code = f'from transformers import AutoTokenizer, {name}\n\nmodel = {name}.from_pretrained("…")'
    return f"```python\n{code}\n```"


def _versions(architecture: Architecture) -> dict[str, str]:
    import torch

    name = architecture.name
    return {
        "bothways": __version__,
        "torch": torch.__version__,
        "format": name if architecture.own else f"Hugging Face transformers, {name}",
    }


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = "".join(f"\n| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    return f"## {title}\n\n| | |\n|---|---|{lines}" if lines else ""


def _cell(value: object) -> str:
    return _line(value).replace("|", "\\|")


def _line(value: object) -> str:
    return " ".join(str(value).split())
