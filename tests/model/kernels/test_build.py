"""Compiling the kernels with compilers that know fewer instructions, or none."""

import ctypes
import logging
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bothways.core import errors
from bothways.core.errors import ConfigError
from bothways.model.kernels import abi, library
from bothways.model.kernels.library import ALL_FEATURES, Feature, supports_heads
from bothways.text import wordpiece
from kernel_cases import NEEDS_AVX512, NEEDS_VNNI

ROOT = Path(__file__).parents[3]
BUILD = runpy.run_path(str(ROOT / "build_kernels.py"))
GCC = shutil.which("gcc")

CHECK = """
import torch
from bothways.core.batch import Layout
from bothways.model.kernels import library
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.linear import PanelLinear

torch.manual_seed(0)
qkv = torch.randn(9, 3, 2, 32)
q, k, v = qkv.double().permute(1, 2, 0, 3)
exact = ((q @ k.mT / 32**0.5).softmax(-1) @ v).transpose(0, 1)
found = packed_attention(qkv, Layout.of([9])).double()
torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
linear, x = torch.nn.Linear(64, 96), torch.randn(7, 64)
with torch.no_grad():
    torch.testing.assert_close(PanelLinear(linear)(x), linear(x), rtol=1e-4, atol=1e-5)
print(int(library.available()))
"""


def old_compiler(folder: Path, unknown: str) -> Path:
    """Write a compiler that is gcc without some options, as in its older versions."""
    script = folder / "old-gcc"
    script.write_text(
        f"""#!/bin/sh
for option in "$@"; do
    case "$option" in {unknown}) echo "unrecognized option $option" >&2; exit 1;; esac
done
exec {GCC} "$@"
"""
    )
    script.chmod(0o755)
    return script


@pytest.mark.skipif(GCC is None or abi.load().library is None, reason="there are no kernels here")
@pytest.mark.parametrize(
    ("unknown", "missing"),
    [
        ("-mavx512bf16|-mamx-*", ["WITH_BF16", "WITH_AMX"]),  # gcc 9
        ("-mamx-*", ["WITH_AMX"]),  # gcc 10
    ],
)
@pytest.mark.slow
def test_an_older_compiler_builds_all_kernels_but_those_it_does_not_know(
    unknown, missing, tmp_path, monkeypatch
):
    monkeypatch.setenv("CC", str(old_compiler(tmp_path, unknown)))
    file = tmp_path / "kernels.so"
    assert BUILD["build"](ROOT, file, ("-O1", "-DNDEBUG"), strict=True) == missing
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, abi.OVERRIDE: str(file)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lost = Feature.AMX | (Feature.BF16 if "WITH_BF16" in missing else Feature(0))
    assert Feature(int(done.stdout)) == library.available() & ~lost


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_compiler_the_error_says_so_and_nothing_is_written(
    compiler, tmp_path, monkeypatch
):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(BUILD["CompileError"], match=compiler):
        BUILD["build"](ROOT, tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


CPU, TESTS = torch.device("cpu"), Path(__file__).parents[2]
loaded = pytest.mark.skipif(abi.load().library is None, reason="nothing is compiled here")


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
    reload.setattr(abi, "FILE", tmp_path / "none.so")
    assert library.available() == Feature(0)
    assert not supports_heads(CPU, torch.float32, 64)
    assert not library.multiplies("int8")
    if sys.platform == "linux":
        assert "install a C compiler, then install bothways again" in library.describe_kernels()


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_on_other_systems_no_compiler_is_advised(system, machine, reload, tmp_path):
    reload.setattr(abi, "FILE", tmp_path / "none.so")
    reload.setattr("platform.system", lambda: system)
    reload.setattr("platform.machine", lambda: machine)
    assert library.describe_kernels().endswith(f"not available for {system} {machine}")


def test_a_file_that_is_no_library_is_refused(reload, tmp_path):
    (tmp_path / "bad.so").write_bytes(b"not a library")
    reload.setattr(abi, "FILE", tmp_path / "bad.so")
    assert abi.load().library is None
    assert "not loadable" in library.describe_kernels()


def test_a_library_that_the_environment_names_is_loaded_or_an_error(reload, tmp_path):
    (tmp_path / "bad.so").write_bytes(b"not a library")
    for name in ("none.so", "bad.so"):
        reload.setenv(abi.OVERRIDE, str(tmp_path / name))
        for load in (abi.load, wordpiece.load.__wrapped__, library.describe_kernels):
            with pytest.raises(ConfigError, match=str(tmp_path)) as raised:
                load()
            assert raised.value.where == abi.OVERRIDE


@loaded
@pytest.mark.parametrize("change", ["version", "struct"])
def test_a_library_of_another_version_is_refused(change, reload):
    class Longer(ctypes.Structure):
        _fields_ = [("batch", abi.AttentionBatch), ("more", ctypes.c_int64)]

    if change == "version":
        reload.setattr(abi, "VERSION", abi.VERSION + 1)
    else:
        reload.setattr(abi, "STRUCTS", (abi.DropoutStruct, Longer, *abi.STRUCTS[2:]))
    assert abi.load().library is None
    assert "of another version of bothways" in library.describe_kernels()


@loaded
def test_stray_files_beside_the_sources_change_nothing(tmp_path):
    package = tmp_path / "bothways" / "model" / "kernels"
    shutil.copytree(abi.FILE.parent, package)
    for folder in package.parents[:2]:
        (folder / "__init__.py").touch()
    (tmp_path / "bothways" / "core").symlink_to(Path(errors.__file__).parent)
    (package / "csrc" / "api.c.orig").write_text("int other;")
    shutil.copy(abi.load().library._name, package / "libkernels.so")
    code = "from bothways.model.kernels import abi; print(abi.load().library, abi.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)} | {abi.OVERRIDE: ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("<CDLL")
    assert done.stdout.endswith(f"> {package / 'abi.py'}\n")


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


def test_missing_kernels_fail_the_tests_where_they_are_expected(reload, request, tmp_path):
    conftest: Any = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    reload.setattr(abi, "FILE", tmp_path / "none.so")
    reload.setenv("BOTHWAYS_EXPECT_KERNELS", "0")
    conftest.pytest_configure(request.config)
    reload.setenv("BOTHWAYS_EXPECT_KERNELS", "1")
    with pytest.raises(pytest.UsageError, match=r"^BOTHWAYS_EXPECT_KERNELS=1, but "):
        conftest.pytest_configure(request.config)
