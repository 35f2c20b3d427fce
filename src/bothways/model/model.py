"""A model: an encoder and a set of heads, each of which computes only where it has a target."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.model import heads as head_modules
from bothways.model.config import EncoderConfig
from bothways.model.encoder import Attentions, Encoder, Hidden, recorded_attentions
from bothways.model.heads import HEADS, Head, with_pooler


@dataclass(frozen=True)
class ModelOutput:
    """The outputs of a model for a batch. `batch.split` divides tensors of tokens by sequence.

    Attributes:
        last_hidden_state: `(tokens, width)`, the vector of each token after the last layer.
        logits: the outputs of each head by kind, `(sequences, outputs)` or `(tokens, outputs)`.
        pooler_output: `(sequences, width)`, the pooled vectors; None for a model without a pooler.
        hidden_states: if asked for, the embeddings and the output of each layer, `(tokens, width)`.
        attentions: if asked for, of each layer one tensor `(heads, queries, keys)` for each
            sequence, in its own length and without dropout.

    Examples:
        >>> model = bothways.load_model("my-bert")
        >>> output = model(model.tokenizer.batch("a good film"), heads=["masked"])
        >>> isinstance(output, bothways.ModelOutput), tuple(output.logits["masked"].shape)
        (True, (5, 26))
    """

    last_hidden_state: Float[Tensor, "tokens width"]
    logits: Mapping[str, Tensor] = field(default_factory=dict)
    pooler_output: Float[Tensor, "sequences width"] | None = None
    hidden_states: tuple[Float[Tensor, "tokens width"], ...] = ()
    attentions: tuple[Attentions, ...] = ()


class Model(nn.Module):
    """An encoder with heads by kind: "masked", "pooler", "pair", "labels", "tags", "span", …

    Args:
        config: the encoder's shape.
        heads: which heads it has; the pooler is added if one of them reads it.
        encoder: an encoder of this shape to use as it is; None for a new one.

    Attributes:
        kept: settings of the model folder that only other programs use, by file.

    Examples:
        >>> model = bothways.load_model("my-bert")
        >>> isinstance(model, bothways.Model), sorted(model.heads)
        (True, ['masked', 'pair', 'pooler'])
    """

    kept: Mapping[str, Mapping[str, Any]] = MappingProxyType({})

    def __init__(
        self, config: EncoderConfig, heads: Iterable[Head], encoder: Encoder | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.specification = with_pooler(config, heads)
        self.encoder = Encoder(config) if encoder is None else encoder
        self.heads = nn.ModuleDict({head.kind: head.build(config) for head in self.specification})

    def before_masked(
        self, batch: Batch, hidden: Hidden, only: Int[Tensor, " asked"] | None = None
    ) -> Float[Tensor, "tokens width"]:
        """Return the vectors that the masked LM head reads of an encoded batch.

        These are the last vectors or, with an enhanced mask decoder, its output for the tokens
        `only`, for which the encoder must have been asked, too. The decoder's first queries are the
        last block's input plus absolute positions.
        """
        head = self.heads["masked"]
        if (
            not isinstance(head, head_modules.MaskedOutput)
            or head.position is None
            or hidden.before is None
        ):
            return hidden.last
        queries = hidden.before + head.position(batch.layout.positions)
        return self.encoder.decode(batch, hidden.before, queries, only)

    def forward(
        self,
        batch: Batch,
        *,
        heads: Collection[str] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> ModelOutput:
        """Encode a batch and compute heads, with gradients unless they are turned off.

        Args:
            batch: packed texts, as `Tokenizer.batch` returns them.
            heads: kinds of heads whose logits are computed. None for all but those that have an
                output for each token of the vocabulary ("masked", "causal"), which would
                take longer than the rest of a small model.
            output_hidden_states: whether to return the output of each layer, too.
            output_attentions: whether to return attention probabilities, too. They are computed
                once more for this, so it takes longer.

        Raises:
            ConfigError: no batch, a sequence longer than the model's positions, a head that the
                model does not have; attentions of random blocks.
        """
        self._check(batch)
        kinds = self._usual_heads() if heads is None else tuple(heads)
        # Asked for its layers, an encoder runs them one by one.
        keep = output_hidden_states or output_attentions
        with recorded_attentions(self.encoder, output_attentions) as attentions:
            hidden = self.encoder(batch, keep_layers=keep)
        pooled = self.outputs("pooler", batch, hidden) if "pooler" in self.heads else None
        return ModelOutput(
            hidden.last,
            {kind: self.outputs(kind, batch, hidden, pooled) for kind in kinds},
            pooled,
            hidden.layers if output_hidden_states else (),
            tuple(attentions),
        )

    def _usual_heads(self) -> list[str]:
        """Return the heads that are computed unless others are named."""
        return [
            value.kind
            for value in self.specification
            if value.outputs is not None and HEADS.get(value.kind) is type(value)
        ]

    def _check(self, batch: object) -> None:
        if not isinstance(batch, Batch):
            message = f"a model reads a Batch, not a {type(batch).__name__}"
            raise ConfigError(message, where="batch", fix="Give model.tokenizer.batch(texts).")
        positions = self.config.max_positions
        if batch.layout.max_seqlen > positions:
            number, length = max(enumerate(batch.layout.lengths), key=lambda pair: pair[1])
            message = f"text {number} has {length} tokens, and the model {positions} positions"
            fix = f"Cut longer texts: tokenizer.batch(texts, length={positions})."
            raise ConfigError(message, where="batch", fix=fix)

    def read(self, kind: str, batch: Batch) -> Float[Tensor, "rows ..."]:
        """Return the outputs of a head, from no more vectors than it reads.

        Raises:
            ConfigError: no batch, a sequence longer than the model's positions, no such head.
        """
        self._check(batch)
        value, only = self._value(kind), None
        if value is not None and value.reads_one_token(self.config):
            only = head_modules.pooled_tokens(batch.layout, self.config.is_causal)
        return self.outputs(kind, batch, self.encoder(batch, only=only))

    def outputs(
        self,
        kind: str,
        batch: Batch,
        hidden: Hidden,
        pooled: Float[Tensor, "sequences width"] | None = None,
    ) -> Float[Tensor, "rows ..."]:
        """Return the outputs of a head for an encoded batch, for each token or each sequence.

        Args:
            pooled: the output of the pooler, where it has been computed already.

        Raises:
            ConfigError: the model does not have the head, or it is not one of the library.
        """
        if kind not in self.heads:
            message = f"the model has no head {kind!r}; it has {', '.join(self.heads) or 'none'}"
            raise ConfigError(message, where="heads", fix="Name one that it has.")
        head, layout = self.heads[kind], batch.layout
        result: Tensor
        match head:
            case head_modules.MaskedOutput():
                result = head(self.before_masked(batch, hidden), hidden.table)
            case head_modules.NextTokenOutput():
                result = head(hidden.last, hidden.table)
            case head_modules.Pooler() | head_modules.ReplacedOutput():
                result = head(hidden.last, layout)
            case head_modules.OwnOutput() if self._is_of_sequences(kind):
                result = head(head.pool(hidden.last, layout))
            case head_modules.LinearOutput() if self._is_of_sequences(kind):
                inputs = self.heads["pooler"](hidden.last, layout) if pooled is None else pooled
                result = head(inputs)
            case head_modules.LinearOutput() | head_modules.OwnOutput() | head_modules.DeepOutput():
                result = head(hidden.last)
            case _:
                message = f"the head {kind!r} is not one of the library"
                raise ConfigError(
                    message, where="heads", fix=f"Call model.heads[{kind!r}] yourself."
                )
        return result

    def _value(self, kind: str) -> Head | None:
        return next((value for value in self.specification if value.kind == kind), None)

    def _is_of_sequences(self, kind: str) -> bool:
        value = self._value(kind)
        return value is not None and value.of_sequences
