"""A training loop of your own: a classifier, and which words its answer depends on."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import toy

import bothways
from bothways.model.heads import LabelHead


def main() -> None:
    """Pre-train a tiny model, then train it with torch alone."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("\n\n".join(toy.texts(60)), encoding="utf8")
        tokenizer = bothways.train_tokenizer(folder / "text.txt", size=60)
        corpus = bothways.build_corpus(folder / "text.txt", tokenizer, folder / "corpus", workers=1)
        shape = bothways.EncoderConfig(tokenizer.size, 32, 2, 2, 64)
        bothways.pretrain(corpus, shape, until="20 steps", out=folder / "run")

        model = bothways.load_model(folder / "run", [LabelHead(2)], fresh=["labels"]).train()
        model.labels = ("negative", "positive")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        rows = toy.rows(40)
        for _ in range(5):
            for start in range(0, len(rows), 8):
                part = rows[start : start + 8]
                batch = model.tokenizer.batch([row["text"] for row in part], length=16)
                labels = torch.tensor([model.labels.index(row["label"]) for row in part])
                loss = torch.nn.functional.cross_entropy(model(batch).logits["labels"], labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print("loss:", loss.item())

        model.eval()
        batch = model.tokenizer.batch("the film was good .")
        output = model(batch, output_hidden_states=True)
        output.hidden_states[0].retain_grad()
        output.logits["labels"].max().backward()
        gradient = output.hidden_states[0].grad
        assert gradient is not None
        shares = gradient.norm(dim=1) / gradient.norm(dim=1).sum()
        for id, share in zip(batch.ids.tolist(), shares.tolist(), strict=True):
            print(f"{model.tokenizer.token(id):>10} {share:.0%}")

        model.save(folder / "classifier")
        print(bothways.load(folder / "classifier", task="classify")("the film was good .").label)


if __name__ == "__main__":
    main()
