"""Slow ranks are named, hanging ones end, and a step can be done again."""

import os
import time
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from bothways.cli import main as cli
from bothways.core.errors import DivergedError
from bothways.training import meter
from bothways.training.meter import ENDED_BY_WATCHDOG, Pace, Watchdog, stragglers
from bothways.training.parallel import Replicated, Single, lost_contact
from toy_training import exit_code

GLOO = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"


def paced(*seconds: float) -> dict[str, float]:
    return {f"rank/{rank}/seconds": value for rank, value in enumerate(seconds)}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((), {}),
        ((1.0, 1.1), {}),
        ((1.0, 3.0), {1: 3.0}),
        ((1.0, 1.0, 1.0, 2.0), {3: 2.0}),
        ((4.0, 4.0, 4.0, 1.0), {}),
        ((0.0, 0.0), {}),
    ],
)
def test_a_straggler_takes_much_longer_than_the_median(seconds, expected):
    assert stragglers(paced(*seconds)) == expected


def test_one_process_has_no_pace_to_compare():
    pace = Pace(Single())
    pace.add(1.0, 100)
    assert pace.read() == {}


def test_the_rank_whose_loss_is_no_number_is_named():
    inf = float("inf")
    meter._check(["masked", None], [[inf, inf], [inf, inf]])
    with pytest.raises(DivergedError, match=r"^step 7: the loss 'masked' is not finite on rank 1"):
        meter._check(["masked", None], [[9.0, 7.0], [7.0, 7.0]])
    with pytest.raises(DivergedError, match=r"^step 7: the gradient norm is not finite\n"):
        meter._check(["masked", None], [[inf, 7.0], [inf, 7.0]])


def hang(errors: Path) -> None:
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    with Watchdog(Replicated(3, 4, 3), 0.2) as dog:
        dog.note("resting", 4)
        time.sleep(0.5)
        dog.note("reading its batch", 5)
        time.sleep(30)


def test_a_rank_that_hangs_says_what_it_was_doing_and_ends(tmp_path):
    assert exit_code(hang, tmp_path / "errors") == ENDED_BY_WATCHDOG
    errors = (tmp_path / "errors").read_text()
    assert "step 5: rank 3 has been reading its batch for more than 0.2 seconds" in errors
    assert "bothways inspect-step RUN 5;" in errors
    assert "Current thread" in errors or "Thread" in errors


@pytest.mark.parametrize("error", [DistNetworkError("Broken pipe"), RuntimeError(GLOO)])
def test_a_lost_rank_is_one_message(error, monkeypatch, capsys):
    def lose() -> None:
        with Watchdog(Replicated(3, 4, 3), None) as dog:
            dog.note("exchanging gradients", 812)
            raise ValueError("in a checkpoint") from error

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(cli, "app", lambda *_, **__: lose())
    monkeypatch.setattr(cli.mistakes, "rename_options", lambda _, words: words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: step 812: rank 3 has lost contact with another rank")
    assert "with --resume" in second


def test_other_errors_of_a_step_stay_as_they_are(monkeypatch):
    for error in (RuntimeError("shapes differ"), DivergedError("gloo"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, Watchdog(Replicated(3, 4, 3), None):
            raise error
        assert caught.value is error
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    lost = lost_contact(Replicated(0, 2, 0), RuntimeError(GLOO))
    assert "while --max-restarts allows it" in str(lost)


def test_without_a_limit_nothing_is_watched():
    with Watchdog(Replicated(0, 2, 0), None) as dog:
        dog.note("computing", 1)
