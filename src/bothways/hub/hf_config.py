"""`config.json`, read into our terms and written from them.

Settings are as strict as tensors: one without a counterpart here is an error, and one that no
version of the family is known to have is listed in the load report.

In our own format, for a model that no class of transformers can be, `config.json` has the model
type "bothways" and, under a key of that name, our configuration and heads; weights have our own
names. Everything else (tokenizer, labels, card, record) is as in any other folder. transformers
does not open it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bothways.core.config import reader as configs
from bothways.core.config.values import join_path
from bothways.core.errors import ConfigError, FolderError, argument, call
from bothways.core.files import read_object
from bothways.core.terminal import listed, quantity
from bothways.hub.adapter import CONFIG, Adapter, apply_adapter, read_adapter
from bothways.hub.resolve import MODULES, object_in, require_types
from bothways.hub.weight_files import Weights, open_weights
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import FAMILIES, family_for, family_named
from bothways.model.families.family import (
    LARGEST,
    Architecture,
    Family,
    check_size,
    read_choice,
    read_number,
)
from bothways.model.families.weight_names import KeyTable, Rename
from bothways.model.heads import HEADS, ChoiceHead, Head
from bothways.model.init import without_weights
from bothways.model.model import Model

if TYPE_CHECKING:
    from bothways.text.tokenizer import Tokenizer

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""The purpose of a label head, as transformers names it."""
RECORD = "bothways.json"
DROPOUTS = "dropouts"
"""The key in `bothways.json` for the dropout of a head that transformers has no setting for."""
MAX_LABELS = 1_000_000
_OUTPUT_KEYS = ("id2label", "label2id", "num_labels", "problem_type")


@dataclass(frozen=True)
class HFConfig:
    """A `config.json`, as read or as to be written.

    Attributes:
        where: the file.
        model_type: the family, or `NATIVE`.
        keys: the family's weight names.
        architecture: the class that it names; None for a class that is unknown here.
        heads: the heads of a folder in our own format; None where the class determines them.
        dropouts: of heads with a dropout of their own, by kind; None means the encoder's.
        unknown: settings that the family is not known to have.
        record: what `bothways.json` has to hold because `config.json` has no setting for it.
        outputs: of a configuration to be written, the settings of the heads alone.
    """

    raw: Mapping[str, Any]
    where: Path
    model_type: str
    encoder: EncoderConfig
    keys: KeyTable
    architecture: Architecture | None
    heads: tuple[Head, ...] | None = None
    dropouts: Mapping[str, float | None] = field(default_factory=dict)
    unknown: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> Problem | None:
        """The purpose of the label head, if the file names it."""
        if self.raw.get("problem_type") is None:
            return None
        problems: dict[str, Problem] = {name: name for name in get_args(Problem)}
        problem: Problem = read_choice(self.raw, "problem_type", problems, "", str(self.where))
        return problem

    @property
    def kept(self) -> dict[str, Any]:
        """The settings that a saved model keeps though nothing here reads them.

        These are the ids of special tokens, except for padding, which is part of the configuration,
        and the model type: several may have the same configuration.
        """
        return {
            key: value
            for key, value in self.raw.items()
            if key == "model_type" or (key.endswith("_token_id") and key != "pad_token_id")
        }

    def labels(self) -> tuple[str, ...]:
        """Return the names of a label or tag head's outputs; FolderError if settings disagree."""
        require_types(self.raw, self.where, label2id=dict)
        names = self.raw.get("id2label")
        if names is not None and (
            not isinstance(names, dict)
            or set(names) != {str(at) for at in range(len(names))}
            or not all(isinstance(name, str | int | float) for name in names.values())
        ):
            message = "id2label must name the outputs 0, 1, 2 … and nothing else, "
            message += f"not {names!r:.80}"
            raise FolderError(message, where=self.where)
        outputs = [h.label_count for h in self.heads or () if h.label_count is not None]
        default = len(names) if names is not None else max(outputs, default=0) or 2
        count = default
        if self.raw.get("num_labels") is not None:
            count = read_number(self.raw, "num_labels", default, str(self.where))
        if not 1 <= count <= MAX_LABELS:
            message = f"a head with labels must have 1 to {MAX_LABELS:,} outputs, not {count}"
            raise FolderError(message, where=self.where)
        if names is None:
            return tuple(map(label_name, range(count)))
        if len(names) != count:
            outputs_named = quantity(len(names), "output(s)")
            message = f"num_labels is {count}, but id2label names {outputs_named}"
            fix = "Remove num_labels, or name as many outputs as the head has."
            raise FolderError(message, where=self.where, fix=fix)
        return tuple(str(names[str(at)]) for at in range(count))


def format_note(folder: Path | None) -> str:
    """Return a sentence about a folder in our own format, "" for one that transformers opens."""
    if folder is None or object_in(folder / "config.json").get("model_type") != NATIVE:
        return ""  # an adapter has no config.json
    return "It is in our own format: transformers has no class with this encoder and these heads."


def label_name(at: int) -> str:
    """Return transformers' name for an output without a name."""
    return f"LABEL_{at}"


def read_hf_config(folder: Path, custom: Iterable[Head] = ()) -> HFConfig:
    """Read the `config.json` of a folder.

    Args:
        custom: heads from outside the library, which the file may name.

    Raises:
        FolderError: the file is missing or malformed, the family is unknown, or a setting has no
            counterpart here.
    """
    if (adapter := read_adapter(folder)) is not None:
        return _read_adapted(adapter)
    file = folder / "config.json"
    if not file.is_file():
        fix = "Give the folder of one model, as transformers' save_pretrained writes it."
        # The checkpoints of a Trainer, and a model in the Hub's cache.
        inner = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
        if inner:
            fix = f"Give a folder in it: {listed(sorted(str(file.parent) for file in inner))}"
        if (folder / MODULES).is_file():
            fix = "Copy or download the folder again, or if it is one of sentence-transformers "
            fix += f"without a Transformer, compute its vectors with {argument(task='embed')}."
        if folder.match("step-[0-9]*"):
            command = call("average", str(folder), out="DIR")
            fix = f"Give the run, {folder.parent}; or make a model of this checkpoint: {command}"
        if any(folder.glob("*.ckpt*.index")):
            command = call("convert", str(folder), out="FOLDER")
            fix = f"To convert a TensorFlow checkpoint: {command}"
        raise FolderError("is not a model folder: it has no config.json", where=folder, fix=fix)
    raw = read_object(file, FolderError)
    if raw.get("model_type") == NATIVE:
        encoder, heads = read_native(raw, file, custom)
        config = _native_config(raw, file, encoder, heads)
        counts = {head.label_count for head in heads if head.label_count is not None}
        if "id2label" in raw and counts != {len(config.labels())}:
            count, outputs = len(config.labels()), sorted(counts) or "none"
            message = f"id2label names {count} outputs, and the heads have {outputs}"
            raise FolderError(message, where=file)
        return config
    family = family_named(str(raw.get("model_type")))
    if family is None:
        kind, types = raw.get("model_type"), [family.model_type for family in FAMILIES]
        allowed = ", ".join([*types, NATIVE])
        if kind is None:
            message = f"names no model_type, which must be one of {allowed}"
            fix = 'To a config.json from before model_type existed, add "model_type": "bert".'
            raise FolderError(message, where=file, fix=fix)
        message = f"model_type {kind!r:.80} is unknown: it must be one of {allowed}"
        raise FolderError(message, where=file, fix="Use a model of one of these families.")
    config = read_family_config(family, raw, file)
    return replace(config, dropouts={**config.dropouts, **_recorded_dropouts(folder)})


def _read_adapted(adapter: Adapter) -> HFConfig:
    """Return the configuration of the base model, with the class and outputs of its adapter."""
    base = read_hf_config(adapter.base)
    family = family_named(base.model_type)
    if family is None:
        message = "changes a model in our own format, which PEFT does not open"
        raise FolderError(message, where=adapter.file, fix=f"Its base model is {adapter.base}.")
    architecture = adapter.architecture(family) or base.architecture
    raw = dict(base.raw)
    if architecture is not None:
        raw["architectures"] = [architecture.name]
    outputs = adapter.outputs(architecture, base.keys)
    if outputs is not None and outputs != len(base.labels()):
        raw |= {"id2label": {str(i): label_name(i) for i in range(outputs)}, "num_labels": outputs}
    record = object_in(adapter.folder / RECORD)
    require_types(record, adapter.folder / RECORD, config=dict)
    if recorded := record.get(CONFIG):
        replaced = {*_OUTPUT_KEYS, *(key for key, _ in family.dropouts.values())}
        # The base model's outputs and dropouts do not belong to the adapted head.
        raw = {key: value for key, value in raw.items() if key not in replaced} | recorded
    config = read_family_config(family, raw, base.where)
    folder = adapter.folder if recorded else adapter.base
    return replace(config, dropouts={**config.dropouts, **_recorded_dropouts(folder)})


def open_model(folder: Path, custom: Iterable[Head] = ()) -> tuple[HFConfig, Weights]:
    """Return configuration and tensors of a model folder; an adapter with those of its base.

    Arguments and errors as `read_hf_config` and `open_weights`.
    """
    adapter = read_adapter(folder)
    config = read_hf_config(folder, custom) if adapter is None else _read_adapted(adapter)
    weights = open_weights(folder if adapter is None else adapter.base)
    if (family := family_named(config.model_type)) is not None:
        # The names of tensors add to the configuration.
        encoder = family.seen(config.encoder, weights.shapes)
        config = replace(config, encoder=encoder, keys=family.keys_for(encoder, weights.shapes))
    if adapter is not None:
        heads = config.architecture.heads if config.architecture else ()
        weights = apply_adapter(weights, adapter, config.keys, heads)
    return config, weights


def read_family_config(family: Family, raw: Mapping[str, Any], location: Path) -> HFConfig:
    """Return the settings of a family in our terms; FolderError for one without counterpart."""
    require_types(raw, location, architectures=list)
    encoder, unknown = family.config_rules.read_all(raw, str(location))
    # Dropouts of heads are known settings, though the encoder does not have them.
    dropout_keys = {key for key, _ in family.dropouts.values()}
    dropouts = {
        kind: default if raw.get(key) is None else read_number(raw, key, 0.0, str(location))
        for kind, (key, default) in family.dropouts.items()
    }
    unknown = {key: value for key, value in unknown.items() if key not in dropout_keys}
    architecture = family.architecture_named(map(str, raw.get("architectures") or []))
    return HFConfig(
        raw, location, family.model_type, encoder, family.keys_for(encoder), architecture,
        dropouts=dropouts, unknown=unknown,
    )  # fmt: skip


def _recorded_dropouts(folder: Path) -> dict[str, float]:
    file = folder / RECORD
    record = object_in(file)
    require_types(record, file, dropouts=dict)
    rates = record.get(DROPOUTS) or {}
    kinds = [kind for kind in ("labels", "tags", "choice") if kind in rates]
    return {kind: read_number(rates, kind, 0.0, str(file)) for kind in kinds}


def write_hf_config(
    model: Model,
    tokenizer: Tokenizer | None,
    labels: Sequence[str],
    problem: Problem | None,
    folder: Path,
) -> HFConfig:
    """Return the `config.json` of a model that is saved in `folder`.

    The model is written as a class of transformers, or in our own format if there is none with
    this encoder and exactly these heads.

    Raises:
        FolderError: the labels do not fit the outputs, or the outputs the problem.
    """
    config, location = model.config, folder / "config.json"
    kept_settings = model.kept.get("config.json", {})
    kind = None if tokenizer is None else tokenizer.kind
    family = family_for(config, kind, kept_settings.get("model_type"))
    architecture = None if family is None else family.architecture_with(model.heads)
    heads = (h for h in model.specification if h.label_count or isinstance(h, ChoiceHead))
    head = next(heads, None)
    count = 0 if head is None else head.label_count or 0
    if problem == "single_label_classification" and count == 1:
        message = "single-label classification needs two outputs or more, and the head has one"
        fix = "Give the head two outputs, or set the problem to regression."
        raise FolderError(message, where=location, fix=fix)
    if labels and len(labels) != count:
        counts = f"{quantity(len(labels), 'label(s)')} for {quantity(count, 'output(s)')}"
        raise FolderError(f"{counts}: {listed(labels)}", where=location)
    outputs: dict[str, Any] = {}
    if count:
        names = list(labels) or list(map(label_name, range(count)))
        outputs["id2label"] = {str(at): name for at, name in enumerate(names)}
        outputs["label2id"] = {name: at for at, name in enumerate(names)}
    if head is not None and problem is not None:
        outputs["problem_type"] = problem
    if family is None or architecture is None:
        raw = {
            "architectures": [_NATIVE_CLASS], "model_type": NATIVE, "dtype": "float32",
            NATIVE: configs.to_dict(NativeConfig(config, model.specification)), **outputs,
        }  # fmt: skip
        return _native_config(raw, location, config, model.specification)
    ids = {key: value for key, value in kept_settings.items() if key != "model_type"}
    if tokenizer is not None:
        from bothways.text.tokenizer_files import tokenizer_config

        # Texts begin with [CLS] and end with [SEP] by default.
        tokens = tokenizer_config(tokenizer.backend, tokenizer.specials)
        tokens = {"bos_token": tokens["cls_token"], "eos_token": tokens["sep_token"]} | tokens
        uses = ("bos", "eos", "cls", "sep", "mask")
        ids = {f"{use}_token_id": tokenizer.id(tokens[f"{use}_token"]) for use in uses}
    # A head's own dropout as settings of `config.json`, and of `bothways.json`.
    key, default = ("", None) if head is None else family.dropouts.get(head.kind, ("", None))
    dropouts, record = dict[str, Any](), dict[str, Any]()
    own_dropout: float | None = getattr(head, "dropout", None)
    if head is not None and not (own_dropout is None and default is None):
        rate = config.dropout.hidden if own_dropout is None else own_dropout
        dropouts, record = ({key: rate}, {}) if key else ({}, {DROPOUTS: {head.kind: rate}})
    raw = {
        **({} if architecture in family.classless else {"architectures": [architecture.name]}),
        "model_type": family.model_type, "dtype": "float32",
        **(family.config_rules.write(config) or {}), **ids, **outputs, **dropouts,
    }  # fmt: skip
    head_settings = {"architectures": [architecture.name], **outputs, **dropouts}
    return HFConfig(
        raw, location, family.model_type, config, family.keys_for(config), architecture,
        record=record, outputs=head_settings,
    )  # fmt: skip


NATIVE = "bothways"
"""The model type, and the key of our configuration in `config.json`."""
_NATIVE_CLASS = "bothways.Model"
"""The stand-in for a class of transformers."""


def _native_config(
    raw: Mapping[str, Any], file: Path, encoder: EncoderConfig, heads: tuple[Head, ...]
) -> HFConfig:
    """Return a `config.json` in our own format, whose tensors have our own names.

    They have names for every head of the library and for these.
    """
    kinds = [head.kind for head in heads]
    renames = (Rename(f"heads.{kind}", f"heads.{kind}") for kind in dict.fromkeys([*HEADS, *kinds]))
    keys = KeyTable("", (Rename("encoder", "encoder"), *renames))
    architecture = Architecture(_NATIVE_CLASS, frozenset(kinds), own=True)
    return HFConfig(raw, file, NATIVE, encoder, keys, architecture, heads)


@dataclass(frozen=True)
class NativeConfig:
    """The content of the key.

    Attributes:
        heads: the heads of the folder, at most one of each kind.
    """

    encoder: EncoderConfig
    heads: tuple[Head, ...] = ()

    def __post_init__(self) -> None:
        kinds = [head.kind for head in self.heads]
        if len(set(kinds)) < len(kinds):
            message = f"must hold at most one head of each kind, not {', '.join(kinds)}"
            raise ConfigError(message, where="heads")


def read_native(
    raw: Mapping[str, Any], file: Path, custom: Iterable[Head] = ()
) -> tuple[EncoderConfig, tuple[Head, ...]]:
    """Return the encoder and the heads that a `config.json` in our own format describes.

    Raises:
        FolderError: a key or value is missing, unknown or malformed; it has the dotted path.
    """
    tree = raw.get(NATIVE)
    if not isinstance(tree, Mapping):
        message = f"{NATIVE}: must be an object with encoder and heads, not {tree!r:.40}"
        raise FolderError(message, where=file, fix="Save the model again, or copy the file again.")
    custom_heads: dict[str, Head] = {head.kind: head for head in custom if head.kind not in HEADS}
    entries, outside = tree.get("heads"), list[Head]()
    # Heads from outside the library leave the tree, which is read without them.
    if custom_heads and isinstance(entries, list):
        remaining = []
        for entry in entries:
            head = custom_heads.get(str(entry.get("kind") if isinstance(entry, Mapping) else entry))
            if head is None:
                remaining.append(entry)
            elif entry in (head.kind, configs.to_dict(head)):
                outside.append(head)
            else:
                description = configs.to_dict(head)
                message = f"{NATIVE}.heads: holds {entry!r:.80}, and {description} is given"
                fix = "Give the head that the model was saved with."
                raise FolderError(message, where=file, fix=fix)
        tree = {**tree, "heads": remaining}
    try:
        config = configs.read(NativeConfig, tree, where=NATIVE)
        _compare(tree, configs.to_dict(config), NATIVE)
        check_size(config.encoder, f"{NATIVE}.encoder")
        # Impossible shapes are found by building, which allocates nothing here.
        with without_weights():
            Model(config.encoder, (*config.heads, *outside))
    except ConfigError as error:
        raise FolderError(f"{error.where}: {error.what}", where=file, fix=error.advice) from error
    return config.encoder, (*config.heads, *outside)


def _compare(raw: Any, parsed: Any, location: str) -> None:
    """Refuse values of another type, which the config reader accepts for the command line."""
    if isinstance(raw, Mapping) and isinstance(parsed, Mapping):
        for key in raw:
            _compare(raw[key], parsed[key], join_path(location, str(key)))
    elif isinstance(raw, list) and isinstance(parsed, list) and len(raw) == len(parsed):
        for at, pair in enumerate(zip(raw, parsed, strict=True)):
            _compare(*pair, join_path(location, str(at)))
    elif isinstance(raw, Mapping) and isinstance(parsed, str):
        pass  # {"kind": "masked"} is written as "masked"
    elif type(raw) is not type(parsed) and not (type(raw) is int and type(parsed) is float):
        raise ConfigError(f"must be {parsed!r:.40}, not {raw!r:.40}", where=location)
    elif isinstance(parsed, int | float) and not abs(parsed) <= LARGEST:
        raise ConfigError(f"must be at most {LARGEST:,}, not {raw!r:.40}", where=location)
