"""Answering questions from files to predictions: what is learned, what transformers opens, and the threshold that stays."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bothways.prediction.opening import open_task, open_task_model
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from commands import run_line
from toy_folder import FILLERS, GOOD, make_folder


def write_squad(file: Path, count: int, seed: int) -> dict[str, str]:
    """A SQuAD 2.0 file: the answer is the one good word of the context; a third have none. The answers by id."""
    draw, paragraphs, answers = random.Random(seed), [], {}
    for number in range(count):
        words = draw.choices(FILLERS[:-1], k=draw.randint(4, 18))
        good = draw.choice(GOOD) if number % 3 else ""
        if good:
            words.insert(draw.randrange(len(words)), good)
        context, id = " ".join(words), f"{seed}-{number}"
        answers[id] = good
        rights = [{"text": good, "answer_start": context.index(good)}] if good else []
        question = {"id": id, "question": "it was", "answers": rights, "is_impossible": not good}
        paragraphs.append({"context": context, "qas": [question]})
    file.write_text(
        json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]})
    )
    return answers


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where a finished run is, in the folder "run"."""
    folder = tmp_path_factory.mktemp("answer")
    make_folder(folder / "bert", dropout=0.0)
    write_squad(folder / "train.json", 240, 0)
    write_squad(folder / "dev.json", 60, 1)
    words = "finetune bert train.json --dev dev.json --task answer --out run --device cpu"
    words += " length=16 task.stride=6 task.longest=3 training.optimizer.lr=3e-3"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_line(*words.split(), "training.until=3 epochs")
    return folder


def record_of(place: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((place / "run" / "model" / "bothways.json").read_text())
    return record


def test_it_is_learned_and_the_threshold_stays(place):
    record, task = record_of(place), open_task_model(str(place / "run"), device="cpu")
    assert record["metrics"]["f1"] > 0.95
    assert record["metrics"]["f1"] == pytest.approx(record["metrics"]["f1_best"])
    assert isinstance(task.task, QuestionAnsweringTask)
    assert (task.task.stride, task.task.longest, task.length) == (6, 3, 16)
    assert task.task.threshold is not None
    assert (
        task.task.threshold
        == record["task"]["threshold"]
        == pytest.approx(record["metrics"]["threshold_best"])
    )


def test_evaluate_and_predict(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    run_line("evaluate", "run", "dev.json", "--json")
    assert json.loads(capsys.readouterr().out) == pytest.approx(
        record_of(place)["metrics"], rel=1e-5
    )
    answers = write_squad(place / "new.json", 40, 2)
    run_line("predict", "run", "new.json")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in found] == list(answers)
    assert sum(row["text"] == answers[row["id"]] for row in found) > 36
    rows = [
        {"question": "it was", "context": "the play was fine and old"},
        {"question": "it was", "context": "the play was old"},
    ]
    (place / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_line("predict", "run", "new.jsonl")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["id"], first["text"], first["start"], first["end"]) == ("1", "fine", 13, 17)
    assert (second["text"], second["start"]) == ("", None)
    assert 0 < second["confidence"] <= 1


def test_an_untrained_span_head_answers_every_question(place):
    """Opened without the record, the task has its defaults."""
    (place / "bare").mkdir()
    for file in (place / "run" / "model").iterdir():
        if file.name != "bothways.json":
            (place / "bare" / file.name).write_bytes(file.read_bytes())
    opened = open_task(str(place / "bare"), length=16, device="cpu")
    assert opened.task_model.task == QuestionAnsweringTask()
    found = opened.predict_examples(opened.read(str(place / "dev.json"), labelled=False))
    assert all(prediction.text for _, prediction in found)
