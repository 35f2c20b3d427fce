"""The command line offers every task, by any of its names."""

import re

import pytest

import bothways
from bothways.cli.main import app, import_for_help
from bothways.cli.predict import predict
from bothways.core.errors import ConfigError
from bothways.tasks.catalogue import ALL_TASKS, TASKS, trainable_task
from commands import run_line


def test_the_help_names_every_task(capsys):
    for command in ("finetune", "sweep"):
        run_line(command, "--help")
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert all(f" {name}," in shown for name in TASKS)
    assert all(f" {name}," in (predict.__doc__ or "") for name in ALL_TASKS.keys() - TASKS.keys())


def test_a_task_is_known_by_its_usual_names(tmp_path):
    assert trainable_task("NER").name == "tag"
    with pytest.raises(ConfigError, match=r"'clasify' is not a task; .* did you mean 'classify'"):
        run_line("finetune", "m", "d.tsv", "--task", "clasify")


def test_a_task_without_training_is_one_message(tmp_path):
    name = "fill-mask"
    message = rf"task: '{name}' needs no fine-tuning.*\n.*load\(MODEL, task=\"fill\""
    with pytest.raises(ConfigError, match=message):
        run_line("finetune", "m", "d.tsv", "--task", name)
    with pytest.raises(ConfigError, match=message):
        bothways.finetune("m", [{"text": "a", "label": "b"}], task=name)
    with pytest.raises(ConfigError, match=message):
        bothways.finetune("m", "d.tsv", task=name, out=tmp_path / "run")


def test_the_help_of_a_command_is_its_docstring(capsys):
    run_line("serve", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--empty-limit" not in shown
    assert "[default: ()]" not in shown


@pytest.mark.parametrize("group", ["", "corpus"])
def test_the_list_of_commands_has_a_line_about_each(group, capsys):
    words = [*group.split(), "--help"]
    import_for_help(words)
    run_line(*words)
    names = [word for word in (app[group] if group else app) if not word.startswith("-")]
    shown = capsys.readouterr().out
    assert names
    for name in names:
        assert re.search(rf"^│ {name} +[A-Z][\w-]+[ :]", shown, re.MULTILINE), name
