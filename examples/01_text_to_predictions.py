"""From raw text to predictions: tokenizer, corpus, pre-training, fine-tuning, prediction."""

from __future__ import annotations

import tempfile
from pathlib import Path

import toy

import bothways


def main() -> None:
    """Run every step in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n\n".join(toy.texts(60)), encoding="utf8")

        tokenizer = bothways.train_tokenizer(folder / "text.txt", size=60, out=folder / "tokenizer")
        corpus = bothways.build_corpus(folder / "text.txt", tokenizer, folder / "corpus", workers=1)
        shape = bothways.EncoderConfig(tokenizer.size, 32, 2, 2, 64)
        done = bothways.pretrain(corpus, shape, until="20 steps", out=folder / "run")
        print("held-out metrics:", dict(done.metrics))

        rows = toy.rows(72)
        train, dev = rows[:56], rows[56:]
        result = bothways.finetune(
            folder / "run", train, dev=dev, epochs=8, lr=3e-3, batch_size=4, max_length=16
        )
        print("accuracy:", result.metrics["accuracy"])
        result.save(folder / "classifier")

        classify = bothways.load(folder / "classifier")
        texts = ["the film was good .", "the song feels dull ."]
        for text, prediction in zip(texts, classify(texts), strict=True):
            print(text, prediction.label, prediction.probabilities)


if __name__ == "__main__":
    main()
