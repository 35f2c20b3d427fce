"""Retrieval: exact nearest vectors as by brute force, folders as BEIR's, metrics as trec_eval's."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bothways.core.errors import DataError
from bothways.tasks.sentence_embedding import vectors as nearest
from bothways.tasks.sentence_embedding.examples import (
    EmbedColumns,
    corpus_file,
    read_beir,
    score_run,
    splits_of,
)
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.sentence_embedding.vectors import top_k


def brute_force(queries: Any, vectors: Any, k: int, names: Any = None) -> tuple[Any, Any]:
    """Products in float64, rounded to fp32 and sorted whole."""
    ids = -np.arange(len(vectors)) if names is None else names
    scores = np.array([[(q.astype(float) * v).sum() for v in vectors] for q in queries], np.float32)
    keys = [list(zip(row, ids, range(len(vectors)), strict=True)) for row in scores]
    order = [[n for *_, n in sorted(row, reverse=True)[:k]] for row in keys]
    rows = np.array(order, np.int64).reshape(len(queries), -1)
    return np.take_along_axis(scores, rows, 1), rows


@pytest.mark.parametrize("block", [7, 64])
@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(1, 150), k=st.integers(1, 40),
    levels=st.sampled_from([1, 2, 5, 1000]), named=st.booleans(), limit=st.sampled_from([10, 2**18]),
)  # fmt: skip
def test_top_k_is_that_of_brute_force(block, seed, count, k, levels, named, limit):
    draw = np.random.default_rng(seed)
    vectors = (draw.integers(0, levels, (count, 8)) - levels / 2).astype(np.float32) / 3
    vectors = vectors[np.sort(draw.integers(0, count, count))] if seed % 2 else vectors
    queries = draw.standard_normal((3, 8)).astype(np.float32)
    names = np.array([f"d{n}" for n in draw.permutation(count)]) if named else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest, "BLOCK_ROWS", block)
        patch.setattr(nearest, "DOUBTFUL", limit)
        patch.setattr(nearest, "QUERIES", 2)
        scores, rows = top_k(queries, vectors, k, names=names)
    expected = brute_force(queries, vectors, k, names)
    assert np.array_equal(rows, expected[1])
    assert np.array_equal(scores, expected[0])


def test_top_k_of_longer_and_longer_vectors(monkeypatch):
    """The rounding of a later block is larger than the distances of scores in an earlier one."""
    monkeypatch.setattr(nearest, "BLOCK_ROWS", 16)
    draw = np.random.default_rng(0)
    query, base = draw.standard_normal((2, 1, 64)).astype(np.float32)
    lengths = np.geomspace(1, 1e6, 64)[:, None]
    noise = draw.standard_normal((64, 64)) * lengths
    across = noise - noise @ query.T / (query @ query.T) * query  # orthogonal to the query
    vectors = (base + across).astype(np.float32)
    assert np.array_equal(top_k(query, vectors, 5)[1], brute_force(query, vectors, 5)[1])


def test_top_k_refuses_what_has_no_order():
    one = np.ones((1, 4), np.float32)
    for row in ([np.nan] * 4, [np.inf, -np.inf, np.inf, np.inf]):
        vectors = np.zeros((53, 4), np.float32)
        vectors[50:] = row
        with pytest.raises(DataError, match="a score is not a number"):
            top_k(one, vectors, 2)
    for width in (3, 0):
        with pytest.raises(DataError, match=f"queries have 4 components, and vectors {width}"):
            top_k(one, np.ones((2, width), np.float32), 2)
    assert top_k(one, np.empty((0, 4), np.float32), 2)[1].shape == (1, 0)
    assert top_k(one[:0], np.empty((9, 4), np.float32), 2)[1].shape == (0, 0)


DOCUMENTS = {"d1": "cats sleep", "d2": "", "d3": "it rains"}


def write_beir(folder: Path, grades: str, suffix: str = "") -> Path:
    """A folder as BEIR's with three documents and two queries."""
    (folder / "qrels").mkdir(parents=True)
    pairs = DOCUMENTS.items()
    rows = [{"_id": name, "title": text[:1] and "On", "text": text} for name, text in pairs]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / f"corpus.jsonl{suffix}").write_bytes(gzip.compress(lines) if suffix else lines)
    queries = [{"_id": "q1", "text": "who sleeps?"}, {"_id": "q2", "text": "weather"}]
    (folder / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    (folder / "qrels" / "test.tsv").write_text(grades)
    return folder


@pytest.mark.parametrize(
    ("grades", "suffix"),
    [
        ("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\tgone\t1\n", ""),
        ("q1 0 d1 2\nq1 0 gone 1\n", ".gz"),
    ],
)
def test_beir_folder(tmp_path, grades, suffix):
    folder = write_beir(tmp_path / "data", grades, suffix)
    data = read_beir(folder)
    assert data.documents == {"d1": "On cats sleep", "d2": "", "d3": "On it rains"}
    assert data.queries == {"q1": "who sleeps?"}
    assert data.grades == {"q1": {"d1": 2, "gone": 1}}
    assert splits_of(folder) == {"test": folder / "qrels" / "test.tsv"}
    task, columns = SentenceEmbeddingTask(), EmbedColumns("page")
    assert not task.read(str(folder)).notes
    assert "named columns are not read" in task.read(str(folder), columns).notes[0]


@pytest.mark.parametrize(
    ("grades", "split", "message"),
    [
        ("q1\td1\t1\n", "train", r"has no qrels/train.tsv; there are grades for test"),
        ("q7\td1\t1\n", "test", "grades q7 of no query"),
        ("q1\td9\t1\n", "test", "grades no document of the corpus"),
        ("q1\td1\t1\nq1\td1\thigh\n", "test", "test.tsv:2: is not a query, a document and a whole"),
        ("query-id\tcorpus-id\tscore\n", "test", "holds no grade"),
    ],
)
def test_beir_folder_with_a_mistake(tmp_path, grades, split, message):
    with pytest.raises(DataError, match=message):
        read_beir(write_beir(tmp_path / "data", grades), split)


def test_beir_folder_without_a_file_or_with_an_id_twice(tmp_path):
    folder = write_beir(tmp_path / "data", "q1\td1\t1\n")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(corpus.read_text() * 2)
    with pytest.raises(DataError, match=r'corpus.jsonl:4: has an "_id" that is used before'):
        read_beir(folder)
    corpus.write_text('{"_id": 1.5, "text": "a"}\n')
    with pytest.raises(DataError, match=r'corpus.jsonl:1: has an "_id" that is missing, or not'):
        read_beir(folder)
    (folder / "queries.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no queries.jsonl\n"):
        read_beir(folder)
    # A text is no folder.
    assert corpus_file(Path("a good film " * 30)) is None


def test_metrics_by_hand():
    grades = {"q": {"a": 2, "b": 1, "c": 0, "d": -1}, "absent": {"a": 1}}
    run = {"q": {"c": 0.9, "b": 0.5, "a": 0.5 + 1e-9, "q": 5.0}}  # in fp32 b and a are equal
    values = score_run(run, grades, cutoffs=[1, 10])
    gain = 1 / np.log2(3) + 2 / np.log2(4)
    expected = {
        "ndcg@1": 0, "ndcg@10": gain / (2 + 1 / np.log2(3)), "mrr@1": 0, "mrr@10": 1 / 2,
        "recall@1": 0, "recall@10": 1, "map@1": 0, "map@10": (1 / 2 + 2 / 3) / 2,
    }  # fmt: skip
    assert values == pytest.approx({name: value / 2 for name, value in expected.items()})
