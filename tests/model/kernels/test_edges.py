"""The library's own kernels where numbers, shapes, memory or threads are not as usual; against torch's operators."""

import contextlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError
from bothways.core.runtime.tuning import TUNING
from bothways.model.config import Dropouts, EncoderConfig, PostNorm, PreNorm
from bothways.model.embedding import look_up
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
from bothways.model.kernels import dropout as module, library, linear as rounding
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.dropout import add_norm, dropout, dropped_product
from bothways.model.kernels.linear import CompiledLinear, on_round_rows, round_rows
from bothways.model.model import Model
from bothways.model.positions import Disentangled, Learned
from bothways.prediction.prepared_model import prepare_model
from spread import in_turn

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(not library.runs_on(CPU), reason="no compiled kernels here")
PRECISIONS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not library.multiplies(name), reason=f"no compiled kernel for {name} here"
        ),
    )
    for name in ("fp32", "bf16", "int8")
]
LOSES = {"fp32": 2e-5, "bf16": 0.15, "int8": 0.3}
"""What numbers around 1 lose in two layers."""


def model() -> Model:
    torch.manual_seed(0)
    return Model(
        EncoderConfig(50, 64, 2, 4, 128, position=Learned(5000), initial_range=0.2), ()
    ).eval()


def batch(lengths: list[int]) -> Batch:
    ids = torch.randint(0, 50, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return Batch(ids, torch.zeros_like(ids), Layout.of(lengths), {})


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("which", ["weights", "rows"])
def test_numbers_of_every_size_are_multiplied(which):
    """Down to the smallest: what is left of a small number once its first eight bits are gone has no eight bits of its own."""
    torch.manual_seed(0)
    small, plain = (
        torch.randn(64, 96).sign() * 10.0 ** torch.empty(64, 96).uniform_(-45, 0),
        torch.randn(64, 96),
    )
    weight, x = (small, plain) if which == "weights" else (plain, small)
    found = CompiledLinear(weight, None, None)(x)
    bound = x.double().abs() @ weight.double().abs().T
    assert bool(
        ((found.double() - x.double() @ weight.double().T).abs() <= 2**-20 * bound + 1e-36).all()
    )
    alone = torch.zeros(64, 96)
    alone[:, 5] = 3.76e-37  # of which a part once became 3e38
    other = torch.ones(64, 96)
    found = CompiledLinear(*((alone, None, None) if which == "weights" else (other, None, None)))(
        other if which == "weights" else alone
    )
    torch.testing.assert_close(found, torch.full((64, 64), 3.76e-37), rtol=0.01, atol=0)


SCRIPT = """
import torch
from bothways.model.kernels.linear import CompiledLinear
from test_edges import batch, model
from bothways.prediction.prepared_model import prepare_model
torch.set_num_threads(3)
x, weight = torch.randn(200, 64), torch.randn(96, 64)
for rows in (7, 200):
    torch.testing.assert_close(CompiledLinear(weight, None, None)(x[:rows]), x[:rows] @ weight.T, rtol=1e-4, atol=1e-4)
plain = model()
with torch.no_grad():
    for lengths in ([5, 9], [40] * 12):
        torch.testing.assert_close(prepare_model(plain).encoder(batch(lengths)).last, plain.encoder(batch(lengths)).last)
print("the same")
"""


@compiled
@pytest.mark.parametrize(
    "limit",
    [
        "OMP_THREAD_LIMIT=1",
        pytest.param("OMP_THREAD_LIMIT=2", marks=pytest.mark.slow),
        pytest.param("OMP_MAX_ACTIVE_LEVELS=0", marks=pytest.mark.slow),
    ],
)
def test_fewer_threads_than_asked_for_do_all_the_work(limit, monkeypatch):
    name, value = limit.split("=")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(__file__).rpartition("/")[0], *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout == "the same\n", done.stderr


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_as_one_kernel_refuse_gradients(precision):
    prepared = prepare_model(model(), precision)
    with pytest.raises(ConfigError, match="CompiledLayers is for inference"):
        prepared.encoder(batch([5, 9]))
    with torch.no_grad():
        assert not prepared.encoder(batch([5, 9])).last.requires_grad


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "lengths", [[0], [0, 0], [0, 4000, *[300] * 20], [3, 0, 7], [0, *[500] * 20]], ids=str
)
def test_sequences_may_be_empty(lengths, precision):
    plain = model()
    with torch.no_grad():
        wanted, found = (
            each.encoder(batch(lengths)).last for each in (plain, prepare_model(plain, precision))
        )
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=LOSES[precision])


def stepped(x: Tensor) -> nn.Parameter:
    """The same numbers, other ones between them."""
    return nn.Parameter(torch.stack([x.detach(), torch.full_like(x, 1e9)], -1)[..., 0])


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_may_lie_anywhere(precision):
    plain = model()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        wanted = prepare_model(plain, precision).encoder(batch([5, 40])).last
        for module in plain.encoder.blocks.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.weight, module.bias = stepped(module.weight), stepped(module.bias)
        assert torch.equal(prepare_model(plain, precision).encoder(batch([5, 40])).last, wanted)
    x, y, norm = torch.randn(9, 64), torch.randn(9, 64), nn.LayerNorm(64)
    nn.init.normal_(norm.weight)
    wanted = add_norm(x, y, 0.0, norm)
    norm.weight, norm.bias = stepped(norm.weight), stepped(norm.bias)
    found = add_norm(x, y, 0.0, norm)
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert norm.weight.grad is not None
    torch.testing.assert_close(
        norm.weight.grad,
        ((x + y - (x + y).mean(1, True)) / (x + y).std(1, correction=0, keepdim=True)).sum(0),
    )


@pytest.mark.parametrize(
    "more", [lambda whole: whole * 2, lambda whole: whole.tanh(), lambda whole: whole]
)
def test_the_gradient_of_a_lookup_is_its_own(more):
    """What adds something of its own to the table gets the same gradient, and keeps it."""
    torch.manual_seed(0)
    table, ids, factor = nn.Embedding(9, 5), torch.tensor([3, 3, 1]), torch.randn(9, 5)
    other = torch.randn(9, 5, requires_grad=True)
    rows, whole = look_up(table, ids)
    found = torch.autograd.grad(
        rows.sum() + ((whole + more(other)) * factor).sum(), [table.weight, other]
    )
    wanted = torch.autograd.grad(
        table(ids).sum() + ((table.weight + more(other)) * factor).sum(), [table.weight, other]
    )
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    given = torch.ones(9, 5)
    torch.autograd.backward([*look_up(table, ids)], [torch.ones(3, 5), given])
    assert torch.equal(given, torch.ones(9, 5))


@pytest.mark.parametrize(
    "changes", [{"padding_idx": 3}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str
)
def test_a_table_with_rules_of_its_own_keeps_them(changes):
    tables = [nn.Embedding(9, 5, **changes) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    ids = torch.tensor([3, 3, 1])
    for table, rows in zip(tables, (look_up(tables[0], ids)[0], tables[1](ids)), strict=True):
        rows.square().sum().backward()
        assert table.weight.grad is not None
    torch.testing.assert_close(tables[0].weight.grad, tables[1].weight.grad)


def test_a_sum_is_normed_in_any_shape_that_torch_takes():
    torch.manual_seed(0)
    norm, unchecked = nn.LayerNorm(64), inspect.unwrap(add_norm)
    for x, y in [
        (torch.randn(3, 7, 64), torch.randn(3, 7, 64)),
        (torch.randn(7, 64), torch.randn(1, 64)),
    ]:
        torch.testing.assert_close(unchecked(x, y, 0.0, norm), norm(x + y))


def test_a_norm_that_does_not_fit_is_left_to_torch_which_refuses_it():
    mixed, narrow = nn.LayerNorm(64), nn.LayerNorm(32)
    mixed.bias = nn.Parameter(mixed.bias.double())
    for norm in (mixed, narrow):
        with pytest.raises(RuntimeError):
            add_norm(torch.randn(7, 64), torch.randn(7, 64), 0.0, norm)


def test_tensors_without_memory_are_left_to_torch():
    with FakeTensorMode():
        assert add_norm(torch.randn(7, 64), torch.randn(7, 64), 0.0, nn.LayerNorm(64)).shape == (
            7,
            64,
        )


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_scores_may_be_very_large_in_bf16(scale):
    """Of 10^6 to 10^10, where the largest alone counts."""
    torch.manual_seed(1)
    qkv = torch.randn(40, 3, 2, 32)
    qkv[:, :2] *= scale
    qkv = qkv.bfloat16()
    parts = []
    for part in qkv.double().split([23, 17]):
        q, k, v = part.permute(1, 2, 0, 3)
        parts.append(((q @ k.mT / 32**0.5).softmax(-1) @ v).transpose(0, 1))
    found = packed_attention(qkv, Layout.of([23, 17]))
    torch.testing.assert_close(found.double(), torch.cat(parts), rtol=2**-7, atol=2**-7)


Found = tuple[Tensor, ...]


def product(kept: int, x: Tensor, y: Tensor, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> Found:
    """The output and both gradients, where masks up to so many elements are kept as they are."""
    monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
    torch.manual_seed(1)
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
        found = dropped_product(x, y, 0.3)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(found.dtype)
    return (found.detach(), *torch.autograd.grad((found * weights).sum(), (x, y)))


@pytest.mark.parametrize(
    ("dtype", "mixed"),
    [
        (torch.float32, False),
        (torch.float64, False),
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.bfloat16, True),
    ],
)
def test_products_with_dropped_ones(dtype, mixed, monkeypatch):
    x = torch.randn(2, 3, 7, 7).softmax(-1).to(torch.float32 if mixed else dtype)
    y = torch.randn(2, 3, 7, 5).to(dtype)
    small, large = (product(kept, x, y, mixed, monkeypatch) for kept in (2**20, 0))
    for one, other in zip(small, large, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert not torch.equal(small[0], product(0, x, 2 * y, mixed, monkeypatch)[0])


def test_a_rate_of_nearly_1_keeps_next_to_nothing():
    torch.manual_seed(3)
    x = dropout(torch.ones(2**18), 1 - 2**-20)
    assert set(x.tolist()) == {0.0, 2.0**16}
    assert 0 < int(x.count_nonzero()) < 20  # 4 are expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.7])
def test_dropout(dtype, rate, monkeypatch):
    results = []
    for kept in (2**20, 0):
        monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
        torch.manual_seed(4)
        x = torch.randn(50, 30, dtype=dtype, requires_grad=True)
        y = dropout(x, rate)
        weights = torch.randn(50, 30, dtype=dtype)
        results.append((y.detach(), *torch.autograd.grad((y * weights).sum(), x)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert 0 < int((results[0][0] == 0).sum()) < 1500


def held(model: Model, batch: Batch) -> int:
    """Bytes for the backward pass, weights left out."""
    weights, sizes = (
        {p.untyped_storage().data_ptr() for p in model.parameters()},
        dict[int, tuple[int, Tensor]](),
    )

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = (0 if storage.data_ptr() in weights else storage.nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.encoder(batch)
    return sum(size for size, _ in sizes.values())


@pytest.mark.parametrize("position", [Learned(), Disentangled(32)], ids=["learned", "disentangled"])
def test_attention_keeps_its_probabilities_once(position, monkeypatch):
    monkeypatch.setattr(module, "runs_on", lambda device: False)  # the kernel never keeps a mask
    config = EncoderConfig(50, 32, 2, 4, 64, position=position, dropout=Dropouts(0.1, 0.1))
    model, layout = Model(config, ()).train(), Layout.of([32] * 3)
    batch = Batch(torch.randint(50, (96,)), torch.zeros(96, dtype=torch.int64), layout)
    sizes = []
    for kept in (2**20, 0):
        monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
        sizes.append(held(model, batch))
    attended, hidden, layers = 4 * 32 * 96, 32 * 96, 2
    if isinstance(position, Disentangled):
        # Of three of the probabilities' size one is left; of each other mask nothing.
        assert sizes[0] - sizes[1] == 4 * (layers * 2 * attended + 5 * hidden + 2 * 32 * 63)
    else:
        # Of the probabilities and their mask, the mask is not kept; nor any other.
        assert sizes[0] - sizes[1] == 4 * (layers * attended + 5 * hidden)


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
