"""The compiled kernels as a library: what this processor can run, and calls.

They are compiled when the package is installed, where there is a C compiler (`build_kernels.py`).
Everything works without them, by PyTorch's operators, with the same results up to rounding:

| system | compiled | processor | kernels |
|---|---|---|---|
| Linux on x86-64 | yes | AVX-512 | attention, norms, losses, AdamW, codes, linear layers in fp32 |
| the same | yes | with VNNI | linear layers in int8, too |
| the same | by gcc 10 or clang 9 | with AVX512-BF16 | linear layers in bf16, too |
| the same | by gcc 11 or clang 12 | with AMX | tiles for all of these, attention in bf16 |
| any other | | | none |
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import logging
from collections.abc import Iterator
from typing import Literal

import torch

from bothways.model.kernels import abi

FORMATS = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}
"""The number of a dtype, which is its number of bytes."""

logger = logging.getLogger(__name__)


class Feature(enum.IntFlag):
    """CPU features that the kernels use; the bits of `csrc`."""

    AVX512 = 1
    VNNI = 2
    BF16 = 4
    AMX = 8
    """AMX in bf16 and int8, if the system lets this process use it."""


ALL_FEATURES = Feature(15)


@functools.cache
def available() -> Feature:
    """Return the CPU features that the compiled kernels can use; none if they are not loaded.

    The first call in a process logs one line (INFO) that names the kernels.
    """
    library = abi.load().library
    features = Feature(0) if library is None else Feature(library.bothways_available())
    logger.info(_describe(features))
    return features


_limited: Feature | None = None


def kernel_features() -> Feature:
    """Return the features in use: those available, within a `limit`."""
    return available() if _limited is None else _limited


@contextlib.contextmanager
def limit(features: Feature) -> Iterator[Feature]:
    """Let all kernels use only these features meanwhile, as on another processor.

    Other threads are affected, too: for tests and measurements.

    Yields:
        The features in use.
    """
    global _limited  # noqa: PLW0603
    library, outer = abi.load().library, _limited
    # C keeps the limit for direct calls, Python for its choice of kernels.
    previous = 0 if library is None else library.bothways_limit(features)
    _limited = features & available()
    try:
        yield _limited
    finally:
        _limited = outer
        if library is not None:
            library.bothways_limit(previous)


def is_tracing() -> bool:
    """Return True if PyTorch traces a program, which has to consist of its operators alone."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch.jit.is_tracing())  # type: ignore[no-untyped-call, attr-defined]


def runs_on(device: torch.device) -> bool:
    """Return True if there are kernels in fp32 for this device now.

    That is a CPU with AVX-512, unless PyTorch's operators are observed: when a program is traced,
    operations are counted, or tensors are fake.
    """
    return (
        device.type == "cpu"
        and bool(kernel_features())
        and not is_tracing()
        and not torch._C._len_torch_dispatch_stack()
    )


# A vector of AVX-512 holds 16 fp32 numbers; heads of other sizes would need masks everywhere.
HEAD_STEP = 16
"""The number of features of a head is a multiple of it."""


def supports_heads(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True if the attention kernel runs on this device for heads of this dtype and size."""
    return (
        head_size % HEAD_STEP == 0 and dtype in {torch.float32, torch.bfloat16} and runs_on(device)
    )


_NEEDED = {"fp32": Feature.AVX512, "bf16": Feature.BF16, "int8": Feature.VNNI}


def multiplies(precision: Literal["fp32", "bf16", "int8"]) -> bool:
    """Return True if there is a linear layer in this precision for this processor."""
    return _NEEDED[precision] in kernel_features()


def describe_kernels() -> str:
    """Return one line that names the kernels in use, or says why there are none and what to do.

    Example: "kernels: AVX-512 + VNNI + BF16 + AMX, 2 threads".
    """
    return _describe(kernel_features())


def _describe(features: Feature) -> str:
    if abi.load().library is None:
        return f"kernels: PyTorch's operators; the compiled ones are {abi.load().problem}"
    if Feature.AVX512 not in features:
        return "kernels: PyTorch's operators; the processor has no AVX-512"
    names = [str(feature.name) for feature in Feature if feature in features]
    used = " + ".join(names).replace("AVX512", "AVX-512")
    threads = torch.get_num_threads()
    return f"kernels: {used}, {threads} thread{'' if threads == 1 else 's'}"


class LabelError(IndexError):
    """A label is not the number of a class."""


def call_kernel(name: str, *arguments: object) -> None:
    """Call a kernel with as many threads as PyTorch uses.

    Args:
        arguments: numbers, and what C reads by its address: tensors, structs, None.

    Raises:
        LabelError: a label is out of range.
        MemoryError: there is no memory for its workspaces.
        RuntimeError: the processor, or a `limit`, does not allow it.
        ValueError: an argument is invalid.
    """
    # Read at each call: the program may change PyTorch's threads at any time.
    threads = min(torch.get_num_threads(), abi.MAX_THREADS)
    addresses = (
        x.data_ptr()
        if isinstance(x, torch.Tensor)
        else ctypes.byref(x)
        if isinstance(x, ctypes.Structure)
        else x
        for x in arguments
    )
    match getattr(abi.load().library, name)(*addresses, threads):
        case 0:
            return
        case 1:
            raise MemoryError(f"{name}: not enough memory for workspaces")
        case 3:
            raise RuntimeError(f"{name} needs instructions that are not available here")
        case 4:
            raise LabelError(f"{name}: a label is not the number of a class")
        case _:
            raise ValueError(f"{name}: an argument is invalid")
