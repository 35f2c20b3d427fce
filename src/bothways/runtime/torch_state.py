"""The state of torch in the calling program, which a run leaves as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_torch_state() -> Iterator[None]:
    """Work with gradients and fp32 tensors by default, and restore torch's state at the end.

    A run seeds the generators, and the calling program may have turned gradients off or chosen
    another default type. Use it also as a decorator: `@own_torch_state()`.
    """
    chosen = torch.get_default_dtype()
    # The state of CUDA is only read where it exists, since reading would start CUDA.
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    with torch.inference_mode(False), torch.random.fork_rng(devices=range(count)):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(chosen)
