"""A speedrun ends at its target or its time, is scored on data of its own, and leaves an entry."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speedrun as job
from speedrun import METRIC, LossTrack, PairTrack, RecordRequest, speedrun

from bothways.data.corpus import Corpus
from bothways.objectives.masked_lm import MaskedLM
from bothways.pretraining.evaluation import evaluate_on_corpus
from bothways.training.run import EarlyStopping, Target
from commands import run_line
from toy_animals import document

TINY = (
    "encoder.width=16", "encoder.heads=2", "encoder.intermediate_size=16", "encoder.depth=1",
    "batch.n=512", "training.until=40 steps", "training.evaluate=5 steps",
    "training.optimizer.lr=1e-2",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("speedrun"), np.random.default_rng(0)
    for name, count in (("train", 60), ("held-out", 20)):
        (folder / f"{name}.txt").write_text("\n\n".join(document(rng) for _ in range(count)))
    return folder


def request_of(place: Path, out: Path, target: float = 3.0, **changes: Any) -> RecordRequest:
    text, held_out = (str(place / f"{name}.txt") for name in ("train", "held-out"))
    track = LossTrack(held_out, target, tokens=1000)
    request = RecordRequest((text,), track, out, overrides=TINY, seeds=1)
    return dataclasses.replace(request, **changes)


def test_run_ends_at_target_loss(place, tmp_path, monkeypatch):
    request = request_of(place, tmp_path / "out", seeds=2)
    entry = speedrun(request, device="cpu")
    assert entry["reached"]
    for run in entry["runs"]:
        curve = [loss for _, _, loss in run["curve"]]
        assert curve[-1] <= 3.0 < min(curve[:-1]), "the first evaluation at the target ends it"
        assert run["steps"] == 5 * len(curve) < 40
        assert run["seconds"] >= run["curve"][-1][0] > 0
    assert entry["mean seconds"] == pytest.approx(np.mean([r["seconds"] for r in entry["runs"]]))
    assert json.loads((request.out / "entry.json").read_text()) == json.loads(json.dumps(entry))
    assert entry["settings"]["training"]["target"] == {"metric": METRIC, "at_most": 3.0}
    held_out = Corpus.open(request.out / "held-out")
    found = evaluate_on_corpus(
        str(request.out / "runs" / "seed-0" / "model"), held_out, tokens=1000,
        objective=MaskedLM(), device="cpu",
    )  # fmt: skip
    assert found["loss/masked"] == pytest.approx(entry["runs"][0]["loss"], rel=1e-4)
    monkeypatch.setattr(job, "pretrain", None)
    assert speedrun(request, device="cpu")["runs"] == entry["runs"], "nothing is trained again"


def write_pairs(folder: Path) -> Path:
    """Animals and what they do, as `toy_animals` has them, against the words in another order."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for name in ("order", "more"):
        rows = [
            {"sentence_good": text, "sentence_bad": " ".join(text.split()[::-1])}
            for text in document(rng).splitlines()
            if text.strip()
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_pair_track_scores_minimal_pairs(place, tmp_path, capsys):
    suite = write_pairs(tmp_path / "suite")
    track = PairTrack(suite, words=500, vocabulary=200)
    words = ("training.until=1 seconds", "training.evaluate=0.5 seconds")
    request = request_of(place, tmp_path / "out", track=track, overrides=(*TINY, *words))
    entry = speedrun(request, device="cpu")
    rows = [json.loads(row) for row in (request.out / "text.jsonl").read_text().splitlines()]
    assert sum(len(row["text"].split()) for row in rows) == 500
    run = entry["runs"][0]
    assert run["seconds"] >= 1
    assert run["curve"]
    assert entry["track"]["words"] == 500
    assert set(run["phenomena"]) == {"order", "more"}
    assert entry["mean accuracy"] == run["accuracy"] == np.mean([*run["phenomena"].values()])
    run_line("evaluate", request.out / "runs" / "seed-0", "--blimp", suite, "--json", "--device", "cpu")  # fmt: skip
    assert json.loads(capsys.readouterr().out)["mean"] == pytest.approx(run["accuracy"])


def test_target_survives_checkpoint():
    target = Target("loss", 2.0)
    waiting = EarlyStopping(None, None, target)
    states = []
    for value in (3.0, 2.5, 2.0):
        waiting.note({"loss": value})
        states.append((waiting.over, waiting.state()))
    assert [over for over, _ in states] == [False, False, True]
    resumed = EarlyStopping(None, None, target)
    assert resumed.restore({**states[-1][1], "loss": 2.0}) == {"loss": 2.0}
    assert resumed.over
    resumed.restore(states[0][1])
    assert not resumed.over
