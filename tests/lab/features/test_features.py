"""Frozen features: equal to transformers' hidden states, computed once, never trained; the tagger on them learns."""

import dataclasses
import json
import random
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from bothways.core.batch import IGNORED, pack
from bothways.core.errors import BothwaysError, ConfigError, FolderError
from bothways.data.loader import ExampleBudget
from bothways.lab.features import LayerChoice, run as features
from bothways.lab.features.run import (
    BiLSTMTagger,
    FeatureConfig,
    FeatureData,
    FeatureTagger,
    LayerSum,
    build_tagger,
    fit_features,
    open_features,
    prepare_features,
    tag_words,
)
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import TaggingTask
from bothways.training.schedules import Epochs, Steps
from commands import run_line
from heard_progress import Heard
from toy_folder import FILLERS, GOOD, make_folder

ALL: tuple[LayerChoice, ...] = get_args(LayerChoice)


def write_columns(file: Path, count: int, seed: int) -> Path:
    """A good word is a name if "the" stands before it."""
    draw, lines = random.Random(seed), ["-DOCSTART- O", ""]
    for _ in range(count):
        words = draw.choices([*FILLERS[:8], *GOOD * 4, *["the"] * 8], k=draw.randint(1, 9))
        for place, word in enumerate(words):
            name = word in GOOD and place > 0 and words[place - 1] == "the"
            lines.append(f"{word} {'B-X' if name else 'O'}")
        lines.append("")
    file.write_text("\n".join(lines) + "\n", encoding="utf8")
    return file


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> FeatureConfig:
    folder = tmp_path_factory.mktemp("data")
    bert = make_folder(
        folder / "bert", num_hidden_layers=5, initializer_range=0.3, max_position_embeddings=24
    )
    base = FeatureConfig(
        model=str(bert),
        train=str(write_columns(folder / "train.txt", 120, 0)),
        dev=str(write_columns(folder / "dev.txt", 40, 1)),
        tagger=BiLSTMTagger(16, 2, 0.1),
    )
    return with_training(base, Epochs(6.0), lr=1e-2)


def with_training(settings: FeatureConfig, until: Epochs, **optimizer: float) -> FeatureConfig:
    training = dataclasses.replace(
        settings.training,
        until=until,
        optimizer=dataclasses.replace(settings.training.optimizer, **optimizer),
    )
    return dataclasses.replace(settings, training=training)


@pytest.fixture(scope="module")
def data(settings, tmp_path_factory) -> FeatureData:
    return prepare_features(settings, tmp_path_factory.mktemp("features"), ALL, device="cpu")


def test_features_match_transformers_hidden_states(data, settings):
    from transformers import BertModel

    theirs = BertModel.from_pretrained(settings.model).eval()
    assert data.dev.layers == (0, 1, 2, 3, 4, 5)
    inputs = data.task_model.encode(data.dev_examples)
    row = 0
    for item in inputs[:8]:
        for sequence in item.sequences:
            with torch.no_grad():
                hidden = theirs(
                    torch.from_numpy(sequence.ids.astype(np.int64))[None], output_hidden_states=True
                ).hidden_states
            index = sequence.targets["tag"].index
            expected = np.stack([layer[0].numpy()[index] for layer in hidden], axis=1)
            np.testing.assert_allclose(data.dev.values[row : row + len(index)], expected, atol=2e-5)
            row += len(index)
    assert row == data.dev.offsets[8]
    words = sum(len(example.words) for example in data.dev_examples)
    assert data.dev.offsets[-1] == words == len(data.dev.values)
    assert isinstance(data.dev.values, np.memmap)


def test_words_of_windows_keep_order(data, tmp_path):
    words = tuple(random.Random(2).choices(FILLERS[:-1], k=60))
    example = TagExample(words, ("O",) * 60)
    inputs = data.task_model.task.encode(
        [example], data.task_model.tokenizer, data.task_model.labels, 10
    )
    assert len(inputs[0].sequences) > 5
    found = open_features(tmp_path / "long", data.task_model.model.encoder, inputs, (0,))
    assert len(found.values) == 60
    assert (found.labels == data.task_model.labels.index("O")).all()
    embedding = data.task_model.model.encoder.embedding
    (ids,) = data.task_model.tokenizer.encode([" ".join(words)])
    places = np.concatenate([sequence.targets["tag"].index for sequence in inputs[0].sequences])
    vectors = embedding.token.weight[ids] + embedding.position.weight[places]
    expected = embedding.norm(vectors + embedding.segment.weight[0]).detach()
    np.testing.assert_allclose(found.values[:, 0], expected, atol=1e-5)


def test_features_are_computed_once(data, tmp_path, monkeypatch):
    calls: list[tuple[int, ...]] = []
    plain = features.extract

    def counted(encoder, inputs, layers, table, progress):
        calls.append(layers)
        plain(encoder, inputs, layers, table, progress)

    monkeypatch.setattr(features, "extract", counted)
    encoder, inputs = data.task_model.model.encoder, data.task_model.encode(data.dev_examples)
    first = open_features(tmp_path / "dev", encoder, inputs, (3, 4))
    again = open_features(tmp_path / "dev", encoder, inputs, (4,))
    assert calls == [(3, 4)]
    assert again.layers == (3, 4)
    np.testing.assert_array_equal(first.values, again.values)
    more = open_features(tmp_path / "dev", encoder, inputs, (4, 5))
    assert more.layers == (3, 4, 5)
    np.testing.assert_array_equal(more.values[:, :2], first.values)
    alone = open_features(tmp_path / "5", encoder, inputs, (5,))
    np.testing.assert_array_equal(more.values[:, 2:], alone.values)
    assert calls.pop() == (5,)
    open_features(tmp_path / "dev", encoder, inputs[:-1], (5,))
    with torch.no_grad():
        bias = encoder.blocks[0].mlp.down.bias
        bias.add_(1.0)
        open_features(tmp_path / "dev", encoder, inputs[:-1], (5,))
        bias.sub_(1.0)
    open_features(tmp_path / "dev", encoder, inputs, (3, 4))
    assert calls == [(3, 4), (5,), (5,), (5,), (3, 4)]
    (tmp_path / "dev" / "features.json").write_text("no json")
    open_features(tmp_path / "dev", encoder, inputs, (3,))
    assert calls[-1] == (3,)
    assert len(open_features(tmp_path / "none", encoder, [], (3,)).values) == 0
    (tmp_path / "dev" / "dev.conll").write_text("the data")
    with pytest.raises(FolderError, match=r"dev\.conll") as raised:
        open_features(tmp_path / "dev", encoder, inputs, (6,))
    assert raised.value.where == tmp_path / "dev"
    assert (tmp_path / "dev" / "dev.conll").exists()


@pytest.mark.parametrize("choice", ["concat_last_four", "weighted_last_four", "weighted_all"])
def test_only_tagger_is_trained(data, settings, choice):
    before = {name: tensor.clone() for name, tensor in data.task_model.model.state_dict().items()}
    values = np.array(data.train.values)
    run = dataclasses.replace(with_training(settings, Epochs(0.5)), layers=choice)
    done = fit_features(data, run, device="cpu")
    after = data.task_model.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in data.task_model.model.parameters())
    np.testing.assert_array_equal(values, data.train.values)
    torch.manual_seed(settings.seed)
    fresh = build_tagger(data, run).state_dict()
    trained = done.tagger.state_dict()
    assert not any(torch.equal(fresh[name], tensor) for name, tensor in trained.items())
    weighted = {"weighted_last_four": 4, "weighted_all": 5}.get(choice, 0)
    assert len(done.shares) == weighted
    assert sum(done.shares) == pytest.approx(1.0 if weighted else 0.0)
    assert isinstance(done.tagger.mix, LayerSum) == bool(weighted)


def test_tagger_matches_reference(data, settings):
    tagger = build_tagger(data, dataclasses.replace(settings, layers="concat_last_four")).eval()
    sequences = data.dev.sequences(start=len(data.train.values))
    batch = pack(sequences[:4])
    rows = np.array(data.dev.values[: int(data.dev.offsets[4])])
    got = tagger.read(batch).numpy()
    np.testing.assert_array_equal(got, rows[:, 2:])
    joined = torch.from_numpy(rows[:, 2:].reshape(len(rows), -1))
    alone = [tagger.lstm.lstm(part)[0] for part in joined.split([len(s) for s in sequences[:4]])]
    expected = tagger.dense(torch.cat(alone))
    torch.testing.assert_close(tagger.logits(batch), expected)
    labels = torch.from_numpy(data.dev.labels[: len(rows)])
    loss = torch.nn.functional.cross_entropy(expected, labels, reduction="sum")
    torch.testing.assert_close(tagger(batch)["tag"].total, loss)
    assert tagger.weights(batch) == {"tag": len(rows)}
    tagger.train()
    assert not torch.equal(tagger.logits(batch), tagger.logits(batch))


def test_stored_features_may_have_more_layers(data):
    layers = data.train.layers
    more = (*layers, layers[-1] + 1)[::-1]
    places = [layers.index(layer) if layer in layers else 0 for layer in more]
    other = dataclasses.replace(data.dev, values=data.dev.values[:, places], layers=more)
    tagger, usual = (
        FeatureTagger([data.train, dev], "concat_last_four", 5, 3, BiLSTMTagger(8, 1, 0.0))
        for dev in (other, data.dev)
    )
    batch = pack(data.dev.sequences(len(data.train.values))[:4])
    assert torch.equal(tagger.read(batch), usual.read(batch))


def test_words_without_tag_have_no_loss(data):
    bare = dataclasses.replace(data.train, labels=np.full_like(data.train.labels, IGNORED))
    tagger = FeatureTagger([bare], "last", 5, 3, BiLSTMTagger(8, 1, 0.0))
    assert tagger.weights(pack(bare.sequences()[:3])) == {"tag": 0.0}


def test_tagger_learns_from_context(settings, tmp_path):
    heard = Heard()
    train = str(write_columns(tmp_path / "train.txt", 200, 0))
    run = dataclasses.replace(
        with_training(settings, Epochs(4.0), lr=2e-2), train=train, layers="embeddings",
        batch=ExampleBudget(8), tagger=BiLSTMTagger(32, 2, 0.0),
    )  # fmt: skip
    ready = prepare_features(run, tmp_path / "features", [run.layers], device="cpu", progress=heard)
    done = fit_features(ready, run, device="cpu", progress=heard)
    # 0 for one who knows the word alone: it is a name or none by what stands before it.
    assert done.metrics["f1"] > 0.8
    assert done.metrics["f1"] == max(f1 for _, f1 in done.history)
    assert len(done.history) == 4
    assert heard.names[-1] == "training"
    assert heard.done("training")[-1] == 1.0


def test_dev_sentences_keep_order(data, settings, monkeypatch):
    first = data.dev_examples[0]
    held = (TagExample((), ()), *data.dev_examples)
    dev = dataclasses.replace(data.dev, offsets=np.concatenate([[0], data.dev.offsets]))
    with_empty = dataclasses.replace(data, dev_examples=held, dev=dev)
    tagger = build_tagger(data, settings)
    tagger.train()
    with monkeypatch.context() as patch:
        patch.setattr(features, "AT_ONCE", 20)
        pairs = list(tag_words(tagger, with_empty))
    assert tagger.training
    assert [example for example, _ in pairs] == list(held)
    assert pairs[0][1].tags == ()
    assert pairs[1][1].words == first.words
    whole = list(tag_words(tagger, data))
    for (_, one), (_, other) in zip(pairs[1:], whole, strict=True):
        np.testing.assert_allclose(one.probabilities, other.probabilities, atol=1e-5)


def test_seeds_differ_and_evaluations_are_as_set(data, settings):
    training = dataclasses.replace(settings.training, until=Epochs(1.0), evaluate=Steps(2))
    short = dataclasses.replace(settings, training=training, layers="last")
    a, b = (
        fit_features(data, dataclasses.replace(short, seed=seed), device="cpu") for seed in (0, 1)
    )
    assert a.metrics != b.metrics
    assert [round(epochs, 1) for epochs, _ in a.history] == [0.5, 1.0]  # four steps an epoch


def test_command_prints_metrics_and_shares(settings, tmp_path, capsys):
    words = ["features", settings.model, settings.train, "--dev", settings.dev]
    words += ["--out", str(tmp_path), "--device", "cpu"]
    short = ["training.until=1 epochs", "tagger.hidden=8", "--layers", "weighted_last_four"]
    run_line(*words, *short, "--json")
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert said["layers"] == "weighted_last_four"
    assert 0 <= said["metrics"]["f1"] <= 1
    assert len(said["shares"]) == 4
    run_line(*words, *short)
    table = capsys.readouterr().out
    assert "Frozen features: weighted_last_four" in table
    assert "share of layer 4 of 4" in table


def test_mistakes_are_errors(data, settings, tmp_path):
    only_last = dataclasses.replace(data, train=dataclasses.replace(data.train, layers=(5,)))
    with pytest.raises(ConfigError, match="do not hold layer 4"):
        build_tagger(only_last, dataclasses.replace(settings, layers="second_to_last"))
    long = dataclasses.replace(settings, length=400)
    with pytest.raises(BothwaysError, match="positions"):
        prepare_features(long, tmp_path, ["last"], device="cpu")
    for wrong in ({"hidden": 0}, {"depth": 0}, {"dropout": 1.0}):
        with pytest.raises(ConfigError, match=f"tagger.{next(iter(wrong))}"):
            BiLSTMTagger(**wrong)
    assert settings.task == TaggingTask(context="document")
