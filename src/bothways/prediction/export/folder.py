"""An exported folder: its graphs, their int8 form, and the comparison of their outputs."""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bothways._version import __version__
from bothways.core.batch import Batch, Layout
from bothways.core.config import reader as configs
from bothways.core.config.values import Tree, parse_overrides, require_choice
from bothways.core.errors import DivergedError, optional, require
from bothways.core.files import check_not_input, local_path, replace_folder
from bothways.core.progress import SILENT, Progress
from bothways.core.runtime.devices import own_torch_state
from bothways.hub import Format, GraphRuntime, model_folder
from bothways.hub.hf_config import RECORD, read_hf_config
from bothways.hub.provenance import digest_of_model
from bothways.hub.resolve import MODULES, PROGRAM, TOKENIZER_FILES, resolve, resolve_run
from bothways.hub.sentence_transformers import program_files
from bothways.model.attention.patterns import Blocks, Window
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.prediction import session_model
from bothways.prediction.analysis.evaluation import MAX_LOSS, Int8Report, measure_int8
from bothways.prediction.export.encoder_graph import (
    WITH_GLOBAL_TOKENS,
    ExportedPart,
    HeadKind,
    Separators,
)
from bothways.prediction.export.model_graph import build_graph, head_kind
from bothways.prediction.opening import open_task, open_task_model
from bothways.prediction.predictor import Predictor
from bothways.prediction.session_model import FORMATS
from bothways.tasks.base import Metrics, TaskModel
from bothways.tasks.sentence_embedding.task import Embedder, pool, projection_of, sentence_config

with optional("export", "exporting a model"):
    import onnx
    from onnx import TensorProto, helper, numpy_helper


def with_int8_weights(graph: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a graph with its matrices in int8, each stored once."""
    readers = defaultdict[str, set[tuple[str, int]]](set)
    for node in graph.graph.node:
        for position, name in enumerate(node.input):
            readers[name].add((node.op_type, position))
    matrices = [
        tensor.name
        for tensor in graph.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2
    ]
    # A matrix that other nodes read as well stays in fp32, as biases and norms do.
    dense = {name for name in matrices if readers[name] == {("MatMul", 1)}}
    tables = {name for name in matrices if readers[name] == {("Gather", 0)}}
    result = onnx.ModelProto()
    result.CopyFrom(graph)
    del result.graph.node[:], result.graph.initializer[:]

    def add(kind: str, inputs: list[str], output: str, **attributes: int) -> None:
        result.graph.node.append(helper.make_node(kind, inputs, [output], output, **attributes))

    for tensor in graph.graph.initializer:
        name = tensor.name
        if name not in dense | tables:
            result.graph.initializer.append(tensor)
            continue
        codes, scales = rounded(numpy_helper.to_array(tensor), 0 if name in dense else 1)
        arrays = {f"{name}.int8": codes, f"{name}.scale": scales}
        if name in dense:
            add("DequantizeLinear", [*arrays], name, axis=1)
        else:
            arrays[f"{name}.scale"] = scales[:, None]
        for key, values in arrays.items():
            result.graph.initializer.append(numpy_helper.from_array(values, key))
    for node in graph.graph.node:
        if node.op_type != "Gather" or node.input[0] not in tables:
            result.graph.node.append(node)
            continue
        # Rows are looked up in int8 and scaled.
        [table, index], [out] = node.input, node.output
        add("Gather", [f"{table}.int8", index], f"{out}.int8")
        add("Gather", [f"{table}.scale", index], f"{out}.scale")
        add("Cast", [f"{out}.int8"], f"{out}.cast", to=TensorProto.FLOAT)
        add("Mul", [f"{out}.cast", f"{out}.scale"], out)
    return result


def rounded(values: NDArray[np.float32], axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return a matrix in int8, and the scales by which its slices along an axis are multiplied."""
    scales = np.abs(values).max(axis=axis, keepdims=True) / 127
    scales[scales == 0] = 1
    codes = np.clip(np.rint(values / scales), -127, 127).astype(np.int8)
    return codes, scales.squeeze(axis).astype(np.float32)


TOLERANCE = 1e-4
"""The largest difference of an output, as a share of the largest output, at least of 1."""
UNIT_TOLERANCE = 1e-5
"""The same for vectors of length 1."""
LONGEST = 512
"""Longer inputs are compared only if a pattern of attention reaches further."""


@dataclass(frozen=True)
class Comparison:
    """Difference between the outputs of a runtime and the model.

    Attributes:
        largest: the largest difference, as a share of the largest output, at least of 1.
        shapes: the rows and lengths that were compared.
    """

    runtime: str
    largest: float
    shapes: tuple[tuple[int, int], ...]

    def check(self) -> None:
        """Raise DivergedError if the difference is too large, or not a number."""
        if not self.largest <= TOLERANCE:
            difference = f"{self.largest:.1e}; the limit is {TOLERANCE:g}"
            message = f"its outputs in {self.runtime} differ from the model's by {difference}"
            fix = "Nothing was written. Use another version of the runtime, or serve with bothways."
            raise DivergedError(message, where="export", fix=fix)

    def __str__(self) -> str:
        largest = f"{self.largest:.1e} of at most {TOLERANCE:g}"
        return f"{self.runtime}: differs by {largest}, in {len(self.shapes)} shapes"


@torch.inference_mode()
def compare_outputs(
    model: Model, exported: ExportedPart, run: session_model.Run, runtime: str
) -> Comparison:
    """Compare all outputs of a graph with the model's, at every token.

    Args:
        model: on the CPU, in evaluation mode, in fp32.
        run: computes the graph in the runtime.
    """
    config = model.config
    session, shapes, shares = session_model.SessionModel(config, exported.head, run), [], []
    for batch in probes(config, exported):
        shapes.append((batch.layout.sequences, batch.layout.max_seqlen))
        outputs = head_outputs(model, exported.head, batch)
        shares.append(_share(outputs, head_outputs(session, exported.head, batch)) / TOLERANCE)
        if exported.sentence is not None:
            vectors = pool(outputs, batch.layout, exported.sentence.pooling)
            if (projection := projection_of(model)) is not None:
                vectors = projection(vectors)
            if exported.sentence.normalised:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            vectors = vectors[:, : exported.sentence.components]
            inputs = session_model.padded_inputs(config, exported.head, batch)
            actual = torch.from_numpy(run(inputs)["sentence_embedding"])
            limit = UNIT_TOLERANCE if exported.sentence.normalised else TOLERANCE
            shares.append(_share(vectors, actual) / limit)
    # `max` would lose a NaN.
    return Comparison(runtime, float(np.max(shares)) * TOLERANCE, tuple(shapes))


def head_outputs(model: Model, head: HeadKind, batch: Batch) -> Tensor:
    """Return the outputs of a head for all tokens or all sequences; "none" for vectors."""
    hidden = model.encoder(batch)
    rows = hidden.last if head == "none" else model.outputs(head, batch, hidden)
    return rows.view(len(rows), -1)


def probes(config: EncoderConfig, exported: ExportedPart) -> Iterator[Batch]:
    """Yield batches of random tokens: one token, short rows of mixed lengths, the longest rows."""
    reach = LONGEST
    for layer in range(config.depth):
        match config.pattern(layer):  # at this length some tokens are hidden from others
            case Window(radius):
                reach = max(reach, 2 * radius + 9)
            case Blocks() as pattern:
                reach = max(reach, pattern.dense + 2 * pattern.size + 1)
    max_length, head = min(config.max_positions, reach), exported.head
    draw = torch.Generator().manual_seed(0)
    for lengths in ([1], [7], [2, 64, 1, 33], [max_length, 5, max_length // 2 + 1]):
        row_lengths = [min(length, config.max_positions) for length in lengths]
        ids = torch.randint(config.vocab, (sum(row_lengths),), generator=draw)
        segments = torch.randint(max(1, config.segments), (sum(row_lengths),), generator=draw)
        layout, mask = Layout.of(row_lengths), None
        if config.has_global_attention and head in WITH_GLOBAL_TOKENS:
            # A separator in each text, and global tokens as tasks mark them.
            mask = torch.zeros_like(ids, dtype=torch.bool)
            for start, length in zip(layout.first_tokens.tolist(), row_lengths, strict=True):
                if head == "labels":
                    mask[start] = True
                    continue
                assert exported.separators is not None
                separator, between = exported.separators.id, exported.separators.between
                ids[start + length // 2] = separator
                at = start + ids[start : start + length].tolist().index(separator)
                end = start + length
                mask[slice(start, at) if head == "span" else slice(at + between, end)] = True
        yield Batch(ids, segments, layout, global_attention_mask=mask)


def _share(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return float("nan")
    return float((expected - actual).abs().max()) / max(1.0, float(expected.abs().max()))


ONNX = FORMATS["onnx"]
INLINE_BYTES = 1_900_000_000
"""Weights beyond this are in a file next to the graph: a protobuf message ends at 2 GiB."""
_OURS = (
    *TOKENIZER_FILES, "config.json", RECORD, MODULES, PROGRAM, "sentence_bert_config.json",
    "[0-9]_Pooling", "[0-9]_Dense", "[0-9]_Normalize", *FORMATS,
)  # fmt: skip


@dataclass(frozen=True)
class ExportResult:
    """Result of an export.

    Attributes:
        comparisons: the comparison with the model in each runtime.
        int8: the cost and gain of int8 in each runtime; empty if it was not asked for.
        sizes: bytes by file of a graph.
    """

    folder: Path
    task: str
    comparisons: tuple[Comparison, ...]
    int8: dict[GraphRuntime, Int8Report]
    sizes: dict[str, int]


@own_torch_state()
def write_export(  # noqa: PLR0913 – one option per question
    folder: str | Path,
    out: str | Path,
    to: Format | Literal["both"] | Iterable[Format] = "onnx",
    *,
    task: str | None = None,
    length: int | None = None,
    settings: Tree | Iterable[str] = (),
    int8: Callable[[Predictor], Metrics] | None = None,
    limit: float = MAX_LOSS,
    progress: Progress = SILENT,
) -> ExportResult:
    """Write a model as a graph, after a comparison of its outputs, as `bothways.export_model`.

    Args:
        settings: settings of the task, such as {"pooling": "cls"} or ["pooling=cls"].
        int8: returns the metrics of a predictor on labelled data; for second files in int8.
        limit: the points that int8 may lose, or nothing is written.
    """
    formats = [*get_args(Format)] if to == "both" else [to] if isinstance(to, str) else [*to]
    require_choice(Format, "to", *formats or ["nothing"])
    # Every format is made of the ONNX file, which is compared with the model first.
    steps = {name: FORMATS[name] for name in ("onnx", *formats)}
    require("export", "exporting a model", "onnx", *(step.runtime for step in steps.values()))
    source, target = resolve(resolve_run(str(folder))), local_path(out)
    check_not_input(target, [source])
    model_folder.check_replaceable(target, _OURS, "an export")
    progress.stage("building the graph")
    task_model = open_task_model(source, task, length=length, device="cpu", settings=settings)
    exported = exported_part(task_model)
    with replace_folder(target) as hidden:
        opened = {"length": length, "settings": parse_overrides(settings)}
        _write_companions(hidden, source, task_model, exported, opened)
        _save(build_graph(task_model.model, exported), hidden / ONNX.fp32)
        comparisons = []
        for name, step in steps.items():
            progress.stage(f"comparing with {step.title}")
            file = hidden / step.fp32
            if name == "openvino":
                convert_to_openvino(hidden / ONNX.fp32, file, exported.head)
            run, _ = step.open(file)
            comparisons.append(compare_outputs(task_model.model, exported, run, step.title))
        for comparison in comparisons:
            comparison.check()
        reports: dict[GraphRuntime, Int8Report] = {}
        for name, step in steps.items():
            if int8 is None or name not in formats:
                continue
            progress.stage(f"quantising for {step.title}")
            _quantise(hidden, name, task_model.model, exported)
            progress.stage(f"evaluating fp32 and int8 in {step.title}")
            report = measure_int8(
                lambda precision, runtime=step.runtime: open_task(
                    hidden, runtime=runtime, precision=precision
                ),
                int8,
            )
            report.check(limit)
            reports[step.runtime] = report
        if "onnx" not in formats:
            shutil.rmtree((hidden / ONNX.fp32).parent)
        files = [file for name in FORMATS for file in sorted(hidden.glob(f"{name}/*"))]
        sizes = {str(file.relative_to(hidden)): file.stat().st_size for file in files}
    return ExportResult(target, task_model.task.name, tuple(comparisons), reports, sizes)


def exported_part(task_model: TaskModel[Any, Any]) -> ExportedPart:
    """Return the part of a model that a task reads.

    Raises:
        FolderError: no graph has its head.
        ConfigError: the task reads other layers than the last one.
    """
    tokenizer = task_model.tokenizer
    separators = Separators(tokenizer.specials.sep, len(tokenizer.template.between))
    if isinstance(task_model, Embedder):
        return ExportedPart("none", sentence_config(task_model), separators)
    head, *_ = task_model.task.heads(task_model.labels, None)
    return ExportedPart(head_kind(head.kind), None, separators)


def _write_companions(
    hidden: Path, source: Path, task_model: TaskModel[Any, Any], exported: ExportedPart,
    opened: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the configuration, the tokenizer and the records of programs.

    Args:
        opened: the length and the settings that the model was opened with.
    """
    model, tokenizer = task_model.model, task_model.tokenizer
    if (source / "tokenizer.json").is_file():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, hidden / name)
    else:
        segments = model.config.segments > 1
        tokenizer.save(hidden, positions=model.config.max_positions, segments=segments)
    record = {
        model_folder.VERSION: __version__,
        model_folder.VOCABULARY: model_folder.vocabulary_digest(tokenizer),
        "task": configs.to_dict(task_model.task),
        "length": task_model.length,
        "source": {**opened, "sha256": digest_of_model(str(source))},
    }
    if (calibration := model_folder.read_record(source).get("calibration")) is not None:
        record["calibration"] = calibration
    files: dict[str, Any] = {RECORD: record, **task_model.task.program_files(task_model.length)}
    files["config.json"] = {**read_hf_config(source).raw, **files.get("config.json", {})}
    if exported.sentence is not None:
        files |= program_files(exported.sentence, model)
    model_folder.write_files(hidden, files)


def _save(graph: onnx.ModelProto, file: Path) -> None:
    """Write a graph; its weights are in `model.onnx_data` next to it if they are too many."""
    file.parent.mkdir(exist_ok=True)
    large = sum(len(tensor.raw_data) for tensor in graph.graph.initializer) > INLINE_BYTES
    location = f"{file.name}_data" if large else None
    onnx.save_model(graph, file, save_as_external_data=large, location=location)


def _quantise(hidden: Path, form: str, model: Model, exported: ExportedPart) -> None:
    """Write a graph in int8: weights are rounded here, activations by the runtime."""
    if form == "openvino":
        source = hidden / "onnx" / "int8_weights.onnx"
        _save(with_int8_weights(build_graph(model, exported)), source)
        convert_to_openvino(source, hidden / FORMATS["openvino"].int8, exported.head)
        for file in source.parent.glob(f"{source.name}*"):
            file.unlink()
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logger, level = logging.getLogger(), logging.getLogger().level
    logger.setLevel(logging.ERROR)  # a warning that shapes could be inferred beforehand
    try:
        # A scale for each output, in 7 bits: 8 would overflow 16-bit sums where a processor has
        # no instruction for products of bytes.
        source, target = hidden / ONNX.fp32, hidden / ONNX.int8
        quantize_dynamic(
            source, target, per_channel=True, reduce_range=True, weight_type=QuantType.QInt8
        )
    finally:
        logger.setLevel(level)


def convert_to_openvino(source: Path, target: Path, head: str) -> None:
    """Write an ONNX file as an OpenVINO model, weights as they are; it notes the kind of head."""
    # `openvino.convert_model` takes ten times as long, and reports the model's operations to Intel.
    model = session_model.openvino_core().read_model(source)
    model.set_rt_info(head, session_model.HEAD)
    import openvino  # as the core was

    target.parent.mkdir(exist_ok=True)
    try:
        openvino.save_model(model, target, compress_to_fp16=False)
    except RuntimeError as error:  # of a full disk
        raise OSError(f"by OpenVINO: {error}") from error
