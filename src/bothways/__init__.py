"""bothways: from raw text to a deployed bidirectional encoder.

The names below are imported when they are first used, so that `import bothways` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bothways._version import __version__

_HOME = {
    "BothwaysError": "core.errors",
    "Corpus": "data.corpus",
    "Encoder": "model.encoder",
    "EncoderConfig": "model.config",
    "FinetuneConfig": "finetuning.prepare",
    "Model": "model.model",
    "PretrainConfig": "pretraining.config",
    "Tokenizer": "text.tokenizer",
    "finetune": "finetuning.run",
    "load_model": "hub.model_folder",
    "open_task": "prediction.predictor",
    "preset": "families.catalogue",
    "pretrain": "pretraining.run",
    "save_model": "hub.model_folder",
}
__all__ = ["__version__", *_HOME]  # noqa: PLE0604

if TYPE_CHECKING:
    from bothways.core.errors import BothwaysError as BothwaysError
    from bothways.data.corpus import Corpus as Corpus
    from bothways.families.catalogue import preset as preset
    from bothways.finetuning.prepare import FinetuneConfig as FinetuneConfig
    from bothways.finetuning.run import finetune as finetune
    from bothways.hub.model_folder import load_model as load_model
    from bothways.hub.model_folder import save_model as save_model
    from bothways.model.config import EncoderConfig as EncoderConfig
    from bothways.model.encoder import Encoder as Encoder
    from bothways.model.model import Model as Model
    from bothways.prediction.predictor import open_task as open_task
    from bothways.pretraining.config import PretrainConfig as PretrainConfig
    from bothways.pretraining.run import pretrain as pretrain
    from bothways.text.tokenizer import Tokenizer as Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'bothways' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}"
        )
    return getattr(importlib.import_module(f"bothways.{_HOME[name]}"), name)
