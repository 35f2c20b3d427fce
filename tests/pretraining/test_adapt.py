"""`bothways adapt`: perplexities before and after, replay, a new head, ELECTRA, resume, and the words to add."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import MaskedHead, PoolerHead, ReplacedHead
from bothways.model.model import Model
from bothways.pretraining.adapt import NEW_HEAD, head_note, vocabulary_fit
from bothways.text.tokenizer import Tokenizer
from bothways.training import checkpoint
from commands import run_line
from heard_progress import Heard
from toy_animals import document
from toy_corpora import write_films, write_texts
from toy_folder import make_examples, make_folder, make_tokenizer, write_tsv
from toy_training import enter_ranks, equal, metric_lines, on_ranks

FAST = {
    "held_out": 0.2, "evaluation_tokens": 800, "batch": {"n": 512},
    "training": {"optimizer": {"lr": 5e-3}, "precision": "fp32", "save": "8 steps"},
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, str]:
    """Text of a domain, in which every word but some is split, and general text."""
    rng, place = np.random.default_rng(3), tmp_path_factory.mktemp("texts")
    domain = [document(rng).replace("cat", "cats").replace("barn", "hills") for _ in range(60)]
    files = {"domain": domain, "general": [document(rng) for _ in range(60)]}
    for name, lines in files.items():
        (place / f"{name}.txt").write_text("\n".join(lines), encoding="utf8")
    return {name: str(place / f"{name}.txt") for name in files}


def folder_of(
    place: Path, tokenizer: Tokenizer, *heads: object, seed: int = 0, electra: bool = False
) -> Path:
    torch.manual_seed(seed)
    config = EncoderConfig(tokenizer.size, 32, 1, 2, 64, dropout=Dropouts(0.0, 0.0))
    if electra:
        config = dataclasses.replace(
            preset("electra-small"), vocab=tokenizer.size, width=32, depth=1, heads=2,
            intermediate_size=64, embedding=16,
        )  # fmt: skip
    save_model(place, Model(config, heads), tokenizer)
    return place


@pytest.mark.usefixtures("pages")
def test_the_command_shows_what_was_measured(tmp_path, tokenizer, texts, capsys):
    model = folder_of(tmp_path / "model", tokenizer, MaskedHead())
    words = ["adapt", model, texts["domain"], "--replay", texts["general"], "--until", "4 steps"]
    words += ["--length", "32", "held_out=0.2", "evaluation_tokens=800", "batch.n=512"]
    run_line(*words, "--out", tmp_path / "run")
    shown = capsys.readouterr().out
    assert "Are new words worth adding?" in shown
    page = (tmp_path / "run/report.html").read_text()
    for part in ("Before and after", "Vocabulary", "domain: perplexity", "Words to add"):
        assert part in page
    assert "cats" in (tmp_path / "run/new_words.txt").read_text().split()


def test_the_domain_is_learned_and_measured_before_and_after(tmp_path, tokenizer, texts):
    model = folder_of(tmp_path / "model", tokenizer, MaskedHead())
    again = bothways.adapt(
        model, texts["domain"], tmp_path / "alone", replay=texts["general"], replay_share=0.0,
        until="40 steps", length=32, **FAST,
    )  # fmt: skip
    for name in ("domain", "general"):
        assert again.after[name]["perplexity"] < 0.8 * again.before[name]["perplexity"]
    pairs = itertools.product(("domain", "general"), ("accuracy/masked", "perplexity"))
    assert [tuple(row[:2]) for row in again.comparison()] == [*pairs]
    assert "held-out/domain/loss/masked" not in again.run.metrics, "there is no mixture"
    assert not again.new_head
    assert again.vocabulary.domain.fertility > 1.05 * again.vocabulary.general.fertility
    assert bothways.load(tmp_path / "alone", task="fill")("The [MASK] sleeps.")


def test_the_state_of_torch_is_left_as_it_was(tmp_path, tokenizer, texts):
    """A default device, on which "meta" has no values, changes nothing, nor does the run its seed."""
    model = folder_of(tmp_path / "model", tokenizer, MaskedHead())
    before = torch.get_rng_state()
    with torch.device("meta"):
        done = bothways.adapt(
            model, texts["domain"], tmp_path / "run", until="2 steps", length=32, **FAST
        )
        corpus = tmp_path / "run/corpora/domain"
        again = bothways.evaluate(done.folder, corpus, length=32, device="cpu", progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(again.metrics) >= set(done.after["domain"])


def test_text_is_read_from_a_named_column(tmp_path, tokenizer, texts):
    model = folder_of(tmp_path / "model", tokenizer, MaskedHead())
    lines = filter(None, Path(texts["domain"]).read_text("utf8").splitlines())
    file = tmp_path / "mails.jsonl"
    file.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines), "utf8")
    options = {"until": "1 steps", "length": 32, **FAST}
    with pytest.raises(BothwaysError, match="has no column 'text'"):
        bothways.adapt(model, file, tmp_path / "run", **options)
    # Plain text has no columns.
    options |= {"column": "body", "replay": texts["general"], "replay_share": 0.0}
    options |= {"length": 999, "progress": (heard := Heard())}
    done = bothways.adapt(model, file, tmp_path / "run", **options)
    note = "note: sequences have 512 tokens, the most that the model reads, not 999"
    assert heard.messages[0] == note
    assert done.folder is not None
    assert done.vocabulary.domain.fertility > 1


def test_a_sentence_encoder_gets_a_head_while_its_encoder_is_frozen(tmp_path, tokenizer, texts):
    model = folder_of(tmp_path / "model", tokenizer, PoolerHead())
    options = {"until": "10 steps", "length": 32, **FAST}
    done = bothways.adapt(model, texts["domain"], tmp_path / "run", **options)
    assert done.new_head
    folders = model, tmp_path / "run/head/model", tmp_path / "run/model"
    old, head, new = (load_model(folder).model for folder in folders)
    assert equal(head.encoder, old.encoder)
    assert not equal(new.encoder, old.encoder)
    assert "with the encoder frozen" in str(done.lead().sections)
    assert head.heads["masked"].bias.abs().sum() > 0


def test_a_head_that_has_learnt_nothing_is_reported():
    before = {"domain": {"loss/masked": 7.2, "unigram/loss/masked": math.log(800)}}
    assert "than token frequencies (perplexity 800)" in head_note(before)
    better = {"domain": {"loss/masked": 6.5, "unigram/loss/masked": math.log(800)}}
    assert head_note(better) == NEW_HEAD
    assert head_note({"domain": {"loss/masked": 6.5}}) == NEW_HEAD, "from an earlier version"


def test_electra_needs_its_generator(tmp_path, tokenizer, texts):
    model = folder_of(tmp_path / "run/model", tokenizer, ReplacedHead(), electra=True)
    with pytest.raises(ConfigError, match="the generator that replaces them is not next to it"):
        bothways.adapt(model, texts["domain"], tmp_path / "no", until="2 steps")
    folder_of(tmp_path / "run/generator", tokenizer, MaskedHead(), seed=1, electra=True)
    options = {"until": "4 steps", "length": 32, **FAST}
    done = bothways.adapt(tmp_path / "run", texts["domain"], tmp_path / "new", **options)
    assert {"perplexity", "f1/replaced"} <= set(done.after["domain"])
    assert (tmp_path / "new/generator/config.json").is_file()
    assert done.before["domain"]["perplexity"] != done.after["domain"]["perplexity"]


def test_an_interrupted_adaptation_resumes_to_equal_weights(tmp_path, tokenizer, texts):
    model = folder_of(tmp_path / "model", tokenizer, MaskedHead())
    given = {"until": "12 steps", "length": 32, "replay": texts["general"], **FAST}
    whole = bothways.adapt(model, texts["domain"], tmp_path / "whole", **given)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("step-12", "model"):
        shutil.rmtree(tmp_path / "cut" / name)
    with pytest.raises(BothwaysError, match="resume"):
        bothways.adapt(model, texts["domain"], tmp_path / "cut", **given)
    done = bothways.adapt(model, texts["domain"], tmp_path / "cut", resume=True, **given)
    assert equal(*(load_file(tmp_path / n / "model/model.safetensors") for n in ("whole", "cut")))
    assert done.before == whole.before
    assert done.after == whole.after
    given["evaluation_tokens"] = 200
    fewer = bothways.adapt(model, texts["domain"], tmp_path / "cut", resume=True, **given)
    assert fewer.before != whole.before, "both are measured on the same text"
    assert fewer.after != whole.after


@pytest.mark.parametrize("head", [MaskedHead(), PoolerHead()])
def test_a_run_killed_before_its_first_checkpoint_leaves_nothing_to_another_model(
    tmp_path, tokenizer, texts, head
):
    models = [folder_of(tmp_path / f"model-{seed}", tokenizer, head, seed=seed) for seed in (0, 1)]
    given = {"until": "4 steps", "length": 16, **FAST}
    first = bothways.adapt(models[0], texts["domain"], tmp_path / "run", **given)
    for path in (tmp_path / "run/step-4", tmp_path / "run/model"):
        shutil.rmtree(path)
    if isinstance(head, PoolerHead):  # the new head belongs to the model
        with pytest.raises(ConfigError, match=r"model: the head in .*model-0, not on .*model-1"):
            bothways.adapt(models[1], texts["domain"], tmp_path / "run", **given)
        return
    second = bothways.adapt(models[1], texts["domain"], tmp_path / "run", **given)
    assert second.before != first.before


def test_mistakes(tmp_path, tokenizer, texts, corpus):
    model = folder_of(tmp_path / "model", tokenizer, MaskedHead())
    one, domain = tmp_path / "one.txt", texts["domain"]
    one.write_text("The cat sleeps.\n")
    other = write_texts(tmp_path / "other", make_tokenizer(tmp_path), ["a good film"]).folder
    os.mkfifo(pipe := tmp_path / "pipe")
    no_text = r"^replay_share: is 0\.1, and there is no general text"
    for text, settings, error, message in (
        (domain, {"replay_share": 1.0}, ConfigError, "replay_share"),
        (domain, {"replay_share": 0.1}, ConfigError, no_text),
        (domain, {"epochs": 1}, ConfigError, "epochs: 'epochs' sets what 'until' sets"),
        ("nowhere.txt", {}, BothwaysError, "nowhere"),
        (domain, {"held_out": 2.0}, ConfigError, "held_out"),
        (domain, {"column": "body"}, ConfigError, "^column: does nothing"),
        (domain, {"start": "other"}, ConfigError, "^start: is other, and the model to adapt"),
        (corpus.folder, {"column": "body"}, ConfigError, "^column: does nothing"),
        ([domain, str(corpus.folder)], {}, DataError, "is a built corpus, not text"),
        (other, {}, ConfigError, f"^{other}: was built with another vocabulary"),
        (pipe, {}, DataError, "is a pipe, and the text is read twice"),
        (one, {"length": 16}, BothwaysError, "document"),  # after its corpus is built
    ):
        with pytest.raises(error, match=message):
            bothways.adapt(model, text, tmp_path / "no", until="2 steps", **settings)
    assert not (tmp_path / "no").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BothwaysError, match="nowhere"):
        bothways.adapt(model, "nowhere.txt", tmp_path / "empty", until="2 steps")
    assert list((tmp_path / "empty").iterdir()) == []


def test_words_are_worth_adding_only_where_they_save_tokens(tokenizer):
    often = vocabulary_fit(tokenizer, ["the cats sleeps"] * 50)
    assert [(word.word, word.count) for word in often.words] == [("cats", 50)]
    assert often.saved == pytest.approx(50 / 200)
    assert often.worth
    rare = vocabulary_fit(tokenizer, ["the cats sleeps"] * 19 + ["the cat"] * 400, ["the cat"])
    assert (rare.words, rare.worth) == ((), False)
    assert rare.answer.startswith("No: no word")
    few = vocabulary_fit(tokenizer, ["the cats sleeps"] * 20 + ["the cat sleeps"] * 400)
    assert few.words
    assert few.answer.startswith("No: the 1 best words save")
    # Text that saves as much is no sign that the domain differs.
    same = vocabulary_fit(tokenizer, ["the cats sleeps"] * 50, ["the cats sleeps"] * 50)
    assert same.saved == same.saved_general == often.saved
    assert not same.worth
    other = vocabulary_fit(tokenizer, ["the cats sleeps"] * 50, ["the cat sleeps"] * 50)
    assert (other.saved_general, other.worth) == (0, True)


class StopAt(Heard):
    """Progress that sends SIGINT to its process in the training of the whole model."""

    def advance(self, done: float, note: str | None = None) -> None:
        super().advance(done, note)
        if self.names[-1] == "training" and 0.3 < done < 1:
            self.stage("stopping")  # a second signal would end it at once
            os.kill(os.getpid(), signal.SIGINT)


def adapt_on_a_rank(rank: int, world: int, port: int, place: Path, given: dict[str, Any]) -> None:
    enter_ranks(rank, world, port)
    with pytest.raises(KeyboardInterrupt):
        bothways.adapt(out=place / "two", progress=StopAt(), **given)
    steps = int(checkpoint.checkpoints(place / "two")[-1].name.removeprefix("step-"))
    done = bothways.adapt(out=place / "two", progress=False, resume=True, **given)
    torch.save((steps, done.before, done.after), place / f"{rank}.found")


@pytest.mark.slow
def test_two_ranks_adapt_as_one_does_and_save_when_interrupted(tmp_path, tokenizer, texts):
    """With a new head: two trainings, and measures before, between and after them."""
    model = folder_of(tmp_path / "model", tokenizer, PoolerHead())
    given = {"model": model, "texts": texts["domain"], "until": "6 steps", "length": 32, **FAST}
    alone = bothways.adapt(out=tmp_path / "alone", progress=False, **given)
    on_ranks(2, adapt_on_a_rank, tmp_path, given)
    found = [torch.load(tmp_path / f"{rank}.found", weights_only=False) for rank in range(2)]
    assert found[0] == found[1]
    steps, before, after = found[0]
    assert 1 <= steps < 6
    assert before["domain"] == pytest.approx(alone.before["domain"], rel=1e-4)
    assert after["domain"] == pytest.approx(alone.after["domain"], rel=1e-4)
    first, second = (load_file(tmp_path / n / "model/model.safetensors") for n in ("alone", "two"))
    torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "two/report.html").is_file()


def test_ctrl_c_names_the_command_that_resumes(tmp_path, tokenizer, texts, monkeypatch, capsys):
    """In the training of a new head, too, whose checkpoints are in a folder of its own."""
    interrupted = contextlib.nullcontext([signal.SIGINT])
    monkeypatch.setattr(checkpoint, "catch_signals", lambda: interrupted)
    for head, saved in ((PoolerHead(), "run-pooler/head"), (MaskedHead(), "run-masked")):
        model = folder_of(tmp_path / head.kind, tokenizer, head)
        words = ["adapt", str(model), texts["domain"], "--out", str(tmp_path / f"run-{head.kind}")]
        words += ["--until", "9 steps", "--length", "32", "batch.n=512"]
        words += ["evaluation_tokens=400", "held_out=0.2"]
        monkeypatch.setattr(sys, "argv", ["bothways", *words])
        with pytest.raises(KeyboardInterrupt):
            run_line(*words)
        shown = " ".join(capsys.readouterr().err.split())
        assert shown.count("To resume: bothways adapt") == 1
        assert "--resume" in shown
        assert (tmp_path / saved / "step-1").is_dir()


@pytest.mark.slow
def test_long_inputs_are_learned_at_4096_tokens(tmp_path, tokenizer, texts):
    """The documented path: a Longformer and a BigBird on joined documents."""
    torch.manual_seed(0)
    for name, kind in (("longformer", "longformer-base-4096"), ("bigbird", "bigbird-roberta-base")):
        encoder = dataclasses.replace(
            preset(kind), vocab=tokenizer.size, pad=0, width=32, depth=1, heads=2,
            intermediate_size=64,
        )  # fmt: skip
        save_model(tmp_path / name, Model(encoder, (MaskedHead(),)), tokenizer)
    rng = np.random.default_rng(1)
    long = [" ".join(document(rng) for _ in range(160)) for _ in range(6)]
    (tmp_path / "long.txt").write_text("\n".join(long), encoding="utf8")
    fast = {**FAST, "evaluation_tokens": 4096, "batch": {"n": 4096}}
    for name in ("longformer", "bigbird"):
        done = bothways.adapt(
            tmp_path / name, tmp_path / "long.txt", tmp_path / f"{name}-run", until="3 steps",
            length=4096, **fast,
        )  # fmt: skip
        assert done.run.progress.tokens > 3 * 3500  # sequences are long
        assert done.after["domain"]["perplexity"] < done.before["domain"]["perplexity"]
        assert load_model(done.folder).model.config.max_positions == 4096


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a teacher, its corpus, a student, a fine-tuned teacher and labelled data."""
    folder = tmp_path_factory.mktemp("distil")
    make_folder(folder / "teacher", num_hidden_layers=4)
    make_folder(folder / "student", num_hidden_layers=1)
    write_films(folder / "corpus")
    write_tsv(folder / "train.tsv", make_examples(64, 0))
    write_tsv(folder / "dev.tsv", make_examples(32, 1))
    rows = make_examples(64, 2)
    bothways.finetune(folder / "teacher", rows, epochs=1, progress=False).save(folder / "tuned")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, place: Path, *words: str) -> None:
    monkeypatch.chdir(place)
    run_line("distil", *words)


QUICK = ("--until", "2 steps", "batch.n=8", "training.schedule.warmup=0.5")


def test_a_corpus_pre_trains_half_of_the_teacher(place, monkeypatch, capsys):
    run(monkeypatch, place, "teacher", "corpus", "--out", "half", *QUICK)
    assert "held-out/loss/soft" in capsys.readouterr().out
    config = json.loads((place / "half" / "model" / "config.json").read_text("utf8"))
    assert (config["architectures"], config["num_hidden_layers"]) == (["BertForMaskedLM"], 2)
    # Another width starts at random, and a folder from its own weights.
    run(
        monkeypatch, place, "half", "corpus", "--out", "small", "--student", "bert-tiny",
        "--recipe", "minilm", *QUICK,
    )  # fmt: skip
    config = json.loads((place / "small" / "model" / "config.json").read_text("utf8"))
    assert (config["architectures"], config["hidden_size"]) == (["BertModel"], 128)
    run(
        monkeypatch, place, "teacher", "corpus", "--out", "again", "--student", "half/model", *QUICK
    )
    assert 'start = "half/model"' in (place / "again" / "config.toml").read_text("utf8")


def test_labelled_data_fine_tunes_a_student_for_the_task_of_the_teacher(place, monkeypatch, capsys):
    run(
        monkeypatch, place, "tuned", "train.tsv", "--dev", "dev.tsv", "--student", "student",
        "--out", "taught", "--epochs", "1", "teacher.weight=0.7",
    )  # fmt: skip
    assert "accuracy" in capsys.readouterr().out
    settings = (place / "taught" / "config.toml").read_text("utf8")
    assert "weight = 0.7" in settings
    assert 'until = "1 epochs"' in settings
    assert any("loss/soft" in line for line in metric_lines(place / "taught"))
    monkeypatch.chdir(place)
    run_line("finetune", "student", "train.tsv", "--teacher", "tuned", "--out", "same", "epochs=1")
    assert 'folder = "tuned"' in (place / "same" / "config.toml").read_text("utf8")
    done = bothways.distil("tuned", make_examples(16, 3), "student", epochs=1, progress=False)
    assert done.task_model.labels == ("neg", "pos")


def test_mistakes_are_one_message(place, monkeypatch):
    with pytest.raises(BothwaysError, match="is not fine-tuned for a task") as untrained:
        run(monkeypatch, place, "teacher", "train.tsv", "--student", "student", "--out", "mistake")
    assert "Or name a task" not in str(untrained.value)  # distil has no --task
    for words, match in (
        (("tuned", "train.tsv"), "labelled data needs a pre-trained student"),
        (("teacher", "corpsu"), "corpsu is no corpus"),
        (("teacher",), "data: is missing: a corpus, or labelled data\n.*to=\"static\""),
        (("tuned", "train.tsv", "--student", "student", "--recipe", "minilm"), "is for a corpus"),
        (("teacher", "corpus", "--recipe", "modern"), "unknown recipe 'modern'"),
        (("teacher", "corpus", "--dev", "dev.tsv"), "is for labelled data"),
        (("none", "corpus"), "no such folder"),
        (("teacher", "corpus", "--epochs", "1", *QUICK), "given twice: 1 epochs and '2 steps'"),
        (("teacher", "corpus", "--epochs", "0"), "until: 0 epochs is not a valid duration"),
        (("teacher", "corpus", "--student", "bert-tiny"), "between vectors of one width"),
        (
            (
                "teacher", "corpus", "--student", "bert-tiny", "--recipe", "minilm",
                "phases.0.length=40", *QUICK,
            ),
            "reads 32 tokens, and sequences have 40",
        ),
    ):  # fmt: skip
        with pytest.raises(BothwaysError, match=match):
            run(monkeypatch, place, *words, "--out", "mistake")
    with pytest.raises(ConfigError, match="does not start from"):
        run(monkeypatch, place, "teacher", "corpus", "--out", "mistake", "start=none")
