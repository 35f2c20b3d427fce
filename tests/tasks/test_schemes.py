"""Schemes of tags: one rule for the entities of all, conversion, detection, and what breaks them."""

import functools

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from bothways.core.errors import DataError
from bothways.prediction.engine import evaluate_task
from bothways.tasks.base import EncodedExample
from bothways.tasks.predictions import TagPrediction
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.schemes import (
    Chunk,
    Spelling,
    as_labels,
    chunks,
    find_scheme,
    flaws,
    respell,
    scheme_of,
    tag_part,
    types_of,
)
from bothways.tasks.tagging.task import Tagger, TaggingTask
from bothways.text.tokenizer import Tokenizer
from toy_task import bind_small

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

KINDS_OF_TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in "XY")]
TAGS = st.lists(st.sampled_from(KINDS_OF_TAGS), max_size=12)


@pytest.mark.parametrize("tags", [*WELL_KNOWN.values(), BILOU], ids=[*WELL_KNOWN, "bilou"])
def test_the_same_entities_in_every_scheme(tags):
    assert chunks(tags) == ENTITIES
    for scheme, expected in WELL_KNOWN.items():
        assert respell(tags, scheme) == tuple(expected)
        assert find_scheme([["O", "O"], expected]) == scheme


def test_of_schemes_that_both_fit_iob2_is_taken_and_other_tags_are_plain():
    assert find_scheme([["O"], []]) == "iob2"
    assert find_scheme([BILOU]) == "bioes"
    assert find_scheme([["I-X", "B-X"], ["B-X"]]) == "iob2"  # each is broken once
    assert find_scheme([["I-X"], ["I-X", "B-X"], ["B-X"]]) == "iob1"
    assert find_scheme([["B-X"], ["NN"]]) == "plain"
    assert respell(["NN", "I-X"], "iob2") == ("NN", "I-X")
    assert find_scheme([["B-X", "L-X"]]) == "bioes"  # even if no entity has one word
    for end in "LE":
        assert chunks(["B-X", f"{end}-X", "I-X"]) == [Chunk("X", 0, 2), Chunk("X", 2, 3)]
    assert chunks(["NN", "I-X"]) == [Chunk("X", 1, 2)]
    assert types_of(["I-b", "O", "B-a", "NN", "B-b", "I"]) == ("_", "a", "b")


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


OF_LABELS: dict[Spelling, list[str]] = {
    # Also in the order of their characters, or where no X has two words.
    "iob2": ["O B-X I-X B-Y I-Y", "B-X B-Y I-X I-Y O", "O B-X B-Y I-Y", "O", "O I-X B-X B-Y I-Y"],
    # Also where two Y never stand side by side, or in an order as IOB2 never has it.
    "iob1": ["O I-X I-Y", "B-X I-X I-Y O", "O I-X B-X"],
    "bioes": ["O B-X I-X E-X S-X", "O B-X I-X L-X U-X", "O B-X M-X E-X S-X", "O S-X"],
}


@pytest.mark.parametrize("scheme", OF_LABELS)
def test_the_scheme_of_labels(scheme):
    assert {scheme_of(labels.split()) for labels in OF_LABELS[scheme]} == {scheme}


def test_entities_in_labels_that_are_bare_or_few():
    assert as_labels(["S", "I", "I"], ["O", "B", "I"]) == ("B", "B", "I")
    bmes = ["O", "B-X", "M-X", "E-X", "S-X"]
    assert as_labels(["B-X", "I-X", "I-X"], bmes) == ("B-X", "M-X", "E-X")
    assert as_labels(["B-X", "B-X", "B-Z", "NN"], ["O", "I-X"]) == ("B-X", "B-X", "B-Z", "NN")
    # What they lack, by its common alias.
    assert as_labels(["B-X", "B-X", "B-Z"], ["O", "I-X"]) == ("I-X", "B-X", "I-Z")


@settings(deadline=None)
@given(TAGS)
def test_entities_are_those_of_seqeval(tags):
    from seqeval.metrics.sequence_labeling import get_entities

    assert [(c.type, c.begin, c.end - 1) for c in chunks(tags)] == get_entities(tags)


SCHEMES: dict[str, tuple[Spelling, str]] = {
    "bioes": ("bioes", "O B-LOC I-LOC E-LOC S-LOC B-PER I-PER E-PER S-PER"),
    "bilou": ("bioes", "U-PER L-PER I-PER B-PER O B-LOC I-LOC L-LOC U-LOC"),
    "iob1": ("iob1", "O I-PER B-PER I-LOC B-LOC"),
    "never side by side": ("iob1", "O I-PER I-LOC"),
    "iob2": ("iob2", "I-PER B-PER B-LOC I-LOC O"),
    "bare": ("iob2", "O B I"),
}


@functools.cache
def small_tagger(tokenizer: Tokenizer, labels: tuple[str, ...]) -> Tagger:
    return bind_small(TaggingTask(), tokenizer, labels)


@pytest.mark.parametrize("name", SCHEMES)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=12))
def test_what_a_model_says_in_its_own_scheme_is_right_in_every_spelling(tokenizer, name, places):
    scheme, labels = SCHEMES[name][0], tuple(SCHEMES[name][1].split())
    own = as_labels([labels[place % len(labels)] for place in places], labels)
    assume(chunks(own) and {*own} <= {*labels})
    assert flaws(own, scheme) == []
    task, words = small_tagger(tokenizer, labels), ("ape",) * len(own)
    logits = np.full((len(own), len(labels)), -99, dtype=np.float32)
    logits[range(len(own)), [labels.index(tag) for tag in own]] = 99
    for spelling in WELL_KNOWN:
        example = TagExample(words, respell(own, spelling))
        prediction = task.decode(example, EncodedExample((), 0, 0), [logits])
        assert prediction.tags == own == task.task.gold_tags(example, labels)
        metrics = dict(task.score([(example, prediction)]))
        kinds = {chunk.type for chunk in chunks(own)}
        named = [key for key in metrics if "/" not in key or key.rsplit("/")[1] in kinds]
        expected = [float(key != "loss") for key in named]
        assert [metrics[key] for key in named] == pytest.approx(expected)
        assert metrics.keys() == task.task.directions(labels).keys()
        assert task.grade(example, prediction) == 1


def test_entities_that_the_labels_cannot_spell_are_refused(tokenizer):
    task = bind_small(TaggingTask(), tokenizer, ("O", "I-PER", "I-LOC"))
    message = r"^a:6: tag 'S-PER' of word 2 \(in the model's scheme 'B-PER'\) is not among the 3 labels; did you mean 'I-PER'"
    with pytest.raises(DataError, match=message):
        evaluate_task(task, [TagExample(("ape", "bee"), ("S-PER", "S-PER"), "a:6")])


KINDS = ("LOC", "ORG", "PER")
PAIR = st.tuples(st.integers(0, 12), st.integers(0, 12))


def counted(
    truth: list[list[str]], predicted: list[list[str]], labels: tuple[str, ...]
) -> dict[str, float]:
    """The metrics; the right tag of each word has the probability exp(−½)."""
    results = []
    for expected, tags in zip(truth, predicted, strict=True):
        words, chances = ("w",) * len(tags), np.full((len(tags), len(labels)), np.exp(-0.5))
        made = TagPrediction(words, tuple(tags), chances)
        results.append((TagExample(words, tuple(expected)), made))
    return dict(TaggingTask().score(results, labels))


@pytest.mark.parametrize(
    ("prefixes", "name"), [("BIES", "IOBES"), ("BILU", "BILOU"), ("IB", "IOB1"), ("BI", "IOB2")]
)
@given(st.lists(st.lists(PAIR, min_size=1, max_size=10), min_size=1, max_size=8))
def test_strict_scores_are_seqevals_in_the_scheme_of_the_labels(prefixes, name, sentences):
    from seqeval import scheme
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    labels = ("O", *(f"{prefix}-{kind}" for kind in KINDS for prefix in prefixes))
    raw, predicted = (
        [[labels[pair[side] % len(labels)] for pair in pairs] for pairs in sentences]
        for side in (0, 1)
    )
    truth = [list(as_labels(tags, labels)) for tags in raw]
    if name == "IOB1":
        # Where B is not needed, seqeval takes the words behind it for an entity without their first.
        broken = [flaws(tags, "iob1") for tags in predicted]
        for tags, places in zip(predicted, broken, strict=True):
            for place in places:
                tags[place] = f"I{tags[place][1:]}"
    scores = counted(truth, predicted, labels)
    kinds = sorted({tag[2:] for tags in [*truth, *predicted] for tag in tags if tag != "O"})
    rates = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
    for rate, score in rates.items():
        metric = functools.partial(score, truth, predicted, zero_division=0)
        strict = metric(mode="strict", scheme=getattr(scheme, name))
        assert scores[f"{rate}_strict"] == pytest.approx(strict)
        if "L" not in prefixes:  # letters that conlleval does not know
            assert scores[rate] == pytest.approx(metric())
            of_types = [scores[f"{rate}/{kind}"] for kind in kinds]
            assert not kinds or of_types == pytest.approx([*metric(average=None)])
    assert scores["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert scores["loss"] == pytest.approx(0.5)
    again = counted(truth, truth, labels)
    assert again["accuracy"] == 1
    has_entities = float(any(tag != "O" for row in truth for tag in row))
    assert again["f1"] == again["f1_strict"] == again["recall_strict"] == has_entities


@pytest.mark.parametrize(
    ("labels", "predicted"),
    [
        ("O B-X I-X E-X S-X", "B-X I-X O"),  # has no end
        ("O B-X I-X E-X S-X", "I-X E-X O"),  # has no beginning
        ("O B-X I-X L-X U-X", "L-X U-X O"),
        ("O I-X B-X", "B-X I-X O"),  # B where nothing stands before it
        ("O B-X I-X", "I-X I-X O"),
    ],
)
def test_entities_that_break_the_scheme_of_the_labels_are_not_strict(labels, predicted):
    tags, names = predicted.split(), tuple(labels.split())
    truth = list(as_labels(tags, names))
    scores = counted([truth], [tags], names)
    assert (scores["f1"], scores["precision_strict"] == 1) == (1, "U-X" in tags)
    assert scores["recall_strict"] == (0.5 if "U-X" in tags else 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=30))
def test_scores_of_plain_tags_are_scikit_learns(pairs):
    from sklearn.metrics import accuracy_score, f1_score

    truth, predicted = zip(*pairs, strict=True)
    halves = ([list(tags[:5]), list(tags[5:])] for tags in (truth, predicted))
    f1 = f1_score(truth, predicted, average="macro", zero_division=0.0)
    expected = {"f1": f1, "accuracy": accuracy_score(truth, predicted), "loss": 0.5}
    assert counted(*halves, ("a", "b", "c")) == pytest.approx(expected)
