"""What several tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bothways.model import native
from bothways.model.native import EVERY, Feature

WITHOUT_AMX = EVERY & ~Feature.TILES
compiled = pytest.mark.skipif(not native.multiplies("int8"), reason="no compiled kernels for int8 here")
amx = pytest.mark.skipif(Feature.TILES not in native.features(), reason="no AMX here")
PROCESSORS = [
    pytest.param(WITHOUT_AMX, marks=(compiled, amx), id="without AMX"),
    pytest.param(EVERY, marks=compiled, id="compiled"),
]


def as_with(most: Feature) -> Iterator[None]:
    """As on a processor that has no more than this."""
    with pytest.MonkeyPatch.context() as patch:
        has = native.limit(most)
        patch.setattr(native, "features", lambda: has)
        yield
    native.limit(EVERY)


@pytest.fixture(scope="module", params=[pytest.param(Feature(0), id="torch"), *PROCESSORS])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything by torch's operators, and by the library's own kernels."""
    yield from as_with(request.param)


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """The library's own kernels, as on each kind of processor that this one can stand for."""
    yield from as_with(request.param)


@pytest.fixture(params=[Feature(0), EVERY], ids=["torch", "compiled"])
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """One test by torch's operators, and by what there is here."""
    yield from as_with(request.param)
