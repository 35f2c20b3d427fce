"""Fine-tuning from a model in memory: many short runs on the same examples, from pre-trained or
random weights.

`data.label` does the work that all runs share: checks, tokenizing, the order of the labels.
`fit_task` runs one start, method and seed. `bothways.finetuning.run` starts from a model folder.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch

from bothways.core.errors import ConfigError
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.finetuning.automatic import UNKNOWN, choose_automatic
from bothways.finetuning.config import USUAL, FinetuneSettings
from bothways.finetuning.data import LabelledData, check_metric, check_outputs
from bothways.finetuning.fit import FinetuneResult, fit
from bothways.finetuning.lora import add_changes
from bothways.finetuning.scaled_head import scale_outputs
from bothways.finetuning.stability import apply_stability, fresh_pooler
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.training.parallel import Single
from bothways.training.preflight.machine import compute_as
from bothways.training.run import OnEvent
from bothways.training.store import MemoryStore


def start_from(start: Model | EncoderConfig, heads: Iterable[Head], seed: int) -> Model:
    """Return a model with new heads and the encoder of `start`.

    The pooler of `start` is copied if both have one. A configuration gives random weights.
    """
    torch.manual_seed(seed)
    if not isinstance(start, Model):
        return Model(start, heads)
    model = Model(start.config, heads, copy.deepcopy(start.encoder))
    if "pooler" in model.heads and "pooler" in start.heads:
        model.heads["pooler"].load_state_dict(start.heads["pooler"].state_dict())
    return model


@own_torch_state(torch.float32)
def fit_task(
    start: Model | EncoderConfig,
    data: LabelledData,
    method: FinetuneSettings = USUAL,
    *,
    seed: int = 0,
    order_seed: int | None = None,
    device: str = "auto",
    progress: Progress = SILENT,
    on_event: OnEvent = lambda event: None,
) -> FinetuneResult:
    """Fine-tune once, in memory.

    Args:
        start: a model whose encoder and pooler are copied, or a configuration for random weights.
        seed: of the new head and all other random weights.
        order_seed: of the order of the data, dropout and mixout. None: the same as `seed`.
        on_event: called after each step, report and evaluation.

    Raises:
        BothwaysError: a loss or a gradient is not finite.
        ConfigError: `start` lacks the blocks that `stability` names, the schedule does
            not fit the run, the task does not have the metric, or early stopping has no dev data.
    """
    config, tokens = (start.config, UNKNOWN) if isinstance(start, Model) else (start, 0.0)
    method, _ = choose_automatic(method, config, data, tokens)
    check_metric(method, data)
    check_outputs(data)
    task, where = data.task, choose_device(device)
    model = start_from(start, task.heads(data.labels, method.dropout), seed)
    scale_outputs(model, task.output_scale(data.train_examples))
    _check_start(start, method)
    has_pooler = isinstance(start, Model) and "pooler" in start.heads
    fresh = () if has_pooler or "pooler" not in model.heads else ("pooler",)
    for note in fresh_pooler(fresh, "the model") if isinstance(start, Model) else ():
        progress.message(f"note: {note}")
    apply_stability(model, method.stability, seed, fresh)
    add_changes(model, method.lora, seed, method.stability.frozen)
    compute_as(model.encoder, method.training, where)
    learner = task.learner(model, data.tokenizer, data.labels, data.length).to(where)
    return fit(
        learner,
        data,
        method,
        MemoryStore(),
        plan=Single(),
        seed=seed if order_seed is None else order_seed,
        fresh=fresh,
        progress=progress,
        on_event=on_event,
    )


def _check_start(start: Model | EncoderConfig, method: FinetuneSettings) -> None:
    for name in ("reinitialise", "frozen", "mixout", "pull"):
        if not isinstance(start, Model) and getattr(method.stability, name):
            what = "needs pre-trained weights, and this run starts from random ones"
            raise ConfigError(
                what, where=f"stability.{name}", fix="Start from a model, or set it to 0."
            )
    if not isinstance(start, Model) and method.lora is not None:
        what = "keeps the encoder's weights, and those of this run are random"
        raise ConfigError(what, where="lora", fix="Start from a model, or leave it out.")
