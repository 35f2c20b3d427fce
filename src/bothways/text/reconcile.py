"""Settings in `tokenizer_config.json` that contradict the `tokenizer.json` beside it.

transformers takes `tokenizer.json` as it is for its generic class alone; the others build themselves anew from vocabulary and
settings. Those of BERT and of bytes have always done so, and their settings are followed here. Those of pieces do so since
version 5, and took the file before: which of the two a model was trained with cannot be told, so a contradiction is refused.
A setting that is not stated is as `tokenizer.json` has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from bothways.core.errors import TokenizerError
from bothways.text.special_tokens import CONFIG, flag

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""What transformers calls the class that takes `tokenizer.json` as it is."""

_OF_PIECES = {
    "AlbertTokenizer": ("do_lower_case", "keep_accents", "add_prefix_space"),
    "BigBirdTokenizer": ("add_prefix_space",),
    "DebertaV2Tokenizer": ("do_lower_case", "split_by_punct", "add_prefix_space"),
    "XLMRobertaTokenizer": ("add_prefix_space",),
}
"""The settings that the classes of pieces read."""


def reconcile(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Changes the backend of `tokenizer.json` to what the settings beside it say.

    Raises:
        TokenizerError: a setting that is neither true nor false, or one of pieces that contradicts the backend.
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
            _refuse(_had(backend), _OF_PIECES.get(name.removesuffix("Fast"), ()), config, file)


def _follow_bert(bert: normalizers.BertNormalizer, config: Mapping[str, Any], file: Path) -> None:
    bert.lowercase = flag(config, file, "do_lower_case", bert.lowercase)
    bert.handle_chinese_chars = flag(
        config, file, "tokenize_chinese_chars", bert.handle_chinese_chars
    )
    if "strip_accents" in config:  # null means as the lower case
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
    had: Mapping[str, bool], keys: tuple[str, ...], config: Mapping[str, Any], file: Path
) -> None:
    for key in keys:
        if flag(config, file, key, had[key]) != had[key]:
            said, has = (json.dumps(value) for value in (not had[key], had[key]))
            what = f"{key!r} is {said}, and {file.name} beside it has it {has}"
            fix = f"Set it to {has}, which transformers took before version 5; since then it takes the setting."
            raise TokenizerError(what, where=file.with_name(CONFIG), fix=fix)


def _had(backend: tokenizers.Tokenizer) -> dict[str, bool]:
    """What the parts of a tokenizer of pieces do, by the settings' names."""
    spec = json.loads(backend.to_str())
    steps = {
        step["type"]: step
        for part in ("normalizer", "pre_tokenizer")
        for step in _steps(spec[part])
    }
    return {
        "do_lower_case": "Lowercase" in steps,
        "keep_accents": "StripAccents" not in steps,
        "split_by_punct": "Punctuation" in steps,
        "add_prefix_space": steps.get("Metaspace", {}).get("prepend_scheme") == "always",
    }


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    match part:
        case None:
            return []
        case {"type": "Sequence", "normalizers": list(steps)} | {
            "type": "Sequence",
            "pretokenizers": list(steps),
        }:
            return steps
        case _:
            return [part]
