"""Small models with random shapes and weights, each as transformers opens its folder, too."""

import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.hub.model_folder import save_model
from bothways.model.config import Dropouts, EncoderConfig, PostNorm, PreNorm, Readout
from bothways.model.families.bert import BERT, MEGATRON_BERT
from bothways.model.model import Model
from bothways.model.positions import Learned
from random_weights import perturb

FAMILIES = {"post": BERT, "pre": MEGATRON_BERT}


def draw_config(seed: int, order: str, dropout: float = 0.0) -> EncoderConfig:
    """A small configuration with every other axis drawn at random."""
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
        activation=rng.choice(("gelu", "gelu_tanh", "relu", "silu")),
        norm_epsilon=rng.choice((1e-12, 1e-5, 1e-2)),
        dropout=Dropouts(dropout, dropout),
        readout=Readout(output=("embedding", "own")[seed % 2]),
    )


def peer(model: Model, name: str, **settings: object) -> nn.Module:
    """Return the class `name` ("ForMaskedLM") of transformers, as it opens the model's folder."""
    cls = getattr(
        transformers, {"post": "Bert", "pre": "MegatronBert"}[model.config.order.kind] + name
    )
    perturb(model, 0.15)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), model)
        theirs, report = cls.from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(report.values())
    return theirs


@dataclass(frozen=True)
class Input:
    """The same sequences packed for us, and padded for them. `kept`: where the rectangle holds a token."""

    batch: Batch
    padded: Mapping[str, Tensor]
    kept: Tensor


def draw_input(config: EncoderConfig, lengths: list[int]) -> Input:
    generator = torch.Generator().manual_seed(0)
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
