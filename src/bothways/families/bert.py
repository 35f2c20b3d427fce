"""BERT: the published sizes, and its two forms in transformers, post-norm (`bert`) and pre-norm (`megatron-bert`).

Source: Devlin et al. 2018, section 3; the small sizes, Turc et al. 2019. Heads are 64 wide and the feed-forward layer is 4H.

Google's code computes GELU by its tanh approximation. The configurations released for transformers say "gelu", the exact one,
and so do these presets; for the paper to the letter, replace `activation` by "gelu_tanh". The largest difference between the
two functions is 5e-4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.core.errors import ConfigError, FolderError
from bothways.families.family import Architecture, Family, HeadKind, read_choice, read_number
from bothways.families.keys import KeyTable, Rename, Rule, Stack, Tie
from bothways.model.config import Activation, EncoderConfig, Learned, PostNorm, PreNorm

UNCASED = 30_522
CASED = 28_996
MULTILINGUAL_CASED = 119_547
MULTILINGUAL_UNCASED = 105_879
CHINESE = 21_128
MEGATRON = 29_056


def _sized(depth: int, width: int, vocab: int) -> EncoderConfig:
    return EncoderConfig(vocab=vocab, width=width, depth=depth, heads=width // 64, inner=4 * width)


def tiny(vocab: int = UNCASED) -> EncoderConfig:
    """2 layers of 128."""
    return _sized(2, 128, vocab)


def mini(vocab: int = UNCASED) -> EncoderConfig:
    """4 layers of 256."""
    return _sized(4, 256, vocab)


def small(vocab: int = UNCASED) -> EncoderConfig:
    """4 layers of 512."""
    return _sized(4, 512, vocab)


def medium(vocab: int = UNCASED) -> EncoderConfig:
    """8 layers of 512."""
    return _sized(8, 512, vocab)


def base(vocab: int = UNCASED) -> EncoderConfig:
    """12 layers of 768."""
    return _sized(12, 768, vocab)


def large(vocab: int = UNCASED) -> EncoderConfig:
    """24 layers of 1024."""
    return _sized(24, 1024, vocab)


def megatron(vocab: int = MEGATRON) -> EncoderConfig:
    """The large size in pre-norm order (Shoeybi et al. 2019), with the defaults of transformers' `megatron-bert`."""
    return replace(large(vocab), order=PreNorm())


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "bert-tiny": tiny,
    "bert-mini": mini,
    "bert-small": small,
    "bert-medium": medium,
    "bert-base": base,
    "bert-large": large,
    "bert-base-uncased": base,
    "bert-large-uncased": large,
    "bert-base-cased": functools.partial(base, CASED),
    "bert-large-cased": functools.partial(large, CASED),
    "bert-base-multilingual-cased": functools.partial(base, MULTILINGUAL_CASED),
    "bert-base-multilingual-uncased": functools.partial(base, MULTILINGUAL_UNCASED),
    "bert-base-chinese": functools.partial(base, CHINESE),
    "megatron-bert-345m": megatron,
}

_NUMBERS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "segments": "type_vocab_size",
    "norm_epsilon": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "initial_range": "initializer_range",
}
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# What these settings may say; anything else is another model.
_FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}


def _read(defaults: EncoderConfig, raw: Mapping[str, Any], where: str) -> EncoderConfig:
    for key, value in _FIXED.items():
        read_choice(raw, key, {value: value}, value, where)
    numbers = {ours: read_number(raw, theirs, getattr(defaults, ours), where) for ours, theirs in _NUMBERS.items()}
    most = read_number(raw, "max_position_embeddings", defaults.position.most, where)
    activation = read_choice(raw, "hidden_act", _ACTIVATIONS, defaults.activation, where)
    pad = None if raw.get("pad_token_id", 0) is None else read_number(raw, "pad_token_id", 0, where)
    try:
        return replace(defaults, **numbers, position=Learned(most), activation=activation, pad=pad)
    except ConfigError as error:
        raise FolderError(f"{error.where}: {error.what}", where=where, fix=error.fix) from error


def _write(order: PostNorm | PreNorm, config: EncoderConfig) -> dict[str, Any] | None:
    if config.order != order or not config.segments:
        return None
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation)
    return {
        **{theirs: getattr(config, ours) for ours, theirs in _NUMBERS.items()},
        "max_position_embeddings": config.position.most,
        "hidden_act": activation,
        "pad_token_id": config.pad,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }


_COMMON: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "bert.embeddings.word_embeddings"),
    Rename("encoder.embedding.position", "bert.embeddings.position_embeddings"),
    Rename("encoder.embedding.segment", "bert.embeddings.token_type_embeddings"),
    Stack(
        "encoder.blocks.{}.attention.qkv",
        (
            "bert.encoder.layer.{}.attention.self.query",
            "bert.encoder.layer.{}.attention.self.key",
            "bert.encoder.layer.{}.attention.self.value",
        ),
    ),
    Rename("encoder.blocks.{}.attention.out", "bert.encoder.layer.{}.attention.output.dense"),
    Rename("encoder.blocks.{}.mlp.up", "bert.encoder.layer.{}.intermediate.dense"),
    Rename("encoder.blocks.{}.mlp.down", "bert.encoder.layer.{}.output.dense"),
    Rename("heads.pooler.dense", "bert.pooler.dense"),
    Rename("heads.masked.dense", "cls.predictions.transform.dense"),
    Rename("heads.masked.norm", "cls.predictions.transform.LayerNorm"),
    Rename("heads.masked.bias", "cls.predictions.bias"),
    Rename("heads.pair.dense", "cls.seq_relationship"),
    # One name for three heads: which it is, the class in config.json says.
    Rename("heads.labels.dense", "classifier"),
    Rename("heads.tags.dense", "classifier"),
    Rename("heads.choice.dense", "classifier"),
    Rename("heads.span.dense", "qa_outputs"),
    Tie("encoder.embedding.token.weight", "cls.predictions.decoder.weight", part="heads.masked"),
    Tie("heads.masked.bias", "cls.predictions.decoder.bias", part="heads.masked"),
)
_POST: tuple[Rule, ...] = (
    Rename("encoder.embedding.norm", "bert.embeddings.LayerNorm"),
    Rename("encoder.blocks.{}.attention_norm", "bert.encoder.layer.{}.attention.output.LayerNorm"),
    Rename("encoder.blocks.{}.mlp_norm", "bert.encoder.layer.{}.output.LayerNorm"),
)
_PRE: tuple[Rule, ...] = (
    Rename("encoder.blocks.{}.attention_norm", "bert.encoder.layer.{}.attention.ln"),
    Rename("encoder.blocks.{}.mlp_norm", "bert.encoder.layer.{}.ln"),
    Rename("encoder.norm", "bert.encoder.ln"),
)
_COMPUTED = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_CLASSES: tuple[tuple[str, frozenset[HeadKind]], ...] = (
    ("ForPreTraining", frozenset({"masked", "pooler", "pair"})),
    ("ForMaskedLM", frozenset({"masked"})),
    ("ForNextSentencePrediction", frozenset({"pooler", "pair"})),
    ("ForSequenceClassification", frozenset({"pooler", "labels"})),
    ("ForTokenClassification", frozenset({"tags"})),
    ("ForQuestionAnswering", frozenset({"span"})),
    ("ForMultipleChoice", frozenset({"pooler", "choice"})),
    ("Model", frozenset({"pooler"})),
)


def _architectures(stem: str) -> tuple[Architecture, ...]:
    return tuple(Architecture(stem + name, heads, bare=name == "Model") for name, heads in _CLASSES)


BERT = Family(
    model_type="bert",
    keys=KeyTable("bert.", _COMMON + _POST, _COMPUTED),
    architectures=_architectures("Bert"),
    read=functools.partial(_read, base()),
    write=functools.partial(_write, PostNorm()),
)
MEGATRON_BERT = Family(
    model_type="megatron-bert",
    keys=KeyTable("bert.", _COMMON + _PRE, _COMPUTED),
    architectures=_architectures("MegatronBert"),
    read=functools.partial(_read, megatron()),
    write=functools.partial(_write, PreNorm()),
)
