"""Fine-tuning for tags, from IOB1 columns, character spans and characters: learned, saved, predicted."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

import bothways
from bothways.core.errors import ConfigError
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import read_examples
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.task import TaggingTask
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs
from commands import run_line
from toy_folder import BAD, FILLERS, GOOD, make_folder

LABELS = ("O", "B-BAD", "I-BAD", "B-GOOD", "I-GOOD")


def write_iob1(file: Path, count: int, seed: int) -> Path:
    """Entities begin with one word of their type and go on with its others; B where one follows another of its type."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        for _ in range(draw.randint(1, 4)):
            lines += [f"{word} x O" for word in draw.choices(FILLERS[:-1], k=draw.randint(1, 3))]
            kind, (first, *others) = draw.choice((("BAD", BAD), ("GOOD", GOOD)))
            lines += [
                f"{first} x I-{kind}",
                *(f"{word} x I-{kind}" for word in draw.choices(others, k=draw.randint(0, 2))),
            ]
            lines += [f"{first} x B-{kind}"] * draw.randint(0, 1)
        lines.append("")
    file.write_text("-DOCSTART- x O\n\n" + "\n".join(lines))
    return file


@pytest.mark.parametrize(
    ("name", "text"),
    [("dev.tsv", "word\ttag\nOslo\tB-LOC\nis\tO\n"), ("dev.conll", "Oslo B-LOC\nis O\n")],
)
def test_dev_words_are_read_by_columns_of_their_own(tmp_path, name, text):
    """Those of the training data are in a table, in which a column numbers the sentences."""
    train, dev = tmp_path / "train.csv", tmp_path / name
    train.write_text("sentence_id,word,tag\n1,Oslo,B-LOC\n1,is,O\n2,cold,O\n")
    dev.write_text(text)
    settings = FinetuneConfig(train=str(train), dev=str(dev), task=TaggingTask())
    [example] = read_examples(settings).examples["dev"]
    assert (example.words, example.tags) == (("Oslo", "is"), ("B-LOC", "O"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[FinetuneResult, Path]:
    folder = tmp_path_factory.mktemp("tags")
    settings = FinetuneConfig(
        model=str(make_folder(folder / "bert")),
        train=str(write_iob1(folder / "train.conll", 160, 0)),
        dev=str(write_iob1(folder / "dev.conll", 20, 1)),
        length=12,
        training=dataclasses.replace(
            finetune_adam(),
            until=Epochs(4.0),
            optimizer=AdamW(lr=3e-3),
            evaluate=Epochs(2.0),
            precision="fp32",
        ),
        task=TaggingTask(context="document"),
    )
    return finetune(settings, folder / "run", device="cpu"), folder


def test_a_separable_task_is_learned_from_iob1(run):
    done, folder = run
    assert done.task_model.labels == LABELS
    assert done.metrics["f1"] > 0.9
    assert done.metrics["f1_strict"] > 0.9
    assert {"f1/GOOD", "recall/BAD", "accuracy", "loss"} < done.metrics.keys()
    assert any("are IOB1; they are read as IOB2" in finding.what for finding in done.findings)
    record = json.loads((folder / "run" / "model" / "bothways.json").read_text())
    assert record["task"]["context"] == "document"


def test_the_commands_evaluate_and_predict(run, monkeypatch, capsys):
    done, folder = run
    monkeypatch.chdir(folder)
    run_line("evaluate", "run", "dev.conll", "--json")
    assert json.loads(capsys.readouterr().out) == pytest.approx(done.metrics, rel=1e-4)
    text = "the film was bad awful and it ends  with a good play"
    (folder / "text.txt").write_text(f"{text}\n\nthe bad\n")
    run_line("predict", "run", "text.txt")
    first, empty, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [(e["type"], e["start"]) for e in first["entities"]] == [
        ("BAD", text.index("bad")),
        ("GOOD", text.index("good")),
    ]
    assert all(text[e["start"] : e["end"]] == e["text"] for e in first["entities"])
    assert empty == {"entities": [], "words": [], "tags": []}
    assert last["tags"] == ["O", "B-BAD"]
    with pytest.raises(ConfigError, match=r"keep: dev.conll is not a table .*\n  Leave keep out"):
        run_line("predict", "run", "dev.conll", "--keep", "id")


TEXT = "a good film."
ROWS = [{"text": TEXT, "label": [[2, 6, "X"]]}, {"text": f"{TEXT} bad", "label": [[13, 16, "X"]]}]


def tune(folder: Path, out: Path | None, train: Any, dev: Any) -> Any:
    make_folder(folder)
    return bothways.finetune(
        folder, train, dev, "ner", out=out, progress=False, **{"training.until": "1 epochs"}
    )


def test_predicted_spans_can_be_trained_on(tmp_path, capsys):
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 8), encoding="utf8")
    out = tmp_path / "run"
    done = tune(tmp_path / "bert", out, train, ROWS)
    assert done.task_model.labels == ("O", "B-X", "I-X")
    predictor = bothways.load(out)
    assert predictor.evaluate(ROWS)["f1"] == predictor.evaluate(train)["f1"]
    texts = tmp_path / "new.txt"
    texts.write_text(f"{TEXT}\nbad\n\n", encoding="utf8")
    capsys.readouterr()
    run_line("predict", out, texts, "--format", "spans")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [TEXT, "bad", ""]
    assert lines == [prediction.to_spans() for prediction in predictor([TEXT, "bad", ""])]
    run_line("predict", out, texts, "--format", "spans", "--out", tmp_path / "parts")
    (part,) = (tmp_path / "parts").glob("part-*")
    assert [json.loads(line) for line in part.read_text("utf8").splitlines()] == lines
    examples = list(TaggingTask().read(str(part)).examples)
    tags = [prediction.tags for prediction in predictor([TEXT, "bad", ""])]
    assert [len(example.tags or ()) for example in examples] == [*map(len, tags)]


def test_spans_are_of_entities():
    with pytest.raises(ConfigError):
        TagPrediction(("a",), ("NN",), None).to_spans()


def test_a_model_of_characters_splits_texts_into_characters(tmp_path):
    row = {"tokens": [*"我有10年"], "ner_tags": ["O", "O", "B-N", "I-N", "O"]}
    out = tmp_path / "run"
    tune(tmp_path / "bert", out, [row] * 8, [row])
    saved = bothways.load(out)
    assert saved.task_model.task.splitter == "characters"
    assert saved("我 有10年").words == ("我", "有", "1", "0", "年")
