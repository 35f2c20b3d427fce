"""The scripts in `examples/` run as they are."""

import runpy

import pytest

from documents import ROOT

EXAMPLES = ROOT / "examples"
LABELS = {
    "01_text_to_predictions.py": {
        "the film was good .": "positive",
        "the song feels dull .": "negative",
    }
}
"""What the examples shall print: a wrong answer is no advertisement."""


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("0*.py")), ids=lambda path: path.name)
def test_an_example_runs(script, tmp_path, monkeypatch, capsys):
    """In this process, which has imported torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    for text, label in LABELS.get(script.name, {}).items():
        assert f"{text} {label}" in printed


def test_every_example_is_listed():
    page = (EXAMPLES / "README.md").read_text("utf8")
    assert all(f"`{script.name}`" in page for script in EXAMPLES.glob("0*.py"))
