"""Preflight of tagged sentences: each finding, by what it says and how grave it is."""

import itertools
import re
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import pytest

from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import Scheme
from bothways.tasks.tagging.task import TaggingTask


def made(*rows: str, name: str = "train") -> list[TagExample]:
    """Sentences of "word/tag word/tag"."""
    pairs = [[tuple(item.split("/")) for item in row.split()] for row in rows]
    return [
        TagExample(tuple(word for word, _ in row), tuple(tag for _, tag in row), f"{name}:{number}")
        for number, row in enumerate(pairs, 1)
    ]


ENOUGH = made(*["a/O b/B-X c/I-X"] * 10)


def said(
    train: Many[TagExample], dev: Many[TagExample] = (), scheme: Scheme = "auto"
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"error": [], "warning": [], "note": []}
    for finding in TaggingTask(scheme=scheme).check(list(train), list(dev)):
        found[finding.severity].append(f"{finding.check}: {finding}")
    return found


def test_sound_data_has_its_baseline_and_nothing_else():
    found = said(ENOUGH, made("d/B-X", name="dev"))
    note = "balance: always answering 'O' would be right for 33.3% of the words"
    assert found == {"error": [], "warning": [], "note": [note]}


TWO_BROKEN = made("a/O b/I-X c/I-X", "d/I-X", name="t")
WITHOUT = [TagExample(("a",), None, "t:2"), TagExample(("a",), ("",), "t:3")]
BLANK = TagExample(("a", " ", ""), ("O", "O", "O"), "t:4")


@pytest.mark.parametrize(
    ("train", "dev", "severity", "message"),
    [
        ([*ENOUGH, TagExample((), (), "t:1")], [], "error", "rows: 1 sentence has no word: t:1"),
        ([*ENOUGH, *WITHOUT], [], "error", "labels: 2 sentences have .* without a tag: t:2, t:3"),
        ([*ENOUGH, *made("a/B-X b/-100")], [], "error", "labels: 1 sentence has .* a tag: train:1"),
        ([*ENOUGH, BLANK], [], "warning", "rows: 2 words are empty .*: t:4 word 2 ' ', t:4 word 3"),
        ([*ENOUGH, *TWO_BROKEN], [], "warning", "2 tags .* IOB2: t:1 word 2 'b' I-X, t:2 word 1"),
        (made("a/B-X b/O", "c/PER"), [], "warning", r"tags of single words: train:2 \('PER'\)"),
        (made("a/O b/O"), [], "error", "nothing to learn: the tags of the training data are 'O'"),
        (made("a/NN"), [], "error", "the tags of the training data are 'NN'"),
        (ENOUGH, made("d/B-Y", "e/B-X f/I-Z", name="dev"), "error", "Y, Z: dev:1, dev:2.* are X"),
        (ENOUGH, made("d/O", name="dev"), "warning", "labels: .* none of the types of entities X"),
        (made("a/NN b/VB"), made("d/NN c/JJ", name="dev"), "error", "lacks, JJ: dev:1"),
        (ENOUGH, made("d/B-X e/NN", name="dev"), "error", "NN: dev:1"),
        ([*ENOUGH, *made("d/B-Y")], [], "warning", r"balance: .* fewer than 10 .*: Y \(1\)"),
        (ENOUGH, made("a/O b/B-X c/O", "d/O", name="dev"), "warning", "overlap: 1 of 2 .*: dev:1"),
    ],
)
def test_each_flaw_is_one_finding(train, dev, severity, message):
    (found,) = said(train, dev)[severity]
    assert re.search(message, found)


def test_context_without_documents_is_told():
    """Of a table whose column of documents has no common name."""
    (finding,) = TaggingTask(context="document").check(ENOUGH, [])[:1]
    assert '**{"columns.document": NAME}' in str(finding)
    neighbour = replace(ENOUGH[0], before=(("a",),))
    assert "document" not in str(TaggingTask(context="document").check([*ENOUGH, neighbour], []))


def test_the_scheme_is_said_and_may_be_given():
    (note, _) = said(made(*["a/I-X b/O"] * 10))["note"]
    assert note == "labels: the tags of the training data are IOB1; they are read as IOB2"
    bioes = said(ENOUGH, made("a/S-X", name="dev"))["note"]
    assert any("the dev data are BIOES; they are read as IOB2" in each for each in bioes)
    assert len(said(ENOUGH, scheme="iob1")["warning"]) == 1
    (error,) = said(made("a/S-X", "b/NN"), scheme="iob2")["error"]
    assert "task.scheme: the training data has tags that IOB2 lacks: NN, S-X" in error
    assert said(made("a/O b/B-X c/L-X d/U-X"), scheme="bioes")["error"] == []
    assert said(made("a/B-X b/O", "c/PER"), scheme="plain")["warning"] == []
    assert said(made("a/NN b/O", "c/VB"))["warning"] == []
    assert "are all absent" in said([TagExample(("a",), None)])["error"][1]


def of_file(path: Path, text: str) -> list[TagExample]:
    path.write_text(text, encoding="utf8")
    return list(TaggingTask().read(str(path)).examples)


def tables(train: list[TagExample]) -> list[str]:
    """What is said of the form of the data."""
    form = re.compile("have blanks|begins with a header|different tags")
    return list(filter(form.search, itertools.chain.from_iterable(said(train).values())))


@pytest.mark.parametrize("header", ["", "sentence\tlabel\n"])
def test_texts_with_labels_are_no_words_with_tags(tmp_path, header):
    rows = "a good film\t1\na book that is far too long to be shown whole\t0\nbad\t0\n" * 2
    train = of_file(tmp_path / "t.tsv", header + rows)
    (error,), first = said(train)["error"], 1 + len(header[:1])
    assert error.startswith(
        f"rows: 4 of {5 + first} words of the training data or their tags have "
    )
    assert f"{tmp_path}/t.tsv:1 word {first} 'a good film' with the tag '1'" in error
    assert "the dev data" in said(ENOUGH, train)["error"][0]


@pytest.mark.parametrize("line", ["Anna/B-PER lives/O", "[Anna](PER) lives", "Anna|B-PER lives|O"])
def test_words_with_their_tags_inside_are_refused(line, tmp_path):
    """Two of them look like two columns."""
    error = said(of_file(tmp_path / "t.txt", f"{line}\n\n" * 4))["error"][0]
    assert "hold a word with its tag" in error
    assert f"{tmp_path}/t.txt:1 word 1 {line.split(maxsplit=1)[0]!r}" in error


def test_labels_before_texts_are_no_words_with_tags(tmp_path):
    (error,) = tables(of_file(tmp_path / "t.tsv", f"1\t{'very ' * 20}good film\n"))
    assert f"'1' with the tag '{('very ' * 8)[:40]}…'" in error


@pytest.mark.parametrize(
    "header", ["label\ttext_a", "Text\tPOS", "index\tsentence1\tsentence2\tlabel"]
)
def test_a_header_is_no_word(tmp_path, header):
    words = header.split()
    between = "\t_" * (len(words) - 2)
    rows = f"{words[0]}{between}\tB-X\nb{between}\tO\n"
    (error,) = tables(of_file(tmp_path / "t.tsv", f"{header}\n{rows}"))
    assert f"{tmp_path}/t.tsv:1 {words[0]!r} with the tag {words[-1]!r}. Remove that" in error


@pytest.mark.parametrize(
    ("rows", "said_of_it"),
    [
        (["a/B_X b/I_X c/O"], "write B-X for B_X, I-X for I_X."),
        (["a/X-B b/X-I c/O"], "write B-X for X-B, I-X for X-I."),
        (["a/b-x b/0"], "B-x for b-x, O for 0"),
        (["a/B-X b/0 c/I-X"], "O for 0"),
        (["a/PER b/O c/O d/O"], "write I-PER for PER"),
        (["a/1 b/0 c/3"], "numbers as tags"),
        (["a/_ b/_ c/NN"], "tag _"),
        (["a/(X* b/(Y*) c/*)"], "brackets"),
        (["1/NN 2/VB 3/NN"], "numbers of their words"),
        (["a/O"] * 9 + ["b/B-X"] * 9, "a single word"),
        (["科0/O 技1/B-X"], "Remove the digits"),
        (["北京/B-X 很/O 大/O"] * 2 + ["a/O"], "2 sentences have words of a script without blanks"),
        (["ฉัน/O ไป/O กรุงเทพ/B-X"], "without blanks"),
        (["a/O b/B-X " * 300], "an empty line ends a sentence"),
        (["a/a b/b c/c d/d e/e f/f g/g h/h i/i j/j"], "the words themselves"),
    ],
)
def test_what_looks_like_something_else_is_told(rows, said_of_it):
    assert any(said_of_it in warning for warning in said(made(*rows))["warning"])


@pytest.mark.parametrize("rows", [["北/B-X 京/I-X"], ["a/O"] * 2 + ["北京/B-X"]])
def test_words_that_texts_are_cut_into_are_not_told(rows):
    assert not any("script" in warning for warning in said(made(*rows))["warning"])
    words, task = made("北京/B-X 很/O 大/O"), TaggingTask(splitter="whitespace")
    assert "script" not in str(task.check(words, []))
    spans = [replace(example, text="北京很大", starts=(0, 2, 3)) for example in words]
    assert "script" not in str(TaggingTask().check(spans, []))


def test_tags_that_hardly_recur_are_told():
    assert tables(made(" ".join(f"w/{number // 2}" for number in range(100)))) == []
    (warning,) = tables(made(" ".join(f"w/{min(number, 50)}" for number in range(100))))
    message = "labels: the 100 words of the training data have 51 different tags, such as 'w' with"
    assert warning.startswith(message)
    assert tables(made(" ".join(f"w/{number}" for number in range(99)))) == []  # too few to tell


@pytest.mark.parametrize(
    "text",
    [
        "The\tDT\ntext\tNN\nlabel\tNN\n\n10 000\tCD\nfilms\tNNS\n",
        "text\tNN\nis\tVBZ\n",
        "it\tPRP\ndog\tNN\n's\tPOS\ntail\tNN\n",
        "word\tpos\nis\tpos\n",
    ],
)
def test_parts_of_speech_are_left_alone(tmp_path, text):
    assert tables(of_file(tmp_path / "t.conll", text)) == []
