"""The files that sentence-transformers adds to a model folder, read and written.

The folder of a sentence encoder is a chain of modules: the Transformer, then Pooling of its last
layer, then perhaps Dense layers, then perhaps Normalize; the program may keep only the first
components of the vectors. That of a cross-encoder is the Transformer alone, whose label head gives
the scores. Every other module and setting would change the results, so it is refused. The files
are written in their older form, which all versions of sentence-transformers read.

Versions of the program record a cross-encoder in different places: up to 3 in config.json as
`sbert_ce_default_activation_function`, 4 and 5 there in the section `sentence_transformers`, and 6
in config_sentence_transformers.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.errors import FolderError
from bothways.core.files import local_path, read_json, read_object, replace_folder
from bothways.hub.hf_config import RECORD
from bothways.hub.model_card import Card, render_card
from bothways.hub.model_folder import check_replaceable, save_model, write_files
from bothways.hub.resolve import (
    MODULES,
    PROGRAM,
    modules_folder,
    object_in,
    require_inside,
    require_types,
)
from bothways.hub.static_embedding import STATIC, StaticEncoder, StaticTokenizer, static_files
from bothways.hub.weight_files import open_weights, read_exact
from bothways.model.block import activate
from bothways.model.config import Activation
from bothways.model.families.family import Architecture
from bothways.model.kernels.linear import on_round_rows
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How the vectors of tokens become one, in the order in which older files join several of them."""
ScoreActivation = Literal["sigmoid", "identity"]
"""How a cross-encoder's score is made of its logit."""
PROJECTION = "projection"
"""The name of the Dense layers among the heads of a model that was opened for embedding."""
_TRANSFORMERS = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The files with the settings of the Transformer, in the order in which the program seeks them."""
_TRANSFORMER = _TRANSFORMERS[0]
_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
}
"""The output that the Transformer reads for each task, and the program's name for it."""
_CALL = "processing_kwargs"
_ARGUMENTS = (
    "model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args",
    "config_kwargs",
)  # fmt: skip
_NEUTRAL = (
    "trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "add_pooling_layer",
    "unpad_inputs", "use_memory_efficient_attention", "use_safetensors", "safe_serialization",
    "low_cpu_mem_usage", "device_map", "padding", "padding_side", "pad_to_multiple_of", "use_fast",
    "use_cache", "cache_dir", "revision", "code_revision", "token", "local_files_only",
    "force_download", "proxies",
)  # fmt: skip
"""Arguments of transformers and its tokenizers that change no more than the rounding: how weights
are held, batches are filled up, and files are found."""
SIMILARITY = "similarity_fn_name"
"""A setting of the program that is kept as it was read; null is the cosine."""
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_CUT, _DEFAULT = "truncate_dim", "default_prompt_name"
_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_STEM = "pooling_mode_"
_SECTION, _OLDEST = "sentence_transformers", "sbert_ce_default_activation_function"
"""Where config.json names the activation of a cross-encoder."""
_SCORE_ACTIVATIONS: dict[ScoreActivation, str] = {
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "identity": "torch.nn.modules.linear.Identity",
}
_DENSE_ACTIVATIONS: dict[str, Activation | Literal["tanh"] | None] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": None,
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
}
_LIBRARY = re.compile(r"^sentence_transformers\.(.*\.)?")
_FIX = "Supported: Transformer and Pooling or StaticEmbedding, perhaps Dense layers and Normalize."


class Projection(nn.Module):
    """Dense layers on the vectors of texts: the modules Dense of sentence-transformers.

    Args:
        layers: the dense layers, the first of which reads pooled vectors.
        activations: applied after each of them; None for none.
    """

    def __init__(
        self, layers: Many[nn.Linear], activations: Many[Activation | Literal["tanh"] | None]
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = layers[0].in_features, layers[-1].out_features
        self.layers, self.activations = nn.ModuleList(layers), tuple(activations)

    def forward(self, x: Float[Tensor, "texts inputs"]) -> Float[Tensor, "texts outputs"]:
        """Return the projected vectors."""
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = on_round_rows(layer, x)
            x = x if activation is None else activate(activation, x)
        return x


@dataclass(frozen=True)
class SentenceEncoderConfig:
    """Settings of a sentence encoder: how the vectors of tokens become the vector of a text.

    Attributes:
        pooling: how the vectors of tokens are pooled; of several ways the vectors are joined.
        normalised: whether the vector is scaled to length 1.
        components: the number of components that are kept; None means all.
        length: the longest text, in tokens.
        prompts: texts that are put before others, by name.
        prompt_name: the prompt that is used by default; None for none.
        include_prompt: whether the tokens of a prompt are pooled.
    """

    pooling: Pooling | tuple[Pooling, ...]
    normalised: bool
    components: int | None
    length: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt_name: str | None = None
    include_prompt: bool = True


@dataclass(frozen=True)
class CrossEncoderConfig:
    """Settings of a cross-encoder: how a label head scores a pair of texts.

    Attributes:
        activation: what is made of the logit.
        length: the longest pair, in tokens.
        prompts, prompt_name: as in `SentenceEncoderConfig`, for the first text.
    """

    activation: ScoreActivation
    length: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt_name: str | None = None


ProgramConfig = SentenceEncoderConfig | CrossEncoderConfig


def read_program_config(folder: Path, positions: int) -> ProgramConfig | None:
    """Return the settings of sentence-transformers in a folder, None where there are none.

    Args:
        positions: the longest text that the model can read, in tokens.

    Raises:
        FolderError: a file is damaged, or has a module or setting that is not supported.
    """
    root = modules_folder(folder)
    file = root / PROGRAM
    program, config = object_in(file), object_in(folder / "config.json")  # an adapter has none
    section: Any = config.get(_SECTION)
    # The module's longest text, else the tokenizer's.
    transformer_file = next(
        (folder / name for name in _TRANSFORMERS if (folder / name).is_file()),
        folder / _TRANSFORMER,
    )
    transformer = object_in(transformer_file)
    if transformer.get("do_lower_case"):
        message = "lower-cases texts before they are tokenized"
        fix = "Let the tokenizer do it, and set do_lower_case to false."
        raise FolderError(message, where=transformer_file, fix=fix)
    length = _read_count(transformer, "max_seq_length", transformer_file)
    length = read_length(folder, positions) if length is None else min(positions, length)
    chain = _read_modules(root / MODULES)
    kinds = [kind for kind, _ in chain]
    has_modules = f"its modules are {', '.join(kinds)[:200] or 'none'}"
    activations = [config[_OLDEST]] if _OLDEST in config else []
    if isinstance(section, dict) and "activation_fn" in section:
        activations.append(section["activation_fn"])
    if program.get("model_type") == "CrossEncoder" or activations:
        if kinds not in ([], ["Transformer"]):
            fix = "Supported is Transformer alone."
            raise FolderError(has_modules, where=root / MODULES, fix=fix)
        # The last activation that is named, by its class; the default is the sigmoid.
        activations.append(program.get("activation_fn"))
        stated = [name for name in activations if name is not None]
        name = stated[-1] if stated else _SCORE_ACTIVATIONS["sigmoid"]
        classes = {path.rpartition(".")[2]: kind for kind, path in _SCORE_ACTIVATIONS.items()}
        class_name = str(name).rpartition(".")[2]
        if class_name not in classes:
            message = f"scores are made by {name!r:.80}"
            raise FolderError(message, where=folder, fix=f"Supported are {' and '.join(classes)}.")
        _check_transformer(transformer, transformer_file, "sequence-classification")
        prompts = _read_prompts(program, file)
        return CrossEncoderConfig(classes[class_name], length, *prompts)
    if not (root / MODULES).is_file():
        return None
    dense, normalised = kinds.count("Dense"), kinds[-1:] == ["Normalize"]
    static = kinds[:1] == [STATIC]
    start = [STATIC] if static else ["Transformer", "Pooling"]
    if kinds != start + ["Dense"] * dense + ["Normalize"] * normalised:
        raise FolderError(has_modules, where=root / MODULES, fix=_FIX)
    for _, path in chain[1:]:
        require_inside(path, root / MODULES)
    if not static:
        _check_transformer(transformer, transformer_file, "feature-extraction")
    if normalised:
        _check_normalize(root / chain[-1][1] / "config.json")
    _check_similarity(program, file)
    pooling, include_prompt = (
        ("mean", True) if static else _read_pooling(root / chain[1][1] / "config.json")
    )
    components, prompts = _read_count(program, _CUT, file), _read_prompts(program, file)
    return SentenceEncoderConfig(pooling, normalised, components, length, *prompts, include_prompt)


def _check_transformer(settings: Mapping[str, Any], file: Path, task: str) -> None:
    """Raise FolderError for settings of a Transformer that change what it computes."""
    require_types(settings, file, modality_config=dict, processing_kwargs=dict)
    modalities, processing = (settings.get(key) or {} for key in ("modality_config", _CALL))
    output, name = _OUTPUTS[task]
    forward = {"method": "forward", "method_output_name": output}
    plain = {
        "transformer_task": task, "module_output_name": name, "query_length": None,
        "document_length": None, "query_expansion": None, "tokenizer_name_or_path": None,
        "modality_config.text": forward,
    }  # fmt: skip
    stated = {**settings, "modality_config.text": modalities.get("text")}
    unsupported = [key for key, value in plain.items() if stated.get(key) not in (None, value)]
    arguments = {key: settings.get(key) for key in _ARGUMENTS}
    arguments |= {f"{_CALL}.{key}": processing.get(key) for key in ("common", "text")}
    for key, values in arguments.items():
        names = values if isinstance(values, dict) else () if values is None else ("",)
        unsupported += [f"{key}.{name}".rstrip(".") for name in names if name not in _NEUTRAL]
    _require_supported(unsupported, file, "Remove those that the model does not need.")


def read_length(folder: Path, positions: int) -> int:
    """Return the tokens to which other programs cut texts: the tokenizer's, if there are as many
    positions.
    """
    length = object_in(folder / "tokenizer_config.json").get("model_max_length")
    return min(length, positions) if type(length) is int and length > 0 else positions


def _check_similarity(program: Mapping[str, Any], file: Path) -> None:
    """Raise FolderError for a similarity that is none of the program's for single vectors."""
    name = program.get(SIMILARITY)
    if name is not None and str(name).removesuffix("_score") not in _SIMILARITIES:
        message = f"compares vectors by {name!r:.80}"
        raise FolderError(message, where=file, fix=f"Supported are {', '.join(_SIMILARITIES)}.")


def _check_normalize(file: Path) -> None:
    """Raise FolderError for a Normalize that reads or writes something else than the vector."""
    settings, plain = object_in(file), (None, "sentence_embedding")
    names = [name for name in ("module_input_name", "module_output_name") if name in settings]
    _require_supported([name for name in names if settings[name] not in plain], file, _FIX)


def _require_supported(unsupported: list[str], file: Path, fix: str) -> None:
    if unsupported:
        message = f"has settings that are not supported: {', '.join(unsupported)[:200]}"
        raise FolderError(message, where=file, fix=fix)


def _read_count(settings: Mapping[str, Any], key: str, file: Path) -> int | None:
    """Return a number of tokens or components; None where there is none."""
    count = settings.get(key)
    if count is not None and (type(count) is not int or count < 1):
        message = f"{key} must be a whole number, at least 1, not {count!r:.40}"
        raise FolderError(message, where=file, fix="Set it to null for no limit of its own.")
    return count


def read_projection(folder: Path) -> Projection | None:
    """Return the Dense layers of a folder, None without any; errors as `read_program_config`."""
    root = modules_folder(folder)
    chain = _read_modules(root / MODULES)
    layers = [_read_dense(root / path) for kind, path in chain if kind == "Dense"]
    return Projection(*zip(*layers, strict=True)) if layers else None


def _read_dense(folder: Path) -> tuple[nn.Linear, Activation | Literal["tanh"] | None]:
    """Return a Dense layer and its activation."""
    file = folder / "config.json"
    if not file.is_file():
        message = f"names a module Dense, and {folder.name}/config.json is missing"
        raise FolderError(message, where=folder.parent / MODULES, fix="Copy the model again.")
    raw = {
        "bias": True, "activation_function": "torch.nn.modules.activation.Tanh",
        "module_input_name": "sentence_embedding", "module_output_name": None,
        "use_residual": False, **read_object(file, FolderError),
    }  # fmt: skip
    require_types(raw, file, in_features=int, out_features=int, bias=bool)
    name = raw.pop("activation_function")
    if not isinstance(name, str) or name not in _DENSE_ACTIVATIONS:
        supported = ", ".join(path.rpartition(".")[2] for path in _DENSE_ACTIVATIONS)
        message = f"has the activation {name!r:.80}"
        raise FolderError(message, where=file, fix=f"Supported are those of torch: {supported}.")
    inputs, outputs, bias = (raw.pop(key, None) for key in ("in_features", "out_features", "bias"))
    if raw.pop("module_output_name") not in (None, "sentence_embedding"):
        raw["module_output_name"] = "another name"
    plain = {"module_input_name": "sentence_embedding", "use_residual": False}
    unsupported = [key for key, value in raw.items() if key not in plain or plain[key] != value]
    _require_supported(unsupported, file, _FIX)
    weights = open_weights(folder)
    shapes = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    if {name: tuple(shape) for name, shape in weights.shapes.items()} != shapes:
        message = f"holds {dict(weights.shapes)!r:.200}, and its config.json says {shapes!r:.200}"
        raise FolderError(message, where=weights.file, fix="Copy the model again.")
    with torch.device("meta"):  # without drawing numbers
        layer = nn.Linear(inputs, outputs, bias=bool(bias))
    state = {name: read_exact(weights, f"linear.{name}") for name in layer.state_dict()}
    layer.load_state_dict(state, assign=True)
    return layer, _DENSE_ACTIVATIONS[name]


def _read_prompts(program: Mapping[str, Any], file: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one."""
    prompts, default = program.get("prompts") or {}, program.get(_DEFAULT)
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        message = f"prompts must be an object of names and texts, not {prompts!r:.80}"
        raise FolderError(message, where=file, fix="Copy the model again.")
    if default is not None and default not in list(prompts):
        names = ", ".join(prompts) or "none"
        message = f"{_DEFAULT} {default!r:.80} is not among its prompts: {names}"
        raise FolderError(message, where=file, fix="Set it to null for no prompt.")
    return {name: text or "" for name, text in prompts.items()}, default


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module, in order; none without the file."""
    tree = read_json(file, FolderError) if file.is_file() else []
    try:
        # A class of another library keeps its whole name: its Transformer may compute anything.
        return [(_LIBRARY.sub("", str(module["type"])), str(module["path"])) for module in tree]
    except (TypeError, KeyError) as error:
        message = "is not a list of modules with type and path"
        raise FolderError(message, where=file, fix=_FIX) from error


def _read_pooling(file: Path) -> tuple[Pooling | tuple[Pooling, ...], bool]:
    """Return the pooling modes, and whether the tokens of a prompt are pooled."""
    raw = read_object(file, FolderError)
    modes: Any = raw.get("pooling_mode")
    # Older files have a flag for each way of pooling.
    if modes is None:
        on = {key for key, value in raw.items() if key.startswith(_STEM) and value}
        modes = [mode for key, mode in _KEYS.items() if key in on] + sorted(on - {*_KEYS})
    modes = modes if isinstance(modes, list) else [modes]
    names: dict[Any, Pooling] = {name: name for name in get_args(Pooling)}
    if not modes or not all(isinstance(mode, str) and mode in names for mode in modes):
        message = f"pools by {' and '.join(map(str, modes))[:80] or 'nothing'}"
        raise FolderError(message, where=file, fix=f"Supported are {', '.join(names)}.")
    require_types(raw, file, include_prompt=bool)
    pooling = modes[0] if len(modes) == 1 else tuple(modes)
    return pooling, raw.get("include_prompt") is not False


def save_sentence_folder(
    folder: str | Path,
    model: Model,
    tokenizer: Tokenizer,
    config: SentenceEncoderConfig,
    *,
    card: Card | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder that `SentenceTransformer` opens, too, if transformers has a class for
    the model; errors as `save_model`.
    """
    files = program_files(config, model)
    if isinstance(model.encoder, StaticEncoder):
        assert isinstance(tokenizer, StaticTokenizer)
        files |= {**static_files(model.encoder, tokenizer), RECORD: dict(extra or {})}
        check_replaceable(local_path(folder))
        with replace_folder(local_path(folder)) as hidden:
            text = render_card(card or Card("Static vectors"), Architecture(STATIC, frozenset()))
            write_files(hidden, files, text)
        return
    if PROJECTION in model.heads:  # is in files of its own
        heads = {kind: head for kind, head in model.heads.items() if kind != PROJECTION}
        original, model = model, Model(model.config, (), model.encoder)
        model.specification, model.kept = original.specification, original.kept
        model.heads = nn.ModuleDict(heads)
    save_model(folder, model, tokenizer, card=card, extra=extra, extra_files=files)


def program_files(
    config: ProgramConfig, model: Model | None = None, projection: Projection | None = None
) -> dict[str, Any]:
    """Return the files of sentence-transformers by name: bytes, and what is written as JSON.

    What is for config.json are settings in addition to the model's own.

    Args:
        model: a sentence encoder; of a cross-encoder it is not needed.
        projection: its Dense layers, where they are not among its heads.
    """
    prompts = {"prompts": dict(config.prompts), _DEFAULT: config.prompt_name}
    transformer = {"max_seq_length": config.length, "do_lower_case": False}
    match config:
        case CrossEncoderConfig():
            path = _SCORE_ACTIVATIONS[config.activation]
            of_task = {
                "transformer_task": "sequence-classification",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
                "module_output_name": "scores",
            }
            return {
                "config.json": {_SECTION: {"activation_fn": path}},
                MODULES: _chain(["Transformer"]),
                _TRANSFORMER: {**transformer, **of_task},
                PROGRAM: {"model_type": "CrossEncoder", "activation_fn": path, **prompts},
            }
        case SentenceEncoderConfig():
            assert model is not None
            if PROJECTION in model.heads:
                projection = cast("Projection", model.heads[PROJECTION])
            static = isinstance(model.encoder, StaticEncoder)
            kinds = [STATIC] if static else ["Transformer", "Pooling"]
            dense = dict[str, Any]()
            if projection is not None:
                paths = {activation: path for path, activation in _DENSE_ACTIVATIONS.items()}
                for layer, activation in zip(
                    projection.layers, projection.activations, strict=True
                ):
                    state = layer.state_dict().items()
                    tensors = {f"linear.{name}": tensor.detach().cpu() for name, tensor in state}
                    dense[f"{len(kinds)}_Dense/config.json"] = {
                        "in_features": layer.in_features,
                        "out_features": layer.out_features,
                        "bias": layer.bias is not None,
                        "activation_function": paths[activation],
                    }
                    dense[f"{len(kinds)}_Dense/model.safetensors"] = safetensors.torch.save(tensors)
                    kinds.append("Dense")
            kinds += ["Normalize"] * config.normalised
            modes = (config.pooling,) if isinstance(config.pooling, str) else config.pooling
            pooling: dict[str, Any] = {key: mode in modes for key, mode in _KEYS.items()}
            # The keys of the older form are a set, and the order of joined vectors matters.
            if modes != tuple(mode for mode in _KEYS.values() if mode in modes):
                pooling = {"pooling_mode": modes}  # in an order that older files cannot express
            similarity = model.kept.get(PROGRAM, {}).get(SIMILARITY, "cosine")
            pooling |= {
                "word_embedding_dimension": model.config.width,
                "include_prompt": config.include_prompt,
            }
            return {
                MODULES: _chain(kinds),
                **({} if static else {"1_Pooling/config.json": pooling, _TRANSFORMER: transformer}),
                **dense,
                PROGRAM: {
                    **prompts,
                    SIMILARITY: similarity,
                    **({} if config.components is None else {_CUT: config.components}),
                },
            }
        case _:
            assert_never(config)


def kept_files(folder: Path, model: Model) -> dict[str, Any]:
    """Return sentence-transformers' files for a model that was converted from a folder."""
    config = read_program_config(folder, model.config.max_positions)
    if config is None:
        return {}
    return program_files(config, model, read_projection(folder))


def _chain(kinds: list[str]) -> list[dict[str, Any]]:
    paths = ["" if kind == "Transformer" else f"{at}_{kind}" for at, kind in enumerate(kinds)]
    return [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
