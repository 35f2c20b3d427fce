"""The range test of learning rates: the rates of its steps, where it ends, and what it suggests."""

import numpy as np
import pytest

import bothways
from bothways.core.errors import ConfigError
from bothways.pretraining.run import RateTest
from commands import run_line

SETTINGS = {"batch": {"n": 256, "start": 256}, "phases": [{"length": 16}]}


def test_rates_grow_by_one_factor_until_the_loss_rises(corpus):
    found = bothways.find_lr(corpus, "bert-tiny", "masked-lm", steps=60, **SETTINGS)
    expected = 1e-6 * 1e6 ** (np.arange(len(found.rates)) / 59)
    assert found.rates == pytest.approx(expected)
    smoothed = found.smoothed
    assert len(found.rates) == 60 or smoothed[-1] > 1.5 * min(smoothed)
    assert all(value <= 1.5 * min(smoothed[: n + 1]) for n, value in enumerate(smoothed[:-1]))
    # Far from both ends: a model of this size learns at about 1e-3.
    assert 1e-5 < found.suggestion < 1e-1
    lowest = int(np.argmin(smoothed))
    assert found.suggestion == found.rates[lowest] / 10
    assert smoothed[0] - min(smoothed) > 0.3


def test_smoothing_is_a_weighted_mean():
    losses = [3.0, 1.0, 2.0]
    weights = [[1], [0.9, 1], [0.81, 0.9, 1]]
    expected = [np.average(losses[: n + 1], weights=w) for n, w in enumerate(weights)]
    assert RateTest([1, 2, 3], losses).smoothed == pytest.approx(expected)


def test_the_command_shows_the_losses_and_trains_nothing(corpus, capsys, monkeypatch):
    found = RateTest([1e-6, 1e-5, 1e-4, 1e-3], [5.0, 4.0, 1.0, 9.0])
    calls = []
    monkeypatch.setattr("bothways.find_lr", lambda *args, **kw: calls.append((args, kw)) or found)
    words = ["pretrain", str(corpus.folder), "--model", "bert-tiny", "objective=masked_lm"]
    run_line(*words, "--find-lr")
    (text, model), options = calls[0]
    assert (text, model, options["objective"]) == (str(corpus.folder), "bert-tiny", "masked_lm")
    assert "lr=1.0e-05" in capsys.readouterr().out
    for option in (["--out", "run"], ["--resume"]):
        with pytest.raises(ConfigError, match=f"{option[0].strip('-')}: is for a run"):
            run_line(*words, "--find-lr", *option)
    with pytest.raises(ConfigError, match="out: is missing"):
        run_line(*words)


def test_a_test_of_one_step_is_refused(corpus):
    with pytest.raises(ConfigError, match="steps: must be at least 2, not 1"):
        bothways.find_lr(corpus, "bert-tiny", steps=1)


def test_a_recipe_with_two_kinds_of_sequences_and_milestones_is_tested(corpus):
    """Of one held-out sequence, one of the two losses has no target."""
    found = bothways.find_lr(corpus, "bert-tiny", recipe="babylm", steps=2, **SETTINGS)
    assert found.rates == pytest.approx([1e-6, 1.0])
