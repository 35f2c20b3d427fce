"""The errors a user can cause, as one small tree.

    BothwaysError
    ├── ConfigError       a setting that cannot be: the dotted path is in `where`
    ├── DataError         a file, column, label or text that cannot be used
    ├── TokenizerError    a vocabulary or tokenizer file that cannot be used
    ├── FolderError       a model folder that cannot be read or written
    ├── CheckpointError   a checkpoint that is corrupt, foreign or of another run
    ├── ResourceError     no room on the disk, no permission, a folder in use, no such device
    └── DivergedError     a loss or a gradient that is not finite

The command line prints the message alone, without a traceback, and exits with status 2.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


class BothwaysError(Exception):
    """A mistake that the user can mend.

    Args:
        what: what was given and what is allowed, as one sentence.
        where: the dotted path of a setting, a file, or `file:line`.
        fix: what to change, as one sentence.
    """

    def __init__(
        self, what: str, *, where: str | os.PathLike[str] | None = None, fix: str | None = None
    ) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        place = f"{os.fspath(self.where)}: " if self.where is not None else ""
        return f"{place}{self.what}" + (f"\n  {self.fix}" if self.fix else "")


class ConfigError(BothwaysError):
    """A setting that cannot be."""


class DataError(BothwaysError):
    """A file, column, label or text that cannot be used."""


class TokenizerError(BothwaysError):
    """A vocabulary or tokenizer file that cannot be used."""


class FolderError(BothwaysError):
    """A model folder that cannot be read or written."""


class CheckpointError(BothwaysError):
    """A checkpoint that is corrupt, foreign or of another run."""


class ResourceError(BothwaysError):
    """No room on the disk, no permission, a folder in use, no such device."""


class DivergedError(BothwaysError):
    """A loss or a gradient that is not finite: this run is lost, another seed or rate may not be."""


@contextlib.contextmanager
def os_errors(place: Path, fix: str) -> Iterator[None]:
    """What the operating system refuses inside is a ResourceError at `place`: no room, no permission, a file for a folder.

    safetensors and torch hide its error in one of their own.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        match cause:
            case OSError():
                what = cause.strerror or str(cause)
            case SafetensorError():
                what = str(cause)
            case _:
                raise
        raise ResourceError(f"cannot be written: {what}", where=place, fix=fix) from error
