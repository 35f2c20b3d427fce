"""The structs and functions of `csrc/bothways.h` for `ctypes`; loading them, without PyTorch."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("libkernels.so")
OVERRIDE = "BOTHWAYS_KERNELS"
"""Environment variable: another library file to load, such as one with sanitizers."""

VERSION = 1
"""BOTHWAYS_ABI: increased with every change of a struct, a signature or their meaning."""

# More threads than this are an invalid argument in C: workspaces grow with their number.
MAX_THREADS = 1024

# Fields and arguments have the widths of <stdint.h>, so that no struct depends on the platform's
# int and long. Pointers are passed as integer addresses.
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class DropoutStruct(ctypes.Structure):
    """Dropout: draws of 32 bits below `threshold` are dropped, the others multiplied by `scale`."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("threshold", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    ]


class AttentionBatch(ctypes.Structure):
    """Packed sequences with their queries, keys and values."""

    _fields_ = [
        ("qkv", _POINTER),
        ("cu_seqlens", _POINTER),
        ("tokens", _INT64),
        ("sequences", _INT64),
        ("heads", _INT64),
        ("head_size", _INT64),
        # By value: a struct inside a struct, as in C.
        ("drop", DropoutStruct),
        ("dtype", _INT32),
    ]


class LinearStruct(ctypes.Structure):
    """A linear layer with weights packed in panels."""

    _fields_ = [
        ("panels", _POINTER),
        ("scales", _POINTER),
        ("zero_point_sum", _POINTER),
        ("bias", _POINTER),
        ("in_features", _INT64),
        ("out_features", _INT64),
        # The kernels compare it with the sizes above: a wrong size cannot overrun the panels.
        ("panel_bytes", _INT64),
        ("dtype", _INT32),
    ]


class LayerNorm(ctypes.Structure):
    """A LayerNorm over the last dimension."""

    _fields_ = [
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("width", _INT64),
        ("epsilon", ctypes.c_float),
    ]


class Moments(ctypes.Structure):
    """Mean and inverse deviation of one row."""

    _fields_ = [("mean", ctypes.c_float), ("inverse_deviation", ctypes.c_float)]


class BlockTail(ctypes.Structure):
    """What follows the attention in a post-norm block."""

    _fields_ = [
        ("out", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("attention_norm", LayerNorm),
        ("mlp_norm", LayerNorm),
    ]


class EncoderLayer(ctypes.Structure):
    """A whole post-norm block."""

    _fields_ = [("qkv", LinearStruct), ("tail", BlockTail)]


class Classification(ctypes.Structure):
    """Rows of logits and their labels."""

    _fields_ = [
        ("logits", _POINTER),
        ("labels", _POINTER),
        ("rows", _INT64),
        ("classes", _INT64),
        ("ignore_index", _INT64),
        ("dtype", _INT32),
    ]


class LogNormalizer(ctypes.Structure):
    """The largest logit of a row, and the logarithm of the sum of the exponentials."""

    _fields_ = [("largest", ctypes.c_float), ("log_sum", ctypes.c_float)]


class AdamWTable(ctypes.Structure):
    """A table whose rows are updated by AdamW, and the constants of one step."""

    _fields_ = [
        ("weight", _POINTER),
        ("average", _POINTER),
        ("squares", _POINTER),
        ("seen", _POINTER),
        ("rows", _INT64),
        ("width", _INT64),
        *((name, ctypes.c_float) for name in ("scale", "decay", "rate", "first", "second")),
        *((name, ctypes.c_float) for name in ("keep", "correction", "epsilon")),
    ]


STRUCTS = (
    DropoutStruct,
    AttentionBatch,
    LinearStruct,
    LayerNorm,
    Moments,
    BlockTail,
    EncoderLayer,
    Classification,
    LogNormalizer,
    AdamWTable,
)
"""In the order in which `bothways_abi` gives their sizes."""

SIGNATURES = {
    "bothways_abi": (_POINTER, _INT32),
    "bothways_available": (),
    "bothways_limit": (_INT32,),
    "bothways_attention": (*[_POINTER] * 3, _INT32),
    "bothways_attention_backward": (*[_POINTER] * 5, _INT32),
    "bothways_linear": (*[_POINTER] * 2, _INT32, _INT64, _POINTER, _INT32, _INT32),
    "bothways_block_tail": (*[_POINTER] * 3, _INT32, _INT64, _POINTER, _INT32),
    "bothways_encoder_layers": (_POINTER, _INT64, *[_POINTER] * 2, _INT32),
    "bothways_add_norm": (*[_POINTER] * 4, _INT32, _INT64, *[_POINTER] * 3, _INT32),
    "bothways_add_norm_backward": (
        *[_POINTER] * 5, _INT64, *[_POINTER] * 2, _INT32, *[_POINTER] * 2, _INT32,
    ),
    "bothways_cross_entropy": (*[_POINTER] * 4, _INT32),
    "bothways_cross_entropy_backward": (*[_POINTER] * 4, _INT32),
    "bothways_adamw_rows": (*[_POINTER] * 3, _INT64, _INT32),
}  # fmt: skip
"""Argument types of each function; all of them return an int32."""


class Loaded(NamedTuple):
    """A library, or the reason why there is none."""

    library: ctypes.CDLL | None
    problem: str


@functools.cache
def load() -> Loaded:
    """Return the kernels, unless they are missing or belong to another version of the package."""
    return load_library(library_file(), SIGNATURES, "bothways_abi", VERSION, STRUCTS)


def library_file() -> Path:
    """Return the file of the kernels; the tokenizer's (`text.wordpiece`) is next to it."""
    return Path(os.environ.get(OVERRIDE) or FILE)


def load_library(
    file: Path,
    signatures: Mapping[str, tuple[Any, ...]],
    abi: str,
    version: int,
    structs: tuple[type[ctypes.Structure], ...],
) -> Loaded:
    """Load a library, if its function `abi` has this version and these sizes of structs.

    A library of another version may have other structs under the same names of functions: they are
    compared before anything is computed.
    """
    system = f"{platform.system()} {platform.machine()}"
    if not file.exists():
        if system != "Linux x86_64":
            return Loaded(None, f"not available for {system}")
        return Loaded(None, "missing: install a C compiler, then install bothways again")
    try:
        library = ctypes.CDLL(str(file))
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int32
    except (OSError, AttributeError) as error:
        return Loaded(None, f"cannot be loaded ({error}): install bothways again")
    sizes = (ctypes.c_int64 * len(structs))()
    if getattr(library, abi)(sizes, len(sizes)) != version or [*sizes] != [
        ctypes.sizeof(struct) for struct in structs
    ]:
        return Loaded(None, "of another version of bothways: install bothways again")
    return Loaded(library, "")
