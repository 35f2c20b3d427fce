"""A small random model with a masked head, ours and the same one in transformers, and texts at random."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig, Readout
from bothways.model.families import gpt
from bothways.model.heads import MaskedHead, NextTokenHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.text.tokenizer import Tokenizer
from random_weights import perturb
from toy_task import VOCABULARY, make_text, make_tokenizer

MASK = VOCABULARY.index("[MASK]")


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
    save_model(folder / "model", perturb(model, 0.1), tokenizer)
    theirs = transformers.BertForMaskedLM.from_pretrained(
        folder / "model", dtype=torch.float64
    ).eval()
    return model, tokenizer, theirs


def make_causal(folder: Path, positions: int = 512) -> tuple[Tokenizer, Any]:
    """A tokenizer, and transformers' GPT in float64; ours is in the folder."""
    import transformers

    torch.manual_seed(1)
    config = dataclasses.replace(
        gpt.base(), vocab=len(VOCABULARY), width=16, depth=2, heads=2, intermediate_size=64,
        position=dataclasses.replace(gpt.base().position, max_positions=positions),
    )  # fmt: skip
    model, tokenizer = Model(config, (NextTokenHead(),)), make_tokenizer(folder / "tokenizer")
    save_model(folder / "model", perturb(model, 0.3), tokenizer)
    theirs = transformers.OpenAIGPTLMHeadModel.from_pretrained(
        folder / "model", dtype=torch.float64
    ).eval()
    return tokenizer, theirs


@torch.no_grad()
def log_probabilities(theirs: Any, ids: list[int]) -> np.ndarray:
    """transformers' log probabilities of every token at every place `(n, vocab)`."""
    return theirs(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()


def likelihoods(
    text: str, variant: str, tokenizer: Tokenizer, masked: Any, causal: Any = None, room: int = 10
) -> list[float]:
    """The log probability of each token of a text that is read `room` tokens at a time, by transformers.

    With a causal model, the output before a token predicts it.
    """
    words = [tokenizer.encode([word])[0].tolist() for word in text.split()]
    ids, back = [id for word in words for id in word], int(causal is None)
    ends = [
        end for end, word in zip(np.cumsum([*map(len, words)]), words, strict=True) for _ in word
    ]
    logs = []
    for start in range(0, len(ids), room):
        chunk = ids[start : start + room]
        left = [] if causal is None else log_probabilities(causal, [2, *chunk, 3])
        for place, id in enumerate(chunk):
            rest = (
                min(ends[start + place] - start, len(chunk)) if variant == "word_l2r" else place + 1
            )
            hidden = [*chunk[:place], *[MASK] * (rest - place), *chunk[rest:]]
            ways = [log_probabilities(masked, [2, *hidden, 3])[place + back][id]]
            ways += [left[place][id]] if causal is not None else []
            logs.append({"causal": ways[-1], "both": np.mean(ways)}.get(variant, ways[0]))
    return logs


def make_masked_text(draw: random.Random, longest: int, masks: int) -> str:
    """Words, some with an s of their own, and so many masks."""
    words = [word + draw.choice(["", "", "s"]) for word in make_text(draw, longest).split()] + [
        "[MASK]"
    ] * masks
    draw.shuffle(words)
    return " ".join(words)
