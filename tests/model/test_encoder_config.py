"""A configuration that cannot be is refused by name, with both values of a conflict."""

from __future__ import annotations

import re

import pytest

from bothways.core.errors import ConfigError
from bothways.model.config import EncoderConfig, Learned
from bothways.model.heads import Labels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab": 0}, "encoder.vocab: must be at least 1, not 0"),
        ({"width": -8}, "encoder.width: must be at least 1, not -8"),
        ({"depth": 0}, "encoder.depth: must be at least 1, not 0"),
        ({"heads": 0}, "encoder.heads: must be at least 1, not 0"),
        ({"inner": 0}, "encoder.inner: must be at least 1, not 0"),
        ({"width": 100, "heads": 12}, "encoder.heads: width 100 cannot be divided among 12 heads"),
        ({"segments": -1}, "encoder.segments: must be at least 0, not -1"),
        ({"dropout": 1.0}, "encoder.dropout: must lie in [0, 1), not 1.0"),
        ({"dropout": float("nan")}, "encoder.dropout: must lie in [0, 1), not nan"),
        ({"attention_dropout": -0.1}, "encoder.attention_dropout: must lie in [0, 1), not -0.1"),
        ({"norm_epsilon": 0.0}, "encoder.norm_epsilon: must be above 0, not 0.0"),
        ({"initial_range": -0.02}, "encoder.initial_range: must be above 0, not -0.02"),
        ({"pad": 50}, "encoder.pad: id 50 is not in the vocabulary of 50"),
        ({"pad": -1}, "encoder.pad: id -1 is not in the vocabulary of 50"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EncoderConfig(**{"vocab": 50, **settings})  # type: ignore[arg-type]


def test_positions_must_be_some() -> None:
    with pytest.raises(ConfigError, match=re.escape("encoder.position.most: must be at least 1, not 0")):
        Learned(0)


@pytest.mark.parametrize(
    ("count", "dropout", "message"), [(0, None, "count: must be"), (2, 1.0, "dropout: must lie in [0, 1)")]
)
def test_a_label_head_that_cannot_be_is_refused(count: int, dropout: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"heads.labels.{message}")):
        Labels(count, dropout)
