"""Documents at URLs: the same as on a disk, also where requests fail."""

from __future__ import annotations

import gzip
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec", reason="needs the extra 'remote'")

from bothways.core import urls
from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.urls import Url, find_files, is_url, open_url
from bothways.data import hub_rows
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.documents import read_documents
from bothways.data.hub_rows import HubData, parse_hub_name, without_revision
from bothways.data.tables import open_table
from bothways.text.tokenizer import Tokenizer
from flaky_store import FlakyStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyStore]]:
    monkeypatch.setattr(urls, "WAITS", (0.0,) * 5)
    FlakyStore.clear()
    yield FlakyStore
    FlakyStore.clear()


def lines(count: int = 2000) -> list[str]:
    draws = random.Random(0)
    return ["".join(draws.choices("abcdefgh ", k=200)).strip() + "." for _ in range(count)]


def test_a_url_has_the_parts_of_a_name() -> None:
    assert is_url("s3://bucket/a.txt")
    assert is_url("simplecache::https://host/a.txt")
    assert not any(map(is_url, ("a.txt", "hub:owner/name", "C:\\a.txt", "/a/b://c", "-")))
    url = Url("https://host/wiki.txt.gz?download=1#top")
    assert (url.name, url.stem, url.suffix) == ("wiki.txt.gz", "wiki.txt", ".gz")
    assert Url("s3://bucket/a?b.txt").suffix == ".txt"
    assert str(Url("s3://bucket/") / "a") == "s3://bucket/a"


def test_documents_of_a_flaky_store_are_those_of_a_folder(
    store: type[FlakyStore], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    texts = lines()
    files = {
        "a.txt": "\n".join(texts).encode(),
        "b.txt.gz": gzip.compress("\n".join(texts[::-1]).encode()),
        "deeper/c.jsonl": b"\n".join(b'{"text": "%s"}' % text.encode() for text in texts[:50]),
        "deeper/wiki_00": b'<doc title="T">\nT\nOne. Two.\n</doc>\n',
    }
    (tmp_path / "deeper").mkdir()
    parquet.write_table(
        Table.from_pylist([{"text": text} for text in texts]), tmp_path / "d.parquet"
    )
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for file in (*files, "d.parquet"):
        store.files[f"bucket/{file}"] = (tmp_path / file).read_bytes()
    store.files["bucket/.hidden/e.txt"] = b"no"
    store.files["bucket/notes.pdf"] = b"no"
    here = [document.text for document in read_documents([str(tmp_path)])]
    reader = read_documents(["flaky://bucket"])
    assert [document.text for document in reader] == here
    assert len(here) == 3 * len(texts) + 51
    assert reader.total == sum(map(len, store.files.values())) - 4  # less those left out
    assert 0.9 * reader.total < reader.position <= reader.total
    some = [document.text for document in read_documents(["flaky://bucket/*.txt*"])]
    assert some == texts + texts[::-1]


def test_the_name_of_a_hub_data_set_may_have_a_revision() -> None:
    assert parse_hub_name("hub:a/b@v1.0:en:dev") == ("a/b", "v1.0", "en", "dev")
    assert parse_hub_name("hub:a/b") == ("a/b", None, None, "train")
    assert without_revision("hub:a/b@v1.0:en:dev") == "hub:a/b:en:dev"
    assert without_revision("a@b:c.txt") == "a@b:c.txt"
    with pytest.raises(DataError, match="hub:a/b@: is not the name of a Hub data set"):
        parse_hub_name("hub:a/b@")


def test_a_file_goes_on_at_the_byte_where_a_request_failed(store: type[FlakyStore]) -> None:
    data = random.Random(1).randbytes(2_000_000)
    store.files["bucket/data"] = data
    with open_url(Url("flaky://bucket/data")) as file:
        assert file.read() == data
        assert store.read == len(data)  # nothing twice
        file.seek(-10, 2)
        assert file.read() == data[-10:]
    assert next(store.count) > 15


def test_a_file_that_is_cut_short_or_changes_meanwhile_is_an_error(
    store: type[FlakyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.every, store.files["bucket/data"] = 0, bytes(300_000)
    with open_url(Url("flaky://bucket/data")) as file:
        file.read(10)
        monkeypatch.setattr(store, "cat_file", lambda *_, **__: b"")
        with pytest.raises(ResourceError, match=r"ended after 131,072 of 300,000 bytes \(6 att"):
            file.read()
    monkeypatch.undo()
    with open_url(Url("flaky://bucket/data")) as file:
        file.read(10)
        store.files["bucket/data"], store.every = b"1" * 300_000, 1
        calls = itertools.count()
        monkeypatch.setattr(store, "_request", lambda self: 1 / next(calls))
        with pytest.raises(DataError, match=r"^flaky://bucket/data: has changed while it was read"):
            file.read()


def test_the_error_after_the_last_attempt_says_what_and_where(store: type[FlakyStore]) -> None:
    store.files["bucket/a.txt"], store.every = b"One.\n", 1
    with pytest.raises(ResourceError) as caught:
        read_documents(["flaky://bucket/a.txt"])
    assert str(caught.value).splitlines() == [
        "flaky://bucket/a.txt: asking for the file: the connection was reset (6 attempts)",
        "  Check the connection and the rights, and run the same command again.",
    ]


def test_mistakes(store: type[FlakyStore], monkeypatch: pytest.MonkeyPatch) -> None:
    store.files |= {"bucket/a.txt": b"", "bucket/b.pdf": b"x", "bucket/c.txt": b"A.\n"}

    def failure(name: str) -> str:
        with pytest.raises(DataError) as caught:
            [*read_documents([name])]
        return str(caught.value)

    assert "flaky://bucket/none.txt: no such file or folder" in failure("flaky://bucket/none.txt")
    assert "flaky://bucket/a.txt: is an empty file" in failure("flaky://bucket/a.txt")
    assert "unsupported file type '.pdf'" in failure("flaky://bucket/b.pdf")
    assert "names no file that can be read" in failure("flaky://bucket/*.md")
    with pytest.raises(DataError, match=r"none.csv: no such file"):
        open_table("flaky://bucket/none.csv")
    with pytest.raises(ConfigError, match=r"Protocol not known: gopher"):
        read_documents(["gopher://hole/a.txt"])

    def absent(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(ResourceError, match=r'Install s3fs to access S3\n.*"bothways\[remote\]"'):
        read_documents(["s3://bucket/a.txt"])


def test_memory_and_local_files_are_stores_too(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://texts/a.txt", "wb") as file:
        file.write(b"One.\nTwo.\n")
    (tmp_path / "a.txt").write_text("One.\nTwo.\n", "utf8")
    for name in ("memory://texts/a.txt", "memory://texts", f"file://{tmp_path}/*.txt"):
        assert [document.text for document in read_documents([name])] == ["One.", "Two."]
    assert find_files(Url("memory://texts/b.txt")) is None


def test_a_corpus_of_a_url_is_that_of_the_file_and_notices_other_text(
    store: type[FlakyStore], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = "A dog barks.\n\nA hound is barking. It is late.\n"
    store.files["bucket/a.txt"] = text.encode()
    (tmp_path / "a.txt").write_text(text, "utf8")
    far = build_corpus(
        read_documents(["flaky://bucket/a.txt"]), tokenizer, tmp_path / "far", workers=1
    )
    near = build_corpus(
        read_documents([str(tmp_path / "a.txt")]), tokenizer, tmp_path / "near", workers=1
    )
    assert far.fingerprint == near.fingerprint
    again = build_corpus(
        read_documents(["flaky://bucket/a.txt"]), tokenizer, tmp_path / "far", workers=1
    )
    assert again.manifest == far.manifest
    store.files["bucket/a.txt"] = text.replace("dog", "cat").encode()
    with pytest.raises(DataError, match="holds a corpus of other documents"):
        build_corpus(
            read_documents(["flaky://bucket/a.txt"]), tokenizer, tmp_path / "far", workers=1
        )


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """A data set of three files, in the form of those of the Hub."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        rows = [f'{{"text": "Text {row}."}}' for row in range(10 * number, 10 * number + 10)]
        (folder / f"train-{number}.jsonl").write_text("\n".join(rows), "utf8")
    return folder


def test_a_hub_data_set_goes_on_at_the_row_where_the_connection_failed(
    store: type[FlakyStore], data_set: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="needs the extra 'data'")
    real, opened = HubData.stream, itertools.count()

    class Unsteady:
        """A stream that fails after seven rows."""

        def __init__(self, data: HubData) -> None:
            self._rows = real(data)
            self.state_dict, self.load_state_dict = (
                self._rows.state_dict,
                self._rows.load_state_dict,
            )

        def __iter__(self) -> Iterator[dict[str, str]]:
            fails = [ConnectionError("reset by peer"), EOFError("a client for HTTP")]
            for number, row in enumerate(self._rows):
                if number == 7:
                    raise fails[next(opened) % 2]
                yield row

    monkeypatch.setattr(HubData, "stream", lambda data: Unsteady(data))  # noqa: PLW0108
    monkeypatch.setattr(hub_rows, "NOTED", 3)
    rows = [document.text for document in read_documents([f"hub:{data_set}"])]
    assert rows == [f"Text {number}." for number in range(30)]
    assert next(opened) == 4  # each time from the row that was noted last

    def gone(self: Unsteady) -> Iterator[Any]:
        raise ConnectionError("no route to host")
        yield {}

    monkeypatch.setattr(Unsteady, "__iter__", gone)
    with pytest.raises(ResourceError, match=r"texts: reading row 1: no route to host \(6 attempts"):
        [*read_documents([f"hub:{data_set}"])]
    (data_set / "train-0.jsonl").write_text('{"text": "One."}\n{"text": ', "utf8")
    monkeypatch.undo()
    with pytest.raises(DataError, match="texts: cannot be read: "):
        [*read_documents([f"hub:{data_set}"])]


def test_an_interrupted_build_does_not_continue_with_a_source_that_has_changed(
    store: type[FlakyStore], tokenizer: Tokenizer, tmp_path: Path, data_set: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pytest.importorskip("datasets", reason="needs the extra 'data'")
    inputs, out = ["flaky://bucket/a.txt", f"hub:{data_set}"], tmp_path / "corpus"
    store.files["bucket/a.txt"] = b"A dog barks."

    def build() -> Corpus:
        return build_corpus(read_documents(inputs), tokenizer, out, workers=1)

    with monkeypatch.context() as patch:
        patch.setattr("bothways.data.corpus.merge_shards", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build()
    store.files["bucket/a.txt"] = b"A cat meows."
    with pytest.raises(DataError, match=r"^flaky://bucket/a.txt: has changed since this work"):
        build()
    store.files["bucket/a.txt"] = b"A dog barks."
    status = (data_set / "train-0.jsonl").stat()
    os.utime(data_set / "train-0.jsonl", (1, 1))
    with pytest.raises(DataError, match=r"or name the earlier revision: hub:owner/name@revision"):
        build()
    os.utime(data_set / "train-0.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    reader = read_documents(inputs)
    store.files["bucket/a.txt"] = b"A cat meows."  # before it is opened
    with pytest.raises(DataError, match=r"has changed since this work began.*\n  Run the same"):
        build_corpus(reader, tokenizer, out, workers=1)
    store.files["bucket/a.txt"] = b"A dog barks."
    origins = build().manifest.origins
    assert [origin.name for origin in origins] == inputs
    assert all(origin.modified for origin in origins)
    (data_set / "train-0.jsonl").write_text('{"text": "Another."}', "utf8")
    with pytest.raises(DataError, match="holds a corpus of other documents"):
        build()
