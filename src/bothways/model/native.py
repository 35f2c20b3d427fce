"""The library's own compiled kernels (`native.c`), for what torch has no operators for on a processor of x86 with AVX-512.

They are compiled when the package is installed, where there is a compiler (`hatch_build.py`). Everything works without them, by
torch's operators: what they give is the same but for rounding.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from bothways.core.layout import Layout

FILE = Path(__file__).with_name("libbothways.so")
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_ARGUMENTS = {
    "bothways_attend": (_POINTER, _POINTER, _INT64, _INT64, _INT64, _INT64, _POINTER, _INT32, _INT32),
    "bothways_multiply": (_POINTER, _INT64, _INT64, *[_POINTER] * 4, _INT64, *[_POINTER] * 3, _INT32),
}
LANES, OUTPUTS = 16, 64
"""Features of a head come in steps of the first, the outputs of a panel of weights are the second; as in `native.c`."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The kernels; none where they are not compiled, or the system has no OpenMP for them."""
    try:
        library = ctypes.CDLL(str(FILE))
    except OSError:
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


def multiplies() -> bool:
    """Whether `Panels` are for this processor: AVX-512 with VNNI."""
    return _level() > 1


def describe() -> str:
    """One line for reports."""
    if _library() is None:
        return "own kernels: cannot be loaded here" if FILE.exists() else "own kernels: not compiled"
    return ("own kernels: not for this processor", "own kernels: attention", "own kernels: attention, int8")[_level()]


def attend(qkv: Float[Tensor, "tokens 3 heads d"], layout: Layout) -> Float[Tensor, "tokens heads d"]:
    """softmax(QKᵀ/√d)V of each sequence, where `attends` allows it; computed in fp32, without gradients.

    Nothing is padded, and no scores but those of eight queries are in memory at a time.
    """
    library = _library()
    assert library is not None
    tokens, _, heads, size = qkv.shape
    qkv, found = qkv.contiguous(), qkv.new_empty(tokens, heads, size)
    failed = library.bothways_attend(
        qkv.data_ptr(), layout.offsets.data_ptr(), layout.sequences, layout.longest, heads, size,
        found.data_ptr(), qkv.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"attention over a sequence of {layout.longest:,} tokens")
    return found


class Panels:
    """Weights in int8 as the kernel reads them: panels of 64 outputs, in each four features of every output side by side.

    Args:
        codes, scales: as `quantised.quantise_weights` gives them.
        bias: of the outputs; none without one.
    """

    def __init__(
        self, codes: Int8[Tensor, "outputs width"], scales: Float[Tensor, " outputs"], bias: Float[Tensor, " outputs"] | None
    ) -> None:
        self.outputs, self.width = codes.shape
        padded, rows = -(-self.width // 4) * 4, -(-self.outputs // OUTPUTS) * OUTPUTS
        filled = torch.nn.functional.pad(codes, (0, padded - self.width, 0, rows - self.outputs))
        self.panels = filled.view(-1, OUTPUTS, padded // 4, 4).transpose(1, 2).contiguous()
        self.padded, self.scales, self.bias = padded, scales.contiguous(), bias
        self.zeros = codes.sum(1, dtype=torch.int32) * 128  # what the code of 0, which is 128, adds to each output

    def __call__(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows outputs"]:
        """Rounds the rows, multiplies, scales and adds the bias; in fp32."""
        library = _library()
        assert library is not None
        x, rows = x.contiguous(), len(x)
        found = x.new_empty(rows, self.outputs)
        codes, scales = x.new_empty(rows, self.padded, dtype=torch.uint8), x.new_empty(rows)
        library.bothways_multiply(
            x.data_ptr(), rows, self.width, self.panels.data_ptr(), self.scales.data_ptr(), self.zeros.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(), self.outputs, codes.data_ptr(), scales.data_ptr(),
            found.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return found
