"""ERNIE: BERT for Chinese, pre-trained on words and entities (Sun et al. 2019, 2020, 2021).

Differences from BERT: later versions add a vector for the task of pre-training to each token; that
of the first task is read when none is named, as in transformers. Version 3 has 2048 positions and
four segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bothways.model.config import EncoderConfig
from bothways.model.families import bert
from bothways.model.families.common import position_buffers
from bothways.model.families.family import ConfigRules, Family, read_flag, read_number
from bothways.model.families.weight_names import KeyTable, Rename
from bothways.model.positions import Learned

CHINESE = 40_000
_TASKS = 3


def third(depth: int, width: int, task_types: int = 16) -> EncoderConfig:
    """Return version 3 with `depth` layers of `width` features, in 12 heads."""
    return EncoderConfig(
        vocab=CHINESE,
        width=width,
        depth=depth,
        intermediate_size=4 * width,
        segments=4,
        position=Learned(2048),
        norm_epsilon=1e-5,
        task_types=task_types,
    )


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "ernie-3.0-base-zh": lambda: third(12, 768, _TASKS),
    "ernie-3.0-medium-zh": lambda: third(6, 768),
    "ernie-3.0-mini-zh": lambda: third(6, 384),
    "ernie-3.0-micro-zh": lambda: third(4, 384),
    "ernie-3.0-nano-zh": lambda: third(4, 312),
}


ERNIE = Family(
    model_type="ernie",
    keys=KeyTable(
        "ernie.",
        (
            *bert.common_rules("ernie"),
            *bert.post_norm_rules("ernie"),
            Rename("encoder.embedding.task", "ernie.embeddings.task_type_embeddings"),
        ),
        position_buffers("ernie.embeddings"),
    ),
    architectures=bert.architectures("Ernie"),
    config_rules=ConfigRules(
        bert.base(),
        read_more=lambda config, raw, location: replace(
            config,
            task_types=read_number(raw, "task_type_vocab_size", _TASKS, location)
            * read_flag(raw, "use_task_id", False, location),
        ),
        write_more=lambda config: {
            "use_task_id": config.task_types > 0,
            "task_type_vocab_size": config.task_types or _TASKS,
        },
    ),
)
