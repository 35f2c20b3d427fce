"""The command line offers every task, by any of its names."""

import re
import shlex

import pytest

import bothways
from bothways.cli.main import app, import_for_help, rename_options, run_command_line
from bothways.cli.predict import predict
from bothways.core.errors import ConfigError
from bothways.tasks.catalogue import ALL_TASKS, TASKS
from commands import run_line

HELP = ["--help", "-h", "--version", "--install-completion"]


def test_the_help_names_every_task(capsys):
    for command in ("finetune", "sweep"):
        run_line(command, "--help")
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        missing = {name for name in TASKS if f" {name}," not in shown}
        assert missing == set(), "name these tasks in the help of --task in cli/options.py"
    untrained = ALL_TASKS.keys() - TASKS.keys()
    missing = {name for name in untrained if f" {name}," not in (predict.__doc__ or "")}
    assert missing == set(), "name these tasks in the help of bothways predict"


def test_a_task_without_training_is_one_message(tmp_path):
    name = "fill-mask"
    message = rf"task: '{name}' needs no fine-tuning.*\n.*load\(MODEL, task=\"fill\""
    with pytest.raises(ConfigError, match=message):
        run_line("finetune", "m", "d.tsv", "--task", name)
    with pytest.raises(ConfigError, match=message):
        bothways.finetune("m", [{"text": "a", "label": "b"}], task=name)
    with pytest.raises(ConfigError, match=message):
        bothways.finetune("m", "d.tsv", task=name, out=tmp_path / "run")


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


@pytest.mark.parametrize("group", ["", "tokenizer", "corpus", "reproduce"])
def test_each_command_has_an_example_that_is_understood(group):
    import_for_help([])
    commands = app[group] if group else app
    for name in {*commands} - {"tokenizer", "corpus", "reproduce", *HELP}:
        arguments = commands[name].assemble_argument_collection(parse_docstring=True)
        helps = [(each.parameter.help or "").lower() for each in arguments]
        assert [text for text in helps if " in python " in text] == []
        line = re.fullmatch(r"Example: `(bothways .+)`", commands[name].help_epilogue)[1]
        assert line.startswith(" ".join(["bothways", *group.split(), name, ""]))
        words = rename_options(app, shlex.split(line)[1:])
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        texts = bound.arguments.get("texts", ())
        assert [text for text in texts if not {*text} & {*"./"}] == [], "not the name of a file"


@pytest.mark.parametrize(
    "words",
    ["--weight-decay --resume", "--num-train-epochs", "--adapter-only --grid lora.rank=2,4"],
)
def test_a_setting_with_dashes_does_not_take_the_next_option_for_its_value(words):
    import_for_help([])
    command = "sweep m d.tsv --dev 20%" if "grid" in words else "finetune m d.tsv"
    with pytest.raises(ConfigError, match="needs a value") as caught:
        rename_options(app, [*command.split(), *words.split()])
    assert caught.value.where == words.split()[0]
    renamed = rename_options(app, ["finetune", "m", "d.tsv", "--weight-decay", "-1", "--resume"])
    assert renamed == ["finetune", "m", "d.tsv", "--resume", "weight_decay=-1"]


def test_help_before_a_command_is_its_help(monkeypatch, capsys):
    for words in (["help", "tokenizer", "train"], ["tokenizer", "train", "--help"]):
        monkeypatch.setattr("sys.argv", ["bothways", *words])
        run_command_line()
    first, second = capsys.readouterr().out.split("Usage: ")[1:]
    assert first == second


def test_the_help_shows_each_argument_by_one_name(capsys):
    run_line("finetune", "--help")
    shown = capsys.readouterr().out
    assert re.search(r"\* +MODEL +A model", shown)
    assert "--model" not in shown
    assert "--no-" not in shown
    run_line("serve", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert [words for words in ("--empty-limit", "[default: ()]") if words in shown] == []
    run_line("tokenizer", "train", "--help")
    assert "--no-lowercase" in capsys.readouterr().out, "without it, there is no way to say no"
    run_line("settings", "--help")
    assert "[default: ]" not in capsys.readouterr().out
