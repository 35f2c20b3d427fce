"""Documents: every kind of file, compressed or not, comes out as it was written; every bad one is named with its line."""

import bz2
import codecs
import gzip
import json
import lzma
import os
import random
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, strategies as st
from pyarrow import parquet

import bothways
from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.data.documents import SNIFFED, Boundary, Document, Origin, read_documents, unwrap
from fake_hub import fake_hub
from heard_progress import Heard

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TWO = "First line.\nSecond line.\n\nAnother document.\n"
WIKI = '<doc id="1" url="u" title="The "Cats" ("Cat")">\nThe "Cats" ("Cat")\n\nCats sleep.\nThey eat.\n\n</doc>\n<doc id="2" title="">\nBare.\n</doc>\n'


def read(path: Path | str, **options: Any) -> list[Document]:
    return list(read_documents([str(path)], **options))


def texts(path: Path | str, **options: Any) -> list[str]:
    return [document.text for document in read(path, **options)]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def failure(path: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **options)
    assert caught.value.fix
    return str(caught.value)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_json_lines_and_wiki_extractor_files_compressed_or_not(tmp_path, suffix):
    compress = COMPRESS[suffix]
    write(tmp_path / f"a.txt{suffix}", compress(TWO.encode()))
    write(
        tmp_path / f"b.jsonl{suffix}",
        compress(b'{"text": "One.\\nTwo.", "n": 1}\n\n{"text": null}\n'),
    )
    write(tmp_path / f"wiki_00{suffix}", compress(WIKI.encode()))
    assert texts(tmp_path / f"a.txt{suffix}") == ["First line.\nSecond line.", "Another document."]
    assert texts(tmp_path / f"b.jsonl{suffix}") == ["One.\nTwo.", ""]
    assert texts(tmp_path / f"wiki_00{suffix}") == ["Cats sleep.\nThey eat.\n", "Bare."]
    assert len(read(tmp_path)) == 6


def test_wiki_extractors_names_tell_nothing_of_its_format(tmp_path):
    rows = b'\n{"id": "1", "title": "Cats", "text": "Cats sleep.\\nThey eat."}\n{"id": "2", "title": "", "text": "Bare."}\n'
    for name, content in (("wiki_00", rows), ("wiki_01.gz", gzip.compress(rows))):
        path = write(tmp_path / name, content)
        expected = [Document("Cats sleep.\nThey eat.", f"{path}:2"), Document("Bare.", f"{path}:3")]
        assert read(path) == expected
    message = failure(tmp_path / "wiki_00", column="body")
    assert "wiki_00:2: has no column 'body'; it has id, title, text" in message
    path = write(tmp_path / "wiki_02", "\n" + TWO)
    assert [document.where for document in read(path)] == [f"{path}:2", f"{path}:5"]
    assert texts(write(tmp_path / "wiki_03", "\n")) == []


def test_where_names_file_and_line(tmp_path):
    path = write(tmp_path / "a.txt", "\n\n" + TWO)
    assert [document.where for document in read(path)] == [f"{path}:3", f"{path}:6"]
    path = write(tmp_path / "b.docs", WIKI)
    assert [document.where for document in read(path)] == [f"{path}:1", f"{path}:8"]


@pytest.mark.parametrize(("boundary", "expected"), [
    (Boundary.AUTO, ["First line.\nSecond line.", "Another document."]),
    (Boundary.BLANK, ["First line.\nSecond line.", "Another document."]),
    (Boundary.LINE, ["First line.", "Second line.", "Another document."]),
    (Boundary.FILE, ["First line.\nSecond line.\n\nAnother document."]),
])  # fmt: skip
def test_what_ends_a_document(tmp_path, boundary, expected):
    assert texts(write(tmp_path / "a.txt", TWO), boundary=boundary) == expected


def test_without_a_blank_line_inside_each_line_is_a_document(tmp_path):
    assert texts(write(tmp_path / "a.txt", "\n\nOne.\nTwo.\n \t\n")) == ["One.", "Two."]
    assert texts(write(tmp_path / "a.txt", "One.\n \t\nTwo.\nThree.")) == ["One.", "Two.\nThree."]
    late = "x" * SNIFFED + "\nOne.\n\nTwo.\n"
    # A blank line this late does not count.
    assert texts(write(tmp_path / "a.txt", late))[1:] == ["One.", "Two."]
    assert texts(write(tmp_path / "a.txt", late), boundary=Boundary.BLANK)[1:] == ["Two."]


def test_hard_wrapped_lines_are_joined_where_documents_have_paragraphs(tmp_path):
    long = "The slanting rays of afternoon sunshine, pouring through the"
    book = f"CHAPTER I\n\n{long}\nConvent, lay upon\nthe flags.\nShe stepped out.\nNuns\nTwo\n"
    joined = f"CHAPTER I\n\n{long} Convent, lay upon the flags.\nShe stepped out.\nNuns\nTwo"
    assert texts(write(tmp_path / "a.txt", book), boundary=Boundary.FILE) == [joined]
    assert texts(write(tmp_path / "a.docs", f'<doc title="t">\n{book}</doc>\n')) == [joined]
    assert unwrap("a" * 100 + "\nNext") == "a" * 100 + " Next"
    assert unwrap("a" * 101 + "\nNext") == "a" * 101 + "\nNext"
    assert unwrap("за\nгородом\nÄpfel\nüber 二\n三") == "за городом\nÄpfel über 二\n三"
    assert unwrap("б" * 50 + "\nПсков") == "б" * 50 + " Псков"
    sentences = texts(write(tmp_path / "b.txt", book), boundary=Boundary.BLANK)[1]
    assert sentences.startswith(long + "\n"), "a line is a sentence"


def test_line_ends_marks_and_nul_characters(tmp_path):
    content = codecs.BOM_UTF8 + b"Eins.\r\nZwei.\r\n\r\nDrei.\r\n"
    assert texts(write(tmp_path / "a.txt", content)) == ["Eins.\nZwei.", "Drei."]
    assert texts(write(tmp_path / "b.txt", b"x" * 9000 + b"\n\nn\0ul\n")) == ["x" * 9000, "nul"]


def test_parquet_row_groups(tmp_path):
    rows = [f"Document {i}." for i in range(3000)] + [None]
    table = pa.table({"body": pa.array(rows, pa.large_string()), "n": list(range(3001))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    found = read(tmp_path / "a.parquet", column="body")
    assert [document.text for document in found] == [row or "" for row in rows]
    assert found[700].where == f"{tmp_path / 'a.parquet'}:row 701"
    assert "has no column 'text'; it has body, n" in failure(tmp_path / "a.parquet")
    assert "row 1: column 'n' holds int" in failure(tmp_path / "a.parquet", column="n")
    cut = write(tmp_path / "b.parquet", (tmp_path / "a.parquet").read_bytes()[:-100])
    assert "is not a complete Parquet file" in failure(cut)


def test_hub(monkeypatch):
    asked: list[tuple[Any, ...]] = []
    errors = {
        "no/such": ValueError("no such data set\nmore"),
        "old/script": RuntimeError("scripts are no longer supported"),
        "no/net": ConnectionError("no network\nat all"),
        "no/cache": PermissionError(13, "Permission denied", "/root/.cache"),
        "no/end": httpx.RemoteProtocolError("Server disconnected"),  # the Hub's client raises it
    }

    def fake(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        if name in errors:
            raise errors[name]
        return iter([{"text": "One.", "n": 1}, {"text": "Two.", "n": 2}])

    fake_hub(monkeypatch, fake)
    assert read("hub:a/b:en:dev")[1] == Document("Two.", "hub:a/b:en:dev:row 2")
    assert texts("hub:a/b:en") == texts("hub:a/b") == texts("hub:a/b::dev") == ["One.", "Two."]
    splits = [("en", "dev"), ("en", "train"), (None, "train"), (None, "dev")]
    assert asked == [("a/b", config, split, True) for config, split in splits]
    assert read_documents(["hub:a/b"]).origins == (Origin("hub:a/b", modified="0a1b2c"),)
    assert "hub:no/such: cannot be read: no such data set\n" in failure("hub:no/such")
    assert "scripts are no longer supported" in failure("hub:old/script")
    assert "hub:no/net: cannot be read: no network\n" in failure("hub:no/net")
    assert "HF_HOME" in failure("hub:no/cache")
    message = failure("hub:a/b", column="body")
    assert "hub:a/b:row 1: has no column 'body'; it has text, n" in message
    assert "not the name of a Hub data set" in failure("hub:a/b:c:d:e")
    assert "not the name of a Hub data set" in failure("hub:")
    opening = lambda name, *_, **__: fake(name, None, split="", streaming=True)  # noqa: E731
    monkeypatch.setattr("datasets.load_dataset_builder", opening)
    assert "hub:no/end: cannot be read: Server disconnected\n" in failure("hub:no/end")


def test_folders_globs_and_repetitions_come_in_order_and_once(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.txt", "a.jsonl", "sub/c.txt", ".hidden/d.txt", ".e.txt"):
        write(tmp_path / name, f'{{"text": "{name}"}}' if name.endswith("jsonl") else name)
    write(tmp_path / "notes.pdf", "%PDF")
    assert texts(tmp_path) == ["a.jsonl", "b.txt", "sub/c.txt"]
    assert texts(tmp_path / "**" / "*.txt") == ["b.txt", "sub/c.txt"]
    inputs = [str(tmp_path / "sub"), str(tmp_path), str(tmp_path / "b.txt")]
    found = [document.text for document in read_documents(inputs)]
    assert found == ["sub/c.txt", "a.jsonl", "b.txt"]
    [note] = read_documents(inputs).notes
    assert note == f"note: {tmp_path}: 1 file not read: notes.pdf"
    for number in range(6):
        write(tmp_path / "sub" / f"{number}.asc", "text")
    note = read_documents([str(tmp_path / "sub")]).notes[0]
    assert note.endswith("sub: 6 files not read: 0.asc, 1.asc, 2.asc, 3.asc, 4.asc and 1 more")


@pytest.mark.parametrize(("name", "content", "column"), [
    ("a.TXT", "One.\nTwo.\n", "text"),
    ("a.TXT.GZ", gzip.compress(b"One.\nTwo.\n", mtime=0), "text"),
    ("a.JSONL", '{"text": "One."}\n{"text": "Two."}\n', "text"),
    ("a.json", '[{"text": "One.", "n": 1}, {"text": "Two.", "n": 2}]', "text"),
    ("a.csv", "text,n\nOne.,1\nTwo.,2\n", "text"),
    ("a.tsv", "One.\t1\nTwo.\t2\n", "0"),
])  # fmt: skip
def test_the_suffix_tells_the_kind_also_in_capitals(tmp_path, name, content, column):
    write(tmp_path / name, content)
    for source in (tmp_path, tmp_path / name):
        assert texts(source, column=column) == ["One.", "Two."]


def test_a_corpus_and_a_vocabulary_name_the_files_of_a_folder_that_they_do_not_read(
    tmp_path, tokenizer
):
    (tmp_path / "text").mkdir()
    write(tmp_path / "text" / "a.txt", "The cat sat on the mat.")
    write(tmp_path / "text" / "b.asc", "The dog sat.")
    heard = Heard()
    bothways.build_corpus(tmp_path / "text", tokenizer, tmp_path / "corpus", progress=heard)
    bothways.train_tokenizer(tmp_path / "text", size=60, progress=heard)
    assert [text for text in heard.messages if "not read: b.asc" in text] == heard.messages[:2]


def test_rows_and_paths_are_texts_and_a_name_among_texts_is_none(tmp_path, tokenizer, monkeypatch):
    import pandas

    monkeypatch.chdir(tmp_path)
    texts = [f"The {word} sleeps." for word in ("cat", "dog", "cow")]
    frame = pandas.DataFrame({"body": [*texts, None]})
    write(tmp_path / "a.txt", "\n".join(texts))
    for inputs, column in ((frame, "body"), (iter(frame.to_dict("records")), "body")):
        corpus = bothways.build_corpus(inputs, tokenizer, "corpus", column=column, workers=1)
        assert len(corpus) == 3
        shutil.rmtree("corpus")
    learned = bothways.train_tokenizer(texts, size=60).backend.get_vocab()
    for inputs, column in ((frame, "body"), ([Path("a.txt")], "text")):
        same = bothways.train_tokenizer(inputs, size=60, column=column)
        assert same.backend.get_vocab() == learned
    with pytest.raises(DataError, match=r"^text 1: 'a.txt' is the name of a file\n.*Path"):
        bothways.train_tokenizer(["a.txt"])


def test_the_splits_of_a_data_set_are_no_languages():
    import datasets

    splits = datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": ["The cat sleeps."]}))
    with pytest.raises(DataError, match="is a DatasetDict of test") as caught:
        bothways.train_tokenizer(splits, size=60)
    assert caught.value.where == "texts"


def test_linked_folders_are_read_once_and_folders_without_permission_are_no_empty_ones(
    tmp_path, monkeypatch
):
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "more").mkdir()
    write(tmp_path / "data" / "sub" / "b.txt", "b")
    write(tmp_path / "more" / "a.txt", "a")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "more")
    for name in ("above", "sub/above"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "data")
    assert texts(tmp_path / "data") == ["a", "b"]
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("link"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ResourceError, match="data/link: permission denied"):
        texts(tmp_path / "data")


def test_settings_that_no_file_has_a_use_for_are_refused(tmp_path):
    text, table = write(tmp_path / "a.txt", TWO), write(tmp_path / "a.jsonl", '{"body": "a"}\n')
    with pytest.raises(ConfigError, match="column: does nothing with plain text"):
        read(text, column="body")
    with pytest.raises(ConfigError, match="boundary: does nothing with tables"):
        read(table, column="body", boundary=Boundary.FILE)
    both = read_documents([str(text), str(table)], column="body", boundary=Boundary.FILE)
    assert [document.text for document in both] == [TWO.removesuffix("\n"), "a"]


def test_a_name_that_is_not_utf8_is_refused_before_the_text_is_read(tmp_path):
    write(tmp_path / os.fsdecode(b"caf\xe9.txt"), TWO)
    assert "has a name that is not UTF-8" in failure(tmp_path)


def test_a_reader_knows_its_files_and_how_far_it_is(tmp_path):
    zipped = gzip.compress(TWO.encode() * 100)
    paths = [write(tmp_path / "a.txt", TWO), write(tmp_path / "b.txt.gz", zipped)]
    reader = read_documents([str(path) for path in paths], boundary=Boundary.BLANK)
    status = [(str(path), path.stat()) for path in paths]
    assert reader.origins == tuple(Origin(name, s.st_size, s.st_mtime_ns) for name, s in status)
    assert reader.settings == {"column": "text", "boundary": "blank"}
    assert reader.total == sum(path.stat().st_size for path in paths)
    assert reader.position == 0
    positions = [reader.position for _ in reader]
    assert positions == sorted(positions)
    assert reader.position == reader.total


@pytest.mark.parametrize(("name", "content", "location"), [
    ("nothing.txt", None, ""),
    ("*.txt", None, ""),
    (".", None, ""),
    ("a.txt", b"", ""),
    ("a.pdf", b"x", ""),
    ("a.parquet.gz", b"x", ""),
    ("a.jsonl", b'["a"]\n', ":1"),
    ("a.jsonl", b'\n{"body": "a", "id": 3}\n', ":2"),
    ("a.jsonl", b'{"text": 3}\n', ":1"),
    ("a.docs", b"<doc id=1>\nText.\n", ":2"),
    ("a.docs", b"<doc id=1>\nText.\n<doc id=2>\n", ":3"),
    ("a.docs", b"<doc id=1>\nText.\n</doc>\n\nMore.\n", ":5"),
    ("a.txt.zst", b"not zstd at all", ""),
])  # fmt: skip
def test_damaged_file_is_an_error_at_its_line(tmp_path, name, content, location):
    path = tmp_path / name if content is None else write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value.where) == f"{path}{location}"
    assert caught.value.fix


@pytest.mark.parametrize(("name", "broken", "error", "message"), [
    ("a.txt", "pathlib.Path.open", PermissionError(13, "Permission denied"), "permission denied"),
    # Of a folder above it.
    ("a.txt", "pathlib.Path.is_dir", PermissionError(13, "Permission denied"), "permission denied"),
    ("a.txt", "bothways.data.text_io._check_head", OSError(5, "Input/output error"), "cannot be read: Input/output error"),
    ("a.parquet", "pyarrow.parquet.ParquetFile", OSError(5, "Input/output error"), "cannot be read: Input/output error"),
])  # fmt: skip
def test_errors_of_the_disk_are_not_called_damage(
    tmp_path, monkeypatch, name, broken, error, message
):
    def fail(*_: Any) -> None:
        raise error

    path = write(tmp_path / name, TWO)
    monkeypatch.setattr(broken, fail)
    with pytest.raises(ResourceError, match=rf"{name}: {message}"):
        read(path)


LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1).filter(
    lambda line: line.strip() != "" and not line.startswith(("<doc ", "\ufeff"))
)


@given(st.lists(st.lists(LINE, min_size=1), min_size=1))
def test_documents_between_blank_lines_come_back(tmp_path_factory, documents):
    expected = ["\n".join(lines) for lines in documents]
    path = write(tmp_path_factory.getbasetemp() / "property.txt", "\n\n".join(expected))
    assert texts(path, boundary=Boundary.BLANK) == expected


@given(st.lists(st.text()))
def test_json_lines_come_back(tmp_path_factory, documents):
    content = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    path = write(tmp_path_factory.getbasetemp() / "property.jsonl", content or "\n")
    assert texts(path) == documents


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    draw = random.Random(0)
    lines = [json.dumps({"text": draw.randbytes(5000).hex()}).encode() + b"\n" for _ in range(100)]
    path = write(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](b"".join(lines)) * 10)  # 10 MB
    tracemalloc.start()
    count = sum(1 for _ in read_documents([str(path)]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1000
    assert peak < 2e6


@pytest.mark.parametrize("boundary", [Boundary.AUTO, Boundary.FILE])
def test_a_text_that_is_too_long_becomes_several_documents(tmp_path, boundary, monkeypatch):
    monkeypatch.setenv("BOTHWAYS_MAX_LINE_BYTES", "10")
    path = write(tmp_path / "a.txt", "one two three four\nfünfundzwanzig\n")
    assert texts(path, boundary=boundary) == ["one two ", "three four", "fünfundzw", "anzig"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_hold_text(tmp_path):
    os.mkfifo(tmp_path / "63")
    thread = threading.Thread(target=(tmp_path / "63").write_text, args=(TWO,))
    thread.start()
    assert len(read(tmp_path / "63")) == 2
    thread.join()
