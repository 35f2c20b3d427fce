"""Checks of a model against its data."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from bothways.core.finding import Finding
from bothways.model.config import ModelConfig
from bothways.preflight.text import SAMPLE, UNKNOWN, unknown_share
from bothways.text.tokenizer import Tokenizer


def check_model(encoder: ModelConfig, tokenizer: Tokenizer, length: int) -> list[Finding]:
    """Check token ids against the embedding, and the length against the positions.

    Without the check, both fail late, as a "device-side assert".
    """
    findings = []
    if tokenizer.size > encoder.vocab:
        what = (
            f"the tokenizer has ids up to {tokenizer.size - 1}, "
            f"but the model's embedding has {encoder.vocab} rows"
        )
        findings.append(
            Finding(
                "ids",
                "error",
                what,
                "tokenizer",
                "Use the tokenizer that the model was trained with.",
            )
        )
    if length > encoder.max_positions:
        what = (
            f"sequences of {length} tokens are longer than the model's "
            f"{encoder.max_positions} positions"
        )
        findings.append(
            Finding(
                "positions", "error", what, "length", f"Set length={encoder.max_positions} or less."
            )
        )
    return findings


def check_casing(tokenizer: Tokenizer, texts: Many[str]) -> list[Finding]:
    """Check that vocabulary and tokenizer agree about capital letters, by a sample of the text."""
    sample = list(texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE])
    if tokenizer.lowercase:
        control = tokenizer.special | (np.arange(tokenizer.size) == tokenizer.specials.unknown)
        tokens = [token for token, id in tokenizer.backend.get_vocab().items() if not control[id]]
        capital = sum(token != token.lower() for token in tokens) / max(1, len(tokens))
        if capital <= 0.1:
            return []
        what = (
            f"the vocabulary is cased ({capital:.0%} of its tokens have capitals), "
            "but the tokenizer lower-cases"
        )
        return [
            Finding(
                "casing",
                "warning",
                what,
                "tokenizer",
                'Set "do_lower_case": false in tokenizer_config.json.',
            )
        ]
    unknown, lowered = (
        unknown_share(tokenizer, some) for some in (sample, [text.lower() for text in sample])
    )
    if unknown - lowered <= UNKNOWN:
        return []
    what = (
        "the vocabulary is uncased, but the tokenizer keeps capitals: "
        f"{unknown:.1%} of tokens are unknown, lower-cased {lowered:.1%}"
    )
    return [
        Finding(
            "casing",
            "warning",
            what,
            "tokenizer",
            'Set "do_lower_case": true in tokenizer_config.json.',
        )
    ]
