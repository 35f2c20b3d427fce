"""Advice is spelled in the words of the interface that was used."""

import pickle
import re
from pathlib import Path

import pytest

import bothways
from bothways.core.errors import (
    ConfigError,
    DataError,
    Finding,
    argument,
    call,
    interface,
    render,
    require_unset,
    setting,
)


@pytest.mark.parametrize(("used", "columns", "others"), [
    ("python", 'text=NAME, label="class"', 'task="embed", **{"a.b": N}, resume=True, n=3'),
    ("command", "--text NAME --label class", "--task embed a.b=N --resume --n 3"),
    ("json", '"text": NAME, "label": "class"', '"task": "embed", "a.b": N, "resume": true, "n": 3'),
])  # fmt: skip
def test_parameters_are_spelled_for_an_interface(used, columns, others):
    assert render(f"<{argument(text='NAME', label='class')}>", used) == f"<{columns}>"
    assert render(argument(task="embed", **{"a.b": "N"}, resume=True, n=3), used) == others


@pytest.mark.parametrize(("used", "expected"), [
    ("python", """**{"a.b": True} **{"a.b": ";"} seed=3 c="none" d=['e', 'f']"""),
    ("command", "a.b=true 'a.b=;' seed=3 c=none d=e,f"),
    ("json", '"a.b": true "a.b": ";" "seed": 3 "c": "none" "d": ["e", "f"]'),
    ("toml", 'a.b = true a.b = ";" seed = 3 c = "none" d = ["e", "f"]'),
])  # fmt: skip
def test_settings_are_spelled_for_an_interface(used, expected):
    settings = [setting("a.b", True), setting("a.b", ";"), setting("seed", 3), setting("c", "none")]
    settings += [setting("d", ["e", "f"])]
    assert render(" ".join(settings), used) == expected


@pytest.mark.parametrize(("used", "command", "expected"), [
    ("python", "export", "bothways.export_model(MODEL, out=FOLDER)"),
    ("python", "average", "bothways.average(MODEL, out=FOLDER)"),
    ("python", "evaluate", "bothways.evaluate(MODEL, out=FOLDER)"),
    ("command", "export", "bothways export MODEL --out FOLDER"),
    ("json", "export", "bothways export MODEL --out FOLDER"),
    ("python", "convert", "bothways convert MODEL --out FOLDER"),  # which is no function
])  # fmt: skip
def test_commands_are_spelled_for_an_interface(used, command, expected):
    assert render(call(command, "MODEL", out="FOLDER"), used) == expected


@pytest.mark.parametrize(("used", "expected"), [
    ("python", 'bothways.load("my model", …) labels="A, B", resume=False'),
    ("command", "bothways predict 'my model' … --labels 'A, B' --no-resume"),
    ("json", """bothways predict 'my model' … "labels": "A, B", "resume": false"""),
])  # fmt: skip
def test_values_are_literals_of_an_interface(used, expected):
    message = f"{call('predict', 'my model', '…')} {argument(labels='A, B', resume=False)}"
    assert render(message, used) == expected


def test_errors_and_findings_have_the_words_of_the_process():
    error = DataError("no text", where="a.csv", fix=f"Name it: {argument(text='NAME')}.")
    again = pickle.loads(pickle.dumps(error))
    finding = Finding("rows", "error", "no text", fix=f"Name it: {argument(text='NAME')}.")
    assert str(again) == "a.csv: no text\n  Name it: text=NAME."
    assert again.message("json").endswith('Name it: "text": NAME.')
    with interface("command"):
        assert str(again) == "a.csv: no text\n  Name it: --text NAME."
        assert again.fix == "Name it: --text NAME."
        assert str(finding).endswith("Name it: --text NAME.")
    assert again.fix == "Name it: text=NAME."


def test_text_that_only_looks_like_a_parameter_stays():
    for text in ("\x02{\x03", "\x02\x03", "\x02[1]\x03", "\x02[null, [], 3]\x03", "\x02", "a\x03"):
        assert render(text, "python") == text


LIBRARY = Path(bothways.__file__).parent
COMMANDS = {"cli", "lab", "serving"}
"""Only commands reach these, or a message of theirs is for who starts a server."""


@pytest.mark.parametrize(("spelling", "exceptions"), [
    # Python has no keyword with a dot: `setting` spells it. This one is of a word that is no setting.
    (r"[a-z_]+\.[a-z0-9_.]+=", ["training.optimizer.lr="]),
    # `argument` spells options. Only torchrun has the first two of these, and only a command the third.
    (r"--[a-z][a-z-]*", ["--master-port", "--max-restarts", "--tokens"]),
])  # fmt: skip
def test_advice_of_the_library_spells_no_parameter_by_hand(spelling, exceptions):
    advice = re.compile(rf"""fix\s*\+?=\s*\(?\s*f?["'][^"']*?({spelling})""")
    files = [
        file for file in LIBRARY.rglob("*.py") if file.relative_to(LIBRARY).parts[0] not in COMMANDS
    ]
    found = [name for file in files for name in advice.findall(file.read_text("utf8"))]
    assert sorted(found) == exceptions


def test_false_is_a_value_of_an_argument():
    require_unset("does nothing", "Leave it out.", a=None)
    with pytest.raises(ConfigError, match=r"^b: does nothing"):
        require_unset("does nothing", "Leave it out.", a=None, b=False)
