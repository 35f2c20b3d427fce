"""The heads of a model folder: those of its class, and what its file lacks of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from bothways.hub.hf_config import HFConfig
from bothways.hub.load_report import head_of, plan_loading
from bothways.model.families.weight_names import Shape
from bothways.model.heads import HEADS, Head, with_pooler
from bothways.model.init import without_weights


def heads_of(config: HFConfig, names: Iterable[str]) -> tuple[Head, ...]:
    """Return the heads of a folder whose tensors have these names.

    They are the heads of the class in `config.json`, or else those that the file holds tensors of.
    A `classifier` of an unknown class is dropped: its name does not determine what it reads.
    """
    if config.heads is not None:
        return config.heads
    if config.architecture is not None:
        kinds: Collection[str | None] = config.architecture.heads
    else:
        table = config.keys
        rules = [table.origin(table.full_name(name)) for name in names]
        module_names = (
            rule.name for rule in rules if rule is not None and rule.name not in table.shared
        )
        kinds = {head_of(name_of) for name_of in module_names}
    return tuple(_head(config, kind) for kind in HEADS if kind in kinds)


def _head(config: HFConfig, kind: str) -> Head:
    """Return a head with as many outputs as there are labels, and its own dropout."""
    # Only the fields that this kind has: the pooler has neither outputs nor a dropout.
    fields = HEADS[kind].__dataclass_fields__
    settings: dict[str, Any] = {}
    if "count" in fields:
        settings["count"] = len(config.labels())
    if "dropout" in fields:
        settings["dropout"] = config.dropouts.get(kind)
    return HEADS[kind](**settings)


def faults_of(
    config: HFConfig,
    shapes: Mapping[str, Shape],
    heads: Iterable[Head],
    fresh: Collection[str] = (),
) -> dict[str, str]:
    """Return the faults of heads in a file with tensors of these shapes, by kind of head.

    A head counts with the pooler if it reads that; complete heads are dropped.
    """
    has = None if config.architecture is None else config.architecture.heads
    faults = dict[str, str]()
    for head in heads:
        report = plan_loading(config.keys, _shapes(config, head), shapes, fresh, has)
        if report.faults:
            faults[head.kind] = "; ".join(report.faults)
    return faults


def lacks(config: HFConfig, shapes: Mapping[str, Shape], head: Head) -> bool:
    """Return True if a folder was saved without a head: its class has none, its file no part.

    The head of a bare model may be absent: transformers has `add_pooling_layer=False`.
    """
    architecture = config.architecture
    kinds: set[str] = {item.kind for item in config.heads or ()}
    if architecture is not None and not architecture.bare:
        kinds |= architecture.heads
    report = plan_loading(config.keys, _shapes(config, head), shapes, ())
    return head.kind not in kinds and not report.loaded and not report.misshapen


def _shapes(config: HFConfig, head: Head) -> dict[str, Shape]:
    """Return the shapes of the head's tensors, and of the pooler's if it reads that."""
    with without_weights():
        return {
            f"heads.{part_head.kind}.{name}": tuple(tensor.shape)
            for part_head in with_pooler(config.encoder, (head,))
            for name, tensor in part_head.build(config.encoder).state_dict().items()
        }
