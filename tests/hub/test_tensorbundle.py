"""TensorFlow's checkpoint format: what is written is read, and whatever is wrong with a file is said, never believed."""

import base64
import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from bothways.core.errors import FolderError, ResourceError
from bothways.hub.convert.tensorflow import open_bundle
from bundle_writer import MAGIC, Table, entry, header, masked_crc, shape_of, table, write_checkpoint
from protobuf_writer import field, varint

REAL_INDEX = (
    "AAAGCAEaAggBAAEPYggKEgQSAggCKAI1X7DOgQAFEWVtcHR5CAESBhIAEgIIBCACNdjqgqIAAxVmMTYIExIIEgIIAhICCAIgAigINeBlr7MBAg"
    "02NAgCEgAgCigINYvyV0AAAxFpMzIIAxIEEgIIBSASKBQ1cAP4LAAAAAABAAAAAKcgU5EAAAAAAQAAAADA8qGwAAEDagCBAQAAAAABAAAAAEdP"
    "OJKGAQiTAQ8AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAV/uAiyR1R9s="
)
REAL_DATA = "AQAAPAA8ADwAPAAAAAAAAARAAAAAAAEAAAACAAAAAwAAAAQAAAA="
"""A checkpoint that TensorFlow 2.21 wrote with `tf.compat.v1.train.Saver`, in base 64."""

BYTES = np.arange(4, dtype=np.float32).tobytes()
GOOD = entry(1, shape_of(2, 2), 0, 0, 16, masked_crc(BYTES))
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def place(folder: Path, index: bytes, data: bytes = BYTES) -> Path:
    (folder / "a.ckpt.data-00000-of-00001").write_bytes(data)
    file = folder / "a.ckpt.index"
    file.write_bytes(index)
    return file


def read(file: Path) -> dict[str, Tensor]:
    bundle = open_bundle(file)
    return {name: bundle.read(name) for name in bundle.shapes}


def test_what_tensorflow_wrote_is_read(tmp_path):
    found = read(place(tmp_path, base64.b64decode(REAL_INDEX), base64.b64decode(REAL_DATA)))
    wanted = {
        "b": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "f16": torch.ones(2, 2, dtype=torch.float16),
        "f64": torch.tensor(2.5, dtype=torch.float64),
        "i32": torch.arange(5, dtype=torch.int32),
    }
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


NAMES = st.text(st.sampled_from("ab/_0"), min_size=1, max_size=12)


@given(st.dictionaries(NAMES, st.lists(st.integers(0, 3), max_size=3), max_size=30))
@QUICK
def test_all_that_is_written_is_read(tmp_path, shapes):
    generator = np.random.default_rng(len(shapes))
    kinds = ("float32", "float64", "int32", "int64", "float16")
    wanted = {
        name: (generator.random(shape) * 99).astype(kinds[at % 5])
        for at, (name, shape) in enumerate(shapes.items())
    }
    write_checkpoint(tmp_path / "m.ckpt", wanted, shards=3)
    found = read(tmp_path / "m.ckpt.index")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name].numpy(), array)
        assert found[name].numpy().dtype == array.dtype


def toy(folder: Path) -> Path:
    arrays: dict[str, Any] = {
        "bert/a/kernel": np.float32([[1, 2], [3, 4]]),
        "bert/a/bias": np.float32([5, 6]),
        "global_step": np.array(7, dtype=np.int64),
    }
    write_checkpoint(folder / "m.ckpt", arrays)
    return folder / "m.ckpt.index"


ENDINGS = st.sampled_from([".index", ".data-00000-of-00001"])


@given(ENDINGS, st.integers(0, 10**6), st.integers(1, 255))
@QUICK
def test_a_flipped_byte_is_refused_or_without_effect(tmp_path, which, at, change):
    file = toy(tmp_path)
    wanted = read(file)
    spoilt = tmp_path / f"m.ckpt{which}"
    data = bytearray(spoilt.read_bytes())
    data[at % len(data)] ^= change
    spoilt.write_bytes(data)
    try:
        found = read(file)
    except FolderError:
        return
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@given(ENDINGS, st.floats(0, 1, exclude_max=True))
@QUICK
def test_a_truncated_file_is_refused(tmp_path, which, share):
    file = toy(tmp_path)
    spoilt = tmp_path / f"m.ckpt{which}"
    data = spoilt.read_bytes()
    spoilt.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(FolderError):
        read(file)


LARGE = st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**69])
NUMBERS = st.one_of(st.integers(0, 40), LARGE)
MESSAGES = st.one_of(
    st.binary(max_size=40),
    st.builds(
        entry, NUMBERS, st.lists(NUMBERS, max_size=4).map(lambda sizes: shape_of(*sizes)), NUMBERS, NUMBERS, NUMBERS,
        st.integers(0, 2**32 - 1),
    ),
)  # fmt: skip


def with_block(block: bytes, index: bytes | None = None) -> bytes:
    """An index of one block; None: the block about the blocks is as it should be."""
    made = Table()
    handle = made.raw_block(block)
    if index is None:
        return made.finish([(b"z", handle)])
    footer = made.block([]) + made.raw_block(index)
    return made.data + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


SOUND = table({b"": header(), b"x": GOOD})
INDEXES = st.one_of(
    st.dictionaries(st.binary(max_size=6), MESSAGES, max_size=4).map(
        lambda entries: table({**entries, b"": header()})
    ),
    MESSAGES.map(lambda first: table({b"x": GOOD, b"": first})),
    st.builds(with_block, st.binary(max_size=60), st.none() | st.binary(max_size=30)),
    st.binary(max_size=40).map(lambda footer: SOUND[:-48] + footer.ljust(40, b"\0") + SOUND[-8:]),
)


@given(INDEXES)
@settings(QUICK, max_examples=75)
def test_an_index_of_any_content_does_no_harm(tmp_path, index):
    with contextlib.suppress(FolderError):
        read(place(tmp_path, index))


def rows(*entries: tuple[bytes, bytes], compression: int = 0) -> bytes:
    """An index with one block of these entries as they are, sorted or not."""
    made = Table()
    return made.finish([(b"z", made.block([(b"", header()), *entries], compression=compression))])


def twice() -> bytes:
    made = Table()
    handle = made.block([(b"", header()), (b"x", GOOD)])
    return made.finish([(b"x", handle), (b"y", handle)])


END = struct.pack("<II", 0, 1)
HUGE = varint(2**70 - 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rows((b"x", GOOD))[:-1] + b"\0", "does not end like an index"),
        (lambda: b"", "does not end like an index"),
        (lambda: rows((b"x", GOOD), compression=1), "the block at 0 is compressed"),
        (lambda: b"x" + rows((b"x", GOOD))[1:], "the block at 0 does not match its checksum"),
        (twice, "its blocks overlap"),
        (lambda: Table().finish([(b"z", varint(0) + varint(99))]), "the block at 0 ends beyond the others"),
        (lambda: with_block(b""), "the block at 0 is too short for its 0 restart points"),
        (lambda: with_block(struct.pack("<I", 2**32 - 1)), "is too short for its 4294967295 restart points"),
        (lambda: with_block(b"\0\0\1" + END), "an entry ends 1 bytes after its block"),
        (lambda: with_block(b"\5\0\0" + END), "a name shares 5 bytes with one of 0"),
        (lambda: with_block(b"\0" + HUGE + b"\0" + END), "and adds 1180591620717411303423; 512 are allowed"),
        (lambda: with_block(b"\xff" * 11 + END), "a number has no end"),
        (lambda: rows((b"a", GOOD), (b"a", GOOD)), "b'a' follows b'a': names must increase"),
        (lambda: rows((b"b", GOOD), (b"a", GOOD)), "b'a' follows b'b'"),
        (lambda: table({b"a": GOOD}), "it has no header"),
        (lambda: table({}), "it has no header"),
        (lambda: table({b"": header(endianness=1)}), "its numbers are big-endian"),
        (lambda: table({b"": header(shards=0)}), "it cannot have 0 data files"),
        (lambda: table({b"": header(shards=10**6)}), "it cannot have 1000000 data files"),
        (lambda: rows((b"\0slice", GOOD)), "holds variables in slices"),
        (lambda: rows((b"\xff", GOOD)), "is not the name of a variable"),
        (lambda: rows((b"_CHECKPOINTABLE_OBJECT_GRAPH", GOOD)), "only TensorFlow 1 checkpoints are read"),
        (lambda: rows((b"x", varint(1 << 3 | 3))), "the unknown wire type 3"),
        (lambda: rows((b"x", field(2, b"ab")[:-1])), "a field of 2 bytes has only 1 left"),
        (lambda: rows((b"x", entry(7, shape_of(4), 0, 0, 16, 0))), "x has type 7, which is not numeric"),
        (lambda: rows((b"x", entry(99, shape_of(4), 0, 0, 16, 0))), "x has type 99"),
        (lambda: rows((b"x", entry(1, shape_of(5), 0, 0, 16, 0))), "x has 16 bytes, not those of"),
        (lambda: rows((b"x", entry(1, shape_of(*[1] * 9), 0, 0, 4, 0))), "x has more than 8 axes"),
        (lambda: rows((b"x", entry(1, shape_of(2**64 - 4), 0, 0, 2**66 - 16, 0))), "x has a negative size"),
        (lambda: rows((b"x", entry(1, field(3, 1), 0, 0, 4, 0))), "x has no known shape"),
        (lambda: rows((b"x", entry(1, shape_of(4), 1, 0, 16, 0))), "x is in data file 1 of 1"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_is_refused(make, message, tmp_path):
    with pytest.raises(FolderError) as caught:
        open_bundle(place(tmp_path, make()))
    assert message in caught.value.what
    assert str(caught.value.where).endswith("a.ckpt.index")


def test_a_field_that_is_not_known_is_passed_over(tmp_path):
    more = field(20, 5) + field(21, b"abc") + varint(22 << 3 | 1) + bytes(8)
    assert read(place(tmp_path, rows((b"x", more + GOOD))))["x"].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(1, shape_of(4), 0, 1, 16, 0)], "has 16 bytes, and a ends at 17"),
        ([entry(1, shape_of(4), 0, 2**69, 16, 0)], "and a ends at"),
        ([entry(1, shape_of(2), 0, 0, 8, 0), entry(1, shape_of(3), 0, 4, 12, 0)], "and a overlap"),
    ],
)
def test_tensors_must_lie_in_their_file_side_by_side(entries, message, tmp_path):
    index = rows(*((name.encode(), one) for name, one in zip("ab", entries, strict=False)))
    with pytest.raises(FolderError, match=message) as caught:
        open_bundle(place(tmp_path, index))
    assert str(caught.value.where).endswith("data-00000-of-00001")


def test_a_tensor_is_read_only_when_it_is_asked_for(tmp_path):
    bad = entry(1, shape_of(2), 0, 0, 8, 1)
    good = entry(1, shape_of(2), 0, 8, 8, masked_crc(BYTES[8:]))
    file = place(tmp_path, rows((b"bad", bad), (b"good", good)))
    bundle = open_bundle(file)
    assert bundle.read("good").tolist() == [2, 3]
    with pytest.raises(FolderError, match="the bytes of bad do not match their checksum"):
        bundle.read("bad")
    (tmp_path / "a.ckpt.data-00000-of-00001").unlink()
    with pytest.raises(ResourceError, match="cannot be read: No such file"):
        bundle.read("good")
    with pytest.raises(FolderError, match=r"needs a.ckpt.data-00000-of-00001"):
        open_bundle(file)


def test_a_file_that_cannot_be_an_index_is_not_read(tmp_path):
    file = tmp_path / "a.ckpt.index"
    with pytest.raises(ResourceError, match="cannot be read: No such file"):
        open_bundle(file)
    longer = "an index of 8,388,608 bytes is longer than that of any model"
    for size, message in ((2**40, "has 1,099,511,627,776 bytes, more than"), (2**23, longer)):
        with file.open("wb") as stream:
            stream.truncate(size)
        with pytest.raises(FolderError, match=message):
            open_bundle(file)
