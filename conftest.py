"""Check arguments and results of the modules that annotate the shapes of arrays, in every test.

The types of all other modules are mypy's: checking each of their calls takes a third of the time.
This file is read before any module of bothways is imported.
"""

from pathlib import Path

from jaxtyping import install_import_hook

SOURCE = Path(__file__).parent / "src"
ANNOTATED = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    for file in SOURCE.rglob("*.py")
    if "from jaxtyping import" in file.read_text("utf8")
]

install_import_hook(ANNOTATED, "beartype.beartype")
