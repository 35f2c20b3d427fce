"""Explanations against other programs: transformers in float64, and the formulas of the papers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.hub.model_folder import load_model
from bothways.model.heads import LabelHead
from bothways.model.model import Model
from bothways.prediction.explanation import (
    ExplainedOutput,
    attentions,
    effect_without,
    integrated_gradients,
    rollout,
    value_of,
    without,
    words_of,
)
from bothways.prediction.predictor import Predictor
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_examples import TextExample
from bothways.text.tokenizer import Tokenizer
from toy_folder import make_folder
from toy_predictors import predictor
from toy_text import bert_tokens, write_vocabulary

TEXT, SECOND = "Hello world, you play 中文 well", "the naïve don"
CLASSES = {
    "classify": ("SequenceClassification", "single_label_classification"),
    "multilabel": ("SequenceClassification", "multi_label_classification"),
    "regress": ("SequenceClassification", "regression"),
    "tag": ("TokenClassification", None),
    "fill": ("MaskedLM", None),
}
LABELS = ["no", "maybe", "yes"]


@functools.cache
def peer(task: str) -> Any:
    """A small model of transformers whose weights are large enough to be far from linear."""
    torch.manual_seed(3)
    name, problem = CLASSES[task]
    labels = ["score"] if task == "regress" else ["O", "B-X", "I-X"] if task == "tag" else LABELS
    config = transformers.BertConfig(
        vocab_size=len(bert_tokens()),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=40,
        initializer_range=0.3,
        problem_type=problem,
        id2label=dict(enumerate(labels)),
        label2id={label: n for n, label in enumerate(labels)},
        attn_implementation="eager",
    )
    return getattr(transformers, f"BertFor{name}")(config).eval()


@functools.cache
def opened(task: str, place: Path) -> Predictor:
    peer(task).save_pretrained(place)
    Tokenizer.load(write_vocabulary(place / "words", do_lower_case=False)).save(place)
    return bothways.load(place, task=task)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explained")


def in_float64(task: str, ids: list[int], base: list[int], segments: list[int], place: Any) -> Any:
    """The shares of tokens by transformers in float64: the formula of the paper as a sum of 200 midpoints."""
    model = peer(task).double()
    table = model.get_input_embeddings()
    start, end = table(torch.tensor(base)).detach(), table(torch.tensor(ids)).detach()
    points = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    x = (start + points[:, None, None] * (end - start)).requires_grad_()
    kind = torch.tensor(segments).expand(len(points), -1)

    def value(embedded: torch.Tensor) -> torch.Tensor:
        logits = model(inputs_embeds=embedded, token_type_ids=kind[: len(embedded)]).logits
        return place(logits)

    (slopes,) = torch.autograd.grad(value(x).sum(), x)
    shares = (slopes.mean(0) * (end - start)).sum(-1)
    with torch.no_grad():
        difference = value(end[None]) - value(start[None])
    peer(task).float()
    return shares.numpy(), float(difference)


def odds(logits: torch.Tensor, label: int) -> torch.Tensor:
    chances = logits.softmax(-1)[..., label]
    return torch.log(chances / (1 - chances))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("task", CLASSES)
def test_integrated_gradients_are_those_of_transformers(task: str, pair: bool, place: Path) -> None:
    if pair and task in ("tag", "fill"):
        return
    predict = opened(task, place / task)
    tokenizer = predict.task_model.tokenizer
    text = TEXT.replace("play", "[MASK]") if task == "fill" else TEXT
    example = predict.task_model.task.from_texts((text, SECOND) if pair else (text,))
    (encoded,) = predict.task_model.encode([example])
    (sequence,) = encoded.sequences
    ids = sequence.ids.tolist()
    target, choose = {
        "classify": (ExplainedOutput("yes"), lambda z: odds(z, 2)),
        "multilabel": (ExplainedOutput("maybe"), lambda z: z[:, 1]),
        "regress": (ExplainedOutput(), lambda z: z[:, 0]),
        "tag": (ExplainedOutput("B-X", 3), lambda z: odds(z[:, ids.index(tokenizer.id("y"))], 1)),
        "fill": (
            ExplainedOutput("world"),
            lambda z: odds(z[:, ids.index(tokenizer.id("[MASK]"))], tokenizer.id("world")),
        ),
    }[task]
    found = integrated_gradients(predict.unprepared(), example, target, steps=48)

    kept = {tokenizer.id(name) for name in ("[CLS]", "[SEP]", "[MASK]")}
    base = [id if id in kept else tokenizer.id("[PAD]") for id in ids]
    shares, difference = in_float64(task, ids, base, sequence.segments.tolist(), choose)
    sizes = [len(word.ids) for word in found.words]
    content = [n for n, id in enumerate(ids) if id not in kept or id == tokenizer.id("[MASK]")]
    wanted = [
        sum(shares[n] for n in content[sum(sizes[:k]) :][:size]) for k, size in enumerate(sizes)
    ]
    largest = np.abs(wanted).max()
    assert largest > 0.05
    np.testing.assert_allclose(found.effects, wanted, atol=2e-4 * largest)
    assert found.value - found.baseline == pytest.approx(difference, abs=1e-4 * largest)
    # Completeness: the shares add up to the difference.
    assert abs(found.error) < 1e-4 * largest


def test_few_steps_have_an_error_that_is_told(place: Path) -> None:
    predict = opened("classify", place / "classify")
    example = predict.task_model.task.from_texts((TEXT,))
    errors = [
        abs(
            integrated_gradients(predict.unprepared(), example, ExplainedOutput("yes"), steps).error
        )
        for steps in (1, 8, 48)
    ]
    assert errors[0] > 1e-2
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("text", [TEXT, "Hello"])
def test_attentions_and_rollout_are_those_of_transformers(text: str, place: Path) -> None:
    predict = opened("classify", place / "classify")
    (encoded,) = predict.task_model.encode([predict.task_model.task.from_texts((text, SECOND))])
    (sequence,) = encoded.sequences
    found = attentions(predict.unprepared(), sequence)
    with torch.no_grad():
        theirs = peer("classify")(
            input_ids=torch.from_numpy(sequence.ids).long()[None],
            token_type_ids=torch.from_numpy(sequence.segments).long()[None],
            output_attentions=True,
        ).attentions
    assert len(found) == len(theirs) == 2
    for ours, other in zip(found, theirs, strict=True):
        np.testing.assert_allclose(ours, other[0].numpy(), atol=1e-6)
    # Abnar and Zuidema 2020, in their order of words: Ã = A(l) Ã(l − 1), A = 0.5 W + 0.5 I.
    flow = None
    for layer in theirs:
        mean = layer[0].double().mean(0)
        mixed = 0.5 * mean + 0.5 * torch.eye(len(mean), dtype=torch.float64)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        flow = mixed if flow is None else mixed @ flow
    np.testing.assert_allclose(rollout(found), flow, atol=1e-6)
    np.testing.assert_allclose(rollout(found).sum(1), 1, atol=1e-9)


def test_words_are_slices_of_the_text_and_can_be_left_out(place: Path) -> None:
    predict = opened("classify", place / "classify")
    tokenizer = predict.task_model.tokenizer
    text = " play  the 😀中 unable, world\u200b"
    example = TextExample(text, SECOND)
    words = words_of(tokenizer, example)
    assert [word.text for word in words if not word.part][:5] == [
        "play",
        "the",
        "😀",
        "中",
        "unable",
    ]
    for word in words:
        assert (SECOND if word.part else text)[word.start : word.stop] == word.text
    ids = [id for word in words if not word.part for id in word.ids]
    assert ids == tokenizer.encode(text).tolist()
    assert without(example, words, 0).text == "  the 😀中 unable, world\u200b"
    assert without(example, words, 4).text == " play  the 😀中 , world\u200b"
    assert (
        without(TextExample("play the"), words_of(tokenizer, TextExample("play the")), 1).text
        == "play"
    )
    last = without(example, words, len(words) - 1)
    assert (last.text, last.text_b) == (text, "the naïve")


def test_words_of_tags_keep_their_numbers(place: Path) -> None:
    predict = opened("tag", place / "tag")
    labels = predict.task_model.labels
    example = predict.task_model.task.from_texts(("the play you hello",))
    words = words_of(predict.task_model.tokenizer, example)
    target = ExplainedOutput("B-X", 2)
    for place_ in range(len(words)):
        shorter = without(example, words, place_)
        rest = [word for n, word in enumerate(example.words) if n != place_]
        assert list(shorter.words) == rest
        prediction = predict(shorter)
        found = effect_without(prediction, place_, target, labels)
        if place_ == 2:
            assert np.isnan(found)
        else:
            assert found == prediction.probabilities[rest.index("you"), labels.index("B-X")]
    assert value_of(predict(example), target, labels) == predict(example).probabilities[2, 1]


def test_what_cannot_be_explained_says_why(tmp_path: Path, place: Path) -> None:
    predict = opened("classify", place / "classify")
    task_model, make = predict.unprepared(), predict.task_model.task.from_texts
    with pytest.raises(DataError, match="'other' is not one of the model's"):
        integrated_gradients(task_model, make((TEXT,)), ExplainedOutput("other"))
    with pytest.raises(DataError, match="the label is missing"):
        integrated_gradients(task_model, make((TEXT,)), ExplainedOutput())
    tags = opened("tag", place / "tag")
    with pytest.raises(DataError, match="there is no word 9"):
        integrated_gradients(
            tags.unprepared(), tags.task_model.task.from_texts((TEXT,)), ExplainedOutput("O", 9)
        )
    embed = predictor(make_folder(tmp_path / "bert"), "embed")
    with pytest.raises(DataError, match="not available for the task 'embed'"):
        integrated_gradients(
            embed.unprepared(), embed.task_model.task.from_texts(("a",)), ExplainedOutput()
        )
    with pytest.raises(DataError, match="give two texts"):
        value_of(embed("a"), ExplainedOutput(), ())
    alone = Predictor(predict.task_model)
    with pytest.raises(ConfigError, match="no model folder"):
        alone.unprepared()


def test_texts_that_are_cut_have_effects_up_to_there(place: Path) -> None:
    predict = opened("classify", place / "classify")
    long = " ".join(["hello"] * 60)
    found = integrated_gradients(
        predict.unprepared(), TextExample(long), ExplainedOutput("yes"), steps=4
    )
    assert len(found.words) == 60
    assert (found.effects[:38] != 0).all()
    assert (found.effects[38:] == 0).all()
    tail = bothways.load(place / "classify", task="classify", long_texts="head_tail")
    long = " ".join(["hello", "world", "play"] * 20)
    with pytest.raises(BothwaysError, match="another part of the text"):
        integrated_gradients(tail.unprepared(), TextExample(long), ExplainedOutput("yes"), steps=4)


def test_gradients_leave_the_model_as_it_was(place: Path) -> None:
    predict = opened("classify", place / "classify")
    before = predict(TEXT).probabilities
    task_model = predict.unprepared()
    integrated_gradients(task_model, TextExample(TEXT), ExplainedOutput("yes"), steps=4)
    assert predict.unprepared() is task_model
    assert not task_model.model.encoder.embedding.token._forward_hooks
    assert all(parameter.grad is None for parameter in task_model.parameters())
    assert predict(TEXT).probabilities == before


SHAPES: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_size": 12},
    "ModernBert": {
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes_of_encoders(name: str, tmp_path: Path) -> None:
    """Tied layers and narrow embeddings, rotary positions without segments: sums are complete."""
    settings = {
        "vocab_size": len(bert_tokens()),
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 40,
        "initializer_range": 0.3,
        **SHAPES[name],
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    getattr(transformers, f"{name}ForMaskedLM")(config).save_pretrained(tmp_path)
    Tokenizer.load(write_vocabulary(tmp_path / "words")).save(tmp_path)
    loaded = load_model(tmp_path)
    model = Model(loaded.model.config, (LabelHead(2),), loaded.model.encoder)
    task_model = ClassificationTask().bind(model, loaded.tokenizer(), ("no", "yes"), 32)
    task_model.eval().requires_grad_(False)
    found = integrated_gradients(task_model, TextExample(TEXT), ExplainedOutput("yes"), steps=48)
    assert abs(found.error) < 1e-3 * np.abs(found.effects).max()
    assert np.abs(found.effects).min() > 0
