"""A tag for each word, such as names of persons and places (Devlin et al. 2018, section 5.3).

The vector of a word's first token goes through dropout and one dense layer to the logits of the
tags; the other tokens of the word are read, but get no output. Examples are `TagExample`s.

Tags are learned as IOB2, however the data spells them, and scored in the scheme of the model's
labels, which differs only for models from elsewhere (`schemes`). A sentence that is longer than the
model's input is read in windows; every word has one tag and one loss, from the window in which it
has the most context. A word without a token, such as a lone control character, is read as [UNK], so
that it has a tag too. There is no CRF: as in the paper, each tag is predicted by itself.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import IGNORED, Batch, TokenTargets
from bothways.core.config.values import require_at_least
from bothways.core.errors import Finding
from bothways.core.source import Ids, Sequence
from bothways.core.training_module import Loss
from bothways.data.tables import TableRow
from bothways.model.heads import Head, TagHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.tasks import base
from bothways.tasks.metrics import TINY
from bothways.tasks.predictions import Entity, TagPrediction
from bothways.tasks.tagging import table_rows
from bothways.tasks.tagging.checks import check_tagged
from bothways.tasks.tagging.examples import TagExample, open_tagged, tag_example, with_context
from bothways.tasks.tagging.schemes import (
    OUTSIDE,
    EntityCounts,
    Scheme,
    TagCounts,
    as_labels,
    chunks,
    spells_entities,
    types_of,
)
from bothways.tasks.tagging.word_splitter import Splitter, choose_splitter
from bothways.tasks.text_task import owners, windows
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

_NO_IDS = np.zeros(0, dtype=np.int32)


class Tagger(base.TaskModel[TagExample, TagPrediction]):
    """A tagging task with a model that has the head "tags"; see `TaskModel`."""

    scale = "classes"
    loss_name = "tag"
    task: TaggingTask

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of tagged words."""
        return {"tag": float((_targets(batch)[1] != IGNORED).sum())}

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the cross-entropy of the tags."""
        return {"tag": cross_entropy(scores, _targets(batch)[1])}

    def scores(self, batch: Batch) -> Float[Tensor, "targets labels"]:
        """Return one logit per label for each target position, in the order of the batch."""
        positions = _targets(batch)[0]
        hidden = self.model.encoder(batch, only=positions).last
        result: Tensor = self.model.heads["tags"](hidden[positions])
        return result

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the logits of each sequence `(its targets, labels)`."""
        owner = batch.layout.sequence_ids[_targets(batch)[0]]
        counts = torch.bincount(owner, minlength=batch.layout.sequences).cpu().numpy()
        return np.split(self.scores(batch).float().cpu().numpy(), np.cumsum(counts)[:-1])

    def decode(
        self, example: TagExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> TagPrediction:
        """Return the most probable tag of each word, and the entities that conlleval finds."""
        logits = np.concatenate(outputs).astype(np.float64)
        probabilities = base.softmax(logits)
        tags = tuple(self.labels[position] for position in logits.argmax(1))
        entities, text, spans = None, example.whole, example.spans
        if self.task.spells(self.labels):
            scores, listed = probabilities.max(1), list[Entity]()
            for kind, begin, end in chunks(tags):
                first, last = spans[begin][0], spans[end - 1][1]
                score = float(scores[begin:end].mean())
                listed.append(Entity(kind, text[first:last], first, last, score))
            entities = tuple(listed)
        return TagPrediction(example.words, tags, probabilities, entities, example.text)


@dataclass(frozen=True)
class TaggingTask(base.Task[TagExample, TagPrediction]):
    """A tag for each word of a sentence.

    Attributes:
        columns: the columns of words and tags.
        scheme: how the tags of the data spell entities; "auto" detects it. "plain" tags are those
            of single words, such as parts of speech.
        context: what the model reads with a sentence: nothing, or its neighbours in the document,
            as far as there is room.
        stride: tokens from one window to the next; None for half a window.
        splitter: how raw text is split into words, see `word_splitter`.
    """

    aliases = "entities named-entity-recognition ner pos tagging token-classification"
    model_class = Tagger
    metric = "f1"

    columns: table_rows.TagColumns = table_rows.TagColumns()
    scheme: Scheme = "auto"
    context: Literal["sentence", "document"] = "sentence"
    stride: int | None = None
    splitter: Splitter = "auto"
    kind: Literal["tag"] = "tag"

    def __post_init__(self) -> None:
        require_at_least(1, "task", stride=self.stride)

    def read(
        self, source: str, columns: table_rows.TagColumns | None = None, *, labelled: bool = True
    ) -> base.Reading[TagExample]:
        requested = columns or table_rows.TagColumns()
        opened = open_tagged(self, source, requested, labelled=labelled)
        if self.context == "document":
            return replace(opened, examples=with_context(opened.examples), table=None, parse=None)
        if opened.table is None or opened.parse is None:
            return replace(opened, examples=(example for _, example in opened.examples))
        return base.Reading.of_table(opened.task, opened.table, opened.parse, opened.notes)

    def read_rows(
        self,
        rows: Iterable[TableRow],
        parse: Callable[[TableRow], TagExample],
        columns: table_rows.TagColumns | None = None,
        *,
        labelled: bool = True,
    ) -> base.Reading[TagExample]:
        requested = columns or table_rows.TagColumns()
        arranged = table_rows.arrange_rows(rows, requested, self.columns, labelled=labelled)
        return base.Reading(self, map(parse, arranged.rows), notes=arranged.notes)

    def example(
        self, row: base.Row, columns: table_rows.TagColumns | None = None,
        labelled: bool | None = None, *, where: str = "an example",
    ) -> TagExample:  # fmt: skip
        requested = columns or table_rows.TagColumns()
        columns = table_rows.choose_tag_columns(row, where, requested, self.columns, labelled)
        return tag_example(row, columns, where, self.splitter)

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> TagExample:
        if len(texts) > 1:
            raise self.wrong_texts(texts, where, "one text")
        return tag_example({"text": texts[0]}, table_rows.TagColumns("text"), where, self.splitter)

    def adapted(self, train: Many[TagExample]) -> TaggingTask:
        if self.splitter != "auto":
            return self
        listed = itertools.chain.from_iterable(e.words for e in train if e.text is None)
        return replace(self, splitter=choose_splitter(listed))

    def labels(self, examples: Iterable[TagExample]) -> tuple[str, ...]:
        """Return "O", then B and I of every type; plain tags in the order of their characters."""
        tags = {tag for example in examples for tag in example.tags or ()}
        if not self.spells(tags):
            return tuple(sorted(tags))
        return (OUTSIDE, *(f"{prefix}-{kind}" for kind in types_of(tags) for prefix in "BI"))

    def spells(self, labels: Iterable[str]) -> bool:
        """Return True if these tags spell entities."""
        return self.scheme != "plain" and spells_entities(labels)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (TagHead(max(1, len(labels)), dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, base.Direction]:
        """Return the metrics of tags, and of entities where tags mark them."""
        names = ["f1"]
        if self.spells(labels):
            suffixes = ["", "_strict", *(f"/{kind}" for kind in types_of(labels))]
            rates = ("f1", "precision", "recall")
            names = [f"{rate}{suffix}" for suffix in suffixes for rate in rates]
        return {**dict.fromkeys([*names, "accuracy"], "highest"), "loss": "lowest"}

    def passages(self, examples: Many[TagExample]) -> Many[Hashable]:
        """Return the number of each sentence's document; without several, the words."""
        keys, document = list[Hashable](), 0
        previous: TagExample | None = None
        for example in examples:
            goes_on = (
                previous is not None and example.before and example.before[-1] == previous.words
            )
            document += not goes_on
            is_alone = not example.before and not example.after
            keys.append(example.words if is_alone else document)
            previous = example
        return keys if len({*keys}) > 1 else [example.words for example in examples]

    def stratum(self, example: TagExample) -> Hashable:
        return tuple(sorted({*(example.tags or ())}))

    def texts(self, example: TagExample) -> tuple[str, ...]:
        return (example.whole,)

    def check(self, train: Many[TagExample], dev: Many[TagExample]) -> list[Finding]:
        return check_tagged(train, dev, self.scheme)

    def gold_tags(self, example: TagExample, labels: Many[str]) -> tuple[str, ...]:
        """Return the tags of an example in the scheme of the model's labels.

        Raises:
            DataError: it has no tags, or one that is not among `labels`.
        """
        originals = base.required(example.tags, example.where, "tags")
        tags = as_labels(originals, labels) if self.spells(labels) else originals
        for number, (original, tag) in enumerate(zip(originals, tags, strict=True), 1):
            if tag not in labels:
                spelled = "" if original == tag else f" (in the model's scheme {tag!r})"
                message = f"tag {original!r} of word {number}{spelled}"
                raise base.unknown_label(message, tag, labels, example.where)
        return tags

    def encode(
        self, examples: Many[TagExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return the windows of each sentence; the target "tag" has each word once, at its first
        token.
        """
        index = {label: position for position, label in enumerate(labels)}
        sentences = list(
            dict.fromkeys(words for e in examples for words in (e.words, *e.before, *e.after))
        )
        distinct = list(dict.fromkeys(itertools.chain(*sentences)))
        unknown = np.array([tokenizer.specials.unknown], dtype=np.int32)
        # After a blank, as inside a text: tokenizers that mark blanks write a first word
        # differently. Every word has at least one token.
        pairs = zip(distinct, tokenizer.encode([f" {word}" for word in distinct]), strict=True)
        pieces = {word: ids if len(ids) else unknown for word, ids in pairs}
        rows = {words: _Row.of([pieces[word] for word in words]) for words in sentences}
        room, results = length - tokenizer.template.single, []
        for example in examples:
            targets = np.full(len(example.words), IGNORED, dtype=np.int64)
            if example.tags is not None:
                targets[:] = [index[tag] for tag in self.gold_tags(example, labels)]
            row = rows[example.words]
            preceding, following = (
                [rows[words].ids for words in some] for some in (example.before, example.after)
            )
            surrounded = row.surrounded(preceding, following, room)
            sequences, missed = self._windows(surrounded, targets, tokenizer, room)
            results.append(base.EncodedExample(sequences, len(row.ids), missed))
        return results

    def _windows(
        self, row: _Row, labels: NDArray[np.int64], tokenizer: Tokenizer, room: int
    ) -> tuple[tuple[Sequence, ...], int]:
        """Return the windows that own a word, at least one, and the number of tokens in none."""
        chunks = windows(len(row.ids), room, self.stride or max(1, room // 2), full=True)
        owner = owners(row.starts, chunks, room)
        # A window in which no word has its most context is not computed
        used = np.unique(owner) if len(owner) else np.zeros(1, dtype=np.int64)
        sequences, covered, end = [], 0, 0
        first = len(tokenizer.template.before)
        for window in used.tolist():
            chunk, mine = chunks[window], owner == window
            target = TokenTargets(row.starts[mine] - chunk.start + first, labels[mine])
            bare = assemble(row.ids[chunk.start : chunk.stop], None, tokenizer.template)
            sequences.append(Sequence(bare.ids, bare.segments, {"tag": target}))
            covered += chunk.stop - max(chunk.start, end)
            end = chunk.stop
        # A word that is longer than a window has tokens in none.
        return tuple(sequences), len(row.ids) - covered

    def score(
        self, results: base.Results[TagExample, TagPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return the metrics of `TagCounts.scores`."""
        counts = TagCounts(labels, self.spells(labels))
        index = {label: position for position, label in enumerate(labels)}
        for example, prediction in results:
            tags = self.gold_tags(example, labels)
            columns = np.array([index[tag] for tag in tags], dtype=np.int64)
            selected = prediction.probabilities[np.arange(len(tags)), columns]
            counts.add(tags, prediction.tags, -float(np.log(np.maximum(selected, TINY)).sum()))
        if not counts.words:
            raise base.nothing_to_score("word")
        return counts.scores()

    def grade(self, example: TagExample, prediction: TagPrediction, labels: Many[str]) -> float:
        """Return the F1 of the sentence's entities, 1 without any; the accuracy of plain tags."""
        tags = self.gold_tags(example, labels)
        if not self.spells(labels):
            correct = [a == b for a, b in zip(tags, prediction.tags, strict=True)]
            return float(np.mean(correct)) if tags else 1.0
        counts = EntityCounts()
        counts.add(chunks(tags), chunks(prediction.tags))
        return counts.scores()["f1"] if counts.expected or counts.predicted else 1.0

    def baseline(self, examples: Many[TagExample]) -> base.Metrics:
        """Return the metrics of the most frequent tag; the loss is the tag frequencies'."""
        labels = self.labels(examples)
        sentences = [self.gold_tags(e, labels) for e in examples if e.tags is not None]
        frequent = Counter(itertools.chain.from_iterable(sentences))
        counts, top = TagCounts(labels, self.spells(labels)), frequent.most_common(1)[0][0]
        for tags in sentences:
            chances = (frequent[tag] / frequent.total() for tag in tags)
            counts.add(tags, [top] * len(tags), -sum(map(math.log, chances)))
        return counts.scores()


@dataclass(frozen=True)
class _Row:
    """A sentence in tokens, with the first token of each word."""

    ids: Ids
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, words: list[Ids]) -> _Row:
        """Join the tokens of words."""
        lengths = np.array([len(ids) for ids in words], dtype=np.int64)
        return cls(np.concatenate([_NO_IDS, *words]), np.cumsum(lengths) - lengths)

    def surrounded(self, preceding: list[Ids], following: list[Ids], room: int) -> _Row:
        """Return the sentence with as much context as fits, evenly if both sides have enough."""
        # Half of the room on each side; what one side does not need is for the other
        spare = max(0, room - len(self.ids))
        left_ids, right_ids = (np.concatenate([_NO_IDS, *rows]) for rows in (preceding, following))
        right_count = min(len(right_ids), max(spare // 2, spare - len(left_ids)))
        left_count = min(len(left_ids), spare - right_count)
        ids = [left_ids[len(left_ids) - left_count :], self.ids, right_ids[:right_count]]
        return _Row(np.concatenate(ids), self.starts + left_count)


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the target positions and their labels."""
    targets = batch.target("tag", TokenTargets)
    return torch.as_tensor(targets.index), torch.as_tensor(targets.ids)
