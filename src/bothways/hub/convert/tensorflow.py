"""Google's checkpoints of BERT, ALBERT and ELECTRA, read and converted without TensorFlow.

**The format** is TensorFlow 1's tensor bundle. `NAME.index` is a sorted table in LevelDB's format:
blocks of entries, each block with a checksum, and a footer with the offset of the index block. A
key omits the prefix that it shares with the previous one. The empty key holds the bundle's header;
every other key is the name of a tensor, with its type, shape and place. `NAME.data-00000-of-00001`
and so on hold the bytes of the tensors.

Files are not trusted: every length is checked before it is used, keys must increase, tensors must
not overlap, and all checksums (CRC-32C) are compared. Opening reads only the index; tensors are
read on demand.

**The models.** Sizes come from the tensors. `bert_config.json` gives the settings that tensors do
not determine, such as the number of heads, and is refused if it contradicts them. ELECTRA has no
such file: its heads have 64 features (google-research/electra). Google's "gelu" is the tanh
approximation in all three, and becomes "gelu_tanh". The optimizer's state is ignored.

The code of all three names the matrix of a dense layer `kernel` (stored transposed), the vectors of
a LayerNorm `gamma` and `beta`, and the layers `layer_0`, `layer_1`, …. Embedding tables and the
outputs of a head are not transposed. Most paths are those of transformers, with slashes for dots; a
family lists the others.

    bert/encoder/layer_3/output/dense/kernel → bert.encoder.layer.3.output.dense.weight
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bothways.core.errors import ConfigError, FolderError, optional, read_errors
from bothways.core.files import check_regular, local_path, read_object, read_regular
from bothways.core.terminal import listed
from bothways.hub.convert import ModelPart
from bothways.hub.hf_config import HFConfig, label_name, read_family_config
from bothways.hub.model_folder import build_model, heads_of
from bothways.hub.weight_files import AGAIN, LoadReport, Weights, head_of
from bothways.model.families import albert, bert, electra, weight_names
from bothways.model.families.family import Family, read_choice
from bothways.model.families.weight_names import Shape
from bothways.model.model import Model
from bothways.text.protobuf import Fixed, MalformedError, fields, varint
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import bert as bert_pipeline
from bothways.text.tokenizer_files import bert_backend, finish

Paths = tuple[tuple[str, str], ...]
"""Expressions in a path and their replacements, applied in order."""

_LEAVES = {
    "kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias",
    "output_weights": "weight", "output_bias": "bias",
}  # fmt: skip
_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")

_LAYERS = (r"/layer_(\d+)/", r"/layer/\1/")
_HEAD = (r"^(?=output_\w+$)", "classifier/")
BERT: Paths = (_LAYERS, (r"^cls/squad/", "qa_outputs/"), _HEAD)
ALBERT: Paths = (
    (r"^bert/encoder/transformer/group_(\d+)/inner_group_(\d+)/",
     r"albert/encoder/albert_layer_groups/\1/albert_layers/\2/"),
    (r"^bert/", "albert/"),
    (r"/attention_1/(self|output(?=/dense))/", "/attention/"),
    (r"(/albert_layers/\d+)/LayerNorm/", r"\1/attention/LayerNorm/"),
    (r"/LayerNorm_1/", "/full_layer_layer_norm/"),
    (r"/ffn_1/intermediate/output/dense/", "/ffn_output/"),
    (r"/ffn_1/intermediate/dense/", "/ffn/"),
    (r"/pooler/dense/", "/pooler/"),
    (r"^cls/predictions/(transform/)?", "predictions/"),
    (r"^cls/seq_relationship/", "sop_classifier/classifier/"),
    _HEAD,
)  # fmt: skip
# Variables of the other of ELECTRA's two models get an empty name.
DISCRIMINATOR: Paths = (
    _LAYERS,
    (r"^(?!electra/|discriminator_predictions/).*", ""),
    (r"/dense_1/", "/dense_prediction/"),
)
_GENERATOR: Paths = (
    _LAYERS,
    (r"^generator/", "electra/"),
    (r"^generator_predictions/output_bias$", "generator_lm_head/bias"),
)
GENERATOR: Paths = ((r"^(?!electra/embeddings/|generator).*", ""), *_GENERATOR)
"""The generator shares the discriminator's embeddings (Clark et al. 2020, section 3.2)."""
UNTIED_GENERATOR: Paths = ((r"^(?!generator).*", ""), *_GENERATOR)
"""A generator with its own embeddings, an option of Google's code."""


def placed(
    paths: Paths, table: weight_names.KeyTable, variable: str
) -> tuple[str, weight_names.TensorPlacement] | None:
    """Return the name of a variable in transformers, and its place in TensorFlow's file.

    None for a variable that is not part of a model of the family `table`.
    """
    path = variable
    for expression, replacement in paths:
        path = re.sub(expression, replacement, path)
    owner, _, leaf = path.rpartition("/")
    if leaf in _TABLES:
        owner, leaf = path, "kernel"
    name = f"{owner}.{_LEAVES.get(leaf, '')}".replace("/", ".")
    if leaf not in _LEAVES or not table.origins(name):
        return None
    turned = leaf == "kernel" and not path.endswith(_TABLES)
    rule = weight_names.Transpose(name, variable) if turned else weight_names.Rename(name, variable)
    return name, weight_names.TensorPlacement(rule, (variable,))


GELU = {"gelu": "gelu_pytorch_tanh", "relu": "relu"}
"""Google's activations → transformers' names; Google's "gelu" is the tanh approximation."""


@dataclass(frozen=True)
class Dialect:
    """The format of a family's checkpoints.

    Attributes:
        paths: the names of variables.
        up, down: the biases of the dense layers of a block, by transformers' names.
        counts: setting → the name of the tensors whose number is the setting.
        config: the file with the other settings; None if there is none.
    """

    family: Family
    paths: Paths
    up: str
    down: str
    counts: Mapping[str, str]
    config: str | None = None


def _in_layers(family: Family, paths: Paths, config: str | None) -> Dialect:
    layer = f"{family.keys.prefix}encoder.layer.{{}}"
    up, down = f"{layer}.intermediate.dense.bias", f"{layer}.output.dense.bias"
    return Dialect(family, paths, up, down, {"num_hidden_layers": down}, config)


_BERT = _in_layers(bert.BERT, BERT, "bert_config.json")
_DISCRIMINATOR = _in_layers(electra.ELECTRA, DISCRIMINATOR, None)
_SHARED = "albert.encoder.albert_layer_groups"
_ALBERT = Dialect(
    albert.ALBERT,
    ALBERT,
    f"{_SHARED}.{{}}.albert_layers.0.ffn.bias",
    f"{_SHARED}.{{}}.albert_layers.0.ffn_output.bias",
    {
        "num_hidden_groups": f"{_SHARED}.{{}}.albert_layers.0.ffn.bias",
        "inner_group_num": f"{_SHARED}.0.albert_layers.{{}}.ffn.bias",
    },
    "albert_config.json",
)


@dataclass(frozen=True)
class TensorFlowCheckpoint:
    """A TensorFlow checkpoint in memory.

    Attributes:
        model: the model in evaluation mode, in fp32, on the CPU.
        report: the variables that were used, by transformers' names, and unused, by TensorFlow's.
        tokenizer: the tokenizer of `vocab.txt` or a SentencePiece file in the folder; None without.
    """

    model: Model
    report: LoadReport
    tokenizer: Tokenizer | None
    index: Path


def read_tensorflow(source: str | Path, part: ModelPart | None = None) -> TensorFlowCheckpoint:
    """Open a TensorFlow 1 checkpoint.

    Args:
        source: the folder, the `.index` file, or its name without `.index`.
        part: the model of an ELECTRA checkpoint; None means the discriminator.

    Raises:
        FolderError: the folder has no checkpoint or several, a file is missing or corrupt, the
            family is unknown, or no class has these heads.
        ConfigError: `part` is given, but the checkpoint is not an ELECTRA.
    """
    index = _find_index(local_path(source))
    bundle = open_bundle(index)
    dialect = _dialect(bundle.shapes, part, index)
    targets = {
        variable: target
        for variable in bundle.shapes
        if (target := placed(dialect.paths, dialect.family.keys, variable)) is not None
    }
    by_name = dict(targets.values())
    weights = Weights(
        bundle.file,
        {name: at.part_shape(bundle.shapes[at.names[0]]) for name, at in by_name.items()},
        lambda name: by_name[name].join([bundle.read(by_name[name].names[0])]),
    )
    settings = _settings(dialect, weights)
    model, report = build_model(settings, weights, heads_of(settings, weights.shapes))
    unused = dict(report.unused)
    for variable in bundle.shapes:
        if variable not in targets:
            owner, _, leaf = variable.rpartition("/")
            reason = _UNUSED.get(variable.partition("/")[0], "not a known part of this family")
            if owner in bundle.shapes or leaf == "global_step":
                reason = "the optimizer's state"
            unused[variable] = reason
    report = replace(report, unused=unused)
    return TensorFlowCheckpoint(model, report, _tokenizer(index.parent), index)


_UNUSED = {
    "generator": "the generator's", "generator_predictions": "the generator's",
    "electra": "the discriminator's", "discriminator_predictions": "the discriminator's",
}  # fmt: skip
"""The reasons why ELECTRA's variables are not used, by the beginnings of their names."""


def _find_index(source: Path) -> Path:
    if source.is_dir():
        files = sorted(source.glob("*.index"))
        if len(files) > 1:
            message = f"holds {len(files)} checkpoints: {listed(file.name for file in files)}"
            raise FolderError(message, where=source, fix="Give the .index file of one of them.")
        if files:
            return files[0]
    else:
        file = source if source.suffix == ".index" else source.with_name(f"{source.name}.index")
        if file.is_file():
            return file
    fix = "Give the unpacked folder, with bert_model.ckpt.index and its data files."
    message = "holds no checkpoint of TensorFlow"
    if not source.exists():
        message = "no such folder, and no checkpoint of this name"
    raise FolderError(f"{message}: there is no .index file", where=source, fix=fix)


def _dialect(variables: Collection[str], part: ModelPart | None, index: Path) -> Dialect:
    def has(stem: str) -> bool:
        """Return True if a variable has this prefix."""
        return any(name.startswith(stem) for name in variables)

    # A checkpoint of ELECTRA's pre-training holds both networks.
    if has("electra/"):
        untied = UNTIED_GENERATOR if has("generator/embeddings/") else GENERATOR
        return replace(_DISCRIMINATOR, paths=untied) if part == "generator" else _DISCRIMINATOR
    if part is not None:
        message = f"{part!r} is a part of an ELECTRA, which {index} is not"
        raise ConfigError(message, where="part", fix="Leave it out.")
    if has("bert/encoder/transformer/"):
        return _ALBERT
    if has("bert/"):
        return _BERT
    variable_names = listed(sorted(variables)) or "none"
    message = f"holds no BERT, ALBERT or ELECTRA of Google's code; it has {variable_names}"
    raise FolderError(message, where=index, fix="Checkpoints of other code have other names.")


def _settings(dialect: Dialect, weights: Weights) -> HFConfig:
    sizes = _sizes(dialect, weights)
    location = weights.file
    raw: dict[str, Any] = {"num_attention_heads": max(1, sizes["hidden_size"] // 64)}
    if dialect.config is not None:
        location = weights.file.with_name(dialect.config)
        if not location.is_file():
            message = f"holds no {dialect.config}, which says what tensors cannot, such as the"
            fix = "Put the one that came with the checkpoint there, under this name."
            raise FolderError(f"{message} number of heads", where=location.parent, fix=fix)
        raw = read_object(location, FolderError)
    other = {key: size for key, size in sizes.items() if raw.get(key, size) != size}
    contradictions = [f"{key} {raw[key]!r}, not {size}" for key, size in other.items()]
    if contradictions:
        message = f"does not fit the tensors of {weights.file.name}: it says "
        fix = "Take the file that came with the checkpoint."
        raise FolderError(message + "; ".join(contradictions), where=location, fix=fix)
    activation = read_choice(raw, "hidden_act", GELU, "gelu", str(location))
    biases = weights.shapes.get("classifier.bias", ())
    outputs = biases[0] if len(biases) == 1 and biases[0] else 2  # transformers' default
    labels = {str(at): label_name(at) for at in range(outputs)}
    settings = {**raw, **sizes, "hidden_act": activation, "id2label": labels}
    config = read_family_config(dialect.family, settings, location)
    # The class with the most heads among those whose heads all have tensors.
    rules = (rule for name in weights.shapes for rule in dialect.family.keys.origins(name))
    kinds = {
        kind
        for rule in rules
        if not isinstance(rule, weight_names.Tie) and (kind := head_of(rule.name))
    }
    candidates = (known for known in dialect.family.architectures if known.heads <= kinds)
    architecture = max(candidates, key=lambda candidate: len(candidate.heads), default=None)
    if architecture is None:
        heads = listed(sorted(kinds)) or "none"
        message = f"has the heads {heads}, for which transformers has no class"
        fix = "Take a checkpoint with its pooler or a head."
        raise FolderError(message, where=weights.file, fix=fix)
    return replace(config, architecture=architecture)


def _sizes(dialect: Dialect, weights: Weights) -> dict[str, int]:
    """Return the settings that follow from the tensors, by transformers' names."""
    embeddings = f"{dialect.family.keys.prefix}embeddings"
    targets = {
        "vocab_size": (f"{embeddings}.word_embeddings.weight", 0),
        "max_position_embeddings": (f"{embeddings}.position_embeddings.weight", 0),
        "type_vocab_size": (f"{embeddings}.token_type_embeddings.weight", 0),
        "hidden_size": (dialect.down.format(0), 0),
        "intermediate_size": (dialect.up.format(0), 0),
    }
    if dialect is not _BERT:
        targets["embedding_size"] = (f"{embeddings}.word_embeddings.weight", 1)
    sizes = {}
    for setting, (name, axis) in targets.items():
        shape: weight_names.Shape = weights.shapes.get(name, ())
        if axis >= len(shape) or 0 in shape:  # an empty one could claim any length
            actual = f": it is {list(shape)}" if name in weights.shapes else ""
            message = f"has no tensor for {name} of {axis + 1} axes or more{actual}"
            fix = "Take a checkpoint of the whole encoder."
            raise FolderError(message, where=weights.file, fix=fix)
        sizes[setting] = shape[axis]
    for setting, name in dialect.counts.items():
        pattern = re.compile(re.escape(name).replace(r"\{\}", "[0-9]+"))
        sizes[setting] = sum(pattern.fullmatch(actual) is not None for actual in weights.shapes)
    return sizes


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Load `vocab.txt`, or the only SentencePiece file, such as ALBERT's `30k-clean.model`.

    Google's files do not say if a vocabulary is cased: it is if it holds a capital letter.
    """
    file, pieces = folder / "vocab.txt", list(folder.glob("*.model"))
    if not file.is_file():
        return Tokenizer.load(pieces[0]) if len(pieces) == 1 else None
    tokenizer = Tokenizer.load(file)
    vocab = tokenizer.backend.get_vocab()
    cased = any(re.search("[A-Z]", token) and not re.fullmatch(r"\[.*\]", token) for token in vocab)
    if not cased or file.with_name("tokenizer_config.json").exists():
        return tokenizer
    backend = finish(bert_backend(vocab, bert_pipeline(lowercase=False)), tokenizer.specials)
    return Tokenizer(backend, tokenizer.specials)


_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_MOST_INDEX = 1 << 22
_MOST_NAME = 512
_MOST_AXES = 8
"""Limits of the index and of a name, in bytes, and of the axes of a tensor. The index of BERT-large
with its optimizer's state has 0.1 MB."""

_TYPES: Mapping[int, torch.dtype] = {
    1: torch.float32, 2: torch.float64, 3: torch.int32, 4: torch.uint8, 5: torch.int16,
    6: torch.int8, 9: torch.int64, 10: torch.bool, 14: torch.bfloat16, 19: torch.float16,
}  # fmt: skip
"""TensorFlow's type numbers; the other types, such as strings, are not numbers."""


@dataclass(frozen=True)
class BundleEntry:
    """The place of a tensor.

    Attributes:
        dtype: the type of its little-endian numbers.
        shard: the number of the data file.
        offset: the first byte in the data file.
        checksum: the masked checksum of its bytes.
    """

    dtype: torch.dtype
    shape: Shape
    shard: int
    offset: int
    size: int
    checksum: int


def open_bundle(index: Path) -> Weights:
    """Open a checkpoint; its tensors have TensorFlow's names.

    Args:
        index: the `.index` file, in the folder of its data files.

    Raises:
        FolderError: a file is missing, truncated, corrupt or of another kind. Reading a tensor
            raises it for a wrong checksum.
        ResourceError: a file cannot be read.
    """
    check_regular(index, FolderError)
    try:
        if (size := index.stat().st_size) > _MOST_INDEX:
            limit = f"that of any model, {_MOST_INDEX:,}"
            raise MalformedError(f"an index of {size:,} bytes is longer than {limit}")
        shards, entries = _read_index(read_regular(index, FolderError))
    except MalformedError as error:
        message = f"is not a complete TensorFlow checkpoint: {error}"
        raise FolderError(message, where=index, fix=AGAIN) from error
    files = {}
    for shard in sorted({entry.shard for entry in entries.values()}):
        name = f"{index.stem}.data-{shard:05d}-of-{shards:05d}"
        file = files[shard] = index.with_name(name)
        if not file.is_file():
            message = f"needs {file.name}, which is not in its folder"
            raise FolderError(message, where=index, fix="Fetch all files of the checkpoint.")
        size, end, previous = file.stat().st_size, 0, ""
        tensors = [(name, entry) for name, entry in entries.items() if entry.shard == shard]
        for name, entry in sorted(tensors, key=lambda pair: (pair[1].offset, pair[1].size)):
            if entry.offset < end:
                message = f"the bytes of {name} and {previous} overlap"
                raise FolderError(message, where=file, fix=AGAIN)
            end, previous = entry.offset + entry.size, name
            if end > size:
                message = f"has {size:,} bytes, and {name} ends at {end:,}"
                raise FolderError(message, where=file, fix=AGAIN)

    def read(name: str) -> Tensor:
        """Return a tensor, whose checksum is compared."""
        entry = entries[name]
        file = files[entry.shard]
        with read_errors(file), file.open("rb") as stream:
            stream.seek(entry.offset)
            data = stream.read(entry.size)
        if len(data) != entry.size or _masked(data) != entry.checksum:
            message = f"the bytes of {name} do not match their checksum"
            raise FolderError(message, where=file, fix=AGAIN)
        if not data:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(bytearray(data), dtype=entry.dtype).reshape(entry.shape)

    return Weights(index, {name: entry.shape for name, entry in entries.items()}, read)


def _read_index(data: bytes) -> tuple[int, dict[str, BundleEntry]]:
    """Return the number of data files, and the tensors by name."""
    if len(data) < _FOOTER or int.from_bytes(data[-8:], "little") != _MAGIC:
        raise MalformedError("it does not end like an index")
    # Offset and size of a block about the blocks, which TensorFlow leaves empty, then of the index.
    (_, _, *handle), _ = _varints(data[-_FOOTER:-8], 0, 4)
    handles = [_varints(value, 0, 2)[0] for _, value in _entries(_block(data, *handle))]
    if any(offset + size > following for (offset, size), (following, _) in pairwise(handles)):
        raise MalformedError("its blocks overlap")
    entries = itertools.chain.from_iterable(_entries(_block(data, *handle)) for handle in handles)
    header_entry = next(entries, None)
    if header_entry is None or header_entry[0]:
        raise MalformedError("it has no header")
    header = _numbers(header_entry[1], shards=1, big_endian=2)
    shards = header["shards"]
    if header["big_endian"]:
        raise MalformedError("its numbers are big-endian")
    if not 1 <= shards <= 99_999:
        raise MalformedError(f"it cannot have {shards} data files")
    tensors, previous = dict[str, BundleEntry](), b""
    for key, value in entries:
        if key <= previous:
            raise MalformedError(f"{key!r} follows {previous!r}: names must increase")
        previous = key
        if key.startswith(b"\0"):
            raise MalformedError("it holds variables in slices, which are not read")
        name = key.decode("latin-1")
        if not name.isascii() or not name.isprintable():
            raise MalformedError(f"{key!r} is not the name of a variable")
        if name == "_CHECKPOINTABLE_OBJECT_GRAPH":
            raise MalformedError("it is of TensorFlow 2: only TensorFlow 1 checkpoints are read")
        tensors[name] = _entry(name, value, shards)
    return shards, tensors


def _varints(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    """Return numbers of variable length, and the position after them."""
    numbers = list[int]()
    for _ in range(count):
        number, at = varint(data, at)
        numbers.append(number)
    return numbers, at


def _block(data: bytes, offset: int, size: int) -> bytes:
    """Return the entries of a block, without the restart points that follow them."""
    end = offset + size  # then follow the kind of compression, 1 byte, and the checksum
    if end + 5 > len(data) - _FOOTER:
        raise MalformedError(f"the block at {offset} ends beyond the others")
    content = data[offset:end]
    if int.from_bytes(data[end + 1 : end + 5], "little") != _masked(data[offset : end + 1]):
        raise MalformedError(f"the block at {offset} does not match its checksum")
    if data[end] != 0:
        raise MalformedError(f"the block at {offset} is compressed, which is not supported")
    # A block ends with the offsets of its restart points, 4 bytes each, and their number.
    restarts = int.from_bytes(content[-4:], "little")
    if len(content) < 4 * (restarts + 1):
        message = f"the block at {offset} is too short for its {restarts} restart points"
        raise MalformedError(message)
    return content[: -4 * (restarts + 1)]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of each entry.

    An entry is (shared, rest, size, suffix, value): after "weight_a", the entry (7, 1, …, "b") has
    the key "weight_b".
    """
    at, key = 0, b""
    while at < len(block):
        (shared, added, size), at = _varints(block, at, 3)
        if shared > len(key) or shared + added > _MOST_NAME:
            lengths = f"shares {shared} bytes with one of {len(key)} and adds {added}"
            raise MalformedError(f"a name {lengths}; {_MOST_NAME} are allowed")
        start, at = at + added, at + added + size
        if at > len(block):
            raise MalformedError(f"an entry ends {at - len(block):,} bytes after its block")
        key = key[:shared] + block[start - added : start]
        yield key, block[start:at]


def _masked(data: bytes) -> int:
    """Return the CRC-32C, rotated and offset: a CRC of data that contains CRCs would be weak."""
    with optional("tensorflow", "reading a TensorFlow checkpoint"):
        import google_crc32c
    plain: int = google_crc32c.value(data)
    return (((plain >> 15) | (plain << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _numbers(message: bytes, **numbers: int) -> dict[str, int]:
    """Return the integers in fields by name → number; 0, the format's default, if missing."""
    integers = (
        (number, value.whole if isinstance(value, Fixed) else value)
        for number, value in fields(message)
    )
    values = {number: value for number, value in integers if isinstance(value, int)}
    return {name: values.get(number, 0) for name, number in numbers.items()}


def _entry(name: str, message: bytes, shards: int) -> BundleEntry:
    numbers = _numbers(message, dtype=1, shard=3, offset=4, size=5, checksum=6)
    dtype = _TYPES.get(numbers["dtype"])
    if dtype is None:
        number = numbers["dtype"]
        raise MalformedError(f"{name} has type {number}, which is not numeric: {list(_TYPES)}")
    shapes = [
        value for number, value in fields(message) if number == 2 and isinstance(value, bytes)
    ]
    shape: Shape = ()
    for number, value in itertools.chain.from_iterable(map(fields, shapes)):
        match number, value:
            case 2, bytes():
                size = _numbers(value, size=1)["size"]
                if size >= 1 << 63:
                    raise MalformedError(f"{name} has a negative size")
                if len(shape) == _MOST_AXES:
                    raise MalformedError(f"{name} has more than {_MOST_AXES} axes")
                shape += (size,)
            case 3, int() if value:
                raise MalformedError(f"{name} has no known shape")
    if math.prod(shape) * dtype.itemsize != numbers["size"]:
        numbers_of = f"{list(shape)} numbers of {dtype.itemsize} bytes"
        raise MalformedError(f"{name} has {numbers['size']} bytes, not those of {numbers_of}")
    if numbers["shard"] >= shards:
        raise MalformedError(f"{name} is in data file {numbers['shard']} of {shards}")
    return BundleEntry(
        dtype, shape, numbers["shard"], numbers["offset"], numbers["size"], numbers["checksum"]
    )
