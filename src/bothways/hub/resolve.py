"""Names of models → local folders: a folder, or a model that is downloaded from the Hub once."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from bothways.core.errors import FolderError, hub_advice, hub_errors, read_errors
from bothways.core.files import (
    local_path,
    near_path,
    read_json,
    read_object,
    recover_folder,
    require_utf8,
)

MODULES, PROGRAM = "modules.json", "config_sentence_transformers.json"
"""Files of sentence-transformers: the modules of a model, and the settings of the program."""
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of PEFT."""
CONFIG_FILES = ("config.json", MODULES, ADAPTER, ADAPTER_WEIGHTS)
SENTENCE_FILES = (
    "sentence_*_config.json", PROGRAM, "[0-9]_Pooling*", "[0-9]_Dense*", "[0-9]_Normalize*",
    "[0-9]_StaticEmbedding*",
)  # fmt: skip
"""Files and folders that sentence-transformers adds."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model",
)  # fmt: skip
MODEL_FILES = (
    *CONFIG_FILES, *SENTENCE_FILES, "bothways.json", *TOKENIZER_FILES,
    "model.safetensors", "model.safetensors.index.json", "model-*.safetensors", "vocabulary.tsv",
)  # fmt: skip
PICKLE_FILES = (
    "pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin", "adapter_model.bin",
)  # fmt: skip
"""Downloaded only where there is no safetensors file."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_OWNERS = {
    "google-bert": r"bert-(base|large)-(un)?cased|bert-base-(multilingual-(un)?cased|chinese)",
    "FacebookAI": r"(xlm-)?roberta-(base|large)",
    "distilbert": r"distil(bert-base-(un|multilingual-)?cased|roberta-base)",
    "albert": r"albert-(base|large|xlarge|xxlarge)-v[12]",
    "openai-community": r"openai-gpt|gpt2(-medium|-large|-xl)?",
    "almanach": r"camembert-(base|large)",
    "Alibaba-NLP": r"gte-((base|large)-en-v1\.5|multilingual-base)",
    "nomic-ai": r"nomic-(bert-2048|embed-text-v1(\.5)?)",
    "EuroBERT": r"EuroBERT-(210m|610m|2\.1B)",
    "nghuyong": r"ernie-3\.0-(base|medium|mini|micro|nano)-zh",
    "microsoft": r"mpnet-base",
    "sentence-transformers": r"all-(MiniLM-L(6|12)-v[12]|distilroberta-v1|mpnet-base-v[12])|LaBSE"
    r"|multi-qa-(MiniLM-L6|distilbert|mpnet-base)-(cos|dot)-v1"
    r"|paraphrase-((multilingual-)?(MiniLM-L(3|6|12)|mpnet-base)|albert-small)-v2"
    r"|distiluse-base-multilingual-cased-v[12]",
}
"""Well-known models that may be named without their owner."""
_FIX = "Give the folder with config.json, or a model of the Hub: owner/name or hub:owner/name."


def object_in(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder; empty if there is no file."""
    return read_object(file, FolderError) if file.exists() else {}


_TYPES = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def require_types(settings: Mapping[str, Any], file: Path, **types: type) -> None:
    """Raise FolderError if a setting of a JSON file is of another type; null passes."""
    for name, expected in types.items():
        value = settings.get(name)
        if value is not None and type(value) is not expected:
            message = f"{name} must be {_TYPES[expected]}, not {value!r:.40}"
            raise FolderError(message, where=file, fix="Copy the file again.")


def resolve_run(name: str) -> str | Path:
    """Return the model folder of this name, of a run the model in it; errors as `resolve`."""
    inner = local_path(name) / "model"
    recover_folder(inner)
    return inner if is_model_folder(inner) and not is_model_folder(inner.parent) else name


def is_model_folder(folder: Path) -> bool:
    """Look for the configuration of a model, of an adapter of one, or of a table of vectors."""
    return any((folder / name).is_file() for name in ("config.json", ADAPTER, MODULES))


def resolve(name: str | Path, files: Sequence[str] = MODEL_FILES) -> Path:
    """Return the local folder of a model, after a download from the Hub if it is not local.

    A name without a slash, or one whose parent folder exists here, is a folder and is never
    looked up on the Hub, except for the short names of well-known models. In an older folder of
    sentence-transformers the result is the folder of the Transformer within it. A folder whose
    replacement was killed is restored first.

    Raises:
        ConfigError: the name of the folder is not UTF-8.
        ResourceError: the folder cannot be restored.
        FolderError: it is neither a folder nor an id, the Hub does not have it, or it cannot be
            reached; or a file of the folder is a link to nothing.
    """
    folder = local_path(name)
    recover_folder(folder)
    if folder.is_dir():
        require_utf8(folder)
        _require_targets(folder, (*files, *PICKLE_FILES))
        return folder / _inner(folder)
    if folder.exists():
        raise FolderError("is a file, not a model folder", where=name, fix=_FIX)
    hub_id = _hub_id(name)
    if hub_id is None:
        from bothways.model.families.catalogue import PRESETS

        if str(name) in PRESETS:
            fix = "Pre-train it, or name a trained model: a folder, or an id of the Hub."
            raise FolderError("is a shape without weights", where=name, fix=fix)
        near = near_path(folder, Path.is_dir)
        fix = f"Did you mean {near}?" if near else _FIX
        raise FolderError("no such folder, and not the id of a Hub model", where=name, fix=fix)
    snapshot = _download(hub_id, files)
    # Which folder holds the Transformer is known only once modules.json is here.
    if inner := _inner(snapshot):
        snapshot = _download(hub_id, files, inner)
    # A pickle is fetched only where it is the only form of the weights.
    if files is MODEL_FILES and not any(snapshot.glob("*model*.safetensors")):
        snapshot = _download(hub_id, PICKLE_FILES, inner)
    return snapshot


def _require_targets(folder: Path, files: Sequence[str]) -> None:
    """Raise FolderError for one of these files that is a link to nothing: it would count as none.

    Example: a snapshot of the Hub's cache, which was copied without the files it links to.
    """
    with read_errors(folder):
        dangling = sorted(x for x in folder.iterdir() if x.is_symlink() and not x.exists())
    for file in dangling:
        if any(map(file.match, files)):
            message = f"is a link to {os.readlink(file)}, which does not exist"
            fix = "Copy the folder again with the files that it links to, as cp -rL does."
            raise FolderError(message, where=file, fix=fix)


def portable_name(name: str) -> str:
    """Return a name by which a model is found from elsewhere: its Hub id, or an absolute path."""
    run = resolve_run(name)
    hub_id = None if local_path(run).is_dir() else _hub_id(run)
    return hub_id or str(resolve(run).absolute())


def _hub_id(name: str | Path) -> str | None:
    """Return the id on the Hub that a name refers to, None for the path of a folder."""
    if isinstance(name, Path):
        return None
    bare = name.removeprefix("hub:")
    if "/" not in bare:
        owners = (o for o, pattern in _OWNERS.items() if re.fullmatch(pattern, bare))
        return next((f"{owner}/{bare}" for owner in owners), None)
    local = name == bare and Path(name).parent.is_dir()
    return bare if _HUB_ID.fullmatch(bare) and not local else None


def modules_folder(folder: Path) -> Path:
    """Return the folder with `modules.json`: the model's own, or the one around it."""
    outer = folder.parent if folder.name else folder.absolute().parent  # of "."
    inside = not (folder / MODULES).is_file() and _inner(outer) == folder.absolute().name
    return outer if inside else folder


def _inner(folder: Path) -> str:
    """Return the name of the Transformer's folder within; "" where it is the folder itself."""
    if (folder / "config.json").is_file() or not (folder / MODULES).is_file():
        return ""
    match read_json(folder / MODULES, FolderError):
        case [{"type": str(kind), "path": str(path)}, *_] if kind.endswith(
            ".Transformer"
        ) and is_inside(path):
            return path
        case _:
            return ""


def is_inside(name: str) -> bool:
    """Return True for a name from `modules.json` that is an entry of the folder itself."""
    return name not in ("", ".", "..") and len(name) < 256 and not set(name) & set("/\\\0")


def require_inside(name: str, file: Path) -> None:
    """Raise FolderError for a name from `modules.json` that leaves the model's folder."""
    if not is_inside(name):
        message = f"the folder of a module must be in the model's folder, not {name!r:.80}"
        raise FolderError(message, where=file, fix="Copy the model again.")


def _download(hub_id: str, files: Sequence[str], inner: str = "") -> Path:
    """Download files of a model, or of the folder `inner` in it."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = [str(PurePosixPath(inner) / file) for file in files]
    download = partial(snapshot_download, hub_id, allow_patterns=patterns)
    try:
        try:
            # The download begins with the same request, but waits for its answer without end.
            HfApi().model_info(hub_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except hub_errors():
            with contextlib.suppress(LocalEntryNotFoundError):
                return Path(download(local_files_only=True)) / inner
            raise
        return Path(download()) / inner
    except GatedRepoError as error:
        fix = "Accept its conditions on its page, then run `hf auth login`."
        message = "is open only to users who have accepted its conditions"
        raise FolderError(message, where=hub_id, fix=fix) from error
    except RepositoryNotFoundError as error:
        near = near_path(Path(hub_id), Path.is_dir)
        fix = "Check the name or the path; for a private model, run `hf auth login`."
        fix = f"Did you mean the folder {near}?" if near else fix
        message = "is neither a folder here nor a model on the Hub"
        raise FolderError(message, where=hub_id, fix=fix) from error
    except (RuntimeError, *hub_errors()) as error:  # pathlib's, of a user without a home
        lines = str(error).strip().splitlines() or [type(error).__name__]
        cause = lines[0].removeprefix("Got: ")
        message = f"is not a folder here, and could not be downloaded from the Hub: {cause}"
        fix = "Check the network, or download it elsewhere and give the folder."
        raise FolderError(message, where=hub_id, fix=hub_advice(error, fix)) from error
