"""Check arguments and results of the modules that annotate the shapes of arrays.

The types of all other modules are mypy's: checking each of their calls takes a third of the time,
and shapes a quarter. So `make test` checks these only in the tests of the packages that have them.
This file is read before any module of bothways is imported.
"""

import os
from pathlib import Path

from jaxtyping import install_import_hook

SOURCE = Path(__file__).parent / "src"
ANNOTATED = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    for file in SOURCE.rglob("*.py")
    if "from jaxtyping import" in file.read_text("utf8")
]

if os.environ.get("BOTHWAYS_CHECK_SHAPES") != "0":
    install_import_hook(ANNOTATED, "beartype.beartype")
