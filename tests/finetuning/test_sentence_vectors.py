"""Fine-tuning of sentence vectors: exact gradients of large steps, each form of data, folders that others open."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bothways
from bothways.core.batch import pack
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.finetuning.data import label
from bothways.finetuning.distillation import with_guide_vectors
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig, Gated
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.tasks.sentence_embedding.examples import (
    POSITIVES,
    QUERIES,
    VectorExample,
    check_vector_examples,
)
from bothways.tasks.sentence_embedding.losses import (
    CoSENT,
    CosineRegression,
    InBatchSoftmax,
    MarginMSE,
    SupervisedContrastive,
    TeacherKL,
    TextTargets,
)
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.sentence_embedding.vectors import retrieval
from bothways.training.loop import VectorStep
from bothways.training.parallel import Plan
from heard_progress import Heard
from spread import in_turn
from toy_folder import BAD, FILLERS, GOOD, make_folder, make_sentence_encoder
from toy_training import enter_ranks, equal, on_ranks

FAST: dict[str, Any] = {"device": "cpu", "lr": 3e-3, "batch": 16, "length": 16}


def sentence(draw: random.Random, word: str) -> str:
    words = [word, *draw.choices(FILLERS[:-1], k=draw.randrange(1, 6))]
    draw.shuffle(words)
    return " ".join(words)


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return two sentences with one of six words."""
    draw = random.Random(seed)
    words = draw.choices(GOOD + BAD, k=count)
    return [{"anchor": sentence(draw, w), "positive": sentence(draw, w)} for w in words]


def scored(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        first, second = draw.choice(GOOD + BAD), draw.choice(GOOD + BAD)
        score = 5.0 if first == second else 2.0 if (first in GOOD) == (second in GOOD) else 0.0
        texts = {"sentence1": sentence(draw, first), "sentence2": sentence(draw, second)}
        rows.append({**texts, "score": score})
    return rows


def classes(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    words = draw.choices(GOOD + BAD, k=count)
    return [{"text": sentence(draw, word), "label": word} for word in words]


def with_negatives(count: int, seed: int) -> list[dict[str, Any]]:
    draw, rows = random.Random(seed), pairs(count, seed)
    negatives = [row["anchor"] for row in pairs(2 * count, seed + 1)]
    for number, row in enumerate(rows):
        row["negative"] = [negatives[number + k * count] for k in range(draw.randrange(3))]
    return rows


def taught(count: int, seed: int) -> list[dict[str, Any]]:
    rows = pairs(count, seed)
    for number, row in enumerate(rows):
        row["negative"] = [rows[(number + k) % count]["positive"] for k in range(1, 5)]
        row["scores"] = [9.0, *(-3.0 for _ in row["negative"])]
    return rows


FORMS: dict[str, Any] = {
    "pairs": (pairs, "softmax", "ndcg@10"),
    "negatives": (with_negatives, "softmax", "ndcg@10"),
    "scores": (scored, "cosent", "spearman"),
    "classes": (classes, "classes", "ndcg@10"),
    "teacher": (taught, "kl", "ndcg@10"),
}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if form in ("pairs", "scores") else pytest.mark.slow)
        for form in FORMS
    ],
)
def test_each_form_of_data_is_learned_and_saved(form, model, tmp_path):
    from sentence_transformers import SentenceTransformer

    make, loss, metric = FORMS[form]
    dev = make(60, 1)
    result = bothways.finetune(model, make(96, 0), dev, "embed", epochs=4, **FAST)
    untrained = bothways.load(model, "embed", device="cpu", loss={"kind": loss})
    before = untrained.evaluate(dev)[metric]
    assert result.before[metric] == pytest.approx(before, abs=1e-6)
    assert result.task_model.task.loss.kind == loss
    assert result.metrics[metric] > max(1.5 * before, before + 0.05)
    folder = result.save(tmp_path / "saved")
    texts = ["good film", "awful play in rain", "men"]
    vectors = bothways.load(folder, device="cpu").encode(texts)
    found = SentenceTransformer(str(folder), device="cpu").encode(texts)
    np.testing.assert_allclose(vectors, found, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "loss"), in_turn([(1,), (40,), (100,)], [InBatchSoftmax(directions="all"), None])
)
def test_gradients_of_microbatches_are_those_of_one_graph(model, tokens, loss):
    """With dropout: both draw the same in each microbatch."""
    opened = load_model(model)
    task = SentenceEmbeddingTask(loss=loss or InBatchSoftmax(), widths=() if loss else (32, 8))
    bound = task.bind(opened.model.double(), opened.tokenizer, (), 16).train()
    examples = [task.example(row) for row in with_negatives(9, 3)]
    items = bound.encode(examples)
    sequences = [sequence for item in items for sequence in task.training_sequences(item)]
    batches, size = [[sequences[0]]], len(sequences[0])
    for sequence in sequences[1:]:
        size += len(sequence)
        if size > tokens:
            batches.append([])
            size = len(sequence)
        batches[-1].append(sequence)
    microbatches = [pack(batch) for batch in batches]
    weights = [bound.weights(batch) for batch in microbatches]
    total = {"vectors": float(len(sequences))}

    torch.manual_seed(5)
    step = VectorStep(bound, bound, microbatches, weights, total, Plan(), contextlib.nullcontext())
    shown = 0.0
    for number in range(len(microbatches)):
        share, losses = step(number)
        share.backward()
        shown += float(losses["vectors"].total.detach())
    gradients = {name: p.grad.clone() for name, p in bound.named_parameters() if p.grad is not None}
    bound.zero_grad()

    torch.manual_seed(5)
    vectors = torch.cat([bound(batch) for batch in microbatches])
    values = [bound.text_values(batch) for batch in microbatches]
    joined = {name: torch.cat([each[name] for each in values]) for name in values[0]}
    expected = bound.compare(vectors, joined)["vectors"]
    (expected / total["vectors"]).backward()
    assert shown == pytest.approx(float(expected.detach()), rel=1e-5)
    assert gradients
    for name, parameter in bound.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_vectors_that_training_made_worse_are_told(model, tmp_path):
    """Also by a run that is resumed, whose weights are no longer those of its start."""
    heard = Heard()
    options = {**FAST, "dev": scored(60, 1), "task": "embed", "out": tmp_path / "run"}
    trained = bothways.finetune(model, scored(96, 0), epochs=4, **options)
    options |= {"out": tmp_path / "worse", "lr": 1.0, "progress": heard}
    start = trained.folder
    worse = bothways.finetune(start, scored(96, 0), until="2 steps", **options)
    assert worse.before["spearman"] == pytest.approx(trained.metrics["spearman"], abs=1e-6)
    assert f"before training: spearman {worse.before['spearman']:.4f}" in heard.text
    again = bothways.finetune(start, scored(96, 0), until="3 steps", resume=True, **options)
    assert again.before == worse.before
    for run in (worse, again):
        assert run.metrics["spearman"] < run.before["spearman"]
        assert any("worse than before training" in reason for reason in run.failure.reasons)
        assert "before training" in run._repr_html_()
    facts = json.loads((worse.folder / "bothways.json").read_text())
    assert facts["before"] == worse.before


def finetune_on_rank(
    rank: int, world: int, port: int, base: str, out: Path, options: dict[str, Any]
) -> None:
    enter_ranks(rank, world, port)
    torch.set_num_threads(1)
    bothways.finetune(base, pairs(64, 0), None, "embed", out=out, **options)


def test_two_ranks_compare_the_texts_of_both(tmp_path):
    base = str(make_folder(tmp_path / "bert", dropout=0.0))
    options = {**FAST, "until": "3 steps", "lr": 1e-3}
    alone = bothways.finetune(base, pairs(64, 0), None, "embed", **options)
    on_ranks(2, finetune_on_rank, base, tmp_path / "two", options)
    shared = load_model(tmp_path / "two" / "model").model.encoder.state_dict()
    for name, tensor in alone.task_model.model.encoder.state_dict().items():
        if not name.endswith("qkv.bias"):
            torch.testing.assert_close(tensor, shared[name], atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "good film"}] * 4, "nothing to learn"),
        ([{"anchor": f"film {n}", "positive": "rain"} for n in range(4)], "same second text"),
        ([{"text": f"film {n}", "label": str(n)} for n in range(4)], "one text"),
        ([{"text": f"film {n}", "label": "a"} for n in range(4)], "have the class"),
        (scored(4, 0)[:1] * 4, "no order"),
        ([{**row, "negative": "men"} for row in scored(8, 0)], "more than two texts"),
        ([{**row, "score": "a"} for row in scored(4, 0)], "no score"),
        (pairs(1, 0), "one training example"),
        ([{**row, "score": float("nan")} for row in scored(4, 0)], "score"),
        ([{**row, "scores": [1.0]} for row in taught(4, 0)], "scores for"),
    ],
)
def test_data_that_cannot_be_learned_is_refused(rows, words, model):
    with pytest.raises(BothwaysError, match=words):
        bothways.finetune(model, rows, None, "embed", epochs=1, **FAST)


def test_scores_beyond_a_cosine_and_classes_of_pairs_are_refused(model):
    for loss, rows, words in (
        (CosineRegression(), scored(8, 0), "up to 5"),
        (SupervisedContrastive(), scored(8, 0), "second text beside the class"),
        (MarginMSE(), pairs(8, 0), "no list of a teacher's scores"),
    ):
        with pytest.raises(BothwaysError, match=words):
            bothways.finetune(model, rows, None, SentenceEmbeddingTask(loss=loss), **FAST)
    task = SentenceEmbeddingTask(loss=InBatchSoftmax())
    read = bothways.finetune(model, scored(8, 0), None, task, until="1 steps", **FAST)
    assert any("softmax does not read" in str(finding) for finding in read.findings)


@pytest.mark.parametrize(
    ("values", "warned"),
    [((0, 1, 2), 1), ((0, 2), 1), ((0, 1), 0), ((0, 1, 2, 3), 0), ((0, 1.5, 2), 0)],
)
def test_classes_of_natural_language_inference_are_no_scores(values, warned):
    cycle = itertools.cycle(values)
    rows = [VectorExample(f"a {n}", f"b {n}", str(next(cycle))) for n in range(8)]
    pair = [VectorExample("c", "d"), VectorExample("e", "f")]
    for loss, train, dev in ((CoSENT(), rows, []), (InBatchSoftmax(), pair, rows)):
        found = [f for f in check_vector_examples(loss, train, dev) if "inference" in f.what]
        assert [f.severity for f in found] == ["warning"] * warned


def test_steps_in_which_texts_are_alone_in_their_class_are_warned_of(model):
    rows = [{"text": f"{BAD[0]} {n}", "label": f"c{n // 3}"} for n in range(60)]
    options = {**FAST, "until": "1 steps", "batch": 4}
    result = bothways.finetune(model, rows, None, "embed", **options)
    [finding] = [finding for finding in result.findings if finding.where == "batch.n"]
    draws = [random.Random(n).sample(rows, 4) for n in range(2000)]
    labels = [[row["label"] for row in draw] for draw in draws]
    alone = np.mean([step.count(label) == 1 for step in labels for label in step])
    assert int(finding.what.split("%")[0].split()[-1]) == pytest.approx(100 * alone, abs=2)
    result = bothways.finetune(model, rows, None, "embed", **{**options, "batch": 20})
    assert "batch.n" not in {finding.where for finding in result.findings}


def test_dev_data_of_another_form_decides_the_metric(model, tmp_path):
    result = bothways.finetune(model, pairs(32, 0), scored(20, 1), "embed", epochs=1, **FAST)
    assert result.settings.chosen_by == "spearman"
    again = bothways.evaluate(result.save(tmp_path / "saved"), scored(20, 1)).metrics
    assert result.metrics["spearman"] == pytest.approx(again["spearman"], abs=1e-6)
    found = bothways.evaluate(tmp_path / "saved", pairs(20, 1)).metrics
    assert found.keys() == {"ndcg@10", "mrr@10", "map"}


def test_dev_files_have_columns_of_their_own_unless_these_are_named(model, tmp_path):
    files = [tmp_path / name for name in ("pairs.jsonl", "scored.jsonl")]
    for file, rows in zip(files, (pairs(8, 0), scored(8, 1)), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = pairs(1, 0)[0].keys()
    options = {**FAST, "until": "1 steps"}
    result = bothways.finetune(model, *files, "embed", **options)
    assert "spearman" in result.metrics
    assert {result.task_model.task.columns.text, result.task_model.task.columns.text_b} == {*names}
    text, text_b = names
    with pytest.raises(DataError, match=f"has no column '{text}'"):
        bothways.finetune(model, *files, "embed", text=text, text_b=text_b, **options)


def test_a_batch_of_one_has_nothing_to_compare(model):
    options = {**FAST, "batch": 1, "until": "1 steps"}
    with pytest.raises(ConfigError, match="has one") as caught:
        bothways.finetune(model, pairs(8, 0), None, "embed", **options)
    assert caught.value.where == "batch.n"
    # This loss compares the documents of an example.
    task = SentenceEmbeddingTask(loss=TeacherKL())
    bothways.finetune(model, taught(8, 0), None, task, **options)


def test_settings_of_a_folder_are_kept_and_told(tmp_path):
    folder = make_sentence_encoder(tmp_path / "folder")
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf8")), "truncate_dim": 8}), "utf8")
    task = SentenceEmbeddingTask(pooling="cls")
    result = bothways.finetune(folder, pairs(8, 0), None, task, until="1 steps", **FAST)
    trained = result.task_model.task
    assert (trained.pooling, trained.normalised, trained.components) == ("cls", True, 8)
    assert (result.settings.task.normalised, result.settings.task.components) == (True, 8)
    [note] = [str(f) for f in result.findings if "as in the folder" in str(f)]
    assert ("normalised = True, components = 8" in note, "pooling" in note) == (True, False)


@pytest.mark.parametrize(("length", "expected"), [(None, 256), (24, 24)])
def test_a_tuned_model_reads_as_much_of_a_text_as_its_folder(tmp_path, length, expected):
    folder = make_sentence_encoder(tmp_path / "folder")
    options = {**FAST, "length": length, "until": "1 steps"}
    result = bothways.finetune(folder, pairs(8, 0), None, "embed", **options)
    notes = [str(finding) for finding in result.findings]
    assert any("length = 256" in note for note in notes) == (length is None)
    result.save(tmp_path / "tuned")
    file = tmp_path / "tuned" / "sentence_bert_config.json"
    assert json.loads(file.read_text("utf8"))["max_seq_length"] == expected
    assert bothways.load(tmp_path / "tuned").task_model.length == expected


def test_layers_that_cannot_be_saved_are_refused_before_training(model, tmp_path):
    task = SentenceEmbeddingTask(layers=(0,))
    with pytest.raises(ConfigError, match=r"reads \(0,\)") as caught:
        bothways.finetune(model, pairs(8, 0), None, task, out=tmp_path / "run", **FAST)
    assert (caught.value.where, [*tmp_path.iterdir()]) == ("layers", [])


def test_prompts_go_by_the_side_of_a_text(model):
    opened = load_model(model)
    task = SentenceEmbeddingTask(prompts={"query": "good ", "document": "bad "})
    bound = task.bind(opened.model, opened.tokenizer, (), 16)
    example = task.example({"query": "film", "positive": "rain", "negative": "men"})
    (encoded,) = bound.encode([example])
    expected = opened.tokenizer.encode(["good film", "bad rain", "bad men"])
    actual = [sequence.ids[1:-1].tolist() for sequence in encoded.sequences]
    assert actual == [ids.tolist() for ids in expected]


def test_retrieval_is_that_of_scikit_learn(model):
    from sklearn.metrics import ndcg_score

    task = SentenceEmbeddingTask(loss=InBatchSoftmax())
    predictor = bothways.load(model, task="embed", device="cpu")
    examples = [task.example(row) for row in with_negatives(20, 7)]
    # One anchor is also a negative of another one, and one is its own positive.
    examples[1] = dataclasses.replace(examples[1], negatives=(examples[0].text,))
    examples[2] = dataclasses.replace(examples[2], text_b=examples[2].text)
    metrics = retrieval((example, predictor(example)) for example in examples)
    texts = list(dict.fromkeys(text for example in examples for text in example.all_texts[1:]))
    queries = list(dict.fromkeys(example.text for example in examples))
    vectors = {text: predictor(text).vectors[0] for text in {*texts, *queries}}
    unit = {text: vector / np.linalg.norm(vector) for text, vector in vectors.items()}
    right = {query: {e.text_b for e in examples if e.text == query} for query in queries}
    labels = [[float(text in right[query]) for text in texts] for query in queries]
    scores = [[float(unit[query] @ unit[text]) for text in texts] for query in queries]
    assert examples[0].text in texts
    for row, query in enumerate(queries):
        if query in texts and query not in right[query]:
            scores[row][texts.index(query)] = -1.0
    assert metrics["ndcg@10"] == pytest.approx(ndcg_score(labels, scores, k=10), abs=1e-6)


def test_columns_are_found_by_their_names():
    task = SentenceEmbeddingTask()
    row = {"query": "a", "pos": ["b", "c"], "neg": ["d"]}
    example = task.example(row)
    assert example.all_texts == ("a", "b", "c", "d")
    for names in itertools.product(QUERIES, POSITIVES):
        assert task.example(dict(zip(names, "ab", strict=True))).all_texts == ("a", "b"), names
    several = task.example({"anchor": "a", "positive": "b", "negative_2": "d", "negative_1": "c"})
    assert several.negatives == ("c", "d")
    with pytest.raises(DataError, match="empty list"):
        task.example({"query": "a", "pos": [], "neg": ["d"]})
    with pytest.raises(DataError, match="a score that is not a number"):
        task.example({"query": "a", "pos": "b", "neg": "c", "scores": [10**400, 1]})


def test_a_guide_reads_the_texts_once_and_belongs_to_the_run(model, tmp_path):
    guide = make_folder(tmp_path / "guide", seed=7)
    unguided = bothways.finetune(model, pairs(48, 0), None, "embed", epochs=1, **FAST)

    def run(margin: float, **options: Any) -> Any:
        loss = InBatchSoftmax(guide=str(guide), margin=margin)
        task = SentenceEmbeddingTask(loss=loss)
        return bothways.finetune(model, pairs(48, 0), None, task, epochs=1, **FAST, **options)

    # No cosine is above that of the positive plus 2; all are above it minus 2.
    plain, kept, dropped = (done.task_model.model for done in (unguided, run(-2.0), run(2.0)))
    assert equal(kept, plain)
    assert not equal(dropped, plain)
    run(0.0, out=tmp_path / "run")
    make_folder(tmp_path / "guide", seed=8)
    with pytest.raises(BothwaysError, match="guide"):
        run(0.0, out=tmp_path / "run", resume=True)


def test_a_model_without_a_class_of_transformers_is_trained_and_saved(model, tmp_path):
    opened = bothways.load_model(model)
    shape = EncoderConfig(opened.tokenizer.size, 16, 1, 2, 24, position=Learned(32), mlp=Gated())
    bothways.save_model(tmp_path / "own", Model(shape, (MaskedHead(),)), opened.tokenizer)
    task = SentenceEmbeddingTask(pooling="max")
    run = bothways.finetune(tmp_path / "own", pairs(48, 0), None, task, epochs=1, **FAST)
    run.save(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "transformers has no class for this model" in card
    found = bothways.load(tmp_path / "saved").encode(["old men"])
    np.testing.assert_allclose(found, run.predictor().encode(["old men"]), rtol=0, atol=1e-6)


def test_each_text_has_its_vector_of_the_guide(model):
    opened = load_model(model)
    task = SentenceEmbeddingTask(long_texts="windows")
    rows = [*with_negatives(5, 3), {"anchor": "old men " * 12, "positive": "rain"}]
    data = label(task, opened.tokenizer, [task.example(row) for row in rows], [], 16)
    guided = with_guide_vectors(data, str(model), torch.device("cpu"), "fp32")
    predictor = bothways.load(model, "embed", device="cpu", normalised=True)
    for example, item in zip(guided.train_examples, guided.train, strict=True):
        for text, windows in zip(example.all_texts, item.by_text(item.sequences), strict=True):
            for window in windows:
                guide = window.target("texts", TextTargets).guide[0]
                np.testing.assert_allclose(guide, predictor.encode(text), atol=1e-5)


def beir_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "qrels").mkdir(parents=True)
    documents = [row["positive"] for row in rows]
    for name, texts in (("queries", [row["anchor"] for row in rows]), ("corpus", documents)):
        lines = [json.dumps({"_id": str(n), "text": text}) for n, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    for split, numbers in (("train", range(40)), ("dev", range(40, 60))):
        grades = [f"{n}\t{n}\t1\n{n}\t{n - 1}\t0\n" for n in numbers if n]
        (folder / "qrels" / f"{split}.tsv").write_text(
            "query-id\tcorpus-id\tscore\n" + "".join(grades)
        )
    return folder


def test_a_folder_of_beirs_form_is_training_data(model, tmp_path):
    rows = pairs(60, 0)
    grades = beir_folder(tmp_path / "beir", rows) / "qrels"
    read = [*SentenceEmbeddingTask().read(str(grades / "dev.tsv")).examples]
    assert [(e.text, e.text_b, e.positives, e.negatives) for e in read] == [
        (row["anchor"], row["positive"], (), (rows[40 + n - 1]["positive"],))
        for n, row in enumerate(rows[40:])
    ]
    train, dev = grades / "train.tsv", grades / "dev.tsv"
    result = bothways.finetune(model, train, dev, "embed", epochs=1, **FAST)
    assert result.metrics.keys() == {"ndcg@10", "mrr@10", "map"}
    text = (grades / "dev.tsv").read_text("utf8") + "1\tgone\t1\n"
    (grades / "other.tsv").write_text(text, "utf8")
    reading = SentenceEmbeddingTask().read(str(grades / "other.tsv"))
    assert (len([*reading.examples]), len(reading.notes)) == (len(read), 1)
    with pytest.raises(DataError, match="has grades for dev, other, train"):
        bothways.finetune(model, tmp_path / "beir", None, "embed", epochs=1, **FAST)
