"""Checks of multiple-choice data."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from bothways.core.finding import Finding
from bothways.tasks.text_checks import check_overlap

if TYPE_CHECKING:
    from bothways.tasks.choice.examples import ChoiceExample
from bothways.tasks.multilabel.checks import _check_answers, _check_endings, _check_positions


def check_choices(train: Many[ChoiceExample], dev: Many[ChoiceExample]) -> list[Finding]:
    """Everything that questions with choices can have wrong; `dev` may be empty."""
    return [
        *_check_endings([*train, *dev]),
        *_check_answers([*train, *dev]),
        *_check_positions(train),
        *check_overlap(train, dev, lambda example: (example.context, example.endings)),
    ]
