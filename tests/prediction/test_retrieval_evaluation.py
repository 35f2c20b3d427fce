"""Folders as BEIR's: the metrics of vectors and of BM25, their table, and a task of mteb."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bothways
from bothways.core.errors import ConfigError
from bothways.prediction.search import evaluation
from bothways.tasks.sentence_embedding.examples import read_beir, score_run
from commands import run_line
from heard_progress import Heard

TEXTS = ["the cat", "a dog", "the bird sleeps", "cat and dog", "rain", "the dog sleeps"]


def write_folder(folder: Path, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{n}", "text": text} for n, text in enumerate(TEXTS)]
    queries = [{"_id": name, "text": text} for name, text in zip(["q1", "d2"], TEXTS, strict=False)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    grades = [
        f"{query['_id']}\td{document}\t{grade}\n"
        for query in queries
        for document, grade in enumerate(draw.integers(0, 3, len(TEXTS)))
    ]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(grades))
    return folder


def test_a_folder_is_ranked_as_by_all_cosines(tmp_path, masked, capsys):
    folders = [write_folder(tmp_path / "all" / name, seed) for seed, name in enumerate("ab")]
    done = bothways.evaluate(masked, folders[0], progress=False)
    embedder = bothways.load(masked, "embed")
    data = read_beir(folders[0])
    cosines = embedder.similarity(list(data.queries.values()), list(data.documents.values()))
    run = evaluation.rank_by_vectors(embedder, data, 100)
    for query, row in zip(data.queries, cosines, strict=True):
        expected = dict(zip(data.documents, row.tolist(), strict=True))
        assert run[query] == pytest.approx(expected, abs=1e-6)
    if importlib.util.find_spec("bm25s") is not None:
        words = evaluation.rank_by_words(data, 2)
        # Those that share a word with "the cat" and "a dog", of which articles do not count.
        assert {name: {*scores} for name, scores in words.items()} == {
            "q1": {"d0", "d3"}, "d2": {"d1", "d3", "d5"},
        }  # fmt: skip
        scores = score_run(evaluation.rank_by_words(data, 100), data.grades, evaluation.CUTOFFS)
        assert done.retrieval["a"]["bm25"] == scores
    run_line("evaluate", masked, tmp_path / "all", "--json")
    tables = json.loads(capsys.readouterr().out)
    assert list(tables) == ["a", "b", "mean"]
    assert tables["a"]["vectors"] == done.metrics
    for metric, value in tables["mean"]["vectors"].items():
        both = [tables[name]["vectors"][metric] for name in "ab"]
        assert value == pytest.approx(np.mean(both))
    run_line("evaluate", masked, tmp_path / "all")
    assert "mean" in capsys.readouterr().out
    for split in ("dev", "train"):
        shutil.copy(folders[0] / "qrels" / "test.tsv", folders[0] / "qrels" / f"{split}.tsv")
    bothways.evaluate(masked, folders[0], progress=(heard := Heard()))
    assert "a: of dev, test, train, the grades are of test" in heard.text
    with pytest.raises(ConfigError, match="does nothing with retrieval data"):
        bothways.evaluate(masked, folders[0], text="body", progress=False)


def test_metrics_of_both_rankings_are_those_of_trec_eval(tmp_path, masked):
    pytrec_eval = pytest.importorskip("pytrec_eval")
    pytest.importorskip("bm25s")
    folder = write_folder(tmp_path / "data", 3)
    done = bothways.evaluate(masked, folder, progress=False).to_json()["data"]
    data = read_beir(folder)
    runs = {
        "vectors": evaluation.rank_by_vectors(bothways.load(masked, "embed"), data, 100),
        "bm25": evaluation.rank_by_words(data, 100),
    }
    measures = {"ndcg_cut.10", "map_cut.10", "recall.10", "recip_rank"}
    for name, run in runs.items():
        kept = {
            query: {document: score for document, score in scores.items() if document != query}
            for query, scores in run.items()
        }
        results = pytrec_eval.RelevanceEvaluator(data.grades, measures).evaluate(kept)
        for ours, theirs in (
            ("ndcg@10", "ndcg_cut_10"), ("map@10", "map_cut_10"), ("recall@10", "recall_10"),
            ("mrr@10", "recip_rank"),
        ):  # fmt: skip
            mean = sum(values[theirs] for values in results.values()) / len(data.grades)
            assert done[name][ours] == pytest.approx(mean, abs=1e-6)


def test_a_task_of_mteb(tmp_path, masked):
    mteb: Any = pytest.importorskip("mteb")
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS

    from bothways.mteb import MtebEncoder

    rows = {"sentence1": TEXTS, "sentence2": TEXTS[::-1], "score": [0.0, 1, 2, 3, 4, 5]}

    class Local(AbsTaskSTS):
        metadata = mteb.TaskMetadata(
            name="Local", description="local", dataset={"path": "none", "revision": "1"},
            type="STS", category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )  # fmt: skip
        min_score, max_score = 0, 5

        def load_data(self, **_: Any) -> None:
            self.dataset, self.data_loaded = {"test": Dataset.from_dict(rows)}, True

    result = mteb.evaluate(MtebEncoder(masked), Local(), cache=None)
    (scores,) = result.task_results[0].scores["test"]
    embedder = bothways.load(masked, "embed")
    cosines = np.diag(embedder.similarity(rows["sentence1"], rows["sentence2"]))
    from scipy.stats import spearmanr

    expected = spearmanr(cosines.round(6), rows["score"]).statistic
    assert scores["cosine_spearman"] == pytest.approx(expected, abs=1e-5)


def test_a_retrieval_task_of_mteb(tmp_path, masked):
    """Its nDCG is that of `bothways.evaluate`, with the prompts of queries and documents."""
    mteb: Any = pytest.importorskip("mteb")
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    from bothways.mteb import MtebEncoder

    folder = write_folder(tmp_path / "local", 3)
    for file in (folder / "queries.jsonl", folder / "qrels" / "test.tsv"):
        # A query is not found as a document, as mteb has it.
        file.write_text(file.read_text().replace('"d2"', '"q2"').replace("d2\td", "q2\td"))
    data = read_beir(folder)
    prompts = {"query": "the ", "passage": "rain "}

    class Local(AbsTaskRetrieval):  # type: ignore[misc]
        metadata = mteb.TaskMetadata(
            name="LocalRetrieval", description="local", dataset={"path": "none", "revision": "1"},
            type="Retrieval", category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )  # fmt: skip

        def load_data(self, **_: Any) -> None:
            texts = data.documents.items()
            rows = [{"id": name, "title": "", "text": text} for name, text in texts]
            queries = [{"id": name, "text": text} for name, text in data.queries.items()]
            split = {
                "corpus": Dataset.from_list(rows), "queries": Dataset.from_list(queries),
                "relevant_docs": data.grades, "top_ranked": None,
            }  # fmt: skip
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    result = mteb.evaluate(MtebEncoder(masked, prompts=prompts), Local(), cache=None)
    (scores,) = result.task_results[0].scores["test"]
    done = bothways.evaluate(masked, folder, progress=False, prompts=prompts).retrieval
    assert done is not None
    (rankings,) = done.values()
    ours = next(iter(rankings.values()))
    assert scores["ndcg_at_10"] == pytest.approx(ours["ndcg@10"], abs=1e-5)
