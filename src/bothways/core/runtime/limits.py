"""Limits of the container or job that this process runs in: processor cores and memory.

A container limits cores in two ways: by affinity (which cores), which the operating system reports,
and by a quota of processor time (how many), which only its control group's files report. Memory has
a limit of the second kind. Limits of enclosing groups hold, too.

Source: docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may use, by affinity and quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = min(_quotas(), default=math.inf)
    # A fraction of a core counts as a whole one, because a thread cannot run on less.
    return max(1, min(cores or 1, math.ceil(quota) if math.isfinite(quota) else cores or 1))


def limit_threads() -> None:
    """Give numerical libraries that are not loaded yet no more threads than the quota has cores.

    They respect affinity themselves. A setting of the user's stays.
    """
    if min(_quotas(), default=math.inf) < (os.cpu_count() or 1):
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def group_memory() -> int | None:
    """Return the bytes that this process's control groups leave it; None without a limit.

    Pages that cache files are counted as used, but the kernel frees them when memory is needed.
    """
    left = []
    for folder in _folders("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        # Version 1 writes a number near 2⁶³ for "no limit".
        if limit is not None and used is not None and limit < 2**60:
            stat = dict(line.split()[:2] for line in read_system_file(folder / "memory.stat"))
            cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            left.append(limit - used + cache)
    return min(left, default=None)


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
