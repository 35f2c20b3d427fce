"""How this process takes memory and gives it back: on a CPU, settings of glibc's allocator, of which torch takes arrays."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

# As malloc.h and mman.h number them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ADVISE_HUGE_PAGES = 14

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@functools.cache
def tune_allocator() -> bool:
    """Let this process keep the memory that its arrays free, and take it in large pages; whether the allocator can.

    By default glibc gives large arrays back to the system, which clears each page anew when it hands it out: tens of thousands
    of page faults a step. And by default a page has 4 KiB, so that where an array lies must be looked up 512 times as often as
    in pages of 2 MiB, which Linux gives to those that ask. Memory that was taken before stays in small ones.

    Once is enough, until `give_back`. The peak stays as it is.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, TypeError, AttributeError):
        return False
    # Take arrays up to 1 GiB from the heap, or 32 MiB where glibc allows no more; never trim the heap.
    threshold = next((each for each in (2**30, 2**25) if mallopt(_MMAP_THRESHOLD, each)), 0)
    if not (threshold and mallopt(_TRIM_THRESHOLD, -1)):
        return False
    if not _is_counted():
        _ask_for_large_pages(libc, threshold // 2)
    return True


def _ask_for_large_pages(libc: ctypes.CDLL, size: int) -> None:
    """Ask for all that the heap can come to: it grows by blocks of this size, up to the machine's memory, and has them back."""
    malloc, free, madvise = libc.malloc, libc.free, libc.madvise
    malloc.restype, malloc.argtypes, free.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_size_t,),
        (ctypes.c_void_p,),
    )
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = os.sysconf("SC_PAGE_SIZE")
    blocks = [
        block for _ in range(page * os.sysconf("SC_PHYS_PAGES") // size) if (block := malloc(size))
    ]
    for block in blocks:
        madvise(block - block % page, size, _ADVISE_HUGE_PAGES)
    for block in blocks:
        free(block)


def _is_counted() -> bool:
    """Whether memory counts, against a limit of this process or of all, before it is touched; yes where nobody tells."""
    import resource  # of Unix alone, as is all of this

    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    strict = not _OVERCOMMIT.exists() or _OVERCOMMIT.read_text(encoding="ascii").strip() == "2"
    return strict or any(each != resource.RLIM_INFINITY for each in limits)


def give_back(device: torch.device) -> None:
    """Give the memory that this process has freed and kept back to the device; on a CPU where the allocator is glibc's."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, TypeError, AttributeError):
        return
    tune_allocator.cache_clear()
