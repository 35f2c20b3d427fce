"""Progress of long jobs."""

import pytest

from bothways.core.errors import ConfigError
from bothways.core.progress import Part, shown_progress, terminal_progress, track
from heard_progress import Heard


def test_tracked_items_report_their_number():
    heard = Heard()
    assert list(track("abcde", heard, "reading", interval=2)) == list("abcde")
    assert heard.stages == [("reading", 5, [0, 2, 4, 5])]


def test_notes_come_first(capsys):
    heard = Heard()
    with shown_progress(heard, ["note: a", "note: b"]) as reporter:
        reporter.message("begun")
    assert heard.messages == ["note: a", "note: b", "begun"]
    for progress in (True, False):
        with shown_progress(progress, ["note: a"]):
            pass
        assert capsys.readouterr() == ("", "note: a\n" if progress else "")
    with pytest.raises(ConfigError), shown_progress("yes"):
        pass


@pytest.mark.parametrize("advances", [True, False])
def test_a_line_is_announced_with_the_first_progress_and_not_before_an_error(advances, capsys):
    with terminal_progress(announced="kernels: none") as progress:
        progress.stage("reading", 2)
        assert capsys.readouterr().err == ""
        if advances:
            progress.advance(1)
            assert "kernels: none\n" in capsys.readouterr().err
    assert ("kernels: none\n" in capsys.readouterr().err) is not advances
    with pytest.raises(ConfigError), terminal_progress(announced="kernels: none"):
        raise ConfigError("is missing")
    assert "kernels" not in capsys.readouterr().err


def test_parts_of_a_job_give_a_warning_once():
    heard, said = Heard(), set[str]()
    for name in ("a", "b"):
        part = Part(heard, name, said)
        part.stage("training", 1.0)
        part.advance(0.5, "step 1")
        for text in ("warning: all alike", "note: alike, too", f"note: {name}", "step 1"):
            part.message(text)
    first = ["a: warning: all alike", "a: note: alike, too", "a: note: a", "a: step 1"]
    assert heard.messages == [*first, "b: note: b", "b: step 1"]
    assert heard.stages == [(f"{name}: training", 1.0, [0.5]) for name in "ab"]
    assert heard.notes == ["step 1", "step 1"]
