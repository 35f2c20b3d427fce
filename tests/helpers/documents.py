"""Pages of the documentation, and what stands in their fenced blocks."""

import functools
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"


@functools.cache
def fences(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf8"), re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The texts of the blocks in a language."""
    return [text for each, text in fences(page) if each == language]


def run_code(code: str, page: Path) -> dict[str, Any]:
    """The names that a block of a page defines."""
    names: dict[str, Any] = {}
    exec(compile(code, page.name, "exec"), names)
    return names


@functools.cache
def commands(page: Path) -> tuple[str, ...]:
    """The command lines of a page, without what a shell does with what they print."""
    lines = [
        re.match(r"(?:.*\| )?(bothways (?!\().*)", line)
        for language, text in fences(page)
        if language in {"", "bash"}
        for line in text.replace("\\\n", " ").splitlines()
    ]
    return tuple(re.split(r"\s+#|\s[>|]\s", found[1])[0] for found in lines if found)
