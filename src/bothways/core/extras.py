"""Optional dependencies: one clear error where a package is missing."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from bothways.core.errors import ResourceError


def installed(*packages: str) -> bool:
    """Return True if all these packages can be imported; imports none of them."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


@contextlib.contextmanager
def optional(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failing import inside the context into an error that names the extra to install.

    Args:
        extra: an extra of this distribution, as in `pip install "bothways[data]"`.
        purpose: the feature that needs the import, as the subject of a sentence.

    Raises:
        ResourceError: a package is not installed.

    Example:
        with optional("data", "reading Parquet files"):
            from pyarrow import parquet
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "bothways":
            raise
        raise ResourceError(
            f"{purpose} needs the package {error.name!r}, which is not installed",
            fix=f'Install it: pip install "bothways[{extra}]"',
        ) from error


def require(extra: str, purpose: str, *packages: str) -> None:
    """Check that packages are installed, before long work that needs them; errors as `optional`."""
    for package in packages:
        if not installed(package):
            with optional(extra, purpose):
                raise ModuleNotFoundError(name=package)
