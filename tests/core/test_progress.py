"""Progress of long jobs."""

import pytest

from bothways.core.errors import ConfigError
from bothways.core.progress import Part, shown_progress, track


class _Record:
    def __init__(self) -> None:
        self.lines: list[object] = []

    def stage(self, name: str, total: float | int | None = None) -> None:
        self.lines.append((name, total))

    def advance(self, done: float | int, note: str | None = None) -> None:
        self.lines.append(done)

    def message(self, text: str) -> None:
        self.lines.append(text)


def test_tracked_items_report_their_number():
    record = _Record()
    assert list(track("abcde", record, "reading", interval=2)) == list("abcde")
    assert record.lines == [("reading", 5), 0, 2, 4, 5]


def test_notes_come_first(capsys):
    record = _Record()
    with shown_progress(record, ["note: a", "note: b"]) as reporter:
        reporter.message("begun")
    assert record.lines == ["note: a", "note: b", "begun"]
    for progress in (True, False):
        with shown_progress(progress, ["note: a"]):
            pass
        assert capsys.readouterr() == ("", "note: a\n" if progress else "")
    with pytest.raises(ConfigError), shown_progress("yes"):
        pass


def test_parts_of_a_job_give_a_warning_once():
    record, said = _Record(), set[str]()
    for name in ("a", "b"):
        part = Part(record, name, said)
        for text in ("warning: all alike", "note: alike, too", f"note: {name}", "step 1"):
            part.message(text)
    assert record.lines == [
        "a: warning: all alike",
        "a: note: alike, too",
        "a: note: a",
        "a: step 1",
        "b: note: b",
        "b: step 1",
    ]
