"""Pre-training from a corpus to a model folder: learns, opens in transformers, resumes, is the same on two ranks, and tests rates."""

import dataclasses
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bothways
from bothways.cli import main as cli
from bothways.core.errors import (
    BothwaysError,
    CheckpointError,
    ConfigError,
    DivergedError,
    Finding,
    FolderError,
    ResourceError,
    render,
)
from bothways.core.report.sections import readable_number
from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget
from bothways.data.masking import Masking, WholeWords
from bothways.data.segments import FullSentences
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import LabelHead, MaskedHead, PairHead
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLM
from bothways.pretraining.build import build_models, build_training_module, preflight
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.evaluation import HeldOut
from bothways.pretraining.run import PretrainResult, RateTest, curves, pretrain
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, train_vocabulary
from bothways.training.checkpoint import Best, Keep, run_folder
from bothways.training.encoding_checks import unknown_tokens
from bothways.training.parallel import plan_here
from bothways.training.run import Event
from bothways.training.schedules import RunState, Steps
from bothways.training.trackers import read_records
from commands import run_line
from heard_progress import Heard
from toy_animals import WORDS
from toy_corpora import write_texts
from toy_pretraining import small_run
from toy_training import enter_ranks, equal, metric_lines, on_ranks, processes

SMALL = [
    "encoder.width=32", "encoder.heads=2", "encoder.intermediate_size=64", "batch.n=512",
    "batch.kind=tokens", "training.precision=fp32", "evaluation_tokens=400", "held_out=0.1",
    "training.save=4 steps", "training.evaluate=6 steps",
]  # fmt: skip


def settings(
    corpus: Corpus, steps: int = 60, training: dict[str, object] | None = None, **changes: object
) -> PretrainConfig:
    changes = {"batch": ExampleBudget(32), "evaluation_tokens": 2000} | changes
    training = {"evaluate": Steps(30)} | (training or {})
    return small_run(corpus, Steps(steps), training=training, **changes)


def words_for(corpus: Corpus, out: Path, *more: str, model: str = "bert-tiny") -> list[str]:
    start = [] if "--start" in more else ["--model", model]
    return ["pretrain", str(corpus.folder), *start, *SMALL, *more, "--out", str(out)]


def command(words: list[str], errors: Path) -> None:
    """A process of its own, whose messages and exit status are the user's."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = ["bothways", *words]
    cli.run_command_line()


def run_rank(rank: int, world: int, port: int, words: list[str]) -> None:
    """The same command in a process that has imported torch before."""
    enter_ranks(rank, world, port)
    torch.set_num_threads(1)
    run_line(*words)


def weights(run: Path, role: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / role / "model.safetensors")


@pytest.fixture(scope="module")
def learned(corpus, tmp_path_factory) -> PretrainResult:
    """A run of 70 steps."""
    return pretrain(settings(corpus, 70), corpus, tmp_path_factory.mktemp("learned"))


def test_it_learns_and_the_folder_opens_in_transformers_with_equal_outputs(corpus, learned):
    from transformers import AutoTokenizer, BertForPreTraining

    done, folder = learned, learned.folder
    assert done.metrics["held-out/loss/masked"] < done.metrics["unigram/loss/masked"] - 0.5
    assert done.metrics["held-out/accuracy/masked"] > done.metrics["unigram/accuracy/masked"] + 0.1
    perplexity = np.exp(done.metrics["held-out/loss/masked"])
    assert done.metrics["held-out/perplexity"] == pytest.approx(perplexity)

    theirs, info = BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    texts = "The cat sleeps in the [MASK].", "The cat eats near the wood."
    inputs = AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")
    batch = corpus.tokenizer.batch([texts])
    assert inputs["input_ids"][0].tolist() == batch.ids.tolist()
    with torch.no_grad():
        wanted = theirs.eval()(**inputs)
        logits = done.model.eval()(batch, heads=("masked", "pair")).logits
    assert torch.allclose(logits["masked"], wanted.prediction_logits[0], atol=1e-5)
    assert torch.allclose(logits["pair"], wanted.seq_relationship_logits, atol=1e-5)


def test_an_evaluation_reads_as_many_tokens_as_it_was_told(corpus):
    config = settings(corpus, evaluation_tokens=100)
    training_module = build_training_module(config, corpus, torch.device("cpu"))
    _, held_out = corpus.split(config.held_out, config.seed)
    scoring = HeldOut(config, corpus, held_out, plan_here(), training_module)
    read = sum(batch.layout.tokens for step in scoring._steps for batch in step.microbatches)
    assert 100 <= read < 200
    sentences = (corpus.sentences_of(document) for document in held_out.tolist())
    assert sum(len(text) for texts in sentences for text in texts) > 400, "there is more to read"
    heard = Heard()
    scoring(heard)
    steps = len(scoring._steps)
    assert heard.stages == [("evaluating", steps, list(range(steps + 1)))]


def test_a_model_to_go_on_from_has_the_vocabulary_of_the_corpus(corpus, tmp_path):
    config = settings(corpus)
    *first, one, other = WORDS
    (tmp_path / "vocab.txt").write_text("\n".join([*first, other, one]) + "\n", encoding="utf8")
    model = Model(config.encoder, (MaskedHead(), PairHead()))
    save_model(tmp_path / "model", model, Tokenizer.load(tmp_path / "vocab.txt"))
    with pytest.raises(ConfigError, match=r"start: the corpus .* has another vocabulary"):
        build_models(dataclasses.replace(config, start=str(tmp_path / "model")), corpus)
    # One whose pairs have other special tokens is no matter of the objective.
    bytewise = train_vocabulary(["the cat sat"], ByteBPE(262))
    other = write_texts(tmp_path / "bytes", bytewise, [f"The cat sat {n}." for n in range(5)])
    with pytest.raises(ConfigError, match=r"start: the corpus .* has another vocabulary"):
        pretrain(dataclasses.replace(config, start=str(tmp_path / "model")), other)


def test_heads_that_a_model_lacks_start_at_random_where_that_is_asked_for(corpus, tmp_path):
    bare = Model(settings(corpus).encoder, (LabelHead(2),))
    save_model(tmp_path / "model", bare, corpus.tokenizer)
    with pytest.raises(FolderError, match=r"fresh=\['masked', 'pair'\]"):
        build_models(settings(corpus, start=str(tmp_path / "model")), corpus)
    start = settings(corpus, fresh=("masked", "pair"), start=str(tmp_path / "model"))
    begun = build_models(start, corpus)["model"]
    assert set(begun.heads) == {"masked", "pair", "pooler"}
    assert equal(begun.encoder, bare.encoder)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param("bert-tiny", "", marks=pytest.mark.slow),
        ("bert-tiny", "training.optimizer=muon training.ema=0.9 objective.z_loss=1e-3"),
        pytest.param(
            "electra-small-discriminator",
            "objective=replaced_tokens encoder.depth=2 encoder.embedding=16 training.ema=0.9",
            marks=pytest.mark.slow,
        ),
        (
            "deberta-v3-small",
            "objective=replaced_tokens objective.generator=shallower encoder.depth=2 "
            "objective.sharing=disentangled training.optimizer=lamb batch.kind=token_ramp "
            "batch.start=128 batch.over=2000",
        ),
    ],
)
def test_two_ranks_come_to_the_weights_of_one(model, settings, corpus, tmp_path):
    more = ["training.until=6 steps", *settings.split()]
    run_line(*words_for(corpus, tmp_path / "one", *more, model=model))
    on_ranks(2, run_rank, words_for(corpus, tmp_path / "two", *more, model=model))
    for role in {path.parent.name for path in (tmp_path / "one").glob("*/config.json")}:
        one, two = weights(tmp_path / "one", role), weights(tmp_path / "two", role)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert torch.allclose(tensor, two[name], atol=2e-5), name


def test_ctrl_c_saves_and_the_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    corpus, tmp_path
):
    lengths = {"until": 60, "report": 1, "save": 20, "evaluate": 40}
    more = [f"training.{name}={count} steps" for name, count in lengths.items()]
    run_line(*words_for(corpus, tmp_path / "whole", *more))
    words = words_for(corpus, tmp_path / "stopped", *more)
    stopped = processes().Process(target=command, args=(words, tmp_path / "errors"))
    stopped.start()
    lines = tmp_path / "stopped" / "metrics.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") > 6) and stopped.is_alive():
        time.sleep(0.02)
    assert stopped.pid is not None
    os.kill(stopped.pid, signal.SIGINT)
    stopped.join(120)
    errors = (tmp_path / "errors").read_text()
    assert stopped.exitcode == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    run_line(*words, "--resume")
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


def test_mistakes_are_named(corpus, tmp_path):
    with pytest.raises(BothwaysError, match=r"tokenizer: .*has ids up to"):
        pretrain(settings(corpus, encoder=EncoderConfig(6, 32, 2, 2, 64)), corpus, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"phases: the shares add up to 0\.5"):
        settings(corpus, phases=(PretrainPhase(32, 0.5),))
    with pytest.raises(ConfigError, match=r"phases\.0\.length: sequences of 1000 tokens"):
        settings(corpus, phases=(PretrainPhase(1000),))
    lone = write_texts(tmp_path / "lone", corpus.tokenizer, ["The cat sleeps. The dog eats."])
    with pytest.raises(BothwaysError, match=r"segments: .*the corpus has 1 document"):
        pretrain(settings(corpus), lone, tmp_path / "run")


def test_a_metric_that_is_never_evaluated_is_named_before_the_first_step(corpus, tmp_path):
    config = settings(corpus, 2, {"keep": Keep(best=Best("held-out/loss", "lowest"))})
    with pytest.raises(ConfigError, match="'held-out/loss' is not evaluated:"):
        pretrain(config, corpus, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_state_of_torch_is_left_as_it_was(corpus):
    """New weights are in float64 if that is the caller's default type, to prove a run to more digits."""
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        again = pretrain(settings(corpus, 1), corpus)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert {weight.dtype for weight in again.model.parameters()} == {torch.float64}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("state", ["autocast", "default type"])
def test_the_precision_of_the_calling_program_changes_no_run(corpus, monkeypatch, state):
    """In a context of autocast, torch would keep the first step's bf16 weights for all steps."""
    monkeypatch.setattr("bothways.core.runtime.devices.has_bf16", lambda device: True)
    config = settings(corpus, 3, {"precision": "bf16"})
    plain = pretrain(config, corpus)
    if state == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            run = pretrain(config, corpus)
    else:
        torch.set_default_dtype(torch.bfloat16)
        try:
            run = pretrain(config, corpus)
        finally:
            torch.set_default_dtype(torch.float32)
    assert run.metrics == plain.metrics
    assert equal(run.model.state_dict(), plain.model.state_dict())


def test_weights_in_float64_are_multiplied_in_float64_on_a_cpu_with_bf16(corpus, monkeypatch):
    monkeypatch.setattr("bothways.core.runtime.devices.has_bf16", lambda device: True)
    torch.set_default_dtype(torch.float64)
    try:
        runs = [pretrain(settings(corpus, 1, {"precision": p}), corpus) for p in ("auto", "fp32")]
    finally:
        torch.set_default_dtype(torch.float32)
    assert runs[0].metrics == runs[1].metrics


def test_settings_are_noted_by_a_resumed_run_that_has_no_checkpoint_yet(corpus, tmp_path):
    with run_folder(tmp_path / "run", resume=False):
        pass
    pretrain(settings(corpus, 1), corpus, tmp_path / "run", resume=True)
    files = [tmp_path / "run" / name for name in ("config.toml", "data.json")]
    noted = [file.read_text() for file in files]
    with pytest.raises(CheckpointError, match="of another run: seed was 0, is 1"):
        pretrain(settings(corpus, 1, seed=1), corpus, tmp_path / "run", resume=True)
    texts = [f"The cat sat {number}." for number in range(9)]
    other = write_texts(tmp_path / "other", corpus.tokenizer, texts)
    with pytest.raises(CheckpointError, match="of another run: corpus is not the same"):
        pretrain(settings(corpus, 1), other, tmp_path / "run", resume=True)
    assert [file.read_text() for file in files] == noted


def test_a_finished_run_is_extended_and_reported_in_another_way(corpus, tmp_path):
    pretrain(settings(corpus, 2), corpus, tmp_path / "run")
    with pytest.raises(ResourceError, match="holds the checkpoints of an earlier run"):
        pretrain(settings(corpus, 2), corpus, tmp_path / "run")
    longer = settings(corpus, 4, {"report": Steps(1), "save": Steps(1)}, microbatch_tokens=2048)
    done = pretrain(longer, corpus, tmp_path / "run", resume=True)
    assert done.progress.steps == 4
    assert "4 steps" in (tmp_path / "run" / "config.toml").read_text()
    for until in (4, 2):
        heard = Heard()
        pretrain(settings(corpus, until), corpus, tmp_path / "run", resume=True, progress=heard)
        assert f"has made 4 steps and ends after {until} steps: nothing is left" in heard.text


def test_a_run_in_memory_learns_the_same_and_writes_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, events = pretrain(settings(corpus, 3), corpus, tmp_path / "run"), []
    done = pretrain(settings(corpus, 3), corpus, on_event=events.append)
    assert [event.progress.steps for event in events if event.kind == "step"] == [1, 2, 3]
    assert (done.metrics, done.folder) == (whole.metrics, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_dropout_alone_can_be_set_where_a_model_gives_the_encoder(corpus, tmp_path):
    encoder = EncoderConfig(corpus.tokenizer.size, 32, 1, 2, 64)
    save_model(tmp_path / "model", Model(encoder, (MaskedHead(), PairHead())), corpus.tokenizer)
    words = ["--start", str(tmp_path / "model"), "training.until=1 steps", "phases.0.length=32"]
    words = ["pretrain", str(corpus.folder), *words, "batch.n=512", "evaluation_tokens=400"]
    for name, more, rate in (("set", ["encoder.dropout.hidden=0.0"], 0.0), ("kept", [], 0.1)):
        run_line(*words, *more, "--out", tmp_path / name)
        model = load_model(tmp_path / name / "model").model
        assert model.config.dropout.hidden == rate
    shape = ["encoder.width=32", "encoder.heads=2", "encoder.depth=1", "--resume"]
    more = [word for word in words if "model" not in word and word != "--start"]
    with pytest.raises(CheckpointError, match=r"start was .*model', is None"):
        run_line(*more, *shape, "--out", tmp_path / "kept")
    with pytest.raises(ConfigError, match="activation\n  Only dropout may differ"):
        run_line(*words, "encoder.activation=relu", "--out", tmp_path / "no")


def test_the_preflight_says_which_sentences_will_be_cut(corpus):
    heard = Heard()
    pretrain(settings(corpus, 1, phases=(PretrainPhase(8),)), corpus, progress=heard)
    assert "longer than 5 tokens and will be cut" in heard.text
    assert "left out, so that pairs fit in 8" in heard.text
    running = settings(corpus, objective=MaskedLM())
    lengths = dataclasses.replace(running, phases=(PretrainPhase(6, 0.5), PretrainPhase(7, 0.5)))
    found = [str(each) for each in preflight(lengths, corpus, None, torch.device("cpu"))]
    for room in (4, 5):
        cut = f"longer than {room} tokens and will be cut into pieces, all of which are read"
        assert any(cut in text for text in found), found


def findings_of(corpus: Corpus, check: str, **changes: object) -> list[Finding]:
    found = preflight(settings(corpus, 1, **changes), corpus, None, torch.device("cpu"))
    return [finding for finding in found if finding.check == check]


def test_the_preflight_warns_of_documents_without_a_next_sentence(corpus, tmp_path):
    texts = ["The cat sleeps.", "The cat sleeps.", "The dog eats. The cat sleeps."]
    texts += [f"The cat sleeps {'now ' * count}." for count in range(1, 9)]
    lone = write_texts(tmp_path / "lone", corpus.tokenizer, texts)
    [finding] = findings_of(lone, "balance")
    assert finding.severity == "warning"
    # The second of two equal ones is left out.
    assert finding.what.startswith("90.0% of the documents are one sentence")
    assert 'boundary="blank" or boundary="file"' in str(finding)
    assert not findings_of(corpus, "balance")
    assert not findings_of(lone, "balance", objective=MaskedLM())
    phases = (PretrainPhase(16, 0.5, FullSentences()), PretrainPhase(32, 0.5))
    assert findings_of(lone, "balance", phases=phases)


def test_pairs_need_a_second_row_of_segments_or_none(corpus):
    for count in (0, 2):
        encoder = dataclasses.replace(settings(corpus, 1).encoder, segments=count)
        assert not findings_of(corpus, "ids", encoder=encoder)
    encoder = dataclasses.replace(encoder, segments=1)
    assert not findings_of(corpus, "ids", encoder=encoder, objective=MaskedLM())
    with pytest.raises(BothwaysError) as caught:
        findings_of(corpus, "ids", encoder=encoder)
    assert caught.value.where == "encoder.segments"


def test_the_preflight_says_how_much_is_unknown(corpus, tmp_path):
    assert not findings_of(corpus, "unknown")
    texts = [f"The cat sleeps near the {'zebra' if number % 2 else 'barn'}. The cat eats. Number {number}."
             for number in range(20)]  # fmt: skip
    strange = write_texts(tmp_path / "strange", corpus.tokenizer, texts)
    [warning] = findings_of(strange, "unknown")
    assert warning.severity == "warning"
    assert "Train a tokenizer on this text" in str(warning)
    share = float((strange.tokens == corpus.tokenizer.specials.unknown).mean())
    assert warning.what.startswith(f"{share:.1%} of the tokens")
    assert not unknown_tokens(0.00004, "Train one.")
    [note] = unknown_tokens(0.0003, "Train one.")
    assert str(note) == "0.03% of the tokens are unknown to the vocabulary"
    assert note.severity == "note"


def test_the_preflight_says_where_whole_words_are_not_masked_as_asked(corpus, tmp_path):
    words = MaskedLM(masking=Masking(unit=WholeWords()))
    [same] = findings_of(corpus, "masking", objective=words)
    assert "every word of this corpus is one token" in str(same)
    assert not findings_of(corpus, "masking", objective=MaskedLM())

    def made(text: str, name: str) -> Corpus:
        texts = (f"{text} {'cat ' * n}." for n in range(20))
        return write_texts(tmp_path / name, corpus.tokenizer, texts)

    long = made(f"The cat{'s' * 60} sleeps. " * 3, "long")
    [few] = findings_of(long, "masking", objective=words)
    long_words = (
        r"words of this corpus are so long that \d+\.\d% of the tokens are masked, not 15\.0%"
    )
    assert re.fullmatch(long_words, few.what)
    assert render(few.fix) == 'Set **{"objective.masking.unit": "tokens"}.'
    assert not findings_of(made("The cats eat the dogs. " * 9, "short"), "masking", objective=words)


def test_a_warm_up_that_is_longer_than_the_run_is_refused(corpus, tmp_path):
    line = ["pretrain", str(corpus.folder), "--out", str(tmp_path / "run"), *SMALL]
    steps = ["training.until=100 steps", "training.schedule.warmup=10000 steps"]
    with pytest.raises(ConfigError) as caught:
        run_line(*line, "--recipe", "paper", *steps)
    assert caught.value.where == "training.schedule.warmup"
    assert '**{"training.schedule.warmup": 0.1}' in str(caught.value.fix)


@pytest.mark.parametrize("setting", ["training.until=auto", "training.optimizer.lr=auto"])
def test_what_fine_tuning_chooses_is_given_in_pre_training(corpus, tmp_path, setting):
    line = ["pretrain", str(corpus.folder), "--out", str(tmp_path / "run"), *SMALL, setting]
    with pytest.raises(ConfigError, match="is chosen by fine-tuning alone") as caught:
        run_line(*line)
    assert caught.value.where == setting.partition("=")[0]


@pytest.mark.usefixtures("pages")
def test_a_page_shows_the_course_of_a_run(corpus, tmp_path):
    config = settings(corpus, 20, {"report": Steps(2), "evaluate": Steps(10)})
    done = pretrain(config, corpus, tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    for title in ("Loss: masked", "Accuracy: pair", "Learning rate", "Gradient norm"):
        assert title in page
    assert "unigram baseline" in page
    assert "majority baseline" in page
    assert readable_number(done.metrics["held-out/loss/masked"]) in page
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    [loss] = [chart for chart in curves(records, done.metrics) if chart.title == "Loss: masked"]
    assert [line.name for line in loss.lines] == ["training", "held-out"]
    assert len(loss.lines[0].x) == 10
    assert loss.baselines == {"unigram baseline": done.metrics["unigram/loss/masked"]}


def test_last_record_that_was_cut_is_skipped_with_a_note(tmp_path, capsys):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_records(file) == [{"step": 1}]
    assert f"{file}: skipped line 2" in capsys.readouterr().err
    file.write_text('{"step": 1}\n{"step": 2}')
    assert read_records(file) == [{"step": 1}, {"step": 2}]
    assert not capsys.readouterr().err


def test_a_phase_may_have_segments_of_its_own(corpus, tmp_path):
    phases = (PretrainPhase(16, 0.5, FullSentences()), PretrainPhase(64, 0.5))
    config = settings(corpus, 8, {"report": Steps(1)}, phases=phases, batch=ExampleBudget(8))
    done = pretrain(config, corpus, tmp_path / "run")
    lines = metric_lines(tmp_path / "run")
    paired = {line["step"] for line in lines if "loss/pair" in line}
    assert paired == {5, 6, 7, 8}, "the first phase has no pairs to learn from"
    assert (done.progress.steps, done.progress.phase) == (8, 1)
    assert done.progress.tokens > 4 * 8 * (16 + 17), "the later sequences are longer"


def test_a_model_is_evaluated_on_a_corpus(corpus, learned, tmp_path, capsys):
    run_line("evaluate", learned.folder, corpus.folder, "--length", "32", "--json")
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["loss/masked"] < metrics["unigram/loss/masked"]
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss/masked"]))
    assert {"accuracy/pair", "majority/accuracy/pair"} <= metrics.keys()
    bare = Model(settings(corpus).encoder, (MaskedHead(),))
    save_model(tmp_path / "bare", bare, corpus.tokenizer)
    run_line("evaluate", tmp_path / "bare", corpus.folder)
    shown = capsys.readouterr().out
    assert "masked" in shown
    assert "pair" not in shown


SETTINGS = {"batch": {"n": 256, "start": 256}, "phases": [{"length": 16}]}


def test_rates_grow_by_one_factor_until_the_loss_rises(corpus):
    found = bothways.find_lr(corpus, "bert-tiny", "masked-lm", steps=60, **SETTINGS)
    expected = 1e-6 * 1e6 ** (np.arange(len(found.rates)) / 59)
    assert found.rates == pytest.approx(expected)
    smoothed = found.smoothed
    assert len(found.rates) == 60 or smoothed[-1] > 1.5 * min(smoothed)
    assert all(value <= 1.5 * min(smoothed[: n + 1]) for n, value in enumerate(smoothed[:-1]))
    # Far from both ends: a model of this size learns at about 1e-3.
    assert 1e-5 < found.suggestion < 1e-1
    lowest = int(np.argmin(smoothed))
    assert found.suggestion == found.rates[lowest] / 10
    assert smoothed[0] - min(smoothed) > 0.3


def test_only_a_first_step_that_diverges_is_an_error(corpus, monkeypatch):
    def diverge(settings, corpus, *, on_event, **_):
        for step in range(1, steps):
            on_event(Event("report", RunState(step), {"learning_rate": 0.1, "loss/masked": 2.0}))
        raise DivergedError("the loss is not finite")

    monkeypatch.setattr("bothways.pretraining.run.pretrain", diverge)
    steps = 3
    assert len(bothways.find_lr(corpus, "bert-tiny", **SETTINGS).rates) == 2
    steps = 1
    with pytest.raises(DivergedError):
        bothways.find_lr(corpus, "bert-tiny", **SETTINGS)


def test_smoothing_is_a_weighted_mean():
    losses = [3.0, 1.0, 2.0]
    weights = [[1], [0.9, 1], [0.81, 0.9, 1]]
    expected = [np.average(losses[: n + 1], weights=w) for n, w in enumerate(weights)]
    assert RateTest([1, 2, 3], losses).smoothed == pytest.approx(expected)


def test_the_command_shows_the_losses_and_trains_nothing(corpus, capsys, monkeypatch):
    found = RateTest([1e-6, 1e-5, 1e-4, 1e-3], [5.0, 4.0, 1.0, 9.0])
    calls = []
    monkeypatch.setattr("bothways.find_lr", lambda *args, **kw: calls.append((args, kw)) or found)
    words = ["pretrain", str(corpus.folder), "--model", "bert-tiny", "objective=masked_lm"]
    run_line(*words, "--find-lr")
    (text, model), options = calls[0]
    assert (text, model, options["objective"]) == (str(corpus.folder), "bert-tiny", "masked_lm")
    assert "lr=1.0e-05" in capsys.readouterr().out
    for option in (["--out", "run"], ["--resume"]):
        with pytest.raises(ConfigError, match=f"{option[0].strip('-')}: is for a run"):
            run_line(*words, "--find-lr", *option)
    with pytest.raises(ConfigError, match="out: is missing"):
        run_line(*words)


def test_a_test_of_one_step_is_refused(corpus):
    with pytest.raises(ConfigError, match="steps: must be at least 2, not 1"):
        bothways.find_lr(corpus, "bert-tiny", steps=1)
    own = {"training": {"optimizer": torch.optim.SGD}}
    with pytest.raises(ConfigError, match=r"training\.optimizer: is a function, whose rate"):
        bothways.find_lr(corpus, "bert-tiny", steps=2, **own)


@pytest.mark.parametrize("length", [{"epochs": 2}, {"training": {"until": "5 minutes"}}])
def test_the_length_of_the_run_whose_rate_is_searched_may_be_named(corpus, length):
    found = bothways.find_lr(corpus, "bert-tiny", steps=2, recipe="modern", **SETTINGS, **length)
    assert len(found.rates) == 2


def test_a_recipe_with_two_kinds_of_sequences_and_milestones_is_tested(corpus):
    """Of one held-out sequence, one of the two losses has no target."""
    found = bothways.find_lr(corpus, "bert-tiny", recipe="babylm", steps=2, epochs=3, **SETTINGS)
    assert found.rates == pytest.approx([1e-6, 1.0])
