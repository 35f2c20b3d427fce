"""The files that sentence-transformers adds to a model folder, read and written.

The folder of a sentence encoder is a chain of modules: the Transformer, then Pooling of its last
layer, then perhaps Normalize; the program may keep only the first components of the vectors. That
of a cross-encoder is the Transformer alone, whose label head gives the scores. Every other module
and setting would change the results, so it is refused. The files are written in their older form,
which all versions of sentence-transformers read.

Versions of the program record a cross-encoder in different places: up to 3 in config.json as
`sbert_ce_default_activation_function`, 4 and 5 there in the section `sentence_transformers`, and 6
in config_sentence_transformers.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from typing_extensions import assert_never

from bothways.core.errors import FolderError
from bothways.core.json_reader import read_json, read_object
from bothways.hub.hf_config import write_hf_config
from bothways.hub.model_card import Card
from bothways.hub.model_folder import save_model
from bothways.hub.resolve import MODULES, PROGRAM, is_inside, modules_folder
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer

Pooling = Literal["cls", "mean", "max"]
Activation = Literal["sigmoid", "identity"]
"""How a cross-encoder's score is made of its logit."""
_TRANSFORMER = "sentence_bert_config.json"
SIMILARITY = "similarity_fn_name"
"""A setting of the program that is kept as it was read."""
_CUT, _DEFAULT = "truncate_dim", "default_prompt_name"
_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}
_STEM = "pooling_mode_"
_SECTION, _OLDEST = "sentence_transformers", "sbert_ce_default_activation_function"
"""Where config.json names the activation of a cross-encoder."""
_ACTIVATIONS: dict[Activation, str] = {
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "identity": "torch.nn.modules.linear.Identity",
}
_FIX = "Supported are Transformer, Pooling by cls, mean or max, and perhaps Normalize."


@dataclass(frozen=True)
class SentenceEncoderConfig:
    """How the vectors of tokens become the vector of a text.

    Attributes:
        pooling: which vectors are pooled.
        normalised: whether the vector is scaled to length 1.
        components: the number of components that are kept; None means all.
        length: the longest text, in tokens.
        prompts: texts that are put before others, by name.
        prompt_name: the prompt that is used by default; None for none.
        include_prompt: whether the tokens of a prompt are pooled.
    """

    pooling: Pooling
    normalised: bool
    components: int | None
    length: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt_name: str | None = None
    include_prompt: bool = True


@dataclass(frozen=True)
class CrossEncoderConfig:
    """How a label head scores a pair of texts.

    Attributes:
        activation: what is made of the logit.
        length: the longest pair, in tokens.
        prompts: texts that are put before the first one, by name.
        prompt_name: the prompt that is used by default; None for none.
    """

    activation: Activation
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
    whole = modules_folder(folder)
    file = whole / PROGRAM
    program = read_object(file, FolderError) if file.is_file() else {}
    config = read_object(folder / "config.json", FolderError)
    section: Any = config.get(_SECTION)
    length = min(positions, _read_length(folder) or positions)
    named = [config[_OLDEST]] if _OLDEST in config else []
    named += [section["activation_fn"]] if _has_activation(section) else []
    if program.get("model_type") == "CrossEncoder" or named:
        kinds = [kind for kind, _ in _read_modules(whole / MODULES)]
        if kinds not in ([], ["Transformer"]):
            fix = "Supported is Transformer alone."
            raise FolderError(_has_modules(kinds), where=whole / MODULES, fix=fix)
        activation = _read_activation([*named, program.get("activation_fn")], folder)
        return CrossEncoderConfig(activation, length, *_read_prompts(program, file))
    if not (whole / MODULES).is_file():
        return None
    chain = _read_modules(whole / MODULES)
    kinds = [kind for kind, _ in chain]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise FolderError(_has_modules(kinds), where=whole / MODULES, fix=_FIX)
    path = chain[1][1]
    if not is_inside(path):
        what = f"the folder of a module must be in the model's folder, not {path!r:.80}"
        raise FolderError(what, where=whole / MODULES, fix="Copy the model again.")
    pooling, include_prompt = _read_pooling(whole / path / "config.json")
    components, prompts = _read_components(program, file), _read_prompts(program, file)
    return SentenceEncoderConfig(
        pooling, len(kinds) == 3, components, length, *prompts, include_prompt
    )


def _has_modules(kinds: list[str]) -> str:
    return f"its modules are {', '.join(kinds)[:200] or 'none'}"


def _has_activation(section: Any) -> bool:
    return isinstance(section, dict) and "activation_fn" in section


def _read_activation(named: list[Any], folder: Path) -> Activation:
    """Return the last activation that is named, by its class; without any that of one label."""
    name = next((each for each in reversed(named) if each is not None), _ACTIVATIONS["sigmoid"])
    kinds = {path.rpartition(".")[2]: activation for activation, path in _ACTIVATIONS.items()}
    kind = str(name).rpartition(".")[2]
    if kind not in kinds:
        what = f"scores are made by {name!r:.80}"
        raise FolderError(what, where=folder, fix=f"Supported are {' and '.join(kinds)}.")
    return kinds[kind]


def _read_prompts(program: Mapping[str, Any], file: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one."""
    prompts, default = program.get("prompts") or {}, program.get(_DEFAULT)
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        what = f"prompts must be an object of names and texts, not {prompts!r:.80}"
        raise FolderError(what, where=file, fix="Copy the model again.")
    if default is not None and default not in prompts:
        what = (
            f"{_DEFAULT} {default!r:.80} is not among its prompts: {', '.join(prompts) or 'none'}"
        )
        raise FolderError(what, where=file, fix="Set it to null for no prompt.")
    return {name: text or "" for name, text in prompts.items()}, default


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module, in order; none without the file."""
    tree = read_json(file, FolderError) if file.is_file() else []
    try:
        return [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in tree]
    except (TypeError, KeyError) as error:
        what = "is not a list of modules with type and path"
        raise FolderError(what, where=file, fix=_FIX) from error


def _read_pooling(file: Path) -> tuple[Pooling, bool]:
    """Return the kind of pooling, and whether the tokens of a prompt are pooled."""
    raw = read_object(file, FolderError)
    modes: Any = raw.get("pooling_mode")
    if modes is None:
        on = (key for key, value in raw.items() if key.startswith(_STEM) and value)
        modes = [_KEYS.get(key, key.removeprefix(_STEM)) for key in on]
    modes = modes if isinstance(modes, list) else [modes]
    names: dict[Any, Pooling] = {name: name for name in get_args(Pooling)}
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in names:
        what = f"pools by {' and '.join(map(str, modes))[:80] or 'nothing'}"
        raise FolderError(what, where=file, fix=_FIX)
    include_prompt = raw.get("include_prompt", True)
    if not isinstance(include_prompt, bool):
        what = f"include_prompt must be true or false, not {include_prompt!r:.40}"
        raise FolderError(what, where=file, fix="Copy the model again.")
    return names[modes[0]], include_prompt


def _read_components(program: Mapping[str, Any], file: Path) -> int | None:
    """Return the number of components that are kept, None for all of them."""
    count = program.get(_CUT)
    if count is not None and (type(count) is not int or count < 1):
        what = f"{_CUT} must be a number of components, at least 1, not {count!r:.40}"
        raise FolderError(what, where=file, fix="Set it to null to keep all.")
    return count


def _read_length(folder: Path) -> int | None:
    """Return the longest text in tokens: of the module, else of the tokenizer."""
    file = folder / _TRANSFORMER
    raw = read_object(file, FolderError) if file.is_file() else {}
    if raw.get("do_lower_case"):
        fix = "Let the tokenizer do it, and set do_lower_case to false."
        raise FolderError("lower-cases texts before they are tokenized", where=file, fix=fix)
    length = raw.get("max_seq_length")
    if length is None and (folder / "tokenizer_config.json").is_file():
        length = read_object(folder / "tokenizer_config.json", FolderError).get("model_max_length")
    return length if isinstance(length, int) and length > 0 else None


def save_sentence_folder(
    folder: str | Path,
    model: Model,
    tokenizer: Tokenizer,
    config: SentenceEncoderConfig,
    *,
    card: Card | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder that `SentenceTransformer` opens, too.

    Raises:
        FolderError: transformers has no class for the model; else as `save_model`.
        ResourceError: as `save_model`.
    """
    architecture = write_hf_config(model, tokenizer, (), None, Path(folder)).architecture
    if architecture is None or architecture.own:
        what = "transformers has no class for this model, and sentence-transformers needs one"
        fix = "Save it with save_model, for use with bothways."
        raise FolderError(what, where=folder, fix=fix)
    extra_files = program_files(config, model)
    save_model(folder, model, tokenizer, card=card, extra=extra, extra_files=extra_files)


def program_files(config: ProgramConfig, model: Model | None = None) -> dict[str, Any]:
    """Return the files of sentence-transformers by name, to be written as JSON.

    What is for config.json are settings in addition to the model's own.

    Args:
        model: a sentence encoder; of a cross-encoder it is not needed.
    """
    prompts = {"prompts": dict(config.prompts), _DEFAULT: config.prompt_name}
    transformer = {"max_seq_length": config.length, "do_lower_case": False}
    match config:
        case CrossEncoderConfig():
            path = _ACTIVATIONS[config.activation]
            of_task = {
                "transformer_task": "sequence-classification",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
                "module_output_name": "scores",
            }
            return {
                "config.json": {_SECTION: {"activation_fn": path}},
                MODULES: _chain([("", "Transformer")]),
                _TRANSFORMER: {**transformer, **of_task},
                PROGRAM: {"model_type": "CrossEncoder", "activation_fn": path, **prompts},
            }
        case SentenceEncoderConfig():
            assert model is not None
            modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
            modules += [("2_Normalize", "Normalize")] if config.normalised else []
            similarity = model.kept.get(PROGRAM, {}).get(SIMILARITY, "cosine")
            return {
                MODULES: _chain(modules),
                "1_Pooling/config.json": {
                    "word_embedding_dimension": model.config.width,
                    **{key: mode == config.pooling for key, mode in _KEYS.items()},
                    "include_prompt": config.include_prompt,
                },
                _TRANSFORMER: transformer,
                PROGRAM: {
                    **prompts,
                    SIMILARITY: similarity,
                    **({} if config.components is None else {_CUT: config.components}),
                },
            }
        case _:
            assert_never(config)


def kept_files(folder: Path, model: Model, length: int | None = None) -> dict[str, Any]:
    """Return the files of sentence-transformers for a model that was converted from a folder.

    Args:
        length: its longest text in tokens; None for that of the folder.

    Raises:
        FolderError: as `read_program_config`.
    """
    config = read_program_config(folder, model.config.max_positions)
    if config is None:
        return {}
    return program_files(replace(config, length=length or config.length), model)


def _chain(modules: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ]
