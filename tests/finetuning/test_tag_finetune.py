"""Fine-tuning for tags from IOB1 columns: learned, saved, opened by transformers, and used from the command line."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from bothways.cli.main import app
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.tasks.tagging.task import TaggingTask
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs
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
    app(["evaluate", "run", "dev.conll", "--json"], result_action="return_value")
    assert json.loads(capsys.readouterr().out) == pytest.approx(done.metrics, rel=1e-4)
    text = "the film was bad awful and it ends  with a good play"
    (folder / "text.txt").write_text(f"{text}\n\nthe bad\n")
    app(["predict", "run", "text.txt"], result_action="return_value")
    first, empty, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [(e["type"], e["start"]) for e in first["entities"]] == [
        ("BAD", text.index("bad")),
        ("GOOD", text.index("good")),
    ]
    assert all(text[e["start"] : e["end"]] == e["text"] for e in first["entities"])
    assert empty == {"entities": [], "words": [], "tags": []}
    assert last["tags"] == ["O", "B-BAD"]
