"""Dev data that is split from training data: shares, classes, groups, and what is recorded."""

import dataclasses
import json
import random
from collections import Counter
from typing import Any

import pytest

import bothways
import toy_folder
from bothways.core.errors import BothwaysError, ConfigError, DataError, FolderError, interface
from bothways.finetuning.config import FinetuneConfig, load_config
from bothways.finetuning.data import read_recorded_split, read_split
from bothways.finetuning.splits import DevPart, Split, fold_name, parse_part, split_examples
from bothways.lab.sweeps.folds import PREDICTIONS, FoldRun, cross_validate
from bothways.tasks.choice.task import ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.multilabel.task import MultilabelExample, MultilabelTask
from bothways.tasks.question_answering.examples import Question
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RankExample, RerankingTask
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import TaggingTask
from bothways.tasks.text_task import TextExample
from commands import run_line
from heard_progress import Heard
from model_folders import change_settings

FIFTH = DevPart((0.8, 0.2), 1)


@pytest.mark.parametrize(
    ("dev", "name"),
    [
        (0.2, "20%"),
        ("0.2", "20%"),
        (".25", "25%"),
        ("20%", "20%"),
        ("12.5 %", "12.5%"),
        ("fold 2 of 5", "fold 2 of 5"),
        *((file, None) for file in ("dev.tsv", "./0.2", "hub:a/b", "20", "dev rows")),
    ],
)
def test_shares_and_folds_have_one_name_and_files_are_none(dev, name):
    part = parse_part(dev)
    assert (part and str(part)) == name
    assert parse_part(name) == part


@pytest.mark.parametrize(
    "dev",
    [0, 1, 1.5, -0.2, "0%", "100%", "1.0", True, "fold 0 of 5", "fold 6 of 5", "fold 1 of 1"],
)
def test_impossible_shares_are_refused(dev):
    with pytest.raises(ConfigError) as caught:
        parse_part(dev)
    assert caught.value.where == "dev"


def texts(labels: list[str]) -> list[TextExample]:
    return [TextExample(f"text {n}", label=label, where=str(n)) for n, label in enumerate(labels)]


def test_each_class_has_its_share_in_any_order_of_rows():
    examples = texts(["a"] * 500 + ["b"] * 50 + ["c"] * 5 + ["d"])
    done = split_examples(ClassificationTask(), examples, FIFTH)
    assert Counter(e.label for e in done.dev)["a"] in {99, 100, 101}
    assert Counter(e.label for e in done.dev)["b"] in {9, 10, 11}
    assert Counter(e.label for e in done.dev)["d"] == 0
    shuffled = random.Random(1).sample(examples, len(examples))
    again = split_examples(ClassificationTask(), shuffled, FIFTH)
    assert {e.where for e in again.dev} == {e.where for e in done.dev}
    other = split_examples(ClassificationTask(), examples, FIFTH, Split(seed=1))
    assert {e.where for e in other.dev} != {e.where for e in done.dev}


def test_texts_that_repeat_take_no_label_from_the_dev_data():
    repeated = [MultilabelExample(f"usual {n % 3}", labels=(), where=f"r{n}") for n in range(141)]
    others = [
        MultilabelExample(f"text {n}", labels=(("food", "sport")[n % 2],), where=f"{n}")
        for n in range(100)
    ]
    done = split_examples(MultilabelTask(), repeated + others, FIFTH)
    assert Counter(e.labels for e in done.dev) == {(): 47, ("food",): 10, ("sport",): 10}


def test_folds_divide_the_data():
    examples, task = texts(["a", "b", "b"] * 20), ClassificationTask()
    parts = [parse_part(fold_name(number, 5)) for number in range(1, 6)]
    devs = [split_examples(task, examples, part).dev for part in parts if part is not None]
    assert sorted(int(e.where) for dev in devs for e in dev) == [*range(60)]
    assert {len(dev) for dev in devs} == {12}
    assert {Counter(e.label for e in dev)["a"] for dev in devs} == {4}


def test_more_folds_than_texts_are_refused_before_the_first_run(model):
    rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(6)]
    with pytest.raises(DataError, match=r"9 folds of 6 examples .*\n  Give at most 6 folds"):
        bothways.finetune(model, rows, folds=9, epochs=1, progress=False)
    last = parse_part("fold 6 of 6")
    assert split_examples(ClassificationTask(), texts(["a", "b"] * 3), last).dev


def test_equal_texts_are_on_one_side():
    examples = texts(["a", "b"] * 50)
    examples = [dataclasses.replace(e, text=f"text {int(e.where) % 20}") for e in examples]
    done = split_examples(ClassificationTask(), examples, FIFTH)
    assert not {e.text for e in done.train} & {e.text for e in done.dev}
    assert len(done.dev) == 20


def test_groups_are_on_one_side():
    examples = texts(["a", "b", "c"] * 60)
    groups = [int(e.where) // 7 for e in examples]
    done = split_examples(ClassificationTask(), examples, FIFTH, groups=groups)
    sides = [{int(e.where) // 7 for e in side} for side in (done.train, done.dev)]
    assert not sides[0] & sides[1]
    assert 29 <= len(done.dev) <= 43


@pytest.mark.parametrize("dev", ["20%", "90%"])
@pytest.mark.parametrize("count", [6, 60])
def test_groups_are_split_alike_in_any_order_of_rows(count, dev):
    """Also where a label of the dev data is moved to the training data."""
    examples, part = texts([*"abc"] * count), parse_part(dev)
    shuffled = random.Random(1).sample(examples, len(examples))
    assert part is not None
    one, other = (
        split_examples(ClassificationTask(), rows, part, groups=[int(e.where) // 4 for e in rows])
        for rows in (examples, shuffled)
    )
    assert {e.where for e in one.dev} == {e.where for e in other.dev}


def test_a_single_group_cannot_be_split():
    with pytest.raises(DataError) as caught:
        split_examples(ClassificationTask(), texts(["a", "b"]), FIFTH, groups=[1, 1])
    assert caught.value.where == "dev"


def test_every_task_keeps_its_passages_together():
    def sides(task: Any, examples: list[Any], key: Any) -> tuple[set[Any], set[Any]]:
        done = split_examples(task, examples, FIFTH)
        return {key(e) for e in done.train}, {key(e) for e in done.dev}

    questions = [
        Question(str(n), f"what {n}", f"context {n // 4}", (("context", 0),), False)
        for n in range(80)
    ]
    train, dev = sides(QuestionAnsweringTask(), questions, lambda e: e.context)
    assert not train & dev
    assert len(dev) == 4
    ranks = [RankExample(f"query {n // 2}", (f"doc {n}",), (1.0,)) for n in range(40)]
    train, dev = sides(RerankingTask(), ranks, lambda e: e.query)
    assert not train & dev
    assert len(dev) == 4
    words = [(f"word{n}",) for n in range(40)]
    sentences = [
        TagExample(
            words[n],
            ("O",),
            before=tuple(words[n - n % 4 : n]),
            after=tuple(words[n + 1 : n - n % 4 + 4]),
        )
        for n in range(40)
    ]
    train, dev = sides(TaggingTask(), sentences, lambda e: int(e.words[0][4:]) // 4)
    assert not train & dev
    assert len(dev) == 2
    single = [  # as a file of columns without -DOCSTART- is read
        dataclasses.replace(e, before=tuple(words[:n]), after=tuple(words[n + 1 :]))
        for n, e in enumerate(sentences)
    ]
    assert len(split_examples(TaggingTask(), single, FIFTH).dev) == 8
    scores = [TextExample(f"text {n}", label=str(n)) for n in range(100)]
    drawn = [split_examples(RegressionTask(), scores, FIFTH, Split(seed=seed)) for seed in (0, 1)]
    assert [len({int(e.label) // 10 for e in done.dev}) for done in drawn] == [10, 10]
    assert drawn[0].dev != drawn[1].dev
    sets = [
        MultilabelExample(f"text {n}", labels=("a",) * (n % 2) + ("b",) * (n % 10 == 0))
        for n in range(100)
    ]
    done = split_examples(MultilabelTask(), sets, FIFTH)
    assert Counter(e.labels for e in done.dev)[("b",)] == 2
    choice = ChoiceTask().example({"context": "a", "endings": ["b", "c"], "label": 1})
    assert ChoiceTask().stratum(choice) == 1


def test_files_and_rows_are_split_alike_and_recorded(model, tmp_path):
    rows, file = toy_folder.make_rows(60, 0), tmp_path / "t.tsv"
    toy_folder.write_tsv(file, toy_folder.make_examples(60, 0))
    usual: dict[str, Any] = {"epochs": 1, "progress": False}
    run = bothways.finetune(model, file, dev=0.2, out=tmp_path / "run", **usual)
    heard, out = Heard(), tmp_path / "rows"
    memory = bothways.finetune(model, rows, dev="20%", out=out, **usual | {"progress": heard})
    assert "splitting the dev data" in heard.names
    assert run.origin["data"]["dev"]["sha256"] == memory.origin["data"]["dev"]["sha256"]
    assert run.origin["data"]["dev"]["name"] == f"20% of {file}"
    assert run.metrics == memory.metrics
    record = json.loads((tmp_path / "run/model/bothways.json").read_text())
    digest = record["split"].pop("sha256")
    assert record["split"] == {"train": str(file), "dev": "20%", "group": None, "seed": 0}
    assert digest not in {source["sha256"] for source in record["data"].values()}
    heard = Heard()
    bothways.evaluate(tmp_path / "run", rows, progress=heard)
    assert any("trained the model" in line for line in heard.messages)
    with pytest.raises(DataError, match="is what the model was trained on"):
        bothways.calibrate(tmp_path / "run", rows, tmp_path / "new", progress=False)
    assert any(finding.where == "dev" for finding in run.findings)
    recorded = read_recorded_split(str(tmp_path / "run"))
    assert len(recorded[1]) == run.origin["data"]["dev"]["examples"]
    run_line("evaluate", tmp_path / "run")
    with pytest.raises(DataError, match="rows: was trained on rows in memory"):
        read_recorded_split(str(tmp_path / "rows"))
    with pytest.raises(BothwaysError):  # another split is other data
        bothways.finetune(model, file, dev=0.3, out=tmp_path / "run", resume=True, **usual)
    file.write_text(file.read_text() + "another text\tpos\n" * 9)
    with pytest.raises(DataError):
        read_recorded_split(str(tmp_path / "run"))
    file.unlink()
    with pytest.raises(DataError, match=r"run: was trained on .*t\.tsv, .*\n  Go to the folder"):
        read_recorded_split(str(tmp_path / "run"))
    for split in ({"train": str(file)}, {**record["split"], "seed": "x"}):
        change_settings(tmp_path / "run/model", "bothways.json", split=split)
        with pytest.raises(FolderError) as error:
            read_recorded_split(str(tmp_path / "run"))
        assert error.value.where == tmp_path / "run/model/bothways.json"


@pytest.mark.parametrize("dev", ["20", "0,2"])
def test_a_number_that_names_no_file_is_said_to_be_no_share(model, dev):
    with pytest.raises(ConfigError, match=rf"dev: '{dev}' is neither .*\n  For a .*: dev=\"20%\""):
        bothways.finetune(model, toy_folder.make_rows(8, 0), dev=dev, progress=False)


def test_a_group_column_is_read_from_files_and_rows(tmp_path):
    lines = [f"text {n}\t{'ab'[n % 2]}\tuser{n // 5}" for n in range(50)]
    file = tmp_path / "t.tsv"
    file.write_text("\n".join(["text\tlabel\tuser", *lines]) + "\n")
    settings = FinetuneConfig(model="m", train=str(file), dev="20%", split=Split("user"))
    done = read_split(settings)
    assert not {int(e.text[5:]) // 5 for e in done.train} & {int(e.text[5:]) // 5 for e in done.dev}
    names = ("text", "label", "user")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    assert [e.text for e in read_split(settings, rows).dev] == [e.text for e in done.dev]
    other = dataclasses.replace(settings, split=Split("usr"))
    for source in (None, rows):
        with pytest.raises(DataError, match="user"):
            read_split(other, source)
    words = tmp_path / "t.conll"
    words.write_text("-DOCSTART- O\n\nthe O\n\nold O\n")
    tagging = dataclasses.replace(settings, train=str(words), task=TaggingTask())
    with pytest.raises(DataError, match=r"t\.conll: has no column 'user': only tables of one ex"):
        read_split(tagging)
    with pytest.raises(ConfigError, match=r"^dev: is no share of the .*\n  Give dev=\"20%\""):
        read_split(dataclasses.replace(settings, dev=None, split=Split()))


@pytest.mark.parametrize(
    ("changes", "where"), [({"group": "user"}, "split.group"), ({"split.seed": 1}, "split.seed")]
)
def test_settings_of_a_split_need_a_share(changes, where):
    with interface("command"), pytest.raises(ConfigError, match="Give --dev 20%") as caught:
        load_config(FinetuneConfig(model="m", train="t", dev="d.tsv"), changes)
    assert caught.value.where == where


def test_questions_in_rows_are_numbered_as_in_files(tmp_path):
    file = tmp_path / "q.jsonl"
    settings = FinetuneConfig(model="m", train=str(file), dev="40%", task=QuestionAnsweringTask())

    def write(*contexts: str) -> list[dict[str, Any]]:
        answers = {"text": ["a dog"], "answer_start": [0]}
        rows = [
            {"question": f"what {n}", "context": context, "answers": answers}
            for n, context in enumerate(contexts)
        ]
        file.write_text("\n".join(map(json.dumps, rows)))
        return rows

    write(*["a dog and a cat"] * 3)
    with pytest.raises(DataError):  # one context
        read_split(settings)
    rows = write(*(f"a dog and {n}" for n in range(3)))
    splits = read_split(settings), read_split(settings, rows)
    of_file, of_rows = ([e.id for e in done.train + done.dev] for done in splits)
    assert of_rows == of_file
    assert {*of_rows} == {"1", "2", "3"}


def test_folds_of_rows_in_memory_are_scored_and_predicted(model):
    rows, kinds = toy_folder.make_rows(24, 0), set[str]()
    result = bothways.finetune(
        model, iter(rows), folds=2, epochs=1, progress=False,
        metrics={"mistakes": lambda predictions, examples: 0.0},
        on_event=lambda event: kinds.add(type(event).__name__),
    )  # fmt: skip
    assert [row["truth"] for row in result.predictions] == [row["label"] for row in rows]
    assert {row["fold"] for row in result.predictions} == {1, 2}
    assert set(result.metrics) == set(result.deviations) > {"accuracy", "mistakes"}
    assert result.folder is None
    assert kinds
    assert "CrossValidation(accuracy=" in repr(result)


def test_folds_predict_each_row_once(model, tmp_path):
    rows = toy_folder.make_rows(30, 0)
    settings = toy_folder.file_settings(model, tmp_path, 30, length=None)
    settings = load_config(settings, {"epochs": 1})
    series = cross_validate(settings, 2, tmp_path / "cv").series
    lines = (tmp_path / "cv/out_of_fold.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    assert [value["row"] for value in values] == [*range(1, 31)]
    assert [value["truth"] for value in values] == [row["label"] for row in rows]
    assert {value["fold"] for value in values} == {1, 2}
    report = json.loads((tmp_path / "cv/folds.json").read_text())
    accuracies = [run.metrics["accuracy"] for run in series.runs]
    assert report["metrics"]["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 2)
    right = sum(value["truth"] == value["prediction"]["label"] for value in values)
    assert right == pytest.approx(sum(15 * accuracy for accuracy in accuracies))
    resumed: dict[str, Any] = {"out": tmp_path / "cv", "resume": True}
    assert cross_validate(settings, 2, **resumed).series.runs == series.runs
    half = FoldRun("f", dataclasses.replace(settings, dev="50%"), rows=rows)
    assert half.digests() == series.runs[0].digests
    other = dataclasses.replace(settings, dev="20%")
    for changes in ({"folds": 3}, {"folds": 1}, {"settings": other}):
        with pytest.raises(ConfigError):
            cross_validate(**{"settings": settings, "folds": 2, **resumed, **changes})
    (tmp_path / "cv/fold-2" / PREDICTIONS).unlink()
    with pytest.raises(ConfigError, match=r"fold-2: a finished run has no .*\n  Delete its folder"):
        cross_validate(settings, 2, **resumed)
