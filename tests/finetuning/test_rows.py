"""Fine-tuning on rows: the result predicts, and its folder predicts the same."""

import dataclasses
from decimal import Decimal
from typing import Any

import pytest
import torch

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.finetuning.data import read_examples
from bothways.model.heads import LabelHead, PoolerHead
from bothways.prediction.opening import open_task
from bothways.tasks.columns import choose_columns
from bothways.tasks.reranking.task import RerankingTask
from bothways.tasks.tagging.examples import TagColumns
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextColumns
from fake_hub import fake_hub
from toy_folder import make_examples, make_rows, write_tsv


def pairs(form: Any) -> list[tuple[str, str]]:
    settings = bothways.FinetuneConfig(model="m", train="t")
    return [(item.text, item.label) for item in read_examples(settings, form).examples["train"]]


def test_named_columns_are_read_in_each_row_and_no_more_endings(model):
    rows = [{"body": "a", "label": "y"}, {"text": "b", "label": "n"}] * 4
    with pytest.raises(DataError, match="train row 2: has no column 'body'"):
        bothways.finetune(model, rows, text="body", **FAST)
    words = [{"w": ["a"], "tags": ["O"]}, {"words": ["a"], "tags": ["O"]}]
    with pytest.raises(DataError, match="train row 2: has no column 'w'"):
        bothways.finetune(model, words, task="tag", text="w", **FAST)
    question = {"context": "a", "ending0": "b", "ending1": "c", "ending2": "d", "label": 0}
    named = {"columns": {"endings": ["ending0", "ending1"]}}
    for columns, count in (({}, 3), (named, 2)):
        choose = bothways.finetune(model, [question] * 4, task="choice", **columns, **FAST)
        assert len(choose.task_model.task.columns.endings) == count


def test_columns_are_chosen_once_for_rows_with_the_same_names(monkeypatch):
    calls, name = list[Any](), "bothways.tasks.columns.choose_columns"
    monkeypatch.setattr(name, lambda *a: calls.append(a) or choose_columns(*a))
    named = [{"text": "a", "label": "y"}, {"label": "n", "sentence": "b"}]
    assert pairs(named * 3) == [("a", "y"), ("b", "n")] * 3
    assert len(calls) == 2


@dataclasses.dataclass
class OwnRow:
    text: str
    label: str


FAST: dict[str, Any] = {"epochs": 0.5, "max_length": 16, "device": "cpu", "progress": False}


def test_rows_become_a_predictor_and_a_folder(model, tmp_path):
    settings = {"lr": 3e-3, "epochs": 5, "batch": 16, "max_length": 16}
    dev = make_rows(60, 1)
    result = bothways.finetune(model, make_rows(160, 0), dev, "sentiment", device="cpu", **settings)
    assert result.metrics["accuracy"] > 0.8
    assert len(result.history) == 5
    texts = [row["text"] for row in make_rows(8, 2)]
    expected = [prediction.label for prediction in result.predictor()(texts)]
    opened = open_task(result.save(tmp_path / "saved"), "text-classification", device="cpu")
    assert [prediction.label for prediction in opened(texts)] == expected
    assert opened.task_model.length == 16
    assert opened.evaluate(dev)["accuracy"] == result.metrics["accuracy"]


@pytest.mark.parametrize("source", ["dataset", "hub", "frame", "file", "rows"])
def test_unused_columns_and_classes_without_rows_are_named(source, tmp_path, monkeypatch):
    import datasets
    import pandas

    names = ["neg", "pos", "never"]
    plain = [{"text": f"word {i}", "label": names[i % 2], "stars": 5} for i in range(8)]
    file = tmp_path / "t.csv"
    pandas.DataFrame(plain).to_csv(file, index=False)
    ids = [{**row, "label": names.index(row["label"])} for row in plain]
    listed = datasets.Dataset.from_list(ids).cast_column("label", datasets.ClassLabel(names=names))
    fake_hub(monkeypatch, lambda *_, **__: listed.to_iterable_dataset())
    frame = pandas.DataFrame(plain)
    frame["label"] = pandas.Categorical(frame["label"], categories=names)
    data: Any = {
        "dataset": listed, "hub": "hub:owner/name", "frame": frame, "file": file, "rows": plain
    }[source]  # fmt: skip
    read = read_examples(bothways.FinetuneConfig(model="m", train="t"), data)
    notes = [str(finding) for finding in read.findings]
    assert any("stars" in note for note in notes)
    assert any("never" in note for note in notes) == (source in {"dataset", "hub", "frame"})


def test_tables_of_python_and_files_are_the_same_examples(tmp_path):
    """Classes have their names, and numbers of NumPy are labels."""
    import datasets
    import numpy as np
    import pandas
    import pyarrow

    rows = make_rows(32, 0)
    names = sorted({row["label"] for row in rows})
    classes = [{**row, "label": names.index(row["label"])} for row in rows]
    columns = {key: [row[key] for row in rows] for key in ("text", "label")}
    kind = datasets.ClassLabel(names=names)
    data = datasets.Dataset.from_list(classes).cast_column("label", kind)
    file = write_tsv(tmp_path / "train.tsv", make_examples(32, 0))
    frame = pandas.DataFrame(columns, index=[7] * 32).astype({"label": "category"})
    table = pyarrow.table(columns)
    for form in (columns, table, frame, data, data.with_format("torch"), str(file)):
        assert pairs(form) == pairs(rows)
    numbers = [{**row, "label": np.int64(row["label"])} for row in classes]
    assert {label for _, label in pairs(numbers)} == {"0", "1"}


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        (RerankingTask(), {"query": [*"aab"], "document": [*"xyz"], "label": [0, 1, 1]}),
        (
            TaggingTask(TagColumns("w", "t", "page", "no"), context="document"),
            {"no": [1, 1, 2], "page": [7, 7, 7], "w": [*"xyz"], "t": ["B-P", "O", "O"]},
        ),
    ],
)
def test_rows_that_are_examples_together_are_joined_as_in_a_file(task, columns, tmp_path):
    """The documents of a query; the words of a sentence, with the others of its document."""
    import pandas

    frame, file = pandas.DataFrame(columns), tmp_path / "t.csv"
    frame.to_csv(file, index=False)
    settings = bothways.FinetuneConfig(model="m", train=str(file), task=task)
    result, expected = read_examples(settings, frame), read_examples(settings)
    examples = [dataclasses.replace(item, where="") for item in expected.examples["train"]]
    assert [dataclasses.replace(item, where="") for item in result.examples["train"]] == examples
    assert len(examples) == 2
    assert [str(note) for note in (*result.findings, *expected.findings)] == []


@pytest.mark.parametrize("scores", [[0.0, 1.0], [Decimal("0.00"), Decimal("1.00")]])
def test_labels_that_are_numbers_of_tables_are_whole_numbers(scores):
    """Also as categories of pandas, whose names have another form."""
    import pandas

    frame = pandas.DataFrame({"text": ["a", "b"], "label": scores})
    for form in (frame, frame.astype({"label": "category"})):
        read = read_examples(bothways.FinetuneConfig(model="m", train="t"), form)
        assert [item.label for item in read.examples["train"]] == ["0", "1"]
        assert read.findings == []


def test_the_state_of_torch_is_left_as_it_was(model):
    """A program without gradients can train, and one with another default type, in which a run would compute."""
    data = make_rows(32, 0), make_rows(30, 1)
    plain = bothways.finetune(model, *data, **FAST)
    with torch.inference_mode():
        assert bothways.finetune(model, *data, **FAST).metrics == plain.metrics
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        run = bothways.finetune(model, *data, **FAST)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert run.metrics == plain.metrics
    assert torch.equal(torch.get_rng_state(), before)


def test_models_are_trained_and_used_whatever_the_default_device_is(model, tmp_path):
    """Such as "cuda" in a notebook; "meta" has no values, so that a tensor there is an error."""
    data = make_rows(32, 0), make_rows(30, 1)
    plain = bothways.finetune(model, *data, **FAST)
    folder = plain.save(tmp_path / "saved")
    head = [PoolerHead(), LabelHead(2)]
    with torch.device("meta"):
        assert bothways.finetune(model, *data, **FAST).metrics == plain.metrics
        classify = bothways.load(folder, device="cpu")
        assert classify.evaluate(data[1]) == pytest.approx(plain.metrics)
        fresh = bothways.load_model(model, head, fresh=["labels"])
        bothways.export_model(folder, tmp_path / "exported", progress=False)
        fill = bothways.load(model, task="fill", device="cpu")
        assert fill("the [MASK] film").masks
        assert str(torch.get_default_device()) == "meta"
    assert {str(weight.device) for weight in fresh.parameters()} == {"cpu"}


def test_an_own_loop_is_the_same_whatever_the_default_device_is(model):
    loop = bothways.load_model(model).train()
    batch = loop.tokenizer.batch(["a good film", "a bad play"])

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        loop.zero_grad()
        output = loop(batch).last_hidden_state
        output.square().sum().backward()
        return [output, *(weight.grad for weight in loop.encoder.parameters())]

    plain = step()
    with torch.device("meta"):
        assert all(map(torch.equal, plain, step()))


def test_fresh_heads_are_in_fp32_as_what_is_read(model):
    torch.set_default_dtype(torch.float64)
    try:
        loaded = bothways.load_model(model, [PoolerHead(), LabelHead(2)], fresh=["labels"])
    finally:
        torch.set_default_dtype(torch.float32)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}


NAMED = [{"Message": "a good film", "text": "an id", "Team": "yes"}] * 4
FLAGS = [{"text": "ape", "labels": [0.0, 1.0, 0.0]}, {"text": "bee", "labels": [1.0, 1.0, 0.0]}]
NO_DOCUMENT = {"query": "a", "documents": [], "labels": []}
LONG = {"query": "a", "documents": ["b " * 600, "c"], "labels": [1, 0]}


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (None, {}, "train: is None"),
        (5, {}, "train: is of type int, which has no rows"),
        ([], {}, "train rows: there is no example"),
        ([("a good film", "yes")], {}, "train row 1: is of type tuple, not a dict"),
        (["a good film"], {}, "train row 1: is of type str, not a dict"),
        ([OwnRow("a good film", "yes")], {}, "train row 1: is of type OwnRow, not a dict"),
        ({"train": "a.tsv", "test": "b.tsv"}, {}, "train: is a dict of train, test"),
        ({"text": ["a"], "label": ["b", "c"]}, {}, "columns of different length: text 1, label 2"),
        ([{"text": 5, "label": "a"}], {}, "train row 1: .*text"),
        # Named columns are read, and no others.
        (NAMED, {"columns": {"text": "mesage"}}, "^train row 1: .*'mesage'; .*mean 'Message'"),
        (NAMED, {"text": "Message", "label": "Tam"}, "^train row 1: has no column 'Tam'; it has M"),
        (NAMED, {"text": "Message"}, "^no example has a label: its column is empty, or its name"),
        (
            [{"text": "a", "label": 1, "labels": "b"}],
            {},
            "its name is .* not the only one\\n.*label=",
        ),
        # A model would learn the labels 0 and 1, which nearly all texts have.
        (FLAGS, {"task": "multilabel"}, "holds 3 numbers 0 and 1, not labels"),
        (
            [{"text": "ape", "labels": [0.3, 0.7]}],
            {"task": "multilabel"},
            "2 numbers, also fractions",
        ),
        ([NO_DOCUMENT], {"task": "rerank"}, "1 example has no document: train row 1"),
        ([NO_DOCUMENT, LONG], {"task": "rerank"}, "1 example has no document: train row 1"),
        (make_rows(8, 0), {"lrr": 1}, "unknown key 'lrr'"),
        (make_rows(8, 0), {"task": "paint"}, "^task: 'paint' is not a task"),
        (make_rows(8, 0), {"task": 5}, r"^task: must be a name or a task, not int\n.*\"regress"),
    ],
)
def test_a_mistake_is_one_message(model, data, settings, message):
    with pytest.raises(BothwaysError, match=message):
        bothways.finetune(model, data, progress=False, **settings)


@pytest.mark.parametrize("task", ["classify", "regress"])
def test_a_model_of_single_texts_refuses_pairs_also_if_it_is_trained_on_rows(model, task):
    """A tuple of texts, where a list is meant, would be one input."""
    singles = [{"body": f"a good film {n}", "stars": n % 2} for n in range(4)]
    pairs = [
        {"sentence1": "a film", "sentence2": row["body"], "stars": row["stars"]} for row in singles
    ]
    settings: Any = {"task": task, "label": "stars", **FAST}
    one = bothways.finetune(model, singles, **settings).predictor()
    two = bothways.finetune(model, pairs, **settings).predictor()
    assert len(one(["a film", "a play"])) == 2
    for predict, inputs in ((one, ("a film", "a play")), (two, "a film"), (one, pairs)):
        with pytest.raises(DataError, match="the model was trained on"):
            predict(inputs)
    dev = [{"text": "a film", "stars": 1}, {"text": "a play", "stars": 0}]
    columns = bothways.finetune(model, singles, dev, **settings).task_model.task.columns
    assert columns == one.task_model.task.columns == TextColumns("body", None, "stars")
    mixed = bothways.finetune(model, [*singles, *pairs], **settings).predictor()
    assert mixed("a film") != mixed(("a film", "a play"))


def test_absent_values_of_a_frame_are_absent(model):
    import pandas

    for column, message in (("text", "has an empty text"), ("label", "has no label")):
        last = {"text": "ape", "label": "a", column: float("nan")}
        frame = pandas.DataFrame([*make_rows(8, 0), last])
        with pytest.raises(BothwaysError, match=f"1 example {message}.*train row 9"):
            bothways.finetune(model, frame, progress=False)


def test_rows_have_a_run_folder_that_is_resumed(model, tmp_path):
    train, dev, folder = make_rows(64, 0), make_rows(30, 1), tmp_path / "run"
    settings: dict[str, Any] = {"max_length": 16, "device": "cpu", "epochs": 1}
    alone = bothways.finetune(model, train, dev, **settings)
    done = bothways.finetune(model, train, dev, out=folder, **settings)
    assert done.metrics == alone.metrics
    assert (done.folder, alone.folder) == (folder / "model", None)
    for name in ("metrics.jsonl", "report.html", "config.toml"):
        assert (folder / name).exists()
    run = {**settings, "output_dir": folder}  # its name in transformers
    again = bothways.finetune(model, train, dev, resume=True, **run)
    assert (again.folder, again.metrics) == (done.folder, done.metrics)
    with pytest.raises(ConfigError) as caught:
        bothways.finetune(model, train, dev, out=tmp_path / "other", **run)
    assert caught.value.where == "output_dir"
    with pytest.raises(BothwaysError, match=r"is of another run: data\.train is not the same"):
        bothways.finetune(model, make_rows(65, 0), dev, resume=True, **run)
    saved = alone.save(tmp_path / "saved")
    assert bothways.load(saved).task_model.length == 16
    assert "fine-tuned on train rows" in (saved / "README.md").read_text()


def test_surplus_cells_of_csv_rows_are_an_unused_column(tmp_path):
    import csv

    lines = ["text,label", "a film,good,9", "a play,bad"]
    read = read_examples(bothways.FinetuneConfig(model="m", train="t"), list(csv.DictReader(lines)))
    assert [(example.text, example.label) for example in read.examples["train"]] == [
        ("a film", "good"), ("a play", "bad")
    ]  # fmt: skip
    assert [str(note) for note in read.findings] == ["columns that are not used: None"]
