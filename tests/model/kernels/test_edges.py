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

from attention_formulas import formula
from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError
from bothways.core.runtime.tuning import TUNING
from bothways.model.config import Dropouts, EncoderConfig, PostNorm, PreNorm
from bothways.model.heads import NextTokenHead
from bothways.model.kernels import dropout as module, library, linear as rounding
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.dropout import add_norm, dropout, dropped_product
from bothways.model.kernels.linear import CompiledLinear, on_round_rows, round_rows
from bothways.model.model import Model
from bothways.model.positions import Disentangled, Learned
from bothways.prediction.prepared_model import prepare_model
from family_peers import outputs
from small_models import EVERY_HEAD, batch_for, kept_bytes
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
    return batch_for(model().config, lengths)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("which", ["weights", "rows"])
def test_numbers_of_every_size_are_multiplied(which):
    """Down to the smallest: what is left of a small number once its first eight bits are gone has no eight bits of its own."""
    torch.manual_seed(0)
    small = torch.randn(64, 96).sign() * 10.0 ** torch.empty(64, 96).uniform_(-45, 0)
    both = (small, torch.randn(64, 96))
    weight, x = both if which == "weights" else both[::-1]
    found = CompiledLinear(weight, None, None)(x)
    weight, x = weight.double(), x.double()
    bound = 2**-20 * (x.abs() @ weight.abs().T) + 1e-36
    assert bool(((found.double() - x @ weight.T).abs() <= bound).all())
    both = (torch.zeros(64, 96), torch.ones(64, 96))
    both[0][:, 5] = 3.76e-37  # of which a part once became 3e38
    weight, x = both if which == "weights" else both[::-1]
    found = CompiledLinear(weight, None, None)(x)
    torch.testing.assert_close(found, torch.full((64, 64), 3.76e-37), rtol=0.01, atol=0)


SCRIPT = """
import torch
from bothways.core.batch import Layout
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.encoder import CompiledBlockTail, CompiledLayers
from bothways.model.kernels.linear import CompiledLinear
torch.manual_seed(0)
weights = [torch.randn(*shape) / 8 for shape in ((192, 64), (64, 64), (96, 64), (64, 96))]
qkv, *linears = (CompiledLinear(weight, None, None) for weight in weights)
tail = CompiledBlockTail(linears, (torch.nn.LayerNorm(64), torch.nn.LayerNorm(64)))
layers = CompiledLayers([qkv], [tail], 4, torch.float32)
for lengths in ([5, 9], [40] * 12):
    layout, results = Layout.of(lengths), []
    x = torch.randn(layout.tokens, 64)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        with torch.no_grad():
            projected = qkv(x)
            heads = packed_attention(projected.view(-1, 3, 4, 16), layout)
            results.append((projected, heads, tail(x, heads.flatten(1)), layers(x, layout, 1)))
    assert all(torch.equal(*pair) for pair in zip(*results))
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
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
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
@pytest.mark.parametrize("lengths", [[0], [0, 900, *[150] * 20], [3, 0, 7]], ids=str)
def test_sequences_may_be_empty(lengths, precision):
    plain = model()
    with torch.no_grad():
        wanted = plain.encoder(batch(lengths)).last
        found = prepare_model(plain, precision).encoder(batch(lengths)).last
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
    normed = (x + y - (x + y).mean(1, True)) / (x + y).std(1, correction=0, keepdim=True)
    torch.testing.assert_close(norm.weight.grad, normed.sum(0))


def test_a_sum_is_normed_in_any_shape_that_torch_takes():
    torch.manual_seed(0)
    norm, unchecked = nn.LayerNorm(64), inspect.unwrap(add_norm)
    for shapes in [((3, 7, 64), (3, 7, 64)), ((7, 64), (1, 64))]:
        x, y = map(torch.randn, shapes)
        torch.testing.assert_close(unchecked(x, y, 0.0, norm), norm(x + y))


def test_a_norm_that_does_not_fit_is_left_to_torch_which_refuses_it():
    mixed, narrow = nn.LayerNorm(64), nn.LayerNorm(32)
    mixed.bias = nn.Parameter(mixed.bias.double())
    for norm in (mixed, narrow):
        with pytest.raises(RuntimeError):
            add_norm(torch.randn(7, 64), torch.randn(7, 64), 0.0, norm)


def test_tensors_without_memory_are_left_to_torch():
    with FakeTensorMode():
        x, y = torch.randn(2, 7, 64)
        assert add_norm(x, y, 0.0, nn.LayerNorm(64)).shape == (7, 64)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_scores_may_be_very_large_in_bf16(scale):
    """Of 10^6 to 10^10, where the largest alone counts."""
    torch.manual_seed(1)
    qkv = torch.randn(40, 3, 2, 32)
    qkv[:, :2] *= scale
    qkv = qkv.bfloat16()
    found = packed_attention(qkv, Layout.of([23, 17]))
    wanted = formula(qkv, [23, 17])
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=2**-7)


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
    [(torch.float32, False), (torch.float64, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)],
)  # fmt: skip
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
def test_a_gradient_has_the_mask_of_its_dropout_kept_or_drawn_again(dtype, rate, monkeypatch):
    results = []
    for kept in (2**20, 0):
        monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
        torch.manual_seed(4)
        x = torch.randn(50, 30, dtype=dtype, requires_grad=True)
        y = dropout(x, rate)
        weights = torch.randn(50, 30, dtype=dtype)
        (gradient,) = torch.autograd.grad((y * weights).sum(), x)
        torch.testing.assert_close(gradient * x.detach(), y.detach() * weights)
        results.append((y.detach(), gradient))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert 0 < int((results[0][0] == 0).sum()) < 1500


@pytest.mark.parametrize("position", [Learned(), Disentangled(32)], ids=["learned", "disentangled"])
def test_attention_keeps_its_probabilities_once(position, monkeypatch):
    monkeypatch.setattr(module, "runs_on", lambda device: False)  # the kernel never keeps a mask
    config = EncoderConfig(50, 32, 2, 4, 64, position=position, dropout=Dropouts(0.1, 0.1))
    model, layout = Model(config, ()).train(), Layout.of([32] * 3)
    batch = Batch(torch.randint(50, (96,)), torch.zeros(96, dtype=torch.int64), layout)
    sizes = []
    for kept in (2**20, 0):
        monkeypatch.setattr(module, "TUNING", replace(TUNING, dropout_mask_elements=kept))
        sizes.append(kept_bytes(model, batch))
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


class Shapes(TorchDispatchMode):
    """The sizes of all that is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            self.sizes |= {size for arg in args[-2:] for size in arg.shape}
        return func(*args, **(kwargs or {}))


HEADS = [head for kind, head in EVERY_HEAD.items() if kind != "choice"]
LENGTHS = [40, 3, 17, 29, *[5] * 13]
TOKENS = sum(LENGTHS)


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
    model = Model(config, [head]).eval()
    layout, ids = Layout.of(LENGTHS), torch.randint(0, 60, (TOKENS,))
    counts = {TOKENS, layout.sequences}
    assert {round_rows(count) for count in counts}.isdisjoint(counts)
    batch = Batch(ids, torch.zeros_like(ids), layout)

    def step() -> tuple[Tensor, list[Tensor | None], set[int]]:
        model.zero_grad()
        with Shapes() as seen, torch.autocast("cpu", torch.bfloat16):
            loss = sum(x.float().square().mean() for x in outputs(model, batch))
            loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()], seen.sizes

    loss, gradients, sizes = step()
    assert sizes.isdisjoint(counts)
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
