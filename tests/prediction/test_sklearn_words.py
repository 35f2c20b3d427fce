"""Predictors have the words of scikit-learn and sentence-transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError, FolderError
from toy_folder import make_folder
from toy_predictors import predictor

TEXTS = ["a good film", "a bad play", "the film was good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("words") / "bert")


@pytest.fixture(scope="module")
def embed(folder) -> Any:
    return bothways.load(folder, "embed")


def test_a_classifier_has_arrays_of_labels_and_probabilities(folder):
    classify = predictor(folder, "classify")
    found = classify(TEXTS)
    for inputs in (TEXTS, np.array(TEXTS), pandas.Series(TEXTS), pandas.DataFrame({"text": TEXTS})):
        labels, rows = classify.predict(inputs), classify.predict_proba(inputs)
        assert labels.tolist() == [prediction.label for prediction in found]
        assert rows.shape == (3, len(classify.classes_))
        assert classify.classes_[rows.argmax(1)].tolist() == labels.tolist()
    assert classify.predict(TEXTS[0]) == found[0].label
    assert classify.predict([]).shape == (0,)
    assert classify.predict_proba([]).shape == (0, len(classify.classes_))
    assert classify.predict(TEXTS, batch_size=1).tolist() == labels.tolist()
    assert classify.score(TEXTS, labels) == 1.0
    assert classify.evaluate(TEXTS, list(labels))["accuracy"] == 1.0
    assert classify.evaluate(pandas.Series(TEXTS), pandas.Series(labels))["accuracy"] == 1.0


def test_answers_that_do_not_fit_are_refused(folder):
    classify = predictor(folder, "classify")
    with pytest.raises(DataError) as short:
        classify.score(TEXTS, [classify.classes_[0]])
    assert short.value.where == "answers"
    with pytest.raises(BothwaysError):
        classify.evaluate(TEXTS, ["no such label"] * 3)


def test_other_tasks_have_the_words_that_fit(folder, embed):
    regress = predictor(folder, "regress")
    numbers = regress.predict(TEXTS)
    assert numbers.dtype == np.float64
    assert regress.score(TEXTS, numbers) == pytest.approx(1.0)
    assert regress.score(TEXTS, [float(numbers.mean())] * 3) != 1.0
    tag = predictor(folder, "tag")
    assert [len(tags) for tags in tag.predict(TEXTS)] == [3, 3, 4]
    multilabel = predictor(folder, "label")
    assert multilabel.predict_proba(TEXTS).shape == (3, len(multilabel.classes_))
    answers = multilabel.predict(TEXTS)
    assert multilabel.evaluate(TEXTS, answers) == multilabel.evaluate(
        [{"text": text, "labels": [*labels]} for text, labels in zip(TEXTS, answers, strict=True)]
    )
    for method in ("predict", "predict_proba"):
        with pytest.raises(ConfigError, match=f"'embed' has no {method}"):
            getattr(embed, method)(TEXTS)
    assert not hasattr(embed, "classes_")
    assert not hasattr(regress, "classes_")


def test_encode_takes_the_arguments_of_sentence_transformers(embed):
    plain = embed.encode(TEXTS)
    unit = embed.encode(TEXTS, normalize_embeddings=True, batch_size=2)
    assert np.linalg.norm(unit, axis=1) == pytest.approx(np.ones(3))
    assert unit == pytest.approx(plain / np.linalg.norm(plain, axis=1, keepdims=True), abs=1e-6)
    assert embed.encode(TEXTS, truncate_dim=5).tolist() == plain[:, :5].tolist()
    assert isinstance(embed.encode(TEXTS, convert_to_tensor=True), torch.Tensor)
    assert len(embed.encode(TEXTS, convert_to_numpy=False)) == 3
    assert embed.similarity(TEXTS[0], TEXTS).shape == (1, 3)
    assert embed.similarity(plain, plain).diagonal() == pytest.approx(np.ones(3))
    with pytest.raises(TypeError, match="normalise"):
        embed.encode(TEXTS, normalise=True)


def test_similarity_is_the_function_of_the_folder(embed, folder):
    other = bothways.load(folder, "embed")
    a, b = embed.encode(TEXTS[:1]), embed.encode(TEXTS)
    for name, expected in {
        "dot": a @ b.T,
        "euclidean": -np.linalg.norm(a - b, axis=1)[None],
        "manhattan": -np.abs(a - b).sum(1)[None],
    }.items():
        other.task_model.model.kept = {
            "config_sentence_transformers.json": {"similarity_fn_name": name}
        }
        assert other.similarity(TEXTS[0], TEXTS) == pytest.approx(expected, abs=1e-5)


def test_models_are_opened_with_settings_of_other_libraries(folder):
    embed = bothways.load(folder, "embed", max_seq_length=8, truncate_dim=4)
    assert embed.task_model.length == 8
    assert embed.encode(TEXTS).shape == (3, 4)
    with pytest.raises(ConfigError, match="another name of 'components'"):
        bothways.load(folder, "embed", components=4, truncate_dim=4)


def test_a_pair_is_refused_where_the_model_reads_one_text(folder, tmp_path):
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, "aba", strict=True)]
    settings: Any = {"epochs": 1, "device": "cpu", "progress": False}
    pandas.DataFrame(rows).to_csv(tmp_path / "one.csv", index=False)
    classify = bothways.finetune(folder, tmp_path / "one.csv", **settings).predictor()
    with pytest.raises(DataError, match="has 2 texts"):
        classify((TEXTS[0], TEXTS[1]))
    assert len(classify.predict(TEXTS[:2])) == 2
    pairs = pandas.DataFrame([{**row, "text_b": "it ends"} for row in rows])
    pairs.to_csv(tmp_path / "two.csv", index=False)
    compare = bothways.finetune(folder, tmp_path / "two.csv", **settings).predictor()
    with pytest.raises(DataError, match="has 1 text,"):
        compare(TEXTS[0])
    assert compare((TEXTS[0], "it ends")).label in {"a", "b"}


def test_a_predictor_is_shown_in_one_line(embed, folder):
    shown = repr(predictor(folder, "classify"))
    assert shown.startswith("Predictor(task='classify', labels=[")
    assert "precision='fp32', device='cpu'" in shown
    assert "\n" not in shown
    with pytest.raises(AttributeError):
        _ = embed.other


def test_a_text_instead_of_a_precision_is_told_what_to_type(folder):
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, "aba", strict=True)]
    result = bothways.finetune(folder, rows, epochs=1, device="cpu", progress=False)
    with pytest.raises(ConfigError, match=r"result\.predictor\(\)\(inputs\)"):
        result.predictor(TEXTS[0])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("to", lambda folder, out: bothways.export_model(folder, out, to="graph")),
        ("to", lambda folder, out: bothways.export_model(folder, out, to=["onnx", "both"])),
        ("to", lambda folder, out: bothways.export_model(folder, out, to=[])),
        ("runtime", lambda folder, out: bothways.load(folder, runtime="tensorrt")),
        ("precision", lambda folder, out: bothways.load(folder, precision="fp8")),
        (
            "boundary",
            lambda folder, out: bothways.build_corpus(["t"], folder, out, boundary="page"),
        ),
        ("kind", lambda folder, out: bothways.train_tokenizer("t", kind="words")),
        ("recipe", lambda folder, out: bothways.finetune(folder, [], recipe="old")),
        ("task", lambda folder, out: bothways.load(folder, "fly")),
    ],
)
def test_names_outside_a_closed_set_are_refused(name, call, folder, tmp_path):
    with pytest.raises(BothwaysError) as refused:
        call(folder, tmp_path / "out")
    assert refused.value.where == name
    assert not (tmp_path / "out").exists()


def test_dir_lists_public_names():
    assert dir(bothways) == sorted(bothways.__all__)
    with pytest.raises(AttributeError, match="SentenceTransformer"):
        _ = bothways.SentenceTransformer


def test_models_and_tokenizers_are_shown_in_one_line(folder):
    model = bothways.load_model(folder)
    assert repr(model).startswith("PretrainedModel(layers=2, width=32, parameters=")
    assert repr(model.tokenizer).startswith("Tokenizer(WordPiece, size=")
    assert "\n" not in repr(model)


def test_an_upload_without_a_network_is_one_message(folder, monkeypatch):
    httpx = pytest.importorskip("httpx")

    def refuse(*_: object, **__: object) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(FolderError) as refused:
        bothways.push_to_hub(folder, "me/my-model")
    assert refused.value.where == "me/my-model"


def test_vectors_have_the_same_bits_in_any_company(folder, embed):
    """As those of `bothways embed`."""
    command = bothways.load(folder, "embed", batch_invariant=True)
    assert embed.task_model.model.batch_invariant == command.task_model.model.batch_invariant
    many = embed.encode(TEXTS)
    np.testing.assert_array_equal(many, command.encode(TEXTS))
    if embed.task_model.model.batch_invariant:  # with the compiled kernels
        np.testing.assert_array_equal(embed.encode(TEXTS[0]), many[0])
