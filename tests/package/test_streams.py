"""The command line with closed streams, other encodings and widths that terminals never have."""

import io
import json
import sys

import pytest

from bothways.cli import main as cli


@pytest.mark.parametrize(
    ("words", "encoding", "columns", "shown"),
    [
        (["describe", "bert-base"], "ascii", "80", r"\u00d7"),
        (["--help"], "utf8", "0", "quickstart"),
        (["--help"], "latin-1", "1", "quickstart"),
    ],
)
def test_output_is_written_in_any_encoding_and_width(
    words, encoding, columns, shown, monkeypatch, capsys
):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["bothways", *words])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    monkeypatch.setenv("COLUMNS", columns)
    cli.main()
    sys.stdout.flush()
    assert shown in written.getvalue().decode("latin-1")
    assert capsys.readouterr().err == ""


def test_characters_that_the_encoding_lacks_stay_valid_json(monkeypatch):
    written = io.BytesIO()
    text = 'é × 中 😀 "quoted"'
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(cli, "app", lambda *_, **__: print(json.dumps(text, ensure_ascii=False)))
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    cli.main()
    assert json.loads(written.getvalue()) == text
