"""The errors that users can cause, as one small tree.

    BothwaysError
    ├── ConfigError       an invalid setting; its dotted path is in `where`
    ├── DataError         a file, column, label or text that cannot be used
    ├── TokenizerError    a vocabulary or tokenizer file that cannot be used
    ├── FolderError       a model folder that cannot be read or written
    ├── CheckpointError   a checkpoint that is corrupt, or belongs to something else
    ├── ResourceError     no disk space, no permission, a folder in use, a missing device or package
    │   └── LostRankError     another rank of a run has ended or cannot be reached
    └── DivergedError     a loss or a gradient that is not finite

The command line prints only the message, without a traceback, and exits with status 2; with 1 for
a lost rank, where the same command may succeed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from bothways.core.advice import Interface, argument, render
from bothways.core.terminal import printable, shortened

AGAIN = f"repeat the same call, with {argument(resume=True)} if it has this option"
"""How to continue any work that has ended, for the advice of an error."""


_LONG_PATH = 1000
"""Characters from which a path is cut in a message."""


class BothwaysError(Exception):
    """Base class of the errors that users can fix.

    Args:
        what: the value given and what is allowed, as one sentence.
        where: the dotted path of a setting, a file, or `file:line`.
        fix: what to change, as one sentence; parameters by `advice.argument`.

    Examples:
        >>> try:
        ...     bothways.load("my-classifier", task="fly")
        ... except bothways.BothwaysError as error:
        ...     print(error.where)
        task
    """

    on_every_rank = False
    """True if all ranks of a run raise it: the command line prints it on the main rank alone."""

    def __init__(
        self, what: str, *, where: str | os.PathLike[str] | None = None, fix: str | None = None
    ) -> None:
        self.what, self.where, self._fix = what, where, fix
        super().__init__(what, where, fix)

    @property
    def fix(self) -> str | None:
        """Advice on what to change, in the words of the interface of this process."""
        return None if self._fix is None else render(self._fix)

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling."""
        remade = functools.partial(type(self), self.what, where=self.where, fix=self._fix)
        return remade, ()

    def __str__(self) -> str:
        return self.message()

    def message(self, interface: Interface | None = None) -> str:
        """Return the error as one text, with advice for an interface; None for the process's."""
        prefix = "" if self.where is None else os.fspath(self.where).replace("\n", "\\n") + ": "
        prefix = prefix if len(prefix) < _LONG_PATH else shortened(prefix)
        text = self.what + (f"\n  {self._fix}" if self._fix else "")
        return printable(render(prefix, interface) + shortened(render(text, interface)))


class ConfigError(BothwaysError):
    """An invalid setting."""


class DataError(BothwaysError):
    """A file, column, label or text that cannot be used."""


class TokenizerError(BothwaysError):
    """A vocabulary or tokenizer file that cannot be used."""


class FolderError(BothwaysError):
    """A model folder that cannot be read or written."""


class CheckpointError(BothwaysError):
    """A checkpoint that is corrupt, or belongs to something else."""


class ResourceError(BothwaysError):
    """No disk space, no permission, a folder in use, a missing device or package."""


class LostRankError(ResourceError):
    """Another rank of a run has ended or cannot be reached."""


class DivergedError(BothwaysError):
    """A loss or a gradient that is not finite; another seed or learning rate may succeed."""


@contextlib.contextmanager
def os_errors(path: Path, fix: str) -> Iterator[None]:
    """Turn errors of the operating system while writing into a ResourceError at `path`.

    safetensors and torch wrap such an error in one of their own.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        match cause:
            case OSError():
                message = cause.strerror or str(cause)
            case SafetensorError():
                message = str(cause)
            case _:
                raise
        raise ResourceError(f"cannot be written: {message}", where=path, fix=fix) from error


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

    Examples:
        with optional("data", "reading Parquet files"):
            from pyarrow import parquet
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "bothways":
            raise
        message = f"{purpose} needs the package {error.name!r}, which is not installed"
        raise ResourceError(message, fix=f'Install it: pip install "bothways[{extra}]"') from error


def require(extra: str, purpose: str, *packages: str) -> None:
    """Check that packages are installed, before long work that needs them; errors as `optional`."""
    for package in packages:
        if not installed(package):
            with optional(extra, purpose):
                raise ModuleNotFoundError(name=package)
