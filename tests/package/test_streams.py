"""The command line with closed streams, other encodings and widths that terminals never have."""

import io
import json
import sys
import tempfile

import pytest

from bothways.cli import main as cli


class Terminal(io.TextIOWrapper):
    """The stream of a terminal, which has an encoding of its own."""

    def isatty(self):
        return True


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
    monkeypatch.setattr(sys, "stdout", Terminal(written, encoding=encoding))
    monkeypatch.setenv("COLUMNS", columns)
    cli.run_command_line()
    sys.stdout.flush()
    assert shown in written.getvalue().decode("latin-1")
    assert capsys.readouterr().err == ""


def test_characters_that_the_encoding_lacks_stay_valid_json(monkeypatch):
    written = io.BytesIO()
    text = 'é × 中 😀 "quoted"'
    monkeypatch.setattr(sys, "stdout", Terminal(written, encoding="ascii"))
    monkeypatch.setattr(cli, "app", lambda *_, **__: print(json.dumps(text, ensure_ascii=False)))
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    cli.run_command_line()
    assert json.loads(written.getvalue()) == text


@pytest.mark.parametrize(
    ("stream", "chosen", "encoding"),
    [
        (io.TextIOWrapper, None, "utf-8"),
        (io.TextIOWrapper, "gb18030", "gb18030"),
        (Terminal, None, "gb18030"),
    ],
)
def test_files_and_pipes_get_utf8_in_every_locale(stream, chosen, encoding, monkeypatch):
    written = io.BytesIO()
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTHONIOENCODING", chosen)
    monkeypatch.setattr(sys, "stdout", stream(written, encoding="gb18030"))
    monkeypatch.setattr(cli, "app", lambda *_, **__: print("中文"))
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    cli.run_command_line()
    assert written.getvalue().decode(encoding) == "中文\n"


def test_a_machine_without_a_temporary_folder_is_one_message(monkeypatch, capsys):
    """As a container whose file system is read-only."""
    monkeypatch.setattr(sys, "argv", ["bothways"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(cli, "app", lambda *_, **__: tempfile.gettempdir())
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    with pytest.raises(SystemExit) as ended:
        cli.run_command_line()
    said = capsys.readouterr().err
    assert (ended.value.code, "/nowhere" in said, "TMPDIR" in said) == (2, True, True)
