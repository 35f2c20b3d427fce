"""Odd files of columns: which column is the word and which the tag, and what is no word."""

from pathlib import Path
from typing import Any

import pytest

from bothways.core.errors import DataError, render
from bothways.tasks.base import Reading
from bothways.tasks.tagging.examples import TagColumns, open_tagged
from bothways.tasks.tagging.task import TaggingTask

NONE = TagColumns()


def opened(
    path: Path, asked: TagColumns = NONE, usual: TagColumns = NONE, *, labelled: bool = True
) -> Reading[Any]:
    return open_tagged(TaggingTask(usual), str(path), asked, labelled=labelled)


def read(path: Path, text: str, asked: TagColumns = NONE) -> tuple[list[tuple[str, str]], str]:
    """Return the sentences, words and tags joined by blanks, and the notes."""
    path.write_text(text, encoding="utf8")
    file = opened(path, asked)
    pairs = [(" ".join(item.words), " ".join(item.tags or ())) for _, item in file.examples]
    return pairs, " ".join(file.notes)


CONLL_U = """# sent_id = 1
1	anna	anna	PROPN	_	_	2	nsubj	_	{0}
2-3	cant	_	_	_	_	_	_	_	_
2	ca	can	AUX	_	_	0	root	_	{1}
3	nt	not	PART	_	_	0	root	_	{1}
3.1	sings	sing	VERB	_	_	_	_	0:x	_

# text = In Oslo.
1	Oslo	Oslo	PROPN	_	_	0	root	_	{2}
"""
CONLL_2012 = """#begin document (nw/x); part 000
nw/x 0 0 In IN (TOP(PP* - - - - * -
nw/x 0 1 New NNP (NP(NML* - - - - (GPE* (ARG1* (3
nw/x 0 2 York NNP *) - - - - *) *) 3)

nw/x 0 0 Anna NNP (TOP(NP*) - - - - (PERSON) -
nw/x 0 1 . . *)) - - - - * -

#end document
"""


CONLL_2009 = """1 Anna anna anna NNP NN _ _ 2 2 SBJ SBJ Y anna.01 _ A0
2 sings sing sing VBZ VBZ _ _ 0 0 ROOT ROOT Y sing.01 A1 _

1 Oslo oslo oslo NNP NNP _ _ 0 0 ROOT ROOT _ _
"""


@pytest.mark.parametrize(
    ("text", "asked", "sentences"),
    [
        pytest.param(
            "1 anna NNP I-NP B-PER\n2 sings VBZ I-VP O\n\n1 acme NNP I-NP B-ORG\n",
            NONE, [("anna sings", "B-PER O"), ("acme", "B-ORG")], id="a counter first",
        ),
        pytest.param(
            "0 anna B-PER\n1 sings O\n2 . O\n0 acme B-ORG\n",
            NONE, [("anna sings .", "B-PER O O"), ("acme", "B-ORG")], id="restarts without a blank line",
        ),
        pytest.param(
            "1\t1\tanna\tB-PER\n1\t2\tsings\tO\n1\t3\t.\tO\n\n2\t1\tacme\tB-ORG\n2\t2\t.\tO\n",
            NONE, [("anna sings .", "B-PER O O"), ("acme .", "B-ORG O")], id="two counters",
        ),
        pytest.param(
            "7\tanna\tB-PER\n7\tsings\tO\n8\tacme\tB-ORG\n8\tis\tO\n",
            NONE, [("anna sings", "B-PER O"), ("acme is", "B-ORG O")], id="sentences by number",
        ),
        pytest.param(
            CONLL_U.format("_", "_", "SpaceAfter=No"),
            NONE, [("anna ca nt", "PROPN AUX PART"), ("Oslo", "PROPN")], id="CoNLL-U",
        ),
        pytest.param(
            CONLL_U.format("_", "_", "_"), TagColumns("lemma", "DepRel"),
            [("anna can not", "nsubj root root"), ("Oslo", "root")], id="CoNLL-U by name",
        ),
        pytest.param(
            CONLL_U.format("name=B-PER", "SpaceAfter=No|name=O", "name=B-LOC|SpaceAfter=No"),
            NONE, [("anna ca nt", "B-PER O O"), ("Oslo", "B-LOC")], id="tags in MISC",
        ),
        pytest.param(
            CONLL_U.format("NE=B-PER", "SpaceAfter=No", "NE=B-LOC"), TagColumns("1", "9"),
            [("anna ca nt", "B-PER O O"), ("Oslo", "B-LOC")], id="tags in MISC of some words",
        ),
        pytest.param(
            "# global.columns = ID FORM MORE NER\n1\tanna\t_\tB-PER\n2\tsings\t_\tO\n",
            TagColumns("FORM", "ner"), [("anna sings", "B-PER O")], id="global.columns",
        ),
        pytest.param(
            CONLL_2012, NONE,
            [("In New York", "O B-GPE I-GPE"), ("Anna .", "B-PERSON O")], id="CoNLL-2012",
        ),
        pytest.param(
            CONLL_2009, NONE, [("Anna sings", "NNP VBZ"), ("Oslo", "NNP")], id="CoNLL-2009",
        ),
        pytest.param(
            CONLL_2012, TagColumns(None, "pos"),
            [("In New York", "IN NNP NNP"), ("Anna .", "NNP .")], id="CoNLL-2012 by name",
        ),
        pytest.param(
            "anna (PER*\nberg *)\nsings *\noslo (LOC)\n",
            NONE, [("anna berg sings oslo", "B-PER I-PER O B-LOC")], id="brackets",
        ),
        pytest.param(
            "anna (PER*\nberg (LOC)\nsings *)\n", TagColumns(None, "1"),
            [("anna berg sings", "(PER* (LOC) *)")], id="brackets that nest are plain tags",
        ),
        pytest.param(
            "#\thttp://a.org/x [2009-10-17]\n1\tanna\tB-PER\tO\n2\tsings\tO\tO\n\n"
            "# http://a.org/y z\n1\tUni\tB-ORG\tO\n2\tOslo\tI-ORG\tB-LOC\n3\t#\tO\tO\n",
            NONE, [("anna sings", "B-PER O"), ("Uni Oslo #", "B-ORG I-ORG O")], id="GermEval",
        ),
        pytest.param(
            "anna\tB-PER\tO\nsings\tO\tO\nUni\tB-ORG\tB-ORGpart\n", TagColumns(None, "2"),
            [("anna sings Uni", "O O B-ORGpart")], id="the nested column",
        ),
        pytest.param(
            "EU NNP I-NP I-ORG\nsays VBZ I-VP O\n\n-DOCSTART- -X- O O\n\nOslo NNP I-NP I-LOC\n",
            NONE, [("EU says", "I-ORG O"), ("Oslo", "I-LOC")], id="CoNLL-2003 in IOB1",
        ),
        pytest.param(
            "EU NNP I-NP O\nsays VBZ I-VP O\n",
            NONE, [("EU says", "O O")], id="chunks, and no entity in the first lines",
        ),
        pytest.param(
            "B-Rating\t2\nO\tstars\n\nO\tin\nB-Place\tOslo\n",
            NONE, [("2 stars", "B-Rating O"), ("in Oslo", "O B-Place")], id="the tag first",
        ),
        pytest.param(
            "# id 1\tdomain=en\nanna _ _ B-PER\nsings _ _ O\n\n\n# id 2\tdomain=en\nacme _ _ B-ORG\n",
            NONE, [("anna sings", "B-PER O"), ("acme", "B-ORG")], id="MultiCoNER",
        ),
        pytest.param(
            "# sent_id = 1\n# B-HASH\n#oslo B-LOC\nrome B-LOC\n# O\n\n# a comment here\n# another\n#\tO\nx O\n",
            NONE, [("# #oslo rome #", "B-HASH B-LOC B-LOC O"), ("# x", "O O")], id="words with #",
        ),
        pytest.param(
            "TOKEN\tNE-COARSE\tNE-FINE\n# document_id = x\nAnna\tB-pers\tB-pers.ind\nis\tO\tO\n",
            TagColumns(None, "NE-fine"), [("Anna is", "B-pers.ind O")], id="a header of HIPE",
        ),
        pytest.param(
            "# language = en\nsentence_id\tword\ttag\n"
            "1\tAnna\tB-PER\n1\tis\tO\n2\tin\tO\n2\tOslo\tB-LOC\n",
            NONE, [("Anna is", "B-PER O"), ("in Oslo", "O B-LOC")], id="a header and sentences",
        ),
        pytest.param("word NN\nis VBZ\n", NONE, [("word is", "NN VBZ")], id="no header: its tag"),
        pytest.param("word B-X\nis O\n", NONE, [("word is", "B-X O")], id="no header: an entity"),
        pytest.param(
            "1 O\n2 O\n3 B-NUM\n", NONE, [("1 2 3", "O O B-NUM")], id="numbers that are words",
        ),
        pytest.param(
            "0 NN\n1 VB\n0 NN\n1 NN\n", NONE, [("0 1 0 1", "NN VB NN NN")], id="no counter: 0 and 1",
        ),
    ],
)  # fmt: skip
def test_layout_of_an_odd_file(tmp_path, text, asked, sentences):
    assert read(tmp_path / "a.conll", text, asked)[0] == sentences


@pytest.mark.parametrize(
    ("text", "asked", "message"),
    [
        ("EU B-ORG\nrejects\n", NONE, r":2: has 1 column \(rejects\); the word is to be column 0"),
        ("EU B-ORG\n", TagColumns(label="2"), r":1: has 2 columns \(EU \| B-ORG\); .* column 2"),
        ("EU B-ORG\n", TagColumns(text="1"), ":1: has 2 columns"),
        ("EU B-ORG\n", TagColumns(text="word"), ": its columns have numbers, and text = 'word'"),
        (CONLL_U.format("_", "_", "_"), TagColumns("1", "tag"), ": has no column label = 'tag'"),
        ("\n-DOCSTART- O\n\n", NONE, ": has no word"),
        ("EU B-ORG\n", TagColumns(document="page"), ": is read as columns of words, and 'page' is"),
        ("EU B-ORG\n", TagColumns(sentence="id"), ": is read as columns of words, and 'id' is to"),
        ("", NONE, ": has no word"),
        (
            "10\u00a0000 O\nanna\t \tB-PER\t\noslo  B-LOC\n",
            NONE,
            ":2: has 3 columns .*, and most lines 2",
        ),
        ("a\tB-X\tO\nb\tO\tO\nc\tO\n", NONE, ":3: has 2 columns .*, and most lines 3"),
        ("a\tB-X\nb\tO\n# x y\nc\tO\n", NONE, ":3: has 3 columns"),  # in a sentence
        ("anna (PER)\nberg *\nin (LOC*\n\nx *\n", NONE, ":3: the span .LOC is not closed"),
        ("anna (PER)\n" * 1000 + "berg *)\n", NONE, r":1001: '\*\)' does not fit the spans before"),
        ("anna (PER)\n" * 1000 + "berg B-PER\n", NONE, ":1001: 'B-PER' is no span in brackets"),
    ],
)
def test_files_that_are_refused_with_their_line(tmp_path, text, asked, message):
    file = tmp_path / "a.conll"
    with pytest.raises(DataError, match=f"^{file}{message}"):
        read(file, text, asked)


def test_unused_columns_are_named(tmp_path):
    (tmp_path / "a.conll").write_text("Anna NNP I-NP B-PER\nsings VBZ I-VP O\n")
    assert opened(tmp_path / "a.conll").unused == ("1", "2")
    (tmp_path / "b.conll").write_text(CONLL_2009)
    unused = opened(tmp_path / "b.conll").unused
    assert unused[:2] == ("2 (lemma)", "3 (plemma)")
    assert not {"1 (form)", "4 (pos)"} & {*unused}
    (tmp_path / "c.conll").write_text("Anna B-PER\nsings O\n")
    assert opened(tmp_path / "c.conll").unused == ()


def test_notes_name_the_columns(tmp_path):
    file = tmp_path / "a.conll"
    assert read(file, "-DOCSTART- O\n\nanna NNP I-NP B-PER\nis VB I-VP O\n")[1] == ""
    _, note = read(file, CONLL_U.format("name=B-PER", "name=O", "name=B-LOC"))
    assert note.startswith(f"{file}: ")
    assert "1 (form)" in note
    assert "name=… in column 9 (misc)" in note
    assert "brackets of column 1, such as (PER*" in read(file, "anna (PER*\nberg *)\n")[1]
    _, note = read(file, "1\tanna\tB-PER\tO\n2\tsings\tO\tO\n")
    assert "column 0 counts" in note
    assert 'label="3"' in render(note)


def test_columns_are_found_again_without_being_saved(tmp_path):
    file = tmp_path / "a.conllu"
    file.write_text(CONLL_U.format("_", "_", "_"), encoding="utf8")
    asked = opened(file, TagColumns(None, "xpos")).task.columns
    assert asked == TagColumns(None, "xpos")
    usual = opened(file, usual=asked)
    assert usual.task.columns == asked
    assert next(usual.examples)[1].tags == ("_", "_", "_")
    file.write_text("anna B-PER\nsings O\n", encoding="utf8")
    other = opened(file, usual=asked)
    assert other.task.columns == NONE
    assert next(other.examples)[1].tags == ("B-PER", "O")


def test_words_to_predict_have_the_same_layout(tmp_path):
    file = tmp_path / "a.conll"
    file.write_text("# http://a.org/x y\n1\tanna\tO\n2\tsings\tO\n\n1\t#\tO\n", encoding="utf8")
    examples = opened(file, labelled=False).examples
    assert [item.words for _, item in examples] == [("anna", "sings"), ("#",)]
