"""Folders without an encoder of ours, opened with the interface of a prepared model.

- An exported model in another runtime. Tasks read its outputs as their heads' outputs, so
  predictions and metrics need no other code. Batches are padded, as the graph asks for.
- A StaticEmbedding folder: a table of vectors, see `hub.static_embedding`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError, FolderError, argument, call, optional
from bothways.hub import Format, GraphRuntime
from bothways.hub.hf_config import read_hf_config
from bothways.hub.model_folder import LoadedModel, read_record
from bothways.hub.resolve import PROGRAM, object_in, resolve
from bothways.hub.static_embedding import TABLE, read_static, static_folder
from bothways.hub.weight_files import LoadReport
from bothways.model.config import EncoderConfig
from bothways.model.heads import HEADS
from bothways.model.model import Hidden
from bothways.prediction.prepared_model import GraphPrecision, UnpackedModel

Arrays = Mapping[str, NDArray[np.int64]]
Run = Callable[[Arrays], Mapping[str, NDArray[np.float32]]]
"""Computes all outputs from the inputs, both by name."""
_MAKING_CORE = threading.Lock()
HEAD = "bothways.head"
"""The key of the head's kind in the metadata of a graph."""


class SessionEncoder(nn.Module):
    """The whole graph as an encoder, whose vectors are the outputs of the head.

    Args:
        head: the head in the graph, "none" for the vectors of tokens.
        run: computes the graph.
    """

    def __init__(self, config: EncoderConfig, head: str, run: Run) -> None:
        super().__init__()
        self.config, self.head, self.width = config, head, config.width
        self._run = run

    def forward(
        self, batch: Batch, keep_layers: bool = False, only: Int[Tensor, " asked"] | None = None
    ) -> Hidden:
        """Return the outputs of all tokens, or of sequences; ConfigError for other layers."""
        if keep_layers:
            message = "an exported model has its last layer alone"
            fix = f"Set layers=[-1], or use {argument(runtime='torch')}."
            raise ConfigError(message, where="layers", fix=fix)
        outputs = self._run(padded_inputs(self.config, self.head, batch))
        match self.head:
            case "none":
                values = outputs["last_hidden_state"]
            case "span":
                values = np.stack([outputs["start_logits"], outputs["end_logits"]], -1)
            case _:
                values = outputs["logits"]
        # The outputs at tokens, without those at padding, packed as the batch is.
        per_token = self.head == "none" or not HEADS[self.head].of_sequences
        rows = values[_places(batch)] if per_token else values
        if self.head == "replaced":
            rows = rows[:, None]
        return Hidden(torch.from_numpy(np.ascontiguousarray(rows)), torch.empty(0, 0))


def padded_inputs(config: EncoderConfig, head: str, batch: Batch) -> Arrays:
    """Return the inputs of a graph `(rows, longest)`, padded on the right."""
    positions, shape = _places(batch), (batch.layout.sequences, batch.layout.max_seqlen)
    ids = np.full(shape, config.pad or 0, dtype=np.int64)
    mask, segments = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    ids[positions], mask[positions], segments[positions] = batch.ids, 1, batch.segments
    inputs = {"input_ids": ids, "attention_mask": mask}
    if config.segments > 1:
        inputs["token_type_ids"] = segments
    if head == "choice":  # each sequence is a question with one choice
        inputs = {name: values[:, None] for name, values in inputs.items()}
    return inputs


def _places(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row and the column of each token."""
    return batch.layout.sequence_ids.numpy(), batch.layout.positions.numpy()


class SessionModel(UnpackedModel):
    """A graph with the interface of a prepared model; arguments as `SessionEncoder`."""

    def __init__(
        self, config: EncoderConfig, head: str, run: Run, precision: GraphPrecision = "fp32"
    ) -> None:
        heads: dict[str, nn.Module] = {} if head == "none" else {head: _ComputedHead()}
        super().__init__(SessionEncoder(config, head, run), heads, precision)

    def check_process(self) -> None:
        """Allow every process: runtimes compute with the threads that are there."""

    def outputs(
        self, kind: str, batch: Batch, hidden: Hidden, pooled: Tensor | None = None
    ) -> Float[Tensor, "rows ..."]:
        return hidden.last


class _ComputedHead(nn.Module):
    """A head whose outputs the graph has computed."""

    def forward(self, x: Tensor, *arguments: object) -> Tensor:
        """Return `x`."""
        return x


def open_session(
    folder: str | Path, precision: str = "fp32", runtime: GraphRuntime = "onnxruntime"
) -> LoadedModel:
    """Open an exported folder in another runtime; its model is a `SessionModel`.

    Args:
        precision: "fp32", "int8", or "auto" for fp32.

    Raises:
        FolderError: the folder is not an export, or has no graph in this precision.
        ConfigError: the runtime does not compute in this precision.
        ResourceError: the runtime is not installed.
    """
    resolved: GraphPrecision = "int8" if precision == "int8" else "fp32"
    if precision not in ("auto", "fp32", "int8"):
        message = f"an exported model is in fp32 or in int8, not in {precision}"
        raise ConfigError(message, where="precision", fix="Set the precision to fp32 or int8.")
    [(form, graph)] = [item for item in FORMATS.items() if item[1].runtime == runtime]
    path, name = resolve(folder), graph.int8 if resolved == "int8" else graph.fp32
    config, file = read_hf_config(path), path / name
    if not file.is_file():
        options: dict[str, str] = {} if form == "onnx" else {"to": form}
        options |= {"int8": "LABELLED_DATA"} if resolved == "int8" else {}
        fix = f"Export the model first: {call('export', 'MODEL', out='FOLDER', **options)}"
        raise FolderError(f"has no {name}", where=path, fix=fix)
    session, head = graph.open(file)
    if head is None:
        message = "was not written by bothways export, so its head is unknown"
        raise FolderError(message, where=file, fix="Export the model with bothways.")
    model = SessionModel(config.encoder, head, session, resolved)
    labels = config.labels() if head in ("labels", "tags") else ()
    extra = read_record(path)
    model.kept = {PROGRAM: object_in(path / PROGRAM)}
    return LoadedModel(model, LoadReport(()), path, labels, config.problem, extra)


def open_onnx(file: Path) -> tuple[Run, str | None]:
    """Open an ONNX file in onnxruntime on the CPU, with as many threads as torch.

    Returns:
        What computes it, and the kind of the head that the file notes.

    Raises:
        FolderError: the file is damaged.
        ResourceError: onnxruntime is not installed.
    """
    # From 1.29 on it reports models to its maker, unless this is set when it is first imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    with optional("export", "running an exported model"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no base class of its errors
        message = f"onnxruntime cannot open it: {str(error).splitlines()[0][:200]}"
        raise FolderError(message, where=file, fix="Export the model again.") from error
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Arrays) -> Mapping[str, NDArray[np.float32]]:
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    return run, session.get_modelmeta().custom_metadata_map.get(HEAD)


def open_openvino(file: Path) -> tuple[Run, str | None]:
    """Open the .xml file of an OpenVINO model, compiled for the CPU; as `open_onnx`.

    OpenVINO computes in bf16 on processors that have it, unless fp32 is asked for. Weights in int8
    are multiplied by activations in int8 in either case.
    """
    threads = torch.get_num_threads()
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    try:
        model = openvino_core().read_model(file)
        compiled = openvino_core().compile_model(model, "CPU", hints)
    except RuntimeError as error:
        message = f"OpenVINO cannot open it: {str(error).strip().splitlines()[-1][:200]}"
        raise FolderError(message, where=file, fix="Export the model again.") from error
    lock = threading.Lock()
    # The converter drops nodes that only rename, so an output may have several names.
    names_of_outputs = [sorted(output.get_names()) for output in model.outputs]

    def run(inputs: Arrays) -> Mapping[str, NDArray[np.float32]]:
        with lock:  # a compiled model has one request, which another thread would overwrite
            outputs = compiled(dict(inputs))
        return {name: outputs[n] for n, names in enumerate(names_of_outputs) for name in names}

    return run, model.get_rt_info(HEAD).astype(str) if model.has_rt_info(HEAD) else None


def openvino_core() -> Any:
    """Return OpenVINO's core, one for the process and all of its threads."""
    with _MAKING_CORE:
        return _make_core()


@cache
def _make_core() -> Any:
    """Return a core; `cache` alone would make one for each thread of those that call at once.

    A core with its CPU plugin replaces the stack on which the thread handles signals, and gives it
    back at its end. Of two cores that end in the order in which they began, the second gives back
    memory that the first has freed, and the next signal ends the process.

    openvino reports its import to its maker, by a package without which it imports as well: it is
    imported without.
    """
    telemetry = "openvino_telemetry"
    reporting = sys.modules.setdefault(telemetry, None)  # type: ignore[arg-type]
    try:
        with optional("export", "running an OpenVINO model"):
            import openvino
    finally:
        if reporting is None:
            del sys.modules[telemetry]
    return openvino.Core()


class GraphFormat(NamedTuple):
    """A format of exported graphs.

    Attributes:
        runtime: what computes a file; `title` is its name in messages, `open` opens one in it.
        fp32, int8: the files in an exported folder, where other programs look for them.
    """

    runtime: GraphRuntime
    title: str
    open: Callable[[Path], tuple[Run, str | None]]
    fp32: str
    int8: str


FORMATS: Mapping[Format, GraphFormat] = {
    "onnx": GraphFormat(
        "onnxruntime", "onnxruntime", open_onnx, "onnx/model.onnx", "onnx/model_quantized.onnx"
    ),
    "openvino": GraphFormat(
        "openvino", "OpenVINO", open_openvino,
        "openvino/openvino_model.xml", "openvino/openvino_model_qint8_quantized.xml",
    ),
}  # fmt: skip
"""The formats of an export, each in the folder of its name."""


def open_static(name: str | Path, device: str) -> LoadedModel | None:
    """Open a StaticEmbedding folder; None for another one.

    Raises:
        FolderError, TokenizerError: a file is missing or damaged.
        ConfigError: the device is not the CPU.
    """
    folder = resolve(name)
    if (inner := static_folder(folder)) is None:
        return None
    if device not in ("auto", "cpu"):
        message = f"vectors of a StaticEmbedding folder are computed on the CPU, not on {device}"
        raise ConfigError(message, where="device", fix="Set the device to cpu.")
    encoder, tokenizer = read_static(inner)
    model = UnpackedModel(encoder, {})
    model.kept = {"config.json": {}, PROGRAM: object_in(folder / PROGRAM)}
    report, record = LoadReport((TABLE,)), read_record(folder)
    return LoadedModel(model, report, folder, extra=record, static_tokenizer=tokenizer)
