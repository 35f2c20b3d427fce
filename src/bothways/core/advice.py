r"""Advice in the words of the interface that was used: Python, a command line, or JSON over HTTP.

A message carries parameters as values, and the place that shows it spells them:

    fix = f"Name the column: {argument(label='NAME')}."

    render(fix, "python")   Name the column: columns={"label": NAME}.
    render(fix, "command")  Name the column: --label NAME.
    render(fix, "json")     Name the column: "label": NAME.

In a message a parameter is JSON between the control characters STX and ETX, so that it survives
f-strings, pickling and the way through other errors. `str` of an error or a finding renders it
for `interface`, which is Python's unless the process is a command.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Interface = Literal["python", "command", "json"]

_COLUMNS = ("text", "text_b", "label")
"""Parameters that are the argument `columns` in Python."""
_FUNCTIONS = {
    "tokenizer train": "train_tokenizer", "corpus build": "build_corpus", "finetune": "finetune",
    "predict": "load", "export": "export_model", "pretrain": "pretrain", "adapt": "adapt",
    "index": "build_index", "search": "search",
}  # fmt: skip
"""Commands that are a function of the package; the others are only commands."""
_PARAMETERS = re.compile("\x02([^\x02\x03]*)\x03")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|…")
_interface: Interface = "python"


def argument(**values: str | float | bool) -> str:
    """Return parameters with their values, as part of a message that `render` spells.

    Values in capitals, such as NAME, are placeholders. True and False are flags.
    """
    return _marked(None, (), values)


def call(command: str, *inputs: str, **values: str | float | bool) -> str:
    """Return a call of a command, or of the function with its purpose, as `argument`."""
    return _marked(command, inputs, values)


def _marked(command: str | None, inputs: tuple[str, ...], values: Mapping[str, Any]) -> str:
    return "\x02" + json.dumps([command, inputs, values]) + "\x03"


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
            case [None, [], dict(values)]:
                return _SPELLINGS[spelled](values)
            case [str(command), [*inputs], dict(values)]:
                function = _FUNCTIONS.get(command) if spelled == "python" else None
                if function is None:
                    words = ["bothways", command, *map(str, inputs), _options(values)]
                    return " ".join(filter(None, words))
                words = [*map(_python_value, inputs), _python(values)]
                return f"bothways.{function}({', '.join(filter(None, words))})"
        return match[0]

    return _PARAMETERS.sub(spell, text)


def _options(values: Mapping[str, Any]) -> str:
    words = []
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        flag = {True: option, False: f"--no-{option[2:]}"}
        words.append(flag[value] if isinstance(value, bool) else f"{option} {value}")
    return " ".join(words)


def _python_value(value: Any) -> str:
    if not isinstance(value, str):
        return repr(value)
    return value if _PLACEHOLDER.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _python(values: Mapping[str, Any]) -> str:
    columns = {name: values[name] for name in _COLUMNS if name in values}
    words = [f"{name}={_python_value(values[name])}" for name in values if name not in columns]
    if columns:
        items = (f'"{name}": {_python_value(value)}' for name, value in columns.items())
        words.insert(0, f"columns={{{', '.join(items)}}}")
    return ", ".join(words)


def _fields(values: Mapping[str, Any]) -> str:
    items = values.items()
    return ", ".join(
        f'"{name}": {"true" if value is True else _python_value(value)}' for name, value in items
    )


_SPELLINGS = {"python": _python, "command": _options, "json": _fields}


@contextlib.contextmanager
def interface(name: Interface) -> Iterator[None]:
    """Render the messages of this process for an interface while the context lasts."""
    global _interface  # noqa: PLW0603 – a process is one command
    previous, _interface = _interface, name
    try:
        yield
    finally:
        _interface = previous
