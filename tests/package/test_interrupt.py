"""Ctrl-C where no job catches it: one word and the status that shells know, no traceback."""

from __future__ import annotations

import pytest

from bothways import cli


def test_ctrl_c_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bothways.commands.describe._find", interrupted)
    monkeypatch.setattr("sys.argv", ["bothways", "describe", "bert-base"])
    with pytest.raises(SystemExit) as status:
        cli.main()
    assert status.value.code == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
