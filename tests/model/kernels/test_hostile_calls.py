"""Direct calls with arguments that do not fit each other: each is refused, and none writes anything.

Under AddressSanitizer (`make kernels-asan`) an overrun would be found, too.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bothways.core.batch import Layout
from bothways.model.kernels import abi, library
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.kernels.encoder import CompiledBlockTail, CompiledLayers
from bothways.model.kernels.int8 import quantize_weights
from bothways.model.kernels.library import ALL_FEATURES, FORMATS, Feature, call_kernel
from bothways.model.kernels.linear import CompiledLinear
from kernel_cases import NEEDS_AVX512, NEEDS_BF16, NEEDS_VNNI, draw_qkv

pytestmark = [NEEDS_AVX512, pytest.mark.usefixtures("processor")]
INVALID, UNSUPPORTED = ValueError, RuntimeError
LENGTHS = [7, 40, 1]


class Attention:
    """A valid batch, and buffers to be left alone."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.qkv = draw_qkv(LENGTHS, 2, 32, 0).to(dtype)
        self.offsets = Layout.of(LENGTHS).cu_seqlens
        self.out = torch.full((48, 2, 32), 7.0, dtype=dtype)
        self.lse = torch.full((48, 2), 7.0)
        drop = abi.DropoutStruct(0, 0, 1.0)
        places = (self.qkv.data_ptr(), self.offsets.data_ptr())
        self.batch = abi.AttentionBatch(*places, 48, 3, 2, 32, drop, FORMATS[dtype])

    def forward(self) -> None:
        """Call the kernel."""
        call_kernel("bothways_attention", self.batch, self.out, self.lse)

    def backward(self) -> None:
        """Call the kernel of the gradient, into `qkv`."""
        buffers = self.out, self.out, self.lse, self.qkv
        call_kernel("bothways_attention_backward", self.batch, *buffers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 47), ("tokens", 49), ("tokens", -1), ("tokens", 2**62),
        ("sequences", 2), ("sequences", -1), ("sequences", 2**40),
        ("heads", 0), ("heads", -1), ("heads", 2**60), ("heads", 2**20),
        ("head_size", 0), ("head_size", 33), ("head_size", -16), ("head_size", 2**30),
        ("dtype", 0), ("dtype", 1), ("dtype", 3), ("dtype", 8),
        ("cu_seqlens", None), ("qkv", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_refuses_what_does_not_fit(field, value, direction):
    attention = Attention()
    setattr(attention.batch, field, value)
    with pytest.raises(INVALID, match="an argument is invalid"):
        getattr(attention, direction)()
    assert (attention.out == 7).all()
    assert (attention.lse == 7).all()


def test_attention_that_fits_is_computed():
    attention = Attention()
    attention.forward()
    attention.backward()
    assert not (attention.out == 7).any()
    assert not (attention.lse == 7).any()


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 7, 47, 47], [0, 7, 47, 49], [0, 47, 7, 48], [1, 7, 47, 48], [0, -5, 47, 48],
        [0, 7, 2**62, 48], [0, 7, -(2**63), 48], [0, 2**63 - 1, -(2**63), 48],
    ],
    ids=str,
)  # fmt: skip
def test_offsets_ascend_from_the_first_token_to_the_last(offsets):
    attention = Attention()
    attention.offsets.copy_(torch.tensor(offsets))
    for direction in (attention.forward, attention.backward):
        with pytest.raises(INVALID):
            direction()
    assert (attention.out == 7).all()


@pytest.mark.parametrize("threads", [0, -1, 2**20])
def test_numbers_of_threads_are_checked(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(abi, "MAX_THREADS", 2**30)
    with pytest.raises(INVALID):
        Attention().forward()


def test_a_longest_sequence_that_is_too_short_changes_nothing():
    """The kernel trusts the offsets alone: a wrong maximum once overran its workspace."""
    layout, qkv = Layout.of([5, 300]), draw_qkv([5, 300], 2, 32, 0).requires_grad_()
    wrong = dataclasses.replace(layout, cu_seqlens=layout.cu_seqlens.clone())
    object.__setattr__(wrong, "max_seqlen", 1)
    results = [packed_attention(qkv, each) for each in (layout, wrong)]
    gradients = [torch.autograd.grad(result.sum(), qkv)[0] for result in results]
    assert torch.equal(*results)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([0, 7, 47, 48], dtype=torch.int32),
        torch.tensor([0, 9, 7, 9, 47, 9, 48, 9])[::2],
    ],
    ids=["int32", "every other one"],
)
def test_offsets_of_another_kind_are_refused(offsets):
    layout = Layout.of(LENGTHS)
    object.__setattr__(layout, "cu_seqlens", offsets)
    with pytest.raises(ValueError, match="cu_seqlens has to be contiguous int64 on the CPU"):
        packed_attention(draw_qkv(LENGTHS, 2, 32, 0), layout)


def test_a_tensor_of_other_tokens_than_the_layout_is_refused():
    with pytest.raises(INVALID):
        packed_attention(draw_qkv([47], 2, 32, 0), Layout.of(LENGTHS))


@NEEDS_BF16
def test_a_gradient_in_bf16_is_refused_without_amx():
    """It once executed instructions that the processor does not have."""
    with library.limit(ALL_FEATURES & ~Feature.AMX):
        attention = Attention(torch.bfloat16)
        attention.forward()
        with pytest.raises(UNSUPPORTED, match="needs instructions that are not available"):
            attention.backward()


@pytest.mark.parametrize(
    ("precision", "needed"),
    [("fp32", Feature.AVX512), ("bf16", Feature.BF16), ("int8", Feature.VNNI)],
)
def test_a_processor_without_the_instructions_is_refused(precision, needed):
    layer = linear(64, 32, precision)
    with library.limit(ALL_FEATURES & ~needed), pytest.raises(UNSUPPORTED):
        layer(torch.randn(3, 32))
    with library.limit(Feature(0)), pytest.raises(UNSUPPORTED):
        Attention().forward()


def linear(outputs: int, inputs: int, precision: str = "fp32") -> CompiledLinear:
    weight = torch.randn(outputs, inputs)
    if precision == "int8":
        return CompiledLinear(*quantize_weights(weight), torch.randn(outputs))
    return CompiledLinear(weight.bfloat16() if precision == "bf16" else weight, None, None)


Call = tuple[str, list[Any], Tensor]
"""A kernel, its arguments, and an output to be left alone."""


def linear_call() -> Call:
    layer, out = linear(64, 32), torch.full((3, 64), 7.0)
    layer.struct.keep_alive = layer.tensors
    return "bothways_linear", [layer.struct, torch.randn(3, 32), 4, 3, out, 4], out


def cross_entropy_call() -> Call:
    logits, labels = torch.randn(4, 5), torch.tensor([0, 1, -100, 4])
    struct = abi.Classification(logits.data_ptr(), labels.data_ptr(), 4, 5, -100, 4)
    struct.keep_alive = logits, labels
    losses, hits = torch.full((4,), 7.0), torch.zeros(4, dtype=torch.uint8)
    return "bothways_cross_entropy", [struct, torch.zeros(4, 2), losses, hits], losses


def adamw_call() -> Call:
    """Of a table of 5 rows of 3 numbers, which also are its moments."""
    weight, seen = torch.full((5, 3), 7.0), torch.zeros(5, dtype=torch.bool)
    places = (weight.data_ptr(),) * 3
    table = abi.AdamWTable(*places, seen.data_ptr(), 5, 3, 1, -0.1, -0.1, 0.1, 0.1, 0.9, 1, 1e-6)
    table.keep_alive = seen
    return "bothways_adamw_rows", [table, torch.tensor([0, 2, 4]), torch.ones(3, 3), 3], weight


def codes_call() -> Call:
    codes, numbers = torch.ones(2, 5, dtype=torch.int8), torch.ones(5)
    products = torch.full((2,), 7.0)
    return "bothways_code_products", [codes, numbers, numbers, 2, 5, products], products


def add_norm_call() -> Call:
    x, weight, moments = torch.randn(3, 20), torch.ones(20), torch.zeros(3, 2)
    norm, drop = abi.LayerNorm(weight.data_ptr(), None, 20, 1e-5), abi.DropoutStruct(0, 0, 1.0)
    norm.keep_alive, out = weight, torch.full((3, 20), 7.0)
    return "bothways_add_norm", [norm, drop, x, x, 4, 3, out, moments, out], out


@pytest.mark.parametrize(
    "make", [linear_call, cross_entropy_call, adamw_call, codes_call, add_norm_call]
)
def test_a_call_that_fits_writes_its_output(make):
    name, arguments, output = make()
    call_kernel(name, *arguments)
    assert not (output == 7).all()


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        *((linear_call, *pair) for pair in [
            ("panels", None), ("in_features", 0), ("in_features", 31), ("in_features", 33), ("in_features", 2**40),
            ("out_features", 0), ("out_features", 65), ("out_features", 20), ("out_features", -64),
            ("panel_bytes", 0), ("panel_bytes", 2**40), ("dtype", 2), ("dtype", 1), ("dtype", 7),
        ]),
        *((cross_entropy_call, *pair) for pair in [
            ("rows", -1), ("rows", 2**50), ("classes", 0), ("classes", -5), ("classes", 2**40), ("dtype", 1),
            ("logits", None), ("labels", None),
        ]),
        *((adamw_call, *pair) for pair in [
            ("rows", 2), ("rows", -1), ("rows", 2**50), ("width", 0), ("width", 2**40),
            ("weight", None), ("average", None), ("squares", None), ("seen", None),
        ]),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_is_refused(make, field, value):
    name, arguments, output = make()
    setattr(arguments[0], field, value)
    # A linear layer in bf16 may be one that the processor does not have.
    with pytest.raises((INVALID, UNSUPPORTED) if make is linear_call else INVALID):
        call_kernel(name, *arguments)
    assert (output == 7).all()


@pytest.mark.parametrize(
    ("make", "place", "value"),
    [
        *((linear_call, *pair) for pair in [
            (1, None), (2, 3), (2, 1), (3, -1), (3, 2**40), (4, None), (5, 0), (5, 6)
        ]),
        # Rows that are not of the table, or not in order.
        *((adamw_call, 1, torch.tensor(rows)) for rows in [[0, 2, 5], [-1, 0, 2], [0, 1, 1], [0, 2, 1], [0, 1, 2**40]]),
        *((codes_call, place, 0) for place in (0, 1, 2, 5)),
        *((codes_call, *pair) for pair in [(3, -1), (3, 2**50), (4, 0), (4, 2**40)]),
        *((add_norm_call, place, None) for place in (0, 1, 2, 3, 6, 7, 8)),
        (add_norm_call, 4, 1), (add_norm_call, 5, -3),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_fit_is_refused(make, place, value):
    name, arguments, output = make()
    arguments[place] = value
    with pytest.raises(INVALID):
        call_kernel(name, *arguments)
    assert (output == 7).all()


@NEEDS_VNNI
@pytest.mark.parametrize("field", ["scales", "zero_point_sum"])
def test_int8_needs_its_scales(field):
    layer = linear(64, 32, "int8")
    setattr(layer.struct, field, None)
    with pytest.raises(INVALID):
        layer(torch.randn(3, 32))


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"rows have 32 features, not \[31\]"):
        linear(64, 32)(torch.randn(3, 31))


def tail(width: int = 32, inner: int = 96) -> CompiledBlockTail:
    layers = (linear(width, width), linear(inner, width), linear(width, inner))
    return CompiledBlockTail(layers, (nn.LayerNorm(width), nn.LayerNorm(width)))


@NEEDS_VNNI
@pytest.mark.parametrize(
    "change",
    [
        lambda s: setattr(s, "up", linear(96, 64).struct),
        lambda s: setattr(s, "down", linear(32, 64).struct),
        lambda s: setattr(s, "down", linear(64, 96).struct),
        lambda s: setattr(s, "up", linear(96, 32, "int8").struct),
        lambda s: setattr(s.attention_norm, "width", 64),
        lambda s: setattr(s.mlp_norm, "width", 0),
        lambda s: setattr(s.mlp_norm, "weight", None),
        lambda s: setattr(s.mlp_norm, "epsilon", float("nan")),
        lambda s: setattr(s.mlp_norm, "epsilon", -1.0),
    ],
)
@torch.no_grad()
def test_a_block_refuses_parts_that_do_not_fit(change):
    changed = tail()
    change(changed.struct)
    with pytest.raises(INVALID):
        changed(torch.randn(5, 32), torch.randn(5, 32))


@pytest.mark.parametrize("shapes", [((5, 32), (4, 32)), ((5, 31), (5, 32)), ((5, 32), (5, 64))])
@torch.no_grad()
def test_a_block_refuses_rows_that_do_not_fit(shapes):
    residual, heads = (torch.randn(shape) for shape in shapes)
    with pytest.raises((ValueError, TypeError)):
        tail()(residual, heads)


@torch.no_grad()
def test_layers_refuse_what_does_not_fit():
    layout, x = Layout.of([5, 9]), torch.randn(14, 32)
    layers = CompiledLayers([linear(96, 32)] * 2, [tail(), tail()], 2, torch.float32)
    assert layers(x, layout, 2).shape == (14, 32)
    with pytest.raises(ValueError, match="there are 32 features and 2 layers, not \\[32\\] and 3"):
        layers(x, layout, 3)
    with pytest.raises(ValueError, match="there are 32 features and 2 layers, not \\[31\\] and 2"):
        layers(x[:, :31], layout, 2)
    with pytest.raises(INVALID):
        layers(x[:13], layout, 2)
    # Heads whose sizes do not make up the width, and a projection of another size.
    for qkv, tails, heads in (
        ([linear(96, 32)], [tail()], 4),
        ([linear(64, 32)], [tail()], 2),
        ([linear(96, 32), linear(96, 64)], [tail(), tail(64)], 2),
    ):
        with pytest.raises(INVALID):
            CompiledLayers(qkv, tails, heads, torch.float32)(x, layout, len(qkv))


@pytest.mark.parametrize("label", [5, -1, 2**40, -(2**63)])
def test_a_label_that_is_no_class_is_refused(label):
    logits, labels = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, -100, label])
    reach = f"labels reach from {min(0, label)} to {max(1, label)}, but"
    with pytest.raises(IndexError, match=reach):
        cross_entropy(logits, labels)
    normalizers, loss = torch.zeros(4, 2), torch.ones(())
    struct = abi.Classification(logits.data_ptr(), labels.data_ptr(), 4, 5, -100, 4)
    gradient = torch.full((4, 5), 7.0)
    with pytest.raises(IndexError):
        call_kernel("bothways_cross_entropy_backward", struct, normalizers, loss, gradient)
    assert (gradient == 7).all()
