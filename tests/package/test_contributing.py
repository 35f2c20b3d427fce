"""The code in CONTRIBUTING.md runs, and does what the text around it says."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from bothways.model.heads import LabelHead, MaskedHead
from bothways.model.model import Model

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf8")
BLOCKS = re.findall(r"^( *)```python\n(.*?)^\1```$", PAGE, re.MULTILINE | re.DOTALL)


def run(word: str) -> dict[str, Any]:
    """The names that the block with this word defines."""
    [code] = [textwrap.dedent(code) for _, code in BLOCKS if word in code]
    names: dict[str, Any] = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    return names


def test_the_family_names_every_tensor_and_reads_its_settings() -> None:
    family = run("MY_BERT")["MY_BERT"]
    config = family.config_rules.read({"hidden_size": 24, "num_attention_heads": 2}, "here")
    assert config.width == 24
    state = Model(config, (MaskedHead(), LabelHead(2))).state_dict()
    names = [name for ours in state for name in family.keys_for(config).place(ours).names]
    assert len(set(names)) == len(names)
    assert "my_bert.encoder.layer.0.attention.self.query.weight" in names


def test_the_command_counts_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = types.ModuleType("my_package")
    vars(package).update(run("def count_lines"))
    monkeypatch.setitem(sys.modules, "my_package", package)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    run("def linecount")["linecount"](tmp_path / "a.txt")
    assert capsys.readouterr().out == "2\n"
