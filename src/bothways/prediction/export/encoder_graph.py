"""The encoder as a padded ONNX graph `(rows, length, width)`.

One graph serves every batch size and length: positions, masks and relative distances are computed
from the shape of the input. Attention is dense, with a mask for padding and the layer's pattern;
block-sparse patterns are spelled as masks, so their cost is quadratic in the length. Sequences are
padded on the right.

What depends on positions alone is a constant computed by the model's own code: rotary angles,
sinusoids, and the row of each relative distance. No logarithm, sine or power is left to a runtime.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways._version import __version__
from bothways.core.errors import optional
from bothways.hub.sentence_transformers import SentenceEncoderConfig
from bothways.model.attention.mask import RotaryTables
from bothways.model.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.model.block import Attention, Block, FeedForward, GroupedProjection
from bothways.model.embedding import (
    LearnedPositions,
    NgramConvolution,
    SinusoidalPositions,
    bucket_of,
    row_of,
    sinusoids,
)
from bothways.model.model import Model
from bothways.model.positions import Disentangled, Learned, Rotary
from bothways.prediction.session_model import HEAD

with optional("export", "exporting a model"):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 17, 8
"""The first opset with LayerNormalization, which runtimes since 2022 read."""
ROWS, LENGTH = "batch", "sequence"
"""The names of the axes that may have any length."""
LOWEST = float(np.finfo(np.float32).min)
"""Bias for the score of a hidden key. Finite: a row of −∞ would give NaN."""
Input = str | float | tuple[int, ...]
"""A value by its name, or a constant: a float in fp32, an int or a vector of ints in int64."""


@dataclass(frozen=True)
class Separators:
    """The separator token, and how many of them stand between the two texts of a pair."""

    id: int
    between: int


HeadKind = Literal[
    "none", "masked", "causal", "tags", "replaced", "labels", "pair", "choice", "span"
]
"""Kind of head at the end of a graph; "none" for the vectors of tokens."""
WITH_GLOBAL_TOKENS = ("labels", "span", "choice")
"""Heads for which tasks mark global tokens of a Longformer: the first; the question, before the
first separator; the ending, after the separators in the middle."""


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


class EncoderGraph:
    """A graph that computes an encoder's vectors.

    It grows by one node with each call of `op`; values are referred to by name.

    Args:
        model: its weights are read.

    Attributes:
        scope: the prefix of the names of new nodes, such as "layers.0.attention".
        inputs: the names of the axes of each input.
        ids, mask, segments: the inputs `(rows, length)`; `segments` is None for a family that has
            fewer than two.
        length: the number of tokens in a row, as a vector of one number.
        keep: True where there is a token, `(rows, 1, 1, length)`.
    """

    def __init__(self, model: Model, exported: ExportedPart) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._nodes: list[onnx.NodeProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._numbers: dict[object, str] = {}  # names of constants by their content
        self.scope = ""
        self.model, self.encoder, self.config, op = model, model.encoder, model.config, self.op
        self.exported, choices = exported, exported.head == "choice"
        rows = ["input_ids", "attention_mask"]
        rows += ["token_type_ids"] if model.config.segments > 1 else []
        self.inputs = dict.fromkeys(rows, (ROWS, "choices", LENGTH) if choices else (ROWS, LENGTH))
        if choices:
            # (questions, choices, length) → (questions · choices, length): a row for each choice.
            shape = op("Concat", (-1,), op("Shape", "input_ids", start=2), axis=0)
            rows = [op("Reshape", name, shape) for name in rows]
        self.ids, self.mask = rows[:2]
        self.segments = rows[2] if len(rows) > 2 else None
        self._masks: dict[Pattern, str] = {}
        self._rotary: dict[float, tuple[str, str]] = {}
        self.length = op("Shape", self.ids, start=1, end=2)
        self.keep = self.unsqueeze(op("Cast", self.mask, to=9), 1, 2)
        end = op("Squeeze", self.length, (0,))
        self.places = op("Range", 0, end, 1)
        self.global_tokens = self._global_tokens() if self.config.has_global_attention else None
        self._relative = self._relative_rows()
        self._score_bias = self._distance_bias()

    def op(self, kind: str, *inputs: Input, **attributes: Any) -> str:
        """Append a node with one output; return the name of the output."""
        return self._append(kind, inputs, 1, **attributes)[0]

    def split(self, x: str, *sizes: int) -> list[str]:
        """Divide the last axis into slices of these sizes; return their names."""
        return self._append("Split", (x, sizes), len(sizes), axis=-1)

    def _append(
        self, kind: str, inputs: Sequence[Input], count: int, **attributes: Any
    ) -> list[str]:
        names = list[str]()
        for value in inputs:
            if isinstance(value, str):
                names.append(value)
                continue
            array = np.array(value, np.float32 if isinstance(value, float) else np.int64)
            key = (array.dtype.str, array.shape, array.tobytes())
            constant = self._numbers.setdefault(key, f"constant_{len(self._constants)}")
            names.append(self.array(constant, array))
        name = f"{self.scope}/{kind}_{len(self._nodes)}"
        outputs = [name if count == 1 else f"{name}:{at}" for at in range(count)]
        self._nodes.append(helper.make_node(kind, names, outputs, name, **attributes))
        return outputs

    def output(self, name: str, value: str, *axes: str | int) -> None:
        """Make a value in fp32 an output of the graph; the names or the lengths of its axes."""
        self._nodes.append(helper.make_node("Identity", [value], [name], f"/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, axes))

    def weight(self, tensor: Tensor, *, transposed: bool = False) -> str:
        """Return the name of a parameter, or of its transpose."""
        name = self._names[id(tensor)] + (".T" if transposed else "")
        array = tensor.detach().numpy()
        return self.array(name, array.T if transposed else array)

    def array(self, name: str, values: NDArray[Any]) -> str:
        """Return the name of a constant array; arrays of one name must be equal."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(values, name)
        return name

    def slice(self, x: str, start: str | int, stop: str | int, axis: int) -> str:
        """Return the part `[start, stop)` of an axis; a value by name is a vector of one number."""
        bounds = [at if isinstance(at, str) else (at,) for at in (start, stop)]
        return self.op("Slice", x, *bounds, (axis,))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Insert axes of length 1."""
        return self.op("Unsqueeze", x, axes)

    def dense(self, x: str, layer: nn.Module) -> str:
        """Apply a dense layer to the last axis; an `nn.Identity` changes nothing."""
        if isinstance(layer, nn.Identity):
            return x
        assert isinstance(layer, nn.Linear)
        x = self.op("MatMul", x, self.weight(layer.weight, transposed=True))
        return x if layer.bias is None else self.op("Add", x, self.weight(layer.bias))

    def norm(self, x: str, layer: nn.Module) -> str:
        """Apply a LayerNorm or RMSNorm; an `nn.Identity` changes nothing."""
        if isinstance(layer, nn.RMSNorm):
            squares = self.op("ReduceMean", self.op("Mul", x, x), axes=(-1,), keepdims=1)
            root = self.op("Sqrt", self.op("Add", squares, layer.eps or 0.0))
            return self.op("Mul", self.op("Div", x, root), self.weight(layer.weight))
        if not isinstance(layer, nn.LayerNorm):
            return x
        weights = [self.weight(value) for value in (layer.weight, layer.bias) if value is not None]
        return self.op("LayerNormalization", x, *weights, axis=-1, epsilon=layer.eps)

    def activate(self, name: str, x: str) -> str:
        """Apply an activation of `model.config.Activation`; GELU is spelled as runtimes fuse it."""
        match name:
            case "tanh" | "relu":
                return self.op(name.capitalize(), x)
            case "silu":
                return self.op("Mul", x, self.op("Sigmoid", x))
            # x / 2 · (1 + erf(x / √2)), in the order of nodes that runtimes recognise.
            case "gelu":
                inner = self.op("Erf", self.op("Div", x, 2**0.5))
                product = self.op("Mul", x, self.op("Add", inner, 1.0))
                return self.op("Mul", product, 0.5)
            # x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 x³))).
            case "gelu_tanh":
                cube = self.op("Mul", self.op("Mul", self.op("Mul", x, x), x), 0.044715)
                inner = self.op("Mul", self.op("Add", x, cube), (2 / np.pi) ** 0.5)
                product = self.op("Mul", x, self.op("Add", self.op("Tanh", inner), 1.0))
                return self.op("Mul", product, 0.5)
            case _:
                raise AssertionError(f"no activation {name}")

    def finish(self) -> onnx.ModelProto:
        """Return the model, with inputs in int64, and the kind of its head as a note."""
        axes, constants = self.inputs.items(), [*self._constants.values()]
        inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, a) for n, a in axes]
        graph = helper.make_graph(self._nodes, "bothways", inputs, self._outputs, constants)
        versions = {"opset_imports": [helper.make_opsetid("", OPSET)], "ir_version": IR_VERSION}
        producer = {"producer_name": "bothways", "producer_version": __version__}
        model = helper.make_model(graph, **versions, **producer)
        helper.set_model_props(model, {HEAD: self.exported.head})
        return model

    def layers(self) -> list[str]:
        """Return the embeddings and the output of each block, the last one normed."""
        x = self._embed()
        result = [x]
        for layer in range(self.config.depth):
            for number, block in enumerate(self.encoder.layer(layer)):
                assert isinstance(block, Block)
                self.scope = f"/layers.{layer}.{number}"
                x = self.block(block, x, layer)
                result.append(x)
            if layer == 0 and self.encoder.convolution is not None:
                self.scope = "/convolution"
                x = result[-1] = self._convolve(self.encoder.convolution, result[0], x)
        self.scope = "/norm"
        return [*result[:-1], self.norm(x, self.encoder.norm)]

    def decode(self, hidden: str, positions: Tensor) -> str:
        """Apply the last block twice with other queries, see `Encoder.decode`."""
        layer = self.config.depth - 1
        block = self.encoder.layer(layer)[-1]
        assert isinstance(block, Block)
        queries = self.op("Add", hidden, self._first_rows(self.weight(positions)))
        for _ in range(2):
            queries = self.block(block, hidden, layer, queries)
        return self.norm(queries, self.encoder.norm)

    def block(self, block: Block, x: str, layer: int, queries: str | None = None) -> str:
        """Apply a block, see `Block.forward`."""
        start = x if queries is None else queries
        if block.normed_after:
            heads = self._attend(block.attention, x, start, layer)
            x = self.op("Add", start, self.dense(heads, block.attention.out))
            x = self.norm(x, block.attention_norm)
            return self.norm(self.op("Add", x, self._feed(block.mlp, x)), block.mlp_norm)
        normed = self.norm(x, block.attention_norm)
        reading = normed if queries is None else self.norm(queries, block.attention_norm)
        heads = self._attend(block.attention, normed, reading, layer)
        x = self.op("Add", start, self.dense(heads, block.attention.out))
        return self.op("Add", x, self._feed(block.mlp, self.norm(x, block.mlp_norm)))

    def _feed(self, mlp: FeedForward, x: str) -> str:
        x = self.dense(x, mlp.up)
        if not mlp.gated:
            return self.dense(self.activate(mlp.activation, x), mlp.down)
        inner = self.config.intermediate_size
        hidden, gate = self.split(x, inner, inner)
        x = self.op("Mul", self.activate(mlp.activation, hidden), gate)
        return self.dense(x, mlp.down)

    def _embed(self) -> str:
        embedding = self.encoder.embedding
        self.scope = "/embedding"
        x = self.op("Gather", self.weight(embedding.token.weight), self.ids)
        if embedding.scale != 1.0:
            x = self.op("Mul", x, embedding.scale)
        match embedding.position:
            case LearnedPositions(offset=offset) as table:
                rows = self.weight(table.weight)
                stop = self.op("Add", self.length, (offset,))
                x = self.op("Add", x, self.slice(rows, offset, stop, 0))
            case SinusoidalPositions(width=width, interleaved=interleaved):
                positions = torch.arange(self.config.max_positions)
                rows = self.array("sinusoids", sinusoids(positions, width, interleaved).numpy())
                x = self.op("Add", x, self._first_rows(rows))
        if embedding.segment is not None:
            # One row is the same for all tokens, and no input.
            at = 0 if self.segments is None else self.segments
            x = self.op("Add", x, self.op("Gather", self.weight(embedding.segment.weight), at))
        if embedding.task is not None:
            tasks = self.weight(embedding.task.weight)
            x = self.op("Add", x, self.op("Gather", tasks, 0))
        if embedding.late:
            return self.norm(self.dense(x, embedding.project), embedding.norm)
        return self.dense(self.norm(x, embedding.norm), embedding.project)

    def _first_rows(self, table: str) -> str:
        """Return the rows of a table for the positions of the input."""
        return self.slice(table, 0, self.length, 0)

    def _convolve(self, module: NgramConvolution, embeddings: str, x: str) -> str:
        conv = module.conv
        keep = self.unsqueeze(self.op("Cast", self.mask, to=1), 2)
        padded = self.op("Transpose", self.op("Mul", embeddings, keep), perm=(0, 2, 1))
        half = conv.kernel_size[0] // 2
        assert conv.bias is not None
        weights = self.weight(conv.weight), self.weight(conv.bias)
        y = self.op("Conv", padded, *weights, group=conv.groups, pads=(half, half))
        y = self.activate(module.activation, self.op("Transpose", y, perm=(0, 2, 1)))
        return self.norm(self.op("Add", x, y), module.norm)

    # Attention

    def _attend(self, module: Attention, x: str, queries: str, layer: int) -> str:
        """Return the heads' outputs, concatenated; `x` is what they attend to."""
        config = self.config
        pattern, base = config.pattern(layer), config.base(layer)
        q, k, v = self._split_heads(self._qkv(module, x))
        if queries != x:
            q = self._split_heads(self._qkv(module, queries))[0]
        if base is not None:
            q, k = self._rotate(q, base), self._rotate(k, base)
        count = 1 + len(module.terms)
        scale = (config.width // config.heads * count) ** -0.5
        q = self.op("Mul", q, scale)
        added = self._position_scores(module, q, k, scale)
        result = self._product(q, k, v, [*added, self._bias(pattern)])
        if self.global_tokens is not None and module.global_qkv is not None:
            # Rows of tokens that are not global are arbitrary; a single global one is repeated.
            global_q, global_k, global_v = self._split_heads(self.dense(x, module.global_qkv))
            if self.exported.head == "labels":
                global_q = self.slice(global_q, 0, 1, 2)
            global_q = self.op("Mul", global_q, scale)
            global_result = self._product(global_q, global_k, global_v, [self._bias(Full())])
            is_global = self.unsqueeze(self.global_tokens, 1, 3)  # (rows, 1, length, 1)
            result = self.op("Where", is_global, global_result, result)
        joined = self.op("Transpose", result, perm=(0, 2, 1, 3))
        return self.op("Reshape", joined, (0, 0, config.width))

    def _qkv(self, module: Attention, x: str) -> str:
        if isinstance(module.qkv, GroupedProjection):
            # Keys and values of a group are repeated for its heads.
            projection, size = module.qkv, module.qkv.size
            projected = self.dense(x, projection.key_value)  # (rows, length, 2 · groups · size)
            apart = self.op("Reshape", projected, (0, 0, 2 * projection.groups, size))
            # The group of each head: those of keys, then those of values.
            numbers = torch.arange(2 * projection.groups).repeat_interleave(projection.repeats)
            groups = self.array(f"groups_{projection.groups}", numbers.numpy())
            repeated = self.op("Gather", apart, groups, axis=2)
            joined = self.op("Reshape", repeated, (0, 0, 2 * self.config.heads * size))
            return self.op("Concat", self.dense(x, projection.query), joined, axis=-1)
        x = self.dense(x, module.qkv)
        if module.bias is None:
            return x
        query, value = module.bias.detach().chunk(2)
        name = f"{self.scope}.qkv.bias"
        bias = torch.cat([query, torch.zeros_like(query), value])
        return self.op("Add", x, self.array(name, bias.numpy()))

    def _split_heads(self, x: str) -> tuple[str, str, str]:
        """Return queries, keys and values `(rows, heads, length, d)`."""
        width, heads = self.config.width, self.config.heads
        tensors = self.split(x, width, width, width)
        shape = (0, 0, heads, width // heads)
        q, k, v = (
            self.op("Transpose", self.op("Reshape", tensor, shape), perm=(0, 2, 1, 3))
            for tensor in tensors
        )
        return q, k, v

    def _product(self, q: str, k: str, v: str, added: list[str]) -> str:
        """Return softmax(q kᵀ + added) v; queries are scaled."""
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=(0, 1, 3, 2)))
        for term in added:
            scores = self.op("Add", scores, term)
        return self.op("MatMul", self.op("Softmax", scores, axis=-1), v)

    def _rotate(self, x: str, base: float) -> str:
        """Rotate queries or keys, see `RotaryTables`."""
        pairs = self.config.width // self.config.heads // 2
        if base not in self._rotary:
            positions, position = torch.arange(self.config.max_positions), self.config.position
            factor = position.factor if isinstance(position, Rotary) else 1.0
            tables = RotaryTables.of(positions, 2 * pairs, base, factor)
            names = (f"rotary_{base}.{name}" for name in ("cos", "sin"))
            cos, sin = (
                self._first_rows(self.array(name, table.flatten(1).numpy()))
                for name, table in zip(names, (tables.cos, tables.sin), strict=True)
            )
            self._rotary[base] = cos, sin
        cos, sin = self._rotary[base]
        # (a, b) → (a cos − b sin, b cos + a sin), with a and b the halves of a head's vector.
        half, second = self.split(x, pairs, pairs)
        turned = (
            self.op("Sub", self.op("Mul", half, cos), self.op("Mul", second, sin)),
            self.op("Add", self.op("Mul", second, cos), self.op("Mul", half, sin)),
        )
        return self.op("Concat", *turned, axis=-1)

    # Masks

    def _global_tokens(self) -> str | None:
        """Return True for global tokens `(rows, length)`; None where there are none."""
        head, separators = self.exported.head, self.exported.separators
        self.scope = "/global_tokens"
        if head not in WITH_GLOBAL_TOKENS:
            return None
        keep = self.op("Cast", self.mask, to=9)
        if head == "labels":
            is_first = self.op("Less", self.places, 1)
            return self.op("And", self.unsqueeze(is_first, 0), keep)
        assert separators is not None
        is_separator = self.op("Equal", self.ids, separators.id)
        # ArgMax is the first place of the largest value: the first separator.
        at = self.op("ArgMax", self.op("Cast", is_separator, to=7), axis=1, keepdims=1)
        if head == "span":
            return self.op("Less", self.places, at)
        begin = self.op("Add", at, separators.between)
        is_ending = self.op("GreaterOrEqual", self.places, begin)
        return self.op("And", is_ending, keep)

    def _bias(self, pattern: Pattern) -> str:
        """Build the bias of attention scores: 0 where a query attends to a key; computed once."""
        if pattern not in self._masks:
            scope = self.scope
            self.scope = "/mask"
            if isinstance(pattern, Blocks):
                self._masks[pattern] = self._block_bias(pattern)
            else:
                self._masks[pattern] = self.op("Where", self._seen(pattern), 0.0, LOWEST)
            self.scope = scope
        return self._masks[pattern]

    def _seen(self, pattern: Full | Window | Causal) -> str:
        """Return True where a query attends to a key: `(rows, 1, queries or 1, keys)`."""
        op = self.op
        query = self.unsqueeze(self.places, 1)
        match pattern:
            case Full():
                return self.keep
            case Window(radius):
                far = op("Abs", op("Sub", query, self.places))
                near = op("LessOrEqual", far, radius)
                if self.global_tokens is not None:
                    near = op("Or", near, self.unsqueeze(self.global_tokens, 1, 2))
            case Causal():
                near = op("GreaterOrEqual", query, self.places)
            case _:
                assert_never(pattern)
        return op("And", near, self.keep)

    def _block_bias(self, pattern: Blocks) -> str:
        """Return the bias of BigBird in evaluation, which reads block 0 for each random block.

        A key that is read n times has the weight n in the softmax, which is log n on its score.
        """
        op, size = self.op, pattern.size
        lengths = self.unsqueeze(op("ReduceSum", self.mask, (1,)), 2, 3)
        end_block = op("Div", op("Sub", lengths, 1), size)  # (rows, 1, 1, 1)
        key = op("Div", self.places, size)
        query = self.unsqueeze(key, 1)
        ends = [op("Or", op("Equal", x, 0), op("Equal", x, end_block)) for x in (query, key)]
        near = op("LessOrEqual", op("Abs", op("Sub", query, key)), 1)
        short = op("LessOrEqual", lengths, pattern.dense)
        dense_rows = op("Or", short, ends[0])  # rows of queries that attend to all
        visible = op("And", op("Or", op("Or", near, ends[1]), dense_rows), self.keep)
        repeated = op("And", op("Equal", key, 0), op("Not", dense_rows))
        often = op("Where", repeated, math.log(1 + pattern.random), 0.0)
        return op("Where", visible, often, LOWEST)

    # Relative positions

    def _relative_rows(self) -> tuple[str, str] | None:
        """Return the rows of the table for falling and for rising distances query − key.

        Falling from length − 1, and rising from 1 − length, each with 2 · length rows: the last one
        is a filler, see `_diagonals`.
        """
        position = self.config.position
        if not isinstance(position, Disentangled):
            return None
        self.scope = "/relative"
        max_positions = position.max_positions
        # The tables are for the longest sequence; the middle 2 · length rows are those of this one.
        start = self.op("Sub", (max_positions,), self.length)
        stop = self.op("Add", (max_positions,), self.length)
        falling = row_of(position, torch.arange(max_positions - 1, -max_positions - 1, -1)).numpy()
        rising = row_of(position, torch.arange(1 - max_positions, max_positions + 1)).numpy()
        return (
            self.slice(self.array("falling_distances", falling), start, stop, 0),
            self.slice(self.array("rising_distances", rising), start, stop, 0),
        )

    def _distance_bias(self) -> str | None:
        """Return the bias of distances `(1, heads, length, length)`; None without one."""
        op, position = self.op, self.config.position
        relative = self.encoder.relative
        if not isinstance(position, Learned) or position.bias is None:
            return None
        assert relative is not None
        self.scope, max_positions = "/relative", position.max_positions
        buckets = bucket_of(position.bias, torch.arange(1 - max_positions, max_positions)).numpy()
        query = self.unsqueeze(self.places, 1)
        distances = op("Add", op("Sub", query, self.places), max_positions - 1)
        rows = op("Gather", self.array("buckets", buckets), distances)
        values = op("Gather", self.weight(relative.table.weight), rows)  # (length, length, heads)
        return self.unsqueeze(op("Transpose", values, perm=(2, 0, 1)), 0)

    def _position_scores(self, module: Attention, q: str, k: str, scale: float) -> list[str]:
        """Build the terms that relative positions add to the scores of scaled queries."""
        relative = self.encoder.relative
        if self._score_bias is not None:
            return [self._score_bias]
        if self._relative is None or relative is None:
            return []
        falling, rising = self._relative
        table = self.norm(self.weight(relative.table.weight), relative.norm)
        # Keys and queries of relative positions `(rows, width)`, constant in the graph.
        if module.position_key is None and module.position_query is None:
            width, terms = self.config.width, module.terms
            all_queries, all_keys, _ = self.split(self._qkv(module, table), width, width, width)
            keys = all_keys if "c2p" in terms else None
            queries = all_queries if "p2c" in terms else None
        else:
            keys, queries = (
                None if layer is None else self.dense(table, layer)
                for layer in (module.position_key, module.position_query)
            )
        result = []
        if keys is not None:
            result.append(self._diagonals(q, self.op("Gather", keys, falling)))
        if queries is not None:
            scaled = self.op("Mul", self.op("Gather", queries, rising), scale)
            turned = self._diagonals(k, scaled)  # keys by queries
            result.append(self.op("Transpose", turned, perm=(0, 1, 3, 2)))
        return result

    def _diagonals(self, x: str, vectors: str) -> str:
        """Return the product of token i with the vector n − 1 − i + j at (i, j).

        Args:
            x: vectors of n tokens `(rows, heads, n, d)`.
            vectors: `(2n, width)`.

        The products `(n, 2n)` of all tokens and vectors are read again in rows of 2n − 1 numbers,
        from the number n − 1 on: each row begins one place further left. See
        `attention.relative.along_diagonals`.
        """
        op = self.op
        heads = self.config.heads
        apart = op("Reshape", vectors, (0, heads, self.config.width // heads))
        products = op("MatMul", x, op("Transpose", apart, perm=(1, 2, 0)))
        flat = op("Reshape", products, (0, 0, -1))
        start = op("Sub", self.length, (1,))
        row = op("Add", self.length, start)  # 2n − 1
        stop = op("Add", start, op("Mul", self.length, row))
        diagonal = self.slice(flat, start, stop, 2)
        shape = op("Concat", (0, 0), self.length, row, axis=0)
        return self.slice(op("Reshape", diagonal, shape), 0, self.length, 3)
