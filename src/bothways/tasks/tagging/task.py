"""A tag for each word, such as names of persons and places (Devlin et al. 2018, section 5.3).

The vector of a word's first token goes through dropout and one dense layer to the logits of the
tags; the other tokens of the word are read, but get no output. Examples are `TagExample`s.

Tags are learned as IOB2, however the data spells them, and scored in the scheme of the model's
labels, which differs only for models from elsewhere (`schemes`). A sentence that is longer than the
model's input is read in windows; every word has one tag and one loss, from the window in which it
has the most context. A word without a token, such as a lone control character, is read as [UNK], so
that it has a tag too. There is no CRF: as in the paper, each tag is predicted by itself.

Columns of words and tags have no header, so any table of two columns can be read as such: one of
texts with labels would be learned as one long sentence. Three signs reveal this to the checks:
blanks in the words, a first line of names, and tags that hardly recur.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import IGNORED, Batch, TokenTargets
from bothways.core.config.values import require_at_least
from bothways.core.errors import Finding, argument, setting
from bothways.core.source import Ids, Sequence
from bothways.core.terminal import listed
from bothways.core.training_module import Loss
from bothways.data.tables import TableRow
from bothways.model.heads import Head, TagHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.tasks import base, text_checks
from bothways.tasks.metrics import TINY, Confusion, classification_metrics
from bothways.tasks.predictions import Entity, TagPrediction
from bothways.tasks.tagging import schemes
from bothways.tasks.tagging.examples import (
    NEIGHBOURS,
    TAGS,
    WORDS,
    TagColumns,
    TagExample,
    arrange_rows,
    choose_tag_columns,
    open_tagged,
    tag_example,
    with_context,
)
from bothways.tasks.tagging.running_text import Splitter, choose_splitter
from bothways.tasks.text_task import LABELS, PAIRS, TEXTS, owners, windows
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer, is_spaceless

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
        if self.task.spells(self.labels) or (
            self.task.scheme != "plain" and schemes.OUTSIDE in self.labels
        ):
            entity_tags = dict(zip(self.labels, _entity_tags(self.labels), strict=True))
            scores, listed = probabilities.max(1), list[Entity]()
            for kind, begin, end in schemes.chunks([entity_tags[tag] for tag in tags]):
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
        splitter: how raw text is split into words, see `running_text`.
    """

    aliases = "entities named-entity-recognition ner pos tagging token-classification"
    model_class = Tagger
    rows_of_lists = True
    metric = "f1"
    long_texts = "windows"

    columns: TagColumns = TagColumns()
    scheme: schemes.Scheme = "auto"
    context: Literal["sentence", "document"] = "sentence"
    stride: int | None = None
    splitter: Splitter = "auto"
    kind: Literal["tag"] = "tag"

    def __post_init__(self) -> None:
        require_at_least(1, "task", stride=self.stride)

    def read(
        self, source: str, columns: TagColumns | None = None, *, labelled: bool = True
    ) -> base.Reading[TagExample]:
        opened = open_tagged(self, source, columns or TagColumns(), labelled=labelled)
        if self.context == "document":
            return replace(opened, examples=with_context(opened.examples), table=None, parse=None)
        if opened.table is None or opened.parse is None:
            return replace(opened, examples=(example for _, example in opened.examples))
        return base.Reading.of_table(opened.task, opened.table, opened.parse, opened.notes)

    def read_rows(
        self,
        rows: Iterable[TableRow],
        parse: Callable[[TableRow], TagExample],
        columns: TagColumns | None = None,
        *,
        labelled: bool = True,
    ) -> base.Reading[TagExample]:
        requested = columns or TagColumns()
        arranged, notes, name = arrange_rows(rows, requested, self.columns, labelled=labelled)
        task = self.with_columns(replace(self.columns, sentence=name))
        examples: Iterator[TagExample] = map(parse, arranged)
        if self.context == "document":
            column = requested.document or self.columns.document or ""
            examples = with_context(
                (row.values.get(column) if isinstance(row.values, Mapping) else None, parse(row))
                for row in arranged
            )
        return base.Reading(task, examples, notes=notes)

    def example(
        self, row: base.Row, columns: TagColumns | None = None,
        labelled: bool | None = None, *, where: str = "an example",
    ) -> TagExample:  # fmt: skip
        requested = columns or TagColumns()
        selected = choose_tag_columns(row, where, requested, self.columns, labelled)
        return tag_example(row, selected, where, self.splitter)

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> TagExample:
        if len(texts) > 1:
            needs = 'one text, or words: {"words": ["…", "…"]}'
            raise self.wrong_texts(texts, where, needs)
        return tag_example({"text": texts[0]}, TagColumns("text"), where, self.splitter)

    def adapted(self, train: Many[TagExample], labels: Many[str] = ()) -> TaggingTask:
        if self.splitter != "auto":
            return self
        listed = itertools.chain.from_iterable(e.words for e in train if e.text is None)
        return replace(self, splitter=choose_splitter(listed))

    def labels(self, examples: Iterable[TagExample]) -> tuple[str, ...]:
        """Return "O", then B and I of every type; plain tags in the order of their characters."""
        tags = {tag for example in examples for tag in example.tags or ()}
        if not self.spells(tags):
            return tuple(sorted(tags))
        return (
            schemes.OUTSIDE,
            *(f"{prefix}-{kind}" for kind in schemes.types_of(tags) for prefix in "BI"),
        )

    def spells(self, labels: Iterable[str]) -> bool:
        """Return True if these tags spell entities."""
        return self.scheme != "plain" and schemes.spells_entities(labels)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (TagHead(max(1, len(labels)), dropout),)

    def directions(self, labels: Many[str]) -> Mapping[str, base.Direction]:
        """Return the metrics of tags, and of entities where tags mark them."""
        names = ["f1"]
        if self.spells(labels):
            suffixes = ["", "_strict", *(f"/{kind}" for kind in schemes.types_of(labels))]
            rates = ("f1", "precision", "recall")
            names = [f"{rate}{suffix}" for suffix in suffixes for rate in rates]
        return base.directions(*names, "accuracy", lowest="loss")

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
        findings = _check_rows([*train, *dev], self.splitter)
        for name, examples in (("training", train), ("dev", dev)):
            if any(example.tags for example in examples):
                findings += _check_table(examples, name)
                findings += _check_scheme(examples, self.scheme, name)
        findings += _check_labels(train, dev, self.scheme)
        if self.context == "document" and not any(e.before or e.after for e in train):
            message = "no sentence has others of its document, which context=document would read"
            column = setting("columns.document", "NAME")
            fix = f"Of a table name the column of the documents: {column}."
            findings.append(Finding("rows", "warning", message, "task.context", fix))
        tags = Counter(tag for example in train for tag in example.tags or ())
        if len(tags) > 1:
            findings += text_checks.check_constant(tags, "words")
            if self.spells(tags) and schemes.OUTSIDE in tags:
                counts = Counter(
                    chunk.type for example in train for chunk in schemes.chunks(example.tags or ())
                )
                rare = [f"{kind} ({count})" for kind, count in counts.items() if count < FEW]
                if rare:
                    message = f"types with fewer than {FEW} training entities are hardly learned: "
                    findings.append(Finding("balance", "warning", message + listed(rare, 5)))
        overlap = text_checks.check_overlap(train, dev, lambda example: example.words, "sentences")
        return findings + overlap

    def gold_tags(self, example: TagExample, labels: Many[str]) -> tuple[str, ...]:
        """Return the tags of an example in the scheme of the model's labels.

        Raises:
            DataError: it has no tags, or one that is not among `labels`.
        """
        originals = base.required(example.tags, example.where, "tags")
        tags = schemes.as_labels(originals, labels) if self.spells(labels) else originals
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
        rows = dict[tuple[str, ...], tuple[Ids, NDArray[np.int64]]]()  # tokens, starts of words
        for words in sentences:
            tokens = [pieces[word] for word in words]
            lengths = np.array(list(map(len, tokens)), dtype=np.int64)
            rows[words] = np.concatenate([_NO_IDS, *tokens]), np.cumsum(lengths) - lengths
        room, results = length - tokenizer.template.single, []
        for example in examples:
            targets = np.full(len(example.words), IGNORED, dtype=np.int64)
            if example.tags is not None:
                targets[:] = [index[tag] for tag in self.gold_tags(example, labels)]
            ids, starts = rows[example.words]
            left, right = (
                np.concatenate([_NO_IDS, *(rows[words][0] for words in some)])
                for some in (example.before, example.after)
            )
            # Half of the room on each side; what one side does not need is for the other
            spare = max(0, room - len(ids))
            right_count = min(len(right), max(spare // 2, spare - len(left)))
            left_count = min(len(left), spare - right_count)
            whole = np.concatenate([left[len(left) - left_count :], ids, right[:right_count]])
            read, missed = self._windows(whole, starts + left_count, targets, tokenizer, room)
            results.append(base.EncodedExample(read, len(ids), missed))
        return results

    def _windows(
        self,
        ids: Ids,
        starts: NDArray[np.int64],
        labels: NDArray[np.int64],
        tokenizer: Tokenizer,
        room: int,
    ) -> tuple[tuple[Sequence, ...], int]:
        """Return the windows that own a word, at least one, and the number of tokens in none."""
        chunks = windows(len(ids), room, self.stride or max(1, room // 2), full=True)
        owner = owners(starts, chunks, room)
        # A window in which no word has its most context is not computed
        used = np.unique(owner) if len(owner) else np.zeros(1, dtype=np.int64)
        sequences, covered, end = [], 0, 0
        first = len(tokenizer.template.before)
        for window in used.tolist():
            chunk, mine = chunks[window], owner == window
            target = TokenTargets(starts[mine] - chunk.start + first, labels[mine])
            bare = assemble(ids[chunk.start : chunk.stop], None, tokenizer.template)
            sequences.append(Sequence(bare.ids, bare.segments, {"tag": target}))
            covered += chunk.stop - max(chunk.start, end)
            end = chunk.stop
        # A word that is longer than a window has tokens in none.
        return tuple(sequences), len(ids) - covered

    def score(
        self, results: base.Results[TagExample, TagPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return the metrics, in memory that does not grow with the data.

        Returns:
            For entities "f1", "precision" and "recall" by conlleval's rule, the same with
            "_strict", and for each type, such as "f1/PER". For plain tags "f1", the mean over the
            tags. For words "accuracy" and "loss" (mean cross-entropy, in nats).
        """
        entities, scheme = self.spells(labels), schemes.scheme_of(labels)
        index = {label: position for position, label in enumerate(labels)}
        confusion, loss = Confusion(len(labels)), 0.0
        loose, strict = schemes.EntityCounts(), schemes.EntityCounts()
        for example, prediction in results:
            tags, predicted = self.gold_tags(example, labels), prediction.tags
            columns = np.array([index[tag] for tag in tags], dtype=np.int64)
            confusion.pairs.update(
                zip(columns.tolist(), map(index.__getitem__, predicted), strict=True)
            )
            selected = prediction.probabilities[np.arange(len(tags)), columns]
            loss -= float(np.log(np.maximum(selected, TINY)).sum())
            if entities:
                loose.add(schemes.chunks(tags), schemes.chunks(predicted))
                strict.add(*(schemes.strict_chunks(some, scheme) for some in (tags, predicted)))
        if not (words := confusion.total):
            raise base.nothing_to_score("word")
        of_words = {"accuracy": float(confusion.right.sum()) / words, "loss": loss / words}
        if not entities:
            return {"f1": classification_metrics(confusion)["f1_macro"], **of_words}
        scores = loose.scores() | strict.scores("_strict") | of_words
        for kind in schemes.types_of(labels):
            scores |= loose.scores(f"/{kind}", kind)
        return scores

    def grade(self, example: TagExample, prediction: TagPrediction, labels: Many[str]) -> float:
        """Return the F1 of the sentence's entities, 1 without any; the accuracy of plain tags."""
        tags = self.gold_tags(example, labels)
        if not self.spells(labels):
            correct = [a == b for a, b in zip(tags, prediction.tags, strict=True)]
            return float(np.mean(correct)) if tags else 1.0
        counts = schemes.EntityCounts()
        counts.add(schemes.chunks(tags), schemes.chunks(prediction.tags))
        return counts.scores()["f1"] if counts.expected or counts.predicted else 1.0

    def baseline(self, examples: Many[TagExample]) -> base.Metrics:
        """Return the metrics of the most frequent tag; the loss is the tag frequencies'."""
        labels, tagged = self.labels(examples), [e for e in examples if e.tags is not None]
        counts = Counter(tag for e in tagged for tag in self.gold_tags(e, labels))
        (top, _), total = counts.most_common(1)[0], counts.total()
        shares = np.array([counts[label] / total for label in labels])

        def constant(words: tuple[str, ...]) -> TagPrediction:
            return TagPrediction(words, (top,) * len(words), np.tile(shares, (len(words), 1)))

        return self.score(((e, constant(e.words)) for e in tagged), labels)


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the target positions and their labels."""
    targets = batch.target("tag", TokenTargets)
    return torch.as_tensor(targets.index), torch.as_tensor(targets.ids)


FEW = 10
"""Number of entities of a type below which it is hardly learned."""
MANY = 100
"""Number of words from which tags that are nearly all different are suspicious."""
SHOWN = 40
"""Number of characters of a word or a tag in a message."""
_SINGULAR = ("id", "idx", "index", "word", "token", "form", "tag", "pos", "upos", "xpos", "score")
_HEADER = {name.lower() for name in itertools.chain(TEXTS, LABELS, WORDS, TAGS, *PAIRS, _SINGULAR)}
"""Common aliases of columns in headers."""
_OUTSIDE_MARKS = {"0", "o", "_", "-", "OUT", "OUTSIDE", "NONE", "None"}
_SPELLINGS = (
    re.compile(r"(?P<prefix>[BIESLUMbieslum])[-_:.+/](?P<type>.+)"),
    re.compile(r"(?P<type>.+)[-_:.+/](?P<prefix>[BIESLUM])"),
)
_PREFIXED = re.compile(r"[BIESLUM][-_].")
_POSITION = re.compile(r"[\u3400-\u9fff\uff00-\uffef\u3000-\u30ff]\d|[!-~]\d")
_BRACKETS = re.compile(r"\([^()]+\*|\*\)")
_INLINE = re.compile(r"\S+[/|_](O|[BIES]-\S+)|\[[^\]]+\]\(\w+\)")
"""A word with its tag: `Anna/B-PER`, `[Anna](PER)`."""
_FORM = "For tags each line is a word and its tag, and an empty line ends a sentence."


def _check_rows(examples: Many[TagExample], splitter: Splitter) -> list[Finding]:
    several = [e for e in examples if len(e.words) > 1]
    lone = [e.where for e in examples if len(e.words) == 1]
    positions = [e.where for e in examples if all(map(_POSITION.fullmatch, e.words))]
    counts = [
        e.where
        for e in several
        if any([*e.words] == [str(n + start) for n in range(len(e.words))] for start in (0, 1))
    ]
    endless = [e.where for e in examples if e.text is None and len(e.words) > NEIGHBOURS]
    segmented = [  # 北京, not 北 and 京
        e.where
        for e in examples
        if e.text is None and any(len(word) > 1 and is_spaceless(word) for word in e.words)
    ]
    blanks = setting("task.splitter", "whitespace")
    white = [_at(e, n) for e in examples for n, word in enumerate(e.words) if not word.strip()]
    limits = {  # what a few sentences may be, but not most of them
        "sentence(s) has|have a single word": (
            lone, 10 < len(examples) < 1.1 * len(lone), "Join the words of each.",
        ),
        "sentence(s) has|have a digit after each character, as in Weibo's data, unlike texts": (
            positions, 2 * len(positions) > len(examples), "Remove the digits.",
        ),
        "sentence(s) has|have the numbers of their words as words": (
            counts, 2 * len(counts) >= len(several), "Name the column of words.",
        ),
        f"sentence(s) has|have more than {NEIGHBOURS} words": (
            endless, 2 * len(endless) > len(examples),
            "Divide them: in columns an empty line ends a sentence; a row of a table is one.",
        ),
        "sentence(s) has|have words of a script without blanks, into which no text is cut": (
            segmented, splitter == "auto" and 2 * len(segmented) > len(examples),
            f"To predict, give words, or write blanks between them and set {blanks}.",
        ),
    }  # fmt: skip
    findings = list[Finding]()
    for fault, (locations, are_most, fix) in limits.items():
        if are_most:
            findings += text_checks.report_rows("rows", locations, fault, fix, "warning")
    empty, bare = "sentence(s) has|have no word", "sentence(s) has|have words without a tag"
    findings += text_checks.check_rows(examples, empty, lambda e: not e.words, "Remove them.")
    fix = "Tag all of their words or remove them."
    findings += text_checks.check_rows(
        examples,
        bare,
        lambda e: e.tags is None or not {"", "-100"}.isdisjoint(e.tags),
        fix,
        check="labels",
    )
    fault = "word(s) is|are empty or white space, and read as unknown"
    return findings + text_checks.report_rows("rows", white, fault, severity="warning")


def _check_table(examples: Many[TagExample], name: str) -> list[Finding]:
    """Report texts with a label each, a header, and tags that are hardly tags."""
    rows = [
        (e.where, number, word, tag)
        for e in examples
        for number, (word, tag) in enumerate(zip(e.words, e.tags or (), strict=False), 1)
    ]
    blank = [row for row in rows if any(len(field.split()) > 1 for field in row[2:])]
    inline = [row for row in rows if any(map(_INLINE.fullmatch, row[2:]))]
    texts = f"For labels of texts set {argument(task='classify')}."
    for faulty, fault, fix in (
        (blank, "have blanks, like texts with a label each", texts),
        (inline, "hold a word with its tag", "Write each word on its own line."),
    ):
        if 2 * len(faulty) > len(rows):
            where, number, *pair = faulty[0]
            message = f"{len(faulty)} of {len(rows)} words of the {name} data or their tags {fault}"
            message += f": {where} word {number} {_shown(*pair)}"
            return [Finding("rows", "error", message, fix=f"{fix} {_FORM}")]
    tags = Counter(tag for *_, tag in rows)
    where, _, *pair = rows[0]
    if all(field.lower() in _HEADER for field in pair) and tags[pair[1]] == 1:
        message = f"the {name} data begins with a header, which would be learned: {where} "
        fix = f"Remove that line if words and tags follow. {texts} {_FORM}"
        return [Finding("rows", "error", message + _shown(*pair), fix=fix)]
    same = [f"{where} {word!r}" for where, _, word, tag in rows if word == tag]
    if len(rows) >= FEW and 2 * len(same) > len(rows):
        message = f"most tags of the {name} data are the words themselves: {listed(same, 5)}"
        fix = f"Name the column of tags: {argument(label='3')}."
        return [Finding("labels", "warning", message, fix=fix)]
    if len(rows) >= MANY and 2 * len(tags) > len(rows):
        message = f"the {len(rows)} words of the {name} data have {len(tags)} different tags"
        message += f", such as {_shown(*pair)}"
        fix = f"Check the order of the columns. {_FORM}"
        return [Finding("labels", "warning", message, fix=fix)]
    return []


def _shown(*pair: str) -> str:
    word, tag = (field if len(field) <= SHOWN else f"{field[:SHOWN]}…" for field in pair)
    return f"{word!r} with the tag {tag!r}"


def _check_scheme(examples: Many[TagExample], scheme: schemes.Scheme, name: str) -> list[Finding]:
    """Report the scheme of the tags and where they break its rules."""
    tags = [example.tags or () for example in examples]
    actual = schemes.find_scheme(tags) if scheme == "auto" else scheme
    if actual == "plain":
        return _check_mixed(examples, name) if scheme == "auto" else []
    parts = {tag: schemes.tag_part(tag) for row in tags for tag in row}
    letters = schemes.PREFIXES[actual]
    foreign = {tag for tag, part in parts.items() if part is None or part.prefix not in letters}
    if foreign:
        message = (
            f"the {name} data has tags that {actual.upper()} lacks: {listed(sorted(foreign), 5)}"
        )
        fix = f"Set {setting('task.scheme', 'auto')}, or plain for tags of single words."
        return [Finding("labels", "error", message, "task.scheme", fix)]
    findings = []
    if actual != "iob2":
        message = f"the tags of the {name} data are {actual.upper()}; they are read as IOB2"
        findings.append(Finding("labels", "note", message))
    flaws = ((e, n) for e in examples for n in schemes.flaws(e.tags or (), actual))
    broken = [f"{_at(e, n)} {(e.tags or ())[n]}" for e, n in flaws]
    fault = f"tag(s) of the {name} data breaks|break the rules of {actual.upper()}"
    fix = "They are read as by conlleval: a tag that continues nothing begins an entity."
    return findings + text_checks.report_rows("labels", broken, fault, fix, "warning")


def _check_mixed(examples: Many[TagExample], name: str) -> list[Finding]:
    """Report plain tags that are likely something else: entities spelled in another way, …."""
    rows = [(example, tag) for example in examples for tag in dict.fromkeys(example.tags or ())]
    tags = Counter(tag for example in examples for tag in example.tags or ())
    likely = {tag: _likely_tag(tag) for tag in tags}
    changed = [f"{new} for {tag}" for tag, new in likely.items() if new != tag]
    remaining = [
        f"{example.where} ({tag!r})" for example, tag in rows if not schemes.spells_entities([tag])
    ]
    so = "so all are read as tags of single words"
    if any("-" in tag for tag in likely.values()) and schemes.spells_entities(likely.values()):
        message = f"the {name} data seems to have tags of entities in another spelling, {so}: "
        fix = f"If entities are meant, write {listed(changed, 5)}."
    elif any("-" in tag and schemes.spells_entities([tag]) for tag in tags):
        message = f"the {name} data has tags of entities, such as B-PER, and others, {so}: "
        fix = "Correct these tags if entities are meant."
    elif any(_BRACKETS.match(tag) for tag in tags):
        message = f"the {name} data has brackets that nest or do not close as tags, {so}: "
        fix = "Name another column of tags."
    elif 2 * tags[schemes.OUTSIDE] > tags.total() and len(tags) > 1:
        message = f"the {name} data has the tag O and types without B and I, {so}: "
        fix = "If they mark entities, write I-PER for PER, and B-PER where one follows another."
    elif len(tags) > 1 and all(tag.lstrip("-").isdecimal() for tag in tags):
        message = f"the {name} data has numbers as tags, {so}: "
        fix = "If they are tags, write the tags, such as B-PER."
    elif len(tags) > 1 and 2 * tags["_"] > tags.total():
        message = f"the {name} data has the tag _, which marks empty fields of CoNLL-U, {so}: "
        remaining = [f"{example.where} ({tag!r})" for example, tag in rows if tag == "_"]
        fix = "Name another column of tags, such as upos."
    else:
        return []
    return [Finding("labels", "warning", message + listed(remaining, 5), fix=fix)]


def _likely_tag(tag: str) -> str:
    """Return the tag of an entity that another spelling probably means, or the tag.

    Examples: B_PER, PER-B and b-PER → B-PER; 0, o, OUT and "-" → O.
    """
    if tag in _OUTSIDE_MARKS:
        return schemes.OUTSIDE
    if schemes.spells_entities([tag]):
        return tag
    for pattern in _SPELLINGS:
        if match := pattern.fullmatch(tag):
            return f"{match['prefix'].upper()}-{match['type']}"
    return tag


@functools.lru_cache(maxsize=256)
def _entity_tags(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tag of an entity for each label, also where other programs write it otherwise.

        ("O", "B_PER", "I_PER") → ("O", "B-PER", "I-PER")
        ("O", "PER", "VITAMIN-E") → ("O", "I-PER", "I-VITAMIN-E")

    In the second form, neighbouring words of one label are one entity.
    """
    likely = tuple(map(_likely_tag, labels))
    if schemes.spells_entities(likely):
        return likely
    pairs = zip(labels, likely, strict=True)
    return tuple(
        tag if tag == schemes.OUTSIDE or _PREFIXED.match(label) else f"I-{label}"
        for label, tag in pairs
    )


def _at(example: TagExample, position: int) -> str:
    return f"{example.where} word {position + 1} {example.words[position]!r}"


def _check_labels(
    train: Many[TagExample], dev: Many[TagExample], scheme: schemes.Scheme
) -> list[Finding]:
    """Report missing types of entities or tags, and those that only the dev data has."""
    train_tags, dev_tags = (
        Counter(tag for example in examples for tag in example.tags or ())
        for examples in (train, dev)
    )
    entities = scheme != "plain" and schemes.spells_entities(train_tags)
    train_types, dev_types = (
        set(schemes.types_of(some)) if entities else set(some) for some in (train_tags, dev_tags)
    )
    kind = "types of entities" if entities else "tags"
    findings = text_checks.check_case(sorted(train_types))
    if len(train_types) < (1 if entities else 2):
        predicted = ", ".join(map(repr, train_tags)) or "all absent"
        message = f"there is nothing to learn: the tags of the training data are {predicted}"
        fix = "Name another column of tags, or give more data."
        findings.append(Finding("labels", "error", message, fix=fix))
    plain = {tag for tag in dev_tags if not schemes.spells_entities([tag])} if entities else set()
    unknown = dev_types - train_types | plain
    if unknown:
        kinds = {t: {t, *(schemes.types_of([t]) if entities else ())} for t in dev_tags}
        faulty = {t for t in dev_tags if not unknown.isdisjoint(kinds[t])}
        where = [e.where for e in dev if not faulty.isdisjoint(e.tags or ())]
        message = (
            f"the dev data has {kind} that training data lacks, {listed(sorted(unknown), 5)}: "
        )
        fix = f"Those of the training data are {listed(sorted(train_types), 5)}."
        findings.append(Finding("labels", "error", message + listed(where, 5), fix=fix))
    if dev and train_types - dev_types:
        message = (
            f"the dev data has none of the {kind} {listed(sorted(train_types - dev_types), 5)}"
        )
        findings.append(Finding("labels", "warning", message))
    return findings
