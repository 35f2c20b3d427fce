"""Tables on pre-training: what their cells are, and a table from text to page, resumed cell by cell."""

import dataclasses
import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bothways.core.errors import BothwaysError, ConfigError, DataError, DivergedError
from bothways.core.report.html import write_html
from bothways.core.report.sections import Curves
from bothways.data.masking import Masking
from bothways.data.segments import FullSentences, NextSentence
from bothways.lab.paper import pages, pretraining_runs as runs, run as cost
from bothways.lab.paper.experiment import PUBLISHED
from bothways.lab.paper.pages import difference, fit_scaling, table_report, write_table_results
from bothways.lab.paper.pretraining_runs import (
    RowOutcome,
    TableRequest,
    base_settings,
    corpus_of_text,
    run_table,
)
from bothways.lab.paper.pretraining_tables import COLUMNS, TABLES
from bothways.lab.paper.run import table_cost
from bothways.lab.sweeps.runs import SweepOutcome
from bothways.model.attention.patterns import Causal
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.masked_lm import MaskedLM, MaskedObjective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.pretraining.config import PretrainConfig
from bothways.training.schedules import Hours, Steps
from commands import run_line
from toy_animals import document

TINY = (
    "encoder.width=16", "encoder.heads=2", "encoder.intermediate_size=16", "encoder.depth=1",
    "training.precision=fp32", "evaluation_tokens=200", "held_out=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    (folder / "text.txt").write_text("\n\n".join(document(rng) for _ in range(60)))
    (folder / "glue" / "SST-2").mkdir(parents=True)
    rows = [f"{('a cat', 'the dog')[i % 2]} ate {i}\t{i % 2}\n" for i in range(12)]
    for split, count in (("train", 12), ("dev", 6)):
        (folder / "glue" / "SST-2" / f"{split}.tsv").write_text(
            "".join(["sentence\tlabel\n", *rows[:count]])
        )
    return folder


def request_of(place: Path, out: Path, table: str = "bert-5", **changes: Any) -> TableRequest:
    request = TableRequest(
        table, (str(place / "text.txt"),), str(place / "glue"), out, "small", Steps(2),
        tasks=("SST-2",), seeds=2, overrides=TINY, finetuning=("training.until=2 steps",),
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


def test_published_figures_are_those_that_two_hands_entered():
    """From the papers, once into the file and once into a test; new ones need a second hand, too."""
    rows = [
        [row.table, row.system, *sorted(row.values.items())]
        for name in sorted(PUBLISHED)
        for row in PUBLISHED[name]
    ]
    assert len(rows) == 78
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest[:32] == "10be2a14d0aefcaf257fa1a249ece07c"


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_cells_differ_only_in_their_variable(scale):
    """Of all settings of a run only those may differ that the table is about."""
    about = {
        "bert-5": {"encoder", "objective", "phases"},
        "bert-6": {"encoder", "training"},
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
        shares = (0.25, 0.5, 1.0) if name in ("steps", "bert-6") else (1.0,)
        assert ends == {Hours(share) for share in shares}


def test_objectives_of_table_5():
    cells = cells_of("bert-5", "paper")
    segments = [cells["no-nsp"].segments_of(phase) for phase in cells["no-nsp"].phases]
    assert {*map(type, segments)} == {NextSentence}, "the pairs stay, the loss goes"
    assert isinstance(cells["no-nsp"].objective, MaskedLM)
    ltr, gpt = (cells[name].encoder for name in ("ltr", "gpt"))
    assert isinstance(cells["ltr"].objective, CausalLM)
    assert ltr.patterns == gpt.patterns == (Causal(),)
    assert (ltr.segments, gpt.segments) == (2, 0)


def test_sizes_masks_rates_and_formats():
    def shape(config: PretrainConfig) -> tuple[int, int, int]:
        encoder = config.encoder
        return encoder.depth, encoder.width, encoder.heads

    assert [shape(cell) for cell in cells_of("bert-6", "paper").values()][:6] == [
        (3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16),
    ]  # fmt: skip
    assert [shape(cell) for cell in cells_of("bert-6").values()][:6] == [
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
    assert [len(done.values("SST-2")) for done in rows] == [2, 2]
    assert [run.steps for done in rows for run in done.pretrained] == [2, 2]
    (base,) = rows[0].tasks["SST-2"]
    assert rows[0].values("SST-2") == tuple(
        100 * run.metrics["accuracy"] for run in base.series.runs
    )
    file = write_table_results(request, rows)
    report = table_report(request, rows, device="cpu")
    [masked] = [x for x in report.sections if isinstance(x, Curves) and x.title.endswith("masked")]
    assert {*masked.baselines} == {"unigram baseline"}
    [comparison] = [x for x in report.sections if x.title == "Measured, and published"]
    assert comparison.columns[-2:] == ["SST-2", "published"]
    measured, *others = (line[-2:] for line in comparison.rows)
    assert measured[0].startswith(f"{statistics.fmean(rows[0].values('SST-2')):.1f}")
    assert [measured[1], *others[:2]] == [92.7, [None, 92.6], [others[1][0], 92.1]]
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for words in ("84.4", "LTR &amp; No NSP", "Held-out loss", "+ BiLSTM", "SST-2"):
        assert words in page
    values = json.loads(file.read_text())
    assert [row["row"] for row in values["rows"]] == [done.cell.title for done in rows]
    mean = values["rows"][0]["columns"]["SST-2"]["mean"]
    assert mean == pytest.approx(statistics.fmean(rows[0].values("SST-2")))
    assert not list((request.out / "cells").glob("*/step-*")), "finished runs keep no checkpoints"
    monkeypatch.setattr(runs, "pretrain", None)  # nothing is trained again
    monkeypatch.setattr("bothways.lab.sweeps.runs.finetune", None)
    again = run_table(request, device="cpu")
    assert [done.values("SST-2") for done in again] == [done.values("SST-2") for done in rows]
    table = table_cost(request, device="cpu")
    assert table.rows[-1] == ["all", 6, 6, "0:00:00"]
    other = dataclasses.replace(request, overrides=(*TINY, "seed=3"))
    with pytest.raises(ConfigError, match="this run was finished with other settings"):
        run_table(other, device="cpu")


def test_seeds_of_pretraining_are_the_unit_of_the_statistics(place, tmp_path, monkeypatch):
    """One value a model, however often it is fine-tuned; a run that diverges is shown as failed."""
    one = request_of(place, tmp_path / "out", cells=("base", "no-nsp"))
    first = run_table(one, device="cpu")
    assert len(first[0].values("SST-2")) == 2, "of one model the fine-tuning runs"
    assert "pretraining_seeds=3 measures it" in str(table_report(one, first, device="cpu"))
    real = runs.pretrain

    def failing(settings: PretrainConfig, *args: Any, **options: Any) -> Any:
        if settings.seed == 2 and isinstance(settings.objective, MaskedLM):
            raise DivergedError("the loss is not finite", where="step 1")
        assert settings.seed > 0, "the runs with the first seed are finished"
        return real(settings, *args, **options)

    monkeypatch.setattr(runs, "pretrain", failing)
    request = dataclasses.replace(one, pretraining_seeds=3)
    base, other = run_table(request, device="cpu")
    assert [run.settings["seed"] for run in base.pretrained] == [0, 1, 2]
    assert len({run.metrics["held-out/loss/masked"] for run in base.pretrained}) == 3
    assert base.values("SST-2") == tuple(
        statistics.fmean(100 * run.metrics["accuracy"] for run in outcome.series.runs)
        for outcome in base.tasks["SST-2"]
    )
    assert (len(base.values("SST-2")), len(other.values("SST-2"))) == (3, 2)
    row = json.loads(write_table_results(request, [base, other]).read_text())["rows"][1]
    assert [bool(run["failed"]) for run in row["pre-training"]] == [False, False, True]
    columns = row["columns"]["perplexity"]
    sides = [done.held_out("held-out/perplexity") for done in (base, other)]
    assert columns["seeds"] == list(sides[1])
    assert columns["difference"] == dataclasses.asdict(difference(*sides, best=1.0))
    report = str(table_report(request, [base, other], device="cpu"))
    assert "(1 of 3 failed)" in report, "the perplexity of a model that diverged"
    assert "of 5 failed)" in report, "this model, and four fine-tuning runs"
    assert "seeds of pre-training" in report
    table = table_cost(request, device="cpu")
    assert table.rows[0][1:3] == [3, 3]
    assert table.rows[-1][1] == 6 + 12


@pytest.fixture
def few_resamples(monkeypatch) -> None:
    monkeypatch.setattr(pages, "RESAMPLES", 50)


def law(parameters: Any, tokens: Any) -> Any:
    return 2.0 + 40.0 * parameters**-0.34 + 70.0 * tokens**-0.28


@pytest.mark.usefixtures("few_resamples")
def test_exponents_of_a_law_are_found():
    parameters = np.array([1, 2, 2.5, 4, 7, 14, 1, 2.5, 4, 1, 2.5, 4]) * 1e5
    tokens = np.array([8e6] * 6 + [4e6] * 3 + [2e6] * 3)
    losses = law(parameters, tokens)
    fit = fit_scaling(losses, {"parameters": parameters, "tokens": tokens})
    assert not fit.problem
    assert fit.irreducible.value == pytest.approx(2.0, abs=1e-2)
    assert fit.exponents["parameters"].value == pytest.approx(0.34, abs=1e-2)
    assert fit.exponents["tokens"].value == pytest.approx(0.28, abs=1e-2)
    assert fit.loss(parameters=3e6, tokens=9e6) == pytest.approx(law(3e6, 9e6), abs=2e-2)
    noise = np.random.default_rng(0).normal(0, 0.005, (3, 12))
    again = {"parameters": np.tile(parameters, 3), "tokens": np.tile(tokens, 3)}
    noisy = fit_scaling((losses + noise).ravel(), again)
    for name, exponent in (("parameters", 0.34), ("tokens", 0.28)):
        assert noisy.exponents[name].low < exponent < noisy.exponents[name].high
    assert noisy.loss(parameters=3e6, tokens=9e6) == pytest.approx(law(3e6, 9e6), abs=2e-2)
    equal = fit_scaling(losses[:6], {"parameters": parameters[:6], "tokens": tokens[:6]})
    assert {*equal.exponents} == {"parameters"}
    assert equal.irreducible.value == pytest.approx(2.0 + 70.0 * 8e6**-0.28, abs=1e-2)


@pytest.mark.usefixtures("few_resamples")
def test_points_that_determine_nothing_are_said_to():
    parameters, tokens = np.geomspace(1e5, 1e7, 8), np.geomspace(1e6, 1e7, 8)
    problems = {
        "vary together": (parameters, tokens[::-1]),
        "a fit needs 4 runs of different sizes, and there are 3": (parameters[:3], np.full(3, 1e6)),
        "three different numbers of tokens": (parameters, np.array([1e6, 2e6] * 4)),
    }
    for words, (n, d) in problems.items():
        fit = fit_scaling(law(n, d), {"parameters": n, "tokens": d})
        assert words in fit.problem
        assert fit.irreducible is None
    noise = np.random.default_rng(1).normal(0, 0.5, 8)
    fit = fit_scaling(5.0 + noise, {"parameters": parameters, "tokens": np.full(8, 1e6)})
    assert "do not determine the exponent of parameters" in fit.problem


@pytest.mark.usefixtures("few_resamples")
def test_sizes_of_a_table_are_fitted(place, tmp_path):
    request = request_of(place, tmp_path / "out", "bert-6", overrides=TINY[:0], seeds=1)
    cells, losses = request.plan.cells, iter(np.linspace(6.0, 4.0, 12))
    rows = []
    for cell in cells:
        folder = request.out / "cells" / cell.name
        folder.mkdir(parents=True)
        tokens = round(8e6 * cell.share)
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "tokens": {tokens}, "seconds": 60}}\n')
        metrics = {"held-out/loss/masked": float(next(losses)), "unigram/loss/masked": 7.0}
        rows.append(RowOutcome(cell, (SweepOutcome(cell.name, metrics),)))
    nothing_learned = SweepOutcome(cells[0].name, {**metrics, "held-out/loss/masked": 6.99})
    rows[0] = RowOutcome(cells[0], (nothing_learned,))
    rows[-1] = RowOutcome(cells[-1], (SweepOutcome(cells[-1].name, {}, ("diverged",)),))

    def sections(rows: list[RowOutcome]) -> dict[str, Any]:
        return {each.title: each for each in table_report(request, rows, device="cpu").sections}

    titles = sections(rows)
    table = titles["Loss by parameters and tokens"]
    names = f"l-3-h-768-a-12, {cells[-1].name}"
    assert f"Excluded, diverged or at the level of word frequencies: {names}." in table.note
    assert "10 runs" in table.note
    assert len(titles["Loss by parameters and tokens, fitted"].lines) == 6
    written = json.loads(write_table_results(request, rows).read_text())["fit"]
    assert {*written["exponents"]} == {"parameters", "tokens"}
    (text,) = sections(rows[:3])["Loss by parameters and tokens"].paragraphs
    assert "No fit: a fit needs 4 runs of different sizes, and there are 1." in text
    assert "at the level of word frequencies: l-3-h-768-a-12." in text


def test_interrupted_cell_resumes(place, tmp_path, monkeypatch):
    request = request_of(place, tmp_path / "out", cells=("no-nsp",), budget=Steps(8), seeds=1)
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
    straight = dataclasses.replace(request, out=tmp_path / "straight")
    (other,) = run_table(straight, device="cpu")
    assert seen == [4]
    assert done.pretrained[0].metrics == other.pretrained[0].metrics
    assert done.values("SST-2") == other.values("SST-2")


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
            own = cell.objective.masking is None or isinstance(cell.objective, ReplacedTokens)
            first, *others = (phase.masking for phase in cell.phases)
            assert first == (None if own else Masking(0.4))
            assert others == [None, None], "the table's own masks"
    assert "length=128" in runs.SCALES["small"].answers


def test_cost_is_estimated_without_writing(place, tmp_path, capsys):
    words = [
        "reproduce", "pretraining", "bert-5", *TINY, "--text", str(place / "text.txt"),
        "--data", str(place / "glue"), "--tasks", "SST-2", "--cells", "base,no-nsp",
        "--budget", "30 minutes", "--out", str(tmp_path / "out"), "--dry-run", "--scale", "small",
    ]  # fmt: skip
    run_line(*words)
    shown = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert shown.count("0:30:00") == 2
    assert "fine-tuning SST-2" in shown


def test_wrong_requests_are_refused(place, tmp_path, monkeypatch):
    # A mistake is reported before the minutes of measuring.
    monkeypatch.setattr(cost, "_pretraining_seconds", lambda *_: pytest.fail("measured"))
    for changes, words in (
        ({"table": "bert-9"}, r"table: unknown name 'bert-9'; there are: bert-5, bert-6"),
        ({"cells": ("nsp",)}, r"cells: unknown name 'nsp'; there are: base, no-nsp"),
        ({"tasks": ("WNLI",)}, r"tasks: unknown name 'WNLI'"),
        ({"seeds": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            request_of(place, tmp_path, **changes)
    no_data = r"no data for any of the columns: no train\.tsv"
    for changes, error, words in (
        ({"tasks": ("MRPC", "RTE")}, DataError, no_data),
        ({"text": ("nowhere.txt",)}, BothwaysError, "no such file"),
        ({"overrides": ("nothing=1",)}, BothwaysError, "unknown"),
        ({"finetuning": ("nothing=1",)}, BothwaysError, "unknown"),
    ):
        with pytest.raises(error, match=words):
            table_cost(request_of(place, tmp_path, **changes), device="cpu")


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
    assert found.error_reduction == pytest.approx(4 / 19)
    errors = difference([50.0, 40.0], [30.0, 24.0], best=1.0).error_reduction
    assert errors == pytest.approx(18 / 44)
    assert difference([80.0], b) is None
    assert difference([80.0, 80.0], [80.0, 80.0]) is None


def test_a_folder_with_a_vocabulary_of_another_size_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sleeps in the old barn\n" * 9, "utf8")
    files, out = [str(tmp_path / "text.txt")], tmp_path / "out"
    tokenizer = corpus_of_text(files, out, 60).tokenizer
    assert corpus_of_text(files, out, 60).tokenizer.size == tokenizer.size < 60
    with pytest.raises(ConfigError, match="was trained for 60 tokens, not 70") as raised:
        corpus_of_text(files, out, 70)
    assert "vocabulary" not in str(raised.value.fix)  # no command has such an option
