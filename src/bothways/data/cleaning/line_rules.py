"""Rules that remove lines of documents.

Source: C4 (Raffel et al. 2020, Exploring the Limits of Transfer Learning, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bothways.core.config.values import require_at_least
from bothways.data.cleaning.words import count_words

_ENDS = (".", "!", "?", '"', "”", "’", "»", "。", "！", "？", "」", "』", "۔", "؟", "।")


@dataclass(frozen=True)
class TerminalPunctuation:
    """Remove lines that do not end in one of some marks, such as headings, menus and buttons.

    Attributes:
        marks: ends of a line that is kept; C4 has full stop, exclamation mark, question mark and
            end quotation mark, and here those of other scripts are added.
        ellipsis: ends of a line that is removed nevertheless.
    """

    marks: tuple[str, ...] = _ENDS
    ellipsis: tuple[str, ...] = ("...", "…")

    def keeps(self, line: str) -> bool:
        """Return True for a line that stays."""
        return line.endswith(self.marks) and not line.endswith(self.ellipsis)


@dataclass(frozen=True)
class LineWords:
    """Remove lines with few words; an ideograph is a word.

    Attributes:
        least: the number of words of a line that is kept.
    """

    least: int = 5

    def __post_init__(self) -> None:
        require_at_least(1, least=self.least)

    def keeps(self, line: str) -> bool:
        """Return True for a line that stays."""
        # Words between spaces are fast to count, and never more than all words.
        return len(line.split()) >= self.least or count_words(line) >= self.least


@dataclass(frozen=True)
class UnwantedLines:
    """Remove lines with one of some phrases, in any case. The phrases are English.

    Attributes:
        phrases: of notices about scripts, cookies and terms.
    """

    phrases: tuple[str, ...] = (
        "javascript",
        "terms of use",
        "privacy policy",
        "cookie policy",
        "uses cookies",
        "use of cookies",
        "use cookies",
    )

    def keeps(self, line: str) -> bool:
        """Return True for a line that stays."""
        lower = line.lower()
        return not any(phrase.lower() in lower for phrase in self.phrases)


LineRule = TerminalPunctuation | LineWords | UnwantedLines


def remove_lines(text: str, rules: Sequence[LineRule]) -> tuple[str, list[tuple[int, str]]]:
    """Return the text without the lines that a rule removes; empty lines stay.

    Also return each line that was removed, after the number of the first rule that removes it.
    """
    if not rules:
        return text, []
    lines, removed = list[str](), list[tuple[int, str]]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        rule = next((n for n, rule in enumerate(rules) if bare and not rule.keeps(bare)), None)
        if rule is None:
            lines.append(line)
        else:
            removed.append((rule, line))
    return "".join(lines), removed
