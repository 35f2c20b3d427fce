"""What clients do wrong, by mistake or on purpose: each is one error of the catalogue, and the server goes on."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies as some

from bothways.core.errors import BothwaysError, ConfigError, ResourceError
from bothways.serving import run
from bothways.serving.app import App, app
from bothways.serving.errors import STATUS, Limits, RequestError
from bothways.serving.exchange import json_object
from bothways.serving.routes import ROUTES
from bothways.serving.run import named_models
from commands import run_line
from running_server import classify, connect, exchange, running, serving, wait_for

LIMITS = Limits(
    body_bytes=20_000, texts=8, text_characters=2000, request_tokens=100, queue_tokens=100,
)  # fmt: skip
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def application(predictors) -> App:
    tasks = predictors.keys() - {"label", "zero-shot"}
    return app({name: predictors[name] for name in sorted(tasks)}, limits=LIMITS)


def code(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert response.json()["error_type"] == error["code"]
    assert STATUS[error["code"]] == response.status_code
    return response.status_code, error["code"]


NO_OBJECTS: dict[tuple[int, str], list[bytes]] = {
    (400, "invalid_json"): [
        b"", b"{", b"\xff\xfe", b'{"inputs": NaN}', b'{"inputs": "\\ud800"}', b"[" * 5000,
        b'{"inputs": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}", b'{"inputs": 1e400}',
        b'{"inputs": ' + b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"}",
    ],
    (400, "bad_request"): [b"[]", b'"a"'],
    (422, "invalid"): [
        b'{"inputs": {"text": {"text": "a"}}}', b'{"' + b"k" * 19_000 + b'": 1}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("expected", NO_OBJECTS)
def test_bodies_that_are_no_json_object_of_fields(url, expected):
    for body in NO_OBJECTS[expected]:
        response = httpx.post(f"{url}/classify", content=body, headers=JSON)
        assert code(response) == expected, body[:40]
        assert len(response.content) < 2000  # what was sent is not sent back


def test_a_body_in_another_encoding_is_no_utf8(url):
    content = '{"inputs": "中"}'.encode("gb18030")
    response = httpx.post(f"{url}/classify", content=content, headers=JSON)
    assert code(response) == (400, "invalid_json")
    assert "not UTF-8 at byte 12" in response.json()["error"]["message"]


REFUSED: dict[tuple[int, str], list[tuple[str, dict[str, Any]]]] = {
    (422, "invalid"): [
        ("/classify", {}),
        ("/classify", {"inputs": [1]}),
        ("/classify", {"inputs": ["a", ["b"]]}),
        ("/answer", {"inputs": "a"}),
        ("/answer", {"inputs": {"question": 1, "context": "a"}}),
        ("/choice", {"inputs": {"context": "a", "endings": "b"}}),
        ("/fill", {"inputs": "no mask"}),
        ("/tag", {"inputs": {"words": "a b", "tags": 3}}),
        ("/embed", {"inputs": "a", "dimensions": 10**30}),
        ("/embed", {"inputs": "a", "prompt_name": "query"}),
        ("/v1/embeddings", {"input": [[-1]], "model": "embed"}),
        ("/v1/embeddings", {"input": [[True]], "model": "embed"}),
        ("/v1/embeddings", {"input": "a", "model": "embed", "encoding_format": "hex"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": "b"}}),
        ("/rerank", {"query": "a", "documents": [1]}),
        ("/rerank", {"query": "a", "texts": ["b"], "top_n": -1}),
        ("/models/fill", {"inputs": "[MASK]", "parameters": {"top_k": 100}}),
        ("/models/tag", {"inputs": "a", "parameters": {"aggregation_strategy": "sum"}}),
        ("/models/tag", {"inputs": "a", "parameters": {"ignore_labels": ["MISC"]}}),
        ("/models/classify", {"inputs": "a", "truncate": False, "parameters": {"truncate": 3}}),
        ("/", {"inputs": "a"}),
        ("/", {"inputs": "a", "model": 3}),
    ],
    (422, "empty"): [
        ("/classify", {"inputs": []}),
        ("/tokenize", {"inputs": [], "model": "embed"}),
        ("/models/rerank", {"query": "a", "documents": []}),
        ("/v1/embeddings", {"input": "", "model": "embed"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}),
    ],
    (422, "wrong_task"): [
        ("/tag", {"inputs": "a", "model": "embed"}),
        ("/prefer", {"inputs": ["a", "b"]}),
    ],
    (413, "too_many_texts"): [("/classify", {"inputs": ["a"] * 9})],
    (413, "text_too_long"): [
        ("/classify", {"inputs": "a" * 2001}),
        ("/classify", {"inputs": "film " * 100, "truncate": False}),
    ],
    (413, "too_many_tokens"): [("/likelihood", {"inputs": "film " * 30})],
    (404, "model_not_found"): [
        ("/classify", {"inputs": "a", "model": "../etc"}),
        ("/models/%2e%2e%2fetc/classify", {"inputs": "a"}),
        ("/models//classify", {"inputs": "a"}),
        ("/models/" + "a" * 10_000 + "/classify", {"inputs": "a"}),
    ],
    (404, "not_found"): [("//etc/passwd", {}), ("/nothing", {})],
    (405, "method_not_allowed"): [("/info", {})],
}


@pytest.mark.parametrize("expected", REFUSED, ids=str)
def test_requests_are_refused_by_a_code(client, url, expected):
    for path, body in REFUSED[expected]:
        response = client.post(f"{url}{path}", json=body)  # a path alone would lose its "//"
        assert code(response) == expected, (path[:40], body)
        assert len(response.content) < 1000
        if expected[1] == "empty":  # each route has another name for its inputs
            param = response.json()["error"]["param"]
            assert param is None or param.partition(".")[0] in body
        if expected[1] == "wrong_task":  # named with those that there are
            served = f"this route is for {path[1:]}, and '{body.get('model', 'answer')}' is for "
            assert response.json()["error"]["message"].startswith(served)
        if expected[0] == 405:
            assert response.headers["allow"] == "GET"


def test_long_texts_are_cut_and_counted(url):
    response = classify(url, ["film " * 100, "film"])
    assert (response.status_code, response.headers["x-truncated"]) == (200, "1")


def test_methods_and_heads(client):
    for method in ("GET", "PUT", "OPTIONS", "DELETE"):
        response = client.request(method, "/classify")
        assert code(response) == (405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        assert "access-control-allow-origin" not in response.headers
    assert code(client.request("BREW", "/classify")) == (400, "bad_request")
    head = client.head("/ready")
    assert (head.status_code, head.content) == (200, b"")


def test_request_ids_are_echoed_only_if_they_are_plain(url):
    def echoed(id: str) -> str:
        return httpx.get(f"{url}/live", headers={"x-request-id": id}).headers["x-request-id"]

    assert echoed("a-1") == "a-1"
    assert len(echoed("a b")) == 32


HEAD = b"POST /classify HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
CHUNK = b"1e8480\r\n" + b" " * 2_000_000 + b"\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD + b"content-length: 30000\r\n\r\n",),
        (HEAD + b"expect: 100-continue\r\ncontent-length: 30000\r\n\r\n",),
        (HEAD + b"content-length: 8000000\r\n\r\n", b" " * 8_000_000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", *[CHUNK] * 4, b"0\r\n\r\n"),
    ],
    ids=["announced", "waits", "sent", "chunks"],
)
def test_large_bodies_are_refused_and_their_clients_see_why(url, parts):
    """The connection is not reset while a client sends, before it reads the answer."""
    answer = exchange(url, *parts)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_slow_clients_have_a_deadline(application, url, monkeypatch):
    monkeypatch.setattr(application, "limits", replace(LIMITS, head_seconds=0.3, body_seconds=0.3))
    sent = {
        "head": [b"POST /classify HTTP/1.1\r\nhost: a\r\n"],
        "body": [HEAD + b"content-length: 20\r\n\r\n{"],
        "lines": [b"\r\n" * 2000],
        "drops": [b"GET / HTTP/1.1\r\nx: y\r\n", *[b"z"] * 100],
        "idle": [],
    }
    start = time.monotonic()
    with ThreadPoolExecutor(5) as pool:
        answers = pool.map(lambda parts: exchange(url, *parts, pause=0.1), sent.values())
        found = dict(zip(sent, answers, strict=True))
    assert time.monotonic() - start < 5  # drops take ten seconds, and do not begin the time again
    for name, limit in (("head", b"head_seconds"), ("body", b"body_seconds"), ("lines", b"head_")):
        assert b" 408 " in found[name].splitlines()[0]
        assert limit in found[name]
    assert found["idle"] == b""  # the connection is closed
    assert found["drops"] == b"" or b" 408 " in found["drops"].splitlines()[0]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /classify HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET \x00 HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http(url, raw):
    received = exchange(url, raw)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"bad_request" in received
    assert httpx.get(f"{url}/ready").status_code == 200


def status_of(call: Callable[[], object]) -> int:
    """The status of what a part of the app raises; 200 if it raises nothing."""
    try:
        call()
    except RequestError as error:
        return error.status
    return 200


PLAIN = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False)
KEYS = some.sampled_from(["text", "text_b", "question", "context", "endings", "words", "top_k"])
VALUES = some.recursive(
    PLAIN | some.text(max_size=9),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


def drawn_request(path: str) -> some.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A route, with values at random for the fields that it reads."""
    request = ROUTES[path].request
    fields = (
        {"inputs", "parameters"} if request is None else request.model_fields.keys() - {"model"}
    )
    names = some.sampled_from(sorted(fields))
    return some.tuples(some.just(path), some.dictionaries(names, VALUES, max_size=4))


@given(some.sampled_from(sorted(ROUTES.keys() - {"/tokenize"})).flatmap(drawn_request))
def test_no_object_is_an_internal_error(application, drawn):
    """Requests are read to the point where they would be queued: no model is needed."""

    def read() -> None:
        path, body = drawn
        query = ROUTES[path].query(application.models, json.loads(json.dumps(body)))
        query.model.encode(query.model.examples(query.inputs, application.limits))

    assert status_of(read) < 500


@given(some.binary(max_size=40) | some.text('{}[]",:\\u0d8e-. \udead', max_size=20))
def test_no_bytes_are_an_internal_error(body):
    data = body if isinstance(body, bytes) else body.encode(errors="surrogatepass")
    assert status_of(lambda: json_object(data, b"")) < 500


def test_keys_and_hosts(application):
    guarded = app(
        {"embed": application.models.named("embed").predictor},
        keys=("one", "zwei-ü"),
        hosts=("Localhost:8080", "127.0.0.1"),
    )
    with running(guarded) as url:
        ask = {"json": {"inputs": "a"}}
        missing = httpx.post(f"{url}/embed", **ask)
        assert code(missing) == (401, "unauthorized")
        assert missing.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer two", "Bearer", "Basic one", "Bearer ön".encode("latin-1")):
            refused = httpx.post(f"{url}/embed", **ask, headers={"authorization": wrong})
            assert refused.status_code == 401
        beyond_ascii = ["Bearer zwei-ü".encode(), "Bearer zwei-ü".encode("latin-1")]
        for right in (
            {"authorization": "Bearer one"},
            {"x-api-key": "one"},
            *({"authorization": each} for each in beyond_ascii),
        ):
            assert httpx.post(f"{url}/embed", **ask, headers=right).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.get(f"{url}/ready", headers={"host": "localhost"}).status_code == 200
        rebound = httpx.post(f"{url}/embed", **ask, headers={"host": "evil.example"})
        assert code(rebound) == (403, "forbidden_host")
        # A probe comes to the address of a container, whatever names are allowed.
        assert httpx.get(f"{url}/ready", headers={"host": "10.0.0.7:8080"}).status_code == 200


@pytest.mark.parametrize("host", ["::1", "[::1]", "[::1]:8080"])
def test_ipv6_hosts(application, host):
    with running(app(application.models.named("embed").predictor, hosts=host)) as url:
        for header, status in (("[::1]", 200), ("[::1]:81", 200), ("[::2]:81", 403), (":", 403)):
            assert httpx.get(f"{url}/info", headers={"host": header}).status_code == status


def test_a_key_and_a_host_by_themselves_are_one(application):
    model = application.models.named("embed").predictor
    single = app(model, keys="secret", hosts="localhost")
    assert (single._keys, single.hosts) == ([b"secret"], ("localhost",))
    # Bytes of the environment that are no UTF-8.
    assert app(model, keys=["\udcff"])._keys == [b"\xff"]
    for name, names in (
        ("owner/name", {"predictors": {"owner/name": model}}),
        (1, {"predictors": {1: model}}),
        ("a b", {"indexes": {"a b": "folder"}}),
    ):
        with pytest.raises(ConfigError, match=f"{name!r} is not a name") as caught:
            app(**{"predictors": model, **names})
        assert caught.value.where in names
    lines = app(model, keys=iter(["secret"]), hosts=iter(["localhost"]))
    assert (lines._keys, lines.hosts) == ([b"secret"], ("localhost",))
    wrong = {
        "keys": [b"a"], "hosts": 1, "limits": {}, "indexes": ["a"], "predictors": [model, model],
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ConfigError) as caught:
            app(**{"predictors": model, name: value})
        assert caught.value.where == name
    for keys in ("", ["secret", ""], None):  # None: a variable that is not set
        with pytest.raises(ConfigError, match="a key is empty"):
            app(model, keys=keys)


def test_connections_have_a_limit(application, monkeypatch):
    monkeypatch.setattr(run, "SPARE_CONNECTIONS", 2)
    limits = Limits(connections=2)
    few = app({"embed": application.models.named("embed").predictor}, limits=limits)
    with serving(few) as (url, server, _):
        connections = server.server_state.connections
        body = b'{"inputs": "a"}'
        head = b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
        held = [connect(url) for _ in range(2)]
        for connection in held:  # a request that stays incomplete, for `body_seconds`
            connection.sendall(whole[:-1])
        wait_for(lambda: len(connections) == 2)
        # Requests that compute nothing are answered, so that no probe ends a server that is busy.
        with httpx.Client(base_url=url, timeout=30) as client:
            for path in ("/live", "/ready", "/metrics", "/v1/models"):
                assert client.get(path).status_code == 200
        wait_for(lambda: len(connections) == 2)
        refused = [exchange(url, whole), exchange(url, whole[:-5], whole[-5:], pause=0.05)]
        refused.append(exchange(url, b"GET /live HTTP/1.1\r\n\r\n" + whole))
        refused.append(exchange(url, head + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n"))
        refused.append(exchange(url, head + b"transfer-encoding: chunked\r\n\r\n"))
        for answer in refused:
            assert answer.startswith(b"HTTP/1.1 429 "), answer
            assert b"overloaded" in answer
            assert b"\r\nretry-after: 1\r\n" in answer
        few.limits = replace(limits, head_seconds=0.3)
        assert exchange(url, whole[:-1]).startswith(b"HTTP/1.1 408 ")
        few.limits = limits
        wait_for(lambda: len(connections) == 2)
        held += [connect(url) for _ in range(2)]
        wait_for(lambda: len(connections) == 4)
        assert exchange(url, b"").startswith(b"HTTP/1.1 429 ")  # beyond the spare ones, too
        for connection in held:
            connection.close()
        wait_for(lambda: not connections)
        assert httpx.get(f"{url}/ready").status_code == 200
        metrics = httpx.get(f"{url}/metrics").text
        assert 'bothways_requests_total{model="",route="unknown",status="429"} 2.0' in metrics
        assert "\nbothways_ready 1.0\n" in metrics
        few.draining = True
        assert "\nbothways_ready 0.0\n" in httpx.get(f"{url}/metrics").text
        draining = httpx.get(f"{url}/ready")
        assert (draining.status_code, draining.headers["retry-after"]) == (503, "1")
        server.should_exit = True


def test_limits_say_what_is_wrong():
    with pytest.raises(ConfigError, match=r"limits\.texts: must be above 0, not 0"):
        Limits(texts=0)
    with pytest.raises(ConfigError, match="do not fit in a queue of 10"):
        Limits(queue_tokens=10)


def test_mistakes_of_the_command(folder, tmp_path, monkeypatch):
    cases = {
        (): "there is no model to serve",
        (f"a={folder}", f"a={folder}"): "two models are called 'a'",
        (f"a b={folder}",): "'a b' is not a name",
        (str(folder), "--host", "0.0.0.0"): "there is no key",
        (str(folder), "--limit", "texts=0"): "above 0",
        (str(folder), "--limit", "colour=3"): "colour",
        (str(folder), "--api-key-file", str(tmp_path / "none")): "cannot be read",
        (str(tmp_path / "nowhere"), "--port", "0"): "nowhere",
        (str(tmp_path / "nowhere"), "--host", "[::1]"): "nowhere|cannot be listened on",
    }
    for words, message in cases.items():
        with pytest.raises(BothwaysError, match=message):
            run_line("serve", *words)
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ConfigError, match="has no key"):
        run_line("serve", str(folder), "--api-key-file", str(tmp_path / "keys"))
    (tmp_path / "keys").write_text("secret\n")
    with pytest.raises(ConfigError, match="no-auth"):
        run_line("serve", str(folder), "--no-auth", "--api-key-file", str(tmp_path / "keys"))
    monkeypatch.setenv("BOTHWAYS_API_KEY", " ")  # of a secret that is missing
    with pytest.raises(ConfigError, match="BOTHWAYS_API_KEY: has no key"):
        run_line("serve", str(folder))
    monkeypatch.delenv("BOTHWAYS_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words, message in (
            (("--port", port), rf"^127\.0\.0\.1:{port}: cannot be listened on: Addr"),
            (("--host", "a..b", "--no-auth"), "cannot be listened on"),
        ):
            with pytest.raises(BothwaysError, match=message):
                run_line("serve", "no-such-model", *words)


def test_a_server_that_was_slower_to_load_says_that_its_port_is_taken(application):
    with run.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with run.bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(ResourceError, match=f":{port}: cannot be listened on: Addr"):
                run.run_server(app(application.models.named("embed").predictor), second)


def test_models_have_the_name_of_their_folder_or_their_own_and_maybe_a_task(tmp_path):
    for name in ("a=b", "bert", "bert:rerank", "lr=1/model"):
        (tmp_path / name).mkdir(parents=True)
    bert, swept = str(tmp_path / "bert"), str(tmp_path / "lr=1" / "model")
    for word, expected in {
        "x=runs/sst": ("x", "runs/sst", None),
        "owner/mini": ("mini", "owner/mini", None),
        "hub:owner/mini": ("mini", "hub:owner/mini", None),
        "runs/ner/": ("ner", "runs/ner/", None),
        "a=runs/sst:ner": ("a", "runs/sst", "tag"),
        f"{bert}:fill-mask": ("bert", bert, "fill"),
        f"whole={bert}:rerank": ("whole", f"{bert}:rerank", None),
        f"{swept}:embed": ("model", swept, "embed"),
    }.items():
        [(name, model)] = named_models((word,)).items()
        assert (name, *model) == expected
    for word, message in {
        str(tmp_path / "a=b"): "'a=b' is not a name",
        "=runs/sst": "'' is not a name",
        f"x={bert}:rernk": "'rernk' is not a task; did you mean 'rerank'",
        f"x={bert}:": "'' is not a task",
    }.items():
        with pytest.raises(ConfigError, match=message):
            named_models((word,))
