"""Round numbers of rows: they come again, nothing else changes, and no layer that learns in bf16 on a CPU is left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bothways.core.batch import Batch, Layout
from bothways.model.config import EncoderConfig, PostNorm, PreNorm
from bothways.model.heads import (
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
from bothways.model.kernels import linear as rounding
from bothways.model.kernels.linear import on_round_rows, round_rows
from bothways.model.model import Model
from bothways.model.positions import Disentangled, Learned
from spread import in_turn


@given(st.integers(0, 10**6))
def test_a_round_number_is_at_most_an_eighth_more(rows):
    assert rows <= round_rows(rows) <= rows * 9 / 8
    assert round_rows(round_rows(rows)) == round_rows(rows)


@pytest.mark.parametrize("least", [1, 16, 1000])
def test_there_are_few_of_them(least):
    assert len({round_rows(rows) for rows in range(least, 2 * least)}) <= 9


def losses(model: Model, batch: Batch, targets: Tensor) -> Tensor:
    """Of all heads of a model."""
    hidden, parts = model.encoder(batch), []
    for name, head in model.heads.items():
        match name:
            case "masked":
                parts.append(
                    head(model.before_masked(batch, hidden, targets)[targets], hidden.table)
                )
            case "causal":
                parts.append(head(hidden.last, hidden.table))
            case "pooler" | "replaced":
                parts.append(head(hidden.last, batch.layout))
            case "pair" | "labels":
                parts.append(head(model.heads["pooler"](hidden.last, batch.layout)))
            case _:
                parts.append(head(hidden.last))
    return sum((part.float().square().mean() for part in parts), torch.zeros(()))


class Shapes(TorchDispatchMode):
    """The sizes of all that is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            self.sizes |= {size for arg in args[-2:] for size in arg.shape}
        return func(*args, **(kwargs or {}))


HEADS: list[Head] = [
    MaskedHead(),
    PoolerHead(),
    PairHead(),
    LabelHead(3),
    TagHead(5),
    SpanHead(),
    ReplacedHead(),
    NextTokenHead(),
]
LENGTHS = [40, 3, 17, 29, *[5] * 13]
TOKENS, TARGETS = sum(LENGTHS), 37


@pytest.mark.parametrize(
    ("head", "order", "position"),
    in_turn(
        [(head, order) for head in HEADS for order in (PostNorm(), PreNorm())],
        [Learned(64), Disentangled(64)],
        [f"{head.kind}-{order}" for head in HEADS for order in ("post", "pre")],
    ),
)
def test_training_in_bf16_multiplies_them_and_gives_the_same(head, order, position, monkeypatch):
    torch.manual_seed(0)
    narrow = None if head == NextTokenHead() else 16
    config = EncoderConfig(60, 32, 2, 2, 48, position=position, embedding=narrow, order=order)
    heads = [head] if not isinstance(head, PairHead | LabelHead) else [PoolerHead(), head]
    model = Model(config, heads).eval()
    layout, ids = Layout.of(LENGTHS), torch.randint(0, 60, (TOKENS,))
    assert {round_rows(n) for n in (TOKENS, TARGETS, layout.sequences)}.isdisjoint(
        {TOKENS, TARGETS, layout.sequences}
    )
    batch, targets = Batch(ids, torch.zeros_like(ids), layout), torch.arange(TARGETS)

    def step() -> tuple[Tensor, list[Tensor | None], set[int]]:
        model.zero_grad()
        with Shapes() as seen, torch.autocast("cpu", torch.bfloat16):
            loss = losses(model, batch, targets)
            loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()], seen.sizes

    loss, gradients, sizes = step()
    assert sizes.isdisjoint({TOKENS, TARGETS, layout.sequences})
    monkeypatch.setattr(rounding, "round_rows", lambda rows: rows)
    wanted, expected, sizes = step()
    assert TOKENS in sizes
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-4)
    for found, reference in zip(gradients, expected, strict=True):
        assert (found is None) == (reference is None)
        if found is not None and reference is not None:
            assert (found - reference).norm() <= 0.02 * reference.norm() + 1e-6


@pytest.mark.parametrize("case", ["fp32", "no gradients"])
def test_nothing_else_is_filled_up(case):
    seen: list[int] = []

    def compute(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x

    run: Callable[[], Tensor] = lambda: on_round_rows(  # noqa: E731
        compute, torch.randn(17, 3, requires_grad=True)
    )
    if case == "fp32":
        run()
    else:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            run()
    assert seen == [17]
