"""Build the distributions in `dist/`, and run each in a fresh environment: `make wheels`.

| distribution | with a C compiler | without one, or with one that fails |
|---|---|---|
| sdist | kernels, compiled when it is installed | PyTorch's operators |
| py3-none-any | PyTorch's operators | PyTorch's operators |
| py3-none-manylinux… | kernels | kernels |

The manylinux wheel holds no OpenMP library: PyTorch has loaded its libgomp before the kernels are
loaded, and a second one would have threads of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent
DIST = ROOT / "dist"

CHECK = """
import torch
from bothways.core.batch import Layout
from bothways.model.kernels import library
from bothways.model.kernels.linear import OneDNNLinear, PanelLinear
from bothways.model.attention.dispatch import attend
from bothways.model.attention.mask import AttentionView
import bothways

torch.manual_seed(0)
qkv, layout = torch.randn(12, 3, 2, 32), Layout.of([5, 7])
parts = []
for part in qkv.double().split([5, 7]):
    q, k, v = part.permute(1, 2, 0, 3)
    parts.append(((q @ k.mT / 32**0.5).softmax(-1) @ v).transpose(0, 1))
result = attend(qkv, AttentionView(layout)).double()
torch.testing.assert_close(result, torch.cat(parts), rtol=1e-5, atol=1e-5)
linear, x = torch.nn.Linear(64, 96), torch.randn(7, 64)
kind = PanelLinear if library.multiplies("fp32") else OneDNNLinear
with torch.no_grad():
    torch.testing.assert_close(kind(linear, torch.float32)(x), linear(x), rtol=1e-4, atol=1e-5)
maps = open("/proc/self/maps").read().split()
runtimes = {path for path in maps if "libgomp" in path or "libomp" in path or "libiomp" in path}
assert len(runtimes) == 1, runtimes
print(library.is_loaded(), library.describe_kernels())
"""


def run(command: Sequence[str | Path], **environment: str) -> str:
    """Run a command; return what it prints, and end with its messages if it fails."""
    done = subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} fails:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> list[Path]:
    """Build the three distributions; return their files in `dist`."""
    # From a copy, so that neither the library of this tree nor a stray file gets into one of them.
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(
        ".venv", ".git", ".*_cache", ".hypothesis", "dist", "*.so", "__pycache__"
    )
    shutil.copytree(ROOT, tree, ignore=ignored)
    hatchling = [sys.executable, "-m", "hatchling", "build", "-d", folder / "built"]
    os.chdir(tree)
    run([*hatchling, "-t", "sdist"])
    run([*hatchling, "-t", "wheel"], BOTHWAYS_PURE="1")
    run([*hatchling, "-t", "wheel"])
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    (compiled,) = (folder / "built").glob("*linux_x86_64.whl")
    scripts = Path(sys.executable).parent
    run(
        [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            "--exclude",
            "libgomp.so.1",
            "-w",
            DIST,
            compiled,
        ],
        PATH=f"{scripts}:{os.environ['PATH']}",
    )
    compiled.unlink()
    for file in (folder / "built").iterdir():
        shutil.move(file, DIST)
    return sorted(DIST.iterdir())


def bundles_openmp(wheel: Path) -> bool:
    """Return whether a wheel holds an OpenMP library."""
    with zipfile.ZipFile(wheel) as archive:
        return any("gomp" in name or "omp.so" in name for name in archive.namelist())


COMPILERS = {
    "with a compiler": {},
    # A PATH with nothing but Python, as on a machine without a compiler.
    "without a compiler": {"PATH": "{bin}", "CC": ""},
    "with a compiler that fails": {"CC": "/bin/false"},
}
"""The environment variables of each case."""


def check(distribution: Path, folder: Path, case: Mapping[str, str]) -> str:
    """Install a distribution in a fresh environment and run it; return how it describes itself."""
    environment = folder / "environment"
    shutil.rmtree(environment, ignore_errors=True)
    run([sys.executable, "-m", "venv", environment])
    python = environment / "bin" / "python"
    variables = {name: value.format(bin=python.parent) for name, value in case.items()}
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "-c", ROOT / "constraints.txt", distribution], **variables)
    return run([python, "-c", CHECK], PYTHONPATH="", **variables).strip()


def main() -> None:
    """Build, check and report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        distributions = build(folder)
        for distribution in distributions:
            pure = distribution.name.endswith("none-any.whl")
            source = distribution.name.endswith(".tar.gz")
            if not source and bundles_openmp(distribution):
                sys.exit(f"{distribution.name} holds a second OpenMP")
            for setup, case in COMPILERS.items():
                said = check(distribution, folder, case)
                print(f"{distribution.name}, {setup}: {said}", flush=True)
                if said.startswith("True") is not (not pure and (not source or not case)):
                    sys.exit("the kernels are missing, or there should be none")


if __name__ == "__main__":
    main()
