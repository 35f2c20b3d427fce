"""The quickstart from text to report, on settings that take seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.report.html import to_html
from bothways.data.batching import ExampleBudget
from bothways.data.full_sentences import FullSentences
from bothways.finetuning.config import FinetuneConfig
from bothways.hub.model_folder import load_model
from bothways.lab.quickstart.labelled_data import (
    gather_documents,
    labelled_examples,
    split_documents,
)
from bothways.lab.quickstart.report_page import quickstart_report
from bothways.lab.quickstart.story import Story, StoryResult, run_story
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.positions import Learned
from bothways.pretraining.config import PretrainPhase
from bothways.training.durations import Epochs
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear
from heard_progress import Heard

SMALL = Story(
    minutes=0.1,
    vocabulary=200,
    encoder=EncoderConfig(200, 32, 2, 2, 64, position=Learned(64), dropout=Dropouts(0.0, 0.0)),
    phases=(PretrainPhase(16, 0.5, FullSentences()), PretrainPhase(32, 0.5)),
    labels=60,
    method=FinetuneConfig(
        Training(Epochs(1.0), AdamW(lr=1e-3), Linear(0.1), evaluate=Epochs(1.0)),
        32,
        ExampleBudget(16),
    ),
    filled=2,
)


def write_text(folder: Path) -> str:
    """Documents of sentences that all differ, with lower-case words to swap."""
    rng = np.random.default_rng(3)
    words = [
        ["cats", "dogs", "owls", "hens"],
        ["often", "never", "always"],
        ["eat", "find", "watch", "carry"],
        ["small", "old", "red"],
    ]
    documents = []
    for _ in range(120):
        lines = [
            f"The {' '.join(rng.choice(group) for group in words)} apples near {rng.integers(10_000)} trees here."
            for _ in range(8)
        ]
        documents.append("\n".join(lines))
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf8")
    return str(folder / "text.txt")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> StoryResult:
    folder = tmp_path_factory.mktemp("quickstart")
    result = run_story(SMALL, folder / "out", files=(write_text(folder),))
    assert result is not None
    return result


def test_the_story_is_told_whole(result: StoryResult) -> None:
    out = result.corpus.folder.parent
    assert "with unseen sentences" in quickstart_report(result).lead
    assert {run.learner.labels for run in (*result.from_pretrained, *result.from_scratch)} == {
        ("as written", "swapped")
    }
    assert len(result.from_pretrained) == len(result.from_scratch) == 3
    assert set(load_model(out / "pretraining" / "model").model.heads) == {
        "masked",
        "pooler",
        "pair",
    }
    tuned = load_model(out / "finetuned")
    assert tuned.labels == ("as written", "swapped")
    assert json.loads((out / "finetuned" / "config.json").read_text())["architectures"] == [
        "BertForSequenceClassification"
    ]
    assert set(result.seconds) == {
        "text",
        "vocabulary",
        "corpus",
        "pre-training",
        "fine-tuning",
        "words hidden",
        "report",
    }
    assert all(0 <= run.metrics["accuracy"] <= 1 for run in result.from_pretrained)
    assert len(result.filled) == 2
    for filled in result.filled:
        assert [p for _, p in filled.guesses] == sorted(
            (p for _, p in filled.guesses), reverse=True
        )


def test_the_report_says_what_was_measured_and_loads_nothing(result: StoryResult) -> None:
    page = to_html(quickstart_report(result))
    assert "http" not in page
    means = [
        np.mean([run.metrics["accuracy"] for run in runs])
        for runs in (result.from_pretrained, result.from_scratch)
    ]
    text = re.sub(r"<[^>]+>", " ", page)
    for mean in means:
        assert f"{100 * mean:.1f} %" in text
    perplexity = result.pretrained.metrics["held-out/perplexity"]
    assert perplexity == pytest.approx(np.exp(result.pretrained.metrics["held-out/loss/masked"]))
    for part_of_report in (
        "Every run",
        "Parameters",
        "Settings",
        "Experiments behind the settings",
        "The value of more time",
        "unigram",
    ):
        assert part_of_report in page, part_of_report
    assert f"{sum(p.numel() for p in result.pretrained.learner.parameters()):,}" in text


def test_no_labelled_sentence_was_read_in_pre_training(result: StoryResult) -> None:
    read = {
        result.corpus.tokenizer.decode(ids)
        for document in range(len(result.corpus))
        for ids in result.corpus.sentences_of(document)
    }
    labelled = result.labelled.dev_examples
    asked = {
        result.corpus.tokenizer.decode(ids)
        for ids in result.corpus.tokenizer.encode([e.text for e in labelled])
    }
    assert len(asked) == len(labelled)
    assert not read & asked


def test_it_goes_on_where_it_was(result: StoryResult, tmp_path: Path) -> None:
    out = result.corpus.folder.parent
    before = (out / "pretraining" / "metrics.jsonl").read_text()
    again = run_story(SMALL, out, files=(str(out.parent / "text.txt"),))
    assert again is not None
    assert (out / "pretraining" / "metrics.jsonl").read_text() == before, (
        "what is finished is not trained again"
    )
    assert [run.metrics for run in again.from_scratch] == [
        run.metrics for run in result.from_scratch
    ]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine" / "corpus").mkdir(parents=True)
    (tmp_path / "mine" / "corpus" / "notes").write_text("dear to me")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        ResourceError, match=r"mine: is not empty, and not the folder of a quickstart\n.*--out NAME"
    ):
        run_story(SMALL, tmp_path / "mine", files=("never read",))
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ResourceError, match="notes: cannot be written: Not a directory"):
        run_story(SMALL, tmp_path / "mine" / "corpus" / "notes", files=("never read",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="never read: no such file"):
        run_story(SMALL, tmp_path / "empty", files=("never read",))
    assert not list((tmp_path / "empty").iterdir())


def test_own_labels(result: StoryResult, tmp_path: Path) -> None:
    rows = [
        f"{'cats eat' if i % 2 else 'dogs find'} apples number {i}\t{'cat' if i % 2 else 'dog'}"
        for i in range(60)
    ]
    (tmp_path / "labels.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n", encoding="utf8")
    heard = Heard()
    own = run_story(
        SMALL,
        tmp_path / "out",
        files=(write_text(tmp_path),),
        labels=tmp_path / "labels.tsv",
        progress=heard,
    )
    assert own is not None
    assert own.labelled.labels == ("cat", "dog")
    assert "swapped" not in quickstart_report(own).lead
    assert "never seen" not in quickstart_report(own).lead
    warnings = [
        f"warning: {finding}" for finding in own.labelled.findings if finding.severity == "warning"
    ]
    assert warnings
    assert [said for said in heard.messages if said.startswith("warning: ")] == warnings


def test_a_text_that_is_labelled_several_times_is_trained_or_tested_on(tmp_path: Path) -> None:
    rows = [f"sentence number {i % 30} here\t{i % 2}" for i in range(120)]
    (tmp_path / "labels.tsv").write_text("text\tlabel\n" + "\n".join(rows) + "\n", encoding="utf8")
    train, test = labelled_examples([], [], tmp_path / "labels.tsv", 1200)
    assert (len(train), len(test)) == (21, 9)
    assert not {example.text for example in train} & {example.text for example in test}


def test_mistakes_are_named(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("One document. It is short.\n", encoding="utf8")
    with pytest.raises(DataError, match="1 document is too few"):
        gather_documents((str(tmp_path / "one.txt"),), SMALL.words)
    (tmp_path / "few.tsv").write_text("text\tlabel\na b\tx\nc d\ty\n", encoding="utf8")
    with pytest.raises(DataError, match="labelled examples are too few"):
        run_story(
            SMALL, tmp_path / "out", files=(write_text(tmp_path),), labels=tmp_path / "few.tsv"
        )
    from bothways.cli.quickstart import quickstart

    with pytest.raises(ConfigError, match=r"minutes: must be at least 0\.5"):
        quickstart(minutes=0.1, out=tmp_path / "never")


def test_parts_are_kept_apart_by_what_a_document_is(tmp_path: Path) -> None:
    documents = gather_documents((write_text(tmp_path),), SMALL.words)
    kept, aside = split_documents(documents, 0.3)
    assert len(kept) + len(aside) == len(documents)
    assert not set(kept) & set(aside)
    assert set(split_documents(documents[::-1], 0.3)[1]) == set(aside), "whatever the order"
    assert 0.1 < len(aside) / len(documents) < 0.5
