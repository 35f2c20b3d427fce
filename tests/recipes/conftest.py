"""A small corpus of the sentences of `toy_animals`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy_animals import WORDS, document

from bothways.data.corpus import Corpus, build
from bothways.data.documents import Document
from bothways.text.tokenizer import Tokenizer


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
