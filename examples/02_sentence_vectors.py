"""Vectors of texts, and the hidden states and attention probabilities of a model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import toy

import bothways
from bothways.core.batch import pack
from bothways.core.sequence import Sequence


def main() -> None:
    """Pre-train a tiny model and look into it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = bothways.train_tokenizer(toy.texts(60), size=60)
        (folder / "text.txt").write_text("\n\n".join(toy.texts(60)), encoding="utf8")
        corpus = bothways.build_corpus(folder / "text.txt", tokenizer, folder / "corpus", workers=1)
        shape = bothways.EncoderConfig(tokenizer.size, 32, 2, 2, 64)
        bothways.pretrain(corpus, shape, until="10 steps", out=folder / "run")

        embed = bothways.load(folder / "run", task="embed")
        vectors = embed.encode(["the film was good .", "the play was fine ."])
        print("vectors:", vectors.shape)

        loaded = bothways.load_model(folder / "run" / "model")
        words = tokenizer.encode("the film was good .")
        special = tokenizer.specials
        ids = torch.tensor([special.cls, *words, special.sep], dtype=torch.int32).numpy()
        batch = pack([Sequence(ids, ids.astype("int8") * 0)])
        with torch.no_grad():
            hidden = loaded.model.encoder(batch, keep_layers=True)
            attentions = loaded.model.encoder.attentions(batch)
        print("layers:", [tuple(layer.shape) for layer in hidden.layers])
        print("attention of the first layer:", tuple(attentions[0][0].shape))


if __name__ == "__main__":
    main()
