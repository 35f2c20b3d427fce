"""Protocol Buffers' wire format: what is written by its rules is read as it was, and nothing is read out of a part."""

import struct

import pytest
from hypothesis import given, settings, strategies as st

from bothways.text.protobuf import Fixed, MalformedError, fields
from protobuf_writer import field, varint

VALUES = (
    st.integers(0, 2**64 - 1)
    | st.binary(max_size=300)
    | st.builds(Fixed, st.binary(min_size=4, max_size=4) | st.binary(min_size=8, max_size=8))
)


def message(items: list[tuple[int, int | bytes | Fixed]]) -> bytes:
    parts = []
    for number, value in items:
        if isinstance(value, Fixed):
            kind = 5 if len(value.data) == 4 else 1
            parts.append(varint(number << 3 | kind) + value.data)
        else:
            parts.append(field(number, value))
    return b"".join(parts)


@settings(deadline=None)
@given(items=st.lists(st.tuples(st.integers(1, 2**29 - 1), VALUES), max_size=6), data=st.data())
def test_a_message_is_read_as_it_was_written(items, data):
    whole = message(items)
    assert list(fields(whole)) == items
    lengths = [len(message(items[:count])) for count in range(len(items) + 1)]
    cut = data.draw(st.integers(0, len(whole)))
    if cut in lengths:
        assert list(fields(whole[:cut])) == items[: lengths.index(cut)]
    else:
        with pytest.raises(MalformedError, match=r" left$|has no end"):
            list(fields(whole[:cut]))


def test_fixed_bytes_are_a_whole_number_or_a_real_one():
    assert Fixed(struct.pack("<f", -1.5)).real == Fixed(struct.pack("<d", -1.5)).real == -1.5
    assert Fixed(struct.pack("<I", 7)).whole == Fixed(struct.pack("<Q", 7)).whole == 7
