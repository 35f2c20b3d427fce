"""`training.recompute` reaches the encoder in every kind of run, and its weights are bit for bit those without it."""

import dataclasses

import pytest

from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import label
from bothways.model import model as module
from bothways.model.config import Dropouts, EncoderConfig
from bothways.pretraining.run import pretrain
from bothways.tasks.classification.task import ClassificationTask
from bothways.training.schedules import Epochs, Steps
from toy_folder import make_examples, make_tokenizer
from toy_pretraining import small_encoder, small_run
from toy_task import fit_task
from toy_training import equal


@pytest.fixture
def recomputed(monkeypatch) -> list[object]:
    """The blocks that were checkpointed."""
    noted: list[object] = []
    usual = module.checkpoint

    def note(block: object, *given: object, **settings: object) -> object:
        noted.append(block)
        return usual(block, *given, **settings)

    monkeypatch.setattr(module, "checkpoint", note)
    return noted


def test_pre_training(corpus, tmp_path, recomputed):
    found = []
    for recompute in (False, True):
        encoder, training = small_encoder(corpus, 3, 0.2), {"recompute": recompute}
        settings = small_run(corpus, Steps(3), encoder=encoder, training=training)
        done = pretrain(settings, corpus, tmp_path / str(recompute))
        found.append(done.training_module)
        assert len(recomputed) == (6 if recompute else 0)
    assert equal(*found)


def test_fine_tuning_in_memory(tmp_path, recomputed):
    tokenizer, found = make_tokenizer(tmp_path), []
    data = label(ClassificationTask(), tokenizer, make_examples(32, 0), make_examples(8, 1), 16)
    for recompute in (False, True):
        changes = {"until": Epochs(2.0), "precision": "fp32", "recompute": recompute}
        training = dataclasses.replace(finetune_adam(), **changes)
        start = EncoderConfig(tokenizer.size, 32, 2, 2, 64, dropout=Dropouts(0.2, 0.2))
        done = fit_task(start, data, FinetuneConfig(training, 16), device="cpu")
        found.append(done.task_model)
        assert bool(recomputed) == recompute
    assert equal(*found)
