"""Records of a run as its pages read them."""

import pytest

from bothways.core.errors import CheckpointError
from bothways.pretraining.run import read_records


def test_last_record_that_was_cut_is_skipped_with_a_note(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_records(file) == [{"step": 1}]
    assert f"{file}: skipped line 2" in capsys.readouterr().err
    file.write_text('{"step": 1}\n{"step": 2}')
    assert read_records(file) == [{"step": 1}, {"step": 2}]
    assert not capsys.readouterr().err
    file.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(CheckpointError):
        read_records(file)
