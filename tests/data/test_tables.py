"""Tables: what comes out of a file is what a plain reader of its format gives, and every flaw is named with its line."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from bothways.core.errors import ConfigError, DataError
from bothways.data.tables import Table, class_names, is_header, open_table
from bothways.data.text_io import BytesRead, read_lines
from fake_hub import fake_hub

ROWS = [
    {"text": 'He said "no", twice', "label": "1"},
    {"text": "naïve – 文字 😀", "label": "0"},
    {"text": "", "label": "nan"},
]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf8", newline="")
    return str(path)


def values(table: Table) -> list[dict[str, object]]:
    try:
        return [dict(row.values) for row in table.rows]
    finally:
        table.close()


def csv_text(rows: list[dict[str, str]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    import pyarrow
    from pyarrow import parquet

    tsv = "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in ROWS)
    jsonl = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(tsv.encode()))
    (tmp_path / "a.csv.bz2").write_bytes(bz2.compress(csv_text(ROWS).encode()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(jsonl.encode()))
    sources = [
        write(tmp_path / "a.csv", csv_text(ROWS)),
        write(tmp_path / "a.tsv", tsv),
        write(tmp_path / "b.tsv", tsv.replace("\n", "\r\n")),
        write(tmp_path / "bom.tsv", "\ufeff" + tsv),
        write(tmp_path / "a.jsonl", jsonl),
        *(str(tmp_path / name) for name in ("a.parquet", "a.tsv.gz", "a.csv.bz2", "a.jsonl.xz")),
    ]
    for source in sources:
        table = open_table(source)
        assert table.names == ("text", "label"), source
        assert values(table) == ROWS, source
        assert source.endswith(".parquet") if table.share is None else table.share() == 1.0


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=12)


@given(st.lists(st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=5))
def test_csv_is_read_as_it_was_written(tmp_path_factory, rows):
    table = open_table(
        write(
            tmp_path_factory.mktemp("csv") / "a.csv", csv_text([{"a": a, "b": b} for a, b in rows])
        ),
        ["a"],
    )
    assert values(table) == [{"a": a, "b": b} for a, b in rows]


def test_rows_know_their_lines(tmp_path):
    source = write(tmp_path / "a.csv", 'text,label\n"two\nlines",1\n\nnext,0\n')
    assert [row.where for row in open_table(source).rows] == [f"{source}:2", f"{source}:5"]
    source = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": 2}\n')
    assert [row.where for row in open_table(source).rows] == [f"{source}:1", f"{source}:3"]


def test_a_number_that_is_no_name_means_that_there_is_no_header(tmp_path):
    source = write(tmp_path / "cola.tsv", "gj04\t1\t\tIt is.\ngj04\t0\t*\tIs it is.\n")
    table = open_table(source, ["3", "1"])
    assert table.names == ("0", "1", "2", "3")
    assert [(row.values["3"], row.where) for row in table.rows] == [
        ("It is.", f"{source}:1"),
        ("Is it is.", f"{source}:2"),
    ]
    named = write(tmp_path / "named.csv", "0,3\na,b\n")
    assert values(open_table(named, ["3"])) == [{"0": "a", "3": "b"}]


def test_plain_lines_are_texts_and_empty_ones_count(tmp_path):
    assert values(open_table(write(tmp_path / "a.txt", "one\n\nthree\n"))) == [
        {"text": "one"},
        {"text": ""},
        {"text": "three"},
    ]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_blank_line_is_a_row_of_a_single_column_alone(tmp_path, suffix):
    source = write(tmp_path / f"one{suffix}", "\ntext\na\n\n\nb\n\n\n")
    found = list(open_table(source).rows)
    assert [(row.values["text"], row.where) for row in found] == [
        ("a", f"{source}:3"), ("", f"{source}:4"), ("", f"{source}:5"), ("b", f"{source}:6")
    ]  # fmt: skip
    assert [row["0"] for row in values(open_table(source, ["0"]))] == ["text", "a", "", "", "b"]
    between = "," if suffix == ".csv" else "\t"
    source = write(
        tmp_path / f"two{suffix}", f"text{between}label\n\na{between}x\n\n\nb{between}y\n"
    )
    assert [row["text"] for row in values(open_table(source))] == ["a", "b"]


def test_a_value_may_be_long_and_a_quote_that_stays_open_is_named(tmp_path, monkeypatch):
    long = "word, " * 50_000
    assert values(open_table(write(tmp_path / "long.csv", f'text,label\n"{long}",x\n'))) == [
        {"text": long, "label": "x"}
    ]
    monkeypatch.setenv("BOTHWAYS_MAX_LINE_BYTES", "1000")
    source = write(tmp_path / "open.csv", 'text,label\na,x\n"b,y\n' + "c,z\n" * 1000)
    with pytest.raises(DataError, match=r"open\.csv:3: is not CSV: .*\n  .*close each quote"):
        values(open_table(source))


class Stdin:
    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


def test_standard_input_is_lines_or_json(monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin('{"a": "ä"}\n\n'.encode()))
    assert values(open_table("-", ["a"])) == [{"a": "ä"}]
    monkeypatch.setattr("sys.stdin", Stdin(b'{"a": 1}\r\n\n'))
    assert values(open_table("-")) == [{"text": '{"a": 1}'}, {"text": ""}]
    monkeypatch.setattr("sys.stdin", Stdin(b"fine\n\xe9t\xe9\n"))
    with pytest.raises(DataError, match=r"^standard input:2: byte 0xe9 at column 1 is not UTF-8"):
        values(open_table("-"))


def test_the_standard_input_is_read_as_files_are(tmp_path, monkeypatch):
    content = "\ufefffirst\r\nsec\0ond\n\n\ufeffthird".encode()
    (tmp_path / "a.txt").write_bytes(content)
    monkeypatch.setattr("sys.stdin", Stdin(content))
    found = values(open_table("-"))
    assert found == values(open_table(str(tmp_path / "a.txt")))
    assert found == [{"text": "first"}, {"text": "second"}, {"text": ""}, {"text": "third"}]
    for content, message in (
        ("hello".encode("utf-16"), "is UTF-16 text"),
        (b"PK\0\1", "is a binary file"),
    ):
        monkeypatch.setattr("sys.stdin", Stdin(content))
        with pytest.raises(DataError, match=f"^standard input: {message}"):
            open_table("-")


def test_a_folder_is_no_table(tmp_path):
    with pytest.raises(DataError, match=f"^{tmp_path}: is a folder\n  Name a file in it"):
        open_table(str(tmp_path))


def test_a_local_data_set_is_read_like_one_of_the_hub(tmp_path, monkeypatch):
    import datasets

    label = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": label, "tags": [label]}
    )
    rows = {
        "text": ["a", "b", "c", "d"],
        "label": [1, 0, -1, None],
        "tags": [[0, 1], [], [-1, None], None],
    }
    asked = []

    def load(*arguments: object, **options: object) -> object:
        asked.append((arguments, options))
        return datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset()

    fake_hub(monkeypatch, load)
    table = open_table("hub:owner/name:cola:validation")
    assert [(row.values["label"], row.values["tags"], row.where) for row in table.rows] == [
        ("yes", ["no", "yes"], "hub:owner/name:cola:validation:row 1"),
        ("no", [], "hub:owner/name:cola:validation:row 2"),
        (None, [None, None], "hub:owner/name:cola:validation:row 3"),
        (None, None, "hub:owner/name:cola:validation:row 4"),
    ]
    assert asked == [(("owner/name", "cola"), {"split": "validation", "streaming": True})]


def test_lists_of_classes_have_their_names_in_every_release_of_datasets():
    import datasets

    label = datasets.ClassLabel(names=["no", "yes"])
    features = {"label": label, "tags": datasets.Sequence(label), "before 4": [label]}
    assert class_names(features) == {name: ["no", "yes"] for name in features}


def test_a_data_set_that_cannot_be_fetched_is_an_error(monkeypatch):
    def load(*arguments: object, **options: object) -> object:
        raise ConnectionError("no network\nat all")

    fake_hub(monkeypatch, load)
    with pytest.raises(
        DataError, match=r"^hub:owner/name: cannot be read: no network\n  Check the name"
    ):
        open_table("hub:owner/name")


@pytest.mark.parametrize(("name", "content", "location"), [
    ("a.xls.gz", gzip.compress(b"x", mtime=0), ""),
    ("a.csv", b"", ""),
    ("a.tsv", b"text\tlabel\n", ""),
    ("a.jsonl", b"\n \n", ""),
    ("a.csv", b"text,label\na,1\nhe said, no,1\n", ":3"),
    ("a.csv", b'text,label\na,1\n"open,1\nb,0\n', ":3"),
    ("a.jsonl", b'{"a": 1}\n{"a": 1\n', ":2"),
    ("a.tsv", "text\tlabel\n好\t1\n".encode("gbk"), ":2"),
    ("a.txt", b"one\rtwo\rthree", ""),
    ("a.parquet", b"PAR1 no", ""),
])  # fmt: skip
def test_damaged_table_is_an_error_at_its_line(tmp_path, name, content, location):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        values(open_table(str(tmp_path / name)))
    assert str(caught.value.where) == f"{tmp_path / name}{location}"


def test_nul_characters_are_left_out_and_counted(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"one\ntw\0o\n\0three\rfour\n")
    assert [row["text"] for row in values(open_table(str(tmp_path / "a.txt")))] == [
        "one", "two", "three\rfour"
    ]  # fmt: skip
    assert caplog.messages == [f"{tmp_path / 'a.txt'}: 2 NUL characters left out, from line 2 on"]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"none\.csv: no such file\n  Check the name. Supported are"
    ):
        open_table(str(tmp_path / "none.csv"))


@pytest.mark.parametrize("begin", [4, 30_000])  # the head of a page, and its text
def test_parquet_that_is_damaged_in_the_middle_is_an_error(begin, tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": ["x" * 500] * 100}),
        tmp_path / "a.parquet",
        compression="none",
        use_dictionary=False,
    )
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[begin : begin + 56] = b"\xff" * 56
    (tmp_path / "a.parquet").write_bytes(bytes(content))
    with pytest.raises(DataError, match="not a complete Parquet file"):
        values(open_table(str(tmp_path / "a.parquet")))


def test_a_value_of_several_lines_is_no_row_of_tsv(tmp_path):
    """As pandas writes one; the halves of it would be predicted as two texts."""
    import pandas

    frame = pandas.DataFrame({"text": ["fine", "two\nlines"], "label": ["x", "y"]})
    frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    rows = open_table(str(tmp_path / "a.tsv")).rows
    assert next(rows).values == {"text": "fine", "label": "x"}
    with pytest.raises(DataError, match=r"a\.tsv:3: holds a quoted value that goes on"):
        next(rows)
    # A quote is a character, as in GLUE's files, and the last columns may be absent.
    source = write(tmp_path / "b.tsv", 'text\tlabel\n"Fine\tx\n"Dull"\n')
    assert [row.values["text"] for row in open_table(source).rows] == ['"Fine', '"Dull"']


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_two_columns_of_one_name_are_refused_but_not_those_without(kind, tmp_path):
    mark = {"csv": ",", "tsv": "\t"}[kind]
    twice = write(tmp_path / f"twice.{kind}", f"text{mark}text{mark}label\na{mark}b{mark}1\n")
    with pytest.raises(DataError, match="two columns are called 'text'") as caught:
        open_table(twice)
    assert caught.value.where == f"{twice}:1"
    assert values(open_table(twice, ["0"]))[1] == {"0": "a", "1": "b", "2": "1"}
    assert open_table(
        write(tmp_path / f"bare.{kind}", f"text{mark}{mark}\na{mark}b{mark}c\n")
    ).names == ("text", "", "")


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="two columns are called 'text'"):
        open_table(str(tmp_path / "twice.parquet"))


@pytest.mark.parametrize(("suffix", "task"), [(".conll", "tag"), (".json", "answer")])
def test_files_of_other_tasks_are_told_apart(suffix, task, tmp_path):
    with pytest.raises(DataError, match=f'task="{task}"'):
        open_table(write(tmp_path / f"a{suffix}", "EU B-ORG\n"))


def test_a_reader_that_is_collected_after_its_file_says_nothing(tmp_path):
    """The garbage collector takes both in any order."""
    bytes_read = BytesRead()
    lines = read_lines(Path(write(tmp_path / "a.txt", "one\ntwo\n")), bytes_read)
    next(lines)
    bytes_read.current.close()
    lines.close()
    assert bytes_read.current is None


def test_a_table_that_is_refused_leaves_no_open_file(tmp_path):
    path = write(tmp_path / "twice.tsv", "text\ttext\na\tb\n")
    with pytest.raises(DataError, match="two columns") as caught:
        open_table(path)
    assert caught.tb is not None  # it still refers to the reader
    files = (
        [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        if Path("/proc/self/fd").exists()
        else []
    )
    assert path not in {str(link.resolve()) for link in files}


@pytest.mark.parametrize(
    ("first", "rows", "expected"),
    [
        (["A fine film.", "positive"], [["Dull.", "negative"], ["Good.", "positive"]], False),
        (["Dull.", "0"], [["Good.", "1"]], False),
        (["x" * 81, "a"], [["y", "b"]], False),
        (["text", "0"], [["Good.", "1"]], True),
        (["Bewertung", "Sterne"], [["Gut.", "5"]], True),
        (["0", "1"], [["0.5", "0.25"]], True),
        (["", "review", "stars"], [["0", "Good.", "5"]], True),
        (["only", "header"], [], True),
    ],
)
def test_a_first_row_of_data_is_not_a_header(first, rows, expected):
    assert is_header(first, rows) is expected


def test_the_columns_of_a_file_without_a_header_go_by_number(tmp_path):
    source = write(tmp_path / "a.tsv", "Fine.\tpositive\nDull.\tnegative\nGood.\tpositive\n")
    table = open_table(source)
    assert table.names == ("0", "1")
    assert values(table)[0] == {"0": "Fine.", "1": "positive"}
    assert open_table(source, ["positive"]).names == ("Fine.", "positive")


def test_array_of_objects_has_a_row_per_object(tmp_path):
    rows = [{"text": "ä" * 100, "n": [{"m": i}]} for i in range(2000)]
    for indent in (None, 1):
        source = write(tmp_path / "a.json", json.dumps(rows, indent=indent, ensure_ascii=False))
        table = open_table(source)
        assert table.names == ("text", "n")
        found = list(table.rows)
        assert [row.values for row in found] == rows
        assert found[-1].where == f"{source}:record 2000"
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b'\xef\xbb\xbf [ {"a": 1} , {"a": 2} ] '))
    assert values(open_table(str(tmp_path / "b.json.gz"))) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("content", [
    b'{"data": []}', b"[]", b"[1]", b'[{"a": 1} {"a": 2}]', b'[{"a": 1},\n {"a"',
    b'[{"a": ' + b"[" * 100_000, b'[{"a": ' + b"1" * 5000 + b"}]", b'[{"a": "\xff"}]',
])  # fmt: skip
def test_damaged_array_is_an_error(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError) as caught:
        values(open_table(str(tmp_path / "a.json")))
    assert str(caught.value.where).startswith(str(tmp_path / "a.json"))


def test_an_array_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("bothways.data.tables.MAX_ARRAY", 20)
    (tmp_path / "a.json.xz").write_bytes(lzma.compress(b'[{"a": "' + b"x" * 10**6 + b'"}]'))
    with pytest.raises(DataError, match="more than 20 characters") as caught:
        values(open_table(str(tmp_path / "a.json.xz")))
    assert "jsonl" in str(caught.value.fix)


def test_many_columns_are_read_in_linear_time(tmp_path):
    names = [f"column{i}" for i in range(100_000)]
    source = write(tmp_path / "wide.csv", ",".join(names) + "\n" + ",".join("x" for _ in names))
    start = time.process_time()
    assert len(next(open_table(source).rows).values) == len(names)
    assert time.process_time() - start < 5
    source = write(tmp_path / "long.csv", ",".join(names) + "\n" + "x," * 100_000 + "x")
    with pytest.raises(DataError) as caught:
        values(open_table(source))
    assert len(str(caught.value)) < 1000


def test_reading_a_csv_leaves_the_field_limit_of_the_process(tmp_path):
    before = csv.field_size_limit()
    values(open_table(write(tmp_path / "a.csv", csv_text(ROWS))))
    assert csv.field_size_limit() == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_are_read(tmp_path):
    for name, asked, expected in (
        ("pipe", [], {"text": '{"a": 1}'}),
        ("pipe", ["a"], {"a": 1}),
        ("pipe.jsonl", [], {"a": 1}),
    ):
        path = tmp_path / name
        os.mkfifo(path)
        thread = threading.Thread(target=path.write_text, args=('{"a": 1}\n',))
        thread.start()
        table = open_table(str(path), asked)
        assert table.share() == 0
        assert values(table) == [expected]
        thread.join()
        path.unlink()


def test_a_line_that_is_too_long_is_an_error_with_the_setting(tmp_path, monkeypatch):
    (tmp_path / "bomb.jsonl.xz").write_bytes(
        lzma.compress(b'{"a": 1}\n' + b"x" * (4 * 10**7), preset=0)
    )
    monkeypatch.setenv("BOTHWAYS_MAX_LINE_BYTES", "1000000")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"xz:2: is longer than 1,000,000 bytes\n.*MAX_LINE_BYTES"):
        values(open_table(str(tmp_path / "bomb.jsonl.xz")))
    assert tracemalloc.get_traced_memory()[1] < 2e7
    tracemalloc.stop()
    monkeypatch.setenv("BOTHWAYS_MAX_LINE_BYTES", "many")
    with pytest.raises(ConfigError, match="'many' is not a positive integer"):
        values(open_table(str(tmp_path / "bomb.jsonl.xz")))


def test_files_that_were_joined_are_noticed(tmp_path):
    one = "text,label\na film,pos\n"
    (tmp_path / "twice.csv").write_text(one + one)
    with pytest.raises(DataError) as caught:
        values(open_table(str(tmp_path / "twice.csv")))
    assert str(caught.value.where).endswith(":3")
    (tmp_path / "mark.txt").write_text("one\n\ufefftwo\n", encoding="utf8")
    assert [row["text"] for row in values(open_table(str(tmp_path / "mark.txt")))] == ["one", "two"]
    (tmp_path / "column.txt").write_text("text\none\ntext\n")  # a text may be like the header
    assert len(values(open_table(str(tmp_path / "column.txt")))) == 3


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", '{"text": "a", "label": "x", "label": "y"}\n'),
    ("a.json", '[{"text": "a"}, {"text": "a", "label": "x", "label": "y"}]'),
])  # fmt: skip
def test_an_object_with_a_key_twice_is_refused(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match="'label' twice"):
        values(open_table(str(tmp_path / name)))
