"""Sentences that can be predicted: each document is about one animal and one place."""

import numpy as np

ANIMALS = ["cat", "dog", "owl", "fox", "hen", "cow"]
PLACES = ["barn", "wood", "town", "lake", "hill"]
VERBS = ["sleeps", "eats", "sings", "walks"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "in", "near", "."]
WORDS += [*ANIMALS, *PLACES, *VERBS, "##s"]


def document(rng: np.random.Generator) -> str:
    animal, place = rng.choice(ANIMALS), rng.choice(PLACES)
    return " ".join(
        f"The {animal} {rng.choice(VERBS)} {rng.choice(['in', 'near'])} the {place}."
        for _ in range(rng.integers(3, 9))
    )
