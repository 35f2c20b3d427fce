"""The model card: `README.md` of a model folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import bothways

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


def render(card: Card, architecture: str, heads: Iterable[str]) -> str:
    """The card as Markdown, with the header that the Hub reads."""
    kinds = set(heads)
    task = next((name for kind, name in _TASKS.items() if kind in kinds), "feature-extraction")
    header = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", "- bothways", "---"]
    use = (
        f'```python\nfrom transformers import AutoTokenizer, {architecture}\n\nmodel = {architecture}.from_pretrained("…")\n```'
    )
    body = [f"# {_line(card.title)}", card.summary, use]
    body += _table("Metrics", {name: f"{value:.4g}" for name, value in card.metrics.items()})
    body += _limits(card.limits)
    body += _table("Data", card.data)
    body += _table("Settings", card.settings)
    body += _table("Versions", versions(architecture))
    return "\n".join(header) + "\n\n" + "\n\n".join(part for part in body if part) + "\n"


def versions(architecture: str) -> dict[str, str]:
    """What wrote the folder, and what reads it."""
    import torch

    return {
        "bothways": bothways.__version__,
        "torch": torch.__version__,
        "format": f"Hugging Face transformers, {architecture}",
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
