"""Examples that sentence vectors are trained on, from the columns of a table.

| columns | an example | loss by default |
|---|---|---|
| anchor, positive | two texts that belong together | in-batch softmax |
| anchor, positive, negative … | and texts that do not, one or a list | in-batch softmax |
| sentence1, sentence2, score | two texts and how similar they are | CoSENT |
| text, label | a text and its class | supervised contrastive |
| query, positive, negative …, scores | and a teacher's score of each document | teacher's KL |
| BEIR's FOLDER/qrels/train.tsv | a query, relevant documents, others | in-batch softmax |
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bothways.core.errors import DataError, Finding
from bothways.tasks import columns as tables, text_checks
from bothways.tasks.base import Row
from bothways.tasks.sentence_embedding import beir, losses
from bothways.tasks.text_task import LABELS, PAIRS, TEXTS, TextColumns, TextExample

QUERIES = ("anchor", "query", "question")
POSITIVES = (
    "positive", "positives", "pos", "answer", "response", "passage", "document", "documents",
)  # fmt: skip
NEGATIVES = ("negative", "negatives", "neg", "hard_negative", "hard_negatives")
LARGEST = 1e18
"""The largest score of a teacher: differences must fit into fp32."""
SCORES = ("score", "scores", "similarity", "similarity_score", "relatedness_score")


@dataclass(frozen=True)
class EmbedColumns(TextColumns):
    """The columns of texts; see `Columns`.

    Attributes:
        text: the text; the anchor of a pair, such as a query.
        text_b: the second text, which belongs to it; a text or a list of them.
        label: the score of a pair, the class of a text, or a list with the score of each document.
        negatives: texts that do not belong to the anchor: columns of texts or of lists.
    """

    negatives: tuple[str, ...] | None = None


COLUMNS = (
    tables.Column(
        "text", "text", (*QUERIES, *TEXTS), companion="text_b",
        pairs=[*itertools.product((*QUERIES, "text"), POSITIVES), *PAIRS],
    ),
    tables.Column(
        "negatives", "negatives", NEGATIVES, numbered=re.compile(r"(hard_)?neg(ative)?s?_?\d+"),
        optional=True,
    ),
    tables.Column("label", "label", (*SCORES, *LABELS), answer=True, optional=True),
)  # fmt: skip


@dataclass(frozen=True)
class VectorExample(TextExample):
    """A text with the texts that it is compared with in training.

    Attributes:
        positives: further texts that belong to it, after `text_b`.
        negatives: texts that do not.
        scores: a teacher's score of `text_b` and of each negative.
    """

    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()

    @property
    def is_scored(self) -> bool:
        """True for a pair of texts with a number."""
        return self.text_b is not None and math.isfinite(tables.number_of(self.label))

    @property
    def all_texts(self) -> tuple[str, ...]:
        """The anchor, its positives and its negatives."""
        first = () if self.text_b is None else (self.text_b,)
        return (self.text, *first, *self.positives, *self.negatives)

    def targets(self) -> list[losses.TextTargets]:
        """Return the targets of each text, in the order of `all_texts`."""
        texts = self.all_texts
        matching = len(texts) - len(self.negatives) - 1
        roles = [losses.ANCHOR, *[losses.POSITIVE] * matching]
        roles += [losses.OTHER] * len(self.negatives)
        scores = [math.nan] * len(texts)
        if self.scores:
            scores[1:] = self.scores
        elif self.text_b is not None and self.label is not None:
            scores[1] = tables.number_of(self.label)
        # Texts of a class are compared by their class.
        classes = self.text_b is None and self.label is not None
        keys = [self.label or ""] if classes else texts
        triples = zip(roles, map(text_key, keys), np.array(scores, dtype=np.float32), strict=True)
        return [losses.TextTargets(*(np.array([value]) for value in values)) for values in triples]


def text_key(text: str) -> int:
    """Return 64 bits of a hash, equal on every rank and in every process."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def vector_example(row: Row, columns: EmbedColumns, where: str) -> VectorExample:
    """Return the example in a row.

    Raises:
        DataError: a column is missing, or its value is not a text, a list of texts, a label or the
            scores of the documents.
    """
    assert columns.text is not None
    text = tables.text_of(row, columns.text, where)
    positives = () if columns.text_b is None else _texts(row, columns.text_b, where)
    if columns.text_b is not None and not positives:
        message = f"column {columns.text_b!r} is an empty list"
        raise DataError(message, where=where, fix="Give each anchor a text that belongs to it.")
    negatives = tuple(
        itertools.chain.from_iterable(_texts(row, name, where) for name in columns.negatives or ())
    )
    label, scores = None, tuple[float, ...]()
    if columns.label is not None:
        value = tables.cell_of(row, columns.label, where)
        if isinstance(value, list | tuple):
            numbers = [v for v in value if isinstance(v, int | float) and abs(v) <= LARGEST]
            documents = len(positives) + len(negatives)
            content = f"column {columns.label!r} holds "
            if len(numbers) != len(value):
                message = f"{content}a score that is not a number, or too large"
                raise DataError(message, where=where, fix="Write finite numbers.")
            if len(value) != documents:
                message = f"{content}{len(value)} scores for {documents} documents"
                fix = "Give the positive and each negative one score, in this order."
                raise DataError(message, where=where, fix=fix)
            scores = tuple(map(float, numbers))
        else:
            # One that is absent is not none: the check of the data names its row.
            label = tables.label_of(value, columns.label, where) or ""
    text_b, further = (positives[0], positives[1:]) if positives else (None, ())
    return VectorExample(text, text_b, label, where, further, negatives, scores)


def grades_file(source: str) -> Path | None:
    """Return the grades that a source names: FOLDER/qrels/SPLIT.tsv, or a folder with one split.

    None for another source than BEIR's.

    Raises:
        DataError: the folder has several splits.
    """
    path = Path(source)
    if path.parent.name == "qrels" and beir.corpus_file(path.parent.parent) is not None:
        return path
    if beir.corpus_file(path) is None or not (splits := beir.splits_of(path)):
        return None
    if len(splits) > 1:
        fix = f"Name one: {next(reversed(splits.values()))}."
        raise DataError(f"has grades for {', '.join(splits)}", where=path, fix=fix)
    return next(iter(splits.values()))


def graded_examples(file: Path, notes: list[str]) -> Iterator[VectorExample]:
    """Yield an example for each query with a relevant document; grades of 0 and less are negatives.

    Args:
        file: the grades, FOLDER/qrels/SPLIT.tsv.
        notes: receives a sentence about what is passed over.

    Raises:
        DataError: as `read_beir`.
    """
    data = beir.read_beir(file.parent.parent, file.name.partition(".")[0])
    passed = 0
    for query, grades in data.grades.items():
        known = {name: grade for name, grade in grades.items() if name in data.documents}
        positives = [data.documents[name] for name, grade in known.items() if grade > 0]
        negatives = tuple(data.documents[name] for name, grade in known.items() if grade <= 0)
        if positives:
            where, (first, *further) = f"{file}, query {query}", positives
            text = data.queries[query]
            yield VectorExample(text, first, None, where, tuple(further), negatives)
        passed += not positives
    absent = {name for rows in data.grades.values() for name in rows} - data.documents.keys()
    if passed or absent:
        notes.append(
            f"{passed:,} of {len(data.grades):,} queries have no relevant document in the corpus "
            f"and are not trained on; {len(absent):,} graded documents are not in it"
        )


def _texts(row: Row, column: str, where: str) -> tuple[str, ...]:
    """Return the text or the list of texts in a column."""
    value = tables.cell_of(row, column, where)
    if not isinstance(value, list | tuple):
        return (tables.text_of(row, column, where),)
    for item in value:
        if not isinstance(item, str):
            message = f"column {column!r} holds a list with {item!r:.80}, which is not a text"
            raise DataError(message, where=where, fix="Write texts.")
    return tuple(value)


def loss_for(examples: Many[VectorExample]) -> losses.VectorLoss:
    """Return the loss that is usual for examples of this form.

    Raises:
        DataError: an example without a second text, a label or negatives.
    """
    first = examples[0]
    if any(example.scores for example in examples):
        return losses.TeacherKL()
    if any(example.text_b is None for example in examples):
        if first.label is None:
            message = "has one text and no class, so there is nothing to learn"
            fix = "Give a column with a text that belongs to it, or with its class."
            raise DataError(message, where=first.where, fix=fix)
        return losses.SupervisedContrastive()
    if any(example.label is not None for example in examples):
        return losses.CoSENT()
    return losses.InBatchSoftmax()


def check_vector_examples(
    loss: losses.VectorLoss, train: Many[VectorExample], dev: Many[VectorExample]
) -> list[Finding]:
    """Return the reasons why examples cannot be learned by a loss, and what looks wrong in them."""
    findings = text_checks.check_examples(train, dev, lambda e: e.all_texts, lambda e: "")
    if len({(e.text_b is None, e.label is None) for e in dev}) > 1:  # a metric could read a part
        message = "the dev data has rows of several forms, such as pairs with and without a score"
        findings.append(Finding("pairs", "error", message, fix="Give one form in a file."))
    check_labels = functools.partial(text_checks.check_rows, train, check="labels")
    match loss:
        case losses.SupervisedContrastive():
            findings += check_labels("example(s) has|have no class", lambda e: not e.label)
            fault = "example(s) has|have a second text beside the class"
            findings += check_labels(fault, lambda e: e.text_b is not None)
            findings += _check_classes(train)
        case losses.CoSENT() | losses.AnglE() | losses.CosineRegression():
            fault, fix = "example(s) has|have no score", "Give two texts and a number."
            findings += check_labels(fault, lambda e: not e.is_scored, fix)
            fault = "example(s) has|have more than two texts"
            findings += check_labels(fault, lambda e: len(e.all_texts) > 2, fix)
            scores = {tables.number_of(example.label) for example in train if example.is_scored}
            if len(scores) == 1 and len(train) > 1:
                message = f"all training pairs have the score {scores.pop():g}: there is no order"
                fix = "Give pairs with different scores."
                findings.append(Finding("labels", "error", message, fix=fix))
            elif isinstance(loss, losses.CosineRegression) and any(abs(s) > 1 for s in scores):
                highest = max(map(abs, scores))
                message = f"a cosine is from −1 to 1, and scores are up to {highest:g}"
                fix = "Divide them by the highest score."
                findings.append(Finding("labels", "error", message, fix=fix))
        case losses.MarginMSE() | losses.TeacherKL():
            fault = "example(s) has|have no list of a teacher's scores"
            fix = "Give a list with the score of the positive and of each negative."
            findings += check_labels(fault, lambda e: not e.scores, fix)
            findings += check_labels(
                "example(s) has|have no negative", lambda e: not e.negatives, fix
            )
        case losses.InBatchSoftmax():
            fault, fix = "example(s) has|have no second text", "Give each anchor its positive."
            findings += text_checks.check_rows(train, fault, lambda e: e.text_b is None, fix)
            fault = "example(s) has|have a label or scores, which softmax does not read"
            findings += check_labels(
                fault, lambda e: e.label is not None or e.scores, None, "warning"
            )
            texts = {text for example in train for text in example.all_texts[1:]}
            if len(train) > 1 and len(texts) == 1:
                message = "all training examples have the same second text: nothing is a negative"
                findings.append(Finding("pairs", "error", message, fix="Give different texts."))
    if len(train) == 1:
        message = "there is one training example, and nothing to compare it with"
        findings.append(Finding("pairs", "error", message, fix="Give more examples."))
    return findings


def _check_classes(train: Many[VectorExample]) -> list[Finding]:
    counts = Counter(example.label for example in train)
    singles = [label for label, count in counts.items() if count == 1]
    if len(counts) == 1:
        message = f"all training texts have the class {next(iter(counts))!r}"
        return [Finding("labels", "error", message, fix="Give texts of several classes.")]
    if len(singles) == len(counts):
        message = "each class has one text, and texts of a class are compared"
        return [Finding("labels", "error", message, fix="Give two texts of a class, or more.")]
    if singles:
        names = ", ".join(map(repr, singles[:5]))
        message = f"classes with one text add nothing: {names}"
        return [Finding("labels", "warning", message)]
    return []
