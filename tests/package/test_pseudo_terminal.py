"""Standard output is the data's: a terminal at standard error changes none of its bytes."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bothways.cli import main as cli
from documents import GUIDE, commands
from spread import in_turn
from terminal import NUMBERS, run_line
from toy_bulk import make_classifier, make_rows, write_rows
from toy_folder import make_examples, write_tsv

ENVIRONMENTS = {
    "dumb": {"TERM": "dumb"},
    "colours": {"FORCE_COLOR": "1"},
    "narrow": {"COLUMNS": "40"},
}
QUICK = {
    "predict": "predict classifier rows.tsv",
    "evaluate": "evaluate classifier train.tsv --json",
    "embed": "embed bert new.txt --out OUT.npy",
    "index": "index new.txt --model bert --out OUT",
    "search": "search index 'a good film' --top 2",
    "mine": "mine pairs.jsonl --index index --out OUT.jsonl",
    "calibrate": "calibrate classifier dev.tsv --out OUT",
    "describe": "describe classifier",
    "demo": "demo OUT",
    "settings": "settings training.optimizer",
    "show": "show bert 'a good film'",
    "compare": "compare classifier classifier train.tsv",
    "average": "average classifier classifier --out OUT",
    "corpus build": "corpus build text.txt --tokenizer bert --out OUT --workers 1",
    "corpus inspect": "corpus inspect corpus --verify",
    "tokenizer encode": "tokenizer encode new.txt --tokenizer bert",
    "tokenizer report": "tokenizer report text.txt --tokenizer bert",
    "tokenizer train": "tokenizer train text.txt --size 60 --out OUT",
}
"""Commands that take less than a second; OUT is a new place."""
_TINY = "batch.kind=examples batch.n=2"
SLOW = {
    "pretrain": f"pretrain corpus --out OUT --model bert-tiny --until '3 steps' {_TINY}",
    "convert": "convert bert --out OUT --vocabulary words.txt",
    "export": "export classifier --out OUT",
    "inspect-step": "inspect-step run 2 corpus",
    "reproduce pretraining": "reproduce pretraining bert-5 --text text.txt --data glue --dry-run "
    "--tasks CoLA --budget '10 minutes'",
    "reproduce glue": "reproduce glue --model bert --data glue --dry-run --tasks CoLA length=32",
    "bench": "bench small --rounds 1",
    "quickstart": "quickstart --minutes 0.5 --out OUT",
}
"""Commands that take seconds, and run in `make test-slow`."""
SERVERS = {"serve": "serve classifier --port 0", "play": "play classifier --no-browser"}
ELSEWHERE = {"reproduce squad", "reproduce swag", "reproduce ner"}
"""Commands that are the function of another line."""
IN_GUIDE = {"adapt", "finetune", "distil", "sweep", "features", "plan", "babylm"}
"""Commands that test_guide_lines.py runs in the same way."""
_COLOURS = re.compile(rb"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    make_classifier(folder)
    write_rows(folder / "rows.tsv", make_rows(60))
    write_rows(folder / "new.txt", make_rows(5))
    (folder / "pairs.jsonl").write_text('{"anchor": "a good film", "positive": "a bad film"}\n')
    write_tsv(folder / "train.tsv", make_examples(24, 0))
    write_tsv(folder / "dev.tsv", make_examples(12, 1))
    texts = [example.text for example in make_examples(240, 2)]
    paragraphs = ["\n".join(texts[at : at + 8]) for at in range(0, 240, 8)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, made in (("corpus build", "corpus"), ("index", "index")):
            run_line(QUICK[name].replace("OUT", made), folder, made)
    return folder


@pytest.fixture(scope="module")
def whole_place(place) -> Path:
    """The same folder with a run, and data of GLUE."""
    (place / "words.txt").write_text("anfield\n")
    cola = "".join(f"x\t{at % 2}\t\ta sentence\n" for at in range(20))
    (place / "glue" / "CoLA").mkdir(parents=True)
    for name in ("train", "dev"):
        (place / "glue" / "CoLA" / f"{name}.tsv").write_text(cola)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = run_line(SLOW["pretrain"].replace("OUT", "run"), place, "run")
        assert done.status == 0, done.messages
    return place


def test_every_command_is_run_here():
    names = set[str]()
    for parent, verbs in cli.PARENTS.items():
        names |= {f"{parent} {name}".strip() for name in verbs if not name.startswith("-")}
    guide = {line.split()[1] for page in GUIDE.glob("*.md") for line in commands(page)}
    assert guide >= IN_GUIDE
    run = QUICK.keys() | SLOW.keys() | SERVERS.keys() | ELSEWHERE | IN_GUIDE
    assert names - cli.PARENTS.keys() == run, "add a line that runs the command to QUICK or SLOW"


@pytest.mark.parametrize(("name", "kind"), in_turn([(name,) for name in QUICK], [*ENVIRONMENTS]))
def test_a_terminal_changes_no_byte_of_the_output(name, kind, place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    plain = run_line(QUICK[name], tmp_path, "plain", terminal=False)
    shown = run_line(QUICK[name], tmp_path, "shown", columns=200)
    assert (plain.status, shown.status) == (0, 0), shown.messages
    assert shown.output == plain.output
    assert shown.output or "OUT" in QUICK[name]
    environment = ENVIRONMENTS[kind]
    if kind != "dumb":  # which is as without a terminal
        plain = run_line(QUICK[name], tmp_path, "other", terminal=False, environment=environment)
    shown = run_line(QUICK[name], tmp_path, kind, columns=200, environment=environment)
    assert (shown.status, shown.output) == (plain.status, plain.output)
    assert b"\x1b" not in _COLOURS.sub(b"", shown.output)


@pytest.mark.parametrize("name", [name for name in QUICK if "OUT" not in QUICK[name]])
def test_a_reader_that_ends_is_no_error(name, place, tmp_path, monkeypatch):
    """As with `| head -1`, whose pipe is closed while there is more to write."""
    monkeypatch.chdir(place)
    ended = run_line(QUICK[name], tmp_path, "ended", reader_ends=True)
    assert ended.status == 0
    assert b"Traceback" not in ended.messages
    assert b"rror" not in ended.messages


def test_no_bar_is_drawn_where_it_could_not_be_erased(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    assert b"predicting" in run_line(QUICK["predict"], tmp_path, "bar").messages
    for terminal, environment in ((False, {"FORCE_COLOR": "1"}), (True, {"TERM": "dumb"})):
        options = {"terminal": terminal, "environment": environment}
        messages = run_line(QUICK["predict"], tmp_path, "plain", **options).messages
        assert b"predicting" not in messages
        assert b"\x1b" not in messages


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_terminal_changes_no_output_of_training(name, whole_place, tmp_path, monkeypatch):
    """Numbers may be times, and are not compared; with an output the whole line is."""
    monkeypatch.chdir(whole_place)
    plain, shown = (
        run_line(SLOW[name], tmp_path, str(terminal), terminal=terminal, columns=200)
        for terminal in (False, True)
    )
    assert (plain.status, shown.status) == (0, 0), shown.messages
    lines = [NUMBERS.sub(b"#", run.output).split() for run in (plain, shown)]
    if name != "quickstart":  # whose examples depend on the time
        assert lines[0] == lines[1]
    assert b"\x1b" not in shown.output
    if not {"OUT", "OUT.html"} & {*SLOW[name].split()}:
        assert plain.output


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_servers_write_nothing_to_the_output(name, place, tmp_path):
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "bothways", *SERVERS[name].split()]
    with (tmp_path / "output").open("wb") as output:
        server = subprocess.Popen(words, cwd=place, stdout=output, stderr=slave)
    os.close(slave)
    shown = b""
    while b"http://" not in shown:
        shown += os.read(master, 2**16)
    server.send_signal(signal.SIGINT)
    assert server.wait(60) in {0, cli.INTERRUPTED}
    os.close(master)
    assert (tmp_path / "output").read_bytes() == b""
