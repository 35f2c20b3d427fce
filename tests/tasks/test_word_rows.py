"""Tables with a word in each row, and words that are single characters."""

from pathlib import Path
from typing import Any

import pytest

from bothways.core.errors import DataError
from bothways.data.tables import TableRow
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import read_rows
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.table_rows import TagColumns
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.tagging.word_splitter import choose_splitter

PLAIN = "sentence_id,words,labels\n1,Anna,B-PER\n1,sings,O\n2,in,O\n2,Oslo,B-LOC\n"
KAGGLE = (
    "Sentence #,Word,POS,Tag\nSentence: 1,Anna,NNP,B-per\n,sings,VB,O\nSentence: 2,in,IN,O\n"
    ',"Oslo,",NNP,B-geo\n'
)


def read(path: Path, text: str, task: TaggingTask, **options: Any) -> list[TagExample]:
    path.write_text(text, encoding="utf8")
    return list(task.read(str(path), **options).examples)


def test_rows_of_words_are_joined_in_order(tmp_path):
    file = tmp_path / "a.csv"
    assert read(file, PLAIN, TaggingTask()) == [
        TagExample(("Anna", "sings"), ("B-PER", "O"), f"{file}:2"),
        TagExample(("in", "Oslo"), ("O", "B-LOC"), f"{file}:4"),
    ]
    for columns in (
        None,
        TagColumns("Word", "Tag"),
        TagColumns("Word", "Tag", sentence="Sentence #"),
    ):
        examples = read(file, KAGGLE, TaggingTask(), columns=columns)
        assert [(e.words, e.tags) for e in examples] == [
            (("Anna", "sings"), ("B-per", "O")), (("in", "Oslo,"), ("O", "B-geo")),
        ]  # fmt: skip
    task = TaggingTask().read(str(file), TagColumns("Word", "POS")).task
    assert task.columns == TagColumns("Word", "POS", sentence="Sentence #")
    words = task.read(str(file), labelled=False).examples
    assert [e.words for e in words] == [("Anna", "sings"), ("in", "Oslo,")]
    words = TaggingTask().read(str(file), labelled=False).examples
    assert [e.words for e in words] == [("Anna", "sings"), ("in", "Oslo,")]


def test_a_named_column_of_sentences(tmp_path):
    text = "tweet,word,tag\nx,Anna,B-PER\nx,sings,O\ny,Oslo,B-LOC\n"
    columns = TagColumns(sentence="tweet")
    examples = read(tmp_path / "a.csv", text, TaggingTask(), columns=columns)
    assert [e.words for e in examples] == [("Anna", "sings"), ("Oslo",)]
    with pytest.raises(DataError, match=r"task\.columns\.sentence") as error:
        read(tmp_path / "a.csv", text, TaggingTask())
    assert error.value.where == f"{tmp_path / 'a.csv'}:2"
    with pytest.raises(DataError, match="no column 'page'"):
        TaggingTask().read(str(tmp_path / "a.csv"), TagColumns(sentence="page"))


def test_texts_beside_a_number_stay_texts(tmp_path):
    text = "sentence_id,text\n1,Anna sings.\n1,In Oslo.\n"
    examples = list(
        TaggingTask().read(str(write(tmp_path / "a.csv", text)), labelled=False).examples
    )
    assert [e.text for e in examples] == ["Anna sings.", "In Oslo."]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf8")
    return path


@pytest.mark.parametrize("kind", ["pandas", "dicts", "dataset"])
def test_rows_in_memory_are_read_as_files(kind, tmp_path):
    import datasets
    import pandas

    from bothways.core.progress import SILENT

    frame = pandas.read_csv(write(tmp_path / "a.csv", KAGGLE))
    rows: Any = {
        "pandas": frame,
        "dicts": frame.to_dict("records"),
        "dataset": datasets.Dataset.from_pandas(frame),
    }[kind]
    examples = read_rows(rows, TaggingTask(), "train", SILENT).examples
    assert [(e.words, e.tags) for e in examples] == [
        (("Anna", "sings"), ("B-per", "O")), (("in", "Oslo,"), ("O", "B-geo")),
    ]  # fmt: skip
    assert [e.where for e in examples] == ["train row 1", "train row 3"]


def test_an_absent_word_is_refused():
    rows = [
        {"sentence_id": 1, "word": "a", "tag": "O"},
        {"sentence_id": 1, "word": None, "tag": "O"},
    ]
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
        ([], "auto"),
    ],
)
def test_single_characters_choose_the_splitter(words, splitter):
    assert choose_splitter(words) == splitter
    example = TagExample(tuple(words), ("O",) * len(words))
    assert TaggingTask().adapted([example]).splitter == splitter
    assert TaggingTask(splitter="rules").adapted([example]).splitter == "rules"


def test_the_settings_of_a_run_keep_the_columns():
    task = TaggingTask(columns=TagColumns("word", "tag", sentence="tweet"))
    config = FinetuneConfig(model="m", train="a.csv", task=task)
    assert config.task.columns.sentence == "tweet"
