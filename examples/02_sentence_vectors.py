"""Vectors of texts, and the hidden states and attention probabilities of a model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import toy

import bothways


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

        model = bothways.load_model(folder / "run")
        batch = model.tokenizer.batch(["the film was good .", "the play seems dull ."])
        with torch.no_grad():
            output = model(batch, output_hidden_states=True, output_attentions=True)
        print("layers:", [tuple(layer.shape) for layer in output.hidden_states])
        print("attention of the first layer:", [tuple(text.shape) for text in output.attentions[0]])


if __name__ == "__main__":
    main()
