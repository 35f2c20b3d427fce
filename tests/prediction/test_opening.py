"""A task opens a folder that lacks heads which it does not read; those that it reads must be there and fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bothways.core.errors import FolderError
from bothways.hub.model_folder import load_model
from bothways.prediction.engine import predict
from bothways.prediction.opening import open_task, open_task_model
from bothways.tasks.multilabel.task import MultilabelExample
from bothways.tasks.text_task import TextExample
from toy_folder import VOCABULARY, make_tokenizer

TEXTS = ("the film was good", "a play", "")
SHAPE = {
    "vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32,
    "pad_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip


def saved(
    place: Path, name: str, *args: Any, settings: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """A model of transformers with random weights, and its folder with a tokenizer."""
    torch.manual_seed(2)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**SHAPE, **(settings or {})), *args, **kwargs).eval()
    model.save_pretrained(place)
    make_tokenizer(place).save(place)
    return model


def changed(place: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The same folder with other tensors."""
    file = place / "model.safetensors"
    tensors = change(load_file(file))
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def without(*prefixes: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {n: x for n, x in tensors.items() if not n.startswith(prefixes)}


def with_three(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "classifier.weight": torch.zeros(3, 16), "classifier.bias": torch.zeros(3)}


def vectors(place: Path, pooling: str) -> np.ndarray:
    task = open_task_model(str(place), "embed", settings={"pooling": pooling})
    pairs = predict(task, map(TextExample, TEXTS))
    return np.concatenate([prediction.vectors for _, prediction in pairs])


@torch.no_grad()
def theirs(model: Any, place: Path, pooling: str) -> np.ndarray:
    """The last layer of transformers, pooled, one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    rows = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        last = model.base_model(**inputs).last_hidden_state[0]
        rows.append(last[0] if pooling == "cls" else last.mean(0))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("name", ["BertModel", "RobertaModel"])
def test_an_encoder_without_its_pooler_gives_vectors(name, pooling, tmp_path):
    model = saved(tmp_path / "bare", name, add_pooling_layer=False)
    expected = theirs(model, tmp_path / "bare", pooling)
    np.testing.assert_allclose(vectors(tmp_path / "bare", pooling), expected, atol=2e-6)
    with pytest.raises(FolderError, match=r"does not hold the head pooler.*\n.*fresh=\['pooler'\]"):
        load_model(tmp_path / "bare")


@pytest.mark.parametrize(
    ("name", "change", "held"),
    [
        ("BertForMaskedLM", without("cls."), []),
        ("BertForMaskedLM", without("cls.predictions.bias"), []),
        ("BertForPreTraining", without("cls.predictions.transform"), ["pooler", "pair"]),
        ("BertForPreTraining", without("bert.pooler"), ["masked"]),
        ("BertForSequenceClassification", without("classifier"), ["pooler"]),
        ("BertForSequenceClassification", without("bert.pooler"), []),
        ("BertForSequenceClassification", with_three, ["pooler"]),
        ("BertForTokenClassification", without("classifier"), []),
        ("ElectraForPreTraining", without("discriminator_predictions"), []),
    ],
)
def test_vectors_need_no_head(name, change, held, tmp_path):
    """What is there of heads is kept, so that a model that is saved again has it."""
    model = saved(tmp_path / "cut", name)
    changed(tmp_path / "cut", change)
    expected = theirs(model, tmp_path / "cut", "mean")
    np.testing.assert_allclose(vectors(tmp_path / "cut", "mean"), expected, atol=2e-6)
    assert list(open_task_model(str(tmp_path / "cut"), "embed").model.heads) == held
    with pytest.raises(FolderError, match=r"does not hold the head"):
        load_model(tmp_path / "cut")


def test_a_task_whose_head_is_missing_says_what_its_file_lacks(tmp_path):
    saved(tmp_path / "masked", "BertForMaskedLM")
    changed(tmp_path / "masked", without("cls.predictions.bias"))
    lacks = r"this model has: none; not the whole masked: 1 missing: cls\.predictions\.bias\n  Choose a model"
    with pytest.raises(FolderError, match=rf"the task 'fill' needs the head 'masked'; {lacks}"):
        open_task(str(tmp_path / "masked"), "fill")
    with pytest.raises(FolderError, match=r"'labels'.*\n.*for natural language inference"):
        open_task(str(tmp_path / "masked"), "zero-shot", settings={"candidates": ["a", "b"]})
    saved(tmp_path / "classes", "BertForSequenceClassification")
    changed(tmp_path / "classes", with_three)
    lacks = r"not the whole labels: 2 of another shape: .*classifier\.weight is \[3, 16\], not \[2, 16\]"
    for task, start in (
        ("classify", "the task 'classify' needs the head 'labels'; this model has: pooler"),
        (None, "is not fine-tuned for a task: its heads are pooler"),
    ):
        with pytest.raises(FolderError, match=f"{start}; {lacks}"):
            open_task(str(tmp_path / "classes"), task)
    changed(tmp_path / "classes", without("bert.pooler", "classifier"))
    with pytest.raises(FolderError, match="not the whole pooler: 2 missing:"):
        open_task(str(tmp_path / "classes"))


def test_a_head_that_config_json_names_no_class_for_is_named(tmp_path):
    saved(tmp_path / "classes", "BertForSequenceClassification")
    config = tmp_path / "classes" / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "architectures": None}))
    for task in ("classify", None):
        lacks = 'no class with classifier.bias, classifier.weight\n  Set "architectures"'
        with pytest.raises(FolderError, match=lacks):
            open_task(str(tmp_path / "classes"), task)


def test_a_fresh_head_is_never_left_out(tmp_path):
    saved(tmp_path / "bare", "BertModel", add_pooling_layer=False)
    loaded = load_model(tmp_path / "bare", fresh=["pooler"], whole=False)
    assert (list(loaded.model.heads), loaded.faults) == (["pooler"], {})


def scores(place: Path, **kwargs: Any) -> list[float]:
    task = open_task_model(str(place), **kwargs)
    return [prediction.score for _, prediction in predict(task, map(TextExample, TEXTS))]


def test_one_output_is_a_score_as_in_transformers(tmp_path):
    model = saved(tmp_path / "one", "BertForSequenceClassification", settings={"num_labels": 1})
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "one")
    expected = [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in TEXTS]
    assert scores(tmp_path / "one") == pytest.approx(expected, abs=2e-6)
    assert scores(tmp_path / "one", task="regress") == pytest.approx(expected, abs=2e-6)
    advice = r'needs two\n  .*task="regress"'  # as classes the softmax is 1 for every text
    with pytest.raises(FolderError, match=rf"has 1 output \(LABEL_0\), and classify {advice}"):
        open_task(str(tmp_path / "one"), "classify")


@pytest.mark.parametrize(
    ("task", "problem"), [(None, "regression"), ("regress", "regression"), ("regress", None)]
)
def test_several_outputs_are_no_score(task, problem, tmp_path):
    named(tmp_path / "three", "valence", "arousal", "dominance", problem=problem)
    message = r"three: its label head has 3 outputs \(valence, arousal, dominance\), and regress has one\n  Choose another task"
    with pytest.raises(FolderError, match=message):
        open_task(str(tmp_path / "three"), task)


def named(place: Path, *names: str, problem: str | None = None) -> Any:
    """A model of transformers with outputs of these names, which it does not compare, and its folder."""
    numbers = {name: at for at, name in enumerate(names)}
    settings = {"id2label": dict(enumerate(names)), "label2id": numbers, "problem_type": problem}
    return saved(place, "BertForSequenceClassification", settings=settings)


@pytest.mark.parametrize(
    ("problem", "example"), [(None, TextExample), ("multi_label_classification", MultilabelExample)]
)
def test_outputs_of_one_name_are_refused_where_names_tell_them_apart(problem, example, tmp_path):
    """All of their probabilities are told where names are different; what reads no label cares for no name."""
    model = named(tmp_path / "three", "neg", "bad", "pos", problem=problem)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "three")
    pipeline = transformers.pipeline(
        "text-classification", model=model, tokenizer=tokenizer, top_k=None, device="cpu"
    )
    expected = {row["label"]: row["score"] for row in pipeline([TEXTS[0]])[0]}
    ((_, prediction),) = predict(open_task_model(str(tmp_path / "three")), [example(TEXTS[0])])
    assert prediction.probabilities == pytest.approx(expected, abs=2e-6)
    named(tmp_path / "twice", "neg", "neg", "pos", problem=problem)
    message = r"twice/config\.json: id2label gives the name 'neg' to 2 outputs, .*\n  Give each output its own name there"
    with pytest.raises(FolderError, match=message):
        open_task(str(tmp_path / "twice"))
    assert load_model(tmp_path / "twice").labels == ("neg", "neg", "pos")
    twice, three = (vectors(tmp_path / name, "mean") for name in ("twice", "three"))
    np.testing.assert_array_equal(twice, three)
