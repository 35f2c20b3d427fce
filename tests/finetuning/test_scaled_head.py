"""Scores far from 0: learned in their own units, and saved in a usual head."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import bothways
from bothways.finetuning.lora import ScaledLinear
from bothways.tasks.base import OutputScale
from bothways.tasks.regression.task import RegressionTask

WORDS = {"the": 0, "film": 0, "good": 1, "bad": -1, "fine": 1, "dull": -1, "and": 0}


def make_rows(count: int, seed: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    texts = [draw.choices(list(WORDS), k=5) for _ in range(count)]
    return [
        {"text": " ".join(text), "score": 10_000 + 3000 * sum(WORDS[word] for word in text)}
        for text in texts
    ]


@pytest.mark.parametrize("training", [False, True])
def test_the_merged_layer_computes_the_same(training):
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 1), torch.randn(5, 8)
    scaled = ScaledLinear(plain, OutputScale(1e4, 3e3)).train(training)
    assert dict(scaled.named_parameters()).keys() == {"weight", "bias"}
    expected = (x.double() @ plain.weight.double().T + plain.bias.double()) * 3e3 + 1e4
    torch.testing.assert_close(scaled(x).double(), expected, rtol=1e-6, atol=0)
    merged = scaled.merged()
    assert type(merged) is nn.Linear
    assert merged.training is training
    torch.testing.assert_close(merged(x).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 2}}], ids=["", "lora"])
def test_scores_far_from_0_are_learned_and_saved_in_a_usual_head(folder, tmp_path, settings):
    done = bothways.finetune(
        str(folder), train=make_rows(160, 0), dev=make_rows(40, 1), out=tmp_path / "run",
        task=RegressionTask(), until="40 steps", lr=1e-2, length=16, progress=False,
        **settings,
    )  # fmt: skip
    assert done.metrics["mse"] < done.baseline["mse"] / 3
    assert any("the head learns them in these units" in each.what for each in done.findings)
    texts = [str(row["text"]) for row in make_rows(6, 2)]
    own = [each.score for each in done.predictor()(texts)]
    again = bothways.load(tmp_path / "run")
    np.testing.assert_allclose([each.score for each in again(texts)], own, rtol=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    with torch.no_grad():
        theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    np.testing.assert_allclose(theirs.numpy(), own, rtol=1e-5)
