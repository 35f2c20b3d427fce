"""Check arguments and results of the modules that annotate the shapes of arrays.

The types of all other modules are mypy's: checking each of their calls takes a third of the time.
Checking shapes at every call takes up to half of it, so `make test` checks only the tests of the
packages that have them, and of each test the first calls of a function: BOTHWAYS_CHECK_SHAPES is
their number.
This file is read before any module of bothways is imported.
"""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping

SOURCE = Path(__file__).parent / "src"
ANNOTATED = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    for file in SOURCE.rglob("*.py")
    if "from jaxtyping import" in file.read_text("utf8")
]
LIMIT = int(os.environ.get("BOTHWAYS_CHECK_SHAPES", "1000000"))
check_every_call = jaxtyping.jaxtyped
started = 0
"""The number of tests that have started."""


def check_first_calls(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator that checks the first calls of a function in a test, or all of a class."""
    return functools.partial(_decorate, typechecker)


def _decorate(typechecker: Callable[..., Any], function: Any) -> Any:
    checked = check_every_call(function, typechecker=typechecker)
    if inspect.isclass(function):
        return checked
    test = calls = 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, calls
        test, calls = started, calls + 1 if test == started else 1
        return (checked if calls <= LIMIT else function)(*args, **kwargs)

    return call


def pytest_runtest_logstart() -> None:
    global started  # noqa: PLW0603 – of the process, as the tests are
    started += 1


if LIMIT:
    jaxtyping.jaxtyped = check_first_calls
    jaxtyping.install_import_hook(ANNOTATED, "beartype.beartype")
