"""Texts that are longer than the model: truncated, read at both ends, or read in windows."""

import numpy as np
import pytest

from bothways.core.errors import ConfigError
from bothways.finetuning.data import examine, needed_length
from bothways.prediction.engine import predict
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.text_task import LongTexts, LongTextTask, TextExample
from bothways.text.tokenizer import Tokenizer
from parity import batch_of, check_sum
from toy_task import VOCABULARY, WORDS, bind_small

LONG = " ".join(WORDS)  # ten tokens
WINDOWS = ["ape bee cat dog elk fox", "dog elk fox gnu hen ibis", "elk fox gnu hen ibis jay"]


def words_of(
    tokenizer: Tokenizer, length: int, long_texts: LongTexts, *texts: str, stride: int | None = None
) -> tuple[list[str], int]:
    """The words of each sequence, and how many tokens are in none."""
    task, ids = LongTextTask(long_texts=long_texts, stride=stride), tokenizer.encode(list(texts))
    read = task.single if len(texts) == 1 else task.pair
    parts, cut = read(*ids, tokenizer.template, length)
    return [" ".join(VOCABULARY[id] for id in part.ids) for part in parts], cut


def test_a_long_text_is_read_by_its_beginning_its_ends_or_whole(tokenizer):
    for long_texts, texts, cut in (
        ("truncate", ["ape bee cat dog elk fox"], 4),
        ("head_tail", ["ape fox gnu hen ibis jay"], 4),
        ("windows", WINDOWS, 0),
    ):
        expected = [f"[CLS] {text} [SEP]" for text in texts]
        assert words_of(tokenizer, 8, long_texts, LONG) == (expected, cut)
        assert words_of(tokenizer, 12, long_texts, LONG) == ([f"[CLS] {LONG} [SEP]"], 0)
    assert len(words_of(tokenizer, 8, "windows", LONG, stride=1)[0]) == 5


def test_windows_move_over_the_longer_of_two_texts(tokenizer):
    parts, cut = words_of(tokenizer, 9, "windows", "ape bee", LONG, stride=4)
    assert parts[0] == "[CLS] ape bee [SEP] ape bee cat dog [SEP]"
    assert parts[-1] == "[CLS] ape bee [SEP] gnu hen ibis jay [SEP]"
    assert cut == 0
    parts, cut = words_of(tokenizer, 9, "windows", LONG, "ape bee cat dog", stride=4)
    assert parts[0] == "[CLS] ape bee cat [SEP] ape bee cat [SEP]"
    assert parts[-1] == "[CLS] hen ibis jay [SEP] ape bee cat [SEP]"
    assert cut == 1
    ends = words_of(tokenizer, 9, "head_tail", LONG, "ape bee")
    assert ends == (["[CLS] ape hen ibis jay [SEP] ape bee [SEP]"], 6)


@pytest.mark.parametrize(
    "task",
    [
        ClassificationTask(long_texts="windows"),
        RegressionTask(long_texts="windows"),
        MultilabelTask(long_texts="windows"),
        SentenceEmbeddingTask(long_texts="windows"),
        SentenceEmbeddingTask(long_texts="windows", pooling="max", normalised=True),
    ],
    ids=lambda task: f"{task.name}-{getattr(task, 'pooling', '')}",
)
def test_the_prediction_for_a_text_is_that_of_all_its_windows(tokenizer, task):
    labels = ("score",) if isinstance(task, RegressionTask) else ("x", "y")
    task_model = bind_small(task, tokenizer, labels, 8).eval()
    kind = MultilabelExample if isinstance(task, MultilabelTask) else TextExample
    ((_, whole),) = predict(task_model, [kind(LONG)])
    parts = [prediction for _, prediction in predict(task_model, [kind(text) for text in WINDOWS])]
    if isinstance(task, SentenceEmbeddingTask):
        rows = np.concatenate([part.vectors for part in parts])
        expected = rows.max(0) if task.pooling == "max" else rows.mean(0)
        expected /= np.linalg.norm(expected) if task.normalised else 1
        np.testing.assert_allclose(whole.vectors[0], expected, atol=1e-5)
    elif isinstance(task, RegressionTask):
        assert whole.score == pytest.approx(np.mean([part.score for part in parts]), rel=1e-4)
    else:
        chances = np.array([[*part.probabilities.values()] for part in parts])
        # The logits of a row, but for a number that all of its classes share.
        logits = np.log(chances) - (np.log1p(-chances) if kind is MultilabelExample else 0)
        odds = np.exp(logits.mean(0))
        expected = odds / (1 + odds if kind is MultilabelExample else odds.sum())
        assert [*whole.probabilities.values()] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "task",
    [
        ClassificationTask(long_texts="windows"),
        ClassificationTask(long_texts="windows", smoothing=0.1, weighting=(1.0, 3.0)),
        RegressionTask(long_texts="windows"),
        MultilabelTask(long_texts="windows"),
    ],
    ids=lambda task: f"{task.name}-{getattr(task, 'smoothing', '')}",
)
def test_a_long_text_weighs_as_much_in_training_as_a_short_one(tokenizer, task):
    labels = ("score",) if isinstance(task, RegressionTask) else ("0", "1")
    task_model = bind_small(task, tokenizer, labels, 8)
    multilabel = isinstance(task, MultilabelTask)
    kind, answer = (MultilabelExample, ("1",)) if multilabel else (TextExample, "1")
    texts = ["ape bee", LONG, *WINDOWS]
    inputs = task_model.encode([kind(text, None, answer) for text in texts])
    assert [len(item.sequences) for item in inputs] == [1, 3, 1, 1, 1]
    losses = [task_model(batch_of([item]))["label"].total.item() for item in inputs]
    weights = [task_model.weights(batch_of([item]))["label"] for item in inputs]
    assert losses[1] == pytest.approx(np.mean(losses[2:]), rel=1e-5)
    assert weights == pytest.approx([weights[0]] * 5)
    check_sum(task_model, list(inputs))


def test_two_texts_of_several_windows_have_a_vector_each(tokenizer):
    task_model = bind_small(SentenceEmbeddingTask(long_texts="windows"), tokenizer, (), 8).eval()
    ((_, pair),) = predict(task_model, [TextExample("ape bee", LONG)])
    alone = predict(task_model, map(TextExample, ("ape bee", LONG)))
    for vector, (_, single) in zip(pair.vectors, alone, strict=True):
        np.testing.assert_allclose(vector, single.vectors[0], atol=1e-5)
    for options in ({"stride": 0}, {"stride": 4}, {"stride": 4, "long_texts": "head_tail"}):
        with pytest.raises(ConfigError, match="stride"):
            ClassificationTask(**options)


def texts_of_length(*lengths: int) -> list[TextExample]:
    return [
        TextExample(" ".join(WORDS[at % 10] for at in range(length)), None, "xy"[length % 2])
        for length in lengths
    ]


def test_the_length_is_chosen_from_the_data(tokenizer):
    """Texts that fit keep the usual length; else nearly all texts are read whole, if the model can."""
    short, long = texts_of_length(*range(3, 23)), texts_of_length(*range(150, 190, 2), 151)

    def chosen(examples: list[TextExample], length: int | None, positions: int = 512) -> int:
        return examine(ClassificationTask(), tokenizer, examples, [], length, positions).length

    assert chosen(short, None) == 128
    assert chosen(short, None, positions=64) == 64
    assert chosen(long, None) == 192
    assert chosen(long, None, positions=160) == 160
    assert chosen(long, 20) == 20


@pytest.mark.parametrize(("usual", "expected"), [(None, 192), (100, 192), (256, 256), (999, 512)])
def test_the_length_of_the_model_is_the_least(tokenizer, usual, expected):
    long = texts_of_length(*range(150, 190, 2), 151)
    data = examine(ClassificationTask(), tokenizer, long, [], None, 512, usual_length=usual)
    assert data.length == expected


def test_the_length_that_is_needed_is_that_of_nearly_all_texts(tokenizer):
    examples = texts_of_length(*[30] * 18, 60, 500)
    inputs = ClassificationTask().encode(examples, tokenizer, ("x", "y"), 16)
    assert needed_length(inputs) == 64
    assert needed_length(inputs, 1.0) == 512


def test_the_advice_on_truncation_can_be_followed(tokenizer):
    long = texts_of_length(*range(150, 190, 2), 151)

    def advice(length: int, positions: int) -> str:
        data = examine(ClassificationTask(), tokenizer, long, [], length, positions)
        (fix,) = [f.fix for f in data.findings if f.check == "truncation"]
        return str(fix)

    assert advice(64, 512).startswith("Set length=192,")
    limit = "at most 100 tokens at once: set length=100 and task.long_texts=windows"
    assert limit in advice(100, 100)
    long = texts_of_length(*[150] * 18, 151, 300)  # 160 tokens, the usual choice, hold all but one
    assert advice(160, 512).startswith("Set length=320,")
