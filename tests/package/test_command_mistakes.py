"""Mistakes of a command line: one form, names that are near, and options under names of other libraries."""

import errno
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch
from cyclopts import CycloptsError

from bothways.cli import main as cli
from bothways.cli.main import explain_mistake, rename_options
from bothways.cli.options import training
from bothways.core.errors import BothwaysError, ConfigError, ResourceError, render
from commands import run_line
from toy_folder import make_examples, make_folder, save_classifier, write_tsv


def mistake(line: str) -> tuple[str | None, str]:
    """The place of the error, and the whole message."""
    with pytest.raises(CycloptsError) as raised:
        cli.app(
            rename_options(cli.app, shlex.split(line)),
            result_action="return_value", print_error=False, exit_on_error=False,
        )  # fmt: skip
    error = explain_mistake(raised.value)
    return None if error.where is None else str(error.where), str(error)


@pytest.mark.parametrize(
    ("line", "where", "named"),
    [
        (
            "corpus build x.txt --out c",
            "--tokenizer",
            ["is missing", "tokenizer.json", "corpus build --help"],
        ),
        ("finetune", "MODEL", ["is missing"]),
        ("finetune m d.tsv --out", "--out", ["needs a value"]),
        ("finetune m d.tsv --lr abc", "--lr", ["'abc'", "number"]),
        ("inspect-step run abc corpus", "STEP", ["'abc'", "number"]),
        (
            "mine p.jsonl --index i --out o --margin x",
            "--margin",
            ["'x' is not a number or none"],
        ),
        ("finetune m d.tsv --lr 1 --lr 2", "--lr", ["twice"]),
        ("embed m x.txt", "--out", ["is missing", ".npy"]),
        ("predict m f.txt --precision=fp6", "--precision", ["'fp6'", "fp32"]),
        ("finetune m d.tsv --epochss 3", "--epochss", ["did you mean --epochs?"]),
        ("predict m f.txt --format csv", "--format", ["'csv'", "--out FILE.csv"]),
        ("describe a b", "bothways describe", ["b"]),
        ("train m d.tsv", None, ["finetune or pretrain"]),
        ("tokenizer train x --vocab-size 3", "--vocab-size", ["did you mean --size?"]),
        ("corpus bild", None, ["did you mean build?"]),
        ("--epochs 1 finetune m d.tsv", "--epochs", ["before", "bothways COMMAND … --epochs"]),
        (
            "finetune --model m d.tsv",
            "bothways finetune",
            ["'d.tsv' has no name", "Leave out --model"],
        ),
        ("tokenizer --size=3 train x", "--size=3", ["bothways tokenizer COMMAND"]),
    ],
)
def test_a_mistake_says_where_and_what(line, where, named):
    place, message = mistake(line)
    assert place == where
    assert [word for word in named if word not in message] == []


@pytest.mark.parametrize("command", ["pretrain corpus", "adapt model texts"])
def test_a_unit_of_a_duration_without_quotation_marks_is_no_file(command):
    with pytest.raises(ConfigError, match="--until: '2' has no unit"):
        run_line(*command.split(), "--until", "2", "minutes", "--out", "run")


def test_a_file_is_advised_where_a_format_is_asked_for():
    assert "FILE.csv" not in mistake("predict m f.txt --precision csv")[1]


@pytest.mark.parametrize("option", ["--freeze", "--quiet", "--gradient-clipping"])
def test_nothing_is_suggested_that_only_looks_alike(option):
    assert "did you mean" not in mistake(f"finetune m d.tsv {option} 3")[1]


@pytest.mark.parametrize(
    ("line", "renamed"),
    [
        ("finetune m d.tsv --learning-rate 3e-5", "finetune m d.tsv learning_rate=3e-5"),
        ("finetune --num-train-epochs=3 m d.tsv", "finetune --epochs 3 m d.tsv"),
        ("finetune m d.tsv --max_length 64", "finetune m d.tsv --max-length 64"),
        ("finetune m d.tsv --patience 3", "finetune m d.tsv patience=3"),
        ("pretrain c --objective masked_lm", "pretrain c objective=masked_lm"),
        ("pretrain c --max-steps 100 --out run", "pretrain c --until '100 steps' --out run"),
        ("describe bert-tiny --lr 3", "describe bert-tiny --lr 3"),
        ("finetune m d.tsv --text=a --lr 1 --nonsense 1", "finetune m d.tsv --text=a --lr 1 --nonsense 1"),
    ],
)  # fmt: skip
def test_options_of_other_libraries_are_ours(line, renamed):
    assert rename_options(cli.app, shlex.split(line)) == shlex.split(renamed)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("finetune m d.tsv \u2014text id", "--text"),
        ("predict m d.tsv \uff0d\uff0dtop=1", "--top"),
        ("corpus build t.txt \u2013-tokenizer t", "--tokenizer"),
    ],
)
def test_an_option_with_a_dash_is_not_taken_for_a_file(line, option):
    """As programs for text write the two hyphens of a command that is copied."""
    with pytest.raises(ConfigError, match=rf"begins with a dash.*\n  Type {option}\.$"):
        rename_options(cli.app, line.split())
    text = ["predict", "m", "\u2014 yes", "\u2014\u2014yes", "\u2014toppled"]
    assert rename_options(cli.app, text) == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("predict m --topp 3", "error: --topp: unknown option; did you mean --top?\n"),
        (
            "pretrain c --mlm-probability 0.3",
            "error: --mlm-probability: unknown option; did you mean objective.masking.rate=VALUE?\n",
        ),
        ("finetune m d.tsv --fp16", "error: --fp16: unknown option; did you mean precision=VALUE?"),
        ("corpus inspect no-such-folder", "error: no-such-folder: "),
        ("calibrate m d.tsv --out made --error 10", "error: --error: must be above 0 and below 1"),
    ],
)
def test_the_command_prints_the_message(line, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bothways", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.run_command_line()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A pre-trained model, a classifier, and data."""
    folder = tmp_path_factory.mktemp("first")
    save_classifier(folder / "classifier", make_folder(folder / "bert", dropout=0.0))
    write_tsv(folder / "train.tsv", make_examples(16, 0))
    for name in ("empty.tsv", "packed.tsv.gz"):
        (folder / name).touch()
    (folder / "tickets.csv").write_text("id,wording,queue\n1,a film,good\n")
    (folder / "semicolons.csv").write_text("text;label\na film;good\n")
    (folder / "nameless.csv").write_text("a film,good\na play,bad\na show,good\n")
    (folder / "unseen.tsv").write_text("sentence\tlabel\na good film\tpso\na bad play\tneg\n")
    (folder / "long.txt").write_text("the film was good " * 200 + "\n")
    (folder / "folder").mkdir()
    names = ",".join(f"c{n}" for n in range(1000))
    (folder / "wide.csv").write_text(f"{names}\n{'x,' * 999}x")
    return folder


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("bench --rounds 0", "rounds"),
        ("bench --rounds 1.5", "--rounds"),
        ("finetune bert train.tsv --batch-size 1.000", "--batch-size"),
        ("inspect-step bert 5.5 corpus", "STEP"),
        ("predict classifier ''", "INPUTS"),
        ("settings finetune", "prefix"),
        ("distil bert", "data"),
        ("features bert train.tsv --dev train.tsv layers=last", "layers"),
        ("predict classifier train.tsv --out ''", "--out"),
        ("finetune bert train.tsv batch_size=1.000", "batch.n"),
        ("finetune bert train.tsv --until='1.000 steps'", "training.until"),
        ("search bert folder", "bert"),
        ("convert nobody/model --out x", "nobody/model"),
        ("plan bert-tiny --tokens 1e400", "tokens"),
        ("plan bert-tiny --tokens 1e6 until=1hour", "tokens"),
        ("plan bert-tiny --tokens 1e6 --until 1hour", "tokens"),
        ("adapt bert lr=3 --out x", "texts"),
        ("finetune bert train.tsv training.early_stopping=3", "training.early_stopping"),
        ("embed bert train.tsv --out none/v.npy", "none/v.npy"),
        ("evaluate classifier train.tsv --report none/x.html", "none/x.html"),
        ("finetune bert empty.tsv", "empty.tsv"),
        ("predict classifier empty.tsv", "empty.tsv"),
        ("finetune bert train.tsv --text txet", "train.tsv"),
        ("finetune bert train.tsv --dev unseen.tsv", None),  # two files are at odds
        ("evaluate classifier unseen.tsv", "unseen.tsv:2"),
        ("predict classifier long.txt task.stride=8", "task"),
        ("finetune bert wide.csv", "wide.csv"),
        ("finetune folder train.tsv", "folder"),
        ("predict brt long.txt", "brt"),
        ("finetune bert folder", "folder"),
        ("predict train.tsv long.txt", "train.tsv"),
        ("finetune bert train.tsv training.optimizer.lr=1e308", "training.optimizer.lr"),
        ("finetune bert train.tsv lr=nan", "training.optimizer.lr"),
        (f"finetune bert train.tsv seed={10**19}", "seed"),
        (f"finetune bert train.tsv order_seed=-{10**19}", "order_seed"),
        ("finetune bert train.tsv training.until='1__0 steps'", "training.until"),
        ("finetune bert train.tsv training.until='1_ steps'", "training.until"),
        (f"finetune bert train.tsv length={10**22}", "length"),
        ("serve bert --port=-1", "port"),
        ("serve bert --port=65536", "port"),
        ("sweep bert train.tsv --dev train.tsv --grid training.until='2", "grid"),
        # Before the model is opened, which there is not.
        ("serve model --drain-delay nan", "drain_delay"),
        ("serve model --drain-delay=-1", "drain_delay"),
        ("serve model --threads 0", "threads"),
        ("corpus inspect corpus --documents=-1", "documents"),
        ("tokenizer report a.txt --tokenizer made --examples=-1", "examples"),
        ("calibrate model dev.tsv --out made --error nan", "error"),
        ("calibrate model dev.tsv --out made --error 1", "error"),
        ("evaluate model dev.tsv --precision int8 --limit nan", "limit"),
        ("quickstart --out made --minutes nan", "minutes"),
        ("quickstart --out made --minutes inf", "minutes"),
    ],
)
def test_a_mistake_is_one_message(line, where, place, monkeypatch):
    monkeypatch.chdir(place)
    words = shlex.split(line, posix="'2" not in line)
    before = {*place.rglob("*")}
    with pytest.raises(BothwaysError) as caught:
        run_line(*(words + ["--out", "run"] * (words[0] == "finetune")))
    assert caught.value.where == where or str(caught.value.where) == where
    assert {*place.rglob("*")} == before


@pytest.mark.parametrize(
    ("line", "named", "unnamed"),
    [
        ("finetune bert long.txt", "has one column, text, and no label", "--label"),
        ("finetune bert long.txt --text 0 --label 1", "the suffix .tsv or .csv", "--label"),
        ("finetune bert tickets.csv", "use --text NAME --label NAME", "header"),
        ("predict classifier tickets.csv", "use --text NAME", "--label"),
        ("finetune bert semicolons.csv", "separated by semicolons", "--text"),
        ("finetune bert nameless.csv", "use --text NUMBER --label NUMBER", "rename"),
        ("finetune bert trian.tsv", "Did you mean train.tsv?", "Supported"),
        ("finetune bert nofile.tsv", "Check the name", "Did you mean"),
        ("finetune bert packed.tsv", "Did you mean packed.tsv.gz?", "Check the name"),
        ("finetune bert long.tx", "Did you mean long.txt?", "Check the name"),
        ("finetune bert wide.csv --text c1000", "did you mean", "Name the columns"),
        ("finetune bert train.tsv dropoutt=0.1", "did you mean dropout?", "Known here"),
        ("finetune bert tickets.csv --text id --task answer", "question, context", "label"),
        ("finetune bert train.tsv --task clasify", "did you mean 'classify'?", "Name one of these"),
    ],
)
def test_the_nearest_answer_is_the_only_advice(line, named, unnamed, place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(BothwaysError) as caught:
        run_line(*line.split(), "--out", "run")
    message = render(f"{caught.value.what} {caught.value.fix}", "command")
    assert named in message
    assert unnamed not in message


def test_a_text_that_is_too_long_is_answered_with_a_warning(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    run_line("predict", "classifier", "long.txt", "--device", "cpu")
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "warning: 1 of 1 examples (100.0%) was longer" in captured.err


def test_a_file_may_begin_with_a_hyphen_after_two(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    Path("-n.txt").write_text("a good film\n", encoding="utf8")
    run_line("predict", "classifier", "--device", "cpu", "--", "-n.txt")
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(SystemExit):
        run_line("predict", "classifier", "--", "-m.txt")
    assert "Unknown option: -m.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "tokenizer encode other.txt mine.txt --tokenizer vocabulary --out mine.txt",
        "tokenizer encode other.txt --tokenizer mine.txt --out ./mine.txt",
        "tokenizer encode mine.txt --tokenizer vocabulary --out link.txt",
        "show corpus --config mine.txt --out mine.txt",
        "evaluate model ~/mine.txt --report mine.txt",
        "convert sub --out sub/.",
    ],
)
def test_no_input_is_written_over(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.txt").write_text("dear to me")
    (tmp_path / "link.txt").symlink_to("mine.txt")
    with pytest.raises(ResourceError, match="the output is also an input"):
        run_line(*line.split())
    assert (tmp_path / "mine.txt").read_text() == "dear to me"


DISK = [OSError(n, os.strerror(n), "run/parts") for n in (errno.ENOSPC, errno.EIO, errno.EROFS)]


ALLOCATOR = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 64 bytes.")
MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no memory"), ALLOCATOR]


@pytest.mark.parametrize("error", [*MEMORY, *DISK], ids=str)
def test_an_error_that_no_job_expects_is_no_traceback(error, monkeypatch, capsys):
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    with pytest.raises(SystemExit) as ended:
        cli.run_command_line()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    if isinstance(error, OSError):
        message = f"error: run/parts: cannot be read or written: {error.strerror}\n"
    else:
        device = "GPU " if isinstance(error, torch.OutOfMemoryError) else ""
        message = f"error: out of {device}memory\n  In training, halve microbatch_tokens"
    assert said.startswith(message)
    assert said.count("\n") == 2


@pytest.mark.parametrize(
    ("rank", "on_every_rank", "printed"), [("0", True, 1), ("1", True, 0), ("1", False, 1)]
)
def test_an_error_of_every_rank_is_printed_once(rank, on_every_rank, printed, monkeypatch, capsys):
    def failing(*_: object, **__: object) -> None:
        error = ConfigError("is wrong")
        error.on_every_rank = on_every_rank
        raise error

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(cli, "app", failing)
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    with pytest.raises(SystemExit) as ended:
        cli.run_command_line()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("is wrong") == printed


def test_an_output_is_full_only_if_it_is(tmp_path):
    """A file that cannot be written has no name in the error of a write: the output was blamed."""
    for name, full in ((tmp_path / "out", False), (os.devnull, False), ("/dev/full", True)):
        if name != "/dev/full" or Path(name).exists():  # Linux has it
            with Path(name).open("w") as file:
                assert cli._is_full(file.fileno()) == full


@pytest.mark.parametrize("saved", ["", "run/step-3", "seed-0/step-3"])
def test_a_run_that_is_interrupted_outside_of_a_step_says_how_to_go_on(
    saved, tmp_path, monkeypatch, capsys
):
    """While it reads the data or saves the model."""
    monkeypatch.setattr(sys, "argv", ["bothways", "pretrain", "corpus", "fresh=[pooler]"])
    if saved:
        (tmp_path / saved).mkdir(parents=True)
        (tmp_path / saved / "manifest.json").touch()
    with pytest.raises(KeyboardInterrupt), training(tmp_path, False, "cpu"):
        raise KeyboardInterrupt
    said = capsys.readouterr().err
    assert ("The checkpoints are kept. To resume: bothways pretrain corpus" in said) == bool(saved)
    assert ("fresh=[pooler]' --resume" in said) == bool(saved)
    again = "Stopped before the first checkpoint: the same command begins again."
    assert (again in said) != bool(saved)


@pytest.mark.parametrize(
    ("word", "path"), [("~/run", "/home/me/run"), ("--out=~/run", "--out=/home/me/run")]
)
def test_the_home_folder_is_found_where_the_shell_leaves_it_to_us(word, path, monkeypatch):
    given: list[str] = []
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(cli, "app", lambda words, **_: given.extend(words))
    monkeypatch.setattr(cli, "rename_options", lambda _, words: words)
    monkeypatch.setattr(sys, "argv", ["bothways", word, "--text=a~/b", "~"])
    cli.run_command_line()
    assert given == [path, "--text=a~/b", "~"]
