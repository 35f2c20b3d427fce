"""A sentence encoder's folder: the task's settings ↔ the files of sentence-transformers."""

from __future__ import annotations

from pathlib import Path

from bothways.core.config import reader as configs
from bothways.core.errors import FolderError
from bothways.hub.model_card import Card
from bothways.hub.sentence_transformers import (
    SentenceEncoderConfig,
    read_sentence_config,
    save_sentence_folder,
)
from bothways.tasks.sentence_embedding.task import Embedder, SentenceEmbeddingTask


def read_sentence_encoder(folder: Path, positions: int) -> tuple[SentenceEmbeddingTask, int] | None:
    """Return the task and the longest text in tokens; None without files of sentence-transformers.

    Raises:
        FolderError: as `read_sentence_config`.
    """
    config = read_sentence_config(folder, positions)
    if config is None:
        return None
    task = SentenceEmbeddingTask(
        pooling=config.pooling, normalised=config.normalised, components=config.components
    )
    return task, config.length


def save_sentence_encoder(folder: str | Path, task: Embedder, card: Card | None = None) -> None:
    """Write a folder from which sentence-transformers computes the same vectors.

    Raises:
        FolderError: sentence-transformers cannot compute these vectors; else as `save_model`.
        ResourceError: as `save_model`.
    """
    settings = task.task
    if settings.layers not in ((-1,), (task.model.config.depth,)):
        what = f"sentence-transformers pools the last layer, and this task reads {settings.layers}"
        raise FolderError(what, where=folder, fix="Set layers=[-1].")
    config = SentenceEncoderConfig(
        settings.pooling, settings.normalised, settings.components, task.length
    )
    extra = {"task": configs.to_dict(settings), "length": task.length}
    save_sentence_folder(folder, task.model, task.tokenizer, config, card=card, extra=extra)
