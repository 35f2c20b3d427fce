"""The heads of a model folder: those of its class, and what its file lacks of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from bothways.families.weight_names import Shape
from bothways.hub.hf_config import HFConfig
from bothways.hub.load_report import head_of, plan_loading
from bothways.model.head_config import (
    BiLMHead,
    ChoiceHead,
    Head,
    LabelHead,
    MaskedHead,
    NextTokenHead,
    PairHead,
    PoolerHead,
    ReplacedHead,
    SpanHead,
    TagHead,
)
from bothways.model.init import without_weights
from bothways.model.model import build_head, with_pooler


def heads_of(settings: HFConfig, names: Iterable[str]) -> tuple[Head, ...]:
    """The heads of a folder: those of the class that `config.json` names, else those whose tensors, of these names, it holds.

    A `classifier` of an unknown class is left out: its name does not tell what it reads.
    """
    if settings.heads is not None:
        return settings.heads
    if settings.architecture is not None:
        kinds: Collection[str | None] = settings.architecture.heads
    else:
        table = settings.keys
        rules = [table.origin(table.full_name(name)) for name in names]
        kinds = {
            head_of(rule.ours)
            for rule in rules
            if rule is not None and rule.ours not in table.shared
        }
    rate = settings.dropouts.get
    every: dict[str, Callable[[], Head]] = {
        "masked": MaskedHead,
        "pooler": PoolerHead,
        "pair": PairHead,
        "labels": lambda: LabelHead(len(settings.labels()), rate("labels")),
        "tags": lambda: TagHead(len(settings.labels()), rate("tags")),
        "span": SpanHead,
        "choice": lambda: ChoiceHead(rate("choice")),
        "replaced": ReplacedHead,
        "causal": NextTokenHead,
        "bilm": BiLMHead,
    }
    return tuple(build() for kind, build in every.items() if kind in kinds)


def faults_of(
    settings: HFConfig,
    held: Mapping[str, Shape],
    heads: Iterable[Head],
    fresh: Collection[str] = (),
) -> dict[str, str]:
    """What a file with tensors of these shapes lacks of heads, each with the pooler if it reads that; whole ones are left out.

    Returns:
        By kind of head, what is missing or of another shape.
    """
    has = None if settings.architecture is None else settings.architecture.heads
    plans = {
        head.kind: plan_loading(settings.keys, _shapes(settings, head), held, fresh, has)
        for head in heads
    }
    return {
        kind: "; ".join(plan.report.faults) for kind, plan in plans.items() if plan.report.faults
    }


def _shapes(settings: HFConfig, head: Head) -> dict[str, Shape]:
    """Those of the head's tensors, and of the pooler's if it reads that, by our names."""
    with without_weights():
        parts = {
            part.kind: build_head(settings.encoder, part)
            for part in with_pooler(settings.encoder, (head,))
        }
    states = {
        f"heads.{kind}.{name}": tensor
        for kind, part in parts.items()
        for name, tensor in part.state_dict().items()
    }
    return {name: tuple(tensor.shape) for name, tensor in states.items()}
