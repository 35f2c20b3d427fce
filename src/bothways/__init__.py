"""bothways: from raw text to a deployed bidirectional encoder.

    import bothways

    classify = bothways.load("my-classifier")
    classify("A wonderful film.").label

The public names are imported at first use, so that `import bothways` is fast and changes nothing in
the process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bothways._version import __version__

_HOME = {
    "adapt": "api",
    "BothwaysError": "core.errors", "Corpus": "data.corpus", "Encoder": "model.encoder",
    "EncoderConfig": "model.config", "FinetuneConfig": "finetuning.prepare",
    "Metric": "finetuning.metrics", "Model": "model.model", "Predictor": "prediction.predictor",
    "PretrainConfig": "pretraining.config", "Tokenizer": "text.tokenizer", "build_corpus": "api",
    "distil": "api", "export_model": "api", "finetune": "api", "load": "api",
    "load_model": "hub.model_folder",
    "preset": "families.catalogue", "pretrain": "api", "push_to_hub": "hub.publish",
    "save_model": "hub.model_folder", "train_tokenizer": "api",
    "tune_allocator": "runtime.allocator",
}  # fmt: skip
__all__ = ["__version__", *_HOME]  # noqa: PLE0604

if TYPE_CHECKING:
    from bothways.api import adapt as adapt
    from bothways.api import build_corpus as build_corpus
    from bothways.api import distil as distil
    from bothways.api import export_model as export_model
    from bothways.api import finetune as finetune
    from bothways.api import load as load
    from bothways.api import pretrain as pretrain
    from bothways.api import train_tokenizer as train_tokenizer
    from bothways.core.errors import BothwaysError as BothwaysError
    from bothways.data.corpus import Corpus as Corpus
    from bothways.families.catalogue import preset as preset
    from bothways.finetuning.metrics import Metric as Metric
    from bothways.finetuning.prepare import FinetuneConfig as FinetuneConfig
    from bothways.hub.model_folder import load_model as load_model
    from bothways.hub.model_folder import save_model as save_model
    from bothways.hub.publish import push_to_hub as push_to_hub
    from bothways.model.config import EncoderConfig as EncoderConfig
    from bothways.model.encoder import Encoder as Encoder
    from bothways.model.model import Model as Model
    from bothways.prediction.predictor import Predictor as Predictor
    from bothways.pretraining.config import PretrainConfig as PretrainConfig
    from bothways.runtime.allocator import tune_allocator as tune_allocator
    from bothways.text.tokenizer import Tokenizer as Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        what = f"module 'bothways' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}"
        raise AttributeError(what)
    return getattr(importlib.import_module(f"bothways.{_HOME[name]}"), name)
