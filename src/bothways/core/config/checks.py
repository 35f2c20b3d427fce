"""Range checks for numbers of a configuration."""

from __future__ import annotations

from typing import get_args

from bothways.core.config.tree import join_path
from bothways.core.errors import ConfigError


def require_at_least(least: int, /, location: str = "", **numbers: float | int | None) -> None:
    """Check that settings are at least `least`; None passes.

    Args:
        location: the dotted path of their table.
        numbers: the values by the names of their settings.

    Raises:
        ConfigError: a value is smaller, or NaN.
    """
    for name, number in numbers.items():
        if number is not None and not number >= least:
            message = f"must be at least {least}, not {number}"
            raise ConfigError(message, where=join_path(location, name))


def require_choice(choices: object, location: str, *values: object, fix: str | None = None) -> None:
    """Check that values are among the choices of a `Literal`, or a union of these; None passes.

    Args:
        location: the name of the parameter.
        fix: advice instead of the list of choices.

    Raises:
        ConfigError: a value is none of them.
    """
    allowed = [name for kind in get_args(choices) for name in get_args(kind) or (kind,)]
    for value in values:
        if value is not None and value not in allowed:
            fix = fix or f"Choose one of {', '.join(allowed)}."
            raise ConfigError(f"unknown {location} {value!r}", where=location, fix=fix)


def require_seed(location: str = "", **seeds: int | None) -> None:
    """Check that seeds have at most 62 bits; arguments and errors as `require_at_least`."""
    for name, seed in seeds.items():
        if seed is not None and not -(2**62) <= seed <= 2**62:
            message = f"must be from -2**62 to 2**62, not {seed}"
            raise ConfigError(message, where=join_path(location, name))


def require_probability(location: str = "", **rates: float | int | None) -> None:
    """Check that dropout rates are in [0, 1); arguments and errors as `require_at_least`."""
    for name, rate in rates.items():
        if rate is not None and not 0 <= rate < 1:
            raise ConfigError(f"must be in [0, 1), not {rate}", where=join_path(location, name))


def require_share(location: str = "", **shares: float | None) -> None:
    """Check that shares are in [0, 1]; arguments and errors as `require_at_least`."""
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"must be in [0, 1], not {share}", where=join_path(location, name))
