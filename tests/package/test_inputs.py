"""What `bothways predict` reads: texts on the command line, the keyboard, globs, pipes, and homes of nobody."""

import io
import json
import os
from pathlib import Path

import pytest

import bothways
from bothways.cli import main as cli
from bothways.cli.options import argument_text
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.core.files import local_path
from bothways.data.text_io import standard_input
from commands import run_line
from toy_folder import make_folder, save_classifier


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A classifier that was trained on the column "review", and two files."""
    folder = tmp_path_factory.mktemp("inputs")
    record = {"task": {"kind": "classify", "columns": {"text": "review", "label": "label"}}}
    save_classifier(folder / "classifier", make_folder(folder / "bert"), extra=record)
    (folder / "new 1.txt").write_text("a good film\n")
    (folder / "new 2.txt").write_text("a bad play\n")
    return folder


def predict(*words: str) -> None:
    run_line("predict", "classifier", *words, "--device", "cpu")


@pytest.fixture
def lines(place, monkeypatch, capsys) -> tuple[str, str]:
    """The predictions of both files."""
    monkeypatch.chdir(place)
    predict("new 1.txt")
    predict("new 2.txt")
    first, second = capsys.readouterr().out.splitlines()
    return first, second


def test_a_text_is_predicted_and_said_to_be_one(lines, capsys):
    predict("a good film")
    printed = capsys.readouterr()
    assert printed.out == lines[0] + "\n"
    assert printed.err.count("note: ") == 1


@pytest.mark.parametrize(
    ("word", "is_text"),
    [
        ("a good film", True),
        ("is it good? see [1], 3.5 stars.", True),
        ("这部电影很好。", True),
        ("24/7 service and so on", True),
        ("good", False),
        ("my data.csv", False),
        ("./a good film", False),
        ("~/a good film", False),
        ("-", False),
        ("hub:owner/name", False),
        ("s3://bucket/a b", False),
        ("new 1.txt", False),
        ("电影.txt", False),
        ("classifier/a good film", False),
        ("x" * 5000 + " y", True),
    ],
)
def test_what_is_a_text(word, is_text, place, monkeypatch):
    monkeypatch.chdir(place)
    assert argument_text((word,)) == (word if is_text else None)
    assert argument_text((word, word)) is None


def test_a_glob_in_quotes_stands_for_its_files(lines, tmp_path, capsys):
    predict("new ?.txt", "--out", str(tmp_path / "out"), "--format", "jsonl")
    parts = [part.read_text() for part in sorted((tmp_path / "out").rglob("*.jsonl"))]
    labels = [[json.loads(text)["label"] for text in texts] for texts in (parts, lines)]
    assert labels[0] == labels[1]
    predict("new 2*")
    assert capsys.readouterr().out == lines[1] + "\n"
    with pytest.raises(ConfigError, match="2 files"):
        predict("new*.txt")
    with pytest.raises(DataError, match=r"^none\*\.txt: matches no file"):
        predict("none*.txt")


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="no open files by name here")
def test_a_pipe_by_name_is_read_like_standard_input(lines, capsys):
    """As `predict MODEL <(command)`, where the column of the training has another name than "text"."""
    source, target = os.pipe()
    os.write(target, b"a good film\n")
    os.close(target)
    try:
        predict(f"/dev/fd/{source}")
    finally:
        os.close(source)
    assert capsys.readouterr().out == lines[0] + "\n"


def test_the_keyboard_is_announced(monkeypatch, capsys):
    for terminal in (False, True):
        typed = io.BytesIO(b"a film\n")
        monkeypatch.setattr(typed, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed))
        assert list(standard_input()) == [(1, "a film")]
        assert ("Ctrl-D" in capsys.readouterr().err) == terminal


def test_an_empty_name_is_not_this_folder(place, monkeypatch):
    monkeypatch.chdir(place / "classifier")
    for open_it in (bothways.load, bothways.load_model, bothways.Index, local_path):
        with pytest.raises(ConfigError, match="is empty"):
            open_it("")


def test_a_home_of_nobody_is_a_name_like_others(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    name = "~nobody-has-this-name/x"
    assert local_path(name) == Path(name)
    for words in (
        ["predict", name, "new 1.txt"],
        ["predict", "classifier", f"{name}.txt"],
        ["evaluate", "classifier", name],
        ["finetune", "bert", name, "--out", str(tmp_path / "run")],
        ["corpus", "build", name, "--tokenizer", "bert", "--out", str(tmp_path / "corpus")],
        ["corpus", "inspect", name],
        ["describe", name],
        ["convert", name, "--out", str(tmp_path / "out")],
        ["tokenizer", "encode", name, "--tokenizer", "bert"],
    ):
        with pytest.raises(BothwaysError) as error:
            run_line(*words)
        assert "no such" in str(error.value)


@pytest.mark.parametrize(
    "line",
    ["evaluate none new.tsv", "finetune bert none.tsv --out OUT", "embed bert none.txt --out OUT"],
)
def test_nothing_is_said_of_kernels_before_an_error(line, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words = line.replace("OUT", str(tmp_path / "out")).split()
    with pytest.raises(BothwaysError):
        run_line(*words)
    assert "kernels" not in capsys.readouterr().err


def test_a_name_that_no_system_allows_is_one_message(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for words in (
        ["predict", "classifier", "new 1.txt", "--out", "x" * 5000],
        ["predict", "x" * 5000, "new 1.txt"],
        ["predict", "classifier", "x" * 5000],
        ["finetune", "bert", "new 1.txt", "--out", "x" * 5000],
    ):
        monkeypatch.setattr("sys.argv", ["bothways", *words])
        with pytest.raises(SystemExit) as ended:
            cli.run_command_line()
        message = capsys.readouterr().err.splitlines()[-2:]
        assert ended.value.code == 2
        assert message[0].startswith("error: x")
        assert len(message[0]) < 400


def test_a_model_folder_whose_name_is_not_utf8_is_refused_for_that(place, tmp_path, monkeypatch):
    name = os.fsdecode(b"m\xe9l")
    monkeypatch.chdir(tmp_path)
    try:
        Path(name).symlink_to(place / "classifier")
    except OSError:
        pytest.skip("names are UTF-8 here")
    for words in (
        ["predict", name, str(place / "new 1.txt")],
        ["predict", str(place / "classifier"), str(place / "new 1.txt"), "--out", f"{name}-out"],
    ):
        with pytest.raises(ConfigError, match="is not UTF-8") as error:
            run_line(*words)
        assert str(error.value).isprintable() or "\n" in str(error.value)
