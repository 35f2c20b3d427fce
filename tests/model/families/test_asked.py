"""Where only some tokens are asked for, theirs are the vectors and gradients that all would have given, in every family."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from batch_operations import batch_flops
from bothways.core.batch import Batch, Layout
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.config import EncoderConfig, Sharing
from bothways.model.families.catalogue import FAMILIES
from bothways.model.families.deberta import DEBERTA_V2
from bothways.model.model import Model
from bothways.model.positions import Disentangled
from bothways.training.step_cost import forward_flops
from drawn_settings import draw_settings
from family_peers import outputs
from random_weights import perturb
from small_models import EVERY_HEAD, batch_for
from spread import first_of, in_turn

LENGTHS = [7, 11, 2, 9]
CONFIGS = {
    f"{family.model_type}-{seed}": family.config_rules.read(
        draw_settings(family.model_type, seed), "settings"
    )
    for family in FAMILIES
    for seed in range(3)
}
CONVOLUTION = draw_settings("deberta-v2", 0) | {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"],
    "conv_kernel_size": 3, "num_hidden_layers": 1,
}  # fmt: skip


def moved(model: Model) -> Model:
    """Float64, so that what differs is no rounding; every parameter away from where it starts."""
    return perturb(model, 0.15).double().train()


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found.get(name, torch.zeros_like(gradient)), gradient, rtol=1e-9, atol=1e-12 * largest
        )


@pytest.mark.parametrize(
    ("config", "only"),
    in_turn(
        [(config,) for config in CONFIGS.values()],
        [[0], [0, 7, 18, 20], [20, 3, 11], list(range(sum(LENGTHS))), []],
        [*CONFIGS],
    ),
)
def test_those_asked_for_are_as_all_would_be_and_the_others_0(config, only):
    model, batch = moved(Model(config, ())), batch_for(config, LENGTHS)
    asked = torch.tensor(only, dtype=torch.int64)
    some, every = model.encoder(batch, only=asked).last, model.encoder(batch).last
    torch.testing.assert_close(some[asked], every[asked], rtol=1e-10, atol=1e-12)
    # A convolution in the last block needs all.
    if config.depth > 1 or not isinstance(config.position, Disentangled):
        assert not some[~torch.isin(torch.arange(len(some)), asked)].any()
    weights = torch.randn(len(only), config.width, dtype=torch.float64)
    if only:
        assert_same(
            gradients(model, (some[asked] * weights).sum()),
            gradients(model, (every[asked] * weights).sum()),
        )


def test_no_more_than_those_asked_for_is_computed():
    config = CONFIGS["bert-1"]
    model, batch, counts = Model(config, ()), batch_for(config, LENGTHS), {}
    for name, asked in {"some": torch.tensor([3, 5]), "all": None}.items():
        with FlopCounterMode(display=False) as counter:
            model.encoder(batch, only=asked)
        counts[name] = counter.get_total_flops()
    tail = 2 * (config.width**2 + 2 * config.width * config.intermediate_size)
    assert counts["all"] - counts["some"] == (sum(LENGTHS) - 2) * tail


def test_layers_are_kept_whole():
    config = CONFIGS["bert-1"]
    model, batch = Model(config, ()).eval(), batch_for(config, LENGTHS)
    some, every = (
        model.encoder(batch, keep_layers=True, only=asked) for asked in (torch.tensor([3]), None)
    )
    for found, wanted in zip((some.last, *some.layers), (every.last, *every.layers), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIGS["bert-1"], depth=4, sharing=Sharing(groups=2, layers_per_group=2)),
        DEBERTA_V2.config_rules.read(CONVOLUTION, "settings"),
    ],
    ids=["shared blocks", "a convolution in the only block"],
)
def test_the_last_block_alone_is_cut_short(config):
    model, batch, asked = moved(Model(config, ())), batch_for(config, LENGTHS), torch.tensor([2, 9])
    some, every = model.encoder(batch, only=asked).last[asked], model.encoder(batch).last[asked]
    torch.testing.assert_close(some, every, rtol=1e-10, atol=1e-12)


LENGTH, COPIES = 12, 3
CASES = [(family, architecture) for family in FAMILIES for architecture in family.architectures]


def seen_by_all(config: EncoderConfig) -> float:
    """What global tokens see in addition."""
    return (
        config.steps * 4.0 * config.width * LENGTH * COPIES if config.has_global_attention else 0.0
    )


@pytest.mark.parametrize(
    ("family", "architecture", "seed"),
    first_of(
        [(*case, number % 4) for number, case in enumerate(CASES)],
        [(family.model_type, "labels" in known.heads) for family, known in CASES],
        [known.name for _, known in CASES],
    ),
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
    config, heads = replace(config, patterns=wide), [EVERY_HEAD[kind] for kind in kinds]
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
