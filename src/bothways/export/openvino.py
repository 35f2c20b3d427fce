"""OpenVINO: an ONNX file converted to its own format, and computed on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bothways.core.errors import optional
from bothways.prediction.session_model import Arrays

FILE = "openvino/openvino_model.xml"
"""The place that sentence-transformers and optimum-intel read; the weights are next to it."""


def convert(source: Path, target: Path) -> None:
    """Write an ONNX file as an OpenVINO model, with weights in fp32.

    Raises:
        ResourceError: openvino is not installed.
    """
    with optional("export", "exporting to OpenVINO"):
        import openvino
    target.parent.mkdir(exist_ok=True)
    openvino.save_model(openvino.convert_model(source), target, compress_to_fp16=False)


class CompiledModel:
    """An OpenVINO model, compiled for the CPU, with as many threads as torch.

    OpenVINO computes in bf16 on processors that have it, unless fp32 is asked for.

    Args:
        file: the .xml file.
        precision: "f32", or "bf16"; None for OpenVINO's choice.
    """

    def __init__(self, file: Path, precision: str | None = "f32") -> None:
        with optional("export", "running an OpenVINO model"):
            import openvino
        hints: dict[str, Any] = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
        if precision is not None:
            hints["INFERENCE_PRECISION_HINT"] = precision
        model = openvino.Core().read_model(file)
        # The converter drops nodes that only rename, so an output may have several names.
        self._names = [sorted(output.get_names()) for output in model.outputs]
        self._model = openvino.compile_model(model, "CPU", hints)

    def __call__(self, given: Arrays) -> dict[str, Any]:
        """Compute all outputs."""
        found = self._model(dict(given))
        return {name: found[number] for number, names in enumerate(self._names) for name in names}
