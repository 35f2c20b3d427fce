"""Microbatches of each step, equal for any number of ranks, and for a GPU prepared ahead.

A step depends on the source, the batch size and the cursor only. All ranks plan it, and each
builds its own share. The draws of `prepare` are keyed by the position of a sequence in its source,
so that ranks, microbatches and resumed runs get equal masks.

The user sets the size of a step for all ranks together. Sequences are sorted by length and dealt
to the ranks, so that every rank has about the same number of tokens. A token budget cuts them to
microbatches of about equal memory, and neighbours of similar length leave little padding in the
rectangles of a `Layout`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from bothways.core.batch import Batch, cut_to_predict, pack, pad_batch
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, DataError, setting
from bothways.core.runtime.process import END_SIGNALS, usable_cores
from bothways.core.source import Cursor, Sequence, Source, TrainingStep, rng

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ExampleBudget:
    """A step of `n` sequences over all ranks."""

    n: int
    kind: Literal["examples"] = "examples"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n)


@dataclass(frozen=True)
class TokenBudget:
    """A step of as many sequences as fit in `n` tokens over all ranks, specials included; at least
    one.
    """

    n: int
    kind: Literal["tokens"] = "tokens"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n)


@dataclass(frozen=True)
class TokenRamp:
    """Token budgets that grow straight from `start` to `n` while the run reads its first `over`
    tokens.

    The budget of a step depends on the tokens read before it, not on steps or time.
    """

    start: int
    n: int
    over: int
    kind: Literal["token_ramp"] = "token_ramp"

    def __post_init__(self) -> None:
        require_at_least(1, "batch", n=self.n, start=self.start, over=self.over)
        if self.n < self.start:
            message = f"{self.n:,} tokens are fewer than the {self.start:,} of the first updates"
            fix = f"Set batch.start lower; or for equal updates {setting('batch.kind', 'tokens')}."
            raise ConfigError(message, where="batch.n", fix=fix)

    def steps(self, tokens: float) -> float:
        """Return the number of steps in which a run reads `tokens`, about."""
        growth, inside = (self.n - self.start) / self.over, min(tokens, self.over)
        # The budget grows with the tokens read, so these grow exponentially with the steps.
        ramp = math.log1p(inside * growth / self.start) / growth if growth else inside / self.n
        return ramp + (tokens - inside) / self.n

    def tokens(self, steps: float) -> float:
        """Return the number of tokens that a run reads in `steps`, about."""
        growth, ramp = (self.n - self.start) / self.over, self.steps(self.over)
        if steps >= ramp:
            return self.over + (steps - ramp) * self.n
        return self.start * math.expm1(steps * growth) / growth if growth else steps * self.n


BatchSize = ExampleBudget | TokenBudget | TokenRamp


def budget_at(batch: BatchSize, tokens_read: int) -> ExampleBudget | TokenBudget:
    """Return the budget of the step that follows `tokens_read` tokens of the run."""
    if not isinstance(batch, TokenRamp):
        return batch
    grown = (batch.n - batch.start) * min(tokens_read, batch.over) // batch.over
    return TokenBudget(batch.start + grown)


def deal(lengths: Many[int], world: int, budget: int) -> list[list[list[int]]]:
    """Assign sequences to ranks and microbatches; return positions in `lengths`.

    Sequences are sorted by length, longest first, ties in the given order; rank r takes every
    world-th sequence from the r-th on. A microbatch has at most `budget` tokens, or is one longer
    sequence. All ranks have the same number of microbatches, because a sharded model works in
    lockstep; some may be empty.

        lengths = [3, 9, 5, 4], world = 2, budget = 9
        rank 0: 9, 4 → [[1], [3]]        rank 1: 5, 3 → [[2, 0], []]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    for rank, microbatches in enumerate(ranks):
        room = 0
        for index in order[rank::world]:
            room -= lengths[index]
            if not microbatches or room < 0:
                microbatches.append([])
                room = budget - lengths[index]
            microbatches[-1].append(index)
    count = max(len(microbatches) for microbatches in ranks)
    return [microbatches + [[]] * (count - len(microbatches)) for microbatches in ranks]


class ListPlan(NamedTuple):
    """The position of a sequence in the list."""

    row: int
    length: int


class ListSource:
    """Sequences in memory as an endless stream (a `core.source.Source`); an epoch is one block.

    Args:
        seed: of the order, different in each epoch; None for the order of the list.

    Raises:
        DataError: there are no sequences.
    """

    def __init__(self, sequences: Many[Sequence], seed: int | None) -> None:
        if not sequences:
            raise DataError("there are no sequences to read", fix="Give at least one example.")
        self.sequences = sequences
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch: (
                np.arange(len(sequences))
                if seed is None
                else rng(seed, "order", epoch=epoch).permutation(len(sequences))
            )
        )

    def read(self, cursor: Cursor) -> Iterator[tuple[ListPlan, Cursor]]:
        """Yield plans from `cursor` on, each with the cursor of the next.

        Raises:
            DataError: the cursor belongs to a longer list.
        """
        epoch, block, item, _ = cursor
        # A list has one block; another cursor is of other data.
        if block > 0 or item >= len(self.sequences):
            message = f"no data at block {block}, item {item} of {len(self.sequences)} sequences"
            raise DataError(message, fix="Continue with the data that the run began with.")
        while True:
            indices = self._order(epoch)
            for at, row in enumerate(indices[item:].tolist(), item + 1):
                next_cursor = Cursor(epoch, 0, at) if at < len(indices) else Cursor(epoch + 1)
                yield ListPlan(row, len(self.sequences[row])), next_cursor
            epoch, item = epoch + 1, 0

    def build(self, plan: ListPlan) -> Sequence:
        return self.sequences[plan.row]

    def key(self, cursor: Cursor) -> tuple[int, int]:
        return cursor.epoch, cursor.number

    def epochs(self, cursor: Cursor) -> float:
        return cursor.epoch + cursor.item / len(self.sequences)


PREFETCHED = 4
"""Number of items prepared ahead."""

T = TypeVar("T")
Prepare = Callable[[Sequence, np.random.Generator], Sequence]


StepPlan = tuple[list[tuple[Any, Cursor]], Cursor]
"""The plan of each sequence of a step with its position, and the cursor after the step."""


def unchanged(sequence: Sequence, rng: np.random.Generator) -> Sequence:
    """Return the sequence: what prepares data whose targets are known."""
    return sequence


@dataclass(frozen=True)
class Loader:
    """Steps from a source.

    Attributes:
        prepare: adds the targets of an objective, with a generator keyed by the sequence's
            position.
        microbatch_tokens: maximum number of tokens per forward pass, unless one sequence is longer.
        rank, world: of each step this process builds the part of rank `rank` out of `world`.
        pad: whether microbatches are padded, see `core.batch.pad_batch`.
    """

    source: Source
    prepare: Prepare
    batch: BatchSize
    microbatch_tokens: int
    seed: int
    rank: int = 0
    world: int = 1
    pad: bool = False

    def steps(self, cursor: Cursor, tokens_read: int = 0) -> Iterator[TrainingStep]:
        """Yield steps from `cursor` on, without end; a step never crosses the end of an epoch.

        Args:
            tokens_read: tokens that the run has read before, over all ranks; for a ramp of batches.
        """
        return itertools.starmap(self.build, self.planned(cursor, tokens_read))

    def planned(self, cursor: Cursor, tokens_read: int = 0) -> Iterator[StepPlan]:
        """Yield the plans of the steps from `cursor` on, for `build`."""
        group: list[tuple[Any, Cursor]] = []
        tokens = 0
        for plan, next_cursor in self.source.read(cursor):
            budget = budget_at(self.batch, tokens_read)
            is_of_examples = isinstance(budget, ExampleBudget)
            size = len(group) + 1 if is_of_examples else tokens + plan.length
            # The plan does not fit any more: it begins the next step.
            if group and size > budget.n:
                yield group, cursor
                group, tokens, tokens_read = [], 0, tokens_read + tokens
            group.append((plan, cursor))
            tokens += plan.length
            if next_cursor.epoch > cursor.epoch:
                yield group, next_cursor
                group, tokens, tokens_read = [], 0, tokens_read + tokens
            cursor = next_cursor

    def epoch(self) -> Iterator[TrainingStep]:
        """Yield the steps of one epoch, for evaluation; large steps make tight microbatches."""
        for step in self.steps(Cursor()):
            yield step
            if step.cursor.epoch:
                return

    def sequences(self, cursor: Cursor) -> Iterator[tuple[Sequence, Sequence]]:
        """Yield the sequences from `cursor` on, in the order of the data and without end: each as
        the source builds it, and with the targets of the objective.
        """
        for plan, following in self.source.read(cursor):
            yield self._sequences(plan, cursor)
            cursor = following

    def build(self, group: list[tuple[Any, Cursor]], next_cursor: Cursor) -> TrainingStep:
        """Return the step of these sequences, each planned with its position."""
        lengths = [plan.length for plan, _ in group]
        assigned = deal(lengths, self.world, self.microbatch_tokens)[self.rank]
        filler = min(range(len(group)), key=lengths.__getitem__)
        microbatches = []
        for indices in assigned:
            sequences = [self._sequences(*group[index])[1] for index in indices or [filler]]
            if not indices:  # nothing is left for this rank: targets carry no weight
                targets = sequences[0].targets.items()
                weightless = {name: target.without_weight() for name, target in targets}
                sequences = [dataclasses.replace(sequences[0], targets=weightless)]
            batch = pack(sequences)
            microbatches.append(pad_batch(batch) if self.pad else batch)
        epochs = self.source.epochs(next_cursor)
        return TrainingStep(tuple(microbatches), next_cursor, sum(lengths), len(group), epochs)

    def _sequences(self, plan: Any, position: Cursor) -> tuple[Sequence, Sequence]:
        """Return a sequence without and with its targets."""
        epoch, index = self.source.key(position)
        original = self.source.build(plan)
        draws = rng(self.seed, "prepare", epoch=epoch, index=index)
        return original, self.prepare(original, draws)


def in_batches(
    sequences: Many[Sequence], max_tokens: int, device: torch.device
) -> Iterator[tuple[list[int], Batch]]:
    """Batch sequences of similar length for predictions; yield their positions and the batch.

    Args:
        max_tokens: maximum number of tokens per batch, unless one sequence is longer.
    """
    for indices in deal([len(sequence) for sequence in sequences], 1, max_tokens)[0]:
        batch = pack([sequences[index] for index in indices], cut_to_predict(device))
        yield indices, batch.to(device)


def prefetch(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield the items, up to `depth` of them computed ahead in a thread.

    An error of `items` is raised here, at its position. The thread ends with the iterator: at its
    end, when it is closed, or when an interrupt arrives while it waits.
    """
    source, end = iter(items), object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        waiting = deque(thread.submit(next, source, end) for _ in range(depth))
        try:
            while (item := waiting.popleft().result()) is not end:
                waiting.append(thread.submit(next, source, end))
                yield item
        finally:
            for future in waiting:
                future.cancel()


WORKERS = 8
"""Processes that build the steps of a rank, at most. One masks 0.1 million tokens a second in
sentences of 16 tokens, 0.5 million in pairs of 128; an H200 reads 0.4 million of BERT-base."""


GRACE = 60
"""Seconds in which a run that was asked to end may still read steps."""


def ahead(
    loader: Loader, device: torch.device, cursor: Cursor, tokens_read: int = 0
) -> Iterable[TrainingStep]:
    """Prepare steps ahead of a GPU in pinned memory; on a CPU, alternate with the model.

    On a CPU a thread would start its own team of torch threads, which compete for the cores of the
    model: 8,800 tokens/s with a thread, 14,400 without, for a small BERT on two cores. Preparing
    the data takes 2 % of the time.

    Args:
        cursor, tokens_read: as in `Loader.steps`.
    """
    if device.type == "cpu":
        return loader.steps(cursor, tokens_read)
    # Sequences that are there already are packed in no time.
    forks = loader.prepare is not unchanged and "fork" in multiprocessing.get_all_start_methods()
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    steps = (
        by_workers(loader, min(WORKERS, max(1, cores)), cursor, tokens_read)
        if forks
        else loader.steps(cursor, tokens_read)
    )
    pinned = (
        dataclasses.replace(step, microbatches=tuple(batch.pinned() for batch in step.microbatches))
        for step in steps
    )
    return prefetch(pinned, PREFETCHED)


def by_workers(
    loader: Loader, workers: int, cursor: Cursor, tokens_read: int = 0
) -> Iterator[TrainingStep]:
    """Return the steps of a loader in their order, built by processes that are forked here.

    Each process plans all steps, which takes a tenth of the time, and builds its own.
    """
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Pickler(pickle.Pickler):
        """Tensors as arrays: torch's own form takes ten times as long."""

        def reducer_override(self, value: object) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.from_numpy, (value.numpy(),)
            return NotImplemented

    class Steps(IterableDataset[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            worker = get_worker_info()
            assert worker is not None
            planned = loader.planned(cursor, tokens_read)
            for plan in itertools.islice(planned, worker.id, None, worker.num_workers):
                step: TrainingStep | Exception
                try:
                    step = loader.build(*plan)
                except Exception as error:  # raised again by the process that reads
                    step = error
                # Through a pipe: the shared memory of a container may hold 64 MB.
                with io.BytesIO() as file:
                    Pickler(file, protocol=5).dump(step)
                    yield file.getvalue()

    def begin(number: int) -> None:
        """Leave the end of a run to the process that reads: a signal may reach all of them."""
        for end_signal in END_SIGNALS:
            signal.signal(end_signal, signal.SIG_IGN)
        # Python's own end of a program waits for those that it has asked by SIGTERM to end.
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))

    with warnings.catch_warnings():  # the processes neither start threads nor use the GPU
        warnings.simplefilter("ignore", DeprecationWarning)
        built = iter(
            DataLoader(
                Steps(),
                None,
                num_workers=workers,
                multiprocessing_context="fork",
                worker_init_fn=begin,
                # Else their seed, which nobody uses, is drawn from the run's generator.
                generator=torch.Generator(),
            )
        )
    return map(_opened, built)


def _opened(pickled: bytes) -> TrainingStep:
    step = pickle.loads(pickled)
    if isinstance(step, Exception):
        raise step
    assert isinstance(step, TrainingStep)
    return step
