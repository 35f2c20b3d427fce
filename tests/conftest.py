"""Fixtures that several test packages share."""

import functools
import gc
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import Document
from bothways.model.kernels import abi, library
from bothways.model.kernels.library import ALL_FEATURES, Feature
from bothways.text.tokenizer import Tokenizer
from toy_animals import WORDS, document
from toy_text import write_vocabulary

# A slow or busy machine is no failure, and the same commit passes or fails alike everywhere. Hypothesis
# draws numbers that it finds in the modules imported so far, and filters those out of range: how many
# depends on the tests that a worker has run before.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=25,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile("slow", deadline=None, derandomize=True, max_examples=200)
# New examples at every run, to find what no one has met yet: pytest -m hypothesis --hypothesis-profile=fresh
settings.register_profile(
    "fresh", deadline=None, derandomize=False, max_examples=100, print_blob=True
)
settings.load_profile("repeatable")

# Until all modules are imported: passes over what is never freed take a tenth of that time.
gc.disable()
# No test cuts the power, and waiting for the disk takes a twentieth of the time.
os.fsync = lambda handle: None
# A client of HTTP reads the certificates of all authorities, which takes longer than a request.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# onnxruntime reports models to its maker, unless this is set when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

WITHOUT_AMX = ALL_FEATURES & ~Feature.AMX
compiled = pytest.mark.skipif(
    not library.multiplies("int8"), reason="no compiled kernels for int8 here"
)
amx = pytest.mark.skipif(Feature.AMX not in library.available(), reason="no AMX here")
PROCESSORS = [
    pytest.param(WITHOUT_AMX, marks=(compiled, amx), id="without AMX"),
    pytest.param(ALL_FEATURES, marks=compiled, id="compiled"),
]


def pytest_configure(config: pytest.Config) -> None:
    """Set what the tests rely on, and fail where compiled kernels have to be there and are not.

    All tests but those of GPUs compute on the processor, where results are the same to the bit.

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
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if os.environ.get("BOTHWAYS_EXPECT_KERNELS") == "1" and abi.load().library is None:
        raise pytest.UsageError(f"BOTHWAYS_EXPECT_KERNELS=1, but {library.describe_kernels()}")


def pytest_collection_finish() -> None:
    """Let no collection of garbage go through modules and tests again, which are never freed."""
    gc.collect()
    gc.freeze()
    gc.enable()


BLANK: dict[str, tuple[str, Callable[..., None]]] = {
    "bothways.pretraining.run": ("write_run_page", lambda file, *_: file.touch()),
    "bothways.pretraining.adapt": ("write_run_page", lambda file, *_: file.touch()),
    "bothways.finetuning.run": (
        "_write_report",
        lambda _, folder, __: (folder / "report.html").touch(),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def drawn_pages() -> Iterator[dict[str, Any]]:
    """Leave the pages of runs empty: to draw one takes as long as tens of steps of a small model."""
    drawn = {}
    with pytest.MonkeyPatch.context() as patch:
        for module, (name, blank) in BLANK.items():
            if module in sys.modules:
                drawn[module] = getattr(sys.modules[module], name)
                patch.setattr(sys.modules[module], name, blank)
        yield drawn


@pytest.fixture
def pages(drawn_pages, monkeypatch) -> None:
    """Draw the pages of runs in this test."""
    for module, draw in drawn_pages.items():
        monkeypatch.setattr(sys.modules[module], BLANK[module][0], draw)


@pytest.fixture(scope="module", params=[pytest.param(Feature(0), id="torch"), *PROCESSORS])
def either_way(request) -> Iterator[None]:
    """PyTorch's operators, and the compiled kernels."""
    with library.limit(request.param):
        yield


@pytest.fixture(params=PROCESSORS)
def processor(request) -> Iterator[None]:
    """The compiled kernels, as on each kind of processor that this one can be."""
    with library.limit(request.param):
        yield


@pytest.fixture(params=[Feature(0), ALL_FEATURES], ids=["torch", "compiled"])
def operators(request) -> Iterator[None]:
    """One test with PyTorch's operators, and with everything available."""
    with library.limit(request.param):
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write_vocabulary(tmp_path_factory.mktemp("tokenizer"), WORDS))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, tokenizer) -> Corpus:
    rng = np.random.default_rng(7)
    documents = [Document(document(rng), f"made:{number}") for number in range(150)]
    folder: Path = tmp_path_factory.mktemp("built") / "corpus"
    return write_corpus(documents, tokenizer, folder, workers=1)
