"""Longformer: RoBERTa on long texts, with windows and global tokens (Beltagy et al. 2020).

Differences from RoBERTa: 4,096 positions; each layer attends within a window; global tokens attend
to all tokens and are attended to by all, with queries, keys and values of their own. The task
decides which tokens are global, as in transformers' classes: the first one for classes, the
question for answers, the ending for choices, none for tags and masks.

`attention_window` in transformers counts both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.attention.patterns import Pattern, Window
from bothways.model.config import EncoderConfig
from bothways.model.families import bert, roberta
from bothways.model.families.common import classes, position_buffers
from bothways.model.families.family import ConfigRules, Family
from bothways.model.families.weight_names import KeyTable, Rule, Stack
from bothways.model.positions import Learned

WINDOW = 512
"""Tokens on both sides together, by default."""
_SEPARATOR = 2


def _long(shape: EncoderConfig) -> EncoderConfig:
    return replace(
        shape, position=Learned(4096, 2), patterns=(Window(WINDOW // 2, global_attention=True),)
    )


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "longformer-base-4096": lambda: _long(roberta.base()),
    "longformer-large-4096": lambda: _long(roberta.large()),
}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    value = raw.get("attention_window", WINDOW)
    sizes = value if isinstance(value, list) else [value] * config.depth
    valid = all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 and size % 2 == 0
        for size in sizes
    )
    if len(sizes) != config.depth or not valid:
        message = (
            "attention_window must be an even number above 0, or one for each of "
            f"{config.depth} layers, not {value!r:.60}"
        )
        raise FolderError(message, where=location)
    patterns: tuple[Pattern, ...] = tuple(
        Window(size // 2, global_attention=True) for size in sizes
    )
    return replace(roberta.counted_from_padding(config, raw, location), patterns=patterns).canonical


_LAYER = "longformer.encoder.layer.{}.attention.self"
_RULES: tuple[Rule, ...] = (
    *bert.encoder_rules("longformer"),
    *bert.post_norm_rules("longformer"),
    Stack(
        "encoder.blocks.{}.attention.global_qkv",
        tuple(f"{_LAYER}.{name}_global" for name in ("query", "key", "value")),
    ),
    *roberta.head_rules("longformer"),
)

LONGFORMER = Family(
    model_type="longformer",
    keys=KeyTable("longformer.", _RULES, position_buffers("longformer.embeddings")),
    architectures=classes("Longformer", pooled={"choice"}),
    # The defaults are those of transformers' class, which the published models do not have.
    config_rules=ConfigRules(
        replace(
            _long(roberta.base()),
            vocab=30_522,
            segments=2,
            norm_epsilon=1e-12,
            position=Learned(510, 2),
        ),
        ignored=frozenset({"attention_mode", "ignore_attention_mask", "onnx_export"}),
        read_more=_read_more,
        # transformers' class for answers needs the separator.
        write_more=lambda config: {
            "attention_window": [
                2 * pattern.radius if isinstance(pattern, Window) else WINDOW
                for pattern in map(config.pattern, range(config.depth))
            ],
            "sep_token_id": _SEPARATOR,
        },
    ),
    dropouts={},
)
