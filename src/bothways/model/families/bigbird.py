"""BigBird: BERT on long texts, with local, random and global blocks (Zaheer et al. 2020).

Differences from BERT: 4,096 positions; attention in blocks of 64 tokens (`Blocks`) for long
sequences, full attention for short ones; GELU by its tanh approximation; dropout before the
embeddings' LayerNorm, not after; a SentencePiece vocabulary; heads for classes and for answers
with layers of their own.

Unlike the paper, transformers takes the first block for each random block in evaluation, and
drops no attention probabilities in blocks. Both are kept here, so that outputs are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.model.attention.patterns import Blocks, Full, Pattern
from bothways.model.config import Deep, Dropouts, EncoderConfig, Own
from bothways.model.families import bert, family
from bothways.model.families.common import output_rules, position_buffers
from bothways.model.families.family import Architecture, Family
from bothways.model.families.weight_names import KeyTable, Rename, Rule
from bothways.model.positions import Learned

VOCABULARY = 50_358
_SEPARATOR = 66
_BLOCKS = Blocks()


def _with_heads(shape: EncoderConfig) -> EncoderConfig:
    """Return the shape with transformers' heads."""
    inner = Own(shape.activation, dropout_first=True)
    return replace(shape, readout=replace(shape.readout, labels=inner, span=Deep()))


def _sized(shape: EncoderConfig) -> EncoderConfig:
    long = replace(
        shape,
        position=Learned(4096),
        patterns=(_BLOCKS,),
        dropout=Dropouts(places=("sum", "attention", "mlp")),
    )
    return _with_heads(replace(long, activation="gelu_tanh"))


def base() -> EncoderConfig:
    """Return 12 layers of 768."""
    return _sized(bert.base(VOCABULARY))


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "bigbird-roberta-base": base,
    "bigbird-roberta-large": lambda: _sized(bert.large(VOCABULARY)),
}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    size, random = (
        family.read_number(raw, name, default, location) for name, default in _SIZES.items()
    )
    kinds: dict[str, Pattern] = {"block_sparse": Blocks(size, random), "original_full": Full()}
    pattern = family.read_choice(raw, "attention_type", kinds, "block_sparse", location)
    return _with_heads(replace(config, patterns=(pattern,)))


_SIZES = {"block_size": _BLOCKS.size, "num_random_blocks": _BLOCKS.random}


def _write_more(config: EncoderConfig) -> dict[str, Any]:
    pattern = config.pattern(0)
    blocks = pattern if isinstance(pattern, Blocks) else _BLOCKS
    return {
        "attention_type": "block_sparse" if isinstance(pattern, Blocks) else "original_full",
        "block_size": blocks.size,
        "num_random_blocks": blocks.random,
        # transformers' class for answers needs the separator.
        "sep_token_id": _SEPARATOR,
    }


_RULES: tuple[Rule, ...] = (
    *bert.encoder_rules("bert"),
    *bert.post_norm_rules("bert"),
    Rename("heads.pooler.dense", "bert.pooler"),
    *bert.MASKED_RULES,
    Rename("heads.pair.dense", "cls.seq_relationship"),
    *output_rules(
        {
            "labels.inner": "classifier.dense",
            "labels.dense": "classifier.out_proj",
            "span.up": "qa_classifier.intermediate.dense",
            "span.down": "qa_classifier.output.dense",
            "span.norm": "qa_classifier.output.LayerNorm",
            "span.dense": "qa_classifier.qa_outputs",
        }
    ),
)
_POOLER: frozenset[str] = frozenset({"pooler"})
_CLASSES: tuple[tuple[str, frozenset[str], frozenset[str]], ...] = (
    ("ForPreTraining", frozenset({"masked", "pooler", "pair"}), frozenset()),
    ("ForMaskedLM", frozenset({"masked", "pooler"}), _POOLER),
    ("ForSequenceClassification", frozenset({"labels", "pooler"}), _POOLER),
    ("ForTokenClassification", frozenset({"tags", "pooler"}), _POOLER),
    ("ForQuestionAnswering", frozenset({"span"}), frozenset()),
    ("ForMultipleChoice", frozenset({"choice", "pooler"}), frozenset()),
    ("Model", _POOLER, frozenset()),
)
"""Suffixes of classes, their heads, and the idle ones among them."""

BIGBIRD = Family(
    model_type="big_bird",
    keys=KeyTable("bert.", _RULES, position_buffers("bert.embeddings")),
    architectures=tuple(
        Architecture("BigBird" + name, heads, name == "Model", idle=idle)
        for name, heads, idle in _CLASSES
    ),
    config_rules=family.ConfigRules(
        base(),
        numbers=family.NUMBERS
        | {"position.scaled": "rescale_embeddings", "bias.projections": "use_bias"},
        activations={"gelu_new": "gelu_tanh", **family.ACTIVATIONS},
        read_more=_read_more,
        write_more=_write_more,
    ),
    dropouts={"labels": ("classifier_dropout", None), "tags": ("classifier_dropout", None)},
)
