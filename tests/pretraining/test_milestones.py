"""Models that are saved by words read: counted as a shell does, at the step that reaches them, after a stop too, and averaged."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from bothways.core.errors import ConfigError, DataError
from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget
from bothways.hub.model_folder import load_model
from bothways.model.families.catalogue import preset
from bothways.objectives.gpt_bert import GPTBERT
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.recipes import BABYLM, RECIPES
from bothways.pretraining.run import milestone_name, pretrain
from bothways.training.schedules import Epochs, Steps
from heard_progress import Heard
from toy_corpora import write_texts
from toy_pretraining import small_run
from toy_training import stop_at


@pytest.fixture(scope="module")
def counted(tokenizer, tmp_path_factory) -> tuple[Corpus, int]:
    """Documents of 11 words each, and all their words."""
    orders = itertools.islice(itertools.permutations(["cat", "dog", "owl", "fox", "now"]), 60)
    texts = [f"The {a} sees the {b} {c}. {d}\t{e}  is here,\nnow." for a, b, c, d, e in orders]
    return write_texts(tmp_path_factory.mktemp("counted") / "corpus", tokenizer, texts), 60 * 11


def settings_for(corpus: Corpus, milestones: tuple[int, ...], **training) -> PretrainConfig:
    return small_run(
        corpus, Epochs(2.0), objective=GPTBERT(), training={"save": Steps(3), **training},
        batch=ExampleBudget(4), word_milestones=milestones,
    )  # fmt: skip


def test_models_are_saved_at_the_step_that_reaches_the_words(counted, tmp_path):
    corpus, words = counted
    assert corpus.manifest.counts.words == words
    trained = 0.9 * words
    targets = (int(0.4 * trained), int(1.5 * trained), int(5 * trained))
    weights, epochs, progress = [], [], Heard()

    def note(event):
        if event.kind == "step":
            epochs.append(event.progress.epochs)
            present = [(tmp_path / "run" / milestone_name(target)).is_dir() for target in targets]
            assert present == [epochs[-1] * trained >= target for target in targets]
            weights.append(present)

    done = pretrain(
        settings_for(corpus, targets), corpus, tmp_path / "run", on_event=note, progress=progress
    )
    assert milestone_name(targets[2]) in progress.text.split()
    first = load_model(tmp_path / "run" / milestone_name(targets[0]))
    assert first.extra["words"] == targets[0]
    assert first.extra["tokens"] < done.progress.tokens
    assert first.model.config.readout.shifted
    table = "encoder.embedding.token.weight"
    assert not torch.equal(first.model.state_dict()[table], done.model.state_dict()[table])


def test_a_resumed_run_saves_the_same(counted, tmp_path):
    corpus, words = counted
    targets = (int(0.3 * words), int(1.2 * words))
    settings = settings_for(corpus, targets)
    pretrain(settings, corpus, tmp_path / "whole")
    with pytest.raises(InterruptedError):
        pretrain(settings, corpus, tmp_path / "cut", on_event=stop_at(6))
    assert not (tmp_path / "cut" / milestone_name(targets[1])).exists()
    pretrain(settings, corpus, tmp_path / "cut", resume=True)
    for target in targets:
        file = Path(milestone_name(target), "model.safetensors")
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes()


def test_a_milestone_that_was_passed_is_reported_not_saved_later(counted, tmp_path):
    corpus, words = counted
    early, late = int(0.3 * words), int(1.2 * words)
    stop, heard = stop_at(6), Heard()
    with pytest.raises(InterruptedError):
        pretrain(settings_for(corpus, (late,)), corpus, tmp_path, on_event=stop, progress=heard)
    assert "words were read" not in heard.text
    settings = settings_for(corpus, (early, late))
    pretrain(settings, corpus, tmp_path, resume=True, progress=heard)
    assert not (tmp_path / milestone_name(early)).exists()
    assert milestone_name(early) in heard.text.split()
    assert (tmp_path / milestone_name(late)).is_dir()


def test_the_average_of_the_weights_is_saved(counted, tmp_path):
    corpus, words = counted
    targets, table = (int(1.7 * words),), "encoder.embedding.token.weight"
    done = pretrain(settings_for(corpus, targets, ema=0.9), corpus, tmp_path / "run")
    pretrain(settings_for(corpus, targets), corpus, tmp_path / "plain")
    name = milestone_name(targets[0])
    averaged, weights = (
        load_model(tmp_path / run / name).model.state_dict()[table] for run in ("run", "plain")
    )
    assert not torch.equal(averaged, weights)
    # Near the end of the run the average is nearer to the final average than the weights are.
    final = done.model.state_dict()[table]
    assert (averaged - final).norm() < (weights - final).norm()


@pytest.mark.parametrize("milestones", [(2, 1), (0, 1), (1, 1)])
def test_milestones_ascend(counted, milestones):
    with pytest.raises(ConfigError, match="word_milestones: must be ascending numbers above 0"):
        settings_for(counted[0], milestones)


def test_what_cannot_be_counted_or_saved_is_refused(counted, tmp_path):
    corpus, _ = counted
    settings = settings_for(corpus, (10,))
    with pytest.raises(ConfigError, match="this one has none"):
        pretrain(settings, corpus)
    with pytest.raises(ConfigError, match="are for one corpus"):
        pretrain(settings, {"a": corpus, "b": corpus}, tmp_path / "two")
    counts = dataclasses.replace(corpus.manifest.counts, words=None)
    old = dataclasses.replace(corpus, manifest=dataclasses.replace(corpus.manifest, counts=counts))
    with pytest.raises(DataError, match="was built before words were counted"):
        pretrain(settings, old, tmp_path / "old")


def test_the_recipe_has_the_checkpoints_of_the_challenge(corpus):
    names = [milestone_name(words) for words in BABYLM]
    assert names == [*(f"chck_{n}M" for n in range(1, 10)), *(f"chck_{n}0M" for n in range(1, 11))]
    settings = RECIPES["babylm"](fit_to_corpus(preset("bert-mini"), corpus.tokenizer))
    assert settings.word_milestones == BABYLM
    assert settings.objective.kind == "gpt_bert"
    assert sum(phase.share for phase in settings.phases) == pytest.approx(1)


def test_names_of_milestones_have_all_digits():
    words = (1_000, 10_000_000, 1_234_567, 1_234_568)
    names = ["chck_0.001M", "chck_10M", "chck_1.234567M", "chck_1.234568M"]
    assert [*map(milestone_name, words)] == names
