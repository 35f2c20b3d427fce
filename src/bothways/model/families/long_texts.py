"""Longformer and BigBird: RoBERTa and BERT on long texts, with 4,096 positions.

Longformer (Beltagy et al. 2020): each layer attends within a window; global tokens attend to all
tokens and are attended to by all, with queries, keys and values of their own. The task decides
which tokens are global, as in transformers' classes: the first one for classes, the question for
answers, the ending for choices, none for tags and masks. `attention_window` in transformers counts
both sides.

BigBird (Zaheer et al. 2020): attention in blocks of 64 tokens, local, random and global (`Blocks`),
for long sequences, full attention for short ones; GELU by its tanh approximation; dropout before
the embeddings' LayerNorm, not after; a SentencePiece vocabulary; heads for classes and for answers
with layers of their own. Unlike the paper, transformers takes the first block for each random block
in evaluation, and drops no attention probabilities in blocks. Both are kept here, so that outputs
are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import FolderError
from bothways.model.attention.patterns import Blocks, Full, Pattern, Window
from bothways.model.config import Deep, Dropouts, EncoderConfig, Own
from bothways.model.families import bert, roberta
from bothways.model.families.family import (
    ACTIVATIONS,
    NUMBERS,
    Architecture,
    ConfigRules,
    Family,
    classes,
    output_rules,
    position_buffers,
    read_choice,
    read_number,
)
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack
from bothways.model.positions import Learned

WINDOW = 512
"""Tokens on both sides together, by default."""
_BLOCKS = Blocks()


def _longformer(shape: EncoderConfig) -> EncoderConfig:
    return replace(
        shape, position=Learned(4096, 2), patterns=(Window(WINDOW // 2, global_attention=True),)
    )


def _with_heads(shape: EncoderConfig) -> EncoderConfig:
    """Return the shape with transformers' heads."""
    inner = Own(shape.activation, dropout_first=True)
    return replace(shape, readout=replace(shape.readout, labels=inner, span=Deep()))


def _bigbird(shape: EncoderConfig) -> EncoderConfig:
    long = replace(
        shape,
        position=Learned(4096),
        patterns=(_BLOCKS,),
        dropout=Dropouts(places=("sum", "attention", "mlp")),
    )
    return _with_heads(replace(long, activation="gelu_tanh"))


PRESETS: dict[str, EncoderConfig] = {
    "longformer-base-4096": _longformer(roberta.base()),
    "longformer-large-4096": _longformer(roberta.large()),
    "bigbird-roberta-base": _bigbird(bert.base(50_358)),
    "bigbird-roberta-large": _bigbird(bert.large(50_358)),
}


def _read_longformer(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
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


_SELF = "longformer.encoder.layer.{}.attention.self"
_LONGFORMER_RULES: tuple[Rule, ...] = (
    *bert.encoder_rules("longformer"),
    *bert.post_norm_rules("longformer"),
    Stack(
        "encoder.blocks.{}.attention.global_qkv",
        tuple(f"{_SELF}.{name}_global" for name in ("query", "key", "value")),
    ),
    *roberta.head_rules("longformer"),
)

LONGFORMER = Family(
    model_type="longformer",
    keys=KeyTable("longformer.", _LONGFORMER_RULES, position_buffers("longformer.embeddings")),
    architectures=classes("Longformer", pooled={"choice"}),
    # The defaults are those of transformers' class, which the published models do not have.
    config_rules=ConfigRules(
        replace(
            _longformer(roberta.base()),
            vocab=30_522,
            segments=2,
            norm_epsilon=1e-12,
            position=Learned(510, 2),
        ),
        ignored=frozenset({"attention_mode", "ignore_attention_mask", "onnx_export"}),
        read_more=_read_longformer,
        # transformers' class for answers needs the separator.
        write_more=lambda config: {
            "attention_window": [
                2 * pattern.radius if isinstance(pattern, Window) else WINDOW
                for pattern in map(config.pattern, range(config.depth))
            ],
            "sep_token_id": 2,
        },
    ),
    dropouts={},
)


def _read_bigbird(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    size, random = (read_number(raw, name, default, location) for name, default in _SIZES.items())
    kinds: dict[str, Pattern] = {"block_sparse": Blocks(size, random), "original_full": Full()}
    pattern = read_choice(raw, "attention_type", kinds, "block_sparse", location)
    return _with_heads(replace(config, patterns=(pattern,)))


_SIZES = {"block_size": _BLOCKS.size, "num_random_blocks": _BLOCKS.random}


def _write_bigbird(config: EncoderConfig) -> dict[str, Any]:
    pattern = config.pattern(0)
    blocks = pattern if isinstance(pattern, Blocks) else _BLOCKS
    return {
        "attention_type": "block_sparse" if isinstance(pattern, Blocks) else "original_full",
        "block_size": blocks.size,
        "num_random_blocks": blocks.random,
        # transformers' class for answers needs the separator.
        "sep_token_id": 66,
    }


_BIGBIRD_RULES: tuple[Rule, ...] = (
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
    keys=KeyTable("bert.", _BIGBIRD_RULES, position_buffers("bert.embeddings")),
    architectures=tuple(
        Architecture("BigBird" + name, heads, name == "Model", idle=idle)
        for name, heads, idle in _CLASSES
    ),
    config_rules=ConfigRules(
        PRESETS["bigbird-roberta-base"],
        numbers=NUMBERS | {"position.scaled": "rescale_embeddings", "bias.projections": "use_bias"},
        activations={"gelu_new": "gelu_tanh", **ACTIVATIONS},
        read_more=_read_bigbird,
        write_more=_write_bigbird,
    ),
    dropouts={"labels": ("classifier_dropout", None), "tags": ("classifier_dropout", None)},
)
