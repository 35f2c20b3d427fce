"""Vectors of a byte or a bit for each component, as `quantize_embeddings` of sentence-transformers.

int8, uint8       floor(255 · (v − lowest) / (highest − lowest)), by component; int8 less 128
binary, ubinary   v > 0, eight components a byte, the first one highest; binary less 128
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bothways.core.errors import ConfigError

VectorType = Literal["float32", "int8", "uint8", "binary", "ubinary"]


def ranges_of(vectors: Any) -> NDArray[np.float32]:
    """Return the lowest and the highest value of each component of several vectors."""
    array = np.asarray(vectors)
    if array.ndim != 2 or len(array) < 2 or array.dtype.kind != "f":
        message = f"must be two vectors or more in floating point, not {array.dtype}{array.shape}"
        fix = "Give vectors of some hundred texts or more; their ranges are used."
        raise ConfigError(message, where="calibration", fix=fix)
    return np.stack([array.min(axis=0), array.max(axis=0)]).astype(np.float32)


def quantize(
    vectors: NDArray[np.float32], kind: VectorType, ranges: Any = None
) -> NDArray[np.generic]:
    """Return vectors `(…, width)` in another type, to the bit as sentence-transformers does.

    Args:
        ranges: the lowest and the highest value of each component `(2, width)`, for int8 and uint8.

    Raises:
        ConfigError: there are no ranges, or they do not fit.
    """
    if kind == "float32":
        return vectors
    if "binary" in kind:
        bits: NDArray[np.uint8] = np.packbits(vectors > 0, axis=-1)
        return bits if kind == "ubinary" else (bits - np.uint8(128)).view(np.int8)
    bounds = None if ranges is None else np.asarray(ranges, np.float32)
    if bounds is None or bounds.shape != (2, vectors.shape[-1]) or not np.isfinite(bounds).all():
        message = f"{kind} needs the lowest and the highest value of each component"
        if bounds is not None:
            message = f"{message}: 2 rows of {vectors.shape[-1]} finite numbers, not {bounds.shape}"
        fix = "Give the ranges of many vectors of this model; binary and ubinary need none."
        raise ConfigError(message, where="ranges", fix=fix)
    if (bounds[0] > bounds[1]).any():
        message, fix = "a lowest value is above the highest one", "Give the lowest values first."
        raise ConfigError(message, where="ranges", fix=fix)
    steps = (bounds[1] - bounds[0]) / 255
    # A component that never varied has step 0; dividing by 1 gives it code 0.
    codes = np.clip(np.floor((vectors - bounds[0]) / np.where(steps == 0, 1, steps)), 0, 255)
    result: NDArray[np.generic] = (
        codes.astype(np.uint8) if kind == "uint8" else (codes - 128).astype(np.int8)
    )
    return result
