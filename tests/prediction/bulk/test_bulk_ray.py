"""Parts on a Ray cluster, and Ray Serve in front of the server: `make ray` runs these tests."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bothways.core.jobs.workers import RayWorkers
from bothways.prediction.bulk.folder import PARTS
from bothways.prediction.bulk.request import BulkRequest
from bothways.prediction.bulk.run import predict_files
from ray_cluster import MARKS, Killing, actor_processes, two_machines
from running_server import running
from toy_bulk import make_classifier, make_rows, write_rows

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_machines() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_classifier(tmp_path_factory.mktemp("model")))


def test_a_cluster_writes_the_bytes_of_one_process_and_survives_a_killed_worker(
    cluster: Any, model: str, tmp_path: Path
) -> None:
    files = [
        write_rows(tmp_path / f"{seed}{kind}", make_rows(60, seed))
        for seed, kind in ((1, ".jsonl"), (2, ".parquet"))
    ]
    asked = BulkRequest(model, tuple(files), rows=4, keep=("id",), form="parquet")
    predict_files(asked, tmp_path / "local")
    killing = Killing(5)
    done = predict_files(asked, tmp_path / "out", RayWorkers("auto", 2), killing)
    assert killing.killed
    assert killing.killed not in actor_processes()
    assert (done.rows, done.parts, done.again) == (120, 30, 0)
    names = [file.name for file in sorted((tmp_path / "local").glob("part-*"))]
    assert names == [file.name for file in sorted((tmp_path / "out").glob("part-*"))]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    # What a cluster has begun, one process continues.
    for number in (3, 17):
        (tmp_path / "out" / PARTS / f"00000-{number:05d}.json").unlink(missing_ok=True)
    assert predict_files(asked, tmp_path / "out").again in (28, 29)


def test_ray_serve_answers_as_the_server_does(cluster: Any, model: str) -> None:
    from ray import serve

    from bothways.serving.deployment import Deployment, NamedModel
    from bothways.serving.ray_serve import deployment

    text, both = "the film was fine", ["the film was fine", "the film was dull and long"]
    asked = [("/v1/embeddings", {"model": "vectors", "input": both})] + [
        (path, {"inputs": text}) for path in ("/predict", "/models/films/predict") for _ in range(9)
    ]
    models = {"films": NamedModel(model), "vectors": NamedModel(model, "embed")}
    with running(Deployment(models).app()) as url:
        expected = [_answer(f"{url}{path}", body) for path, body in asked]
    # Both machines are this one, and a proxy on each would take the same port.
    serve.start(proxy_location="HeadOnly", http_options={"port": 8123})
    serve.run(deployment(f"films={model}", f"vectors={model}:embed", replicas=2), route_prefix="/")
    try:
        found = [_answer(f"http://127.0.0.1:8123{path}", body) for path, body in asked]
    finally:
        serve.shutdown()
    assert found == expected
    assert found[1][0]["label"] in ("neg", "pos")


def _answer(url: str, body: Any) -> Any:
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.loads(answer.read())
