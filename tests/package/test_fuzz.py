"""The fuzzers run, and see what they are meant to see."""

import signal

import numpy as np
import pytest
from fuzz.__main__ import outcome_of
from fuzz.cases import Case, Workshop

from bothways.core.errors import DataError


def test_damage_changes_the_content_and_repeats_with_the_seed(tmp_path):
    first, again = (Workshop(tmp_path, np.random.default_rng(3)) for _ in range(2))
    content = b"some rows of data\n" * 20
    damaged = [first.damage(content) for _ in range(20)]
    assert [again.damage(content) for _ in range(20)] == damaged
    assert sum(item != content for item in damaged) > 15


def test_what_the_fuzzers_damage_can_be_made(tmp_path):
    workshop = Workshop(tmp_path, np.random.default_rng(3))
    assert (workshop.classifier / "model.safetensors").exists()


def refuse() -> None:
    raise DataError("is damaged")


@pytest.mark.parametrize(
    ("run", "outcome"),
    [(lambda: None, "accepted"), (refuse, "refused"), (lambda: {}["a"], "KeyError")],
)
def test_only_errors_of_the_library_are_allowed(run, outcome):
    assert outcome in outcome_of(Case("case", run))
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
