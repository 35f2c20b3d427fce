"""Predictors: prepared models in fp32, bf16 or int8, and exported graphs, for every task.

The names that options take are here and in the packages inside, for commands that load no torch.
"""

from typing import Literal

from bothways.hub import GraphRuntime

PredictPrecision = Literal["auto", "fp32", "bf16", "int8"]
"""Precisions of matrix products; auto is bf16 where the hardware has it."""
Runtime = Literal["torch", GraphRuntime]
"""Runtimes for a model: this library with torch, or another runtime from an exported folder."""
PartFormat = Literal["jsonl", "spans", "parquet", "npy"]
"""Formats of files of predictions."""
