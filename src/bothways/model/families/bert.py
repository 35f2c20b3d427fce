"""BERT in its published sizes: post-norm (`bert`) and pre-norm (`megatron-bert`).

Source: Devlin et al. 2018, section 3; for the small sizes, Turc et al. 2019. Heads have 64
features and the feed-forward layer has 4H.

Google's code computes GELU by its tanh approximation. The configurations released for transformers
have the exact "gelu", as have these presets; to follow the paper exactly, replace `activation` by
"gelu_tanh". The largest difference between the two functions is 5e-4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from bothways.model.config import EncoderConfig, PreNorm
from bothways.model.families.common import classes, masked_rules, output_rules, position_buffers
from bothways.model.families.family import Architecture, ConfigRules, Family
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Stack

UNCASED = 30_522
CASED = 28_996
MULTILINGUAL_CASED = 119_547
MULTILINGUAL_UNCASED = 105_879
CHINESE = 21_128
MEGATRON = 29_056


def sized(depth: int, width: int, vocab: int = UNCASED) -> EncoderConfig:
    """Return `depth` layers of `width` features."""
    return EncoderConfig(
        vocab=vocab, width=width, depth=depth, heads=width // 64, intermediate_size=4 * width
    )


# Each takes the size of the vocabulary.
tiny, mini = functools.partial(sized, 2, 128), functools.partial(sized, 4, 256)
small, medium = functools.partial(sized, 4, 512), functools.partial(sized, 8, 512)
base, large = functools.partial(sized, 12, 768), functools.partial(sized, 24, 1024)


def megatron() -> EncoderConfig:
    """Return the large size in pre-norm order (Shoeybi et al. 2019), as in `megatron-bert`."""
    return replace(large(MEGATRON), order=PreNorm())


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


def encoder_rules(stem: str) -> tuple[Rule, ...]:
    """Return the names of the encoder's tensors without LayerNorms, in BERT and its descendants."""
    layer = f"{stem}.encoder.layer.{{}}"
    return (
        Rename("encoder.embedding.token", f"{stem}.embeddings.word_embeddings"),
        Rename("encoder.embedding.position", f"{stem}.embeddings.position_embeddings"),
        Rename("encoder.embedding.segment", f"{stem}.embeddings.token_type_embeddings"),
        Stack(
            "encoder.blocks.{}.attention.qkv",
            tuple(f"{layer}.attention.self.{name}" for name in ("query", "key", "value")),
        ),
        Rename("encoder.blocks.{}.attention.out", f"{layer}.attention.output.dense"),
        Rename("encoder.blocks.{}.mlp.up", f"{layer}.intermediate.dense"),
        Rename("encoder.blocks.{}.mlp.down", f"{layer}.output.dense"),
    )


def post_norm_rules(stem: str) -> tuple[Rule, ...]:
    """Return the names of the LayerNorms in post-norm order."""
    layer = f"{stem}.encoder.layer.{{}}"
    return (
        Rename("encoder.embedding.norm", f"{stem}.embeddings.LayerNorm"),
        Rename("encoder.blocks.{}.attention_norm", f"{layer}.attention.output.LayerNorm"),
        Rename("encoder.blocks.{}.mlp_norm", f"{layer}.output.LayerNorm"),
    )


_LM = "cls.predictions"
MASKED_RULES = masked_rules(
    f"{_LM}.transform.dense", f"{_LM}.transform.LayerNorm", f"{_LM}.decoder", f"{_LM}.bias"
)


def common_rules(stem: str) -> tuple[Rule, ...]:
    """Return the names of all tensors but LayerNorms, where all heads are BERT's."""
    return (
        *encoder_rules(stem),
        Rename("heads.pooler.dense", f"{stem}.pooler.dense"),
        Rename("heads.pair.dense", "cls.seq_relationship"),
        *MASKED_RULES,
        *output_rules(),
    )


_PRE: tuple[Rule, ...] = (
    Rename("encoder.blocks.{}.attention_norm", "bert.encoder.layer.{}.attention.ln"),
    Rename("encoder.blocks.{}.mlp_norm", "bert.encoder.layer.{}.ln"),
    Rename("encoder.norm", "bert.encoder.ln"),
)
_CONSTANT = {"position_embedding_type": "absolute"}
_COMPUTED = position_buffers("bert.embeddings")


def architectures(stem: str) -> tuple[Architecture, ...]:
    """Return BERT's classes, their names beginning with `stem`."""
    pair: frozenset[str] = frozenset({"pooler", "pair"})
    pair_classes = classes(stem, pooled={"labels", "choice"}, pretraining={"masked", *pair})
    return (*pair_classes, Architecture(f"{stem}ForNextSentencePrediction", pair))


BERT = Family(
    model_type="bert",
    keys=KeyTable("bert.", common_rules("bert") + post_norm_rules("bert"), _COMPUTED),
    architectures=architectures("Bert"),
    config_rules=ConfigRules(base(), constant=_CONSTANT),
)
MEGATRON_BERT = Family(
    model_type="megatron-bert",
    keys=KeyTable("bert.", common_rules("bert") + _PRE, _COMPUTED),
    architectures=architectures("MegatronBert"),
    config_rules=ConfigRules(megatron(), constant=_CONSTANT),
    dropouts={},
)
