"""Examples that sentence vectors are trained on, and retrieval data in folders as BEIR's.

    corpus.jsonl     {"_id": "d1", "title": "…", "text": "…"}
    queries.jsonl    {"_id": "q1", "text": "…"}
    qrels/test.tsv   query-id, corpus-id, score; or without a header query, 0, document, score

A document is read as its title, a space and its text, as `mteb` reads it. All files may be
compressed.

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
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bothways.core.errors import DataError, Finding, argument
from bothways.core.terminal import listed
from bothways.data.tables import open_table
from bothways.data.text_io import COMPRESSED, read_lines
from bothways.tasks import text_checks
from bothways.tasks.base import Row
from bothways.tasks.columns import Column, cell_of, label_of, number_of, text_of
from bothways.tasks.sentence_embedding import losses
from bothways.tasks.text_task import LABELS, PAIRS, TEXTS, TextColumns, TextExample

Grades = Mapping[str, Mapping[str, int]]
"""The relevance of documents by query: 0 or less for those that do not fit."""
Run = Mapping[str, Mapping[str, float]]
"""The scores of the documents that were found, by query."""


@dataclass(frozen=True)
class RetrievalData:
    """Queries with relevant documents among those of a corpus.

    Attributes:
        folder: that it was read from.
        documents, queries: texts by id; queries without a grade are dropped.
        grades: by query and document.
    """

    folder: Path
    documents: Mapping[str, str]
    queries: Mapping[str, str]
    grades: Grades


def corpus_file(folder: Path) -> Path | None:
    """Return the file with the documents of a folder as BEIR's; None for any other folder."""
    return _file(folder / "corpus.jsonl")


def splits_of(folder: Path) -> dict[str, Path]:
    """Return the files with grades by the name of their split, such as "test"."""
    files = sorted((folder / "qrels").glob("*.tsv*"))
    return {file.name.partition(".")[0]: file for file in files}


def read_beir(folder: Path, split: str = "test") -> RetrievalData:
    """Read a folder as BEIR's; the texts of all documents are held in memory.

    Raises:
        DataError: a file is missing or cannot be read; an id occurs twice, or is not there.
    """
    corpus, queries = corpus_file(folder), _file(folder / "queries.jsonl")
    grades, missing = splits_of(folder), "corpus.jsonl" if corpus is None else "queries.jsonl"
    if corpus is None or queries is None or split not in grades:
        missing = missing if corpus is None or queries is None else f"qrels/{split}.tsv"
        splits = f"; there are grades for {listed(grades)}" if corpus and queries and grades else ""
        fix = "A folder as BEIR's has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."
        raise DataError(f"has no {missing}{splits}", where=folder, fix=fix)
    graded = read_grades(grades[split])
    documents, texts = _texts_by_id(corpus), _texts_by_id(queries)
    unknown = [name for name in graded if name not in texts]
    if unknown or not any(name in documents for rows in graded.values() for name in rows):
        what = f"{listed(unknown, 5)} of no query" if unknown else "no document of the corpus"
        fix = "Take all files from one source."
        raise DataError(f"grades {what}", where=grades[split], fix=fix)
    return RetrievalData(folder, documents, {name: texts[name] for name in graded}, graded)


def read_grades(file: Path) -> dict[str, dict[str, int]]:
    """Read grades by query and document, with three columns as BEIR's or four as TREC's.

    Raises:
        DataError: a line has other columns, or a grade that is not a whole number.
    """
    grades = dict[str, dict[str, int]]()
    for number, line in read_lines(str(file)):
        fields = line.split("\t") if "\t" in line else line.split()
        if number == 1 and fields and not fields[-1].lstrip("+-").isdecimal():
            continue  # the header
        try:
            query, document, grade = (fields[0], *fields[-2:]) if len(fields) in (3, 4) else ()
            grades.setdefault(query, {})[document] = int(grade)
        except ValueError:
            message = f"is not a query, a document and a whole number: {line:.80}"
            raise DataError(message, where=f"{file}:{number}") from None
    if not grades:
        raise DataError("holds no grade", where=file)
    return grades


def _file(path: Path) -> Path | None:
    names = (path.with_name(path.name + suffix) for suffix in ("", *COMPRESSED))
    # Not `Path.is_file`, which raises OSError for the text that was meant by a long name.
    return next((name for name in names if os.path.isfile(name)), None)


def _texts_by_id(file: Path) -> dict[str, str]:
    """Return the texts of a file by id; before each its title, if it has one."""
    texts = dict[str, str]()
    for row in open_table(str(file)).rows:
        name, title = (row.values.get(column) for column in ("_id", "title"))
        if not isinstance(name, str | int) or str(name) in texts:
            fault = "used before" if str(name) in texts else "missing, or not a text"
            message, fix = f'has an "_id" that is {fault}', "Give each text an id of its own."
            raise DataError(message, where=row.where, fix=fix)
        texts[str(name)] = f"{title or ''} {text_of(row.values, 'text', row.where)}".strip()
    return texts


def score_run(run: Run, grades: Grades, cutoffs: Many[int] = (10, 100)) -> dict[str, float]:
    """Return the mean over the queries of nDCG, MRR, recall and MAP among the first documents.

    As trec_eval: scores are compared in fp32, and of equal ones the highest id is first; the gain
    is the grade. As BEIR: a document with the id of the query is dropped. A query that is not in
    the run counts 0.

    Args:
        cutoffs: numbers of first documents; names are such as "ndcg@10".

    Examples:
        >>> score_run({"q": {"a": 0.5, "b": 0.7}}, {"q": {"a": 1}}, cutoffs=[10])
        {'ndcg@10': 0.6309297535714575, 'mrr@10': 0.5, 'recall@10': 1.0, 'map@10': 0.5}
    """
    values = []
    for query, graded in grades.items():
        scores = ((np.float32(x), name) for name, x in run.get(query, {}).items() if name != query)
        documents = [name for _, name in sorted(scores, reverse=True)]
        values.append([_metrics(documents, graded, k) for k in cutoffs])
    pairs = itertools.product(("ndcg", "mrr", "recall", "map"), cutoffs)
    names = [f"{name}@{k}" for name, k in pairs]
    return dict(zip(names, np.mean(values, axis=0).T.ravel().tolist(), strict=True))


def _metrics(documents: Many[str], grades: Mapping[str, int], k: int) -> tuple[float, ...]:
    """Return nDCG, MRR, recall and MAP of one ranking among its first `k` documents."""
    # Documents without a grade are not relevant, nor those graded below 0.
    gains = [max(0, grades.get(name, 0)) for name in documents[:k]]
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)
    if not ideal:
        return 0.0, 0.0, 0.0, 0.0
    dcg, best = (  # Σ gain / log2(place + 1)
        sum(gain / math.log2(rank + 1) for rank, gain in enumerate(values, 1))
        for values in (gains, ideal[:k])
    )
    hits = [rank for rank, gain in enumerate(gains, 1) if gain]
    precisions = [number / rank for number, rank in enumerate(hits, 1)]
    reciprocal = 1 / hits[0] if hits else 0.0
    return dcg / best, reciprocal, len(hits) / len(ideal), sum(precisions) / len(ideal)


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
    Column(
        "text", "text", (*QUERIES, *TEXTS), companion="text_b",
        pairs=[*dict.fromkeys([*itertools.product((*QUERIES, "text"), POSITIVES), *PAIRS])],
    ),
    Column(
        "negatives", "negatives", NEGATIVES, numbered=re.compile(r"(hard_)?neg(ative)?s?_?\d+"),
        optional=True,
    ),
    Column("label", "label", (*SCORES, *LABELS), answer=True, optional=True),
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
        return self.text_b is not None and math.isfinite(number_of(self.label))

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
            scores[1] = number_of(self.label)
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
    text = text_of(row, columns.text, where)
    positives = () if columns.text_b is None else _texts(row, columns.text_b, where)
    if columns.text_b is not None and not positives:
        message = f"column {columns.text_b!r} is an empty list"
        raise DataError(message, where=where, fix="Give each anchor a text that belongs to it.")
    negatives = tuple(
        itertools.chain.from_iterable(_texts(row, name, where) for name in columns.negatives or ())
    )
    if negatives and not positives:
        message = f"has negatives, in column {(columns.negatives or ())[0]!r}, and no positive"
        fix = f"Name the column of the positive, {argument(text_b='NAME')}, or remove this one."
        raise DataError(message, where=where, fix=fix)
    label, scores = None, tuple[float, ...]()
    if columns.label is not None:
        value = cell_of(row, columns.label, where)
        if isinstance(value, list):
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
            label = label_of(value, columns.label, where) or ""
    text_b, further = (positives[0], positives[1:]) if positives else (None, ())
    return VectorExample(text, text_b, label, where, further, negatives, scores)


def grades_file(source: str) -> Path | None:
    """Return the grades that a source names: FOLDER/qrels/SPLIT.tsv, or a folder with one split.

    None for another source than BEIR's.

    Raises:
        DataError: the folder has several splits.
    """
    path = Path(source)
    if path.parent.name == "qrels" and corpus_file(path.parent.parent) is not None:
        return path
    if corpus_file(path) is None or not (splits := splits_of(path)):
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
    data = read_beir(file.parent.parent, file.name.partition(".")[0])
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
    value = cell_of(row, column, where)
    if not isinstance(value, list):
        return (text_of(row, column, where),)
    for item in value:
        if not isinstance(item, str):
            message = f"column {column!r} holds a list with {item!r:.80}, which is not a text"
            raise DataError(message, where=where, fix="Write texts.")
    return tuple(value)


def check_vector_examples(
    loss: losses.VectorLoss, train: Many[VectorExample], dev: Many[VectorExample]
) -> list[Finding]:
    """Return the reasons why examples cannot be learned by a loss, and what looks wrong in them."""
    findings = text_checks.check_examples(train, dev, lambda e: e.all_texts, lambda e: "")
    if len({(e.text_b is None, e.label is None) for e in dev}) > 1:  # a metric could read a part
        message = "the dev data has rows of several forms, such as pairs with and without a score"
        findings.append(Finding("pairs", "error", message, fix="Give one form in a file."))
    findings += text_checks.check_rows(
        dev, "dev example(s) has|have no score or class", _lacks_answer, check="labels"
    )
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
            scores = {number_of(example.label) for example in train if example.is_scored}
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
    # SNLI and MNLI number entailment 0, neutral 1 and contradiction 2.
    scored = [{number_of(e.label) for e in part if e.is_scored} for part in (train, dev)]
    if any({0, 2} <= scores <= {0, 1, 2} for scores in scored):
        message = (
            "the scores are 0, 1 and 2, and the highest means most alike: classes of natural "
            "language inference, where 0 is entailment, are the reverse"
        )
        fix = "Of those, give entailed sentences as positive, contradictions as negative."
        findings.append(Finding("labels", "warning", message, fix=fix))
    if len(train) == 1:
        message = "there is one training example, and nothing to compare it with"
        findings.append(Finding("pairs", "error", message, fix="Give more examples."))
    return findings


def _lacks_answer(example: VectorExample) -> bool:
    """Return True for a pair or a text that has a label, but not one that can be scored."""
    answer = example.label if example.text_b is None else example.is_scored
    return example.label is not None and not answer


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
