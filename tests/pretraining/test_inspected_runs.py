"""One step of a run, done again."""

import json
import shutil
from pathlib import Path

import pytest

from bothways.cli import main as cli
from bothways.core.errors import CheckpointError, ConfigError
from bothways.data.corpus import build_corpus
from bothways.data.documents import Document
from bothways.data.loader import ExampleBudget
from bothways.model.config import Dropouts, EncoderConfig
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.inspect_step import inspect_step
from bothways.pretraining.run import pretrain
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear, Steps


@pytest.fixture(scope="module")
def settings(corpus) -> PretrainConfig:
    encoder = EncoderConfig(corpus.tokenizer.size, 32, 2, 2, 64, dropout=Dropouts(0.0, 0.0))
    training = Training(
        Steps(6), AdamW(lr=3e-3), Linear(0.1), "fp32", save=Steps(2), report=Steps(1), ema=0.9
    )
    phases = (PretrainPhase(16, 0.5), PretrainPhase(48, 0.5))
    return PretrainConfig(
        encoder,
        training,
        phases=phases,
        batch=ExampleBudget(8),
        held_out=0.1,
        evaluation_tokens=400,
    )


@pytest.fixture(scope="module")
def run(corpus, settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "run"
    pretrain(settings, corpus, folder)
    return folder


@pytest.mark.parametrize(("step", "began"), [(1, 0), (4, 0), (6, 4)])
def test_a_step_is_done_again_from_the_checkpoint_before_it(corpus, run, tmp_path, step, began):
    """The mean over its sequences is the loss in the record of the run."""
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)  # keeps step-4 and step-6
    found = inspect_step(folder, step, corpus)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    record = next(
        each for each in map(json.loads, lines) if each["step"] == step and "share" in each
    )
    assert (found.step, found.began, len(found.sequences)) == (step, began, 8)
    assert all(each.text.startswith("[CLS]") for each in found.sequences)
    assert all(each.tokens <= (16 if step <= 3 else 48) for each in found.sequences)
    pair = sum(each.losses["pair"] for each in found.sequences) / 8
    assert pair == pytest.approx(record["loss/pair"], rel=1e-5)


def test_what_cannot_be_inspected_is_refused(corpus, run, tmp_path):
    with pytest.raises(ConfigError, match=r"the run ends with step 6: there is no step 7"):
        inspect_step(run, 7, corpus)
    with pytest.raises(ConfigError, match=r"step: must be at least 1, not 0"):
        inspect_step(run, 0, corpus)
    with pytest.raises(CheckpointError, match=r"is not the folder of a pre-training run"):
        inspect_step(tmp_path, 1, corpus)
    documents = [Document("the dog sleeps. " * 3, f"other:{number}") for number in range(40)]
    other = build_corpus(documents, corpus.tokenizer, tmp_path / "other", workers=1)
    with pytest.raises(CheckpointError, match=r"was trained on another corpus"):
        inspect_step(run, 6, other)


def test_the_command_prints_a_table(corpus, run, capsys):
    words = ["inspect-step", str(run), "6", str(corpus.folder), "--device", "cpu"]
    cli.app([*words, "--json"], result_action="return_value")
    assert json.loads(capsys.readouterr().out)["began"] == 4
    cli.app(words, result_action="return_value")
    assert "Step 6: 8 sequences" in capsys.readouterr().out
