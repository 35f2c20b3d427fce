"""Cores, memory and signals of this process: the limits of its container, glibc's allocator.

A container limits cores in two ways: by affinity (which cores), which the operating system reports,
and by a quota of processor time (how many), which only its control group's files report. Memory has
a limit of the second kind. Limits of enclosing groups hold, too.

Nothing here is called by an import or a constructor: the command line and the training loop call
`tune_allocator`, and programs of your own may.

Source: docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


END_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)  # Windows has the first two
)
"""What ends a run: Ctrl-C, the end of a job or of a terminal, and the warning before it."""
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use, by affinity and quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # A fraction of a core counts as a whole one, because a thread cannot run on less.
    return max(1, min([cores or 1, *map(math.ceil, _quotas())]))


def limit_threads() -> None:
    """Give numerical libraries that are not loaded yet no more threads than the quota has cores.

    They respect affinity themselves. A setting of the user's stays.
    """
    if min(_quotas(), default=math.inf) < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def group_memory() -> Iterator[int]:
    """Yield the bytes that each of this process's control groups with a limit leaves it.

    Pages that cache files are counted as used, but the kernel frees them when memory is needed.
    """
    for folder in _folders("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        # Version 1 writes a number near 2⁶³ for "no limit".
        if limit is not None and used is not None and limit < 2**60:
            stat = dict(line.split()[:2] for line in read_system_file(folder / "memory.stat"))
            cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            yield limit - used + cache


def _quotas() -> Iterator[float]:
    """Yield the limits of processor time, in cores."""
    for folder in _folders("cpu"):
        match [word for line in read_system_file(folder / "cpu.max") for word in line.split()]:
            case [quota, period, *_] if quota.isdecimal():
                yield int(quota) / int(period)
        time, per = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if time and per:
            yield time / per


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own to the root.

    A line of /proc/self/cgroup is "0::/path" in version 2, and "4:cpu,cpuacct:/path" in version 1.
    Inside a container the path may be the host's; then only the root exists.
    """
    for line in read_system_file(OWN_GROUP) or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controllers if controllers else GROUPS
        folder = root / path.lstrip("/")
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(root))


def _number(path: Path) -> int | None:
    lines = read_system_file(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def read_system_file(path: str | Path) -> list[str]:
    """Return the lines of a file of the operating system; none if it does not exist."""
    try:
        return Path(path).read_text(encoding="utf8").splitlines()
    except OSError:
        return []


# The numbers of malloc.h and mman.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ADVISE_HUGE_PAGES = 14

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@functools.cache
def tune_allocator() -> bool:
    """Let this process keep the memory that its arrays free, in large pages.

    By default glibc returns large arrays to the system, which clears each page when it hands it out
    again: tens of thousands of page faults a step. And a page has 4 KiB, so that addresses are
    looked up 512 times as often as with the pages of 2 MiB that Linux gives on request. Memory
    taken before stays in small pages; the peak does not change.

    Returns:
        Whether the allocator has these settings.

    Examples:
        >>> bothways.tune_allocator()  # doctest: +SKIP
        True
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, TypeError, AttributeError):
        return False
    # Take arrays up to 1 GiB from the heap, or 32 MiB if glibc allows no more; never trim the heap.
    threshold = next((size for size in (2**30, 2**25) if mallopt(_MMAP_THRESHOLD, size)), 0)
    if not (threshold and mallopt(_TRIM_THRESHOLD, -1)):
        return False
    if not _is_counted():
        # Request large pages for all that the heap can grow to: blocks of this size, up to the
        # machine's memory, are allocated, marked and freed untouched.
        malloc, free, madvise = libc.malloc, libc.free, libc.madvise
        malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
        free.argtypes = (ctypes.c_void_p,)
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        page, size = os.sysconf("SC_PAGE_SIZE"), threshold // 2
        count = page * os.sysconf("SC_PHYS_PAGES") // size
        blocks = [block for _ in range(count) if (block := malloc(size))]
        for block in blocks:
            madvise(block - block % page, size, _ADVISE_HUGE_PAGES)
        for block in blocks:
            free(block)
    return True


def _is_counted() -> bool:
    """Return True if untouched memory counts against a limit, or if that is unknown."""
    import resource  # Unix only, like all of this

    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    strict = not _OVERCOMMIT.exists() or _OVERCOMMIT.read_text(encoding="ascii").strip() == "2"
    return strict or any(limit != resource.RLIM_INFINITY for limit in limits)


def give_back(device: torch.device) -> None:
    """Return the memory that this process has freed and kept to the device.

    Settings of `tune_allocator` hold afterwards, too.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, TypeError, AttributeError):
        return
    if tune_allocator.cache_info().currsize:
        tune_allocator.cache_clear()  # the marks of trimmed memory are gone
        tune_allocator()
