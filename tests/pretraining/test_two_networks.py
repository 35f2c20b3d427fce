"""Runs of a generator and a discriminator: killed and resumed, in other microbatches."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.objectives.replaced_tokens import Narrower, ReplacedTokens, Shallower
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.run import pretrain
from bothways.pretraining.run_page import read_records
from bothways.training.checkpoint import checkpoints
from bothways.training.optimizers import AdamW
from bothways.training.run import Event, Training
from bothways.training.schedules import Linear, Steps
from toy_training import exit_code

ELECTRA = ("electra-small-discriminator", ReplacedTokens(generator=Narrower(0.5)))
DEBERTA = ("deberta-v3-small", ReplacedTokens(generator=Shallower(), sharing="disentangled"))
KINDS = pytest.mark.parametrize("kind", [ELECTRA, DEBERTA], ids=["shared", "disentangled"])


def config_of(
    corpus: Corpus, kind: tuple[str, ReplacedTokens], steps: int, dropout: float = 0.1
) -> PretrainConfig:
    shape = fit_to_corpus(preset(kind[0]), corpus.tokenizer)
    assert isinstance(shape, EncoderConfig)
    small = dataclasses.replace(
        shape, width=32, depth=2, heads=2, intermediate_size=64, embedding=None,
        dropout=Dropouts(dropout, dropout),
    )  # fmt: skip
    training = Training(
        Steps(steps), AdamW(lr=3e-3), Linear(0.1), precision="fp32", save=Steps(4), report=Steps(1)
    )
    return PretrainConfig(
        small, training, kind[1], (PretrainPhase(48),), ExampleBudget(8), held_out=0.1,
        evaluation_tokens=400,
    )  # fmt: skip


def killed_at(
    corpus: Path, kind: tuple[str, ReplacedTokens], steps: int, folder: Path, step: int
) -> None:
    """A run that is killed after a step."""

    def kill(event: Event) -> None:
        if event.kind == "step" and event.progress.steps == step:
            os.kill(os.getpid(), signal.SIGKILL)

    text = Corpus.open(corpus)
    pretrain(config_of(text, kind, steps), text, folder, on_event=kill)


@KINDS
def test_killed_and_resumed_both_networks_end_with_the_same_weights(kind, corpus, tmp_path):
    config = config_of(corpus, kind, 7)
    arguments = (corpus.folder, kind, 7, tmp_path / "cut", 6)
    assert exit_code(killed_at, *arguments) == -signal.SIGKILL
    assert [path.name for path in checkpoints(tmp_path / "cut")] == ["step-4"]
    pretrain(config, corpus, tmp_path / "cut", resume=True)
    pretrain(config, corpus, tmp_path / "whole")
    for role in ("model", "generator"):
        whole, cut = (
            load_file(tmp_path / run / role / "model.safetensors") for run in ("whole", "cut")
        )
        assert whole.keys() == cut.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, cut[name]), name


def losses_of(config: PretrainConfig, corpus: Corpus, folder: Path) -> dict[str, list[float]]:
    """Both losses of a run, at every step."""
    pretrain(config, corpus, folder)
    records = read_records(folder / "metrics.jsonl")
    names = ("loss/masked", "loss/replaced")
    return {name: [each[name] for each in records if name in each] for name in names}


def test_losses_do_not_depend_on_microbatches(corpus, tmp_path):
    kind = (ELECTRA[0], dataclasses.replace(ELECTRA[1], sharing="disentangled"))
    config = config_of(corpus, kind, 14, dropout=0.0)
    parts = dataclasses.replace(config, microbatch_tokens=120)
    one, many = (
        losses_of(each, corpus, tmp_path / str(number))
        for number, each in enumerate([config, parts])
    )
    for name, values in one.items():
        assert len(values) == 14
        assert min(values) < 0.9 * values[0]
        assert many[name] == pytest.approx(values, rel=1e-5)
