"""bothways: from raw text to a deployed bidirectional encoder.

    import bothways

    classify = bothways.load("my-classifier")
    classify("A wonderful film.").label

The public names are imported at first use, so that `import bothways` is fast and changes nothing in
the process.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from bothways._version import __version__

_HOME = {  # in the order of the reference
    "load": "model_folders", "finetune": "training_runs", "predict": "model_folders",
    "evaluate": "model_folders", "calibrate": "model_folders", "Predictor": "prediction.predictor",
    "search": "indexes", "build_index": "indexes", "mine": "indexes",
    "Index": "prediction.search.index",
    "demo": "lab.demo", "train_tokenizer": "texts", "Tokenizer": "text.tokenizer",
    "build_corpus": "texts", "Corpus": "data.corpus",
    "pretrain": "training_runs", "adapt": "training_runs", "distil": "training_runs",
    "find_lr": "training_runs",
    "show": "training_runs",
    "load_model": "model_folders", "save_model": "hub.model_folder",
    "average": "model_folders", "export_model": "model_folders", "push_to_hub": "hub.model_folder",
    "PretrainedModel": "hub.model_folder", "Model": "model.model", "ModelOutput": "model.model",
    "Encoder": "model.model", "EncoderConfig": "model.config", "preset": "model.families.catalogue",
    "FinetuneConfig": "finetuning.config", "PretrainConfig": "pretraining.config",
    "Metric": "finetuning.config", "tune_allocator": "core.runtime.process",
    "BothwaysError": "core.errors",
}  # fmt: skip
__all__ = [*_HOME, "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:
    from bothways.core.errors import BothwaysError as BothwaysError
    from bothways.core.runtime.process import tune_allocator as tune_allocator
    from bothways.data.corpus import Corpus as Corpus
    from bothways.finetuning.config import FinetuneConfig as FinetuneConfig, Metric as Metric
    from bothways.hub.model_folder import (
        PretrainedModel as PretrainedModel,
        push_to_hub as push_to_hub,
        save_model as save_model,
    )
    from bothways.indexes import build_index as build_index, mine as mine, search as search
    from bothways.lab.demo import demo as demo
    from bothways.model.config import EncoderConfig as EncoderConfig
    from bothways.model.families.catalogue import preset as preset
    from bothways.model.model import Encoder as Encoder, Model as Model, ModelOutput as ModelOutput
    from bothways.model_folders import (
        average as average,
        calibrate as calibrate,
        evaluate as evaluate,
        export_model as export_model,
        load as load,
        load_model as load_model,
        predict as predict,
    )
    from bothways.prediction.predictor import Predictor as Predictor
    from bothways.prediction.search.index import Index as Index
    from bothways.pretraining.config import PretrainConfig as PretrainConfig
    from bothways.text.tokenizer import Tokenizer as Tokenizer
    from bothways.texts import build_corpus as build_corpus, train_tokenizer as train_tokenizer
    from bothways.training_runs import (
        adapt as adapt,
        distil as distil,
        find_lr as find_lr,
        finetune as finetune,
        pretrain as pretrain,
        show as show,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        if importlib.util.find_spec(f"bothways.{name}"):  # a module, such as bothways.serving
            return importlib.import_module(f"bothways.{name}")
        message = f"module 'bothways' has no attribute {name!r}; it has {', '.join(__dir__())}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(f"bothways.{_HOME[name]}"), name)
    return globals().setdefault(name, value)  # which Python finds from now on


def __dir__() -> list[str]:
    """Return the public names, for TAB in a shell or notebook."""
    return sorted(__all__)
