"""The scripts in `examples/` run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = Path(__file__).parents[2] / "src"


LABELS = {
    "01_text_to_predictions.py": {
        "the film was good .": "positive",
        "the song feels dull .": "negative",
    }
}
"""What the examples shall print: a wrong answer is no advertisement."""


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("0*.py")), ids=lambda path: path.name)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, script],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    for text, label in LABELS.get(script.name, {}).items():
        assert f"{text} {label}" in done.stdout


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text("utf8")
    assert all(f"`{script.name}`" in page for script in EXAMPLES.glob("0*.py"))
