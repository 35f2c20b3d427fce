"""Loading the kernels: what is refused, what is said, and what a limit changes."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bothways.model.kernels import abi, library
from bothways.model.kernels.library import ALL_FEATURES, Feature, supports_heads
from kernel_cases import NEEDS_AVX512, NEEDS_VNNI

CPU, TESTS = torch.device("cpu"), Path(__file__).parents[2]
loaded = pytest.mark.skipif(not library.is_loaded(), reason="nothing is compiled here")


@pytest.fixture
def reload(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """Load the library once more in the test, and as before after it."""

    def forget() -> None:
        abi.load.cache_clear()
        library.available.cache_clear()

    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def test_without_a_file_nothing_is_chosen_and_the_remedy_is_said(reload, tmp_path):
    reload.setenv(abi.OVERRIDE, str(tmp_path / "none.so"))
    assert library.available() == Feature(0)
    assert not supports_heads(CPU, torch.float32, 64)
    assert not library.multiplies("int8")
    if sys.platform == "linux":
        assert "install a C compiler, then install bothways again" in library.describe_kernels()


@pytest.mark.parametrize("system", [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_on_other_systems_no_compiler_is_advised(system, reload, tmp_path):
    reload.setenv(abi.OVERRIDE, str(tmp_path / "none.so"))
    reload.setattr("platform.system", lambda: system[0])
    reload.setattr("platform.machine", lambda: system[1])
    assert library.describe_kernels().endswith(f"not available for {' '.join(system)}")


def test_a_file_that_is_no_library_is_refused(reload, tmp_path):
    (tmp_path / "bad.so").write_bytes(b"not a library")
    reload.setenv(abi.OVERRIDE, str(tmp_path / "bad.so"))
    assert not library.is_loaded()
    assert "cannot be loaded" in library.describe_kernels()


@loaded
@pytest.mark.parametrize("change", ["version", "struct"])
def test_a_library_of_another_version_is_refused(change, reload):
    class Longer(ctypes.Structure):
        _fields_ = [("batch", abi.AttentionBatch), ("more", ctypes.c_int64)]

    if change == "version":
        reload.setattr(abi, "VERSION", abi.VERSION + 1)
    else:
        reload.setattr(abi, "STRUCTS", (abi.DropoutStruct, Longer, *abi.STRUCTS[2:]))
    assert not library.is_loaded()
    assert "of another version of bothways" in library.describe_kernels()


@loaded
def test_stray_files_beside_the_sources_change_nothing(tmp_path):
    package = tmp_path / "bothways" / "model" / "kernels"
    shutil.copytree(abi.FILE.parent, package)
    for folder in (tmp_path / "bothways", package.parent):
        (folder / "__init__.py").touch()
    (package / "csrc" / "api.c.orig").write_text("int other;")
    shutil.copy(abi.load().library._name, package / "libkernels.so")  # type: ignore[union-attr]
    code = (
        "from bothways.model.kernels import library; print(library.is_loaded(), library.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)} | {abi.OVERRIDE: ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"True {package / 'library.py'}\n"


@NEEDS_AVX512
def test_the_kernels_are_described_once(reload, caplog):
    with caplog.at_level(logging.INFO, "bothways"):
        for _ in range(3):
            library.kernel_features()
    assert caplog.messages == [library.describe_kernels()]
    assert caplog.messages[0].startswith("kernels: AVX-512")


@NEEDS_VNNI
def test_a_limit_holds_within_its_block_and_nests():
    before = library.available()
    with library.limit(ALL_FEATURES & ~Feature.VNNI) as used:
        assert Feature.VNNI not in used == library.kernel_features()
        assert library.multiplies("fp32")
        assert not library.multiplies("int8")
        with library.limit(Feature(0)):
            assert "no AVX-512" in library.describe_kernels()
        assert library.kernel_features() == used
    assert library.kernel_features() == library.available() == before


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_missing_kernels_fail_the_tests_where_they_are_expected(wanted, reload, request, tmp_path):
    conftest: Any = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    reload.setenv("BOTHWAYS_EXPECT_KERNELS", wanted)
    reload.setenv(abi.OVERRIDE, str(tmp_path / "none.so"))
    if wanted == "0":
        conftest.pytest_configure()
        return
    with pytest.raises(pytest.UsageError, match=r"^BOTHWAYS_EXPECT_KERNELS=1, but "):
        conftest.pytest_configure()
