"""The tensors of a model folder, read one at a time from whichever file holds them.

safetensors is preferred: its tensors are pages of the file, read when they are used and shared with other processes. The
mapping is private: what is written to a tensor goes to a copy of the page, never to the file. A pickle is opened only by
torch's reader of plain tensors, which runs no code; what that refuses is refused here.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bothways.core.errors import FolderError
from bothways.families.weight_names import Shape

AGAIN = "Copy or download the file again; a file of some hundred bytes is a pointer that Git LFS has not followed."


@dataclass(frozen=True)
class Weights:
    """Attributes:
    file: the file, or the index of several.
    shapes: of every tensor in it, by name.
    read: gives a tensor by name, on the CPU, as it is stored; it shares no memory with others.
    """

    file: Path
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]


def open_weights(folder: Path) -> Weights:
    """The weights of a model folder: `model.safetensors` or its shards, else `pytorch_model.bin` or its shards.

    Raises:
        FolderError: there are none, a file is missing, truncated or corrupt, or a pickle holds more than tensors.
    """
    for name, read in _READERS.items():
        if (folder / name).is_file():
            return read(folder / name)
    raise FolderError(
        f"holds no weights: there is none of {', '.join(_READERS)}",
        where=folder,
        fix="Weights of TensorFlow, Flax or ONNX alone cannot be read.",
    )


def _open_safetensors(file: Path) -> Weights:
    try:
        handle: Any = safe_open(file, framework="pt")
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FolderError(
            f"is no whole safetensors file: {error}", where=file, fix=AGAIN
        ) from error
    return Weights(file, shapes, handle.get_tensor)


def _open_pickle(file: Path) -> Weights:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        # A hostile or broken file trips the unpickler in any of these ways.
        what = "is refused: it is no plain pickle of tensors, and reading it any other way could run code"
        raise FolderError(what, where=file, fix="Use the model's safetensors file.") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and _plain(value) for name, value in state.items()
    ):
        raise FolderError(
            "is refused: it holds more than dense tensors by name",
            where=file,
            fix="Save the model's state_dict.",
        )
    tensors: dict[str, Tensor] = state
    # Those of a pickle may be views of each other.
    return Weights(
        file,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        lambda name: tensors[name].clone(),
    )


def _plain(value: object) -> bool:
    """Whether this is a tensor with a number for each of its elements."""
    return (
        isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"
    )


def _open_shards(file: Path) -> Weights:
    shard_of = _weight_map(file)
    shards = {
        name: _READERS[_whole(file)](file.parent / name) for name in sorted(set(shard_of.values()))
    }
    for tensor, name in shard_of.items():
        if tensor not in shards[name].shapes:
            raise FolderError(
                f"says that {tensor} lies in {name}, where it is not", where=file, fix=AGAIN
            )
    return Weights(
        file,
        {tensor: shards[name].shapes[tensor] for tensor, name in shard_of.items()},
        lambda tensor: shards[shard_of[tensor]].read(tensor),
    )


def _whole(index: Path) -> str:
    return index.name.removesuffix(".index.json")


def _weight_map(file: Path) -> dict[str, str]:
    tree = read_json(file)
    shard_of = tree.get("weight_map")
    if not isinstance(shard_of, dict):
        raise FolderError("has no weight_map from tensors to files", where=file, fix=AGAIN)
    for name in shard_of.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not (file.parent / name).is_file()
        ):
            raise FolderError(
                f"names a shard that is not in its folder: {name!r}",
                where=file,
                fix="Fetch all shards.",
            )
    return shard_of


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        FolderError: it does not, or cannot be read.
    """
    tree = read_tree(file)
    if not isinstance(tree, dict):
        raise FolderError(f"holds {type(tree).__name__}, not an object with settings", where=file)
    return tree


def read_tree(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        FolderError: it is no JSON, or cannot be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"cannot be read as JSON: {error}", where=file, fix=AGAIN) from error


_READERS: dict[str, Callable[[Path], Weights]] = {
    "model.safetensors": _open_safetensors,
    "model.safetensors.index.json": _open_shards,
    "pytorch_model.bin": _open_pickle,
    "pytorch_model.bin.index.json": _open_shards,
}
