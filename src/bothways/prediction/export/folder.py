"""The exported folder: graphs in the places where other programs look for them.

| file | read by |
|---|---|
| `onnx/model.onnx` | onnxruntime, sentence-transformers, TEI, fastembed, transformers.js |
| `onnx/model_quantized.onnx` | transformers.js (its "q8") |
| `openvino/openvino_model.xml`, `.bin` | OpenVINO, sentence-transformers, optimum-intel |
| `openvino/openvino_model_qint8_quantized.xml`, `.bin` | the same |
| `config.json`, the tokenizer's files | all of them |
| `modules.json`, `1_Pooling` | sentence-transformers, TEI (text-embeddings-inference) |
| `bothways.json` | bothways, with `--runtime onnxruntime` or `openvino` |

The folder appears complete and verified, or not at all.
"""

from __future__ import annotations

import fnmatch
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from bothways._version import __version__
from bothways.core.atomic_files import check_not_input, replace_folder
from bothways.core.config import reader as configs
from bothways.core.config.checks import require_choice
from bothways.core.config.tree import Tree
from bothways.core.errors import FolderError, optional, require
from bothways.core.progress import SILENT, Progress
from bothways.core.terminal import listed
from bothways.hub.hf_config import RECORD, read_hf_config
from bothways.hub.model_folder import VERSION, VOCABULARY, vocabulary_digest, write_files
from bothways.hub.resolve import resolve, resolve_run
from bothways.hub.sentence_transformers import program_files
from bothways.model.model import Model
from bothways.prediction.export.encoder_graph import Separators
from bothways.prediction.export.int8_weights import with_int8_weights
from bothways.prediction.export.model_graph import ExportedPart, build_graph, head_kind
from bothways.prediction.export.verification import Comparison, compare_outputs
from bothways.prediction.int8_report import MAX_LOSS, Int8Report, measure_int8
from bothways.prediction.predictor import Predictor, open_task, open_task_model
from bothways.prediction.session_model import FILES, HEAD, OPENERS, GraphRuntime
from bothways.tasks.base import Metrics, TaskModel
from bothways.tasks.sentence_embedding.task import Embedder, sentence_config

if TYPE_CHECKING:
    import onnx

Format = Literal["onnx", "openvino"]
"""Formats of an export."""
ONNX, OPENVINO = FILES["onnxruntime"], FILES["openvino"]
INLINE_BYTES = 1_900_000_000
"""Weights beyond this are in a file next to the graph: a protobuf message ends at 2 GiB."""
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model",
)  # fmt: skip
_OURS = (
    *_TOKENIZER_FILES, "config.json", RECORD, "modules.json",
    "[0-9]_Pooling", "[0-9]_Dense", "[0-9]_Normalize",
    "sentence_bert_config.json", "config_sentence_transformers.json", "onnx", "openvino",
)  # fmt: skip


@dataclass(frozen=True)
class Int8Gate:
    """Labelled data that int8 must pass.

    Attributes:
        evaluate: returns the metrics of a predictor; called for fp32 and for int8.
        limit: the points that may be lost.
    """

    evaluate: Callable[[Predictor], Metrics]
    limit: float = MAX_LOSS


@dataclass(frozen=True)
class ExportResult:
    """Result of an export.

    Attributes:
        folder: the exported folder.
        task: the name of the task that it is for.
        comparisons: the comparison with the model in each runtime.
        int8: the cost and gain of int8 in each runtime; empty if it was not asked for.
        sizes: bytes by file of a graph.
    """

    folder: Path
    task: str
    comparisons: tuple[Comparison, ...]
    int8: dict[GraphRuntime, Int8Report]
    sizes: dict[str, int]


def write_export(
    folder: str | Path,
    out: str | Path,
    to: Format | Literal["both"] | Iterable[Format] = "onnx",
    *,
    task: str | None = None,
    length: int | None = None,
    settings: Tree | Iterable[str] = (),
    int8: Int8Gate | None = None,
    progress: Progress = SILENT,
) -> ExportResult:
    """Write a model as a graph, after a comparison of its outputs, as `bothways.export_model`.

    Args:
        settings: settings of the task, such as {"pooling": "cls"} or ["pooling=cls"].
        int8: labelled data for second files in int8, which are written only if they pass.
        progress: receives the stages.
    """
    formats = [*get_args(Format)] if to == "both" else [to] if isinstance(to, str) else [*to]
    require_choice(Format, "to", *formats or ["nothing"])
    steps = [TARGETS[name] for name in dict.fromkeys(("onnx", *formats))]
    # Every format is made of the ONNX file, which is compared with the model first.
    require("export", "exporting a model", "onnx", *(step.runtime for step in steps))
    source, target = resolve(resolve_run(str(folder))), Path(out)
    check_not_input(target, [source])
    _check_replaceable(target)
    progress.stage("building the graph")
    task_model = open_task_model(source, task, length=length, device="cpu", settings=settings)
    exported = exported_part(task_model)
    with replace_folder(target) as hidden:
        _write_companions(hidden, source, task_model, exported)
        _save(build_graph(task_model.model, exported), hidden / ONNX["fp32"])
        comparisons = []
        for step in steps:
            progress.stage(f"comparing with {step.title}")
            step.convert(hidden, exported.head)
            run = OPENERS[step.runtime](hidden / FILES[step.runtime]["fp32"])
            comparisons.append(compare_outputs(task_model.model, exported, run, step.title))
        for comparison in comparisons:
            comparison.check()
        reports: dict[GraphRuntime, Int8Report] = {}
        for step in [TARGETS[name] for name in formats] if int8 is not None else ():
            assert int8 is not None
            progress.stage(f"quantising for {step.title}")
            step.quantise(hidden, task_model.model, exported)
            progress.stage(f"evaluating fp32 and int8 in {step.title}")
            reports[step.runtime] = _gate(hidden, int8, step.runtime)
        if "onnx" not in formats:
            shutil.rmtree((hidden / ONNX["fp32"]).parent)
        sizes = {
            str(path.relative_to(hidden)): path.stat().st_size
            for name in ("onnx", "openvino")
            for path in sorted((hidden / name).glob("*"))
        }
    return ExportResult(target, task_model.task.name, tuple(comparisons), reports, sizes)


def exported_part(task_model: TaskModel[Any, Any]) -> ExportedPart:
    """Return the part of a model that a task reads.

    Raises:
        FolderError: no graph has its head.
        ConfigError: the task reads other layers than the last one.
    """
    tokenizer = task_model.tokenizer
    separators = Separators(tokenizer.specials.sep, len(tokenizer.template.between))
    kinds = [head.kind for head in task_model.task.heads(task_model.labels, None)]
    if isinstance(task_model, Embedder):
        sentence = sentence_config(task_model)
        return ExportedPart("none", sentence, separators)
    return ExportedPart(head_kind(kinds[0]), None, separators)


def _write_companions(
    hidden: Path, source: Path, task_model: TaskModel[Any, Any], exported: ExportedPart
) -> None:
    """Write the configuration, the tokenizer and the records of programs."""
    model, tokenizer = task_model.model, task_model.tokenizer
    if (source / "tokenizer.json").is_file():
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, hidden / name)
    else:
        segments = model.config.segments > 1
        tokenizer.save(hidden, positions=model.config.max_positions, segments=segments)
    record = {
        VERSION: __version__,
        VOCABULARY: vocabulary_digest(tokenizer),
        "task": configs.to_dict(task_model.task),
        "length": task_model.length,
    }
    files: dict[str, Any] = {RECORD: record, **task_model.task.program_files(task_model.length)}
    files["config.json"] = {**read_hf_config(source).raw, **files.get("config.json", {})}
    if exported.sentence is not None:
        files |= program_files(exported.sentence, model)
    write_files(hidden, files)


def _save(graph: onnx.ModelProto, file: Path) -> None:
    """Write a graph; its weights are in `model.onnx_data` next to it if they are too many."""
    import onnx

    file.parent.mkdir(exist_ok=True)
    large = sum(len(tensor.raw_data) for tensor in graph.graph.initializer) > INLINE_BYTES
    onnx.save_model(
        graph, file, save_as_external_data=large, location=f"{file.name}_data" if large else None
    )


def _quantise_onnx(hidden: Path, model: Model, exported: ExportedPart) -> None:
    """Write the ONNX file in int8: weights are rounded here, activations by onnxruntime."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logger, level = logging.getLogger(), logging.getLogger().level
    logger.setLevel(logging.ERROR)  # a warning that shapes could be inferred beforehand
    try:
        # A scale for each output, in 7 bits: 8 would overflow 16-bit sums where a processor has
        # no instruction for products of bytes.
        quantize_dynamic(
            hidden / ONNX["fp32"],
            hidden / ONNX["int8"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        logger.setLevel(level)


def _quantise_openvino(hidden: Path, model: Model, exported: ExportedPart) -> None:
    """Write the OpenVINO model with weights in int8."""
    source = hidden / "onnx" / "int8_weights.onnx"
    _save(with_int8_weights(build_graph(model, exported)), source)
    convert_to_openvino(source, hidden / OPENVINO["int8"], exported.head)
    for file in source.parent.glob(f"{source.name}*"):
        file.unlink()


def _gate(hidden: Path, gate: Int8Gate, runtime: GraphRuntime) -> Int8Report:
    """Compare int8 with fp32 on labelled data.

    Raises:
        ConfigError: it loses more than the limit.
    """
    report = measure_int8(
        lambda precision: open_task(hidden, runtime=runtime, precision=precision),
        gate.evaluate,
    )
    report.check(gate.limit)
    return report


def _check_replaceable(folder: Path) -> None:
    """Raise FolderError for a folder that is not an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise FolderError("is a file, not a folder", where=folder, fix="Choose another folder.")
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [
        name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in _OURS)
    ]
    if foreign:
        message = f"holds files that are not of an export, which would be lost: {listed(foreign)}"
        raise FolderError(message, where=folder, fix="Choose an empty or a new folder.")


def _convert_openvino(hidden: Path, head: str) -> None:
    convert_to_openvino(hidden / ONNX["fp32"], hidden / OPENVINO["fp32"], head)


def convert_to_openvino(source: Path, target: Path, head: str) -> None:
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


class ExportTarget(NamedTuple):
    """A format: its runtime, and what writes its files, from that of ONNX and in int8."""

    runtime: GraphRuntime
    title: str
    convert: Callable[[Path, str], None]
    quantise: Callable[[Path, Model, ExportedPart], None]


TARGETS: Mapping[str, ExportTarget] = {
    "onnx": ExportTarget("onnxruntime", "onnxruntime", lambda hidden, head: None, _quantise_onnx),
    "openvino": ExportTarget("openvino", "OpenVINO", _convert_openvino, _quantise_openvino),
}
"""The formats by name; `session_model` has the files and the classes of their runtimes."""
