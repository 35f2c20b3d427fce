"""Compiling the kernels with compilers that know fewer instructions, or none."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bothways.model.kernels import abi, library
from bothways.model.kernels.library import Feature

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


@pytest.mark.skipif(GCC is None or not library.is_loaded(), reason="there are no kernels here")
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
