"""Checks of texts against a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many

import numpy as np

from bothways.core.finding import Finding
from bothways.tasks.base import EncodedExample
from bothways.text.tokenizer import Tokenizer

WHOLE, ROUND = 0.95, 32
"""The share of texts that the default length holds whole, and the multiple it is rounded to."""
UNKNOWN = 0.02
"""The share of unknown tokens above which a warning is reported."""
SAMPLE = 1000
"""Number of texts in the sample that casing is checked on."""


def unknown_share(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Return the share of unknown tokens in these texts."""
    ids, _ = tokenizer.encode_flat(texts)
    return float((ids == tokenizer.specials.unknown).mean()) if len(ids) else 0.0


def needed_length(inputs: Iterable[EncodedExample], share: float = WHOLE) -> int:
    """Return the length that holds this share of examples whole, rounded up to a multiple of 32.

    Example: 95 % of the texts have at most 201 tokens, special tokens included → 224.
    """
    lengths = [
        max(length for s in item.sequences for length in s.parts or (len(s),)) + item.cut
        for item in inputs
    ]
    return -(-int(np.quantile(lengths, share, method="inverted_cdf")) // ROUND) * ROUND


def check_inputs(
    inputs: Many[EncodedExample],
    tokenizer: Tokenizer,
    length: int,
    advice: Callable[[int], str] = lambda needed: f"Set length={needed}.",
) -> list[Finding]:
    """Report texts that are cut off, and unknown tokens.

    Args:
        advice: returns the fix, given the length that holds nearly all texts.
    """
    findings = []
    cut = [item for item in inputs if item.cut]
    if cut:
        lost = sum(item.cut for item in cut) / sum(item.tokens for item in inputs)
        what = (
            f"{len(cut)} of {len(inputs)} examples ({len(cut) / len(inputs):.1%}) are longer than "
            f"{length} tokens and are cut: {lost:.1%} of all tokens are not read"
        )
        fix = advice(needed_length(inputs))
        findings.append(Finding("truncation", "warning", what, "length", fix))
    ids = [sequence.ids for item in inputs for sequence in item.sequences]
    share = float((np.concatenate(ids) == tokenizer.specials.unknown).mean()) if ids else 0.0
    if share > UNKNOWN:
        what = f"{share:.1%} of the tokens are unknown to the vocabulary"
        fix = "Use a model whose vocabulary fits this text."
        findings.append(Finding("unknown", "warning", what, "tokenizer", fix))
    return findings
