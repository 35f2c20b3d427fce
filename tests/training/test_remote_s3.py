"""Checkpoints on an S3 server on this machine, which fails one request in five (`make test-elastic`)."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bothways.core import urls
from bothways.training.checkpoint import checkpoints
from bothways.training.remote import Remote
from s3_server import s3_server
from toy_training import TRAINING, session

pytestmark = pytest.mark.elastic


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server(monkeypatch):
        yield "s3://bucket/runs/one"


@pytest.mark.filterwarnings("default")
def test_a_run_goes_on_from_s3_on_a_connection_that_fails_one_time_in_five(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count(1)
    monkeypatch.setattr(urls, "WAITS", (0.0,) * 5)

    def unsteady(real: Callable[..., Any]) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            if next(count) % 5 == 0:
                raise ConnectionError("reset by peer")
            return real(*arguments)

        return request

    for name in ("_put", "_get", "_find"):
        monkeypatch.setattr(Remote, name, unsteady(getattr(Remote, name)))
    keep = dataclasses.replace(TRAINING.keep, remote=bucket, asynchronous=True)
    training = dataclasses.replace(TRAINING, keep=keep)
    for name in ("one", "two", "whole"):
        (tmp_path / name).mkdir()
    session(tmp_path / "one", 5, training=training)
    kept = [path.name for path in checkpoints(tmp_path / "one")]
    assert [*Remote(bucket).checkpoints()] == kept
    shutil.rmtree(tmp_path / "one")
    assert session(tmp_path / "two", training=training).steps == 14
    session(tmp_path / "whole")
    one, other = (torch.load(tmp_path / name / "final.pt") for name in ("whole", "two"))
    assert all(torch.equal(other[name], weight) for name, weight in one.items())
    Remote(bucket)._files.rm(f"{bucket}/step-14/manifest.json")
    assert "step-14" not in Remote(bucket).checkpoints()
