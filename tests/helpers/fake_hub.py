"""A stand-in for the Hub: data sets that a function returns, by repository, configuration and split."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass
class FakeBuilder:
    """A data set of the Hub that was found; its rows are asked for later."""

    load: Callable[..., Any]
    repository: str
    name: str | None
    commit: str

    @property
    def config(self) -> Any:
        """What datasets knows of the files: the repository and the commit."""
        files = SimpleNamespace(origin_metadata=[(self.repository, self.commit)])
        return SimpleNamespace(data_files={"train": files})

    def as_streaming_dataset(self, split: str) -> Any:
        """Return the rows of a split."""
        return self.load(self.repository, self.name, split=split, streaming=True)


def fake_hub(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]) -> None:
    """Let `load` return the rows of all data sets."""
    import datasets

    def find(repository: str, name: str | None = None, revision: str | None = None) -> FakeBuilder:
        return FakeBuilder(load, repository, name, revision or "0a1b2c")

    monkeypatch.setattr(datasets, "load_dataset_builder", find)
