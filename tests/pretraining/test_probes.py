"""Probes of a run: their values against scikit-learn and the task, no update changed, resumed, drawn."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bothways.core.batch import pack
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.core.progress import SILENT
from bothways.core.source import Sequence
from bothways.data.loader import ExampleBudget
from bothways.hub.model_folder import load_model
from bothways.model.attention.patterns import Causal
from bothways.model.families.catalogue import preset
from bothways.model.positions import Rotary
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.masked_lm import MaskedLM
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.prediction.analysis.evaluation import evaluate_suite, open_pairs
from bothways.prediction.predictor import Predictor
from bothways.pretraining import run as pretraining
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.evaluation import with_probes
from bothways.pretraining.run import PretrainResult, curves, pretrain, write_run_page
from bothways.training import parallel
from bothways.training.checkpoint import Best, Keep
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Steps
from bothways.training.trackers import read_records
from heard_progress import Heard
from toy_pretraining import small_encoder, small_run
from toy_training import equal, stop_at

PAIRS, TABLE = "probe/accuracy/agreement", "probe/accuracy/animals"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    """A folder of minimal pairs, and a labelled table."""
    folder = tmp_path_factory.mktemp("probes")
    (folder / "agreement").mkdir()
    rows = [
        {"sentence_good": f"The {a} sees the {b}.", "sentence_bad": f"The sees {a} the {b}."}
        for a, b in (("cat", "dog"), ("owl", "fox"), ("dog", "owl"), ("fox", "cat"))
    ]
    (folder / "agreement" / "order.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = "".join(
        f"The {animal} sees the {other}.\t{'day' if animal in ('cat', 'dog') else 'night'}\n"
        for animal in ("cat", "dog", "owl", "fox") for other in ("cat", "dog", "owl")
    )  # fmt: skip
    (folder / "animals.tsv").write_text(f"text\tlabel\n{table}")
    return str(folder / "agreement"), str(folder / "animals.tsv")


def settings_for(corpus, probes=(), causal=False, **training) -> PretrainConfig:
    encoder = small_encoder(corpus, 1, 0.1)
    if causal:
        encoder = dataclasses.replace(encoder, patterns=(Causal(),))
    return small_run(
        corpus, Steps(6), training={"evaluate": Steps(2), "save": Steps(2), **training}, encoder=encoder,
        objective=CausalLM() if causal else MaskedLM(), phases=(PretrainPhase(16),),
        batch=ExampleBudget(4), evaluation_tokens=100, probes=probes,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["rotary", "causal", "replaced"])
def test_probes_change_no_update(corpus, files, kind):
    plain = settings_for(corpus, causal=kind == "causal")
    if kind == "replaced":
        size = {"width": 32, "depth": 1, "heads": 2, "intermediate_size": 64, "embedding": None}
        encoder = fit_to_corpus(preset("deberta-v3-small"), corpus.tokenizer)
        plain = dataclasses.replace(
            settings_for(corpus, optimizer=AdamW(lr=0.1)),
            encoder=dataclasses.replace(encoder, **size),
            objective=ReplacedTokens(sharing="disentangled"),
        )
        files = files[1:]
    if kind == "rotary":
        encoder = dataclasses.replace(plain.encoder, position=Rotary(64))
        plain = dataclasses.replace(plain, encoder=encoder)
    both = (dataclasses.replace(plain, probes=probes) for probes in ((), files))
    without, probed = (pretrain(settings, corpus, device="cpu") for settings in both)
    assert equal(probed.training_module, without.training_module)
    settings = dataclasses.replace(plain, probes=files)
    again = with_probes(
        lambda _: {}, settings, corpus.tokenizer, probed.training_module, parallel.Plan(), SILENT
    )()
    assert [PAIRS, TABLE][-len(files) :] == [name for name in again if "probe/acc" in name]
    assert again.items() <= dict(probed.metrics).items()
    assert {name: probed.metrics[name] for name in without.metrics} == dict(without.metrics)


@pytest.fixture(scope="module")
def probed(corpus, files, tmp_path_factory) -> PretrainResult:
    folder = tmp_path_factory.mktemp("probed") / "run"
    return pretrain(settings_for(corpus, files), corpus, folder, device="cpu")


def test_values_are_those_of_the_saved_model(probed, files):
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold

    loaded = load_model(probed.folder)
    rows = [line.split("\t") for line in Path(files[1]).read_text().splitlines()[1:]]
    tokenizer, features = loaded.tokenizer, []
    special = tokenizer.specials
    for text, _ in rows:
        ids = np.array([special.cls, *tokenizer.encode(text), special.sep], dtype=np.int32)
        batch = pack([Sequence(ids, np.zeros(len(ids), dtype=np.int8))])
        with torch.no_grad():
            features.append(loaded.model.eval().encoder(batch).last.double().mean(0).numpy())
    x, y = np.array(features), np.array([label for _, label in rows])
    right = []
    for train, test in StratifiedKFold(5).split(x, y):
        mean, deviation = x[train].mean(0), x[train].std(0)
        solver = LogisticRegression(max_iter=1000).fit((x[train] - mean) / deviation, y[train])
        right.append((solver.predict((x[test] - mean) / deviation) == y[test]).mean())
    assert probed.metrics[TABLE] == pytest.approx(float(np.mean(right)))
    assert probed.metrics["majority/probe/animals"] == pytest.approx(0.5)


def test_pairs_are_scored_as_by_evaluate(corpus, files, probed):
    scores = evaluate_suite(Predictor(open_pairs(probed.folder, device="cpu")), Path(files[0]))
    assert probed.metrics[PAIRS] == scores.accuracy
    single = str(Path(files[0]) / "order.jsonl")
    other = pretrain(settings_for(corpus, (single,)), corpus, device="cpu")
    assert other.metrics["probe/accuracy/order"] == scores.accuracy


def test_records_resume_and_are_drawn(corpus, files, tmp_path):
    settings = settings_for(corpus, files, keep=Keep(best=Best(TABLE, "highest")))
    whole = pretrain(settings, corpus, tmp_path / "whole", device="cpu")
    with pytest.raises(InterruptedError):
        pretrain(settings, corpus, tmp_path / "cut", device="cpu", on_event=stop_at(4))
    resumed = pretrain(settings, corpus, tmp_path / "cut", device="cpu", resume=True)
    assert dict(resumed.metrics) == dict(whole.metrics)
    files = (tmp_path / name / "metrics.jsonl" for name in ("whole", "cut"))
    records = [
        [(r["step"], r[PAIRS], r[TABLE]) for r in read_records(file) if PAIRS in r]
        for file in files
    ]
    assert [step for step, *_ in records[0]] == [2, 4, 6]
    assert records[0] == records[1]
    page = tmp_path / "whole" / "page.html"
    write_run_page(page, settings, whole.metrics, whole.progress, torch.device("cpu"))
    assert "Probe: agreement" in page.read_text()
    drawn = curves(read_records(page.with_name("metrics.jsonl")), whole.metrics)
    assert not [curve for curve in drawn if "agreement" in curve.title]
    # Other probes may be chosen when a run continues.
    pretrain(settings_for(corpus), corpus, tmp_path / "cut", resume=True)


def test_what_cannot_be_probed_is_refused(corpus, files, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="probes: two have one name"):
        settings_for(corpus, (files[1], "other/animals.jsonl"))
    with pytest.raises(BothwaysError, match="nowhere"):
        pretrain(settings_for(corpus, ("nowhere.tsv",)), corpus, device="cpu")
    other = tmp_path / "other.tsv"
    other.write_text("good\tbad\nThe cat sees.\tThe sees cat.\n")
    with pytest.raises(DataError, match="columns are good, bad") as raised:
        pretrain(settings_for(corpus, (str(other),)), corpus, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    assert raised.value.fix == "Call them text and label, or sentence_good and sentence_bad."
    assert "--" not in str(raised.value)
    small = tmp_path / "small.tsv"
    small.write_text("text\tlabel\nThe cat.\tday\nThe owl.\tnight\nThe fox.\tnight\n")
    with pytest.raises(DataError, match="two texts or more of each"):
        pretrain(settings_for(corpus, (str(small),)), corpus, device="cpu")
    small.write_text("text\tlabel\nThe cat.\tday\nThe owl.\t\n")
    with pytest.raises(DataError, match=r"small\.tsv:3: .*label"):
        pretrain(settings_for(corpus, (str(small),)), corpus, device="cpu")
    shared = parallel.Plan(sharding=parallel.Sharding())
    monkeypatch.setattr(pretraining, "choose_parallelism", lambda *_: shared)
    with pytest.raises(
        ConfigError, match=r"probes: are not .* share a model\n  Set sharding=\"none"
    ):
        pretrain(settings_for(corpus, files), corpus, device="cpu")


def test_cut_texts_are_reported(corpus, tmp_path):
    table = tmp_path / "long.tsv"
    rows = [f"{'The cat sees the dog. ' * n}\t{label}\n" for n in (1, 9) for label in "ab"]
    table.write_text("text\tlabel\n" + "".join(rows))
    progress = Heard()
    pretrain(settings_for(corpus, (str(table),)), corpus, device="cpu", progress=progress)
    assert any("2 texts are cut to 16 tokens" in line for line in progress.messages)
