"""`bothways export`: a model for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import bothways
from bothways.cli import options


@options.documented_by(bothways.export_model)
def export(  # noqa: PLR0913 – one option per question
    folder: str,
    *settings: str,
    to: Literal["onnx", "openvino", "both"] = "onnx",
    out: Path,
    task: str | None = None,
    length: options.MaxLength = None,
    int8: str | None = None,
    limit: float | None = None,
    text: options.TextColumn = None,
    text_b: options.SecondColumn = None,
    label: options.LabelColumn = None,
) -> None:
    """Write a model as a graph that onnxruntime, OpenVINO and browsers run.

    The graph takes any batch size and length. Nothing is written if its outputs differ from the
    model's.

    Parameters
    ----------
    settings
        Settings of the task, such as pooling=cls for embed.
    limit
        Points of the metric that int8 may lose; a point is 0.01. By default 0.5.
    """
    from bothways.core.progress import terminal_progress

    columns = {"text": text, "text_b": text_b, "label": label}
    with terminal_progress() as progress:
        result = bothways.export_model(
            folder,
            out,
            to,
            task=task,
            length=length,
            int8=int8,
            limit=limit,
            columns={name: column for name, column in columns.items() if column is not None},
            progress=progress,
            **options.settings_for(bothways.export_model, settings),
        )
    for name, size in result.sizes.items():
        print(f"{out / name}  {size / 2**20:,.1f} MiB")
    for comparison in result.comparisons:
        print(comparison)
    for runtime, report in result.int8.items():
        print(f"{runtime}: {report}")
