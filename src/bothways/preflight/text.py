"""Checks of texts against a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from bothways.core.finding import Finding
from bothways.tasks.base import EncodedExample
from bothways.text.tokenizer import Tokenizer

UNKNOWN = 0.02
"""The share of unknown tokens from which on a warning is due."""
SAMPLE = 1000
"""Texts that casing is judged by."""


def unknown_share(tokenizer: Tokenizer, texts: list[str]) -> float:
    """The part of the tokens of these texts that are unknown."""
    ids, _ = tokenizer.encode_flat(texts)
    return float((ids == tokenizer.specials.unknown).mean()) if len(ids) else 0.0


def check_inputs(inputs: Many[EncodedExample], tokenizer: Tokenizer, length: int) -> list[Finding]:
    """How much of the text is cut off, and how much of the rest is unknown."""
    findings = []
    cut = [item for item in inputs if item.cut]
    if cut:
        tokens = sum(item.tokens for item in inputs)
        what = (
            f"{len(cut)} of {len(inputs)} examples ({len(cut) / len(inputs):.1%}) are longer than {length} tokens and are cut: "
            f"{sum(item.cut for item in cut) / tokens:.1%} of all tokens are not read"
        )
        findings.append(
            Finding(
                "truncation", "warning", what, "length", "Set a greater length to read them whole."
            )
        )
    ids = [sequence.ids for item in inputs for sequence in item.sequences]
    share = float((np.concatenate(ids) == tokenizer.specials.unknown).mean()) if ids else 0.0
    if share > UNKNOWN:
        what = f"{share:.1%} of the tokens are unknown to the vocabulary"
        findings.append(
            Finding(
                "unknown",
                "warning",
                what,
                "tokenizer",
                "Use a model whose vocabulary fits this text.",
            )
        )
    return findings
