"""The model folder, read and written: a Hugging Face folder in both directions.

`config.json`, `model.safetensors` and the tokenizer's files are those of transformers;
`bothways.json` holds what they have no place for. A model that no class of transformers can be is
saved in our own format (`NativeConfig`). Loading is strict: a part that the folder lacks starts at
random only if it is requested by name. `PretrainedModel` is for a training loop of one's own.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import logging
import math
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bothways._version import __version__
from bothways.core.config.values import checked
from bothways.core.errors import ConfigError, FolderError, hub_advice, hub_errors, setting
from bothways.core.files import local_path, read_utf8, replace_folder
from bothways.core.runtime.devices import require_threads
from bothways.core.terminal import listed
from bothways.hub import hf_config
from bothways.hub.adapter import CONFIG, TrainedAdapter
from bothways.hub.model_card import Card, render_card
from bothways.hub.resolve import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    MODEL_FILES,
    MODULES,
    PICKLE_FILES,
    PROGRAM,
    is_model_folder,
    modules_folder,
    object_in,
    require_types,
    resolve,
    resolve_run,
)
from bothways.hub.weight_files import (
    AGAIN,
    NO_PLACE,
    NOT_KNOWN,
    LoadReport,
    Weights,
    head_of,
    plan_loading,
    read_exact,
    unread_files,
)
from bothways.model.families.catalogue import family_named
from bothways.model.families.family import Architecture
from bothways.model.families.weight_names import KeyTable, Shape, to_file_names
from bothways.model.heads import HEADS, Head, HeadValue, PoolerHead, with_pooler
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_files import FILES

logger = logging.getLogger(__name__)

VERSION = "bothways"
VOCABULARY = "vocabulary"
UNTRAINED = "untrained"
"""The keys in `bothways.json` for the library's version, the digest of the vocabulary, and heads
that the class of transformers has and the model that was saved had not."""


_FILES = (*MODEL_FILES, *PICKLE_FILES, "README.md")


@dataclass(frozen=True)
class LoadedModel:
    """A model folder in memory.

    Attributes:
        model: in evaluation mode, in fp32, on the CPU.
        report: the fate of every tensor.
        folder: the folder, which also holds the tokenizer's files if it has a tokenizer.
        labels: names of the outputs of the label or tag head, in order; empty without such a head
            or with a fresh one.
        problem: the purpose of the label head, if the folder names it.
        extra: the rest of `bothways.json`.
        faults: why heads were dropped: what the file lacks of them, by kind.
        untrained: kinds of heads that the file holds with random values, since nothing read them.
        tokenizer_folder: the folder of the tokenizer, which an adapter may have elsewhere; None for
            `folder`.
        static_tokenizer: the tokenizer of a folder of static vectors; None for others.
    """

    model: Model
    report: LoadReport
    folder: Path
    labels: tuple[str, ...] = ()
    problem: hf_config.Problem | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()
    tokenizer_folder: Path | None = None
    static_tokenizer: Tokenizer | None = None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer, with as many segments as the model has.

        Raises:
            TokenizerError: the folder has no tokenizer, or one that cannot be read.
            FolderError: the vocabulary is not the one that the model was saved with, or has more
                ids than the embedding has rows.
        """
        if self.static_tokenizer is not None:
            return self.static_tokenizer
        folder = self.tokenizer_folder or self.folder
        tokenizer = Tokenizer.load(folder)
        _check_rows(tokenizer, self.model, folder)
        self._check_vocabulary(tokenizer, folder)
        return tokenizer.for_segments(self.model.config.segments)

    def _check_vocabulary(self, tokenizer: Tokenizer, folder: Path) -> None:
        recorded = object_in(folder / hf_config.RECORD).get(VOCABULARY)
        if recorded is not None and recorded != vocabulary_digest(tokenizer):
            message = "holds another vocabulary than the model was saved with, by its digest"
            fix = f'Restore its files, or delete "{VOCABULARY}" from {hf_config.RECORD}.'
            raise FolderError(message, where=folder, fix=fix)
        file = folder / "vocab.txt"
        if recorded is not None or (folder / "tokenizer.json").exists() or not file.exists():
            return
        rows, fix = self.model.config.vocab, "Copy or download vocab.txt again."
        # An embedding padded to a multiple of 8 has up to 127 rows more than there are tokens.
        if tokenizer.size < rows and not (rows % 8 == 0 and rows - tokenizer.size < 128):
            message = f"has {tokenizer.size:,} tokens, and the model's embedding {rows:,} rows"
            raise FolderError(message, where=file, fix=fix)
        lines = read_utf8(file, FolderError).splitlines()
        special = (tokenizer.token(at) for at in vars(tokenizer.specials).values())
        repeated = [token for token in special if lines.count(token) > 1]
        if repeated:
            message = f"has several lines for {' and '.join(repeated)}"
            raise FolderError(message, where=file, fix=fix)


def _check_rows(tokenizer: Tokenizer, model: Model, folder: Path) -> None:
    """Raise FolderError if a tokenizer has more ids than the model's embedding has rows."""
    if tokenizer.size > model.config.vocab:
        rows = f"the model's embedding {model.config.vocab:,} rows"
        message = f"the tokenizer has {tokenizer.size:,} ids, and {rows}"
        fix = "Take the tokenizer that the model was trained with."
        raise FolderError(message, where=folder, fix=fix)


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of all tokens and their ids, in hexadecimal."""
    vocabulary = sorted((at, token) for token, at in tokenizer.backend.get_vocab().items())
    text = json.dumps([*vocabulary, vars(tokenizer.specials)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_record(folder: Path) -> dict[str, Any]:
    """Return `bothways.json` without the parts that belong to the format of the folder."""
    reserved = (VERSION, hf_config.DROPOUTS, VOCABULARY, UNTRAINED, CONFIG)
    record = object_in(folder / hf_config.RECORD)
    return {key: value for key, value in record.items() if key not in reserved}


def load_model(
    source: str | Path,
    heads: Head | Iterable[Head] | None = None,
    fresh: str | Collection[str] = (),
    *,
    whole: bool = True,
) -> LoadedModel:
    """Load a model folder, or a model from the Hugging Face Hub.

    Args:
        source: the folder, or the model's id on the Hub.
        heads: the model's heads, with the pooler that they read; None means the folder's.
            Needed for a head from outside the library, whose class the folder cannot name.
        fresh: kinds of heads that start at random, even where the folder holds them. A pooler that
            one of them reads starts at random, too, if the model was saved without one.
        whole: whether the file must hold all of these heads; otherwise incomplete ones are left
            out, and listed in `faults`.

    Raises:
        FolderError: it is not a model folder of a known family; a file is corrupt; or a tensor
            is missing, has another shape or is not finite.
        ConfigError: `fresh` names a head that the model does not have; something else than a head
            is among `heads`.
        ResourceError: the process was forked after a model was opened, and has threads.

    Examples:
        >>> loaded = load_model("google-bert/bert-base-uncased")  # doctest: +SKIP
        >>> loaded.model.config.width  # doctest: +SKIP
        768
    """
    folder, fresh = resolve(source), {fresh} if isinstance(fresh, str) else fresh
    specified = (heads,) if isinstance(heads, HeadValue) else heads
    specified = None if specified is None else tuple(specified)
    for head in specified or ():
        if not isinstance(head, HeadValue):
            fix = "Give heads of bothways.model.heads, such as [LabelHead(2)]."
            raise ConfigError(f"{head!r} is not a head", where="heads", fix=fix)
    require_threads()
    config, weights = hf_config.open_model(folder, specified or ())
    # More layers than tensors would take long to build for nothing.
    if (blocks := config.encoder.blocks) > len(weights.shapes):
        message = f"has {blocks:,} layers, and {weights.file.name} only "
        message += f"{len(weights.shapes)} tensors"
        raise FolderError(message, where=config.where, fix=AGAIN)
    if specified is None:
        requested = heads_of(config, weights.shapes)
    else:
        requested = with_pooler(config.encoder, specified)
    has = None if config.architecture is None else config.architecture.heads
    faults = dict[str, str]()
    for head in () if whole else requested:
        report = plan_loading(config.keys, _shapes(config, head), weights.shapes, fresh, has)
        if report.faults:
            faults[head.kind] = "; ".join(report.faults)
    selected = tuple(head for head in requested if head.kind not in faults)
    kinds = {head.kind for head in selected}
    if absent := sorted({*fresh} - kinds):
        names = ", ".join(sorted(kinds)) or "none"
        message = f"{', '.join(absent)} must be among the model's heads: {names}"
        raise ConfigError(message, where="fresh", fix="Leave it out.")
    # Fresh heads that read a pooler: if the folder was saved without one, it is fresh, too.
    reading = [h for h in selected if h.kind in fresh and h.reads_pooler(config.encoder)]
    if reading and _lacks_pooler(config, weights.shapes):
        fresh = {*fresh, "pooler"}
    model, report = build_model(config, weights, selected, fresh)
    for line in report.warnings:
        logger.warning("%s: %s", folder, line)
    program = object_in(modules_folder(folder) / PROGRAM)
    model.kept = {"config.json": config.kept, PROGRAM: program}
    with_labels = [h for h in selected if h.label_count is not None and h.kind not in fresh]
    labels = config.labels() if with_labels else ()
    numbers = config.raw.get("label2id") or {}
    if other := [x for at, x in enumerate(labels) if str(numbers.get(x, at)) != str(at)]:
        message = "%s: label2id in config.json disagrees with id2label, which is used, on %s"
        logger.warning(message, folder, listed(other))
    record = object_in(folder / hf_config.RECORD)
    require_types(record, folder / hf_config.RECORD, untrained=list)
    untrained = tuple(kind for kind in kinds if kind in (record.get(UNTRAINED) or ()))
    # The tokenizer is read at its first use, when the program may work in another folder.
    extra, tokenizer_folder = read_record(folder), folder.absolute()
    if weights.adapter:
        base = config.where.parent
        # PEFT saves neither tokenizer nor poolings; other programs write theirs next to it.
        has_tokenizer = any((folder / name).is_file() for name in FILES)
        tokenizer_folder = (folder if has_tokenizer else base).absolute()
        folder = folder if extra or (folder / MODULES).is_file() else base
    return LoadedModel(
        model, report, folder, labels, config.problem, extra, faults, untrained, tokenizer_folder
    )


def build_model(
    config: hf_config.HFConfig, weights: Weights, heads: Iterable[Head], fresh: Collection[str] = ()
) -> tuple[Model, LoadReport]:
    """Return the model with its weights, in evaluation mode, and the fate of every tensor.

    Raises:
        FolderError: a tensor that is in no fresh head is missing, has another shape or is not
            finite.
    """
    specification = tuple(heads)
    model, report = plan_model(config, weights, specification, fresh)
    table = config.keys
    if faulty := [*report.missing, *report.misshapen]:
        # A head that no class of the family keeps has our names.
        names_of = {name: [rule.name for rule in table.origins(name)] or [name] for name in faulty}
        kinds = {head_of(subject) for module_names in names_of.values() for subject in module_names}
        if None in kinds:
            subject, fix = "the encoder", AGAIN
            unplaced = [name for name, why in report.unused.items() if why in (NO_PLACE, NOT_KNOWN)]
            if any(".base_layer." in name for name in weights.shapes):  # the names of PEFT
                fix = (
                    "An adapter is not merged: call merge_and_unload of PEFT, then save the model."
                )
            elif report.misshapen:
                fix = "Correct config.json: its sizes are another model's."
            elif unplaced and report.missing:  # a module of another program around the model
                fix = f"The file has other names, such as {unplaced[0]}: "
                fix += "save the model inside by save_pretrained, or rename its tensors."
        else:
            lacking = sorted({head.kind for head in specification} & kinds)
            subject = f"the head{'s' * (len(lacking) > 1)} {' and '.join(lacking)}"
            fix = f"To start what is missing at random: {setting('fresh', lacking)}."
        message = f"does not hold {subject} of this model: {'; '.join(report.faults)}"
        raise FolderError(message, where=weights.file, fix=fix)
    state = _read_state(report, table, model.state_dict(), weights)
    for head in specification:
        if head.kind in fresh:
            with torch.device("cpu"):  # as what is read, whatever the program's default is
                initial = head.build(config.encoder).float().state_dict()
            state |= {f"heads.{head.kind}.{name}": tensor for name, tensor in initial.items()}
    model.load_state_dict(state, assign=True)
    return model.eval(), report


def plan_model(
    config: hf_config.HFConfig, weights: Weights, heads: Iterable[Head], fresh: Collection[str] = ()
) -> tuple[Model, LoadReport]:
    """Return the model without memory for its weights, and the plan of its loading.

    Only names and shapes are read.
    """
    with without_weights():
        model = Model(config.encoder, heads)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    has = None if config.architecture is None else config.architecture.heads
    report = replace(
        plan_loading(config.keys, shapes, weights.shapes, fresh, has),
        unknown_settings=config.unknown,
        wrappers=weights.wrappers,
        adapter=weights.adapter,
        unread_files=unread_files(weights.file),
    )
    return model, report


def _read_state(
    report: LoadReport, table: KeyTable, names: Iterable[str], weights: Weights
) -> dict[str, Tensor]:
    """Return our tensors in fp32, without fresh heads."""
    for copy, name in report.copies:
        if not torch.equal(weights.read(report.sources[copy]), weights.read(report.sources[name])):
            message = f"holds different values for {copy} and {name}, tied by config.json"
            fix = 'If they differ on purpose, set "tie_word_embeddings": false.'
            raise FolderError(message, where=weights.file, fix=fix)
    state, not_finite = {}, []
    for tensor_name in set(names) - set(report.fresh):
        placement = table.place(tensor_name)
        chunks = list[Tensor]()
        for name in placement.names:
            chunk = read_exact(weights, report.sources[name])
            # NaN and infinity reach the sum, which is faster than the extremes, and needs no memory
            # for an answer per number; a sum of finite numbers can overflow.
            if not math.isfinite(chunk.sum()) and not all(map(math.isfinite, chunk.aminmax())):
                not_finite.append(name)
            chunks.append(chunk)
        tensor = placement.join(chunks).contiguous()
        # On some processors matrix products depend on the alignment of the weights in the last
        # bit. Memory of torch is aligned to 64 bytes; a part of a tensor need not be.
        state[tensor_name] = tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()
    if not_finite:
        faulty = listed(sorted(not_finite))
        message = f"holds NaN or infinity in {len(not_finite)} of its tensors: {faulty}"
        fix = "Use a checkpoint from before training diverged, or download the file again."
        raise FolderError(message, where=weights.file, fix=fix)
    return state


def _require_own(model: object, tokenizer: object) -> None:
    """Raise ConfigError for a model, a tensor or a tokenizer of another library."""
    if not isinstance(model, Model):
        message = f"must be a bothways.Model, not {type(model).__name__}"
        fix = "Save it with its own library: bothways.load_model opens the folder."
        raise ConfigError(message, where="model", fix=fix)
    with without_weights():
        expected = Model(model.config, model.specification).state_dict().keys()
    if foreign := sorted(model.state_dict().keys() - expected):
        message = f"has tensors that no model folder of its configuration has: {listed(foreign)}"
        fix = "Make pruned weights plain first: torch.nn.utils.prune.remove(module, 'weight')."
        raise ConfigError(message, where="model", fix=fix)
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        message = f"must be a bothways.Tokenizer, not {type(tokenizer).__name__}"
        fix = "Open its folder: bothways.Tokenizer.load(FOLDER)."
        raise ConfigError(message, where="tokenizer", fix=fix)


def _label_names(labels: object) -> list[str]:
    """Return labels as texts; ConfigError for a single text, or for no list at all."""
    if isinstance(labels, str) or not isinstance(labels, Iterable):
        raise ConfigError(f"must be a list of names, not {labels!r}", where="labels")
    return [str(label) for label in labels]


_STILL_TRUE = ("task", "length")
"""The parts of the folder's record that hold after further training."""


@checked
def save_model(  # noqa: PLR0913 – one independent value per kind of content
    folder: str | Path,
    model: Model,
    tokenizer: Tokenizer | None = None,
    *,
    labels: Sequence[str] = (),
    problem: hf_config.Problem | None = None,
    card: Card | None = None,
    extra: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, Any] | None = None,
    adapter: TrainedAdapter | None = None,
) -> Architecture:
    """Save a model folder, which appears complete or not at all, and replaces an older one.

    transformers opens it if one of its classes has this encoder and exactly these heads.
    Otherwise the folder is in our own format, which transformers does not open, and the card and
    the returned architecture say so.

    Args:
        folder: the path; an existing folder must hold nothing but a model.
        model: its weights are saved in fp32. Of one that `bothways.load_model` has opened, the
            tokenizer, labels, problem and task that are not given are those of its folder.
        tokenizer: the tokenizer that the model was trained with.
        labels: names of the outputs of the head that counts them; empty means LABEL_0, LABEL_1 …
        problem: the purpose of the label head.
        card: the content of `README.md`.
        extra: the content of `bothways.json`: tuned thresholds, the training's record. JSON only.
        extra_files: JSON files of other programs, by name, such as those of sentence-transformers;
            under "config.json" settings in addition to the model's own.
        adapter: the low-rank changes that made the model of its base; the folder is then an adapter
            of PEFT, and holds the changes and the heads in place of all weights.

    Returns:
        The class of transformers that the folder is for, or a stand-in with `own=True`.

    Raises:
        ConfigError: the folder is not a text or a path; model, tokenizer or labels are those of
            another library; or weights are pruned or parametrized, which a folder has no names for.
        FolderError: the labels do not fit the outputs, the tokenizer has more ids than the
            embedding has rows, or the folder holds something else.
        ResourceError: the disk is full or writing is not permitted; an older model is kept.

    Examples:
        >>> model = bothways.load_model("my-classifier")
        >>> labels = ["bad", "good"]
        >>> bothways.save_model("renamed", model, model.tokenizer, labels=labels).name
        'BertForSequenceClassification'
        >>> bothways.load("renamed", task="classify")("a good film").label
        'good'
    """
    path = local_path(folder)
    _require_own(model, tokenizer)
    names = _label_names(labels)
    if isinstance(model, PretrainedModel):
        # What is not given is as the folder has it; a fresh head has another purpose than its own.
        loaded, is_fresh = model._loaded, bool(model.report.fresh)
        if (loaded.folder / MODULES).is_file():
            message = "pooling and other modules of sentence-transformers are not saved with a "
            message += "model; save_sentence_encoder of bothways.tasks.sentence_embedding.task "
            logger.warning("%s: %s", loaded.folder, message + "saves them")
        origin = loaded.tokenizer_folder or loaded.folder
        if tokenizer is None and any((origin / name).is_file() for name in FILES):
            tokenizer = model.tokenizer
        if extra is None and not is_fresh:
            extra = {name: loaded.extra[name] for name in _STILL_TRUE if name in loaded.extra}
        problem = problem or (None if is_fresh else loaded.problem)
        names = names or _label_names(model.labels)
    config = hf_config.write_hf_config(model, tokenizer, names, problem, path)
    architecture = config.architecture
    assert architecture is not None
    if tokenizer is not None:
        _check_rows(tokenizer, model, path)
    check_replaceable(path)
    digest = {} if tokenizer is None else {VOCABULARY: vocabulary_digest(tokenizer)}
    # The class may have a pooler that the model has not, and that nothing reads.
    lacks_pooler = "pooler" in architecture.idle - set(model.heads)
    new = {UNTRAINED: ["pooler"]} if lacks_pooler else {}
    record = {VERSION: __version__, **digest, **new, **(extra or {}), **config.record}
    files = {hf_config.RECORD: record, **(extra_files or {})}
    state = {
        name: tensor.detach().to("cpu", torch.float32)
        for name, tensor in model.state_dict().items()
    }
    if lacks_pooler:
        # A seed of its own, so that equal models give equal files.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            pooler = PoolerHead().build(model.config).state_dict()
        state |= {f"heads.pooler.{name}": tensor for name, tensor in pooler.items()}
    if adapter is None:
        files["config.json"] = {**config.raw, **files.get("config.json", {})}
        weights_file, table = "model.safetensors", config.keys
        named = to_file_names(table, state)
        named |= {spare.stored: named[n] for n, spare in table.spares.items() if n in named}
        prefix = table.prefix if architecture.bare else ""
        tensors = {name.removeprefix(prefix): tensor.clone() for name, tensor in named.items()}
    else:
        files[hf_config.RECORD][CONFIG] = {**config.outputs, **files.pop("config.json", {})}
        weights_file = ADAPTER_WEIGHTS
        files[ADAPTER], tensors = adapter.files(state, config.keys, architecture)
    with replace_folder(path) as hidden:
        write_files(hidden, files, render_card(card or Card(), architecture))
        if tokenizer is not None:
            tokenizer.save(
                hidden, positions=model.config.max_positions, segments=model.config.segments > 1
            )
        write_weights(hidden / weights_file, tensors)
    return architecture


def check_adapter_only(source: str, model: Model, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if PEFT could not open the changes of a model as an adapter of its base."""
    folder = resolve(resolve_run(source))
    architecture = hf_config.write_hf_config(model, tokenizer, (), None, folder).architecture
    family = family_named(hf_config.read_hf_config(folder).model_type)
    if (folder / ADAPTER).is_file():
        message = f"needs a whole model as its base, and {source} is an adapter itself"
    elif family is None or architecture is None or architecture.own:
        message = "transformers has no class with this encoder and these heads for PEFT to adapt"
    elif family.other_keys:
        message = f"modules of {family.model_type} in transformers have other names than its files"
    else:
        return
    fix = "Leave it out: the folder then holds all weights."
    raise ConfigError(message, where="lora.adapter_only", fix=fix)


def write_weights(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file next to the record of its folder."""
    save_file(tensors, file, metadata={"format": "pt"})
    # safetensors creates files that only their owner can read, whatever the umask.
    file.chmod((file.parent / hf_config.RECORD).stat().st_mode)


def write_files(folder: Path, files: Mapping[str, Any], card: str = "") -> None:
    """Write files by name, bytes as they are and other values as JSON; and a card, if any."""
    files = {**files, "README.md": card.encode()} if card else files
    for name, tree in files.items():
        text = "" if isinstance(tree, bytes) else json.dumps(tree, indent=2, ensure_ascii=False)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(tree if isinstance(tree, bytes) else f"{text}\n".encode())


def check_replaceable(path: Path, reserved: Sequence[str] = _FILES, kind: str = "a model") -> None:
    """Raise FolderError if a folder holds anything but files with these patterns."""
    if path.exists() and not path.is_dir():
        raise FolderError("is a file, not a folder", where=path, fix="Choose another folder.")
    present = sorted(file.name for file in path.iterdir()) if path.exists() else []
    foreign = [name for name in present if not any(fnmatch.fnmatch(name, k) for k in reserved)]
    if foreign:
        message = f"holds files of something other than {kind}: {listed(foreign)}"
        raise FolderError(message, where=path, fix="Choose an empty or a new folder.")


def heads_of(config: hf_config.HFConfig, names: Iterable[str]) -> tuple[Head, ...]:
    """Return the heads of a folder whose tensors have these names.

    They are the heads of the class in `config.json`, or else those that the file holds tensors of.
    A `classifier` of an unknown class is dropped: its name does not determine what it reads.
    """
    if config.heads is not None:
        return config.heads
    if config.architecture is not None:
        kinds: Collection[str | None] = config.architecture.heads
    else:
        table = config.keys
        rules = (rule for name in names for rule in table.origins(table.full_name(name))[:1])
        kinds = {head_of(rule.name) for rule in rules if rule.name not in table.shared}
    heads = list[Head]()
    for kind, head_class in HEADS.items():
        if kind in kinds:
            settings: dict[str, Any] = {}
            # Only the fields that this kind has: the pooler has neither outputs nor a dropout.
            if "count" in head_class.__dataclass_fields__:
                settings["count"] = len(config.labels())
            if "dropout" in head_class.__dataclass_fields__:
                settings["dropout"] = config.dropouts.get(kind)
            heads.append(head_class(**settings))
    return tuple(heads)


def _lacks_pooler(config: hf_config.HFConfig, shapes: Mapping[str, Shape]) -> bool:
    """Return True if a folder was saved without a pooler: neither its class nor its file has one.

    That of a bare model may be absent: transformers has `add_pooling_layer=False`.
    """
    architecture = config.architecture
    kinds: set[str] = {item.kind for item in config.heads or ()}
    if architecture is not None and not architecture.bare:
        kinds |= architecture.heads
    report = plan_loading(config.keys, _shapes(config, PoolerHead()), shapes, ())
    return "pooler" not in kinds and not report.loaded and not report.misshapen


def _shapes(config: hf_config.HFConfig, head: Head) -> dict[str, Shape]:
    """Return the shapes of the head's tensors, and of the pooler's if it reads that."""
    with without_weights():
        return {
            f"heads.{part_head.kind}.{name}": tuple(tensor.shape)
            for part_head in with_pooler(config.encoder, (head,))
            for name, tensor in part_head.build(config.encoder).state_dict().items()
        }


@checked
def push_to_hub(
    source: str | Path | Model,
    repo_id: str,
    tokenizer: Tokenizer | None = None,
    *,
    card: Card | None = None,
    private: bool | None = None,
    message: str = "Upload with bothways",
) -> str:
    """Upload a model to the Hugging Face Hub, in a repository that is created if necessary.

    Args:
        source: a model folder, the folder of a run, or a model in memory, which is saved first.
        repo_id: the repository, as owner/name.
        tokenizer, card: of a model in memory; a folder has its own.
        private: whether a new repository is private; None means the owner's default.
        message: the commit message.

    Returns:
        The address of the commit.

    Raises:
        FolderError: `source` is not a model folder, or the Hub refuses the upload.
        ConfigError: a tokenizer or a card is given for a folder.

    Examples:
        >>> push_to_hub("my-classifier", "me/my-classifier")  # doctest: +SKIP
    """
    if isinstance(source, Model):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            save_model(folder, source, tokenizer, card=card)
            return push_to_hub(folder, repo_id, private=private, message=message)
    if tokenizer is not None or card is not None:
        message = "is of a model in memory, and a folder is uploaded as it is"
        raise ConfigError(message, where="tokenizer" if card is None else "card")
    folder = local_path(resolve_run(str(source)))
    if not is_model_folder(folder):
        fix = "Give the folder that save_model wrote."
        raise FolderError("is not a model folder: it has no config.json", where=folder, fix=fix)
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    # The patterns keep other files of the folder, such as notebooks, out of a public repository.
    api = HfApi()
    try:
        with contextlib.suppress(HfHubHTTPError):  # other calls wait without end for an answer
            api.model_info(repo_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message=message,
            allow_patterns=[f"{name}/*" if "]_" in name else name for name in _FILES],
        )
    except hub_errors() as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        description = f"cannot be uploaded to the Hub: {lines[0]}"
        fix = "Check the network and the name; log in with a token that may write: hf auth login"
        raise FolderError(description, where=repo_id, fix=hub_advice(error, fix)) from error
    return str(commit.commit_url)


class PretrainedModel(Model):
    """A `Model` with the tokenizer and the labels of its folder, in evaluation mode.

        model = bothways.load_model("bert-base-uncased")
        output = model(model.tokenizer.batch(["A good film.", "A bad play."]))
        output.last_hidden_state, output.logits, output.pooler_output

    Args:
        loaded: the folder in memory; its modules become those of this model.

    Attributes:
        labels: names of the outputs of the label or tag head, in order; empty without such a head
            or with a fresh one.
        report: the fate of every tensor of the folder.

    Examples:
        >>> model = bothways.load_model("my-classifier")
        >>> isinstance(model, bothways.PretrainedModel), model.labels
        (True, ('negative', 'positive'))
    """

    def __init__(self, loaded: LoadedModel) -> None:
        nn.Module.__init__(self)
        model = loaded.model
        self.config, self.specification, self.kept = model.config, model.specification, model.kept
        self.encoder, self.heads = model.encoder, model.heads
        self.labels, self.report = loaded.labels, loaded.report
        self._loaded = loaded
        self.eval()

    def __repr__(self) -> str:
        shape = self.config
        parameters = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"PretrainedModel(layers={shape.depth}, width={shape.width}, "
            f"parameters={parameters:,}, heads=[{', '.join(self.heads)}], labels={self.labels})"
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer.

        Raises:
            TokenizerError: the folder has no tokenizer, or one that cannot be read.
            FolderError: the vocabulary is not the one that the model was saved with.
        """
        return self._loaded.tokenizer

    def save(self, folder: str | Path) -> Path:
        """Save model, tokenizer, if any, and labels as a Hugging Face folder; return its path.

        `bothways.save_model` has more settings, such as the model card.

        Raises:
            FolderError: the labels do not fit the outputs, or the folder holds something else.
            ResourceError: the folder cannot be written.
        """
        save_model(folder, self)
        return local_path(folder)
