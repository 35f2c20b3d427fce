"""The ledger's formulas against the modules themselves, the published sizes, and torch's own count of operations."""

from __future__ import annotations

import pytest
from bert_peers import draw_config, draw_input
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bothways.families import bert
from bothways.model.heads import Head, Labels, Masked, Model, Pair, Pooled
from bothways.model.ledger import forward_flops, ledger

PRETRAINING = (Masked(), Pooled(), Pair())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), order=st.sampled_from(["post", "pre"]), chosen=st.sets(st.integers(0, 3)))
def test_the_formulas_count_every_parameter(seed: int, order: str, chosen: set[int]) -> None:
    config = draw_config(seed, order)
    heads = [((*PRETRAINING, Labels(seed % 7 + 1)))[at] for at in chosen]
    counted = sum(parameter.numel() for parameter in Model(config, heads).parameters())
    assert ledger(config, heads).total == counted


@pytest.mark.parametrize(
    ("name", "heads", "count"),
    [
        ("bert-tiny", (Pooled(),), 4_385_920),
        ("bert-mini", (Pooled(),), 11_170_560),
        ("bert-small", (Pooled(),), 28_763_648),
        ("bert-medium", (Pooled(),), 41_373_184),
        ("bert-base", (Pooled(),), 109_482_240),
        ("bert-base-cased", (Pooled(),), 108_310_272),
        ("bert-large", (Pooled(),), 335_141_888),
        ("bert-base", PRETRAINING, 110_106_428),
    ],
)
def test_published_sizes(name: str, heads: tuple[Head, ...], count: int) -> None:
    assert ledger(bert.PRESETS[name](), heads).total == count


def test_the_textbook_formula_and_what_it_leaves_out() -> None:
    base = ledger(bert.base())
    assert base.textbook == 30_522 * 768 + 12 * 12 * 768**2
    assert base.total - base.textbook == 516_096


@pytest.mark.parametrize("order", ["post", "pre"])
def test_operations_equal_what_torch_counts(order: str) -> None:
    config = draw_config(3, order, dropout=0.1, attention_dropout=0.1)
    length, copies, predicted = 10, 4, 0.2
    heads = (*PRETRAINING, Labels(3))
    model = Model(config, heads)
    batch = draw_input(config, [length] * copies).batch
    with FlopCounterMode(display=False) as counter:
        x = model.encoder(batch).last
        pooled = model.heads["pooler"](x, batch.layout)
        rows = x[: int(predicted * len(x))]
        loss = model.heads["masked"](rows, model.encoder.embedding.token.weight).sum()
        loss = loss + model.heads["pair"](pooled).sum() + model.heads["labels"](pooled).sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == pytest.approx(forward_flops(config, heads, length, predicted) * length * copies)
    # The first block's input is an embedding, which needs no product of its own to be learned: all else is twice the forward.
    assert counter.get_total_flops() == pytest.approx(3 * forward)
