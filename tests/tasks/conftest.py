"""What several tests of tasks are about: a small tokenizer, and a masked model of it."""

import pytest

from bothways.text.tokenizer import Tokenizer
from toy_masked import make_masked
from toy_task import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple:
    """A model, its tokenizer, and the model of transformers with the same weights."""
    return make_masked(tmp_path_factory.mktemp("masked"))
