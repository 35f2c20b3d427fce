"""The command line with closed streams, other encodings and widths that terminals never have."""

import io
import json
import os
import subprocess
import sys

import pytest

from bothways.cli import main as cli
from bothways.cli import mistakes


@pytest.mark.parametrize(
    ("words", "environment", "shown"),
    [
        (["describe", "bert-base"], {"PYTHONIOENCODING": "ascii"}, r"\u00d7"),
        (["--help"], {"COLUMNS": "0"}, "quickstart"),
        (["--help"], {"PYTHONIOENCODING": "latin-1", "COLUMNS": "1"}, "quickstart"),
    ],
)
def test_output_is_written_in_any_encoding_and_width(words, environment, shown):
    done = subprocess.run(
        [sys.executable, "-m", "bothways", *words],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert shown in done.stdout.decode("latin-1")


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_replaced(stream, monkeypatch):
    monkeypatch.setattr(sys, stream, None)
    monkeypatch.setattr(cli, "app", lambda words, **_: print("result"))
    monkeypatch.setattr(mistakes, "rename_options", lambda _, words: words)
    cli.main()
    replaced = getattr(sys, stream)
    assert replaced.name == os.devnull
    replaced.close()


def test_characters_that_the_encoding_lacks_stay_valid_json(monkeypatch):
    written = io.BytesIO()
    text = 'é × 中 😀 "quoted"'
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(cli, "app", lambda *_, **__: print(json.dumps(text, ensure_ascii=False)))
    monkeypatch.setattr(mistakes, "rename_options", lambda _, words: words)
    cli.main()
    assert json.loads(written.getvalue()) == text
