"""What users read of a problem: errors as one small tree, findings of checks, and advice.

    BothwaysError
    ├── ConfigError       an invalid setting; its dotted path is in `where`
    │   └── UnknownKeyError   a setting that does not exist
    ├── DataError         a file, column, label or text that cannot be used
    ├── TokenizerError    a vocabulary or tokenizer file that cannot be used
    ├── FolderError       a model folder that cannot be read or written
    ├── CheckpointError   a checkpoint that is corrupt, or belongs to something else
    ├── ResourceError     no disk space, no permission, a folder in use, a missing device or package
    │   └── LostRankError     another rank of a run has ended or cannot be reached
    └── DivergedError     a loss or a gradient that is not finite

The command line prints only the message, without a traceback, and exits with status 2; with 1 for
a lost rank, where the same command may succeed.

Advice is in the words of the interface that was used: Python, a command line, JSON over HTTP, or a
TOML file.
A message carries parameters as values, and the place that shows it spells them:

    fix = f"Name the column: {argument(label='NAME')}."

    render(fix, "python")   Name the column: label=NAME.
    render(fix, "command")  Name the column: --label NAME.
    render(fix, "json")     Name the column: "label": NAME.

A setting is a word on a command line, and its path may have dots, which no keyword of Python has:

    fix = f"Set {setting('training.recompute', True)}."

    render(fix, "python")   Set **{"training.recompute": True}.
    render(fix, "command")  Set training.recompute=true.
    render(fix, "toml")     Set training.recompute = true.

In a message a parameter is JSON between the control characters STX and ETX, so that it survives
f-strings, pickling and the way through other errors. `str` of an error or a finding renders it
for `interface`, which is Python's unless the process is a command.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bothways.core.terminal import printable, shortened

Interface = Literal["python", "command", "json", "toml"]

_FUNCTIONS = {
    "tokenizer train": "train_tokenizer", "corpus build": "build_corpus", "finetune": "finetune",
    "predict": "load", "export": "export_model", "pretrain": "pretrain", "adapt": "adapt",
    "index": "build_index", "search": "search", "show": "show", "average": "average",
    "evaluate": "evaluate",
}  # fmt: skip
"""Commands that are a function of the package; the others are only commands."""
_OPTIONS = {"best": "top"}
"""Options whose argument has another name: `top` is also a setting of a task."""
_PARAMETERS = re.compile("\x02([^\x02\x03]*)\x03")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|…")
_interface: Interface = "python"


def argument(**values: str | float | bool) -> str:
    """Return parameters with their values, as part of a message that `render` spells.

    Values in capitals, such as NAME, are placeholders. True and False are flags; dotted names are
    settings.
    """
    return f"\x02{json.dumps([None, (), values])}\x03"


def setting(path: str, value: str | float | bool | Many[str]) -> str:
    """Return a setting of a run with its value, as `argument`."""
    return f"\x02{json.dumps([path, value])}\x03"


def call(command: str, *inputs: str, **values: str | float | bool) -> str:
    """Return a call of a command, or of the function with its purpose, as `argument`."""
    return f"\x02{json.dumps([command, inputs, values])}\x03"


def render(text: str, interface: Interface | None = None) -> str:
    """Spell the parameters in a message for an interface; None for the current process's."""
    spelled = interface or _interface

    def spell(match: re.Match[str]) -> str:
        """Return one set of parameters; text that is none stays."""
        try:
            message = json.loads(match[1])
        except ValueError:
            return match[0]
        match message:
            case [str(path), value]:
                return _spelled_setting(path, value, spelled)
            case [None, [], dict(values)]:
                return _spelled(values, spelled)
            case [str(command), [*inputs], dict(values)]:
                function = _FUNCTIONS.get(command) if spelled == "python" else None
                style: Interface = "python" if function else "command"
                words = [*(_literal(word, style) for word in inputs), _spelled(values, style)]
                if function:
                    return f"bothways.{function}({', '.join(filter(None, words))})"
                return " ".join(["bothways", command, *filter(None, words)])
        return match[0]

    return _PARAMETERS.sub(spell, text)


def _spelled(values: Mapping[str, Any], interface: Interface) -> str:
    """Return parameters with their values as keywords, options or members of an object."""
    words = []
    for name, value in values.items():
        option = _OPTIONS.get(name, name).replace("_", "-")
        if interface != "command" or "." in name:
            words.append(_spelled_setting(name, value, interface))
        elif isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option} {_literal(value, interface)}")
    return (" " if interface == "command" else ", ").join(words)


def _spelled_setting(path: str, value: Any, interface: Interface) -> str:
    """Return a setting as `key=value`, or as the keyword or member that any parameter is."""
    if interface == "command":
        text = ",".join(value) if isinstance(value, list) else str(value)
        return shlex.quote(f"{path}={text.lower() if isinstance(value, bool) else text}")
    text = _literal(value, interface)
    if interface == "toml":
        return f"{path} = {text}"
    if interface == "json" or "." not in path:
        return f"{path}={text}" if interface == "python" else f'"{path}": {text}'
    return f"**{{{json.dumps(path)}: {text}}}"


def _literal(value: Any, interface: Interface) -> str:
    """Return a value as an interface reads it; a placeholder, such as NAME, as it is."""
    if isinstance(value, str) and _PLACEHOLDER.fullmatch(value):
        return value
    if interface == "command":
        return shlex.quote(str(value))
    if interface == "python" and not isinstance(value, str):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


@contextlib.contextmanager
def interface(name: Interface) -> Iterator[None]:
    """Render the messages of this process for an interface while the context lasts."""
    global _interface  # noqa: PLW0603 – a process is one command
    previous, _interface = _interface, name
    try:
        yield
    finally:
        _interface = previous


AGAIN = f"repeat the same call, with {argument(resume=True)} if it has this option"
"""How to continue any work that has ended, for the advice of an error."""


_LONG_PATH = 1000
"""Characters from which a path is cut in a message."""


class BothwaysError(Exception):
    """Base class of the errors that users can fix.

    Args:
        what: the value given and what is allowed, as one sentence.
        where: the dotted path of a setting, a file, or `file:line`.
        fix: what to change, as one sentence; `advice` with parameters that are not spelled yet.

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
        self.what, self.where, self.advice = what, where, fix
        super().__init__(what, where, fix)

    @property
    def fix(self) -> str | None:
        """Advice on what to change, in the words of the interface of this process."""
        return None if self.advice is None else render(self.advice)

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling."""
        remade = functools.partial(type(self), self.what, where=self.where, fix=self.advice)
        return remade, ()

    def __str__(self) -> str:
        return self.message()

    def message(self, interface: Interface | None = None) -> str:
        """Return the error as one text, with advice for an interface; None for the process's."""
        prefix = "" if self.where is None else os.fspath(self.where).replace("\n", "\\n") + ": "
        # `Path` has made s3:/bucket/run of s3://bucket/run.
        prefix = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]+:/)(?=[^/\s])", r"\1/", prefix)
        prefix = prefix if len(prefix) < _LONG_PATH else shortened(prefix)
        text = self.what + (f"\n  {self.advice}" if self.advice else "")
        return printable(render(prefix, interface) + shortened(render(text, interface)))


class ConfigError(BothwaysError):
    """An invalid setting."""


class UnknownKeyError(ConfigError):
    """A setting that does not exist."""


def require_unset(message: str, fix: str, /, **values: object) -> None:
    """Raise ConfigError at the first argument that is set, where it does nothing.

    Args:
        values: arguments by name; None is not set.
    """
    for name, value in values.items():
        if value is not None:
            raise ConfigError(message, where=name, fix=fix)


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


def is_interruption(error: BaseException) -> bool:
    """Return True for Ctrl-C, and for an error that hides it.

    In the middle of an import in C it is the cause of another error. A second one, while `zipfile`
    closes a file because of the first, leaves the file open, which is a ValueError.
    """
    chain = (error, error.__cause__, error.__context__)
    return any(isinstance(link, KeyboardInterrupt) for link in chain)


@contextlib.contextmanager
def os_errors(path: Path, fix: str) -> Iterator[None]:
    """Turn errors of the operating system while writing into a ResourceError at `path`.

    safetensors and torch wrap such an error in one of their own.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # `torch.save` raises RuntimeError while the error of the disk is handled.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        match cause:
            case OSError():
                if isinstance(cause, PermissionError):
                    fix = "Choose another place, or give this user write permission."
                message = cause.strerror or str(cause)
            case SafetensorError():
                message = str(cause)
            case _:
                raise
        raise ResourceError(f"cannot be written: {message}", where=path, fix=fix) from error


@contextlib.contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Turn errors of the operating system while reading into a ResourceError at `path`.

    An OSError without a number comes from a decompressor and passes unchanged.
    """
    try:
        yield
    except PermissionError as error:
        fix = "Give this user read permission."
        raise ResourceError("permission denied", where=path, fix=fix) from error
    except OSError as error:
        if error.errno is None:
            raise
        fix = "Check the name and the disk."
        raise ResourceError(f"cannot be read: {error.strerror}", where=path, fix=fix) from error


def installed(*packages: str) -> bool:
    """Return True if all these packages can be imported; imports none of them."""
    return all(importlib.util.find_spec(package) is not None for package in packages)


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the Hub's client: its newer releases use httpx or httpx2."""
    clients = [importlib.import_module(name) for name in ("httpx", "httpx2") if installed(name)]
    return OSError, ValueError, *(client.HTTPError for client in clients)


def hub_advice(error: Exception, fix: str) -> str:
    """Return advice for an error of the Hub's client: `fix`, unless it is of a file here."""
    # pathlib raises a RuntimeError for a user without a home.
    if getattr(error, "filename", None) is None and "home directory" not in str(error):
        return fix
    return "Set the variable HF_HOME to a folder with room that this user may write."


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


Check = Literal[
    "ids", "positions", "casing", "truncation", "unknown", "disk", "memory", "time",
    "rows", "labels", "pairs", "balance", "overlap", "heads", "masking", "training",
]  # fmt: skip
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A problem that a check found.

    Attributes:
        severity: an error stops the run, a warning probably harms it, a note is information.
        what: the problem, as one sentence.
        where: a setting, a file or a line.
    """

    check: Check
    severity: Severity
    what: str
    where: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        prefix = f"{self.where}: " if self.where else ""
        return render(f"{prefix}{self.what}" + (f". {self.fix}" if self.fix else ""))


def report_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the warnings and notes, warnings first.

    Raises:
        BothwaysError: there are errors; the message lists all of them.
    """
    findings = list(findings)
    errors = [finding for finding in findings if finding.severity == "error"]
    if len(errors) == 1:
        raise BothwaysError(errors[0].what, where=errors[0].where, fix=errors[0].fix)
    if errors:
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        raise BothwaysError(f"{len(errors)} errors must be corrected before training:{lines}")
    return sorted(findings, key=lambda finding: finding.severity != "warning")
