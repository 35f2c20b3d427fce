"""Comparison of an exported graph with the model, on inputs of many shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.errors import DivergedError
from bothways.core.layout import Layout
from bothways.hub.sentence_transformers import SentenceEncoderConfig
from bothways.model.attention.patterns import Blocks, Pattern, Window
from bothways.model.config import EncoderConfig
from bothways.model.model import Model
from bothways.prediction.export.encoder_graph import GlobalRule
from bothways.prediction.export.model_graph import ExportedPart, HeadKind
from bothways.prediction.session_model import Run, SessionModel, padded_inputs
from bothways.tasks.sentence_embedding.task import pool, projection_of

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
        runtime: its name.
        largest: the largest difference, as a share of the largest output, at least of 1.
        tolerance: the largest that is allowed.
        shapes: the rows and lengths that were compared.
    """

    runtime: str
    largest: float
    tolerance: float
    shapes: tuple[tuple[int, int], ...]

    def check(self) -> None:
        """Raise DivergedError if the difference is too large, or not a number."""
        if not self.largest <= self.tolerance:
            message = (
                f"its outputs in {self.runtime} differ from the model's by {self.largest:.1e}; "
                f"the limit is {self.tolerance:g}"
            )
            fix = "Nothing was written. Use another version of the runtime, or serve with bothways."
            raise DivergedError(message, where="export", fix=fix)

    def __str__(self) -> str:
        largest = f"{self.largest:.1e} of at most {self.tolerance:g}"
        return f"{self.runtime}: differs by {largest}, in {len(self.shapes)} shapes"


@torch.inference_mode()
def compare_outputs(model: Model, exported: ExportedPart, run: Run, runtime: str) -> Comparison:
    """Compare all outputs of a graph with the model's, at every token.

    Args:
        model: on the CPU, in evaluation mode, in fp32.
        run: computes the graph in the runtime.
    """
    config = model.config
    session, shapes, shares = SessionModel(config, exported.head, run), [], []
    for batch in probes(config, exported):
        shapes.append((batch.layout.sequences, batch.layout.max_seqlen))
        outputs = head_outputs(model, exported.head, batch)
        shares.append(_share(outputs, head_outputs(session, exported.head, batch)) / TOLERANCE)
        if exported.sentence is not None:
            vectors = sentence_vectors(model, outputs, batch.layout, exported.sentence)
            inputs = padded_inputs(config, exported.head, batch)
            actual = torch.from_numpy(run(inputs)["sentence_embedding"])
            limit = UNIT_TOLERANCE if exported.sentence.normalised else TOLERANCE
            shares.append(_share(vectors, actual) / limit)
    # `max` would lose a NaN.
    return Comparison(runtime, float(np.max(shares)) * TOLERANCE, TOLERANCE, tuple(shapes))


def head_outputs(model: Model, head: HeadKind, batch: Batch) -> Tensor:
    """Return the outputs of a head for all tokens or all sequences; "none" for vectors."""
    hidden = model.encoder(batch)
    rows = hidden.last if head == "none" else model.outputs(head, batch, hidden)
    return rows.view(len(rows), -1)


def sentence_vectors(
    model: Model, x: Tensor, layout: Layout, config: SentenceEncoderConfig
) -> Tensor:
    """Return the vector of each sequence from those of its tokens."""
    vectors = pool(x, layout, config.pooling)
    if (projection := projection_of(model)) is not None:
        vectors = projection(vectors)
    if config.normalised:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return vectors[:, : config.components]


def probes(config: EncoderConfig, exported: ExportedPart) -> Iterator[Batch]:
    """Yield batches of random tokens: one token, short rows of mixed lengths, the longest rows."""
    reached = max(_reach(config.pattern(layer)) for layer in range(config.depth))
    max_length = min(config.max_positions, max(LONGEST, reached))
    draw = torch.Generator().manual_seed(0)
    for lengths in ([1], [7], [2, 64, 1, 33], [max_length, 5, max_length // 2 + 1]):
        row_lengths = [min(length, config.max_positions) for length in lengths]
        ids = torch.randint(config.vocab, (sum(row_lengths),), generator=draw)
        segments = torch.randint(max(1, config.segments), (sum(row_lengths),), generator=draw)
        batch = Batch(ids, segments, Layout.of(row_lengths))
        yield _with_global_tokens(batch, exported) if config.has_global_attention else batch


def _reach(pattern: Pattern) -> int:
    """Return a length at which a pattern hides some tokens from others."""
    match pattern:
        case Window(radius):
            return 2 * radius + 9
        case Blocks():
            return pattern.dense + 2 * pattern.size + 1
        case _:
            return 0


def _with_global_tokens(batch: Batch, exported: ExportedPart) -> Batch:
    """Return the batch with a separator in each text, and global tokens as tasks mark them."""
    layout, rule = batch.layout, exported.global_rule
    if exported.separators is None or rule in ("none", "first"):
        return dataclasses.replace(batch, global_attention_mask=global_tokens(batch, rule, 0, 0))
    separators = exported.separators
    lengths = layout.cu_seqlens.diff()
    middle = layout.first_tokens + lengths // 2
    ids = batch.ids.index_fill(0, middle[lengths > 2], separators.id)
    batch = dataclasses.replace(batch, ids=ids)
    mask = global_tokens(batch, rule, separators.id, separators.between)
    return dataclasses.replace(batch, global_attention_mask=mask)


def global_tokens(batch: Batch, rule: GlobalRule, separator: int, between: int) -> Tensor | None:
    """Return True for the global tokens of a rule, sequence by sequence."""
    if rule == "none":
        return None
    result = torch.zeros_like(batch.ids, dtype=torch.bool)
    for start, length in zip(batch.layout.first_tokens.tolist(), batch.layout.lengths, strict=True):
        row = batch.ids[start : start + length].tolist()
        at = row.index(separator) if rule != "first" and separator in row else 0
        match rule:
            case "first":
                result[start] = True
            case "question":
                result[start : start + at] = True
            case "ending":
                result[start + at + between : start + length] = True
    return result


def _share(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return float("nan")
    return float((expected - actual).abs().max()) / max(1.0, float(expected.abs().max()))
