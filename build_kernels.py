"""Compile the kernels of `src/bothways/model/kernels/csrc` into one shared library, and the
tokenizer into another one.

`hatch_build.py` calls `build` when the package is installed or a wheel is built. By hand:

    python build_kernels.py                   for this source tree, as an installation does
    python build_kernels.py --strict          with every warning as an error
    python build_kernels.py --sanitize        with AddressSanitizer, UBSan and assertions
    python build_kernels.py --emulate-amx     with AMX emulated, to test its code anywhere

Each source file is compiled with the instructions that it may use: a compiler that does not know
AMX or AVX512-BF16 builds the rest.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent
SOURCES, LIBRARY = "src/bothways/model/kernels/csrc", "src/bothways/model/kernels/libkernels.so"
EMULATION = "tests/model/kernels/amx_emulation.h"

# -ffp-contract=off: what PyTorch rounds twice is rounded twice here: int8 codes are the same.
FLAGS = ("-std=gnu11", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")
STRICT = ("-Wall", "-Wextra", "-Wconversion", "-Werror")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
BF16 = (*AVX512, "-mavx512bf16")
AMX = (*BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")

REQUIRED = {
    "api.c": (),
    "encoder.c": (),
    "linear.c": (),
    "team.c": (),
    "attention_avx512.c": AVX512,
    "linear_avx512.c": AVX512,
    "rows_avx512.c": AVX512,
    "linear_vnni.c": (*AVX512, "-mavx512vnni"),
}
TOKENIZER = {"wordpiece.c": ()}
"""A library of its own, `tokenizer_library`, for any processor, which is loaded without PyTorch."""
OPTIONAL = {
    "WITH_BF16": {"linear_bf16.c": BF16},  # gcc 10, clang 9
    "WITH_AMX": {"attention_amx.c": AMX, "linear_amx.c": AMX},  # gcc 11, clang 12
}
"""Units that older compilers do not know, by the macro that says that they were compiled."""


class CompileError(Exception):
    """The compiler is missing, or does not compile a required file."""


def compiler() -> list[str]:
    """Return the C compiler that `CC` names, else `cc`, with its arguments."""
    return shlex.split(os.environ.get("CC") or "cc")


def build(
    root: Path,
    library: Path,
    options: Sequence[str] = ("-O3", "-DNDEBUG"),
    *,
    strict: bool = False,
    emulate: bool = False,
    kernels: bool = True,
) -> list[str]:
    """Compile and link; return the macros of the optional units that the compiler does not know.

    Args:
        root: of the source tree.
        library: the file to write, at once: a running process keeps the file that it has loaded.
            The tokenizer is written next to it.
        options: for the compiler and the linker.
        strict: turn warnings into errors, and require all units that the compiler knows.
        emulate: compile AMX instructions into functions that do the same.
        kernels: False compiles the tokenizer alone.

    Raises:
        CompileError: see there.
    """
    command = [*compiler(), *FLAGS, *options, *(STRICT if strict else ())]
    emulation = ["-include", str(root / EMULATION), "-DEMULATED_AMX"] if emulate else []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compile_files(files: dict[str, tuple[str, ...]], more: Sequence[str] = ()) -> list[str]:
            def compile_file(file: str) -> str:
                target = str(Path(folder, file).with_suffix(".o"))
                flags = [flag for flag in files[file] if not (emulate and flag.startswith("-mamx"))]
                extra = emulation if "amx" in file else []
                run(
                    [
                        *command,
                        *flags,
                        *extra,
                        *more,
                        "-c",
                        str(root / SOURCES / file),
                        "-o",
                        target,
                    ]
                )
                return target

            return list(pool.map(compile_file, files))

        # Without OpenMP: the tokenizer must not load the system's before PyTorch loads its own.
        linked = {tokenizer_library(library): compile_files(TOKENIZER)}
        objects, macros, missing = [], ["-fopenmp"], []
        for macro, files in OPTIONAL.items() if kernels else ():
            try:
                objects += compile_files(files, ["-fopenmp"])
                macros.append(f"-D{macro}")
            except CompileError:
                if strict and all(map(_knows, files.values())):
                    raise
                missing.append(macro)
        if kernels:
            linked[library] = [*compile_files(REQUIRED, macros), *objects, "-fopenmp"]
        for target, parts in linked.items():
            # Another build may run at the same time.
            unfinished = target.with_suffix(f".{os.getpid()}.part")
            try:
                run([*command, "-shared", "-pthread", "-o", str(unfinished), *parts, "-lm"])
                unfinished.replace(target)
            finally:
                unfinished.unlink(missing_ok=True)
    return missing


def tokenizer_library(library: Path) -> Path:
    """Return the file of the tokenizer, next to that of the kernels."""
    return library.with_stem(f"{library.stem}_wordpiece")


def _knows(flags: Sequence[str]) -> bool:
    """Return whether the compiler knows these instructions."""
    try:
        run([*compiler(), *flags, "-x", "c", "-c", os.devnull, "-o", os.devnull])
    except CompileError:
        return False
    return True


def run(command: Sequence[str]) -> None:
    """Run a compiler.

    Raises:
        CompileError: it cannot be started, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be started: {error}") from None
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} fails:\n{done.stderr}")
    sys.stderr.write(done.stderr)


def main() -> None:
    """Build from the command line."""
    parser = argparse.ArgumentParser(description="Compile the kernels.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the source tree")
    parser.add_argument(
        "--output", type=Path, help="the library to write; that of the source tree if not given"
    )
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument(
        "--sanitize", action="store_true", help="AddressSanitizer, UBSan and assertions"
    )
    parser.add_argument("--emulate-amx", action="store_true", help="emulate AMX instructions")
    arguments = parser.parse_args()
    library = arguments.output or arguments.root / LIBRARY
    library.parent.mkdir(parents=True, exist_ok=True)
    sanitizers = (
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
        "-fno-omit-frame-pointer",
    )
    options = sanitizers if arguments.sanitize else ("-O3", "-DNDEBUG")
    try:
        missing = build(
            arguments.root, library, options, strict=arguments.strict, emulate=arguments.emulate_amx
        )
    except CompileError as error:
        sys.exit(str(error))
    print(library, *(f"without {macro.removeprefix('WITH_')}" for macro in missing))


if __name__ == "__main__":
    main()
