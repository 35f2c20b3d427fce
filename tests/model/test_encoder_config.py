"""A configuration that cannot be is refused by name, with both values of a conflict."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from bothways.core.errors import ConfigError
from bothways.model.attention.patterns import Blocks, Full, Window
from bothways.model.config import Dropouts, EncoderConfig, Gated, Readout
from bothways.model.heads import LabelHead, NextTokenHead
from bothways.model.positions import Disentangled, DistanceBias, Learned, Rotary


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab": 0}, "encoder.vocab: must be at least 1, not 0"),
        ({"width": -8}, "encoder.width: must be at least 1, not -8"),
        ({"depth": 0}, "encoder.depth: must be at least 1, not 0"),
        ({"heads": 0}, "encoder.heads: must be at least 1, not 0"),
        ({"intermediate_size": 0}, "encoder.intermediate_size: must be at least 1, not 0"),
        ({"width": 100, "heads": 12}, "encoder.heads: width 100 cannot be divided among 12 heads"),
        ({"segments": -1}, "encoder.segments: must be at least 0, not -1"),
        ({"norm_epsilon": 0.0}, "encoder.norm_epsilon: must be above 0, not 0.0"),
        ({"initial_range": -0.02}, "encoder.initial_range: must be above 0, not -0.02"),
        ({"pad": 50}, "encoder.pad: id 50 is not in the vocabulary of 50"),
        ({"pad": -1}, "encoder.pad: id -1 is not in the vocabulary of 50"),
        ({"patterns": ()}, "encoder.patterns: must hold at least one pattern"),
        (
            {"patterns": (Blocks(),), "position": Disentangled()},
            "encoder.patterns: disentangled positions cannot be combined",
        ),
        (
            {"patterns": (Blocks(),), "position": Learned(bias=DistanceBias())},
            "encoder.patterns: a bias of distances cannot be combined",
        ),
        ({"heads": 4, "width": 8, "key_value_heads": 3}, "4 heads cannot be divided among 3 heads"),
        ({"key_value_heads": 0}, "encoder.key_value_heads: must be at least 1, not 0"),
        (
            {"key_value_heads": 1, "position": Disentangled()},
            "encoder.key_value_heads: cannot be combined",
        ),
        (
            {"patterns": (Window(4, global_attention=True),), "position": Disentangled()},
            "encoder.patterns: disentangled positions cannot",
        ),
        (
            {"position": Rotary(), "width": 12, "heads": 4},
            "encoder.heads: rotary positions need an even head size, but width / heads = 3",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EncoderConfig(**{"vocab": 50, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rate"),
    [("hidden", 1.0), ("hidden", float("nan")), ("attention", -0.1), ("embedding", 1.0)],
)
def test_a_rate_that_cannot_be_is_refused(name: str, rate: float) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"encoder.dropout.{name}: must be in [0, 1), not {rate}")
    ):
        Dropouts(**{name: rate})  # type: ignore[arg-type]


def test_positions_must_be_some() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("encoder.position.max_positions: must be at least 1, not 0")
    ):
        Learned(0)
    with pytest.raises(
        ConfigError, match=re.escape("encoder.position.max_positions: must be at least 1, not 0")
    ):
        Rotary(0)
    with pytest.raises(
        ConfigError, match=re.escape("encoder.position.bases: must be numbers above 1, not (1.0,)")
    ):
        Rotary(bases=(1.0,))


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("encoder.patterns.radius: must be at least 0, not -1")
    ):
        Window(-1)
    with pytest.raises(
        ConfigError, match=re.escape("encoder.mlp.dropout: must be in [0, 1), not 1.0")
    ):
        Gated(1.0)
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "encoder.embedding: the next-token head predicts with the token embedding, whose 4 features"
        ),
    ):
        NextTokenHead().build(EncoderConfig(50, embedding=4))
    own = NextTokenHead().build(EncoderConfig(50, embedding=4, readout=Readout(output="own")))
    assert own(torch.ones(3, 768), torch.ones(50, 4)).shape == (3, 50)


def test_patterns_and_bases_go_round_and_equal_encoders_have_one_canonical_form() -> None:
    config = EncoderConfig(
        50, depth=5, patterns=(Full(), Window(2)), position=Rotary(9, (7.0, 3.0, 3.0))
    )
    assert [config.pattern(layer) for layer in range(5)] == [
        Full(),
        Window(2),
        Full(),
        Window(2),
        Full(),
    ]
    assert [config.base(layer) for layer in range(5)] == [7, 3, 3, 7, 3]
    assert EncoderConfig(50).base(0) is None
    longer = replace(
        config, patterns=(Full(), Window(2)) * 4, position=Rotary(9, (7.0, 3.0, 3.0, 7.0, 3.0, 8.0))
    )
    assert longer.canonical == config.canonical == config
    assert replace(longer, depth=6).canonical != replace(config, depth=6).canonical


@pytest.mark.parametrize(
    ("count", "dropout", "message"),
    [(0, None, "count: must be"), (2, 1.0, "dropout: must be in [0, 1)")],
)
def test_a_label_head_that_cannot_be_is_refused(
    count: int, dropout: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"heads.labels.{message}")):
        LabelHead(count, dropout)
