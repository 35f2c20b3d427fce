"""Tables on pre-training: what their cells are, and a table from text to page, resumed cell by cell."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.core.report.html import write_html
from bothways.core.report.sections import Curves
from bothways.data.masking import Masking
from bothways.data.segments import FullSentences, NextSentence
from bothways.lab.paper import pretraining_runs as runs
from bothways.lab.paper.cost import table_cost
from bothways.lab.paper.pages import difference, table_report, write_table_results
from bothways.lab.paper.pretraining_runs import TableRequest, base_settings, run_table
from bothways.lab.paper.pretraining_tables import COLUMNS, TABLES
from bothways.model.attention.patterns import Causal
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.masked_lm import MaskedLM, MaskedObjective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.pretraining.config import PretrainConfig
from bothways.training.schedules import Hours, Steps
from commands import run_line
from toy_animals import document

TINY = (
    "encoder.width=16",
    "encoder.heads=2",
    "encoder.intermediate_size=16",
    "encoder.depth=1",
    "training.precision=fp32",
    "evaluation_tokens=200",
    "held_out=0.1",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    (folder / "text.txt").write_text("\n\n".join(document(rng) for _ in range(60)))
    (folder / "glue" / "CoLA").mkdir(parents=True)
    for split, count in (("train", 12), ("dev", 6)):
        rows = "".join(
            f"x\t{i % 2}\t\t{('a cat', 'the dog')[i % 2]} ate {i}\n" for i in range(count)
        )
        (folder / "glue" / "CoLA" / f"{split}.tsv").write_text(rows)
    return folder


@pytest.fixture(autouse=True)
def without_pages(monkeypatch) -> None:
    """The pages of single runs take longer than these runs."""
    for module in ("pretraining", "finetuning"):
        monkeypatch.setattr(f"bothways.{module}.run.installed", lambda *packages: False)


def request_of(place: Path, out: Path, table: str = "bert-5", **changes: Any) -> TableRequest:
    request = TableRequest(
        table, (str(place / "text.txt"),), str(place / "glue"), out, "small", Steps(2),
        tasks=("CoLA",), seeds=2, overrides=TINY, finetuning=("training.until=2 steps",),
    )  # fmt: skip
    return dataclasses.replace(request, **changes)


def cells_of(table: str, scale: Any = "small") -> dict[str, PretrainConfig]:
    request = TableRequest(table, (), "", Path(), scale, Hours(1.0))
    base = base_settings(request)
    return {cell.name: cell.settings(base) for cell in request.chosen}


def test_tables_name_cells_and_published_rows():
    for table in TABLES.values():
        cells = [cell.name for cell in table.cells]
        assert len({*cells}) == len(cells)
        assert {*table.columns} <= {*COLUMNS}
        ours, theirs = {cell.title for cell in table.cells}, {x.system for x in table.published}
        assert theirs - ours <= {"reference BERT-Base", "SENTENCE-PAIR", "+ BiLSTM"}
        assert not theirs or theirs & ours


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_cells_differ_only_in_their_variable(scale):
    """Of all settings of a run only those may differ that the table is about."""
    about = {
        "bert-5": {"encoder", "objective", "phases"},
        "bert-6": {"encoder"},
        "bert-8": {"objective"},
        "masking-rate": {"objective"},
        "roberta-1": {"data_copies"},
        "roberta-2": {"objective"},
        "albert-sentences": {"objective"},
        "albert-sharing": {"encoder"},
        "electra": {"objective", "evaluation_masking"},
        "steps": {"encoder", "objective", "training"},
    }
    if scale == "small":  # the first masks, of objectives that hide tokens
        about["electra"].add("phases")
        about["steps"].add("phases")
    for name in TABLES:
        cells = [dict(vars(cell)) for cell in cells_of(name, scale).values()]
        differing = {key for key in cells[0] for cell in cells if cell[key] != cells[0][key]}
        assert differing <= about[name], name
        ends = {cell["training"].until for cell in cells}
        assert ends == ({Hours(1.0)} if name != "steps" else {Hours(0.25), Hours(0.5), Hours(1.0)})


def test_objectives_of_table_5():
    cells = cells_of("bert-5", "paper")
    assert all(
        isinstance(cells["no-nsp"].segments_of(phase), NextSentence)
        for phase in cells["no-nsp"].phases
    ), "the pairs stay, the loss goes"
    assert isinstance(cells["no-nsp"].objective, MaskedLM)
    ltr, gpt = (cells[name].encoder for name in ("ltr", "gpt"))
    assert isinstance(cells["ltr"].objective, CausalLM)
    assert ltr.patterns == gpt.patterns == (Causal(),)
    assert (ltr.segments, gpt.segments) == (2, 0)


def test_sizes_masks_rates_and_formats():
    def shape(config: PretrainConfig) -> tuple[int, int, int]:
        encoder = config.encoder
        return encoder.depth, encoder.width, encoder.heads

    assert [shape(cell) for cell in cells_of("bert-6", "paper").values()] == [
        (3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16),
    ]  # fmt: skip
    assert [shape(cell) for cell in cells_of("bert-6").values()] == [
        (1, 192, 3), (2, 192, 1), (2, 192, 3), (4, 192, 3), (4, 256, 4), (8, 256, 4),
    ]  # fmt: skip

    def masks(table: str) -> list[tuple[float, float, float]]:
        found = [cell.objective for cell in cells_of(table).values()]
        assert all(isinstance(each, MaskedObjective) for each in found)
        return [(m.rate, m.mask, m.random) for m in (each.masking for each in found)]

    assert masks("bert-8") == [
        (0.15, *mix) for mix in ((0.8, 0.1), (1, 0), (0.8, 0.2), (0.8, 0), (0, 0.8), (0, 1))
    ]
    rates = [0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    mixed = [(0.15, 0.8, 0.1), (0.4, 0.8, 0.1)]
    assert masks("masking-rate") == [*((rate, 1, 0) for rate in rates), *mixed]
    formats = cells_of("roberta-2")
    last = {name: cell.segments_of(cell.phases[-1]) for name, cell in formats.items()}
    assert isinstance(last["segment-pair"], NextSentence)
    assert last["full-sentences"] == FullSentences(128)
    assert last["doc-sentences"] == FullSentences(128, cross=False)
    copies = {name: cell.data_copies for name, cell in cells_of("roberta-1", "paper").items()}
    assert copies == {"static": 10, "dynamic": None}


def test_table_runs_from_text_to_page_and_resumes(place, tmp_path, monkeypatch):
    request = request_of(place, tmp_path / "out", cells=("base", "ltr"))
    heard: list[int] = []
    rows = run_table(request, device="cpu", on_row=lambda rows: heard.append(len(rows)))
    assert heard == [1, 2]
    assert [done.cell.title for done in rows] == ["BERT-Base", "LTR & No NSP"]
    assert [len(done.values("CoLA")) for done in rows] == [2, 2]
    assert {done.pretrained.steps for done in rows} == {2}
    base = rows[0].tasks["CoLA"]
    assert rows[0].values("CoLA") == tuple(100 * run.metrics["mcc"] for run in base.series.runs)
    file = write_table_results(request, rows)
    report = table_report(request, rows, device="cpu")
    drawn = [each for each in report.sections if isinstance(each, Curves)]
    assert {"unigram baseline"} == {
        name for each in drawn if each.title.endswith("masked") for name in each.baselines
    }
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for words in ("84.4", "LTR &amp; No NSP", "Held-out loss", "+ BiLSTM", "SST-2"):
        assert words in page
    values = json.loads(file.read_text())
    assert [row["row"] for row in values["rows"]] == [done.cell.title for done in rows]
    mean = values["rows"][0]["columns"]["CoLA"]["mean"]
    assert mean == pytest.approx(statistics.fmean(rows[0].values("CoLA")))
    assert not list((request.out / "cells").glob("*/step-*")), "finished runs keep no checkpoints"

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("nothing is trained again")

    monkeypatch.setattr(runs, "pretrain", never)
    monkeypatch.setattr("bothways.lab.sweeps.runs.finetune", never)
    again = run_table(request, device="cpu")
    assert [done.values("CoLA") for done in again] == [done.values("CoLA") for done in rows]
    table = table_cost(request, device="cpu")
    assert table.rows[-1] == ["all", 6, 6, "0:00:00"]
    other = dataclasses.replace(request, overrides=(*TINY, "seed=3"))
    with pytest.raises(ConfigError, match="this run was finished with other settings"):
        run_table(other, device="cpu")


def test_interrupted_cell_resumes(place, tmp_path, monkeypatch):
    request = request_of(place, tmp_path / "out", cells=("no-nsp",), budget=Steps(8))
    real, seen = runs.pretrain, list[int]()

    def stopping(*args: Any, on_event: Any = None, **options: Any) -> Any:
        def stop(event: Any) -> None:
            if event.kind == "checkpoint" and event.progress.steps == 4 and not seen:
                seen.append(4)
                raise KeyboardInterrupt

        return real(*args, on_event=stop, **options)

    monkeypatch.setattr(runs, "pretrain", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_table(request, device="cpu")
    (done,) = run_table(request, device="cpu")
    straight = request_of(place, tmp_path / "straight", cells=("no-nsp",), budget=Steps(8))
    (other,) = run_table(straight, device="cpu")
    assert seen == [4]
    assert done.pretrained.metrics == other.pretrained.metrics
    assert done.values("CoLA") == other.values("CoLA")


def test_small_runs_train_all_positions():
    """Questions and pairs are read with up to 128 tokens: no position may be untrained.

    Models that hide tokens begin with 40 % by 80/10/10, whatever the masks of their table;
    replaced token detection keeps its own.
    """
    for name in TABLES:
        for cell in cells_of(name).values():
            assert [(phase.length, phase.share) for phase in cell.phases] == [
                (16, 0.4), (64, 0.3), (128, 0.3),
            ]  # fmt: skip
            assert cell.segments_of(cell.phases[0]) == FullSentences(16)
            first, *others = (phase.masking for phase in cell.phases)
            own = isinstance(cell.objective, ReplacedTokens)
            assert first == (
                Masking(0.4) if cell.objective.masking is not None and not own else None
            )
            assert others == [None, None], "the table's own masks"
    assert "length=128" in runs.SCALES["small"].answers


def test_cost_is_estimated_without_writing(place, tmp_path, capsys):
    words = [
        "reproduce", "pretraining", "bert-5", *TINY, "--text", str(place / "text.txt"),
        "--data", str(place / "glue"), "--tasks", "CoLA", "--cells", "base,no-nsp",
        "--budget", "30 minutes", "--out", str(tmp_path / "out"), "--dry-run", "--scale", "small",
    ]  # fmt: skip
    run_line(*words)
    shown = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert shown.count("0:30:00") == 2
    assert "fine-tuning CoLA" in shown


def test_wrong_requests_are_refused(place, tmp_path):
    for changes, words in (
        ({"table": "bert-9"}, r"table: unknown name 'bert-9'; there are: bert-5, bert-6"),
        ({"cells": ("nsp",)}, r"cells: unknown name 'nsp'; there are: base, no-nsp"),
        ({"tasks": ("WNLI",)}, r"tasks: unknown name 'WNLI'"),
        ({"seeds": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            request_of(place, tmp_path, **changes)
    with pytest.raises(DataError, match=r"no data for any of the columns: no train\.tsv"):
        table_cost(request_of(place, tmp_path, tasks=("SST-2", "RTE")), device="cpu")
    with pytest.raises(BothwaysError, match="no such file"):
        table_cost(request_of(place, tmp_path, text=("nowhere.txt",)), device="cpu")
    with pytest.raises(BothwaysError, match="unknown"):
        table_cost(request_of(place, tmp_path, overrides=("nothing=1",)), device="cpu")


def test_difference_matches_welch():
    a, b = [80.0, 82.0, 81.0], [85.0, 84.0, 87.0, 84.0]
    found = difference(a, b)
    va, vb = statistics.variance(a) / 3, statistics.variance(b) / 4
    freedom = (va + vb) ** 2 / (va**2 / 2 + vb**2 / 3)
    from scipy import stats

    t = (85.0 - 81.0) / (va + vb) ** 0.5
    half = stats.t.ppf(0.975, freedom) * (va + vb) ** 0.5
    assert found.points == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx((4 - half, 4 + half))
    assert found.p_value == pytest.approx(2 * stats.t.sf(t, freedom))
    assert difference([80.0], b) is None
    assert difference([80.0, 80.0], [80.0, 80.0]) is None
