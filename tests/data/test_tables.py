"""Tables: what comes out of a file is what a plain reader of its format gives, and every flaw is named with its line."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import shutil
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from hypothesis import given, strategies as st
from pyarrow import parquet

from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.data.tables import Table, is_header, open_table
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
    tsv = "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in ROWS)
    jsonl = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(tsv.encode()))
    (tmp_path / "a.csv.bz2").write_bytes(bz2.compress(csv_text(ROWS).encode()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(jsonl.encode()))
    write(tmp_path / "a.csv", csv_text(ROWS))
    write(tmp_path / "a.tsv", tsv)
    write(tmp_path / "b.tsv", tsv.replace("\n", "\r\n"))
    write(tmp_path / "bom.tsv", "\ufeff" + tsv)
    write(tmp_path / "a.jsonl", jsonl)
    write(tmp_path / "d.CSV", csv_text(ROWS))
    write(tmp_path / "d.TSV", tsv)
    write(tmp_path / "d.JSONL", jsonl)
    shutil.copy(tmp_path / "a.tsv.gz", tmp_path / "d.TSV.GZ")
    shutil.copy(tmp_path / "a.parquet", tmp_path / "d.PARQUET")
    limit = csv.field_size_limit()
    for source in map(str, tmp_path.iterdir()):
        table = open_table(source)
        assert table.names == ("text", "label"), source
        assert values(table) == ROWS, source
        assert source.lower().endswith(".parquet") if table.share is None else table.share() == 1.0
    assert csv.field_size_limit() == limit  # which is the process's


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=12)


@given(st.lists(st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=5))
def test_csv_is_read_as_it_was_written(tmp_path_factory, rows):
    expected = [{"a": a, "b": b} for a, b in rows]
    path = write(tmp_path_factory.mktemp("csv") / "a.csv", csv_text(expected))
    assert values(open_table(path, ["a"])) == expected


ONE, LABELLED = "\ntext\na\n\n\nb\n\n\n", "Fine.\tpositive\nDull.\tnegative\nGood.\tpositive\n"


@pytest.mark.parametrize(("name", "content", "columns", "names", "expected"), [
    ("a.csv", 'text,label\n"two\nlines",1\n\nnext,0\n', [], ["text", "label"], {2: ["two\nlines", "1"], 5: ["next", "0"]}),
    ("a.jsonl", '{"a": 1}\n\n{"a": 2}\n', [], ["a"], {1: [1], 3: [2]}),
    # As pandas, datasets and the files of CLUE have it.
    ("a.json", '{"text": "好"}\n\n{"text": "坏"}\n', [], ["text"], {1: ["好"], 3: ["坏"]}),
    # Of plain lines, empty ones count, and none is a header; of a column, a text may be like its header.
    ("a.txt", "text\n\nthree\n", [], ["text"], {1: ["text"], 2: [""], 3: ["three"]}),
    ("a.csv", "text\none\ntext\n", [], ["text"], {2: ["one"], 3: ["text"]}),
    ("a.txt", "PAR100 lamps are sold out 灯\n", [], ["text"], {1: ["PAR100 lamps are sold out 灯"]}),
    # A number that is no name means that there is no header.
    ("cola.tsv", "gj04\t1\t\tIt is.\ngj04\t0\t*\tIs it is.\n", ["3", "1"], ["0", "1", "2", "3"],
     {1: ["gj04", "1", "", "It is."], 2: ["gj04", "0", "*", "Is it is."]}),
    ("named.csv", "0,3\na,b\n", ["3"], ["0", "3"], {2: ["a", "b"]}),
    ("a.tsv", LABELLED, [], ["0", "1"], {1: ["Fine.", "positive"], 2: ["Dull.", "negative"], 3: ["Good.", "positive"]}),
    ("a.tsv", LABELLED, ["positive"], ["Fine.", "positive"], {2: ["Dull.", "negative"], 3: ["Good.", "positive"]}),
    # A blank line is a row of a single column alone, unless nothing follows it.
    ("one.csv", ONE, [], ["text"], {3: ["a"], 4: [""], 5: [""], 6: ["b"]}),
    ("one.tsv", ONE, [], ["text"], {3: ["a"], 4: [""], 5: [""], 6: ["b"]}),
    ("one.csv", ONE, ["0"], ["0"], {2: ["text"], 3: ["a"], 4: [""], 5: [""], 6: ["b"]}),
    ("two.csv", "text,label\n\na,x\n\n\nb,y\n", [], ["text", "label"], {3: ["a", "x"], 6: ["b", "y"]}),
    ("two.tsv", "text\tlabel\n\na\tx\n\n\nb\ty\n", [], ["text", "label"], {3: ["a", "x"], 6: ["b", "y"]}),
])  # fmt: skip
def test_rows_know_their_lines(tmp_path, name, content, columns, names, expected):
    source = write(tmp_path / name, content)
    table = open_table(source, columns)
    assert table.names == tuple(names)
    assert [(row.where, row.values) for row in table.rows] == [
        (f"{source}:{line}", dict(zip(names, row, strict=True))) for line, row in expected.items()
    ]


def test_threads_read_long_values_of_csv(tmp_path, monkeypatch):
    """The limit of a value is one of the process, which each reader sets and restores."""
    row, change, limit = {"text": "word, " * 30_000}, csv.field_size_limit, csv.field_size_limit()
    source = write(tmp_path / "long.csv", csv_text([row] * 3))
    # Other threads have their turn between a change of the limit and what is read by it.
    monkeypatch.setattr(csv, "field_size_limit", lambda *new: (change(*new), time.sleep(0.001))[0])
    with ThreadPoolExecutor(8) as threads:
        tables = threads.map(lambda _: values(open_table(source)), range(8))
        assert all(rows == [row] * 3 for rows in tables)
    assert change() == limit


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe with a name")
def test_csv_is_read_while_another_reader_waits_for_a_pipe(tmp_path):
    pipe, file = tmp_path / "pipe.csv", write(tmp_path / "file.csv", "text,label\na,x\n")
    os.mkfifo(pipe)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(lambda: values(open_table(str(pipe))))
        with pipe.open("w") as writer:
            writer.write("text,label\nb,x\n")
            writer.flush()
            time.sleep(0.1)
            read = threads.submit(lambda: values(open_table(file)))
            assert wait([read], timeout=10).done
        assert waiting.result() == [{"text": "b", "label": "x"}]


def test_a_value_may_be_long_and_a_quote_that_stays_open_is_named(tmp_path, monkeypatch):
    long = "word, " * 50_000
    assert values(open_table(write(tmp_path / "long.csv", f'text,label\n"{long}",x\n'))) == [
        {"text": long, "label": "x"}
    ]
    monkeypatch.setenv("BOTHWAYS_MAX_LINE_BYTES", "1000")
    source = write(tmp_path / "open.csv", 'text,label\na,x\n"b,y\n' + "c,z\n" * 1000)
    with pytest.raises(DataError, match=r"open\.csv:3: is not CSV: .*\n  .*close each quote"):
        values(open_table(source))


def test_standard_input_is_lines_or_json(tmp_path, monkeypatch):
    def read(content: bytes, *columns: str) -> list[dict[str, object]]:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return values(open_table("-", columns))

    assert read('{"a": "ä"}\n\n'.encode(), "a") == [{"a": "ä"}]
    assert read(b'{"a": 1}\r\n\n') == [{"text": '{"a": 1}'}, {"text": ""}]
    content = "\ufefffirst\r\nsec\0ond\n\n\ufeffthird".encode()
    (tmp_path / "a.txt").write_bytes(content)
    texts = ["first", "second", "", "third"]
    assert read(content) == values(open_table(str(tmp_path / "a.txt")))
    assert [row["text"] for row in read(content)] == texts
    for content, message in (
        (b"fine\n\xe9t\xe9\n", ":2: byte 0xe9 at column 1 is not UTF-8"),
        ("hello".encode("utf-16"), ": is UTF-16 text"),
        (b"PK\0\1", ": is a binary file"),
    ):
        with pytest.raises(DataError, match=f"^standard input{message}"):
            read(content)


def test_classes_of_a_hub_data_set_are_their_names(monkeypatch):
    import datasets

    label = datasets.ClassLabel(names=["no", "yes"])
    kinds = {"text": datasets.Value("string"), "label": label, "tags": [label]}
    features, tags = datasets.Features(kinds), [[0, 1], [], [-1, None], None]
    rows = {"text": ["a", "b", "c", "d"], "label": [1, 0, -1, None], "tags": tags}
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


def test_a_folder_that_datasets_saved_is_read_as_a_data_set(tmp_path, caplog):
    import datasets

    folder = tmp_path / "saved"
    rows = {"text": ["Fine.", "Dull."], "label": [1, 0]}
    data = datasets.Dataset.from_dict(rows)
    data = data.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    data.save_to_disk(folder)
    (tmp_path / "files").mkdir()
    data.to_parquet(file := tmp_path / "files" / "a.parquet")
    for path, advice in ((folder, f"write hub:{folder}"), (next(folder.glob("*.arrow")), "hub:")):
        with pytest.raises(DataError, match=advice):
            open_table(str(path))
    for source in (folder, tmp_path / "files"):
        labels = [row["label"] for row in values(open_table(f"hub:{source}"))]
        assert labels == ["yes", "no"]
    open_table(str(file), only=["text"])
    assert not caplog.messages
    assert [row["label"] for row in values(open_table(str(file)))] == [1, 0]
    assert [text.startswith(f"{file}: its classes are") for text in caplog.messages] == [True]


def test_a_split_that_is_not_named_is_said_where_there_are_others(tmp_path, caplog):
    import datasets

    for name, texts in (("train", ["a"]), ("test", ["b"])):
        datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / f"{name}.parquet")
    assert values(open_table(f"hub:{tmp_path}::test")) == [{"text": "b"}]
    assert not caplog.messages
    assert values(open_table(f"hub:{tmp_path}")) == [{"text": "a"}]
    assert caplog.messages == [
        f"hub:{tmp_path}: no split is named, so train is read; the others are test"
    ]


@pytest.mark.parametrize(("name", "content", "where", "message"), [
    ("none.csv", None, "", "no such file\n  Check the name. Supported are"),
    (".", None, "", "is a folder\n  Name a file in it"),
    ("a.conll", b"EU B-ORG\n", "", 'task="tag"'),
    ("a.xls.gz", gzip.compress(b"x", mtime=0), "", "unsupported file type '.xls'"),
    ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "", "Unpack it"),
    ("a.csv", b"", "", "holds no row"),
    ("a.tsv", b"text\tlabel\n", "", "holds no row"),
    ("a.jsonl", b"\n \n", "", "holds no row"),
    ("a.csv", b"text,label\na,1\nhe said, no,1\n", ":3", "has 3 values for 2 columns (text, label)\n  Quote"),
    ("a.tsv", b'text\tlabel\na\t1\n"b\tc"\t0\n', ":3", "has 3 values for 2 columns (text, label)\n  Remove tabs"),
    ("a.csv", b'text,label\na,1\n"open,1\nb,0\n', ":3", "is not CSV"),
    ("a.csv", b"text,label\na film,pos\n" * 2, ":3", "repeats the header"),  # of files that were joined
    ("a.jsonl", b'{"a": 1}\n{"a": 1\n', ":2", "is not JSON"),
    ("a.jsonl", b'{"text": "a", "label": "x", "label": "y"}\n', ":1", "'label' twice"),
    ("a.tsv", "text\tlabel\n好\t1\n".encode("gbk"), ":2", "is not UTF-8"),
    ("a.txt", b"one\rtwo\rthree", "", "is one line with 2 carriage returns"),
    ("a.csv", b"text,label\rone,1\rtwo,0\r", ":1", "holds a carriage return\n  Write line ends"),
    ("a.csv", b'text;label\n"Hello, Ann";1\n', ":2", "separated by semicolons"),
    ("a.csv", gzip.compress(b"text\n", mtime=0), "", "is not text, but compressed by gzip\n  Add .gz"),
    ("a.csv", b"PK\3\4\x14\0", "", "spreadsheet or another zip archive\n  Unpack it. Of a spreadsheet"),
    ("a.csv", b"PAR1\x15\0\x15", "", "is not text, but a Parquet file\n  Name it .parquet."),
    ("a.xlsx", b"PK\3\4\x14\0", "", "save each table as CSV UTF-8"),
    ("a.jsonl", b'[\n {"text": "a"}\n]\n', ":1", "an array of objects has the suffix .json"),
    ("a.parquet", b"PAR1 no", "", "is not a complete Parquet file"),
    ("a.json", b'{"data": []}', "", "is read by the task answer alone"),
    ("a.json", b'{"default": {}}', "", "name the other files instead of their folder"),
    ("dataset_info.json", b'{"features": {}}', "", "name the folder: hub:FOLDER"),
    ("a.json", b'{"a": 1}\n{"a": 2}\n{"a"', ":3", "is not JSON"),
    ("a.json", b'{"data": [\n{"a": 1},\n{"a": 2}]}', "", "is not an array of objects"),
    ("a.json", b'{"text": "the only row"}\n', "", "one object per line in a .jsonl file"),
    ("a.json", b"[]", "", "holds no row"),
    ("a.json", b"[1]", ":record 1", "holds a JSON int"),
    ("a.json", b'[{"a": 1} {"a": 2}]', "", "is not JSON"),
    ("a.json", b'[{"text": "one"}]\n[{"text": "two"}]\n', "", "line 2"),
    ("a.json", b'[{"a": ' + b"[" * 100_000, "", "number with too many digits"),
    ("a.json", b'[{"a": ' + b"1" * 5000 + b"}]", "", "number with too many digits"),
    ("a.json", b'[{"a": "\xff"}]', ":1", "is not UTF-8"),
    ("a.json", b'[{"a": 1}, {"a": 1, "label": "x", "label": "y"}]', "", "'label' twice"),
])  # fmt: skip
def test_damaged_table_is_an_error_at_its_line(tmp_path, name, content, where, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        values(open_table(str(path)))
    assert str(caught.value.where) == f"{path}{where}"
    assert message in str(caught.value)


def test_json_that_is_read_as_text_is_reported(tmp_path, caplog, monkeypatch):
    """Its braces and keys would be parts of the texts."""
    objects = '{"text": "Fine."}\n{"text": "Dull."}\n'
    source = write(tmp_path / "a.txt", objects)
    assert values(open_table(source)) == [{"text": line} for line in objects.splitlines()]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(objects.encode())))
    open_table("-")
    write(tmp_path / "b.txt", "{smile}\n" + objects)
    open_table(str(tmp_path / "b.txt"))
    [file, stdin] = caplog.messages
    assert file.startswith(f"{source}:1: is a JSON object")
    assert file.endswith(".jsonl")
    assert stdin.startswith("standard input:1:")
    assert stdin.endswith("use text=NAME")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ResourceError, match=r"^standard input: is closed\n  Name a file to read"):
        open_table("-")


def test_nul_characters_are_left_out_and_counted(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"one\ntw\0o\n\0three\rfour\n")
    assert [row["text"] for row in values(open_table(str(tmp_path / "a.txt")))] == [
        "one", "two", "three\rfour"
    ]  # fmt: skip
    assert caplog.messages == [f"{tmp_path / 'a.txt'}: 2 NUL characters left out, from line 2 on"]


@pytest.mark.parametrize("begin", [4, 30_000])  # the head of a page, and its text
def test_parquet_that_is_damaged_in_the_middle_is_an_error(begin, tmp_path):
    table, path = pyarrow.table({"text": ["x" * 500] * 100}), tmp_path / "a.parquet"
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[begin : begin + 56] = b"\xff" * 56
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="not a complete Parquet file"):
        values(open_table(str(path)))


def test_parquet_of_a_repeated_cell_takes_little_memory(tmp_path):
    """It is in the file once, and in each row that is read at a time."""
    text = "x" * 2**15
    parquet.write_table(pyarrow.table({"text": [text] * 1500}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**16
    tracemalloc.start()
    assert all(row.values == {"text": text} for row in open_table(str(tmp_path / "a.parquet")).rows)
    assert tracemalloc.get_traced_memory()[1] < 2**24  # of 47 MiB in all
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "is_told"),
    [('"a ""good"" film"', True), ('""""', True), ('a "good" film', False), ('"a good film"', False), ('"" wow ""', False)],
)  # fmt: skip
def test_quotes_of_csv_in_a_tsv_are_told(tmp_path, caplog, value, is_told):
    (tmp_path / "a.tsv").write_text(f"text\tlabel\na film\t0\n{value}\t1\n")
    assert [*open_table(str(tmp_path / "a.tsv")).rows][1].values["text"] == value
    assert ("a.tsv:3: holds a value that is quoted" in caplog.text) == is_told


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


@pytest.mark.parametrize(("kind", "mark"), [("csv", ","), ("tsv", "\t")])
def test_two_columns_of_one_name_are_refused_but_not_those_without(kind, mark, tmp_path):
    twice = write(tmp_path / f"twice.{kind}", f"text{mark}text{mark}label\na{mark}b{mark}1\n")
    with pytest.raises(DataError, match="two columns are called 'text'") as caught:
        open_table(twice)
    assert caught.value.where == f"{twice}:1"
    assert "label" not in str(caught.value.fix)  # also of texts for a corpus, which has no labels
    assert values(open_table(twice, ["0"]))[1] == {"0": "a", "1": "b", "2": "1"}
    bare = write(tmp_path / f"bare.{kind}", f"text{mark}{mark}\na{mark}b{mark}c\n")
    assert open_table(bare).names == ("text", "", "")
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="two columns are called 'text'"):
        open_table(str(tmp_path / "twice.parquet"))


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
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    table = open_table(str(tmp_path / "a.parquet"))
    table.close()
    open_files = {link.resolve() for link in Path("/proc/self/fd").glob("*")}
    assert not open_files & {Path(path), tmp_path / "a.parquet"}
    assert table.rows  # still there


@pytest.mark.parametrize(("first", "rows", "columns", "expected"), [
    (["A fine film.", "positive"], [["Dull.", "negative"], ["Good.", "positive"]], [], False),
    (["Dull.", "0"], [["Good.", "1"]], [], False),
    (["x" * 81, "a"], [["y", "b"]], [], False),
    (["text", "0"], [["Good.", "1"]], [], True),
    (["Bewertung", "Sterne"], [["Gut.", "5"]], [], True),
    (["0", "1"], [["0.5", "0.25"]], [], True),
    (["", "review", "stars"], [["0", "Good.", "5"]], [], True),
    (["only", "header"], [], [], True),
    # A value like the number of a column is not its name: the label of the first row is 1, and
    # texts are in column 1.
    (["1", "Fine."], [["other"] * 2], ["1"], False),
    (["a", "1", "", "Fine."], [["other"] * 4], ["3", "1"], False),
    (["0", "1"], [["other"] * 2], ["1"], True),
    (["text", "0"], [["other"] * 2], ["0"], True),
    (["2023", "2024"], [["other"] * 2], ["2024"], True),
])  # fmt: skip
def test_a_first_row_of_data_is_not_a_header(first, rows, columns, expected):
    assert is_header(first, rows, columns) is expected


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
