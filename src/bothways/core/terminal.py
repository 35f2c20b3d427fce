"""Characters that terminals, pages, messages and UTF-8 files can show and hold."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.segment import Segment

# C0 and C1 control characters except tab and newline, DEL, overrides of the writing direction,
# and lone surrogates, which no encoding can write.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Replace control characters by their escapes, so that a name cannot command a terminal.

    Example: "a\x1b[2Jb" (which clears the screen) → r"a\x1b[2Jb".
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match.group())[1:-1], text)


_LONG_WORD = re.compile(r"'[^'\n]{300,}'|\"[^\"\n]{300,}\"|\S{300,}")


def shortened(text: str) -> str:
    """Return a message in which quoted texts and words of 300 characters or more are cut.

    Example: a label of 3,000 letters → "'xxx…xxx' (3,002 characters)", with 100 characters at the
    beginning and 50 at the end.
    """

    def cut(match: re.Match[str]) -> str:
        word = match.group()
        return f"{word[:100]}…{word[-50:]} ({len(word):,} characters)"

    return _LONG_WORD.sub(cut, text)


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Join names with commas; beyond `limit` of them, give the number of the others.

    Example: listed("abcd", 2) → "a, b and 2 more".
    """
    names = list(names)
    remainder = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + remainder


def result_line(name: str, metrics: Mapping[str, float], **fields: object) -> str:
    """Return the `repr` of a result: its metrics to four digits, then the fields that are not None.

    Example: "FinetuneResult(accuracy=0.9125, f1=0.9071, steps=120)".
    """
    items = {key: f"{value:.4g}" for key, value in metrics.items()}
    items |= {key: str(value) for key, value in fields.items() if value is not None}
    return printable(f"{name}({', '.join(f'{key}={value}' for key, value in items.items())})")


def quantity(count: int, phrase: str) -> str:
    """Put a count before a phrase that has "(s)" or "one|several" where a number decides.

    Example: quantity(2, "row(s) is|are empty") → "2 rows are empty".
    """
    words = phrase.replace("(s)", "" if count == 1 else "s")
    return f"{count:,} " + re.sub(r"(\w+)\|(\w+)", r"\1" if count == 1 else r"\2", words)


def output_console() -> Console:
    """Return standard output for tables and texts.

    A file or a pipe gets lines of 80 characters, unless COLUMNS gives another number, whether or
    not another stream is a terminal. A reader that ends is an error here as it is for `print`.
    Control characters in texts, such as the labels of a model, are escaped.

    Raises:
        BrokenPipeError: while printing, the reader has ended.
    """
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            """Raise the error again: rich would exit with status 1."""
            raise BrokenPipeError

        def render(self, *arguments: Any) -> Iterable[Segment]:
            """Escape control characters; those of rich itself are in segments of their own."""
            for segment in super().render(*arguments):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    fixed = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdecimal()
    return Output(width=80 if fixed else None, emoji=False)


class ErrorStream(io.TextIOBase):
    """Standard error for progress and notes, which never fails: nobody may be left to read them.

    After its reader or its terminal is gone, or its disk is full, output is discarded.

    Args:
        stream: standard error; None if it was closed before Python started. The host program may
            have closed it, too.

    Attributes:
        failure: the error after which output is discarded; None if there was none.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = None if getattr(stream, "closed", False) else stream
        self.failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # while an instance is copied
            raise AttributeError(name)
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._attempt("write", text)
        return len(text)

    def flush(self) -> None:
        self._attempt("flush")

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Return the file descriptor; raise OSError if there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("standard error is closed")
        return int(self._stream.fileno())

    def _attempt(self, method: str, *arguments: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except (OSError, ValueError) as error:  # ValueError: the host program has closed it
            self.failure = error
            # Buffered text is flushed once more at exit: to nowhere.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            self._stream = None


def write_stderr(text: str) -> None:
    """Print a line on standard error, if that can be written."""
    print(printable(text), file=ErrorStream(sys.stderr), flush=True)


def show_lines(console: Console, *renderables: RenderableType) -> None:
    """Print texts and tables below each other; long texts, such as paths, are not broken."""
    console.print(*renderables, sep="\n", soft_wrap=True)


def say(console: Console, text: str) -> None:
    """Print a line without interpreting markup, colours or line breaks."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def time_text(seconds: float) -> str:
    """Return a time as "0:01:30" or "2 days, 3:00:00"; "years" for 30 years or more."""
    return str(timedelta(seconds=round(seconds))) if seconds < 1e9 else "years"
