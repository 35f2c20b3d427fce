"""Names of other libraries are answered with the names here."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest

import bothways
from bothways.core.errors import ConfigError
from bothways.prediction.other_names import ARGUMENTS, METHODS, SETTINGS
from bothways.prediction.predictor import Predictor
from bothways.tasks.catalogue import AnyTask
from toy_folder import make_folder


@pytest.fixture(scope="module")
def embed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bothways.load(make_folder(tmp_path_factory.mktemp("place") / "bert"), "embed")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda embed: embed.encode(["a"], normalize_embeddings=True),
            r"^normalize_embeddings: encode has no argument .*\n  .*normalised=True\)\.$",
        ),
        (lambda embed: embed.encode(["a"], batch_size=8), r"batch_size.*\n  Leave it out: texts"),
        (lambda embed: embed.encode(["a"], promt="q"), r"^promt: .*\n  Did you mean prompt\?"),
        (lambda embed: embed.encode(["a"], other=1), r"It takes texts, prompt_name, prompt\.$"),
        (lambda embed: embed(["a"], top_k=None), r"^top_k: .*\n  .*prediction\.probabilities"),
        (lambda embed: embed.evaluate([], columns={}), r"^columns: .*\n  Name them where"),
    ],
)
def test_arguments_of_other_libraries_have_advice(embed: Any, call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(embed)


def test_methods_of_other_libraries_have_advice(embed: Any) -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'similarity'\. .* are the cosines\."):
        embed.similarity([], [])
    with pytest.raises(AttributeError, match=r"^a predictor has no attribute 'other'$"):
        _ = embed.other
    with pytest.raises(AttributeError, match=r"'SentenceTransformer'; see bothways\.load; it has"):
        _ = bothways.SentenceTransformer  # type: ignore[attr-defined]
    assert not hasattr(embed, "predict_proba")
    assert copy.deepcopy(embed) is embed
    assert pickle.loads(pickle.dumps(embed)).encode("a").shape == (32,)


def test_settings_of_other_libraries_have_their_name_here(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "bert")
    with pytest.raises(ConfigError, match=r"^max_length: .*\n  Its name here is length\.$"):
        bothways.load(folder, "embed", max_length=8)


def test_the_names_are_not_ours() -> None:
    """A name that gets a meaning here would be refused."""
    loading = {*inspect.signature(bothways.load).parameters}
    fields = {name for task in typing.get_args(AnyTask) for name in task.__dataclass_fields__}
    assert not (loading | fields) & {*SETTINGS}
    assert {*SETTINGS.values()} <= loading | fields
    assert not {*METHODS} & {*dir(Predictor), "task", "precision"}
    for method in (Predictor.encode, Predictor.__call__, Predictor.evaluate):
        assert not {*ARGUMENTS} & {*inspect.signature(method).parameters}
