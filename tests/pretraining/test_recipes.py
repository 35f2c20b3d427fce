"""The recipes of BERT's descendants: their values, and the classes of what they save."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from bothways.cli import app
from bothways.commands.pretrain import pretrain
from bothways.core.errors import ConfigError
from bothways.data.batching import ExampleBudget, TokenBudget, TokenRamp
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.documents import Document
from bothways.data.full_sentences import FullSentences
from bothways.data.masking import AnyToken, Masking, NGrams, Spans
from bothways.data.next_sentence import NextSentence
from bothways.families.catalogue import preset
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.positions import Learned
from bothways.objectives.catalogue import default_objective
from bothways.objectives.masked_lm import MaskedLM, with_masking
from bothways.objectives.replaced_tokens import Narrower, ReplacedTokens
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.objectives.span_boundary import MaskedLMSpanBoundary
from bothways.pretraining.config import PretrainPhase
from bothways.pretraining.recipes import (
    RECIPES,
    albert,
    deberta,
    electra,
    roberta,
    settings_of,
    spanbert,
)
from bothways.text.trainers import ByteBPE, train_tokenizer
from bothways.training.durations import Steps
from bothways.training.optimizers import AdamW, BertAdam, Lamb
from bothways.training.schedules import GoogleLinear, Linear
from toy_animals import document

SMALL = [
    "encoder.depth=2",
    "encoder.width=32",
    "encoder.heads=2",
    "encoder.intermediate_size=64",
    "encoder.position.max_positions=64",
    "training.until=2 steps",
    "training.schedule.warmup=0.1",
    "training.precision=fp32",
    "batch.n=8",
    "held_out=0.1",
    "evaluation_tokens=400",
    "phases.0.length=48",
]


@pytest.fixture(scope="module")
def byte_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rng = np.random.default_rng(7)
    texts = [document(rng) for _ in range(80)]
    tokenizer = train_tokenizer(texts, ByteBPE(320))
    documents = [Document(text, f"made:{number}") for number, text in enumerate(texts)]
    return build_corpus(documents, tokenizer, tmp_path_factory.mktemp("made") / "c", workers=1)


def test_modern_begins_with_short_sequences_and_small_updates_from_random_weights_alone() -> None:
    encoder = preset("bert-mini")
    made = settings_of("modern", encoder)
    assert [(phase.length, phase.share) for phase in made.phases] == [
        (16, 0.4), (64, 0.3), (128, 0.3)
    ]  # fmt: skip
    assert made.segments_of(made.phases[0]) == FullSentences(16)
    assert isinstance(made.segments_of(made.phases[1]), NextSentence)
    assert made.batch == TokenRamp(512, 8192, 8_000_000)
    assert made.objective == with_masking(default_objective(encoder), Masking(0.4))
    small = dataclasses.replace(encoder, position=Learned(40))
    assert [phase.length for phase in settings_of("modern", small).phases] == [16, 40, 40]
    dropped = dataclasses.replace(encoder, dropout=Dropouts(0.3, 0.2))
    for recipe in ("modern", "short"):
        more = settings_of(recipe, dropped, "folder")
        assert more.phases == (PretrainPhase({"modern": 128, "short": 64}[recipe]),)
        assert more.batch == TokenBudget({"modern": 8192, "short": 512}[recipe])
        assert more.objective == default_objective(encoder)
        assert (more.start, more.encoder) == ("folder", dropped)
    paper = settings_of("paper", dropped, "folder")
    assert paper == dataclasses.replace(RECIPES["paper"](dropped), encoder=dropped, start="folder")


def test_roberta_is_the_papers_base() -> None:
    made = roberta(preset("roberta-base"))
    assert (made.objective, made.batch, made.data_copies) == (MaskedLM(), ExampleBudget(8192), None)
    assert [phase.length for phase in made.phases] == [512]
    assert (made.training.until, made.training.clip_norm) == (Steps(500_000), None)
    assert made.training.optimizer == AdamW(lr=6e-4, betas=(0.9, 0.98), eps=1e-6, decay=0.01)
    assert made.training.schedule == Linear(Steps(24_000))
    assert made.encoder == preset("roberta-base")


def test_albert_is_the_public_codes() -> None:
    made = albert(preset("albert-base-v2"))
    masking = Masking(0.15, unit=NGrams(3), replacements=AnyToken())
    assert made.objective == MaskedLMSentenceOrder(masking=masking)
    assert (made.batch, made.data_copies) == (ExampleBudget(4096), 40)
    assert (made.training.until, made.training.clip_norm) == (Steps(125_000), 1.0)
    assert made.training.optimizer == Lamb(lr=0.00176, betas=(0.9, 0.999), eps=1e-6, decay=0.01)
    assert made.training.schedule == GoogleLinear(Steps(3125))
    dropped = albert(preset("bert-tiny")).encoder
    assert isinstance(dropped, EncoderConfig)
    assert (dropped.dropout.hidden, dropped.dropout.attention) == (0, 0)


def test_spanbert_is_the_papers() -> None:
    """Section 4.2: 256 × 512 tokens, in sequences that end with their document; section 3.1."""
    made = spanbert(preset("bert-large"))
    assert isinstance(made.objective, MaskedLMSpanBoundary)
    assert made.objective.segments == FullSentences(cross=False)
    masking = made.objective.masking
    assert (masking.rate, masking.decided_by) == (0.15, "unit")
    assert masking.unit == Spans(stop=0.2, longest=10)
    assert round(float(Spans().lengths @ np.arange(1, 11)), 1) == 3.8
    assert made.batch == TokenBudget(131_072)
    assert (made.training.until, made.training.clip_norm) == (Steps(2_400_000), 1.0)
    assert made.training.optimizer == AdamW(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, decay=0.1)
    assert made.training.schedule == Linear(Steps(10_000))


@pytest.mark.parametrize("size", ["deberta-base", "deberta-large"])
def test_deberta_is_the_papers(size: str) -> None:
    """Table 8."""
    made = deberta(preset(size))
    assert made.encoder == preset(size)
    assert (made.encoder.dropout.hidden, made.encoder.dropout.attention) == (0.1, 0.1)
    masking = Masking(0.15, unit=NGrams(3), replacements=AnyToken())
    assert (made.objective, made.batch) == (MaskedLM(masking=masking), ExampleBudget(2048))
    assert (made.training.until, made.training.clip_norm) == (Steps(1_000_000), 1.0)
    assert made.training.optimizer == AdamW(lr=2e-4, betas=(0.9, 0.999), eps=1e-6, decay=0.01)
    assert made.training.schedule == Linear(Steps(10_000))


def test_electra_is_the_small_size_of_the_paper_and_the_code() -> None:
    """Appendix A; google-research/electra, configure_pretraining.py."""
    made = electra(preset("electra-small"))
    assert isinstance(made.objective, ReplacedTokens)
    assert (made.objective.generator, made.objective.replaced) == (Narrower(0.25), 50)
    assert made.objective.masking.rate == 0.15
    assert (made.batch, [phase.length for phase in made.phases]) == (ExampleBudget(128), [128])
    assert (made.training.until, made.training.clip_norm) == (Steps(1_000_000), 1.0)
    assert made.training.optimizer == BertAdam(lr=5e-4, betas=(0.9, 0.999), eps=1e-6, decay=0.01)
    assert made.training.schedule == GoogleLinear(Steps(10_000))


@pytest.mark.parametrize("recipe", [roberta, albert, spanbert])
def test_a_small_encoder_reads_all_its_positions(recipe) -> None:  # type: ignore[no-untyped-def]
    encoder = EncoderConfig(100, 32, 1, 2, 64, position=Learned(40))
    assert [phase.length for phase in recipe(encoder).phases] == [40]


def test_the_command_knows_every_recipe() -> None:
    known = inspect.signature(pretrain).parameters["recipe"].annotation
    assert all(repr(name) in known for name in RECIPES)


@pytest.mark.parametrize(
    ("recipe", "model", "name", "words"),
    [
        ("roberta", "roberta-base", "RobertaForMaskedLM", []),
        ("roberta", "roberta-base", "RobertaForMaskedLM", ["objective.segments.cross=false"]),
        ("albert", "albert-base-v2", "AlbertForPreTraining", []),
        ("spanbert", "bert-tiny", "BertForMaskedLM", []),
        ("electra", "bert-tiny", "ElectraForPreTraining", []),
        ("deberta", "deberta-base", "DebertaForMaskedLM", []),
    ],
)
def test_what_a_recipe_saves_opens_in_transformers(
    byte_corpus: Corpus,
    corpus: Corpus,
    tmp_path: Path,
    recipe: str,
    model: str,
    name: str,
    words: list[str],
) -> None:
    text = byte_corpus if recipe == "roberta" else corpus
    options = ["--model", model, "--recipe", recipe, "--device", "cpu", "--out", str(tmp_path)]
    app(["pretrain", str(text.folder), *SMALL, *words, *options], result_action="return_value")
    folder = tmp_path / "model"
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    _, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("name", ["gpt2", "elmo-small"])
def test_a_recipe_for_other_models_says_which_recipes_fit(name: str) -> None:
    """To set an objective, as its own message advises, does not help."""
    for recipe, make in RECIPES.items():
        if recipe in ("modern", "short", "paper"):
            assert settings_of(recipe, preset(name)) == make(preset(name))
            continue
        with pytest.raises(ConfigError, match=f"recipe: the objective of '{recipe}' is for other"):
            settings_of(recipe, preset(name))
