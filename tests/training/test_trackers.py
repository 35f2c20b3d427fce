import dataclasses
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bothways.core.errors import CheckpointError, ResourceError
from bothways.training import trackers
from bothways.training.meter import EvaluationScores, Speed, StepReport, report_values, score_values
from bothways.training.schedules import Hours, RunState, Steps, Tokens
from bothways.training.trackers import JsonLines, TensorBoard
from toy_training import TRAINING, metric_lines, session

REPORT = StepReport(
    RunState(40, 1200, 0.5, 3.0),
    EvaluationScores({"masked": 6.5, "pair": 0.69}, {"masked": 0.031}),
    1.5,
    1e-4,
    [(2.0, 700.0), (1.0, 500.0)],
)


def test_a_report_is_a_flat_table():
    scores = {"loss/masked": 6.5, "loss/pair": 0.69, "accuracy/masked": 0.031}
    state = {"step": 40, "tokens": 1200, "epochs": 0.5, "seconds": 3.0}
    state |= {"gradient_norm": 1.5, "learning_rate": 1e-4}
    ranks = {"rank/0/seconds": 2.0, "rank/0/tokens": 700, "rank/1/seconds": 1.0}
    assert report_values(REPORT) == state | scores | ranks | {"rank/1/tokens": 500}
    named = {f"heldout/{name}": value for name, value in scores.items()}
    assert score_values(REPORT.scores, "heldout/") == named


def test_lines_after_the_step_resumed_from_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    first = JsonLines(file, 0)
    for step in (10, 20, 20, 30):
        first.write({"step": step, "loss": 0.5})
    with file.open("a") as stream:
        stream.write('{"step": 40, "lo')
    again = JsonLines(file, 20)
    again.write({"step": 30, "loss": 0.25})
    lines = [json.loads(each) for each in file.read_text().splitlines()]
    assert [each["step"] for each in lines] == [10, 20, 20, 30]
    assert lines[-1]["loss"] == 0.25


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85", "\x0b", "\r"])
def test_names_may_hold_what_ends_a_line_elsewhere(tmp_path, sign):
    file = tmp_path / "metrics.jsonl"
    records = [{"step": step, f"dev/f1/a{sign}b": 0.5} for step in (1, 2, 3)]
    first = JsonLines(file, 0)
    for each in records:
        first.write(each)
    JsonLines(file, 2)
    with file.open(encoding="utf8") as stream:
        assert [json.loads(each) for each in stream] == records[:2]


@pytest.mark.parametrize(
    "bad",
    ["no json", "[1]", '{"loss": 1}', '{"step": "x"}', "null", "[" * 10**5, '{"step": 1e999}'],
)
def test_a_line_that_is_no_record_is_refused(tmp_path, bad):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(CheckpointError, match="is not a record of a run") as caught:
        JsonLines(file, 1)
    assert caught.value.where == file


def test_records_that_cannot_be_written_are_said(tmp_path):
    tracker = JsonLines(tmp_path / "metrics.jsonl", 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ResourceError, match="cannot be written"):
        tracker.write({"step": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be written"):
        TensorBoard(tmp_path / "file", 0)


def test_records_that_cannot_be_read_are_said(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        JsonLines(file, 3)
    file.unlink()
    file.mkdir()  # reading it is an error of the system
    with pytest.raises(ResourceError, match=r"metrics\.jsonl: cannot be read: Is a directory"):
        JsonLines(file, 3)


def read_events(folder):
    """Steps and values by name, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(scalar.step, scalar.value) for scalar in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_reads_what_is_written_and_forgets_what_a_resume_repeats(tmp_path):
    first = TensorBoard(tmp_path, 0)
    for step in (10, 20, 30):
        first.write({"step": step, "loss/masked": float(step), "tokens": step * 7})
    first.close()
    again = TensorBoard(tmp_path, 20)
    again.write({"step": 30, "loss/masked": 0.5})
    again.close()
    assert read_events(tmp_path) == {
        "loss/masked": [(10, 10.0), (20, 20.0), (30, 0.5)],
        "tokens": [(10, 70.0), (20, 140.0)],
    }


def test_tensorboard_reads_a_session_after_the_clock_was_set_back_as_the_last_one(
    tmp_path, monkeypatch
):
    for number, now in enumerate((86_400.0, 3600.0, 3600.0)):
        monkeypatch.setattr(trackers.time, "time", lambda now=now: now)
        tracker = TensorBoard(tmp_path, 10 * number)
        for step in (10 * number + 10, 10 * number + 20):
            tracker.write({"step": step, "loss/masked": float(number)})
        tracker.close()
    losses = [(10, 0.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert read_events(tmp_path) == {"loss/masked": losses}


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(trackers.time, "perf_counter", lambda: Clock.now)
    monkeypatch.setattr(trackers.time, "monotonic", lambda: Clock.now)
    return Clock


def test_speed_is_tokens_by_the_time_between_two_marks(clock):
    speed = Speed(Tokens(10_000), peak=500.0)
    assert speed.mark(RunState(tokens=1000)) == {"share": 0.1}
    clock.now += 5.0
    expected = {"share": 0.2, "tokens_per_second": 200.0, "gemm_share": 0.4, "seconds_left": 40.0}
    assert speed.mark(RunState(tokens=2000)) == pytest.approx(expected)


def test_speed_looks_back_no_further_than_its_window(clock):
    speed = Speed(Steps(1000), window=10.0)
    for step in range(1, 61):
        clock.now += 1.0
        tokens = step * 100 if step <= 30 else 3000 + (step - 30) * 500
        found = speed.mark(RunState(steps=step, tokens=tokens))
    assert found["tokens_per_second"] == pytest.approx(500.0)
    assert found["seconds_left"] == pytest.approx(940.0)
    assert "gemm_share" not in found


def test_time_left_of_a_run_by_the_clock_is_the_rest_of_it(clock):
    speed = Speed(Hours(1.0))
    speed.mark(RunState())
    clock.now += 900.0
    assert speed.mark(RunState(seconds=900.0, tokens=10))["seconds_left"] == pytest.approx(2700.0)


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[dict[str, Any]] = []

    def init(self, **options: Any) -> SimpleNamespace:
        run: dict[str, Any] = {**options, "logged": [], "finished": False}
        self.runs.append(run)
        return SimpleNamespace(
            log=lambda values, step: run["logged"].append((step, values)),
            finish=lambda: run.update(finished=True),
        )


def test_weights_and_biases_gets_each_record_and_a_resumed_run_is_the_same_one(
    tmp_path, monkeypatch
):
    fake, training = FakeWandb(), dataclasses.replace(TRAINING, trackers=("wandb",))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    session(tmp_path, 5, training=training)
    session(tmp_path, training=training)
    first, second = fake.runs
    assert first["id"] == second["id"]
    assert (first["name"], first["resume"], first["finished"]) == (tmp_path.name, "allow", True)
    assert first["config"] == {"model.dropout": 0.2, "betas": (0.9, 0.999)}
    sent = [{"step": step, **values} for step, values in first["logged"] + second["logged"]]
    assert sent == metric_lines(tmp_path)
