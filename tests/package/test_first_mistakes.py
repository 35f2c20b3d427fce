"""The mistakes of a first attempt: each is one message that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from bothways.cli.main import app
from bothways.core.errors import BothwaysError
from bothways.hub.model_folder import load_model, save_model
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from toy_folder import make_examples, make_folder, write_tsv


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained model, a classifier, and data."""
    folder = tmp_path_factory.mktemp("first")
    loaded = load_model(make_folder(folder / "bert", dropout=0.0))
    model = Model(loaded.model.config, (PoolerHead(), LabelHead(2)), loaded.model.encoder)
    save_model(folder / "classifier", model, loaded.tokenizer(), labels=("neg", "pos"))
    write_tsv(folder / "train.tsv", make_examples(16, 0))
    (folder / "empty.tsv").touch()
    (folder / "header.tsv").write_text("text\tlabel\n")
    (folder / "unseen.tsv").write_text("sentence\tlabel\na good film\tpso\na bad play\tneg\n")
    (folder / "long.txt").write_text("the film was good " * 200 + "\n")
    (folder / "folder").mkdir()
    (folder / "wide.csv").write_text(
        "\n".join([",".join(f"c{n}" for n in range(1000)), "x," * 999 + "x"])
    )
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("finetune bert empty.tsv", r"empty\.tsv: holds no row\n  Give a file with"),
        ("predict classifier empty.tsv", r"empty\.tsv: holds no row"),
        (
            "finetune bert train.tsv --text txet",
            r"has no column 'txet'; it has .*\n  Name the columns: columns={\"text\": NAME",
        ),
        (
            "finetune bert train.tsv --dev unseen.tsv",
            r"1 label of dev examples has no training example",
        ),
        (
            "evaluate classifier unseen.tsv",
            r"unseen\.tsv:2: label 'pso' is not among .*did you mean 'pos'\?\n  Give data with",
        ),
        ("predict classifier long.txt task.stride=8", r"task: a setting of the task has no prefix"),
        ("finetune bert wide.csv", r"is the text \(c0, c1, .*, c29 and 970 more\); use columns="),
        ("finetune folder train.tsv", r"folder: is not a model folder: it has no config\.json\n"),
        ("predict brt long.txt", r"brt: no such folder, .*\n  Did you mean .*bert\?"),
        ("finetune bert folder", r"folder: is a folder\n  Name a file in it"),
        ("predict train.tsv long.txt", r"train\.tsv: is a file, not a model folder\n  Give the"),
    ],
)
def test_a_mistake_is_one_message(
    line: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words = line.split() + (["--out", "run"] if line.startswith("finetune") else [])
    with pytest.raises(BothwaysError, match=message):
        app(words, result_action="return_value")


def test_a_text_that_is_too_long_is_answered_with_a_warning(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    app(["predict", "classifier", "long.txt", "--device", "cpu"], result_action="return_value")
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "warning: 1 of 1 examples (100.0%) was longer" in captured.err
