"""Tagged words from columns, tables and running text."""

import gzip
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bothways.core.errors import DataError
from bothways.data.tables import TableRow
from bothways.finetuning.data import read_rows
from bothways.tasks.tagging.examples import (
    NEIGHBOURS,
    TagColumns,
    TagExample,
    open_tagged,
    with_context,
)
from bothways.tasks.tagging.running_text import choose_splitter
from bothways.tasks.tagging.task import TaggingTask

CONLL = """-DOCSTART- -X- O O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

Peter NNP B-NP B-PER
# NN I-NP I-PER

-DOCSTART- -X- O O

End NN B-NP O
"""


GUESS = TagColumns()


def opened(source, asked: TagColumns = GUESS, usual: TagColumns = GUESS, labelled: bool = True):
    result = open_tagged(TaggingTask(usual), str(source), asked, labelled=labelled)
    return result.task.columns, list(result.examples), result.share


def read(source: object, asked: TagColumns = GUESS, labelled: bool = True) -> list[TagExample]:
    return [example for _, example in opened(source, asked, labelled=labelled)[1]]


def write(file: Path, text: str) -> Path:
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


@pytest.mark.parametrize("name", ["a.conll", "a.txt", "a.bio.gz", "a.train", "a"])
def test_columns_of_words_and_tags(tmp_path, name):
    file = write(tmp_path / name, CONLL)
    columns, found, share = opened(file)
    assert columns == TagColumns()
    assert [document for document, _ in found] == [1, 1, 2]
    assert [example for _, example in found] == [
        TagExample(("EU", "rejects"), ("B-ORG", "O"), f"{file}:3"),
        TagExample(("Peter", "#"), ("B-PER", "I-PER"), f"{file}:6"),
        TagExample(("End",), ("O",), f"{file}:11"),
    ]
    assert share() == 1.0


def test_other_columns_by_number(tmp_path):
    file = write(tmp_path / "a.conll", CONLL)
    columns, found, _ = opened(file, TagColumns(label="1"))
    assert columns == TagColumns(None, "1")
    assert found[0][1].tags == ("NNP", "VBZ")
    assert opened(file, usual=columns)[1] == found
    of_a_table = TagColumns("tokens", "ner_tags")
    assert opened(file, usual=of_a_table)[1][0][1].tags == ("B-ORG", "O")


def test_tabs_blanks_line_ends_and_comments(tmp_path):
    text = "# newdoc id = 1\n# sent_id = 1\n# text = a b\n1\ta b\t_\tX\r\n2\t\t_\tY\r\n \r\n\r\n# newdoc\n# id 7\n1\t#\tz\tO"
    (_, first), (_, second) = opened(write(tmp_path / "a.conllu", text), TagColumns("1", "3"))[1]
    assert (second.words, second.tags) == (("#",), ("O",))
    assert (first.words, first.tags) == (("a b", ""), ("X", "Y"))
    assert first.where == f"{tmp_path / 'a.conllu'}:4"
    tweets = "#newdocs O\nx O\n\n#id\tO\n\n#newparty B-X\n\n#newdoc O\n"
    found = opened(write(tmp_path / "tweets.conll", tweets))[1]
    words = [("#newdocs", "x"), ("#id",), ("#newparty",), ("#newdoc",)]
    assert [(document, example.words) for document, example in found] == [(0, x) for x in words]
    # A document begins without an empty line before it.
    file = write(tmp_path / "t.conll", "the O\n-DOCSTART- -X-\n\nrain B-LOC\nends O\n")
    assert opened(file)[1] == [
        (0, TagExample(("the",), ("O",), f"{file}:1")),
        (1, TagExample(("rain", "ends"), ("B-LOC", "O"), f"{file}:4")),
    ]
    # A word of many digits is no counter.
    file = write(tmp_path / "digits.conll", f"{'2' * 5000} EU B-X\n{'2' * 5000} b O\n")
    assert read(file) == [TagExample(("2" * 5000,) * 2, ("B-X", "O"), f"{file}:1")]


def test_words_without_tags(tmp_path):
    file = write(tmp_path / "a.conll", "EU\nrejects O\n")
    assert read(file, labelled=False) == [TagExample(("EU", "rejects"), None, f"{file}:1")]
    file = write(tmp_path / "a.txt", "1 EU\n2 rejects\n")
    example = TagExample(("EU", "rejects"), None, f"{file}:1")
    assert read(file, TagColumns("1"), labelled=False) == [example]
    file = write(tmp_path / "b.conll", "1 EU\n2 rejects\n")
    trained = opened(file, usual=TagColumns("1", "3"), labelled=False)
    assert trained[1] == [(0, replace(example, where=f"{file}:1"))]
    with pytest.raises(DataError, match=r"has 1 column \(EU\); the word is to be column 1\n"):
        read(write(tmp_path / "a.conll", "EU\n"), TagColumns("1"), labelled=False)


def test_lines_of_text(tmp_path):
    file = write(tmp_path / "a.txt", "Anna lives.\n\nIn Oslo\n")
    columns, found, _ = opened(file, usual=TagColumns("tokens", "tags"), labelled=False)
    assert columns == TagColumns("tokens", "tags")  # as in training
    assert [document for document, _ in found] == [0, 1, 1]
    assert [example for _, example in found] == [
        TagExample(("Anna", "lives", "."), None, f"{file}:1", "Anna lives.", (0, 5, 10)),
        TagExample((), None, f"{file}:2", "", ()),
        TagExample(("In", "Oslo"), None, f"{file}:3", "In Oslo", (0, 3)),
    ]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("id\ttext\n1\tAnna lives.\n2\tIn Oslo\n", TagColumns()),
        ("id\tsays\n1\tAnna lives.\n2\tIn Oslo\n", TagColumns("says")),
    ],
)
@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_a_table_of_texts_between_tabs(tmp_path, name, text, asked):
    file = write(tmp_path / name, text)
    found = read(file, asked, labelled=False)
    assert [e.words for e in found] == [("Anna", "lives", "."), ("In", "Oslo")]
    assert [e.whole for e in found] == ["Anna lives.", "In Oslo"]
    assert found[0].where == f"{file}:2"


def test_columns_between_tabs_stay_columns(tmp_path):
    file = write(tmp_path / "a.tsv", "In\tO\nNew York\tB-LOC\n\nAnna\tB-PER\n")
    assert [e.words for e in read(file, labelled=False)] == [("In", "New York"), ("Anna",)]
    tags = read(file, TagColumns("1"), labelled=False)
    assert [e.words for e in tags] == [("O", "B-LOC"), ("B-PER",)]
    (example,) = read(write(tmp_path / "b.tsv", "text\tO\nAnna\tB-PER\n"))
    assert example.tags == ("O", "B-PER")
    (example,) = read(write(tmp_path / "c.tsv", "New York\tB-LOC\n"))
    assert example.words == ("New York",)  # tags that are there say enough


def test_texts_are_not_taken_for_words(tmp_path):
    file = write(tmp_path / "a.tsv", "said\tid\nAnna lives\t1\nIn Oslo\t2\n")
    message = r"a\.tsv:1: 2 of the first 3 words have blanks, .*: 'Anna lives'\n.*text=NAME"
    with pytest.raises(DataError, match=message):
        read(file, labelled=False)
    with pytest.raises(DataError, match=r"empty\.tsv: has no word"):
        read(write(tmp_path / "empty.tsv", ""), labelled=False)


@pytest.mark.parametrize(
    "text",
    ["Anna\tB-PER\nlives\tO\n", "-DOCSTART-\n\n# id 1\nAnna NNP B-PER\nlives VB O\n\n"],
)
def test_columns_in_a_txt_are_predicted_too(tmp_path, text):
    file = write(tmp_path / "a.txt", text)
    for columns in (TagColumns(), TagColumns("0")):
        assert read(file, columns, labelled=False)[0].words == ("Anna", "lives")
    for lines in ("Type O\n", "Type O\nis rare\n", "answer B\nanswer O\n", "O\nO\n"):
        assert len(read(write(file, lines), labelled=False)) == lines.count("\n")


def test_the_standard_input(monkeypatch):
    def given_(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    given_("Anna lives\n")
    assert read("-", labelled=False)[0].words == ("Anna", "lives")
    given_("Anna B-PER\nlives O\n")
    assert read("-") == [TagExample(("Anna", "lives"), ("B-PER", "O"), "standard input:1")]
    given_('{"t": ["Anna", "lives"]}\n')
    example = TagExample(("Anna", "lives"), None, "standard input:1")
    assert read("-", TagColumns("t"), labelled=False) == [example]
    given_('{"t": "Anna lives"}\n')
    assert read("-", TagColumns("t"), labelled=False)[0].starts == (0, 5)


def write_rows(file: Path, rows: list[dict[str, object]]) -> Path:
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return file
    return write(file, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "names"),
    [("a.jsonl", "words tags"), ("a.jsonl.gz", "tokens ner_tags"), ("a.parquet", "tokens labels")],
)
def test_tables_of_lists(tmp_path, name, names):
    words, tags = names.split()
    row = {words: ["EU", "rejects"], tags: ["B-ORG", "O"], "pos_tags": [1, 2]}
    rows = [{**row, "text": "EU rejects"}]
    file = write_rows(tmp_path / name, rows)
    columns, found, _ = opened(file)
    assert columns == TagColumns(words, tags)
    (example,) = (example for _, example in found)
    assert (example.words, example.tags) == (("EU", "rejects"), ("B-ORG", "O"))
    assert example.where.startswith(str(file))
    assert opened(file, TagColumns(label="pos_tags"))[1][0][1].tags == ("1", "2")
    assert opened(file, usual=TagColumns(words, "pos_tags"))[1][0][1].tags == ("1", "2")
    assert opened(file, labelled=False)[0] == TagColumns(words)


def test_documents_of_a_table(tmp_path):
    pages = {"a": 1, "b": 1, "c": 2}
    rows = [{"words": [word], "tags": ["O"], "page": page} for word, page in pages.items()]
    file = write_rows(tmp_path / "a.jsonl", rows)
    columns, found, _ = opened(file, TagColumns(document="page"))
    assert columns == TagColumns("words", "tags", "page")
    assert str(columns) == "text = 'words', label = 'tags', document = 'page'"
    assert [document for document, _ in found] == [1, 1, 2]
    examples = with_context(iter(opened(file, usual=columns)[1]))
    assert [example.before for example in examples] == [(), (("a",),), ()]
    assert [document for document, _ in opened(file)[1]] == [None, None, None]


@pytest.mark.parametrize(
    ("words", "tags", "asked", "message"),
    [
        (["a", "b"], ["O"], GUESS, r":1: has 2 words and 1 tag"),
        ("a b", ["O"], GUESS, r":1: column 'words' holds a text, not a list of words"),
        (["a", None], ["O"], GUESS, r":1: column 'words' holds a list with NoneType and str"),
        (["a", "\ud83d"], ["O", "O"], GUESS, r":1: column 'words' holds U\+D83D at character 0"),
        (["a"], "O", GUESS, r":1: column 'tags' holds a text, not a list of tags"),
        (["a"], None, GUESS, r":1: column 'tags' holds NoneType, not a list of tags"),
        (["a"], ["O"], TagColumns("w"), r": has no column 'w'; it has words, tags"),
        (["a"], ["O"], TagColumns(document="d"), r": has no column 'd'"),
    ],
)
def test_rows_that_cannot_be(tmp_path, words, tags, asked, message):
    file = write_rows(tmp_path / "a.jsonl", [{"words": words, "tags": tags}])
    with pytest.raises(DataError, match=f"^{file}{message}"):
        read(file, asked)


@pytest.mark.parametrize("names", ["words, x", "tags, labels"])
def test_a_column_of_tags_that_is_not_clear_is_asked_for(tmp_path, names):
    row = {"words": ["a"], **{name: ["O"] for name in names.split(", ")}}
    with pytest.raises(DataError, match=rf"has the tags \({names}\); use label=NAME"):
        read(write_rows(tmp_path / "a.jsonl", [row]))


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=6))
def test_spans_slice_the_text_back_into_words(words):
    example = TagExample(tuple(words))
    assert [example.whole[begin:end] for begin, end in example.spans] == words


def test_neighbours_are_of_the_document_and_no_more_than_can_be_read():
    made = [(number // 500, TagExample((str(number),) * 7, ("O",) * 7)) for number in range(600)]
    alone = [(None, TagExample(("x",))), (None, TagExample(("y",)))]
    found = list(with_context(iter([*made, *alone])))
    assert found[-2:] == [example for _, example in alone]
    words = tuple(example.words for _, example in made)
    assert tuple(example.words for example in found[:-2]) == words
    assert found[0].before == found[499].after == found[500].before == ()
    assert found[1].before == words[:1]
    enough = -(-NEIGHBOURS // 7)
    assert found[300].before == words[300 - enough : 300]
    assert found[300].after == words[301 : 301 + enough]


PLAIN = "sentence_id,words,labels\n1,Anna,B-PER\n,,O\n1,sings,\n2,in,O\n2,Oslo,B-LOC\n"
KAGGLE = (
    "Sentence #,Word,POS,Tag\nSentence: 1,Anna,NNP,B-per\n,sings,VB,O\nSentence: 2,in,IN,O\n"
    ',"Oslo,",NNP,B-geo\n'
)
OF_KAGGLE = [(("Anna", "sings"), ("B-per", "O")), (("in", "Oslo,"), ("O", "B-geo"))]


def read_file(path: Path, text: str, task: TaggingTask, **options: Any) -> list[TagExample]:
    path.write_text(text, encoding="utf8")
    return list(task.read(str(path), **options).examples)


def test_rows_of_words_are_joined_in_order(tmp_path):
    file = tmp_path / "a.csv"
    assert read_file(file, PLAIN, TaggingTask()) == [
        TagExample(("Anna", "", "sings"), ("B-PER", "O", ""), f"{file}:2"),
        TagExample(("in", "Oslo"), ("O", "B-LOC"), f"{file}:5"),
    ]
    named = TagColumns("Word", "Tag")
    for columns in (None, named, replace(named, sentence="Sentence #")):
        examples = read_file(file, KAGGLE, TaggingTask(), columns=columns)
        assert [(e.words, e.tags) for e in examples] == OF_KAGGLE
    task = TaggingTask().read(str(file), TagColumns("Word", "POS")).task
    assert task.columns == TagColumns("Word", "POS", sentence="Sentence #")
    for reader in (task, TaggingTask()):
        words = [example.words for example in reader.read(str(file), labelled=False).examples]
        assert words == [("Anna", "sings"), ("in", "Oslo,")]
    with pytest.raises(DataError, match=r"the tags \(sentence_id, word\)"):
        read_file(file, "sentence_id,word\n1,Anna\n1,sings\n", TaggingTask())
    texts = "sentence_id,text\n1,Anna sings.\n1,In Oslo.\n"  # texts beside a number stay texts
    examples = read_file(file, texts, TaggingTask(), labelled=False)
    assert [example.text for example in examples] == ["Anna sings.", "In Oslo."]


@pytest.mark.parametrize("name", ["Sentence", "sent_id", "sentence #"])
def test_a_column_of_numbers_may_have_the_name_of_a_text(tmp_path, name):
    path, rows = tmp_path / "a.csv", [(1, "Anna", "B-PER"), (1, "sings", "O"), (2, "Oslo", "O")]
    table = [dict(zip((name, "Word", "Tag"), row, strict=True)) for row in rows]
    lines = "".join(",".join(map(str, row.values())) + "\n" for row in table)
    from_file = read_file(path, f"{name},Word,Tag\n{lines}", TaggingTask())
    in_memory = read_rows(table, TaggingTask(), "train").examples
    for examples in (from_file, in_memory):
        assert [e.words for e in examples] == [("Anna", "sings"), ("Oslo",)]


def test_a_named_column_of_sentences(tmp_path):
    text = "tweet,word,tag\nx,Anna,B-PER\nx,sings,O\ny,Oslo,B-LOC\n"
    columns = TagColumns(sentence="tweet")
    examples = read_file(tmp_path / "a.csv", text, TaggingTask(), columns=columns)
    assert [e.words for e in examples] == [("Anna", "sings"), ("Oslo",)]
    with pytest.raises(
        DataError, match=r"name the sentences: .*columns\.sentence\": NAME"
    ) as error:
        read_file(tmp_path / "a.csv", text, TaggingTask())
    assert error.value.where == f"{tmp_path / 'a.csv'}:2"
    with pytest.raises(DataError, match="no column 'page'"):
        TaggingTask().read(str(tmp_path / "a.csv"), TagColumns(sentence="page"))


@pytest.mark.parametrize("kind", ["pandas", "dicts", "dataset"])
def test_rows_in_memory_are_read_as_files(kind, tmp_path):
    import datasets
    import pandas

    from bothways.core.progress import SILENT

    frame = pandas.read_csv(write(tmp_path / "a.csv", KAGGLE))
    dataset, dicts = datasets.Dataset.from_pandas(frame), frame.to_dict("records")
    rows = {"pandas": frame, "dicts": dicts, "dataset": dataset}[kind]
    examples = read_rows(rows, TaggingTask(), "train", SILENT).examples
    assert [(e.words, e.tags) for e in examples] == OF_KAGGLE
    assert [e.where for e in examples] == ["train row 1", "train row 3"]


@pytest.mark.parametrize("form", [list, tuple, lambda items: np.array(items, dtype=object)])
def test_lists_in_memory_have_any_form(form):
    tags, words = form(["B-PER", "O"]), form(["Anna", "sings"])
    example = TaggingTask().example({"words": words, "tags": tags})
    assert (example.words, example.tags) == (("Anna", "sings"), ("B-PER", "O"))
    spans = form([{"start": 0, "end": 4, "label": "PER"}])
    assert TaggingTask().example({"text": "Anna sings", "spans": spans}).tags == ("B-PER", "O")
    with pytest.raises(DataError, match="column 'text' holds a text, not a list of words"):
        TaggingTask().example({"text": "Anna sings", "tags": tags})


def test_a_row_that_cannot_be_read_ends_the_sentences(tmp_path):
    """As an error of the file, which is no `RowError`: the sentence would lose a word."""
    file = write(tmp_path / "a.csv", PLAIN + "2,now,O,O\n3,Rome,B-LOC\n")
    with pytest.raises(DataError, match=r"a\.csv:7: has 4 values for 3 columns") as error:
        list(TaggingTask().read(str(file)).examples)
    assert type(error.value) is DataError


def test_an_absent_word_is_refused():
    rows = [{"sentence_id": 1, "word": word, "tag": "O"} for word in ("a", None)]
    table = (TableRow(row, f"row {number}") for number, row in enumerate(rows, 1))
    with pytest.raises(DataError, match="not a word") as error:
        list(TaggingTask().read_rows(table, lambda row: row).examples)
    assert error.value.where == "row 2"


@pytest.mark.parametrize(
    ("words", "splitter"),
    [
        (["我", "有", "1", "0", "年", "A", "P", "P"], "auto"),
        (["我", "有", "1", "0", "年", "。", "北", "京", "东", "京"], "characters"),
        (["東", "京", "タ", "ワ", "ー", "に"], "characters"),
        (["我", "有", "10", "年", "北京"], "auto"),
        (["a", "b", "c"], "auto"),
        (["א", "ב", "ג"], "auto"),
        ([], "auto"),
    ],
)
def test_single_characters_choose_the_splitter(words, splitter):
    assert choose_splitter(words) == splitter
    example = TagExample(tuple(words), ("O",) * len(words))
    assert TaggingTask().adapted([example]).splitter == splitter
    assert TaggingTask(splitter="rules").adapted([example]).splitter == "rules"
