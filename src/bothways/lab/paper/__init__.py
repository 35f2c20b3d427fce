"""Published experiments, run again and compared with the published results."""

from typing import Literal

Scale = Literal["small", "paper"]
"""Sizes of models and data: for a CPU, or the papers'."""
