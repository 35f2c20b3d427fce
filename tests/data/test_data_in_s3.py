"""Text and corpora on an S3 server on this machine, which fails one request in five (`make test-elastic`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bothways.core import urls
from bothways.core.part_cache import Cache, fetch_ahead
from bothways.core.source import Cursor
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.corpus_source import CorpusSource
from bothways.data.documents import read_documents
from bothways.data.epoch_order import Windows
from bothways.data.segments import FullSentences
from bothways.text.tokenizer import Tokenizer
from far_corpus import cut
from s3_server import s3_server

pytestmark = [pytest.mark.elastic, pytest.mark.filterwarnings("default")]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server(monkeypatch):
        yield "s3://bucket"


def test_a_corpus_of_text_in_s3_and_sequences_of_a_corpus_in_s3(
    bucket: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    store, count = s3fs.S3FileSystem(), itertools.count(1)
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        lines = (f"A dog barks. A hound is barking. {'It is late. ' * n}" for n in range(60))
        (tmp_path / "text" / name).write_text("\n".join(f"{name} {line}" for line in lines), "utf8")
    store.put(f"{tmp_path}/text", f"{bucket}/text", recursive=True)
    monkeypatch.setattr(urls, "WAITS", (0.0,) * 5)

    def unsteady(real: Callable[..., Any]) -> Callable[..., Any]:
        async def request(*arguments: Any, **options: Any) -> Any:
            if next(count) % 5 == 0:
                raise ConnectionError("reset by peer")
            return await real(*arguments, **options)

        return request

    real = s3fs.S3FileSystem._call_s3
    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", unsteady(real))
    built = [
        build_corpus(read_documents([place]), tokenizer, tmp_path / name, workers=1)
        for place, name in ((f"{bucket}/text", "far"), (str(tmp_path / "text"), "near"))
    ]
    assert built[0].fingerprint == built[1].fingerprint
    assert all(origin.modified for origin in built[0].manifest.origins)
    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", real)
        cut(tmp_path / "near", 256)
        store.put(f"{tmp_path}/near", f"{bucket}/corpus", recursive=True)
    begun = next(count)
    remote = Corpus.open(f"{bucket}/corpus", Cache(tmp_path / "cache", 12_000))
    remote.verify()
    streams = []
    for text in (remote, built[1]):
        source = CorpusSource(
            text, tokenizer.template, FullSentences(24), np.arange(len(text)), 1, None,
            Windows(documents=40, run=10),
        )  # fmt: skip
        epoch = itertools.takewhile(lambda pair: pair[1].epoch < 1, source.read(Cursor()))
        streams.append([source.build(plan).ids.tolist() for plan, _ in epoch])
    assert streams[0] == streams[1]
    while not fetch_ahead().idle:
        pass
    assert next(count) - begun > 100
