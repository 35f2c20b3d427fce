"""Ranks that share a model, and the ready files for clusters."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from bothways.cli import main as cli
from bothways.core.config import reader as configs
from bothways.model.families.catalogue import preset
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.forecast import memory_demand
from bothways.pretraining.recipes import modern
from bothways.training.parallel import Plan, Sharding
from bothways.training.schedules import Steps
from bothways.training.step_cost import USABLE, choose_parallelism
from heard_progress import Heard

READY = Path(__file__).parents[2] / "deploy" / "training"
SETTINGS = modern(preset("bert-tiny"))


def test_ranks_share_a_model_that_does_not_fit(monkeypatch):
    from bothways.training import step_cost as machine

    monkeypatch.setattr(machine, "all_gather", lambda plan, value: value[None])
    monkeypatch.setattr(machine.devices, "memory_available", lambda device: free)
    cpu, plan, load = torch.device("cpu"), Plan(1, 4, 1, 2), memory_demand(SETTINGS)
    needed = load.memory(cpu).total
    free = int(needed / USABLE) + 1
    assert choose_parallelism(plan, "auto", load, cpu) == plan
    free = int(needed / USABLE) - 1
    assert choose_parallelism(plan, "auto", load, cpu) == Plan(1, 4, 1, 2, Sharding())
    assert choose_parallelism(plan, None, load, cpu) == plan
    assert choose_parallelism(Plan(), Sharding(), load, cpu, heard := Heard()) == Plan()
    assert "sharding does nothing" in heard.text


def ready_commands() -> list[tuple[str, list[str]]]:
    """The words of `bothways` in each ready file, with folders in place of variables."""
    found = []
    for file in sorted(READY.iterdir()):
        text = re.sub(r"\s+#.*", "", file.read_text("utf8"))
        if file.suffix == ".sh":
            settings = re.search(r"SETTINGS=\((.*)\)", text)
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
def test_a_ready_file_gives_settings_that_there_are(name, words):
    cli.app.parse_args(words, print_error=False, exit_on_error=False)
    overrides = [word for word in words if "=" in word]
    read = configs.load(PretrainConfig, base=SETTINGS, overrides=overrides)
    assert read.training.until == Steps(100_000), name
    assert read.training.step_limit == 1800


def test_the_script_for_slurm_is_right_for_the_shell():
    subprocess.run(["bash", "-n", str(READY / "slurm.sh")], check=True)
