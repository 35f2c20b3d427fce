"""GPT and GPT-2, a contrast to BERT: Transformers from left to right (Radford et al. 2018, 2019).

Differences from BERT: causal attention; no segments, no pooler and no special tokens; one head,
which predicts the next token. GPT is post-norm without a LayerNorm after the embeddings, GPT-2 is
pre-norm. Files hold dense layers transposed.

Source: Devlin et al. 2018, section 2.2, figure 3 and appendix A.4, which compare BERT with GPT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bothways.model.attention.patterns import Causal
from bothways.model.config import Activation, EncoderConfig, PostNorm, PreNorm
from bothways.model.families import family
from bothways.model.families.weight_names import KeyTable, Rename, Rule, Tie, Transpose
from bothways.model.positions import Learned


def base() -> EncoderConfig:
    """Return the first GPT: 12 layers of 768, the size of BERT-base."""
    return EncoderConfig(
        vocab=40_478, segments=0, position=Learned(512), patterns=(Causal(),),
        order=PostNorm(embedding=False), activation="gelu_tanh", norm_epsilon=1e-5, pad=None,
    )  # fmt: skip


def second(depth: int, width: int) -> EncoderConfig:
    """Return a GPT-2 with heads of 64 features."""
    shape = replace(base(), vocab=50_257, position=Learned(1024), order=PreNorm())
    return replace(shape, depth=depth, width=width, heads=width // 64, intermediate_size=4 * width)


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "openai-gpt": base,
    "gpt2": lambda: second(12, 768),
    "gpt2-medium": lambda: second(24, 1024),
    "gpt2-large": lambda: second(36, 1280),
    "gpt2-xl": lambda: second(48, 1600),
}


def _read_more(config: EncoderConfig, raw: Mapping[str, Any], location: str) -> EncoderConfig:
    rate, inner = family.read_number(raw, "embd_pdrop", 0.1, location), 4 * config.width
    if raw.get("n_inner") is not None:
        inner = family.read_number(raw, "n_inner", inner, location)
    return replace(
        config,
        intermediate_size=inner,
        dropout=replace(config.dropout, embedding=None if rate == config.dropout.hidden else rate),
    )


_BLOCKS: tuple[Rule, ...] = (
    Rename("encoder.blocks.{}.attention_norm", "transformer.h.{}.ln_1"),
    Transpose("encoder.blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn"),
    Transpose("encoder.blocks.{}.attention.out", "transformer.h.{}.attn.c_proj"),
    Rename("encoder.blocks.{}.mlp_norm", "transformer.h.{}.ln_2"),
    Transpose("encoder.blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc"),
    Transpose("encoder.blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj"),
    Tie("encoder.embedding.token.weight", "lm_head.weight", owner="heads.causal"),
)
_FIRST: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "transformer.tokens_embed"),
    Rename("encoder.embedding.position", "transformer.positions_embed"),
    *_BLOCKS,
)
_SECOND: tuple[Rule, ...] = (
    Rename("encoder.embedding.token", "transformer.wte"),
    Rename("encoder.embedding.position", "transformer.wpe"),
    *_BLOCKS,
    Rename("encoder.norm", "transformer.ln_f"),
)
_NUMBERS = {
    "vocab": "vocab_size", "width": "n_embd", "depth": "n_layer", "heads": "n_head",
    "norm_epsilon": "layer_norm_epsilon", "dropout.hidden": "resid_pdrop",
    "dropout.attention": "attn_pdrop", "initial_range": "initializer_range",
}  # fmt: skip
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_FIRST_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""In GPT's code, gelu is the approximation."""
_END = 50_256
_SECOND_ACTIVATIONS: dict[str, Activation] = {"gelu_new": "gelu_tanh", **family.ACTIVATIONS}
_MASKS = ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")
_SCALED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


_SUMMARY = frozenset(
    f"summary_{name}"
    for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
)


def _classes(stem: str) -> tuple[family.Architecture, ...]:
    return (
        family.Architecture(stem + "LMHeadModel", frozenset({"causal"})),
        family.Architecture(stem + "Model", frozenset(), bare=True),
    )


GPT = family.Family(
    model_type="openai-gpt",
    keys=KeyTable("transformer.", _FIRST, ("transformer.position_ids", *_MASKS)),
    architectures=_classes("OpenAIGPT"),
    config_rules=family.ConfigRules(
        base(),
        numbers=_NUMBERS,
        positions="n_positions",
        activation="afn",
        ignored=_SUMMARY | {"n_ctx", "predict_special_tokens", "n_special"},
        activations=_FIRST_ACTIVATIONS,
        fixed={},
        aliases=_ALIASES,
        read_more=_read_more,
        write_more=lambda config: {"embd_pdrop": config.dropout_at("embedding")},
    ),
    dropouts={},
)
GPT2 = family.Family(
    model_type="gpt2",
    keys=KeyTable("transformer.", _SECOND, _MASKS),
    architectures=_classes("GPT2"),
    config_rules=family.ConfigRules(
        second(12, 768),
        numbers=_NUMBERS,
        positions="n_positions",
        activation="activation_function",
        ignored=_SUMMARY | {"n_ctx", "reorder_and_upcast_attn"},
        activations=_SECOND_ACTIVATIONS,
        fixed=_SCALED,
        aliases=_ALIASES,
        read_more=_read_more,
        write_more=lambda config: {
            "embd_pdrop": config.dropout_at("embedding"),
            "n_inner": {4 * config.width: None}.get(size := config.intermediate_size, size),
            # Absent ids would be the published vocabulary's.
            **({} if config.vocab > _END else {"bos_token_id": None, "eos_token_id": None}),
        },
    ),
    dropouts={},
)
