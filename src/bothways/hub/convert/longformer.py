"""BERT or RoBERTa → Longformer, a start for training on long texts (Beltagy et al. 2020, section
5).

The position embeddings are repeated, so that neighbours keep the vectors of neighbours; the
projections of global tokens start as copies of those of all tokens. Up to the window, and without
global tokens, the outputs are the original model's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bothways.core.errors import ConfigError
from bothways.model import heads
from bothways.model.attention.patterns import Window
from bothways.model.config import EncoderConfig, FromPooler, Own
from bothways.model.families import roberta
from bothways.model.families.longformer import LONGFORMER
from bothways.model.init import without_weights
from bothways.model.model import Model
from bothways.model.positions import Learned

_POSITIONS = "encoder.embedding.position.weight"
_INNER = "heads.labels.inner."
"""The dense layer of Longformer's label head; in BERT it is the pooler's."""

POSITIONS, WINDOW = 4096, 512
"""The authors' values of the longest input and of the tokens that each one attends to."""


def lengthened(model: Model, positions: int = POSITIONS, window: int = WINDOW) -> Model:
    """Return the model as a Longformer: with the head that it was fine-tuned with, if any, or else
    with the masked LM head, or the pooler.

    Args:
        positions: the longest input, in tokens.
        window: tokens that each one attends to, on both sides together.

    Raises:
        ConfigError: the window is odd or below 2, there are fewer positions than before, the model
            has none of these heads or several that were fine-tuned, or its encoder or the head is
            not as in a BERT or RoBERTa.
    """
    if window < 2 or window % 2:
        raise ConfigError(f"must be an even number above 0, not {window}", where="window")
    old = model.config
    if (
        not isinstance(old, EncoderConfig)
        or not isinstance(old.position, Learned)
        or old.pad is None
    ):
        raise ConfigError(_OTHER, where="encoder.position", fix=_FIX)
    if positions < old.position.max_positions:
        message = f"must be at least the model's {old.position.max_positions}, not {positions}"
        raise ConfigError(message, where="positions")
    head = _head_of(model)
    # Positions count from the padding id.
    config = replace(
        old,
        position=Learned(positions, old.pad + 1),
        patterns=(Window(window // 2, global_attention=True),),
        readout=replace(roberta.base().readout, output=old.readout.output),
    )
    if LONGFORMER.config_rules.write(config) is None or not _reads_alike(head, old):
        raise ConfigError(_OTHER, where="encoder", fix=_FIX)
    with without_weights():
        result = Model(config, (head,))
    result.load_state_dict(
        _weights(model, old.position, config, list(result.state_dict())), assign=True
    )
    result.kept = model.kept
    return result.eval()


_OTHER = "this encoder differs from Longformer's by more than the attention"
_FIX = "Give a BERT or RoBERTa with exact GELU, as it was pre-trained or fine-tuned."


def _head_of(model: Model) -> heads.Head:
    """Return the head that is kept."""
    tuned = [
        head
        for head in model.specification
        if isinstance(head, heads.LabelHead | heads.TagHead | heads.SpanHead | heads.ChoiceHead)
    ]
    if len(tuned) > 1:
        titles = " and ".join(head.title for head in tuned)
        message = f"the model has a {titles}, and a Longformer has one of them"
        raise ConfigError(message, where="heads", fix=_FIX)
    fallback = [
        head for head in (heads.MaskedHead(), heads.PoolerHead()) if head.kind in model.heads
    ]
    if not (candidates := [*tuned, *fallback]):
        message = "a Longformer is made of a model with a masked LM head, a pooler or a tuned head"
        raise ConfigError(message, where="heads", fix=_FIX)
    return candidates[0]


def _reads_alike(head: heads.Head, old: EncoderConfig) -> bool:
    """Return True if Longformer's head of this kind computes the same from its weights."""
    readout = old.readout
    match head:
        case heads.MaskedHead():
            return (readout.masked or old.activation) == "gelu"
        case heads.LabelHead():
            inner = readout.labels
            return isinstance(inner, FromPooler) or replace(inner, dropout_first=False) == Own(
                "tanh"
            )
        case heads.ChoiceHead():
            return isinstance(readout.choice, FromPooler)
        case heads.TagHead() | heads.SpanHead():
            return readout.tokens is None and readout.span is None
        case _:
            return True


def _weights(
    model: Model, position: Learned, config: EncoderConfig, names: list[str]
) -> dict[str, Tensor]:
    state = model.state_dict()
    unused, rows = state[_POSITIONS].split([position.offset, position.max_positions])
    assert isinstance(config.position, Learned)
    leading = rows.new_zeros(config.position.offset, rows.shape[1])
    leading[: len(unused)] = unused[: len(leading)]
    # The authors found copies of the learned positions a far better start than new ones.
    times = -(-config.position.max_positions // position.max_positions)
    tiled = torch.cat([leading, rows.repeat(times, 1)[: config.position.max_positions]])

    def origin(name: str) -> str:
        """Return the name of the old weights that these begin as."""
        if name.startswith(_INNER) and name not in state:  # what BERT calls its pooler
            return name.replace(_INNER, "heads.pooler.dense.")
        return name.replace(".global_qkv.", ".qkv.")

    return {name: tiled if name == _POSITIONS else state[origin(name)].clone() for name in names}
