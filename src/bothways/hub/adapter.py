"""Adapters of PEFT, in both directions: low-rank changes of a model that the folder names.

    adapter_config.json        rank, scale, and the folder or Hub id of the base model
    adapter_model.safetensors  lora_A and lora_B of each changed module; other modules whole

An adapter is read as the weights that it makes: W + s B A for a changed matrix. What else PEFT can
do to a module (DoRA, biases, other kinds of adapters) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bothways.core.errors import FolderError
from bothways.core.files import local_path, read_object
from bothways.core.terminal import listed, quantity
from bothways.hub.resolve import ADAPTER, require_types, resolve, resolve_run
from bothways.hub.weight_files import ADAPTER_NAMES, AGAIN, Weights, open_weights, read_exact
from bothways.model.families.family import Architecture, Family
from bothways.model.families.weight_names import KeyTable, TensorPlacement, Transpose

CONFIG = "config"
"""The key in `bothways.json` of an adapter for settings that a model folder has in `config.json`:
with that file, transformers would look for the model's weights next to it."""
_FIX = "Merge it into its model (merge_and_unload), save that, and give the new folder."
_PREFIX = "base_model.model."
_TASK_TYPES = {
    "SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering", "FEATURE_EXTRACTION": "Model",
}  # fmt: skip
"""Task types of PEFT → the end of the class of the base model."""
_WHOLE = ("classifier", "score", "qa_outputs")
"""Modules that PEFT keeps whole for these task types, whatever an adapter says."""
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_READ = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
        "task_type", "auto_mapping", "base_model_name_or_path",
        # These choose or initialise modules in training; the tensors of the file show the outcome.
        "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform",
        "layers_pattern", "lora_dropout", "inference_mode", "eva_config", "ensure_weight_tying",
        "peft_version", "megatron_core", "qalora_group_size",
    }
)  # fmt: skip
"""Settings that are read, or that do not change what a trained adapter computes."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "revision": (None, "main"),
    # Other starts, such as PiSSA's, change the base model's weights, too.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
"""Settings with the values that are supported; any other setting must be off."""


@dataclass(frozen=True)
class Adapter:
    """An adapter folder.

    Attributes:
        settings: the content of `adapter_config.json`.
        base: the local folder of the base model.
        weights: the tensors, by their names without PEFT's prefix.
    """

    folder: Path
    settings: Mapping[str, Any]
    base: Path
    weights: Weights

    @property
    def file(self) -> Path:
        """The file with the settings."""
        return self.folder / ADAPTER

    def architecture(self, family: Family) -> Architecture | None:
        """Return the class that was adapted; None for the class of the base model."""
        task, mapping = self.settings.get("task_type"), self.settings.get("auto_mapping") or {}
        if task is None and not mapping:
            return None
        name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        for candidate in family.architectures:
            if candidate.name == name or (
                task and candidate.name.endswith(_TASK_TYPES.get(task, "\0"))
            ):
                return candidate
        message = f"has task_type {task!r:.40}, class {name!r:.80}: no class of {family.model_type}"
        fix = f"Supported are {', '.join(_TASK_TYPES)} and the family's other classes."
        raise FolderError(message, where=self.file, fix=fix)

    def outputs(self, architecture: Architecture | None, table: KeyTable) -> int | None:
        """Return the number of labels or tags; None if the adapter has no head for them."""
        shapes = {table.full_name(name): shape for name, shape in self.weights.shapes.items()}
        kinds = {"labels", "tags"} & (architecture.heads if architecture else frozenset())
        names = (table.place(f"heads.{kind}.dense.weight").names[0] for kind in kinds)
        return next((shapes[name][0] for name in names if shapes.get(name)), None)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's change, α / r or α / √r; FolderError for another rank."""
        config = self.settings
        expected = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
        alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
        if rank != expected or isinstance(alpha, bool) or not isinstance(alpha, int | float):
            settings = f"rank {expected!r:.20}, alpha {alpha!r:.20}"
            message = f"gives {module} {settings}; its rank is {rank}"
            raise FolderError(message, where=self.file, fix=AGAIN)
        return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that is the end of a module's name."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def read_adapter(folder: Path) -> Adapter | None:
    """Open the adapter in a folder; None for a folder without one.

    Raises:
        FolderError: a setting is not supported, the base model is not here, or the file of the
            tensors is missing or damaged.
    """
    file = folder / ADAPTER
    if not file.is_file():
        return None
    settings = read_object(file, FolderError)
    require_types(
        settings, file, task_type=str, use_rslora=bool, fan_in_fan_out=bool, rank_pattern=dict,
        alpha_pattern=dict,
    )  # fmt: skip
    for pattern in [*(settings.get("rank_pattern") or ()), *(settings.get("alpha_pattern") or ())]:
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"has the pattern {pattern!r:.80}, which is not a regular expression: {error}"
            raise FolderError(message, where=file, fix=AGAIN) from error
    unsupported = {
        key: value
        for key, value in {"peft_type": None, **settings}.items()
        if (value not in _ONLY[key] if key in _ONLY else key not in _READ and value)
    }
    if unsupported:
        pairs = listed([f"{key} = {value!r:.60}" for key, value in unsupported.items()])
        raise FolderError(f"has settings that are not read: {pairs}", where=file, fix=_FIX)
    fix = f"Set base_model_name_or_path in {ADAPTER} to the base model's folder or Hub id."
    base_name: Any = settings.get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        raise FolderError("names no base model", where=file, fix=fix)
    # A relative path may begin at the adapter's folder; one from the current folder goes first.
    beside = folder / base_name
    is_beside = beside.is_dir() and not local_path(base_name).exists()
    try:
        base = resolve(beside if is_beside else resolve_run(base_name))
    except FolderError as error:
        message = f"names a base model that cannot be read: {error.where}: {error.what}"
        raise FolderError(message, where=file, fix=fix) from error
    if (base / ADAPTER).is_file():
        message = f"names a base model that is an adapter itself, {base_name!r:.80}"
        raise FolderError(message, where=file, fix=_FIX)
    weights = open_weights(folder, ADAPTER_NAMES)
    # PEFT calls the weight of an adapted layer LAYER.base_layer.weight.
    names = {
        name.removeprefix(_PREFIX).replace(".base_layer.", "."): name for name in weights.shapes
    }
    shapes = {bare: weights.shapes[name] for bare, name in names.items()}
    renamed = Weights(weights.file, shapes, lambda bare: weights.read(names[bare]))
    return Adapter(folder, settings, base, renamed)


def apply_adapter(
    base: Weights, adapter: Adapter, table: KeyTable, heads: Collection[str]
) -> Weights:
    """Return the tensors of the base model as the adapter changes them.

    Args:
        table: the weight names of the base model.
        heads: kinds of heads of the adapted class.

    Raises:
        FolderError: a tensor is of no known kind, or does not fit the base model.
    """
    names = {table.full_name(name): name for name in base.shapes}
    replaced, factors = dict[str, str](), dict[str, dict[str, str]]()
    for name in adapter.weights.shapes:
        if factor := _FACTOR.fullmatch(name):
            factors.setdefault(factor[1], {})[(factor[2] or "") + factor[3]] = name
        elif "lora_" in name or not table.knows(name):
            message = f"holds {name}, which is no tensor of LoRA nor of the base model's family"
            raise FolderError(message, where=adapter.weights.file, fix=_FIX)
        else:
            full = table.full_name(name)
            target, shape = names.get(full, full), adapter.weights.shapes[name]
            # Of another number of tokens; heads may have another number of outputs.
            if full.startswith(table.prefix) and base.shapes.get(target, shape) != shape:
                message = f"replaces {name} by {list(shape)}, and the base model has "
                message += f"{list(base.shapes[target])} there"
                raise FolderError(message, where=adapter.weights.file, fix=_FIX)
            replaced[target] = name
    shapes = {**base.shapes, **{name: adapter.weights.shapes[of] for name, of in replaced.items()}}
    changes = dict[str, Callable[[], Tensor]]()
    for module, pair in factors.items():
        full = table.full_name(f"{module}.weight")
        target = names.get(full, full)
        changes[target] = _change(adapter, module, pair, shapes.get(target))
    for full, tie in table.ties.items():
        if (
            names.get(full, full) in {*changes, *replaced}
            and tie.owner.removeprefix("heads.") in heads
        ):
            message = f"changes {full}, but not the output layer that the base model ties to it"
            raise FolderError(message, where=adapter.weights.file, fix=_FIX)

    def read(name: str) -> Tensor:
        """Return a tensor of the adapter or of the base model, with its change."""
        tensor = adapter.weights.read(replaced[name]) if name in replaced else base.read(name)
        # Quantised weights are refused by the caller.
        change = name in changes and tensor.is_floating_point()
        return tensor.to(torch.float32) + changes[name]() if change else tensor

    note = f"{quantity(len(changes), 'tensor(s)')} changed, {len(replaced):,} replaced"
    return Weights(base.file, shapes, read, base.wrappers, f"{note} by {adapter.weights.file}")


def _change(
    adapter: Adapter, module: str, names: Mapping[str, str], target: tuple[int, ...] | None
) -> Callable[[], Tensor]:
    """Return the function that computes the change of a weight, from the names of its factors."""
    embedding = set(names) == {"embedding_A", "embedding_B"}
    if not embedding and set(names) != {"A", "B"}:
        message = f"holds one factor of {module} without the other"
        raise FolderError(message, where=adapter.weights.file, fix=AGAIN)
    # A before B: the factor from the inputs, then the one to the outputs.
    into, out = sorted(names.values())
    if any(len(adapter.weights.shapes[name]) != 2 for name in (into, out)):
        message = f"holds factors of {module} that are not matrices"
        raise FolderError(message, where=adapter.weights.file, fix=AGAIN)
    (rank, inputs), (outputs, other) = (adapter.weights.shapes[name] for name in (into, out))
    # Embeddings, and layers of GPT-2's kind, have the transposed matrix.
    turned = embedding or bool(adapter.settings.get("fan_in_fan_out"))
    shape = (inputs, outputs) if turned else (outputs, inputs)
    if target != shape or rank != other:
        message = f"changes {module} by a matrix of {list(shape)}"
        reason = "does not have it" if target is None else f"has {list(target)} there"
        message += f", and the base model {reason}"
        raise FolderError(message, where=adapter.weights.file, fix="Check base_model_name_or_path.")
    scale = adapter.scale(module, rank)

    def change() -> Tensor:
        """Return s B A, in the order of the weight."""
        left, into_weights = (read_exact(adapter.weights, name) for name in (out, into))
        product = scale * (left @ into_weights)
        return product.t() if turned else product

    return change


@dataclass(frozen=True)
class LowRankChange:
    """A trained low-rank change of one of our matrices, which may stack several.

    Attributes:
        into: the matrices A, one after the other `(changed · rank, inputs)`.
        out: the matrices B `(changed, outputs of one, rank)`.
        stacked: the number of matrices stacked in the weight.
        changed: the numbers of those that are changed.
    """

    into: Tensor
    out: Tensor
    stacked: int
    changed: tuple[int, ...]

    def factors(self, placement: TensorPlacement) -> Iterable[tuple[str, Tensor, Tensor]]:
        """Yield name, A and B of each tensor of a file that the matrix is in.

        Matrices that a file has in one tensor, such as queries and keys, share factors of a higher
        rank: B is zero outside their own rows.
        """
        count, rows, rank = self.out.shape
        full = self.out.new_zeros(self.stacked * rows, count * rank)
        used = torch.zeros(full.shape)
        for number, index in enumerate(self.changed):
            block = (
                slice(index * rows, (index + 1) * rows),
                slice(number * rank, (number + 1) * rank),
            )
            full[block], used[block] = self.out[number], 1.0
        # A transposed weight has the same factors; PEFT's fan_in_fan_out turns their product.
        turned = isinstance(placement.rule, Transpose)
        # The mask goes through the same rule, so it shows which columns a tensor of the file needs.
        chunks, masks = ([matrix] if turned else placement.split(matrix) for matrix in (full, used))
        for name, chunk, mask in zip(placement.names, chunks, masks, strict=True):
            columns = mask.any(0)
            if columns.any():
                yield name.removesuffix(".weight"), self.into[columns], chunk[:, columns]


@dataclass(frozen=True)
class TrainedAdapter:
    """The result of low-rank training, to be saved as changes of its base model.

    Attributes:
        base: the folder or the Hub id of the base model.
        scale: the factor of each change.
        changes: the changes, by the names of our modules.
    """

    base: str
    scale: float
    changes: Mapping[str, LowRankChange]

    def files(
        self, state: Mapping[str, Tensor], table: KeyTable, architecture: Architecture
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return `adapter_config.json` and the tensors of `adapter_model.safetensors`.

        Args:
            state: the model's tensors by our names; those of heads are saved whole.
            table: the weight names of the family.
            architecture: the class of transformers that PEFT shall adapt.
        """
        prefix = table.prefix if architecture.bare else ""
        tensors, ranks, heads = dict[str, Tensor](), dict[str, int](), dict[str, None]()
        turned = False
        for tensor_name, change in self.changes.items():
            placement = table.place(f"{tensor_name}.weight")
            turned |= isinstance(placement.rule, Transpose)
            for name, into, out in change.factors(placement):
                module = name.removeprefix(prefix)
                ranks[module] = len(into)
                tensors[f"{_PREFIX}{module}.lora_A.weight"] = into
                tensors[f"{_PREFIX}{module}.lora_B.weight"] = out
        for tensor_name, tensor in state.items():
            if tensor_name.startswith("heads."):
                placement = table.place(tensor_name)
                for full, chunk in zip(placement.names, placement.split(tensor), strict=True):
                    name = full.removeprefix(prefix)
                    module_name = name.partition(".")[0]
                    module = module_name if module_name in _WHOLE else name.rpartition(".")[0]
                    heads[module] = None
                    tensors[f"{_PREFIX}{name}"] = chunk
        # PEFT has one rank, and patterns for modules that deviate from it.
        rank = min(ranks.values())
        suffix = next(
            (t for t, end in _TASK_TYPES.items() if architecture.name.endswith(end)), None
        )
        mapping = {"base_model_class": architecture.name, "parent_library": "transformers"}
        wide = {re.escape(module): value for module, value in ranks.items() if value != rank}
        config = {
            "peft_type": "LORA", "task_type": suffix, "auto_mapping": None if suffix else mapping,
            "base_model_name_or_path": self.base, "inference_mode": True, "bias": "none",
            "r": rank, "lora_alpha": self.scale * rank, "lora_dropout": 0.0,
            "rank_pattern": wide,
            "alpha_pattern": {module: self.scale * value for module, value in wide.items()},
            "target_modules": sorted(ranks), "modules_to_save": sorted(heads) or None,
            "fan_in_fan_out": turned, "use_rslora": False, "init_lora_weights": True,
        }  # fmt: skip
        return config, {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
