"""The tensors of a model folder, read one at a time from the file that holds them.

safetensors is preferred. Its tensors are read into memory and never mapped: writing into a
mapped file changes the model of a running process, and shortening it ends the process. A pickle is
opened only by torch's reader of plain tensors, which runs no code.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bothways.core.errors import FolderError, argument
from bothways.core.files import read_object
from bothways.core.terminal import listed
from bothways.hub.resolve import ADAPTER_WEIGHTS
from bothways.model.families.weight_names import Shape

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_PARTS = (".safetensors", ".pkl", ".pickle", ".joblib")
AGAIN = "Copy or download the file again; a tiny file is an unresolved Git LFS pointer."


@dataclass(frozen=True)
class Weights:
    """The tensors of a file or of several.

    Attributes:
        file: the file, or the index of several.
        shapes: the shape of every tensor, by name.
        read: returns a tensor by name, on the CPU, as stored; it shares no memory with others.
        wrappers: prefixes of wrapper modules, such as `module.`, that were removed from names.
        adapter: a note on the adapter that changes the tensors; empty without one.
    """

    file: Path
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]
    wrappers: tuple[str, ...] = ()
    adapter: str = ""


def open_adapter_weights(folder: Path) -> Weights:
    """Open the tensors of an adapter of PEFT.

    Raises:
        FolderError: as `open_weights`.
    """
    if (folder / ADAPTER_WEIGHTS).is_file():
        return _open_safetensors(folder / ADAPTER_WEIGHTS)
    if (pickled := folder / "adapter_model.bin").is_file():
        return _open_pickle(pickled)
    raise FolderError(f"holds no {ADAPTER_WEIGHTS}", where=folder, fix=AGAIN)


def open_weights(folder: Path) -> Weights:
    """Open `model.safetensors` or its shards, else `pytorch_model.bin` or its shards.

    Raises:
        FolderError: there are none, a file is missing, truncated or corrupt, or a pickle holds
            anything but tensors.
    """
    for name, open_file in _READERS.items():
        if (folder / name).is_file():
            return _unwrap(open_file(folder / name))
    message = f"holds no weights: none of {', '.join(_READERS)}"
    fix = "Weights for TensorFlow, Flax or ONNX alone cannot be read."
    files = sorted(file.name for file in folder.iterdir() if file.suffix in _SUFFIXES)
    if files:
        fix = f"It has {listed(files)}; rename the model's own weights to model.safetensors."
    if (folder / "onnx").is_dir() or (folder / "openvino").is_dir():
        fix = (
            f"An exported graph is computed with {argument(runtime='onnxruntime')} or "
            f"{argument(runtime='openvino')}."
        )
    raise FolderError(message, where=folder, fix=fix)


_WRAPPERS = re.compile(
    r"(?:(?:^|(?<=\.))_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)|^module)\."
)
"""Modules that torch.compile, FSDP and DataParallel put around a model or a part of it."""


def _unwrap(weights: Weights) -> Weights:
    """Return the tensors under the names that they have without modules that only wrap.

    Example: `module.bert.pooler.dense.bias` → `bert.pooler.dense.bias`.
    """
    original: dict[str, str] = {}
    wrappers = dict[str, None]()
    for name in weights.shapes:
        bare = name
        while match := _WRAPPERS.search(bare):
            wrappers[match[0]] = None
            bare = bare[: match.start()] + bare[match.end() :]
        # Where two names would become one, all names stay as they are, below.
        original.setdefault(bare, name)
    if not wrappers or len(original) < len(weights.shapes):
        return weights
    return Weights(
        weights.file,
        {bare: weights.shapes[name] for bare, name in original.items()},
        lambda bare: weights.read(original[bare]),
        tuple(wrappers),
    )


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "C64": torch.complex64,
}  # fmt: skip
"""The element types of safetensors that torch has."""


def unread_files(folder: Path, weights: Path) -> tuple[str, ...]:
    """Return the names of files in a folder that may hold a part of the model and are not read.

    The same weights in the formats of other programs, under common aliases, do not count.
    """
    names = (file.name for file in folder.iterdir() if file.is_file())
    shards = weights.name.removesuffix(".index.json").rpartition(".")[0]
    prefixes = (f"{shards}-", "model.", "model-", "pytorch_model")
    return tuple(sorted(n for n in names if n.endswith(_PARTS) and not n.startswith(prefixes)))


def _open_safetensors(file: Path) -> Weights:
    try:
        state = _state(file)
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in names}
        # The library has validated the header, whose offsets it does not give.
        with file.open("rb", buffering=0) as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        message = f"is not a complete safetensors file: {error}"
        raise FolderError(message, where=file, fix=AGAIN) from error

    def read(name: str) -> Tensor:
        """Return a tensor; a copy in memory, aligned as all memory of torch."""
        entry = header[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            message = f"holds {name} as {entry['dtype']}, which cannot be read"
            raise FolderError(
                message, where=file, fix="Use the model's fp32, fp16 or bf16 weights."
            )
        tensor = torch.empty(math.prod(shapes[name]), dtype=dtype)
        target = tensor.view(torch.uint8).numpy().data
        with file.open("rb", buffering=0) as stream:
            stream.seek(8 + size + entry["data_offsets"][0])
            # A read may return less than it was asked for, such as over 2 GiB on Linux.
            while target and (count := stream.readinto(target)):
                target = target[count:]
        # Size and time since the header was read: another program may have replaced the file.
        if target or _state(file) != state:
            fix = "Write a new folder and rename it, or wait until it is complete."
            raise FolderError("was changed while it was read", where=file, fix=fix)
        return tensor.reshape(shapes[name])

    return Weights(file, shapes, read)


def _state(file: Path) -> tuple[int, ...]:
    """Return values that change when a file is replaced or written to."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# Each of these is raised by the unpickler for some hostile or broken file.
_PICKLE_ERRORS = (
    pickle.UnpicklingError, RuntimeError, EOFError, OSError,
    LookupError, ValueError, TypeError, AttributeError,
)  # fmt: skip


def _open_pickle(file: Path) -> Weights:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except _PICKLE_ERRORS as error:
        message = "is refused: it is not a plain pickle of tensors, and other pickles can run code"
        raise FolderError(message, where=file, fix="Use the model's safetensors file.") from error
    # Each tensor has a number for each of its elements.
    if not isinstance(state, dict) or not all(
        isinstance(name, str)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type != "meta"
        for name, value in state.items()
    ):
        message = "is refused: it holds more than dense tensors by name"
        raise FolderError(message, where=file, fix="Save the model's state_dict.")
    tensors: dict[str, Tensor] = state
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    # The tensors of a pickle may be views of each other.
    return Weights(file, shapes, lambda name: tensors[name].clone())


def _open_shards(index: Path) -> Weights:
    shard_of = read_object(index, FolderError).get("weight_map")
    if not isinstance(shard_of, dict):
        raise FolderError("has no weight_map from tensors to files", where=index, fix=AGAIN)
    files = {file.name for file in index.parent.iterdir() if file.is_file()}
    for name in shard_of.values():
        if not isinstance(name, str) or name not in files:
            message = f"names a shard that is not in its folder: {name!r:.80}"
            raise FolderError(message, where=index, fix="Download all shards.")
    open_file = _READERS[index.name.removesuffix(".index.json")]
    shards = {name: open_file(index.parent / name) for name in sorted(set(shard_of.values()))}
    for tensor, name in shard_of.items():
        if tensor not in shards[name].shapes:
            message = f"says that {name} holds {tensor}, which it does not"
            raise FolderError(message, where=index, fix=AGAIN)
    shapes = {tensor: shards[name].shapes[tensor] for tensor, name in shard_of.items()}
    return Weights(index, shapes, lambda tensor: shards[shard_of[tensor]].read(tensor))


_READERS: dict[str, Callable[[Path], Weights]] = {
    "model.safetensors": _open_safetensors,
    "model.safetensors.index.json": _open_shards,
    "pytorch_model.bin": _open_pickle,
    "pytorch_model.bin.index.json": _open_shards,
}


def read_exact(weights: Weights, name: str) -> Tensor:
    """Return a tensor in fp32; raise FolderError if it is quantised."""
    tensor = weights.read(name)
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        message = f"holds {name} as {dtype}: quantised weights cannot be read"
        fix = "Use the model's fp32, fp16 or bf16 weights."
        raise FolderError(message, where=weights.file, fix=fix)
    return tensor.to(torch.float32)
