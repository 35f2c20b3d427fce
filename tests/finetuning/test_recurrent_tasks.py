"""ELMo at work: pre-trained from the command line, then at every task, embedded, as frozen features; and GPT pre-trained."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bothways.cli.main import app
from bothways.core.batch import pack
from bothways.core.config import reader as configs
from bothways.core.errors import BothwaysError, ConfigError, FolderError
from bothways.data.batching import ExampleBudget
from bothways.data.corpus import Corpus
from bothways.finetuning.bilstm_tagger import BiLSTMTagger
from bothways.finetuning.config import FinetuneSettings, finetune_adam
from bothways.finetuning.data import label
from bothways.finetuning.feature_data import FeatureConfig
from bothways.finetuning.frozen_features import fit_features, prepare_features
from bothways.finetuning.in_memory_run import fit_task
from bothways.finetuning.stability import Stability, apply_stability
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import LSTMConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import BiLMHead, LabelHead, PoolerHead
from bothways.model.model import Model
from bothways.prediction.engine import predict
from bothways.prediction.predictor import open_learner, open_task
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.recipes import modern, paper
from bothways.tasks.catalogue import Trainable
from bothways.tasks.sentence_embedding.task import save_sentence_encoder
from bothways.tasks.text_examples import TextExample
from bothways.training.durations import Epochs, Steps
from family_tasks import LENGTH, TASKS, assert_opens_as_it_was, tokenizer_of

TINY = ["encoder.projection=16", "encoder.cells=24"]
FAST = [
    "training.until=30 steps", "training.precision=fp32", "training.optimizer.lr=0.03",
    "encoder.initial_range=0.3", "batch.n=512", "batch.kind=tokens",
    "held_out=0.1", "evaluation_tokens=1000",
]  # fmt: skip
LENGTHS = ["phases.1.length=24", "phases.2.length=24"]
"""Of the phases of a run from random weights; one that starts from a model has a single phase."""


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `bothways pretrain`, of a second or two."""
    out = tmp_path_factory.mktemp("elmo") / "run"
    words = ["--model", "elmo-small", *TINY, *FAST, *LENGTHS, "--device", "cpu", "--out", str(out)]
    app(["pretrain", str(corpus.folder), *words], result_action="return_value")
    return out


def test_pre_training_learns_to_tell_both_neighbours(trained: Path) -> None:
    loaded = load_model(trained / "model")
    assert loaded.model.specification == (BiLMHead(),)
    assert isinstance(loaded.model.config, LSTMConfig)
    assert (loaded.model.config.projection, loaded.model.config.cells) == (16, 24)
    metrics = loaded.extra["metrics"]
    for name in ("next", "previous"):
        assert metrics[f"held-out/loss/{name}"] < 0.7 * metrics[f"unigram/loss/{name}"]
        assert metrics[f"held-out/accuracy/{name}"] > metrics[f"unigram/accuracy/{name}"]
    mean = (metrics["held-out/loss/next"] + metrics["held-out/loss/previous"]) / 2
    assert metrics["held-out/perplexity"] == pytest.approx(math.exp(mean))
    card = (trained / "model" / "README.md").read_text()
    assert "It predicts the next and the previous token, each from one side alone" in card
    assert "positions are as they were" not in card
    # The configuration of the run makes an equal one without a base.
    settings = configs.load(PretrainConfig, file=trained / "config.toml")
    assert settings.encoder == loaded.model.config


def test_a_run_goes_on_from_its_model_and_from_its_checkpoint(
    trained: Path, corpus: Corpus, tmp_path: Path
) -> None:
    fast = [word for word in FAST[1:] if not word.startswith("encoder")]
    common = [
        str(corpus.folder),
        *fast,
        "phases.0.length=24",
        "training.until=3 steps",
        "--device",
        "cpu",
    ]
    words = [
        "--start",
        str(trained / "model"),
        "--out",
        str(tmp_path / "more"),
    ]
    app(["pretrain", *common, *words], result_action="return_value")
    before, after = (
        load_model(trained / "model").extra["metrics"],
        load_model(tmp_path / "more" / "model").extra["metrics"],
    )
    assert after["held-out/perplexity"] < 2 * before["held-out/perplexity"]
    again = [
        "pretrain",
        str(corpus.folder),
        "--model",
        "elmo-small",
        *TINY,
        *FAST,
        *LENGTHS,
        "--device",
        "cpu",
    ]
    app([*again, "--out", str(trained), "--resume"], result_action="return_value")
    assert load_model(trained / "model").extra["metrics"] == pytest.approx(before)
    start = ["--start", str(trained / "model"), "--out", str(tmp_path / "no")]
    with pytest.raises(ConfigError, match="'masked_lm_nsp' does not fit this encoder"):
        app(["pretrain", *common, *start, "objective=masked_lm_nsp"], result_action="return_value")


def test_gpt_is_pre_trained_from_left_to_right(corpus: Corpus, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    shape = [
        "encoder.width=16",
        "encoder.depth=1",
        "encoder.heads=2",
        "encoder.intermediate_size=32",
        "encoder.position.max_positions=64",
    ]
    words = [
        "--model",
        "gpt2",
        *shape,
        *FAST,
        *LENGTHS,
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    app(["pretrain", str(corpus.folder), *words], result_action="return_value")
    _, info = GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not any(info.values())
    metrics = load_model(tmp_path / "run" / "model").extra["metrics"]
    assert metrics["held-out/loss/next"] < 0.8 * metrics["unigram/loss/next"]
    assert "held-out/loss/previous" not in metrics

    # No class of GPT has a pooler or a classifier: both start at random, and are saved as our own.
    table, model = tmp_path / "rows.tsv", str(tmp_path / "run" / "model")
    rows = "\n".join(f"{word} the cat\t{word}" for word in ["dog", "owl"] * 12)
    table.write_text(f"text\tlabel\n{rows}\n")
    words = [model, str(table), "--dev", str(table), "--device", "cpu", "epochs=40", "lr=3e-3"]
    out = ["--out", str(tmp_path / "tuned")]
    app(["finetune", *words, *out, "batch_size=8"], result_action="return_value")
    tuned = load_model(tmp_path / "tuned" / "model")
    assert {"pooler", "labels"} <= {head.kind for head in tuned.model.specification}
    # [CLS] alone has seen nothing of the text: the last token is read.
    assert tuned.extra["metrics"]["accuracy"] == 1.0
    with pytest.raises(FolderError, match="the heads labels and pooler of this model"):
        load_model(model, [LabelHead(2), PoolerHead()])


@pytest.mark.parametrize("recipe", [modern, paper])
def test_recipes_give_a_language_model_running_text(recipe: Any) -> None:
    for name in ("elmo-original", "gpt2"):
        settings = recipe(preset(name))
        assert settings.objective.segments.kind == "full_sentences"
        assert settings.objective.models(settings.encoder)["model"].heads[0].kind in (
            "bilm",
            "causal",
        )
    assert recipe(preset("bert-base")).objective.segments.kind == "next_sentence"


@pytest.mark.parametrize(
    "definition_and_examples", TASKS, ids=[definition.name for definition, _ in TASKS]
)
def test_every_task_is_done(
    definition_and_examples: tuple[Trainable, list[Any]], tmp_path: Path
) -> None:
    definition, examples = definition_and_examples
    tokenizer = tokenizer_of("bert")
    shape = replace(
        fit_to_corpus(preset("elmo-small"), tokenizer),
        projection=8,
        cells=12,
        initial_range=0.3,
        max_positions=40,
    )
    data = label(definition, tokenizer, examples, [], LENGTH)
    training = replace(finetune_adam(), until=Steps(2), evaluate=None, precision="fp32")
    task = fit_task(
        shape,
        data,
        FinetuneSettings(training, LENGTH, ExampleBudget(8), task=definition),
        device="cpu",
    ).learner
    inputs = [item for example in examples for item in task.encode([example]).copy()]
    batch = pack([sequence for item in inputs for sequence in item.sequences])
    (loss,) = task.train()(batch).values()
    task.zero_grad()
    loss.total.backward()
    # A head on tokens at the end reads nothing of one direction; all parts are reached all the same.
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in task.model.encoder.parameters()
    )
    record = {"task": configs.to_dict(task.task), "length": LENGTH}
    save_model(
        tmp_path / "model",
        task.model,
        tokenizer,
        labels=data.labels,
        problem=definition.problem,
        extra=record,
    )
    assert_opens_as_it_was(tmp_path / "model", task, examples)


def test_texts_are_embedded(trained: Path) -> None:
    task = open_learner(str(trained), "embed", device="cpu")
    ((_, found),) = predict(task, [TextExample("the cat sleeps", "the owl")])
    for text, vector in zip(("the cat sleeps", "the owl"), found.vectors, strict=True):
        (item,) = task.encode([TextExample(text)])
        with torch.no_grad():
            wanted = task.model.encoder(pack(list(item.sequences))).last.mean(0)
        np.testing.assert_allclose(vector, wanted.numpy(), atol=1e-6)
    with pytest.raises(FolderError, match="sentence-transformers needs one"):
        save_sentence_encoder(trained / "vectors", task)  # type: ignore[arg-type]


def test_a_model_that_fills_no_masks_says_so(trained: Path) -> None:
    with pytest.raises(FolderError, match="'fill' needs the head 'masked'; this model has: bilm"):
        open_task(str(trained), "fill", device="cpu")


def test_blocks_start_anew_and_are_frozen_but_not_mixed() -> None:
    model = Model(LSTMConfig(20, 4, 6, 2), (BiLMHead(),))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_stability(model, Stability(reinitialise=1, frozen=1), seed=5)
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed == {
        name for name in before if name.startswith("encoder.blocks.1.") and "weight" in name
    }
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"encoder.embedding.token.weight"}
    with pytest.raises(ConfigError, match=r"stability\.mixout: mixout works on dense layers"):
        apply_stability(model, Stability(mixout=0.1), seed=5)


def test_pairs_are_refused_before_training(corpus: Corpus, tmp_path: Path) -> None:
    words = [
        "--model",
        "elmo-small",
        *TINY,
        *FAST,
        *LENGTHS,
        "objective=masked_lm_nsp",
        "--out",
        str(tmp_path / "run"),
    ]
    with pytest.raises(
        BothwaysError,
        match="'masked_lm_nsp' does not fit this encoder, which reads in two directions",
    ):
        app(["pretrain", str(corpus.folder), *words], result_action="return_value")
    assert not (tmp_path / "run").exists()


def test_frozen_layers_are_read_by_a_tagger(trained: Path, tmp_path: Path) -> None:
    """ELMo's own use: layers weighed by the task (Peters et al. 2018, section 3.2)."""
    lines = [
        "The O",
        "cat B-X",
        "sleeps O",
        "",
        "The O",
        "owl B-X",
        "sings O",
        "near O",
        "the O",
        "lake O",
        "",
    ] * 4
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf8")
    file, tagger = str(tmp_path / "train.txt"), BiLSTMTagger(8, 1, 0.0)
    base = FeatureConfig(
        model=str(trained / "model"), train=file, dev=file, layers="weighted_all", tagger=tagger
    )
    optimizer = replace(base.training.optimizer, lr=2e-2)
    training = replace(base.training, until=Epochs(10.0), optimizer=optimizer)
    settings = replace(base, training=training, batch=ExampleBudget(2))
    data = prepare_features(
        settings, tmp_path / "features", ("weighted_all", "embeddings"), device="cpu"
    )
    model = load_model(trained / "model").model
    (item,) = data.learner.encode(data.dev_examples[:1])
    batch = pack(list(item.sequences))
    with torch.no_grad():
        layers = model.encoder(batch, keep_layers=True).layers
    wanted = torch.stack(layers, 1)[batch.targets["tag"].index]
    assert data.dev.layers == (0, 1, 2)
    np.testing.assert_allclose(data.dev.values[: len(wanted)], wanted.numpy(), atol=1e-6)
    assert fit_features(data, settings, device="cpu").metrics["f1"] > 0.9
