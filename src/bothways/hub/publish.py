"""Upload of a model folder to the Hugging Face Hub."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bothways.core.config.values import checked
from bothways.core.errors import FolderError, installed
from bothways.core.files import local_path
from bothways.hub.model_card import Card
from bothways.hub.model_folder import save_model
from bothways.hub.resolve import MODEL_FILES, is_model_folder, resolve_run
from bothways.model.model import Model

if TYPE_CHECKING:
    from bothways.text.tokenizer import Tokenizer

_FIX = "Check the network and the name, and log in with a token that may write: hf auth login"


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
        tokenizer: of a model in memory.
        card: of a model in memory.
        private: whether a new repository is private; None means the owner's default.
        message: the commit message.

    Returns:
        The address of the commit.

    Raises:
        FolderError: `source` is not a model folder, or the Hub refuses the upload.

    Examples:
        >>> push_to_hub("my-classifier", "me/my-classifier")  # doctest: +SKIP
    """
    if isinstance(source, Model):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            save_model(folder, source, tokenizer, card=card)
            return push_to_hub(folder, repo_id, private=private, message=message)
    folder = local_path(resolve_run(str(source)))
    if not is_model_folder(folder):
        fix = "Give the folder that save_model wrote."
        raise FolderError("is not a model folder: it has no config.json", where=folder, fix=fix)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # Without a network: the newer clients of the Hub use httpx, whose errors are no OSError.
    failures: tuple[type[Exception], ...] = (HfHubHTTPError, OSError, ValueError)
    if installed("httpx"):
        failures += (importlib.import_module("httpx").HTTPError,)
    # The patterns keep other files of the folder, such as notebooks, out of a public repository.
    api, patterns = HfApi(), [*MODEL_FILES, "README.md"]
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message=message,
            allow_patterns=[f"{name}/*" if "]_" in name else name for name in patterns],
        )
    except failures as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        description = f"cannot be uploaded to the Hub: {lines[0]}"
        raise FolderError(description, where=repo_id, fix=_FIX) from error
    return str(commit.commit_url)
