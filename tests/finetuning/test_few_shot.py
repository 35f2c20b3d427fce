"""Few-shot training: the pairs of classes, the logistic head and its folder, runs and mistakes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

import bothways
from bothways.core.batch import LabelTargets
from bothways.core.errors import BothwaysError, ConfigError
from bothways.core.source import Sequence
from bothways.finetuning.config import FewShot
from bothways.finetuning.few_shot import check_few_shot, pair_module, sample_pairs
from bothways.hub.model_folder import load_model
from bothways.tasks.sentence_embedding.losses import TextTargets
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask, save_sentence_encoder
from commands import run_line
from toy_folder import make_examples, make_rows, write_tsv

FAST: dict[str, Any] = {"recipe": "few-shot", "device": "cpu", "lr": 3e-3, "length": 16}
SMALL = {"progress": False, "few_shot": {"pairs": 4}}


def labelled(*labels: int) -> list[Sequence]:
    """One sequence per label, whose id is its number."""
    zeros = np.zeros(1, dtype=np.int8)
    return [
        Sequence(np.array([n]), zeros, {"label": LabelTargets(np.array([label]))})
        for n, label in enumerate(labels)
    ]


def test_pairs_are_of_a_class_and_grow_with_the_texts():
    labels = [0] * 6 + [1] * 3 + [2]
    pairs = sample_pairs(labelled(*labels), FewShot(pairs=50), seed=3)
    assert Counter(int(pair.ids[0]) for pair in pairs) == dict.fromkeys(range(10), 50)
    assert all(labels[a] == labels[b] and (a != b or a == 9) for a, b in (p.ids for p in pairs))
    partners = Counter(int(pair.ids[1]) for pair in pairs if pair.ids[0] == 0)
    assert partners.keys() == {1, 2, 3, 4, 5}
    assert max(partners.values()) < 25
    keys = pairs[0].target("texts", TextTargets).keys
    assert pairs[0].parts == (1, 1)
    assert list(keys) == [labels[pairs[0].ids[0]]] * 2
    again = sample_pairs(labelled(*labels), FewShot(pairs=50), seed=3)
    assert all((a.ids == b.ids).all() for a, b in zip(pairs, again, strict=True))


def test_many_texts_and_lonely_classes_are_warned_of(monkeypatch):
    monkeypatch.setattr("bothways.finetuning.few_shot.MOST_PAIRS", 25)
    sequences = labelled(*[0] * 6, *[1] * 3, 2)
    lonely, many = check_few_shot(sequences, FewShot(pairs=4))
    assert "1 text is alone in a class" in lonely.what
    assert "25 pairs" in many.what
    two, *_ = check_few_shot(labelled(0, 0, 1, 2), FewShot(pairs=4))
    assert two.what == "2 texts are alone in a class, and paired with themselves"
    assert len(sample_pairs(sequences, FewShot(pairs=4), 0)) == 25
    assert check_few_shot(labelled(0, 0, 1, 1), FewShot(pairs=4)) == []


@pytest.mark.parametrize(("classes", "weighting"), [(2, None), (3, "balanced")])
def test_the_head_is_the_solvers_on_the_sentence_vectors(model, classes, weighting):
    data = make_rows(24, 0) + [{"text": "two old men", "label": "none"}] * 2 * (classes - 2)
    texts, labels = ([row[name] for row in data] for name in ("text", "label"))
    weights = {"class_weight": weighting}  # the same names in scikit-learn
    done = bothways.finetune(model, data, **FAST, **SMALL, **(weights if weighting else {}))
    embedder = bothways.Predictor(pair_module(done.task_model, FewShot()))
    vectors = np.stack([answer.vectors[0] for answer in embedder(texts)]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    solver = LogisticRegression(
        C=FewShot().inverse_regularisation, max_iter=1000, tol=1e-7, **weights
    )
    solver.fit(vectors, labels)
    actual = done.predictor().predict_proba(texts)
    np.testing.assert_allclose(actual, solver.predict_proba(vectors), atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_head_reads_the_vector_of_its_folder(model, tmp_path, pooling):
    opened = load_model(model)
    task = SentenceEmbeddingTask(pooling=pooling)
    embedder = task.bind(opened.model, opened.tokenizer, (), 16)
    save_sentence_encoder(tmp_path / "sentences", embedder)
    done = bothways.finetune(tmp_path / "sentences", make_rows(8, 0), **FAST, **SMALL)
    tuned, batch = done.task_model.model, opened.tokenizer.batch(["the film"])
    with torch.no_grad():
        rows = tuned.encoder(batch).last
        vector = rows[0] if pooling == "cls" else rows.mean(0)
        expected = tuned.heads["labels"].dense(vector / vector.norm()).softmax(0)
    actual = torch.tensor(done.predictor().predict_proba(["the film"])[0])
    torch.testing.assert_close(actual, expected, check_dtype=False)
    [of_pairs] = bothways.Predictor(pair_module(done.task_model, FewShot()))(["the film"])
    np.testing.assert_allclose(of_pairs.vectors[0], vector, atol=1e-5)  # what the head reads


def test_a_command_writes_a_folder_that_predicts_the_same(model, tmp_path, capsys):
    train, dev = (write_tsv(tmp_path / f"{n}.tsv", make_examples(32, n)) for n in (0, 1))
    out = tmp_path / "run"
    words = ("finetune", model, train, "--dev", dev, "--out", out, "--recipe", "few-shot")
    run_line(*words, "--lr", "3e-3", "few_shot.pairs=20")
    assert "our own format" in capsys.readouterr().err
    examples = make_rows(32, 1)
    labels = [row["label"] for row in examples]
    assert bothways.load(out / "model").score([row["text"] for row in examples], labels) > 0.8
    assert "does not open the folder" in (out / "model" / "README.md").read_text()


def test_what_few_shot_training_cannot_do_is_refused(model):
    with pytest.raises(ConfigError, match="one class a text, and the task is regress"):
        bothways.finetune(model, make_rows(8, 0), task="regress", **FAST, **SMALL)
    with pytest.raises(ConfigError, match="no effect in few-shot training") as error:
        bothways.finetune(model, make_rows(8, 0), dropout=0.2, **FAST, **SMALL)
    assert error.value.where == "dropout"
    with pytest.raises(BothwaysError, match="at least two classes"):
        bothways.finetune(model, [{"text": "good", "label": "a"}] * 4, **FAST, **SMALL)
    with pytest.raises(ConfigError, match="above 0"):
        FewShot(inverse_regularisation=0.0)
