"""Names of files and folders: home folders, and URLs where a path is expected."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bothways.core.errors import ConfigError
from bothways.core.terminal import surrogate_in


def is_url(name: object) -> bool:
    """Return True for a URL such as "s3://bucket/text.txt"; a chain such as "a::b://c" is one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+(://|::.*://)", str(name)) is not None


def local_path(name: str | os.PathLike[str]) -> Path:
    """Return a path on this machine; ~ and ~user are home folders, as in a shell.

    Where there is no such user, the name stays as it is, where pathlib raises an error.
    """
    return Path(os.path.expanduser(name))


def require_local(folder: Path) -> None:
    """Check that a folder is not a URL, of which `Path` has made s3:/bucket/run.

    Raises:
        ConfigError: it is one, or its name is not UTF-8, which safetensors cannot write.
    """
    require_utf8(folder)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", folder.as_posix()):
        fix = (
            "Name a folder of this machine; copy it from or to the URL with the tools of its store."
        )
        raise ConfigError("is a URL, not a folder of this machine", where=folder, fix=fix)


def require_utf8(folder: Path) -> None:
    """Raise ConfigError if the name of a folder has bytes that are not UTF-8."""
    if surrogate_in(str(folder.absolute())) is not None:
        message = "has a name that is not UTF-8, which safetensors cannot open"
        raise ConfigError(message, where=folder, fix="Rename the folder, or one above it.")
