"""OpenVINO: an ONNX file converted to its own format."""

from __future__ import annotations

from pathlib import Path

from bothways.core.errors import optional
from bothways.prediction.session_model import HEAD


def convert(source: Path, target: Path, head: str) -> None:
    """Write an ONNX file as an OpenVINO model, with weights in the precision that they have there.

    Args:
        head: its kind, a note in the file.

    Raises:
        ResourceError: openvino is not installed.
    """
    with optional("export", "exporting to OpenVINO"):
        import openvino
    target.parent.mkdir(exist_ok=True)
    model = openvino.convert_model(source)
    model.set_rt_info(head, HEAD)
    openvino.save_model(model, target, compress_to_fp16=False)
