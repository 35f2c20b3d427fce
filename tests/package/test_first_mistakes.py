"""The mistakes of a first attempt, and settings beyond all limits: each is one error that names its place."""

import shlex
from pathlib import Path

import pytest

from bothways.cli.main import app
from bothways.core.errors import BothwaysError
from bothways.hub.model_folder import load_model, save_model
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from toy_folder import make_examples, make_folder, write_tsv


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
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
    ("line", "where"),
    [
        ("bench --rounds 0", "rounds"),
        ("convert nobody/model --out x", "nobody/model"),
        ("plan bert-tiny --tokens 1e400", "tokens"),
        ("adapt bert lr=3 --out x", "texts"),
        ("finetune bert train.tsv training.early_stopping=3", "training.early_stopping"),
        ("embed bert train.tsv --out none/v.npy", "none/v.npy"),
        ("evaluate classifier train.tsv --report none/x.html", "none/x.html"),
        ("finetune bert empty.tsv", "empty.tsv"),
        ("predict classifier empty.tsv", "empty.tsv"),
        ("finetune bert train.tsv --text txet", "train.tsv"),
        ("finetune bert train.tsv --dev unseen.tsv", None),  # two files are at odds
        ("evaluate classifier unseen.tsv", "unseen.tsv:2"),
        ("predict classifier long.txt task.stride=8", "task"),
        ("finetune bert wide.csv", "wide.csv"),
        ("finetune folder train.tsv", "folder"),
        ("predict brt long.txt", "brt"),
        ("finetune bert folder", "folder"),
        ("predict train.tsv long.txt", "train.tsv"),
        ("finetune bert train.tsv training.optimizer.lr=1e308", "training.optimizer.lr"),
        ("finetune bert train.tsv lr=nan", "training.optimizer.lr"),
        (f"finetune bert train.tsv seed={10**19}", "seed"),
        (f"finetune bert train.tsv order_seed=-{10**19}", "order_seed"),
        ("finetune bert train.tsv training.until='1__0 steps'", "training.until"),
        ("finetune bert train.tsv training.until='1_ steps'", "training.until"),
        (f"finetune bert train.tsv length={10**22}", "length"),
        ("serve bert --port=-1", "port"),
        ("serve bert --port=65536", "port"),
        ("sweep bert train.tsv --dev train.tsv --grid training.until='2", "grid"),
    ],
)
def test_a_mistake_is_one_message(line, where, place, monkeypatch):
    monkeypatch.chdir(place)
    words = shlex.split(line, posix="'2" not in line)
    with pytest.raises(BothwaysError) as caught:
        app(words + ["--out", "run"] * (words[0] == "finetune"), result_action="return_value")
    assert caught.value.where == where or str(caught.value.where) == where


def test_a_text_that_is_too_long_is_answered_with_a_warning(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    app(["predict", "classifier", "long.txt", "--device", "cpu"], result_action="return_value")
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "warning: 1 of 1 examples (100.0%) was longer" in captured.err
