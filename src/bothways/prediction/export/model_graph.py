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

from typing import TYPE_CHECKING, get_args

from torch import nn
from typing_extensions import assert_never

from bothways.core.errors import FolderError
from bothways.hub.sentence_transformers import Pooling, SentenceEncoderConfig
from bothways.model import heads as head_modules
from bothways.model.model import Model
from bothways.prediction.export import encoder_graph
from bothways.prediction.export.encoder_graph import LENGTH, ROWS, ExportedPart, HeadKind
from bothways.tasks.sentence_embedding.task import projection_of, sentence_encoder

if TYPE_CHECKING:
    import onnx


def head_kind(kind: str) -> HeadKind:
    """Return the kind as one that can be exported; FolderError if it cannot."""
    kinds: dict[str, HeadKind] = {name: name for name in get_args(HeadKind)}
    if kind not in kinds:
        message = f"the head {kind!r} cannot be exported"
        raise FolderError(message, fix=f"Heads that can are {', '.join(kinds)}.")
    return kinds[kind]


def build_graph(model: Model, exported: ExportedPart) -> onnx.ModelProto:
    """Return the ONNX model of an encoder with one head, for any batch size and length.

    Examples:
        >>> from bothways.prediction.export.encoder_graph import ExportedPart
        >>> from bothways.prediction.export.model_graph import build_graph
        >>> graph = build_graph(bothways.load_model("my-bert"), ExportedPart("masked"))
        >>> [output.name for output in graph.graph.output]
        ['logits']
    """
    graph = _ModelGraph(model, exported)
    graph.append_head()
    return graph.finish()


class _ModelGraph(encoder_graph.EncoderGraph):
    """A graph of a model, with a head after the last layer."""

    def append_head(self) -> None:
        """Append the layers and the head, and name the outputs."""
        layers, exported, kind = self.layers(), self.exported, self.exported.head
        x = layers[-1]
        self.scope, config = f"/{kind}", self.config
        if kind == "none":
            self.output("last_hidden_state", x, ROWS, LENGTH, config.width)
            if exported.sentence is not None:
                vector = self._sentence(x, exported.sentence)
                width = sentence_encoder(exported.sentence).width(self.model)
                self.output("sentence_embedding", vector, ROWS, width)
            return
        head = self.model.heads[kind]
        [outputs] = [head.outputs for head in self.model.specification if head.kind == kind]
        count = config.vocab if outputs is None else outputs
        match kind:
            case "span":
                logits = self.split(self._rows(head, x), 1, 1)
                for name, value in zip(("start_logits", "end_logits"), logits, strict=True):
                    self.output(name, self.op("Squeeze", value, (-1,)), ROWS, LENGTH)
            case "choice":
                scores = self._rows(head, self._pooled(head, x))
                shape = self.op("Shape", "input_ids", start=0, end=2)
                self.output("logits", self.op("Reshape", scores, shape), ROWS, "choices")
            case "labels" | "pair":
                scores = self._rows(head, self._pooled(head, x))
                self.output("logits", scores, ROWS, count)
            case "replaced":
                scores = self.op("Squeeze", self._rows(head, x), (-1,))
                self.output("logits", scores, ROWS, LENGTH)
            case "masked" | "causal" | "tags":
                if kind == "masked" and self.model.config.readout.shifted:
                    message = "its masked LM head predicts a token from the vector before it"
                    fix = "Programs that read graphs do not expect it: export the encoder alone."
                    raise FolderError(message, fix=fix)
                if isinstance(head, head_modules.MaskedOutput) and head.position is not None:
                    x = self.decode(layers[-2], head.position.weight)
                self.output("logits", self._rows(head, x), ROWS, LENGTH, count)
            case _:
                assert_never(kind)

    def _rows(self, head: nn.Module, x: str) -> str:
        """Apply a head to vectors of tokens, or to pooled ones."""
        match head:
            case head_modules.LinearOutput(dense=dense):
                return self.dense(x, dense)
            case head_modules.OwnOutput():
                if head.reads != "late":
                    x = self.activate(head.activation, self.dense(x, head.inner))
                return self.dense(self.norm(x, head.norm), head.dense)
            case head_modules.DeepOutput():
                inner = self.activate(head.activation, self.dense(x, head.up))
                x = self.op("Add", x, self.dense(inner, head.down))
                return self.dense(self.norm(x, head.norm), head.dense)
            case head_modules.ReplacedOutput():
                if head.norm is not None:  # of the sum with the first token's vector
                    x = self.norm(self.op("Add", x, self.slice(x, 0, 1, 1)), head.norm)
                x = self.activate(head.activation, self.dense(x, head.inner))
                return self.dense(x, head.dense)
            case head_modules.MaskedOutput():
                if head.activation is not None:
                    x = self.activate(head.activation, self.dense(x, head.dense))
                x = self._tokens(self.norm(x, head.norm), head.output)
                return x if head.bias is None else self.op("Add", x, self.weight(head.bias))
            case head_modules.NextTokenOutput():
                return self._tokens(x, head.output)
            case _:
                raise AssertionError(f"no graph for {type(head).__name__}")

    def _tokens(self, x: str, matrix: nn.Linear | None) -> str:
        """Multiply by the token embedding, which is stored once, or by the head's own matrix."""
        if matrix is not None:
            return self.dense(x, matrix)
        table = self.weight(self.encoder.embedding.token.weight)
        return self.op("MatMul", x, self.op("Transpose", table, perm=(1, 0)))

    def _pooled(self, head: nn.Module, x: str) -> str:
        """Return the vector that a head of sequences reads `(rows, width)`."""
        if isinstance(head, head_modules.OwnOutput):
            if head.reads == "late":
                return self._mean(self.activate(head.activation, self.dense(x, head.inner)))
            return self._mean(x) if head.reads == "mean" else self._representative(x)
        if isinstance(head, head_modules.VectorOutput):
            return self._unit(self._mean(x) if head.reads == "mean" else self._representative(x))
        pooler = self.model.heads["pooler"]
        assert isinstance(pooler, head_modules.Pooler)
        return self.op("Tanh", self.dense(self._representative(x), pooler.dense))

    def _representative(self, x: str) -> str:
        """Return the vector of the first token, or in a causal encoder of the last one."""
        return self._pool(x, "lasttoken" if self.config.is_causal else "cls")

    def _lengths(self) -> str:
        return self.op("ReduceSum", self.mask, (1,), keepdims=1)

    def _mean(self, x: str) -> str:
        """Return the mean of the tokens of each row; zeros for a row of padding."""
        keep = self.unsqueeze(self.op("Cast", self.mask, to=1), 2)
        total = self.op("ReduceSum", self.op("Mul", x, keep), (1,), keepdims=0)
        count = self.op("Max", self.op("Cast", self._lengths(), to=1), 1.0)
        return self.op("Div", total, count)

    def _unit(self, x: str) -> str:
        """Return vectors scaled to length 1."""
        norm = self.op("ReduceL2", x, axes=(-1,), keepdims=1)
        return self.op("Div", x, self.op("Max", norm, 1e-12))

    def _pool(self, x: str, pooling: Pooling) -> str:
        """Return the pooled vector of each row."""
        match pooling:
            case "cls":
                return self.op("Squeeze", self.slice(x, 0, 1, 1), (1,))
            case "lasttoken":
                end = self.op("Sub", self._lengths(), 1)  # (rows, 1)
                return self.op("GatherND", x, end, batch_dims=1)
            case "mean":
                return self._mean(x)
            case "max":
                keep = self.unsqueeze(self.op("Cast", self.mask, to=9), 2)
                masked = self.op("Where", keep, x, encoder_graph.LOWEST)
                return self.op("ReduceMax", masked, axes=(1,), keepdims=0)
            case "mean_sqrt_len_tokens":
                count = self.op("Max", self.op("Cast", self._lengths(), to=1), 1.0)
                return self.op("Mul", self._mean(x), self.op("Sqrt", count))
            case "weightedmean":
                # Tokens from 1 on; the padding after them counts on and is masked.
                mask = self.op("Cast", self.mask, to=1)
                counts = self.op("CumSum", mask, 1)
                weights = self.op("Mul", counts, mask)  # (rows, length)
                keep = self.unsqueeze(weights, 2)
                total = self.op("ReduceSum", self.op("Mul", x, keep), (1,), keepdims=0)
                weight = self.op("ReduceSum", weights, (1,), keepdims=1)
                return self.op("Div", total, self.op("Max", weight, 1.0))
            case _:
                assert_never(pooling)

    def _sentence(self, x: str, config: SentenceEncoderConfig) -> str:
        """Return the vector of each row, as `tasks.sentence_embedding` computes it."""
        modes = (config.pooling,) if isinstance(config.pooling, str) else config.pooling
        pooled = [self._pool(x, mode) for mode in modes]
        x = pooled[0] if len(pooled) == 1 else self.op("Concat", *pooled, axis=-1)
        if (projection := projection_of(self.model)) is not None:
            for layer, activation in zip(projection.layers, projection.activations, strict=True):
                x = self.dense(x, layer)
                x = x if activation is None else self.activate(activation, x)
        if config.normalised:
            x = self._unit(x)
        if config.components is not None:
            x = self.slice(x, 0, config.components, 1)
        return x
