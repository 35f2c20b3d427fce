"""Scores of tags equal seqeval's, by conlleval's rule and by that of their scheme; those of plain tags equal scikit-learn's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bothways.tasks.tagging.schemes import TagCounts, as_labels, flaws, respell, types_of

KINDS = ("LOC", "ORG", "PER")
LABELS = ("O", *(f"{prefix}-{kind}" for kind in KINDS for prefix in "BI"))
PAIRS = st.lists(
    st.lists(st.tuples(st.sampled_from(LABELS), st.sampled_from(LABELS)), min_size=1, max_size=10),
    min_size=1,
    max_size=8,
)


def counted(
    truth: list[list[str]], predicted: list[list[str]], labels: tuple[str, ...] = LABELS
) -> dict[str, float]:
    counts = TagCounts(labels, entities=True)
    for expected, found in zip(truth, predicted, strict=True):
        counts.add(expected, found, 0.5 * len(expected))
    return counts.scores()


@settings(deadline=None)
@given(PAIRS)
def test_scores_are_seqevals(sentences):
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score
    from seqeval.scheme import IOB2

    raw = [[tag for tag, _ in sentence] for sentence in sentences]
    truth, predicted = (
        [list(respell(tags, "iob2")) for tags in raw],
        [[tag for _, tag in sentence] for sentence in sentences],
    )
    scores = counted(truth, predicted)
    theirs = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
    for name, metric in theirs.items():
        assert scores[name] == pytest.approx(metric(truth, predicted, zero_division=0))
        assert scores[name] == pytest.approx(
            metric(raw, predicted, zero_division=0)
        )  # conversion changes nothing
        strict = metric(truth, predicted, mode="strict", scheme=IOB2, zero_division=0)
        assert scores[f"{name}_strict"] == pytest.approx(strict)
        occurring = sorted({tag[2:] for tags in [*truth, *predicted] for tag in tags if tag != "O"})
        if occurring:
            of_types = metric(truth, predicted, average=None, zero_division=0)
            assert [scores[f"{name}/{kind}"] for kind in occurring] == pytest.approx(list(of_types))
    assert scores["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert scores["loss"] == 0.5


def labels_of(prefixes: str) -> tuple[str, ...]:
    return ("O", *(f"{prefix}-{kind}" for kind in KINDS for prefix in prefixes))


@pytest.mark.parametrize(
    ("prefixes", "name"), [("BIES", "IOBES"), ("BILU", "BILOU"), ("IB", "IOB1"), ("BI", "IOB2")]
)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=10),
        min_size=1,
        max_size=8,
    )
)
def test_strict_scores_are_seqevals_in_the_scheme_of_the_labels(prefixes, name, sentences):
    from seqeval import scheme
    from seqeval.metrics import accuracy_score, f1_score, precision_score, recall_score

    labels = labels_of(prefixes)
    drawn = [
        [[labels[place % len(labels)] for place in side] for side in zip(*some, strict=True)]
        for some in sentences
    ]
    truth, predicted = (
        [list(as_labels(raw, labels)) for raw, _ in drawn],
        [tags for _, tags in drawn],
    )
    if (
        name == "IOB1"
    ):  # where B is not needed, seqeval takes the words behind it for an entity without their first
        predicted = [sound_iob1(tags) for tags in predicted]
    scores = counted(truth, predicted, labels)
    for rate, metric in {
        "f1": f1_score,
        "precision": precision_score,
        "recall": recall_score,
    }.items():
        theirs = metric(
            truth, predicted, mode="strict", scheme=getattr(scheme, name), zero_division=0
        )
        assert scores[f"{rate}_strict"] == pytest.approx(theirs)
    assert scores["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    again = counted(truth, truth, labels)
    assert again["accuracy"] == 1
    assert (
        again["f1"]
        == again["f1_strict"]
        == again["recall_strict"]
        == float(any(tag != "O" for row in truth for tag in row))
    )


def sound_iob1(tags: list[str]) -> list[str]:
    broken = flaws(tags, "iob1")
    return [f"I{tag[1:]}" if place in broken else tag for place, tag in enumerate(tags)]


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


def test_a_broken_prediction_counts_for_conlleval_and_not_for_strict_iob2():
    scores = counted([["O", "B-PER", "I-PER"]], [["O", "I-PER", "I-PER"]])
    assert (scores["f1"], scores["f1/PER"], scores["f1_strict"]) == (1.0, 1.0, 0.0)
    assert scores["f1/LOC"] == scores["recall/LOC"] == scores["precision/LOC"] == 0.0
    assert scores["accuracy"] == pytest.approx(2 / 3)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=30))
def test_scores_of_plain_tags_are_scikit_learns(pairs):
    from sklearn.metrics import accuracy_score, f1_score

    truth, predicted = zip(*pairs, strict=True)
    counts = TagCounts("abc", entities=False)
    counts.add(truth[:5], predicted[:5], 1.0)
    counts.add(truth[5:], predicted[5:], 2.0)
    assert counts.words == len(pairs)
    expected = {
        "f1": f1_score(truth, predicted, average="macro", zero_division=0.0),
        "accuracy": accuracy_score(truth, predicted),
        "loss": 3 / len(pairs),
    }
    assert counts.scores() == pytest.approx(expected)


def test_types_in_order():
    assert types_of(["I-b", "O", "B-a", "NN", "B-b", "I"]) == ("_", "a", "b")
