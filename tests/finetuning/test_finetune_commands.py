"""`bothways finetune`, `evaluate` and `predict`, as one types them."""

import io
import json
import signal
from pathlib import Path

import pytest

from bothways.core.config import reader as configs
from bothways.core.errors import BothwaysError
from bothways.finetuning.config import FinetuneConfig
from bothways.model.kernels import library
from bothways.training.optimizers import BertAdam
from bothways.training.schedules import Epochs, GoogleLinear
from commands import run_line
from toy_folder import file_settings, make_examples, make_folder, write_tsv
from toy_task import interrupt_score


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, data and a configuration."""
    folder = tmp_path_factory.mktemp("place")
    file_settings(make_folder(folder / "bert"), folder, 320, 80)
    settings = 'length = 12\nseed = 5\n[training]\nuntil = "2 epochs"\nprecision = "fp32"\n'
    (folder / "run.toml").write_text(settings)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, place: Path, *words: str) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", ["bothways", *words])
    run_line(*words)


@pytest.fixture(scope="module")
def finished(place) -> Path:
    words = "finetune bert train.tsv --dev dev.tsv --out run --config run.toml length=16"
    words += " --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        run(patch, place, *words.split(), "training.optimizer.lr=3e-3", "training.until=5 epochs")
    return place


def test_the_file_wins_over_the_recipe_and_the_words_over_the_file(finished):
    settings = configs.load(FinetuneConfig, file=finished / "run" / "config.toml")
    assert (settings.model, settings.train, settings.dev) == ("bert", "train.tsv", "dev.tsv")
    assert (settings.length, settings.seed, settings.training.until) == (16, 5, Epochs(5.0))
    assert (settings.training.optimizer.lr, settings.training.precision) == (3e-3, "fp32")


def test_a_run_says_what_it_reached_and_where_it_is(place, monkeypatch, capsys):
    words = "finetune bert train.tsv --dev dev.tsv --out brief --recipe paper length=16"
    run(monkeypatch, place, *words.split(), "training.until=1 steps")
    output = capsys.readouterr()
    labels = [example.label for example in make_examples(80, 1)]
    table = [line.split() for line in output.out.splitlines()]
    accuracy = next(cells for cells in table if "accuracy" in cells)
    assert "majority baseline" in output.out
    assert float(accuracy[-2]) in {round(labels.count(each) / 80, 4) for each in labels}
    assert "The model is in brief/model. Try it: bothways predict brief FILE, or in" in output.err
    assert "bothways play brief" in output.err
    settings = configs.load(FinetuneConfig, file=place / "brief" / "config.toml")
    assert settings.training.optimizer == BertAdam(lr=5e-5)
    assert settings.training.schedule == GoogleLinear(0.1)


def test_columns_are_options(place, monkeypatch):
    lines = [f"{e.label}\tthe film\t{e.text}" for e in make_examples(40, 3)]
    (place / "pairs.tsv").write_text("\n".join(lines) + "\n")
    words = "finetune bert pairs.tsv --text 1 --text-b 2 --label 0 --out pairs length=16"
    run(monkeypatch, place, *words.split(), "training.until=1 steps", "task.smoothing=0.125")
    record = json.loads((place / "pairs" / "model" / "bothways.json").read_text())
    assert record["task"]["columns"] == {"text": "1", "text_b": "2", "label": "0"}
    assert record["task"]["kind"] == "classify"
    card = (place / "pairs" / "model" / "README.md").read_text()
    assert "Fine-tuned for the task classify: neg, pos." in card
    assert "| smoothing | 0.125 |" in card
    assert "| weighting |" not in card  # as usual


def test_interrupting_saves_and_says_how_to_go_on(place, monkeypatch, capsys):
    interrupt_score(monkeypatch, number=signal.SIGTERM)
    line = "finetune bert train.tsv --dev dev.tsv --out broken length=16 epochs=2"
    words = line.split()
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, place, *words)
    said = capsys.readouterr().err
    assert "Saved after step 10" in said
    assert f"To resume: bothways {line} --resume" in said
    run(monkeypatch, place, *words, "--resume")
    assert (place / "broken" / "model" / "model.safetensors").exists()


def test_an_evaluation_is_a_table_or_json(finished, monkeypatch, capsys):
    run(monkeypatch, finished, "evaluate", "run", "dev.tsv", "--json")
    metrics = json.loads(capsys.readouterr().out)
    record = json.loads((finished / "run" / "model" / "bothways.json").read_text())
    assert metrics == pytest.approx(record["metrics"], rel=1e-5)
    words = "evaluate run dev.tsv --label label --precision fp32"
    run(monkeypatch, finished, *words.split())
    table, said = capsys.readouterr()
    assert said == f"{library.describe_kernels()}\n"
    assert f"{metrics['accuracy']:.4f}" in table
    assert "run on dev.tsv" in table


def test_predictions_are_json_lines_in_the_order_of_the_input(finished, monkeypatch, capsys):
    examples = make_examples(100, 9, longest=16)
    cut = sum(len(example.text.split()) > 14 for example in examples)
    assert cut > 0
    run(monkeypatch, finished, "predict", "run", str(write_tsv(finished / "new.tsv", examples)))
    output = capsys.readouterr()
    warning = f"{cut} of 100 examples ({cut}.0%) were longer than the model reads, and were cut"
    assert output.err == f"warning: {warning}\n"
    rows = [json.loads(line) for line in output.out.splitlines()]
    labels = [example.label for example in examples]
    assert sum(row["label"] == label for row, label in zip(rows, labels, strict=True)) > 95
    for row in rows:
        assert row["probabilities"].keys() == {"neg", "pos"}
        assert row["label"] == max(row["probabilities"], key=row["probabilities"].__getitem__)
    lines = "".join(f"{example.text}\n" for example in examples)
    objects = "".join(json.dumps({"words": example.text}) + "\n" for example in examples)
    for words, text in (
        (("predict", "run"), lines),
        (("predict", "run", "-"), lines),
        (("predict", "run", "-", "--text", "words", "--window", "7"), objects),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf8"))
        run(monkeypatch, finished, *words)
        for line, row in zip(capsys.readouterr().out.splitlines(), rows, strict=True):
            expected = pytest.approx(row["probabilities"], abs=1e-5)
            assert json.loads(line)["probabilities"] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("finetune bert train.tsv --out x lenght=3", "lenght: unknown key 'lenght'"),
        ("finetune bert train.tsv --out x sharding.kind=sharding", "sharding: fine-tuning holds"),
        ("finetune bert train.tsv --out x --label kind", "train.tsv: has no column 'kind'"),
        ("finetune none train.tsv --out x", "none"),
        ("finetune bert none.tsv --out x", "none.tsv: no such file"),
        ("finetune bert train.tsv --out run", "run: holds the checkpoints of an earlier run"),
        ("finetune bert train.tsv --out bert", "bert: is not empty, and not the folder of a run"),
        ("finetune bert train.tsv --out x --seeds 2 --folds 2", "--seeds: and --folds are both"),
        ("evaluate bert dev.tsv", "bert: is not fine-tuned for a task: its heads are masked"),
        ("predict run none.txt", "none.txt: no such file"),
    ],
)
def test_mistakes_are_named(finished, monkeypatch, words, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BothwaysError) as caught:
        run(monkeypatch, finished, *words.split())
    assert str(caught.value).startswith(message)
