"""A tag for each word, such as names of persons and places (Devlin et al. 2018, section 5.3).

Idea: the vector of a word's first token goes through dropout and one dense layer to the logits of the tags; the other tokens of
the word are read, but nothing is computed for them. Data it reads: `TagExample`s, words with tags.

Notable choices. Tags are learned as IOB2, however the data spells them, and scored in the scheme of the model's labels, another
one only for models from elsewhere (`schemes`). A sentence that is longer than the model is read in windows (`windows`); every
word has one tag and one loss, from the window in which it stands best. A word of which the tokenizer leaves nothing, such as a
lone control character, is read as [UNK], so that it has a tag too. There is no CRF: as in the paper, each tag is predicted by
itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.config.checks import require_at_least
from bothways.core.errors import DataError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.sequence import Ids, Sequence
from bothways.core.targets import IGNORED, TokenTargets
from bothways.kernels.cross_entropy import cross_entropy
from bothways.model.head_config import Head, TagHead
from bothways.model.model import Model
from bothways.tasks.predictions import Entity, TagPrediction
from bothways.tasks.tagging.checks import check_tagged
from bothways.tasks.tagging.examples import (
    FIRST_AND_LAST,
    TagColumns,
    TagExample,
    open_tagged,
    with_neighbours,
)
from bothways.tasks.tagging.metrics import EntityCounts, TagCounts, types_of
from bothways.tasks.tagging.schemes import OUTSIDE, Scheme, as_labels, chunks, spells_entities
from bothways.tasks.tagging.windows import owners, window_starts
from bothways.tasks.task import Direction, Metrics, Reading, Task
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TaggingTask(Task[TagExample, TagPrediction]):
    """A tag for each word of a sentence.

    Attributes:
        columns: where words and tags are.
        scheme: how the tags of the data spell entities; "auto" finds it. "plain" tags stand for single words.
        context: what the model sees with a sentence: nothing, or the sentences around it in its document, as there is room.
        stride: how many tokens lie between the beginnings of windows; none means half a window.
    """

    metric: ClassVar[str] = "f1"

    columns: TagColumns = FIRST_AND_LAST
    scheme: Scheme = "auto"
    context: Literal["sentence", "document"] = "sentence"
    stride: int | None = None
    kind: Literal["tag"] = "tag"

    def __post_init__(self) -> None:
        require_at_least(1, "task", stride=self.stride)

    def read(
        self, source: str, asked: TagColumns | None = None, *, labelled: bool = True
    ) -> Reading[TagExample]:
        """As `Definition.read`; while reading, DataError for a line without a word or a tag."""
        opened = open_tagged(source, asked or FIRST_AND_LAST, self.columns, labelled=labelled)
        alone = self.context == "sentence"
        examples = (
            (example for _, example in opened.examples)
            if alone
            else with_neighbours(opened.examples)
        )
        return Reading(self.with_columns(opened.columns), examples, opened.share)

    def labels(self, examples: Iterable[TagExample]) -> tuple[str, ...]:
        """ "O", then B and I of every type that occurs; plain tags in the order of their characters."""
        found = {tag for example in examples for tag in example.tags or ()}
        if not self.spells(found):
            return tuple(sorted(found))
        return (OUTSIDE, *(f"{prefix}-{kind}" for kind in types_of(found) for prefix in "BI"))

    def spells(self, labels: Iterable[str]) -> bool:
        """Whether these tags spell entities."""
        return self.scheme != "plain" and spells_entities(labels)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """An output for each tag."""
        return (TagHead(max(1, len(labels)), dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Those of `TagCounts.scores`."""
        rates = ["f1", "precision", "recall"] if self.spells(labels) else ["f1"]
        kinds = (
            ["_strict", *(f"/{kind}" for kind in types_of(labels))] if self.spells(labels) else []
        )
        names = [*rates, *(f"{rate}{kind}" for kind in kinds for rate in rates), "accuracy"]
        return {**dict.fromkeys(names, "highest"), "loss": "lowest"}

    def texts(self, example: TagExample) -> tuple[str, ...]:
        """The sentence."""
        return (example.whole,)

    def check(self, train: Many[TagExample], dev: Many[TagExample]) -> list[Finding]:
        """Rows, tags and their scheme, balance, and what training and development data share."""
        return check_tagged(train, dev, self.scheme)

    def gold(self, example: TagExample, labels: Many[str]) -> tuple[str, ...] | None:
        """The tags of an example in the scheme of the model's labels.

        Raises:
            DataError: a tag that is none of `labels`.
        """
        if example.tags is None:
            return None
        tags = as_labels(example.tags, labels) if self.spells(labels) else example.tags
        strange = next((place for place, tag in enumerate(tags) if tag not in labels), None)
        if strange is not None:
            given, tag = example.tags[strange], tags[strange]
            spelled = "" if given == tag else f" (in the model's scheme {tag!r})"
            what = f"tag {given!r} of word {strange + 1}{spelled} is none of the model's: {', '.join(labels)}"
            raise DataError(
                what,
                where=example.where,
                fix="Give data with the tags that the model was trained on.",
            )
        return tags

    def encode(
        self, examples: Many[TagExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """[CLS] words [SEP], in as many windows as that takes; the target "tag" has the first token of each word once."""
        index = {label: place for place, label in enumerate(labels)}
        rows = _rows(
            (words for e in examples for words in (e.words, *e.before, *e.after)), tokenizer
        )
        results = []
        for example in examples:
            tags = self.gold(example, labels) or (None,) * len(example.words)
            targets = np.array(
                [IGNORED if tag is None else index[tag] for tag in tags], dtype=np.int64
            )
            before, after = (
                [rows[words].ids for words in some] for some in (example.before, example.after)
            )
            row, room = rows[example.words], length - tokenizer.template.single
            sequences, cut = self._windows(
                _surrounded(row, before, after, room), targets, tokenizer, room
            )
            results.append(EncodedExample(sequences, len(row.ids), cut))
        return results

    def _windows(
        self, row: _Row, labels: NDArray[np.int64], tokenizer: Tokenizer, room: int
    ) -> tuple[tuple[Sequence, ...], int]:
        """The windows that some word needs, at least one; and how many tokens lie in none: the end of a word without end."""
        first = len(tokenizer.template.before)
        starts = window_starts(len(row.ids), room, self.stride or max(1, room // 2))
        owner = owners(row.places, starts, room)
        used = np.unique(owner) if len(owner) else np.zeros(1, dtype=np.int64)
        sequences = []
        for window in used:
            mine, start = owner == window, int(starts[window])
            bare = assemble(row.ids[start : start + room], None, tokenizer.template)
            target = TokenTargets(row.places[mine] - start + first, labels[mine])
            sequences.append(Sequence(bare.ids, bare.segments, {"tag": target}))
        return tuple(sequences), _missed(starts[used], len(row.ids), room)

    def baseline(self, train: Many[TagExample], scored: Many[TagExample]) -> Metrics:
        """The most frequent tag for all words; for the loss, each tag by its share."""
        labels = self.labels(train)
        frequent = Counter(tag for example in train for tag in self.gold(example, labels) or ())
        counts, top = TagCounts(labels, self.spells(labels)), frequent.most_common(1)[0][0]
        for example in scored:
            tags = self.gold(example, labels) or ()
            counts.add(
                tags,
                [top] * len(tags),
                -sum(math.log(frequent[tag] / frequent.total()) for tag in tags if frequent[tag]),
            )
        return counts.scores()

    def answer(self, prediction: TagPrediction) -> str | tuple[str, ...]:
        """The tag that all words have, as those of a model that has collapsed do; else the tags."""
        return prediction.tags[0] if len(set(prediction.tags)) == 1 else tuple(prediction.tags)

    def task(self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int) -> Tagger:
        """With a model that has the head "tags"."""
        return Tagger(self, model, tokenizer, labels, length)


class Tagger(TaskLearner[TagExample, TagPrediction]):
    """A model with the head "tags", as a task."""

    definition: TaggingTask

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of tagged words."""
        return {"tag": float((_targets(batch)[1] != IGNORED).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The cross-entropy of the tags."""
        return {"tag": cross_entropy(self.logits(batch), _targets(batch)[1])}

    def logits(self, batch: Batch) -> Float[Tensor, "words labels"]:
        """One logit per label for each word that has its place in the batch, in the order of the batch."""
        words = _targets(batch)[0]
        result: Tensor = self.model.heads["tags"](self.model.encoder(batch, only=words).last[words])
        return result

    def outputs(self, batch: Batch) -> list[Output]:
        """The logits of each sequence `(its words, labels)`."""
        counts = (
            torch.bincount(
                batch.layout.sequence_ids[_targets(batch)[0]], minlength=batch.layout.sequences
            )
            .cpu()
            .numpy()
        )
        return np.split(self.logits(batch).float().cpu().numpy(), np.cumsum(counts)[:-1])

    def decode(self, example: TagExample, outputs: Many[Output]) -> TagPrediction:
        """The most probable tag of each word, and the entities that conlleval finds in them."""
        logits = np.concatenate(outputs).astype(np.float64)
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        probabilities = exponentials / exponentials.sum(1, keepdims=True)
        tags = tuple(self.labels[place] for place in logits.argmax(1))
        entities = (
            _entities(example, tags, probabilities.max(1))
            if self.definition.spells(self.labels)
            else None
        )
        return TagPrediction(example.words, tags, probabilities, entities)

    def score(self, results: Iterable[tuple[TagExample, TagPrediction]]) -> Metrics:
        """As `TagCounts.scores`.

        Raises:
            DataError: an example without tags or with one that is none of the model's; no word at all.
        """
        counts = TagCounts(self.labels, self.definition.spells(self.labels))
        index = {label: place for place, label in enumerate(self.labels)}
        for example, prediction in results:
            tags = self._gold(example)
            chosen = (
                prediction.probabilities[np.arange(len(tags)), [index[tag] for tag in tags]]
                if tags
                else np.ones(1)
            )
            counts.add(
                tags,
                prediction.tags,
                -float(np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).sum()),
            )
        if not counts.words:
            raise DataError("there is no word to score", fix="Give at least one sentence.")
        return counts.scores()

    def grade(self, example: TagExample, prediction: TagPrediction) -> float:
        """The F1 of the sentence's entities, 1 where there are none and none were predicted; the share of right plain tags."""
        tags = self._gold(example)
        if not self.definition.spells(self.labels):
            return (
                float(np.mean([a == b for a, b in zip(tags, prediction.tags, strict=True)]))
                if tags
                else 1.0
            )
        counts = EntityCounts()
        counts.add(chunks(tags), chunks(prediction.tags))
        return counts.scores()["f1"] if counts.expected or counts.predicted else 1.0

    def _gold(self, example: TagExample) -> tuple[str, ...]:
        tags = self.definition.gold(example, self.labels)
        if tags is None:
            raise DataError(
                "has no tags, so it cannot be scored",
                where=example.where,
                fix="Add them, or use predict.",
            )
        return tags


@dataclass(frozen=True)
class _Row:
    """A sentence in tokens, and the place of each word's first."""

    ids: Ids
    places: NDArray[np.int64]


def _rows(
    sentences: Iterable[tuple[str, ...]], tokenizer: Tokenizer
) -> dict[tuple[str, ...], _Row]:
    """Each sentence once; at least one token a word."""
    distinct = list(dict.fromkeys(sentences))
    words = list(dict.fromkeys(word for sentence in distinct for word in sentence))
    unknown = np.array([tokenizer.specials.unknown], dtype=np.int32)
    # After a blank, as words stand in a text: tokenizers that mark blanks write a first word otherwise.
    found = tokenizer.encode([f" {word}" for word in words])
    pieces = {word: ids if len(ids) else unknown for word, ids in zip(words, found, strict=True)}
    return {sentence: _row([pieces[word] for word in sentence]) for sentence in distinct}


def _row(pieces: list[Ids]) -> _Row:
    lengths = np.array([len(ids) for ids in pieces], dtype=np.int64)
    return _Row(np.concatenate([_NOTHING, *pieces]), np.cumsum(lengths) - lengths)


_NOTHING = np.zeros(0, dtype=np.int32)


def _surrounded(row: _Row, before: list[Ids], after: list[Ids], room: int) -> _Row:
    """A sentence, with as much around it as there is room for, evenly if both sides have enough."""
    spare, had, has = max(0, room - len(row.ids)), sum(map(len, before)), sum(map(len, after))
    right = min(has, max(spare // 2, spare - had))
    left = min(had, spare - right)
    behind, ahead = (np.concatenate([_NOTHING, *rows]) for rows in (before, after))
    return _Row(np.concatenate([behind[had - left :], row.ids, ahead[:right]]), row.places + left)


def _missed(starts: NDArray[np.int64], tokens: int, room: int) -> int:
    """How many tokens lie in none of the windows: parts of a word that is longer than a window."""
    ends = np.minimum(starts + room, tokens)
    before = np.concatenate([[0], ends[:-1]])
    return tokens - int(np.sum(ends - np.maximum(starts, before)))


def _entities(
    example: TagExample, tags: Many[str], scores: NDArray[np.float64]
) -> tuple[Entity, ...]:
    text, spans = example.whole, example.spans
    return tuple(
        _entity(text, spans, chunk.type, chunk.begin, chunk.end, scores) for chunk in chunks(tags)
    )


def _entity(
    text: str,
    spans: list[tuple[int, int]],
    kind: str,
    begin: int,
    end: int,
    scores: NDArray[np.float64],
) -> Entity:
    first, last = spans[begin][0], spans[end - 1][1]
    return Entity(kind, text[first:last], first, last, float(scores[begin:end].mean()))


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Places of the words' first tokens, and their labels."""
    targets = cast(TokenTargets, batch.targets["tag"])
    return cast(Tensor, targets.index), cast(Tensor, targets.ids)
