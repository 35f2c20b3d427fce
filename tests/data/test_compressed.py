"""Compressed files of one or several streams: every byte is read, or the file is refused."""

import functools
import lzma
from pathlib import Path

import pytest
from test_documents import COMPRESS

from bothways.core.errors import DataError
from bothways.data.documents import read_documents
from bothways.data.tables import open_table
from bothways.data.text_io import read_lines

LONG = b"".join(b"row %d of the long stream\n" % number for number in range(10_000))
long_stream = functools.cache(lambda suffix: COMPRESS[suffix](LONG))

suffixes = pytest.mark.parametrize("suffix", list(filter(None, COMPRESS)))


def lines(path: Path) -> list[str]:
    return [line for _, line in read_lines(path)]


@suffixes
def test_streams_of_different_length_are_read_to_the_end(suffix, tmp_path):
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESS[suffix]
    path.write_bytes(compress(b"one\n") + long_stream(suffix) + compress(b"") + compress(b"last\n"))
    read = lines(path)
    assert read[0] == "one"
    assert read[-1] == "last"
    assert len(read) == 10_002


@suffixes
def test_padding_with_zeros_is_skipped(suffix, tmp_path):
    path, compress = tmp_path / f"a.txt{suffix}", COMPRESS[suffix]
    path.write_bytes(compress(b"one\n") + bytes(4096) + compress(b"two\n") + bytes(512))
    assert lines(path) == ["one", "two"]


@suffixes
@pytest.mark.parametrize("damage", ["head", "middle", "cut", "garbage"])
def test_damage_after_the_first_stream_names_the_byte(damage, suffix, tmp_path):
    first, second = COMPRESS[suffix](b"one\n" * 300), long_stream(suffix)
    data = {
        "head": b"?" + second[1:],
        "middle": second[: len(second) // 2] + b"?" * 40 + second[len(second) // 2 + 40 :],
        "cut": second[:-5],
        "garbage": b"<html>not found</html>",
    }[damage]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(first + data)
    with pytest.raises(DataError, match=f"byte {len(first)} on") as caught:
        lines(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("suffix", "content"), [
    ("jsonl", b'{"text": "one"}\n'), ("json", b'[{"text": "one"}]'), ("txt", b"one\n"),
    ("tsv", b"text\tlabel\none\tx\n"), ("csv", b"text,label\none,x\n"),
])  # fmt: skip
def test_each_reader_refuses_a_damaged_second_stream(suffix, content, tmp_path):
    path = tmp_path / f"a.{suffix}.xz"
    path.write_bytes(lzma.compress(content) + b"?" + lzma.compress(content)[1:])
    with pytest.raises(DataError, match="damaged"):
        list(open_table(str(path)).rows)
    with pytest.raises(DataError, match="damaged"):
        list(read_documents([str(path)]))


def test_zstandard_skippable_frames_are_skipped(tmp_path):
    compress, path = COMPRESS[".zst"], tmp_path / "a.txt.zst"
    skippable = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    path.write_bytes(skippable + compress(b"one\n") + skippable + compress(b"two\n"))
    assert lines(path) == ["one", "two"]
