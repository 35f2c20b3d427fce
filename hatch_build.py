"""Compiles the library's own kernels (`src/bothways/kernels/csrc`) when the package is installed or a wheel is built.

They are for Linux on x86-64, by the compiler that `CC` names, else `cc`. Where there is none, or it fails, the package is
installed without them, and works by torch's operators.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES, MADE = "src/bothways/kernels/csrc", "src/bothways/kernels/libbothways.so"
# -ffp-contract=off: what torch rounds twice is rounded twice here, so that codes of int8 are the same.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")


class CompiledKernels(BuildHookInterface[Any]):
    """Hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles; a wheel with kernels is for this platform, and for any Python."""
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return
        sources, made = Path(self.root, SOURCES), Path(self.root, MADE)
        unfinished = made.with_suffix(
            f".{os.getpid()}.part"
        )  # another build may go on beside this one
        read = b"".join(file.read_bytes() for file in sorted(sources.iterdir()))
        source_said = (
            f"-DSOURCE={zlib.crc32(read)}u"  # by which native.py knows that they belong together
        )
        arguments = [*FLAGS, source_said, "-o", str(unfinished), str(sources / "native.c"), "-lm"]
        try:
            subprocess.run([*shlex.split(os.environ.get("CC") or "cc"), *arguments], check=True)
            unfinished.replace(
                made
            )  # at once: a process that runs keeps the file that it has loaded
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            self.app.display_warning(
                f"{SOURCES} is not compiled ({error}): the package works without it, and is slower"
            )
            # Where nothing can be written an old file stays, which is not loaded unless it is of these sources.
            with contextlib.suppress(OSError):
                made.unlink()
            return
        build_data["artifacts"].append(MADE)
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )
