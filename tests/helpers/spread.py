"""A grid of cases thinned for `make test`; `make test-slow` runs the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(
    cases: Iterable[tuple[Any, ...]], options: Sequence[Any], ids: Sequence[str] | None = None
) -> list[Any]:
    """Each case with each option, marked slow except for one option of each case, in turn.

    (a, b, c) with options (1, 2): a-1, b-2, c-1, and slow a-2, b-1, c-2. So every case and every
    option is in the fast tests, and their number is that of the cases.
    """
    return [
        pytest.param(
            *case,
            option,
            id=None if ids is None else f"{ids[number]}-{place}",
            marks=() if place == number % len(options) else pytest.mark.slow,
        )
        for number, case in enumerate(cases)
        for place, option in enumerate(options)
    ]


def first_of(
    cases: Iterable[tuple[Any, ...]], kinds: Iterable[Any], ids: Sequence[str]
) -> list[Any]:
    """The cases, marked slow except for the first of each kind."""
    seen = set[Any]()
    parameters = []
    for case, kind, name in zip(cases, kinds, ids, strict=True):
        parameters.append(
            pytest.param(*case, id=name, marks=pytest.mark.slow if kind in seen else ())
        )
        seen.add(kind)
    return parameters
