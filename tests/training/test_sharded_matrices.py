"""Runs whose ranks change, with whole models or a part of one each, must do what one process does.

Each run is of real networks whose matrices do not end where ranks do: sharded on two ranks from
step 0, replicated from step 2, sharded from step 4, alone from step 6; with clipping, decay, an
average of the weights and an evaluation of it after each step.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bothways.core.batch import pack
from bothways.core.source import Cursor, Sequence, rng
from bothways.core.training_module import TrainingModule
from bothways.data.masking import Masking, Vocabulary
from bothways.model.config import Dropouts, EncoderConfig, Sharing
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.objectives.masked_lm import MaskedLM, MaskedObjective
from bothways.objectives.replaced_tokens import Narrower, ReplacedTokens
from bothways.training import parallel, saved_state
from bothways.training.checkpoint import FolderStore, Keep, checkpoints
from bothways.training.loop import evaluate_losses
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Plan, Sharding
from bothways.training.run import Event, Training, TrainingPhase, TrainingRun
from bothways.training.schedules import Constant, Steps
from toy_training import SINGLE, ToyStep, enter_ranks, on_ranks

WORDS, END = 29, 8
VOCABULARY = Vocabulary(np.arange(WORDS) < 3, np.zeros(WORDS, bool), 1)
CASES: dict[str, tuple[MaskedObjective, Sharing | None]] = {
    "z-loss": (MaskedLM(masking=Masking(0.3), z_loss=0.1), None),
    "one block for all layers": (
        ReplacedTokens(masking=Masking(0.3), generator=Narrower(0.5)),
        Sharing(),
    ),
}
"""The objective of a run, and how its layers share a block."""


def build_training_module(case: str) -> TrainingModule:
    """30 rows of three stacked matrices, 29 rows of words, 7 or 14 inside the feed-forward layer."""
    objective, sharing = CASES[case]
    encoder = EncoderConfig(
        WORDS, 10, 2, 2, 7, position=Learned(16), dropout=Dropouts(0.0, 0.0), initial_range=0.3,
        embedding=6, sharing=sharing,
    )  # fmt: skip
    torch.manual_seed(2)
    models = {name: Model(*spec) for name, spec in objective.models(encoder).items()}
    return objective.training_module(models, VOCABULARY).double()


def steps(objective: MaskedObjective, plan: Plan, cursor: Cursor) -> Iterator[ToyStep]:
    """Seven sequences in each step, of which this rank has every second if there are two."""
    while True:
        items = range(cursor.item, cursor.item + 7)
        cursor = Cursor(0, 0, items.stop)
        drawn = [(rng(3, "matrices", index=item), item) for item in items]
        whole = [
            objective.prepare(
                Sequence(draw.integers(3, WORDS, 6 + item % 5, np.int32), np.zeros(6 + item % 5, np.int8)),
                VOCABULARY, draw,
            )
            for draw, item in drawn
        ]  # fmt: skip
        mine = whole[plan.rank :: plan.world]
        batches = pack(mine[:1]), pack(mine[1:])
        yield ToyStep(batches, cursor, sum(map(len, whole)), 7, items.stop / 100)


def session(case: str, folder: Path, until: int, plan: Plan = SINGLE) -> list[float]:
    """Train up to a step from where the folder stands; return the norms and what was evaluated."""
    training_module, found = build_training_module(case), list[float]()
    objective, _ = CASES[case]

    def heldout(progress: object) -> dict[str, float]:
        batch = next(steps(objective, plan, Cursor(0, 0, 1000)))
        losses = evaluate_losses(training_module, [batch], plan, precision="fp32").losses
        found.extend(losses.values())
        return {"heldout": sum(losses.values())}

    def note(event: Event) -> None:
        if event.kind == "report":
            found.append(event.values["gradient_norm"])

    training = Training(
        Steps(until), AdamW(lr=0.01), Constant(), precision="fp32", clip_norm=0.5, ema=0.7,
        report=Steps(1), evaluate=Steps(1), keep=Keep(last=9),
    )  # fmt: skip
    phase = TrainingPhase(Steps(until), lambda state: steps(objective, plan, state.cursor))
    folder.mkdir(parents=True, exist_ok=True)
    TrainingRun(
        training_module, [phase], training, plan, FolderStore(folder, {}),
        evaluation=heldout, on_event=note,
    ).train()  # fmt: skip
    return found


def work(rank: int, world: int, port: int, case: str, folder: Path) -> None:
    """One of two ranks: three sessions of a run."""
    enter_ranks(rank, world, port)
    saved_state.WHOLE_BYTES = 0
    replicated = parallel.plan_here()
    plans = (
        replace(replicated, sharding=Sharding()),
        replicated,
        replace(replicated, sharding=Sharding(reshard_after_forward=False)),
    )
    with parallel.connected(replicated, torch.device("cpu")):
        found = [
            value
            for number, plan in enumerate(plans, 1)
            for value in session(case, folder, 2 * number, plan)
        ]
    torch.save(found, folder / f"rank{rank}.pt")


@pytest.mark.parametrize("case", CASES)
def test_a_run_by_changing_ranks_is_that_of_one_process(case, tmp_path):
    folder, alone = tmp_path / "ranks", tmp_path / "alone"
    folder.mkdir()
    on_ranks(2, work, case, folder)
    first, second = (torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    expected = session(case, alone, END)
    assert first == second
    found = first + session(case, folder, END)
    assert found == pytest.approx(expected, rel=1e-9)
    assert [(place / "shards").exists() for place in checkpoints(folder)] == [
        True, False, True, False,
    ]  # fmt: skip
    last = checkpoints(alone)[-1].name
    for file, read in (("model.safetensors", load_file), ("state.pt", _moments)):
        ours, expected = (read(place / last / file) for place in (folder, alone))
        assert ours.keys() == expected.keys()
        for key, tensor in expected.items():
            # torch restores counts of steps as float32.
            found = ours[key].to(tensor.dtype)
            torch.testing.assert_close(found, tensor, rtol=1e-8, atol=1e-10)


def _moments(file: Path) -> dict[Any, torch.Tensor]:
    state = torch.load(file, weights_only=True)["optimizer"]["state"]
    return {(i, name): value for i, values in state.items() for name, value in values.items()}
