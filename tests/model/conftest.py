"""What several tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bothways.model import native

compiled = pytest.mark.skipif(not native.multiplies("int8"), reason="no compiled kernels for int8 here")


@pytest.fixture(scope="module", params=["torch", pytest.param("compiled", marks=compiled)])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything by torch's operators, and by the library's own kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "_level", lambda: 0)
        yield
