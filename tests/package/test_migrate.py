"""The page for users of other libraries: its tables are those of the code, and its Python runs."""

import re
import shlex
from pathlib import Path

import pytest

from bothways.cli.main import app, rename_options
from bothways.core.config.reader import load
from bothways.finetuning.config import SAME
from bothways.prediction import opening
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from documents import GUIDE, blocks, run_code
from toy_folder import make_folder, make_sentence_encoder

PAGES = [GUIDE / "migrate.md", GUIDE / "zh" / "migrate.md"]


@pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])
def test_tables_of_names_are_those_of_the_code(page):
    *_, training, prediction = re.findall(r"(?:^\|.*\n)+", page.read_text("utf8"), re.M)
    rows = [re.findall(r"`([^`]*)`", line) for line in training.splitlines()[2:]]
    forms = {name: f"{path}={form}" for name, (path, form) in SAME.items()}
    quoted = {name: re.sub(r"=(.* .*)", r'="\1"', form) for name, form in forms.items()}
    assert rows == [[f"{name}=N", form.format("N")] for name, form in quoted.items()]
    rows = [re.findall(r"`([^`]*)`", line) for line in prediction.splitlines()[2:]]
    assert rows == [[*pair] for pair in opening._ALIASES.items()]


@pytest.mark.parametrize("page", PAGES, ids=["english", "chinese"])
def test_commands_and_settings_in_the_table_of_vectors_are_read(page):
    section = page.read_text("utf8").split("\n## ")[2]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [shlex.split(cell) for line in lines for cell in re.findall(r"`([^`]*)`", line)[1:]]
    settings = [cell for cell in cells if all(word.startswith("task.") for word in cell)]
    for cell in settings:
        load(SentenceEmbeddingTask, overrides=[word.removeprefix("task.") for word in cell])
    lines = [cell[1:] for cell in cells if cell[0] == "bothways"]
    for line in lines:
        app.parse_args(rename_options(app, line), exit_on_error=False, print_error=False)
    assert (len(settings), len(lines)) == (5, 2)


@pytest.mark.parametrize(("number", "label"), [(0, "yes"), (1, None), (2, "yes")])
def test_python_of_the_page_runs(number, label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "bert-base-uncased")
    make_sentence_encoder(tmp_path / "all-MiniLM-L6-v2")
    code = blocks(PAGES[0], "python")
    assert len(code) == 3
    names = run_code(code[number], PAGES[0])
    if label:
        assert names["classify"]("a good film").label == label
    else:
        assert names["vectors"].shape == (2, 32)
        assert Path("my-vectors", "modules.json").exists()
