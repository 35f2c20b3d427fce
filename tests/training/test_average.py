"""The moving average of the weights: its formula, what is evaluated with it, resuming."""

import dataclasses

import pytest
import torch

from bothways.core.errors import ConfigError
from bothways.training.average import Average, use_average
from bothways.training.checkpoint import Best, FolderStore, Keep, MemoryStore, Store
from bothways.training.run import Event
from bothways.training.schedules import Steps
from toy_training import TRAINING, Toy, run_toy, toy


def run(
    store: Store, until: int = 8, stop: int = 0, ema: float | None = 0.8
) -> tuple[Toy, list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """The training module after a run, its weights after each update, and those of each evaluation."""
    training = dataclasses.replace(
        TRAINING, until=Steps(until), evaluate=Steps(4), save=Steps(1), ema=ema,
        keep=Keep(20, Best("score", "highest")),
    )  # fmt: skip
    training_module, weights, scored = toy(), list[dict[str, torch.Tensor]](), []

    def copied() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in training_module.named_parameters()}

    def note(event: Event) -> None:
        if event.kind == "step":
            weights.append(copied())
        if event.kind == "checkpoint" and event.progress.steps == stop:
            raise InterruptedError

    def evaluation(progress: object) -> dict[str, float]:
        scored.append(copied())
        return {"score": float(-len(scored))}

    run_toy(store, training, training_module, evaluation=evaluation, on_event=note)  # fmt: skip
    return training_module, weights, scored


def expected(weights: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """Σ dᵗ⁻ⁱ wᵢ / Σ dᵗ⁻ⁱ in float64."""
    shares = [decay ** (len(weights) - i) for i in range(1, len(weights) + 1)]
    return {
        name: sum(share * w[name].double() for share, w in zip(shares, weights, strict=True))
        / sum(shares)
        for name in weights[0]
    }


def test_the_average_is_evaluated_and_returned_and_changes_no_update():
    training_module, weights, scored = run(MemoryStore())
    _, plain, _ = run(MemoryStore(), ema=None)
    for ours, theirs in zip(weights, plain, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(scored) == 2
    for found, count in (
        (scored[0], 4),
        (scored[1], 8),
        (dict(training_module.named_parameters()), 8),
    ):
        for name, weight in expected(weights[:count], 0.8).items():
            torch.testing.assert_close(found[name].double(), weight, rtol=1e-5, atol=1e-7)


def test_the_best_weights_are_the_average_of_their_evaluation(tmp_path):
    for store in (MemoryStore(), FolderStore(tmp_path, {})):
        training_module, _, scored = run(store)
        store.load_best(training_module, Best("score", "highest"))
        for name, parameter in training_module.named_parameters():
            assert torch.equal(parameter, scored[0][name])


def test_a_run_that_was_cut_has_the_same_average(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = run(FolderStore(tmp_path / "whole", {}))[0].state_dict()
    with pytest.raises(InterruptedError):
        run(FolderStore(tmp_path / "cut", {}), stop=5)
    again = run(FolderStore(tmp_path / "cut", {}))[0].state_dict()
    assert whole.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    finished, weights, _ = run(FolderStore(tmp_path / "cut", {}))
    assert weights == []
    assert all(torch.equal(t, finished.state_dict()[name]) for name, t in whole.items())


def test_a_frozen_parameter_has_no_average():
    training_module = toy()
    training_module.words.weight.requires_grad_(False)
    average = Average(training_module, 0.5)
    assert "words/weight" not in dict(average.named_buffers())
    assert [*average.parameters()] == []
    use_average(training_module)


@pytest.mark.parametrize("ema", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_out_of_range_is_refused(ema):
    with pytest.raises(ConfigError, match="above 0 and below 1") as caught:
        dataclasses.replace(TRAINING, ema=ema)
    assert caught.value.where == "training.ema"
