"""Preflight of tagged sentences: each finding, by what it says and how grave it is."""

from __future__ import annotations

from collections.abc import Sequence as Many

from bothways.tasks.schemes import Scheme
from bothways.tasks.tagchecks import check_tagged
from bothways.tasks.tagged import TagExample


def made(*rows: str, name: str = "train") -> list[TagExample]:
    """Sentences of "word/tag word/tag"."""
    pairs = [[tuple(item.split("/")) for item in row.split()] for row in rows]
    return [
        TagExample(tuple(word for word, _ in row), tuple(tag for _, tag in row), f"{name}:{number}")
        for number, row in enumerate(pairs, 1)
    ]


ENOUGH = made(*["a/O b/B-X c/I-X"] * 10)


def said(train: Many[TagExample], dev: Many[TagExample] = (), scheme: Scheme = "auto") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"error": [], "warning": [], "note": []}
    for finding in check_tagged(list(train), list(dev), scheme):
        found[finding.severity].append(f"{finding.check}: {finding}")
    return found


def test_sound_data_has_its_baseline_and_nothing_else() -> None:
    found = said(ENOUGH, made("d/B-X", name="dev"))
    assert found == {
        "error": [],
        "warning": [],
        "note": ["balance: always answering 'O' would be right on 33.3% of the words"],
    }


def test_sentences_without_words_or_tags() -> None:
    found = said([*ENOUGH, TagExample((), (), "t:1"), TagExample(("a",), None, "t:2"), TagExample(("a",), ("",), "t:3")])
    assert found["error"] == [
        "rows: 1 sentences have no word: t:1 Take them out.",
        "labels: 2 sentences have words without a tag: t:2, t:3 Tag all of their words, or take them out.",
    ]
    (warning,) = said([*ENOUGH, TagExample(("a", " ", ""), ("O", "O", "O"), "t:4")])["warning"]
    assert warning == "rows: 2 words are empty or white space, and are read as unknown: t:4 word 2 ' ', t:4 word 3 ''"


def test_the_scheme_is_said_and_its_breaches_are_counted_with_their_places() -> None:
    (note, _) = said(made(*["a/I-X b/O"] * 10))["note"]
    assert note == "labels: the tags of the training data are IOB1; they are read as IOB2"
    assert (
        "labels: the tags of the dev data are BIOES; they are read as IOB2" in said(ENOUGH, made("a/S-X", name="dev"))["note"]
    )
    (warning,) = said([*ENOUGH, *made("a/O b/I-X c/I-X", "d/I-X", name="t")])["warning"]
    assert warning.startswith(
        "labels: 2 tags of the training data break the rules of IOB2: t:1 word 2 'b' I-X, t:2 word 1 'd' I-X They"
    )
    assert len(said(ENOUGH, scheme="iob1")["warning"]) == 1
    (error,) = said(made("a/S-X", "b/NN"), scheme="iob2")["error"]
    assert error.startswith(
        "labels: task.scheme: the training data has tags that are none of IOB2's: NN, S-X Set task.scheme=auto"
    )


def test_tags_of_entities_among_plain_ones_are_told() -> None:
    (warning,) = said(made("a/B-X b/O", "c/PER"))["warning"]
    assert "so that all are taken as plain: train:2 ('PER')" in warning
    assert said(made("a/B-X b/O", "c/PER"), scheme="plain")["warning"] == []
    assert said(made("a/NN b/O", "c/VB"))["warning"] == []


def test_there_must_be_something_to_learn() -> None:
    assert said(made("a/O b/O"))["error"] == [
        "labels: there is nothing to learn: the tags of the training data are 'O' "
        "Name another column of tags, or give more data."
    ]
    assert "the training data are 'NN' Name" in said(made("a/NN"))["error"][0]
    assert "are all absent Name" in said([TagExample(("a",), None)])["error"][1]


def test_dev_types_that_training_lacks_are_errors_and_the_reverse_a_warning() -> None:
    found = said(ENOUGH, made("d/B-Y", "e/B-X f/I-Z", name="dev"))
    (error,) = found["error"]
    assert error == (
        "labels: the dev data has types of entities that no training example has, Y, Z: dev:1, dev:2 "
        "Those of the training data are X."
    )
    (warning,) = said(ENOUGH, made("d/O", name="dev"))["warning"]
    assert warning == "labels: the dev data has none of the types of entities X"
    (error,) = said(made("a/NN b/VB"), made("d/NN c/JJ", name="dev"))["error"]
    assert "the dev data has tags that no training example has, JJ: dev:1" in error
    (error,) = said(ENOUGH, made("d/B-X e/NN", name="dev"))["error"]
    assert "NN: dev:1" in error


def test_rare_types_and_shared_sentences() -> None:
    (warning,) = said([*ENOUGH, *made("d/B-Y")])["warning"]
    assert warning == "balance: types with fewer than 10 entities in the training data, which are hardly learned: Y (1)"
    (warning,) = said(ENOUGH, made("a/O b/B-X c/O", "d/O", name="dev"))["warning"]
    assert warning.startswith("overlap: 1 of 2 dev sentences are in the training data too, word for word: dev:1 Take")
