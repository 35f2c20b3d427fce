"""Predictions in parts: equal to those of one file, resumed exactly, and clear about what is wrong."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import dataset, parquet

from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.model.kernels import library
from bothways.prediction.bulk import run
from bothways.prediction.bulk.parts import BulkRequest, part_content, prediction_values
from bothways.prediction.bulk.run import FILES, REJECTS, SUCCESS, predict_files
from commands import run_line
from heard_progress import Heard
from toy_bulk import make_classifier, make_rows, write_rows
from toy_predictors import TASKS


@pytest.fixture(scope="module")
def begun(model, tmp_path_factory) -> tuple[BulkRequest, Path]:
    """A request, and the folder in which it was carried out."""
    folder = tmp_path_factory.mktemp("begun")
    asked = request(model, folder)
    predict_files(asked, folder / "out")
    return asked, folder / "out"


def parts(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.glob("part-*"))}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for part in parts(out).values() for line in part.splitlines()]


def check_equal_predictions(row: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two predictions of a text in different batches, up to the sixth digit printed."""
    assert row["label"] == expected["label"]
    assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=2e-6)


def test_parts_of_any_kind_of_file_are_what_the_command_prints(model, tmp_path, capsys):
    kinds = enumerate((".txt", ".jsonl", ".tsv", ".csv", ".parquet"))
    files = [write_rows(tmp_path / f"rows{kind}", make_rows(23, seed)) for seed, kind in kinds]
    printed = ""
    for file in files:
        run_line("predict", model, file)
        printed += capsys.readouterr().out
    run_line("predict", model, *files, "--out", tmp_path / "whole")
    assert "115 rows in" in capsys.readouterr().err
    assert b"".join(parts(tmp_path / "whole").values()).decode() == printed
    run_line("predict", model, *files, "--out", tmp_path / "small", "--rows", 7)
    assert [*parts(tmp_path / "small")][3:5] == ["part-00000-00003.jsonl", "part-00001-00000.jsonl"]
    if library.runs_on(torch.device("cpu")):  # batch-invariant: other batches, the same bits
        assert b"".join(parts(tmp_path / "small").values()).decode() == printed
    for row, expected in zip(lines(tmp_path / "small"), printed.splitlines(), strict=True):
        check_equal_predictions(row, json.loads(expected))
    assert json.loads((tmp_path / "small" / SUCCESS).read_text()) == {
        "rows": 115, "rejected": 0, "parts": 20,
    }  # fmt: skip


def test_parquet_keeps_columns_with_their_types(model, tmp_path):
    file, out = write_rows(tmp_path / "rows.parquet", make_rows(23)), tmp_path / "out"
    run_line("predict", model, file, "--out", out, "--keep", "id=key", "--keep", "source", "--rows", 9)  # fmt: skip
    table = dataset.dataset(out, format="parquet").to_table()
    assert table.schema.field("key").type == pyarrow.int64()
    assert table["key"].to_pylist() == list(range(23))
    assert table["source"].to_pylist()[:4] == ["s0", None, None, "s3"]
    run_line("predict", model, file, "--out", tmp_path / "json", "--format", "jsonl")
    rows = table.select(["label", "probabilities"]).to_pylist()
    for row, expected in zip(rows, lines(tmp_path / "json"), strict=True):
        check_equal_predictions({**row, "probabilities": dict(row["probabilities"])}, expected)


def test_kept_columns_of_other_files_have_the_types_of_the_first_rows(model, tmp_path):
    rows = make_rows(12)
    rows[10]["id"], rows[11]["source"] = "not a number", "\ud800"  # half of a surrogate pair
    file = write_rows(tmp_path / "rows.jsonl", rows)
    words = ("predict", model, file, "--keep", "id", "--format", "parquet", "--rows", 5)
    words += ("--keep", "source")
    message = r"rows\.jsonl:11: 'id' is 'not a number', not of the type int64"
    with pytest.raises(DataError, match=message):
        run_line(*words, "--out", tmp_path / "strict")
    run_line(*words, "--out", tmp_path / "out", "--rejects")
    assert dataset.dataset(tmp_path / "out", format="parquet").count_rows() == 10
    rejected = (tmp_path / "out" / REJECTS / "00000-00002.jsonl").read_text().splitlines()
    assert [json.loads(row)["where"] for row in rejected] == [f"{file}:11", f"{file}:12"]
    rows[0]["id"] = "\ud800"
    words = ("predict", model, write_rows(tmp_path / "other.jsonl", rows), *words[3:])
    with pytest.raises(DataError, match="the values of 'id' have no type of Parquet in common"):
        run_line(*words, "--out", tmp_path / "other")


@pytest.mark.parametrize("name", TASKS)
def test_every_prediction_has_columns_in_parquet(name, predictors):
    opened = predictors[name]
    predictions = opened(TASKS[name][1][:5])
    expected = [prediction_values(each, None) for each in predictions]
    content = part_content("parquet", predictions, None, {}, ())
    written = parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    for row, values in zip(written, expected, strict=True):
        if "probabilities" in values and isinstance(values["probabilities"], dict):
            row["probabilities"] = dict(row["probabilities"])
        if name == "likelihood":
            row["tokens"] = [[*each.values()] for each in row["tokens"]]
        if name == "embed":
            row["vector"] = [float(str(np.float32(value))) for value in row["vector"]]
        # What JSON leaves out, as a model without conformal sets does, is null in a column.
        assert row == dict.fromkeys(row) | values
    text = part_content("jsonl", predictions, None, {}, None).decode().splitlines()
    assert [json.loads(line) for line in text] == expected


def test_vectors_are_those_of_one_file(folder, tmp_path):
    files = [write_rows(tmp_path / f"{seed}.txt", make_rows(15, seed)) for seed in (1, 2)]
    run_line("embed", folder, *files, "pooling=max", "--out", tmp_path / "out", "--rows", 4)
    whole = []
    for file in files:
        run_line("embed", folder, file, "pooling=max", "--out", tmp_path / "one.npy")
        whole.append(np.load(tmp_path / "one.npy"))
    found = [np.load(file) for file in sorted((tmp_path / "out").glob("part-*.npy"))]
    assert len(found) == 8
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(whole))
    keyed = write_rows(tmp_path / "keyed.jsonl", make_rows(15, 1))
    run_line("embed", folder, keyed, "pooling=max", "--out", tmp_path / "keyed", "--keep", "id")
    table = parquet.read_table(tmp_path / "keyed")
    assert table["id"].to_pylist() == list(range(1000, 1015))
    np.testing.assert_array_equal(np.stack(table["vector"].to_numpy()), whole[0])


class Acting(Heard):
    """Calls a function at each report, with the number of the report."""

    def __init__(self, act: Callable[[int], object]) -> None:
        super().__init__()
        self.act, self.count = act, 0

    def advance(self, done: float | int, note: str | None = None) -> None:
        super().advance(done, note)
        self.count += 1
        self.act(self.count)


def interrupting(at: int) -> Acting:
    """Interrupt the work at a report."""

    def act(count: int) -> None:
        if count == at:
            raise KeyboardInterrupt

    return Acting(act)


def replacing(file: Path, content: bytes) -> Acting:
    """Replace a file by another at the reports."""

    def act(count: int) -> None:
        hidden = file.with_suffix(".new")
        hidden.write_bytes(content)
        hidden.replace(file)

    return Acting(act)


def request(model: str, tmp_path: Path, **changes: Any) -> BulkRequest:
    files = tuple(write_rows(tmp_path / f"{seed}.jsonl", make_rows(20, seed)) for seed in (1, 2))
    return replace(BulkRequest(model, files, rows=4, keep=("id",)), **changes)


def stamps(out: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in out.glob("part-*")}


@pytest.mark.parametrize("at", [1, 6, 13])
def test_an_interrupted_run_continues_where_it_stopped(begun, tmp_path, at):
    (asked, reference), out = begun, tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        predict_files(asked, out, progress=interrupting(at))
    before = stamps(out)
    assert not (out / SUCCESS).exists()
    done = predict_files(asked, out)
    assert done == run.BulkResult(rows=40, parts=10, again=len(before))
    assert {name: stamps(out)[name] for name in before} == before
    assert parts(out) == parts(reference)
    assert predict_files(asked, out).again == 10


def test_threads_of_the_calling_program_stay(model, tmp_path):
    before = torch.get_num_threads()
    predict_files(request(model, tmp_path), tmp_path / "out", threads=before + 1)
    assert torch.get_num_threads() == before


def test_only_what_changed_is_computed_again(model, tmp_path):
    asked, out = request(model, tmp_path), tmp_path / "out"
    predict_files(asked, out)
    before = stamps(out)
    (out / "part-00000-00003.jsonl").write_bytes(b"half a")  # without its end
    (out / "part-00001-00001.jsonl").unlink()
    rows = make_rows(20, 2)
    rows[0]["text"] = "another text"
    write_rows(tmp_path / "2.jsonl", rows[:14])
    assert predict_files(asked, out).again == 5
    changed = {"part-00000-00003.jsonl", "part-00001-00000.jsonl", "part-00001-00001.jsonl", "part-00001-00003.jsonl"}  # fmt: skip
    after = stamps(out)
    assert {name for name in after if after[name] != before.get(name)} == changed
    assert "part-00001-00004.jsonl" not in after
    assert [row["id"] for row in lines(out)] == [*range(1000, 1020), *range(2000, 2014)]
    predict_files(asked, tmp_path / "fresh")
    assert parts(out) == parts(tmp_path / "fresh")


def test_progress_is_in_bytes_of_the_input_and_ends_with_all_of_them(model, tmp_path):
    asked, heard = request(model, tmp_path), Heard()
    predict_files(asked, tmp_path / "out", progress=heard)
    [(name, total, done)] = heard.stages
    assert (name, total) == ("predicting", sum(Path(file).stat().st_size for file in asked.files))
    assert done == sorted(done)
    assert done[-1] == pytest.approx(total)
    assert heard.notes[-1] == "40 rows"


BROKEN = '{"id": 1, "text": "fine"}\n{"id": 2, "text"\n{"id": 3}\n{"id": 4, "text": 5}\n{"id": 5, "text": "good"}\n'


def test_a_broken_row_ends_the_work_with_its_line(model, tmp_path):
    good = write_rows(tmp_path / "good.jsonl", make_rows(6))
    (tmp_path / "bad.jsonl").write_text(BROKEN)
    asked = BulkRequest(model, (good, str(tmp_path / "bad.jsonl")), rows=4)
    with pytest.raises(DataError, match=r"bad\.jsonl:2: "):
        predict_files(asked, tmp_path / "out")
    assert [*parts(tmp_path / "out")] == ["part-00000-00000.jsonl", "part-00000-00001.jsonl"]
    (tmp_path / "bad.jsonl").write_text('{"text": "mended"}\n')
    assert predict_files(asked, tmp_path / "out").again == 2


def test_broken_rows_can_be_put_aside(model, tmp_path):
    file, out = tmp_path / "bad.jsonl", tmp_path / "out"
    file.write_text(BROKEN)
    asked = BulkRequest(model, (str(file),), rows=1, keep=("id",), rejects=True)
    done = predict_files(asked, out)
    assert (done.rows, done.rejected) == (2, 3)
    assert [row["id"] for row in lines(out)] == [1, 5]
    texts = "".join(each.read_text() for each in sorted((out / REJECTS).glob("*.jsonl")))
    rejected = [json.loads(line) for line in texts.splitlines()]
    assert [row["where"] for row in rejected] == [f"{file}:{number}" for number in (2, 3, 4)]
    assert "text" in rejected[1]["error"]
    assert predict_files(asked, out).rejected == 3


def test_a_row_that_cannot_be_encoded_is_put_aside(folder, tmp_path):
    (tmp_path / "masks.txt").write_text("the [MASK] was\nno mask here\n[MASK] fine\n")
    asked = BulkRequest(str(folder), (str(tmp_path / "masks.txt"),), "fill")
    with pytest.raises(DataError, match=r"masks\.txt:2: "):
        predict_files(asked, tmp_path / "strict")
    done = predict_files(replace(asked, rejects=True), tmp_path / "out")
    assert (done.rows, done.rejected) == (2, 1)


def test_empty_files_have_no_parts(model, tmp_path):
    (tmp_path / "none.jsonl").touch()
    schema = pyarrow.schema([("text", pyarrow.string())])
    parquet.write_table(schema.empty_table(), tmp_path / "none.parquet")
    files = [
        *map(str, sorted(tmp_path.glob("none.*"))),
        write_rows(tmp_path / "a.txt", make_rows(3)),
    ]
    assert predict_files(BulkRequest(model, tuple(files)), tmp_path / "out").rows == 3
    assert [*parts(tmp_path / "out")] == ["part-00002-00000.jsonl"]
    assert len([*(tmp_path / "out" / FILES).iterdir()]) == 3


def test_the_first_file_may_be_empty_where_columns_are_kept(model, tmp_path):
    (tmp_path / "a.jsonl").touch()
    rows = write_rows(tmp_path / "b.jsonl", make_rows(5))
    empty = parquet.read_schema(write_rows(tmp_path / "d.parquet", make_rows(5))).empty_table()
    parquet.write_table(empty.drop_columns("id"), tmp_path / "c.parquet")
    for files in ((str(tmp_path / "a.jsonl"), rows), (str(tmp_path / "c.parquet"), rows)):
        out = tmp_path / f"out-{Path(files[0]).suffix[1:]}"
        predict_files(BulkRequest(model, files, keep=("id",), form="parquet"), out)
        assert dataset.dataset(out, format="parquet").to_table()["id"].to_pylist() == [*range(5)]


def test_a_file_that_changes_while_it_is_read_is_read_again(model, tmp_path):
    asked, out = request(model, tmp_path), tmp_path / "out"
    other = Path(write_rows(tmp_path / "other.jsonl", make_rows(20, 3))).read_bytes()
    predict_files(asked, out, progress=replacing(tmp_path / "1.jsonl", other))
    assert lines(out)[0]["id"] == 1000
    predict_files(asked, out)
    assert [row["id"] for row in lines(out)] == [*range(3000, 3020), *range(2000, 2020)]


def test_a_file_that_is_written_to_while_it_is_read_is_one_message(model, tmp_path):
    """The predictions were those of rows of both, and complete."""
    asked, out = request(model, tmp_path), tmp_path / "out"
    other = (tmp_path / "1.jsonl").read_bytes().replace(b'"id": 10', b'"id": 30')
    writing = Acting(lambda _: (tmp_path / "1.jsonl").write_bytes(other))
    with pytest.raises(DataError, match="has changed while it was read\n  Run the same") as caught:
        predict_files(asked, out, progress=writing)
    assert caught.value.where == str(tmp_path / "1.jsonl")
    assert not (out / SUCCESS).exists()
    predict_files(asked, out)
    assert [row["id"] for row in lines(out)] == [*range(3000, 3020), *range(2000, 2020)]


def test_output_that_changes_is_not_complete_until_the_end(model, tmp_path):
    asked, out = request(model, tmp_path), tmp_path / "out"
    predict_files(asked, out)
    write_rows(tmp_path / "1.jsonl", make_rows(6, 3))
    (out / "_parts" / "00000-00002.json").unlink()  # as a kill between a part and its marker does
    with pytest.raises(KeyboardInterrupt):
        predict_files(asked, out, progress=interrupting(2))
    assert not (out / SUCCESS).exists()
    predict_files(asked, out)
    assert (out / SUCCESS).exists()
    assert [row["id"] for row in lines(out)] == [*range(3000, 3006), *range(2000, 2020)]


def test_parts_of_a_changed_file_that_were_at_work_are_computed_again(model, tmp_path, monkeypatch):
    """The file was read to its end and noted before its parts were written."""
    asked, out = request(model, tmp_path), tmp_path / "out"
    predict_files(asked, out)
    write_rows(tmp_path / "2.jsonl", make_rows(20, 3))

    def interrupted(worker: Any, jobs: Any, *_: object) -> Any:
        first, *_ = [*jobs]
        yield worker(first)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "map_in_order", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict_files(asked, out, processes=2)
    monkeypatch.undo()
    assert predict_files(asked, out).again == 6
    assert [row["id"] for row in lines(out)] == [*range(1000, 1020), *range(3000, 3020)]


def test_a_refused_job_leaves_nothing_behind(model, tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise ResourceError("a worker process was killed (signal 9)")

    monkeypatch.setattr(run, "map_in_order", killed)
    with pytest.raises(ResourceError, match="was killed"):
        predict_files(request(model, tmp_path), tmp_path / "out", processes=2)
    assert not (tmp_path / "out").exists()


def test_types_of_an_earlier_call_stay(model, tmp_path):
    """The rows that come after a finished file have whole numbers, its own have others."""
    rows = make_rows(8)
    for row in rows[:4]:
        row["id"] = 0.5
    files = [write_rows(tmp_path / f"{n}.jsonl", rows[n : n + 4]) for n in (0, 4)]
    asked, out = BulkRequest(model, tuple(files), keep=("id",), form="parquet"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        predict_files(asked, out, progress=interrupting(3))
    assert predict_files(asked, out).again == 1
    table = dataset.dataset(out, format="parquet").to_table()
    assert table["id"].to_pylist() == [0.5] * 4 + [4.0, 5.0, 6.0, 7.0]


def test_vectors_of_other_types_continue(folder, tmp_path):
    options = {"task": "embed", "keep": (), "vectors": "int8"}
    ranges = ((-1.0,) * 32, (1.0,) * 32)
    asked = request(str(folder), tmp_path, ranges=ranges, **options)
    assert predict_files(asked, tmp_path / "out").again == 0
    assert predict_files(asked, tmp_path / "out").again == 10


def test_a_data_set_of_the_hub_is_read_in_one_revision(model, tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'data'")
    data, out, heard = tmp_path / "texts", tmp_path / "out", Heard()
    data.mkdir()
    file, name = data / "train.jsonl", f"hub:{data}"
    write_rows(file, make_rows(9))
    asked = BulkRequest(model, (name,), rows=2, keep=("id",))
    with pytest.raises(KeyboardInterrupt):
        predict_files(asked, out, progress=interrupting(5))
    before = parts(out)
    assert 0 < len(before) < 5
    os.utime(file, (1, 1))
    with pytest.raises(DataError, match=r"texts: has changed since .*\n  Delete .*_files to begin"):
        predict_files(asked, out)
    assert parts(out) == before
    (out / FILES / "versions.json").unlink()  # as told
    named = replace(asked, files=(f"{name}@main",))
    assert predict_files(named, out).again == len(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bothways.data.tables.HubData.rows", lambda _: 1 / 0)
        assert predict_files(asked, out, progress=heard).again == 5, "what is finished is not read"
    assert [row["id"] for row in lines(out)] == [*range(9)]


def test_a_data_set_that_changes_before_it_is_read_ends_the_work(model, tmp_path):
    pytest.importorskip("datasets", reason="needs the extra 'data'")
    data = tmp_path / "texts"
    data.mkdir()
    write_rows(data / "train.jsonl", make_rows(9))
    files = (write_rows(tmp_path / "a.jsonl", make_rows(3)), f"hub:{data}")
    rows = write_rows(tmp_path / "b.jsonl", make_rows(9, 1))
    changing = replacing(data / "train.jsonl", Path(rows).read_bytes())
    with pytest.raises(DataError, match=r"texts: has changed since .*\n  Delete .*_files to begin"):
        predict_files(BulkRequest(model, files), tmp_path / "out", progress=changing)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rows": 5}, ConfigError, r"_job\.json: the folder was begun with rows = 4, not 5"),
        ({"top": 1}, ConfigError, "was begun with top = None, not 1"),
        ({"rows": 0}, ConfigError, r"^rows: must be at least 1"),
        ({"keep": ("idd",)}, DataError, r"has no column 'idd'; it has id, text, source; did you mean 'id'"),
        ({"keep": ("id", "text=id")}, ConfigError, "^keep: names a column twice: id, id"),
        ({"keep": ("id=label",)}, ConfigError, "^keep: 'label' is also a field of the prediction"),
        ({"form": "npy"}, ConfigError, "^format: npy holds vectors, and the task is 'classify'"),
        ({"form": "npy", "task": "embed"}, ConfigError, "^format: npy holds no columns to keep"),
        ({"top": 2, "task": "embed"}, ConfigError, "^best=2 keeps the best .* the task is 'embed'"),
        ({"form": "csv"}, ConfigError, r"^format: unknown format 'csv'\s+Name a file instead: out=\WFILE\.csv"),
        ({"form": "xlsx"}, ConfigError, r"^format: unknown format 'xlsx'\s+Choose one of jsonl"),
        ({"files": ("-",)}, ConfigError, "^-: parts are made of files, not of a pipe"),
        ({"files": (".",)}, DataError, r"^\.: is a folder"),
        ({"files": ()}, ConfigError, "^files: names no file"),
        ({"files": ("no.txt",)}, DataError, r"^no\.txt: no such file\n  Check the name\.$"),
        ({"files": ("good",)}, DataError, r"texts that are no file go to bothways\.load\(MODEL\)"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_any_work(begun, tmp_path, change, kind, message):
    asked, out = begun
    before, place = stamps(out), tmp_path / "new"
    with pytest.raises(kind, match=message):
        predict_files(replace(asked, **change), out if "begun" in message else place)
    assert stamps(out) == before
    assert not [*place.glob("part-*")]


@pytest.mark.parametrize("name", ["config.json", "bothways.json", "1_Pooling/config.json"])
def test_another_model_of_the_same_name_does_not_continue(name, tmp_path):
    folder, asked = make_classifier(tmp_path), request(str(tmp_path / "classifier"), tmp_path)
    predict_files(asked, tmp_path / "out")
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"id2label": {"0": "a", "1": "b"}, "length": 9}))
    with pytest.raises(ConfigError, match="the folder was begun with sha256 of the model"):
        predict_files(asked, tmp_path / "out")


def test_a_folder_with_other_files_is_left_alone(model, tmp_path):
    asked, out = request(model, tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious\n")
    with pytest.raises(ResourceError, match=r"out: holds other files, such as 'thesis\.txt'"):
        predict_files(asked, out)
    with pytest.raises(DataError, match=r"thesis\.txt: is in the folder of the output"):
        predict_files(replace(asked, files=(str(out / "thesis.txt"),), keep=()), out)
    assert [file.name for file in out.iterdir() if file.name != ".lock"] == ["thesis.txt"]


def test_options_of_parts_need_a_folder(model, tmp_path):
    files = [write_rows(tmp_path / f"{seed}.txt", make_rows(2, seed)) for seed in (1, 2)]
    for words, message in (
        (files, "files: there are 2 files, and one is read"),
        ((files[0], "--rejects"), "rejects: is for predictions in parts"),
        ((files[0], "--window", 0), "window: must be at least 1"),
        ((files[0], "--out", tmp_path, "--window", 5), "window: is for predictions that are print"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_line("predict", model, *words)
    with pytest.raises(ConfigError, match="processes: must be at least 1"):
        predict_files(request(model, tmp_path), tmp_path / "out", processes=0)
