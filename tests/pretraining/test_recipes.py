"""The recipes of BERT's descendants: their values, and the classes of what they save."""

import dataclasses
import itertools
import json
import re
import typing

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bothways.core.errors import BothwaysError, ConfigError, interface, render, report_findings
from bothways.core.source import Cursor
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import Corpora
from bothways.data.loader import ExampleBudget, TokenBudget, TokenRamp
from bothways.data.masking import AnyToken, CorpusToken, Masking, NGrams, Spans
from bothways.data.segments import FullSentences, NextSentence
from bothways.hub.model_folder import load_model
from bothways.model.config import Dropouts
from bothways.model.families.catalogue import PRESETS, family_for, preset
from bothways.model.heads import ReplacedHead
from bothways.model.positions import Learned
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence, with_masking
from bothways.objectives.replaced_tokens import Narrower, ReplacedTokens
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.objectives.span_boundary import MaskedLMSpanBoundary
from bothways.pretraining.build import (
    build_training_module,
    check_class,
    fit_to_corpus,
    layer_differences,
    loader_of,
    vocabulary_of,
)
from bothways.pretraining.config import (
    AnyObjective,
    PretrainConfig,
    PretrainPhase,
    default_objective,
    load_pretraining,
)
from bothways.pretraining.forecast import memory_demand
from bothways.pretraining.recipes import (
    GPU_RAMP,
    NARROW,
    RECIPES,
    chosen_settings,
    modern,
    settings_of,
)
from bothways.pretraining.run import pretrain
from bothways.training.checkpoint import checkpoints
from bothways.training.optimizers import AdamW, BertAdam, Lamb, Muon, StableAdamW
from bothways.training.parallel import Plan
from bothways.training.schedules import (
    Cosine,
    GoogleLinear,
    Linear,
    RunState,
    Steps,
    Tokens,
    rate_factor,
)
from commands import run_line
from spread import in_turn
from toy_corpora import write_bytes
from toy_pretraining import small_encoder, small_run
from toy_training import equal, metric_lines, stop_at

SMALL = [
    "encoder.depth=2", "encoder.width=32", "encoder.heads=2", "encoder.intermediate_size=64",
    "encoder.position.max_positions=64", "training.until=2 steps", "training.precision=fp32",
    "training.schedule.warmup=0.1", "batch.n=8", "held_out=0.1", "evaluation_tokens=400",
    "phases.0.length=48",
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_corpus(tmp_path_factory) -> Corpus:
    return write_bytes(tmp_path_factory.mktemp("made") / "c")


def test_modern_begins_with_short_sequences_and_small_updates_from_random_weights_alone():
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


def test_modern_has_no_dropout_in_any_preset_and_keeps_its_family():
    for name in PRESETS:
        encoder = settings_of("modern", preset(name)).encoder
        rates = (encoder.dropout.hidden, encoder.dropout.attention, encoder.dropout.embedding)
        assert not any(rates), name
        assert not getattr(encoder.mlp, "dropout", 0.0), name  # inside GTE's gated layers
        assert family_for(encoder) is family_for(preset(name))
    embedded = preset("bert-tiny").with_dropout(Dropouts(embedding=0.2), mlp=0.0)
    assert settings_of("modern", embedded).encoder.dropout == Dropouts(0.0, 0.0, 0.0)


def test_layers_of_a_model_with_other_dropout_in_gated_layers_are_the_same():
    encoder = preset("gte-base-en-v1.5")
    other = encoder.with_dropout(Dropouts(0.3, 0.2), mlp=0.3)
    assert layer_differences(encoder, other) == []
    assert "mlp" in layer_differences(preset("bert-base"), encoder)


N_GRAMS = Masking(0.15, unit=NGrams(3), replacements=AnyToken())
SPANS = Masking(
    0.15, unit=Spans(stop=0.2, longest=10), replacements=CorpusToken(), decided_by="unit"
)
OF_PAPERS = {
    "paper": (  # appendix A.2; google-research/bert, run_pretraining.py
        "bert-base", MaskedLMNextSentence(masking=Masking(0.15, replacements=AnyToken())),
        ExampleBudget(256), Steps(1_000_000),
        BertAdam(lr=1e-4, betas=(0.9, 0.999), eps=1e-6, decay=0.01), GoogleLinear(0.01),
    ),
    "electra": (  # appendix A; google-research/electra, configure_pretraining.py
        "electra-small", ReplacedTokens(generator=Narrower(0.25)), ExampleBudget(128),
        Steps(1_000_000), BertAdam(lr=5e-4, betas=(0.9, 0.999), eps=1e-6, decay=0.01),
        GoogleLinear(0.01),
    ),
    "roberta": (
        "roberta-base", MaskedLM(), ExampleBudget(8192), Steps(500_000),
        AdamW(lr=6e-4, betas=(0.9, 0.98), eps=1e-6, decay=0.01), Linear(0.048),
    ),
    "albert": (
        "bert-base", MaskedLMSentenceOrder(masking=N_GRAMS), ExampleBudget(4096),
        Steps(125_000), Lamb(lr=0.00176, betas=(0.9, 0.999), eps=1e-6, decay=0.01),
        GoogleLinear(0.025),
    ),
    "spanbert": (  # sections 3.1 and 4.2: 256 × 512 tokens; sequences end with their document
        "bert-large", MaskedLMSpanBoundary(FullSentences(cross=False), SPANS),
        TokenBudget(131_072), Steps(2_400_000),
        AdamW(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, decay=0.1), Linear(1 / 240),
    ),
    "deberta": (  # table 8
        "deberta-large", MaskedLM(masking=N_GRAMS), ExampleBudget(2048), Steps(1_000_000),
        AdamW(lr=2e-4, betas=(0.9, 0.999), eps=1e-6, decay=0.01), Linear(0.01),
    ),
}  # fmt: skip
"""A model, the objective, the batch, the length, the optimizer and the schedule."""
PHASES = {
    "paper": (PretrainPhase(128, 0.9), PretrainPhase(512, 0.1)),
    "electra": (PretrainPhase(128),),
}
"""Of all others one phase of 512 tokens."""


@pytest.mark.parametrize("recipe", OF_PAPERS)
def test_a_recipe_is_its_papers(recipe):
    model, *expected = OF_PAPERS[recipe]
    made, encoder = RECIPES[recipe](preset(model)), preset(model)
    training = made.training
    settings = training.until, training.optimizer, training.schedule
    assert [made.objective, made.batch, *settings] == expected
    assert made.data_copies == {"albert": 40, "paper": 10}.get(recipe)
    assert made.phases == PHASES.get(recipe, (PretrainPhase(512),))
    assert training.clip_norm == (None if recipe == "roberta" else 1.0)
    if recipe == "albert":
        dropout = dataclasses.replace(encoder.dropout, hidden=0.0, attention=0.0)
        encoder = dataclasses.replace(encoder, dropout=dropout)
    if recipe == "paper":
        encoder = dataclasses.replace(encoder, activation="gelu_tanh")
    assert made.encoder == encoder


def test_the_factor_of_replaced_tokens_is_electras():
    assert (ReplacedTokens().replaced, ReplacedTokens().masking.rate) == (50, 0.15)


def test_spans_have_the_mean_length_of_the_paper():
    assert round(float(Spans().lengths @ np.arange(1, 11)), 1) == 3.8


@pytest.mark.parametrize(
    ("recipe", "model", "name"),
    [
        ("roberta", "roberta-base", "RobertaForMaskedLM"),
        ("albert", "albert-base-v2", "AlbertForPreTraining"),
        ("spanbert", "bert-tiny", "BertForMaskedLM"),
        ("electra", "bert-tiny", "ElectraForPreTraining"),
    ],
)
def test_what_a_recipe_saves_opens_in_transformers(
    byte_corpus, corpus, tmp_path, recipe, model, name
):
    text = byte_corpus if recipe == "roberta" else corpus
    options = ["--model", model, "--recipe", recipe, "--device", "cpu", "--out", str(tmp_path)]
    run_line("pretrain", text.folder, *SMALL, *options)
    folder = tmp_path / "model"
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    _, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def test_a_recipe_for_other_models_says_which_recipes_fit():
    """To set an objective, as its own message advises, does not help."""
    name = "gpt2"
    for recipe, make in RECIPES.items():
        if recipe in ("modern", "short", "paper"):
            assert settings_of(recipe, preset(name)) == make(preset(name))
            continue
        with pytest.raises(ConfigError, match=f"recipe: the objective of '{recipe}' is for other"):
            settings_of(recipe, preset(name))


@pytest.mark.parametrize(
    ("recipe", "updates"),
    [("paper", 10_000), ("electra", 10_000), ("roberta", 24_000), ("albert", 3125),
     ("spanbert", 10_000), ("deberta", 10_000), ("deberta_v3", 10_000)],
)  # fmt: skip
def test_of_its_own_length_a_recipe_has_the_papers_warm_up(recipe, updates):
    model = "deberta-v3-small" if recipe == "deberta_v3" else "bert-mini"
    training = settings_of(recipe, preset(model)).training
    rate = rate_factor(training.schedule, training.end)
    exact = [rate(RunState(steps=steps)) for steps in (1, updates // 5, updates - 1)]
    assert exact == [1 / updates, 0.2, (updates - 1) / updates]


SHAPES = ("bert-mini", "electra-small", "deberta-v3-small", "roberta-base", "gpt2")
KINDS = [member.kind for member in typing.get_args(AnyObjective)]
BUDGETS = ("7 steps", "90000 tokens", "0.5 epochs", "25 seconds", "2 hours")


def start(
    corpus: Corpus, recipe: str | None, model: str, *words: str, until: str = BUDGETS[0]
) -> PretrainConfig:
    """The settings of a run, after all checks of settings that come before its first step."""
    encoder = fit_to_corpus(preset(model), corpus.tokenizer)
    change = lambda base: load_pretraining(base, [f"training.until={until}", *words])  # noqa: E731
    settings, _ = chosen_settings(recipe, encoder, None, change)
    rate_factor(settings.training.schedule, settings.training.end)
    heads = settings.objective.models(settings.encoder)["model"]
    report_findings(check_class(*heads, corpus.tokenizer))
    return settings


def suggested(error: BothwaysError, recipe: str, model: str) -> tuple[str, str, list[str]]:
    """The recipe, the model and the settings of the line that an error names."""
    with interface("command"):
        text = str(error)
    settings = re.findall(r"objective=[a-z_]+", text)[:1]
    recipe, model = (
        found[1] if (found := re.search(rf"--{name} ([a-z0-9_-]+)", text)) else usual
        for name, usual in (("recipe", recipe), ("model", model))
    )
    return recipe, model, [] if f"--model {model}" in text else settings


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_starts_with_each_length(corpus, recipe):
    model = "deberta-v3-small" if recipe == "deberta_v3" else "bert-mini"
    for until in BUDGETS:
        settings = start(corpus, recipe, model, until=until)
        at_half = RunState(steps=4, tokens=45_000, epochs=0.25, seconds=12.5)
        assert rate_factor(settings.training.schedule, settings.training.end)(at_half) > 0
        unit = "1 hours" if "steps" in until else "3 steps"
        with interface("command"), pytest.raises(ConfigError) as caught:
            start(corpus, recipe, model, f"training.schedule.warmup={unit}", until=until)
        line = re.search(
            r"training\.schedule\.warmup=[0-9]+\.[0-9]+", caught.value.message("command")
        )
        start(corpus, recipe, model, line[0], until=until)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_combination_starts_or_names_the_line_that_does(corpus, recipe):
    for model, objective in itertools.product(SHAPES, (None, *KINDS)):
        words = [] if objective is None else [f"objective={objective}"]
        refused: BothwaysError | None = None
        try:
            with interface("command"):
                start(corpus, recipe, model, *words)
        except BothwaysError as error:
            refused = error
        if refused is not None and refused.where == "objective.teacher":
            assert objective == "distillation"
            assert "objective.teacher=" in refused.message("command")
        elif refused is not None:
            other, shape, settings = suggested(refused, recipe, model)
            assert (other, shape, settings) != (recipe, model, words)
            start(corpus, other, shape, *(words if shape != model else []), *settings)


def test_the_shape_of_another_family_is_built_or_named(corpus):
    for recipe, words in (("electra", []), ("modern", ["objective=replaced_tokens"])):
        family = family_for(start(corpus, recipe, "bert-small", *words).encoder)
        assert family.model_type == "electra"
    family = family_for(start(corpus, "electra", "bert-small", "objective=masked_lm_nsp").encoder)
    assert family.model_type == "bert"
    with pytest.raises(ConfigError) as caught:
        start(corpus, "deberta_v3", "bert-small")
    assert 'model="deberta-v3-small"' in str(caught.value.fix)
    [finding] = check_class(preset("bert-small"), [ReplacedHead()], corpus.tokenizer)
    assert "--model deberta-v3-xsmall" in render(str(finding.fix), "command")


def test_a_language_model_takes_the_phases_of_a_recipe_without_their_masks(corpus):
    words = ("objective=causal_lm", "encoder.patterns=causal")
    settings = start(corpus, "babylm", "bert-tiny", *words)
    assert [phase.masking for phase in settings.phases] == [None] * 4
    with pytest.raises(ConfigError, match="hides no tokens"):
        start(corpus, "babylm", "bert-tiny", *words, "phases.0.masking.rate=0.2")


def test_another_objective_keeps_the_recipes_masks_and_notes_tell_the_rest():
    encoder = preset("bert-mini")

    def chosen(*words: str) -> tuple[PretrainConfig, list[str]]:
        return chosen_settings("short", encoder, None, lambda base: load_pretraining(base, words))

    for kind in ("masked_lm", "masked_lm_nsp", "masked_lm_sop"):
        settings, notes = chosen(f"objective={kind}")
        assert (settings.objective.kind, settings.objective.masking.rate) == (kind, 0.4)
        assert notes == []
    settings, notes = chosen("objective=replaced_tokens")
    assert settings.objective.masking == ReplacedTokens().masking
    assert len(notes) == 1
    assert "masking.rate=0.15" in notes[0]
    words = ["objective=replaced_tokens"]
    settings, _ = chosen_settings(
        "short", encoder, "run", lambda base: load_pretraining(base, words)
    )
    assert settings.encoder == encoder  # of a model to start from
    _, notes = chosen("objective=replaced_tokens", "objective.masking.rate=0.2")
    assert notes == []
    settings, notes = chosen("schedule=cosine", "optimizer=bert_adam")
    assert settings.training.schedule == Cosine(0.06)
    assert settings.training.optimizer == BertAdam(lr=1e-3, betas=(0.9, 0.98))
    assert notes == []
    hour = lambda base: load_pretraining(base, ["until=0.2 hours"])  # noqa: E731
    [note] = chosen_settings(None, encoder, None, hour)[1]
    assert "the recipe short" in note
    _, notes = chosen("optimizer=lamb")
    assert len(notes) == 1
    assert "lr=0.00176" in notes[0]


@pytest.mark.parametrize(("model", "memory"), [("modernbert-base", 6e9), ("bert-large", 8e9)])
def test_on_a_small_gpu_fewer_tokens_go_through_the_model_at_once(model, memory):
    change = lambda base: load_pretraining(base, [])  # noqa: E731
    settings, _ = chosen_settings("short", preset(model), None, change, memory)
    assert settings.microbatch_tokens < RECIPES["short"](preset(model)).microbatch_tokens
    assert memory_demand(settings).fits(memory, torch.device("cuda"))
    none_fits, _ = chosen_settings("short", preset(model), None, change, 1e6)
    assert none_fits == settings_of("short", preset(model), gpu=True)


@pytest.mark.parametrize(
    ("recipe", "batch", "run"),
    in_turn(
        [("short", TokenBudget(16_384)), ("modern", GPU_RAMP)],
        [("bert-mini", 24e9), ("bert-large", 141e9)],
    ),
)
def test_updates_fill_a_gpu_and_fit_into_it(recipe, batch, run):
    model, memory = run
    encoder = preset(model)

    def chosen(*words: str, recipe: str = recipe, gpu: float | None = memory) -> PretrainConfig:
        change = lambda base: load_pretraining(base, words)  # noqa: E731
        return chosen_settings(recipe, encoder, None, change, gpu)[0]

    settings = chosen()
    assert settings.batch == batch
    assert [phase.length for phase in settings.phases[:2]] == [16, 128]
    assert sum(phase.share for phase in settings.phases) == pytest.approx(1)
    assert 4096 < settings.microbatch_tokens <= 65_536
    highest = RECIPES["short" if encoder.width <= NARROW else recipe](encoder).training.optimizer
    assert settings.training.optimizer == highest
    assert memory_demand(settings).fits(memory, torch.device("cuda"))
    own = chosen("batch.n=1000000", "microbatch_tokens=512", "lr=3e-4")
    assert (own.batch.n, own.microbatch_tokens, own.training.optimizer.lr) == (1_000_000, 512, 3e-4)
    paper = chosen(recipe="paper")
    assert dataclasses.replace(paper, microbatch_tokens=4096) == chosen(recipe="paper", gpu=None)
    assert chosen(gpu=None) == settings_of(recipe, encoder)


OPTIMIZERS = [Lamb(lr=0.02), StableAdamW(lr=5e-3), Muon(lr=0.02, others=AdamW(lr=5e-3))]


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize(
    "optimizer",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in OPTIMIZERS[:-1]), OPTIMIZERS[-1]],
    ids=lambda config: config.kind,
)
def test_a_run_learns_and_resumes_to_equal_weights(optimizer, precision, corpus, tmp_path):
    """With updates that grow and an average of the weights, which is saved."""
    config = small_run(
        corpus, Tokens(24_000),
        training={
            "optimizer": optimizer, "schedule": Cosine(0.1), "clip_norm": None, "ema": 0.9,
            "report": Steps(1), "save": Steps(7), "precision": precision,
        },
        encoder=small_encoder(corpus, dropout=0.1), objective=MaskedLM(z_loss=1e-3),
        phases=(PretrainPhase(16, 0.3), PretrainPhase(48, 0.7)),
        batch=TokenRamp(200, 1200, 16_000), evaluation_tokens=1500,
    )  # fmt: skip
    done = pretrain(config, corpus, tmp_path / "whole")
    assert done.metrics["held-out/loss/masked"] < done.metrics["unigram/loss/masked"] - 0.1
    assert 0 < done.metrics["held-out/loss/z"] < 200, "without its coefficient"
    with pytest.raises(InterruptedError):
        pretrain(config, corpus, tmp_path / "cut", on_event=stop_at(14))
    again = pretrain(config, corpus, tmp_path / "cut", resume=True)
    assert again.metrics == done.metrics
    saved = [load_model(tmp_path / name / "model").model for name in ("whole", "cut")]
    assert all(equal(model, done.model) for model in saved)
    ours = done.model.state_dict()
    stored = load_file(checkpoints(tmp_path / "whole")[-1] / "model.safetensors")
    name = "encoder.blocks.0.attention.qkv.weight"
    assert torch.equal(ours[name], stored[f"average.model/{name.replace('.', '/')}"])
    assert not torch.allclose(ours[name], stored[f"model.{name}"])
    lines = [line for line in metric_lines(tmp_path / "whole") if "learning_rate" in line]
    read = [0, *(line["tokens"] for line in lines)]
    sizes = [after - before for before, after in itertools.pairwise(read)]
    assert max(sizes[:3]) <= 300
    assert max(sizes) > 1100
    assert all("loss/z" in line for line in lines)


@pytest.mark.parametrize("objective", [MaskedLM(z_loss=0.5), CausalLM(z_loss=0.5)])
def test_the_z_loss_is_a_loss_of_its_own_over_all_predictions(objective, corpus):
    encoder = preset("bert-tiny" if isinstance(objective, MaskedLM) else "gpt2")
    encoder = dataclasses.replace(fit_to_corpus(encoder, corpus.tokenizer), depth=1)
    config = dataclasses.replace(modern(encoder), objective=objective)
    training_module = build_training_module(config, corpus, torch.device("cpu")).eval()
    plain, vocabulary = dataclasses.replace(objective, z_loss=0.0), vocabulary_of(corpus, objective)
    without = plain.training_module(training_module.saved(), vocabulary).eval()
    documents = {"": corpus.split(0.1, 0)[0]}
    loader = loader_of(config, Corpora.of(corpus, None), documents, Plan())
    batch = next(iter(loader.steps(Cursor()))).microbatches[0]
    assert training_module.coefficients == {"z": 0.5}
    assert without.coefficients == {}
    with torch.no_grad():
        losses, others = training_module(batch), without(batch)
    assert losses.keys() == {*others, "z"} == training_module.weights(batch).keys()
    assert all(torch.equal(losses[name].total, loss.total) for name, loss in others.items())
    assert training_module.weights(batch)["z"] == sum(without.weights(batch).values())
    # log Z of a fresh model with small logits is near that of equal logits.
    mean = (losses["z"].total / training_module.weights(batch)["z"]).sqrt().item()
    assert mean == pytest.approx(torch.tensor(corpus.tokenizer.size).log().item(), rel=0.05)


@pytest.mark.parametrize("kind", [MaskedLM, CausalLM])
@pytest.mark.parametrize("coefficient", [-1e-4, float("nan")])
def test_a_z_loss_that_is_subtracted_is_refused(kind, coefficient):
    with pytest.raises(ConfigError, match="must be at least 0") as caught:
        kind(z_loss=coefficient)
    assert caught.value.where == "objective.z_loss"
