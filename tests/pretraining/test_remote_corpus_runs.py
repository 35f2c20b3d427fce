"""Pre-training on a corpus at a URL: the run of the folder, through a cache that is large enough."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("fsspec", reason="needs the extra 'remote'")

import bothways
from bothways.cli.main import app
from bothways.core import urls
from bothways.core.errors import BothwaysError
from bothways.core.part_cache import fetch_ahead
from bothways.data.corpus import Corpus
from bothways.pretraining.run_page import read_records
from far_corpus import put
from flaky_store import FlakyStore

SETTINGS = """
    encoder.width=32 encoder.heads=2 encoder.intermediate_size=64 encoder.depth=2 batch.kind=tokens batch.n=512
    microbatch_tokens=512 training.precision=fp32 held_out=0.1 evaluation_tokens=400
    shuffle=windows shuffle.documents=24 shuffle.run=6
""".split()  # noqa: SIM905


@pytest.fixture
def url(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(urls, "WAITS", (0.0,) * 5)
    monkeypatch.setenv("BOTHWAYS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BOTHWAYS_CACHE_GB", "1.6e-5")
    monkeypatch.setattr("bothways.pretraining.run.write_run_page", lambda *_: None)
    FlakyStore.clear()
    yield put(Path(corpus.folder), tmp_path, 256)
    wait_for_fetches()
    FlakyStore.clear()


def wait_for_fetches() -> None:
    while not fetch_ahead().idle:
        time.sleep(0.001)


def run(corpus: str, out: Path, *words: str) -> Path:
    steps = ["--out", str(out), "--until", "6 steps"]
    app(["pretrain", corpus, *steps, *SETTINGS, *words], result_action="return_value")
    return out


def test_a_run_on_a_corpus_at_a_url_is_that_on_its_folder(
    url: str, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far, near = run(url, tmp_path / "far"), run(str(corpus.folder), tmp_path / "near")
    one, two = (load_file(each / "model" / "model.safetensors") for each in (far, near))
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)
    lines = [
        [{name: value for name, value in record.items() if "loss" in name} for record in records]
        for records in (read_records(each / "metrics.jsonl") for each in (far, near))
    ]
    assert lines[0] == lines[1] != []
    wait_for_fetches()  # a listing while threads write counts files that come and go
    held = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*.bin.*"))
    assert 0 < held <= 16_000
    app(["inspect-step", str(far), "2", url], result_action="return_value")
    app(["corpus", "inspect", url], result_action="return_value")
    assert "150" in capsys.readouterr().out
    found = []
    for place in (url, str(corpus.folder)):
        app(
            ["evaluate", str(near), place, "--length", "32", "--json"], result_action="return_value"
        )
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


def test_a_student_learns_from_a_corpus_at_a_url(url: str, corpus: Corpus, tmp_path: Path) -> None:
    teacher = run(str(corpus.folder), tmp_path / "teacher")
    settings = ["training.until=2 steps", "batch.n=256", *SETTINGS[-3:]]
    students = []
    for name, place in (("far", url), ("near", str(corpus.folder))):
        out = tmp_path / name
        app(
            ["distil", str(teacher), place, "--out", str(out), *settings],
            result_action="return_value",
        )
        students.append(load_file(out / "model" / "model.safetensors"))
    assert all((students[0][key] == value).all() for key, value in students[1].items())
    bothways.distil(
        str(teacher),
        url,
        out=tmp_path / "python",
        until="1 step",
        progress=False,
        shuffle={"kind": "windows", "documents": 24, "run": 6},
    )


def test_a_cache_that_is_too_small_is_an_error_before_the_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failure(*words: str) -> str:
        with pytest.raises(BothwaysError) as caught:
            run(url, tmp_path / "none", *words)
        return str(caught.value)

    assert "the cache of 1.6e-05 GB holds less than the 1.86e-05 GB of a corpus whose" in failure(
        "shuffle=none"
    )
    assert "Set shuffle=windows, which reads it in windows, or BOTHWAYS_CACHE_GB=0.1" in failure(
        "shuffle=none"
    )
    assert "of two windows of 120 documents\n" in failure("shuffle.documents=120")
    assert not (tmp_path / "none").exists()
