"""The files that sentence-transformers adds to a model folder, read and written.

Such a folder is a chain of modules: the Transformer, then Pooling of its last layer, then perhaps
Normalize; the program may keep only the first components of the vectors. Every other module and
setting would change the vectors, so it is refused. The files are written in their older form,
which all versions of sentence-transformers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bothways.core.errors import FolderError
from bothways.core.json_reader import read_json, read_object
from bothways.hub.hf_config import write_hf_config
from bothways.hub.model_card import Card
from bothways.hub.model_folder import save_model
from bothways.hub.resolve import MODULES, PROGRAM, is_inside, modules_folder
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer

Pooling = Literal["cls", "mean", "max"]
_TRANSFORMER = "sentence_bert_config.json"
_KEPT = ("prompts", "similarity_fn_name")
"""Settings of the program that are kept as they were read."""
_CUT = "truncate_dim"
_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}
_STEM = "pooling_mode_"
_FIX = "Supported are Transformer, Pooling by cls, mean or max, and perhaps Normalize."


@dataclass(frozen=True)
class SentenceEncoderConfig:
    """How the vectors of tokens become the vector of a text.

    Attributes:
        pooling: which vectors are pooled.
        normalised: whether the vector is scaled to length 1.
        components: the number of components that are kept; None means all.
        length: the longest text, in tokens.
    """

    pooling: Pooling
    normalised: bool
    components: int | None
    length: int


def read_sentence_config(folder: Path, positions: int) -> SentenceEncoderConfig | None:
    """Return the settings of sentence-transformers in a folder, None where there are none.

    Args:
        positions: the longest text that the model can read, in tokens.

    Raises:
        FolderError: a file is damaged, or has a module or setting that is not supported.
    """
    whole = modules_folder(folder)
    if not (whole / MODULES).is_file():
        return None
    chain = _read_modules(whole / MODULES)
    kinds = [kind for kind, _ in chain]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        what = f"its modules are {', '.join(kinds)[:200] or 'none'}"
        raise FolderError(what, where=whole / MODULES, fix=_FIX)
    path = chain[1][1]
    if not is_inside(path):
        what = f"the folder of a module must be in the model's folder, not {path!r:.80}"
        raise FolderError(what, where=whole / MODULES, fix="Copy the model again.")
    length = min(positions, _read_length(folder) or positions)
    components = _read_components(whole / PROGRAM)
    pooling = _read_pooling(whole / path / "config.json")
    return SentenceEncoderConfig(pooling, len(kinds) == 3, components, length)


def _read_modules(file: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module, in order."""
    tree = read_json(file, FolderError)
    try:
        return [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in tree]
    except (TypeError, KeyError) as error:
        what = "is not a list of modules with type and path"
        raise FolderError(what, where=file, fix=_FIX) from error


def _read_pooling(file: Path) -> Pooling:
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
    return names[modes[0]]


def _read_components(file: Path) -> int | None:
    """Return the number of components that are kept, None for all of them."""
    raw = read_object(file, FolderError) if file.is_file() else {}
    name, count = raw.get("default_prompt_name"), raw.get(_CUT)
    if name is not None:
        what = f"puts the prompt {name!r:.80} before every text, which is not supported"
        fix = "Put the prompt into your texts, and set default_prompt_name to null."
        raise FolderError(what, where=file, fix=fix)
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
    """Write a model folder that `sentence_transformers.SentenceTransformer` opens, too.

    Raises:
        FolderError: transformers has no class for the model; else as `save_model`.
        ResourceError: as `save_model`.
    """
    architecture = write_hf_config(model, tokenizer, (), None, Path(folder)).architecture
    if architecture is None or architecture.own:
        what = "transformers has no class for this model, and sentence-transformers needs one"
        fix = "Save it with save_model, for use with bothways."
        raise FolderError(what, where=folder, fix=fix)
    extra_files = sentence_files(model, config)
    save_model(folder, model, tokenizer, card=card, extra=extra, extra_files=extra_files)


def sentence_files(model: Model, config: SentenceEncoderConfig) -> dict[str, Any]:
    """Return the files of sentence-transformers by name, to be written as JSON."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if config.normalised else []
    chain = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ]
    kept = model.kept.get(PROGRAM, {})
    return {
        MODULES: chain,
        "1_Pooling/config.json": {
            "word_embedding_dimension": model.config.width,
            **{key: mode == config.pooling for key, mode in _KEYS.items()},
        },
        _TRANSFORMER: {"max_seq_length": config.length, "do_lower_case": False},
        PROGRAM: {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            **{key: kept[key] for key in _KEPT if key in kept},
            **({} if config.components is None else {_CUT: config.components}),
        },
    }
