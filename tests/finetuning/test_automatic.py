"""The rate and the length that a run chooses: by width, pre-training, updates and labels."""

import dataclasses
import json

import pytest

from bothways.core.config import reader as configs
from bothways.data.loader import ExampleBudget, TokenBudget
from bothways.finetuning.config import FinetuneConfig, finetune_adam, load_config, paper_finetuning
from bothways.finetuning.data import LabelledData
from bothways.finetuning.lora import LoRA
from bothways.finetuning.prepare import choose_automatic, default_rate, enough_epochs
from bothways.finetuning.run import finetune
from bothways.lab.sweeps.runs import SweepFolder, finetune_seeds
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.positions import Learned
from bothways.tasks.classification.task import ClassificationTask
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Epochs, Steps
from heard_progress import Heard
from toy_folder import VOCABULARY, file_settings, make_data, make_folder, make_rows
from toy_task import fit_task

SMALL = EncoderConfig(len(VOCABULARY), 32, 2, 2, 64, position=Learned(32))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LabelledData:
    return make_data(tmp_path_factory.mktemp("tokenizer"), 320, 40)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("bert-large", 3.8e-5), ("bert-base", 5e-5), ("bert-small", 7.5e-5), ("bert-tiny", 3e-4)],
)
def test_the_rate_falls_with_the_width(name, rate):
    """Of low-rank changes it is ten times as high (Hu et al. 2021, table 9)."""
    encoder = preset(name)
    assert default_rate(encoder) == rate
    assert default_rate(encoder, tokens=0.0) == pytest.approx(2 * rate, rel=0.02)
    assert default_rate(encoder, tokens=1e12) == rate
    assert default_rate(encoder, lora=LoRA()) == pytest.approx(10 * rate)


@pytest.mark.parametrize(
    ("updates", "labels", "epochs"),
    [
        (12_000.0, 3, 3),  # MNLI
        (267.0, 2, 3),  # CoLA
        (78.0, 2, 6),  # RTE
        (313.0, 77, 4),  # banking77
        (5.0, 2, 20),
    ],
)
def test_few_updates_are_more_epochs(updates, labels, epochs):
    assert enough_epochs(updates, labels) == epochs


def test_only_what_is_left_open_is_chosen(data):
    chosen, notes = choose_automatic(FinetuneConfig(), SMALL, data)
    assert chosen.training.optimizer == AdamW(lr=3e-4)
    assert chosen.training.until == Epochs(20.0)
    assert [str(note) for note in notes] == [
        "training.optimizer.lr: 0.0003, for a width of 32",
        "training.until: 20 epochs, for 10 updates an epoch and 2 labels",
    ]
    assert {note.severity for note in notes} == {"note"}
    for given in (FinetuneConfig(finetune_adam()), paper_finetuning(ClassificationTask())):
        assert choose_automatic(given, SMALL, data) == (given, [])
    rate = dataclasses.replace(FinetuneConfig().training, optimizer=AdamW(lr=1e-3))
    chosen, [note] = choose_automatic(FinetuneConfig(rate), SMALL, data)
    assert chosen.training.optimizer == AdamW(lr=1e-3)
    assert note.where == "training.until"
    by_tokens = FinetuneConfig(batch=TokenBudget(data.tokens))
    assert "for 1 update an epoch" in str(choose_automatic(by_tokens, SMALL, data)[1][1])


def test_what_is_set_can_be_left_open_again():
    base = FinetuneConfig(model="m", train="t.tsv")
    assert load_config(base, ["epochs=4"]).training.until == Epochs(4.0)
    again = load_config(load_config(base, ["epochs=4", "lr=1e-4"]), ["epochs=auto", "lr=auto"])
    assert again == base
    assert configs.read(FinetuneConfig, configs.to_dict(base)) == base


def test_random_and_little_trained_weights_take_a_higher_rate(data, tmp_path):
    training = dataclasses.replace(FinetuneConfig().training, until=Steps(1), precision="fp32")
    done = fit_task(SMALL, data, FinetuneConfig(training, 16), device="cpu")
    assert done.settings.training.optimizer == AdamW(lr=6e-4)
    folder = make_folder(tmp_path / "bert")

    def rate_of(record: dict[str, int]) -> object:
        (folder / "bothways.json").write_text(json.dumps(record))
        config = FinetuneConfig(model=str(folder), train="rows", length=16, training=training)
        done = finetune(config, train=make_rows(40, 0), device="cpu")
        return done.settings.training.optimizer.lr

    rates = [rate_of(record) for record in ({}, {"tokens": 1000}, {"tokens": 10**9})]
    assert rates == [3e-4, 6e-4, 3e-4]


def test_the_choice_is_printed_recorded_and_resumed(tmp_path):
    changes = {"precision": "fp32", "evaluate": Epochs(10.0)}
    training = dataclasses.replace(FinetuneConfig().training, **changes)
    model, heard = make_folder(tmp_path / "bert"), Heard()
    settings = file_settings(
        model, tmp_path, 16, 16, length=None, batch=ExampleBudget(16), training=training
    )
    done = finetune(settings, tmp_path / "run", device="cpu", progress=heard)
    assert "note: training.optimizer.lr: 0.0003, for a width of 32" in heard.text
    assert "note: training.until: 20 epochs, for 1 update an epoch" in heard.text
    assert done.progress.epochs == 20
    written = configs.load(FinetuneConfig, file=tmp_path / "run" / "config.toml")
    assert (written.training.until, written.training.optimizer) == (Epochs(20.0), AdamW(lr=3e-4))
    record = json.loads((tmp_path / "run" / "model" / "bothways.json").read_text())
    assert record["settings"]["training"]["optimizer"]["lr"] == 3e-4
    again = finetune(settings, tmp_path / "run", device="cpu", resume=True)
    assert again.metrics == done.metrics

    place = SweepFolder(tmp_path / "runs", device="cpu")
    first = finetune_seeds(settings, (0,), place)
    place = dataclasses.replace(place, resume=True)
    assert finetune_seeds(settings, (0,), place).runs == first.runs
