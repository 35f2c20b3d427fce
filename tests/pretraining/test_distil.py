"""`bothways distil` and `bothways.distil`: a corpus pre-trains a student, labelled data fine-tunes one."""

import json
from pathlib import Path

import pytest

import bothways
from bothways.cli.main import app
from bothways.core.errors import BothwaysError, ConfigError
from bothways.data.corpus import build_corpus
from bothways.data.documents import Document
from toy_folder import make_examples, make_folder, make_tokenizer, write_tsv


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a teacher, its corpus, a student, a fine-tuned teacher and labelled data."""
    folder = tmp_path_factory.mktemp("distil")
    make_folder(folder / "teacher", num_hidden_layers=4)
    make_folder(folder / "student", num_hidden_layers=1)
    texts = (". ".join(e.text for e in make_examples(6, number)) + "." for number in range(60))
    documents = (Document(text, str(number)) for number, text in enumerate(texts))
    build_corpus(documents, make_tokenizer(folder / "t"), folder / "corpus", workers=1)
    write_tsv(folder / "train.tsv", make_examples(64, 0))
    write_tsv(folder / "dev.tsv", make_examples(32, 1))
    rows = make_examples(64, 2)
    bothways.finetune(folder / "teacher", rows, epochs=1, progress=False).save(folder / "tuned")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, place: Path, *words: str) -> None:
    monkeypatch.chdir(place)
    app(["distil", *words], result_action="return_value")


QUICK = ("--until", "2 steps", "batch.n=8", "training.schedule.warmup=0.5")


def test_a_corpus_pre_trains_half_of_the_teacher(place, monkeypatch, capsys):
    run(monkeypatch, place, "teacher", "corpus", "--out", "half", *QUICK)
    assert "held-out/loss/soft" in capsys.readouterr().out
    config = json.loads((place / "half" / "model" / "config.json").read_text("utf8"))
    assert (config["architectures"], config["num_hidden_layers"]) == (["BertForMaskedLM"], 2)
    # Another width starts at random, and a folder from its own weights.
    run(
        monkeypatch, place, "half", "corpus", "--out", "small", "--student", "bert-tiny",
        "--recipe", "minilm", *QUICK,
    )  # fmt: skip
    config = json.loads((place / "small" / "model" / "config.json").read_text("utf8"))
    assert (config["architectures"], config["hidden_size"]) == (["BertModel"], 128)
    run(
        monkeypatch, place, "teacher", "corpus", "--out", "again", "--student", "half/model", *QUICK
    )
    assert 'start = "half/model"' in (place / "again" / "config.toml").read_text("utf8")


def test_labelled_data_fine_tunes_a_student_for_the_task_of_the_teacher(place, monkeypatch, capsys):
    run(
        monkeypatch, place, "tuned", "train.tsv", "--dev", "dev.tsv", "--student", "student",
        "--out", "taught", "--epochs", "1", "teacher.weight=0.7",
    )  # fmt: skip
    assert "accuracy" in capsys.readouterr().out
    settings = (place / "taught" / "config.toml").read_text("utf8")
    assert "weight = 0.7" in settings
    assert 'until = "1 epochs"' in settings
    records = (place / "taught" / "metrics.jsonl").read_text("utf8").splitlines()
    assert any("loss/soft" in json.loads(line) for line in records)
    monkeypatch.chdir(place)
    app(
        ["finetune", "student", "train.tsv", "--teacher", "tuned", "--out", "same", "epochs=1"],
        result_action="return_value",
    )
    assert 'folder = "tuned"' in (place / "same" / "config.toml").read_text("utf8")
    done = bothways.distil("tuned", make_examples(16, 3), "student", epochs=1, progress=False)
    assert done.task_model.labels == ("neg", "pos")


def test_mistakes_are_one_message(place, monkeypatch):
    for words, match in (
        (("tuned", "train.tsv"), "labelled data needs a pre-trained student"),
        (("tuned", "train.tsv", "--student", "student", "--recipe", "minilm"), "is for a corpus"),
        (("teacher", "corpus", "--recipe", "modern"), "unknown recipe 'modern'"),
        (("teacher", "corpus", "--dev", "dev.tsv"), "is for labelled data"),
        (("teacher", "train.tsv", "--student", "student"), "is not fine-tuned for a task"),
        (("none", "corpus"), "no such folder"),
        (("teacher", "corpus", "--epochs", "1", *QUICK), "given twice: 1 epochs and '2 steps'"),
        (("teacher", "corpus", "--epochs", "0"), "until: 0 epochs is not a valid duration"),
        (("teacher", "corpus", "--student", "bert-tiny"), "between vectors of one width"),
    ):
        with pytest.raises(BothwaysError, match=match):
            run(monkeypatch, place, *words, "--out", "mistake")
    with pytest.raises(BothwaysError, match="reads 32 tokens, and sequences have 40"):
        run(
            monkeypatch, place, "teacher", "corpus", "--student", "bert-tiny", "--recipe", "minilm",
            "--out", "mistake", "phases.0.length=40", *QUICK,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="does not start from"):
        run(monkeypatch, place, "teacher", "corpus", "--out", "mistake", "start=none")
