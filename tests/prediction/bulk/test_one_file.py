"""Predictions as one file, and columns that are kept on standard output."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

import bothways
from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.prediction.bulk import run
from bothways.prediction.bulk.parts import BulkRequest
from bothways.prediction.bulk.run import PARTS, SUCCESS, predict_files
from child_processes import children
from commands import run_line, run_shell_line
from terminal import Run, run_command
from toy_bulk import make_rows, write_rows


@pytest.fixture
def table(tmp_path) -> Path:
    """Texts with keys; some hold what a table must quote."""
    texts = ['a "good" film, really', "a bad play", "two\nlines", "tab\tbed\rbee"] * 3
    with (tmp_path / "new.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "text"])
        rows.writerows([f"k{n}", text] for n, text in enumerate(texts))
    return tmp_path / "new.csv"


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_standard_output_keeps_columns_in_order(model, table, capsys):
    run_line("predict", model, table)
    plain = printed(capsys)
    run_line("predict", model, table, "--keep", "id", "--keep", "text=body", "--window", "5")
    kept = printed(capsys)
    assert [row.pop("id") for row in kept] == [f"k{n}" for n in range(12)]
    assert kept[2].pop("body") == "two\nlines"
    assert [{"label": row["label"], "probabilities": row["probabilities"]} for row in kept] == plain


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.tsv", "out.parquet", "out.TSV"])
def test_a_file_has_the_rows_of_standard_output(name, model, table, capsys):
    run_line("predict", model, table, "--keep", "text", "--keep", "id")
    expected, out = printed(capsys), table.with_name(name)
    run_line("predict", model, table, "--out", out, "--keep", "text", "--keep", "id", "--rows", "5")
    assert capsys.readouterr().out == ""
    assert [file.name for file in sorted(table.parent.glob("*out*"))] == [name]
    assert not run.parts_folder(out).exists()
    match out.suffix:
        case ".jsonl":
            assert [json.loads(line) for line in out.read_text().splitlines()] == expected
        case ".parquet":
            rows = parquet.read_table(out).to_pylist()
            for row in rows:
                row["probabilities"] = dict(row["probabilities"])
            assert rows == expected
        case ".csv":
            for row in expected:
                chances = row.pop("probabilities").items()
                row |= {f"probabilities.{label}": str(chance) for label, chance in chances}
            with out.open(newline="") as file:
                assert [*csv.DictReader(file)] == expected
        case _:
            lines = out.read_text().splitlines()
            assert len(lines) == 13
            assert lines[3].split("\t")[:2] == ["two lines", "k2"]
            assert lines[4].split("\t")[:2] == ["tab bed bee", "k3"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_an_interrupted_file_is_absent_and_continues(suffix, model, table, monkeypatch):
    request = BulkRequest(model, (str(table),), keep=("id",), rows=4)
    whole, out = table.with_name(f"whole{suffix}"), table.with_name(f"out{suffix}")
    predict_files(request, whole)
    take, taken = run._BulkRun.take, []

    def interrupted(self: Any, result: Any) -> None:
        """Write one part, then be interrupted."""
        if taken:
            raise KeyboardInterrupt
        taken.append(result)
        take(self, result)

    monkeypatch.setattr(run._BulkRun, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict_files(request, out)
    monkeypatch.undo()
    assert not out.exists()
    done = predict_files(request, out)
    assert (done.rows, done.again) == (12, 1)
    assert out.read_bytes() == whole.read_bytes()


def test_parts_are_in_order_beyond_five_digits(tmp_path):
    numbers = [7, 99_999, 100_000]
    for number in numbers:
        (tmp_path / f"part-00000-{number:05}.jsonl").write_text(f"{number}\n")
    run.join_parts(tmp_path, tmp_path / "out.jsonl", flat=False)
    assert (tmp_path / "out.jsonl").read_text().split() == [*map(str, numbers)]


def test_rejected_rows_are_in_a_file_beside_it(model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 1, "text": "a good film"}\n{"id": 2, "text": 3}\n')
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError):
        predict_files(BulkRequest(model, (str(rows),), keep=("id",)), out)
    assert not out.exists()
    run_line("predict", model, rows, "--keep", "id", "--rejects", "--out", tmp_path / "b.jsonl")
    [row] = (tmp_path / "b.jsonl").read_text().splitlines()
    assert json.loads(row)["id"] == 1
    [rejected] = run.rejects_file(tmp_path / "b.jsonl").read_text().splitlines()
    assert json.loads(rejected)["where"].endswith("rows.jsonl:2")
    # Work that such a row has stopped goes on with rejects.
    request = BulkRequest(model, (str(rows),), keep=("id",), rows=1)
    with pytest.raises(DataError):
        predict_files(request, out)
    capsys.readouterr()
    run_line("predict", model, rows, "--keep", "id", "--rejects", "--rows", 1, "--out", out)
    assert f"1 row in {out}; 1 part was finished before" in capsys.readouterr().err
    assert out.read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_pipe_is_read_once(model, tmp_path):
    """Its parts cannot be continued, and its rows have the types of the first of them."""
    rows = [json.dumps(row) for row in make_rows(9)]
    (tmp_path / "files").mkdir()

    def predict(name: str) -> Run:
        words = ["predict", str(model), "-", "--text", "text", "--keep", "id", "--rows", "4"]
        words += ["--out", str(tmp_path / "files" / name)]
        return run_command(words, tmp_path / "printed", terminal=False, stdin="\n".join(rows))

    done = predict("out.parquet")
    assert (done.status, b"9 rows" in done.messages) == (0, True)
    table = parquet.read_table(tmp_path / "files" / "out.parquet")
    assert table["id"].to_pylist() == [*range(9)]
    rows[5] = "{"
    broken = predict("b.csv")
    assert (broken.status, b"standard input:6" in broken.messages) == (2, True)
    assert [file.name for file in (tmp_path / "files").iterdir()] == ["out.parquet"]


def test_a_pipe_is_read_after_a_run_that_was_killed(model, tmp_path, monkeypatch):
    line = f"bothways predict {model} - --keep text --out {tmp_path / 'out.jsonl'}"
    with monkeypatch.context() as killed:
        killed.setattr(run, "join_parts", lambda *given, **options: 1 / 0)
        killed.setattr(run.shutil, "rmtree", lambda *given, **options: None)
        with pytest.raises(ZeroDivisionError):
            run_shell_line(f"echo 'the rain' 'the film' | {line}")
    run_shell_line(f"echo 'a play' | {line}")
    [row] = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(row)["text"] == "a play"


def test_names_that_cannot_be_written_are_refused(model, table):
    for words, where in (
        (["--out", "x.json"], "out"),
        (["--out", "x.csv", "--format", "parquet"], "format"),
        (["--out", "x.csv", "--format", "jsonl"], "format"),
        (["--keep", "label", "--keep", "text=label"], "keep"),
    ):
        with pytest.raises(ConfigError) as refused:
            run_line("predict", model, table, *words)
        assert refused.value.where == where
    before = table.read_bytes()
    with pytest.raises(ResourceError, match="the output is also an input"):
        run_line("predict", model, table, "--out", table)
    assert table.read_bytes() == before
    rejects = table.rename(table.with_name("x.csv.rejects.jsonl"))
    with pytest.raises(ResourceError, match="the output is also an input"):
        run_line("predict", model, rejects, "--out", table.with_name("x.csv"))
    assert rejects.read_bytes() == before


def test_fillings_are_counted_by_a_setting(masked, table):
    with pytest.raises(ConfigError, match=r"^best=3 keeps .* 'fill'\n.* top=3") as refused:
        [*bothways.predict(masked, table, task="fill", best=3)]
    assert refused.value.message("command").startswith("--top 3 keeps")


PARTS_OF_ALL = 60


def wait_for(out: Path, parts: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until this many parts are finished."""
    for _ in range(6000):
        if len([*(out / PARTS).glob("*.json")]) >= parts:
            return
        assert process.poll() is None
        time.sleep(0.01)
    raise AssertionError(f"{parts} parts take more than a minute")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_workers_and_a_killed_run_lose_and_repeat_nothing(model, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", make_rows(2 * PARTS_OF_ALL))
    asked = BulkRequest(model, (file,), rows=2, keep=("id",))
    predict_files(asked, tmp_path / "reference")
    out = tmp_path / "out"
    words = ["predict", model, file, f"--out={out}", "--rows=2", "--keep=id", "--processes=2"]
    process = subprocess.Popen([sys.executable, "-m", "bothways", *words])
    try:
        wait_for(out, 1, process)
        workers = children(process.pid)
        os.kill(workers[0], signal.SIGKILL)
        while {*children(process.pid)} == {*workers}:  # until the killed one is replaced
            assert process.poll() is None
            time.sleep(0.01)
        wait_for(out, 10, process)
    finally:
        process.kill()
        process.wait()
    assert not (out / SUCCESS).exists()
    finished = len([*(out / PARTS).glob("[!.]*.json")])  # without one that was being written
    done = predict_files(asked, out)
    assert (done.rows, done.parts, done.again) == (2 * PARTS_OF_ALL, PARTS_OF_ALL, finished)
    for part in (tmp_path / "reference").glob("part-*"):
        assert (out / part.name).read_bytes() == part.read_bytes()
    assert len([*out.glob("part-*")]) == PARTS_OF_ALL
