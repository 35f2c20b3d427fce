"""Extractive question answering: the answer is a span of the context (Devlin et al. 2018).

[CLS] question [SEP] context [SEP] goes through the encoder, and one dense layer gives each token
two scores: that the answer begins with it, and that it ends there. No answer is the span of [CLS]
alone. A context that is too long is read in overlapping windows. Examples are `Question`s.

Source: google-research/bert run_squad.py for all that the paper leaves open: a window without the
whole answer is trained to give [CLS], in SQuAD 1.1 too; the score of no answer is the minimum over
the windows. The answer is cut from the context at the characters of its tokens; Google's code
searches the tokens' text among the words of the context, with nearly always the same result.

The score of a span is that of its start plus that of its end. Where windows overlap, a span counts
in the window in which its first token has the most context. There are two differences to that code,
and both only add spans:

- That code combines the 20 best starts and the 20 best ends of a window. Here every start is
  combined with every end within the longest answer, so the best spans are the best of all.
- It drops a span that the window with the most context cuts in two. Here the next window counts.
"""

from __future__ import annotations

import itertools
import unicodedata
from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch, SpanTargets
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, Finding, setting
from bothways.core.files import local_path
from bothways.core.terminal import listed
from bothways.core.training_module import Loss
from bothways.data.tables import HUB, Table, TableRow, holds_lines
from bothways.data.text_io import suffix_of
from bothways.model.config import Deep
from bothways.model.heads import Head, SpanHead
from bothways.objectives.losses import span_loss
from bothways.tasks import base
from bothways.tasks.columns import TableTask
from bothways.tasks.predictions import AnswerPrediction, AnswerSpan
from bothways.tasks.question_answering.examples import (
    ANYWHERE,
    TABLE,
    Question,
    QuestionColumns,
    best_threshold,
    grade_answer,
    located,
    question_of,
    read_squad,
)
from bothways.tasks.text_checks import check_examples, check_rows, report_rows
from bothways.tasks.text_task import windows
from bothways.text.template import assemble
from bothways.text.tokenizer import Encoded, Tokenizer

FAR = 1e6
"""The amount that BigBird subtracts from the scores of the question's tokens."""

Results = base.Results[Question, AnswerPrediction]


@dataclass(frozen=True)
class EncodedQuestion(base.EncodedExample):
    """The windows of a question's context.

    Attributes:
        context: the context in tokens.
        chunks: the tokens of the context in each sequence.
        begin: the position of the first token of the context in each sequence.
    """

    context: Encoded
    chunks: tuple[range, ...]
    begin: int


class QuestionAnswerer(base.TaskModel[Question, AnswerPrediction]):
    """A question-answering task with a model that has the head "span"; see `TaskModel`."""

    task: QuestionAnsweringTask

    scale = "span"
    loss_name = "span"

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of windows of questions whose answer is known."""
        weight = batch.target("span", SpanTargets).weight
        return {"span": float(torch.as_tensor(weight).sum())}

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the mean cross-entropy of the first and the last token."""
        targets = batch.target("span", SpanTargets)
        return {"span": span_loss(scores, batch.layout, targets)}

    def scores(self, batch: Batch) -> Float[Tensor, "tokens 2"]:
        """Return the scores of each token as a start and as an end."""
        result = self.model.read("span", batch)
        if not isinstance(self.model.config.readout.span, Deep):
            return result
        mask = batch.global_attention_mask
        assert mask is not None
        # The tokens of the question and the separator after them, but not [CLS].
        question = (torch.cat([mask[:1], mask[:-1]]) | mask) & (batch.layout.positions > 0)
        return result - FAR * question[:, None].to(result.dtype)

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return the scores of each window `(its tokens, 2)`."""
        scores = self.scores(batch).float().cpu().numpy()
        return np.split(scores, torch.as_tensor(batch.layout.lengths).cumsum(0)[:-1].tolist())

    def decode(
        self, example: Question, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> AnswerPrediction:
        """Return the best spans of all windows, and the best one or none as the answer."""
        assert isinstance(encoded, EncodedQuestion)
        begin, chunks = encoded.begin, encoded.chunks
        pairs = zip(outputs, chunks, strict=True)
        of_context = [output[begin : begin + len(chunk)] for output, chunk in pairs]
        table = span_scores(of_context, chunks, self.task.longest)
        # The characters of spans of tokens with their scores; of equal texts the first.
        distinct: dict[str, tuple[int, int, float]] = {}
        for first, last, score in best_spans(table, self.task.n_best):
            start, end = characters(example.context, encoded.context.offsets, first, last)
            distinct.setdefault(example.context[start:end], (start, end, score))
        distinct.pop("", None)
        spans, null = list(distinct.values()), min(float(output[0].sum()) for output in outputs)
        difference = null - spans[0][2] if spans else 0.0
        considered = [score for _, _, score in spans]
        if self.task.threshold is not None:
            considered.append(null)
        # A softmax over the best spans, and over no answer where a threshold permits it
        probabilities = base.softmax(np.array(considered)).tolist() if considered else [1.0]
        answers = tuple(
            AnswerSpan(example.context[start:end], start, end, score, probability)
            for (start, end, score), probability in zip(spans, probabilities, strict=False)
        )
        answer: tuple[str, int | None, int | None, float] = ("", None, None, probabilities[-1])
        if answers and (self.task.threshold is None or difference <= self.task.threshold):
            best = answers[0]
            answer = (best.text, best.start, best.end, best.probability)
        return AnswerPrediction(example.id, *answer, difference, answers)


@dataclass(frozen=True)
class QuestionAnsweringTask(TableTask[Question, AnswerPrediction]):
    """The part of a context that answers a question, or no answer.

    Weights are selected by "f1_best", the F1 at the best threshold: it equals F1 where every
    question has an answer; where some have none, it needs no threshold beforehand.

    Attributes:
        columns: the columns of a table.
        query: maximum number of tokens of a question; at most half of the room.
        stride: tokens from one window to the next.
        longest: maximum number of tokens of an answer.
        n_best: number of answers in a prediction.
        threshold: no answer is given where its score exceeds the best span's by more than
            this. None: every question gets an answer. Chosen on dev data that has questions without
            one.
    """

    aliases = "answering extractive-qa qa question-answering squad"
    model_class = QuestionAnswerer
    metric = "f1_best"
    metrics = base.directions("f1", "em", "f1_best")
    length = 384
    window = 1024
    long_texts = "windows"
    example_input: ClassVar[Any] = {
        "question": "Who wrote it?",
        "context": "Ada Lovelace wrote it in 1843.",
    }
    truncation_advice: ClassVar[tuple[str, str]] = (
        "Long contexts are read in windows; to read more of a question, set task.query.",
    ) * 2

    column_table = TABLE

    columns: QuestionColumns = QuestionColumns()
    query: int = 64
    stride: int = 128
    longest: int = 30
    n_best: int = 20
    threshold: float | None = None
    kind: Literal["answer"] = "answer"

    def __post_init__(self) -> None:
        require_at_least(
            1, query=self.query, stride=self.stride, longest=self.longest, n_best=self.n_best
        )

    def read(
        self, source: str, columns: QuestionColumns | None = None, *, labelled: bool = True
    ) -> base.Reading[Question]:
        path = local_path(source)
        is_json = not source.startswith(HUB) and suffix_of(path) == ".json"
        if not is_json or (path.is_file() and holds_lines(source)):
            return super().read(source, columns, labelled=labelled)
        requested, unused = columns or QuestionColumns(), list[str]()
        fields = replace(requested, answers=requested.answers if labelled else None)
        questions = read_squad(source, fields, unused)
        return base.Reading(self.with_columns(columns or self.columns), questions, unused=unused)

    def open(self, source: str, columns: Any, labelled: bool) -> tuple[Table, Any]:
        """Open a table whose rows are numbered where they have no id."""
        table, selected = super().open(source, columns, labelled)

        def numbered(row: TableRow, number: int) -> TableRow:
            return replace(row, values={selected.id: number, **row.values})

        # Unlike a generator, `map` goes on after a row that cannot be read, and does not count it.
        rows = map(numbered, table.rows, itertools.count(1))
        return replace(table, rows=rows), selected

    def parse(self, row: base.Row, columns: QuestionColumns, where: str) -> Question:
        return question_of(row, columns, where)

    def from_texts(self, texts: tuple[str, ...], *, where: str = "an example") -> Question:
        if len(texts) != 2:
            needs = 'a question with its context: {"question": "…", "context": "…"}'
            raise self.wrong_texts(texts, where, needs)
        return Question(where.rpartition(" ")[2], *texts, where=where)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Return the head for spans, which has no dropout."""
        if dropout is not None:
            message = "the head of this task has none"
            raise ConfigError(message, where="dropout", fix="Leave it out.")
        return (SpanHead(),)

    def stratum(self, example: Question) -> Hashable:
        return example.impossible

    def texts(self, example: Question) -> tuple[str, ...]:
        return example.question, example.context

    def shared(self, example: Question) -> str:
        return example.context

    def check(self, train: Many[Question], dev: Many[Question]) -> list[Finding]:
        twice = list[str]()
        for some in (train, dev):
            counts = Counter(example.id for example in some)
            twice += [example.where for example in some if counts[example.id] > 1]
        bare = "question(s) has|have no answer and is|are not marked as impossible"
        fix = "Fix these questions or remove them."
        # Dev questions without a right answer in the context: no prediction can be exact.
        lost = [
            f"{e.where} ({e.answers[0][0][:40]!r})"
            for e in dev
            if e.answers and not any(text.strip() in e.context for text, _ in e.answers)
        ]
        fault = f"of {len(dev)} dev questions has|have no answer in their context, but count"
        return [
            *check_examples(train, dev, self.texts, lambda e: True, kind="questions"),
            *report_rows("rows", twice, "question(s) shares|share their id with others", fix),
            *check_rows([*train, *dev], bare, lambda e: not e.annotated, fix),
            *_check_places(train),
            *report_rows("labels", lost, fault, severity="warning"),
            *_check_impossible(train, dev, self.threshold),
        ]

    def encode(
        self, examples: Many[Question], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedQuestion]:
        """Return the windows of each question; equal contexts are tokenized once."""
        texts = list(dict.fromkeys(example.context for example in examples))
        contexts = dict(zip(texts, tokenizer.encode_with_offsets(texts), strict=True))
        questions = tokenizer.encode([example.question for example in examples])
        template, results = tokenizer.template, list[EncodedQuestion]()
        room = length - template.pair
        for example, question in zip(examples, questions, strict=True):
            context, read = contexts[example.context], min(len(question), self.query, room // 2)
            # The tokens of the first answer, if any. The weight is 0 if it cannot be learned.
            span, weight = None, float(bool(example.impossible))
            if example.answers and not example.impossible:
                text, offset = example.answers[0]
                answer = text.strip()
                position = located(example.context, answer, offset + text.index(answer))
                if position is not None:
                    span = covering(context.offsets, position, position + len(answer))
                weight = float(span is not None)
            begin = len(template.first) + read + len(template.between)
            chunks, sequences = windows(len(context.ids), room - read, self.stride), []
            for chunk in chunks:
                bare = assemble(question[:read], context.ids[chunk.start : chunk.stop], template)
                positions = (0, 0)  # [CLS], for a span that is not whole in the window
                if span is not None and span[0] >= chunk.start and span[1] < chunk.stop:
                    positions = (begin + span[0] - chunk.start, begin + span[1] - chunk.start)
                start, end = (np.array([token], dtype=np.int64) for token in positions)
                targets = SpanTargets(start, end, np.array([weight], dtype=np.float32))
                # The question is global in Longformer.
                in_question = np.arange(len(bare)) < len(template.first) + read
                bare = replace(bare, targets={"span": targets}, global_attention_mask=in_question)
                sequences.append(bare)
            tokens, cut = len(question) + len(context.ids), len(question) - read
            windowed = (context, tuple(chunks), begin)
            results.append(EncodedQuestion(tuple(sequences), tokens, cut, *windowed))
        return results

    def score(self, results: Results, labels: Many[str]) -> base.Metrics:
        """Return exact match and F1; memory: seven numbers a question.

        Returns:
            "em" and "f1" of the predictions, and "f1_best", the F1 at the best threshold. With
            questions without an answer also "em_best", "threshold_best" (for F1), and the metrics
            of questions with ("_has") and without an answer ("_no").
        """
        numbers = array("d")
        for question, answer in results:
            base.required(question.annotated or None, question.where, "known answer")
            best, none = grade_answer(answer.best, question), grade_answer("", question)
            grade = best if answer.text else none
            numbers.extend((grade.exact, grade.f1, best.exact, best.f1, none.f1))
            numbers.extend((answer.null_difference, question.impossible is True))
        if not numbers:
            raise base.nothing_to_score("question")
        exact, f1, best_exact, best_f1, none_f1, difference, impossible = (
            np.array(numbers).reshape(-1, 7).T
        )
        # The threshold may deny an answer that was given, so it searches among the best answers
        no, (threshold, highest) = impossible > 0, best_threshold(difference, best_f1, none_f1)
        metrics = {"em": float(exact.mean()), "f1": float(f1.mean()), "f1_best": highest}
        if not no.any():
            return metrics
        metrics["em_best"] = best_threshold(difference, best_exact, none_f1)[1]
        metrics["threshold_best"] = threshold
        metrics["em_no"] = float(exact[no].mean())
        if not no.all():
            metrics |= {"em_has": float(exact[~no].mean()), "f1_has": float(f1[~no].mean())}
        return metrics

    def grade(self, example: Question, prediction: AnswerPrediction, labels: Many[str]) -> float:
        """Return the F1 with the nearest right answer."""
        return grade_answer(prediction.text, example).f1

    def tuned(self, results: Results, labels: Many[str], metric: str) -> QuestionAnsweringTask:
        """Return the task with the threshold of the best F1, if some questions have no answer."""
        best = self.score(results, labels).get("threshold_best")
        return self if best is None else replace(self, threshold=best)

    def baseline(self, examples: Many[Question]) -> base.Metrics:
        """Return the metrics of giving no answer, if that is right for some questions."""
        share = sum(example.impossible is True for example in examples) / max(1, len(examples))
        return {"f1": share, "em": share, "f1_best": share} if 0 < share < 1 else {}


def _check_places(train: Many[Question]) -> list[Finding]:
    """Report answers that are not in their context, or not where the data places them."""
    absent, moved = list[str](), list[str]()
    for example in train:
        for text, start in example.answers[:1]:
            expected = start + text.index(text.strip())
            position = located(example.context, text.strip(), expected)
            if position is None:
                absent.append(f"{example.where} ({text[:40]!r})")
            elif start != ANYWHERE and position != expected:
                moved.append(f"{example.where} ({text[:40]!r})")
    findings = []
    if absent:
        message = f"{len(absent)} of {len(train)} training answers are not in their context"
        if len(absent) == len(train):
            fix = "Fix these answers; there is nothing else to learn."
            findings.append(Finding("labels", "error", f"{message}: {listed(absent, 5)}", fix=fix))
        else:
            message = f"{message} and are skipped: {listed(absent, 5)}"
            findings.append(Finding("labels", "warning", message))
    fault = "training answer(s) does|do not begin at the given character; "
    fault += "the nearest occurrence is used"
    return findings + report_rows("labels", moved, fault, severity="note")


def _check_impossible(
    train: Many[Question], dev: Many[Question], threshold: float | None
) -> list[Finding]:
    in_train, in_dev = (sum(e.impossible is True for e in some) for some in (train, dev))
    missing = "there are {} questions without an answer, but no such {} questions: {}"
    findings = []
    if in_train or in_dev:
        shares = [
            f"{count / len(some):.1%} of the {name} questions"
            for name, some, count in (("training", train, in_train), ("dev", dev, in_dev))
            if some
        ]
        message = f"no answer is right for {' and '.join(shares)}"
        findings.append(Finding("balance", "note", message))
    if in_train == len(train):
        message, fix = "no training question has an answer", "Give questions that have one."
        findings.append(Finding("labels", "error", message, fix=fix))
    elif in_train and not in_dev and threshold is None:
        message = missing.format("training", "dev", "every question gets an answer")
        fix = f"Give dev data that has some, or set {setting('task.threshold', 0)}."
        findings.append(Finding("labels", "warning", message, "task.threshold", fix))
    if in_dev and not in_train:
        message = missing.format("dev", "training", "a model hardly learns to give none")
        findings.append(Finding("labels", "warning", message))
    return findings


Offsets = NDArray[np.int64]
Scores = NDArray[np.float32]


def covering(offsets: Offsets, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and the last token that share a character with `[start, stop)`, if any.

    Args:
        offsets: begin and end of each token in characters, in order `(tokens, 2)`.
    """
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], stop, side="left")) - 1
    return (first, last) if first <= last else None


def characters(text: str, offsets: Offsets, first: int, last: int) -> tuple[int, int]:
    """Return the characters of the tokens from `first` to `last`.

    White space at the ends is dropped. Combining marks that the tokenizer dropped stay with their
    letter.
    """
    start, stop = int(offsets[first, 0]), int(offsets[last, 1])
    while stop < len(text) and unicodedata.category(text[stop]).startswith("M"):
        stop += 1
    span = text[start:stop]
    return start + len(span) - len(span.lstrip()), stop - len(span) + len(span.rstrip())


def span_scores(scores: Many[Scores], chunks: Many[range], max_tokens: int) -> Scores:
    """Return the scores of all spans of a text `(tokens, longest)`.

    Entry `[i, n]` is the span of the n + 1 tokens from i on; −∞ if no window holds it. The longest
    span has `max_tokens`, or the tokens of the largest window.

    Args:
        scores: for each window `(its tokens, 2)`: of a start and of an end.
        chunks: the windows, which together are the whole text.
    """
    tokens = chunks[-1].stop
    max_tokens = min(max_tokens, max(map(len, chunks)))
    result = np.full((tokens, max_tokens), -np.inf, dtype=np.float32)
    best_scores = np.full((tokens, max_tokens), -np.inf)  # of each span in its best window
    for score, chunk in zip(scores, chunks, strict=True):
        size, rows = len(chunk), slice(chunk.start, chunk.stop)
        if not size:
            continue
        # Row i of the view is ends[i : i + longest]: the ends of all spans that begin at i.
        ends = np.concatenate([score[:, 1], np.full(max_tokens - 1, -np.inf, dtype=np.float32)])
        spans = np.lib.stride_tricks.sliding_window_view(ends, max_tokens)[:size] + score[:, :1]
        # As in run_squad.py: tokens on the poorer side, and of equal ones the larger window
        context = np.minimum(np.arange(size), np.arange(size)[::-1]) + 0.01 * size
        better = (context[:, None] > best_scores[rows]) & (spans > -np.inf)
        result[rows][better] = spans[better]
        best_scores[rows] = np.where(better, context[:, None], best_scores[rows])
    return result


def best_spans(table: NDArray[np.float32], count: int) -> list[tuple[int, int, float]]:
    """Return the best spans of `span_scores` as (first token, last token, score), best first.

    Of equal ones, the span that begins first precedes.
    """
    flat, max_tokens = table.ravel(), table.shape[1]
    positions = np.flatnonzero(flat > -np.inf)
    if count < len(positions):
        positions = positions[flat[positions] >= np.partition(flat[positions], -count)[-count]]
    selected = positions[np.argsort(-flat[positions], kind="stable")][:count]
    # A flat place i · longest + n is the span from token i to token i + n.
    starts, more = np.divmod(selected, max_tokens)
    columns = (starts, starts + more, flat[selected])
    return list(zip(*(column.tolist() for column in columns), strict=True))
