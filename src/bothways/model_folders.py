"""Open a model: for predictions, for a training loop of one's own, as a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from bothways.core.bar import shown_progress
from bothways.core.progress import Progress

if TYPE_CHECKING:
    from bothways.hub.pretrained_model import PretrainedModel
    from bothways.model.heads import Head
    from bothways.prediction.export.folder import ExportResult, Format
    from bothways.prediction.predictor import Predictor
    from bothways.prediction.prepared_model import PredictPrecision
    from bothways.prediction.session_model import Runtime


def load(
    folder: str | Path,
    task: str | None = None,
    *,
    precision: PredictPrecision = "fp32",
    device: str = "auto",
    length: int | None = None,
    batch_invariant: bool = False,
    runtime: Runtime = "torch",
    **settings: Any,
) -> Predictor:
    """Load a model for predictions; call the result with a text, a pair, a row or a list.

    Args:
        folder: a model folder, the folder of a run, or a Hub id.
        task: a name such as "classify", "ner", "qa", "fill" or "embed"; `None` for the task that
            the model was trained for.
        precision: precision of matrix products: "fp32", "bf16", "int8" or "auto".
        device: "auto" (a GPU, if there is one), "cpu", "cuda" or "cuda:N".
        length: maximum length of a text in tokens; `None` as in training.
        batch_invariant: True for predictions that are bit-identical regardless of the other
            texts in the batch, as of `bothways predict`; without it a short text alone is
            computed sooner.
            Vectors of the task "embed" always are.
        runtime: "onnxruntime" or "openvino" computes the graph in a folder that
            `bothways.export_model` wrote.
        settings: settings of the task, such as `pooling="cls"` or `top=3`.

    Raises:
        FolderError: the folder cannot be read, or lacks the heads of the task.
        ConfigError: an unknown task, setting or device.

    Examples:
        >>> classify = bothways.load("my-classifier")
        >>> classify("a good film").label
        'positive'
        >>> [prediction.label for prediction in classify(["a good film", "a bad play"])]
        ['positive', 'negative']
        >>> embed = bothways.load("my-bert", task="embed")
        >>> embed.encode(["a good film", "a bad play"]).shape
        (2, 32)
    """
    from bothways.core.config.checks import require_choice
    from bothways.prediction.predictor import open_task
    from bothways.prediction.prepared_model import PredictPrecision
    from bothways.prediction.session_model import Runtime

    require_choice(PredictPrecision, "precision", precision)
    require_choice(Runtime, "runtime", runtime)
    return open_task(
        folder,
        task,
        precision=precision,
        device=device,
        length=length,
        batch_invariant=batch_invariant,
        runtime=runtime,
        settings=settings,
    )


def load_model(
    folder: str | Path, heads: Iterable[Head] | None = None, *, fresh: Collection[str] = ()
) -> PretrainedModel:
    """Load a model for a training loop of your own, or to look into it.

    The result is an `nn.Module` in evaluation mode, in fp32, on the CPU. Called with a batch, it
    returns an output with the names of transformers. Tokens are packed: all texts of a batch end
    to end, without padding, and `batch.split` divides a tensor of tokens by text.

    Args:
        folder: a model folder, the folder of a run, or a Hub id.
        heads: the model's heads, with the pooler that they read; `None` for the folder's.
        fresh: kinds of heads that start at random, such as the label head of a new task.

    Raises:
        FolderError: the folder cannot be read, or lacks a head that is not in `fresh`.
        ConfigError: `fresh` names a head that the model does not have.

    Examples:
        >>> model = bothways.load_model("my-bert")
        >>> batch = model.tokenizer.batch(["a good film", ("a bad play", "it ends")])
        >>> output = model(batch, output_hidden_states=True, output_attentions=True)
        >>> [tuple(text.shape) for text in batch.split(output.last_hidden_state)]
        [(5, 32), (8, 32)]
        >>> len(output.hidden_states), [tuple(text.shape) for text in output.attentions[0]]
        (3, [(2, 5, 5), (2, 8, 8)])
        >>> tuple(output.logits["pair"].shape)
        (2, 2)
        >>> import torch
        >>> from bothways.model.heads import LabelHead
        >>> model = bothways.load_model("my-bert", [LabelHead(2)], fresh=["labels"]).train()
        >>> output = model(model.tokenizer.batch(["a good film", "a bad play"], length=16))
        >>> labels = torch.tensor([1, 0])
        >>> torch.nn.functional.cross_entropy(output.logits["labels"], labels).backward()
        >>> model.labels = ("bad", "good")
        >>> model.save("my-own-classifier").name
        'my-own-classifier'
    """
    from bothways.hub import model_folder
    from bothways.hub.pretrained_model import PretrainedModel
    from bothways.hub.resolve import resolve_run

    return PretrainedModel(model_folder.load_model(resolve_run(str(folder)), heads, fresh))


def export_model(  # noqa: PLR0913 – one option per question
    folder: str | Path,
    out: str | Path,
    to: Format | Literal["both"] | Iterable[Format] = "onnx",
    *,
    task: str | None = None,
    length: int | None = None,
    int8: str | Path | Iterable[Any] | None = None,
    limit: float | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    progress: Progress | bool = True,
    **settings: Any,
) -> ExportResult:
    """Write a model as a graph for onnxruntime, OpenVINO or a browser, and verify its outputs.

    Args:
        folder: a fine-tuned model folder, the folder of a run, a sentence encoder, or a Hub id.
        out: the new folder: the graph with its configuration and tokenizer, without the weights of
            PyTorch; an earlier export there is replaced.
        to: format: onnx, openvino, or both.
        task: what the graph computes, as for predictions; by default the task of the model.
        length: maximum length of a text in tokens; `None` as in training.
        int8: labelled data, a file, a Hub data set, or in Python rows. A second file in int8 for
            each format is written if it scores as well as fp32 there.
        limit: points of the metric that int8 may lose; a point is 0.01. `None` for 0.5.
        columns: columns of a file of `int8` by role, "text", "text_b" and "label"; by
            default as in training.
        progress: True shows progress on standard error, False nothing; an object with `stage`,
            `advance` and `message` receives it.
        settings: settings of the task, such as `pooling="cls"`.

    Returns:
        The exported `folder`, the largest differences from the model (`comparisons`), the cost of
        `int8` by runtime, and the `sizes` of the files in bytes.

    Raises:
        FolderError: the folder cannot be read or its model cannot be a graph, or `out` holds
            something else.
        ConfigError: an unknown task or setting, or int8 loses too much.
        DivergedError: a runtime computes other outputs than the model.
        ResourceError: a package of the extra "export" is missing.

    Examples:
        >>> result = bothways.export_model("my-classifier", "exported", int8="dev.tsv")
        >>> sorted(result.sizes)
        ['onnx/model.onnx', 'onnx/model_quantized.onnx']
        >>> classify = bothways.load("exported", runtime="onnxruntime")
        >>> classify("a good film").label
        'positive'
    """
    from bothways.core.advice import argument
    from bothways.core.config import reader as configs
    from bothways.core.errors import ConfigError
    from bothways.prediction.export.folder import Int8Gate, write_export
    from bothways.prediction.int8_report import MAX_LOSS
    from bothways.tasks.base import Metrics

    if limit is not None and int8 is None:
        fix = f"Add {argument(int8='LABELLED_DATA')}."
        raise ConfigError("limits the loss of int8, which is not computed", where="limit", fix=fix)
    data = int8 if int8 is None or isinstance(int8, str | Path) else list(int8)  # read twice

    def evaluate(predictor: Predictor) -> Metrics:
        """Return the metrics on the labelled data."""
        if not isinstance(data, str | Path):
            return predictor.evaluate(data or [])
        trained: Any = predictor.task_model.task
        roles = configs.read(type(trained.columns), columns, where="columns") if columns else None
        return predictor.evaluate(predictor.read(data, roles, labelled=True))

    gate = Int8Gate(evaluate, MAX_LOSS if limit is None else limit) if int8 is not None else None
    with shown_progress(progress) as reporter:
        return write_export(
            folder,
            out,
            to,
            task=task,
            length=length,
            settings=settings,
            int8=gate,
            progress=reporter,
        )
