"""Files at URLs, by fsspec's store in memory, and data sets of the Hub that change or fail."""

import gzip
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.files import is_url
from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import read_documents
from bothways.data.tables import HubData, open_table, parse_hub_name, without_revision
from bothways.data.text_io import file_at


def store(name: str, data: bytes) -> str:
    url = f"memory://texts/{name}"
    with fsspec.open(url, "wb") as file:
        file.write(data)
    return url


def test_is_url():
    assert is_url("s3://bucket/a.txt")
    assert is_url("simplecache::https://host/a.txt")
    assert not any(map(is_url, ("a.txt", "hub:owner/name", "C:\\a.txt", "/a/b://c", "-")))


def test_documents_and_tables_at_urls_equal_local_ones(tokenizer, tmp_path):
    text = "A dog barks.\n\nA hound is barking. It is late.\n"
    names = [
        store("a.txt", text.encode()),
        store("b.txt.gz", gzip.compress(text.encode())),
        store("c.jsonl", b'{"text": "One."}\n{"text": "Two."}\n'),
    ]
    table = pyarrow.Table.from_pylist([{"text": "One."}, {"text": "Two."}])
    parquet.write_table(table, tmp_path / "d.parquet")
    names.append(store("d.parquet", (tmp_path / "d.parquet").read_bytes()))
    assert [row.values["text"] for row in open_table(names[-1]).rows] == ["One.", "Two."]
    texts = [document.text for document in read_documents(names)]
    assert texts == ["A dog barks.", "A hound is barking. It is late."] * 2 + ["One.", "Two."] * 2
    (tmp_path / "a.txt").write_text(text, "utf8")

    def build(source: str, out: str) -> Corpus:
        return write_corpus(read_documents([source]), tokenizer, tmp_path / out, workers=1)

    far = build(names[0], "far")
    assert far.fingerprint == build(str(tmp_path / "a.txt"), "near").fingerprint
    store("a.txt", text.replace("dog", "cat").encode())
    with pytest.raises(DataError, match="holds a corpus of other documents"):
        build(names[0], "far")


def test_errors_name_the_url(tmp_path, monkeypatch):
    store("b.pdf", b"x")
    with pytest.raises(DataError, match=r"memory://texts/b.pdf: unsupported file type '.pdf'"):
        read_documents(["memory://texts/b.pdf"])
    with pytest.raises(DataError, match=r"memory://texts/\*.txt: is a pattern of URLs"):
        read_documents(["memory://texts/*.txt"])
    for read in (lambda url: [*read_documents([url])], open_table):
        with pytest.raises(ResourceError, match=r"memory://texts/none.csv: cannot be read"):
            read("memory://texts/none.csv")
    with pytest.raises(ResourceError, match=r"gopher://hole/a.txt: .*Protocol not known: gopher"):
        [*read_documents(["gopher://hole/a.txt"])]
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ResourceError, match=r's3://a/b.txt: .*s3fs.*\n.*install "bothways\[remote'):
        [*read_documents(["s3://a/b.txt"])]
    with pytest.raises(DataError, match=r"s3://a/b.txt: no such file\n  Download it"):
        file_at("s3://a/b.txt")
    damaged = store("cut.txt.gz", gzip.compress(b"One.\n" * 1000)[:-9])
    with pytest.raises(DataError, match=r"memory://texts/cut.txt.gz: the compressed file is dam"):
        [*read_documents([damaged])]
    with pytest.raises(DataError, match=r"memory://texts/cut.parquet: is not a complete Parquet"):
        open_table(store("cut.parquet", b"PAR1 no"))
    with pytest.raises(ConfigError, match=r"s3://bucket/corpus: is a URL, not a folder"):
        Corpus.open("s3://bucket/corpus")


def test_the_name_of_a_hub_data_set_may_have_a_revision():
    assert parse_hub_name("hub:a/b@v1.0:en:dev") == ("a/b", "v1.0", "en", "dev")
    assert parse_hub_name("hub:a/b") == ("a/b", None, None, "train")
    assert without_revision("hub:a/b@v1.0:en:dev") == "hub:a/b:en:dev"
    assert without_revision("a@b:c.txt") == "a@b:c.txt"
    with pytest.raises(DataError, match="hub:a/b@: is not the name of a Hub data set"):
        parse_hub_name("hub:a/b@")


@pytest.fixture
def data_set(tmp_path) -> Path:
    """A data set of three files, in the form of those of the Hub."""
    pytest.importorskip("datasets", reason="needs the extra 'data'")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        rows = [f'{{"text": "Text {row}."}}' for row in range(10 * number, 10 * number + 10)]
        (folder / f"train-{number}.jsonl").write_text("\n".join(rows), "utf8")
    return folder


def test_a_hub_data_set_that_fails_says_at_which_row(data_set, monkeypatch):
    rows = HubData(f"hub:{data_set}").rows()
    assert [row["text"] for row in rows] == [f"Text {number}." for number in range(30)]

    def failing(data: HubData) -> Iterator[Any]:
        yield {"text": "Text 0."}
        raise ConnectionError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(HubData, "stream", property(failing))
        with pytest.raises(ResourceError, match=r"texts: reading row 2: no route to host"):
            [*read_documents([f"hub:{data_set}"])]
    (data_set / "train-0.jsonl").write_text('{"text": "One."}\n{"text": ', "utf8")
    with pytest.raises(DataError, match="texts: cannot be read: "):
        [*read_documents([f"hub:{data_set}"])]


def test_an_interrupted_build_does_not_continue_with_a_data_set_that_has_changed(
    tokenizer, tmp_path, data_set, monkeypatch
):
    inputs, out = [f"hub:{data_set}"], tmp_path / "corpus"
    seconds = itertools.count(1)

    def build() -> Corpus:
        return write_corpus(read_documents(inputs), tokenizer, out, workers=1)

    def touch() -> None:
        os.utime(data_set / "train-0.jsonl", (second := next(seconds), second))

    status = (data_set / "train-0.jsonl").stat()
    with monkeypatch.context() as patch:
        patch.setattr("bothways.data.shards.merge_shards", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build()
    touch()
    with pytest.raises(DataError, match=r"or name the earlier revision: hub:owner/name@revision"):
        build()
    os.utime(data_set / "train-0.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    reader = read_documents(inputs)
    touch()  # before it is opened
    with pytest.raises(DataError, match=r"has changed since this work began.*\n  Run the same"):
        write_corpus(reader, tokenizer, out, workers=1)
    os.utime(data_set / "train-0.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert all(origin.modified for origin in build().manifest.origins)
    (data_set / "train-0.jsonl").write_text('{"text": "Another."}', "utf8")
    with pytest.raises(DataError, match="holds a corpus of other documents"):
        build()
