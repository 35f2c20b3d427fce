"""Schemes of tags: one rule for the entities of all, conversion, detection, and what breaks them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bothways.tasks.tagging.schemes import (
    Chunk,
    Scheme,
    Spelling,
    as_labels,
    chunks,
    find_scheme,
    flaws,
    foreign_tags,
    respell,
    scheme_of,
    tag_part,
)

WELL_KNOWN: dict[Spelling, list[str]] = {
    # "U.N. official Rolf Ekeus heads for New York , Paris Lyon" – two entities of one type side by side
    "iob1": ["I-ORG", "O", "I-PER", "I-PER", "O", "O", "I-LOC", "I-LOC", "O", "I-LOC", "B-LOC"],
    "iob2": ["B-ORG", "O", "B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O", "B-LOC", "B-LOC"],
    "bioes": ["S-ORG", "O", "B-PER", "E-PER", "O", "O", "B-LOC", "E-LOC", "O", "S-LOC", "S-LOC"],
}
BILOU = ["U-ORG", "O", "B-PER", "L-PER", "O", "O", "B-LOC", "L-LOC", "O", "U-LOC", "U-LOC"]
ENTITIES = [
    Chunk("ORG", 0, 1), Chunk("PER", 2, 4), Chunk("LOC", 6, 8), Chunk("LOC", 9, 10), Chunk("LOC", 10, 11),
]  # fmt: skip

PLACES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from(["PER", "LOC", "A-B"])),
    max_size=6,
)
TAGS = st.lists(
    st.sampled_from(["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("X", "Y"))]),
    max_size=12,
)


@pytest.mark.parametrize("tags", [*WELL_KNOWN.values(), BILOU], ids=[*WELL_KNOWN, "bilou"])
def test_the_same_entities_in_every_scheme(tags):
    assert chunks(tags) == ENTITIES
    for scheme, expected in WELL_KNOWN.items():
        assert respell(tags, scheme) == tuple(expected)


@pytest.mark.parametrize("scheme", WELL_KNOWN)
def test_schemes_are_found(scheme):
    assert find_scheme([["O", "O"], WELL_KNOWN[scheme]]) == scheme
    assert flaws(WELL_KNOWN[scheme], scheme) == []


def test_of_schemes_that_both_fit_iob2_is_taken_and_other_tags_are_plain():
    assert find_scheme([["O"], []]) == "iob2"
    assert find_scheme([BILOU]) == "bioes"
    assert find_scheme([["I-X", "B-X"], ["B-X"]]) == "iob2"  # each is broken once
    assert find_scheme([["I-X"], ["I-X", "B-X"], ["B-X"]]) == "iob1"
    assert find_scheme([["B-X"], ["NN"]]) == "plain"
    assert respell(["NN", "I-X"], "iob2") == ("NN", "I-X")
    assert (
        find_scheme([["B-X", "L-X"]]) == "bioes"
    )  # in other letters, even if no entity has one word
    assert (
        chunks(["B-X", "L-X", "I-X"])
        == chunks(["B-X", "E-X", "I-X"])
        == [Chunk("X", 0, 2), Chunk("X", 2, 3)]
    )
    assert chunks(["NN", "I-X"]) == [Chunk("X", 1, 2)]


def test_bare_tags_are_of_a_type_without_a_name():
    assert respell(["I", "I", "O", "S"], "iob2") == ("B-_", "I-_", "O", "B-_")
    assert tag_part("O") == ("O", "")
    assert tag_part("M-a-b") == ("I", "a-b")
    assert tag_part("O-PER") is tag_part("b-PER") is tag_part("B_PER") is tag_part("") is None


@pytest.mark.parametrize(
    ("tags", "scheme", "places"),
    [
        (["O", "I-X", "I-X"], "iob2", [1]),
        (["I-X"], "iob2", [0]),
        (["B-X", "I-Y", "I-Y"], "iob2", [1]),
        (["B-X", "I-X", "B-X", "O"], "iob2", []),
        (["B-X"], "iob1", [0]),
        (["I-Y", "B-X", "B-X"], "iob1", [1]),
        (["B-X", "O"], "bioes", [0]),
        (["B-X", "I-X"], "bioes", [1]),
        (["E-X"], "bioes", [0]),
        (["S-X", "I-X", "E-X", "S-X"], "bioes", [1]),
        (["B-X", "E-Y"], "bioes", [0, 1]),
        (["B-X", "I-X", "I-X", "E-X", "B-Y", "E-Y"], "bioes", []),
    ],
)
def test_broken_sequences(tags, scheme, places):
    assert flaws(tags, scheme) == places


def test_tags_of_another_scheme():
    assert foreign_tags(["O", "B-X", "E-X", "S-X", "NN"], "iob2") == {"E-X", "S-X", "NN"}
    assert foreign_tags(["O", "B-X", "L-X", "U-X"], "bioes") == set()


def spelled(entities: list[tuple[int, int, str]], scheme: Scheme) -> list[str]:
    """Entities after gaps of so many words, in a scheme."""
    tags: list[str] = []
    for gap, length, kind in entities:
        tags += ["O"] * gap
        touching = bool(tags) and tags[-1].endswith(f"-{kind}")
        body = [f"I-{kind}"] * length
        if scheme == "iob2" or (scheme == "iob1" and touching):
            body[0] = f"B-{kind}"
        if scheme == "bioes":
            body[0], body[-1] = f"B-{kind}", f"E-{kind}"
            body = [f"S-{kind}"] if length == 1 else body
        tags += body
    return tags


@settings(deadline=None)
@given(PLACES)
def test_well_formed_tags_mean_what_was_spelled(entities):
    at, expected = 0, []
    for gap, length, kind in entities:
        expected.append(Chunk(kind, at + gap, at + gap + length))
        at += gap + length
    for scheme in ("iob1", "iob2", "bioes"):
        tags = spelled(entities, scheme)
        assert chunks(tags) == expected
        assert flaws(tags, scheme) == []
        for other in ("iob1", "iob2", "bioes"):
            assert list(respell(tags, other)) == spelled(entities, other)


@settings(deadline=None)
@given(TAGS)
def test_any_tags_become_sound_ones_of_any_scheme_with_the_same_entities(tags):
    for scheme in ("iob1", "iob2", "bioes"):
        converted = respell(tags, scheme)
        assert chunks(converted) == chunks(tags)
        assert flaws(converted, scheme) == []
        assert respell(converted, scheme) == converted
        # A word is outside afterwards if and only if it was.
        assert [tag == "O" for tag in converted] == [tag == "O" for tag in tags]


@pytest.mark.parametrize(
    ("labels", "scheme"),
    [
        ("O B-X I-X B-Y I-Y", "iob2"),
        ("B-X B-Y I-X I-Y O", "iob2"),  # in the order of their characters
        ("O B-X B-Y I-Y", "iob2"),  # no X has two words
        ("O", "iob2"),
        ("O I-X I-Y", "iob1"),
        ("B-X I-X I-Y O", "iob1"),  # two Y never stand side by side
        ("O I-X B-X", "iob1"),  # in the order in which they occur, as IOB2 never has them
        ("O I-X B-X B-Y I-Y", "iob2"),
        ("O B-X I-X E-X S-X", "bioes"),
        ("O B-X I-X L-X U-X", "bioes"),
        ("O B-X M-X E-X S-X", "bioes"),
        ("O S-X", "bioes"),
    ],
)
def test_the_scheme_of_labels(labels, scheme):
    assert scheme_of(labels.split()) == scheme


LETTERS = {"BILOU": BILOU, "BMES": [tag.replace("I-", "M-") for tag in WELL_KNOWN["bioes"]]}


@pytest.mark.parametrize("tags", [*WELL_KNOWN.values(), BILOU])
@pytest.mark.parametrize(
    "expected", [*WELL_KNOWN.values(), *LETTERS.values()], ids=[*WELL_KNOWN, *LETTERS]
)
def test_entities_in_the_letters_of_labels(tags, expected):
    labels = [*dict.fromkeys(expected)]
    assert as_labels(tags, labels) == tuple(expected)


def test_entities_in_labels_that_are_bare_or_few():
    assert as_labels(["S", "I", "I"], ["O", "B", "I"]) == ("B", "B", "I")
    assert as_labels(["B-X", "B-X", "B-Z", "NN"], ["O", "I-X"]) == ("B-X", "B-X", "B-Z", "NN")
    assert as_labels(["B-X", "B-X", "B-Z"], ["O", "I-X"]) == (
        "I-X",
        "B-X",
        "I-Z",
    )  # what they lack, by its common alias


@settings(deadline=None)
@given(TAGS)
def test_entities_are_those_of_seqeval(tags):
    from seqeval.metrics.sequence_labeling import get_entities

    assert [(c.type, c.begin, c.end - 1) for c in chunks(tags)] == get_entities(tags)
