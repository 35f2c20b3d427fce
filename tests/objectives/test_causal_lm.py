"""Left-to-right language modelling: the loss against its formula, and a GPT from pre-training to fine-tuning."""

import pytest
import torch
from torch import nn

from bothways.core.batch import pack
from bothways.core.errors import FolderError
from bothways.hub.model_folder import load_model
from bothways.model.attention.patterns import Causal
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import LabelHead, NextTokenHead, PoolerHead
from bothways.objectives.causal_lm import CausalLM
from bothways.pretraining.recipes import modern, paper
from commands import run_line
from toy_objective import SIZE, build_module, draw_sequences
from toy_training import check_splits

FAST = [
    "training.until=30 steps", "training.precision=fp32", "training.optimizer.lr=0.03",
    "encoder.initial_range=0.3", "batch.n=512", "batch.kind=tokens",
    "held_out=0.1", "evaluation_tokens=1000", "phases.1.length=24", "phases.2.length=24",
]  # fmt: skip


def test_loss_is_the_cross_entropy_of_the_next_tokens():
    config = EncoderConfig(SIZE, 8, 2, 2, 8, patterns=(Causal(),), dropout=Dropouts(0.0, 0.0))
    module, lengths = build_module(CausalLM(), config), (5, 2, 3)
    sequences = draw_sequences(CausalLM(), lengths)
    batch, model = pack(sequences), module.model
    losses = module(batch)
    assert losses.keys() == {"next"}
    assert module.weights(batch) == {"next": sum(lengths) - len(lengths)}
    logits = model.heads["causal"](model.encoder(batch).last, model.encoder.embedding.token.weight)
    expected = sum(
        nn.functional.cross_entropy(rows[:-1], ids[1:], reduction="sum")
        for rows, ids in zip(logits.split(lengths), batch.ids.split(lengths), strict=True)
    )
    torch.testing.assert_close(losses["next"].total, expected)
    check_splits(module.double(), sequences)


def test_gpt_is_pre_trained_from_left_to_right(corpus, tmp_path):
    from transformers import GPT2LMHeadModel

    shape = [
        "encoder.width=16",
        "encoder.depth=1",
        "encoder.heads=2",
        "encoder.intermediate_size=32",
        "encoder.position.max_positions=64",
    ]
    words = [
        "--model", "gpt2", *shape, *FAST, "--device", "cpu", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    run_line("pretrain", corpus.folder, *words)
    _, info = GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not any(info.values())
    metrics = load_model(tmp_path / "run" / "model").extra["metrics"]
    assert metrics["held-out/loss/next"] < 0.8 * metrics["unigram/loss/next"]

    # No class of GPT has a pooler or a classifier: both start at random, and are saved as our own.
    table, model = tmp_path / "rows.tsv", str(tmp_path / "run" / "model")
    rows = "\n".join(f"{word} the cat\t{word}" for word in ["dog", "owl"] * 12)
    table.write_text(f"text\tlabel\n{rows}\n")
    words = [model, str(table), "--dev", str(table), "--device", "cpu", "epochs=20", "lr=6e-3"]
    out = ["--out", str(tmp_path / "tuned")]
    rarely = ["batch_size=8", "training.evaluate=10 epochs"]
    run_line("finetune", *words, *out, *rarely)
    tuned = load_model(tmp_path / "tuned" / "model")
    assert {"pooler", "labels"} <= {head.kind for head in tuned.model.specification}
    # [CLS] alone has seen nothing of the text: the last token is read.
    assert tuned.extra["metrics"]["accuracy"] == 1.0
    with pytest.raises(FolderError, match="the heads labels and pooler of this model"):
        load_model(model, [LabelHead(2), PoolerHead()])


@pytest.mark.parametrize("recipe", [modern, paper])
def test_recipes_give_a_language_model_running_text(recipe):
    settings = recipe(preset("gpt2"))
    assert settings.objective.segments.kind == "full_sentences"
    assert settings.objective.models(settings.encoder)["model"].heads == (NextTokenHead(),)
    assert recipe(preset("bert-base")).objective.segments.kind == "next_sentence"
