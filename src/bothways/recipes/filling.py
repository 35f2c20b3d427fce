"""What a pre-trained model makes of a hidden word."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from bothways.core.batch import pack
from bothways.core.seeds import rng
from bothways.core.sequence import Ids
from bothways.data.corpus import Corpus
from bothways.model.heads import Model
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

GUESSES = 3


@dataclass(frozen=True)
class Filled:
    """A sentence with one word hidden, and the model's most probable words with their probabilities.

    Attributes:
        before, after: the text around the hidden word.
        truth: the hidden word.
        guesses: (word, probability), the most probable first.
    """

    before: str
    after: str
    truth: str
    guesses: tuple[tuple[str, float], ...]


def fill_masks(model: Model, corpus: Corpus, documents: Iterable[int], count: int, seed: int) -> list[Filled]:
    """Hide one word in sentences of these documents and let the model, with a masked head, fill it in."""
    draws, tokenizer = rng(seed, "filling"), corpus.tokenizer
    filled = []
    for document in documents:
        sentences = [ids for ids in corpus.sentences_of(int(document)) if 8 <= len(ids) <= 30]
        places = _words(sentences[draws.integers(len(sentences))], tokenizer) if sentences else None
        if places is None or not len(places[1]):
            continue
        ids, whole = places
        filled.append(_fill(model, ids, int(draws.choice(whole)), tokenizer))
        if len(filled) == count:
            break
    return filled


def _words(ids: Ids, tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """The sentence, and the places of words of four letters or more that are one token."""
    followed = np.append(tokenizer.continues[ids[1:]], False)
    alone = [at for at in np.flatnonzero(~tokenizer.continues[ids] & ~followed) if _is_word(tokenizer.token(int(ids[at])))]
    return ids, np.array(alone, dtype=np.int32)


def _is_word(token: str) -> bool:
    return len(token) >= 4 and token.isalpha()


@torch.no_grad()
def _fill(model: Model, ids: Ids, at: int, tokenizer: Tokenizer) -> Filled:
    sequence = assemble(ids, None, tokenizer.specials)
    hidden = sequence.ids.copy()
    hidden[at + 1] = tokenizer.specials.mask
    device = next(model.parameters()).device
    batch = pack([dataclasses.replace(sequence, ids=hidden)]).to(device)
    model.eval()
    x = model.encoder(batch).last[at + 1 : at + 2]
    probabilities = model.heads["masked"](x, model.encoder.embedding.token.weight)[0].softmax(-1)
    best = probabilities.topk(GUESSES)
    guesses = zip((tokenizer.token(int(id)) for id in best.indices), best.values.tolist(), strict=True)
    return Filled(tokenizer.decode(ids[:at]), tokenizer.decode(ids[at + 1 :]), tokenizer.token(int(ids[at])), tuple(guesses))
