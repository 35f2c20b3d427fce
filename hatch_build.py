"""Compile the kernels when the package is installed or a wheel is built (see `build_kernels.py`).

Only on Linux, and on other processors than x86-64 the tokenizer alone. Without a C compiler, or if
it fails, the package is installed without them and works by PyTorch's operators and the tokenizer
of `tokenizers`; `BOTHWAYS_PURE=1` asks for that.
"""

from __future__ import annotations

import contextlib
import os
import platform
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernels(BuildHookInterface[Any]):
    """Hatchling's hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel with kernels is for this platform, and for any Python."""
        if platform.system() != "Linux":
            return
        kernels = platform.machine() == "x86_64"
        build = runpy.run_path(str(Path(self.root, "build_kernels.py")))
        library = Path(self.root, build["LIBRARY"])
        files = [build["tokenizer_library"](library), *([library] if kernels else [])]
        if os.environ.get("BOTHWAYS_PURE") == "1":
            _remove(files)
            return
        try:
            missing = build["build"](Path(self.root), library, kernels=kernels)
        except (OSError, build["CompileError"]) as error:
            self.app.display_warning(
                f"the kernels are not compiled, everything will be slower: {error}"
            )
            _remove(files)
            return
        for macro in missing:
            self.app.display_warning(
                f"the compiler is too old for {macro.removeprefix('WITH_')} kernels"
            )
        build_data["artifacts"] += [str(file.relative_to(self.root)) for file in files]
        build_data["pure_python"] = False
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform_tag}"


def _remove(libraries: list[Path]) -> None:
    """Remove libraries of an earlier build; where nothing can be written they stay."""
    for library in libraries:
        with contextlib.suppress(OSError):
            library.unlink()
