"""Checks of a tokenizer against a text and a model."""

from __future__ import annotations

from bothways.core.errors import Finding
from bothways.model.config import EncoderConfig
from bothways.text.tokenizer import Tokenizer

UNKNOWN = 0.02
"""The share of unknown tokens above which a warning is reported."""


def unknown_tokens(share: float, fix: str) -> list[Finding]:
    """Report a share of unknown tokens: a warning above `UNKNOWN`, else a note unless 0.00 %."""
    message = "of the tokens are unknown to the vocabulary"
    if share > UNKNOWN:
        return [Finding("unknown", "warning", f"{share:.1%} {message}", "tokenizer", fix)]
    rounded = f"{share:.2%}"
    return [Finding("unknown", "note", f"{rounded} {message}")] if rounded != "0.00%" else []


def check_model(encoder: EncoderConfig, tokenizer: Tokenizer, length: int) -> list[Finding]:
    """Check token ids against the embedding, and the length against the positions.

    Without the check, both fail late, as a "device-side assert".
    """
    findings = []
    if tokenizer.size > encoder.vocab:
        message = (
            f"the tokenizer has ids up to {tokenizer.size - 1}, "
            f"but the model's embedding has {encoder.vocab} rows"
        )
        fix = "Use the tokenizer that the model was trained with."
        findings.append(Finding("ids", "error", message, "tokenizer", fix))
    if length > (max_length := encoder.max_positions):
        message = f"sequences of {length} tokens are longer than the model's {max_length} positions"
        fix = f"Set it to {max_length} or less."
        findings.append(Finding("positions", "error", message, "length", fix))
    return findings
