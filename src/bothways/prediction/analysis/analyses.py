"""The analysis of each kind of prediction: of classes, numbers, tags, answers, rankings.

The outcomes of an entity are those of MUC and SemEval 2013, task 9: right; of another type; with
another boundary; both; missed; and, for a predicted entity where there is none, spurious.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Sequence as Many
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bothways.core.report import sections as s
from bothways.prediction.analysis import base
from bothways.tasks import metrics, predictions as p
from bothways.tasks.base import E, Metrics, P, required
from bothways.tasks.choice.task import ChoiceExample
from bothways.tasks.metrics import TINY, Confusion, Rankings, ndcg, sigmoid
from bothways.tasks.multilabel.task import LEAST, MultilabelExample, constant_labels
from bothways.tasks.predictions import AnswerPrediction, RankPrediction, TagPrediction
from bothways.tasks.question_answering.examples import Question, grade_answer
from bothways.tasks.reranking.task import RankExample
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import Chunk, chunks
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextExample

LABELS = 5
"""Number of labels that are shown of an example: the labels furthest from the truth."""
POINTS = 1000
"""Number of points in a picture; of more examples an even sample is drawn."""


def _shown(
    example: TextExample | MultilabelExample, truth: str, answers: list[s.ReportGuess]
) -> s.ReportExample:
    # Examples of further tasks have the same answer, and need not have a second text.
    second = getattr(example, "text_b", None)
    texts = [example.text] if second is None else [example.text, " ‖ ", second]
    return s.ReportExample([*map(base.clip, texts)], truth, answers, example.where)


class DecisionAnalysis(base.TaskAnalysis[E, P]):
    """Confusion of classes and calibration, where one of several classes is right."""

    grade_name, cost_name = "accuracy", "cross-entropy"

    def __init__(self, names: Many[str] = ()) -> None:
        super().__init__()
        self.labels = tuple(names)
        self.confusion = Confusion(len(names))
        self._index = {name: index for index, name in enumerate(names)}

    def decide(self, example: E, prediction: P) -> tuple[Any, ...]:
        """Return true and predicted classes of D decisions, and probabilities `(D, classes)`."""
        raise NotImplementedError

    def add(self, example: E, prediction: P) -> base.Judgement:
        """Count the pairs of classes; the cost is −log p of the right ones, the doubt the greatest
        lead of a sure wrong class.
        """
        *classes, probabilities = self.decide(example, prediction)
        # A sentence without a word has no decision: an empty list would become floats.
        truth, predicted = (np.asarray(rows, dtype=np.int64) for rows in classes)
        chances = np.asarray(probabilities)
        self.confusion.pairs.update(zip(truth.tolist(), predicted.tolist(), strict=True))
        top, true_chances = chances.max(1), chances[np.arange(len(truth)), truth]
        self.calibration.add(top, truth == predicted)
        leads = (top - true_chances)[(top >= base.SURE) & (true_chances < top)]
        loss = -float(np.log(np.maximum(true_chances, TINY)).sum())
        return base.Judgement(loss, float(leads.max()) if len(leads) else None)

    def baseline(self) -> Metrics:
        """Compute the accuracy of the most frequent class."""
        truth = self.confusion.true
        return {"accuracy": float(truth.max() / max(1, truth.sum()))} if len(truth) else {}

    def sections(self) -> list[s.Section]:
        """Build the confusion of classes and the reliability curve."""
        return [*base.confusion_sections(self.labels, self.confusion), *self.reliability()]


class ClassAnalysis(DecisionAnalysis[TextExample, p.ClassPrediction]):
    """Confusion of classes and calibration."""

    def decide(self, example: TextExample, prediction: p.ClassPrediction) -> tuple[Any, ...]:
        """Return the class of a text."""
        chances = [prediction.probabilities[label] for label in self.labels]
        label = required(example.label, example.where)
        return [self._index[label]], [prediction.index], [chances]

    def show(self, example: TextExample, prediction: p.ClassPrediction) -> s.ReportExample:
        """Show the texts with the most probable classes."""
        best = base.guesses(prediction.probabilities, example.label)
        return _shown(example, str(example.label), best)

    def baseline(self) -> Metrics:
        """Compute the metrics of the most frequent class."""
        truth = self.confusion.true
        majority, top = Confusion(len(self.labels)), int(truth.argmax())
        majority.pairs.update({(i, top): int(count) for i, count in enumerate(truth)})
        return metrics.classification_metrics(majority) if majority.total else {}


class ChoiceAnalysis(DecisionAnalysis[ChoiceExample, p.ChoicePrediction]):
    """Confusion of the positions of endings, and calibration."""

    def decide(self, example: ChoiceExample, prediction: p.ChoicePrediction) -> tuple[Any, ...]:
        """Return the position of an ending; those up to the last that is right or given count."""
        label = required(example.label, example.where)
        count = max(self.confusion.labels, label + 1, prediction.index + 1)
        self.confusion.labels = count
        self.labels = tuple(f"ending {number}" for number in range(1, count + 1))
        return [label], [prediction.index], [prediction.probabilities]

    def show(self, example: ChoiceExample, prediction: p.ChoicePrediction) -> s.ReportExample:
        """Show the context with the most probable endings."""
        endings = [f"{n}. {base.clip(text)}" for n, text in enumerate(example.endings, 1)]
        truth = endings[required(example.label, example.where)]
        best = base.guesses(dict(zip(endings, prediction.probabilities, strict=True)), truth)
        return s.ReportExample([base.clip(example.context)], truth, best, example.where)


class LabelSetAnalysis(base.TaskAnalysis[MultilabelExample, p.MultilabelPrediction]):
    """Counts of each label and calibration."""

    grade_name, cost_name, calibrated = "all labels right", "cross-entropy", "labels"

    def __init__(self, labels: Many[str]) -> None:
        super().__init__()
        self.labels = tuple(labels)
        self.examples = 0
        self.hits, self.true, self.predicted = np.zeros((3, len(labels)), dtype=np.int64)

    def add(self, example: MultilabelExample, prediction: p.MultilabelPrediction) -> base.Judgement:
        """Count each label; the cost is the mean cross-entropy of all of them."""
        truth, predicted = self._encode(example.labels), self._encode(prediction.labels)
        self.examples += 1
        self.hits += truth & predicted
        self.true += truth
        self.predicted += predicted
        self.calibration.add(np.array([*prediction.probabilities.values()]), truth)
        misses = self._misses(example, prediction)
        loss, worst = -float(np.log(np.maximum(1 - misses, LEAST)).mean()), float(misses.max())
        return base.Judgement(loss, worst if worst >= base.SURE else None)

    def show(
        self, example: MultilabelExample, prediction: p.MultilabelPrediction
    ) -> s.ReportExample:
        """Show the texts with the labels that are furthest from the truth."""
        furthest = np.argsort(-self._misses(example, prediction), kind="stable")[:LABELS]
        labels = example.labels or ()
        answers = [
            s.ReportGuess(name, prediction.probabilities[name], name in labels)
            for name in (self.labels[index] for index in furthest)
        ]
        return _shown(example, ", ".join(labels) or "no label", answers)

    def baseline(self) -> Metrics:
        """Compute the metrics of the best constant set of labels."""
        answer = constant_labels(self.true, self.examples)
        hits = np.where(answer, self.true, 0)
        return metrics.multilabel_metrics(hits, self.true + answer * self.examples - 2 * hits)

    def sections(self) -> list[s.Section]:
        """Build the rates of each label and the reliability curve."""
        table = base.rates_table("label", self.labels, self.hits, self.true, self.predicted)
        return [table, *self.reliability()]

    def _encode(self, labels: tuple[str, ...] | None) -> NDArray[np.bool_]:
        names = set(labels or ())
        return np.array([name in names for name in self.labels])

    def _misses(
        self, example: MultilabelExample, prediction: p.MultilabelPrediction
    ) -> NDArray[np.float64]:
        """Return the distance of each label's probability from 1 where it holds, else from 0."""
        chances = np.array(list(prediction.probabilities.values()), dtype=np.float64)
        return np.where(self._encode(example.labels), 1 - chances, chances)


class ScoreAnalysis(base.TaskAnalysis[TextExample, p.ScorePrediction]):
    """Predicted against true numbers, and the residuals: 16 bytes of each example are kept."""

    grade_name, cost_name = None, "squared error"

    def __init__(self) -> None:
        super().__init__()
        self._truth, self._predicted = array("d"), array("d")

    def add(self, example: TextExample, prediction: p.ScorePrediction) -> base.Judgement:
        """Keep both numbers; the cost is the squared error."""
        self._truth.append(float(required(example.label, example.where)))
        self._predicted.append(prediction.score)
        return base.Judgement((self._truth[-1] - prediction.score) ** 2)

    def show(self, example: TextExample, prediction: p.ScorePrediction) -> s.ReportExample:
        """Show the texts with the true and the predicted number."""
        scores = float(required(example.label, example.where)), prediction.score
        true, predicted = map(s.number_format(scores), scores)
        return _shown(example, f"{true}, predicted {predicted}", [])

    def baseline(self) -> Metrics:
        """Compute the metrics of the mean, whose squared error is the variance."""
        error = float(np.var(np.array(self._truth))) if self._truth else 0.0
        return {"spearman": 0.0, "pearson": 0.0, "mse": error}

    def sections(self) -> list[s.Section]:
        """Build the scatter plots and the quantiles of the residuals."""
        truth, predicted = np.array(self._truth), np.array(self._predicted)
        residuals = predicted - truth
        low, high = float(truth.min()), float(truth.max())
        # Both axes have one range, so that the diagonal is where predictions are right.
        ends = min(low, float(predicted.min())), max(high, float(predicted.max()))
        sample = slice(None, None, -(-len(truth) // POINTS))
        x, y, errors = (values[sample].tolist() for values in (truth, predicted, residuals))
        diagonal, level = ((ends[0], ends[0]), (ends[1], ends[1])), ((low, 0.0), (high, 0.0))
        note = f"{len(x):,} of {len(truth):,} examples." if len(x) < len(truth) else ""
        sizes, quantiles = np.abs(residuals), np.quantile(residuals, [0.05, 0.5, 0.95]).tolist()
        rows: list[list[s.Cell]] = [
            ["mean (bias)", float(residuals.mean())],
            ["mean absolute", float(sizes.mean())],
            ["root mean square", float(np.sqrt(np.square(residuals).mean()))],
            ["5th percentile", quantiles[0]],
            ["median", quantiles[1]],
            ["95th percentile", quantiles[2]],
            ["maximum absolute", float(sizes.max())],
        ]
        return [
            s.Scatter("Predicted against true", "true", "predicted", x, y, diagonal, note),
            s.Scatter("Residuals", "true", "predicted − true", x, errors, level, note),
            s.TableSection("Residuals: predicted − true", ["", "value"], rows),
        ]


Outcome = Literal[
    "right", "other type", "other boundary", "other type and boundary", "missed", "spurious"
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def outcomes(truth: Many[Chunk], predicted: Many[Chunk]) -> list[tuple[Chunk, Outcome]]:
    """List every entity with its outcome; spurious ones are predicted, all others true.

    Each entity is paired at most once: with the same words first, then with shared words, an entity
    of the same type before others.
    """
    pairs: list[tuple[Chunk, Outcome]] = []
    unmatched, free = list(truth), list(predicted)
    # The outcomes of pairs, the best first: by the same words, then by the same type.
    agreements = itertools.product((True, False), repeat=2)
    for outcome, (same_words, same_type) in zip(OUTCOMES[:4], agreements, strict=True):
        for chunk in list(unmatched):
            candidates = (
                other
                for other in free
                if chunk.begin < other.end
                and other.begin < chunk.end
                and ((chunk.begin, chunk.end) == (other.begin, other.end)) is same_words
                and (chunk.type == other.type) is same_type
            )
            match = next(candidates, None)
            if match is not None:
                unmatched.remove(chunk)
                free.remove(match)
                pairs.append((chunk, outcome))
    missed = [(chunk, "missed") for chunk in unmatched]
    return [*pairs, *missed, *((chunk, "spurious") for chunk in free)]  # type: ignore[list-item]


class TagAnalysis(DecisionAnalysis[TagExample, TagPrediction]):
    """Outcomes of entities, confusion of tags, and calibration."""

    grade_name, cost_name = "F1 of the sentence", "cross-entropy of the sentence"
    calibrated = "tags"

    def __init__(self, task: TaggingTask, labels: Many[str]) -> None:
        super().__init__(labels)
        self._task, self._entities = task, task.spells(labels)
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()

    def decide(self, example: TagExample, prediction: TagPrediction) -> tuple[Any, ...]:
        """Return the tags of the words, and count the outcomes of entities."""
        gold, tags = self._task.gold_tags(example, self.labels), prediction.tags
        if self._entities:
            pairs = outcomes(chunks(gold), chunks(tags))
            self.outcomes.update((chunk.type, outcome) for chunk, outcome in pairs)
        truth, predicted = ([self._index[tag] for tag in row] for row in (gold, tags))
        return truth, predicted, prediction.probabilities

    def show(self, example: TagExample, prediction: TagPrediction) -> s.ReportExample:
        """Show the sentence with its wrongly tagged words marked, and the tags of the worst."""
        gold, tags = self._task.gold_tags(example, self.labels), prediction.tags
        words = example.words
        top = prediction.probabilities.max(1) if len(words) else np.zeros(0)
        errors = [index for index, (a, b) in enumerate(zip(gold, tags, strict=True)) if a != b]
        worst = sorted(errors, key=lambda index: -top[index])[: base.GUESSES]
        answers = [s.ReportGuess(f"{words[i]}: {tags[i]}", float(top[i]), False) for i in worst]
        truth = ", ".join(f"{words[index]}: {gold[index]}" for index in worst) or "as predicted"
        pieces: list[str | s.Marked] = []
        for index, word in enumerate(words):
            pieces += [s.Marked(word) if index in errors else word, " "]
        return s.ReportExample(pieces, truth, answers, example.where)

    def baseline(self) -> Metrics:
        """Compute the accuracy of the most frequent tag; its F1 is 0 where tags spell entities."""
        return {**super().baseline(), **({"f1": 0.0} if self._entities else {})}

    def sections(self) -> list[s.Section]:
        """Build the outcomes of entities, the confusion of tags and the reliability curve."""
        if not self._entities:
            return super().sections()
        types = sorted({kind for kind, _ in self.outcomes})
        rows: list[Many[s.Cell]] = [
            [name, *(self.outcomes[name, outcome] for outcome in OUTCOMES)] for name in types
        ]
        total = [sum(self.outcomes[name, outcome] for name in types) for outcome in OUTCOMES]
        note = "Entities are counted by their true type, spurious ones by the predicted type."
        columns, rows = ["type", *OUTCOMES], [*rows, ["all", *total]]
        table = s.TableSection("Outcomes of entities", columns, rows, total=True, note=note)
        return [table, *super().sections()]


KINDS = {
    "right": "exactly a right answer",
    "right to give none": "there is no answer, and none was given",
    "boundary wrong": "shares words with a right answer",
    "another place": "shares no word with a right answer",
    "no answer given": "there is an answer",
    "answer though there is none": "there is no answer",
}
"""The kinds of predictions with their meaning."""
NONE = "(no answer)"
AROUND = 200
"""Number of characters of the context that are shown on each side of an answer."""


class AnswerAnalysis(base.TaskAnalysis[Question, AnswerPrediction]):
    """Kinds of errors and calibration."""

    grade_name, cost_name = "F1", "confidence × (1 − F1)"

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def add(self, example: Question, prediction: AnswerPrediction) -> base.Judgement:
        """Doubt the label where a sure answer shares no word with a right one."""
        grade, confidence = grade_answer(prediction.text, example), prediction.confidence
        if not example.answers:
            kind = "answer though there is none" if prediction.text else "right to give none"
        elif grade.exact:
            kind = "right"
        else:
            kind = "boundary wrong" if grade.f1 else "another place"
            kind = kind if prediction.text else "no answer given"
        self.kinds[kind] += 1
        self.calibration.add(confidence, bool(grade.exact))
        sure = confidence >= base.SURE and not grade.f1
        return base.Judgement(confidence * (1 - grade.f1), confidence if sure else None)

    def show(self, example: Question, prediction: AnswerPrediction) -> s.ReportExample:
        """Show the question, the surroundings of the answer, and other spans."""
        answers = {prediction.text: prediction.confidence}
        for span in prediction.spans:
            answers.setdefault(span.text, span.probability)
        best = [
            s.ReportGuess(text or NONE, confidence, bool(grade_answer(text, example).exact))
            for text, confidence in answers.items()
        ]
        truth = " / ".join(sorted({text for text, _ in example.answers})) or NONE
        context, start, end = example.context, prediction.start, prediction.end
        pieces: list[str | s.Marked] = [base.clip(context)]
        if start is not None and end is not None:  # the surroundings of the answer
            begin, stop = max(0, start - AROUND), end + AROUND
            pieces = [
                ("… " if begin else "") + context[begin:start],
                s.Marked(context[start:end]),
                context[end:stop] + (" …" if stop < len(context) else ""),
            ]
        pieces.insert(0, f"{example.question} ‖ ")
        return s.ReportExample(pieces, truth, best[: base.GUESSES], example.where)

    def baseline(self) -> Metrics:
        """Return the share of questions without an answer, for which giving none is right."""
        none = self.kinds["right to give none"] + self.kinds["answer though there is none"]
        share = none / max(1, self.kinds.total())
        return {"em": share, "f1": share, "f1_best": share} if 0 < share < 1 else {}

    def sections(self) -> list[s.Section]:
        """Build the counts of each kind of error and the reliability curve."""
        total = max(1, self.kinds.total())
        rows: list[Many[s.Cell]] = [
            [kind, meaning, self.kinds[kind], s.percentage(self.kinds[kind] / total)]
            for kind, meaning in KINDS.items()
        ]
        columns = ["kind", "", "questions", "share"]
        return [s.TableSection("Answers by kind", columns, rows), *self.reliability()]


RANKS = (1, 2, 3, 4, 6, 11, 21, 51, 101)
"""The first ranks of ranges that are counted together; the last range is open."""
MAX_RANK = 100
"""The last rank of the curves."""


class RankingAnalysis(base.TaskAnalysis[RankExample, RankPrediction]):
    """Ranks of relevant documents: 16 bytes of each document, and the queries, are kept.

    The documents of a query are one ranking, wherever they are in the data. Of documents with
    equal scores the relevant ones stand last.
    """

    grade_name, cost_name, calibrated = "nDCG@10", "nDCG@10 that is missing", "documents"

    def __init__(self) -> None:
        super().__init__()
        self.rankings = Rankings()

    def add(self, example: RankExample, prediction: RankPrediction) -> base.Judgement:
        """Compute 1 − nDCG@10, and how far the first document leads over the relevant ones.

        The cost is 0 without a relevant document, since every order is as good.
        """
        labels = np.array(required(example.labels, example.where))
        logits = np.array(prediction.logits)
        relevant, chances = labels > 0, sigmoid(logits)
        self.calibration.add(chances, relevant)
        for logit, label in zip(prediction.logits, labels.tolist(), strict=True):
            self.rankings.add(example.query, logit, label)
        cost = 1 - ndcg(logits, labels) if labels.any() else 0.0
        lead = float(chances.max() - chances.max(where=relevant, initial=0.0))
        return base.Judgement(cost, lead if lead > 0 and chances.max() >= base.SURE else None)

    def show(self, example: RankExample, prediction: RankPrediction) -> s.ReportExample:
        """Show the query with the first documents and the first relevant one."""
        labels = required(example.labels, example.where)
        chances = sigmoid(np.array(prediction.logits))
        ranking = [ranked.index for ranked in prediction.ranking]
        best = next(((n, index) for n, index in enumerate(ranking, 1) if labels[index] > 0), None)
        indices, truth = ranking[: base.GUESSES], "no relevant document"
        if best is not None:
            rank, index = best
            indices += [] if index in indices else [index]
            truth = f"{base.clip(example.documents[index])} (place {rank:,} of {len(ranking):,})"
        answers = [
            s.ReportGuess(base.clip(example.documents[i]), float(chances[i]), bool(labels[i] > 0))
            for i in indices
        ]
        return s.ReportExample([base.clip(example.query)], truth, answers, example.where)

    def baseline(self) -> Metrics:
        """Compute the metrics of equal scores, which are the metrics of a random order."""
        equal = {
            query: (array("d", bytes(8 * len(labels))), labels)
            for query, (_, labels) in self.rankings.by_query.items()
        }
        return Rankings(equal).metrics() if equal else {}

    def sections(self) -> list[s.Section]:
        """Build recall by rank, the first relevant ranks and the reliability curve."""
        queries = list[tuple[NDArray[np.int64], int]]()  # ranks of relevant documents, and of all
        for scores, labels in self.rankings.by_query.values():
            relevant = np.frombuffer(labels) > 0
            order = np.lexsort((relevant, -np.frombuffer(scores)))
            queries.append((1 + np.flatnonzero(relevant[order]), len(order)))
        answerable = [(ranks, count) for ranks, count in queries if len(ranks)]
        ranges = np.searchsorted(RANKS, [ranks[0] for ranks, _ in answerable], "right")
        spans = zip(RANKS, (stop - 1 for stop in RANKS[1:]), strict=False)
        names = [f"{low}" if low == high else f"{low} to {high}" for low, high in spans]
        names.append("beyond 100")
        counts = dict(zip(names, np.bincount(ranges, minlength=10)[1:].tolist(), strict=True))
        counts["no relevant document"] = len(queries) - len(answerable)
        rows: list[Many[s.Cell]] = [
            [name, count, s.percentage(count / len(queries))]
            for name, count in counts.items()
            if count
        ]
        note = "Of documents with equal scores the relevant ones stand last."
        title, columns = "The first relevant document of a query", ["place", "queries", "share"]
        table = s.TableSection(title, columns, rows, note=note)
        if not answerable:
            return [table, *self.reliability()]
        max_rank = min(MAX_RANK, max(count for _, count in answerable))
        cutoffs = np.arange(1, max_rank + 1)
        hits, recall, chance = np.zeros((3, max_rank))
        for ranks, count in answerable:
            # A query is a hit from the rank of its first relevant document on.
            hits += cutoffs >= ranks[0]
            recall += np.searchsorted(ranks, cutoffs, "right") / len(ranks)
            # In a random order the first k of n documents hold k / n of the relevant ones.
            chance += np.minimum(cutoffs / count, 1)
        sums = {
            "queries with a relevant document": hits,
            "relevant documents": recall,
            "relevant documents, in a random order": chance,
        }
        x, total = cutoffs.tolist(), len(answerable)
        lines = [s.Line(name, x, (shares / total).tolist()) for name, shares in sums.items()]
        note = f"Means over queries with a relevant document: {total:,}."
        title = "What the first places hold"
        curves = s.Curves(title, "down to this place", "share", lines, percent=True, note=note)
        return [curves, table, *self.reliability()]
