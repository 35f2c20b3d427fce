"""Names of models → folders: a folder is itself, anything else is fetched from the Hugging Face Hub, once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from bothways.core.errors import FolderError

MODULES, PROGRAM = "modules.json", "config_sentence_transformers.json"
"""Of sentence-transformers: which modules make up a model, and what the program does with them."""
CONFIG_FILES = ("config.json", MODULES)
SENTENCE_FILES = (
    "sentence_bert_config.json",
    PROGRAM,
    "[0-9]_Pooling*",
    "[0-9]_Normalize*",
)
"""What sentence-transformers adds; the folders are left with their files."""
MODEL_FILES = (
    *CONFIG_FILES,
    *SENTENCE_FILES,
    "bothways.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
)
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
"""Fetched only where there is no safetensors file."""

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def resolve_run(name: str) -> str | Path:
    """A model folder by name; for the folder of a run, the model in it."""
    inner = Path(name).expanduser() / "model"
    return (
        inner
        if (inner / "config.json").is_file() and not (inner.parent / "config.json").exists()
        else name
    )


def resolve(name: str | Path, files: Sequence[str] = MODEL_FILES) -> Path:
    """The local folder of a model: `name` itself if it is one, else the files of that id on the Hub, or of its cache.

    In an older folder of sentence-transformers it is the one inside that the Transformer lies in.

    Raises:
        FolderError: it is neither a folder nor an id, the Hub has none of that id, or it cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / _inner(folder)
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name) or folder.exists():
        what = (
            "is a file, not a model folder"
            if folder.exists()
            else "is no folder, and no id on the Hugging Face Hub"
        )
        raise FolderError(
            what,
            where=name,
            fix="Give the folder that holds config.json, or an id such as google-bert/bert-base-uncased.",
        )
    found = _fetch(name, files)
    if inner := _inner(found):
        found = _fetch(name, files, inner)
    if files is MODEL_FILES and not any(found.glob("model*.safetensors")):
        found = _fetch(name, PICKLE_FILES, inner)
    return found


def modules_folder(folder: Path) -> Path:
    """Where the modules of sentence-transformers are named: in the model's folder, or in that around it."""
    return (
        folder.parent
        if not (folder / MODULES).is_file() and _inner(folder.parent) == folder.name
        else folder
    )


def _inner(folder: Path) -> str:
    """The name of the folder inside that the Transformer lies in; nothing where it lies in the folder itself."""
    if (folder / "config.json").is_file() or not (folder / MODULES).is_file():
        return ""
    from bothways.hub.weight_files import read_tree

    match read_tree(folder / MODULES):
        case [{"type": str(kind), "path": str(path)}, *_] if (
            kind.endswith(".Transformer") and Path(path).name == path
        ):
            return path
        case _:
            return ""


def _fetch(name: str, files: Sequence[str], inner: str = "") -> Path:
    """Files of an id, or of the folder `inner` there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return (
            Path(
                snapshot_download(
                    name, allow_patterns=[str(PurePosixPath(inner) / file) for file in files]
                )
            )
            / inner
        )
    except GatedRepoError as error:
        fix = "Accept its conditions on its page, then run `hf auth login`."
        raise FolderError(
            "may only be read by those who accepted its conditions", where=name, fix=fix
        ) from error
    except RepositoryNotFoundError as error:
        fix = "Check the spelling; for a private one, run `hf auth login`; for a local folder, give its path."
        raise FolderError(
            "is no folder here and no model on the Hub", where=name, fix=fix
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[:1]
        what = f"is no folder here, and could not be fetched from the Hub: {''.join(reason) or type(error).__name__}"
        fix = "Check the network, or fetch it on a machine that has one and give the folder."
        raise FolderError(what, where=name, fix=fix) from error
