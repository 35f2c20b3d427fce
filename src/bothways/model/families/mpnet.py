"""MPNet: BERT's architecture with a bias of distances (Song et al. 2020).

Differences from BERT: a bias of distances on the scores, shared by all layers; positions and heads
as in RoBERTa, with the pooler of multiple choice; no segments. Tokens are BERT's word pieces
between RoBERTa's special tokens. transformers counts positions from the id 1 of padding, whatever
`config.json` has, and 32 buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.config import EncoderConfig
from bothways.model.families import bert, roberta
from bothways.model.families.common import classes, position_buffers
from bothways.model.families.family import UNSEGMENTED, ConfigRules, Family, read_number
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack
from bothways.model.positions import DistanceBias, Learned

ENGLISH = 30_527
_PAD, _BUCKETS = 1, "relative_attention_num_buckets"


def base() -> EncoderConfig:
    """Return 12 layers of 768."""
    position = Learned(512, offset=_PAD + 1, bias=DistanceBias())
    return replace(roberta.base(ENGLISH), segments=0, position=position)


PRESETS: dict[str, Callable[[], EncoderConfig]] = {"mpnet-base": base}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    if config.pad != _PAD:
        message = f"pad_token_id must be {_PAD}, from which positions count, not {config.pad}"
        raise FolderError(message, where=location)
    buckets = read_number(raw, _BUCKETS, DistanceBias().buckets, location)
    if buckets != DistanceBias().buckets:
        message = f"{_BUCKETS} must be {DistanceBias().buckets}, not {buckets}"
        fix = "transformers computes that many whatever the setting: use its code for other tables."
        raise FolderError(message, where=location, fix=fix)
    return config


_LAYER = "mpnet.encoder.layer.{}"
_RULES: tuple[Rule, ...] = (
    Stack(
        "encoder.blocks.{}.attention.qkv",
        tuple(f"{_LAYER}.attention.attn.{name}" for name in ("q", "k", "v")),
    ),
    Rename("encoder.blocks.{}.attention.out", f"{_LAYER}.attention.attn.o"),
    Rename("encoder.blocks.{}.attention_norm", f"{_LAYER}.attention.LayerNorm"),
    Rename("encoder.relative.table", "mpnet.encoder.relative_attention_bias"),
    *(
        rule
        for rule in (*bert.encoder_rules("mpnet"), *bert.post_norm_rules("mpnet"))
        if ".attention" not in rule.name and "segment" not in rule.name
    ),
    *roberta.head_rules("mpnet"),
)

MPNET = Family(
    model_type="mpnet",
    keys=KeyTable("mpnet.", _RULES, position_buffers("mpnet.embeddings")),
    architectures=classes("MPNet", pooled={"choice"}),
    config_rules=ConfigRules(
        # The defaults are those of transformers' class, which the published models do not have.
        replace(base(), norm_epsilon=1e-12, position=replace(base().position, max_positions=510)),
        numbers=UNSEGMENTED,
        constant={_BUCKETS: DistanceBias().buckets},
        read_more=_read_more,
    ),
    dropouts={},
)
