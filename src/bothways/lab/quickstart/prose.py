"""Extraction of prose from docstrings, without code, tables and markup.

It handles reStructuredText, numpydoc and Google sections, Sphinx fields, doctests and Markdown
fences. A line is classified by its beginning; nothing is parsed in full.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_RULE = re.compile(r"([=\-~^\"'#*+_.`:])\1{2,}$")
_TABLE = re.compile(r"[=\-+|]{2,}([ +|]+[=\-+|]{2,})+[+|]?$|\|.*\|$|.*\|.*\|")
_DIRECTIVE = re.compile(r"\.\.(?: +([\w-]+)::.*| .*)?$")
_KEPT_DIRECTIVES = {
    "note", "warning", "tip", "hint", "important", "caution", "attention", "seealso", "admonition",
}  # fmt: skip
_HEADING = re.compile(
    r"(args?|arguments?|(?:keyword )?arguments|(?:other )?parameters|returns?|yields?|raises|warns"
    r"|attributes|methods|examples?|usage|notes?|references|see also|warnings?|todo|shapes?"
    r"|inputs?|outputs?|options):{0,2}$",
    re.IGNORECASE,
)
_TYPED = re.compile(r"[*\\]*[\w.]+(?:, [*\\]*[\w.]+)* +:(?: |$)|[*`]*[\w.]+[*`]* \(.*\):$")
_DROPPED_FIELD = re.compile(r":(?:type|rtype|vartype|meta)\b[^:]*:")
_ITEM = re.compile(r"(?:[-*+•] +|\(?(?:\d{1,2}|[a-z])[.)] +|:\w+(?: [^:`]+)?: +)(?=\S)")
_NAMED_ITEM = re.compile(r"[*`]*[\w.]+[*`]*(?: \([^)]*\))?: +(?=\S)")
_INLINE = (
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"(?::[\w:+-]+:)?`~?([^`<]+?)(?: ?<[^`>]*>)?`(?:__?\b)?"), r"\1"),
    (re.compile(r"(?<![\w*])\*\*?(\w[^*]*?)\*\*?(?![\w*])"), r"\1"),
    (re.compile(r"\[[\w#]+\]_|<?https?://\S+|\\(?=[*_`|])"), ""),
)
_MARKUP = re.compile(r"[`*\\]|\]_|://")


@dataclass
class _Paragraph:
    indent: int
    hanging: bool
    lines: list[str] = field(default_factory=list)


def prose(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring that are prose, one line each, in order.

    Omits doctests, literal blocks, code fences, tables, directives other than notes, headings, type
    specifications, links, and paragraphs that are not mostly words. Descriptions of parameters and
    list items are kept as paragraphs.
    """
    lines = inspect.cleandoc(docstring).expandtabs().split("\n")
    return [
        text
        for paragraph in _paragraphs(_without_blocks(lines))
        if _is_prose(text := _plain(" ".join(paragraph.lines)))
    ]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _without_blocks(lines: list[str]) -> Iterator[str]:
    """Drop code, tables and directives; replace headings and underlines by blank lines."""
    skip_deeper, skip_to_blank, fenced = -1, False, False
    for number, line in enumerate(lines):
        text = line.strip()
        if text.startswith(("```", "~~~")):
            fenced = not fenced
        elif fenced:
            continue
        elif not text:
            skip_to_blank = False
            yield ""
        elif skip_to_blank or 0 <= skip_deeper < _indent(line):
            continue
        elif text.startswith((">>>", "In [")) or (text[0] in "=-+|" and _TABLE.match(text)):
            skip_to_blank, skip_deeper = True, -1
        elif text.startswith("..") and (directive := _DIRECTIVE.match(text)):
            skip_deeper = -1 if directive.group(1) in _KEPT_DIRECTIVES else _indent(line)
        elif (
            _RULE.match(text)
            or (number + 1 < len(lines) and _RULE.match(lines[number + 1].strip()))
            or _HEADING.match(text)
        ):
            skip_deeper = -1
            yield ""
        else:
            skip_deeper = _indent(line) if text.endswith("::") else -1
            yield line


def _paragraphs(lines: Iterator[str]) -> Iterator[_Paragraph]:
    """Join lines to paragraphs; list items, fields and changes of indentation start a new one."""
    current = _Paragraph(0, False)
    for line in lines:
        text, indent = line.strip(), _indent(line)
        fresh = not current.lines or indent < current.indent
        if not text or _DROPPED_FIELD.match(text) or (fresh and _TYPED.match(text)):
            yield current
            current = _Paragraph(indent, False)
            continue
        item = _ITEM.match(text) or (_NAMED_ITEM.match(text) if indent else None)
        if item or indent < current.indent or (indent > current.indent and not current.hanging):
            yield current
            current = _Paragraph(indent, item is not None)
        current.lines.append(text[item.end() :] if item else text)
    yield current


def _plain(text: str) -> str:
    if _MARKUP.search(text):
        for pattern, replacement in _INLINE:
            text = pattern.sub(replacement, text)
    return " ".join(text.replace("::", ":").split())


def _is_prose(text: str) -> bool:
    """Test for at least three words and at least 80 % letters and spaces."""
    words = text.split(" ")
    letters = sum(map(str.isalpha, text)) + len(words) - 1
    return (
        5 * letters >= 4 * len(text)
        and sum(word.strip("\"'(),.:;").isalpha() for word in words) >= 3
    )
