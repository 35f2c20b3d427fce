"""Settings in `tokenizer_config.json` that contradict `tokenizer.json` in the same folder.

Only the generic class of transformers uses `tokenizer.json` unchanged; the others rebuild the
tokenizer from vocabulary and settings. BERT's and the byte-level classes have always done so, so
their settings are applied here. The SentencePiece classes do so since version 5 and used the file
before: it is unknown which of the two a model was trained with, so contradictions are refused.
A missing setting is as in `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from bothways.core.errors import TokenizerError
from bothways.text.hf_pipelines import steps_of
from bothways.text.special_tokens import CONFIG, flag

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The names of transformers' class that uses `tokenizer.json` unchanged."""

_OF_PIECES = {
    "AlbertTokenizer": ("do_lower_case", "keep_accents", "add_prefix_space"),
    "BigBirdTokenizer": ("add_prefix_space",),
    "DebertaV2Tokenizer": ("do_lower_case", "split_by_punct", "add_prefix_space"),
    "XLMRobertaTokenizer": ("add_prefix_space",),
}
"""The settings that the SentencePiece classes read."""


def reconcile(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Apply the settings to the backend of `tokenizer.json`.

    Raises:
        TokenizerError: a setting is neither true nor false, or contradicts a SentencePiece backend.
    """
    name = str(config.get("tokenizer_class"))
    if name in GENERIC:
        return
    match backend.model, backend.normalizer, backend.pre_tokenizer:
        case models.WordPiece(), normalizers.BertNormalizer() as bert, _:
            _follow_bert(bert, config, file)
        case models.BPE(), _, pre_tokenizers.ByteLevel() as cut:
            _follow_bytes(cut, backend.post_processor, config, file)
        case models.Unigram(), _, _:
            _refuse(_settings(backend), _OF_PIECES.get(name.removesuffix("Fast"), ()), config, file)


def _follow_bert(bert: normalizers.BertNormalizer, config: Mapping[str, Any], file: Path) -> None:
    bert.lowercase = flag(config, file, "do_lower_case", bert.lowercase)
    bert.handle_chinese_chars = flag(
        config, file, "tokenize_chinese_chars", bert.handle_chinese_chars
    )
    if "strip_accents" in config:  # null means as do_lower_case
        bert.strip_accents = flag(config, file, "strip_accents", None)


def _follow_bytes(
    cut: pre_tokenizers.ByteLevel,
    post: processors.PostProcessor | None,
    config: Mapping[str, Any],
    file: Path,
) -> None:
    cut.add_prefix_space = flag(config, file, "add_prefix_space", cut.add_prefix_space)
    if isinstance(post, processors.RobertaProcessing):
        post.add_prefix_space = flag(config, file, "add_prefix_space", post.add_prefix_space)
        post.trim_offsets = flag(config, file, "trim_offsets", post.trim_offsets)


def _refuse(
    actual: Mapping[str, bool], keys: tuple[str, ...], config: Mapping[str, Any], file: Path
) -> None:
    for key in keys:
        if flag(config, file, key, actual[key]) != actual[key]:
            given, value = json.dumps(not actual[key]), json.dumps(actual[key])
            what = f"{key!r} is {given}, but {value} in {file.name}"
            fix = (
                f"Set it to {value}, which transformers used before version 5; "
                "since then it uses the setting."
            )
            raise TokenizerError(what, where=file.with_name(CONFIG), fix=fix)


def _settings(backend: tokenizers.Tokenizer) -> dict[str, bool]:
    """Return the settings that the parts of a SentencePiece backend correspond to."""
    spec = json.loads(backend.to_str())
    parts = ("normalizer", "pre_tokenizer")
    steps = {step["type"]: step for part in parts for step in steps_of(spec[part])}
    return {
        "do_lower_case": "Lowercase" in steps,
        "keep_accents": "StripAccents" not in steps,
        "split_by_punct": "Punctuation" in steps,
        "add_prefix_space": steps.get("Metaspace", {}).get("prepend_scheme") == "always",
    }
