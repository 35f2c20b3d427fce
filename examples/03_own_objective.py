"""A pre-training objective of your own: hide the last token of a sequence and predict it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import toy

import bothways
from bothways.core.batch import Batch, TokenTargets
from bothways.core.source import Sequence
from bothways.core.training_module import Loss, TrainingModule
from bothways.data.masking import Vocabulary
from bothways.data.segments import FullSentences
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.objectives.objective import ModelSpec, Objective


@dataclass(frozen=True)
class LastToken(Objective):
    """Hide the last word of a sequence and predict it."""

    segments: FullSentences = FullSentences()
    kind: Literal["last_token"] = "last_token"

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return one model with a masked LM head."""
        return {"model": ModelSpec(encoder, (MaskedHead(),))}

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Mask the token before the final [SEP]."""
        ids, last = sequence.ids.copy(), np.array([len(sequence) - 2])
        targets = TokenTargets(last, ids[last].astype(np.int64))
        ids[last] = vocabulary.mask
        return dataclasses.replace(sequence, ids=ids, targets={"last": targets})

    def training_module(
        self, models: Mapping[str, bothways.Model], vocabulary: Vocabulary
    ) -> TrainingModule:
        """Return the module to train."""
        return LastTokenModule(models["model"])


class LastTokenModule(TrainingModule):
    """Predicts the hidden token; losses are sums over targets."""

    def __init__(self, model: bothways.Model) -> None:
        super().__init__()
        self.model = model
        self.predicts = ("last",)

    def saved(self) -> Mapping[str, bothways.Model]:
        """Return the model to save."""
        return {"model": self.model}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of targets."""
        return {"last": float(len(batch.target("last", TokenTargets).ids))}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the cross-entropy of the hidden tokens."""
        targets = batch.target("last", TokenTargets)
        hidden = self.model.encoder(batch, only=targets.index)
        logits = self.model.heads["masked"](hidden.last[targets.index], hidden.table)
        return {"last": cross_entropy(logits, torch.as_tensor(targets.ids))}


def main() -> None:
    """Train the objective for some steps and save the model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n\n".join(toy.texts(60)), encoding="utf8")
        tokenizer = bothways.train_tokenizer(folder / "text.txt", size=60)
        corpus = bothways.build_corpus(folder / "text.txt", tokenizer, folder / "corpus", workers=1)
        shape = bothways.EncoderConfig(tokenizer.size, 32, 2, 2, 64)
        done = bothways.pretrain(corpus, shape, LastToken(), until="20 steps", out=folder / "run")
        print("saved:", done.folder, dict(done.metrics))


if __name__ == "__main__":
    main()
