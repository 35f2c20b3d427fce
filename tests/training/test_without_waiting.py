"""A step needs no value from the device, so that a GPU is never waited for, and mixes no devices.

Tensors on the meta device have shapes but no values: to read one is an error, and so is an operation
with a tensor of another device. What a step copies to the device, which may wait too, is not seen here.
"""

import itertools
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import bothways
from bothways.core.batch import Batch
from bothways.core.training_module import TrainingModule, VectorModule
from bothways.hub.model_folder import save_model
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.tasks.sentence_embedding import losses
from toy_folder import make_examples, make_folder
from toy_pretraining import small_encoder


class Found(Exception):
    """The module of a run was about to compute its first batch."""


@pytest.fixture
def first_step():
    """Return the module of a run and the first batch that it trains on."""
    found: list[tuple[TrainingModule, Batch]] = []

    def keep(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, TrainingModule) and module.training and inputs:
            found.append((module, inputs[0]))
            raise Found

    def run(train: Any, *args: Any, **settings: Any) -> tuple[TrainingModule, Batch]:
        hook = register_module_forward_pre_hook(keep)
        try:
            with pytest.raises(Found):
                train(*args, device="cpu", progress=False, **settings)
        finally:
            hook.remove()
        return found[0]

    return run


def step_on_meta(module: TrainingModule, batch: Batch) -> None:
    """Compute losses and gradients without values."""
    moved = module.to("meta")
    if isinstance(moved, VectorModule):
        totals = [*moved.compare(moved(batch.to("meta")), moved.text_values(batch)).values()]
    else:
        totals = [loss.total for loss in moved(batch.to("meta")).values()]
    torch.stack(totals).sum().backward()
    assert any(weight.grad is not None for weight in moved.parameters())


OBJECTIVES = ["masked_lm", "masked_lm_nsp", "masked_lm_sop", "replaced_tokens", "gpt_bert"]
"""All but masked_lm_sbo, which waits for the number of distinct tokens that its losses read."""


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_of_pre_training(objective, corpus, first_step):
    step_on_meta(
        *first_step(bothways.pretrain, corpus.folder, "bert-tiny", objective, until="1 steps")
    )


def test_a_step_of_left_to_right(corpus, first_step):
    shape = {"width": 32, "depth": 1, "heads": 2, "intermediate_size": 64}
    settings = {"until": "1 steps", "encoder": shape}
    step_on_meta(*first_step(bothways.pretrain, corpus.folder, "gpt2", "causal_lm", **settings))


def test_a_step_of_distillation(corpus, first_step, tmp_path):
    save_model(tmp_path / "teacher", Model(small_encoder(corpus), [MaskedHead()]), corpus.tokenizer)
    step_on_meta(
        *first_step(
            bothways.distil, tmp_path / "teacher", corpus.folder, until="1 steps",
            **{"encoder.depth": 1},
        )
    )  # fmt: skip


TEXTS = [each.text for each in make_examples(24, 1)]
PAIRS = [{"anchor": one, "positive": other} for one, other in itertools.pairwise(TEXTS)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "classify": [{"text": text, "label": len(text) % 2} for text in TEXTS],
    "regress": [{"text": text, "score": len(text) / 7} for text in TEXTS],
    "multilabel": [{"text": text, "labels": ["a", "b"][: len(text) % 3]} for text in TEXTS],
    "tag": [{"tokens": text.split(), "tags": ["O", "B-X"] * 9} for text in TEXTS],
    "answer": [
        {"question": "what", "context": text, "answers": {"text": [text[:3]], "answer_start": [0]}}
        for text in TEXTS
    ],
    "choice": [{"context": text, "endings": TEXTS[:2], "label": 1} for text in TEXTS],
    "embed": PAIRS,
}
for row in ROWS["tag"]:
    row["tags"] = row["tags"][: len(row["tokens"])]


@pytest.mark.parametrize("task", ROWS)
def test_a_step_of_fine_tuning(task, first_step, tmp_path):
    folder = make_folder(tmp_path / "bert")
    rows = ROWS[task]
    step_on_meta(*first_step(bothways.finetune, folder, rows, rows[:8], task=task))


LOSSES = {
    "softmax": losses.InBatchSoftmax(margin=0.1, directions="all"),
    "cosent": losses.CoSENT(),
    "angle": losses.AnglE(),
    "cosine": losses.CosineRegression(),
    "classes": losses.SupervisedContrastive(),
    "margin_mse": losses.MarginMSE(),
    "kl": losses.TeacherKL(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_vectors(name):
    roles = torch.tensor(
        [0, 1, 2, 0, 2, 1] if name in ("softmax", "margin_mse", "kl") else [0, 1] * 3
    )
    texts = losses.TextTargets(roles, torch.arange(6, device="meta"), torch.zeros(6, device="meta"))
    vectors = torch.zeros(6, 4, device="meta", requires_grad=True)
    LOSSES[name](vectors, texts).backward()
    assert vectors.grad is not None
