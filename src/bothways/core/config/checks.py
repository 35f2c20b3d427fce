"""Where numbers of a configuration must lie: the two ranges that most settings have."""

from __future__ import annotations

from bothways.core.config.tree import join_path
from bothways.core.errors import ConfigError


def require_at_least(least: int, where: str = "", **numbers: float | int | None) -> None:
    """Numbers, by the names of their settings, that must be at least `least`; absent ones pass.

    Args:
        where: the dotted path of the table that they stand in.

    Raises:
        ConfigError: the first that lies below, or is no number.
    """
    for name, number in numbers.items():
        if number is not None and not number >= least:
            raise ConfigError(
                f"must be at least {least}, not {number}", where=join_path(where, name)
            )


def require_probability(where: str = "", **rates: float | int | None) -> None:
    """Rates of what is dropped, by the names of their settings, that must lie in [0, 1); absent ones pass.

    Args:
        where: the dotted path of the table that they stand in.

    Raises:
        ConfigError: the first that lies outside.
    """
    for name, rate in rates.items():
        if rate is not None and not 0 <= rate < 1:
            raise ConfigError(f"must lie in [0, 1), not {rate}", where=join_path(where, name))
