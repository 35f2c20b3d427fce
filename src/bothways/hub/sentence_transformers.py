"""The files that sentence-transformers puts beside a model, both ways: what to pool, how long a text may be.

Such a folder is a chain of modules: the Transformer, then Pooling of its last layer, then perhaps Normalize; of what they give,
the program keeps the first components, if it is told how many. That much is an `Embedding`; every other module and setting
changes the vectors, so it is refused rather than left out. What is written is the older form of these files, which all versions
of sentence-transformers read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from bothways.core.config import reader as configs
from bothways.core.errors import FolderError
from bothways.families.catalogue import family_for
from bothways.hub.model_card import Card
from bothways.hub.model_folder import save_model
from bothways.hub.resolve import MODULES, PROGRAM, modules_folder
from bothways.hub.weight_files import read_json, read_tree
from bothways.tasks.sentence_embedding.task import Embedder, Pooling, SentenceEmbeddingTask

TRANSFORMER = "sentence_bert_config.json"
_OTHERS = ("prompts", "similarity_fn_name")
"""What the program does beside: it is kept as it was read."""
_CUT = "truncate_dim"

_KEYS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}
_STEM = "pooling_mode_"
_HOW = "Here are understood: Transformer, then Pooling by cls, mean or max, then perhaps Normalize."


def read_sentence_encoder(folder: Path, positions: int) -> tuple[SentenceEmbeddingTask, int] | None:
    """What the files of sentence-transformers in a folder say, and the longest text in tokens; none where there are none.

    Args:
        positions: of the model, which no text is longer than.

    Raises:
        FolderError: a file is damaged, or asks for what is not understood here.
    """
    whole = modules_folder(folder)
    if not (whole / MODULES).is_file():
        return None
    chain = _modules(whole / MODULES)
    kinds = [kind for kind, _ in chain]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise FolderError(
            f"its modules are {', '.join(kinds) or 'none'}", where=whole / MODULES, fix=_HOW
        )
    components = _components(whole / PROGRAM)
    pooling = _pooling(whole / chain[1][1] / "config.json")
    definition = SentenceEmbeddingTask(
        pooling=pooling, normalised=len(kinds) == 3, components=components
    )
    return definition, min(positions, _longest(folder) or positions)


def _modules(file: Path) -> list[tuple[str, str]]:
    """The kind and the folder of each module, in their order."""
    tree = read_tree(file)
    try:
        return [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in tree]
    except (TypeError, KeyError) as error:
        raise FolderError(
            "is no list of modules with type and path", where=file, fix=_HOW
        ) from error


def _pooling(file: Path) -> Pooling:
    raw = read_json(file)
    if "pooling_mode" in raw:
        said = raw["pooling_mode"]
        modes = [said] if isinstance(said, str) else list(said)
    else:
        modes = [
            _KEYS.get(key, key.removeprefix(_STEM))
            for key, on in raw.items()
            if key.startswith(_STEM) and on
        ]
    if len(modes) != 1 or modes[0] not in _KEYS.values():
        raise FolderError(
            f"pools by {' and '.join(map(str, modes)) or 'nothing'}", where=file, fix=_HOW
        )
    return cast(Pooling, modes[0])


def _components(file: Path) -> int | None:
    """How many components of a vector are kept; FolderError for a prompt before every text, which would change its vector."""
    raw = read_json(file) if file.is_file() else {}
    name, count = raw.get("default_prompt_name"), raw.get(_CUT)
    if name is not None:
        what = f"puts the prompt {name!r} before every text, which is not understood here"
        raise FolderError(
            what,
            where=file,
            fix="Put the prompt into your texts, and set default_prompt_name to null.",
        )
    if count is not None and (type(count) is not int or count < 1):
        what = f"{_CUT} must be how many components of a vector are kept, at least 1, not {count!r:.40}"
        raise FolderError(what, where=file, fix="Set it to null to keep all.")
    return count


def _longest(folder: Path) -> int | None:
    """The longest text in tokens: as said for the module, else for the tokenizer, where a huge number stands for none."""
    raw = read_json(folder / TRANSFORMER) if (folder / TRANSFORMER).is_file() else {}
    if raw.get("do_lower_case"):
        what = "lower-cases texts before they are tokenized"
        raise FolderError(
            what,
            where=folder / TRANSFORMER,
            fix="Let the tokenizer do it, and set do_lower_case to false.",
        )
    length = raw.get("max_seq_length")
    if length is None and (folder / "tokenizer_config.json").is_file():
        length = read_json(folder / "tokenizer_config.json").get("model_max_length")
    return length if isinstance(length, int) else None


def save_sentence_encoder(folder: str | Path, task: Embedder, card: Card | None = None) -> None:
    """Write a model folder that `sentence_transformers.SentenceTransformer` opens, too, and gives equal vectors from.

    Raises:
        FolderError: sentence-transformers cannot do what the task does; else as `save_model`.
        ResourceError: as `save_model`.
    """
    definition = task.definition
    if family_for(task.model.config) is None:
        what = "transformers has no class for this model, and sentence-transformers opens no other"
        raise FolderError(what, where=folder, fix="Save it with save_model: bothways opens that.")
    last = (-1,), (task.model.config.depth,)
    if definition.layers not in last:
        what = f"sentence-transformers pools the last layer, and this embedding reads {definition.layers}"
        raise FolderError(what, where=folder, fix="Set layers=[-1].")
    extra = {"task": configs.to_dict(definition), "length": task.length}
    save_model(folder, task.model, task.tokenizer, card=card, extra=extra, beside=_files(task))


def _files(task: Embedder) -> dict[str, Any]:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] if task.definition.normalised else []
    chain = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(modules)
    ]
    kept = task.model.kept.get(PROGRAM, {})
    modes = {key: mode == task.definition.pooling for key, mode in _KEYS.items()}
    cut = {} if task.definition.components is None else {_CUT: task.definition.components}
    return {
        MODULES: chain,
        "1_Pooling/config.json": {"word_embedding_dimension": task.model.config.width, **modes},
        TRANSFORMER: {"max_seq_length": task.length, "do_lower_case": False},
        PROGRAM: {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            **{key: kept[key] for key in _OTHERS if key in kept},
            **cut,
        },
    }
