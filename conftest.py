"""Check arguments and results of the modules that annotate the shapes of arrays.

The types of all other modules are mypy's: checking each of their calls takes a third of the time.
Checking shapes takes up to half of a test's time, so `make test` checks the first call of a
function in a process, and all calls in one test of BOTHWAYS_CHECK_SHAPES; without it, in all.
This file is read before any module of bothways is imported.
"""

import functools
import inspect
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import torch

SOURCE = Path(__file__).parent / "src"
ANNOTATED = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    for file in SOURCE.rglob("*.py")
    if "from jaxtyping import" in file.read_text("utf8")
]
ONE_IN = int(os.environ.get("BOTHWAYS_CHECK_SHAPES", "1"))
check_every_call = jaxtyping.jaxtyped
checking = True
"""Whether the test under way is checked."""


def check_some_tests(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator that checks some calls of a function, or all of a class."""
    return functools.partial(_decorate, typechecker)


def _decorate(typechecker: Callable[..., Any], function: Any) -> Any:
    checked = check_every_call(function, typechecker=typechecker)
    if inspect.isclass(function):
        return checked
    first = True

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        # What is compiled is not checked: torch 2.13's compiler reads other values than the checks.
        is_checked, first = (checking or first) and not torch.compiler.is_compiling(), False
        return (checked if is_checked else function)(*args, **kwargs)

    return call


def pytest_runtest_logstart(nodeid: str) -> None:
    global checking  # noqa: PLW0603 – of the process, as the tests are
    checking = zlib.crc32(nodeid.encode()) % ONE_IN == 0


jaxtyping.jaxtyped = check_some_tests
jaxtyping.install_import_hook(ANNOTATED, "beartype.beartype")
