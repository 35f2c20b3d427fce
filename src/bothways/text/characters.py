"""Characters: halves of surrogate pairs, which JSON and Python strings can hold and UTF-8 cannot."""

from __future__ import annotations


def surrogate_in(text: str) -> str | None:
    r"""Describe the first half of a surrogate pair in a text; None if there is none.

    Example: "ab\ud800" → "U+D800 at character 2, half of a surrogate pair".
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at character {error.start}"
        return f"{half}, half of a surrogate pair"
    return None


def without_surrogates(text: str) -> str:
    """Join the halves of surrogate pairs that belong together, and replace others by U+FFFD."""
    if surrogate_in(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
