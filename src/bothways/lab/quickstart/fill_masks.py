"""Predictions of a pre-trained model for masked words of a corpus, with the true words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from bothways.core.batch import pack
from bothways.core.keyed_rng import rng
from bothways.core.sequence import Ids
from bothways.core.targets import TokenTargets
from bothways.data.corpus import Corpus
from bothways.model.model import Model
from bothways.tasks.mask_filling.task import MaskFiller, MaskFillingTask
from bothways.tasks.text_examples import TextExample
from bothways.tasks.zero_shot import vocabulary_logits
from bothways.text.tokenizer import Tokenizer

GUESSES = 5
POOL = 10
"""Number of masked words for each one that is shown."""


@dataclass(frozen=True)
class FilledMask:
    """A sentence with one masked word and the most probable words.

    Attributes:
        before, after: the text around the masked word.
        truth: the masked word.
        guesses: (word, probability), the most probable first.
        rank: the place of the true word among all tokens, from 1.
        probability: of the true word.
    """

    before: str
    after: str
    truth: str
    guesses: tuple[tuple[str, float], ...]
    rank: int
    probability: float


def fill_masks(
    model: Model, corpus: Corpus, documents: Iterable[int], count: int, seed: int
) -> list[FilledMask]:
    """Mask one word in sentences of these documents, predict it, and return an even sample.

    Of `POOL` times as many sentences, the sample is even by the probability of the model's best
    guess: from the one it is most sure of to the one it is least sure of.
    """
    draws, tokenizer = rng(seed, "filling"), corpus.tokenizer
    fill = MaskFillingTask().learner(model, tokenizer, (), model.config.max_positions).eval()
    filled: list[FilledMask] = []
    for document in documents:
        if len(filled) == count * POOL:
            break
        sentences = [ids for ids in corpus.sentences_of(int(document)) if 8 <= len(ids) <= 30]
        if not sentences:
            continue
        ids = sentences[draws.integers(len(sentences))]
        whole = whole_words(ids, tokenizer)
        if len(whole):
            filled.append(_fill(fill, ids, int(draws.choice(whole))))
    filled.sort(key=lambda one: -one.guesses[0][1])
    places = np.linspace(0, len(filled) - 1, min(count, len(filled))).round().astype(int)
    return [filled[place] for place in places]


def whole_words(ids: Ids, tokenizer: Tokenizer) -> Ids:
    """Return the positions of words of one token and at least four letters."""
    followed = np.append(tokenizer.continues[ids[1:]], False)
    alone = np.flatnonzero(~tokenizer.continues[ids] & ~followed)
    tokens = [tokenizer.token(int(ids[at])) for at in alone]
    kept = [
        at for at, token in zip(alone, tokens, strict=True) if len(token) >= 4 and token.isalpha()
    ]
    return np.array(kept, dtype=np.int32)


@torch.inference_mode()
def _fill(fill: MaskFiller, ids: Ids, at: int) -> FilledMask:
    tokenizer = fill.tokenizer
    before, after = tokenizer.decode(ids[:at]), tokenizer.decode(ids[at + 1 :])
    text = " ".join([before, tokenizer.token(tokenizer.specials.mask), after])
    (encoded,) = fill.encode([TextExample(text)])
    batch = pack(encoded.sequences)
    position = torch.as_tensor(batch.target("masked", TokenTargets).index)
    (logits,) = torch.cat(list(vocabulary_logits(fill.model, batch, position)))
    chances = logits.softmax(-1)[: tokenizer.size].numpy() * tokenizer.named
    truth, order = int(ids[at]), np.argsort(-chances, kind="stable")
    rank = int(np.flatnonzero(order == truth)[0]) + 1
    guesses = [(tokenizer.token(int(id)), float(chances[id])) for id in order[:GUESSES]]
    return FilledMask(
        before, after, tokenizer.token(truth), tuple(guesses), rank, float(chances[truth])
    )
