"""How this process takes memory and gives it back: settings of glibc's allocator, which torch uses.

Nothing here is called by an import or a constructor: the command line and the training loop call
`tune_allocator`, and programs of your own may.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
        _ask_for_large_pages(libc, threshold // 2)
    return True


def _ask_for_large_pages(libc: ctypes.CDLL, size: int) -> None:
    """Request large pages for all that the heap can grow to.

    Blocks of this size, up to the machine's memory, are allocated, marked and freed untouched.
    """
    malloc, free, madvise = libc.malloc, libc.free, libc.madvise
    malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.argtypes = (ctypes.c_void_p,)
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = os.sysconf("SC_PAGE_SIZE")
    count = page * os.sysconf("SC_PHYS_PAGES") // size
    blocks = [block for _ in range(count) if (block := malloc(size))]
    for block in blocks:
        madvise(block - block % page, size, _ADVISE_HUGE_PAGES)
    for block in blocks:
        free(block)


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
