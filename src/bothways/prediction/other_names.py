"""Names that other libraries have for what predictors do, each with the name here.

They are of sentence-transformers, the pipelines of transformers, and scikit-learn. Those of
settings of a training run are in `finetuning.config.ELSEWHERE`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from bothways.core.errors import ConfigError

_LENGTH = "Give the length where the model is opened: bothways.load(MODEL, length=128)."
_BATCHES = "Leave it out: texts are batched by their tokens, and results do not depend on it."
_SCORES = "Leave it out: all probabilities are in prediction.probabilities."
_ARRAYS = "Leave it out: the result is an array; torch.from_numpy makes it a tensor."
_COLUMNS = 'Name them where the model is opened: bothways.load(MODEL, columns={"text": NAME}).'
_NORMALISED = 'Open the model with bothways.load(MODEL, "embed", normalised=True).'
_OPENED = "Give it where the model is opened: bothways.load(MODEL, {}=…)."
_PROMPT = 'Call encode(texts, prompt_name="{}").'
_SILENT = "Leave it out: no progress is shown."

ARGUMENTS: Mapping[str, str] = {
    "normalize_embeddings": _NORMALISED, "normalize": _NORMALISED, "batch_size": _BATCHES,
    "show_progress_bar": _SILENT, "convert_to_numpy": _ARRAYS, "convert_to_tensor": _ARRAYS,
    "truncate_dim": _OPENED.format("components"), "device": _OPENED.format("device"),
    "precision": _OPENED.format("precision"), "max_length": _LENGTH, "max_seq_length": _LENGTH,
    "truncation": _LENGTH, "padding": _BATCHES, "top_k": _SCORES, "return_all_scores": _SCORES,
    "function_to_apply": _SCORES, "columns": _COLUMNS, "text_column": _COLUMNS,
    "label_column": _COLUMNS,
    "candidate_labels": "Leave it out: the labels are those of training.",
    "aggregation_strategy": "Leave it out: prediction.entities are whole entities.",
    "doc_stride": _OPENED.format("stride"),
}  # fmt: skip
"""Arguments of calls → advice."""

METHODS: Mapping[str, str] = {
    "similarity": f"{_NORMALISED} Then vectors @ others.T are the cosines.",
    "encode_query": _PROMPT.format("query"), "encode_document": _PROMPT.format("document"),
    "encode_multi_process": "bothways embed FILES --out FOLDER --processes N does this.",
    "get_sentence_embedding_dimension": "encode(text).shape[-1] is the width.",
    "get_embedding_dimension": "encode(text).shape[-1] is the width.",
    "max_seq_length": "The longest text in tokens is predictor.learner.length.",
    "tokenizer": "It is predictor.learner.tokenizer.", "model": "It is predictor.learner.model.",
    "labels": "They are predictor.learner.labels.",
    "id2label": "They are predictor.learner.labels.",
    "predict_proba": "Call the predictor: all probabilities are in prediction.probabilities.",
    "transform": "Call encode(texts).", "score": "Call evaluate(data).",
    "rank": "Call the predictor with (query, [document, …]).",
    "fit": "Call bothways.finetune.", "train": "Call bothways.finetune.",
    "save": "It is read from a folder, which stays; bothways.finetune(…).save(FOLDER) writes one.",
    "save_pretrained": "It is read from a folder, which stays.",
    "push_to_hub": "Call bothways.push_to_hub.", "to": _OPENED.format("device"),
}  # fmt: skip
"""Methods and attributes of models → advice."""

SETTINGS: Mapping[str, str] = {
    "max_length": "length", "max_seq_length": "length", "model_max_length": "length",
    "truncate_dim": "components", "normalize_embeddings": "normalised", "normalize": "normalised",
    "torch_dtype": "precision", "dtype": "precision", "backend": "runtime", "top_k": "top",
    "doc_stride": "stride", "pooling_mode": "pooling",
}  # fmt: skip
"""Arguments with which models are opened → the names here."""


def check_settings(names: Iterable[str]) -> None:
    """Raise ConfigError for a setting by its name in other libraries."""
    for name in names:
        if name in SETTINGS:
            what, fix = f"unknown setting {name!r}", f"Its name here is {SETTINGS[name]}."
            raise ConfigError(what, where=name, fix=fix)


def refuse_arguments(method: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first argument that a method of a predictor does not have."""
    for name in given:
        near = difflib.get_close_matches(name, known := [*known], 1)
        fix = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(known)}."
        what = f"{method} has no argument {name!r}"
        raise ConfigError(what, where=name, fix=ARGUMENTS.get(name, fix))


def missing_attribute(name: str) -> AttributeError:
    """Return the error for an attribute that predictors do not have."""
    advice = METHODS.get(name)
    what = f"a predictor has no attribute {name!r}"
    return AttributeError(f"{what}. {advice}" if advice else what)
