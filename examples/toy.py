"""Text and labels for the examples."""

from __future__ import annotations

import itertools
import random

NOUNS, VERBS = ("film", "play", "book", "song"), ("was", "seems", "feels")
GOOD, BAD = ("good", "great", "fine"), ("bad", "poor", "dull")


def sentence(rng: random.Random, words: tuple[str, ...] = GOOD + BAD) -> str:
    """Return a random sentence about a film, a play, a book or a song."""
    return f"the {rng.choice(NOUNS)} {rng.choice(VERBS)} {rng.choice(words)} ."


def texts(count: int) -> list[str]:
    """Return documents of four sentences."""
    rng = random.Random(0)
    return [" ".join(sentence(rng) for _ in range(4)) for _ in range(count)]


def rows(count: int) -> list[dict[str, str]]:
    """Return labelled rows of different sentences, 72 at most."""
    every = [
        {"text": f"the {noun} {verb} {word} .", "label": label}
        for noun, verb in itertools.product(NOUNS, VERBS)
        for label, words in (("positive", GOOD), ("negative", BAD))
        for word in words
    ]
    return random.Random(1).sample(every, count)
