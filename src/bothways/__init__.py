"""bothways: from raw text to a deployed bidirectional encoder.

The names below are imported when they are first used, so that `import bothways` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BothwaysError": "core.errors",
    "Corpus": "data.corpus",
    "Encoder": "model.encoder",
    "EncoderConfig": "model.config",
    "FinetuneConfig": "recipes.finetune",
    "Model": "model.heads",
    "PretrainConfig": "recipes.settings",
    "Tokenizer": "text.tokenizer",
    "finetune": "recipes.finetune",
    "load_model": "interop.folder",
    "open_task": "recipes.finetuned",
    "preset": "families.catalogue",
    "pretrain": "recipes.pretrain",
    "save_model": "interop.folder",
}
__all__ = ["__version__", *_HOME]  # noqa: PLE0604

if TYPE_CHECKING:
    from bothways.core.errors import BothwaysError as BothwaysError
    from bothways.data.corpus import Corpus as Corpus
    from bothways.families.catalogue import preset as preset
    from bothways.interop.folder import load_model as load_model
    from bothways.interop.folder import save_model as save_model
    from bothways.model.config import EncoderConfig as EncoderConfig
    from bothways.model.encoder import Encoder as Encoder
    from bothways.model.heads import Model as Model
    from bothways.recipes.finetune import FinetuneConfig as FinetuneConfig
    from bothways.recipes.finetune import finetune as finetune
    from bothways.recipes.finetuned import open_task as open_task
    from bothways.recipes.pretrain import pretrain as pretrain
    from bothways.recipes.settings import PretrainConfig as PretrainConfig
    from bothways.text.tokenizer import Tokenizer as Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bothways' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(f"bothways.{_HOME[name]}"), name)
