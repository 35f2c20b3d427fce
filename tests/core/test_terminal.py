"""Text for terminals, pages and messages."""

import copy
import io
from pathlib import Path

import pytest

from bothways.core import files
from bothways.core.errors import DataError, ResourceError, optional, require
from bothways.core.files import read_json, read_object
from bothways.core.progress import error_console
from bothways.core.report.sections import TableSection
from bothways.core.report.terminal import render_report
from bothways.core.terminal import (
    ErrorStream,
    listed,
    output_console,
    printable,
    quantity,
    say,
    time_text,
)


def test_control_characters_are_escaped():
    assert printable("a\x1b[2J\x07\x9b\u202eb\ud800") == r"a\x1b[2J\x07\x9b\u202eb\ud800"
    assert printable("größer, 数学\n\tok") == "größer, 数学\n\tok"


def test_control_characters_of_names_do_not_reach_messages():
    error = DataError("no column 'a\x1b[2J'", where=Path("b\x07\n.txt"), fix="Rename \x9b it.")
    assert str(error) == "b\\x07\\n.txt: no column 'a\\x1b[2J'\n  Rename \\x9b it."


def test_names_between_colons_are_no_pictures(capsys):
    say(output_console(), "a :smile: [b]")
    say(error_console(), "a :smile: [b]")
    assert [*capsys.readouterr()] == ["a :smile: [b]\n"] * 2


def test_control_characters_of_labels_do_not_reach_tables(capsys):
    section = TableSection("a \x1b]0;b\x07", ["\x1b[2Jc"], [["d\x9b2J"]], note="\x1b[1me")
    output_console().print(render_report(section))
    printed = capsys.readouterr().out
    assert r"\x1b[2Jc" in printed
    assert not {"\x1b", "\x07", "\x9b"} & {*printed}


@pytest.mark.parametrize("closed_by", ["shell", "program"])
def test_a_closed_standard_error_discards_and_has_no_descriptor(closed_by):
    """As after 2>&- in a shell, or after sys.stderr.close()."""
    stderr = io.StringIO()
    stderr.close()
    stream = ErrorStream(None if closed_by == "shell" else stderr)
    assert (stream.write("lost"), stream.isatty(), stream.encoding) == (4, False, "utf-8")
    with pytest.raises(OSError, match="standard error is closed"):
        stream.fileno()
    assert isinstance(copy.copy(stream), ErrorStream)


def test_long_lists_are_cut():
    assert listed("abcd", 2) == "a, b and 2 more"
    assert listed("ab", 2) == "a, b"


def test_quantity_selects_words_for_one_or_several():
    assert quantity(1, "row(s) is|are empty") == "1 row is empty"
    assert quantity(1000, "row(s) is|are empty") == "1,000 rows are empty"


def test_times_of_any_length_are_texts():
    assert [time_text(seconds) for seconds in (0.0, 89.5, 90000.0)] == [
        "0:00:00", "0:01:30", "1 day, 1:00:00",
    ]  # fmt: skip
    assert {time_text(seconds) for seconds in (1e9, 1e30, float("inf"))} == {"years"}


def test_a_missing_package_is_named_with_its_extra():
    message = r"'no_such_thing', .*\n  .*\"bothways\[data\]\""
    with pytest.raises(ResourceError, match=message), optional("data", "reading clouds"):
        import no_such_thing.deep  # noqa: F401
    with pytest.raises(ModuleNotFoundError), optional("data", "reading clouds"):
        import bothways.no_such_part  # noqa: F401
    with pytest.raises(ResourceError, match=message):
        require("data", "reading clouds", "json", "no_such_thing")


@pytest.mark.parametrize(("content", "message"), [
    (b"{", "a.json: is not JSON: .* at column 2"),
    (b"{\n,", "a.json: is not JSON: .* at line 2 column 1"),
    (b"[" * 10**5, "nested too deeply"),
    (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
    (b"\xff", "is not UTF-8 text"),
    (b"[1]", "holds a JSON list, not an object"),
])  # fmt: skip
def test_flaws_of_json_are_errors_of_the_class_that_is_asked_for(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ResourceError, match=message):
        read_object(tmp_path / "a.json", ResourceError)


def test_json_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match="cannot be read"):
        read_json(tmp_path / "none.json")
    monkeypatch.setattr(files, "LARGEST", 9)
    (tmp_path / "large.json").write_text("[12345678]")
    with pytest.raises(DataError, match="has 10 bytes, more than 9"):
        read_json(tmp_path / "large.json")


def test_long_words_of_a_message_are_cut():
    long = "x y" * 1000
    error = DataError(f"label {long!r} is unknown", where="a.tsv:3", fix="y" * 4000)
    assert len(str(error)) < 600
    assert str(error).startswith("a.tsv:3: label 'x yx y")
    assert "3,002 characters" in str(error)
    assert error.what == f"label {long!r} is unknown"
    plain = "a text of many words " * 100
    assert str(DataError(plain, where="run/" + "a" * 400)) == f"run/{'a' * 400}: {plain}"
