"""Fine-tuning in memory: equal to padded fine-tuning by transformers, equal for equal seeds, and the best weights are kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from bothways.core.errors import ConfigError
from bothways.core.source import Cursor
from bothways.finetuning import data as labelled
from bothways.finetuning.config import RECIPES, FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData, label, score, train_loader
from bothways.finetuning.prepare import learning_by_rows, start_from
from bothways.finetuning.run import FinetuneResult
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.kernels.library import runs_on
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.tasks.catalogue import trainable_task
from bothways.tasks.classification.task import ClassificationTask, TextClassifier
from bothways.tasks.text_task import TextExample
from bothways.training.checkpoint import Best, Keep
from bothways.training.loop import Loop
from bothways.training.meter import Meter
from bothways.training.optimizers import AdamW, BertAdam, build_optimizer
from bothways.training.parallel import Plan
from bothways.training.run import Event
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import Epochs, GoogleLinear, Linear, RunState, Steps, rate_factor
from heard_progress import Heard
from toy_folder import VOCABULARY, make_data, make_examples, make_folder, make_tokenizer
from toy_task import fit_task
from toy_training import equal

LENGTH = 16
FAST = replace(finetune_adam(), until=Epochs(6.0), optimizer=AdamW(lr=3e-3), precision="fp32")
METHOD = FinetuneConfig(FAST, LENGTH)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LabelledData:
    return make_data(tmp_path_factory.mktemp("tokenizer"), 320, 80)


def small(**changes: object) -> EncoderConfig:
    changes = {"position": Learned(32), "initial_range": 0.1, **changes}
    return EncoderConfig(len(VOCABULARY), 32, 2, 2, 64, **changes)


def assert_scored(done: FinetuneResult, data: LabelledData) -> None:
    """The saved weights have the metrics of the result."""
    expected = {f"dev/{name}": value for name, value in done.metrics.items()}
    assert score(done.task_model, data, done.settings) == expected


@pytest.mark.parametrize("world", [1, 2])
def test_packed_fine_tuning_is_padded_fine_tuning(world, tmp_path):
    """Twenty updates by this library and by transformers on the same batches: losses, gradient norms, weights.

    The embedding is updated by rows, as alone on a CPU, and whole, as a rank of two does it.
    """
    from transformers import BertForSequenceClassification

    source = make_folder(tmp_path / "theirs", dropout=0.0)
    pretrained = load_model(source, [PoolerHead()]).model
    data = label(ClassificationTask(), make_tokenizer(tmp_path), make_examples(200, 2), [], LENGTH)
    start = start_from(pretrained, (PoolerHead(), LabelHead(2, None)), seed=3)
    task = TextClassifier(ClassificationTask(), start, data.tokenizer, data.labels, LENGTH)
    save_model(tmp_path / "begin", task.model, data.tokenizer, labels=data.labels)
    theirs = BertForSequenceClassification.from_pretrained(tmp_path / "begin").train()

    training = replace(FAST, until=Steps(20), schedule=Linear(0.2))
    method = FinetuneConfig(training, LENGTH, microbatch_tokens=150)
    seen: list[tuple[float, float, float]] = []

    def on_step(progress: RunState, meter: Meter) -> bool:
        report = meter.read()
        seen.append((report.scores.losses["label"], report.gradient_norm, report.rate))
        return False

    optimizer = AdamW(lr=3e-3, decay=0.05)
    with learning_by_rows(task.model, torch.device("cpu"), world, AdamW()):
        until = method.training.end
        built = build_optimizer(optimizer, task.named_parameters())
        rate = rate_factor(method.training.schedule, until)
        loop = Loop(RunTensors(task, built, Plan()), rate, on_step, precision="fp32")
        loop.train(train_loader(data.sequences, method, 3).steps(Cursor()), until, RunState())
    decayed = [parameter for parameter in theirs.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in theirs.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.0)
    steps, sizes = train_loader(data.sequences, method, 3).steps(Cursor()), list[int]()
    for number, (expected, step) in enumerate(zip(seen, steps, strict=False)):
        rows = [row for batch in step.microbatches for row in _rows(batch)]
        columns = ([row[0], row[1], torch.ones_like(row[0])] for row in rows)
        padded = [pad_sequence(column, batch_first=True) for column in zip(*columns, strict=True)]
        names = ("input_ids", "token_type_ids", "attention_mask")
        labels = torch.stack([row[2] for row in rows])
        sizes.append(len(rows))
        loss = theirs(**dict(zip(names, padded, strict=True)), labels=labels).loss
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        rate = 3e-3 * (number / 4 if number < 4 else (20 - number) / 16)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        found = (loss.item(), norm.item(), rate)
        assert expected == pytest.approx(found, rel=1e-4, abs=1e-6), number
    assert len(seen) == 20
    assert sizes == [*[32] * 6, 8, *[32] * 6, 8, *[32] * 6]  # an epoch ends with what is left of it
    theirs.save_pretrained(tmp_path / "end")
    end = load_model(tmp_path / "end").model.state_dict()
    for name, tensor in task.model.state_dict().items():
        # The gradient of a key's bias is 0 but for rounding, which Adam blows up to the size of its rate.
        if not name.endswith("qkv.bias"):
            assert torch.allclose(tensor, end[name], atol=2e-5), name


def _rows(batch):
    lengths, labels = batch.layout.lengths, batch.targets["label"].labels
    return zip(batch.ids.split(lengths), batch.segments.split(lengths), labels, strict=True)


def test_a_start_is_copied_and_its_label_head_is_new(folder):
    pretrained, heads = load_model(folder).model, (PoolerHead(), LabelHead(3, 0.25))
    before = {name: tensor.clone() for name, tensor in pretrained.state_dict().items()}
    model, again, other = (start_from(pretrained, heads, seed=seed) for seed in (1, 1, 2))
    unstarted = start_from(pretrained.config, heads, seed=0)
    assert model.specification == unstarted.specification == heads
    for name, tensor in model.state_dict().items():
        if name.startswith("heads.labels"):
            continue
        assert torch.equal(tensor, before[name]), name
        assert tensor.data_ptr() != pretrained.state_dict()[name].data_ptr()
    weight = model.heads["labels"].dense.weight
    assert weight.shape == (3, 32)
    assert weight.std() > 0
    assert torch.equal(weight, again.heads["labels"].dense.weight)
    assert not torch.equal(weight, other.heads["labels"].dense.weight)


def test_a_separable_task_is_learned_from_both_starts(folder, data):
    for start in (load_model(folder).model, small()):
        events: list[Event] = []
        done = fit_task(start, data, METHOD, seed=0, device="cpu", on_event=events.append)
        assert done.metrics["accuracy"] > 0.95
        steps = [event.progress.steps for event in events if event.kind == "step"]
        assert steps == list(range(1, 61))
        assert [epochs for epochs, _ in done.history] == [1, 2, 3, 4, 5, 6]
        assert done.metrics["accuracy"] == max(metrics["accuracy"] for _, metrics in done.history)
        assert_scored(done, data)
        assert done.failure is None
        assert not done.task_model.training
        assert not done.task_model.model.encoder.embedding.token.sparse


def test_the_embedding_is_learned_by_rows_on_one_cpu_alone():
    """While it is fine-tuned with compiled kernels, and no longer: a tied head may read it then."""
    model, has_kernels = Model(small(), (LabelHead(2),)), runs_on(torch.device("cpu"))
    table = model.encoder.embedding.token
    for device, world, expected in (("cpu", 1, has_kernels), ("cpu", 2, False), ("cuda", 1, False)):
        with learning_by_rows(model, torch.device(device), world, AdamW()):
            assert table.sparse == expected
    with pytest.raises(ZeroDivisionError), learning_by_rows(model, torch.device("cpu"), 1, AdamW()):
        raise ZeroDivisionError
    assert not table.sparse


def test_seeds_decide_everything(data):
    brief = replace(METHOD, training=replace(FAST, until=Steps(4), evaluate=None))
    runs = [fit_task(small(), data, brief, seed=seed, device="cpu") for seed in (1, 1, 2)]
    one, again, other = runs
    assert one.metrics == again.metrics != other.metrics
    assert equal(again.task_model, one.task_model)
    assert len(one.history) == 1  # at the end


def test_the_best_weights_win_by_any_metric(data):
    # A high rate makes it jump about.
    high = replace(FAST, optimizer=AdamW(lr=2e-2), until=Epochs(2.0), evaluate=Steps(3))
    for metric, choose in (("loss", min), ("mcc", max)):
        method = replace(METHOD, training=high, metric=metric)
        done = fit_task(small(), data, method, device="cpu")
        assert done.metrics[metric] == choose(metrics[metric] for _, metrics in done.history)
        assert_scored(done, data)
        assert len(done.history) == 7  # of 20 steps every third, and the last


def test_f1_is_of_two_classes(data):
    examples = [*make_examples(20, 0), TextExample("rain", None, "wet")]
    three = label(ClassificationTask(), data.tokenizer, examples, [], LENGTH)
    with pytest.raises(ConfigError, match=r"^metric: classify with 3 labels"):
        fit_task(small(), three, replace(METHOD, metric="f1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 4}, r"^length: must be at least 5"),
        ({"microbatch_tokens": 0}, r"^microbatch_tokens: must be at least 1, not 0"),
        ({"dropout": 1.0}, r"^dropout: must be at least 0 and below 1, not 1\.0"),
        (
            {"training": replace(FAST, keep=Keep(best=Best("x", "lowest")))},
            r"^training\.keep\.best: which checkpoint is the best is decided by metric",
        ),
    ],
)
def test_methods_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        FinetuneConfig(**changes)


def test_the_recipes_are_those_of_the_paper():
    """facts: batch 32, 3 epochs, 5e-5, a tenth of warm-up; the code has no bias correction and its own decay."""
    assert FinetuneConfig().batch.n == 32
    assert RECIPES["modern"](ClassificationTask()).training.optimizer == AdamW(lr="auto")
    for name in ("classify", "choice", "qa", "regress", "tag"):  # section 4.4 has its own for SWAG
        made = RECIPES["paper"](trainable_task(name))
        batch, rate = (16, 2e-5) if name == "choice" else (32, 5e-5)
        adam = BertAdam(lr=rate, betas=(0.9, 0.999), eps=1e-6, decay=0.01)
        assert (made.batch.n, made.training.optimizer) == (batch, adam)
        assert (made.training.until, made.length) == (Epochs(3.0), made.task.length)
        assert made.training.schedule == GoogleLinear(0.1)
    until = {name: recipe(ClassificationTask()).training.until for name, recipe in RECIPES.items()}
    assert until.pop("few-shot") == Epochs(1.0)
    assert until == {"modern": "auto", "paper": Epochs(3.0), "electra": Epochs(3.0)}
    electra = {
        task: RECIPES["electra"](trainable_task(task)) for task in ("classify", "regress", "qa")
    }
    assert [made.training.until.count for made in electra.values()] == [3.0, 10.0, 2.0]
    assert [made.length for made in electra.values()] == [128, 128, 512]
    for made in electra.values():  # google-research/electra, configure_finetuning.py
        assert made.training.optimizer == BertAdam(lr=1e-4, eps=1e-6, decay=0.01)
        assert (made.stability.layer_decay, made.batch.n) == (0.8, 32)
        assert made.training.schedule == GoogleLinear(0.1)


def test_examples_encoded_in_parts_are_as_those_encoded_together(data, monkeypatch):
    monkeypatch.setattr(labelled, "ENCODED", 7)
    heard, examples = Heard(), (data.train_examples, data.dev_examples)
    parts = labelled.examine(data.task, data.tokenizer, *examples, 16, progress=heard)
    for chunked, whole in ((parts.train, data.train), (parts.dev, data.dev)):
        for a, b in zip(chunked, whole, strict=True):
            assert np.array_equal(a.sequences[0].ids, b.sequences[0].ids)
    tokenizing = ("tokenizing", 400, list(range(0, 400, 7)))
    assert heard.stages == [tokenizing, ("checking the data", None, [])]
