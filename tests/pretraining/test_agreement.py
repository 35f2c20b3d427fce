"""Ranks that were started with other settings or data stop before the first step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import bothways
from bothways.core.errors import ConfigError
from bothways.data.batching import ExampleBudget
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.documents import Document
from bothways.model.config import EncoderConfig
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.run import pretrain
from bothways.training.durations import Steps
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear
from toy_folder import make_folder
from toy_training import enter_ranks, on_ranks


def trained_on_two(rank: int, world: int, port: int, corpora: list[Path], folder: Path) -> None:
    """Runs of two ranks with other settings or data, each of which is refused."""
    enter_ranks(rank, world, port)
    same, other = map(Corpus.open, corpora)
    encoder = EncoderConfig(same.tokenizer.size, 32, 2, 2, 64)
    training = Training(Steps(2), AdamW(lr=3e-3), Linear(0.1), "fp32")
    phases, batch = (PretrainPhase(32),), ExampleBudget(8)
    settings = PretrainConfig(encoder, training, phases=phases, batch=batch, held_out=0.1)
    seeds = dataclasses.replace(settings, seed=rank)
    refused = []
    for case, text in ((seeds, same), (settings, other if rank else same)):
        with pytest.raises(ConfigError) as caught:
            pretrain(case, text, folder / "refused", device="cpu")
        refused.append((caught.value.where, caught.value.what, caught.value.on_every_rank))
    rows = [{"text": f"a dog {word}", "label": word} for word in ("runs", "sleeps")] * 8
    with pytest.raises(ConfigError) as caught:
        bothways.finetune(folder / "bert", rows[rank:], epochs=1, device="cpu", progress=False)
    refused.append((caught.value.where, caught.value.what, caught.value.on_every_rank))
    (folder / f"rank{rank}.json").write_text(json.dumps(refused))


def test_ranks_that_differ_stop(corpus: Corpus, tmp_path: Path) -> None:
    documents = [Document("the dog sleeps. " * 3, f"other:{number}") for number in range(40)]
    other = build_corpus(documents, corpus.tokenizer, tmp_path / "other", workers=1)
    make_folder(tmp_path / "bert")
    on_ranks(2, trained_on_two, [corpus.folder, other.folder], tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert [where for where, _, _ in first] == ["rank 1"] * 3
    assert first[0][1] == "seed is 1, and 0 on rank 0"
    assert first[1][1].startswith("corpus is ")
    assert first[2][1].startswith("data.train is ")
    assert all(everywhere for _, _, everywhere in first)
    assert not (tmp_path / "refused" / ".run").exists()
