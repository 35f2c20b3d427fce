"""Extractive question answering: the answer is a span of the context (Devlin et al. 2018, sections 4.2 and 4.3).

Idea: [CLS] question [SEP] context [SEP] goes through the encoder, and one dense layer gives each token two scores: that the
answer begins with it, and that it ends there. No answer is the span of [CLS] alone. A context that is too long is read in
windows that overlap. Data it reads: `Question`s.

Source: google-research/bert run_squad.py for all that the paper leaves open: a window without the whole answer is trained to
say [CLS], in SQuAD 1.1 too; the score of no answer is the least over the windows. `tasks.spans` tells where decoding differs.
The answer is cut from the context as it stands, at the characters of its tokens; Google's code looks for the tokens' text among
the words of the context, nearly always to the same end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, DataError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.sequence import Ids, Sequence
from bothways.core.targets import SpanTargets
from bothways.model.head_config import Deep, Head, SpanHead
from bothways.model.model import Model
from bothways.objectives.losses import span_loss
from bothways.tasks.predictions import AnswerPrediction, AnswerSpan
from bothways.tasks.question_answering.answer_spans import (
    AnswerWindow,
    answer_windows,
    best_spans,
    characters,
    covering,
    span_scores,
)
from bothways.tasks.question_answering.checks import check_questions
from bothways.tasks.question_answering.examples import (
    SQUAD,
    Question,
    QuestionColumns,
    located,
    open_questions,
    tokenized,
)
from bothways.tasks.question_answering.metrics import Graded, grade
from bothways.tasks.task import Direction, Metrics, Reading, Task
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.text.template import Template, assemble
from bothways.text.tokenizer import Encoded, Tokenizer


@dataclass(frozen=True)
class QuestionAnsweringTask(Task[Question, AnswerPrediction]):
    """The part of a context that answers a question, or that there is none.

    Weights are chosen by "f1_best", the F1 at the best threshold: it is the F1 where every question has an answer, and where
    some have none it needs no threshold to be chosen beforehand.

    Attributes:
        columns: where the texts are, in a table.
        query: tokens of a question that are read; half of what fits, if that is less.
        stride: tokens from one window to the next.
        longest: tokens of an answer.
        n_best: answers that a prediction names.
        unfound: what to do with a training question whose answer does not stand in its context: "skip" trains without it.
        threshold: no answer is given where its score is higher than that of the best span by more than this. None: every
            question gets an answer. Chosen on dev data, if that has questions without one.
    """

    metric: ClassVar[str] = "f1_best"
    length: ClassVar[int] = 384
    window: ClassVar[int] = 1024

    columns: QuestionColumns = SQUAD
    query: int = 64
    stride: int = 128
    longest: int = 30
    n_best: int = 20
    unfound: Literal["skip", "error"] = "skip"
    threshold: float | None = None
    kind: Literal["answer"] = "answer"

    def __post_init__(self) -> None:
        require_at_least(
            1, query=self.query, stride=self.stride, longest=self.longest, n_best=self.n_best
        )

    def read(
        self, source: str, asked: QuestionColumns | None = None, *, labelled: bool = True
    ) -> Reading[Question]:
        """As `Definition.read`; errors as `squad.open_questions`."""
        columns = asked or self.columns
        return Reading(
            self.with_columns(columns), *open_questions(source, columns, labelled=labelled)
        )

    def labels(self, examples: Iterable[Question]) -> tuple[str, ...]:
        """None: the outputs are tokens."""
        return ()

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """Two scores a token. ConfigError for a dropout: this head has none."""
        if dropout is not None:
            raise ConfigError(
                "the head of this task has none", where="dropout", fix="Leave it out."
            )
        return (SpanHead(),)

    def directions(self, labels: Many[str]) -> Mapping[str, Direction]:
        """Exact match, F1, and F1 at the best threshold."""
        return {"f1": "highest", "em": "highest", "f1_best": "highest"}

    def texts(self, example: Question) -> tuple[str, ...]:
        """The question and the context."""
        return example.question, example.context

    def shared(self, example: Question) -> str:
        """The context."""
        return example.context

    def check(self, train: Many[Question], dev: Many[Question]) -> list[Finding]:
        """Texts, ids, answers, and what training and development data share."""
        return check_questions(train, dev, self.unfound, self.threshold)

    def baseline(self, train: Many[Question], scored: Many[Question]) -> Metrics:
        """What giving no answer reaches; nothing where all questions are alike in that."""
        share = sum(example.impossible is True for example in scored) / max(1, len(scored))
        return {"f1": share, "em": share, "f1_best": share} if 0 < share < 1 else {}

    def answer(self, prediction: AnswerPrediction) -> str:
        """The text."""
        return prediction.text

    def encode(
        self, examples: Many[Question], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """The windows of each question; a context is tokenized once for all of its questions."""
        return self.inputs(examples, tokenized(examples, tokenizer), tokenizer, length)

    def inputs(
        self,
        examples: Many[Question],
        contexts: Mapping[str, Encoded],
        tokenizer: Tokenizer,
        length: int,
    ) -> list[EncodedExample]:
        """As `encode`, with the contexts in tokens."""
        questions = tokenizer.encode([example.question for example in examples])
        return [
            self._input(example, question, contexts[example.context], tokenizer, length)
            for example, question in zip(examples, questions, strict=True)
        ]

    def _input(
        self, example: Question, question: Ids, context: Encoded, tokenizer: Tokenizer, length: int
    ) -> EncodedExample:
        read, parts = self.plan(len(question), len(context.ids), length - tokenizer.template.pair)
        (span, weight), begin = _target(example, context), _begin(tokenizer.template, read)
        sequences = []
        for part in parts:
            bare = assemble(
                question[:read], context.ids[part.start : part.stop], tokenizer.template
            )
            start, end = (
                np.array([place], dtype=np.int64) for place in _positions(span, part, begin)
            )
            targets = SpanTargets(start, end, np.array([weight], dtype=np.float32))
            global_tokens = (
                np.arange(len(bare)) < len(tokenizer.template.first) + read
            )  # the question, in Longformer
            sequences.append(
                Sequence(
                    bare.ids, bare.segments, {"span": targets}, global_attention_mask=global_tokens
                )
            )
        return EncodedExample(
            tuple(sequences), len(question) + len(context.ids), len(question) - read
        )

    def plan(self, question: int, context: int, room: int) -> tuple[int, list[AnswerWindow]]:
        """How many tokens of a question are read, and the windows of its context, from their numbers of tokens."""
        read = min(question, self.query, room // 2)
        return read, answer_windows(context, room - read, self.stride)

    def task(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> QuestionAnswerer:
        """With a model that has the head "span"."""
        return QuestionAnswerer(self, model, tokenizer, labels, length)


class QuestionAnswerer(TaskLearner[Question, AnswerPrediction]):
    """A model with the head "span", as a task."""

    definition: QuestionAnsweringTask
    _contexts: Mapping[str, Encoded] = MappingProxyType({})
    """Of the examples that were encoded last, since they are decoded next; else of the one that was decoded last."""

    def encode(self, examples: Many[Question]) -> list[EncodedExample]:
        """As the definition has it."""
        self._contexts = tokenized(examples, self.tokenizer, self._contexts)
        return self.definition.inputs(examples, self._contexts, self.tokenizer, self.length)

    def weights(self, batch: Batch) -> dict[str, float]:
        """The number of windows of questions whose answer is known."""
        return {"span": float(cast(Tensor, _spans(batch).weight).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """The cross-entropy of the first and the last token, averaged."""
        return {"span": span_loss(self.scores(batch), batch.layout, _spans(batch))}

    def scores(self, batch: Batch) -> Float[Tensor, "tokens 2"]:
        """The scores of each token as a start and as an end."""
        result: Tensor = self.model.heads["span"](self.model.encoder(batch).last)
        alone = isinstance(self.model.config.readout.span, Deep)
        return result - FAR * _question(batch)[:, None].to(result.dtype) if alone else result

    def outputs(self, batch: Batch) -> list[Output]:
        """The scores of each window `(its tokens, 2)`."""
        scores = self.scores(batch).float().cpu().numpy()
        return np.split(scores, torch.as_tensor(batch.layout.lengths).cumsum(0)[:-1].tolist())

    def decode(self, example: Question, outputs: Many[Output]) -> AnswerPrediction:
        """The best spans of all windows, and the best one or none as the answer."""
        context, template = self._tokens(example.context), self.tokenizer.template
        (question,) = self.tokenizer.encode([example.question])
        read, parts = self.definition.plan(
            len(question), len(context.ids), self.length - template.pair
        )
        begin = _begin(template, read)
        table = span_scores(
            [output[begin : len(output) - len(template.last)] for output in outputs],
            parts,
            self.definition.longest,
        )
        null = min(float(output[0].sum()) for output in outputs)
        found = _texts(example.context, context, best_spans(table, self.definition.n_best))
        return self._prediction(example, found, null)

    def _tokens(self, context: str) -> Encoded:
        if (
            context not in self._contexts
        ):  # it was encoded elsewhere; questions on one context mostly follow each other
            self._contexts = {context: self.tokenizer.encode_with_offsets([context])[0]}
        return self._contexts[context]

    def _prediction(
        self, example: Question, found: Many[tuple[int, int, float]], null: float
    ) -> AnswerPrediction:
        threshold, difference = self.definition.threshold, null - found[0][2] if found else 0.0
        considered = [score for _, _, score in found] + ([] if threshold is None else [null])
        shares = np.exp(np.array(considered) - max(considered, default=0.0))
        probabilities = (shares / shares.sum()).tolist() if considered else [1.0]
        spans = tuple(
            AnswerSpan(example.context[start:end], start, end, score, probability)
            for (start, end, score), probability in zip(found, probabilities, strict=False)
        )
        if not spans or (threshold is not None and difference > threshold):
            return AnswerPrediction(
                example.id, "", None, None, probabilities[-1], difference, spans
            )
        best = spans[0]
        return AnswerPrediction(
            example.id, best.text, best.start, best.end, best.probability, difference, spans
        )

    def score(self, results: Iterable[tuple[Question, AnswerPrediction]]) -> Metrics:
        """Exact match, F1 and more, as `Graded.metrics`.

        Raises:
            DataError: a question of which nobody has said what is right; no question at all.
        """
        return _graded(results).metrics()

    def grade(self, example: Question, prediction: AnswerPrediction) -> float:
        """The F1 with the nearest right answer."""
        return grade(prediction.text, example).f1

    def tuned(self, results: Iterable[tuple[Question, AnswerPrediction]]) -> QuestionAnsweringTask:
        """With the threshold that gives the best F1, if there are questions without an answer."""
        best = _graded(results).metrics().get("threshold_best")
        return self.definition if best is None else replace(self.definition, threshold=best)


FAR = 1e6
"""What BigBird takes off the scores of the question's tokens."""


def _question(batch: Batch) -> Bool[Tensor, " tokens"]:
    """The tokens of questions with the separator behind them; not [CLS]."""
    assert batch.global_attention_mask is not None
    positions = batch.layout.positions
    before = torch.cat([batch.global_attention_mask[:1], batch.global_attention_mask[:-1]])
    return (before | batch.global_attention_mask) & (positions > 0)


def _target(example: Question, context: Encoded) -> tuple[tuple[int, int] | None, float]:
    """The tokens of the first answer, none where there is none to give; and whether this can be learned."""
    if example.impossible:
        return None, 1.0
    for text, start in example.answers[:1]:
        bare = text.strip()
        place = located(example.context, bare, start + text.index(bare))
        span = None if place is None else covering(context.offsets, place, place + len(bare))
        return span, float(span is not None)
    return None, 0.0


def _begin(template: Template, question: int) -> int:
    """The place of the first token of the context, after so many of the question."""
    return len(template.first) + question + len(template.between)


def _positions(span: tuple[int, int] | None, part: AnswerWindow, first: int) -> tuple[int, int]:
    """Where a span of the context is in a window whose tokens begin at `first`; at [CLS], if it is not whole in there."""
    if span is None or span[0] < part.start or span[1] >= part.stop:
        return 0, 0
    return first + span[0] - part.start, first + span[1] - part.start


def _texts(
    context: str, encoded: Encoded, spans: Many[tuple[int, int, float]]
) -> list[tuple[int, int, float]]:
    """The characters of spans of tokens with their scores; of those with one text the first."""
    found: dict[str, tuple[int, int, float]] = {}
    for first, last, score in spans:
        start, end = characters(context, encoded.offsets, first, last)
        found.setdefault(context[start:end], (start, end, score))
    found.pop("", None)
    return list(found.values())


def _graded(results: Iterable[tuple[Question, AnswerPrediction]]) -> Graded:
    graded = Graded()
    for example, prediction in results:
        if not example.annotated:
            what = "it is not known what is right, so it cannot be scored"
            raise DataError(
                what, where=example.where, fix="Add answers or is_impossible, or use predict."
            )
        graded.add(example, prediction.text, prediction.best, prediction.null_difference)
    if not len(graded):
        raise DataError("there is no question to score", fix="Give at least one.")
    return graded


def _spans(batch: Batch) -> SpanTargets:
    return cast(SpanTargets, batch.targets["span"])
