"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable

from cyclopts import Parameter


def _check_names(kind: object, names: str | Iterable[str] | None) -> None:
    """Raise ValueError for an unknown option."""
    for name in [names] if isinstance(names, str) else names or ():
        if name.startswith("-") and name != "-":
            raise ValueError(f"Unknown option: {name}")


INPUTS = Parameter(negative_iterable="", allow_leading_hyphen=True, validator=_check_names)
"""File names as arguments of a command, including "-"."""
