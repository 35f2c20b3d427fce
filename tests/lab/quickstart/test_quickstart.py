"""The quickstart from text to report, on settings that take seconds."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.report.html import write_html
from bothways.core.report.sections import ComparisonChart
from bothways.data.documents import Document
from bothways.data.loader import ExampleBudget
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.run import FinetuneResult
from bothways.hub.model_folder import load_model
from bothways.lab import quickstart as gain
from bothways.lab.quickstart import (
    QuickstartResult,
    Shape,
    chance_difference,
    choose_length,
    choose_shape,
    gather_documents,
    labelled_examples,
    masked_words,
    quickstart_report,
    run_quickstart,
)
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Epochs, Hours, Linear, Tokens
from heard_progress import Heard

SMALL: dict[str, Any] = {
    "vocabulary": 200,
    "shapes": (Shape(2, 32, 1e-3, 4_000, 2),),
    "method": FinetuneConfig(
        Training(Epochs(1.0), AdamW(lr=1e-3), Linear(0.1), evaluate=Epochs(1.0)),
        32,
        ExampleBudget(16),
    ),
}


def write_text(folder: Path) -> str:
    """Documents of sentences that all differ, with lower-case words to swap."""
    rng = np.random.default_rng(3)
    words = ("cats dogs owls hens", "often never always", "eat find watch carry", "small old red")

    def sentence() -> str:
        middle = " ".join(rng.choice(group.split()) for group in words)
        return f"The {middle} apples near {rng.integers(10_000)} trees here."

    documents = ["\n".join(sentence() for _ in range(8)) for _ in range(120)]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf8")
    return str(folder / "text.txt")


@pytest.fixture(scope="module", autouse=True)
def short_measurements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gain, "MEASURED_SECONDS", 0.05)
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> QuickstartResult:
    folder = tmp_path_factory.mktemp("quickstart")
    result = run_quickstart(folder / "out", files=(write_text(folder),), **SMALL)
    assert result is not None
    return result


def test_quickstart_runs_all_stages(result):
    out = result.corpus.folder.parent
    assert "on unseen sentences" in quickstart_report(result).lead
    labels, runs = ("as written", "swapped"), (*result.from_pretrained, *result.from_scratch)
    assert {run.task_model.labels for run in runs} == {labels}
    assert len(result.from_pretrained) == len(result.from_scratch) == 2
    pretrained = load_model(out / "pretraining" / "model").model
    assert {*pretrained.heads} == {"masked", "pooler", "pair"}
    assert load_model(out / "finetuned").labels == labels
    config = json.loads((out / "finetuned" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert all(0 <= run.metrics["accuracy"] <= 1 for run in result.from_pretrained)


def test_report_has_measurements_and_loads_nothing(result, tmp_path):
    write_html(quickstart_report(result), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf8")
    assert "http" not in page
    text = re.sub(r"<[^>]+>", " ", page).replace("\N{NO-BREAK SPACE}", " ")
    for runs in (result.from_pretrained, result.from_scratch):
        mean = np.mean([run.metrics["accuracy"] for run in runs])
        assert f"{100 * mean:.1f} %" in text
    perplexity = result.pretrained.metrics["held-out/perplexity"]
    assert perplexity == pytest.approx(np.exp(result.pretrained.metrics["held-out/loss/masked"]))
    for title in ("Settings", "unigram", "majority baseline"):
        assert title in page, title


def test_labelled_sentences_are_not_in_corpus(result):
    corpus, labelled = result.corpus, result.labelled.dev_examples
    texts = [corpus.sentences_of(document) for document in range(len(corpus))]
    read = {corpus.tokenizer.decode(ids) for sentences in texts for ids in sentences}
    encoded = corpus.tokenizer.encode([example.text for example in labelled])
    asked = {*map(corpus.tokenizer.decode, encoded)}
    assert len(asked) == len(labelled)
    assert not read & asked


def test_quickstart_resumes(result):
    out = result.corpus.folder.parent
    before = (out / "pretraining" / "metrics.jsonl").read_text()
    shapes, heard = (Shape(1, 64, 1e-3, 10, 1), *SMALL["shapes"]), Heard()
    options = SMALL | {"shapes": shapes, "progress": heard}  # a larger one would fit, too
    again = run_quickstart(out, files=(str(out.parent / "text.txt"),), **options)
    assert again.shape == result.shape
    assert "continuing to pre-train a BERT of 2 layers × 32\n" in heard.text
    after = (out / "pretraining" / "metrics.jsonl").read_text()
    assert after == before, "what is finished is not trained again"
    metrics = [[run.metrics for run in done.from_scratch] for done in (again, result)]
    assert metrics[0] == metrics[1]
    options = SMALL | {"shapes": shapes[:1]}  # of another version
    with pytest.raises(ResourceError, match="2 layers × 32"):
        run_quickstart(out, files=(str(out.parent / "text.txt"),), **options)


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "mine" / "corpus").mkdir(parents=True)
    (tmp_path / "mine" / "corpus" / "notes").write_text("dear to me")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ResourceError, match="mine: is not empty, and not the folder"):
        run_quickstart(tmp_path / "mine", files=("never read",), **SMALL)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ResourceError, match="notes: cannot be written: Not a directory"):
        run_quickstart(tmp_path / "mine" / "corpus" / "notes", files=("never read",), **SMALL)
    with pytest.raises(ResourceError, match=r"notes/new: cannot be written: .*\n  Choose another"):
        run_quickstart(tmp_path / "mine" / "corpus" / "notes" / "new", files=("never read",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="never read: no such file"):
        run_quickstart(tmp_path / "empty", files=("never read",), **SMALL)
    assert not list((tmp_path / "empty").iterdir())


def test_mistakes_are_errors(tmp_path):
    (tmp_path / "one.txt").write_text("One document. It is short.\n", encoding="utf8")
    with pytest.raises(DataError, match="1 document: too few"):
        gather_documents((str(tmp_path / "one.txt"),))
    with pytest.raises(DataError, match="0 labelled examples are too few"):
        labelled_examples([], [Document("It stops here.", "short")])
    with pytest.raises(DataError, match="Chinese has none"):
        labelled_examples([], [Document("这是一个很小的句子，没有空格。", "chinese")])
    from bothways.cli.lab import quickstart

    with pytest.raises(ConfigError, match=r"minutes: must be at least 0\.5"):
        quickstart(minutes=0.1, out=tmp_path / "never")


def test_hidden_words_are_those_of_test_sentences_the_right_guesses_first(result):
    section = masked_words(result)
    written = {e.text for e in result.labelled.dev_examples if e.label == "as written"}
    right = [example.guesses[0].answer == example.truth for example in section.examples]
    assert right == sorted(right, reverse=True)
    assert 0 < len(right) <= 4
    for example in section.examples:
        before, hidden, after = example.parts
        assert (hidden.text, len(example.guesses)) == ("[MASK]", 3)
        assert f"{before}{example.truth}{after}" in written


@pytest.mark.parametrize(("pretrained", "gains"), [((0.72, 0.73), True), ((0.503, 0.492), False)])
def test_headline_claims_a_gain_only_beyond_chance(result, pretrained, gains):
    def with_accuracy(
        runs: tuple[FinetuneResult, ...], *values: float
    ) -> tuple[FinetuneResult, ...]:
        return tuple(
            dataclasses.replace(run, metrics={**run.metrics, "accuracy": value})
            for run, value in zip(runs, values, strict=True)
        )

    changed = dataclasses.replace(
        result,
        from_pretrained=with_accuracy(result.from_pretrained, *pretrained),
        from_scratch=with_accuracy(result.from_scratch, 0.496, 0.507),
    )
    headline = quickstart_report(changed).headline
    assert ("wins" in headline, "chance" in headline) == (gains, not gains)


def test_chance_difference_is_larger_of_two_errors():
    chart = ComparisonChart("", "", {"pre-trained": [0.5, 0.5], "from random weights": [0.5, 0.5]})
    assert chance_difference(chart, 5000) == pytest.approx(0.02)
    chart = ComparisonChart("", "", {"pre-trained": [0.4, 0.6], "from random weights": [0.5, 0.5]})
    assert chance_difference(chart, 5000) == pytest.approx(2 * 0.02**0.5)


LARGE, MEDIUM = Shape(4, 256, 1e-3, 1_000_000, 3), Shape(2, 128, 2e-3, 500_000, 2)


@pytest.mark.parametrize(
    ("rates", "seconds", "shape"),
    [
        ((10_000, 20_000), 200, LARGE),
        ((3_000, 9_000), 200, MEDIUM),
        ((300, 900), 200, dataclasses.replace(MEDIUM, seeds=1)),
    ],
)
def test_largest_shape_that_fits_is_chosen(rates, seconds, shape, monkeypatch):
    by_depth = dict(zip((LARGE.depth, MEDIUM.depth), rates, strict=True))
    monkeypatch.setattr(gain, "measure_speed", lambda shape, *_: float(by_depth[shape.depth]))
    speed = by_depth[shape.depth]
    assert choose_shape((LARGE, MEDIUM), 4000, seconds, 100_000) == (shape, speed)
    assert shape.seconds(speed, 100_000) == (shape.tokens + 100_000 * shape.seeds) / speed


def test_one_thread_is_chosen_where_cores_are_busy(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(
        gain, "measure_speed", lambda *_: 90.0 if torch.get_num_threads() > 1 else 1_400.0
    )
    try:
        torch.set_num_threads(2)
        assert choose_shape((MEDIUM,), 4000, 600, 0) == (MEDIUM, 1_400.0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_length_is_tokens_unless_the_time_is_set_or_too_short():
    until, _ = choose_length(MEDIUM, 10_000.0, 50_000, limit=480, passed=60, use_all=False)
    assert until == Tokens(500_000)
    until, _ = choose_length(MEDIUM, 10_000.0, 50_000, limit=600, passed=60, use_all=True)
    assert until == Hours((600 - 60 - 10) / 3600)
    until, message = choose_length(MEDIUM, 500.0, 50_000, limit=480, passed=80, use_all=False)
    assert until == Hours((400 - 200) / 3600)
    assert "--minutes 22" in message  # (500,000 + 100,000) / 500 + 80 s
