"""A fine-tuned teacher: the soft loss of every task by its formula, its targets, and runs that learn from it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bothways
from bothways.core.batch import pack
from bothways.core.errors import BothwaysError, ConfigError
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.distillation import (
    TARGET,
    TaughtModule,
    TeacherTargets,
    with_teacher_scores,
)
from bothways.finetuning.run import FinetuneResult
from bothways.hub.model_folder import save_model
from bothways.model.model import Model
from bothways.objectives.distillation import Teacher
from bothways.tasks.base import TaskModel
from bothways.tasks.catalogue import Trainable
from bothways.tasks.text_task import TextExample
from family_tasks import LENGTH, TASKS, encoder_of, tokenizer_of
from toy_folder import make_examples, make_folder
from toy_training import check_splits, equal

CPU = torch.device("cpu")


def build_task_model(definition: Trainable, examples: list[Any], seed: int) -> TaskModel[Any, Any]:
    tokenizer = tokenizer_of("bert")
    labels = definition.labels(examples)
    torch.manual_seed(seed)
    model = Model(encoder_of("bert", tokenizer), definition.heads(labels, None))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return definition.bind(model, tokenizer, labels, LENGTH).eval()


def prepared(
    definition: Trainable, examples: list[Any], folder: Path, **settings: Any
) -> tuple[TaskModel[Any, Any], TaskModel[Any, Any], LabelledData, Teacher]:
    """A student, a teacher in a folder, and data with the teacher's scores."""
    student, other = (build_task_model(definition, examples, seed) for seed in (0, 1))
    named = {"labels": other.labels, "problem": definition.problem}
    save_model(folder, other.model, other.tokenizer, **named)
    data = label(definition, student.tokenizer, examples, [], LENGTH)
    settings = {"temperature": 3.0, **settings}
    teacher = Teacher(str(folder), **settings)
    return student, other, with_teacher_scores(data, teacher, CPU, "fp32"), teacher


def divergence(z: Tensor, t: Tensor) -> Tensor:
    """Sum over rows of T² KL of softmax, at temperature 3."""
    return 9 * F.kl_div(F.log_softmax(z / 3, 1), F.softmax(t / 3, 1), reduction="sum")


def expected_mean(scale: str, ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The mean soft loss, from outputs of one sequence at a time."""
    total, count = 0.0, 0
    for mine, other in zip(ours, theirs, strict=True):
        z, t = (torch.as_tensor(np.array(x), dtype=torch.float64) for x in (mine, other))
        if scale == "labels":
            p, q = (t / 3).sigmoid(), (z / 3).sigmoid()
            each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            total, count = total + 9 * each.sum().item(), count + len(z)
        elif scale == "number":
            total, count = total + (z - t).square().sum().item(), count + 1
        elif scale == "span":
            total, count = total + divergence(z.T, t.T).item() / 2, count + 1
        else:
            z, t = torch.atleast_2d(z), torch.atleast_2d(t)
            total, count = total + divergence(z, t).item(), count + len(z)
    return total / count


@pytest.mark.parametrize(
    ("definition", "examples"), TASKS, ids=[definition.name for definition, _ in TASKS]
)
def test_the_soft_loss_of_every_task_is_its_formula(definition, examples, tmp_path):
    student, other, data, teacher = prepared(definition, examples, tmp_path / "teacher")
    training_module, sequences = TaughtModule(student, teacher).eval(), data.sequences
    batch = pack(sequences)
    with torch.no_grad():
        ours = [student.outputs(pack([each]))[0] for each in sequences]
        theirs = [other.outputs(pack([each]))[0] for each in sequences]
    mean = training_module(batch)["soft"].total.item() / training_module.weights(batch)["soft"]
    assert mean == pytest.approx(expected_mean(str(student.scale), ours, theirs), rel=1e-4)
    assert mean > 0.01
    assert training_module.coefficients == {student.loss_name: 0.5, "soft": 0.5}
    hard = student(batch)[student.loss_name].total
    assert torch.equal(training_module(batch)[student.loss_name].total, hard)
    check_splits(training_module, sequences, 1e-5)
    trained = {name for name, p in training_module.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in student.named_parameters()}
    student.model.load_state_dict(other.model.state_dict())
    assert training_module(batch)["soft"].total.item() == pytest.approx(0.0, abs=1e-3)
    training_module.zero_grad(set_to_none=True)
    training_module(batch)["soft"].total.backward()
    assert max(p.grad.abs().max().item() for p in training_module.parameters()) < 1e-3


def test_labels_in_another_order_are_matched_by_name(tmp_path):
    definition, examples = TASKS[0]
    _, other, data, _ = prepared(definition, examples, tmp_path / "teacher")
    order = [2, 0, 1]
    turned = Model(other.model.config, other.model.specification, other.model.encoder)
    turned.load_state_dict(other.model.state_dict())
    turned.heads["labels"].dense.weight.data = other.model.heads["labels"].dense.weight[order]
    turned.heads["labels"].dense.bias.data = other.model.heads["labels"].dense.bias[order]
    names = [other.labels[at] for at in order]
    save_model(tmp_path / "turned", turned, other.tokenizer, labels=names)
    again = with_teacher_scores(data, Teacher(str(tmp_path / "turned")), CPU, "fp32")
    for first, second in zip(data.sequences, again.sequences, strict=True):
        one, two = (each.target(TARGET, TeacherTargets).scores for each in (first, second))
        assert np.allclose(one, two, atol=1e-6)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a student, and a teacher that knows the classes."""
    folder = tmp_path_factory.mktemp("taught")
    make_folder(folder / "student", num_hidden_layers=1)
    make_folder(folder / "big")
    rows = make_examples(320, 0)
    settings = {"epochs": 6, "lr": 3e-3, "progress": False}
    done = bothways.finetune(folder / "big", rows, make_examples(60, 1), **settings)
    assert done.metrics["accuracy"] > 0.95
    done.save(folder / "teacher")
    return folder


def run(place: Path, out: Path | None = None, **settings: Any) -> FinetuneResult:
    teacher = {"folder": str(place / "teacher"), "weight": 1.0, **settings.pop("teacher", {})}
    settings = {"epochs": 6, "lr": 3e-3, **settings}
    train, dev = settings.pop("train", make_examples(160, 2)), make_examples(60, 1)
    return bothways.finetune(
        place / "student", train, dev, out=out, teacher=teacher, progress=False, **settings
    )


def test_a_student_learns_from_wrong_labels_what_its_teacher_knows(place, tmp_path):
    """With the whole weight on the teacher the labels do not matter, not even if all are wrong."""
    wrong = [
        dataclasses.replace(each, label="pos" if each.label == "neg" else "neg")
        for each in make_examples(160, 2)
    ]
    done = run(place, train=wrong)
    assert done.metrics["accuracy"] > 0.75
    few = make_examples(8, 3)
    file = tmp_path / "more.jsonl"
    texts = [each.text for each in make_examples(320, 4)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf8")
    teachers = ({"unlabelled": source} for source in (None, str(file)))
    alone, more = (run(place, train=few, teacher=teacher, epochs=3) for teacher in teachers)
    assert more.metrics["accuracy"] > alone.metrics["accuracy"] + 0.2


def test_a_resumed_run_with_a_teacher_ends_as_one_that_never_stopped(place, tmp_path):
    out, often = tmp_path / "run", {"save": "5 steps", "keep": {"last": 9}}
    whole = run(place, out, epochs=2, training=often)
    names = json.loads((out / "step-10" / "progress.json").read_text("utf8"))["config"]
    assert len(names["data"]["teacher"]) == 64
    for left in ("step-10", "model", "report.html"):
        (out / left).rename(tmp_path / left)
    again = run(place, out, epochs=2, resume=True, training=often)
    assert equal(again.task_model.model, whole.task_model.model)
    assert bothways.load(out).task_model.labels == ("neg", "pos")


def test_mistakes_are_one_message(place, tmp_path):
    with pytest.raises(ConfigError, match="must be above 0, not 0"):
        Teacher("x", temperature=0.0)
    with pytest.raises(ConfigError, match="weight"):
        Teacher("x", weight=1.5)
    three = [
        TextExample(each.text, None, "xyz"[at % 3]) for at, each in enumerate(make_examples(30, 0))
    ]
    with pytest.raises(BothwaysError, match=r"has the labels neg, pos, the data x, y, z"):
        bothways.finetune(
            place / "student", three, teacher={"folder": str(place / "teacher")}, progress=False
        )
    with pytest.raises(BothwaysError, match="needs the head 'labels'"):
        run(place, teacher={"folder": str(place / "big")})
    pairs = [{"anchor": "the film", "positive": f"film {at}"} for at in range(4)]
    bothways.finetune(place / "big", pairs, None, "embed", epochs=1).save(tmp_path / "vectors")
    teacher = {"folder": str(tmp_path / "vectors")}
    with pytest.raises(ConfigError, match=r"^teacher: models for embed are not taught by"):
        bothways.finetune(place / "student", pairs, None, "embed", teacher=teacher)
    with pytest.raises(ConfigError, match=r"^teacher: .* 'embed', which is not learned from a te"):
        bothways.distil(tmp_path / "vectors", pairs, place / "student", epochs=1)
    other = build_task_model(*TASKS[0], 0)
    save_model(tmp_path / "other", other.model, other.tokenizer, labels=other.labels)
    with pytest.raises(BothwaysError, match=r"has another vocabulary than the student: .* differ"):
        run(place, teacher={"folder": str(tmp_path / "other")})
