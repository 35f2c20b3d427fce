"""Fixtures that several test packages share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from bothways.data.corpus import Corpus, build_corpus
from bothways.data.documents import Document
from bothways.model.kernels import library
from bothways.model.kernels.library import ALL_FEATURES, Feature
from bothways.text.tokenizer import Tokenizer
from toy_animals import WORDS, document

# A slow or busy machine is no failure, and the same commit passes or fails alike everywhere.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
# New examples at every run, to find what no one has met yet: pytest -m hypothesis --hypothesis-profile=fresh
settings.register_profile(
    "fresh", deadline=None, derandomize=False, max_examples=100, print_blob=True
)
settings.load_profile("repeatable")

# No test cuts the power, and waiting for the disk takes a twentieth of the time.
os.fsync = lambda handle: None

WITHOUT_AMX = ALL_FEATURES & ~Feature.AMX
compiled = pytest.mark.skipif(
    not library.multiplies("int8"), reason="no compiled kernels for int8 here"
)
amx = pytest.mark.skipif(Feature.AMX not in library.available(), reason="no AMX here")
PROCESSORS = [
    pytest.param(WITHOUT_AMX, marks=(compiled, amx), id="without AMX"),
    pytest.param(ALL_FEATURES, marks=compiled, id="compiled"),
]


def pytest_configure() -> None:
    """Set what the tests rely on, and fail where compiled kernels have to be there and are not.

    Started in the background, by nohup or by cron, a process ignores signals, and so do its
    children: tests of Ctrl-C and of hang-ups would wait for what never comes.
    """
    for number, action in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, action)
    if os.environ.get("BOTHWAYS_EXPECT_KERNELS") == "1" and not library.is_loaded():
        raise pytest.UsageError(f"BOTHWAYS_EXPECT_KERNELS=1, but {library.describe_kernels()}")


@pytest.fixture(scope="module", params=[pytest.param(Feature(0), id="torch"), *PROCESSORS])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's operators, and the compiled kernels."""
    with library.limit(request.param):
        yield


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """The compiled kernels, as on each kind of processor that this one can be."""
    with library.limit(request.param):
        yield


@pytest.fixture(params=[Feature(0), ALL_FEATURES], ids=["torch", "compiled"])
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """One test with PyTorch's operators, and with everything available."""
    with library.limit(request.param):
        yield


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
