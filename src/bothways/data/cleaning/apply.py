"""The first part of a cleaning, for a shard of documents in any process: rules and signatures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bothways.core.atomic_files import replace_text
from bothways.data.cleaning.batch import TextBatch
from bothways.data.cleaning.config import Cleaning
from bothways.data.cleaning.line_rules import remove_lines
from bothways.data.cleaning.near_duplicates import NearDuplicates, SignedTexts, sign_texts
from bothways.data.cleaning.shingles import ShingleTable

BATCH_CHARACTERS = 2**19
"""Texts are measured together up to this number of characters."""

EXAMPLES, EXCERPT = 5, 300
"""Examples of each step that are kept, and the characters of each."""

KEPT_LINES = 4096
"""Removed lines from which the examples are chosen."""


@dataclass(frozen=True)
class LeftOutExample:
    """A document, or a line of one, that a step left out.

    Attributes:
        key: random, but equal for equal texts; the examples with the smallest keys are kept.
        step: the name of the step.
        document: the document's number in the order of the inputs, from 0 on.
        text: the first characters of the document, or of the line.
        like: of a near-duplicate: the number of the document that stays in its place.
        similarity: of a near-duplicate: the Jaccard similarity of the two.
        like_text: of a near-duplicate: the first characters of the other.
    """

    key: str
    step: str
    document: int
    text: str
    like: int | None = None
    similarity: float | None = None
    like_text: str | None = None


@dataclass(frozen=True)
class CleanedTexts:
    """The texts of D documents after the rules.

    Attributes:
        texts: without the lines that rules removed.
        fates: `(D)` 0, or 1 + the place of the rule for documents that rejects it.
        removed: `(L, 2)` lines and bytes in UTF-8 that each rule for lines removed.
        signed: the texts that stay, and empty ones in place of the others; None if near-duplicates
            are not searched for.
        examples: of removed lines and rejected documents.
    """

    texts: list[str]
    fates: NDArray[np.uint8]
    removed: NDArray[np.int64]
    signed: SignedTexts | None
    examples: list[LeftOutExample]


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
    cut, removed, examples = _cut(texts, cleaning)
    fates = np.zeros(len(texts), dtype=np.uint8)
    batches = list(_batches(cut))
    for batch in batches:
        text_batch = TextBatch(cut[batch], languages[batch], split)
        for number, rule in enumerate(cleaning.document_rules.values(), 1):
            fates[batch][rule.rejects(text_batch) & text_batch.undecided] = number
            text_batch.undecided = fates[batch] == 0
    names = list(cleaning.document_rules)
    examples += [
        make_example(names[fates[number] - 1], number, texts[number])
        for number in np.flatnonzero(fates).tolist()
    ]
    signed = None
    if cleaning.near_duplicates:
        staying = ["" if fate else text for text, fate in zip(cut, fates, strict=True)]
        signed = _sign([staying[batch] for batch in batches], cleaning.near_duplicates)
    return CleanedTexts(cut, fates, removed, signed, choose_examples(examples))


def make_example(step: str, document: int, text: str) -> LeftOutExample:
    """Return an example of a document that a step left out, or of a line of it."""
    key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return LeftOutExample(key, step, document, text[:EXCERPT])


def choose_examples(examples: Iterable[LeftOutExample]) -> list[LeftOutExample]:
    """Return the examples to keep of each step, in the order of the documents.

    They are those with the smallest keys; of equal ones the first.
    """
    steps = dict[str, dict[str, LeftOutExample]]()
    for example in sorted(examples, key=lambda e: (e.key, e.document)):
        by_key = steps.setdefault(example.step, {})
        if len(by_key) < EXAMPLES:
            by_key.setdefault(example.key, example)
    return [
        example
        for by_key in steps.values()
        for example in sorted(by_key.values(), key=lambda e: e.document)
    ]


def _cut(
    texts: Sequence[str], cleaning: Cleaning
) -> tuple[list[str], NDArray[np.int64], list[LeftOutExample]]:
    """Apply the rules for lines; return the texts, what was removed, and examples of it."""
    names, rules = list(cleaning.line_rules), list(cleaning.line_rules.values())
    counts = np.zeros((len(rules), 2), dtype=np.int64)
    cut, examples = list[str](), list[LeftOutExample]()
    for number, text in enumerate(texts):
        cleaned, removed = remove_lines(text, rules)
        cut.append(cleaned)
        for rule, line in removed:
            counts[rule] += (1, len(line.encode()))
            examples.append(make_example(names[rule], number, line.strip()))
        if len(examples) > KEPT_LINES:
            examples = choose_examples(examples)
    return cut, counts, examples


def _sign(batches: Iterable[Sequence[str]], settings: NearDuplicates) -> SignedTexts:
    """Return the shingles and signatures of parts of texts, one after the other."""
    signed = [sign_texts([], settings), *(sign_texts(batch, settings) for batch in batches)]
    shingles = ShingleTable(
        np.concatenate([batch.shingles.values for batch in signed]),
        np.cumsum(np.concatenate([[0], *(batch.shingles.counts for batch in signed)])),
    )
    return SignedTexts(shingles, np.concatenate([batch.signatures for batch in signed]))


def _batches(texts: Sequence[str]) -> Iterator[slice]:
    """Yield slices of texts of about BATCH_CHARACTERS each."""
    start = size = 0
    for number, text in enumerate(texts, 1):
        size += len(text)
        if size >= BATCH_CHARACTERS or number == len(texts):
            yield slice(start, number)
            start, size = number, 0


def store_examples(path: Path, examples: Sequence[LeftOutExample]) -> None:
    """Write examples as JSON lines. Raises ResourceError."""
    rows = [
        {
            name: value
            for name, value in vars(example).items()
            if name != "key" and value is not None
        }
        for example in examples
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_text(path, text)


def load_examples(path: Path) -> list[LeftOutExample]:
    """Read examples that `store_examples` wrote."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [LeftOutExample(key="", **json.loads(line)) for line in lines]
