"""The settings of a pre-training run, as users first write them."""

import dataclasses
import re
from typing import Any

import pytest

import bothways
from bothways.core.config import reader as configs
from bothways.core.config.values import flatten
from bothways.core.errors import ConfigError, DataError, UnknownKeyError
from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig, PreNorm
from bothways.model.families.catalogue import preset
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import (
    ALL_PEER_NAMES,
    PretrainConfig,
    PretrainPhase,
    load_pretraining,
)
from bothways.pretraining.recipes import distillation, modern
from bothways.training.run import TRAINING_NAMES
from bothways.training.schedules import Epochs, Steps
from commands import run_line

BASE = modern(preset("bert-tiny"))


def test_common_names_are_settings():
    read = load_pretraining(BASE, ["lr=3e-4", "epochs=4", "warmup=0.2"])
    again = load_pretraining(BASE, {"learning_rate": 3e-4})
    assert read.training.optimizer == again.training.optimizer
    assert flatten(configs.to_dict(read))["training.optimizer.lr"] == 3e-4
    assert read.training.until == Epochs(4.0)
    assert load_pretraining(BASE, ["until=7 steps"]).training.until == Steps(7)
    values: dict[str, Any] = {
        "epochs": "2", "until": "7 steps", "precision": "fp32", "evaluate": "20 steps",
        "optimizer": "lamb", "schedule": "constant",
    }  # fmt: skip
    for name in TRAINING_NAMES:
        assert load_pretraining(BASE, {name: values.get(name, "0.2")}) != BASE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("clip_norm=1", r"'clip_norm'; did you mean training\.clip_norm\?"),
        ("optim=adamw_torch", r"'optim'; did you mean optimizer\?"),
        ("lrr=1", r"'lrr'; did you mean lr\?"),
        ("batch=16", r"batch: 16 is given, .*\n.*batch\.n=16 and batch\.kind=examples, or batch"),
        ("per_device_train_batch_size=9", r"per_device_train_batch_size: 9 .*\n.*batch\.n=9 and"),
        ("batch_size=16", r"batch_size: 16 is given, .*\n.*batch\.n=16 and batch\.kind=examples"),
        ("fresh=masked", r"fresh: names masked, and without start all heads begin at random"),
        ("microbatch_tokens=0", r"microbatch_tokens: must be at least 1, not 0"),
        ("evaluation_tokens=-1", r"evaluation_tokens: must be at least 1, not -1"),
        ("objective.segments.length=9", r"objective\.segments\.length: is 9, .*\n.*phases\.1"),
        ("phases.0.segments.length=9", r"phases\.0\.segments\.length: is 9, .*\n.*phases\.0"),
    ],
)
def test_a_name_that_is_none_is_told_the_setting(given, message):
    with pytest.raises(ConfigError) as error:
        load_pretraining(BASE, [given])
    assert re.search(message, error.value.message("command"))


@pytest.mark.parametrize("name", ALL_PEER_NAMES)
def test_a_name_of_transformers_with_another_meaning_is_told_the_setting(name):
    with pytest.raises(UnknownKeyError, match=rf"did you mean {ALL_PEER_NAMES[name]}\?"):
        load_pretraining(BASE, {name: 1})
    path = TRAINING_NAMES.get(ALL_PEER_NAMES[name], ALL_PEER_NAMES[name])
    assert path in {setting.path for setting in configs.list_settings(BASE)}


def test_the_recipe_follows_the_budget_in_python_too(corpus, monkeypatch):
    seen: list[PretrainConfig] = []
    monkeypatch.setattr("bothways.pretraining.run.pretrain", lambda run, *_, **__: seen.append(run))
    for until, recipe in (("5 minutes", None), ("2 hours", None), ("5 minutes", "modern")):
        bothways.pretrain(corpus, "bert-tiny", until=until, recipe=recipe, lr=2e-3)
    bothways.pretrain(corpus, "bert-tiny", MaskedLMNextSentence())
    assert seen.pop().objective == MaskedLMNextSentence()
    assert [run.evaluation_tokens for run in seen] == [20_000, 200_000, 200_000]
    assert [flatten(configs.to_dict(run))["training.optimizer.lr"] for run in seen] == [2e-3] * 3


def test_arguments_have_priority_over_the_file_of_another_run(corpus, tmp_path, monkeypatch):
    """The file had replaced the model that was named, its weights or the teacher."""
    seen: list[PretrainConfig] = []
    monkeypatch.setattr("bothways.pretraining.run.pretrain", lambda run, *_, **__: seen.append(run))
    tiny = fit_to_corpus(preset("bert-tiny"), corpus.tokenizer)
    save_model(tmp_path / "new", Model(tiny, [MaskedHead()]), corpus.tokenizer)
    new, file = str(tmp_path / "new"), tmp_path / "config.toml"
    file.write_text(configs.to_toml(modern(tiny)))
    another = r"model: is given, and .*config.toml has a model with another width, depth, heads"
    with pytest.raises(ConfigError, match=another):
        bothways.pretrain(corpus, "bert-mini", config=file)
    with pytest.raises(ConfigError, match=another):
        run_line("plan", "bert-mini", "--config", file)
    sizes = {name: getattr(tiny, name) for name in ("width", "depth", "heads", "intermediate_size")}
    for model, settings in (("bert-mini", {"encoder": sizes}), ("bert-tiny", {}), (None, {})):
        bothways.pretrain(corpus, model, config=file, **settings)
    bothways.pretrain(corpus, start=new, config=file)
    other = {"objective.teacher": f"{new}/", "start": "none", "start_layers": "none"}
    taught = load_pretraining(distillation(new), other)
    file.write_text(configs.to_toml(taught))
    with pytest.raises(ConfigError, match=r"student: is given, and .* with another depth"):
        bothways.distil(new, corpus, "bert-tiny", config=file)
    bothways.distil(new, corpus, config=file)
    bothways.distil(new, corpus, new, config=file, **{"encoder.depth": 2})
    assert [run.encoder.width for run in seen] == [tiny.width] * 6
    assert [run.start for run in seen] == [None, None, None, new, None, new]
    assert [getattr(run.objective, "teacher", None) for run in seen[-2:]] == [new, new]
    # A student that starts from its teacher starts from the one that is named, with its layers.
    save_model(
        tmp_path / "old",
        Model(dataclasses.replace(tiny, depth=4), [MaskedHead()]),
        corpus.tokenizer,
    )
    taught = distillation(str(tmp_path / "old"))
    assert taught.start_layers == (1, 4)
    file.write_text(configs.to_toml(dataclasses.replace(taught, encoder=tiny)))
    bothways.distil(new, corpus, config=file, **{"encoder.depth": 1})
    bothways.distil(new, corpus, new, config=file)
    bothways.distil(taught.start, corpus, config=file)
    assert [run.start for run in seen[6:]] == [new, new, taught.start]
    assert [run.start_layers for run in seen[6:]] == [(1,), None, (1, 4)]
    with pytest.raises(ConfigError, match=r"objective\.teacher: is a setting of distillation"):
        bothways.distil(new, corpus, objective="masked_lm")


def test_a_shape_that_is_no_larger_than_the_model_to_start_from_is_refused(corpus, tmp_path):
    """The shape of the model was taken, without a word about the other one."""
    start = EncoderConfig(corpus.tokenizer.size, 64, 2, 2, 64, position=Learned(512))
    save_model(tmp_path, Model(start, [MaskedHead()]), corpus.tokenizer)
    for changes, names in (
        ({"depth": 1}, "depth"), ({"width": 128}, "heads"), ({"heads": 4}, "heads"),
        ({"order": PreNorm()}, "order"), ({"intermediate_size": 63}, "intermediate_size"),
    ):  # fmt: skip
        shape = dataclasses.replace(start, **changes)
        with pytest.raises(ConfigError, match=rf"encoder: is not a larger shape .*: {names}\n"):
            bothways.pretrain(corpus, shape, start=tmp_path, until="1 steps")
    words = ["pretrain", str(corpus.folder), "--model", "bert-mini", "--start", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"encoder: is not a larger shape .*: heads\n"):
        run_line(*words, "--out", tmp_path / "run")


def test_settings_change_a_shape_before_it_is_compared_with_the_start(corpus, tmp_path):
    start = EncoderConfig(corpus.tokenizer.size, 64, 2, 2, 64, position=Learned(512))
    save_model(tmp_path, Model(start, [MaskedHead()]), corpus.tokenizer)
    shape = {"width": 64, "heads": 2, "depth": 3, "intermediate_size": 64}
    grown = bothways.pretrain(
        corpus, "bert-tiny", "masked-lm", until="1 steps", start=tmp_path, encoder=shape
    )
    assert (grown.model.config.width, grown.model.config.depth) == (64, 3)


@pytest.mark.parametrize("share", [0.0, -0.5, float("nan")])
def test_each_phase_has_a_share(share):
    phases = PretrainPhase(16, share), PretrainPhase(16, 1 - share)
    with pytest.raises(ConfigError, match=r"phases\.0\.share: must be above 0 and at most 1"):
        dataclasses.replace(BASE, phases=phases)


def test_a_depth_beyond_any_model_is_refused_before_it_is_built():
    with pytest.raises(ConfigError, match=r"encoder\.depth: must be at most 10,000"):
        dataclasses.replace(BASE, encoder=dataclasses.replace(BASE.encoder, depth=10**9))


@pytest.mark.parametrize("nothing", [{}, []])
def test_no_corpus_is_refused(nothing):
    with pytest.raises(DataError, match="corpus: there is no corpus"):
        bothways.pretrain(nothing, "bert-tiny")


def test_a_loaded_model_is_no_shape(corpus):
    with pytest.raises(ConfigError, match=r"model: must be .* not Model\n.*start=FOLDER"):
        bothways.pretrain(corpus, Model(preset("bert-tiny"), ()), until="1 steps")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": MaskedLM}, r"^objective: must be a name or an objective, not .*LM"),
        ({"resume": True}, r"^resume: .*\n.*out=FOLDER"),
        ({"training": {"trackers": ["wandb"]}}, r"^training\.trackers: need a run in a folder"),
    ],
)
def test_a_class_and_what_needs_a_folder_are_refused(settings, message, corpus):
    with pytest.raises(ConfigError, match=message):
        bothways.pretrain(corpus, "bert-tiny", until="1 steps", phases=[{"length": 16}], **settings)
