"""The playground in a real browser: `make browser`. Chromium by playwright, accessibility by axe-core."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest

from bothways import build_index, load
from bothways.hub.model_folder import load_model
from bothways.model.heads import LabelHead, TagHead
from bothways.model.model import Model
from bothways.prediction.predictor import Predictor
from bothways.serving import app as application_of
from bothways.serving.app import App
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.tagging.task import TaggingTask
from running_server import running

BROWSER, AXE = os.environ.get("BOTHWAYS_BROWSER"), os.environ.get("BOTHWAYS_AXE")
pytestmark = pytest.mark.skipif(not BROWSER, reason="needs Chromium and playwright: make browser")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, LocatorAssertions, Page
HOSTILE = (
    "<img src=x onerror=window.pwned=1>",
    "<script>window.pwned=1</script>",
    "\u202ertl\u200b\u0007 'quoted\" \\ &amp; {{7*7}} ${7*7}",
    "a" * 500,
)
TEXT = "a good film was bad"
DOCUMENTS = ("a good film", "old men sleep", "the play ends in rain")
FIELDS: dict[str, dict[str, str]] = {
    "classify": {"text": TEXT},
    "label": {"text": TEXT},
    "regress": {"text": TEXT, "second": "a play"},
    "choice": {"text": "a good film", "items": "was bad\nends\nin rain"},
    "tag": {"text": TEXT},
    "answer": {"second": "was", "text": f"the play ends with {TEXT}"},
    "fill": {"text": "a good [MASK] was bad"},
    "likelihood": {"text": TEXT},
    "embed": {"items": "a film\na play\nold men"},
    "rerank": {"text": "a film", "items": "was bad\na good film\nin rain"},
    "search:films": {"text": "in rain"},
}
NAMES = [*FIELDS][:-1]


def expect(place: Any) -> LocatorAssertions:
    from playwright import sync_api

    return sync_api.expect(place)


def hostile(folder: Path, kind: str) -> Predictor:
    loaded = load_model(folder)
    if kind == "tag":
        labels, task, head = ("O", f"B-{HOSTILE[0]}", f"I-{HOSTILE[0]}"), TaggingTask(), TagHead(3)
    else:
        labels, task, head = HOSTILE, ClassificationTask(), LabelHead(len(HOSTILE))
    model = Model(loaded.model.config, (head,), loaded.model.encoder)
    task_model = task.bind(model, loaded.tokenizer, labels, 32)
    return Predictor(task_model, reopen=lambda: task_model)


@pytest.fixture(scope="module")
def application(folder, predictors, tmp_path_factory) -> App:
    served = {name: predictors[name] for name in NAMES}
    served["embed"] = load(folder, "embed", length=32, batch_invariant=True)
    served |= {f"hostile-{kind}": hostile(folder, kind) for kind in ("classify", "tag")}
    index = tmp_path_factory.mktemp("place") / "films"
    build_index([*DOCUMENTS, HOSTILE[0]], folder, index, bm25=True, length=32)
    return application_of(served, playground=True, indexes={"films": index})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


Open = Callable[..., "Page"]


@pytest.fixture
def show(browser, url) -> Iterator[Open]:
    """Open the page with a state; at the end nothing has left the host, and nothing has failed."""
    contexts, faults, requests = [], [], []

    def opened(base: str = url, *, faulty: bool = False, width: int = 1200, **state: str) -> Page:
        dark = state.pop("scheme", "light")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=dark, locale="en-US"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        if not faulty:
            page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: requests.append((base, request.url)))
        page.goto(f"{base}/play#{urlencode(state)}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults
    for base, asked in requests:
        assert asked.startswith((f"{base}/", "data:")), asked
        assert "#" not in asked


def settled(page: Page) -> Page:
    """Wait until nothing is computed."""
    expect(page.locator(".panel")).to_be_attached()
    page.wait_for_function(
        "() => { const p = document.querySelector('.panel'); return p && !p.hasAttribute('aria-busy') && p.childElementCount }"
    )
    return page


# ---- tasks ----


def test_classify(show, application):
    page = settled(show(model="classify", text=TEXT))
    found = application.models.named("classify").predictor(TEXT)
    expect(page.locator(".headline")).to_have_text(found.label)
    names, values = (page.locator(f".bar-{part}").all_inner_texts() for part in ("name", "value"))
    shown = dict(zip(names, values, strict=True))
    assert shown == {name: f"{100 * p:.1f} %" for name, p in found.probabilities.items()}


def test_two_models_are_shown_beside_each_other(show, application):
    against = {"model": "classify", "against": "hostile-classify"}
    page = settled(show(text=TEXT, **against))
    expect(page.locator(".sides > section")).to_have_count(2)
    answers = [application.models.named(name).predictor(TEXT) for name in against.values()]
    shown = page.locator(".sides .headline").all_inner_texts()
    assert shown[0] == answers[0].label
    assert shown[1].replace(" ", "") == answers[1].label.replace(" ", "")
    expect(page.locator(".panel strong").first).to_have_text("The answers differ.")
    page.get_by_label("Beside").select_option("")
    expect(page.locator(".sides")).to_have_count(0)
    assert "against=" in page.url


@pytest.mark.parametrize(
    ("model", "place", "count"),
    [
        ("label", ".bar", 2),
        ("regress", ".scale-value", 1),
        ("choice", ".bar", 3),
        ("fill", ".bar", 3),
        ("likelihood", ".tint", 5),
        ("embed", ".cell", 9),
        ("rerank", ".ranking li", 3),
        ("search:films", ".ranking li", 4),
    ],
)
def test_each_task_has_its_picture(show, model, place, count):
    page = settled(show(model=model, **FIELDS[model]))
    expect(page.locator(f".panel {place}")).to_have_count(count)
    expect(page.locator(".status")).to_contain_text("ms in the model")


def test_tags_are_spans_with_their_type(show, application):
    text = "😀 a good film 中 was bad and it ends"
    page = settled(show(model="tag", text=text))
    entities = application.models.named("tag").predictor(text).entities
    marks = page.locator(".span")
    expect(marks).to_have_count(len(entities))
    for n, entity in enumerate(entities):
        assert marks.nth(n).inner_text().replace("\n", "") == entity.text + entity.type
    assert page.locator(".panel .text").inner_text().startswith("😀 a") or entities[0].start == 0


def test_answers_are_marked_in_their_context(show, application):
    fields = {"second": "was", "text": "😀😀 the play ends 中 with a good film in rain"}
    page = settled(show(model="answer", **fields))
    found = application.models.named("answer").predictor((fields["second"], fields["text"]))
    expect(page.locator("mark.answer")).to_have_text(found.text)
    assert page.locator(".panel .text").inner_text() == fields["text"]


def test_a_click_hides_a_word_and_another_brings_it_back(show):
    page = settled(show(model="fill", text="a good film was bad"))
    expect(page.locator(".empty")).to_contain_text("Click a word")
    page.get_by_role("button", name="film", exact=True).click()
    expect(page.locator("textarea")).to_have_value("a good [MASK] was bad")
    expect(page.locator(".panel .bar")).to_have_count(3)
    page.get_by_role("button", name="was", exact=True).click()
    expect(page.locator("textarea")).to_have_value("a good [MASK] [MASK] bad")
    expect(page.locator(".panel .bar")).to_have_count(6)
    page.locator('.chip[aria-pressed="true"]').first.click()
    expect(page.locator("textarea")).to_have_value("a good film [MASK] bad")
    page.locator(".use").first.click()
    expect(page.locator("textarea")).not_to_have_value("a good film [MASK] bad")


def test_answers_follow_the_last_keystroke(show):
    page = settled(show(model="classify"))
    expect(page.locator(".empty")).to_be_visible()
    page.locator("textarea").press_sequentially("a bad film", delay=5)
    expect(page.locator(".bar")).to_have_count(2)
    assert "text=a+bad+film" in page.url
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".empty")).to_be_visible()
    page.locator(".example").first.click()
    expect(page.locator(".bar")).to_have_count(2)


def test_the_address_holds_the_state(show):
    page = settled(show(model="classify", text=TEXT, tab="why", lang="zh", theme="dark"))
    expect(page.locator(".effect")).to_have_count(5)
    page.reload()
    settled(page)
    expect(page.locator(".effect")).to_have_count(5)
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    assert page.locator("html").get_attribute("data-theme") == "dark"
    expect(page.locator("textarea")).to_have_value(TEXT)
    page.evaluate("location.hash = 'model=tag&text=a+film&lang=en'")
    expect(page.locator("textarea")).to_have_value("a film")
    expect(page.locator("h2")).to_have_text("Input")


# ---- why, tokens, code ----


@pytest.mark.parametrize("model", ["classify", "label", "tag", "regress"])
def test_words_with_effects(show, model):
    page = settled(show(model=model, tab="why", method="leave_one_out", **FIELDS[model]))
    words = " ".join(FIELDS[model][name] for name in ("text", "second") if name in FIELDS[model])
    expect(page.locator(".effect")).to_have_count(len(words.split()))
    assert page.locator(".effect-word").all_inner_texts() == words.split()
    expect(page.locator(".caveat")).to_be_visible()


def test_the_explained_label_can_be_chosen(show):
    page = settled(show(model="classify", tab="why", text=TEXT))
    expect(page.locator(".effect")).to_have_count(5)
    first = page.locator(".effect small").all_inner_texts()
    chosen = page.get_by_label("Explained")
    other = {"pos": "neg", "neg": "pos"}[chosen.input_value()]
    chosen.select_option(other)
    page.wait_for_function(
        "first => [...document.querySelectorAll('.effect small')].map((e) => e.innerText).join() !== first",
        arg=",".join(first),
    )
    assert f"label={other}" in page.url


def test_attention_by_mouse_and_keyboard(show):
    page = settled(show(model="embed", tab="why", method="attention", **FIELDS["embed"]))
    left = page.locator(".left li")
    expect(left).to_have_count(4)
    drawn = "() => document.querySelector('canvas').getContext('2d').getImageData(0, 0, 300, 80).data.some(Boolean)"
    assert page.evaluate(drawn)
    page.locator(".left").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    expect(left.nth(1)).to_have_attribute("aria-selected", "true")
    expect(page.locator(".numbers summary")).to_have_text("Looks most at: a")
    page.get_by_role("button", name="None").click()
    assert not page.evaluate(drawn)
    page.get_by_label("Layer").select_option("1")
    expect(page.get_by_label("Layer")).to_have_value("1")
    assert "layer=1" in page.url


def test_tokens_show_what_is_cut(show):
    page = settled(show(model="classify", tab="tokens", text=" ".join(["film"] * 40)))
    expect(page.locator(".token")).to_have_count(42)
    expect(page.locator(".is-cut")).to_have_count(10)
    expect(page.locator(".is-special")).to_have_count(2)
    expect(page.locator(".warning")).to_contain_text("10 are cut off")


def test_snippets_run(show):
    text = 'it\'s "quoted" \\ $HOME `x` 😀\u202e\nend'
    page = settled(show(model="classify", tab="code", text=text))
    curl, python, answer = page.locator("pre").all_inner_texts()
    wanted = json.loads(answer)
    done = subprocess.check_output([sys.executable, "-c", python], text=True)
    assert done.strip() == str(wanted)
    if shutil.which("curl"):
        assert json.loads(subprocess.check_output(["sh", "-c", curl])) == wanted


# ---- hostile content ----


@pytest.mark.parametrize("tab", ["result", "why", "tokens", "code"])
@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_labels_texts_and_errors_are_only_text(show, kind, tab):
    text = "a film <img src=x onerror=window.pwned=1> <script>window.pwned=1</script> \u202e good"
    state = {"lang": "<b>", "label": HOSTILE[1], "word": "<i>", "method": "<u>", "layer": "<s>"}
    page = settled(show(model=f"hostile-{kind}", text=text, tab=tab, **state))
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None
    assert page.locator(".panel img, .panel script, .panel b, .panel i").count() == 0
    if (kind, tab) == ("classify", "result"):
        assert {*page.locator(".bar-name").all_text_contents()} == {*HOSTILE}


def test_an_error_of_the_server_is_only_text(show):
    page = show(faulty=True, model="classify", text=TEXT)
    settled(page)
    message = "<img src=x onerror=window.pwned=1>"
    body = json.dumps({"error": {"message": message, "code": message}})
    page.route("**/classify", lambda route: route.fulfill(status=500, body=body))
    page.locator("textarea").fill("a film")
    expect(page.locator(".error")).to_contain_text(message)
    assert page.locator(".panel img").count() == 0
    assert page.evaluate("window.pwned") is None
    page.unroute("**/classify")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".bar")).to_have_count(2)


def test_the_policy_blocks_inline_scripts(show):
    page = settled(show(faulty=True, model="classify", text=TEXT))
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.pwned = 1'; document.body.append(s);"
        " const i = document.createElement('div'); i.innerHTML = '<img src=x onerror=window.pwned=1>'; document.body.append(i); }"
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.pwned") is None


@pytest.mark.parametrize("model", ["classify", "tag", "fill", "likelihood"])
def test_a_hundred_thousand_characters(show, model):
    page = settled(show(faulty=True, model=model))
    text = "a 😀 film " * 10_000 + ("[MASK]" if model == "fill" else "")
    assert len(text) >= 80_000
    page.locator("textarea").fill(text + "good " * 4_000)
    page.wait_for_timeout(600)
    settled(page)
    for name in ("Why", "Tokens", "Code", "Result"):
        page.get_by_role("tab", name=name).click()
        settled(page)
    expect(page.locator(".panel .bar, .panel .text, .panel .error").first).to_be_visible()
    page.locator("textarea").fill("a [MASK]" if model == "fill" else "a film")
    expect(page.locator(".panel .error")).to_have_count(0)


def test_a_server_that_has_stopped(show, browser, url):
    page = settled(show(faulty=True, model="classify", text=TEXT))
    page.context.set_offline(True)
    page.locator("textarea").fill("a film")
    expect(page.locator(".error")).to_contain_text("The server does not answer")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".bar")).to_have_count(2)


def test_a_key_is_asked_for_and_kept_in_memory(show, predictors):
    one = application_of(predictors["classify"], keys=["sesame"], playground=True)
    with running(one) as url:
        page = show(url, faulty=True, text=TEXT)
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not accepted")
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Open").click()
        expect(page.locator(".bar")).to_have_count(2)
        page.get_by_role("tab", name="Code").click()
        settled(page)
        assert "sesame" not in page.content()
        assert "BOTHWAYS_API_KEY" in page.locator("pre").first.inner_text()
        assert "sesame" not in page.url
        stored = page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
        assert stored == ["", 0, 0]
        assert page.context.cookies() == []


# ---- for everyone ----


def serious(page: Page) -> list[str]:
    """What axe-core calls serious or critical."""
    assert AXE
    page.evaluate(Path(AXE).read_text(encoding="utf8"))
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{fault['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


@pytest.mark.skipif(not AXE, reason="axe-core is missing: make browser takes it from npm")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_nothing_serious_for_axe(show, scheme, lang):
    states = [{"model": name, **FIELDS[name]} for name in NAMES]
    states += [{"model": "classify", "text": TEXT, "tab": tab} for tab in ("why", "tokens", "code")]
    states += [{"model": "embed", "tab": "why", "method": "attention", **FIELDS["embed"]}]
    states += [{"model": "classify"}]
    page = settled(show(lang=lang, scheme=scheme))
    faults = {}
    for state in states:
        page.evaluate("hash => { location.hash = hash; }", urlencode({**state, "lang": lang}))
        page.wait_for_timeout(150)
        settled(page)
        faults[json.dumps(state)] = serious(page)
    assert not {state: found for state, found in faults.items() if found}


def test_by_keyboard_alone(show):
    page = settled(show(model="classify", text=TEXT))
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the result")
    page.get_by_role("tab", name="Result").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(":focus")).to_have_text("Why")
    expect(page.locator(".effect")).to_have_count(5)
    page.keyboard.press("End")
    expect(page.locator(":focus")).to_have_text("Code")
    page.keyboard.press("ArrowRight")
    expect(page.locator(":focus")).to_have_text("Result")
    assert page.get_by_role("tab", selected=True).inner_text() == "Result"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_does_not_scroll_sideways(show, width):
    page = settled(show(width=width))
    states = [
        {"model": name, "tab": tab, **FIELDS[name]} for name in NAMES for tab in ("result", "why")
    ]
    states += [{"model": "classify", "tab": tab, "text": TEXT} for tab in ("tokens", "code")]
    wide = []
    for state in states:
        page.evaluate("hash => { location.hash = hash; }", urlencode(state))
        page.wait_for_timeout(100)
        settled(page)
        if page.evaluate("document.documentElement.scrollWidth") > width:
            wide.append(state)
    assert not wide
