"""The structs and functions of `csrc/bothways.h` for `ctypes`; loading them, without PyTorch."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bothways.core.errors import ConfigError

FILE = Path(__file__).with_name("libkernels.so")
OVERRIDE = "BOTHWAYS_KERNELS"
"""Environment variable: another library file to load, such as one with sanitizers."""

VERSION = 2
"""BOTHWAYS_ABI: increased with every change of a struct, a signature or their meaning."""

# More threads than this are an invalid argument in C: workspaces grow with their number.
MAX_THREADS = 1024

# Fields and arguments have the widths of <stdint.h>, so that no struct depends on the platform's
# int and long. Pointers are passed as integer addresses.
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_FLOAT = ctypes.c_float


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one type, in order."""
    return [(name, kind) for name in names.split()]


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
        *_fields(_POINTER, "qkv cu_seqlens"),
        *_fields(_INT64, "tokens sequences heads head_size"),
        # By value: a struct inside a struct, as in C.
        ("drop", DropoutStruct),
        ("dtype", _INT32),
    ]


class LinearStruct(ctypes.Structure):
    """A linear layer with weights packed in panels."""

    _fields_ = [
        *_fields(_POINTER, "panels scales zero_point_sum bias"),
        # The kernels compare the bytes with the sizes: a wrong size cannot overrun the panels.
        *_fields(_INT64, "in_features out_features panel_bytes"),
        ("dtype", _INT32),
    ]


class LayerNorm(ctypes.Structure):
    """A LayerNorm over the last dimension."""

    _fields_ = [
        *_fields(_POINTER, "weight bias"),
        ("width", _INT64),
        ("epsilon", _FLOAT),
    ]


class Moments(ctypes.Structure):
    """Mean and inverse deviation of one row."""

    _fields_ = _fields(_FLOAT, "mean inverse_deviation")


class BlockTail(ctypes.Structure):
    """What follows the attention in a post-norm block."""

    _fields_ = _fields(LinearStruct, "out up down") + _fields(LayerNorm, "attention_norm mlp_norm")


class EncoderLayer(ctypes.Structure):
    """A whole post-norm block."""

    _fields_ = [("qkv", LinearStruct), ("tail", BlockTail)]


class Classification(ctypes.Structure):
    """Rows of logits and their labels."""

    _fields_ = [
        *_fields(_POINTER, "logits labels"),
        *_fields(_INT64, "rows classes ignore_index"),
        ("dtype", _INT32),
    ]


class LogNormalizer(ctypes.Structure):
    """The largest logit of a row, and the logarithm of the sum of the exponentials."""

    _fields_ = _fields(_FLOAT, "largest log_sum")


class AdamWTable(ctypes.Structure):
    """A table whose rows are updated by AdamW, and the constants of one step."""

    _fields_ = [
        *_fields(_POINTER, "weight average squares seen"),
        *_fields(_INT64, "rows width"),
        *_fields(_FLOAT, "scale decay rate first second keep correction epsilon"),
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
    "bothways_code_products": (*[_POINTER] * 3, *[_INT64] * 2, _POINTER, _INT32),
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

    Raises:
        ConfigError: there is none where `BOTHWAYS_KERNELS` says.
    """

    def refused(problem: str, fix: str = ": install bothways again") -> Loaded:
        if os.environ.get(OVERRIDE):
            advice = "Name a library that build_kernels.py has written, or unset the variable."
            raise ConfigError(f"{file} is {problem}", where=OVERRIDE, fix=advice)
        return Loaded(None, problem + fix)

    system = f"{platform.system()} {platform.machine()}"
    if not file.exists():
        if system != "Linux x86_64":
            return refused(f"not available for {system}", "")
        return refused("missing", ": install a C compiler, then install bothways again")
    try:
        library = ctypes.CDLL(str(file))
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int32
    except (OSError, AttributeError) as error:
        return refused(f"not loadable ({error})")
    sizes = (ctypes.c_int64 * len(structs))()
    if getattr(library, abi)(sizes, len(sizes)) != version or [*sizes] != [
        ctypes.sizeof(struct) for struct in structs
    ]:
        return refused("of another version of bothways")
    return Loaded(library, "")
