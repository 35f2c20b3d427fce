"""What this machine can do: its device, its arithmetic, its speed at matrix products, its memory and disk.

Nothing is assumed from a name. bf16 on a processor without instructions for it is emulated, and slower than fp32 by a factor:
so it is looked for. The speed that a step is compared with is measured here and now, since two machines of one name differ.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Literal

import torch
from typing_extensions import assert_never

from bothways.core.errors import ConfigError, ResourceError
from bothways.runtime.allocator import give_back
from bothways.runtime.limits import group_memory, read_system_file, usable_cores

Precision = Literal["auto", "fp32", "bf16"]
"""The arithmetic of matrix products: bf16 where the hardware has it ("auto"), or one of the two."""

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def choose_device(name: str = "auto") -> torch.device:
    """The device of this name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: the name is none that torch knows.
        ResourceError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{name!r} is no device: it must be auto, cpu, cuda or cuda:N", where="device"
        ) from error
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(
            f"{name!r} is not supported: the device must be auto, cpu, cuda or cuda:N",
            where="device",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ResourceError(
            f"there is no {name!r}: torch sees {torch.cuda.device_count()} CUDA devices",
            where="device",
        )
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 in hardware: for a CPU, AVX512-BF16, AMX or the bf16 instructions of Arm.

    NVIDIA's do from Ampere on. torch's own answer is for the current device, whichever is asked for.
    """
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    return _has_onednn() and not _BF16_FLAGS.isdisjoint(_cpu_flags())


def has_int8(device: torch.device) -> bool:
    """Whether the device multiplies int8 in hardware, into int32, as predictions need it: a CPU with VNNI or AMX.

    Older processors add two products in 16 bits, where they may not fit. Those of Arm have not been tried.
    """
    return device.type == "cpu" and _has_onednn() and not _INT8_FLAGS.isdisjoint(_cpu_flags())


def packs_weights(device: torch.device) -> bool:
    """Whether the device multiplies matrices that are packed beforehand: a processor of x86 with oneDNN."""
    return (
        device.type == "cpu" and _has_onednn() and platform.machine().lower() in {"x86_64", "amd64"}
    )


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.lru_cache
def has_varlen(device: torch.device) -> bool:
    """Whether torch has flash attention for packed sequences here, windows included: NVIDIA GPUs from Ampere on, torch 2.11."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or not torch.backends.cuda.is_flash_attention_available()
    ):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    windows = "window_size" in inspect.signature(varlen_attn).parameters
    return windows and torch.cuda.get_device_capability(device) >= (8, 0)


def has_flex(device: torch.device) -> bool:
    """Whether torch compiles FlexAttention here: NVIDIA GPUs from Ampere on, with Triton."""
    found = (
        device.type == "cuda"
        and torch.version.hip is None
        and importlib.util.find_spec("triton") is not None
    )
    return found and torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """The type of matrix products.

    Raises:
        ConfigError: bf16 is asked for and the device has none.
    """
    match precision:
        case "fp32":
            return torch.float32
        case "auto":
            return torch.bfloat16 if has_bf16(device) else torch.float32
        case "bf16":
            if has_bf16(device):
                return torch.bfloat16
            raise ConfigError(
                f"bf16 is asked for, but {describe_device(device)} has no instructions for it and would be slower than in fp32",
                where="precision",
                fix="Set the precision to auto or fp32.",
            )
        case _:
            assert_never(precision)


@functools.lru_cache
def gemm_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Floating-point operations a second of a large matrix product, measured once a process: the best of what fits the time."""
    side = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    wait(device)
    times: list[float] = []
    # The first one warms up.
    while len(times) < 2 or sum(times) < seconds:
        start = time.perf_counter()
        left @ right
        wait(device)
        times.append(time.perf_counter() - start)
    return 2 * side**3 / min(times[1:])


def memory_available(device: torch.device) -> int | None:
    """Bytes that this program can still take on the device, within the limit of its container; none where nobody tells.

    What it has freed and kept is given back before, as after `tune_allocator`.
    """
    give_back(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = next(
        (
            int(line.split()[1]) * 1024
            for line in read_system_file("/proc/meminfo")
            if line.startswith("MemAvailable:")
        ),
        None,
    )
    return min((each for each in (available, group_memory()) if each is not None), default=None)


def disk_free(path: str | os.PathLike[str]) -> int:
    """Bytes free on the disk on which the path lies or will lie."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def describe_device(device: torch.device) -> str:
    """One line for reports: the processor, its cores, the version of torch."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{_cpu_name()}, {torch.get_num_threads()} of {usable_cores()} cores, torch {torch.__version__}"


def _cpu_name() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in read_system_file("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


@functools.lru_cache
def _cpu_flags() -> frozenset[str]:
    """The processor's features, as Linux lists them, and those that torch found itself."""
    rows = [
        line.partition(":")[2]
        for line in read_system_file("/proc/cpuinfo")
        if line.startswith(("flags", "Features"))
    ]
    probes = {
        "_is_avx512_bf16_supported": "avx512_bf16",
        "_is_amx_tile_supported": "amx_bf16",
        "_is_vnni_supported": "avx512_vnni",
    }
    # torch's own probes work without Linux, but their names are private and differ between versions.
    found = {flag for probe, flag in probes.items() if getattr(torch.cpu, probe, bool)()}
    return frozenset(rows[0].split() if rows else ()) | found


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
