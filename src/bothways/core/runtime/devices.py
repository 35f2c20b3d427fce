"""Capabilities of this machine: device, arithmetic, speed of matrix products, memory and disk.

Nothing is assumed from a name. A processor without bf16 instructions emulates them, several times
slower than fp32, so the instructions are detected. The speed that a step is compared with is
measured, because two machines of one name differ. What a run changes in torch itself is restored by
`own_torch_state`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bothways.core.errors import ConfigError, ResourceError, installed
from bothways.core.runtime.process import give_back, group_memory, read_system_file, usable_cores
from bothways.core.terminal import quantity

Precision = Literal["auto", "fp32", "bf16"]
"""The type of matrix products; "auto" is bf16 if the hardware has it, else fp32."""

PROGRAMS = 64
"""At most this many programs of a function are compiled."""

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def choose_device(name: str = "auto") -> torch.device:
    """Return the device of this name; "auto" is CUDA if available, else the CPU.

    Raises:
        ConfigError: the name is unknown or not supported.
        ResourceError: the machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        message = f"{name!r} is not a device: it must be auto, cpu, cuda or cuda:N"
        raise ConfigError(message, where="device") from error
    if device.type not in {"cpu", "cuda"}:
        message = f"{name!r} is not supported: the device must be auto, cpu, cuda or cuda:N"
        raise ConfigError(message, where="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        devices = quantity(torch.cuda.device_count(), "CUDA device(s)")
        message = f"there is no {name!r}: torch sees {devices}"
        fix = "Set the device to auto, which takes a GPU if there is one."
        raise ResourceError(message, where="device", fix=fix)
    return device


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module, that of its first parameter."""
    return next(module.parameters()).device


def has_bf16(device: torch.device) -> bool:
    """Return True if the device multiplies bf16 in hardware.

    On a CPU that needs AVX512-BF16, AMX or Arm's bf16 instructions, on an NVIDIA GPU Ampere or
    later. torch's own test always answers for the current device.
    """
    if device.type == "cuda":
        return torch.version.hip is not None or _is_ampere(device)
    return torch.backends.mkldnn.is_available() and not _BF16_FLAGS.isdisjoint(_cpu_flags())


def has_int8(device: torch.device) -> bool:
    """Return True if the device multiplies int8 into int32 in hardware: a CPU with VNNI or AMX.

    Older processors add two products in 16 bits, which can overflow. Arm is untested.
    """
    is_cpu = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return is_cpu and not _INT8_FLAGS.isdisjoint(_cpu_flags())


def packs_weights(device: torch.device) -> bool:
    """Return True if the device multiplies with prepacked weights: an x86 CPU with oneDNN."""
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and x86


def _is_ampere(device: torch.device) -> bool:
    """Return True for an NVIDIA GPU, Ampere or later."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@functools.lru_cache
def has_varlen(device: torch.device) -> bool:
    """Return True if torch has FlashAttention for packed sequences: NVIDIA, Ampere or later."""
    return _is_ampere(device) and torch.backends.cuda.is_flash_attention_available()


def has_flex(device: torch.device) -> bool:
    """Return True if torch compiles FlexAttention here: NVIDIA GPU, Ampere or later, and Triton."""
    return _is_ampere(device) and installed("triton")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as programs of torch's compiler, for any number of tokens.

    It is compiled at its first call, and again with and without gradients, for each precision, each
    shape of a block, and numbers of tokens that are 1 or equal by chance: FlexAttention seven times
    for each precision, the blocks of a ModernBERT with its evaluations eight times. Beyond torch's
    limit of 8 for a function it would run uncompiled.
    """
    config = torch._dynamo.config
    # Each thread has its own limit, with torch 2.13; to set it takes longer than to read it.
    if config.recompile_limit < PROGRAMS:  # noqa: PLR1730
        config.recompile_limit = PROGRAMS
    return _programs(function)


@functools.cache
def _programs(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the type of matrix products.

    Raises:
        ConfigError: "bf16" on a device without bf16 instructions.
    """
    match precision:
        case "fp32":
            return torch.float32
        case "auto":
            return torch.bfloat16 if has_bf16(device) else torch.float32
        case "bf16":
            if has_bf16(device):
                return torch.bfloat16
            message = f"{describe_device(device)} has no bf16 instructions: fp32 is faster"
            raise ConfigError(message, where="precision", fix="Set the precision to auto or fp32.")
        case _:  # of a caller in Python without a type checker
            message = f"{precision!r} is unknown: it must be auto, fp32 or bf16, or int8 to predict"
            raise ConfigError(message, where="precision", fix="Set the precision to auto.")


@functools.lru_cache
def gemm_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Return the floating-point operations per second of a large matrix product.

    Measured once per process: the fastest of the products that fit in `seconds`.
    """
    side = 8192 if device.type == "cuda" else 1024
    left, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    wait(device)
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        start = time.perf_counter()
        left @ other
        wait(device)
        times.append(time.perf_counter() - start)
    return 2 * side**3 / min(times[1:])  # the first product is a warm-up


def memory_available(device: torch.device) -> int | None:
    """Return the bytes available on the device, within the container's limit; None if unknown.

    Freed memory that this process still holds is released first (see `tune_allocator`).
    """
    give_back(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    lines = read_system_file("/proc/meminfo")
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*available, *group_memory()], default=None)


def gpu_memory(name: str = "auto") -> float | None:
    """Return the bytes available on the GPU that a name chooses; None if it chooses the CPU.

    Of several ranks, all of the memory: what is free differs, and their settings must not.
    """
    device = choose_device(name)
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total if int(os.environ.get("WORLD_SIZE", "1")) > 1 else free


def disk_free(path: str | os.PathLike[str]) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def describe_device(device: torch.device) -> str:
    """Describe a device in one line: the processor, its cores, the version of torch."""
    version = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {version}"
    names = [*_cpuinfo("model name"), platform.processor() or platform.machine()]
    return f"{names[0]}, {torch.get_num_threads()} of {usable_cores()} cores, {version}"


def _cpuinfo(*keys: str) -> list[str]:
    """Return the values of the lines of /proc/cpuinfo that start with one of the keys."""
    lines = read_system_file("/proc/cpuinfo")
    return [line.partition(":")[2].strip() for line in lines if line.startswith(keys)]


@functools.lru_cache
def _cpu_flags() -> frozenset[str]:
    """Return the processor's features that Linux or torch report."""
    rows = _cpuinfo("flags", "Features")
    probes = {
        "_is_avx512_bf16_supported": "avx512_bf16",
        "_is_amx_tile_supported": "amx_bf16",
        "_is_vnni_supported": "avx512_vnni",
    }
    # torch's probes work without Linux, but their names are private and differ between versions.
    probed = {flag for probe, flag in probes.items() if getattr(torch.cpu, probe, bool)()}
    return frozenset(rows[0].split() if rows else ()) | probed


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
def _first_process() -> int:
    """Return the process of the first call: a forked process inherits the answer."""
    return os.getpid()


def require_threads() -> None:
    """Raise ResourceError in a process that was forked after the first call, if it has threads.

    The threads of OpenMP do not survive a fork: torch would wait for them forever.
    """
    if os.getpid() != _first_process() and torch.get_num_threads() > 1:
        message = "a model was opened before this process was forked, so torch's threads are gone"
        fix = "Call torch.set_num_threads(1) first in the new process, or start it with spawn."
        raise ResourceError(message, where="model", fix=fix)


@contextlib.contextmanager
def cpu_by_default() -> Iterator[None]:
    """Create tensors without a device on the CPU, whatever device the calling program prefers.

    Use it also as a decorator: `@cpu_by_default()`.
    """
    # Where the CPU is the default device already, a context would only slow each call down.
    is_default = torch.get_default_device().type == "cpu"
    with contextlib.nullcontext() if is_default else torch.device("cpu"):
        yield


@contextlib.contextmanager
def own_torch_state(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Work with gradients, without autocast, with new tensors on the CPU; restore torch's state.

    Restored are the generators, which a run seeds, and the default type. The calling program may
    have turned gradients off, set a default device, or be in a context of autocast, whose precision
    would be another one than the run's. Use it also as a decorator: `@own_torch_state()`.

    Args:
        dtype: the default type of new tensors meanwhile; None for the calling program's if that
            is float64, in which a run can be proved to more digits, else fp32.
    """
    default = torch.get_default_dtype()
    # The state of CUDA is only read where it exists, since reading would start CUDA.
    started = torch.cuda.is_initialized()
    count = torch.cuda.device_count() if started else 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.random.fork_rng(devices=range(count)))
        stack.enter_context(cpu_by_default())
        for kind in ("cpu", "cuda"):
            # Until the outermost context ends, torch keeps its casts of the weights, so without
            # `cache_enabled=False` each step would compute with those of the first.
            if torch.is_autocast_enabled(kind):
                off = torch.autocast(kind, enabled=False, cache_enabled=False)
                stack.enter_context(off)
        stack.callback(torch.set_default_dtype, default)
        double = default if default is torch.float64 else torch.float32
        torch.set_default_dtype(dtype or double)
        yield
