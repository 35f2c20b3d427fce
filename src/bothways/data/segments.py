"""Segments: what the sequences of a corpus are made of, and the plans of single sequences.

A value such as `FullSentences` plans the sequences of a block from sentence offsets. Any subclass
of `Segments` can be handed to `CorpusSource`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bothways.core.advice import argument
from bothways.core.errors import ConfigError
from bothways.core.finding import Finding
from bothways.core.keyed_rng import rng
from bothways.data.epoch_order import BLOCK, EpochBlock, Selection

if TYPE_CHECKING:
    from bothways.data.corpus import Corpus
    from bothways.text.template import Template

SENTENCES_CHECKED = 1_000_000
"""Sentences and documents of a corpus that checks read, at most."""


class PairPlan(NamedTuple):
    """A is tokens `[a, a_stop)` of the corpus, B is `[b, b_stop)`; `label` is the pair's class."""

    a: int
    a_stop: int
    b: int
    b_stop: int
    label: int

    @property
    def length(self) -> int:
        """Tokens of the sequence, [CLS] A [SEP] B [SEP]."""
        return self.a_stop - self.a + self.b_stop - self.b + PairSegments.specials


class SpanPlan(NamedTuple):
    """Tokens `[start, stop)` of the corpus for each document in the sequence, in order."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Tokens of the sequence: [CLS], and a [SEP] after each document."""
        return 1 + sum(stop - start + 1 for start, stop in self.ranges)


class Segments:
    """Base class of frozen dataclasses with the fields `length` and `kind`.

    Attributes:
        length: the longest sequence in tokens, specials included.
        specials: special tokens of a sequence from one document.
        fate: what becomes of a sentence that is longer than a sequence.
    """

    length: int
    kind: str
    specials: ClassVar[int] = 2
    fate: ClassVar[str] = "will be cut"

    @property
    def room(self) -> int:
        """Tokens of text that fit."""
        return self.length - self.specials

    def plan(
        self, block: EpochBlock, selection: Selection, rng: np.random.Generator
    ) -> list[PairPlan] | list[SpanPlan]:
        """Return the sequences of a block, shuffled."""
        raise NotImplementedError

    def require(self, selection: Selection, template: Template) -> None:
        """Raise ConfigError or DataError if these documents or special tokens do not suffice."""

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings of the preflight about this corpus."""
        cut = int(
            (np.diff(corpus.sentences[:SENTENCES_CHECKED].astype(np.int64)) > self.room).sum()
        )
        if not cut:
            return []
        share = cut / min(len(corpus.sentences) - 1, SENTENCES_CHECKED)
        message = f"{share:.1%} of the sentences are longer than {self.room} tokens and {self.fate}"
        return [Finding("truncation", "note", message, "phases")]


class PairSegments(Segments):
    """Base class of segments that are pairs, [CLS] A [SEP] B [SEP], with a label.

    Attributes:
        short: the share of documents that are read with a random shorter target length.
        one_sentence: the fate of pairs of one-sentence documents, as the end of a sentence.
    """

    short: float = 0.0
    specials: ClassVar[int] = 3
    one_sentence: ClassVar[str] = "these have no second sentence"

    def __post_init__(self) -> None:
        if self.length < self.specials + 2:
            message = f"must be at least 5 ([CLS], A, [SEP], B, [SEP]), not {self.length}"
            raise ConfigError(message, where="segments.length")
        if not 0 <= self.short <= 1:
            raise ConfigError(f"must be in [0, 1], not {self.short}", where="segments.short")

    def require(self, selection: Selection, template: Template) -> None:
        """Raise ConfigError if the tokenizer's pairs have other special tokens."""
        if findings := self._check_template(template):
            raise ConfigError(findings[0].what, where="segments", fix=findings[0].fix)

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings about sentences, special tokens and one-sentence documents."""
        documents = corpus.documents[: SENTENCES_CHECKED + 1]
        single = float((np.diff(documents) == 1).mean())
        findings = [*super().check(corpus), *self._check_template(corpus.tokenizer.template)]
        if (unread := self._unread_share(corpus)) >= 0.0005:
            message = f"{unread:.1%} of the tokens are left out, so that pairs fit in {self.length}"
            findings.append(Finding("truncation", "note", message, "phases"))
        if single > 0.5:
            message = f"{single:.1%} of the documents are one sentence, and {self.one_sentence}"
            fix = (
                f"Build the corpus with {argument(boundary='blank')} or "
                f"{argument(boundary='file')}, or set objective=masked_lm."
            )
            findings.append(Finding("balance", "warning", message, "objective.segments", fix))
        return findings

    def read_in_place(self, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return `(pairs)`: True where B is the text next to A, given the plans `(pairs, 5)`."""
        return np.ones(len(pairs), dtype=np.bool_)

    def _unread_share(self, corpus: Corpus) -> float:
        """Return the share of tokens that no pair reads in their place, in the first documents."""
        documents = corpus.documents[: BLOCK + 1].astype(np.int64)
        ids = np.arange(min(len(corpus), max(2, int((documents <= BLOCK).sum()) - 1)))
        if len(ids) < 2:
            return 0.0
        selection = Selection(corpus, ids)
        block, draws = selection.open(0, 0, 0), rng(0, "unread")
        pairs = np.array(self.plan(block, selection, draws), dtype=np.int64).reshape(-1, 5)
        borders = np.zeros(int(block.stops.max()) + 1, dtype=np.int64)
        for begin, stop in ((pairs[:, :2]).T, pairs[self.read_in_place(pairs), 2:4].T):
            np.add.at(borders, begin, 1)
            np.add.at(borders, stop, -1)
        return 1 - float((borders.cumsum() > 0).sum() / (block.stops - block.starts).sum())

    def _check_template(self, template: Template) -> list[Finding]:
        if template.pair == self.specials:
            return []
        message = (
            f"sentence pairs are [CLS] A [SEP] B [SEP], and this tokenizer has {template.pair} "
            "special tokens there"
        )
        fix = "Set objective=masked_lm, as RoBERTa does."
        return [Finding("heads", "error", message, "objective.segments", fix)]
