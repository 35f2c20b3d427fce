"""Texts with character spans: the forms of annotation tools, and spans that are refused."""

import json
from collections.abc import Iterator
from typing import Any

import pandas
import pyarrow
import pytest
from hypothesis import given, strategies as st
from pyarrow import parquet

from bothways.core.errors import DataError
from bothways.data.tables import TableRow, iter_rows
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.running_text import CharacterSpan, split_words, tags_from_spans
from bothways.tasks.tagging.task import TaggingTask

TEXT = "Anna Berg sings in 👍 Oslo."
WORDS = ("Anna", "Berg", "sings", "in", "👍", "Oslo", ".")
TAGS = ("B-PER", "I-PER", "O", "O", "O", "B-LOC", "O")
TRIPLES = [[0, 9, "PER"], [21, 25, "LOC"]]
TASK = TaggingTask()


def objects(start: str = "start", end: str = "end", kind: str = "label") -> list[dict[str, Any]]:
    return [{start: a, end: b, kind: name} for a, b, name in TRIPLES]


LABEL_STUDIO = {
    "id": 7,
    "data": {"source": "news", "text": TEXT},
    "annotations": [
        {"was_cancelled": True, "result": []},
        {
            "result": [
                {"type": "labels", "value": {"start": 21, "end": 25, "text": "Oslo", "labels": ["LOC"]}},
                {"type": "labels", "value": {"start": 0, "end": 9, "text": "Anna Berg", "labels": ["PER"]}},
                {"type": "choices", "value": {"choices": ["news"]}},
            ]
        },
    ],
}  # fmt: skip
FORMS: dict[str, Any] = {
    "doccano": {"id": 1, "text": TEXT, "label": TRIPLES, "Comments": []},
    "doccano relations": {"text": TEXT, "entities": objects("start_offset", "end_offset")},
    "prodigy": {
        "text": TEXT, "spans": objects(), "answer": "accept",
        "tokens": [{"text": "Anna", "start": 0, "end": 4, "id": 0}],
    },
    "spacy": [TEXT, {"entities": TRIPLES}],
    "spacy rows": {"text": TEXT, "entities": TRIPLES},
    "label studio": LABEL_STUDIO,
    "label studio min": {"text": TEXT, "label": [{**span, "labels": [span.pop("label")]} for span in objects()]},
    "pipeline": {"text": TEXT, "entities": [{**each, "score": 0.9, "word": "x"} for each in objects(kind="entity_group")]},
    "bothways spans": {"text": TEXT, "spans": objects()},
    "cluener": {"text": TEXT, "label": {"LOC": {"Oslo": [[21, 24]]}, "PER": {"Anna Berg": [[0, 8]]}}},
    "white space": {"text": TEXT, "labels": [[0, 10, "PER"], [20, 25, "LOC"]]},
    "floats": {"text": TEXT, "labels": [[0.0, 9.0, "PER"], [21.0, 25.0, "LOC"]]},
}  # fmt: skip


def rows_of(*values: Any) -> Iterator[TableRow]:
    return (TableRow(value, f"row {number}") for number, value in enumerate(values, 1))


def in_memory(*values: Any, labelled: bool = True) -> tuple[list[TagExample], list[str]]:
    def parse(row: TableRow) -> TagExample:
        return TASK.example(row.values, where=row.where)

    reading = TASK.read_rows(rows_of(*values), parse, labelled=labelled)
    return list(reading.examples), list(reading.notes)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_tags(form, tmp_path):
    row = FORMS[form]
    file, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n", encoding="utf8")
    array.write_text(json.dumps([row, row]), encoding="utf8")
    from_files = [example for path in (file, array) for example in TASK.read(str(path)).examples]
    examples = [*from_files, *in_memory(row, row)[0]]
    assert {(e.words, e.tags, e.text) for e in examples} == {(WORDS, TAGS, TEXT)}
    assert [e.where for e in from_files][1::2] == [f"{file}:2", f"{array}:record 2"]


@pytest.mark.parametrize("form", ["doccano relations", "label studio min", "cluener"])
def test_a_frame_that_was_read_from_parquet_gives_the_same_tags(form, tmp_path):
    """Its columns hold arrays of arrays; and each row has the keys of all, some without a value."""
    other = {"text": "In Bern", "label": {"LOC": {"Bern": [[3, 6]]}, "ORG": {"In": [[0, 1]]}}}
    rows = [FORMS[form], *([other] if form == "cluener" else [])]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    frame = pandas.read_parquet(tmp_path / "a.parquet")
    first = next(iter(TASK.read(str(tmp_path / "a.parquet")).examples))
    for example in (first, in_memory(*iter_rows(frame, "frame"))[0][0]):
        assert (example.words, example.tags) == (WORDS, TAGS)


def test_the_splitter_that_fits_a_span_is_named():
    text = "U.N. speech"
    with pytest.raises(DataError, match="cuts a word") as raised:
        tags_from_spans(text, split_words(text, "rules"), [CharacterSpan(0, 3, "ORG")], "1")
    assert '**{"task.splitter": "punctuation"}' in str(raised.value.fix)


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([[1, 9, "PER"]], ("0–9", "cuts a word", 'task.splitter": "characters"')),
        ([[0, 6, "PER"]], ("0–9", "cuts a word")),
        ([[0, 9, "PER"], [5, 9, "X"]], ("overlap", "0–9 (PER)", "5–9 (X)")),
        ([[0, 9, "PER"], [0, 9, "PER"]], ("overlap",)),
        ([[4, 4, "PER"]], ("empty",)),
        ([[4, 5, "PER"]], ("white space",)),
        ([[9, 4, "PER"]], ("not in the text of 26 characters",)),
        ([[21, 40, "PER"]], ("not in the text",)),
        ([[-4, 2, "PER"]], ("not in the text",)),
        ([{"start": 22, "end": 26, "label": "LOC", "text": "Oslo"}], ("UTF-16",)),
        ([{"start": 0, "end": 4, "label": "LOC", "text": "Oslo"}], ("'Anna'", "'Oslo'")),
        ([[0, 4]], ("not a span",)),
        ([["0", "4", "PER"]], ("not a span",)),
        ([[float("nan"), 4, "PER"]], ("not a span",)),
        ([[False, True, "PER"]], ("not a span",)),
        ([[0, 4, ""]], ("not a span",)),
        ([{"start": None, "end": None, "entity_group": "PER"}], ("not a span",)),
        ([{"start": 0, "end": 4, "labels": ["A", "B"]}], ("not a span",)),
        ([{"start": 0, "end": 4, "entity": "B-PER"}], ("tag of a token",)),
        ("PER", ("'text' holds a text, not a list of words", '"spans"')),
        ({"姓名": 1}, ("not a list of spans", "{'姓名': 1}")),
    ],
)
def test_spans_that_are_refused(spans, said, tmp_path):
    file = tmp_path / "a.jsonl"
    good = {"text": TEXT, "entities": TRIPLES}
    rows = [good, {"text": TEXT, "entities": spans}, good]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    reading = TASK.read(str(file))
    with pytest.raises(DataError) as error:
        list(reading.examples)
    assert next(reading.table.rows, None) is None, "the file is closed when a row is refused"
    assert error.value.where == f"{file}:2"
    assert all(part in str(error.value) for part in said)
    assert ("UTF-16" in str(error.value)) == ("UTF-16" in said)


def test_rows_that_nobody_annotated_are_counted(tmp_path):
    accepted = FORMS["prodigy"]
    rejected = {"text": "Oslo", "spans": [[0, 99, "X"]], "answer": "reject"}
    examples, notes = in_memory(rejected, accepted, rejected, accepted)
    assert len(examples) == 2
    assert notes == ['2 rows left out: their "answer" is reject']
    empty = {"data": {"text": "Oslo"}, "annotations": []}
    examples, notes = in_memory(LABEL_STUDIO, empty)
    assert (len(examples), len(notes)) == (1, 1)
    examples, notes = in_memory(LABEL_STUDIO, empty, labelled=False)
    assert (len(examples), notes) == (2, [])
    ((example,), _) = in_memory({"data": {"text": "Oslo"}, "annotations": [{"result": None}]})
    assert example.tags == ("O",)
    with pytest.raises(DataError, match=r"2 texts in its data \(a, b\)\n.*Call the text"):
        in_memory({"data": {"a": "Oslo", "b": "Rome"}, "annotations": [{"result": []}]})
    result = [{"value": {"start": 0, "end": 4, "labels": ["X"]}}]
    with pytest.raises(DataError, match="2 annotations that differ"):
        in_memory({"data": {"text": TEXT}, "annotations": [{"result": []}, {"result": result}]})
    for result in ([None], [{"value": None}], 5):
        with pytest.raises(DataError, match=r"has an annotation that is not an object"):
            in_memory({"data": {"text": "Oslo"}, "annotations": [{"result": result}]})
    file = tmp_path / "a.json"
    broken = {"data": {"text": "Oslo"}, "annotations": [5]}
    file.write_text(json.dumps([LABEL_STUDIO, broken]), encoding="utf8")
    with pytest.raises(DataError, match="has an annotation that is not an object") as caught:
        list(TASK.read(str(file)).examples)
    assert caught.value.where == f"{file}:record 2"
    file.write_text(json.dumps([empty]), encoding="utf8")
    with pytest.raises(DataError, match="no annotated row"):
        TASK.read(str(file))


def test_words_and_tags_go_before_spans():
    row = {"text": "a b", "tokens": ["a", "b"], "ner_tags": ["O", "B-X"], "spans": [[0, 1, "Y"]]}
    assert in_memory(row)[0] == [TagExample(("a", "b"), ("O", "B-X"), "row 1")]
    prediction = {
        "entities": [{"type": "PER", "text": "Anna", "start": 0, "end": 4, "score": 0.9}],
        "words": ["Anna", "!"], "tags": ["B-PER", "O"],
    }  # fmt: skip
    assert in_memory(prediction)[0] == [TagExample(("Anna", "!"), ("B-PER", "O"), "row 1")]
    examples, _ = in_memory({"text": "a b", "tokens": ["a", "b"], "spans": [[0, 1, "Y"]]})
    assert examples[0].tags == ("B-Y", "O")


@given(st.data())
def test_the_spans_of_words_are_their_tags(data):
    text = data.draw(st.text(st.sampled_from("ab中 .-👍\u0301\n"), max_size=20))
    words = split_words(text)
    tags, number = ["O"] * len(words), 0
    spans = []
    while number < len(words):
        count = data.draw(st.integers(1, 3)) if data.draw(st.booleans()) else 0
        last = min(number + count, len(words))
        if count:
            spans.append(CharacterSpan(words[number][0], words[last - 1][1], "X"))
            tags[number:last] = ["B-X", *["I-X"] * (last - number - 1)]
        number = max(last, number + 1)
    assert tags_from_spans(text, words, spans, "a text") == tuple(tags)
