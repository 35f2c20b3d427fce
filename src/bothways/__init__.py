"""bothways: from raw text to a deployed bidirectional encoder.

The names below are imported when they are first used, so that `import bothways` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BothwaysError": "bothways.core.errors",
    "EncoderConfig": "bothways.model.config",
    "Encoder": "bothways.model.encoder",
    "Tokenizer": "bothways.text.tokenizer",
}
__all__ = ["__version__", *_HOME]  # noqa: PLE0604

if TYPE_CHECKING:
    from bothways.core.errors import BothwaysError
    from bothways.model.config import EncoderConfig
    from bothways.model.encoder import Encoder
    from bothways.text.tokenizer import Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bothways' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(importlib.import_module(_HOME[name]), name)
