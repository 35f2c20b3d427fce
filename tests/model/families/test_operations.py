"""The ledger's count of operations against torch's own counter: every family, every class, random settings."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from batch_operations import batch_flops
from bothways.core.batch import Batch, Layout
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import FAMILIES
from bothways.model.heads import (
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
from bothways.model.model import Model
from bothways.training.step_cost import forward_flops
from drawn_settings import draw_settings
from family_peers import outputs
from spread import in_turn

LENGTH, COPIES = 12, 3
HEADS: dict[str, Head] = {
    "masked": MaskedHead(), "pooler": PoolerHead(), "pair": PairHead(), "labels": LabelHead(3), "tags": TagHead(4), "span": SpanHead(),
    "choice": ChoiceHead(), "replaced": ReplacedHead(), "causal": NextTokenHead(),
}  # fmt: skip
CASES = [(family, architecture) for family in FAMILIES for architecture in family.architectures]


def seen_by_all(config: EncoderConfig) -> float:
    """What global tokens see in addition."""
    return (
        config.steps * 4.0 * config.width * LENGTH * COPIES if config.has_global_attention else 0.0
    )


@pytest.mark.parametrize(
    ("family", "architecture", "seed"),
    in_turn(CASES, range(4), [architecture.name for _, architecture in CASES]),
)
def test_operations_are_those_that_torch_counts(family, architecture, seed):
    """Windows reach over the whole sequence; of a causal product torch counts the masked half, too."""
    config = family.config_rules.read(draw_settings(family.model_type, seed), "settings")
    wide = tuple(
        replace(pattern, radius=2 * LENGTH) if isinstance(pattern, Window) else pattern
        for pattern in config.patterns
    )
    kinds = (
        architecture.heads if architecture.bare else architecture.heads - {"pooler"}
    )  # it comes with those that read it
    config, heads = replace(config, patterns=wide), [HEADS[kind] for kind in kinds]
    model = Model(config, heads).eval()
    ids = torch.randint(4, config.vocab, (LENGTH * COPIES,))
    everywhere = torch.arange(len(ids)) % LENGTH == 0 if config.has_global_attention else None
    batch = Batch(
        ids, torch.zeros_like(ids), Layout.of([LENGTH] * COPIES), global_attention_mask=everywhere
    )
    with FlopCounterMode(display=False) as counter:
        outputs(model, batch)
    computed = replace(
        config,
        patterns=tuple(Full() if isinstance(pattern, Causal) else pattern for pattern in wide),
    )
    expected = forward_flops(computed, heads, LENGTH, predicted=1.0) * len(ids)
    expected += batch_flops(config, heads, LENGTH)
    assert counter.get_total_flops() == pytest.approx(expected + seen_by_all(config), rel=1e-9)
