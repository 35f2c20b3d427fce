"""Reranking: metrics as trec_eval and sklearn define them, the loss of transformers, data as people have it, and training."""

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, ndcg_score

import bothways
from bothways.core.errors import DataError, FolderError
from bothways.hub.model_folder import save_model
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.metrics import average_precision, ndcg, reciprocal_rank
from bothways.tasks.reranking.task import RankColumns, Ranker, RankExample, RerankingTask
from bothways.text.tokenizer import Tokenizer
from commands import run_line
from parity import batch_of
from toy_folder import BAD, FILLERS, GOOD, make_folder, save_classifier
from toy_task import WORDS, bind_small, make_task
from toy_tasks import make_rankings

METRICS = ("ndcg@10", "mrr@10", "map")


def in_order(labels: list[float]) -> tuple[float, float, float]:
    """The metrics of a ranking without ties, from their formulas."""
    gains = [label / np.log2(at + 2) for at, label in enumerate(labels[:10])]
    best = [label / np.log2(at + 2) for at, label in enumerate(sorted(labels)[::-1][:10])]
    hits = [at for at, label in enumerate(labels) if label > 0]
    if not hits:
        return 0.0, 0.0, 0.0
    precisions = [(n + 1) / (at + 1) for n, at in enumerate(hits)]
    first = 1 / (hits[0] + 1) if hits[0] < 10 else 0.0
    return sum(gains) / sum(best), first, sum(precisions) / len(hits)


def measured(scores: Any, labels: Any) -> tuple[float, float, float]:
    pair = np.array(scores, dtype=float), np.array(labels, dtype=float)
    return ndcg(*pair), reciprocal_rank(*pair), average_precision(*pair)


def test_metrics_are_those_of_the_formulas_and_of_sklearn():
    draw = np.random.default_rng(1)
    for _ in range(30):
        count = int(draw.integers(2, 30))
        labels = draw.integers(0, 4, count) * draw.integers(0, 2, count)
        scores = draw.permutation(count) - 7.0
        found = measured(scores, labels)
        assert found == pytest.approx(in_order(labels[np.argsort(-scores)].tolist()))
        if labels.any():
            assert found[2] == pytest.approx(average_precision_score(labels > 0, scores))
        tied = draw.integers(0, 4, count)
        expected = ndcg_score([labels], [tied], k=10)
        assert measured(tied, labels)[0] == pytest.approx(expected)


def test_ties_count_as_the_mean_of_all_orders():
    draw = random.Random(2)
    for count in (1, 2, 4, 5):
        for _ in range(12):
            scores = [draw.randrange(3) for _ in range(count)]
            labels = [float(draw.choice([0, 0, 1, 2])) for _ in range(count)]
            permutations = itertools.permutations(range(count))
            rows = [sorted(order, key=lambda n: -scores[n]) for order in permutations]
            orders = [in_order([labels[n] for n in row]) for row in rows]
            assert measured(scores, labels) == pytest.approx(np.mean(orders, axis=0))
    # Beyond the tenth place: 12 documents in one tie, of which one is relevant.
    harmonic = sum(1 / n for n in range(1, 11))
    assert measured([0] * 12, [1, *[0] * 11])[1] == pytest.approx(harmonic / 12)
    assert measured(range(12), [1, *[0] * 11]) == (0.0, 0.0, pytest.approx(1 / 12))


def make_ranker(tokenizer: Tokenizer, dropout: float = 0.0, **settings: Any) -> Ranker:
    task = RerankingTask(**settings)
    return bind_small(task, tokenizer, ("relevance",), seed=6, dropout=dropout).eval()


def test_metrics_are_means_over_queries(tokenizer):
    task, examples = make_ranker(tokenizer, 0.1), make_rankings(12, 3)
    rankings = [measured(made.logits, e.labels) for e, made in predict(task, examples)]
    expected = np.mean(rankings, axis=0)
    metrics = evaluate_task(task, examples)
    assert [metrics[name] for name in METRICS] == pytest.approx(expected)
    # One query is one, wherever its documents are.
    rows = [
        RankExample(e.query, (document,), (label,))
        for e in examples
        for document, label in zip(e.documents, e.labels, strict=True)
    ]
    random.Random(0).shuffle(rows)
    assert evaluate_task(task, rows) == pytest.approx(metrics)
    assert {*task.task.directions(())} == {*metrics}


def test_the_best_window_of_a_document_counts(tokenizer):
    task = make_ranker(tokenizer, long_texts="windows")
    long = " ".join(WORDS * 3)
    example = RankExample("ape bee", (long, "cat"), (1.0, 0.0))
    (encoded,) = task.encode([example])
    assert encoded.windows[0] > 2
    assert encoded.windows[1] == 1
    assert task.weights(batch_of([encoded]))["label"] == pytest.approx(2.0)
    ((_, prediction),) = predict(task, [example])
    each = task.scores(batch_of([encoded]))[:-1]
    assert prediction.logits[0] == pytest.approx(each.max().item(), abs=1e-5)
    assert each.max() - each.min() > 1e-3
    assert prediction.ranking[0].score == max(prediction.scores)


def ranked(tokenizer: Tokenizer, **settings: Any) -> bothways.Predictor:
    return bothways.Predictor(make_ranker(tokenizer, **settings))


def test_inputs_of_python(tokenizer):
    rank = ranked(tokenizer)
    documents = ["bee cat", "dog", "elk fox gnu"]
    prediction = rank(("ape", documents))
    assert prediction == rank({"query": "ape", "documents": documents})
    first, second = rank([("ape", documents), ("hen", ["dog"])])
    assert first.logits == pytest.approx(prediction.logits, abs=1e-6)
    assert (second.query, second.documents) == ("hen", ("dog",))
    assert rank(("ape", "dog")).logits == pytest.approx(prediction.logits[1:2], abs=1e-6)
    order = [each.index for each in prediction.ranking]
    assert order == np.argsort(-np.array(prediction.logits)).tolist()
    best = prediction.to_json()["ranking"][0]
    assert best["document"] == documents[order[0]]
    probability = 1 / (1 + np.exp(-np.array(prediction.logits)))
    assert prediction.scores == pytest.approx(probability)
    logits = ranked(tokenizer, activation="identity")(("ape", documents))
    assert logits.scores == logits.logits == prediction.logits
    named = ranked(tokenizer, prompts={"q": "hen "}, prompt_name="q")(("ape", documents))
    assert named.logits == rank(("hen ape", documents)).logits
    for wrong, message in (
        ("ape", "needs a query with documents"),
        (("ape", []), "needs a query with documents"),
        ([("ape", [1])], "a query and its documents, or a dict"),
    ):
        with pytest.raises(DataError, match=message):
            rank(wrong)
    with pytest.raises(DataError, match=r"is 3 texts, and the task 'regress' needs one or two"):
        bothways.tasks.regression.task.RegressionTask().from_texts(("a", "b", "c"))


FORMS = {
    "pairs.tsv": "query\tdocument\tlabel\nape\tbee\t1\nape\tcat\t0\nhen\tdog\t2\n",
    "ids.tsv": "qid\tquery\tpassage\trelevance\n7\tape\tbee\t1.0\n7\tape\tcat\t0\n8\then\tdog\t2\n",
    "named.csv": "question,body,good\nape,bee,true\nape,cat,false\nhen,dog,2\n",
    "none.tsv": "ape\tbee\t1\nape\tcat\t0\nhen\tdog\t2\n",
    "lists.jsonl": '{"query": "ape", "documents": ["bee", "cat"], "labels": [1, 0]}\n'
    '{"query": "hen", "documents": ["dog"], "labels": [2]}\n',
}
READ = {
    "named.csv": RankColumns("question", "body", "good"),
    "none.tsv": RankColumns("0", "1", "2"),
}


@pytest.mark.parametrize("name", FORMS)
def test_files_as_people_have_them(tmp_path, name):
    file = tmp_path / name
    file.write_text(FORMS[name])
    reading = RerankingTask().read(str(file), READ.get(name))
    found = [(e.query, e.documents, e.labels) for e in reading.examples]
    assert found == [("ape", ("bee", "cat"), (1.0, 0.0)), ("hen", ("dog",), (2.0,))]
    assert list(reading.unused) == (["qid"] if name == "ids.tsv" else [])
    bare = RerankingTask().read(str(file), READ.get(name), labelled=False).examples
    assert [example.labels for example in bare] == [None, None]
    if name not in READ:
        rows = list(reading.task.read(str(file)).examples)
        assert [len(e.documents) for e in rows] == [2, 1]


def test_rows_with_and_without_a_label_are_not_one_example(tmp_path):
    file = tmp_path / "pairs.tsv"
    file.write_text("query\tdocument\tlabel\nape\tbee\t1\nape\tcat\t\nape\tdog\t\n")
    found = [(e.documents, e.labels) for e in RerankingTask().read(str(file)).examples]
    assert found == [(("bee",), (1.0,)), (("cat", "dog"), None)]


@pytest.mark.parametrize(("positive", "negative"), [("pos", "neg"), ("positives", "negatives")])
def test_relevant_documents_and_others(positive, negative, tmp_path):
    row = {"query": "ape", positive: ["bee"], negative: ["cat", "dog"]}
    example = RerankingTask().example(row)
    assert (example.documents, example.labels) == (("bee", "cat", "dog"), (1.0, 0.0, 0.0))
    row = json.dumps({"anchor": "ape", positive: "bee", negative: "cat"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{row}\n")
    reading = RerankingTask().read(str(tmp_path / "rows.jsonl"))
    assert [(e.query, e.documents) for e in reading.examples] == [("ape", ("bee", "cat"))] * 2
    new = {"query": "ape", "documents": ["dog"]}  # what a trained model ranks
    assert reading.task.example(new).documents == ("dog",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a", "other": "b"}, r"has the documents \(query, other\)"),
        ({"query": "a", "text": "b", "passage": "c"}, r"has the documents \(passage, text\)"),
        ({"query": "a", "documents": [1]}, r"holds a value of type int, where a document"),
        ({"query": "a", "documents": None}, r"holds a null, where a document"),
        ({"query": 3, "documents": "b"}, r"column 'query' holds int, not text"),
        ({"query": "a", "documents": ["b"], "labels": [1, 0]}, r"holds 2 labels for 1 document"),
        ({"query": "a", "document": "b", "label": -1}, r"'label' holds -1, which is not a"),
        ({"query": "a", "document": "b", "label": "yes"}, r"'yes', which is not a .*\n  Write"),
        ({"query": "a", "document": "b", "label": "inf"}, r"which is not a relevance"),
        ({"query": "a", "document": "b", "label": 10**400}, r"which is not a relevance"),
        ({"query": "a", "document": "b", "label": 10**5000}, r"number with too many digits"),
        ({"query": "a", "document": "b", "label": "1_0"}, r"'1_0', which is not a relevance"),
        ({"query": "a", "documents": ["b", "c"], "labels": [1, None]}, r"None, which is no"),
    ],
)
def test_rows_that_are_no_rankings(row, message):
    with pytest.raises(DataError, match=message):
        RerankingTask().example(row, where="row 3")


def test_a_constant_answer_is_a_random_order(tokenizer):
    examples = make_rankings(30, 1)
    baseline = dict(RerankingTask().baseline(examples))
    truth = np.array([label for e in examples for label in e.labels or ()])
    p = truth.mean()
    entropy = -np.mean(truth * np.log(p) + (1 - truth) * np.log(1 - p))
    assert baseline.pop("loss") == pytest.approx(entropy)
    expected = np.mean([measured([0] * len(e.documents), e.labels) for e in examples], axis=0)
    assert [baseline[name] for name in METRICS] == pytest.approx(expected)
    graded = [RankExample("q", ("a", "b"), (3.0, 0.0))]  # as dev data may be
    assert RerankingTask().baseline(graded).keys() == {*METRICS}
    rank = ranked(tokenizer)
    assert len(rank(("ape", ["bee cat", "dog elk"])).signature) == 2


def test_answers_are_a_label_for_each_document():
    task, example = RerankingTask(), RankExample("q", ("a", "b"))
    assert task.answered(example, [1, 0.0]).labels == (1.0, 0.0)
    assert task.answered(RankExample("q", ("a",)), True).labels == (1.0,)
    assert task.answered(example, None).labels is None
    with pytest.raises(DataError, match="1 label for 2 documents"):
        task.answered(example, 1)


def make_labelled(count: int, seed: int) -> list[dict[str, Any]]:
    """Good documents are relevant, whatever the query."""
    draw = random.Random(seed)
    rows = []
    for n in range(count):
        documents = [draw.choice(words) for words in draw.sample((GOOD, BAD, BAD), 3)]
        labels = [int(word in GOOD) for word in documents]
        query = f"the {draw.choice(FILLERS[:-1])} {n}"
        rows.append({"query": query, "documents": documents, "labels": labels})
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("trained")
    folder = make_folder(place / "bert", dropout=0.0)
    settings = {"task": "rerank", "max_length": 24, "epochs": 3, "lr": 3e-3, "progress": False}
    result = bothways.finetune(
        folder, train=make_labelled(80, 1), dev=make_labelled(30, 2), **settings
    )
    assert result.metrics["ndcg@10"] > 0.95
    assert result.metrics["map"] > 0.95
    return result.save(place / "model")


def test_a_trained_model_opens_as_a_cross_encoder(trained):
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification
    assert not any(auto.from_pretrained(trained, output_loading_info=True)[1].values())
    rank = bothways.load(trained)
    assert rank.task_model.task.name == "rerank"
    documents = ["good film", "poor play", " ".join(["the old men"] * 12)]
    theirs = CrossEncoder(str(trained), device="cpu")
    assert theirs.max_seq_length == 24
    found = theirs.rank("great film", documents)
    ours = rank(("great film", documents)).ranking
    assert [each["corpus_id"] for each in found] == [each.index for each in ours]
    assert [each["score"] for each in found] == pytest.approx([e.score for e in ours], abs=1e-6)


def test_a_cross_encoder_is_tuned_with_the_settings_of_its_folder(tmp_path):
    from sentence_transformers import CrossEncoder

    save_classifier(tmp_path / "plain", make_folder(tmp_path / "bert"), ("LABEL_0",))
    (tmp_path / "plain" / "bothways.json").unlink()
    CrossEncoder(
        str(tmp_path / "plain"), device="cpu", max_length=20, activation_fn=torch.nn.Identity(),
        prompts={"ask": "it ends "}, default_prompt_name="ask",
    ).save_pretrained(str(tmp_path / "model"))  # fmt: skip
    settings: dict[str, Any] = {"task": "rerank", "until": "1 steps", "progress": False}
    result = bothways.finetune(tmp_path / "model", train=make_labelled(4, 1), **settings)
    assert any("prompt_name = 'ask', length = 20" in str(note) for note in result.findings)
    # In training the prompt is read before the query, as in prediction.
    example = RankExample("the film", ("bad",), (1.0,))
    (encoded,) = result.task_model.encode([example])
    tokenizer = result.task_model.tokenizer
    prompted = tokenizer.encode(["it ends the film"])[0].tolist()
    assert encoded.sequences[0].ids[1 : 1 + len(prompted)].tolist() == prompted
    opened = bothways.load(result.save(tmp_path / "tuned")).task_model
    assert (opened.length, opened.task.activation) == (20, "identity")
    reference = CrossEncoder(str(tmp_path / "tuned"), device="cpu")
    assert (reference.max_seq_length, reference.default_prompt_name) == (20, "ask")
    expected = reference.predict([("the film", "bad")])
    rank = result.predictor()
    assert rank(("the film", ["bad"])).scores == pytest.approx(list(expected), abs=1e-6)
    # A cross-encoder of three classes is none of this task.
    save_classifier(tmp_path / "classes", tmp_path / "bert", ("a", "b", "c"))
    (tmp_path / "classes" / "bothways.json").unlink()
    shutil.copy(tmp_path / "model" / "config_sentence_transformers.json", tmp_path / "classes")
    of_classes = bothways.finetune(tmp_path / "classes", train=make_labelled(4, 1), **settings)
    assert of_classes.task_model.task.activation == "sigmoid"


def test_the_command_line(trained, tmp_path, capsys):
    rows, pairs = make_labelled(5, 3), tmp_path / "pairs.tsv"
    lines = ["q\td\trel\n"]
    for row in rows:
        judged = zip(row["documents"], row["labels"], strict=True)
        lines += [f"{row['query']}\t{text}\t{label}\n" for text, label in judged]
    pairs.write_text("".join(lines))
    columns = ("--text", "q", "--text-b", "d")
    run_line("predict", str(trained), str(pairs), *columns, "--top", "2")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["query"] for each in found] == [row["query"] for row in rows]
    assert all(len(each["ranking"]) == 2 for each in found)
    run_line("evaluate", trained, pairs, *columns, "--label", "rel", "--json")
    expected = bothways.load(trained).evaluate(rows)
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected)


def test_fewer_or_more_outputs_than_one(tmp_path):
    task = make_task(tmp_path / "vocabulary")
    save_model(tmp_path / "three", task.model, task.tokenizer, labels=task.labels)
    with pytest.raises(FolderError, match=r"has 3 outputs \(x, y, z\), and rerank has one"):
        bothways.load(tmp_path / "three", task="rerank")
