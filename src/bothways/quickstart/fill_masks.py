"""Predictions of a pre-trained model for masked words of a corpus, with the true words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from bothways.core.keyed_rng import rng
from bothways.core.sequence import Ids
from bothways.data.corpus import Corpus
from bothways.model.model import Model
from bothways.prediction.engine import predict
from bothways.tasks.mask_filling.task import MaskFiller, MaskFillingTask
from bothways.tasks.text_examples import TextExample
from bothways.text.tokenizer import Tokenizer

GUESSES = 3


@dataclass(frozen=True)
class FilledMask:
    """A sentence with one masked word and the most probable words.

    Attributes:
        before, after: the text around the masked word.
        truth: the masked word.
        guesses: (word, probability), the most probable first.
    """

    before: str
    after: str
    truth: str
    guesses: tuple[tuple[str, float], ...]


def fill_masks(
    model: Model, corpus: Corpus, documents: Iterable[int], count: int, seed: int
) -> list[FilledMask]:
    """Mask one word in sentences of these documents and predict it."""
    draws, tokenizer = rng(seed, "filling"), corpus.tokenizer
    fill = MaskFillingTask(top=GUESSES).learner(model, tokenizer, (), model.config.max_positions)
    filled = []
    for document in documents:
        sentences = [ids for ids in corpus.sentences_of(int(document)) if 8 <= len(ids) <= 30]
        places = _words(sentences[draws.integers(len(sentences))], tokenizer) if sentences else None
        if places is None or not len(places[1]):
            continue
        ids, whole = places
        filled.append(_fill(fill, ids, int(draws.choice(whole))))
        if len(filled) == count:
            break
    return filled


def _words(ids: Ids, tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """Return a sentence and the positions of its words of one token and at least four letters."""
    followed = np.append(tokenizer.continues[ids[1:]], False)
    alone = [
        at
        for at in np.flatnonzero(~tokenizer.continues[ids] & ~followed)
        if _is_word(tokenizer.token(int(ids[at])))
    ]
    return ids, np.array(alone, dtype=np.int32)


def _is_word(token: str) -> bool:
    return len(token) >= 4 and token.isalpha()


def _fill(fill: MaskFiller, ids: Ids, at: int) -> FilledMask:
    tokenizer = fill.tokenizer
    before, after = tokenizer.decode(ids[:at]), tokenizer.decode(ids[at + 1 :])
    text = " ".join([before, tokenizer.token(tokenizer.specials.mask), after])
    ((_, prediction),) = predict(fill, [TextExample(text)])
    guesses = tuple((guess.token, guess.probability) for guess in prediction.masks[0])
    return FilledMask(before, after, tokenizer.token(int(ids[at])), guesses)
