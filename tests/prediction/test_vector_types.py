"""Vectors of a byte or a bit a component: those of sentence-transformers, in files and by the server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from pyarrow import parquet
from sentence_transformers.util.quantization import quantize_embeddings

import bothways
from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.prediction.predictor import Predictor
from bothways.serving import app as application_of
from bothways.tasks.sentence_embedding.vectors import quantize, ranges_of
from commands import run_line
from running_server import running
from toy_folder import make_folder
from toy_predictors import TEXTS, predictor

TYPES: list[Any] = ["int8", "uint8", "binary", "ubinary"]


@pytest.fixture(scope="module")
def embedder(folder) -> Predictor:
    return predictor(folder, "embed", batch_invariant=True)


def theirs(vectors: Any, kind: Any, **options: Any) -> np.ndarray:
    return np.asarray(quantize_embeddings(np.asarray(vectors), kind, **options))


def same(ours: Any, expected: np.ndarray) -> None:
    assert ours.dtype == expected.dtype
    assert np.array_equal(ours, expected)


@pytest.mark.parametrize("kind", TYPES)
def test_codes_are_those_of_sentence_transformers(kind, embedder):
    draw = np.random.default_rng(1)
    for rows, width in ((200, 384), (3, 7), (2, 1)):
        vectors = draw.standard_normal((rows, width)).astype(np.float32)
        vectors[:, 0] = 0.25  # a constant component
        others = (2 * draw.standard_normal((50, width))).astype(np.float32)
        ranges = ranges_of(others)
        same(quantize(vectors, kind, ranges), theirs(vectors, kind, ranges=ranges))
        same(quantize(vectors, kind, ranges), theirs(vectors, kind, calibration_embeddings=others))
        same(quantize(vectors[0], kind, ranges), theirs(vectors[:1], kind, ranges=ranges)[0])
    same(embedder.encode(TEXTS, precision=kind), theirs(embedder.encode(TEXTS), kind))
    ranges = ranges_of(embedder.encode(TEXTS))
    one = embedder.encode(TEXTS[0], precision=kind, ranges=ranges, truncate_dim=None)
    same(one, embedder.encode(TEXTS, precision=kind)[0])
    assert embedder.encode([], precision=kind).dtype == one.dtype


def test_mistakes_of_ranges(embedder):
    width = embedder.encode("a film").size
    for precision, ranges, message in (
        ("int8", None, "int8 needs the lowest and the highest value"),
        ("int8", np.zeros((2, 3)), rf"2 rows of {width} finite numbers, not \(2, 3\)"),
        ("uint8", np.full((2, width), np.nan), "finite numbers"),
        ("int8", np.array([[1.0] * width, [0.0] * width]), "a lowest value is above the highest"),
    ):
        with pytest.raises(ConfigError, match=rf"^ranges: .*{message}"):
            embedder.encode("a film", precision=precision, ranges=ranges)
    for vectors in (np.zeros(3), np.zeros((1, 3)), np.zeros((4, 3), np.int8)):
        with pytest.raises(ConfigError, match="must be two vectors or more in floating point"):
            ranges_of(vectors)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_folder(folder / "bert")
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return folder


@pytest.mark.parametrize(
    "kind",
    ["int8", "ubinary", *(pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES[1:3])],
)
def test_files_have_the_type(place, monkeypatch, kind):
    monkeypatch.chdir(place)
    line = ["embed", "bert", "texts.txt", "--rows", "20", "--out"]
    run_line(*line, "plain.npy")
    expected = theirs(np.load("plain.npy"), kind)
    words = ["--output-dtype", kind]
    words += ["--calibration", "plain.npy"] if kind in ("int8", "uint8") else []
    for out in ("npy", "jsonl", "parquet"):
        run_line(*line, f"{kind}.{out}", *words)
    same(np.load(f"{kind}.npy"), expected)
    rows = [json.loads(row)["vector"] for row in Path(f"{kind}.jsonl").read_text().splitlines()]
    assert rows == expected.tolist()
    table = parquet.read_table(f"{kind}.parquet")
    assert str(table.schema.field("vector").type.value_type) == expected.dtype.name
    assert table["vector"].to_pylist() == expected.tolist()


def test_mistakes_of_files(place, monkeypatch):
    monkeypatch.chdir(place)
    np.save("codes.npy", np.zeros((4, 16), np.int8))
    np.save("narrow.npy", np.eye(3, dtype=np.float32))
    np.save("calibration.npy", np.eye(32, dtype=np.float32))
    for error, dtype, options in (
        (ConfigError, "int8", {}),
        (ConfigError, "binary", {"calibration": "narrow.npy"}),
        (ConfigError, "int8", {"calibration": "codes.npy"}),
        (DataError, "int8", {"calibration": "texts.txt"}),
        (ConfigError, "int8", {"calibration": "narrow.npy"}),
        (ConfigError, "binary", {"task": "fill"}),
        (ConfigError, "int9", {}),
        (ResourceError, "int8", {"calibration": "calibration.npy", "out": "calibration.npy"}),
    ):
        given: dict[str, Any] = {"task": "embed", "out": "mistake.jsonl", "output_dtype": dtype}
        with pytest.raises(error):
            bothways.predict("bert", "texts.txt", **given | options, progress=False)
        assert not Path("mistake.jsonl").exists()
    assert np.load("calibration.npy").dtype == np.float32


@pytest.fixture(scope="module")
def client(embedder) -> Iterator[httpx.Client]:
    with running(application_of(embedder)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("kind", TYPES)
def test_the_server_has_the_types(client, embedder, kind):
    unit = embedder.encode(TEXTS, normalize_embeddings=True)
    ranges = ranges_of(unit) if kind in ("int8", "uint8") else None
    expected = quantize(unit, kind, ranges)
    asked = {"output_dtype": kind, **({} if ranges is None else {"ranges": ranges.tolist()})}

    def embeddings(**fields: Any) -> list[Any]:
        response = client.post("/v1/embeddings", json={"input": TEXTS, **asked, **fields})
        return [one["embedding"] for one in response.json()["data"]]

    answers, coded = embeddings(), embeddings(encoding_format="base64")
    raw = [np.frombuffer(base64.b64decode(text), expected.dtype) for text in coded]
    assert np.array_equal(np.stack(raw), answers)
    assert client.post("/embed", json={"inputs": TEXTS, **asked}).json() == answers
    # The float64 norm of the server and the fp32 norm of `encode` may differ by a rounding.
    assert np.mean(np.array(answers) == expected) > 0.99
    assert all(isinstance(code, int) for code in answers[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"output_dtype": "int8"}, {"output_dtype": "ubinary", "ranges": [[0.0], [1.0]]},
        {"output_dtype": "int8", "ranges": [[0.0], [1.0]]}, {"ranges": [[0.0] * 16] * 2},
        {"output_dtype": "uint8", "ranges": [[0.0] * 3, [0.0]]},
        {"output_dtype": "int8", "ranges": [[1.0] * 16, [0.0] * 16]},
    ],
)  # fmt: skip
def test_ranges_that_the_server_refuses(client, fields):
    for path, name in (("/v1/embeddings", "input"), ("/embed", "inputs")):
        response = client.post(path, json={name: "a film", **fields})
        assert response.status_code == 422, response.text
        assert response.json()["error"]["param"] == "ranges"
