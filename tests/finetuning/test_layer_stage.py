"""TinyBERT's distillation for a task: the layers by their formula from transformers' models, then the answers."""

from __future__ import annotations

import json
import math
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import bothways
from bothways.cli.main import app
from bothways.core.batch import pack
from bothways.core.errors import BothwaysError
from bothways.finetuning.data import label
from bothways.finetuning.distillation import layer_module, with_token_weights
from bothways.finetuning.teacher import LayerStage, objective_of
from bothways.hub.model_folder import load_model
from bothways.prediction.predictor import open_task_model
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_examples import TextExample
from bothways.training.signals import Interruption
from toy_folder import make_examples, make_folder, make_tokenizer, write_tsv

DATA = make_examples(24, 0)
QUICK: dict[str, Any] = {
    "epochs": 1,
    "teacher": {
        "weight": 1.0,
        "stage": {"kind": "layers", "training": {"until": "6 steps", "optimizer": {"lr": 1e-3}}},
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, and a wider and deeper teacher that transformers has saved as a classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("layers")
    make_folder(folder / "student", seed=1)
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=make_tokenizer(folder / "t").size, hidden_size=48, num_hidden_layers=4,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=32,
        initializer_range=0.2, id2label={0: "neg", 1: "pos"},
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder / "teacher")
    make_tokenizer(folder / "teacher").save(folder / "teacher")
    write_tsv(folder / "train.tsv", DATA)
    return folder


def run(place: Path, out: Path | None, **settings: Any) -> Any:
    given = {**QUICK, **settings}
    given["teacher"] = {"folder": str(place / "teacher"), **given["teacher"]}
    return bothways.finetune(place / "student", DATA, out=out, progress=False, **given)


def test_the_losses_are_those_of_the_paper(place: Path) -> None:
    """Section 3.1, equations 7 to 9, of pairs with segments, from transformers in float64."""
    from transformers import BertModel

    student = load_model(place / "student").model
    teacher = open_task_model(place / "teacher", "classify").model
    objective = objective_of(LayerStage(), str(place / "teacher"), student.config)
    training_module = layer_module(student, teacher, objective).double().eval()
    pairs = [TextExample(a.text, b.text, a.label) for a, b in zip(DATA[:6], DATA[6:], strict=False)]
    tokenizer = make_tokenizer(place / "t")
    data = label(ClassificationTask(), tokenizer, pairs, [], 32)
    sequences = [with_token_weights(each) for each in data.sequences]
    assert any(each.segments.any() for each in sequences)

    read = []
    for name in ("student", "teacher"):
        peer = BertModel.from_pretrained(place / name, attn_implementation="eager").double().eval()
        rows = []
        for each in sequences:
            ids, segments = (torch.as_tensor(x).long()[None] for x in (each.ids, each.segments))
            with torch.no_grad():
                states = peer(ids, token_type_ids=segments, output_hidden_states=True).hidden_states
                scores = []
                for layer, x in zip(peer.encoder.layer, states, strict=False):
                    own = layer.attention.self
                    q, k = (
                        f(x[0]).unflatten(1, (2, -1)).transpose(0, 1) for f in (own.query, own.key)
                    )
                    scores.append(q @ k.mT / math.sqrt(q.shape[-1]))
            rows.append(([x[0] for x in states], scores))
        read.append(rows)
    expected = dict.fromkeys(("embedding", "hidden", "attention"), 0.0)
    for name, level, pairs_of_layers in (
        ("embedding", 0, [(0, 0)]), ("hidden", 0, [(1, 2), (2, 4)]), ("attention", 1, [(0, 1), (1, 3)]),
    ):  # fmt: skip
        for mine, other in pairs_of_layers:
            ours, theirs = (
                [row[level][at] for row in rows]
                for rows, at in zip(read, (mine, other), strict=True)
            )
            if level == 0:
                ours = [training_module.project(x) for x in ours]
            joined = (torch.cat([x.flatten() for x in parts]) for parts in (ours, theirs))
            expected[name] += F.mse_loss(*joined).item()
    batch = pack(sequences)
    weights = training_module.weights(batch)
    found = {
        name: loss.total.item() / weights[name] for name, loss in training_module(batch).items()
    }
    assert found == pytest.approx(expected, rel=1e-6)
    assert min(expected.values()) > 0.01


def test_one_command_runs_both_stages(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["distil", str(place / "teacher"), str(place / "train.tsv"), "--recipe", "tinybert"]
    words += ["--student", str(place / "student"), "--out", str(tmp_path / "run")]
    words += ["--epochs", "2", "teacher.stage.training.until=3 epochs"]
    app([*words, "teacher.stage.training.report=1 steps"], result_action="return_value")
    assert "first the teacher's layers, 3 epochs" in capsys.readouterr().err
    settings = (tmp_path / "run/config.toml").read_text("utf8")
    for line in ("weight = 1.0", "temperature = 1.0", "lr = 3e-05", 'kind = "constant"'):
        assert line in settings
    lines = (tmp_path / "run/layers/metrics.jsonl").read_text("utf8").splitlines()
    hidden = [json.loads(line)["loss/hidden"] for line in lines]
    assert len(hidden) == 3  # one batch an epoch
    assert hidden[-1] < hidden[0]
    assert bothways.load(tmp_path / "run").task_model.labels == ("neg", "pos")


@pytest.mark.slow
def test_a_first_stage_that_was_stopped_resumes_to_equal_weights(
    place: Path, tmp_path: Path
) -> None:
    whole = run(place, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interruption, "asked", True)
        stopped = run(place, tmp_path / "cut")
    assert (stopped.finished, stopped.progress.steps, stopped.folder) == (False, 1, None)
    with pytest.raises(BothwaysError, match="Add resume=True"):
        run(place, tmp_path / "cut")
    # The teacher may have moved, and what changes no update may be another.
    moved = {**deepcopy(QUICK["teacher"]), "folder": str(tmp_path / "moved")}
    shutil.copytree(place / "teacher", tmp_path / "moved")
    moved["stage"]["training"]["report"] = "1 steps"
    done = run(place, tmp_path / "cut", resume=True, teacher=moved)
    state = whole.task_model.model.state_dict()
    for each in (done, run(place, None)):  # in memory, too
        assert all(torch.equal(state[n], t) for n, t in each.task_model.model.state_dict().items())
    alone = run(place, None, teacher={"weight": 1.0})
    name = "encoder.embedding.token.weight"
    assert not torch.equal(state[name], alone.task_model.model.state_dict()[name])


def test_mistakes_are_one_message(place: Path, tmp_path: Path) -> None:
    make_folder(place / "heads", num_attention_heads=4)
    make_folder(place / "three", num_hidden_layers=3)
    for student, given, match in (
        ("heads", {}, "the student has 4 attention heads, the teacher 2"),
        ("three", {}, r"spread evenly over 3 of the student.*\n.*teacher\.stage\.layers=2,4,6"),
        ("student", {"stability": {"mixout": 0.5}}, "back to those before teacher.stage"),
        (
            "student",
            {"teacher": {"stage": {"kind": "layers", "losses": ["hidden", "hidden"]}}},
            r"teacher\.stage\.losses: .*each kind once",
        ),
        (
            "student",
            {"teacher": {"stage": {"kind": "layers", "training": {"evaluate": "1 epochs"}}}},
            r"teacher\.stage\.training\.evaluate: is about evaluations, and this stage has none",
        ),
        (
            "student",
            {"teacher": {"stage": {"kind": "layers", "training": {"recompute": True}}}},
            r"teacher\.stage\.training\.recompute: .*\n  Set training\.recompute instead",
        ),
    ):
        settings = {**QUICK, **given}
        settings["teacher"] = {"folder": str(place / "teacher"), **settings["teacher"]}
        with pytest.raises(BothwaysError, match=match):
            bothways.finetune(
                place / student, DATA, out=tmp_path / "no", progress=False, **settings
            )
        assert not (tmp_path / "no").exists()
