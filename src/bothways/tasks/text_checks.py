"""Checks of labelled texts that several tasks share."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence as Many
from typing import Any

from bothways.core.config.values import is_integer
from bothways.core.errors import Check, Finding, Severity, argument
from bothways.core.terminal import listed, quantity

RARE, COMMON = 0.01, 0.9
"""A class is rare below this share of the examples; above this one, accuracy says little."""
EVEN_PART = 0.2
"""The part of an even share of the examples below which one of many classes is rare."""
_ERRORS = frozenset(["#NAME?", "#REF!", "#VALUE!", "#DIV/0!", "#N/A", "#NUM!", "#NULL!"])
COMPLETE = "Complete these rows or remove them."


def report_rows(
    check: Check, where: Many[str], fault: str, fix: str | None = None, severity: Severity = "error"
) -> list[Finding]:
    """Return a finding with the number and the first places of faulty rows; none without any.

    Example: report_rows("rows", ["a.tsv:3"], "row(s) is|are empty") →
    "1 row is empty: a.tsv:3".
    """
    message = f"{quantity(len(where), fault)}: {listed(where, 5)}"
    return [Finding(check, severity, message, fix=fix)] if where else []


def check_rows(
    examples: Many[Any],
    fault: str,
    is_faulty: Callable[[Any], object],
    fix: str | None = COMPLETE,
    severity: Severity = "error",
    check: Check = "rows",
) -> list[Finding]:
    """Report the examples with a fault, in the words of `report_rows`."""
    return report_rows(check, [e.where for e in examples if is_faulty(e)], fault, fix, severity)


def check_examples(
    train: Many[Any],
    dev: Many[Any],
    texts: Callable[[Any], tuple[str, ...]],
    answer: Callable[[Any], object],
    marks: Collection[str] = (),
    key: Callable[[Any], Hashable] | None = None,
    kind: str = "examples",
) -> list[Finding]:
    """Report what is wrong in any labelled texts: empty ones, no answer, train data in dev data.

    Args:
        texts: returns the texts of an example.
        answer: returns its answer; None for none.
        marks: labels that count as none.
        key: returns what identifies an example; None for its texts.
        kind: the noun for what it identifies, in the plural.
    """
    examples = [*train, *dev]
    stripped = [(e.where, {text.strip() for text in texts(e)}) for e in examples]
    empty = [where for where, contents in stripped if "" in contents]
    broken = [where for where, contents in stripped if not _ERRORS.isdisjoint(contents)]
    fault = "text(s) has|have an error of a spreadsheet"
    findings = report_rows("rows", empty, "example(s) has|have an empty text", COMPLETE)
    findings += report_rows("rows", broken, fault, COMPLETE, "warning")
    unlabelled = [example.where for example in examples if answer(example) is None]
    if examples and len(unlabelled) == len(examples):
        message = "no example has a label: its column is empty, or its name is not known"
        message += " or not the only one"
        fix = f"Name the column: {argument(label='NAME')}."
        findings.append(Finding("labels", "error", message, fix=fix))
    else:
        absent, fix = "empty, null or NaN", "Label these rows or remove them."
        if marks:
            absent += f", or {listed(map(repr, sorted(marks)))}"
            fix += " A mark that is a class needs another name."
        fault = f"example(s) has|have no label ({absent})"
        findings += report_rows("labels", unlabelled, fault, fix)
    return findings + check_overlap(train, dev, key or texts, kind)


def check_case(labels: Many[str]) -> list[Finding]:
    """Report labels that differ in case, invisible characters, or the form of a number only.

    True and False are forms of 1 and 0: rows of JSON may hold `true` and `1` for one answer.
    """
    alike: dict[str, list[str]] = {}
    for label in labels:
        # Invisible or combining characters make a label look like another text.
        hides = any(unicodedata.category(letter) in {"Cf", "Mn", "Zs"} for letter in label)
        display = ascii(label) if hides else repr(label)
        # The visible form: " Caf\u00e9" is "cafe\u0301", "01" and "1.0" are "1".
        text = unicodedata.normalize("NFKC", label).casefold()
        text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf").strip()
        integer, point, fraction = text.partition(".")
        if is_integer(integer) and not fraction.strip("0") and (fraction or not point):
            text = str(int(integer))
        text = {"true": "1", "false": "0"}.get(text, text)
        alike.setdefault(text, []).append(display)
    same = [" and ".join(group) for group in alike.values() if len(group) > 1]
    message = "labels that differ in case, invisible characters or the form of a number only are "
    message += f"learned as different ones: {listed(same, 5)}"
    fix = "Spell them alike if they mean the same."
    return [Finding("labels", "warning", message, fix=fix)] if same else []


def check_known(
    train: Many[str], dev: Iterable[tuple[str, str]], consequence: str = ""
) -> list[Finding]:
    """Report labels of one set that the other lacks, and those that differ in case only.

    Args:
        train: the labels of the training data.
        dev: the labels of the development data, each with its source.
        consequence: that of a label without a development example.
    """
    held_out = [*dev]
    dev_labels = {label for label, _ in held_out}
    unknown = [f"{location} ({label!r})" for label, location in held_out if label not in train]
    fix = f"The labels of the training data are {listed(train, 5)}."
    fault = "label(s) of dev examples has|have no training example"
    findings = check_case(train) + report_rows("labels", unknown, fault, fix)
    absent = [label for label in train if held_out and label not in dev_labels]
    if absent:
        message = f"no dev example has one of the labels {listed(absent, 5)}{consequence}"
        findings.append(Finding("labels", "warning", message))
    return findings


def check_constant(counts: Counter[Any], of: str = "training data") -> list[Finding]:
    """Note how often the most frequent label would be right."""
    if not counts:
        return []
    top, count = counts.most_common(1)[0]
    share = f"{count / counts.total():.1%}"
    message = f"always answering {top!r} would be right for {share} of the {of}"
    return [Finding("balance", "note", message)]


def check_rare(counts: dict[str, int], total: int, kind: str) -> list[Finding]:
    """Report labels (`kind`, in the plural) that few of `total` training examples have.

    Of many labels each has a small share; rare are those with less than a fifth of an even one.
    """
    # 1 % for up to 20 labels; for 100 labels a fifth of their even share of 1 %
    least = min(RARE, EVEN_PART / max(1, len(counts)))
    rare = [f"{label} ({count})" for label, count in counts.items() if count / total < least]
    if not rare:
        return []
    message = f"{kind} with less than {100 * least:.2g}% of the training examples are hardly "
    return [Finding("balance", "warning", f"{message}learned: {listed(rare, 5)}")]


def check_overlap(
    train: Many[Any], dev: Many[Any], key: Callable[[Any], Hashable], kind: str
) -> list[Finding]:
    """Report development examples that are in the training data.

    Args:
        key: returns what identifies an example: everything but its labels.
    """
    train_keys = {key(example) for example in train}
    shared = [example.where for example in dev if key(example) in train_keys]
    fault = f"of {len(dev)} dev {kind} is|are also in the training data"
    fix = "Remove them from one of the two: they make the metrics too good."
    return report_rows("overlap", shared, fault, fix, "warning")
