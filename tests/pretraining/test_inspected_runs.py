"""One step of a run, done again."""

import dataclasses
import itertools
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bothways
from bothways.core.errors import CheckpointError, ConfigError
from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget, TokenRamp
from bothways.data.segments import FullSentences
from bothways.model.config import Dropouts
from bothways.model.families.catalogue import preset
from bothways.objectives.masked_lm import MaskedLMNextSentence
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.pretraining import inspect_step, run as pretraining_run
from bothways.pretraining.build import fit_to_corpus
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.inspect_step import Repeat, repeat_step
from bothways.pretraining.run import pretrain
from bothways.training import checkpoint, loop
from bothways.training.optimizers import AdamW
from bothways.training.run import Target, Training
from bothways.training.schedules import WSD, Duration, Hours, Linear, Steps, Tokens
from bothways.training.trackers import STEPS, recorded_steps
from commands import run_line
from toy_corpora import write_texts
from toy_folder import make_folder
from toy_training import enter_ranks, metric_lines, on_ranks, signal_at


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    folder, settings = tmp_path_factory.mktemp("inspected") / "run", settings_for(corpus, Steps(6))
    still = dataclasses.replace(settings.encoder, dropout=Dropouts(0.0, 0.0))
    phases = (PretrainPhase(16, 0.5), PretrainPhase(48, 0.5))
    settings = dataclasses.replace(settings, encoder=still, phases=phases, batch=ExampleBudget(8))
    pretrain(settings, corpus, folder)
    return folder


@pytest.fixture(scope="module")
def other(corpus, tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("other") / "corpus"
    return write_texts(folder, corpus.tokenizer, ("the dog sleeps. " * n for n in range(1, 41)))


@pytest.mark.parametrize(("step", "began"), [(1, 0), (6, 5)])
def test_a_step_is_done_again_from_the_checkpoint_before_it(corpus, run, tmp_path, step, began):
    """The mean over its sequences is the loss in the record of the run."""
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)  # keeps step-5 and step-6
    # As if a GPU had trained it.
    text = (folder / "config.toml").read_text()
    text, count = re.subn("(compiled|graphs) = false", r"\1 = true", text)
    assert count == 2
    (folder / "config.toml").write_text(text)
    found = repeat_step(folder, step, corpus)
    record = records(run)[step]
    assert (found.step, found.began, len(found.sequences)) == (step, began, 8)
    assert all(each.read.tokens[0].token == "[CLS]" for each in found.sequences)
    assert all(len(each.read.tokens) <= (16 if step == 1 else 48) for each in found.sequences)
    pair = sum(each.losses["pair"] for each in found.sequences) / 8
    assert pair == pytest.approx(record["loss/pair"], rel=1e-5)


def test_what_cannot_be_inspected_is_refused(corpus, other, run, tmp_path):
    with pytest.raises(ConfigError, match=r"the run ends with step 6: there is no step 7"):
        repeat_step(run, 7, corpus)
    with pytest.raises(ConfigError, match=r"step: must be at least 1, not 0"):
        repeat_step(run, 0, corpus)
    with pytest.raises(CheckpointError, match=r"is not the folder of a pre-training run"):
        repeat_step(tmp_path, 1, corpus)
    with pytest.raises(CheckpointError, match=r"was trained on another corpus"):
        repeat_step(run, 6, other)


def test_the_command_prints_a_table(corpus, run, capsys):
    words = ["inspect-step", str(run), "6", str(corpus.folder), "--device", "cpu"]
    run_line(*words, "--json")
    assert json.loads(capsys.readouterr().out)["began"] == 5
    run_line(*words)
    printed = capsys.readouterr().out
    assert "Step 6: 8 sequences" in printed
    assert "[MASK]→" in printed
    inputs = bothways.show(corpus, step=6, count=8, config=run / "config.toml", progress=False)
    shown = [[*each.tokens] for each in inputs.sequences]
    assert shown == [[*each.read.tokens] for each in repeat_step(run, 6, corpus).sequences]


CPU = torch.device("cpu")
SECOND = 1 / 3600
PAIRS = MaskedLMNextSentence()


def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the training loop that goes on by irregular amounts whenever it is read."""
    times = itertools.accumulate(itertools.cycle([0.01, 0.03, 0.02, 0.07]))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(times)))


@pytest.fixture(autouse=True)
def no_pages(monkeypatch) -> None:
    monkeypatch.setattr(pretraining_run, "can_write", lambda *_: False)
    monkeypatch.setattr(checkpoint.errors, "installed", lambda *packages: False)


def settings_for(
    corpus: Corpus, until: Duration, objective: Objective = PAIRS, **training: Any
) -> PretrainConfig:
    name = "electra-small" if isinstance(objective, ReplacedTokens) else "bert-tiny"
    shape = fit_to_corpus(preset(name), corpus.tokenizer)
    small = dataclasses.replace(
        shape, width=32, depth=2, heads=2, intermediate_size=64, embedding=None,
        dropout=Dropouts(0.1, 0.1),
    )  # fmt: skip
    usual = {"schedule": WSD(0.2, 0.3), "save": Steps(5), "report": Steps(1), "evaluate": Steps(4)}
    changed = {**usual, "precision": "fp32", "ema": 0.9, **training}
    pairs = isinstance(objective, MaskedLMNextSentence)
    phases = (
        PretrainPhase(16, 0.4, FullSentences() if pairs else None),
        PretrainPhase(32, 0.3),
        PretrainPhase(48, 0.3),
    )
    return PretrainConfig(
        small, Training(until, AdamW(lr=3e-3), **changed), objective, phases,
        TokenRamp(64, 256, 3000), 130, 0.1, 400,
    )  # fmt: skip


def records(folder: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in metric_lines(folder) if "gradient_norm" in line}


def assert_repeats(folder: Path, corpus: Corpus, work: Path) -> None:
    """The last step and all before it: losses and norms as recorded, weights as in checkpoints."""
    known, steps = records(folder), recorded_steps(folder)
    last = len(steps)
    found = repeat_step(folder, last, device="cpu")
    assert (found.difference, found.compared) == (None, last - found.began)
    assert found.gradient_norm == known[last]["gradient_norm"]
    assert {f"loss/{name}": value for name, value in found.losses.items()} == {
        name: value for name, value in known[last].items() if name.startswith("loss/")
    }
    assert found.rate == known[last]["learning_rate"]
    shutil.copytree(folder, work)
    for saved in work.glob("step-*"):
        shutil.rmtree(saved)
    repeat = Repeat(work, last, corpus, CPU)  # from the first step on
    for saved in sorted(folder.glob("step-*"), key=lambda path: int(path.name[5:])):
        repeat.advance(int(saved.name[5:]))
        weights = repeat.training_module.state_dict()
        for name, tensor in load_file(saved / "model.safetensors").items():
            if not name.startswith("average"):
                assert torch.equal(weights[name], tensor), (saved.name, name)
    assert repeat.difference is None


@pytest.mark.parametrize(
    ("until", "objective"),
    [(Hours(1.9 * SECOND), ReplacedTokens()), (Tokens(1200), PAIRS)],
    ids=lambda each: each.kind,
)
def test_a_run_repeats_to_the_bit(corpus, tmp_path, monkeypatch, until, objective):
    with monkeypatch.context() as patch:
        ticking(patch)
        pretrain(settings_for(corpus, until, objective), corpus, tmp_path / "run", device="cpu")
    assert {*recorded_steps(tmp_path / "run")["phase"].tolist()} == {0, 1, 2}
    assert_repeats(tmp_path / "run", corpus, tmp_path / "copy")


def test_a_run_that_was_stopped_and_made_longer_repeats_to_the_bit(corpus, tmp_path, monkeypatch):
    """The rates of its first session are those of the shorter run."""
    folder = tmp_path / "run"
    settings, longer = (
        settings_for(corpus, Hours(seconds * SECOND), schedule=Linear(0.3)) for seconds in (2.2, 3)
    )
    with monkeypatch.context() as patch:
        ticking(patch)
        event = signal_at(7, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            pretrain(settings, corpus, folder, device="cpu", on_event=event)
        before = recorded_steps(folder).copy()
        pretrain(longer, corpus, folder, device="cpu", resume=True)
    assert len(before) == 7
    assert (recorded_steps(folder)[:7] == before).all()
    assert_repeats(folder, corpus, tmp_path / "copy")


def test_a_run_that_its_target_ended_repeats_to_the_bit(corpus, tmp_path):
    target = Target("held-out/loss/masked", 9.0)
    settings = settings_for(corpus, Hours(10), target=target, schedule=Linear(0.0))
    pretrain(settings, corpus, tmp_path / "run")
    assert len(recorded_steps(tmp_path / "run")) == 4
    assert_repeats(tmp_path / "run", corpus, tmp_path / "copy")
    assert pretrain(settings, corpus, tmp_path / "run", resume=True).progress.steps == 4


@pytest.fixture(scope="module")
def three_steps(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("short") / "run"
    pretrain(settings_for(corpus, Steps(3)), corpus, folder, device="cpu")
    return folder


@pytest.fixture
def short_run(three_steps, tmp_path) -> Path:
    return shutil.copytree(three_steps, tmp_path / "run")


def test_a_run_without_its_record_is_refused(short_run):
    record = short_run / STEPS
    content = record.read_bytes()
    record.unlink()
    with pytest.raises(CheckpointError) as caught:
        repeat_step(short_run, 2)
    assert STEPS in caught.value.what
    record.write_bytes(b"\0\0\0\0\0\0\xf8\x7f" + content[8:])  # the first rate is NaN
    with pytest.raises(CheckpointError):
        repeat_step(short_run, 2)
    record.write_bytes(content[:-3])  # cut by a kill
    assert repeat_step(short_run, 2).difference is None
    with pytest.raises(ConfigError) as ended:
        repeat_step(short_run, 3)
    assert ended.value.where == "step"
    for name, damaged, kind, where in (
        ("config.toml", "", ConfigError, "config.toml: encoder"),
        ("data.json", '{"size": 3}', CheckpointError, "data.json"),
    ):
        (short_run / name).write_text(damaged)
        with pytest.raises(kind) as caught:
            repeat_step(short_run, 2)
        assert str(caught.value.where).endswith(where)
        assert "=" not in (caught.value.fix or "")  # the command takes no settings


def test_another_result_than_the_recorded_one_is_reported(short_run, capsys, monkeypatch):
    metrics = short_run / "metrics.jsonl"
    rows = metric_lines(short_run)
    changed = [
        {**row, "gradient_norm": 7.5} if row["step"] == 2 else row
        for row in rows if row["step"] < 3
    ]  # fmt: skip
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in changed))
    found = repeat_step(short_run, 3)
    assert (found.difference.step, found.difference.recorded) == (2, 7.5)
    assert found.compared == 2
    run_line("inspect-step", short_run, "3")
    shown = capsys.readouterr().out
    assert "At step 2 the run recorded a gradient norm of 7.5" in shown
    assert "number of threads" in shown
    several = dataclasses.replace(found, ranks=2)
    monkeypatch.setattr(inspect_step, "repeat_step", lambda *_, **__: several)
    run_line("inspect-step", short_run, "3")  # what changes it has been named
    assert "number of threads" not in capsys.readouterr().out


def test_a_corpus_that_was_moved_is_asked_for(corpus, short_run, tmp_path, capsys):
    data = json.loads((short_run / "data.json").read_text())
    assert data["corpora"] == {"": str(corpus.folder)}
    data["corpora"][""] = str(tmp_path / "gone")
    (short_run / "data.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError) as caught:
        run_line("inspect-step", short_run, "1")
    assert caught.value.where == str(tmp_path / "gone")
    words = ["inspect-step", str(short_run), "1", str(corpus.folder), "--json"]
    run_line(*words)
    assert json.loads(capsys.readouterr().out)["difference"] is None
    with pytest.raises(ConfigError):
        run_line(*words, corpus.folder)


def trained_on_two(rank: int, world: int, port: int, corpora: list[Path], folder: Path) -> None:
    """A run of two ranks; the first with each of the others' settings or data is refused."""
    enter_ranks(rank, world, port)
    same, other = map(Corpus.open, corpora)
    settings = settings_for(same, Hours(0.5 * SECOND))
    settings = dataclasses.replace(settings, batch=ExampleBudget(8))
    seeds = dataclasses.replace(settings, seed=rank)
    refused = []
    for case, text in ((seeds, same), (settings, other if rank else same)):
        with pytest.raises(ConfigError) as caught:
            pretrain(case, text, folder / "refused", device="cpu")
        refused.append((caught.value.where, caught.value.what, caught.value.on_every_rank))
    rows = [{"text": f"a dog {word}", "label": word} for word in ("runs", "sleeps")] * 8
    with pytest.raises(ConfigError) as caught:
        bothways.finetune(folder / "bert", rows[rank:], epochs=1, device="cpu", progress=False)
    refused.append((caught.value.where, caught.value.what, caught.value.on_every_rank))
    (folder / f"rank{rank}.json").write_text(json.dumps(refused))
    pretrain(settings, same, folder / "run", device="cpu")


def test_ranks_that_differ_stop_and_ranks_that_agree_repeat(corpus, other, tmp_path):
    make_folder(tmp_path / "bert")
    on_ranks(2, trained_on_two, [corpus.folder, other.folder], tmp_path)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert [where for where, _, _ in first] == ["rank 1"] * 3
    assert first[0][1] == "seed is 1, and 0 on rank 0"
    assert first[1][1].startswith("corpus is ")
    assert first[2][1].startswith("data.train is ")
    assert all(everywhere for _, _, everywhere in first)
    assert not (tmp_path / "refused" / ".run").exists()
    run = tmp_path / "run"
    steps = recorded_steps(run)
    found = repeat_step(run, len(steps))
    assert found.ranks == 2
    assert found.rate == records(run)[len(steps)]["learning_rate"]
    before = records(run).get(len(steps) - 1, {"tokens": 0})  # on a slow machine there is one step
    read = sum(len(each.read.tokens) for each in found.sequences)
    assert read == records(run)[len(steps)]["tokens"] - before["tokens"]
