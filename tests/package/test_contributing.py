"""The code in CONTRIBUTING.md runs, and does what the text around it says."""

import ast
import re
import sys
import textwrap
import types
from typing import Any

import httpx
import numpy as np
import pytest

import bothways
from bothways.cli import main
from bothways.model.heads import HEADS, LabelHead, MaskedHead
from bothways.model.model import Model
from bothways.serving import app
from bothways.serving.routes import ROUTES
from documents import ROOT, run_code
from running_server import running
from toy_folder import make_folder

FILE = ROOT / "CONTRIBUTING.md"
PAGE = FILE.read_text("utf8")
BLOCKS = re.findall(r"^( *)```python\n(.*?)^\1```$", PAGE, re.MULTILINE | re.DOTALL)


def run(word: str) -> dict[str, Any]:
    """The names that the block with this word defines."""
    [code] = [textwrap.dedent(code) for _, code in BLOCKS if word in code]
    return run_code(code, FILE)


def test_the_family_names_every_tensor_and_reads_its_settings():
    family = run("MY_BERT")["MY_BERT"]
    config = family.config_rules.read({"hidden_size": 24, "num_attention_heads": 2}, "here")
    assert config.width == 24
    state = Model(config, (MaskedHead(), LabelHead(2))).state_dict()
    names = [name for ours in state for name in family.keys_for(config).place(ours).names]
    assert len(set(names)) == len(names)
    assert "my_bert.encoder.layer.0.attention.self.query.weight" in names


def test_the_route_answers_refuses_and_is_described(tmp_path, monkeypatch):
    make_folder(tmp_path / "bert")
    predictor = bothways.load(tmp_path / "bert", task="embed")
    monkeypatch.setitem(ROUTES, "/norms", run("NORMS")["NORMS"])
    with running(app(predictor)) as url:
        answer = httpx.post(f"{url}/norms", json={"inputs": ["good", "bad film"]})
        assert answer.json() == pytest.approx(
            np.linalg.norm(predictor.encode(["good", "bad film"]), axis=1)
        )
        refusal = httpx.post(f"{url}/norms", json={"inputs": "good", "axis": 1})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (422, "axis")
        assert "/norms" in httpx.get(f"{url}/openapi.json").json()["paths"]


def test_a_suffix_is_of_one_head():
    suffixes = [head.suffix for head in HEADS.values() if head.suffix is not None]
    assert len({*suffixes}) == len(suffixes)


def test_the_entry_of_the_command_has_the_form_of_the_others():
    [entry] = re.findall(r'`"linecount": (\(.*?\))`', PAGE)
    others = [other for group in main._COMMANDS.values() for other in group.values()]
    assert {len(other) for other in others} == {len(ast.literal_eval(entry))}


def test_the_command_counts_with_progress(tmp_path, monkeypatch, capsys):
    package = types.ModuleType("my_package")
    vars(package).update(run("def count_lines"))
    monkeypatch.setitem(sys.modules, "my_package", package)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    run("def linecount")["linecount"](tmp_path / "a.txt")
    assert capsys.readouterr().out == "2\n"
