"""The library's own compiled kernels (`native.c`), for what torch has no operators for on a processor of x86 with AVX-512.

They are compiled when the package is installed, where there is a compiler (`hatch_build.py`). Everything works without them, by
torch's operators: what they give is the same but for rounding.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bothways.core.layout import Layout
from bothways.model.dropout import STEPS, draw_seed

FILE, SOURCE = Path(__file__).with_name("libbothways.so"), Path(__file__).with_name("native.c")
LANES, OUTPUTS = 16, 64
"""Features of a head come in steps of the first, the outputs of a panel of weights are the second; as in `native.c`."""
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Dense(ctypes.Structure):
    _fields_ = [*((name, _POINTER) for name in ("panels", "scales", "zeros", "bias")), ("width", _INT64), ("outputs", _INT64)]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("epsilon", ctypes.c_float)]


class _Rest(ctypes.Structure):
    _fields_ = [("out", _Dense), ("up", _Dense), ("down", _Dense), ("first", _Norm), ("second", _Norm)]


class _Dropout(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_uint64), ("below", ctypes.c_uint32), ("scale", ctypes.c_float)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("qkv", _POINTER), ("offsets", _POINTER),
        *((name, _INT64) for name in ("sequences", "longest", "heads", "size")), ("drop", _Dropout), ("bf16", _INT32),
    ]  # fmt: skip


_ARGUMENTS = {
    "bothways_attend": (ctypes.POINTER(_Batch), _POINTER, _POINTER, _INT32),
    "bothways_attend_backward": (ctypes.POINTER(_Batch), *[_POINTER] * 4, _INT32),
    "bothways_multiply": (ctypes.POINTER(_Dense), _POINTER, _INT64, _POINTER, _INT32),
    "bothways_rest": (ctypes.POINTER(_Rest), _POINTER, _POINTER, _INT64, _POINTER, _INT32),
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernels; none where they are not compiled, not from this source, or the system has no OpenMP for them."""
    try:
        library = ctypes.CDLL(str(FILE))
        library.bothways_source.restype = ctypes.c_uint32
        if library.bothways_source() != zlib.crc32(SOURCE.read_bytes()):
            return None
    except (OSError, AttributeError):
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


@functools.cache
def _level() -> int:
    library = _library()
    return 0 if library is None else int(library.bothways_level())


def attends(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether `attend` is for heads of `size` features in this type: on a CPU with AVX-512, in fp32 and bf16, in steps of 16.

    Not while torch traces a program: there everything has to be its own operators.
    """
    if device.type != "cpu" or size % LANES or dtype not in {torch.float32, torch.bfloat16} or _level() < 1:
        return False
    return not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # type: ignore[no-untyped-call, attr-defined]


def multiplies(precision: Literal["fp32", "int8"]) -> bool:
    """Whether `Dense` layers are for this processor: AVX-512, for int8 with VNNI."""
    return _level() >= {"fp32": 1, "int8": 2}[precision]


def describe() -> str:
    """For reports, in a few words."""
    if _library() is None:
        return "own kernels: cannot be loaded, install again" if FILE.exists() else "own kernels: not compiled"
    return ("own kernels: not for this processor", "own kernels: fp32", "own kernels: fp32 and int8")[_level()]


def _call(name: str, what: str, *arguments: object) -> None:
    """A kernel, on as many threads as torch has; what it gives is 0, or 1 where it found no memory."""
    if getattr(_library(), name)(*arguments, torch.get_num_threads()):
        raise MemoryError(f"no memory for {what}")


def _fp32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().float()


def _place(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _batch(qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout, drop: _Dropout) -> _Batch:
    shape = (layout.sequences, layout.longest, *qkv.shape[2:])
    return _Batch(qkv.data_ptr(), layout.offsets.data_ptr(), *shape, drop, qkv.dtype is torch.bfloat16)


def attend(qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout) -> Float[Tensor, "tokens heads d"]:
    """softmax(QKᵀ/√d)V of each sequence, where `attends` allows it; computed in fp32, without gradients.

    Nothing is padded, and no scores but those of eight queries are in memory at a time.
    """
    qkv = qkv.contiguous()
    found = qkv.new_empty(len(qkv), *qkv.shape[2:])
    batch = _batch(qkv, layout, _Dropout(0, 0, 1.0))
    _call("bothways_attend", f"attention over {layout.longest:,} tokens", batch, found.data_ptr(), None)
    return found


def attend_learning(qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout, rate: float) -> Float[Tensor, "tokens heads d"]:
    """As `attend`, in fp32, differentiable once, with dropout of the probabilities.

    The backward pass computes them again from queries, keys and the logarithm of each row's sum, and draws the dropout again
    from its seed and the number of token and head: so no probability is kept (Dao et al. 2022, algorithm 4).
    """
    result: Tensor = _Attention.apply(qkv, layout, rate)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layout: Layout, rate: float) -> Tensor:
        dropped = min(round(rate * STEPS), STEPS - 1)
        drop = _Dropout(draw_seed() if dropped else 0, dropped * (2**32 // STEPS), STEPS / (STEPS - dropped))
        qkv = qkv.contiguous()
        found = qkv.new_empty(len(qkv), *qkv.shape[2:])
        logs = qkv.new_empty(found.shape[:2])
        batch = _batch(qkv, layout, drop)
        _call("bothways_attend", f"attention over {layout.longest:,} tokens", batch, found.data_ptr(), logs.data_ptr())
        ctx.layout, ctx.drop = layout, drop
        ctx.save_for_backward(qkv, found, logs)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        qkv, found, logs = ctx.saved_tensors
        gradient, result = gradient.contiguous(), torch.empty_like(qkv)
        places = (found.data_ptr(), gradient.data_ptr(), logs.data_ptr(), result.data_ptr())
        batch = _batch(qkv, ctx.layout, ctx.drop)
        _call("bothways_attend_backward", f"attention over {ctx.layout.longest:,} tokens", batch, *places)
        return result, None, None


class _Prepared:
    """What a kernel reads: addresses of tensors that it holds, and that nobody changes; so a copy of it is itself."""

    def __deepcopy__(self, memo: object) -> _Prepared:
        return self


class Dense(_Prepared):
    """A dense layer, its weights in panels of 64 outputs: in int8 with four features of every output side by side.

    Args:
        weight: in fp32, or the codes of `quantised.quantise_weights`.
        scales: of the codes; none in fp32.
        bias: of the outputs; none without one.
    """

    def __init__(
        self,
        weight: Float[Tensor, "outputs width"] | Int8[Tensor, "outputs width"],
        scales: Float[Tensor, " outputs"] | None,
        bias: Float[Tensor, " outputs"] | None,
    ) -> None:
        self.outputs, width = weight.shape
        together = 1 if scales is None else 4
        padded, rows = -(-width // together) * together, -(-self.outputs // OUTPUTS) * OUTPUTS
        filled = torch.nn.functional.pad(weight, (0, padded - width, 0, rows - self.outputs))
        panels = filled.view(-1, OUTPUTS, padded // together, together).transpose(1, 2).contiguous()
        zeros = None if scales is None else weight.sum(1, dtype=torch.int32) * 128  # the code of 0
        self.tensors = panels, scales, zeros, bias
        self.layer = _Dense(*map(_place, self.tensors), width, self.outputs)

    def __call__(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """x·Wᵀ + b in fp32; in int8 rows are rounded before, as `quantised` has it."""
        x, rows = x.float().contiguous(), x.shape[0]
        found = x.new_empty(rows, self.outputs)
        _call("bothways_multiply", "a product", self.layer, x.data_ptr(), rows, found.data_ptr())
        return found


class Rest(_Prepared):
    """What follows the attention in a block whose LayerNorms come last and whose activation is GELU; without dropout.

    Args:
        dense: the projection of what the heads found, and both layers of the feed-forward part.
        norms: LayerNorms, after each of the two.
    """

    def __init__(self, dense: Sequence[Dense], norms: Sequence[nn.LayerNorm]) -> None:
        # Detached ones keep their memory, whatever becomes of the parameters.
        tensors = [(_fp32(norm.weight), _fp32(norm.bias)) for norm in norms]
        self.parts = dense, tensors
        made = (_Norm(*map(_place, pair), norm.eps) for pair, norm in zip(tensors, norms, strict=True))
        self.block = _Rest(*(part.layer for part in dense), *made)

    def __call__(self, start: Float[Tensor, "rows width"], heads: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows width"]:
        """x = first(start + out(heads)), and second(x + down(gelu(up(x)))) of that."""
        start, heads = start.float().contiguous(), heads.float().contiguous()
        found = torch.empty_like(start)
        where = (start.data_ptr(), heads.data_ptr(), start.shape[0], found.data_ptr())
        _call("bothways_rest", "a block", self.block, *where)
        return found
