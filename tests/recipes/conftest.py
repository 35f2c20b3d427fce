"""A small corpus of sentences that can be predicted: each document is about one animal and one place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bothways.data.corpus import Corpus, build
from bothways.data.documents import Document
from bothways.text.tokenizer import Tokenizer

ANIMALS = ["cat", "dog", "owl", "fox", "hen", "cow"]
PLACES = ["barn", "wood", "town", "lake", "hill"]
VERBS = ["sleeps", "eats", "sings", "walks"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "in", "near", ".", *ANIMALS, *PLACES, *VERBS, "##s"]


def document(rng: np.random.Generator) -> str:
    animal, place = rng.choice(ANIMALS), rng.choice(PLACES)
    return " ".join(
        f"The {animal} {rng.choice(VERBS)} {rng.choice(['in', 'near'])} the {place}." for _ in range(rng.integers(3, 9))
    )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf8")
    return Tokenizer.load(folder / "vocab.txt")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Corpus:
    rng = np.random.default_rng(7)
    documents = [Document(document(rng), f"made:{number}") for number in range(150)]
    folder: Path = tmp_path_factory.mktemp("built") / "corpus"
    return build(documents, tokenizer, folder, workers=1)
