"""Names of models → folders: a folder is itself, anything else is fetched from the Hugging Face Hub, once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from bothways.core.errors import FolderError

CONFIG_FILES = ("config.json",)
SENTENCE_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
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


def model_folder(name: str) -> str | Path:
    """A model folder by name; for the folder of a run, the model in it."""
    inner = Path(name).expanduser() / "model"
    return inner if (inner / "config.json").is_file() and not (inner.parent / "config.json").exists() else name


def resolve(name: str | Path, files: Sequence[str] = MODEL_FILES) -> Path:
    """The local folder of a model: `name` itself if it is one, else the files of that id on the Hub, or of its cache.

    Raises:
        FolderError: it is neither a folder nor an id, the Hub has none of that id, or it cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name) or folder.exists():
        what = "is a file, not a model folder" if folder.exists() else "is no folder, and no id on the Hugging Face Hub"
        raise FolderError(
            what, where=name, fix="Give the folder that holds config.json, or an id such as google-bert/bert-base-uncased."
        )
    found = _fetch(name, files)
    if files is MODEL_FILES and not any(found.glob("model*.safetensors")):
        found = _fetch(name, PICKLE_FILES)
    return found


def _fetch(name: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except GatedRepoError as error:
        fix = "Accept its conditions on its page, then run `hf auth login`."
        raise FolderError("may only be read by those who accepted its conditions", where=name, fix=fix) from error
    except RepositoryNotFoundError as error:
        fix = "Check the spelling; for a private one, run `hf auth login`; for a local folder, give its path."
        raise FolderError("is no folder here and no model on the Hub", where=name, fix=fix) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[:1]
        what = f"is no folder here, and could not be fetched from the Hub: {''.join(reason) or type(error).__name__}"
        fix = "Check the network, or fetch it on a machine that has one and give the folder."
        raise FolderError(what, where=name, fix=fix) from error
