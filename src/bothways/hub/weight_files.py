"""The tensors of a model folder: read one at a time, and the plan and report of their loading.

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
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bothways.core.errors import FolderError, call, read_errors
from bothways.core.files import read_object
from bothways.core.terminal import listed, quantity
from bothways.hub import Format, GraphRuntime
from bothways.hub.resolve import ADAPTER_WEIGHTS, MODULES
from bothways.model.families.weight_names import KeyTable, Shape, Spare, Tie

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_PARTS = (".safetensors", ".pkl", ".pickle", ".joblib")
_EXACT = "Use the model's fp32, fp16 or bf16 weights."
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


ADAPTER_NAMES = (ADAPTER_WEIGHTS, "adapter_model.bin")
_NAMES = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""The files of weights in a folder, and the indexes of several; the first one is read."""


def open_weights(folder: Path, names: Sequence[str] = _NAMES) -> Weights:
    """Open the weights of a model, or under `ADAPTER_NAMES` those of an adapter of PEFT.

    Raises:
        FolderError: there are none, a file is missing, truncated or corrupt, or a pickle holds
            anything but tensors.
    """
    for file in (folder / name for name in names):
        if file.is_file():
            return _unwrap(_open_shards(file) if file.suffix == ".json" else _open_file(file))
    message = f"holds no weights: none of {', '.join(names)}"
    fix = "Weights for TensorFlow, Flax or ONNX alone cannot be read."
    files = sorted(file.name for file in folder.glob("*") if file.suffix in _SUFFIXES)
    if names is ADAPTER_NAMES:
        fix = AGAIN
    elif files:
        fix = f"It has {listed(files)}; rename the model's own weights to {names[0]}."
    for name, runtime in zip(get_args(Format), get_args(GraphRuntime), strict=True):
        if (folder / name).is_dir():
            command = call("predict", str(folder), runtime=runtime)
            fix = f"An exported graph is computed by {command}"
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


def unread_files(weights: Path) -> tuple[str, ...]:
    """Return the names of unread files next to the weights that may hold a part of the model.

    The same weights in the formats of other programs, under common aliases, do not count.
    """
    folder = weights.parent
    names = [file.name for file in folder.iterdir() if file.is_file()]
    shards = weights.name.removesuffix(".index.json").rpartition(".")[0]
    prefixes = (f"{shards}-", "model.", "model-", "pytorch_model")
    unread = [n for n in names if n.endswith(_PARTS) and not n.startswith(prefixes)]
    if MODULES not in names:  # which names the modules of sentence-transformers
        unread += [module.name for module in folder.glob("*_Pooling")]
    return tuple(sorted(unread))


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
            raise FolderError(message, where=file, fix=_EXACT)
        tensor = torch.empty(math.prod(shapes[name]), dtype=dtype, device="cpu")
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
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    files = {file.name for file in index.parent.glob(f"*{suffix}") if file.is_file()}
    for name in shard_of.values():
        if not isinstance(name, str) or name not in files:
            message = f"names a shard that is not a {suffix} file in its folder: {name!r:.80}"
            raise FolderError(message, where=index, fix="Download all shards.")
    shards = {name: _open_file(index.parent / name) for name in sorted(set(shard_of.values()))}
    for tensor, name in shard_of.items():
        if tensor not in shards[name].shapes:
            message = f"says that {name} holds {tensor}, which it does not"
            raise FolderError(message, where=index, fix=AGAIN)
    shapes = {tensor: shards[name].shapes[tensor] for tensor, name in shard_of.items()}
    return Weights(index, shapes, lambda tensor: shards[shard_of[tensor]].read(tensor))


def _open_file(file: Path) -> Weights:
    with read_errors(file), file.open("rb"):  # libraries call an unreadable file missing or wrong
        pass
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_pickle(file)


def read_exact(weights: Weights, name: str) -> Tensor:
    """Return a tensor in fp32; raise FolderError if it is quantised."""
    tensor = weights.read(name)
    if not tensor.is_floating_point() or tensor.itemsize == 1:  # float8 needs its scales
        dtype = str(tensor.dtype).removeprefix("torch.")
        message = f"holds {name} as {dtype}: quantised weights cannot be read"
        raise FolderError(message, where=weights.file, fix=_EXACT)
    return tensor.to(torch.float32)


NO_PLACE = "the configuration has no place for it"
NOT_KNOWN = "not a known part of this family"
NOT_REQUESTED = "head was not requested"


@dataclass(frozen=True)
class LoadReport:
    """Names are Hugging Face's, in full, except in `fresh`.

    Attributes:
        loaded: tensors of the model that the file holds.
        missing: tensors that it does not hold.
        misshapen: tensors of another shape than the model's: (theirs, the model's).
        unused: tensors of the file that the model does not take, with the reason.
        fresh: our tensors that start at random as requested.
        unknown_settings: settings of `config.json` that the family is not known to have.
        unread_files: files of the folder that may hold a part of the model and were not read.
        wrappers, adapter: as in `Weights`.
        sources: the file's own names, by full name.
        copies: (name of a copy, name of the tensor that it must equal), in full.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    misshapen: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()
    unknown_settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    unread_files: tuple[str, ...] = ()
    adapter: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    copies: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def fresh_heads(self) -> tuple[str, ...]:
        """The kinds of heads that start at random."""
        return tuple(sorted({str(head_of(name)) for name in self.fresh}))

    @property
    def unrequested(self) -> list[str]:
        """The tensors of heads that were not requested."""
        return [name for name, reason in self.unused.items() if reason.endswith(NOT_REQUESTED)]

    @property
    def faults(self) -> list[str]:
        """A line for missing tensors, and one for those of another shape."""
        pairs = [
            f"{name} is {list(actual)}, not {list(expected)}"
            for name, (actual, expected) in self.misshapen.items()
        ]
        lines = [f"{len(self.missing)} missing: {listed(self.missing)}"] if self.missing else []
        return lines + ([f"{len(pairs)} of another shape: {listed(pairs)}"] if pairs else [])

    @property
    def warnings(self) -> list[str]:
        """A line for each part of the folder that was passed over though it may change outputs."""
        foreign = [name for name, reason in self.unused.items() if reason in (NO_PLACE, NOT_KNOWN)]
        count = quantity(len(foreign), "tensor(s)")
        return ([f"{count} not used: {listed(foreign)}"] if foreign else []) + self._unread

    @property
    def _unread(self) -> list[str]:
        """A line for files that were not read, and one for unknown settings."""
        lines = [f"files not read: {listed(self.unread_files)}"] if self.unread_files else []
        if self.unknown_settings:
            pairs = [f"{key} = {value!r:.40}" for key, value in self.unknown_settings.items()]
            count = quantity(len(pairs), "unknown setting(s)")
            lines.append(f"config.json has {count}, not used: {listed(pairs)}")
        return lines

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded", *self.faults]
        if self.adapter:
            lines.append(self.adapter)
        if self.wrappers:
            lines.append(f"names were read without {' and '.join(self.wrappers)}")
        if self.fresh:
            lines.append(f"{len(self.fresh)} start at random, as requested: {listed(self.fresh)}")
        by_reason = defaultdict[str, list[str]](list)
        for name, reason in self.unused.items():
            by_reason[reason].append(name)
        lines += [f"{len(n)} unused ({reason}): {listed(n)}" for reason, n in by_reason.items()]
        return "\n".join(lines + self._unread)


def plan_loading(
    table: KeyTable,
    expected: Mapping[str, Shape],
    actual: Mapping[str, Shape],
    fresh: Collection[str],
    has: Collection[str] | None = None,
) -> LoadReport:
    """Plan the loading of a file, from names and shapes alone.

    Args:
        table: the family's names.
        expected: the shapes of the model's tensors by our names.
        actual: the shapes of the file's tensors by its own names.
        fresh: kinds of heads that start at random.
        has: kinds of heads of the file's class, None where it is unknown. It decides between
            heads with the same names.
    """
    # Heads of several classes may have one name in files: the class decides which one it is.
    shared = set() if has is None else {head_of(module) for module in table.shared} - set(has)
    full = {name: table.full_name(name) for name in actual}
    sources = dict[str, str]()  # the file's names by full name
    # A name that is already full has priority over others that become the same.
    for name in sorted(full, key=lambda name: (full[name] != name, name)):
        sources.setdefault(full[name], name)
    # A lone copy or spare replaces the original.
    for name, other in (table.ties | table.spares).items():
        if other.stored in sources:
            sources.setdefault(name, sources[other.stored])
    loaded, missing, misshapen = [], [], {}
    random = tuple(tensor_name for tensor_name in expected if head_of(tensor_name) in fresh)
    for tensor_name in expected.keys() - set(random):
        placement = table.place(tensor_name)
        for name in placement.names:
            shape = placement.part_shape(expected[tensor_name])
            if name not in sources or head_of(tensor_name) in shared:
                missing.append(name)
            elif actual[sources[name]] == shape:
                loaded.append(name)
            else:
                misshapen[name] = (actual[sources[name]], shape)
    heads = {head_of(tensor_name) for tensor_name in expected}
    loaded_heads = heads - set(fresh)
    # A copy matters only if its head is read: an unused one may hold anything.
    ties = [
        (tie.stored, name) for name, tie in table.ties.items() if head_of(tie.owner) in loaded_heads
    ]
    copies = tuple((source, name) for source, name in ties if source in sources)
    # A tensor of another shape is a fault of its own, not an unused one.
    taken = {sources[name] for name in (*loaded, *misshapen)}
    remaining = [name for name in actual if name not in taken]
    unused = {n: _reason(table, n, full[n], sources, heads, fresh) for n in remaining}
    return LoadReport(
        tuple(sorted(loaded)), tuple(sorted(missing)), misshapen, unused, random,
        sources=sources, copies=copies,
    )  # fmt: skip


def head_of(name: str) -> str | None:
    """Return the kind of head of one of our tensors or parts, None for the encoder's."""
    root, _, remainder = name.partition(".")
    return remainder.partition(".")[0] if root == "heads" else None


def _reason(
    table: KeyTable,
    name: str,
    full: str,
    sources: Mapping[str, str],
    heads: Collection[str | None],
    fresh: Collection[str],
) -> str:
    """Return the reason why a tensor of the file is not taken."""
    # Two names of one tensor in the file: the other was read.
    if sources[full] != name:
        return f"{sources[full]} is the same"
    rules = table.origins(full)
    if not rules:
        return "computed here" if table.computes(full) else NOT_KNOWN
    by_head = {
        head_of(rule.owner if isinstance(rule, Tie | Spare) else rule.name): rule for rule in rules
    }
    kind = next((head for head in by_head if head in heads), None)
    if kind is not None and kind in fresh:
        return f"the {kind} head starts at random, as requested"
    if kind not in by_head:
        return f"the {' or '.join(map(str, by_head))} {NOT_REQUESTED}"
    match by_head[kind]:
        case Tie(tensor_name):
            return f"a copy of {tensor_name}"
        case Spare(tensor_name):
            return f"{tensor_name} is read in its place"
        case _:
            return NO_PLACE
