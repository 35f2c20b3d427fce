"""Checks of texts against a tokenizer, and of a tokenizer against a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Many
from typing import Protocol, runtime_checkable

import numpy as np

from bothways.core.errors import Finding
from bothways.core.source import Sequence
from bothways.core.terminal import quantity
from bothways.model.config import EncoderConfig
from bothways.text.tokenizer import Tokenizer

WHOLE, ROUND = 0.95, 32
"""The share of texts that the default length holds whole, and the multiple it is rounded to."""
UNKNOWN = 0.02
"""The share of unknown tokens above which a warning is reported."""
SAMPLE = 1000
"""Number of texts in the sample that casing is checked on."""


@runtime_checkable
class EncodedInput(Protocol):
    """An example as sequences, with the number of tokens read and cut."""

    @property
    def sequences(self) -> Many[Sequence]:
        """The sequences of the example."""

    @property
    def cut(self) -> int:
        """Tokens that do not fit."""

    @property
    def tokens(self) -> int:
        """Tokens of the example, with those cut."""


def unknown_share(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Return the share of unknown tokens in these texts."""
    ids, _ = tokenizer.encode_flat(texts)
    return float((ids == tokenizer.specials.unknown).mean()) if len(ids) else 0.0


def needed_length(inputs: Iterable[EncodedInput], share: float = WHOLE) -> int:
    """Return the length that holds this share of examples whole, rounded up to a multiple of 32.

    Example: 95 % of the texts have at most 201 tokens, special tokens included → 224.
    """
    lengths = [
        max((length for s in item.sequences for length in s.parts or (len(s),)), default=0)
        + item.cut
        for item in inputs
    ]
    return -(-int(np.quantile(lengths, share, method="inverted_cdf")) // ROUND) * ROUND


def check_inputs(
    inputs: Many[EncodedInput],
    tokenizer: Tokenizer,
    length: int,
    advice: Callable[[int], str] = lambda needed: f"Set length={needed}.",
) -> list[Finding]:
    """Report texts that are cut off, and unknown tokens.

    Args:
        advice: returns the fix, given the length that holds nearly all texts, or, if `length` does,
            all of them.
    """
    findings = []
    cut = [item for item in inputs if item.cut]
    if cut:
        lost = sum(item.cut for item in cut) / sum(item.tokens for item in inputs)
        fault = (
            f"of {len(inputs):,} examples ({len(cut) / len(inputs):.1%}) is|are longer than "
            f"{length:,} tokens and is|are cut"
        )
        message = f"{quantity(len(cut), fault)}: {lost:.1%} of all tokens are not read"
        needed = needed_length(inputs)
        if needed <= length:  # which holds nearly all: the rest asks for more
            needed = needed_length(inputs, 1.0)
        fix = advice(needed)
        findings.append(Finding("truncation", "warning", message, "length", fix))
    ids = [sequence.ids for item in inputs for sequence in item.sequences]
    share = float((np.concatenate(ids) == tokenizer.specials.unknown).mean()) if ids else 0.0
    if share > UNKNOWN:
        findings += unknown_tokens(share, "Use a model whose vocabulary fits this text.")
    return findings


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


def check_casing(tokenizer: Tokenizer, texts: Many[str]) -> list[Finding]:
    """Check that vocabulary and tokenizer agree about capital letters, by a sample of the text."""
    sample = list(texts[:: max(1, len(texts) // SAMPLE)][:SAMPLE])
    if tokenizer.lowercase:
        control = tokenizer.special | (np.arange(tokenizer.size) == tokenizer.specials.unknown)
        tokens = [token for token, id in tokenizer.backend.get_vocab().items() if not control[id]]
        capital = sum(token != token.lower() for token in tokens) / max(1, len(tokens))
        if capital <= 0.1:
            return []
        message = (
            f"the vocabulary is cased ({capital:.0%} of its tokens have capitals), "
            "but the tokenizer lower-cases"
        )
        fix = 'Set "do_lower_case": false in tokenizer_config.json.'
        return [Finding("casing", "warning", message, "tokenizer", fix)]
    unknown, lowered = (
        unknown_share(tokenizer, some) for some in (sample, [text.lower() for text in sample])
    )
    if unknown - lowered <= UNKNOWN:
        return []
    message = (
        "the vocabulary is uncased, but the tokenizer keeps capitals: "
        f"{unknown:.1%} of tokens are unknown, lower-cased {lowered:.1%}"
    )
    fix = 'Set "do_lower_case": true in tokenizer_config.json.'
    return [Finding("casing", "warning", message, "tokenizer", fix)]
