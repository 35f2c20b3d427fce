"""The model card: `README.md` of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import bothways
from bothways.families.family import Architecture

_TASKS = {
    "labels": "text-classification",
    "tags": "token-classification",
    "span": "question-answering",
    "choice": "multiple-choice",
    "masked": "fill-mask",
    "causal": "text-generation",
}
"""The Hub's names for what a head does; the first that a model has is entered."""


@dataclass(frozen=True)
class Card:
    """What a reader of the folder should know.

    Attributes:
        title: one line.
        summary: what the model is for, what it was trained on, its limits.
        settings: of its training, seeds and all.
        metrics: what it reached.
        data: what it was trained and scored on, with fingerprints.
        limits: what it cannot be relied on for, one sentence each.
    """

    title: str = "A BERT encoder"
    summary: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    limits: Sequence[str] = ()


def render_card(card: Card, architecture: Architecture) -> str:
    """The card as Markdown, with the header that the Hub reads."""
    task = next(
        (name for kind, name in _TASKS.items() if kind in architecture.heads), "feature-extraction"
    )
    library = "bothways" if architecture.own else "transformers"
    header = [
        "---",
        f"library_name: {library}",
        f"pipeline_tag: {task}",
        "tags:",
        "- bothways",
        "---",
    ]
    body = [f"# {_line(card.title)}", card.summary, _use(architecture)]
    body += _table("Metrics", {name: f"{value:.4g}" for name, value in card.metrics.items()})
    body += _limits(card.limits)
    body += _table("Data", card.data)
    body += _table("Settings", card.settings)
    body += _table("Versions", versions(architecture))
    return "\n".join(header) + "\n\n" + "\n\n".join(part for part in body if part) + "\n"


def _use(architecture: Architecture) -> str:
    if architecture.own:
        code = 'from bothways import load_model\n\nmodel = load_model("…").model'
        return f"```python\n{code}\n```\n\ntransformers has no class for this model and does not open the folder."
    name = architecture.name
    return f'```python\nfrom transformers import AutoTokenizer, {name}\n\nmodel = {name}.from_pretrained("…")\n```'


def versions(architecture: Architecture) -> dict[str, str]:
    """What wrote the folder, and what reads it."""
    import torch

    return {
        "bothways": bothways.__version__,
        "torch": torch.__version__,
        "format": architecture.name
        if architecture.own
        else f"Hugging Face transformers, {architecture.name}",
    }


def _limits(limits: Sequence[str]) -> list[str]:
    return ["## Limits", "\n".join(f"- {_line(limit)}" for limit in limits)] if limits else []


def _table(title: str, rows: Mapping[str, object]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return [f"## {title}", "\n".join(["| | |", "|---|---|", *lines])]


def _cell(value: object) -> str:
    return _line(value).replace("|", "\\|")


def _line(value: object) -> str:
    return " ".join(str(value).split())
