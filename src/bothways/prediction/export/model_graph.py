"""A model with one head as an ONNX model: which inputs it reads, and which outputs it has.

Names and axes are those that programs expect of the classes of transformers:

| head | outputs |
|---|---|
| none | `last_hidden_state (rows, length, width)`, for texts `sentence_embedding (rows, width)` |
| "masked", "causal", "tags" | `logits (rows, length, outputs)` |
| "replaced" | `logits (rows, length)` |
| "labels", "pair" | `logits (rows, outputs)` |
| "choice" | `logits (questions, choices)`, from inputs `(questions, choices, length)` |
| "span" | `start_logits`, `end_logits (rows, length)` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn
from typing_extensions import assert_never

from bothways._version import __version__
from bothways.core.errors import FolderError
from bothways.hub.sentence_transformers import Pooling, SentenceEncoderConfig
from bothways.model import heads as head_modules
from bothways.model.model import Model
from bothways.prediction.export.builder import LOWEST, GraphBuilder
from bothways.prediction.export.encoder_graph import EncoderGraph, GlobalRule, Separators
from bothways.prediction.session_model import HEAD
from bothways.tasks.sentence_embedding.task import projection_of, sentence_encoder

if TYPE_CHECKING:
    import onnx

HeadKind = Literal[
    "none", "masked", "causal", "tags", "replaced", "labels", "pair", "choice", "span"
]
"""Kind of head at the end of a graph; "none" for the vectors of tokens."""
ROWS, LENGTH = "batch", "sequence"
"""The names of the axes that may have any length."""
_RULES: Mapping[HeadKind, GlobalRule] = {
    "labels": "first", "span": "question", "choice": "ending"
}  # fmt: skip


@dataclass(frozen=True)
class ExportedPart:
    """The part of a model that becomes a graph.

    Attributes:
        head: the kind of its head.
        sentence: how the vectors of tokens are pooled; None for no `sentence_embedding`.
        separators: where a Longformer's texts end.
    """

    head: HeadKind
    sentence: SentenceEncoderConfig | None = None
    separators: Separators | None = None

    @property
    def global_rule(self) -> GlobalRule:
        """The tokens that are global in a model that has these, as tasks mark them."""
        return _RULES.get(self.head, "none")


def head_kind(kind: str) -> HeadKind:
    """Return the kind as one that can be exported.

    Raises:
        FolderError: it cannot.
    """
    kinds: dict[str, HeadKind] = {name: name for name in get_args(HeadKind)}
    if kind not in kinds:
        message = f"the head {kind!r} cannot be exported"
        raise FolderError(message, fix=f"Heads that can are {', '.join(kinds)}.")
    return kinds[kind]


def build_graph(model: Model, exported: ExportedPart) -> onnx.ModelProto:
    """Return the ONNX model of an encoder with one head, for any batch size and length.

    Examples:
        >>> from bothways.prediction.export.model_graph import ExportedPart, build_graph
        >>> graph = build_graph(bothways.load_model("my-bert"), ExportedPart("masked"))
        >>> [output.name for output in graph.graph.output]
        ['logits']
    """
    encoder, kind = model.encoder, exported.head
    graph = GraphBuilder({id(p): name for name, p in model.named_parameters()})
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if encoder.config.segments > 1 else []
    choice = kind == "choice"
    axes = (ROWS, "choices", LENGTH) if choice else (ROWS, LENGTH)
    rows = list(names)
    if choice:
        length = graph.op("Shape", "input_ids", start=2)
        # (questions, choices, length) → (questions · choices, length): a row for each choice.
        shape = graph.op("Concat", (-1,), length, axis=0)
        rows = [graph.op("Reshape", name, shape) for name in names]
    inputs = rows[0], rows[1], rows[2] if len(rows) > 2 else None
    vectors = EncoderGraph(graph, encoder, inputs, exported.global_rule, exported.separators)
    _HeadGraph(graph, vectors, model).append(exported)
    return graph.model(dict.fromkeys(names, axes), {HEAD: kind}, ("bothways", __version__))


class _HeadGraph:
    """The part of a graph after the last layer."""

    def __init__(self, graph: GraphBuilder, encoder: EncoderGraph, model: Model) -> None:
        self.graph, self.encoder, self.model = graph, encoder, model
        self.layers = encoder.layers()

    def append(self, exported: ExportedPart) -> None:
        """Append the head and name the outputs."""
        graph, x, kind = self.graph, self.layers[-1], exported.head
        graph.scope, config = f"/{kind}", self.encoder.config
        if kind == "none":
            graph.output("last_hidden_state", x, ROWS, LENGTH, config.width)
            if exported.sentence is not None:
                vector = self._sentence(x, exported.sentence)
                width = sentence_encoder(exported.sentence).width(self.model)
                graph.output("sentence_embedding", vector, ROWS, width)
            return
        head = self.model.heads[kind]
        [outputs] = [head.outputs for head in self.model.specification if head.kind == kind]
        count = config.vocab if outputs is None else outputs
        match kind:
            case "span":
                logits = graph.split(self._rows(head, x), 1, 1)
                for name, value in zip(("start_logits", "end_logits"), logits, strict=True):
                    graph.output(name, graph.op("Squeeze", value, (-1,)), ROWS, LENGTH)
            case "choice":
                scores = self._rows(head, self._pooled(head, x))
                shape = graph.op("Shape", "input_ids", start=0, end=2)
                graph.output("logits", graph.op("Reshape", scores, shape), ROWS, "choices")
            case "labels" | "pair":
                scores = self._rows(head, self._pooled(head, x))
                graph.output("logits", scores, ROWS, count)
            case "replaced":
                scores = graph.op("Squeeze", self._rows(head, x), (-1,))
                graph.output("logits", scores, ROWS, LENGTH)
            case "masked" | "causal" | "tags":
                if kind == "masked" and self.model.config.readout.shifted:
                    message = "its masked LM head predicts a token from the vector before it"
                    fix = "Programs that read graphs do not expect it: export the encoder alone."
                    raise FolderError(message, fix=fix)
                if isinstance(head, head_modules.MaskedOutput) and head.position is not None:
                    x = self.encoder.decode(self.layers[-2], head.position.weight)
                graph.output("logits", self._rows(head, x), ROWS, LENGTH, count)

    def _rows(self, head: nn.Module, x: str) -> str:
        """Apply a head to vectors of tokens, or to pooled ones."""
        graph = self.graph
        match head:
            case head_modules.LinearOutput(dense=dense):
                return graph.dense(x, dense)
            case head_modules.OwnOutput():
                x = x if head.reads == "late" else self._hidden(head, x)
                return graph.dense(graph.norm(x, head.norm), head.dense)
            case head_modules.DeepOutput():
                inner = graph.activate(head.activation, graph.dense(x, head.up))
                x = graph.op("Add", x, graph.dense(inner, head.down))
                return graph.dense(graph.norm(x, head.norm), head.dense)
            case head_modules.ReplacedOutput():
                if head.norm is not None:
                    x = graph.norm(graph.op("Add", x, self._first(x)), head.norm)
                x = graph.activate(head.activation, graph.dense(x, head.inner))
                return graph.dense(x, head.dense)
            case head_modules.MaskedOutput():
                if head.activation is not None:
                    assert isinstance(head.dense, nn.Linear)
                    x = graph.activate(head.activation, graph.dense(x, head.dense))
                x = self._tokens(graph.norm(x, head.norm), head.output)
                return x if head.bias is None else graph.op("Add", x, graph.weight(head.bias))
            case head_modules.NextTokenOutput():
                return self._tokens(x, head.output)
            case _:
                raise AssertionError(f"no graph for {type(head).__name__}")

    def _hidden(self, head: head_modules.OwnOutput, x: str) -> str:
        return self.graph.activate(head.activation, self.graph.dense(x, head.inner))

    def _tokens(self, x: str, matrix: nn.Linear | None) -> str:
        """Multiply by the token embedding, which is stored once, or by the head's own matrix."""
        graph = self.graph
        if matrix is not None:
            return graph.dense(x, matrix)
        table = graph.weight(self.model.encoder.embedding.token.weight)
        return graph.op("MatMul", x, graph.op("Transpose", table, perm=(1, 0)))

    def _pooled(self, head: nn.Module, x: str) -> str:
        """Return the vector that a head of sequences reads `(rows, width)`."""
        if isinstance(head, head_modules.OwnOutput):
            if head.reads == "late":
                return self._mean(self._hidden(head, x))
            return self._mean(x) if head.reads == "mean" else self._representative(x)
        if isinstance(head, head_modules.VectorOutput):
            return self._unit(self._mean(x) if head.reads == "mean" else self._representative(x))
        pooler = self.model.heads["pooler"]
        assert isinstance(pooler, head_modules.Pooler)
        return self.graph.op("Tanh", self.graph.dense(self._representative(x), pooler.dense))

    def _first(self, x: str) -> str:
        """Return the vector of the first token `(rows, 1, width)`."""
        return self.graph.slice(x, 0, 1, 1)

    def _representative(self, x: str) -> str:
        """Return the vector of the first token, or in a causal encoder of the last one."""
        return self._pool(x, "lasttoken" if self.encoder.config.is_causal else "cls")

    def _lengths(self) -> str:
        return self.graph.op("ReduceSum", self.encoder.mask, (1,), keepdims=1)

    def _mean(self, x: str) -> str:
        """Return the mean of the tokens of each row; zeros for a row of padding."""
        graph = self.graph
        keep = graph.unsqueeze(graph.op("Cast", self.encoder.mask, to=1), 2)
        total = graph.op("ReduceSum", graph.op("Mul", x, keep), (1,), keepdims=0)
        count = graph.op("Max", graph.op("Cast", self._lengths(), to=1), 1.0)
        return graph.op("Div", total, count)

    def _unit(self, x: str) -> str:
        """Return vectors scaled to length 1."""
        norm = self.graph.op("ReduceL2", x, axes=(-1,), keepdims=1)
        return self.graph.op("Div", x, self.graph.op("Max", norm, 1e-12))

    def _pool(self, x: str, pooling: Pooling) -> str:
        """Return the pooled vector of each row."""
        graph = self.graph
        match pooling:
            case "cls":
                return graph.op("Squeeze", self._first(x), (1,))
            case "lasttoken":
                end = graph.op("Sub", self._lengths(), 1)  # (rows, 1)
                return graph.op("GatherND", x, end, batch_dims=1)
            case "mean":
                return self._mean(x)
            case "max":
                keep = graph.unsqueeze(graph.op("Cast", self.encoder.mask, to=9), 2)
                masked = graph.op("Where", keep, x, LOWEST)
                return graph.op("ReduceMax", masked, axes=(1,), keepdims=0)
            case "mean_sqrt_len_tokens":
                count = graph.op("Max", graph.op("Cast", self._lengths(), to=1), 1.0)
                return graph.op("Mul", self._mean(x), graph.op("Sqrt", count))
            case "weightedmean":
                # Tokens from 1 on; the padding after them counts on and is masked.
                mask = graph.op("Cast", self.encoder.mask, to=1)
                counts = graph.op("CumSum", mask, 1)
                weights = graph.op("Mul", counts, mask)  # (rows, length)
                keep = graph.unsqueeze(weights, 2)
                total = graph.op("ReduceSum", graph.op("Mul", x, keep), (1,), keepdims=0)
                weight = graph.op("ReduceSum", weights, (1,), keepdims=1)
                return graph.op("Div", total, graph.op("Max", weight, 1.0))
            case _:
                assert_never(pooling)

    def _sentence(self, x: str, config: SentenceEncoderConfig) -> str:
        """Return the vector of each row, as `tasks.sentence_embedding` computes it."""
        graph = self.graph
        modes = (config.pooling,) if isinstance(config.pooling, str) else config.pooling
        pooled = [self._pool(x, mode) for mode in modes]
        x = pooled[0] if len(pooled) == 1 else graph.op("Concat", *pooled, axis=-1)
        if (projection := projection_of(self.model)) is not None:
            for layer, activation in zip(projection.layers, projection.activations, strict=True):
                assert isinstance(layer, nn.Linear)
                x = graph.dense(x, layer)
                x = x if activation is None else graph.activate(activation, x)
        if config.normalised:
            x = self._unit(x)
        if config.components is not None:
            x = graph.slice(x, 0, config.components, 1)
        return x
