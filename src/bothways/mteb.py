"""A model of vectors for the benchmark `mteb`, which calls it as its own models.

    import mteb
    from bothways.mteb import MtebEncoder

    mteb.evaluate(MtebEncoder("my-bert"), mteb.get_tasks(tasks=["STSBenchmark"]))

Queries and documents get the prompts of the folder. Only this module imports mteb, which is no
extra: `pip install mteb`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from mteb.models import ModelMeta

import bothways
from bothways.prediction.predictor import Predictor


class MtebEncoder:
    """What `mteb.evaluate` takes as a model.

    Args:
        model: a folder, a Hub id, or an open predictor of the task embed.
        name: of the results, such as "me/my-bert".
        settings: of the task embed, such as `pooling="mean"`.
    """

    def __init__(
        self, model: str | Path | Predictor, name: str = "bothways/model", **settings: Any
    ) -> None:
        if not isinstance(model, Predictor):
            model = bothways.load(model, "embed", **settings)
        self.embedder = model
        self.name = name

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **_: Any
    ) -> np.ndarray:
        """Return the vectors of batches with the key "text", by the prompt of their role."""
        texts = [text for batch in inputs for text in batch["text"]]
        encode = self.embedder.encode
        if prompt_type is not None:
            is_query = getattr(prompt_type, "value", None) == "query"
            encode = self.embedder.encode_query if is_query else self.embedder.encode_document
        vectors: np.ndarray = encode(texts)
        return vectors

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarity of each vector with each; see `Predictor.similarity`."""
        import torch

        return torch.from_numpy(
            self.embedder.similarity(np.asarray(embeddings1), np.asarray(embeddings2))
        )

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarity of vectors with the same number."""
        import torch

        return torch.from_numpy(
            self.embedder.similarity_pairwise(np.asarray(embeddings1), np.asarray(embeddings2))
        )

    @functools.cached_property
    def mteb_model_meta(self) -> Any:
        """The name of the model and its similarity; nothing is looked up on the Hub."""
        similarity = self.embedder.similarity_name
        values = {"name": self.name, "revision": "local", "similarity_fn_name": similarity}
        return ModelMeta.create_empty(values)
