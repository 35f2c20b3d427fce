"""Preflight: every finding is reached by data that deserves it, and by none that does not."""

import dataclasses
import re

import pytest
import torch

from bothways.core.errors import BothwaysError, Finding, render, report_findings, setting
from bothways.finetuning.data import check_casing, check_inputs
from bothways.model.config import EncoderConfig
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.positions import Learned
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_task import TextExample
from bothways.training import step_cost
from bothways.training.checkpoint import Keep
from bothways.training.encoding_checks import check_model
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import WSD, Constant, Steps
from bothways.training.step_cost import MemoryDemand, check_machine
from toy_task import VOCABULARY, WORDS, make_tokenizer

CPU = torch.device("cpu")


def said(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.severity) for finding in findings]


def fair(count: int, start: int = 0) -> list[TextExample]:
    return [
        TextExample(f"text {number}", None, "xy"[number % 2], f"a:{number}")
        for number in range(start, start + count)
    ]


def one(label: str | None, text: str = "t", text_b: str | None = None) -> list[TextExample]:
    return [TextExample(text, text_b, label, "a:3")]


def many(count: int, *labels: str) -> list[TextExample]:
    return [TextExample(f"t{n}", None, labels[n % len(labels)]) for n in range(count)]


SCORES = [f"{n % 5}.{n}" for n in range(90)]


def test_good_data_gets_a_baseline_and_no_complaint():
    (finding,) = ClassificationTask().check(fair(40), fair(10, 40))
    assert (finding.check, finding.severity) == ("balance", "note")
    assert finding.what == "always answering 'x' would be right for 50.0% of the training data"


def test_labels_that_all_differ_are_probably_another_column():
    findings = ClassificationTask().check(many(40, *map(str, range(1001, 1041))), [])
    (warning,) = [finding for finding in findings if finding.severity == "warning"]
    assert warning.what.startswith("each of the 40 labels has one training example (1001, 1002, ")


@pytest.mark.parametrize(
    ("train", "dev", "expected", "message"),
    [
        (one("x", text_b=""), [], "rows error", "1 example has an empty text: a:3"),
        ([], one("z"), "labels error", r"1 label of dev .* has no training example: a:3 \('z'\)"),
        (one("z"), fair(4, 90), "labels warning", "no dev example has one of the labels z"),
        (many(500, "x"), [], "balance warning", r"96.3% of the training examples are 'x'"),
        (many(200, "x", "y") + one("z"), [], "balance warning", r"less than 1% .*: z \(1\)"),
        (many(90, *SCORES), [], "labels warning", r"the 92 labels look like scores \(0\.0, "),
    ],
)
def test_flaws_of_examples_are_found(train, dev, expected, message):
    findings = ClassificationTask().check([*fair(40), *train], dev)
    said = [f.what for f in findings if f"{f.check} {f.severity}" == expected]
    assert any(re.search(message, text) for text in said), findings


def test_one_class_and_none_are_errors():
    one = ClassificationTask().check([TextExample(f"t{n}", None, "x") for n in range(9)], [])
    assert [finding.what for finding in one] == [
        "training needs at least two classes, and the only label is 'x'"
    ]
    [none] = ClassificationTask().check([TextExample("t", None, None, "a:1")], [])
    assert (none.severity, none.what[:30]) == ("error", "no example has a label: its co")


def test_texts_that_differ_in_the_second_are_no_overlap():
    train = [TextExample("a", "b", "x"), TextExample("c", "d", "y")]
    dev = [TextExample("a", "c", "x"), TextExample("a", None, "y")]
    assert "overlap" not in {finding.check for finding in ClassificationTask().check(train, dev)}


def test_ids_and_positions_are_held_against_the_tables(tmp_path):
    tokenizer, size = make_tokenizer(tmp_path), len(VOCABULARY)
    encoder = EncoderConfig(size, 8, 1, 1, 8, position=Learned(16))
    assert check_model(encoder, tokenizer, 16) == []
    ids, positions = check_model(dataclasses.replace(encoder, vocab=size - 1), tokenizer, 17)
    assert (ids.check, ids.severity) == ("ids", "error")
    assert f"ids up to {size - 1}, but the model's embedding has {size - 1} rows" in ids.what
    assert (positions.check, positions.severity) == ("positions", "error")
    assert positions.what == "sequences of 17 tokens are longer than the model's 16 positions"


def test_casing_is_held_against_the_vocabulary(tmp_path):
    lower, capital = [" ".join(WORDS)], [" ".join(WORDS).title()]
    uncased = make_tokenizer(tmp_path / "a")
    keeping = make_tokenizer(tmp_path / "b", lowercase=False)
    assert check_casing(uncased, capital) == check_casing(keeping, lower) == []
    (finding,) = check_casing(keeping, capital)
    assert (finding.check, finding.severity) == ("casing", "warning")
    assert "100.0% of tokens are unknown, lower-cased 0.0%" in finding.what
    cased = (*VOCABULARY[:5], *WORDS[:5], *(word.title() for word in WORDS[5:]))
    (finding,) = check_casing(make_tokenizer(tmp_path / "c", cased), lower)
    assert finding.what.startswith(
        "the vocabulary is cased (50% of its tokens have capitals), but the tokenizer lower-cases"
    )
    assert check_casing(make_tokenizer(tmp_path / "d", cased, lowercase=False), ["Fox"]) == []


def test_a_sample_of_the_texts_decides_about_casing(tmp_path, monkeypatch):
    monkeypatch.setattr("bothways.finetuning.data.SAMPLE", 4)
    texts = ["ape"] * 96 + ["APE"] * 4
    assert check_casing(make_tokenizer(tmp_path, lowercase=False), texts) == []
    assert check_casing(make_tokenizer(tmp_path, lowercase=False), texts[::-1]) != []


def test_what_is_cut_and_what_is_unknown_is_counted(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    texts = ("ape bee", "ape bee cat dog elk fox", "ape yak")
    short, long, strange = (TextExample(text, None, "x") for text in texts)

    def check(length, *examples):
        inputs = ClassificationTask().encode(examples, tokenizer, ("x",), length)
        return [(f.check, f.severity, f.what) for f in check_inputs(inputs, tokenizer, length, str)]

    assert check(8, short, short, short) == []
    cut = "1 of 4 examples (25.0%) is longer than 6 tokens and is cut: "
    cut += "16.7% of all tokens are not read"
    assert check(6, short, short, short, long) == [("truncation", "warning", cut)]
    unknown = "25.0% of the tokens are unknown to the vocabulary"
    assert check(8, strange) == [("unknown", "warning", unknown)]


DEMAND = MemoryDemand(
    ((EncoderConfig(1000, 64, 2, 2, 128), (PoolerHead(), LabelHead(2))),),
    length=128,
    microbatch=4096,
    training=Training(Steps(1), AdamW(), Constant(), keep=Keep(1)),
)


def with_training(**changes: object) -> MemoryDemand:
    training = dataclasses.replace(DEMAND.training, **changes)
    return dataclasses.replace(DEMAND, training=training)


def test_an_average_takes_room():
    more = with_training(ema=0.9)
    assert (DEMAND.saved, more.saved) == (12 * DEMAND.parameters, 16 * DEMAND.parameters)
    assert more.memory(CPU).total - DEMAND.memory(CPU).total == 4 * DEMAND.parameters


@pytest.mark.parametrize(("schedule", "checkpoints"), [(Constant(), 3), (WSD(), 4)])
def test_a_full_disk_is_an_error(tmp_path, monkeypatch, schedule, checkpoints):
    """The checkpoint before a plateau's end stays, too."""
    demand = with_training(schedule=schedule)
    needed = demand.parameters * (checkpoints * 12 + 4)
    monkeypatch.setattr(step_cost.devices, "disk_free", lambda folder: needed)
    assert check_machine(demand, tmp_path, CPU) == []
    monkeypatch.setattr(step_cost.devices, "disk_free", lambda folder: needed - 1)
    (finding,) = check_machine(demand, tmp_path, CPU)
    assert (finding.check, finding.severity, finding.where) == ("disk", "error", str(tmp_path))
    monkeypatch.setattr(step_cost.devices, "disk_free", lambda folder: 2**18)
    what = f"{checkpoints} checkpoints and the model take {needed / 2**20:.1f} MiB, but 0.2 MiB are"
    assert check_machine(demand, tmp_path, CPU)[0].what == f"{what} free"


def test_checkpoints_of_the_run_itself_are_room_for_a_resumed_one(tmp_path, monkeypatch):
    needed = DEMAND.parameters * (3 * 12 + 4)
    for name in ("step-5", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(step_cost.devices, "disk_free", lambda folder: needed - 2000)
    assert check_machine(DEMAND, tmp_path, CPU) == []
    monkeypatch.setattr(step_cost.devices, "disk_free", lambda folder: needed - 2001)
    assert said(check_machine(DEMAND, tmp_path, CPU)) == [("disk", "error")]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(1.01, []), (0.99, [("memory", "warning")]), (0.0, [("memory", "error")])],
)
def test_memory_is_forecast(tmp_path, monkeypatch, share, expected):
    fixed = 16 * DEMAND.parameters
    free = int(fixed + (DEMAND.memory(CPU).total - fixed) * share) - (share == 0)
    monkeypatch.setattr(step_cost.devices, "memory_available", lambda device: free)
    assert said(check_machine(DEMAND, tmp_path, CPU)) == expected


def test_a_sequence_longer_than_a_microbatch_is_counted_and_noted(tmp_path, monkeypatch):
    whole, short = (dataclasses.replace(DEMAND, microbatch=n) for n in (128, 8))
    assert short.memory(CPU) == whole.memory(CPU)
    assert short.largest_microbatch(2**30, CPU) == DEMAND.largest_microbatch(2**30, CPU) > 4096
    (finding,) = check_machine(short, tmp_path, CPU)
    assert (finding.severity, finding.where) == ("note", "microbatch_tokens")
    assert check_machine(whole, tmp_path, CPU) == []
    free = whole.memory(CPU).total - 1
    assert whole.largest_microbatch(free, CPU) == 0, "not a part of a sequence"
    monkeypatch.setattr(step_cost.devices, "memory_available", lambda device: free)
    (warning,) = check_machine(whole, tmp_path, CPU)
    assert "microbatch_tokens" not in warning.fix


def test_recomputation_is_advised_where_it_would_help(tmp_path, monkeypatch):
    again = with_training(recompute=True)
    memory = again.memory(CPU).total - 1
    assert memory < DEMAND.memory(CPU).total
    monkeypatch.setattr(step_cost.devices, "memory_available", lambda device: memory)
    advice, advice_again = (
        check_machine(demand, tmp_path, CPU)[0].fix for demand in (DEMAND, again)
    )
    recompute = setting("training.recompute", True)
    assert recompute in advice
    assert recompute not in advice_again


def test_a_microbatch_is_advised_that_fits(tmp_path, monkeypatch):
    free = int((16 * DEMAND.parameters + DEMAND.memory(CPU).total) / 2)
    monkeypatch.setattr(step_cost.devices, "memory_available", lambda device: free)
    (warning,) = check_machine(DEMAND, tmp_path, CPU)
    match = re.search(r"microbatch_tokens=(\d+)", render(warning.fix, "command"))
    fitting = dataclasses.replace(DEMAND, microbatch=int(match[1]))
    assert check_machine(fitting, tmp_path, CPU) == []
    assert fitting.microbatch % DEMAND.length == 0


def test_errors_are_listed_in_one_message_and_the_rest_is_returned():
    note = Finding("time", "note", "n")
    warning = Finding("unknown", "warning", "w", "tokenizer", "Change it.")
    assert report_findings([note, warning]) == [warning, note]
    assert str(warning) == "tokenizer: w. Change it."
    one = Finding("rows", "error", "one", "a:1", "Mend it.")
    with pytest.raises(BothwaysError, match=r"^a:1: one\n  Mend it\.$"):
        report_findings([note, one, warning])
    message = r"^2 errors must be corrected before training:\n  1\. a:1: one. Mend it\.\n  2\. two$"
    with pytest.raises(BothwaysError, match=message):
        report_findings([one, warning, Finding("labels", "error", "two")])
