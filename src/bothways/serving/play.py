"""The playground: a page to try models in a browser, and the files that it consists of.

The files are those of one folder, by name. The page loads nothing from elsewhere and runs no inline
script, and its content security policy makes the browser enforce both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}
"""The types of the files, by suffix."""
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
)
"""The headers of the page and its files, next to those of every response."""


@dataclass(frozen=True)
class Page:
    """A file for a browser.

    Attributes:
        body: its bytes.
        kind: its content type.
        status: of the response.
        headers: of the response.
    """

    body: bytes
    kind: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)


MOVED = Page(b"", "text/plain", 308, {**HEADERS, "location": "../play"})
"""The answer to `/play/`, from which the files of the page would have other addresses."""


@functools.cache
def pages() -> Mapping[str, Page]:
    """Return the files of the playground by path: the page itself is `/play`."""
    files = {
        f"/play/{file.name}": Page(file.read_bytes(), KINDS[file.name.rpartition(".")[2]])
        for file in (resources.files("bothways.serving") / "page").iterdir()
    }
    return {"/play": files.pop("/play/index.html"), **files}
