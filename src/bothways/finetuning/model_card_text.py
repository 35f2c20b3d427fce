"""The text of a fine-tuned model's card: its data, its run and its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from bothways.core.finding import Finding
from bothways.hub.model_card import UNSEEN
from bothways.training.durations import Duration
from bothways.training.state import RunState

if TYPE_CHECKING:
    from bothways.finetuning.prepare import ModelSource


def data_of(sources: Mapping[str, ModelSource]) -> dict[str, object]:
    """Return the name, size and sha256 of each data set, by its use."""
    return {
        name: f"{source.name}, {source.examples:,} examples, sha256 {source.sha256}"
        for name, source in sources.items()
    }


def limits_of_finetuned(
    length: int, seed: int, findings: Iterable[Finding], evaluated: bool
) -> tuple[str, ...]:
    """Return the limits of a fine-tuned model.

    Args:
        length: maximum length of a text in tokens.
        findings: of the preflight; its warnings apply to the model as well.
        evaluated: True if there was dev data.
    """
    warnings = [finding.what for finding in findings if finding.severity == "warning"]
    chosen = "The weights were selected by the metrics above: expect less on new data."
    return (
        UNSEEN,
        f"It was trained on sequences of at most {length} tokens.",
        *(f"{what[:1].upper()}{what[1:].removesuffix('.')}." for what in warnings),
        chosen if evaluated else "Nothing was measured: there was no dev data.",
        f"This is one run, with seed {seed}; other seeds give other metrics.",
    )


def run_of(until: Duration, progress: RunState) -> str:
    """Return the length of a run, and if it ended early."""
    done = f"{progress.amount(until):.4g} of at most {until}, ended early"
    return done if progress.early else str(until)
