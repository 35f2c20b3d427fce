"""Preflight of labelled texts: rows, labels, their balance, and what training and development data share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from typing import Protocol, TypeVar, runtime_checkable

from bothways.core.finding import Finding, places
from bothways.tasks.text_examples import TextExample, label_names

RARE, COMMON = 0.01, 0.9
"""A class is rare below this share of the examples; a class above this one makes accuracy say little."""
MANY = 20
"""Classes from which on labels that are fractions look like scores."""


@runtime_checkable
class Placed(Protocol):
    """What examples of all kinds have."""

    @property
    def where(self) -> str: ...


@runtime_checkable
class Texts(Placed, Protocol):
    """What examples of all kinds have that are one text or two."""

    @property
    def text(self) -> str: ...
    @property
    def text_b(self) -> str | None: ...


E = TypeVar("E", bound=Placed)


def check_examples(train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
    """Everything that labelled texts can have wrong; `dev` may be empty."""
    return [
        *check_texts([*train, *dev]),
        *check_answered([e.where for e in (*train, *dev) if e.label is None]),
        *_check_labels(train, dev),
        *_check_balance(train),
        *check_overlap(train, dev, texts_of),
    ]


def check_texts(examples: Many[Texts]) -> list[Finding]:
    """Texts of nothing but white space."""
    empty = [
        e.where
        for e in examples
        if not e.text.strip() or (e.text_b is not None and not e.text_b.strip())
    ]
    if not empty:
        return []
    what = f"{len(empty)} examples have an empty text: {places(empty)}"
    return [Finding("rows", "error", what, fix="Complete these rows, or take them out.")]


def check_answered(bare: Many[str]) -> list[Finding]:
    """`bare`: where the examples are that have no label."""
    if not bare:
        return []
    what = f"{len(bare)} examples have no label (it is empty, null or NaN): {places(bare)}"
    return [Finding("labels", "error", what, fix="Label these rows, or take them out.")]


def _check_labels(train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
    labels, seen = label_names(train), label_names(dev)
    findings = []
    if len(labels) < 2:
        what = f"training needs two classes or more, and the labels are {', '.join(map(repr, labels)) or 'all absent'}"
        findings.append(
            Finding("labels", "error", what, fix="Name another label column, or give more data.")
        )
    strange = [
        f"{e.where} ({e.label!r})" for e in dev if e.label is not None and e.label not in labels
    ]
    if strange:
        what = f"{len(strange)} dev examples have labels that no training example has: {places(strange)}"
        findings.append(
            Finding(
                "labels",
                "error",
                what,
                fix=f"The labels of the training data are {places(labels)}.",
            )
        )
    absent = [label for label in labels if dev and label not in seen]
    if absent:
        findings.append(
            Finding("labels", "warning", f"no dev example has one of the labels {places(absent)}")
        )
    findings += _check_scores(labels)
    return findings


def _check_scores(labels: Many[str]) -> list[Finding]:
    if len(labels) > MANY and sum(_is_fraction(label) for label in labels) > len(labels) / 2:
        what = f"the {len(labels)} labels look like scores ({places(labels)}), and each is taken as a class of its own"
        return [
            Finding(
                "labels", "warning", what, fix="To learn them as scores, choose the task regress."
            )
        ]
    return []


def _is_fraction(label: str) -> bool:
    whole, point, part = label.removeprefix("-").partition(".")
    return bool(point) and whole.isdecimal() and part.isdecimal()


def _check_balance(train: Many[TextExample]) -> list[Finding]:
    counts = Counter(e.label for e in train if e.label is not None)
    if len(counts) < 2:
        return []
    (top, most), total = counts.most_common(1)[0], counts.total()
    findings = [
        Finding(
            "balance",
            "note",
            f"always answering {top!r} would be right on {most / total:.1%} of the training data",
        )
    ]
    if most / total > COMMON:
        what = f"{most / total:.1%} of the training examples are {top!r}: accuracy says little here"
        fix = "Choose the best checkpoint by another metric, such as metric=f1_macro."
        findings.append(Finding("balance", "warning", what, fix=fix))
    rare = [f"{label} ({count})" for label, count in counts.items() if count / total < RARE]
    if rare:
        what = f"classes with less than {RARE:.0%} of the training examples, which are hardly learned: {places(rare)}"
        findings.append(Finding("balance", "warning", what))
    return findings


def texts_of(example: Texts) -> tuple[str, str | None]:
    """What such an example is known by."""
    return example.text, example.text_b


def check_overlap(
    train: Many[E], dev: Many[E], key: Callable[[E], Hashable], kind: str = "examples"
) -> list[Finding]:
    """Development examples that are in the training data.

    Args:
        key: what an example is known by: all of it but its labels.
        kind: what an example is called, in the plural.
    """
    known = {key(example) for example in train}
    shared = [example.where for example in dev if key(example) in known]
    if not shared:
        return []
    what = f"{len(shared)} of {len(dev)} dev {kind} are in the training data too, word for word: {places(shared)}"
    return [
        Finding(
            "overlap",
            "warning",
            what,
            fix="Take them out of one of the two: they make the metrics too good.",
        )
    ]
