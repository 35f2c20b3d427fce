"""A small random model with a masked head, ours and the same one in transformers, and texts at random."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig, Readout
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.text.tokenizer import Tokenizer
from toy_task import VOCABULARY, make_text, make_tokenizer


def make_masked(
    folder: Path, positions: int = 24, seed: int = 3, spare: int = 0, shifted: bool = False
) -> tuple[Model, Tokenizer, Any]:
    """Ours, its tokenizer, and transformers' in float64; the embedding has so many rows more than there are tokens.

    With `shifted` it predicts the token after a vector, as GPT-BERT.
    """
    import transformers

    torch.manual_seed(seed)
    config = EncoderConfig(
        len(VOCABULARY) + spare, 16, 2, 2, 32, position=Learned(positions), initial_range=0.4,
        readout=Readout(shifted=shifted),
    )  # fmt: skip
    model, tokenizer = Model(config, (MaskedHead(),)), make_tokenizer(folder / "tokenizer")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_model(folder / "model", model, tokenizer)
    theirs = transformers.BertForMaskedLM.from_pretrained(
        folder / "model", dtype=torch.float64
    ).eval()
    return model, tokenizer, theirs


@torch.no_grad()
def log_probabilities(theirs: Any, ids: list[int]) -> np.ndarray:
    """transformers' log probabilities of every token at every place `(n, vocab)`."""
    return theirs(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def make_masked_text(draw: random.Random, longest: int, masks: int) -> str:
    """Words, some with an s of their own, and so many masks."""
    words = [word + draw.choice(["", "", "s"]) for word in make_text(draw, longest).split()] + [
        "[MASK]"
    ] * masks
    draw.shuffle(words)
    return " ".join(words)
