"""Pre-training from several corpora: one tokenizer, losses by corpus, a forecast, exact resume."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError, FolderError
from bothways.core.source import Cursor
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import ByWeight, Corpora, Smoothed
from bothways.data.loader import ExampleBudget, TokenBudget, TokenRamp
from bothways.data.masking import Masking
from bothways.hub.model_folder import save_model
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead, PairHead, PoolerHead, token_head
from bothways.model.model import Model
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.masked_lm import MaskedLM
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.pretraining.build import preflight
from bothways.pretraining.config import PretrainConfig, PretrainPhase, load_pretraining
from bothways.pretraining.evaluation import scored_objective
from bothways.pretraining.run import pretrain
from bothways.text.tokenizer import Tokenizer
from bothways.training.schedules import Constant, Duration, Epochs, Hours, Steps, Tokens
from commands import run_line
from toy_animals import WORDS, document
from toy_corpora import write_texts
from toy_objective import short_run
from toy_pretraining import small_encoder, small_run
from toy_training import equal, metric_lines, stop_at

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpora(corpus, tokenizer, tmp_path_factory) -> dict[str, Corpus]:
    """A large and a small corpus."""
    rng = np.random.default_rng(8)
    texts = [document(rng).replace("in", "near") for _ in range(15)]
    folder = tmp_path_factory.mktemp("small") / "small"
    return {"large": corpus, "small": write_texts(folder, tokenizer, texts)}


def settings(
    corpus: Corpus, until: Duration | None = None, training: Any = None, **changes: object
) -> PretrainConfig:
    common = {
        "objective": MaskedLM(),
        "encoder": small_encoder(corpus, 1, 0.1), "batch": ExampleBudget(16), "held_out": 0.2,
        "phases": (PretrainPhase(16, 0.5), PretrainPhase(32, 0.5)), "evaluation_tokens": 1000,
        "mixture": ByWeight({"large": 0.9, "small": 0.1}),
    }  # fmt: skip
    training = {"evaluate": Steps(6), "save": Steps(6)} | (training or {})
    return small_run(corpus, until or Steps(12), training=training, **(common | changes))


@pytest.mark.usefixtures("pages")
def test_losses_are_named_by_corpus_and_the_total_is_weighted(corpora, tmp_path):
    config = settings(corpora["large"])
    done = pretrain(config, corpora, tmp_path / "run")
    for kind in ("loss", "accuracy"):
        parts = [done.metrics[f"held-out/{name}/{kind}/masked"] for name in corpora]
        total = done.metrics[f"held-out/{kind}/masked"]
        assert total == pytest.approx(0.9 * parts[0] + 0.1 * parts[1], rel=1e-9)
        assert parts[0] != parts[1]
        unigram = [done.metrics[f"unigram/{name}/{kind}/masked"] for name in corpora]
        total = done.metrics[f"unigram/{kind}/masked"]
        assert total == pytest.approx(0.9 * unigram[0] + 0.1 * unigram[1])
    perplexity = np.exp(done.metrics["held-out/small/loss/masked"])
    assert done.metrics["held-out/small/perplexity"] == pytest.approx(perplexity)
    page = (tmp_path / "run/report.html").read_text()
    assert "held-out, small" in page
    card = (tmp_path / "run/model/README.md").read_text()
    assert "small corpus" in card
    assert "large corpus" in card


def test_an_interrupted_mixture_resumes_to_equal_weights(corpora, tmp_path):
    config = settings(corpora["large"])
    whole = pretrain(config, corpora, tmp_path / "whole").model
    with pytest.raises(InterruptedError):  # in the second phase
        pretrain(config, corpora, tmp_path / "cut", on_event=stop_at(8, "step"))
    reordered = dict(reversed(corpora.items()))
    assert equal(pretrain(config, reordered, tmp_path / "cut", resume=True).model, whole)
    other = dataclasses.replace(config, mixture=ByWeight({"large": 0.5, "small": 0.5}))
    with pytest.raises(BothwaysError, match=r"mixture\.weights\.large was 0\.9, is 0\.5"):
        pretrain(other, corpora, tmp_path / "cut", resume=True)


def test_phases_read_mixtures_at_rates_of_their_own(corpora, tmp_path):
    """The second phase reads the small corpus alone, at a third of the rate."""
    only = ByWeight({"large": 0, "small": 1})
    phases = (PretrainPhase(16, 0.5), PretrainPhase(16, 0.5, rate=1 / 3, mixture=only))
    config = settings(
        corpora["large"], training={"schedule": Constant(), "report": Steps(1)},
        mixture=ByWeight({"large": 1, "small": 0}), phases=phases,
    )  # fmt: skip
    done = pretrain(config, corpora, tmp_path / "run")
    lines = metric_lines(tmp_path / "run")
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert rates == pytest.approx([5e-3] * 6 + [5e-3 / 3] * 6)
    first, second = done.progress.ends[0].parts, done.progress.cursor.parts
    assert first[1] == Cursor()
    assert second[0] == first[0].at_next_phase()
    assert second[1] != Cursor()
    text = Corpora.of(corpora, config.mixture)
    notes = [str(note) for note in preflight(config, text, None, CPU)]
    expected = "0.00%, then 100.00% of the sequences"
    assert any("small: " in note and expected in note for note in notes)
    other = dataclasses.replace(phases[1], mixture=ByWeight({"medium": 1}))
    one = Corpora.of(corpora["large"], None)
    unknown = r"phases\.1\.mixture\.weights: has weights for medium"
    for changes, read, error, message in (
        ({"phases": phases[:1] * 2}, text, BothwaysError, r"small: .* may never be read"),
        ({"phases": (phases[0], other)}, text, ConfigError, unknown),
        ({"mixture": None}, one, BothwaysError, r"phases\.1\.mixture: there is one corpus"),
    ):
        with pytest.raises(error, match=message):
            preflight(dataclasses.replace(config, **changes), read, None, CPU)


def test_mistakes_are_named(corpora, tmp_path, corpus):
    with pytest.raises(ConfigError, match="mixture: there is one corpus"):
        bothways.pretrain(corpora["large"], "bert-tiny", mixture={"alpha": 0.3})
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "more"]) + "\n", encoding="utf8")
    other = Tokenizer.load(tmp_path / "vocab.txt")
    foreign = write_texts(tmp_path / "foreign", other, ["The cat sleeps."] * 3)
    with pytest.raises(ConfigError, match=r"'foreign' .* and 'large' .* different tokenizers"):
        Corpora.of({"large": corpus, "foreign": foreign}, None)


def test_a_run_that_never_reads_a_corpus_is_refused_with_its_forecast(corpora):
    def check(until: Duration, share: float) -> list[str]:
        mixture = ByWeight({"large": 1 - share, "small": share})
        config = settings(corpora["large"], until, mixture=mixture)
        return [*map(str, preflight(config, Corpora.of(corpora, mixture), None, CPU))]

    for until in (Steps(12), Tokens(4000), Epochs(0.5)):
        with pytest.raises(BothwaysError, match=r"small: .* 0\.10% .* may never be read"):
            check(until, 0.001)
        assert any("small: " in note and "50.00% of the" in note for note in check(until, 0.5))
    assert check(Hours(1.0), 0.001)


@pytest.mark.parametrize(
    ("batch", "sequences"),
    [
        (TokenBudget(640), "about 22.5 in this run"),  # 0.5 · 4 · (320 / 32 + 320 / 256)
        (ExampleBudget(6), "about 12 in this run"),  # 0.5 · 4 · 6, of any length
        (TokenRamp(640, 640, 1000), "about 22.5 in this run"),
        (ExampleBudget(3210), "about 6,420 in this run"),  # not 6.42e+03
        # 760 tokens in the first two updates and 1,060 in the others: 320 * (e^(k / 6) - 1) * 6.
        (TokenRamp(320, 640, 3 * 640), "about 13.9 in this run"),
    ],
    ids=str,
)
def test_the_forecast_counts_the_sequences_of_every_phase(corpora, batch, sequences):
    config = settings(
        corpora["large"], Steps(4), mixture=ByWeight({"large": 0.5, "small": 0.5}), batch=batch,
        phases=(PretrainPhase(32, 0.5), PretrainPhase(256, 0.5)),
    )  # fmt: skip
    text = Corpora.of(corpora, config.mixture)
    notes = preflight(config, text, None, CPU)
    assert any("small: " in str(note) and sequences in str(note) for note in notes)


def test_frequencies_for_masking_are_those_of_the_mixture(corpora):
    one = Corpora.of(corpora["large"], None)
    assert (one.token_counts == corpora["large"].token_counts).all()
    mixed = Corpora.of(corpora, ByWeight({"large": 1, "small": 1}))
    shares = [part.token_counts / part.token_counts.sum() for part in corpora.values()]
    found = mixed.token_counts / mixed.token_counts.sum()
    assert np.allclose(found, np.mean(shares, axis=0), atol=1e-3)


def test_the_command_and_the_function_take_several_corpora(corpora, tmp_path, capsys):
    folders = [str(corpus.folder) for corpus in corpora.values()]
    words = ["--model", "bert-tiny", "training.until=2 steps", "encoder.depth=1"]
    words += ["encoder.width=32", "encoder.heads=2", "encoder.intermediate_size=64"]
    words += ["evaluation_tokens=300", "held_out=0.2", "objective=masked_lm", "batch.n=2048"]
    words += ["mixture.alpha=0.3", "--recipe", "modern"]
    out = ["--out", str(tmp_path / "run")]
    run_line("pretrain", *folders, *words, *out)
    assert "small/loss" in capsys.readouterr().out
    assert "alpha = 0.3" in (tmp_path / "run/config.toml").read_text()
    (file := tmp_path / "mixture.toml").write_text("[mixture]\nalpha = 0.2\n")
    one = settings(corpora["large"], Steps(2), mixture=None)
    assert load_pretraining(one, file=file).mixture == Smoothed(0.2)
    tiny = EncoderConfig(5, 32, 1, 2, 64)
    done = bothways.pretrain(
        dict(zip(corpora, folders, strict=True)), tiny, "masked-lm", until="2 steps",
        held_out=0.2, evaluation_tokens=300, mixture={"kind": "by_weight", "weights": {"large": 3, "small": 1}},
    )  # fmt: skip
    assert "held-out/large/loss/masked" in done.metrics
    done = bothways.pretrain(
        folders, tiny, "masked-lm", until="2 steps", held_out=0.2, evaluation_tokens=300
    )
    assert "held-out/corpus/loss/masked" in done.metrics
    with pytest.raises(DataError, match="nowhere"):
        run_line("pretrain", folders[0], "nowhere", *out)


HEADS = (MaskedHead(), PoolerHead(), PairHead())


def scored(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    run_line("evaluate", *words, "--length", "32", "--json")
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_of_sentence_order_is_scored_on_the_order(corpus, tmp_path, capsys):
    """More than half of the pairs of next sentence prediction are random; half of these are swapped."""
    pretrain(short_run(corpus, MaskedLMSentenceOrder(), "bert-tiny", 1), corpus, tmp_path / "run")
    assert isinstance(scored_objective(str(tmp_path / "run")), MaskedLMSentenceOrder)
    found = scored(capsys, str(tmp_path / "run"), str(corpus.folder))
    assert found["majority/accuracy/pair"] < 0.53


@pytest.mark.parametrize(
    ("name", "objective", "kind"),
    [
        ("albert-base", MaskedLM(), "masked_lm_sop"),
        ("bert-tiny", MaskedLM(), "masked_lm_nsp"),
        ("gpt2", CausalLM(), "causal_lm"),
    ],
)
def test_without_a_record_the_family_says_what_pairs_are(name, objective, kind, corpus, tmp_path):
    encoder = short_run(corpus, objective, name).encoder
    heads = (token_head(encoder), *HEADS[1:])
    save_model(tmp_path / "model", Model(encoder, heads), corpus.tokenizer)
    assert scored_objective(str(tmp_path / "model")).kind == kind


def test_a_discriminator_is_scored_with_the_generator_of_its_run(corpus, tmp_path, capsys):
    objective = ReplacedTokens(masking=Masking())
    pretrain(short_run(corpus, objective, "electra-small", 1), corpus, tmp_path / "run")
    found = scored(capsys, str(tmp_path / "run"), str(corpus.folder))
    assert {"f1/replaced", "entropy/replaced", "loss/masked"} <= found.keys()


def test_a_model_without_a_head_for_tokens_is_one_message(corpus, tmp_path):
    save_model(tmp_path / "bare", Model(small_encoder(corpus), ()), corpus.tokenizer)
    with pytest.raises(FolderError, match="has no head that predicts tokens"):
        scored_objective(str(tmp_path / "bare"))


@pytest.mark.parametrize(
    "words",
    [["--report", "page.html"], ["--precision", "int8"], ["--task", "tag"], ["variant=word_l2r"]],
)
def test_options_that_do_nothing_with_a_corpus_are_refused(words, corpus, tmp_path):
    command = ["evaluate", str(tmp_path / "model"), str(corpus.folder), *words]
    with pytest.raises(BothwaysError, match="does nothing with a corpus"):
        run_line(*command)
    with pytest.raises(BothwaysError, match=r"^normalised: does nothing with a corpus"):
        bothways.evaluate(tmp_path / "model", corpus.folder, normalised=False)
