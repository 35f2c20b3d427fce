"""The playground over HTTP: its files, their headers, and explanations. `test_browser` looks at the page itself."""

import importlib.resources
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import bothways
from bothways.prediction.predictor import Predictor
from bothways.serving import app as application_of, run as serving_run
from bothways.serving.app import App
from bothways.serving.errors import Limits
from bothways.serving.exchange import pages
from commands import run_line
from running_server import answer, refusal, running, wait_for

PAGE = importlib.resources.files("bothways.serving") / "page"
SCRIPTS = sorted(Path(path).stem for path in pages() if path.endswith(".js"))
TEXT = "a good film was bad"
FORBIDDEN = (
    "innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(",
    "localStorage", "sessionStorage", "document.cookie", "sendBeacon",
)  # fmt: skip


@pytest.fixture(scope="module")
def application(predictors) -> App:
    limits = Limits(request_tokens=4000, queue_tokens=4000)
    return application_of(predictors, limits=limits, keys=["sesame"], playground=True)


@pytest.fixture(scope="module")
def client(url) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": "Bearer sesame"}) as client:
        yield client


def explain(client: httpx.Client, **body: Any) -> Any:
    return answer(client, "/explain", body)


def refused(client: httpx.Client, **body: Any) -> tuple[int, str]:
    return refusal(client, "/explain", body)[:2]


# ---- files ----


@pytest.mark.parametrize("path", ["/play", "/play/style.css", "/play/main.js"])
def test_files_need_no_key_and_have_strict_headers(url, path):
    response = httpx.get(url + path)
    assert response.status_code == 200
    kinds = {"js": "text/javascript", "css": "text/css"}
    kind = kinds.get(path.rpartition(".")[2], "text/html")
    assert response.headers["content-type"] == f"{kind}; charset=utf-8"
    own, none = ("script-src", "style-src", "connect-src"), ("base-uri", "form-action")
    assert set(response.headers["content-security-policy"].split("; ")) == {
        "default-src 'none'", "img-src 'self' data:", "frame-ancestors 'none'",
        *(f"{name} 'self'" for name in own), *(f"{name} 'none'" for name in none),
    }  # fmt: skip
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in response.headers
    head = httpx.head(url + path)
    assert head.content == b""
    assert head.headers["content-length"] == str(len(response.content))
    assert httpx.post(url + path, json={}).status_code in (401, 405)


NO_FILES = """
/play/index.html /play/app.py /play/../app.py /play/..%2fapp.py /play/%2e%2e/app.py
/play/main.js%00 /play/main.js/x /play//main.js /play/MAIN.js /models/classify/play
"""


@pytest.mark.parametrize("path", NO_FILES.split())
def test_there_are_no_other_files(client, path):
    response = client.get(path)
    assert response.status_code == 404
    assert "import" not in response.text


def test_a_slash_at_the_end_leads_to_the_page(url):
    response = httpx.get(f"{url}/play/")
    assert response.status_code == 308
    assert response.headers["location"] == "../play"
    assert httpx.get(f"{url}/play/", follow_redirects=True).text == httpx.get(f"{url}/play").text


def test_what_the_page_asks_for_needs_the_key(url):
    assert httpx.get(f"{url}/info").status_code == 401
    body = {"model": "classify", "method": "attention", "inputs": TEXT}
    assert httpx.post(f"{url}/explain", json=body).status_code == 401


def test_without_the_playground_there_is_no_page_and_no_explanation(predictors):
    with running(application_of(predictors["classify"])) as url:
        assert httpx.get(f"{url}/play").status_code == 404
        assert httpx.get(f"{url}/play/main.js").status_code == 404
        body = {"method": "attention", "inputs": TEXT}
        assert httpx.post(f"{url}/explain", json=body).status_code == 404


def test_every_file_is_served_and_small():
    kinds = [item.name.partition(".")[2] for item in PAGE.iterdir()]
    assert (kinds.count("html"), kinds.count("css"), kinds.count("js")) == (1, 1, len(SCRIPTS))
    assert len(kinds) == len(pages()) == 2 + len(SCRIPTS)
    assert sum(len(page.body) for page in pages().values()) < 106_000


def test_the_page_runs_nothing_inline_and_loads_nothing_from_elsewhere():
    html = (PAGE / "index.html").read_text(encoding="utf8")
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module" src="play/main.js">']
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", html)
    for name in SCRIPTS:
        source = (PAGE / f"{name}.js").read_text(encoding="utf8")
        for target in re.findall(r'(?:from|import)\s+"([^"]+)"', source):
            assert target.startswith("./"), (name, target)
            assert target.removeprefix("./").removesuffix(".js") in SCRIPTS
        assert [word for word in FORBIDDEN if word in source] == [], name
        assert not re.search(r"https?://", source), name
    style = (PAGE / "style.css").read_text(encoding="utf8")
    assert "url(" not in style
    assert "@import" not in style


def test_both_languages_say_the_same_things():
    words = (PAGE / "words.js").read_text(encoding="utf8")
    tables = []
    for name in ("EN", "ZH"):
        body = re.search(rf"const {name} = \{{(.*?)\n\}};", words, re.DOTALL)
        assert body
        pairs = re.findall(r'(\w+): "((?:[^"\\]|\\.)*)"', body[1])
        tables.append({key: sorted(re.findall(r"\{\w+\}", text)) for key, text in pairs})
        assert len(pairs) == len(tables[-1])
    assert tables[0] == tables[1]
    used = set()
    for name in SCRIPTS:
        source = (PAGE / f"{name}.js").read_text(encoding="utf8")
        used |= set(re.findall(r'\bt\("(\w+)"', source))
    assert used <= {*tables[0]}


# ---- explanations ----


def test_words_left_out_are_predictions_without_them(client, application):
    predict = application.models.named("classify").predictor
    found = explain(client, model="classify", method="leave_one_out", inputs=TEXT, label="neg")
    whole = predict(TEXT).probabilities["neg"]
    assert found["value"] == pytest.approx(whole, rel=1e-5)
    words = TEXT.split()
    assert [word["text"] for word in found["words"]] == words
    for n, word in enumerate(found["words"]):
        rest = " ".join(words[:n] + words[n + 1 :])
        wanted = whole - predict(rest).probabilities["neg"]
        assert word["effect"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"model": "classify", "inputs": ["a film", "was bad"], "label": "pos"}, 4),
        ({"model": "label", "inputs": TEXT, "label": "pos"}, 5),
        ({"model": "regress", "inputs": ["a film", "was bad"]}, 4),
        ({"model": "tag", "inputs": TEXT, "label": "B-X", "word": 2}, 5),
        ({"model": "embed", "inputs": ["a film", "was bad"]}, 4),
    ],
)
def test_words_left_out_of_every_task(client, body, count):
    found = explain(client, method="leave_one_out", **body)
    assert len(found["words"]) == count
    effects = [word["effect"] for word in found["words"]]
    assert effects.count(None) == (body["model"] == "tag")
    assert any(effects)


def test_attention_of_a_layer(client, monkeypatch):
    found = explain(client, model="embed", method="attention", inputs=TEXT, layer=1)
    count = len(found["tokens"])
    assert [token["text"] for token in found["tokens"]] == ["[CLS]", *TEXT.split(), "[SEP]"]
    heads = np.array(found["heads"])
    assert heads.shape == (2, count, count)
    np.testing.assert_allclose(heads.sum(-1), 1, atol=1e-3)
    np.testing.assert_allclose(np.array(found["rollout"]).sum(-1), 1, atol=1e-3)
    other = explain(client, model="embed", method="attention", inputs=TEXT)
    assert (other["layer"], other["layers"]) == (2, 2)
    assert other["heads"] != found["heads"]
    assert other["rollout"] == found["rollout"]
    monkeypatch.setattr("bothways.serving.explain.MAX_ATTENTION_TOKENS", count - 1)
    refusal = refused(client, model="embed", method="attention", inputs=TEXT)
    assert refusal == (413, "too_many_tokens")


def test_the_input_in_training_is_that_of_the_objective(client, folder):
    body = {"model": "classify", "method": "masked_lm", "rate": 0.4}
    found = explain(client, **body, inputs=[TEXT, "the play ends"], draw=2)
    shown = bothways.show(
        folder, TEXT, "the play ends", objective="masked-lm", step=3, progress=False,
        **{"objective.masking.rate": 0.4, "phases": [{"length": 16}]},
    )  # fmt: skip
    fields = operator.attrgetter("token", "id", "position", "segment", "original", "change")
    expected = [fields(token) for token in shown.sequences[0].tokens]
    fields = operator.itemgetter("text", "id", "position", "segment", "original", "change")
    assert [fields(token) for token in found["tokens"]] == expected
    assert sum(token["change"] != "" for token in found["tokens"]) == round(0.4 * len(expected))
    other = explain(client, **body, inputs=[TEXT, "the play ends"])
    assert other["tokens"] != found["tokens"]
    whole = explain(client, **{**body, "unit": "whole_words"}, inputs=TEXT)["tokens"]
    assert [token["special"] for token in whole] == [True, *[False] * 5, True]


REFUSED: dict[str, list[dict[str, Any]]] = {
    "masked_lm": [
        {"layer": 1}, {"rate": 0}, {"rate": 1.1}, {"unit": "letters"}, {"draw": -1}, {"inputs": ["a", "b", "c"]},
        {"inputs": {"text": "a"}}, {"inputs": ""}, {"inputs": [TEXT, " "]}, {"inputs": "a " * 600},
    ],
    "attention": [{"inputs": None}, {"layer": 3}, {"layer": True}, {"label": "neg"}, {"draw": 0}],
    "leave_one_out": [
        {}, {"label": "neg", "rate": 0.3}, {"label": "<b>"}, {"label": ["neg"]}, {"label": "neg", "word": -1},
        {"label": "neg", "inputs": {}}, {"label": "neg", "inputs": ["a", "b", "c"]},
    ],
    "guess": [{}],
}  # fmt: skip


@pytest.mark.parametrize("method", REFUSED)
def test_what_cannot_be_explained_is_refused(client, method):
    for fields in REFUSED[method]:
        body = {"model": "classify", "method": method, "inputs": TEXT, **fields}
        assert refused(client, **body) == (422, "invalid"), fields
    assert refused(client, model="classify", inputs=TEXT) == (422, "invalid")  # without a method


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a " * 600, "too_many_texts"),
        ("a" * 20_001, "text_too_long"),
        ("a " * 500, "too_many_tokens"),
    ],
)
def test_long_texts_are_not_explained(client, text, code):
    body = {"model": "classify", "method": "leave_one_out", "label": "neg"}
    assert refused(client, **body, inputs=text) == (413, code)


@pytest.mark.parametrize(
    ("model", "method", "inputs"),
    [
        ("choice", "attention", {"context": "a", "endings": ["film", "play"]}),
        ("likelihood", "leave_one_out", "a film"),
        ("answer", "leave_one_out", {"question": "a", "context": "film"}),
        ("embed", "leave_one_out", "a film"),
    ],
)
def test_methods_that_a_task_does_not_have(client, model, method, inputs):
    code = "wrong_task" if model == "choice" else "invalid"
    assert refused(client, model=model, method=method, inputs=inputs) == (422, code)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("rerank", {"query": "a", "documents": []}, "no text"),
        ("likelihood", "", "no text"),
        ("rerank", {"query": "a", "documents": ["a", "film"]}, "several sequences"),
        ("tag", "a " * 60, "several sequences"),
        ("answer", {"question": "a", "context": "a " * 60}, "several sequences"),
    ],
)
def test_attention_needs_a_single_sequence(client, model, inputs, message):
    body = {"model": model, "method": "attention", "inputs": inputs}
    refused_as = refusal(client, "/explain", body)
    assert refused_as[:3] == (422, "invalid", "inputs")
    assert message in refused_as[3]


def test_explanations_without_a_model_folder_are_refused(predictors):
    alone = Predictor(predictors["classify"].task_model)
    with running(application_of(alone, playground=True)) as url, httpx.Client(base_url=url) as one:
        body = {"method": "attention", "inputs": TEXT}
        assert refusal(one, "/explain", body)[:3] == (422, "invalid", "method")
        assert explain(one, method="leave_one_out", inputs=TEXT, label="neg")["words"]


def test_info_has_what_the_page_needs(client):
    models = {model["name"]: model for model in client.get("/info").json()["models"]}
    assert models["fill"]["mask"] == "[MASK]"
    assert models["classify"]["specials"] == {"single": 2, "pair": 3}
    assert models["classify"]["layers"] == 2
    assert models["classify"]["pairs"] is False
    assert (models["tag"]["long_texts"], models["embed"]["long_texts"]) == ("windows", "truncate")


def test_the_command_prints_the_address(folder, monkeypatch, capsys):
    import webbrowser

    served: list[Any] = []
    opened: list[str] = []

    def run_server(application: Any, *_: Any, opened: Any, **__: Any) -> None:
        served.append(application)
        opened()

    monkeypatch.setattr(serving_run, "run_server", run_server)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    words = ["play", f"toy={folder}", "--task", "fill", "--no-browser"]
    run_line(*words)
    printed = capsys.readouterr().err
    found = re.search(r"http://127\.0\.0\.1:\d+/play", printed)
    assert found
    assert not opened
    application, *_ = served
    assert list(application.models.by_name) == ["toy"]
    assert application.hosts == ("localhost", "127.0.0.1", "::1")
    run_line(*words[:-1])
    wait_for(lambda: opened)  # another thread opens the browser
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/play", opened[0])
