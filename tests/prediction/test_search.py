"""Indexes: exact as brute force, changed at once or not at all, checked against their model, damaged ones refused."""

from __future__ import annotations

import dataclasses
import errno
import functools
import gc
import itertools
import json
import os
import pickle
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import bothways
from bothways.core.errors import (
    BothwaysError,
    ConfigError,
    DataError,
    FolderError,
    ResourceError,
)
from bothways.core.files import HIDDEN
from bothways.core.progress import SILENT
from bothways.indexes import read_texts
from bothways.model.kernels.library import runs_on
from bothways.prediction.search import change, ranking
from bothways.prediction.search.change import change_index
from bothways.prediction.search.index import Hit, Index, IndexRecord
from bothways.prediction.search.ranking import CodedVectors, StoredVectors, search_codes
from bothways.tasks.sentence_embedding.vectors import top_k
from commands import run_line
from heard_progress import Heard
from toy_masked import make_masked

compiled = pytest.mark.skipif(not runs_on(torch.device("cpu")), reason="no compiled kernels here")
WIDTH = 70  # no multiple of 64
RECORD = IndexRecord("model", "digest", WIDTH, True, "fp32")


@functools.cache
def vector_of(text: str) -> np.ndarray:
    """A unit vector of a text, which is its own seed."""
    row = np.random.default_rng([*text.encode()]).standard_normal(WIDTH)
    return (row / np.linalg.norm(row)).astype(np.float32)


def embed(texts: Iterable[str]) -> np.ndarray:
    return np.stack([*map(vector_of, texts)])


def add(folder: Path, texts: Any, delete: Any = (), record: Any = RECORD, **options: Any) -> Index:
    return change_index(folder, record, texts.items(), embed, SILENT, delete=delete, **options)


def found(index: Index, query: str, k: int = 5, **options: Any) -> list[Hit]:
    return index.ranked([query], embed([query]), k, **options)[0]


def expected(documents: Mapping[str, str], query: str, k: int = 5) -> list[Hit]:
    """Hits by brute force in float64."""
    (vector,) = embed([query]).astype(float)
    products = {name: (vector_of(text) * vector).sum() for name, text in documents.items()}
    scores = {name: float(np.float32(product)) for name, product in products.items()}
    order = sorted(scores, key=lambda name: (scores[name], name), reverse=True)[:k]
    return [Hit(name, scores[name], documents[name]) for name in order]


@pytest.mark.parametrize(("seed", "coded"), [(0, 30_000), (1, 1), (2, 12)])
def test_an_index_that_changed_is_one_of_its_documents(tmp_path, seed, coded, monkeypatch):
    monkeypatch.setattr(change, "WINDOW", 7)
    monkeypatch.setattr(ranking, "CODED_ROWS", coded)
    draw, documents = random.Random(seed), dict[str, str]()
    for step in range(12):
        count = draw.choice([0, 3, 20])
        new = {f"d{draw.randrange(80)}": f"text {draw.randrange(40)}" for _ in range(count)}
        delete = draw.sample(sorted(documents), min(len(documents), draw.choice([0, 2, 15])))
        index = add(tmp_path / "index", new, delete)
        documents = {name: text for name, text in documents.items() if name not in delete} | new
        assert len(index) == len(documents)
        assert found(index, f"text {step}") == expected(documents, f"text {step}")
        assert found(index, "text 1", 100) == expected(documents, "text 1", 100)
        assert len(index.record.segments) <= 7
        assert len(set(index.ids[index.live].tolist())) == len(index)
    named = {segment.number for segment in index.record.segments} | {index.record.deleted}
    add(tmp_path / "index", {"last": "one"})
    numbers = {int(path.stem.split("-")[1]) for path in (tmp_path / "index").glob("*-*")}
    assert numbers <= named | {13}


@pytest.mark.parametrize(("stored", "least"), [("bf16", 0.97), ("int8", 0.9), ("binary", 0.85)])
def test_stored_vectors_find_the_same_documents(tmp_path, stored, least):
    documents = {f"d{n}": f"text {n}" for n in range(600)}
    record = dataclasses.replace(RECORD, stored=stored)
    half = dict(list(documents.items())[:400])
    add(tmp_path / "index", half, record=record)
    index = add(tmp_path / "index", {n: t for n, t in documents.items() if n not in half}, ["d0"])
    del documents["d0"]
    queries = [f"query {n}" for n in range(20)]
    hits = [{hit.id for hit in found(index, query, 10)} for query in queries]
    right = [{hit.id for hit in expected(documents, query, 10)} for query in queries]
    assert np.mean([len(a & b) / 10 for a, b in zip(hits, right, strict=True)]) >= least
    assert "d0" not in {hit.id for hit in found(index, "text 0", 10)}
    assert index.vectors[np.array([3, 401])].shape == (2, WIDTH)
    # The scores are those of the decoded vectors.
    vectors = index.vectors[np.arange(len(index.ids))].astype(float)
    for hit in found(index, "query 1", 10):
        row = int(np.flatnonzero(index.ids == hit.id.encode())[-1])
        assert hit.score == np.float32((vectors[row] * embed(["query 1"])[0]).sum())


@compiled
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    width=st.integers(1, 70),
    lengths=st.sampled_from([0, 1, 8, 30]),
    k=st.integers(1, 12),
    seed=st.integers(0, 999),
)
def test_codes_find_what_the_vectors_find_to_the_bit(sizes, width, lengths, k, seed):
    """Also of vectors of very different lengths, of zeros, and of equal ones."""
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-lengths / 2, lengths / 2, sum(sizes))
    matrix = (rng.standard_normal((sum(sizes), width)) * scale[:, None]).astype(np.float32)
    matrix[rng.random(len(matrix)) < 0.1] = 0
    matrix[rng.integers(len(matrix), size=3)] = matrix[0]
    parts = np.split(matrix, np.cumsum(sizes)[:-1])
    coded = [CodedVectors.of(part) if rng.random() < 0.8 else None for part in parts]
    coded[0] = coded[0] or CodedVectors.of(parts[0])
    names = rng.permutation(len(matrix)).astype("S")
    deleted = rng.random(len(matrix)) < 0.2
    deleted[0] = False
    vectors, k = StoredVectors(parts, width, 0.0), min(k, int((~deleted).sum()))
    queries = rng.standard_normal((2, width)).astype(np.float32)
    wanted = top_k(queries, vectors, k, names=names, deleted=deleted)
    actual = search_codes(queries, coded, vectors, k, names, deleted)
    assert [array.tolist() for array in actual] == [array.tolist() for array in wanted]


@compiled
def test_few_rows_of_codes_are_in_doubt():
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal((20_000, 96)).astype(np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    codes, query = CodedVectors.of(matrix), matrix[7] + matrix[8]
    products, exact = codes.products(query), matrix.astype(np.float64) @ query
    assert np.abs(products - exact).max() <= codes.error * np.linalg.norm(query)
    assert codes.error < 0.02
    floor = np.partition(products, -10)[-10] - 2 * codes.error * np.linalg.norm(query)
    assert (products >= floor).sum() < 100


def test_many_queries_and_a_processor_without_kernels_read_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "CODED_ROWS", 1)
    index = add(tmp_path / "index", {f"d{n}": f"text {n}" for n in range(9)})
    monkeypatch.setattr(ranking.CodedVectors, "products", None)  # whoever calls it fails
    assert len(index.nearest(embed([f"text {n}" for n in range(5)]), 3)[0]) == 5
    monkeypatch.setattr(ranking, "runs_on", lambda device: False)
    assert len(index.nearest(embed(["text 1"]), 3)[0]) == 1


def test_codes_are_those_of_torch_and_of_sentence_transformers():
    from sentence_transformers.util.quantization import quantize_embeddings

    vectors = embed([f"text {n}" for n in range(200)])
    bf16 = ranking.compress(vectors, "bf16", 0.0)
    assert np.array_equal(bf16, torch.from_numpy(vectors).bfloat16().view(torch.uint16).numpy())
    bits = ranking.signs(vectors)
    reference = quantize_embeddings(vectors, "ubinary")
    assert np.array_equal(bits.T.copy().view(np.uint8)[:, : reference.shape[1]], reference)
    scale = ranking.choose_scale(vectors)
    codes = ranking.compress(vectors, "int8", scale)
    assert np.abs(StoredVectors([codes], WIDTH, scale)[:] - vectors).max() <= scale / 2 * 1.001
    assert np.abs(codes).max() <= 127


def test_signs_are_counted_without_numpy_2(monkeypatch):
    words = np.random.default_rng(0).integers(0, 2**63, 50, np.uint64)
    counts = [int(word).bit_count() for word in words]
    assert ranking._count_bits(words).tolist() == counts
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert ranking._count_bits(words).tolist() == counts


def die_at(number: int) -> None:
    """End this process in place of the renaming of a file with this number."""
    count, replace = 0, Path.replace

    def dying(self: Path, target: Any) -> Path:
        nonlocal count
        count += 1
        if count == number:
            os._exit(9)
        return replace(self, target)

    Path.replace = dying  # type: ignore[method-assign, assignment]


def test_a_killed_change_leaves_the_old_index_or_the_new_one(tmp_path):
    """The process ends before the n-th file gets its name, for every n."""
    old = {f"d{n}": f"text {n}" for n in range(30)}
    new = {f"d{n}": f"new {n}" for n in range(20, 40)}
    add(tmp_path / "base", old)
    after = {name: text for name, text in old.items() if name != "d3"} | new
    outcomes = list[bool]()
    for kill_at in range(20):
        folder = tmp_path / f"index{kill_at}"
        shutil.copytree(tmp_path / "base", folder)
        (folder / f"{HIDDEN}77-vectors-2.npy").touch()  # of a thread of a killed process
        if (child := os.fork()) == 0:
            die_at(kill_at)
            add(folder, new, ["d3"])
            os._exit(0)
        _, status = os.waitpid(child, 0)
        index = Index(folder)
        segments = map(index.documents, range(len(index.record.segments)))
        documents = dict(itertools.chain.from_iterable(segments))
        outcomes.append(documents == after)
        assert documents in (old, after)
        assert found(index, "text 25") == expected(documents, "text 25")
        repaired = add(folder, new, ["d3"] if documents == old else [])
        assert found(repaired, "new 25") == expected(after, "new 25")
        assert not [*folder.glob(f"{HIDDEN}*")]
        if os.waitstatus_to_exitcode(status) == 0 and kill_at:
            break
    assert outcomes[1:-1] == [False] * (len(outcomes) - 2)
    assert len(outcomes) > 5
    assert outcomes[-1]


def test_a_mistake_in_a_change_leaves_the_index(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    add(folder, {"a": "one"})
    for documents, delete, message in (
        ([("b", "x"), ("b", "y")], [], "the id 'b' occurs twice"),
        ([("", "x")], [], "the id '' is empty"),
        ([("x" * 256, "x")], [], "has more than 255 bytes"),
        ([("a\0b", "x")], [], "the id 'a"),
        ([], ["nobody"], "there is no document 'nobody' to delete"),
    ):
        with pytest.raises(DataError, match=message):
            change_index(folder, RECORD, documents, embed, SILENT, delete=delete)
    assert found(Index(folder), "one") == expected({"a": "one"}, "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(FolderError, match="holds other files than an index"):
        add(tmp_path / "other", {"a": "one"})


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="a system without it")
def test_vectors_that_a_full_disk_has_no_room_for(tmp_path, monkeypatch):
    """A page of a mapped file that the disk cannot take ends the process by SIGBUS."""
    add(tmp_path / "index", {"a": "one"})

    def reserve(descriptor: int, offset: int, size: int) -> None:
        assert (offset, size) == (0, os.fstat(descriptor).st_size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with pytest.raises(ResourceError, match="No space left") as caught:
        add(tmp_path / "index", {"b": "two"})
    assert caught.value.where == tmp_path / "index" / "vectors-2.npy"
    monkeypatch.undo()
    assert len(add(tmp_path / "index", {"c": "three"})) == 2


def test_queries_that_do_not_fit(tmp_path):
    index = add(tmp_path / "index", {"a": "one"})
    with pytest.raises(DataError, match="queries have 3 components, and vectors 70"):
        index.nearest(np.ones((1, 3), np.float32), 1)
    with pytest.raises(DataError, match="are not finite"):
        index.nearest(np.full((1, WIDTH), np.nan, np.float32), 1)
    with pytest.raises(ConfigError, match="built without BM25"):
        index.ranked(["one"], None, mode="bm25")
    assert add(tmp_path / "index", {}, ["a"]).nearest(embed(["x"]), 3)[0].shape == (1, 0)


@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "noise"])
def test_a_damaged_index_is_one_message(tmp_path, damage, monkeypatch):
    pytest.importorskip("bm25s")
    monkeypatch.setattr(ranking, "CODED_ROWS", 1)
    folder = add(tmp_path / "index", {f"d{n}": f"text {n}" for n in range(9)}, bm25=True).folder
    files = [path for path in folder.rglob("[!.]*") if path.is_file()]
    assert len(files) == 12
    for file in files:
        content = file.read_bytes()
        changed = {"cut": content[: len(content) // 2], "empty": b"", "noise": os.urandom(200)}
        file.unlink() if damage == "gone" else file.write_bytes(changed[damage])
        message = r"the index is damaged|is not an index|is not JSON|is not UTF-8"
        with pytest.raises(FolderError, match=message):
            found(Index(folder), "text 1", 9, mode="hybrid")
        file.write_bytes(content)
    assert len(found(Index(folder), "text 1", 9, mode="hybrid")) == 9


@pytest.mark.parametrize("stored", ["fp32", "binary"])
def test_an_open_index_stays_as_it_was_though_its_files_are_replaced(tmp_path, stored):
    record = dataclasses.replace(RECORD, stored=stored)
    index = add(tmp_path / "index", {"a": "one", "b": "two"}, record=record)
    hits = found(index, "one")
    assert found(pickle.loads(pickle.dumps(index)), "one") == hits
    for number in range(4):  # small segments are joined, and the files of the old ones removed
        add(tmp_path / "index", {"a": f"new {number}", f"c{number}": "three"})
    assert not (tmp_path / "index" / "texts-1.jsonl").exists()
    assert found(index, "one") == hits


def test_a_change_of_texts_cut_between_lines_is_refused(tmp_path):
    folder = add(tmp_path / "index", {"a": "one", "b": "two"}).folder
    texts = folder / "texts-1.jsonl"
    texts.write_bytes(texts.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(FolderError, match=r"the index is damaged: texts-1"):
        add(folder, {"c": "three"}, bm25=True)


def test_a_record_with_impossible_values(tmp_path):
    folder = add(tmp_path / "index", {"a": "one", "b": "two"}).folder
    add(folder, {}, ["a"])
    record = json.loads((folder / "index.json").read_text())
    [segment] = record["segments"]
    np.save(folder / "codes-1.npy", np.zeros((2, WIDTH), np.int16))
    np.save(folder / "scales-1.npy", np.ones(2, np.float32))
    impossible: list[dict[str, Any]] = [
        {"segments": [{**segment, "rows": 5}]}, {"segments": [{**segment, "error": 0.5}]},
        {"width": 0}, {"width": 71}, {"stored": "int8"}, {"scale": "x"}, {"new": 1}, {"segments": []},
    ]  # fmt: skip
    for change_ in impossible:
        (folder / "index.json").write_text(json.dumps(record | change_))
        with pytest.raises(FolderError, match="the index is damaged"):
            Index(folder)


HEADERS = (
    "{'descr': '<f4')",
    "{'shape': {[]: 1}}",
    "{'shape': " + "9" * 5000,
    "{'shape': (9" + "9" * 20,
)
"""Headers of .npy files for which numpy raises no ValueError."""


@pytest.mark.parametrize("stored", ["fp32", "binary"])
def test_arrays_of_another_kind_are_refused(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(ranking, "CODED_ROWS", 1)
    record = dataclasses.replace(RECORD, stored=stored)
    add(tmp_path / "index", {f"d{n}": f"text {n}" for n in range(9)}, record=record)
    folder = add(tmp_path / "index", {}, ["d3"]).folder
    for file in sorted(folder.glob("*.npy")):
        content, values = file.read_bytes(), np.load(file)
        others = [values[..., None], values.astype("U" if values.dtype.kind == "S" else "S9")]
        if values.dtype.itemsize > 1 and values.dtype.kind != "S":
            others.append(values.astype(values.dtype.newbyteorder()))
        others += [np.concatenate([values, values], axis=-1)] if values.dtype == np.uint64 else []
        for other in others:
            np.save(file, other)
            with pytest.raises(FolderError, match=file.name):
                Index(folder)
        for header in HEADERS:
            line = header.encode().ljust(118)
            file.write_bytes(content[:8] + len(line).to_bytes(2, "little") + line)
            with pytest.raises(FolderError, match=file.name):
                Index(folder)
        with file.open("wb") as archive:
            np.savez(archive, values)
        with pytest.raises(FolderError, match=file.name):
            Index(folder)
        file.write_bytes(content)
    assert len(found(Index(folder), "text 1", 9)) == 8


def test_codes_are_read_by_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "CODED_ROWS", 1)
    index = add(tmp_path / "index", {f"d{n}": f"text {n}" for n in range(9)})
    hits = found(index, "text 1", 3)
    codes = index.folder / "codes-1.npy"
    np.save(codes, np.asfortranarray(np.load(codes)))
    assert found(Index(index.folder), "text 1", 3) == hits


@pytest.mark.parametrize("coded", [1, 30_000])
def test_infinite_vectors_are_damage(tmp_path, coded, monkeypatch):
    monkeypatch.setattr(ranking, "CODED_ROWS", coded)
    folder = add(tmp_path / "index", {f"d{n}": f"text {n}" for n in range(9)}).folder
    vectors, queries = np.load(folder / "vectors-1.npy"), embed(["text 1", "text 2"])
    queries[0], queries[1] = np.eye(WIDTH, dtype=np.float32)[:2]
    vectors[3, 0] = -np.inf
    vectors[3, 1:] = 0
    np.save(folder / "vectors-1.npy", vectors)
    with np.errstate(invalid="ignore"), pytest.raises((FolderError, DataError), match="damaged"):
        Index(folder).nearest(queries, 9)


def test_ids_that_are_not_text_are_damage(tmp_path):
    folder = add(tmp_path / "index", {"a": "one", "b": "two"}).folder
    np.save(folder / "ids-1.npy", np.array([b"\xff", b"\xfe"]))
    with pytest.raises(FolderError, match="the index is damaged: ids"):
        found(Index(folder), "one")


def test_words_that_lie_about_documents_are_damage(tmp_path):
    pytest.importorskip("bm25s")
    folder = add(tmp_path / "index", {"a": "a dog", "b": "the cat"}, bm25=True).folder
    words = folder / "bm25-1"
    settings = json.loads((words / "params.index.json").read_text())
    lies: Mapping[str, Any] = {
        "indices.csc.index.npy": np.full(2, 99), "indptr.csc.index.npy": np.array([0.0, 1.0, 2.0]),
        "data.csc.index.npy": np.array(["x", "y"]), "vocab.index.json": [["dog"]],
        "params.index.json": settings | {"dtype": -1},
    }  # fmt: skip
    for name, lie in lies.items():
        content = (words / name).read_bytes()
        if name.endswith(".npy"):
            np.save(words / name, lie)
        else:
            (words / name).write_text(json.dumps(lie))
        with pytest.raises(FolderError, match="the index is damaged: bm25-1"):
            found(Index(folder), "dog", mode="bm25")
        (words / name).write_bytes(content)
    # numba would read beyond the ends of arrays, and may not be installed.
    (words / "params.index.json").write_text(json.dumps(settings | {"backend": "numba"}))
    assert [hit.id for hit in found(Index(folder), "dog", mode="bm25")] == ["a"]


def test_bm25_is_that_of_bm25s_and_reads_scripts_without_spaces():
    bm25s = pytest.importorskip("bm25s")
    assert ranking.search_words("The cats, 两只猫 of U2; a") == ["cats", "两", "只", "猫", "u2"]
    assert ranking.search_words("well—known") == ["well", "known"]
    # Vowel signs, which are no letters, belong to words; forms of other widths are equal.
    expected = ["हिन्दी", "abc12", "カ", "タ", "𠮷"]
    assert ranking.search_words("हिन्दी \uff21\uff22\uff23１２ ｶﾀ 𠮷") == expected
    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(["cat", "dog", "rain", "sun", "Paris", "the"], k=draw.randrange(9)))
        for _ in range(50)
    ]
    reference = bm25s.BM25()
    reference.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    scorer, names = ranking.build_bm25(texts), ranking.encode_ids(map(str, range(50)))
    for query in ("cat rain", "Paris, Paris sun", "the"):
        tokens = [token for token in query.lower().replace(",", "").split() if token != "the"]
        scores = reference.get_scores(tokens) if tokens else np.zeros(50, np.float32)
        values, rows = ranking.search_bm25(scorer, query, 50, names)
        assert np.array_equal(np.sort(rows), np.flatnonzero(scores > 0))
        assert np.allclose(values, scores[rows])
        assert np.all(np.diff(values) <= 0)


def test_counting_words_writes_nothing_into_the_log_of_a_program(caplog):
    pytest.importorskip("bm25s")
    ranking.build_bm25(["a cat"])
    assert not caplog.records


def test_an_index_that_was_emptied_still_counts_words(tmp_path):
    pytest.importorskip("bm25s")
    add(tmp_path / "index", {"a": "a dog"}, bm25=True)
    assert found(add(tmp_path / "index", {}, ["a"]), "dog", mode="bm25") == []
    hits = found(add(tmp_path / "index", {"b": "a cat", "c": "the dog"}), "dog", mode="bm25")
    assert [hit.id for hit in hits] == ["c"]


def test_texts_without_an_id_get_numbers_that_no_document_has(tmp_path):
    folder = tmp_path / "index"
    add(folder, {"1": "one", "3": "three"})
    texts = [(None, "new"), ("4", "four"), (None, "newer"), (None, "newest")]
    index = change_index(folder, RECORD, texts, embed, SILENT)
    named = {index.ids[row].decode(): text for row, text in enumerate(index.texts(range(6)))}
    numbers = {"2": "new", "5": "newer", "6": "newest"}
    assert named == {"1": "one", "3": "three", "4": "four"} | numbers


@pytest.mark.parametrize("absent", [None, float("nan"), ""])
def test_a_row_without_its_id_is_no_document_with_a_number(absent, tmp_path, masked):
    rows = [{"id": 1.0, "text": "one"}, {"id": absent, "text": "two"}]  # as pandas has 1 and None
    with pytest.raises(DataError) as error:
        [*read_texts(rows)]
    assert error.value.where == "text 2"
    bothways.build_index(rows[:1], masked, out=tmp_path, progress=False)
    index = bothways.build_index([{"id": 1, "text": "new"}], out=tmp_path, progress=False)
    assert [hit.text for hit in index.search("one")] == ["new"]  # of the same document
    emptied = bothways.build_index([], out=tmp_path, delete=[1.0], progress=False)
    assert len(emptied) == 0


def test_a_row_without_the_column_of_the_text_names_its_own():
    rows = [{"review": "a good film", "stars": 5}]
    assert [*read_texts(rows, text="review")] == [(None, "a good film")]
    beir = {"_id": "x", "title": "A film", "text": "It is good."}
    assert [*read_texts([beir, beir | {"title": ""}])] == [
        ("x", "A film It is good."), ("x", "It is good."),
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"^text 1: has no column 'text'; it has review, stars\n"):
        next(read_texts(rows))
    # As Excel writes .csv in half of the world.
    with pytest.raises(DataError, match="separated by semicolons"):
        next(read_texts([{"id;text": "1;a good film"}]))


def test_words_and_fused_ranks_of_a_changed_index(tmp_path, monkeypatch):
    pytest.importorskip("bm25s")
    first = {f"d{n}": f"text {n} cat" for n in range(8)}
    add(tmp_path / "index", first, bm25=True)
    index = add(tmp_path / "index", {"d1": "a dog", "e": "dog and cat"}, ["d2"])
    documents = first | {"d1": "a dog", "e": "dog and cat"}
    del documents["d2"]
    fresh = add(tmp_path / "fresh", documents, bm25=True)
    hits = found(index, "dog", mode="bm25")
    assert [hit.id for hit in hits] == ["d1", "e"]
    assert hits == found(fresh, "dog", mode="bm25")
    by_vector = [hit.id for hit in found(index, "dog cat", 100)]
    by_words = [hit.id for hit in found(index, "dog cat", 100, mode="bm25")]
    fused = {
        name: sum(1 / (61 + ranks.index(name)) for ranks in (by_vector, by_words) if name in ranks)
        for name in by_vector
    }
    both = found(index, "dog cat", 3, mode="hybrid")
    assert [hit.score for hit in both] == pytest.approx(sorted(fused.values(), reverse=True)[:3])
    assert all(hit.score == pytest.approx(fused[hit.id]) for hit in both)
    assert found(index, "zebra", mode="bm25") == []
    monkeypatch.chdir(tmp_path)
    index = Index("index")
    monkeypatch.chdir("index")  # before its words are opened
    assert found(index, "dog", mode="bm25") == hits


def test_texts_that_are_cut_are_counted(tmp_path, masked):
    heard = Heard()
    texts = ["a dog", "a cat " * 200, ""]
    bothways.build_index(texts, masked, tmp_path / "index", progress=heard)
    assert "1 of 3 examples (33.3%) was longer than the model reads, and was cut" in heard.text


@pytest.mark.parametrize(("stored", "noted"), [("int8", True), ("binary", True), ("bf16", False)])
def test_vectors_beyond_the_range_of_the_first_are_named(stored, noted, tmp_path):
    record, heard = dataclasses.replace(RECORD, stored=stored), Heard()
    add(tmp_path / "index", {"a": "one", "b": "two"}, record=record)
    texts = [(name, name) for name in "cdefgh"]
    change_index(tmp_path / "index", record, texts, embed, heard)
    assert "were cut" not in heard.text
    change_index(tmp_path / "index", record, texts, lambda t: 30 * embed(t), heard)
    assert ("note: 6 vectors had components beyond" in heard.text) == noted


def test_documents_too_few_for_a_graph_are_named(tmp_path):
    heard = Heard()
    index = change_index(tmp_path / "index", RECORD, [("a", "one")], embed, heard, graph=True)
    assert [segment.graph for segment in index.record.segments] == [False]
    assert "note: no graph for 1 document, searched exactly; it begins at 30,000" in heard.text


def test_a_graph_finds_what_is_exact(tmp_path, monkeypatch):
    usearch = pytest.importorskip("usearch.index")
    monkeypatch.setattr(change, "GRAPH_ROWS", 100)
    documents = {f"d{n}": f"text {n}" for n in range(300)}
    add(tmp_path / "index", documents, graph=True)
    index = add(tmp_path / "index", {"new": "text 301"}, ["d7"])
    assert [segment.graph for segment in index.record.segments] == [True, False]
    documents = {**documents, "new": "text 301"}
    del documents["d7"]
    assert found(index, "text 7", exact=True) == expected(documents, "text 7")
    with monkeypatch.context() as patch:  # without the exact search of what a graph does not reach
        patch.setattr("bothways.prediction.search.index.top_k", None)
        hits = [({*found(index, q)}, {*expected(documents, q)}) for q in map(str, range(20))]
    assert np.mean([len(actual & exact) for actual, exact in hits]) > 4.5
    # Of many equal texts a graph reaches some: the others are no hits, and none is one twice.
    equal = {"one": "text"} | {f"d{n:04}": f"text {n % 3}" for n in range(3000)}
    add(tmp_path / "equal", equal, graph=True)
    same = add(tmp_path / "equal", {}, [f"d{n:04}" for n in range(1400)])
    queries = embed(["text", "text 1", "text 2"])
    scores, rows = same.nearest(queries, 10)
    assert [len({*each}) for each in rows.tolist()] == [10, 10, 10]
    vectors = embed([equal[same.ids[row].decode()] for row in rows.ravel()]).reshape(3, 10, -1)
    np.testing.assert_allclose(scores, np.einsum("qw,qkw->qk", queries, vectors), atol=1e-6)
    assert not same.deleted[rows].any()
    assert same.nearest(queries, 1500)[0].shape == (3, 1500)
    file = index.folder / "graph-1.usearch"
    for width, key in ((WIDTH + 1, 0), (WIDTH, 10**6)):  # of other vectors, of other documents
        other = usearch.Index(ndim=width, metric="ip")
        other.add(np.array([key]), np.ones((1, width), np.float32))
        other.save(str(file))
        with pytest.raises(FolderError, match=r"the index is damaged: graph-1"):
            found(Index(index.folder), "text 7")
    file.write_bytes(b"no graph")
    with pytest.raises(FolderError, match=r"the index is damaged: graph-1"):
        found(Index(index.folder), "text 7")


def test_commands_and_functions_give_the_same(tmp_path, masked, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"_id": "x", "title": "A", "text": "cat"}, {"id": "y", "text": "the dog"}]
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("more.txt").write_text("a cat\nthe bird\n")
    files, prompts = ["texts.jsonl", "more.txt"], {"query": "the ", "passage": "a "}
    bothways.build_index([Path(file) for file in files], masked, "index", prompts=prompts)
    line = ["index", *files, "--model", masked, "--out", "cls", "pooling=cls"]
    run_line(*line)
    assert Index("cls").record.settings == {"pooling": "cls"}
    run_line("index", "more.txt", "--out", "index", "--delete", "y")
    index = Index("index")
    assert sorted(index.ids[index.live].tolist()) == [b"more.txt:1", b"more.txt:2", b"x"]
    with pytest.raises(DataError, match="there is no document 'xy' to delete"):
        bothways.build_index([], out="index", delete="xy")  # not "x" and "y"
    bothways.build_index([{"id": number, "text": "a cat"} for number in (3, 4, 5)], out="index")
    bothways.build_index([], out="index", delete=[np.int64(3), 4])
    bothways.build_index([], out="index", delete=5)
    with pytest.raises(DataError, match=r"text 1: 'more.txt' is the name of a file"):
        bothways.build_index(["more.txt"], out="index")
    assert index.record.prompts == ("the ", "a ")
    capsys.readouterr()
    run_line("search", "index", "the dog", "--top", "2")
    line = json.loads(capsys.readouterr().out)
    hits = bothways.search("index", "the dog", 2)
    assert line == {"query": "the dog", "hits": [vars(hit) for hit in hits]}
    run_line("search", "index", "node.js", "--top", "1")
    assert json.loads(capsys.readouterr().out)["query"] == "node.js"
    for words, message in (  # that are no query
        (["missing.txt"], r"^missing\.txt: no such file"),
        (["the dog", "--text", "question"], "^the dog: no such file"),
        (["the", "dog"], '^the: is not a file\n  Put quotation marks around a text: "the dog"'),
    ):
        with pytest.raises(BothwaysError, match=message):
            run_line("search", "index", *words)
    embedder = bothways.load(masked, "embed")
    texts = {"x": "A cat", "more.txt:1": "a cat", "more.txt:2": "the bird"}
    query = embedder.encode("the dog", prompt="the ")
    cosines = embedder.similarity(query, embedder.encode(list(texts.values()), prompt="a "))
    assert max(cosines[0]) == pytest.approx(hits[0].score, abs=1e-5)
    assert hits[0].text == texts[hits[0].id]
    prompting = bothways.load(masked, "embed", prompts=dict(query="the "))
    assert bothways.search(index, ["the dog"], 2, model=prompting) == [hits]


def test_in_memory_of_an_open_predictor(tmp_path, masked):
    rows = ["the cat", "a dog", "the bird sings"]
    embed = bothways.load(masked, "embed", pooling="cls", length=12)
    index = bothways.build_index(rows, embed, progress=False)
    hits = index.search("a dog", k=2)
    assert (len(hits), hits[0].text) == (2, "a dog")
    assert index.search(["a dog"], 2) == [hits] == bothways.search(index, ["a dog"], 2)
    assert (index.record.settings, index.record.length) == ({"pooling": "cls"}, 12)
    made = bothways.build_index(rows, masked, tmp_path / "i", pooling="cls", length=12)
    assert made.search("a dog", k=2) == bothways.Index(tmp_path / "i").search("a dog", k=2) == hits
    folder = index.folder
    assert (folder / "index.json").exists()
    assert len(bothways.build_index(["an owl"], embed, tmp_path / "i", progress=False)) == 4
    del index
    gc.collect()
    assert not folder.exists()


def test_mistakes_with_an_index_in_memory(tmp_path, masked, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    embed = bothways.load(masked, "embed")
    index = bothways.build_index(["the cat"], embed, progress=False)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: bothways.build_index(["a"], embed, pooling="mean"), "pooling"),
        (lambda: bothways.build_index(["a"], embed, precision="int8"), "precision"),
        (lambda: bothways.build_index(["a"], bothways.load(masked, "fill")), "model"),
        (lambda: index.search("a", mode="bm25", model=embed), "model"),
        (lambda: index.search("a", mode="bm25", exact=True), "exact"),
        (lambda: bothways.build_index(["a", 5], embed, progress=False), "text 2"),
        (lambda: index.search("a", model=bothways.load(masked, "fill")), "model"),
        (lambda: index.search("a", rerank=bothways.load(masked, "fill")), "rerank"),
        (lambda: index.search(iter(["a", 5])), "query 2"),
        (lambda: index.search("a", k=0), "k"),
        (lambda: bothways.search(index, "a", top=0), "top"),
        (lambda: index.search("a", depth=7), "depth"),
    ]
    for call, where in calls:
        with pytest.raises(BothwaysError) as caught:
            call()
        assert caught.value.where == where
    config = {"similarity_fn_name": "euclidean"}
    embed.task_model.model.kept = {"config_sentence_transformers.json": config}
    with pytest.raises(ConfigError, match="model: the model compares by euclidean"):
        bothways.build_index(["a"], embed, progress=False)
    assert os.listdir(tmp_path / "temporary") == [index.folder.name]  # none is left of the others


def test_an_index_belongs_to_its_model(tmp_path, masked):
    made = bothways.build_index(["cat", "dog"], masked, tmp_path / "index", progress=False)
    (tmp_path / "other").mkdir()
    make_masked(tmp_path / "other", seed=8)
    other = str(tmp_path / "other" / "model")
    moved = shutil.copytree(masked, tmp_path / "moved")
    assert bothways.search(made, "cat", model=moved) == bothways.search(made, "cat")
    for call in (
        lambda: bothways.search(made, "cat", model=other),
        lambda: bothways.search(made, "cat", model=bothways.load(other, "embed")),
        lambda: bothways.build_index(["bird"], other, tmp_path / "index", progress=False),
    ):
        with pytest.raises(FolderError, match="is not the model of the index"):
            call()
    for settings in ({"pooling": "cls"}, {"length": 9}):
        embedder = bothways.load(masked, "embed", **settings)
        with pytest.raises(ConfigError, match=r"Open it by bothways.load\('.*', \"embed\"\)\.$"):
            made.search("cat", model=embedder)
        with pytest.raises(ConfigError, match="another length or other settings"):
            bothways.build_index(["bird"], embedder, tmp_path / "index", progress=False)
    pooled = bothways.build_index(["cat", "dog"], masked, pooling="cls", length=9, progress=False)
    hits = pooled.search("dog", model=bothways.load(masked, "embed"))
    assert hits == pooled.search("dog") != made.search("dog")
    with pytest.raises(ConfigError) as caught:
        pooled.search("dog", model=bothways.load(masked, "embed", length=10))
    advice = re.fullmatch(r"Open it by (bothways.*)\.", caught.value.fix or "")
    assert advice is not None
    assert pooled.search("dog", model=eval(advice[1])) == hits
    for name, value in {"stored": "int8", "length": 9, "normalised": False}.items():
        with pytest.raises(ConfigError, match=f"^{name}: .* has its settings already"):
            bothways.build_index(["a"], out=tmp_path / "index", progress=False, **{name: value})
    opened = bothways.load(masked, "embed")
    refused = {"precision": "int8", "device": "cpu", "length": 9, "normalised": False}
    for name, value in refused.items():
        with pytest.raises(ConfigError, match=f"^{name}: the predictor has its settings"):
            bothways.build_index(["a"], opened, progress=False, **{name: value})
    bothways.build_index(["a"], masked, tmp_path / "bytes", stored="int8", progress=False)
    with pytest.raises(ConfigError, match="vectors in int8"):
        bothways.build_index(["b"], out=tmp_path / "bytes", stored="fp32", progress=False)
    assert len(bothways.build_index(["b"], out=tmp_path / "bytes", progress=False)) == 2
    with pytest.raises(ConfigError, match="there is no index yet, and no model"):
        bothways.build_index(["a"], out=tmp_path / "new", progress=False)
    with pytest.raises(BothwaysError, match=r"is not an index: it has no index\.json"):
        bothways.search(tmp_path, "cat")
    with pytest.raises(BothwaysError, match=r"Did you mean .*index\?"):
        bothways.search(tmp_path / "idnex", "cat")
    again = bothways.build_index(["bird"], out=tmp_path / "index", progress=False)
    assert sorted(again.ids.tolist()) == [b"1", b"2", b"3"]
