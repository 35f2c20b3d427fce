"""Mistakes of a command line: one form, names that are near, and options under names of other libraries."""

import shlex

import pytest
from cyclopts import CycloptsError

from bothways.cli import main as cli
from bothways.cli.mistakes import explain_mistake, rename_options


def mistake(line: str) -> tuple[str | None, str]:
    """The place of the error, and the whole message."""
    with pytest.raises(CycloptsError) as raised:
        cli.app(
            rename_options(cli.app, shlex.split(line)),
            result_action="return_value", print_error=False, exit_on_error=False,
        )  # fmt: skip
    error = explain_mistake(raised.value)
    return None if error.where is None else str(error.where), str(error)


@pytest.mark.parametrize(
    ("line", "where", "named"),
    [
        ("corpus build x.txt --out c", "--tokenizer", ["is missing", "corpus build --help"]),
        ("finetune", "MODEL", ["is missing"]),
        ("finetune m d.tsv --out", "--out", ["needs a value"]),
        ("finetune m d.tsv --lr abc", "--lr", ["'abc'", "number"]),
        ("finetune m d.tsv --lr 1 --lr 2", "--lr", ["twice"]),
        ("predict m f.txt --precision=fp6", "--precision", ["'fp6'", "fp32"]),
        ("finetune m d.tsv --epochss 3", "--epochss", ["did you mean --epochs?"]),
        ("describe a b", "bothways describe", ["b"]),
        ("train m d.tsv", None, ["finetune or pretrain"]),
        ("corpus bild", None, ["did you mean build?"]),
    ],
)
def test_a_mistake_says_where_and_what(line, where, named):
    place, message = mistake(line)
    assert place == where
    assert [word for word in named if word not in message] == []


@pytest.mark.parametrize("option", ["--freeze", "--quiet", "--gradient-clipping"])
def test_nothing_is_suggested_that_only_looks_alike(option):
    assert "did you mean" not in mistake(f"finetune m d.tsv {option} 3")[1]


@pytest.mark.parametrize(
    ("line", "renamed"),
    [
        ("finetune m d.tsv --learning-rate 3e-5", "finetune m d.tsv learning_rate=3e-5"),
        ("finetune --num-train-epochs=3 m d.tsv", "finetune --epochs 3 m d.tsv"),
        ("finetune m d.tsv --max_length 64", "finetune m d.tsv --max-length 64"),
        ("finetune m d.tsv --patience 3", "finetune m d.tsv patience=3"),
        ("pretrain c --max-steps 100 --out run", "pretrain c --until '100 steps' --out run"),
        ("describe bert-tiny --lr 3", "describe bert-tiny --lr 3"),
        ("finetune m d.tsv --text=a --lr 1 --nonsense 1", "finetune m d.tsv --text=a --lr 1 --nonsense 1"),
        ("finetune m d.tsv --learning-rate", "finetune m d.tsv --learning-rate"),
    ],
)  # fmt: skip
def test_options_of_other_libraries_are_ours(line, renamed):
    assert rename_options(cli.app, shlex.split(line)) == shlex.split(renamed)


def test_the_command_prints_the_message(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bothways", "predict", "m", "--topp", "3"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        "error: --topp: unknown option; did you mean --top?\n"
    )
