"""The fuzzers run, and see what they are meant to see."""

import itertools
import signal

import numpy as np
import pytest
from fuzz import targets
from fuzz.__main__ import outcome_of
from fuzz.cases import Case, Workshop
from fuzz.targets import TARGETS

import bothways.finetuning.run
import bothways.pretraining.run  # noqa: F401 – whose pages are left empty
from bothways.core.errors import DataError


def test_damage_changes_the_content_and_repeats_with_the_seed(tmp_path):
    first, again = (Workshop(tmp_path, np.random.default_rng(3)) for _ in range(2))
    content = b"some rows of data\n" * 20
    damaged = [first.damage(content) for _ in range(20)]
    assert [again.damage(content) for _ in range(20)] == damaged
    assert sum(item != content for item in damaged) > 15


def test_only_damage_is_refused(tmp_path, monkeypatch):
    """A file that is refused as it is hides whatever damage would do."""
    monkeypatch.setattr(Workshop, "damage", lambda _, content: content)
    monkeypatch.setattr(targets, "damage_file", lambda *_: None)
    workshop = Workshop(tmp_path, np.random.default_rng(3))
    outcomes = [
        (case.name.split(".")[:2], outcome_of(case))
        for target, count in (("data", 18), ("folders", 3))
        for case in itertools.islice(TARGETS[target](workshop), count)
    ]
    refused = [name for name, outcome in outcomes if outcome != "accepted"]
    assert refused == [["evaluate rows", "txt"]], "texts without labels"


def refuse() -> None:
    raise DataError("is damaged")


@pytest.mark.parametrize(
    ("run", "outcome"),
    [(lambda: None, "accepted"), (refuse, "refused"), (lambda: {}["a"], "KeyError")],
)
def test_only_errors_of_the_library_are_allowed(run, outcome):
    assert outcome in outcome_of(Case("case", run))
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
