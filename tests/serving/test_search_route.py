"""`/search`: the hits of `bothways.search`, limits, indexes that change on disk, and indexes of other models."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import bothways
from bothways.core.errors import ConfigError, FolderError
from bothways.prediction.search.index import Index
from bothways.serving.app import App, app
from bothways.serving.errors import Limits
from bothways.serving.routes import document
from bothways.serving.run import named_indexes, named_models, open_app
from running_server import answer, refusal, running, wait_for
from toy_masked import make_masked
from toy_predictors import TEXTS

QUERIES = ["the cat", "a dog runs"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("masked")
    make_masked(place)
    return str(place / "model")


@pytest.fixture(scope="module")
def films(tmp_path_factory, model) -> Path:
    """An index with settings of its own and prompts."""
    pytest.importorskip("bm25s")
    folder = tmp_path_factory.mktemp("indexes") / "films"
    settings = {"pooling_mode": "cls", "prompts": {"query": "the "}}
    bothways.build_index(TEXTS[:30], model, folder, bm25=True, **settings)
    return folder


@pytest.fixture(scope="module")
def application(model, films, predictors, tmp_path_factory) -> App:
    other = tmp_path_factory.mktemp("other") / "plain"
    bothways.build_index(TEXTS[30:], model, other, stored="int8")
    models = {
        "vectors": bothways.load(model, "embed", batch_invariant=True),
        "rank": predictors["rerank"],
    }
    options: Any = {"limits": Limits(texts=300), "playground": True}
    return app(models, indexes={"films": films, "plain": other}, **options)


def search(client: httpx.Client, **body: Any) -> Any:
    return answer(client, "/search", body)


@pytest.mark.parametrize("mode", ["vectors", "bm25", "hybrid"])
@pytest.mark.parametrize("rerank", [None, "rank"])
def test_hits_are_those_of_the_library(client, films, predictors, mode, rerank):
    deep = mode == "hybrid" or rerank is not None
    asked = {"top": 4, "mode": mode} | ({"depth": 7} if deep else {})
    response = search(client, query=QUERIES, index="films", rerank=rerank, **asked)
    expected = bothways.search(films, QUERIES, rerank=rerank and predictors["rerank"], **asked)
    assert (response["index"], response["version"]) == ("films", 1)
    for query, result, hits in zip(QUERIES, response["results"], expected, strict=True):
        assert result["query"] == query
        assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in hits]
        scores = [hit.score for hit in hits]
        assert [hit["score"] for hit in result["hits"]] == pytest.approx(scores, abs=1e-6)
        assert [hit["text"] for hit in result["hits"]] == [hit.text for hit in hits]


def test_an_index_is_chosen_and_described(client):
    assert len(search(client, query="a", index="plain")["results"][0]["hits"]) == 10
    described = {one["name"]: one for one in client.get("/info").json()["indexes"]}
    assert described["films"] == {
        "name": "films", "model": "vectors", "documents": 30, "version": 1, "stored": "fp32", "bm25": True,
    }  # fmt: skip
    response = client.post("/models/vectors/search", json={"query": "the cat", "index": "films"})
    assert response.json() == search(client, query="the cat", index="films")
    assert "search;dur=" in response.headers["server-timing"]
    by_words = client.post("/search", json={"query": "a", "index": "films", "mode": "bm25"})
    assert by_words.headers["x-compute-tokens"] == "0"


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"query": "a"}, (422, "invalid", "index")),
        ({"query": "a", "index": "books"}, (422, "invalid", "index")),
        ({"query": "a", "index": "films", "model": "rank"}, (422, "invalid", "index")),
        ({"query": "a", "index": "films", "model": "x"}, (404, "model_not_found", "model")),
        ({"query": "a", "index": "plain", "mode": "hybrid"}, (422, "invalid", "mode")),
        ({"query": "a", "index": "films", "mode": "fuzzy"}, (422, "invalid", "mode")),
        ({"query": "a", "index": "films", "rerank": "vectors"}, (422, "wrong_task", "rerank")),
        ({"query": "a", "index": "films", "rerank": "x"}, (404, "model_not_found", "rerank")),
        ({"query": "a", "index": "films", "depth": 7}, (422, "invalid", "depth")),
        ({"query": "a", "index": "films", "mode": "bm25", "exact": True}, (422, "invalid", "exact")),
        ({"query": " ", "index": "films"}, (422, "empty", "query")),
        ({"query": [], "index": "films"}, (422, "empty", "query")),
        ({"query": "a", "index": "films", "top": 0}, (422, "invalid", "top")),
        ({"query": "a", "index": "films", "top": 301}, (413, "too_many_texts", "texts")),
        ({"query": ["a"] * 4, "index": "films", "mode": "hybrid"}, (413, "too_many_texts", "texts")),
        ({"query": "a" * 200_001, "index": "films"}, (413, "text_too_long", "text_characters")),
        ({"query": "a " * 99, "index": "films", "truncate": False}, (413, "text_too_long", "truncate")),
        ({"query": TEXTS[0] * 9, "index": "films", "mode": "bm25", "rerank": "rank", "truncate": False}, (413, "text_too_long", "truncate")),
        ({"query": "a", "indx": "films"}, (422, "invalid", "indx")),
    ],
)  # fmt: skip
def test_refusals(client, body, refused):
    assert refusal(client, "/search", body)[:3] == refused


def test_a_text_that_is_too_long_is_a_query_or_a_hit(client):
    body = {"query": ["a", "a " * 99], "index": "films", "truncate": False}
    assert refusal(client, "/search", body)[3].startswith("query 2 ")
    ranked = {**body, "query": TEXTS[0] * 9, "mode": "bm25", "rerank": "rank"}
    assert refusal(client, "/search", ranked)[3].startswith("a query with a hit ")


def test_a_server_without_an_index(model, application):
    alone = app(application.models.named("vectors").predictor)
    assert "/search" not in document(alone.models, guarded=False)["paths"]
    with running(alone) as url:
        response = httpx.post(f"{url}/search", json={"query": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (422, "wrong_task")
        assert "indexes in Python" in response.text


def test_the_document_names_the_models_of_all_indexes(model, films, tmp_path):
    make_masked(tmp_path, seed=4)
    other = f"{tmp_path}/model"
    bothways.build_index(["the cat"], other, tmp_path / "index")
    models = {"one": bothways.load(model, "embed"), "two": bothways.load(other, "embed")}
    served = app(models, indexes={"films": films, "index": tmp_path / "index"})
    entry = document(served.models, guarded=False)["paths"]["/search"]["post"]
    body = entry["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["model"] == {"enum": ["one", "two", None]}
    assert "model" not in body["required"]


def test_a_changed_index_is_opened_again(tmp_path, model):
    pytest.importorskip("bm25s")
    folder, embedder = tmp_path / "index", bothways.load(model, "embed", batch_invariant=True)
    bothways.build_index(["the cat"], model, folder)
    application = app(embedder, indexes={"one": folder})
    with running(application) as url, httpx.Client(base_url=url) as client:
        found = search(client, query="the cat")
        assert found["version"] == 1
        by_words = {"query": "dog", "mode": "bm25"}
        assert refusal(client, "/search", by_words)[:3] == (422, "invalid", "mode")
        bothways.build_index([{"id": "new", "text": "a dog"}], out=folder, delete=["1"], bm25=True)
        assert search(client, **by_words)["results"][0]["hits"]
        found = search(client, query="the cat")
        assert found["version"] == 2
        assert [hit["id"] for hit in found["results"][0]["hits"]] == ["new"]
        assert client.get("/info").json()["indexes"][0]["version"] == 2
        # An index of other settings, a damaged one, and one that is gone; then again a good one.
        good = tmp_path / "good"
        shutil.copytree(folder, good)
        shutil.rmtree(folder)
        bothways.build_index(["the cat"], model, folder, pooling="cls")
        for damage in ("", "{", None):
            if damage is None:
                (folder / "index.json").unlink()
            elif damage:
                (folder / "index.json").write_text(damage)
            response = client.post("/search", json={"query": "the cat"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
            assert "retry-after" in response.headers
            assert str(tmp_path) not in response.text
        shutil.rmtree(folder)
        shutil.copytree(good, folder)
        assert search(client, query="the cat")["results"] == found["results"]


def test_searches_while_the_index_changes(tmp_path, model):
    folder = tmp_path / "index"
    bothways.build_index(["the cat"], model, folder)
    application = app(bothways.load(model, "embed"), indexes={"one": folder})
    with running(application) as url, httpx.Client(base_url=url, timeout=60) as client:
        with ThreadPoolExecutor(4) as pool:
            searches = [pool.submit(search, client, query="the cat", top=20) for _ in range(30)]
            for n in range(4):
                bothways.build_index([f"a dog {n}"], out=folder)
        found = [task.result() for task in searches]
    for each in found:
        assert len(each["results"][0]["hits"]) == each["version"]


def test_a_search_whose_files_are_replaced_meanwhile_is_repeated(client, monkeypatch):
    whole, faults = Index.ranked, [FileNotFoundError("vectors-1.npy")]

    def ranked(*arguments: Any, **options: Any) -> Any:
        if faults:
            raise faults.pop()
        return whole(*arguments, **options)

    monkeypatch.setattr(Index, "ranked", ranked)
    assert search(client, query="the cat", index="films")["results"][0]["hits"]
    assert not faults


def test_searches_that_would_wait_too_long_are_refused(tmp_path, model, monkeypatch):
    folder = tmp_path / "index"
    bothways.build_index(["the cat"], model, folder)
    application = app(bothways.load(model, "embed"), indexes={"one": folder})
    whole, released = Index.ranked, threading.Event()

    def held(*arguments: Any, **options: Any) -> Any:
        assert released.wait(60)
        return whole(*arguments, **options)

    monkeypatch.setattr(Index, "ranked", held)
    with running(application) as url, httpx.Client(base_url=url, timeout=60) as client:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(search, client, query="a")
            wait_for(lambda: application._searches)
            application._search_seconds = 50.0
            soon = {"x-request-timeout": "40"}
            refused = httpx.post(f"{url}/search", json={"query": "a"}, headers=soon)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "50"
            released.set()
            assert first.result()["version"] == 1
        application._search_seconds = 0.0
        assert search(client, query="a")["version"] == 1


def test_an_index_needs_the_model_that_made_it(tmp_path, model, films):
    make_masked(tmp_path, seed=4)
    indexes = named_indexes([str(films)])
    assert indexes == {"films": str(films)}
    served = named_models((), None, indexes.values())
    assert [*served.values()] == [(model, "embed")]
    with pytest.raises(ConfigError, match="task: is of models, and none is named"):
        named_models((), "fill", indexes.values())
    other = r"no model that is served fits: \w+ is not the model of the index"
    with pytest.raises(FolderError, match=other):
        open_app(named_models([f"{tmp_path}/model:embed"]), indexes)
    with pytest.raises(FolderError, match=other):
        app(bothways.load(f"{tmp_path}/model", "embed"), indexes={"films": films})
    with pytest.raises(FolderError, match="default is for the task fill"):
        app(bothways.load(f"{tmp_path}/model", "fill"), indexes={"films": films})
    with pytest.raises(FolderError, match="default was opened with another length"):
        app(bothways.load(model, "embed", length=9), indexes={"films": films})
    with pytest.raises(ConfigError, match="made with another length than 9"):
        open_app(served, indexes, length=9)
    with pytest.raises(FolderError, match="is not an index"):
        open_app(served, {"none": str(tmp_path)})
    for words in (["a b=x"], ["a=x", "a=y"]):
        with pytest.raises(ConfigError, match=r"is not a name|two indexes are called"):
            named_indexes(words)
    application = open_app(served, indexes)
    settings = application.models.indexes["films"].model.task_model.task
    assert json.dumps(settings.pooling) == '"cls"'
