import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from bothways.core.batch import IGNORED, pack
from bothways.core.errors import BothwaysError
from bothways.core.source import Cursor
from bothways.core.training_module import Loss
from bothways.training import loop
from bothways.training.loop import Loop, evaluate_losses
from bothways.training.meter import Meter
from bothways.training.optimizers import AdamW, build_optimizer
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import Epochs, Hours, RunState, Steps, Tokens
from toy_training import (
    SINGLE,
    Taught,
    Toy,
    ToyStep,
    broken_at,
    equal,
    fit_toy,
    sequence,
    steps,
    toy,
)


def run(
    training_module,
    batches,
    until,
    on_step=lambda progress, meter: False,
    progress=None,
    **options,
):
    optimizer = build_optimizer(AdamW(lr=0.01), training_module.trained_parameters())
    options = {"precision": "fp32", "schedule": lambda progress: 1.0} | options
    tensors = RunTensors(training_module, optimizer, SINGLE)
    trained = Loop(tensors, options.pop("schedule"), on_step, **options)
    return trained.train(batches, until, progress or RunState())


def reference_gradients(size):
    """Of the mean over hidden tokens plus the mean over labels of the first step, by plain autograd."""
    training_module = toy(dtype=torch.float64)
    batch = pack([sequence(0, item) for item in range(size)])
    losses = training_module(batch)
    masked, labels = batch.targets["masked"], batch.targets["pair"].labels
    pairs = max(1, int((labels != IGNORED).sum()))
    (losses["masked"].total / len(masked.index) + losses["pair"].total / pairs).backward()
    return {name: parameter.grad for name, parameter in training_module.named_parameters()}


@pytest.mark.parametrize("cuts", [1, 2])
@pytest.mark.parametrize("size", [6, 7, 1])
def test_the_gradient_is_that_of_the_mean_over_the_whole_step_however_it_is_cut(size, cuts):
    result = fit_toy(toy(dtype=torch.float64), steps(Cursor(), size, cuts), 1)
    for name, gradient in reference_gradients(size).items():
        torch.testing.assert_close(result["moments"][name] / 0.1, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("until", "expected"),
    [(Steps(3), 3), (Tokens(90), None), (Epochs(1.0), 4), (Epochs(0.8), 4)],
)
def test_it_stops_when_the_duration_is_over(until, expected):
    seen = []
    progress = run(
        toy(), steps(Cursor()), until, lambda progress, meter: seen.append(progress) or False
    )
    assert progress.share(until) >= 1
    assert all(each.share(until) < 1 for each in seen[:-1])
    assert expected in (None, progress.steps)
    assert [each.steps for each in seen] == list(range(1, progress.steps + 1))


def test_hours_count_the_time_of_earlier_sessions(monkeypatch):
    """Each look at the clock is half a minute later."""
    looks = itertools.count(step=30.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
    before = RunState(steps=7, seconds=3000.0, tokens=10)
    progress = run(toy(), steps(Cursor()), Hours(1.0), progress=before)
    assert 3600 <= progress.seconds < 3900
    fresh = run(toy(), steps(Cursor()), Hours(1.0))
    assert 4 * (progress.steps - 7) < fresh.steps < 8 * (progress.steps - 7)


def test_it_ends_with_the_steps_or_when_it_is_asked_to_and_counts_what_they_say():
    batches = list(itertools.islice(steps(Cursor()), 3))
    tokens = sum(step.tokens for step in batches)
    for data, on_step in (
        (batches, lambda progress, meter: False),
        (steps(Cursor()), lambda progress, meter: progress.steps == 3),
    ):
        progress = run(toy(), data, Steps(10), on_step)
        assert progress == RunState(3, tokens, 0.75, progress.seconds, batches[-1].cursor)


def test_the_rate_is_peak_times_schedule_of_the_progress_before_the_step():
    rates = []
    run(
        toy(),
        steps(Cursor()),
        Steps(3),
        lambda progress, meter: rates.append(meter.read().rate) or False,
        schedule=lambda progress: progress.steps / 4,
    )
    assert rates == [0.0, 0.01 / 4, 0.01 / 2]


def test_reports_are_sums_by_weights_since_the_last():
    """Over two steps with a rate of 0, against the training module asked directly."""
    reports = []

    def on_step(progress, meter):
        if progress.steps % 2 == 0:
            reports.append(meter.read())
        return False

    run(toy(), steps(Cursor(), 5, 2), Steps(4), on_step, schedule=lambda progress: 0.0)
    for number, report in enumerate(reports):
        whole = pack([sequence(0, item) for item in range(number * 10, number * 10 + 10)])
        expected, weights = toy()(whole), toy().weights(whole)
        means = {name: loss.total.item() / weights[name] for name, loss in expected.items()}
        assert report.progress.steps == 2 * number + 2
        assert report.scores.losses == pytest.approx(means, rel=1e-6)
        accuracy = expected["masked"].hits.item() / weights["masked"]
        assert report.scores.accuracies == {"masked": accuracy}
        assert report.gradient_norm > 0
    assert len(reports) == 2


def test_a_loss_without_weight_is_left_out_of_the_report_and_trains_nothing():
    one = sequence(0, 0)
    assert one.targets["pair"].labels[0] == IGNORED
    training_module, seen = toy(), []
    data = [ToyStep((pack([one]),), Cursor(), 1, 1, 0.0)]
    run(training_module, data, Steps(1), lambda _, meter: seen.append(meter.read()) or False)
    assert set(seen[0].scores.losses) == {"masked"}
    decayed = toy().labels.weight * (1 - 0.01 * 0.01)
    torch.testing.assert_close(training_module.labels.weight, decayed)


@pytest.mark.parametrize("read_every", [1, 4, 100])
def test_a_loss_that_is_no_number_stops_the_run_and_is_named_with_its_step(read_every):
    training_module, steps_done = broken_at(toy(), 3), []

    def on_step(progress, meter):
        steps_done.append(progress.steps)
        if progress.steps % read_every == 0:
            meter.read()
        return False

    with pytest.raises(BothwaysError, match="the loss 'masked' is not finite") as caught:
        run(training_module, steps(Cursor()), Steps(6), on_step)
    assert caught.value.where == "step 3"
    assert "learning rate" in caught.value.fix
    assert all(parameter.isfinite().all() for parameter in training_module.parameters())
    twin = toy()
    run(twin, steps(Cursor()), Steps(2))
    assert equal(training_module, twin)


def test_a_gradient_that_is_no_number_under_a_finite_loss_is_named_too():
    training_module = toy()
    training_module.decoder.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(BothwaysError, match="the gradient norm is not finite") as caught:
        run(training_module, steps(Cursor()), Steps(2))
    assert caught.value.where == "step 1"


def test_evaluation_is_without_dropout_or_gradient_and_leaves_the_mode():
    training_module = toy(dropout=0.5)
    batches = [next(steps(Cursor(), 7, 2)), next(steps(Cursor(1), 4, 1))]
    first, second = (
        evaluate_losses(training_module, batches, SINGLE, precision="fp32") for _ in range(2)
    )
    assert first == second
    assert training_module.training
    assert all(parameter.grad is None for parameter in training_module.parameters())
    items = [(0, item) for item in range(7)] + [(1, item) for item in range(4)]
    whole = pack([sequence(*item) for item in items])
    losses, weights = toy()(whole), toy().weights(whole)
    means = {name: loss.total.item() / weights[name] for name, loss in losses.items()}
    assert first.losses == pytest.approx(means, rel=1e-6)
    training_module.eval()
    evaluate_losses(training_module, batches, SINGLE)
    assert not training_module.training


def test_an_evaluation_that_is_no_number_is_refused():
    with pytest.raises(BothwaysError, match="'masked' of an evaluation"):
        evaluate_losses(broken_at(toy(), 1), [next(steps(Cursor()))], SINGLE)


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(monkeypatch):
    monkeypatch.setattr("bothways.core.runtime.devices.has_bf16", lambda device: True)
    dtypes = []

    class Watched(Toy):
        def forward(self, batch):
            dtypes.append(self.inner(self.norm(self.words(batch.ids))).dtype)
            return super().forward(batch)

    torch.manual_seed(1)
    training_module = Watched()
    run(training_module, steps(Cursor()), Steps(2), precision="auto")
    assert dtypes == [torch.bfloat16] * 2
    assert all(parameter.dtype == torch.float32 for parameter in training_module.parameters())


def test_adding_a_microbatch_fetches_nothing_from_the_device():
    """A tensor on the meta device has no values: whatever looked at one would fail."""
    meter = Meter(SINGLE)
    meter.add({"masked": 1.0}, {"masked": Loss(torch.empty((), device="meta"))})
    meter.close(RunState(steps=1), torch.empty((), device="meta"), 0.1, 0.0, 0)
    assert meter.pending


def test_it_learns_in_training_mode_and_leaves_frozen_parts_in_evaluation_mode():
    training_module, modes = taught().eval(), []
    before = {name: tensor.clone() for name, tensor in training_module.teacher.state_dict().items()}

    def on_step(progress, meter):
        modes.append((training_module.training, training_module.teacher.training))
        return False

    run(training_module, steps(Cursor()), Steps(2), on_step)
    assert modes == [(True, False)] * 2
    assert equal(training_module.teacher, before)
    assert not any(name.startswith("teacher.") for name, _ in training_module.trained_parameters())


def taught():
    torch.manual_seed(1)
    return Taught()


def test_a_coefficient_scales_the_gradient_and_not_the_reported_loss():
    training_module, bare, reports = taught(), toy(), []
    bare.coefficients = {}
    for one in (training_module, bare):
        run(one, steps(Cursor()), Steps(1), lambda _, meter: reports.append(meter.read()) or False)
    assert reports[0].scores == reports[1].scores
    expected = toy()
    batch = next(steps(Cursor())).microbatches[0]
    weights, losses = expected.weights(batch), expected(batch)
    masked, pair = (losses[name].total / weights[name] for name in ("masked", "pair"))
    (3 * masked + pair).backward()
    moments = fit_toy(taught(), steps(Cursor()), 1)["moments"]
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(moments[name] / 0.1, parameter.grad)
