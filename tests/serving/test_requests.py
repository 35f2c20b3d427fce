"""Fields of requests are obeyed or refused by name, and the size of one request costs the others nothing."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from typing import Any

import httpx
import pytest

from bothways.prediction.opening import rebound
from bothways.prediction.predictor import Predictor
from bothways.serving.app import App, app
from bothways.serving.errors import Limits
from bothways.serving.models import example_ranges
from running_server import answer, refusal, running
from toy_predictors import TEXTS

QUESTION = {"question": TEXTS[0], "context": " ".join(TEXTS[:4])}


@pytest.fixture(scope="module")
def application(predictors) -> App:
    return app(predictors, playground=True)


REQUESTS: dict[str, dict[str, Any]] = {
    "/classify": {"inputs": "a"},
    "/embed": {"inputs": "a"},
    "/v1/embeddings": {"input": "a", "model": "embed"},
    "/predict": {"inputs": "a", "model": "classify"},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "/tokenize": {"inputs": "a", "model": "embed"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/models/classify": {"inputs": "a"},
    "/models/tag": {"inputs": "a"},
    "/models/answer": {"inputs": QUESTION},
    "/models/fill": {"inputs": "[MASK]"},
    "/models/embed": {"inputs": "a"},
    "/models/choice": {"inputs": {"context": "a", "endings": ["b"]}},
    "/explain": {"inputs": "a", "method": "attention", "model": "classify"},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_unknown_fields_are_refused_by_their_name(client, path):
    body = REQUESTS[path]
    answer(client, path, body)
    status, code, param, message = refusal(client, path, {**body, "modle": None, "modl": 1})
    assert (status, code, param) == (422, "invalid", "modle")
    assert message.startswith("modle is not one of ")
    if path.startswith("/models") and path != "/models/choice":
        for inner, name in (("parameters", "candidate_labels"), ("options", "use_cahce")):
            wrong = {**body, inner: {name: ["a"]}}
            assert refusal(client, path, wrong)[:3] == (422, "invalid", f"{inner}.{name}")


ROWS: list[tuple[str, dict[str, Any]]] = [
    ("/classify", {"text": "a", "label": "pos"}),
    ("/models/regress/regress", {"text": "a", "text_b": "b"}),
    ("/choice", {"context": "a", "endings": ["b", "c"]}),
    ("/models/choice", {"context": "a", "endings": ["b", "c"]}),
    ("/tag", {"words": ["a", "b"]}),
    ("/answer", {**QUESTION, "id": "1"}),
    ("/fill", {"text": "[MASK]"}),
    ("/models/classify/explain", {"text": "a"}),
]


@pytest.mark.parametrize(("path", "row"), ROWS)
def test_columns_that_a_task_ignores_are_refused(client, path, row):
    fields: dict[str, Any] = {}
    if path.endswith("explain"):
        fields = {"method": "leave_one_out", "label": "pos"}
    answer(client, path, {"inputs": row, **fields})
    for inputs in ({**row, "note": "x"}, {"note": None, **row}):
        wrong = refusal(client, path, {"inputs": inputs, **fields})
        assert wrong[:3] == (422, "invalid", "inputs.note")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/classify", '{"inputs": "a", "inputs": "b"}', "inputs"),
        ("/classify", '{"inputs": [{"text": "a"}, {"text": "b", "te\\u0078t": "c"}]}', "text"),
        ("/v1/embeddings", '{"input": "a", "model": "embed", "model": "embed"}', "model"),
        ("/models/classify", '{"inputs": "a", "options": {"use_gpu": 1, "use_gpu": 1}}', "use_gpu"),
    ],
)
def test_a_key_that_stands_twice_is_refused_by_its_name(client, path, body, name):
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, "invalid", name)


def test_a_name_that_is_nearly_right_is_named(client):
    wrong = {"inputs": QUESTION, "parameters": {"topk": 2}}
    for path, body, param, near in (
        ("/embed", {"input": "a"}, "input", "'inputs'"),
        ("/v1/embeddings", {"inputs": "a", "model": "embed"}, "inputs", "'input'"),
        ("/models/answer", wrong, "parameters.topk", "'top_k'"),
    ):
        status, _, found, message = refusal(client, path, body)
        assert (status, found) == (422, param)
        assert f"did you mean {near}?" in message


def test_what_clients_always_send_is_accepted(client):
    options = {"use_cache": False, "wait_for_model": True, "use_gpu": False}
    answer(client, "/models/classify", {"inputs": "a", "options": options, "parameters": None})
    openai = {"input": "a", "model": "embed", "user": "u", "encoding_format": "float"}
    plain = answer(client, "/v1/embeddings", openai)
    infinity = {"dimensions": 0, "modality": "text"}
    assert answer(client, "/embeddings", openai | infinity)["data"] == plain["data"]
    image = refusal(client, "/embeddings", openai | {"modality": "image"})
    assert image[:3] == (422, "invalid", "modality")
    answer(client, "/embed", {"inputs": "a", "truncate": None, "truncation_direction": "Right"})


def parameter(model: str, inputs: Any, **values: Any) -> tuple[str, dict[str, Any], str]:
    (name,) = values
    return f"/models/{model}", {"inputs": inputs, "parameters": values}, f"parameters.{name}"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/embed", {"inputs": "a", "truncation_direction": "left"}, "truncation_direction"),
        parameter("embed", "a", truncation_direction="Left"),
        parameter("classify", "a", function_to_apply="none"),
        parameter("answer", QUESTION, doc_stride=8),
        parameter("fill", "[MASK]", targets=["a"]),
        ("/predict", {"inputs": "a", "model": "classify", "raw_scores": True}, "raw_scores"),
        ("/models/answer", {"inputs": {**QUESTION, "id": 3}}, "inputs"),
        ("/models/classify", {"inputs": {"text": "a", "label": "b"}}, "inputs"),
        ("/rerank", {"query": "a", "documents": ["b"], "return_text": True}, "return_text"),
        ("/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "documents"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/embed", {"inputs": "a", "dimensions": 8.5}, "dimensions"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(client, path, body, param):
    assert refusal(client, path, body)[:3] == (422, "invalid", param)


def test_parameters_of_answers_are_obeyed(client, application):
    def ask(**parameters: Any) -> Any:
        return answer(client, "/models/answer", {"inputs": QUESTION, "parameters": parameters})

    tokenizer = application.models.named("answer").task_model.tokenizer
    for longest in (1, 2):
        texts = [each["answer"] for each in ask(max_answer_len=longest, top_k=40)]
        assert max(len(tokenizer.encode(text)) for text in texts) == longest
    assert len(ask(top_k=40)) > 20 >= len(ask(top_k=20.0))
    assert ask(handle_impossible_answer=False)["answer"] == ask()["answer"] != ""
    model = application.models.named("answer")
    assert model.task_model.task.threshold is None  # the served model stays as it is
    certain = [ask(handle_impossible_answer=True)["answer"] for _ in range(2)]
    assert certain[0] == certain[1]
    several = ask(handle_impossible_answer=True, top_k=40)
    assert [each["answer"] for each in several].count("") == 1
    assert "" not in [each["answer"] for each in ask(top_k=40)]
    assert several[0]["answer"] == certain[0]
    assert sum(each["score"] for each in several) == pytest.approx(1)
    for parameters, code, param in [
        ({"max_answer_len": 305_182_016}, "invalid", "parameters.max_answer_len"),
        ({"top_k": 1_000_000}, "too_many_texts", "texts"),
    ]:
        body = {"inputs": QUESTION, "parameters": parameters}
        assert refusal(client, "/models/answer", body)[1:3] == (code, param)
    assert ask(max_answer_len=512, top_k=2048) == ask(max_answer_len=40, top_k=40 * 40)
    nothing = {"inputs": {"question": "a", "context": ""}, "parameters": {"top_k": 2}}
    expected = [{"answer": "", "score": 1.0, "start": 0, "end": 0}]
    assert answer(client, "/models/answer", nothing) == expected


def test_no_answer_is_one_by_the_threshold_of_the_served_model(predictors):
    task_model = predictors["answer"].task_model
    limits = {"never": 1e9, "always": -1e9}  # of the lead of no answer over the best span
    served = {name: Predictor(rebound(task_model, {"threshold": x})) for name, x in limits.items()}
    body = {"inputs": QUESTION, "parameters": {"handle_impossible_answer": True}}
    with running(app(served)) as url, httpx.Client(base_url=url) as client:
        found = {name: answer(client, f"/models/{name}", body)["answer"] for name in served}
    assert (found["never"] != "", found["always"]) == (True, "")


def test_raw_scores_are_logits(client):
    body = {"inputs": TEXTS[:2], "model": "rerank"}
    (usual,) = answer(client, "/predict", body)
    (raw,) = answer(client, "/predict", {**body, "raw_scores": True})
    assert usual["score"] != raw["score"]
    functions = {"softmax": "classify zero-shot", "sigmoid": "label", "none": "regress"}
    for function, names in functions.items():
        for path in (f"/models/{name}" for name in names.split()):
            named = {"inputs": TEXTS[0], "parameters": {"function_to_apply": function}}
            assert answer(client, path, named) == answer(client, path, {"inputs": TEXTS[0]})


def test_fields_in_the_url_are_refused_and_whole_floats_are_numbers(client):
    assert refusal(client, "/embed?dimensions=8", {"inputs": "a"})[:2] == (400, "bad_request")
    (short,) = answer(client, "/embed", {"inputs": "a", "dimensions": 8.0})
    assert len(short) == 8


SIMILAR = {"source_sentence": "a", "sentences": ["a", "b", "a " * 1000]}
LONG = {"query": "a", "documents": ["a", "b", "a " * 1000], "truncate": False}


@pytest.mark.parametrize(("path", "body", "name"), [
    ("/v1/embeddings", {"input": ["a", "b", "", ""], "model": "embed"}, "input 3"),
    ("/embed", {"inputs": ["a", "b", "a " * 100_001]}, "input 3"),
    ("/embed", {"inputs": ["a", "b", "a " * 1000], "truncate": False}, "input 3"),
    ("/similarity", {"inputs": SIMILAR, "truncate": False}, "sentence 3"),
    ("/similarity", {"inputs": {**SIMILAR, "source_sentence": "a " * 100_001}}, "source_sentence"),
    ("/rerank", LONG, "document 3"),
    ("/rerank", {"query": "a", "texts": LONG["documents"], "truncate": False}, "text 3"),
])  # fmt: skip
def test_a_refusal_names_the_input_of_a_list(client, path, body, name):
    *_, message = refusal(client, path, body)
    assert re.search(rf"\b{name}\b", message)


LARGE: list[tuple[str, Any, tuple[int, str]]] = [
    ("/embed", {"inputs": ["a"] * 500_000}, (413, "too_many_texts")),
    ("/v1/embeddings", {"input": [1] * 500_000, "model": "embed"}, (422, "invalid")),
    ("/choice", {"inputs": {"context": "a", "endings": [""] * 600_000}}, (413, "text_too_long")),
    ("/choice", {"inputs": {"context": "a", "endings": [""] * 100_000}}, (413, "too_many_texts")),
    ("/rerank", {"query": "a " * 90_000, "documents": ["b"] * 2000}, (413, "text_too_long")),
    ("/tokenize", {"inputs": ["a " * 90_000] * 8, "model": "embed"}, (413, "text_too_long")),
    ("/tag", {"inputs": {"words": [""] * 600_000}}, (413, "text_too_long")),
    ("/classify", {"inputs": ["good " * 2000] * 150}, (200, "")),
    ("/tokenize", {"inputs": "good " * 30_000, "model": "embed"}, (200, "")),
]


@pytest.mark.parametrize(("path", "body", "expected"), LARGE)
def test_a_large_request_delays_no_small_one(application, client, url, path, body, expected):
    """By the processor's time between two turns of the event loop, whatever else the machine does."""
    data, results = json.dumps(body).encode(), []
    loop, turns, ended = application._started.get_loop(), list[float](), threading.Event()

    def attack() -> None:
        headers = {"content-type": "application/json"}
        response = httpx.post(f"{url}{path}", content=data, headers=headers, timeout=60)
        code = "" if response.status_code == 200 else response.json()["error"]["code"]
        results.append((response.status_code, code))

    def turn() -> None:
        turns.append(time.process_time())
        if thread.is_alive():
            loop.call_later(0.01, turn)
        else:
            ended.set()

    thread = threading.Thread(target=attack)
    turns.append(time.process_time())
    thread.start()
    loop.call_soon_threadsafe(turn)
    while thread.is_alive():
        answer(client, "/regress", {"inputs": ["a", "b"]})
        time.sleep(0.02)
    assert results == [expected]
    assert ended.wait(60)
    waits = [end - start for start, end in itertools.pairwise(turns)]
    assert max(waits) < 0.5  # usually 0.1


def test_a_large_request_ends_at_its_deadline_while_it_is_read(url):
    body = json.dumps({"inputs": ["good " * 2000] * 200}).encode()
    headers = {"content-type": "application/json", "x-request-timeout": "0.01"}
    response = httpx.post(f"{url}/classify", content=body, headers=headers, timeout=60)
    assert response.json()["error"]["code"] == "deadline"


def test_chunks_cover_the_examples_in_order(application):
    model, limits = application.models.named("classify"), Limits()
    for lengths in ([1], [10_000] * 9, [100_000, 1, 1, 40_000], [0] * 5):
        examples = model.examples(["a" * length for length in lengths], limits)
        ranges = list(example_ranges(model, examples))
        assert [n for start, stop in ranges for n in range(start, stop)] == [*range(len(lengths))]
        for start, stop in ranges:
            assert stop == start + 1 or sum(lengths[start:stop]) <= 32_000
        assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))
