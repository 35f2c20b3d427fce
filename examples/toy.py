"""Text and labels for the examples."""

from __future__ import annotations

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
    """Return labelled rows."""
    rng = random.Random(1)
    labels = [("positive", GOOD), ("negative", BAD)] * (count // 2)
    return [{"text": sentence(rng, words), "label": label} for label, words in labels]
