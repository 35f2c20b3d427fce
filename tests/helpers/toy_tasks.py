"""For each trainable task: labels, the class of transformers, examples at random, and one without an answer."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from bothways.tasks.base import TaskModel
from bothways.tasks.choice.task import ChoiceExample, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RankExample, RerankingTask
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from toy_task import WORDS, bind_small, make_examples, make_text

LABELS = ("x", "y", "z")
TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def make_scored(count: int, seed: int = 0) -> list[TextExample]:
    draw = random.Random(seed)
    return [
        TextExample(e.text, e.text_b, f"{draw.uniform(0, 5):.3f}", e.where)
        for e in make_examples(count, longest=8, seed=seed)
    ]


def make_labelled(count: int, seed: int = 0) -> list[MultilabelExample]:
    draw = random.Random(seed)
    return [
        MultilabelExample(
            e.text, e.text_b, tuple(label for label in LABELS if draw.random() < 0.4), e.where
        )
        for e in make_examples(count, longest=8, seed=seed)
    ]


def make_choices(count: int, seed: int = 0) -> list[ChoiceExample]:
    """Questions of two to five choices."""
    draw, examples = random.Random(seed), []
    for number in range(count):
        endings = tuple(make_text(draw, 9) for _ in range(draw.randint(2, 5)))
        label = draw.randrange(len(endings))
        examples.append(ChoiceExample(make_text(draw, 12), endings, label, f"made:{number}"))
    return examples


def make_sentences(count: int, seed: int = 0, labels: tuple[str, ...] = TAGS) -> list[TagExample]:
    """Sentences of words of one to three tokens."""
    draw, examples = random.Random(seed), []
    for number in range(count):
        size = draw.randint(1, 30)
        words = tuple(draw.choice(WORDS) + draw.choice(("", "s", "-", "ss")) for _ in range(size))
        examples.append(TagExample(words, tuple(draw.choices(labels, k=size)), f"made:{number}"))
    return examples


def make_questions(count: int, seed: int = 0) -> list[Question]:
    """Questions on random words; every third has no answer."""
    draw, questions = random.Random(seed), []
    for number in range(count):
        words = make_text(draw, 40).split()
        first = draw.randrange(len(words))
        answer = " ".join(words[first : first + draw.randint(1, 3)])
        start = len(" ".join(words[:first])) + (first > 0)
        answers = () if number % 3 == 2 else ((answer, start),)
        texts = make_text(draw, 8), " ".join(words)
        questions.append(Question(f"q{number}", *texts, answers, not answers, f"made:{number}"))
    return questions


def make_rankings(count: int, seed: int = 0) -> list[RankExample]:
    """Queries with one to four documents."""
    draw, examples = random.Random(seed), []
    for number in range(count):
        documents = tuple(make_text(draw, 5) for _ in range(draw.randint(1, 4)))
        labels = tuple(float(draw.random() < 0.4) for _ in documents)
        query = f"{make_text(draw, 5)} {number}"
        examples.append(RankExample(query, documents, labels, f"made:{number}"))
    return examples


class ToyTask(NamedTuple):
    """A task with what a small model of it needs.

    Attributes:
        peer: the class of transformers.
        make: returns so many examples with answers, by a seed.
        bare: an example without one.
    """

    task: Any
    labels: tuple[str, ...]
    peer: str
    make: Callable[[int, int], list[Any]]
    bare: Any

    def bind(self, tokenizer: Tokenizer, dropout: float = 0.0) -> TaskModel[Any, Any]:
        """A small model; questions have the windows of a longer text."""
        length = 24 if self.peer.endswith("Answering") else 16
        return bind_small(self.task, tokenizer, self.labels, length, dropout=dropout, spread=0.5)


_CLASSES = "BertForSequenceClassification"
TOY_TASKS = {
    "classify": ToyTask(
        ClassificationTask(), LABELS, _CLASSES,
        lambda count, seed: make_examples(count, seed=seed), TextExample("ape", None, None, "f:2"),
    ),
    "regress": ToyTask(
        RegressionTask(), ("score",), _CLASSES, make_scored, TextExample("ape", None, None, "f:2")
    ),
    "multilabel": ToyTask(
        MultilabelTask(), LABELS, _CLASSES, make_labelled, MultilabelExample("ape", where="f:2")
    ),
    "rerank": ToyTask(
        RerankingTask(), ("relevance",), _CLASSES, make_rankings,
        RankExample("ape", ("bee", "cat"), None, "f:2"),
    ),
    "choice": ToyTask(
        ChoiceTask(), (), "BertForMultipleChoice", make_choices,
        ChoiceExample("ape", ("bee", "cat"), None, "f:2"),
    ),
    "tag": ToyTask(
        TaggingTask(), TAGS, "BertForTokenClassification", make_sentences,
        TagExample(("ape",), None, "f:2"),
    ),
    "answer": ToyTask(
        QuestionAnsweringTask(stride=5, threshold=0.0), (), "BertForQuestionAnswering",
        make_questions, Question("q", "ape", "bee", where="f:2"),
    ),
}  # fmt: skip
