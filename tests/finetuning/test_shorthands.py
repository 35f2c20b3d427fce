"""Common names stand for settings with their dotted paths."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

import bothways
from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError, UnknownKeyError
from bothways.data.loader import ExampleBudget
from bothways.finetuning.config import SAME, SHORTHANDS, FinetuneConfig, load_config
from bothways.training.run import PEER_NAMES
from bothways.training.schedules import Epochs
from bothways.training_runs import finetune_settings

BASE = FinetuneConfig(model="m", train="t.tsv")


@pytest.mark.parametrize(
    "overrides",
    [
        ["lr=3e-4", "epochs=4", "batch=16", "max_length=64"],
        ["learning_rate=3e-4", "epochs=4", "batch_size=16", "length=64"],
        {"lr": 3e-4, "epochs": 4, "batch": 16, "max_length": 64},
    ],
)
def test_common_names_are_settings(overrides):
    settings = load_config(BASE, overrides)
    assert settings.training.optimizer.lr == 3e-4
    assert settings.training.until == Epochs(4.0)
    assert settings.batch == ExampleBudget(16)
    assert settings.length == 64


def test_every_shorthand_is_a_setting():
    values: dict[str, Any] = {
        "epochs": "2", "until": "7 steps", "batch_size": "8", "max_length": "64",
        "early_stopping": "3", "precision": "fp32", "evaluate": "20 steps", "optimizer": "lamb",
        "schedule": "cosine", "columns": {"text": "words"}, "adapter_only": "true",
    }  # fmt: skip
    base = replace(BASE, dev="30%")  # for the group of a split
    for name in SHORTHANDS:
        given = {name: values.get(name, "0.2")}
        given |= {"text": "words"} if name == "text_b" else {}
        assert load_config(base, given) != base


@pytest.mark.parametrize("name", SAME)
def test_names_of_other_libraries_that_mean_the_same_are_accepted(name):
    ours, form = SAME[name]
    base = replace(BASE, dev="d.tsv")
    value: Any = {
        "schedule": "cosine", "metric": "mcc", "task.weighting": "balanced",
        "text": "words", "label": "class",
    }.get(ours, 1)  # fmt: skip
    value = 0.2 if ours in {"task.smoothing", "warmup"} and "steps" not in form else value
    value = 64 if ours == "length" else 7 if value == 1 else value
    given, path = load_config(base, {name: value}), form.format(value)
    assert given == load_config(base, [f"{ours}={path}"]) != base
    assert given == load_config(base, [f"{name}={value}"])


@pytest.mark.parametrize("name", PEER_NAMES)
def test_a_name_of_transformers_with_another_meaning_is_told_the_setting(name, tmp_path):
    with pytest.raises(UnknownKeyError, match=rf"did you mean {PEER_NAMES[name]}\?"):
        load_config(BASE, {name: 1})
    path = SHORTHANDS.get(PEER_NAMES[name], PEER_NAMES[name])
    (tmp_path / "a.toml").write_text(f"{name} = 1\n")
    with pytest.raises(ConfigError, match=rf"did you mean {path}\?"):
        load_config(BASE, file=tmp_path / "a.toml")
    assert path in {setting.path for setting in configs.list_settings(BASE)}


@pytest.mark.parametrize("share", [0.25, "0.25", ".25", 0, "0"])
def test_warmup_steps_below_1_are_a_share_as_in_transformers_5(share):
    given = load_config(BASE, {"warmup_steps": share})
    assert given == load_config(BASE, {"warmup": float(share)}) != BASE
    with pytest.raises(ConfigError, match="warmup"):
        load_config(BASE, {"warmup_steps": "many"})


def test_a_schedule_by_name_keeps_its_settings_in_any_order():
    for first, second in itertools.product(
        ("schedule=cosine", "training.schedule=cosine"),
        ("warmup=0.25", "training.schedule.warmup=0.25"),
    ):
        schedule: Any = load_config(BASE, [first, second]).training.schedule
        assert schedule == load_config(BASE, [second, first]).training.schedule
        assert (schedule.kind, schedule.warmup) == ("cosine", 0.25)


@pytest.mark.parametrize(
    "names",
    [
        ("lr", "learning_rate"),
        ("epochs", "max_steps"),
        ("lr", "training.optimizer.lr"),
        ("training.optimizer.kind", "optimizer"),
    ],
)
def test_a_setting_under_two_names_is_refused(names):
    with pytest.raises(ConfigError) as refused:
        load_config(BASE, dict.fromkeys(names, "1"))
    assert refused.value.where in names


@pytest.mark.parametrize(
    ("where", "run"),
    [
        ("model", lambda rows: bothways.finetune(object(), rows)),
        ("teacher", lambda rows: bothways.distil(object(), rows, "b")),
        ("student", lambda rows: bothways.distil("a", rows, object())),
    ],
)
def test_a_model_in_memory_is_refused_where_a_folder_is_needed(where, run):
    with pytest.raises(ConfigError) as refused:
        run([{"text": "a", "label": "b"}])
    assert refused.value.where == where


def test_arguments_have_priority_over_the_file_of_another_run(tmp_path, monkeypatch):
    """A run by the config.toml of another one had that one's model, and named its data."""
    seen: list[FinetuneConfig] = []
    monkeypatch.setattr("bothways.finetuning.run.finetune", lambda run, *_, **__: seen.append(run))
    file = tmp_path / "config.toml"
    file.write_text(configs.to_toml(replace(BASE, dev="d.tsv")))
    bothways.finetune("new", "new.tsv", config=file, lora={"rank": 4})
    bothways.finetune("new", "new.tsv", dev=0.2, config=file)
    assert [(run.model, run.train, run.dev) for run in seen] == [
        ("new", "new.tsv", "d.tsv"), ("new", "new.tsv", "20%"),
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"task: is regress, and .*config.toml has the task class"
    ):
        bothways.finetune("new", "new.tsv", task="regress", config=file)
    with pytest.raises(ConfigError, match="a setting has the task multilabel"):
        bothways.finetune("new", "new.tsv", task="regress", **{"task.kind": "multilabel"})
    # Of a table without a kind the settings have to be those of the task.
    file.write_text('[task]\nseparator = ","')
    bothways.finetune("new", "new.tsv", task="multilabel", config=file)
    with pytest.raises(
        ConfigError, match=r"is a setting of multilabel, and task is regress"
    ) as error:
        bothways.finetune("new", "new.tsv", task="regress", config=file)
    assert error.value.where == f"{file}: task.separator"
    for text, near in (
        ("epochs = 1", "training.until"),
        ("patience = 2", "training.early_stopping"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"did you mean {near}") as error:
            bothways.finetune("new", "new.tsv", config=file)
        assert str(error.value.where).startswith(f"{file}: ")
    file.write_text('sharding = "auto"')
    with pytest.raises(ConfigError) as error:
        bothways.finetune("new", "new.tsv", config=file)
    assert error.value.where == f"{file}: sharding"
    # "classify" may be the default of the argument, over which the file has priority.
    file.write_text('task = "tag"')
    settings, notes = finetune_settings("new", "new.tsv", None, "classify", {}, config=file)
    assert settings.task.kind == "tag"
    assert ["tag" in note for note in notes] == [True]
