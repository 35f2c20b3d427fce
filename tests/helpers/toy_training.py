"""A small training module with two losses, its data, and what the tests run in processes of their own."""

import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bothways.core import files
from bothways.core.batch import IGNORED, Batch, LabelTargets, TokenTargets, pack
from bothways.core.errors import BothwaysError
from bothways.core.progress import SILENT, Progress
from bothways.core.source import Cursor, Sequence, TrainingStep as ToyStep, rng
from bothways.core.training_module import Loss, TrainingModule, hidden_matrices
from bothways.pretraining import run as pretraining_run
from bothways.training import parallel
from bothways.training.checkpoint import (
    Best,
    FolderStore,
    Keep,
    Store,
    checkpoints,
    read_checkpoint,
)
from bothways.training.loop import Loop, evaluate_losses, weighted_sum
from bothways.training.optimizers import (
    AdamW,
    Lamb,
    Muon,
    OptimizerConfig,
    StableAdamW,
    build_optimizer,
)
from bothways.training.parallel import full_tensor, sharded
from bothways.training.run import Event, Training, TrainingPhase, TrainingRun
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import Linear, RunState, Steps

VOCABULARY, EPOCH, WIDTH = 24, 20, 8
SINGLE = parallel.Plan()


class Toy(TrainingModule):
    """Predicts hidden tokens, and a label of each sequence that has one; the latter without counting hits."""

    hidden_matrices = {"inner.weight": 2}  # noqa: RUF012

    @property
    def gathered_apart(self) -> list[nn.Module]:
        return [self.inner]

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.labels = nn.Linear(WIDTH, 2)

    def weights(self, batch: Batch) -> dict[str, float]:
        masked, labels = batch.targets["masked"].index, batch.targets["pair"].labels
        return {"masked": float(len(masked)), "pair": float((labels != IGNORED).sum())}

    def forward(self, batch: Batch) -> dict[str, Loss]:
        hidden = self.dropout(torch.tanh(self.inner(self.norm(self.words(batch.ids)))))
        masked, labels = batch.targets["masked"], batch.targets["pair"].labels
        logits = self.decoder(hidden[masked.index])
        pooled = hidden.new_zeros(batch.layout.sequences, WIDTH).index_add(
            0, batch.layout.sequence_ids, hidden
        )
        pairs = nn.functional.cross_entropy(
            self.labels(pooled), labels, reduction="sum", ignore_index=IGNORED
        )
        tokens = nn.functional.cross_entropy(logits, masked.ids, reduction="sum")
        return {"pair": Loss(pairs), "masked": Loss(tokens, (logits.argmax(1) == masked.ids).sum())}


def toy(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Toy:
    """The same weights each time."""
    torch.manual_seed(1)
    return Toy(dropout).to(dtype)


class Taught(Toy):
    """A toy with a frozen teacher, which learns its tokens with three times the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.coefficients = {"masked": 3.0}
        self.teacher = toy(dropout=0.5)

    def frozen(self) -> tuple[str, ...]:
        return ("teacher.",)


def sequence(epoch: int, item: int) -> Sequence:
    """It hides one to three tokens; every third has no label."""
    draws = rng(3, "toy", epoch=epoch, index=item)
    ids = draws.integers(0, VOCABULARY, draws.integers(4, 10)).astype(np.int32)
    index = np.sort(draws.choice(len(ids), draws.integers(1, 4), replace=False)).astype(np.int64)
    label = np.array([IGNORED if item % 3 == 0 else int(ids[0] % 2)], np.int64)
    targets = {
        "masked": TokenTargets(index, ids[index].astype(np.int64)),
        "pair": LabelTargets(label),
    }
    return Sequence(ids, np.zeros(len(ids), np.int8), targets)


def void(one: Sequence) -> Sequence:
    return dataclasses.replace(
        one, targets={name: target.without_weight() for name, target in one.targets.items()}
    )


def check_splits(module: TrainingModule, sequences: list[Sequence], near: float = 1e-12) -> None:
    """The gradients of a step are the same in other microbatches, of which one has no weight."""

    def gradients(batches: list[Batch]) -> dict[str, Tensor]:
        module.zero_grad(set_to_none=True)
        weights = [module.weights(batch) for batch in batches]
        total = {name: sum(each[name] for each in weights) for name in weights[0]}
        for batch in batches:
            weighted_sum(module(batch), total, module.coefficients).backward()
        return {name: p.grad for name, p in module.trained_parameters() if p.grad is not None}

    empty = pack([void(sequences[0])])
    assert {*module.weights(empty).values()} == {0.0}
    parts = gradients([pack(sequences[:2]), empty, pack(sequences[2:])])
    torch.testing.assert_close(parts, gradients([pack(sequences)]), rtol=1e-9, atol=near)


def steps(
    cursor: Cursor | RunState, size: int = 5, cuts: int = 1, rank: int = 0, world: int = 1
) -> Iterator[ToyStep]:
    """Endless steps of `size` sequences; this rank has every `world`-th of them, in `cuts` microbatches of uneven size."""
    cursor = getattr(cursor, "cursor", cursor)
    while True:
        items = range(cursor.item, cursor.item + size)
        whole = [sequence(cursor.epoch, item) for item in items]
        mine = whole[rank::world]
        parts = [mine[: len(mine) // 3], mine[len(mine) // 3 :]] if cuts == 2 else [mine]
        epoch, item = divmod(cursor.epoch * EPOCH + items.stop, EPOCH)
        cursor = Cursor(epoch, 0, item)
        batches = tuple(pack(part or [void(whole[0])]) for part in parts)
        yield ToyStep(batches, cursor, sum(map(len, whole)), size, epoch + item / EPOCH)


def fit_toy(
    training_module: Toy,
    batches: Iterator[ToyStep],
    until: int,
    plan: parallel.Plan = SINGLE,
    config: OptimizerConfig = AdamW(lr=0.01),  # noqa: B008
    clip_norm: float | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Train; weights, and the first moments, which after one step are the gradients times 1 − β₁."""
    with sharded(training_module, plan):
        parameters = training_module.trained_parameters()
        optimizer = build_optimizer(config, parameters, matrices=hidden_matrices(training_module))
        tensors = RunTensors(training_module, optimizer, plan)
        loop = Loop(tensors, lambda progress: 1.0, precision="fp32", clip_norm=clip_norm)
        loop.train(batches, Steps(until), RunState())
        moments = {
            name: full_tensor(optimizer.state[parameter]["exp_avg"])
            for name, parameter in training_module.trained_parameters()
        }
    return {"weights": training_module.state_dict(), "moments": moments}


def broken_at(training_module: Toy, step: int | None) -> Toy:
    """The training module with a loss that is not a number from a forward pass on."""
    forward, count = training_module.forward, iter(range(1, 10**6))

    def broken(batch: Batch) -> dict[str, Loss]:
        losses = forward(batch)
        if step is not None and next(count) >= step:
            losses["masked"] = dataclasses.replace(
                losses["masked"], total=losses["masked"].total * float("nan")
            )
        return losses

    training_module.forward = broken
    return training_module


CONFIG = {"model": {"dropout": 0.2}, "betas": (0.9, 0.999)}
TRAINING = Training(
    until=Steps(14),
    optimizer=AdamW(lr=0.01),
    schedule=Linear(warmup=0.2),
    precision="fp32",
    report=Steps(2),
    evaluate=Steps(4),
    save=Steps(3),
    keep=Keep(last=2, best=Best("heldout/loss", "lowest")),
)


WHOLE = (Lamb(lr=0.01), StableAdamW(lr=0.01), Muon(lr=0.01))
"""The optimizers whose update depends on whole matrices."""
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
"""An optimizer of torch's own."""
FITS: dict[str, tuple[int, OptimizerConfig, int]] = {
    **{f"{size} sequences": (size, AdamW(lr=0.01), 3) for size in (6, 7, 1)},
    **{f"gradients of {size} sequences": (size, AdamW(lr=0.01), 1) for size in (6, 7, 1)},
    **{config.kind: (7, config, 3) for config in WHOLE},
}
"""The sequences of each step, the optimizer and the steps of what two ranks do."""


def run_toy(
    store: Store | Path,
    training: Training = TRAINING,
    training_module: Toy | None = None,
    *,
    plan: parallel.Plan = SINGLE,
    phases: list[TrainingPhase] | None = None,
    **options: Any,
) -> RunState:
    """Train a toy on endless steps, or on those of `phases`; a folder has no settings."""
    store = FolderStore(store, {}) if isinstance(store, Path) else store
    phases = phases or [TrainingPhase(training.end, steps)]
    run = TrainingRun(training_module or toy(), phases, training, plan, store, **options)
    return run.train()


def session(
    folder: Path,
    signal_at: int | None = None,
    number: int = signal.SIGTERM,
    plan: parallel.Plan = SINGLE,
    training: Training = TRAINING,
    progress: Progress = SILENT,
) -> RunState:
    """Train a toy with dropout over two phases in this folder, from where it stands; a signal comes while a step is made."""
    torch.manual_seed(1)
    training_module = Toy(dropout=0.2)
    torch.manual_seed(plan.rank)

    def data(size: int, offset: int, state: RunState) -> Iterator[ToyStep]:
        cursor, first = state.cursor, state.ends[-1].epoch if state.ends else 0
        done = offset + ((cursor.epoch - first) * EPOCH + cursor.item) // size
        for place, step in enumerate(steps(cursor, size, 2, plan.rank, plan.world), done):
            if place == signal_at:
                os.kill(os.getpid(), number)
            yield step

    def heldout(progress: Progress) -> dict[str, float]:
        step = next(steps(Cursor(9), 4, 1, plan.rank, plan.world))
        scores = evaluate_losses(training_module, [step], plan)
        return {"heldout/loss": scores.losses["masked"]}

    phases = [
        TrainingPhase(Steps(8), functools.partial(data, 5, 0)),
        TrainingPhase(Steps(14), functools.partial(data, 4, 8)),
    ]
    store, options = FolderStore(folder, CONFIG), {"evaluation": heldout, "progress": progress}
    try:
        state = run_toy(store, training, training_module, plan=plan, phases=phases, **options)
    except KeyboardInterrupt:
        return read_checkpoint(checkpoints(folder)[-1]).progress
    if state.steps == 14 and plan.rank == 0:
        torch.save(training_module.state_dict(), folder / "final.pt")
    return state


def killed_in_save(folder: Path, flush: int) -> None:
    """A session that is killed when a file is flushed for the n-th time: in the middle of a checkpoint."""
    count, real = iter(range(1, 10**6)), files._flush

    def flush_or_die(path: Path) -> None:
        if next(count) == flush:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path)

    files._flush = flush_or_die
    session(folder)


def enter_ranks(rank: int, world: int, port: int) -> None:
    """Set what torchrun sets, on one machine."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    # Drawing charts takes longer than these runs.
    pretraining_run.write_run_page = lambda file, *_: file.touch()


def on_ranks(
    world: int, work: Callable[..., object], *arguments: object, port: int = 0, code: int = 0
) -> None:
    """Run `work(rank, world, port, *arguments)` in a process for each rank; all end with `code`."""
    port = port or free_port()
    ranks = [
        processes().Process(target=work, args=(rank, world, port, *arguments))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        rank.kill()  # what waits for a rank that has failed
    assert [rank.exitcode for rank in ranks] == [code] * world


def rank_main(rank: int, world: int, port: int, folder: Path) -> None:
    """What rank 0 or 1 of two does; what it found is written to the folder."""
    enter_ranks(rank, world, port)
    plan = parallel.plan_here()
    with parallel.connected(plan, torch.device("cpu")):
        found = _collective(plan) | _sessions(plan, folder)
    torch.save(found, folder / f"rank{rank}.pt")


def _collective(plan: parallel.Plan) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (size, config, count) in FITS.items():
        # Two microbatches on rank 0, one on rank 1.
        mine = steps(Cursor(), size, 2 - plan.rank, plan.rank, 2)
        found[name] = fit_toy(toy(dtype=torch.float64), mine, count, plan, config)
    step = next(steps(Cursor(), 7, 2, plan.rank, 2))
    scores = evaluate_losses(toy(dtype=torch.float64), [step], plan, precision="fp32")
    found["scores"] = dataclasses.asdict(scores)
    # In another order on each rank.
    found["total"] = parallel.sum_over_ranks(
        plan, {"b": float(plan.rank), "a": 10.0} if plan.rank else {"a": 10.0, "b": 0.0}
    )
    try:
        broken = broken_at(toy(), 3 if plan.rank == 1 else None)
        fit_toy(broken, steps(Cursor(), 6, 1, plan.rank, 2), 6, plan)
    except BothwaysError as error:
        found["error"] = str(error)
    return found


def _sessions(plan: parallel.Plan, folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, signal_at in (("whole", None), ("stopped", 5 if plan.rank == 1 else None)):
        (folder / name).mkdir(exist_ok=True)
        start = time.perf_counter()
        progress = session(folder / name, signal_at, plan=plan)
        found[name] = progress.steps
        found[f"{name} seconds"] = progress.seconds, time.perf_counter() - start
    torch.distributed.barrier()
    if plan.rank == 0:
        shutil.copytree(folder / "stopped", folder / "alone")
    torch.distributed.barrier()
    found["resumed"] = session(folder / "stopped", plan=plan).steps
    return found


def exit_code(work: Callable[..., object], *arguments: object) -> int | None:
    """The exit status of `work(*arguments)` in a process that begins with torch imported."""
    process = processes().Process(target=work, args=arguments)
    process.start()
    process.join(120)
    process.kill()
    return process.exitcode


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@functools.cache
def processes() -> ForkServerContext:
    """Processes that begin with torch imported, and nothing else of this one."""
    # The server that they are forked from takes its path from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    context = multiprocessing.get_context("forkserver")
    # What is imported late is imported once, too; this module is the last: see its end.
    late = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")
    late = ("bothways.cli.main", "bothways.finetuning.run", "bothways.pretraining.run", *late)
    record_writer = "tensorboard.summary.writer.record_writer"
    context.set_forkserver_preload(["pytest", *late, record_writer, "toy_text", "toy_training"])
    return context


Tensors = nn.Module | Mapping[str, Tensor]


def equal(first: Tensors, second: Tensors) -> bool:
    """Whether two modules, or two tables, have the same tensors by name, to the bit."""
    one, other = (x.state_dict() if isinstance(x, nn.Module) else x for x in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def stop_at(step: int, kind: str = "checkpoint") -> Callable[[Event], None]:
    """A listener that ends a run by InterruptedError, after its checkpoint or event of a step."""

    def stop(event: Event) -> None:
        if event.kind == kind and event.progress.steps == step:
            raise InterruptedError

    return stop


def signal_at(step: int, number: int = signal.SIGINT) -> Callable[[Event], None]:
    """A listener that sends this process a signal after a step."""

    def send(event: Event) -> None:
        if event.kind == "step" and event.progress.steps == step:
            signal.raise_signal(number)

    return send


def metric_lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Each rank collects garbage at its end, which would take a second for what has been preloaded.
gc.freeze()
