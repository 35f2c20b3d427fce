"""Dense layers of the library's own kernels, for predictions: their weights in panels, alone and as whole blocks.

See `native` for what these are and where they come from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

from bothways.core.errors import ConfigError
from bothways.core.layout import Layout
from bothways.kernels.add_norm import NormFields
from bothways.kernels.library import INT32, INT64, POINTER, BatchFields, DropoutFields, call

OUTPUTS, LINE = 32, 64
"""Outputs of a panel, and bytes of a line; as in `csrc`."""


class _Dense(ctypes.Structure):
    _fields_ = [
        *((name, POINTER) for name in ("panels", "scales", "zeros", "bias")),
        ("width", INT64), ("outputs", INT64), ("kind", INT32),
    ]  # fmt: skip


class _Rest(ctypes.Structure):
    _fields_ = [
        ("out", _Dense),
        ("up", _Dense),
        ("down", _Dense),
        ("first", NormFields),
        ("second", NormFields),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [("qkv", _Dense), ("rest", _Rest)]


def _readable(x: Tensor) -> Tensor:
    """In fp32, or in bf16 as it is."""
    return (x if x.dtype is torch.bfloat16 else x.float()).contiguous()


def _fp32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float().contiguous()


def _place(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def refuse_gradients(layer: object, *x: Tensor) -> None:
    """ConfigError: gradients are asked for, of a layer that has none."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in x):
        what = f"is for predictions: {type(layer).__name__} has no gradients"
        raise ConfigError(
            what, where="precision", fix="Train the model itself, and prepare what comes of it."
        )


class _Held:
    """What a kernel reads: addresses of tensors that it holds, and that nobody changes; so a copy of it is itself."""

    def __deepcopy__(self, memo: object) -> _Held:
        return self


_KINDS = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}
"""Bytes of a number."""


class Dense(_Held):
    """A dense layer, its weights in panels of 32 outputs, four bytes of each side by side.

    Args:
        weight: in fp32, in bf16, or the codes of `quantised.quantise_weights`.
        scales: of the codes; none for numbers.
        bias: of the outputs; none without one.
        dtype: of what it gives, fp32 or bf16.
    """

    def __init__(
        self,
        weight: Float[Tensor, "outputs width"] | Int8[Tensor, "outputs width"],
        scales: Float[Tensor, " outputs"] | None,
        bias: Float[Tensor, " outputs"] | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.outputs, self.width = weight.shape
        self.dtype, size = dtype, _KINDS[weight.dtype]
        together = 4 // size
        step = together if size == 4 else LINE // size  # a tile reads whole lines
        padded, rows = -(-self.width // step) * step, -(-self.outputs // OUTPUTS) * OUTPUTS
        filled = torch.nn.functional.pad(weight, (0, padded - self.width, 0, rows - self.outputs))
        panels = filled.view(-1, OUTPUTS, padded // together, together).transpose(1, 2).contiguous()
        zeros = None if scales is None else weight.sum(1, dtype=torch.int32) * 128  # the code of 0
        self.tensors = panels, scales, zeros, _fp32(bias)
        self.layer = _Dense(*map(_place, self.tensors), self.width, self.outputs, size)

    def __call__(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """x·Wᵀ + b of rows in fp32 or bf16; in int8 they are rounded before, as `quantised` has it."""
        x, rows = _readable(x), x.shape[0]
        found = x.new_empty(rows, self.outputs, dtype=self.dtype)
        to = (found.data_ptr(), self.dtype is torch.bfloat16)
        call(
            "bothways_multiply",
            "a product",
            ctypes.byref(self.layer),
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            rows,
            *to,
        )
        return found


class Rest(_Held):
    """What follows the attention in a block whose LayerNorms come last and whose activation is GELU; without dropout.

    Args:
        dense: the projection of what the heads found, and both layers of the feed-forward part; all of one type.
        norms: LayerNorms, after each of the two.
    """

    def __init__(self, dense: Sequence[Dense], norms: Sequence[nn.LayerNorm]) -> None:
        # Detached ones keep their memory, whatever becomes of the parameters.
        tensors = [(_fp32(norm.weight), _fp32(norm.bias)) for norm in norms]
        self.dense, self.tensors = dense, tensors
        made = (
            NormFields(*map(_place, pair), norm.eps)
            for pair, norm in zip(tensors, norms, strict=True)
        )
        self.block = _Rest(*(part.layer for part in dense), *made)

    def __call__(
        self, start: Float[Tensor, "rows width"], heads: Float[Tensor, "rows inputs"]
    ) -> Float[Tensor, "rows width"]:
        """x = first(start + out(heads)), and second(x + down(gelu(up(x)))) of that, in fp32; heads also in bf16."""
        refuse_gradients(self, start, heads)
        start, heads = start.float().contiguous(), _readable(heads)
        found = torch.empty_like(start)
        where = (
            start.data_ptr(),
            heads.data_ptr(),
            heads.dtype is torch.bfloat16,
            start.shape[0],
            found.data_ptr(),
        )
        call("bothways_rest", "a block", ctypes.byref(self.block), *where)
        return found


class Layers(_Held):
    """Whole blocks, one after the other: attention of all to all, and what follows it.

    Args:
        qkv: the projections to queries, keys and values of each, all of one type.
        rests: what follows the attention of each.
        heads: of each.
        dtype: in which they attend.
    """

    def __init__(
        self, qkv: Sequence[Dense], rests: Sequence[Rest], heads: int, dtype: torch.dtype
    ) -> None:
        self.parts = qkv, rests
        self.shape = (heads, rests[0].dense[0].width // heads)
        self.bf16 = dtype is torch.bfloat16
        layers = [_Layer(first.layer, rest.block) for first, rest in zip(qkv, rests, strict=True)]
        self.layers = (ctypes.POINTER(_Layer) * len(layers))(*map(ctypes.pointer, layers))

    def __call__(
        self, x: Float[Tensor, "tokens width"], layout: Layout, depth: int
    ) -> Float[Tensor, "tokens width"]:
        """What the first `depth` of them make of x, in fp32; computed for some sequences at a time, which stay in the cache."""
        refuse_gradients(self, x)
        x = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        offsets, drop = layout.cu_seqlens, DropoutFields(0, 0, 1.0)
        batch = BatchFields(
            None,
            offsets.data_ptr(),
            layout.sequences,
            layout.max_seqlen,
            *self.shape,
            drop,
            self.bf16,
        )
        call(
            "bothways_layers",
            f"{len(x):,} tokens",
            self.layers,
            depth,
            ctypes.byref(batch),
            x.data_ptr(),
        )
        return x
