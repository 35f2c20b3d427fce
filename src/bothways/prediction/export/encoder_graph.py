"""The encoder as a padded graph `(rows, length, width)`, from the modules of an `Encoder`.

One graph serves every batch size and length: positions, masks and relative distances are computed
from the shape of the input. Attention is dense, with a mask for padding and the layer's pattern;
block-sparse patterns are spelled as masks, so their cost is quadratic in the length. Sequences are
padded on the right.

What depends on positions alone is a constant computed by the model's own code: rotary angles,
sinusoids, and the row of each relative distance. No logarithm, sine or power is left to a runtime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import assert_never

from bothways.model.attention.mask import RotaryTables
from bothways.model.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.model.block import Attention, Block, FeedForward, GroupedProjection
from bothways.model.embedding import (
    LearnedPositions,
    NgramConvolution,
    ScoreBias,
    SinusoidalPositions,
    bucket_of,
    row_of,
    sinusoids,
)
from bothways.model.model import Encoder
from bothways.model.positions import Disentangled, DistanceBias, Learned, Rotary
from bothways.prediction.export.builder import LOWEST, GraphBuilder

GlobalRule = Literal["none", "first", "question", "ending"]
"""The global tokens of a Longformer: none, the first, those before the first separator, or those
after the separators in the middle."""


@dataclass(frozen=True)
class Separators:
    """The separator token, and how many of them stand between the two texts of a pair."""

    id: int
    between: int


class EncoderGraph:
    """The part of a graph that computes an encoder's vectors.

    Args:
        graph: gets the nodes.
        encoder: its weights are read.
        rule: which tokens are global, for a model that has these.
        separators: needed by the rules "question" and "ending".

    Attributes:
        ids, mask, segments: the inputs `(rows, length)`; `segments` is None for a family that has
            fewer than two.
        length: the number of tokens in a row, as a vector of one number.
        keep: True where there is a token, `(rows, 1, 1, length)`.
    """

    def __init__(
        self,
        graph: GraphBuilder,
        encoder: Encoder,
        inputs: tuple[str, str, str | None],
        rule: GlobalRule = "none",
        separators: Separators | None = None,
    ) -> None:
        self.graph, self.encoder, self.config = graph, encoder, encoder.config
        self.ids, self.mask, self.segments = inputs
        self._masks: dict[Pattern, str] = {}
        self._rotary: dict[float, tuple[str, str]] = {}
        op = graph.op
        self.length = op("Shape", self.ids, start=1, end=2)
        self.keep = graph.unsqueeze(op("Cast", self.mask, to=9), 1, 2)
        end = op("Squeeze", self.length, (0,))
        self.places = op("Range", 0, end, 1)
        self.separators, self.rule = separators, rule
        self.global_tokens = self._global_tokens() if self.config.has_global_attention else None
        self._relative = self._relative_rows()
        self._score_bias = self._distance_bias()

    def layers(self) -> list[str]:
        """Return the embeddings and the output of each block, the last one normed."""
        x = self._embed()
        result = [x]
        for layer in range(self.config.depth):
            for number, block in enumerate(self.encoder.layer(layer)):
                assert isinstance(block, Block)
                self.graph.scope = f"/layers.{layer}.{number}"
                x = self.block(block, x, layer)
                result.append(x)
            if layer == 0 and self.encoder.convolution is not None:
                self.graph.scope = "/convolution"
                x = result[-1] = self._convolve(self.encoder.convolution, result[0], x)
        self.graph.scope = "/norm"
        return [*result[:-1], self.graph.norm(x, self.encoder.norm)]

    def decode(self, hidden: str, positions: Tensor) -> str:
        """Apply the last block twice with other queries, see `Encoder.decode`."""
        layer = self.config.depth - 1
        block = self.encoder.layer(layer)[-1]
        assert isinstance(block, Block)
        queries = self.graph.op("Add", hidden, self._first_rows(self.graph.weight(positions)))
        for _ in range(2):
            queries = self.block(block, hidden, layer, queries)
        return self.graph.norm(queries, self.encoder.norm)

    def block(self, block: Block, x: str, layer: int, queries: str | None = None) -> str:
        """Apply a block, see `Block.forward`."""
        graph, start = self.graph, x if queries is None else queries
        if block.normed_after:
            heads = self._attend(block.attention, x, start, layer)
            x = graph.op("Add", start, graph.dense(heads, block.attention.out))
            x = graph.norm(x, block.attention_norm)
            return graph.norm(graph.op("Add", x, self._feed(block.mlp, x)), block.mlp_norm)
        normed = graph.norm(x, block.attention_norm)
        reading = normed if queries is None else graph.norm(queries, block.attention_norm)
        heads = self._attend(block.attention, normed, reading, layer)
        x = graph.op("Add", start, graph.dense(heads, block.attention.out))
        return graph.op("Add", x, self._feed(block.mlp, graph.norm(x, block.mlp_norm)))

    def _feed(self, mlp: FeedForward, x: str) -> str:
        graph = self.graph
        x = graph.dense(x, mlp.up)
        if not mlp.gated:
            return graph.dense(graph.activate(mlp.activation, x), mlp.down)
        inner = self.config.intermediate_size
        hidden, gate = graph.split(x, inner, inner)
        x = graph.op("Mul", graph.activate(mlp.activation, hidden), gate)
        return graph.dense(x, mlp.down)

    def _embed(self) -> str:
        graph, embedding = self.graph, self.encoder.embedding
        graph.scope = "/embedding"
        x = graph.op("Gather", graph.weight(embedding.token.weight), self.ids)
        if embedding.scale != 1.0:
            x = graph.op("Mul", x, embedding.scale)
        match embedding.position:
            case LearnedPositions(offset=offset) as table:
                rows = graph.weight(table.weight)
                stop = graph.op("Add", self.length, (offset,))
                x = graph.op("Add", x, graph.slice(rows, offset, stop, 0))
            case SinusoidalPositions(width=width, interleaved=interleaved):
                positions = torch.arange(self.config.max_positions)
                rows = graph.array("sinusoids", sinusoids(positions, width, interleaved).numpy())
                x = graph.op("Add", x, self._first_rows(rows))
        if embedding.segment is not None:
            # One row is the same for all tokens, and no input.
            at = 0 if self.segments is None else self.segments
            x = graph.op("Add", x, graph.op("Gather", graph.weight(embedding.segment.weight), at))
        if embedding.task is not None:
            tasks = graph.weight(embedding.task.weight)
            x = graph.op("Add", x, graph.op("Gather", tasks, 0))
        if embedding.late:
            return graph.norm(self._project(x), embedding.norm)
        return self._project(graph.norm(x, embedding.norm))

    def _project(self, x: str) -> str:
        layer = self.encoder.embedding.project
        return self.graph.dense(x, layer) if isinstance(layer, torch.nn.Linear) else x

    def _first_rows(self, table: str) -> str:
        """Return the rows of a table for the positions of the input."""
        return self.graph.slice(table, 0, self.length, 0)

    def _convolve(self, module: NgramConvolution, embeddings: str, x: str) -> str:
        graph, conv = self.graph, module.conv
        keep = graph.unsqueeze(graph.op("Cast", self.mask, to=1), 2)
        padded = graph.op("Transpose", graph.op("Mul", embeddings, keep), perm=(0, 2, 1))
        half = conv.kernel_size[0] // 2
        assert conv.bias is not None
        weights = graph.weight(conv.weight), graph.weight(conv.bias)
        y = graph.op("Conv", padded, *weights, group=conv.groups, pads=(half, half))
        y = graph.activate(module.activation, graph.op("Transpose", y, perm=(0, 2, 1)))
        return graph.norm(graph.op("Add", x, y), module.norm)

    # Attention

    def _attend(self, module: Attention, x: str, queries: str, layer: int) -> str:
        """Return the heads' outputs, concatenated; `x` is what they attend to."""
        graph, config = self.graph, self.config
        pattern, base = config.pattern(layer), config.base(layer)
        q, k, v = self._split_heads(self._qkv(module, x))
        if queries != x:
            q = self._split_heads(self._qkv(module, queries))[0]
        if base is not None:
            q, k = self._rotate(q, base), self._rotate(k, base)
        count = 1 + len(module.terms)
        scale = (config.width // config.heads * count) ** -0.5
        q = graph.op("Mul", q, scale)
        added = self._position_scores(module, q, k, scale)
        result = self._product(q, k, v, [*added, self._bias(pattern)])
        if self.global_tokens is not None and module.global_qkv is not None:
            global_heads = self._split_heads(graph.dense(x, module.global_qkv))
            global_result = self._attend_from_global(*global_heads, scale)
            is_global = graph.unsqueeze(self.global_tokens, 1, 3)  # (rows, 1, length, 1)
            result = graph.op("Where", is_global, global_result, result)
        joined = graph.op("Transpose", result, perm=(0, 2, 1, 3))
        return graph.op("Reshape", joined, (0, 0, config.width))

    def _qkv(self, module: Attention, x: str) -> str:
        if isinstance(module.qkv, GroupedProjection):
            return self._grouped(module.qkv, x)
        x = self.graph.dense(x, module.qkv)
        if module.bias is None:
            return x
        query, value = module.bias.detach().chunk(2)
        name = f"{self.graph.scope}.qkv.bias"
        bias = torch.cat([query, torch.zeros_like(query), value])
        return self.graph.op("Add", x, self.graph.array(name, bias.numpy()))

    def _grouped(self, projection: GroupedProjection, x: str) -> str:
        """Return queries, keys and values, those of a group repeated for its heads."""
        graph, heads, size = self.graph, self.config.heads, projection.size
        projected = graph.dense(x, projection.key_value)  # (rows, length, 2 · groups · size)
        apart = graph.op("Reshape", projected, (0, 0, 2 * projection.groups, size))
        # The group of each head: those of keys, then those of values.
        numbers = torch.arange(2 * projection.groups).repeat_interleave(projection.repeats)
        name = f"groups_{projection.groups}"
        repeated = graph.op("Gather", apart, graph.array(name, numbers.numpy()), axis=2)
        joined = graph.op("Reshape", repeated, (0, 0, 2 * heads * size))
        return graph.op("Concat", graph.dense(x, projection.query), joined, axis=-1)

    def _split_heads(self, x: str) -> tuple[str, str, str]:
        """Return queries, keys and values `(rows, heads, length, d)`."""
        graph, width, heads = self.graph, self.config.width, self.config.heads
        tensors = graph.split(x, width, width, width)
        shape = (0, 0, heads, width // heads)
        q, k, v = (
            graph.op("Transpose", graph.op("Reshape", tensor, shape), perm=(0, 2, 1, 3))
            for tensor in tensors
        )
        return q, k, v

    def _product(self, q: str, k: str, v: str, added: list[str]) -> str:
        """Return softmax(q kᵀ + added) v; queries are scaled."""
        graph = self.graph
        scores = graph.op("MatMul", q, graph.op("Transpose", k, perm=(0, 1, 3, 2)))
        for term in added:
            scores = graph.op("Add", scores, term)
        return graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v)

    def _rotate(self, x: str, base: float) -> str:
        """Rotate queries or keys, see `RotaryTables`."""
        graph, pairs = self.graph, self.config.width // self.config.heads // 2
        if base not in self._rotary:
            positions, position = torch.arange(self.config.max_positions), self.config.position
            factor = position.factor if isinstance(position, Rotary) else 1.0
            tables = RotaryTables.of(positions, 2 * pairs, base, factor)
            names = (f"rotary_{base}.{name}" for name in ("cos", "sin"))
            cos, sin = (
                self._first_rows(graph.array(name, table.flatten(1).numpy()))
                for name, table in zip(names, (tables.cos, tables.sin), strict=True)
            )
            self._rotary[base] = cos, sin
        cos, sin = self._rotary[base]
        # (a, b) → (a cos − b sin, b cos + a sin), with a and b the halves of a head's vector.
        half, second = graph.split(x, pairs, pairs)
        turned = (
            graph.op("Sub", graph.op("Mul", half, cos), graph.op("Mul", second, sin)),
            graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", half, sin)),
        )
        return graph.op("Concat", *turned, axis=-1)

    def _attend_from_global(self, q: str, k: str, v: str, scale: float) -> str:
        """Compute the attention of global tokens to all tokens; other rows are arbitrary."""
        graph = self.graph
        if self.rule == "first":  # only its row is computed, and repeated
            q = graph.slice(q, 0, 1, 2)
        q = graph.op("Mul", q, scale)
        return self._product(q, k, v, [self._bias(Full())])

    # Masks

    def _global_tokens(self) -> str | None:
        """Return True for global tokens `(rows, length)`; None where there are none."""
        graph, rule = self.graph, self.rule
        graph.scope = "/global_tokens"
        if rule == "none":
            return None
        keep = graph.op("Cast", self.mask, to=9)
        if rule == "first":
            is_first = graph.op("Less", self.places, 1)
            return graph.op("And", graph.unsqueeze(is_first, 0), keep)
        assert self.separators is not None
        is_separator = graph.op("Equal", self.ids, self.separators.id)
        is_separator = graph.op("And", is_separator, keep)
        # ArgMax is the first place of the largest value: the first separator.
        at = graph.op("ArgMax", graph.op("Cast", is_separator, to=7), axis=1, keepdims=1)
        if rule == "question":
            return graph.op("Less", self.places, at)
        begin = graph.op("Add", at, self.separators.between)
        is_ending = graph.op("GreaterOrEqual", self.places, begin)
        return graph.op("And", is_ending, keep)

    def _bias(self, pattern: Pattern) -> str:
        """Build the bias of attention scores: 0 where a query attends to a key; computed once."""
        if pattern not in self._masks:
            graph, scope = self.graph, self.graph.scope
            graph.scope = "/mask"
            if isinstance(pattern, Blocks):
                self._masks[pattern] = self._block_bias(pattern)
            else:
                self._masks[pattern] = graph.op("Where", self._seen(pattern), 0.0, LOWEST)
            graph.scope = scope
        return self._masks[pattern]

    def _seen(self, pattern: Full | Window | Causal) -> str:
        """Return True where a query attends to a key: `(rows, 1, queries or 1, keys)`."""
        graph, op = self.graph, self.graph.op
        query = graph.unsqueeze(self.places, 1)
        match pattern:
            case Full():
                return self.keep
            case Window(radius):
                far = op("Abs", op("Sub", query, self.places))
                near = op("LessOrEqual", far, radius)
                if self.global_tokens is not None:
                    near = op("Or", near, graph.unsqueeze(self.global_tokens, 1, 2))
            case Causal():
                near = op("GreaterOrEqual", query, self.places)
            case _:
                assert_never(pattern)
        return op("And", near, self.keep)

    def _block_bias(self, pattern: Blocks) -> str:
        """Return the bias of BigBird in evaluation, which reads block 0 for each random block.

        A key that is read n times has the weight n in the softmax, which is log n on its score.
        """
        graph, op, size = self.graph, self.graph.op, pattern.size
        lengths = graph.unsqueeze(op("ReduceSum", self.mask, (1,)), 2, 3)
        end_block = op("Div", op("Sub", lengths, 1), size)  # (rows, 1, 1, 1)
        key = op("Div", self.places, size)
        query = graph.unsqueeze(key, 1)
        ends = [
            op("Or", op("Equal", block, 0), op("Equal", block, end_block)) for block in (query, key)
        ]
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
        position, graph = self.config.position, self.graph
        if not isinstance(position, Disentangled):
            return None
        graph.scope = "/relative"
        max_positions = position.max_positions
        # The tables are for the longest sequence; the middle 2 · length rows are those of this one.
        start = graph.op("Sub", (max_positions,), self.length)
        stop = graph.op("Add", (max_positions,), self.length)
        falling = row_of(position, torch.arange(max_positions - 1, -max_positions - 1, -1)).numpy()
        rising = row_of(position, torch.arange(1 - max_positions, max_positions + 1)).numpy()
        return (
            graph.slice(graph.array("falling_distances", falling), start, stop, 0),
            graph.slice(graph.array("rising_distances", rising), start, stop, 0),
        )

    def _distance_bias(self) -> str | None:
        """Return the bias of distances `(1, heads, length, length)`; None without one."""
        graph, op, position = self.graph, self.graph.op, self.config.position
        relative = self.encoder.relative
        if not isinstance(position, Learned) or not isinstance(relative, ScoreBias):
            return None
        assert isinstance(position.bias, DistanceBias)
        graph.scope, max_positions = "/relative", position.max_positions
        buckets = bucket_of(position.bias, torch.arange(1 - max_positions, max_positions)).numpy()
        query = graph.unsqueeze(self.places, 1)
        distances = op("Add", op("Sub", query, self.places), max_positions - 1)
        rows = op("Gather", graph.array("buckets", buckets), distances)
        values = op("Gather", graph.weight(relative.table.weight), rows)  # (length, length, heads)
        return graph.unsqueeze(op("Transpose", values, perm=(2, 0, 1)), 0)

    def _position_scores(self, module: Attention, q: str, k: str, scale: float) -> list[str]:
        """Build the terms that relative positions add to the scores of scaled queries."""
        graph, relative = self.graph, self.encoder.relative
        if self._score_bias is not None:
            return [self._score_bias]
        if self._relative is None or relative is None or isinstance(relative, ScoreBias):
            return []
        falling, rising = self._relative
        table = graph.norm(graph.weight(relative.table.weight), relative.norm)
        keys, queries = self._position_vectors(module, table)
        result = []
        if keys is not None:
            result.append(self._diagonals(q, graph.op("Gather", keys, falling)))
        if queries is not None:
            scaled = graph.op("Mul", graph.op("Gather", queries, rising), scale)
            turned = self._diagonals(k, scaled)  # keys by queries
            result.append(graph.op("Transpose", turned, perm=(0, 1, 3, 2)))
        return result

    def _position_vectors(self, module: Attention, table: str) -> tuple[str | None, str | None]:
        """Return keys and queries of relative positions `(rows, width)`, constant in the graph."""
        graph, width = self.graph, self.config.width
        if module.position_key is None and module.position_query is None:
            queries, keys, _ = graph.split(self._qkv(module, table), width, width, width)
            terms = module.terms
            return keys if "c2p" in terms else None, queries if "p2c" in terms else None
        keys_queries = (module.position_key, module.position_query)
        vectors = [None if layer is None else graph.dense(table, layer) for layer in keys_queries]
        return vectors[0], vectors[1]

    def _diagonals(self, x: str, vectors: str) -> str:
        """Return the product of token i with the vector n − 1 − i + j at (i, j).

        Args:
            x: vectors of n tokens `(rows, heads, n, d)`.
            vectors: `(2n, width)`.

        The products `(n, 2n)` of all tokens and vectors are read again in rows of 2n − 1 numbers,
        from the number n − 1 on: each row begins one place further left. See
        `attention.dispatch.along_diagonals`.
        """
        graph, op = self.graph, self.graph.op
        heads = self.config.heads
        apart = op("Reshape", vectors, (0, heads, self.config.width // heads))
        products = op("MatMul", x, op("Transpose", apart, perm=(1, 2, 0)))
        flat = op("Reshape", products, (0, 0, -1))
        start = op("Sub", self.length, (1,))
        row = op("Add", self.length, start)  # 2n − 1
        stop = op("Add", start, op("Mul", self.length, row))
        diagonal = graph.slice(flat, start, stop, 2)
        shape = op("Concat", (0, 0), self.length, row, axis=0)
        return graph.slice(op("Reshape", diagonal, shape), 0, self.length, 3)
