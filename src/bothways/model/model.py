"""A model: an encoder and a set of heads, each of which computes only where it has a target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.model.config import LSTMConfig, ModelConfig
from bothways.model.encoder import Encoder, Hidden
from bothways.model.head_modules import LSTMOutput, MaskedOutput, OwnOutput, pooled_tokens
from bothways.model.heads import Head, with_pooler
from bothways.model.lstm import AnyEncoder, LSTMEncoder


class Model(nn.Module):
    """An encoder with heads by kind: "masked", "pooler", "pair", "labels", "tags", "span", …

    Args:
        config: the encoder's shape.
        heads: which heads it has; the pooler is added if one of them reads it.
        encoder: an encoder of this shape to use as it is; None for a new one.

    Attributes:
        kept: settings of the model folder that only other programs use, by file.

    Examples:
        >>> model = bothways.load_model("my-bert").model
        >>> sorted(model.heads)
        ['masked', 'pair', 'pooler']
    """

    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(
        self, config: ModelConfig, heads: Iterable[Head], encoder: AnyEncoder | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.specification = with_pooler(config, heads)
        self.encoder = build_encoder(config) if encoder is None else encoder
        self.heads = nn.ModuleDict({head.kind: head.build(config) for head in self.specification})

    def before_masked(
        self, batch: Batch, hidden: Hidden, only: Int[Tensor, " asked"] | None = None
    ) -> Float[Tensor, "tokens width"]:
        """Return what the masked LM head reads of an encoded batch.

        These are the last vectors or, with an enhanced mask decoder, its output for the tokens
        `only`, for which the encoder must have been asked, too. The decoder's first queries are the
        last block's input plus absolute positions.
        """
        head = self.heads["masked"]
        if not isinstance(head, MaskedOutput) or head.position is None or hidden.before is None:
            return hidden.last
        assert isinstance(self.encoder, Encoder)
        queries = hidden.before + head.position(batch.layout.positions)
        return self.encoder.decode(batch, hidden.before, queries, only)

    def read(
        self, kind: Literal["labels", "choice"], batch: Batch
    ) -> Float[Tensor, "sequences labels"]:
        """Return the outputs of a head of whole sequences, with no more vectors than it reads."""
        head, layout = self.heads[kind], batch.layout
        if isinstance(head, LSTMOutput):
            of_tokens: Tensor = head(self.encoder(batch).last, layout)
            return of_tokens
        own = head if isinstance(head, OwnOutput) else None
        causal = not isinstance(self.config, LSTMConfig) and self.config.is_causal
        only = None if own and own.reads == "mean" else pooled_tokens(layout, causal)
        x = self.encoder(batch, only=only).last
        result: Tensor = head(own.pool(x, layout) if own else self.heads["pooler"](x, layout))
        return result


def build_encoder(config: ModelConfig) -> AnyEncoder:
    """Return an encoder of this shape with new weights."""
    return LSTMEncoder(config) if isinstance(config, LSTMConfig) else Encoder(config)
