"""Sentence vectors: layers are transformers', pooling is that of a plain loop, cosines are scored as scipy scores them."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bothways.core.errors import ConfigError, DataError
from bothways.prediction.engine import PredictConfig, evaluate_task, predict
from bothways.tasks.sentence_embedding.examples import EmbedColumns, VectorExample
from bothways.tasks.sentence_embedding.metrics import Agreement
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.text_task import TextExample
from toy_masked import make_masked, make_masked_text


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple:
    return make_masked(tmp_path_factory.mktemp("masked"))


@torch.no_grad()
def layers_of(theirs: Any, tokenizer: Any, text: str, room: int = 22) -> list[np.ndarray]:
    """transformers' hidden states `(n, width)`, embeddings first."""
    ids = [2, *tokenizer.encode([text])[0].tolist()[:room], 3]
    return [
        x[0].numpy()
        for x in theirs.bert(torch.tensor([ids]), output_hidden_states=True).hidden_states
    ]


POOL = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0)}


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
@pytest.mark.parametrize(
    ("layers", "combine"),
    [
        ((-1,), "mean"),
        ((0,), "mean"),
        ((1, 2), "mean"),
        ((-2, -1), "concat"),
        ((-3, 1, 2), "concat"),
    ],
)
def test_vectors_are_those_of_a_plain_loop(made, pooling, layers, combine):
    model, tokenizer, theirs = made
    draw = random.Random()
    texts = [make_masked_text(draw, longest, 0) for longest in (1, 5, 9, 3, 60)] + [""]
    for normalised, components in ((False, None), (True, None), (False, 5), (True, 20)):
        definition = SentenceEmbeddingTask(
            pooling=pooling,
            layers=layers,
            combine=combine,
            normalised=normalised,
            components=components,
        )
        task = definition.bind(model, tokenizer, (), 24).train()
        found = predict(
            task, [TextExample(text) for text in texts], PredictConfig(tokens=30, window=4)
        )
        for text, (example, prediction) in zip(texts, found, strict=True):
            assert example.text == text
            chosen = [layers_of(theirs, tokenizer, text)[layer] for layer in layers]
            expected = POOL[pooling](
                np.concatenate(chosen, -1) if combine == "concat" else np.mean(chosen, 0)
            )
            if normalised:
                expected = expected / np.linalg.norm(expected)
            expected = expected[:components]
            assert prediction.vectors.shape == (1, definition.width(model))
            np.testing.assert_allclose(prediction.vectors[0], expected, atol=1e-5)
    model.eval()


def test_a_pair_is_two_vectors_and_a_cosine(made):
    model, tokenizer, _ = made
    task = SentenceEmbeddingTask().bind(model, tokenizer, (), 24)
    pair, a, b = (
        p
        for _, p in predict(
            task, [TextExample("ape bee", "cats"), TextExample("ape bee"), TextExample("cats")]
        )
    )
    np.testing.assert_allclose(pair.vectors, np.concatenate([a.vectors, b.vectors]), atol=1e-6)
    cosine = np.dot(*pair.vectors) / np.prod(np.linalg.norm(pair.vectors, axis=1))
    assert pair.cosine == pytest.approx(cosine, abs=1e-6)
    assert a.cosine is None
    assert set(pair.to_json()) == {"vectors", "cosine"}
    written = np.array(a.to_json()["vector"], dtype=np.float32)
    assert (written == a.vectors[0]).all()
    with pytest.raises(ConfigError, match="no grade for each example"):
        task.grade(TextExample("ape bee", "cats"), pair)


def test_long_texts_are_cut_and_counted(made):
    _, tokenizer, _ = made
    short, long, pair = SentenceEmbeddingTask().encode(
        [TextExample("ape"), TextExample("ape " * 9), TextExample("ape " * 9, "bee " * 7)],
        tokenizer,
        (),
        8,
    )
    assert [(item.tokens, item.cut) for item in (short, long, pair)] == [(1, 0), (9, 3), (16, 4)]
    assert [[len(s) for s in item.sequences] for item in (short, long, pair)] == [[3], [8], [8, 8]]


def test_pairs_are_scored_as_scipy_scores_them(made):
    model, tokenizer, _ = made
    draw = random.Random()
    examples = [
        TextExample(
            make_masked_text(draw, 6, 0), make_masked_text(draw, 6, 0), str(draw.randrange(50) / 10)
        )
        for _ in range(30)
    ]
    task = SentenceEmbeddingTask(normalised=True).bind(model, tokenizer, (), 24)
    found = evaluate_task(task, examples, PredictConfig(window=7))
    predictions = [p for _, p in predict(task, examples)]
    cosines, scores = [p.cosine for p in predictions], [float(e.label or 0) for e in examples]
    assert found["pearson"] == pytest.approx(stats.pearsonr(cosines, scores).statistic, abs=1e-5)
    assert found["spearman"] == pytest.approx(stats.spearmanr(cosines, scores).statistic, abs=1e-5)
    rows = np.concatenate([p.vectors for p in predictions])
    assert found["anisotropy"] == pytest.approx(
        (rows @ rows.T)[~np.eye(60, dtype=bool)].mean(), abs=1e-5
    )


@given(st.integers(2, 12), st.integers(1, 3), st.integers(0, 10**6))
def test_anisotropy_is_the_mean_over_all_pairs_of_texts(pairs, cells, seed):
    rng = np.random.default_rng(seed)
    vectors = (rng.normal(size=(pairs, 2, cells, 5)) + rng.normal(size=5)).astype(np.float32)
    agreement = Agreement()
    for row in vectors:
        agreement.add(float(rng.normal()), row)
    for cell, found in enumerate(agreement.cells()):
        rows = vectors[:, :, cell].reshape(-1, 5).astype(np.float64)
        units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert found.anisotropy == pytest.approx(
            (units @ units.T)[~np.eye(2 * pairs, dtype=bool)].mean(), abs=1e-6
        )


def test_the_columns_of_sts_are_known(tmp_path):
    """GLUE's file has quotes that are quotes, and columns that nobody asks for."""
    file = tmp_path / "sts.tsv"
    file.write_text(
        'index\tsource1\tsentence1\tsentence2\tscore\n0\tnone\tA "man\tA dog.\t2.500\n',
        encoding="utf8",
    )
    reading = SentenceEmbeddingTask().read(str(file))
    assert reading.task.columns == EmbedColumns("sentence1", "sentence2", "score")  # type: ignore[attr-defined]
    assert list(reading.examples) == [VectorExample('A "man', "A dog.", "2.500", f"{file}:2")]
    (texts,) = (
        SentenceEmbeddingTask().read(str(file), EmbedColumns("sentence2"), labelled=False).examples
    )
    assert (texts.text, texts.text_b, texts.label) == ("A dog.", None, None)
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": "x", "b": "y", "gold": 3}\n')
    (example,) = SentenceEmbeddingTask().read(str(other), EmbedColumns("a", "b", "gold")).examples
    assert (example.text, example.text_b, example.label) == ("x", "y", "3")


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (TextExample("a", None, "1", "f:2"), "^f:2: has one text; similarity needs two"),
        (TextExample("a", "b", "good", "f:3"), "^f:3: the score 'good' is not a number"),
        (TextExample("a", "b", "inf", "f:3"), "^f:3: the score 'inf' is not a number"),
        (TextExample("a", "b", None, "f:4"), "^f:4: has no score"),
        (
            TextExample("a", "b", "1", "f:5"),
            "^correlation needs at least two pairs, and there are 1",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(made, example, message):
    model, tokenizer, _ = made
    with pytest.raises(DataError, match=message):
        evaluate_task(SentenceEmbeddingTask().bind(model, tokenizer, (), 24), [example])


def test_layers_and_numbers_of_components_that_cannot_be_are_refused(made):
    model, tokenizer, _ = made
    for layer in (3, -4):
        with pytest.raises(
            ConfigError,
            match=rf"^layers: the model has layers 0 \(the embeddings\) to 2, .* not {layer}",
        ):
            SentenceEmbeddingTask(layers=(-1, layer)).bind(model, tokenizer, (), 24)
    with pytest.raises(ConfigError, match=r"^layers: must name at least one layer"):
        SentenceEmbeddingTask(layers=())
    with pytest.raises(ConfigError, match=r"^components: must be at least 1, not 0"):
        SentenceEmbeddingTask(components=0)


def test_a_task_without_a_loss_is_that_of_sts():
    definition = SentenceEmbeddingTask()
    assert definition.labels([TextExample("a", label="x")]) == ()
    names = ("spearman", "pearson", "ndcg@10", "mrr@10", "map")
    assert definition.directions(()) == dict.fromkeys(names, "highest")
    assert definition.metric in definition.directions(())
    assert definition.heads((), None) == ()
    assert definition.texts(TextExample("a", "b")) == ("a", "b")


def test_predictions_have_no_dropout_in_whatever_mode_and_keep_that_of_the_task(made):
    model, tokenizer, _ = made
    task, example = (
        SentenceEmbeddingTask().bind(model, tokenizer, (), 24),
        TextExample("some words"),
    )
    expected = next(predict(task.eval(), [example]))[1].vectors
    for whole, inner in ((True, True), (False, True), (False, False)):
        task.train(whole)
        model.train(inner)
        np.testing.assert_array_equal(next(predict(task, [example]))[1].vectors, expected)
        assert task.training == whole
    model.eval()
