"""Sequences at random that objectives prepare, and short runs on a toy corpus, also one that stops and resumes."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bothways.core.source import Sequence, rng
from bothways.data.corpus import Corpus
from bothways.data.masking import Vocabulary
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.model import Model
from bothways.objectives.objective import Objective
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.run import PretrainResult, pretrain
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Steps
from toy_pretraining import small_run
from toy_training import stop_at

SIZE = 50
VOCABULARY = Vocabulary(np.arange(SIZE) < 5, np.arange(SIZE) > 40, 4, counts=np.arange(SIZE))


def draw_sequences(
    objective: Objective,
    lengths: Iterable[int] = (9, 28, 12, 17, 31),
    vocabulary: Vocabulary = VOCABULARY,
) -> list[Sequence]:
    """Texts between 2 and 3, [CLS] and [SEP], with the objective's targets."""
    draw, result = np.random.default_rng(4), []
    for number, length in enumerate(lengths):
        inner = draw.integers(5, len(vocabulary.special), length - 2)
        text = Sequence(np.array([2, *inner, 3], np.int32), np.zeros(length, np.int8))
        result.append(objective.prepare(text, vocabulary, rng(number, "test")))
    return result


def build_module(objective: Objective, encoder: EncoderConfig) -> Any:
    """The training module of an objective, with weights at random, in evaluation mode."""
    torch.manual_seed(0)
    models = {role: Model(*spec) for role, spec in objective.models(encoder).items()}
    module = objective.training_module(models, VOCABULARY)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.eval()


def short_run(
    corpus: Corpus, objective: Objective, name: str, steps: int = 4, start: str | None = None, **shape: Any
) -> PretrainConfig:  # fmt: skip
    """Settings of a run of a small encoder, with a checkpoint at every second step."""
    sizes = {"width": 32, "depth": 2, "heads": 2, "intermediate_size": 64} | shape
    encoder = dataclasses.replace(fit_to_corpus(preset(name), corpus.tokenizer), **sizes)
    return small_run(
        corpus, Steps(steps), training={"optimizer": AdamW(lr=1e-3), "save": Steps(2)},
        encoder=encoder, objective=objective, phases=(PretrainPhase(48),), start=start,
    )  # fmt: skip


def check_resume(
    config: PretrainConfig, corpus: Corpus, folder: Path, whole: PretrainResult
) -> None:
    """A run that stops after its checkpoint at step 2, and is resumed, ends as one that never stopped."""
    with pytest.raises(InterruptedError):
        pretrain(config, corpus, folder, on_event=stop_at(2))
    resumed = pretrain(config, corpus, folder, resume=True)
    assert resumed.metrics == whole.metrics
    states = (result.training_module.state_dict() for result in (resumed, whole))
    torch.testing.assert_close(*states, rtol=0, atol=0)
