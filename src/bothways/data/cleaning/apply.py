"""The first part of a cleaning, for a shard of documents in any process: rules and signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bothways.data.cleaning.batch import TextBatch
from bothways.data.cleaning.config import Cleaning
from bothways.data.cleaning.line_rules import remove_lines
from bothways.data.cleaning.near_duplicates import SignedTexts, sign_texts
from bothways.data.cleaning.shingles import ShingleTable

BATCH_CHARACTERS = 2**19
"""Texts are measured together up to this number of characters."""


@dataclass(frozen=True)
class CleanedTexts:
    """The texts of D documents after the rules.

    Attributes:
        texts: without the lines that rules removed.
        fates: `(D)` 0, or 1 + the place of the rule for documents that rejects it.
        removed: `(L, 2)` lines and bytes in UTF-8 that each rule for lines removed.
        signed: the texts that stay, and empty ones in place of the others; None if near-duplicates
            are not searched for.
    """

    texts: list[str]
    fates: NDArray[np.uint8]
    removed: NDArray[np.int64]
    signed: SignedTexts | None


def clean_texts(
    texts: Sequence[str],
    languages: Sequence[str],
    cleaning: Cleaning,
    split: Callable[[str, str], list[str]],
) -> CleanedTexts:
    """Apply the rules to texts, and compute the shingles and signatures of those that stay.

    Args:
        texts: without halves of surrogate pairs.
        languages: the ISO 639 code of each text.
        cleaning: the steps.
        split: returns the sentences of a text in a language.
    """
    line_rules, cut = list(cleaning.line_rules.values()), list[str]()
    removed = np.zeros((len(line_rules), 2), dtype=np.int64)
    for text in texts:
        cleaned, lines = remove_lines(text, line_rules)
        cut.append(cleaned)
        for number, line in lines:
            removed[number] += (1, len(line.encode()))
    fates = np.zeros(len(texts), dtype=np.uint8)
    batches, start, size = list[slice](), 0, 0
    for number, text in enumerate(cut, 1):
        size += len(text)
        if size >= BATCH_CHARACTERS or number == len(cut):
            batches.append(slice(start, number))
            start, size = number, 0
    for batch in batches:
        text_batch = TextBatch(cut[batch], languages[batch], split)
        # The first rule that rejects a text decides its fate; later rules skip it.
        for number, rule in enumerate(cleaning.document_rules.values(), 1):
            fates[batch][rule.rejects(text_batch) & text_batch.undecided] = number
            text_batch.undecided = fates[batch] == 0
    signed = None
    if cleaning.near_duplicates:
        staying = ["" if fate else text for text, fate in zip(cut, fates, strict=True)]
        # An empty table first: `concatenate` needs one, also without texts.
        signatures = [sign_texts([], cleaning.near_duplicates)]
        signatures += [sign_texts(staying[batch], cleaning.near_duplicates) for batch in batches]
        counts = np.concatenate([[0], *(batch.shingles.counts for batch in signatures)])
        values = np.concatenate([batch.shingles.values for batch in signatures])
        rows = np.concatenate([batch.signatures for batch in signatures])
        signed = SignedTexts(ShingleTable(values, np.cumsum(counts)), rows)
    return CleanedTexts(cut, fates, removed, signed)
