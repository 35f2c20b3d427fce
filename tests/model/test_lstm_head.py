"""A BiLSTM between the encoder and the labels: torch's own LSTM sequence by sequence, and a run from start to prediction."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import bothways
from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.layout import Layout
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.run import finetune
from bothways.model.attention.patterns import Causal
from bothways.model.config import EncoderConfig
from bothways.model.flops import forward_flops
from bothways.model.heads import LabelHead
from bothways.model.model import Model
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.regression.task import RegressionTask
from small_models import SMALL
from toy_folder import make_examples, make_folder, write_tsv

LENGTHS = [7, 1, 12, 3]
CAUSAL = dataclasses.replace(SMALL, patterns=(Causal(),))


@pytest.mark.parametrize("config", [SMALL, CAUSAL])
def test_it_is_torchs_lstm_on_each_sequence(config: EncoderConfig) -> None:
    torch.manual_seed(0)
    model = Model(config, (LabelHead(3, 0.0, lstm=5),)).double().eval()
    assert set(model.heads) == {"labels"}, "there is no pooler"
    layout = Layout.of(LENGTHS)
    ids = torch.randint(4, 50, (layout.tokens,))
    batch = Batch(ids, torch.zeros_like(ids), layout)
    found = model.read("labels", batch)
    head, vectors = model.heads["labels"], model.encoder(batch).last
    expected = []
    for part in vectors.split(LENGTHS):
        outputs, _ = head.lstm.lstm(part)
        expected.append(head.dense(torch.cat([outputs[-1, :5], outputs[0, 5:]])))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)
    model.train()
    model.read("labels", batch).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_a_causal_model_sees_both_sides_through_it() -> None:
    """Without it the vector of the first token knows nothing of the others."""
    torch.manual_seed(1)
    model = Model(CAUSAL, (LabelHead(2, 0.0, lstm=4),)).eval()
    layout, head = Layout.of([6]), model.heads["labels"]
    ids = torch.arange(10, 16)
    changed = ids.clone()
    changed[-1] = 20
    back = [
        head.lstm(model.encoder(Batch(each, torch.zeros_like(each), layout)).last, layout)[0, 4:]
        for each in (ids, changed)
    ]
    assert not torch.allclose(*back)


@pytest.mark.parametrize("task", [ClassificationTask(lstm=6), RegressionTask(lstm=6)])
def test_it_is_fine_tuned_saved_and_loaded(task: object, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "base")
    examples = make_examples(24, 0)
    if isinstance(task, RegressionTask):
        examples = [dataclasses.replace(each, label=str(len(each.text) % 5)) for each in examples]
    file = write_tsv(tmp_path / "train.tsv", examples)
    settings = FinetuneConfig(model=str(folder), train=str(file), dev=str(file), task=task)  # type: ignore[arg-type]
    done = finetune(settings, tmp_path / "run", device="cpu")
    assert done.finished
    predict = bothways.load(tmp_path / "run", device="cpu")
    assert predict.task_model.model.specification == (
        LabelHead(2 if isinstance(task, ClassificationTask) else 1, lstm=6),
    )
    values = predict.evaluate(str(file))
    assert values[task.metric] == pytest.approx(done.metrics[task.metric], abs=1e-4)


def test_its_operations_are_counted() -> None:
    plain, deep = (forward_flops(SMALL, (LabelHead(2, lstm=units),), 20) for units in (0, 8))
    of_lstm = 2 * 2 * (4 * 8 * (16 + 8) + 4 * 8 * (16 + 8))
    tail = 2 * (16 * 16 + 2 * 16 * 24) * (1 - 1 / 20)  # the last block is computed for all tokens
    pooler = 2 * 16 * (16 + 2) / 20
    assert deep - plain == pytest.approx(of_lstm + 2 * 16 * 2 / 20 + tail - pooler)


def test_a_negative_size_is_refused() -> None:
    for make in (lambda: LabelHead(2, lstm=-1), lambda: ClassificationTask(lstm=-1)):
        with pytest.raises(ConfigError, match="at least 0"):
            make()
