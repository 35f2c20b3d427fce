"""What is printed is what it is: brackets in names are no markup."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from bothways.cli.options import metric_table
from bothways.core.terminal import output_console, say, show_lines
from bothways.text.trainers import WordPiece, train_vocabulary
from commands import run_line

METRICS = {"f1": 0.25, "f1/[/x]": 1.0}


def printed_lines(printed: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(printed)
    return console.file.getvalue().splitlines()


def shown(printed: object) -> list[list[str]]:
    """The cells of a table as they are printed, row by row."""
    lines = [line.strip().replace("┃", "│") for line in printed_lines(printed)]
    return [[*map(str.strip, line[1:-1].split("│"))] for line in lines if line[0] == "│"]


def test_a_line_is_printed_as_it_is():
    console = Console(file=io.StringIO(), width=20, force_terminal=True)
    say(console, f"[/x] [bold]12 {'long ' * 9}")
    assert console.file.getvalue() == f"[/x] [bold]12 {'long ' * 9}\n"


def test_a_table_of_metrics_of_several_models():
    table = metric_table("a [/b]", {"fp32": METRICS, "int8": {"f1": 0.5, "f1/[/x]": 0.0}})
    assert printed_lines(table)[0] == "a [/b]"
    assert shown(table) == [
        ["metric", "fp32", "int8"],
        ["f1", "0.2500", "0.5000"],
        ["f1/[/x]", "1.0000", "0.0000"],
    ]
    assert shown(metric_table("", {"value": {"tokens": 1950}}))[1] == ["tokens", "1,950"]
    plain = metric_table("", {"": METRICS}, "", lambda name, value: f"{value:.0%}")
    assert shown(plain) == [["f1", "25%"], ["f1/[/x]", "100%"]]


def test_folders_may_have_brackets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a cat sat\n\na dog ran\n")
    train_vocabulary(["a cat sat", "a dog ran"], WordPiece(60)).save("tokenizer")
    words = ["--tokenizer", "tokenizer", "--out", "c[/x]", "--workers", "1"]
    for _ in range(2):
        run_line("corpus", "build", "text.txt", *words)
    assert "\nc[/x] already has the corpus of these inputs;" in f"\n{capsys.readouterr().err}"
    run_line("tokenizer", "train", "text.txt", "--size", "60", "--out", "t[/x]")
    assert capsys.readouterr().err.endswith("The tokenizer is in t[/x].\n")


def test_a_path_is_never_broken():
    """At 80 columns, as a title and as a line of its own."""
    title = f"runs/{'a-long-name/' * 9}model on data.tsv"
    console = Console(file=io.StringIO(), width=80)
    table = metric_table(title, {"f1": {"f1": 0.5}})
    show_lines(console, Text(title, "bold"), table)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == lines[1] == title
    assert all(len(line) <= 80 for line in lines[2:])


@pytest.mark.parametrize(("columns", "width"), [("", 80), ("100", 100)])
def test_a_file_gets_lines_of_80_characters_or_columns(columns, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    output_console().print("a" * 300)
    assert max(map(len, capsys.readouterr().out.splitlines())) == width
