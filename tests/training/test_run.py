"""Runs that are killed, stopped and resumed: each must end as if nothing had happened."""

import dataclasses
import itertools
import os
import shutil
import signal
import time

import pytest
import torch

from bothways.core.errors import CheckpointError, ConfigError, DivergedError
from bothways.training.checkpoint import Best, FolderStore, Keep, checkpoints, read_checkpoint
from bothways.training.run import Target, TrainingPhase
from bothways.training.schedules import Hours, Linear, Steps
from bothways.training.trackers import STEPS, JsonLines
from heard_progress import Heard
from toy_training import (
    CONFIG,
    SGD,
    TRAINING,
    WHOLE,
    broken_at,
    equal,
    exit_code,
    killed_in_save,
    metric_lines,
    run_toy,
    session,
    steps,
    toy,
)

TIMES = {"seconds", "tokens_per_second", "seconds_left"}
BARE = dataclasses.replace(TRAINING, evaluate=None, save=None, keep=Keep())


def bare(**changes):
    """Settings that evaluate and save at the end alone, with these changes."""
    return dataclasses.replace(BARE, **changes)


def timeless(folder):
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in metric_lines(folder)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    assert session(folder).steps == 14
    return folder


def equal_weights(*folders):
    """Whether two runs ended with the same tensors."""
    return equal(*(torch.load(folder / "final.pt", weights_only=True) for folder in folders))


def assert_equal_runs(folder, whole):
    assert equal_weights(folder, whole)
    assert timeless(folder) == timeless(whole)
    assert (folder / STEPS).read_bytes() == (whole / STEPS).read_bytes()
    assert [path.name for path in checkpoints(folder)] == [path.name for path in checkpoints(whole)]
    then, now = (read_checkpoint(checkpoints(each)[-1]) for each in (whole, folder))
    assert now.metrics == then.metrics
    assert dataclasses.replace(now.progress, seconds=then.progress.seconds) == then.progress


@pytest.mark.parametrize("step", [2, 5, 8, 13])
def test_killed_at_any_step_and_resumed_it_ends_in_the_same_weights(step, whole, tmp_path):
    assert exit_code(session, tmp_path, step, signal.SIGKILL) == -signal.SIGKILL
    saved = [path.name for path in checkpoints(tmp_path)]
    assert saved[-1:] == (
        [f"step-{max(s for s in (3, 4, 6, 8, 9, 12) if s <= step)}"] if step >= 3 else []
    )
    assert exit_code(session, tmp_path) == 0
    assert_equal_runs(tmp_path, whole)


@pytest.mark.parametrize("flush", [4, 8, 13])
def test_killed_in_the_middle_of_a_checkpoint_it_resumes_from_the_one_before(
    flush, whole, tmp_path
):
    assert exit_code(killed_in_save, tmp_path, flush) == -signal.SIGKILL
    for path in checkpoints(tmp_path):
        read_checkpoint(path)
    assert exit_code(session, tmp_path) == 0
    assert_equal_runs(tmp_path, whole)


@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGTERM, 5), (signal.SIGINT, 5), (signal.SIGHUP, 5), (signal.SIGINT, 13)],
)
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(number, step, whole, tmp_path):
    before = signal.getsignal(number)
    progress = session(tmp_path, step, number)
    # It comes while the next step is made, so that is trained on, be it the last one.
    assert progress.steps == step + 1
    assert not (tmp_path / "final.pt").exists()
    saved = read_checkpoint(checkpoints(tmp_path)[-1]).progress
    assert dataclasses.replace(saved, seconds=progress.seconds) == progress
    assert signal.getsignal(number) == before
    assert session(tmp_path).steps == 14
    assert equal_weights(tmp_path, whole)


@pytest.mark.parametrize("optimizer", [*WHOLE, SGD])
def test_stopped_with_other_optimizers_and_an_average_it_ends_in_the_same_weights(
    optimizer, tmp_path
):
    training = dataclasses.replace(
        TRAINING, optimizer=optimizer, schedule=lambda share: 1 - share / 2, ema=0.9
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, signal_at in ((whole, None), (cut, 11)):
        folder.mkdir()
        session(folder, signal_at, training=training)
    assert not (cut / "final.pt").exists()
    assert session(cut, training=training).steps == 14
    assert equal_weights(cut, whole)


def test_what_the_last_steps_came_to_is_recorded_when_a_run_is_stopped(tmp_path):
    assert session(tmp_path, 6).steps == 7  # reports are due at even steps
    assert [line["step"] for line in metric_lines(tmp_path) if "learning_rate" in line][-2:] == [
        6,
        7,
    ]


def unread(folder):
    """A session whose standard error nobody reads, stopped by Ctrl-C."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    session(folder, 6, signal.SIGINT)


def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_saves(tmp_path):
    assert exit_code(unread, tmp_path) == 0
    assert read_checkpoint(checkpoints(tmp_path)[-1]).progress.steps == 7


def test_a_finished_run_is_left_as_it_is(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    written = (folder / "metrics.jsonl").read_bytes()
    assert session(folder).steps == 14
    assert (folder / "metrics.jsonl").read_bytes() == written
    assert [path.name for path in checkpoints(folder)] == [path.name for path in checkpoints(whole)]


def test_no_step_is_recorded_twice_and_none_is_left_out(whole):
    training = [line["step"] for line in metric_lines(whole) if "learning_rate" in line]
    evaluations = [line["step"] for line in metric_lines(whole) if "heldout/loss" in line]
    assert training == [2, 3, 4, 6, 8, 9, 10, 12, 14]
    assert evaluations == [4, 8, 12, 14]


def test_a_checkpoint_holds_the_metrics_of_its_own_step_alone(tmp_path):
    training = dataclasses.replace(
        TRAINING, evaluate=Steps(4), save=Steps(3), until=Steps(9), keep=Keep(9)
    )
    run_toy(tmp_path, training, evaluation=lambda progress: {"x": 1.0})
    metrics = {path.name: read_checkpoint(path).metrics for path in checkpoints(tmp_path)}
    assert metrics == {"step-3": {}, "step-6": {}, "step-9": {"x": 1.0}}


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("keep.best", {"keep": Keep(best=Best("f1", "highest"))}),
        ("target", {"target": Target("f1", 1.0), "keep": Keep()}),
    ],
)
def test_a_metric_that_is_not_evaluated_is_refused(setting, changes, tmp_path):
    training = dataclasses.replace(TRAINING, evaluate=Steps(1), **changes)
    with pytest.raises(ConfigError, match="'f1' is not evaluated: there are loss") as caught:
        run_toy(FolderStore(tmp_path, CONFIG), training, evaluation=lambda progress: {"loss": 1.0})
    assert caught.value.where == f"training.{setting}.metric"
    if setting == "target":
        with pytest.raises(ConfigError, match=r"^training\.target: requires evaluation data"):
            run_toy(FolderStore(tmp_path, CONFIG), training)


def test_a_run_by_the_clock_ends_with_an_evaluation_and_a_checkpoint(tmp_path):
    training = bare(until=Hours(0.2 / 3600))
    evaluated = []

    def evaluation(progress):
        evaluated.append(1)
        return {"x": 1.0}

    progress = run_toy(tmp_path, training, evaluation=evaluation)
    assert progress.seconds >= 0.2
    assert evaluated == [1]
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{progress.steps}"]
    assert "x" in metric_lines(tmp_path)[-1]


def test_the_first_report_of_a_run_by_the_clock_has_its_time_left(tmp_path, monkeypatch):
    """Also where the first step takes long: it begins at 0 seconds."""
    training = bare(until=Hours(0.6 / 3600), report=Steps(1))
    heard, seconds = Heard(), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: seconds[0])

    def wait(event):
        if event.kind == "step":
            seconds[0] += 0.3

    run_toy(tmp_path, training, progress=heard, on_event=wait)
    first = metric_lines(tmp_path)[0]
    assert first["seconds"] < 0.3
    assert 0.5 <= first["share"] < 1
    assert first["seconds_left"] < 0.4
    assert heard.done("training")[1] >= 0.5


def test_the_time_of_evaluations_is_not_forgotten_in_a_checkpoint(tmp_path):
    training = bare(until=Steps(2))

    def evaluation(progress):
        time.sleep(0.3)
        return {"x": 1.0}

    run_toy(tmp_path, training, evaluation=evaluation)
    assert read_checkpoint(checkpoints(tmp_path)[-1]).progress.seconds > 0.3


def test_a_run_whose_time_is_over_after_a_step_that_was_saved_saves_what_it_evaluates_then(
    tmp_path, monkeypatch
):
    """Each look at the clock is a tenth of an hour later."""
    looks = itertools.count()

    def clock_from(before):
        start = next(looks)
        return lambda: before + 360.0 * (next(looks) - start)

    for module in ("run", "loop"):
        monkeypatch.setattr(f"bothways.training.{module}.clock_from", clock_from)
    training = bare(until=Hours(0.55), save=Steps(1))

    def session():
        return run_toy(tmp_path, training, evaluation=lambda progress: {"x": 1.0})

    done = session()
    saved = read_checkpoint(checkpoints(tmp_path)[-1])
    assert saved.metrics == {"x": 1.0}
    assert saved.progress.finished(training.until)
    assert session().steps == done.steps


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("clip_norm", (0.0, -1.0, NAN), r"must be .* 0.*\n.*none"),
        ("step_limit", (0.0, -1.0, NAN), r"must be .* 0.*\n.*none"),
        ("ema", (0.0, 1.0, -0.5, NAN), "must be above 0 and below 1"),
        ("early_stopping", (0, -1), "must be at least 1"),
        ("keep.last", (0, -1), "must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(name, values, message):
    for value in values:
        with pytest.raises(ConfigError, match=rf"^training\.{name}: {message}"):
            Keep(value) if name == "keep.last" else dataclasses.replace(TRAINING, **{name: value})


def test_data_that_is_not_the_same_is_said_after_the_settings_that_it_may_be_read_by(tmp_path):
    """And a setting such as `start`, by which others may be read, before those."""
    one, other = ({"data": 64 * c, "encoder": {"width": c}, "start": c} for c in "ab")
    training = dataclasses.replace(TRAINING, until=Steps(1))
    run_toy(FolderStore(tmp_path, one), training)
    message = "run: start was 'a', is 'b'; encoder.width was 'a', is 'b'; data is not the same"
    (tmp_path / "data.json").write_text("one")
    with pytest.raises(CheckpointError, match=message):
        run_toy(FolderStore(tmp_path, other, (), {"data.json": "b"}), training)
    assert (tmp_path / "data.json").read_text() == "one"  # of the run that has the folder


def test_records_of_a_run_that_left_no_checkpoint_are_begun_anew(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl", 0).write({"step": 1, "loss": 9.0})
    assert session(tmp_path).steps == 14
    assert metric_lines(tmp_path)[0]["step"] == 2
    assert os.listdir(tmp_path / "tensorboard")


@pytest.mark.parametrize(("steps", "warmup", "warned"), [(1, 0.1, 1), (2, 0.1, 0), (1, 0.0, 0)])
def test_a_run_of_one_update_at_a_rate_of_0_is_a_warning(steps, warmup, warned, tmp_path):
    heard = Heard()
    training = bare(until=Steps(steps), schedule=Linear(warmup))
    run_toy(tmp_path, training, progress=heard)
    assert len([line for line in heard.messages if line.startswith("warning: the only")]) == warned


def test_a_run_shows_its_training_and_its_evaluations(tmp_path):
    heard = Heard()

    def evaluation(progress):
        progress.stage("scoring", 4)
        progress.advance(1)
        return {"x": 1.0}

    training = bare(until=Steps(2), evaluate=Steps(1), report=Steps(1))
    run_toy(tmp_path, training, evaluation=evaluation, progress=heard)
    training, scoring = ("training", 1.0), ("scoring", 4)
    assert [each[:2] for each in heard.stages] == [training, *(scoring, training) * 2]
    assert [done for _, _, done in heard.stages] == [[0, 0.5, 0.5], [1], [0.5, 1, 1], [1], [1]]
    assert [note.split(" · ")[0] for note in heard.notes] == ["step 1", "step 2"]
    assert heard.messages == ["evaluation step 1 · x 1.000", "evaluation step 2 · x 1.000"]


def broken(progress):
    raise RuntimeError("no memory left")


@pytest.mark.parametrize("every", [None, Steps(2)])
def test_an_evaluation_that_fails_loses_no_step_and_is_made_up_for(every, tmp_path):
    training = bare(until=Steps(4), evaluate=every)
    with pytest.raises(RuntimeError, match="no memory left"):
        run_toy(FolderStore(tmp_path, CONFIG), training, evaluation=broken)
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{every.count if every else 4}"]
    done = run_toy(FolderStore(tmp_path, CONFIG), training, evaluation=lambda _: {"m": 1.0})
    assert done.steps == 4
    assert read_checkpoint(checkpoints(tmp_path)[-1]).metrics == {"m": 1.0}
    assert [line["m"] for line in metric_lines(tmp_path) if "m" in line] == [1.0]


@pytest.mark.parametrize("before", [{"m": 0.1}, {}])
def test_a_run_resumed_when_its_time_is_over_has_the_metrics_of_its_last_step(before, tmp_path):
    training = bare(until=Steps(2))

    def session(training, metrics):
        evaluation = (lambda progress: metrics) if metrics else None
        return run_toy(tmp_path, training, evaluation=evaluation)

    session(training, before)
    seconds = read_checkpoint(checkpoints(tmp_path)[-1]).progress.seconds
    over = session(dataclasses.replace(training, until=Hours((seconds + 1e-4) / 3600)), {"m": 0.2})
    assert over.steps == 2
    assert read_checkpoint(checkpoints(tmp_path)[-1]).metrics == (before or {"m": 0.2})


def test_a_damaged_newest_checkpoint_is_skipped_with_a_note(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "copy")
    newest = checkpoints(folder)[-1]
    (newest / "model.safetensors").write_bytes(b"cut")
    heard = Heard()
    assert session(folder, progress=heard).steps == 14
    assert f"skipped a damaged checkpoint: {newest}" in heard.text
    then, now = (read_checkpoint(checkpoints(each)[-1]) for each in (whole, folder))
    assert now.progress.tokens == then.progress.tokens
    for path in checkpoints(folder):
        (path / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"manifest\.json: holds a JSON list"):
        session(folder)


def test_events_are_reported(tmp_path):
    events = []
    run_toy(tmp_path, bare(until=Steps(2)), evaluation=lambda _: {"m": 1.0}, on_event=events.append)
    kinds = ["step", "step", "report", "evaluation", "checkpoint"]
    steps_done = [1, 2, 2, 2, 2]
    assert [(e.kind, e.progress.steps) for e in events] == [*zip(kinds, steps_done, strict=True)]


def test_what_makes_the_steps_ends_with_an_error(tmp_path):
    """Processes that build steps would keep the program from ending."""
    ended = []

    def closing(state):
        try:
            yield from steps(state)
        finally:
            ended.append(True)

    phases = [TrainingPhase(TRAINING.end, closing)]
    with pytest.raises(DivergedError) as caught:  # whose traceback holds the loop
        run_toy(tmp_path, training_module=broken_at(toy(), 2), phases=phases)
    assert ended == [True], caught
