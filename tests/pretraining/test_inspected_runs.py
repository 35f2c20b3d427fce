"""One step again, several runs on a page, and the ready files for clusters."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bothways.cli import main as cli
from bothways.core.config import reader as configs
from bothways.core.errors import CheckpointError, ConfigError
from bothways.data.batching import ExampleBudget
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.documents import Document
from bothways.model.config import Dropouts, EncoderConfig
from bothways.pretraining.build import memory_demand
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.inspect_step import inspect_step
from bothways.pretraining.run import pretrain
from bothways.pretraining.run_page import differences
from bothways.training.durations import Steps
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Replicated, Sharded, Sharding, Single
from bothways.training.preflight.machine import choose_parallelism
from bothways.training.preflight.memory import USABLE
from bothways.training.run import Training
from bothways.training.schedules import Linear

READY = Path(__file__).parents[2] / "deploy" / "training"


@pytest.fixture(scope="module")
def settings(corpus: Corpus) -> PretrainConfig:
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
def run(corpus: Corpus, settings: PretrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected") / "run"
    pretrain(settings, corpus, folder)
    return folder


@pytest.mark.parametrize(("step", "began"), [(1, 0), (4, 0), (6, 4)])
def test_a_step_is_done_again_from_the_checkpoint_before_it(
    corpus: Corpus, run: Path, tmp_path: Path, step: int, began: int
) -> None:
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


def test_what_cannot_be_inspected_is_refused(corpus: Corpus, run: Path, tmp_path: Path) -> None:
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


def test_the_commands_print_a_table_and_write_a_page(
    corpus: Corpus, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect-step", str(run), "6", str(corpus.folder), "--device", "cpu"]
    cli.app([*words, "--json"], result_action="return_value")
    assert json.loads(capsys.readouterr().out)["began"] == 4
    cli.app(words, result_action="return_value")
    assert "Step 6: 8 sequences" in capsys.readouterr().out
    other = tmp_path / "other" / "run"
    shutil.copytree(run, other)
    text = (other / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace("lr = 0.003", "lr = 0.001"))
    page = tmp_path / "runs.html"
    words = ["compare-runs", str(run), str(other), "--out", str(page)]
    cli.app(words, result_action="return_value")
    html = page.read_text("utf8")
    assert "training.optimizer.lr" in html
    assert "other/run" in html
    assert "Settings that differ" in html
    with (other / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: is not UTF-8"):
        cli.app(["compare-runs", str(run), str(other), "--out", str(page)])
    with pytest.raises(CheckpointError, match=r"has no metrics.jsonl"):
        cli.app(["compare-runs", str(run), str(tmp_path), "--out", str(page)])
    with pytest.raises(ConfigError, match=r"two runs or more can be compared, not 1"):
        cli.app(["compare-runs", str(run), "--out", str(page)])


def test_only_settings_that_differ_are_shown() -> None:
    found = differences({"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3, "z": 4}})
    assert found == [["y", "2", "3"], ["z", "–", "4"]]


def test_ranks_share_a_model_that_does_not_fit(
    settings: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bothways.training.preflight import machine

    monkeypatch.setattr(machine, "all_gather", lambda plan, value: value[None])
    monkeypatch.setattr(machine, "memory_available", lambda device: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cpu, plan, load = torch.device("cpu"), Replicated(1, 4, 1), memory_demand(settings)
    needed = load.memory(cpu, "replicated", 4).total
    free = int(needed / USABLE) + 1
    assert choose_parallelism(plan, "auto", load, cpu) == plan
    free = int(needed / USABLE) - 1
    assert choose_parallelism(plan, "auto", load, cpu) == Sharded(1, 4, 1, 2, Sharding())
    assert choose_parallelism(plan, None, load, cpu) == plan
    assert choose_parallelism(Single(), Sharding(), load, cpu) == Single()


def ready_commands() -> list[tuple[str, list[str]]]:
    """The words of `bothways` in each ready file, with folders in place of variables."""
    found = []
    for file in sorted(READY.iterdir()):
        text = re.sub(r"\s+#.*", "", file.read_text("utf8"))
        if file.suffix == ".sh":
            settings = re.search(r"SETTINGS=\((.*)\)", text)
            assert settings is not None
            words = ["pretrain", "corpus", "--out", "out", "--resume", *shlex.split(settings[1])]
        elif "- pretrain" in text:
            after = text[text.index("- pretrain") :].splitlines()
            lines = [line.strip() for line in after]
            end = next(place for place, line in enumerate(lines) if not line.startswith("- "))
            words = [line.removeprefix("- ") for line in lines[:end]]
        else:
            after = text[text.index("-m bothways") + len("-m bothways") :].replace("\\\n", " ")
            words = shlex.split(after)
        found.append((file.name, words))
    return found


@pytest.mark.parametrize(("name", "words"), ready_commands(), ids=lambda each: str(each)[:20])
def test_a_ready_file_gives_settings_that_there_are(
    name: str, words: list[str], settings: PretrainConfig
) -> None:
    cli.app.parse_args(words, print_error=False, exit_on_error=False)
    read = configs.load(
        PretrainConfig, base=settings, overrides=[word for word in words if "=" in word]
    )
    assert read.training.until == Steps(100_000), name
    assert read.training.step_limit == 1800


def test_the_script_for_slurm_is_right_for_the_shell() -> None:
    subprocess.run(["bash", "-n", str(READY / "slurm.sh")], check=True)
