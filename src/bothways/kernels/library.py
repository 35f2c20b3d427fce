"""The library's own compiled kernels (`csrc`), for what torch has no operators for on a processor of x86 with AVX-512.

They are compiled when the package is installed, where there is a compiler (`hatch_build.py`). Everything works without them, by
torch's operators: what they give is the same but for rounding.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from bothways.core.layout import Layout
from bothways.kernels.dropout import STEPS, draw_seed

FILE, SOURCE = Path(__file__).with_name("libbothways.so"), Path(__file__).with_name("csrc")
LANES = 16
"""Features of a head come in steps of it; as in `csrc`."""
POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class DropoutFields(ctypes.Structure):
    """A dropout, as `csrc` has it: of 2³² draws so many are dropped, the rest is scaled."""

    _fields_ = [("seed", ctypes.c_uint64), ("below", ctypes.c_uint32), ("scale", ctypes.c_float)]


class BatchFields(ctypes.Structure):
    """Packed sequences and their heads, as `csrc` has them."""

    _fields_ = [
        ("qkv", POINTER), ("offsets", POINTER),
        *((name, INT64) for name in ("sequences", "longest", "heads", "size")), ("drop", DropoutFields), ("bf16", INT32),
    ]  # fmt: skip


_ARGUMENTS = {
    "bothways_attend": (ctypes.POINTER(BatchFields), POINTER, POINTER, INT32),
    "bothways_attend_backward": (ctypes.POINTER(BatchFields), *[POINTER] * 4, INT32),
    "bothways_multiply": (POINTER, POINTER, INT32, INT64, POINTER, INT32, INT32),
    "bothways_rest": (POINTER, POINTER, POINTER, INT32, INT64, POINTER, INT32),
    "bothways_layers": (POINTER, INT64, ctypes.POINTER(BatchFields), POINTER, INT32),
    "bothways_add_norm": (*[POINTER] * 4, INT64, *[POINTER] * 3, INT32),
    "bothways_add_norm_backward": (*[POINTER] * 3, INT64, *[POINTER] * 4, INT32),
    "bothways_lose": (*[POINTER] * 4, INT32),
    "bothways_lose_backward": (*[POINTER] * 4, INT32),
    "bothways_features": (INT32,),
}


class Feature(enum.IntFlag):
    """What a processor has of what the kernels use, in the bits of `csrc`."""

    AVX512 = 1
    VNNI = 2
    BF16 = 4
    TILES = 8
    """AMX in bf16 and int8, as far as the system lets this process use it."""


EVERY = Feature(15)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernels; none where they are not compiled, not from this source, or the system has no OpenMP for them."""
    try:
        library = ctypes.CDLL(str(FILE))
        library.bothways_source.restype = ctypes.c_uint32
        if library.bothways_source() != zlib.crc32(
            b"".join(file.read_bytes() for file in sorted(SOURCE.iterdir()))
        ):
            return None
    except (OSError, AttributeError):
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.bothways_features(EVERY)
    return library


@functools.cache
def kernel_features() -> Feature:
    """What the kernels use: all that the processor has; nothing where they cannot be loaded."""
    return limit(EVERY)


def limit(most: Feature) -> Feature:
    """Let the kernels use no more than these, as on another processor; what they use."""
    library = _library()
    return Feature(0) if library is None else Feature(library.bothways_features(most))


def traced() -> bool:
    """Whether torch traces a program now, in which everything has to be its own operators."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[no-untyped-call, attr-defined]


def serves(device: torch.device) -> bool:
    """Whether there are kernels in fp32 for this device: a CPU with AVX-512, while nothing is `traced`, and nobody is handed
    torch's operators, as for fake tensors or a count of operations."""
    return (
        device.type == "cpu"
        and bool(kernel_features())
        and not traced()
        and not torch._C._len_torch_dispatch_stack()
    )


def attends(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether `attend` is for heads of `size` features in this type: where it `serves`, in fp32 and bf16, in steps of 16."""
    return size % LANES == 0 and dtype in {torch.float32, torch.bfloat16} and serves(device)


_NEEDED = {"fp32": Feature.AVX512, "bf16": Feature.BF16, "int8": Feature.VNNI}


def multiplies(precision: Literal["fp32", "bf16", "int8"]) -> bool:
    """Whether `Dense` layers are for this processor: AVX-512, for bf16 and int8 with its instructions for them."""
    return _NEEDED[precision] in kernel_features()


def describe_kernels() -> str:
    """For reports, in a few words."""
    if _library() is None:
        return (
            "own kernels: cannot be loaded, install again"
            if FILE.exists()
            else "own kernels: not compiled"
        )
    used = [precision for precision, needed in _NEEDED.items() if needed in kernel_features()]
    in_tiles = " with AMX" if Feature.TILES in kernel_features() else ""
    return (
        f"own kernels: {', '.join(used)}{in_tiles}"
        if used
        else "own kernels: not for this processor"
    )


def call(name: str, what: str, *arguments: object) -> None:
    """A kernel, on as many threads as torch has; what it gives is 0, or 1 where it found no memory."""
    if getattr(_library(), name)(*arguments, torch.get_num_threads()):
        raise MemoryError(f"no memory for {what}")


def dropping(rate: float) -> DropoutFields:
    """A dropout with a new seed, at the rate that `dropout` would have."""
    dropped = min(round(rate * STEPS), STEPS - 1)
    return DropoutFields(
        draw_seed() if dropped else 0, dropped * (2**32 // STEPS), STEPS / (STEPS - dropped)
    )


def _batch(
    qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout, drop: DropoutFields
) -> BatchFields:
    shape = (layout.sequences, layout.max_seqlen, *qkv.shape[2:])
    return BatchFields(
        qkv.data_ptr(), layout.cu_seqlens.data_ptr(), *shape, drop, qkv.dtype is torch.bfloat16
    )


def attend(
    qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout
) -> Float[Tensor, "tokens heads d"]:
    """softmax(QKᵀ/√d)V of each sequence, where `attends` allows it; computed in fp32, without gradients.

    Nothing is padded, and no scores but those of eight queries are in memory at a time.
    """
    qkv = qkv.contiguous()
    found = qkv.new_empty(len(qkv), *qkv.shape[2:])
    batch = _batch(qkv, layout, DropoutFields(0, 0, 1.0))
    call(
        "bothways_attend",
        f"attention over {layout.max_seqlen:,} tokens",
        batch,
        found.data_ptr(),
        None,
    )
    return found


def attend_learning(
    qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout, rate: float
) -> Float[Tensor, "tokens heads d"]:
    """As `attend`, differentiable once, with dropout of the probabilities; in fp32, and by AMX in bf16.

    The backward pass computes them again from queries, keys and the logarithm of each row's sum, and draws the dropout again
    from its seed and the number of token and head: so no probability is kept (Dao et al. 2022, algorithm 4).
    """
    result: Tensor = _Attention.apply(qkv, layout, rate)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, layout: Layout, rate: float) -> Tensor:
        qkv, drop = qkv.contiguous(), dropping(rate)
        found = qkv.new_empty(len(qkv), *qkv.shape[2:])
        logs = qkv.new_empty(found.shape[:2], dtype=torch.float32)
        batch = _batch(qkv, layout, drop)
        call(
            "bothways_attend",
            f"attention over {layout.max_seqlen:,} tokens",
            batch,
            found.data_ptr(),
            logs.data_ptr(),
        )
        ctx.layout, ctx.drop = layout, drop
        ctx.save_for_backward(qkv, found, logs)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        qkv, found, logs = ctx.saved_tensors
        gradient, result = gradient.to(qkv.dtype).contiguous(), torch.empty_like(qkv)
        places = (found.data_ptr(), gradient.data_ptr(), logs.data_ptr(), result.data_ptr())
        batch = _batch(qkv, ctx.layout, ctx.drop)
        call(
            "bothways_attend_backward",
            f"attention over {ctx.layout.max_seqlen:,} tokens",
            batch,
            *places,
        )
        return result, None, None
