"""Fixtures that several test packages share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from bothways.data.corpus import Corpus, build_corpus
from bothways.data.documents import Document
from bothways.kernels import library as native
from bothways.kernels.library import EVERY, Feature
from bothways.text.tokenizer import Tokenizer
from toy_animals import WORDS, document

# A slow or busy machine is no failure, and the same commit passes or fails alike everywhere.
settings.register_profile("repeatable", deadline=None, derandomize=True)
# New examples at every run, to find what no one has met yet: pytest -m hypothesis --hypothesis-profile=fresh
settings.register_profile("fresh", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("repeatable")

WITHOUT_AMX = EVERY & ~Feature.TILES
compiled = pytest.mark.skipif(
    not native.multiplies("int8"), reason="no compiled kernels for int8 here"
)
amx = pytest.mark.skipif(Feature.TILES not in native.kernel_features(), reason="no AMX here")
PROCESSORS = [
    pytest.param(WITHOUT_AMX, marks=(compiled, amx), id="without AMX"),
    pytest.param(EVERY, marks=compiled, id="compiled"),
]


def as_with(most: Feature) -> Iterator[None]:
    """As on a processor that has no more than this."""
    with pytest.MonkeyPatch.context() as patch:
        has = native.limit(most)
        patch.setattr(native, "kernel_features", lambda: has)
        yield
    native.limit(EVERY)


@pytest.fixture(scope="module", params=[pytest.param(Feature(0), id="torch"), *PROCESSORS])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything by torch's operators, and by the library's own kernels."""
    yield from as_with(request.param)


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """The library's own kernels, as on each kind of processor that this one can stand for."""
    yield from as_with(request.param)


@pytest.fixture(params=[Feature(0), EVERY], ids=["torch", "compiled"])
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """One test by torch's operators, and by what there is here."""
    yield from as_with(request.param)


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
    return build_corpus(documents, tokenizer, folder, workers=1)
