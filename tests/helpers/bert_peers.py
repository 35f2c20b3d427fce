"""Models of transformers with random shapes and random weights, and ours with the same weights."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.model.config import Dropouts, EncoderConfig, PostNorm, PreNorm, Readout
from bothways.model.families.bert import BERT, MEGATRON_BERT
from bothways.model.families.family import Family
from bothways.model.families.weight_names import to_file_names
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.model.positions import Learned
from random_weights import perturb

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
STEMS = {"post": "Bert", "pre": "MegatronBert"}
FAMILIES: dict[str, Family] = {"post": BERT, "pre": MEGATRON_BERT}


def draw_config(
    seed: int, order: str, dropout: float = 0.0, attention_dropout: float = 0.0
) -> EncoderConfig:
    """A small configuration with every axis drawn at random."""
    rng = random.Random(seed)
    heads = rng.choice((1, 2, 4))
    return EncoderConfig(
        vocab=rng.randint(40, 90),
        width=heads * rng.choice((5, 8)),
        depth=rng.randint(1, 3),
        heads=heads,
        intermediate_size=rng.randint(8, 70),
        segments=rng.randint(1, 3),
        position=Learned(rng.randint(24, 40)),
        order=PostNorm() if order == "post" else PreNorm(),
        activation=rng.choice(tuple(ACTIVATIONS)),
        norm_epsilon=rng.choice((1e-12, 1e-5, 1e-2)),
        dropout=Dropouts(dropout, attention_dropout),
        readout=Readout(output=("embedding", "own")[seed % 2]),
    )


def peer(config: EncoderConfig, name: str, **settings: object) -> nn.Module:
    """transformers' class `name` ("ForMaskedLM") of this shape, with every parameter moved away from where it starts."""
    stem = STEMS[config.order.kind]
    theirs = getattr(transformers, f"{stem}Config")(
        vocab_size=config.vocab,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate_size,
        type_vocab_size=config.segments,
        max_position_embeddings=config.position.max_positions,
        hidden_act=ACTIVATIONS[config.activation],
        layer_norm_eps=config.norm_epsilon,
        hidden_dropout_prob=config.dropout.hidden,
        attention_probs_dropout_prob=config.dropout.attention,
        tie_word_embeddings=config.readout.output == "embedding",
        **settings,
    )
    model: nn.Module = getattr(transformers, stem + name)(theirs)
    return perturb(model, 0.15)


def ours(peer: nn.Module, config: EncoderConfig, heads: tuple[Head, ...]) -> Model:
    """Our model with the weights of theirs."""
    table = FAMILIES[config.order.kind].keys_for(config)
    model = Model(config, heads)
    state = {table.full_name(name): tensor for name, tensor in peer.state_dict().items()}
    places = {name: table.place(name) for name in model.state_dict()}
    model.load_state_dict(
        {name: place.join([state[part] for part in place.names]) for name, place in places.items()}
    )
    return model


def gradients(model: Model) -> Mapping[str, Tensor]:
    """Our gradients under their full names."""
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return to_file_names(FAMILIES[model.config.order.kind].keys_for(model.config), found)


@dataclass(frozen=True)
class Input:
    """The same sequences packed for us, and padded for them. `kept`: where the rectangle holds a token."""

    batch: Batch
    padded: Mapping[str, Tensor]
    kept: Tensor


def draw_input(config: EncoderConfig, lengths: list[int], seed: int = 0) -> Input:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    # Their padding row gets no gradient, even where the padding token stands in a text: so it does not stand in this one.
    ids = torch.randint(1, config.vocab, kept.shape, generator=generator)
    segments = torch.randint(config.segments, kept.shape, generator=generator)
    batch = Batch(ids[kept], segments[kept], Layout.of(lengths))
    padded = {
        "input_ids": ids * kept,
        "token_type_ids": segments * kept,
        "attention_mask": kept.long(),
    }
    return Input(batch, padded, kept)
