"""A run goes on with other numbers of ranks and other plans: the same data, the same weights."""

import dataclasses
import hashlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bothways.core.batch import Batch, TokenTargets
from bothways.core.source import TrainingStep
from bothways.data.corpus import Corpus
from bothways.data.loader import Loader
from bothways.hub.model_folder import save_model
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.objectives.distillation import Distillation
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import Narrower, ReplacedTokens, Shallower
from bothways.pretraining import run as pretraining_run
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.run import pretrain
from bothways.training import saved_state
from bothways.training.checkpoint import checkpoints
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Sharding
from bothways.training.run import Event
from bothways.training.schedules import Steps
from bothways.training.trackers import read_records
from toy_pretraining import small_run
from toy_training import enter_ranks, equal, on_ranks, stop_at

LENGTH, ELECTRA = 8, "electra-small-discriminator"
Stage = tuple[int, Sharding | None, int]
"""The ranks of a session, how they hold the model, and the step at which it is stopped."""
LAST: Stage = (1, None, LENGTH)
STAGES: dict[str, tuple[Stage, ...]] = {
    "two networks": ((4, Sharding(over="machine"), 2), (2, None, 4), (3, Sharding(), 6), LAST),
    "teacher": ((2, Sharding(), 6), LAST),
}


def shape_of(corpus: Corpus, name: str, dropout: float = 0.0) -> EncoderConfig:
    shape = fit_to_corpus(preset(name), corpus.tokenizer)
    return dataclasses.replace(
        shape, width=32, depth=2, heads=2, intermediate_size=64, embedding=None,
        dropout=Dropouts(dropout, dropout),
    )  # fmt: skip


def config_of(
    corpus: Corpus,
    objective: Objective,
    steps: int = LENGTH,
    name: str = ELECTRA,
    dropout: float = 0.0,
    **settings: Any,
) -> PretrainConfig:
    """A run whose sessions save every second step and record every step."""
    return small_run(
        corpus, Steps(steps),
        training={"optimizer": AdamW(lr=3e-3), "save": Steps(2), "report": Steps(1)},
        encoder=shape_of(corpus, name, dropout), objective=objective, phases=(PretrainPhase(48),),
        **settings,
    )  # fmt: skip


def read_by(batches: tuple[Batch, ...]) -> list[str]:
    """A digest of each sequence: its ids, its hidden tokens, their places; none where all is void."""
    found = []
    for batch in batches:
        if not len(batch.target("masked", TokenTargets).ids):
            continue
        ends, targets = batch.layout.cu_seqlens.tolist(), batch.target("masked", TokenTargets)
        index = torch.as_tensor(targets.index)
        for start, end in itertools.pairwise(ends):
            mine = (index >= start) & (index < end)
            parts = batch.ids[start:end], index[mine] - start, torch.as_tensor(targets.ids)[mine]
            text = ";".join(str(part.tolist()) for part in parts)
            found.append(hashlib.sha256(text.encode()).hexdigest())
    return found


Read = dict[Any, list[str]]
"""By the cursor after an update: digests of what one rank read for it, in order."""


def train(
    config: PretrainConfig, corpus: Corpus, folder: Path, stop: int, rank: int = 0
) -> tuple[dict[str, torch.Tensor], Read]:
    """Train up to a step; return the weights, if it is the last one, and what was read."""
    read: Read = {}
    make = Loader.build

    def noted(self: Loader, *arguments: Any) -> TrainingStep:
        step = make(self, *arguments)
        if self.batch == config.batch:  # not an evaluation
            read[step.cursor] = read_by(step.microbatches)
        return step

    def interrupt(event: Event) -> None:
        # The last rank, so that the others learn of it.
        if event.kind == "step" and event.progress.steps == stop < LENGTH and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "build", noted)
        patch.setattr(pretraining_run, "can_write", lambda *_: False)  # no page
        try:
            done = pretrain(config, corpus, folder, resume=True, on_event=interrupt)
        except KeyboardInterrupt:
            assert checkpoints(folder)[-1].name == f"step-{stop}"
            return {}, read
    assert done.progress.steps == stop == LENGTH
    return done.training_module.trained_state(), read


SHARED = ReplacedTokens(generator=Narrower(0.5))


def objective_of(kind: str, teacher: str) -> Objective:
    return Distillation(teacher) if kind == "teacher" else SHARED


def session(
    rank: int,
    world: int,
    port: int,
    folder: Path,
    place: Path,
    kind: str,
    number: int,
    teacher: str,
) -> None:
    """One rank of a session."""
    enter_ranks(rank, world, port)
    saved_state.WHOLE_BYTES = 0
    torch.set_default_dtype(torch.float64)
    corpus, (_, sharding, stop) = Corpus.open(place), STAGES[kind][number]
    objective = objective_of(kind, teacher)
    config = config_of(corpus, objective, microbatch_tokens=130, sharding=sharding)
    weights, read = train(config, corpus, folder, stop, rank)
    torch.save({"weights": weights, "read": [*read.items()]}, folder / f"{number}-{rank}.found")


def merged(folder: Path, stages: tuple[Stage, ...]) -> Read:
    """What all ranks of all sessions read; where two sessions read the same, it must be equal."""
    result: Read = {}
    for number, (world, _, _) in enumerate(stages):
        parts = [
            dict(torch.load(folder / f"{number}-{rank}.found", weights_only=False)["read"])
            for rank in range(world)
        ]
        for cursor in parts[0]:
            mine = [part[cursor] for part in parts]
            # Sequences are dealt like cards, the longest first.
            turns = itertools.zip_longest(*mine)
            dealt = [digest for turn in turns for digest in turn if digest is not None]
            assert result.setdefault(cursor, dealt) == dealt
    return result


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory) -> str:
    torch.manual_seed(3)
    shape = shape_of(corpus, ELECTRA)
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save_model(folder, Model(shape, (MaskedHead(),)), corpus.tokenizer)
    return str(folder)


@pytest.mark.parametrize("kind", ["teacher", pytest.param("two networks", marks=pytest.mark.slow)])
def test_a_run_by_changing_ranks_does_what_one_rank_does(corpus, tmp_path, kind, teacher):
    """Sharded within a machine, replicated, sharded over all, alone; in float64."""
    folder, stages = tmp_path / "run", STAGES[kind]
    for number, (world, _, _) in enumerate(stages):
        on_ranks(world, session, folder, corpus.folder, kind, number, teacher)
    torch.set_default_dtype(torch.float64)
    try:
        objective = objective_of(kind, teacher)
        config = config_of(corpus, objective, microbatch_tokens=130, sharding=None)
        weights, read = train(config, corpus, tmp_path / "alone", LENGTH)
    finally:
        torch.set_default_dtype(torch.float32)
    assert merged(folder, stages) == read
    kinds = [(path / "shards").exists() for path in checkpoints(folder)]
    assert kinds == [True, False]  # of several ranks, of one
    last = torch.load(folder / f"{len(stages) - 1}-0.found", weights_only=False)["weights"]
    assert last.keys() == weights.keys()
    torch.testing.assert_close(last, weights, rtol=1e-7, atol=1e-9)


APART = ReplacedTokens(generator=Shallower(), sharing="disentangled")


@pytest.mark.parametrize(("name", "objective"), [(ELECTRA, SHARED), ("deberta-v3-small", APART)])
def test_stopped_and_resumed_both_networks_end_with_the_same_weights(
    name, objective, corpus, tmp_path
):
    config = config_of(corpus, objective, 7, name, dropout=0.1)
    with pytest.raises(InterruptedError):
        pretrain(config, corpus, tmp_path / "cut", on_event=stop_at(6, "step"))
    assert checkpoints(tmp_path / "cut")[-1].name == "step-4"
    pretrain(config, corpus, tmp_path / "cut", resume=True)
    pretrain(config, corpus, tmp_path / "whole")
    for role in ("model", "generator"):
        file = Path(role, "model.safetensors")
        assert equal(*(load_file(tmp_path / run / file) for run in ("whole", "cut")))


def losses_of(config: PretrainConfig, corpus: Corpus, folder: Path) -> dict[str, list[float]]:
    """Both losses of a run, at every step."""
    pretrain(config, corpus, folder)
    records = read_records(folder / "metrics.jsonl")
    names = ("loss/masked", "loss/replaced")
    return {name: [each[name] for each in records if name in each] for name in names}


def test_losses_do_not_depend_on_microbatches(corpus, tmp_path):
    config = config_of(corpus, dataclasses.replace(SHARED, sharing="disentangled"), 14)
    parts = dataclasses.replace(config, microbatch_tokens=120)
    one, many = (
        losses_of(each, corpus, tmp_path / str(number))
        for number, each in enumerate([config, parts])
    )
    for name, values in one.items():
        assert len(values) == 14
        assert min(values) < 0.9 * values[0]
        assert many[name] == pytest.approx(values, rel=1e-5)
