"""Settings and places that no run can have: one message each, or a run that works."""

import subprocess
import sys
from pathlib import Path

import pytest

from bothways.core.errors import ConfigError, ResourceError
from bothways.core.files import lock_folder
from bothways.core.training_module import perplexity
from bothways.lab.features.run import FeatureConfig
from bothways.tasks.predictions import LikelihoodPrediction
from spread import first_of
from toy_folder import BAD, GOOD, make_folder

ROWS = [{"text": f"a {word} film", "label": "pos"} for word in GOOD]
ROWS += [{"text": f"a {word} play", "label": "neg"} for word in BAD]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    make_folder(folder / "bert", dropout=0.0)
    lines = "".join(f"{row['text']}\t{row['label']}\n" for row in ROWS)
    (folder / "train.tsv").write_text(f"text\tlabel\n{lines}", "utf8")
    return folder


def test_seeds_have_62_bits_in_python_too():
    with pytest.raises(ConfigError, match=r"^seed: must be from"):
        FeatureConfig(model="bert", train="a.conll", dev="b.conll", seed=10**19)


def test_a_folder_that_nobody_may_change_is_one_message(tmp_path, monkeypatch):
    """As after `chattr +i`: the folder exists, and no file can be created in it."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("filelock.FileLock.acquire", refused)
    message = "cannot be written: Operation not permitted"
    with pytest.raises(ResourceError, match=message), lock_folder(tmp_path):
        pass


def test_a_perplexity_beyond_all_numbers_is_finite():
    assert perplexity(1e4) == perplexity(700.0) < float("inf")
    assert LikelihoodPrediction(("ape",), (-1e5,)).to_json()["pseudo_perplexity"] > 1e300


@pytest.mark.parametrize(
    ("redirection", "status"),
    first_of(
        [("<&- >&- 2>&-", 0), ("<&-", 2), (">&-", 0), ("2>&-", 0), ("--no-option 2>/dev/full", 2)],
        ["closed"] * 5, ["all", "input", "output", "errors", "full"],
    ),
)  # fmt: skip
def test_closed_streams_end_no_command_with_a_traceback(redirection, status, place):
    words = "describe bert" if "<" not in redirection or ">" in redirection else "predict bert"
    line = ["sh", "-c", f"{sys.executable} -m bothways {words} {redirection}"]
    done = subprocess.run(line, cwd=place, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert done.returncode == status
