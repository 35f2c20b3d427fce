"""Recipes as data: for an encoder, each is a complete `PretrainConfig`.

`modern` and `short` are for one machine; the others are the settings of papers and of their code.
Their warm-up and their phases are shares of the run, so that a run of any length, in any unit, has
them: of the papers' own lengths they are the papers' numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from bothways.core.config.reader import replaced_members
from bothways.core.config.values import require_choice
from bothways.core.errors import ConfigError, argument, setting
from bothways.data.loader import BatchSize, ExampleBudget, TokenBudget, TokenRamp
from bothways.data.masking import AnyToken, Masking, NGrams, RareTokens
from bothways.data.segments import FullSentences
from bothways.model.config import EncoderConfig, Readout, with_vocabulary
from bothways.model.families.catalogue import PRESETS, family_for, preset
from bothways.model.families.electra import READOUT
from bothways.model.positions import Learned, Rotary
from bothways.objectives.distillation import Distillation, Relations
from bothways.objectives.gpt_bert import GPTBERT
from bothways.objectives.masked_lm import MaskedLM, MaskedObjective, with_masking
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import ReplacedTokens, Shallower
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.objectives.span_boundary import MaskedLMSpanBoundary
from bothways.pretraining import PretrainRecipe, build
from bothways.pretraining.config import PretrainConfig, PretrainPhase, default_objective
from bothways.pretraining.forecast import memory_demand
from bothways.training.optimizers import AdamW, BertAdam, Lamb, StableAdamW
from bothways.training.run import Training
from bothways.training.schedules import WSD, Epochs, GoogleLinear, Hours, Linear, Steps, Tokens

SHORT_BUDGET = Hours(0.5)
"""The longest run for which `short` is the better recipe (docs/decisions/007)."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a run for any encoder: called with one, it returns the complete config.

    Attributes:
        objective: None for the default objective of the encoder.
        masking: the tokens that the default objective predicts; None for its own masking.
        phases: sequence lengths, one after the other; one phase of 512 tokens by default.
        shortened: whether phases beyond the encoder's positions are cut to them; else an error.
        shape: the encoder → the one that is trained, such as without dropout.
        detector: a preset for models that detect replaced tokens; None for other objectives.
        early: whether the first phases, masking and batch are for random weights only.
    """

    training: Training
    batch: BatchSize
    objective: Objective | None = None
    masking: Masking | None = None
    phases: tuple[PretrainPhase, ...] = (PretrainPhase(512),)
    shortened: bool = True
    shape: Callable[[EncoderConfig], EncoderConfig] = lambda encoder: encoder
    settings: Mapping[str, Any] = field(default_factory=dict)
    detector: str | None = None
    early: bool = False

    def __call__(self, encoder: EncoderConfig) -> PretrainConfig:
        """Return the settings of a run that trains this encoder.

        Raises:
            ConfigError: they do not fit the encoder.
        """
        objective = self.objective or with_masking(default_objective(encoder), self.masking)
        phases = tuple(
            dataclasses.replace(
                phase,
                length=min(phase.length, encoder.max_positions) if self.shortened else phase.length,
                bases=phase.bases if isinstance(encoder.position, Rotary) else None,
                # Another objective, such as causal, has only its own segments.
                segments=phase.segments if isinstance(objective, MaskedObjective) else None,
            )
            for phase in self.phases
        )
        return PretrainConfig(
            encoder=self.shape(encoder), training=self.training, objective=objective, phases=phases,
            batch=self.batch, **self.settings,
        )  # fmt: skip


RARELY: dict[str, Any] = {"report": Steps(100), "evaluate": Steps(10_000), "save": Steps(10_000)}
"""Few records, for trainings of many updates."""


def _without_dropout(encoder: EncoderConfig) -> EncoderConfig:
    rates = encoder.dropout
    # None stays: embeddings then have the rate of the other places.
    embedding = None if rates.embedding is None else 0.0
    rates = dataclasses.replace(rates, hidden=0.0, attention=0.0, embedding=embedding)
    return encoder.with_dropout(rates, mlp=0.0)


def _google_training(rate: float) -> Training:
    """Return the training of Google's code: a million updates, the first 1 % as warm-up."""
    optimizer = BertAdam(lr=rate, betas=(0.9, 0.999), eps=1e-6, decay=0.01)
    return Training(Steps(1_000_000), optimizer, GoogleLinear(0.01), **RARELY)


def _adam_training(
    updates: int,
    warmup: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    decay: float = 0.01,
    clip_norm: float | None = 1.0,
) -> Training:
    """Return a training by Adam whose rate rises for some updates, then falls linearly."""
    optimizer, schedule = AdamW(lr, betas, eps, decay), Linear(warmup / updates)
    return Training(Steps(updates), optimizer, schedule, clip_norm=clip_norm, **RARELY)


paper = Recipe(
    training=_google_training(1e-4),
    batch=ExampleBudget(256),
    masking=Masking(0.15, mask=0.8, random=0.1, replacements=AnyToken()),
    phases=(PretrainPhase(128, 0.9), PretrainPhase(512, 0.1)),
    shortened=False,
    shape=lambda encoder: dataclasses.replace(encoder, activation="gelu_tanh"),
    settings={"data_copies": 10},
)
"""The paper's settings (Devlin et al. 2018, appendix A.2) with those of its code: GELU by tanh,
Adam without bias correction.

A million steps of 256 sequences; 90 % of them at 128 tokens, the rest at 512; ten versions of the
data.
"""

modern = Recipe(
    training=Training(
        until=Epochs(1.0),
        optimizer=AdamW(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, decay=0.01),
        schedule=Linear(0.06),
        evaluate=Steps(1000),
        save=Steps(1000),
    ),
    # Small updates until a model has left word frequencies behind, large ones for speed then.
    batch=TokenRamp(512, 8192, over=8_000_000),
    masking=Masking(0.4),
    phases=(
        PretrainPhase(16, 0.4, FullSentences()), PretrainPhase(64, 0.3), PretrainPhase(128, 0.3)
    ),
    shape=_without_dropout,
    early=True,
)  # fmt: skip
"""Modern settings for one machine: no dropout, fresh masks in every epoch, 40 % of the tokens
masked, short sequences and small updates at first.

That short runs want no dropout and a higher rate is from Izsak et al. 2021 and Geiping & Goldstein
2022, 40 % from Wettig et al. 2022; the lengths and the ramp are measured
(docs/decisions/071-modern-begins-short.md).
"""

short = dataclasses.replace(
    modern,
    training=dataclasses.replace(
        modern.training,
        until=Hours(5 / 60),
        optimizer=AdamW(lr=1e-3, betas=(0.9, 0.98), eps=1e-6, decay=0.01),
    ),
    batch=TokenBudget(512),
    phases=(PretrainPhase(16, 0.5, FullSentences()), PretrainPhase(64, 0.5)),
    settings={"evaluation_tokens": 20_000},
)
"""For minutes on a CPU: many small updates, on short sequences at first.

The second half reads 64 tokens. In five minutes a small BERT gets below the unigram baseline.
"""

GPU_TOKENS = 128 * 128
"""Tokens of an update on a GPU. Beside an H200, launching the kernels of a step of BERT-base takes
37 ms, and reading as many tokens 41: fewer would make no more updates."""
GPU_RAMP = TokenRamp(GPU_TOKENS, 16 * GPU_TOKENS, over=1_000_000_000)
"""To half of the 4,096 sequences at which Izsak et al. 2021 and Geiping & Goldstein 2022 end a day
on one GPU."""
GPU_MICROBATCH = 65_536
"""More tokens at once take more memory and are no faster."""
NARROW = 512
"""Up to this width the rate on a GPU is that of `short`: wider models, with LayerNorm after the
residual, do not bear it."""
_GPU_TRAINING = dataclasses.replace(modern.training, schedule=Linear(0.1))
ON_GPU = {
    "modern": dataclasses.replace(
        modern, training=_GPU_TRAINING, batch=GPU_RAMP, phases=(
            PretrainPhase(16, 0.1, FullSentences()), PretrainPhase(128, 0.8),
            PretrainPhase(512, 0.1),
        ),
    ),
    "short": dataclasses.replace(
        short,
        training=dataclasses.replace(_GPU_TRAINING, until=short.training.until),
        batch=TokenBudget(GPU_TOKENS),
        phases=(PretrainPhase(16, 0.2, FullSentences()), PretrainPhase(128, 0.8)),
        settings={},
    ),
}  # fmt: skip
"""The same with updates and sequences that fill a GPU. Sentences of 16 tokens come first here, too:
with them a model leaves word frequencies behind (decision 007). What they reach there in minutes is
not known (decision 120)."""

electra = Recipe(
    training=_google_training(5e-4),
    batch=ExampleBudget(128),
    objective=ReplacedTokens(),
    phases=(PretrainPhase(128),),
    settings={"evaluation_masking": ReplacedTokens().masking},
    shape=lambda encoder: _with_heads(encoder, ReplacedTokens()),
    detector="electra-small",
)
"""The settings of ELECTRA-small (Clark et al. 2020, appendix A, and its code).

A million updates of 128 sequences of 128 tokens. The larger sizes have 512 tokens and 2e-4: base
766,000 updates of 256 sequences and a generator of a third (`objective.generator.share`), large
400,000 updates of 2,048 sequences with 25 % masked. In Google's code the warm-up multiplies the
falling rate: a difference of 1 % at most, at its end.

The heads are ELECTRA's, also with the shape of a BERT.
"""

roberta = Recipe(
    training=_adam_training(500_000, 24_000, lr=6e-4, betas=(0.9, 0.98), clip_norm=None),
    batch=ExampleBudget(8192),
    objective=MaskedLM(),
)
"""The settings of RoBERTa base (Liu et al. 2019, table 9): full sentences, masked LM alone, new
masks in every epoch.

The rate of 6e-4 belongs to 8,192 sequences of 512 tokens. For other batches, fairseq's README has
1e-4 (256 sequences), 5e-4 (2,048) and 7e-4 (8,192). Dropout is the encoder's, 0.1 in RoBERTa's
presets.
"""

albert = Recipe(
    training=Training(
        Steps(125_000),
        Lamb(lr=0.00176, betas=(0.9, 0.999), eps=1e-6, decay=0.01),
        GoogleLinear(0.025),  # 3,125 updates
        **RARELY,
    ),
    batch=ExampleBudget(4096),
    objective=MaskedLMSentenceOrder(masking=Masking(0.15, unit=NGrams(3), replacements=AnyToken())),
    shape=_without_dropout,
    settings={"data_copies": 40},
)
"""The settings of ALBERT (Lan et al. 2019; google-research/albert): sentence order, n-grams masked,
LAMB, no dropout in the encoder.

The rate of 1.76e-3 belongs to 4,096 sequences of 512 tokens. 15 % of the tokens are masked; the
command in Google's README limits them to 20, which is 3.9 % of 512. Dropout is 0 as in version 2;
the paper removes it only from its largest model (section 4.8).
"""

spanbert = Recipe(
    training=_adam_training(2_400_000, 10_000, lr=1e-4, eps=1e-8, decay=0.1),
    batch=TokenBudget(256 * 512),
    objective=MaskedLMSpanBoundary(segments=FullSentences(cross=False)),
)
"""The settings of SpanBERT large (Joshi et al. 2019, section 4.2): spans masked, their tokens
predicted from the borders too, one segment that ends with its document.

The rate of 1e-4 belongs to 131,072 tokens: 256 sequences of 512, about 390 of the paper's corpus,
whose documents may be shorter. The decay is the paper's; the authors' commands have 0.01. They
train the base size for 300,000 updates of eight times as many tokens at 5e-4.
"""

deberta = Recipe(
    training=_adam_training(1_000_000, 10_000, lr=2e-4),
    batch=ExampleBudget(2048),
    objective=MaskedLM(masking=Masking(0.15, unit=NGrams(3), replacements=AnyToken())),
)
"""The settings of DeBERTa base and large (He et al. 2020, appendix A.3, table 8): masked LM alone,
n-grams of up to three words masked.

The rate of 2e-4 belongs to 2,048 sequences of 512 tokens. The paper's ablations, of the base size,
have 1e-4 for 256; its model of 1.5 billion parameters has 1.5e-4 for 2,048. The masks have the
lengths of DeBERTa's code, which cuts them from left to right, so that the end of a sequence is
hardly ever predicted; here all parts are predicted alike.
"""

deberta_v3 = Recipe(
    training=_adam_training(500_000, 10_000, lr=6e-4, betas=(0.9, 0.98)),
    batch=ExampleBudget(8192),
    objective=ReplacedTokens(generator=Shallower(0.5), sharing="disentangled"),
    settings={"evaluation_masking": ReplacedTokens().masking},
    detector="deberta-v3-small",
)
"""The settings of DeBERTa version 3, base and small (He et al. 2021): replaced tokens, a generator
of half the depth, disentangled embeddings.

The rate of 6e-4 belongs to 8,192 sequences of 512 tokens; the large size has 3e-4. The factor of
the discriminator's loss is the paper's, 50; the default of the public code is 10.
"""

modernbert = Recipe(
    training=Training(
        Tokens(2_019_000_000_000),
        StableAdamW(lr=8e-4, betas=(0.9, 0.98), eps=1e-6, decay=1e-5 / 8e-4),
        WSD(warmup=3 / 2019, decay=50 / 2019, shape="sqrt"),
        clip_norm=None,
        **RARELY,
    ),
    batch=TokenRamp(768 * 1024, 4608 * 1024, over=50_000_000_000),
    objective=MaskedLM(
        masking=Masking(0.3, replacements=AnyToken()), segments=FullSentences(cross=False)
    ),
    phases=(
        PretrainPhase(1024, 1719 / 2019, bases=(10_000.0,)),
        PretrainPhase(8192, 250 / 2019, rate=3 / 8),
        PretrainPhase(8192, 50 / 2019, rate=3 / 8),
    ),
)
"""The settings of ModernBERT base (Warner et al. 2024, appendix A, table 3, and its code).

1,719 billion tokens in sequences of 1,024 with one base of rotary positions, 250 of 8,192 with the
base of global layers at 160,000 and a rate of 3e-4, and 50 in which the rate falls as 1 − √. The
last phase reads a better mixture: `phases.2.mixture`, for several corpora. The decay of 1e-5 is of
each update at the peak rate, whatever that rate is; here decay is multiplied by the rate. The large
size has 5e-4. The authors also drop 10 % of the outputs of attention; transformers' class has one
rate for these and for the probabilities.
"""

BABYLM = tuple(1_000_000 * n for n in (*range(1, 10), *range(10, 101, 10)))
"""The checkpoints of the track strict-small: every million words, then every ten millions."""
babylm = dataclasses.replace(
    modern,
    training=dataclasses.replace(modern.training, until=Epochs(10.2)),
    objective=GPTBERT(masking=Masking(0.3, unit=NGrams(3), decided_by="unit"), z_loss=1e-4),
    phases=tuple(
        PretrainPhase(length, share, masking=Masking(rate, unit=NGrams(3), decided_by="unit"))
        for length, share, rate in (
            (16, 0.1, 0.3),
            (128, 0.6, 0.25),
            (256, 0.2, 0.2),
            (512, 0.1, 0.15),
        )
    ),
    settings={"word_milestones": BABYLM},
)
"""GPT-BERT for the track strict-small of BabyLM: ten million words, each read ten times, with the
model saved after every million, then every ten millions.

The lengths, the falling share of masked tokens and the factor of the normaliser are those of
Charpentier and Samuel 2024; updates and rate are those of `modern`, since LAMB at 1.4e-2 belongs to
8,192 sequences, of which a hundred million words make a hundred. A hundredth of the documents is
held out: the words of 10 epochs are a little fewer, hence 10.2.
"""

RECIPES: dict[str, Recipe] = {name: globals()[name] for name in get_args(PretrainRecipe)}
"""The recipes above, by the names that commands and `bothways.pretrain` take."""


def _with_heads(encoder: EncoderConfig, objective: Objective) -> EncoderConfig:
    """Return the shape of a BERT with ELECTRA's heads if it is to detect replaced tokens."""
    if not isinstance(objective, ReplacedTokens):
        return encoder
    detector = dataclasses.replace(encoder, readout=READOUT)
    family = family_for(detector)
    fits = family is not None and family.architecture_with(["replaced"]) is not None
    return detector if fits and encoder.readout == Readout() else encoder


def distilbert(encoder: EncoderConfig, teacher: str) -> PretrainConfig:
    """Return the settings of DistilBERT's code: soft targets at temperature 2, masked LM, cosine.

    Weights 5, 2 and 1; rare tokens are masked more often; three epochs of 4,000 sequences an
    update, at 5e-4. The batch is what its README adds up to on eight GPUs, about.

    Source: huggingface/transformers-research-projects, distillation; Sanh et al. 2019.
    """
    recipe = Recipe(
        training=Training(
            until=Epochs(3.0),
            optimizer=AdamW(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, decay=0.0),
            schedule=Linear(0.05),
            clip_norm=5.0,
            evaluate=Steps(1000),
            save=Steps(1000),
        ),
        batch=ExampleBudget(4000),
        objective=Distillation(  # with its losses by default
            teacher, masking=Masking(unit=RareTokens(0.7), replacements=AnyToken())
        ),
    )
    return recipe(encoder)


def minilm(encoder: EncoderConfig, teacher: str) -> PretrainConfig:
    """Return the settings of MiniLMv2 (Wang et al. 2020): relations of one layer, no masks.

    400,000 updates of 256 sequences of 512 tokens at 6e-4. 48 relation heads, 64 for a teacher of
    1,024 features or more, or the most that divide both widths. Of a teacher with 24 layers, the
    21st, or the 19th of a RoBERTa; of others, the last. (Both numbers are from summaries of the
    paper and settings of other code, not from its text.)
    """
    source = build.start_encoder(teacher)
    max_heads = 64 if source.width >= 1024 else 48
    common = math.gcd(encoder.width, source.width)
    heads = max(n for n in range(1, max_heads + 1) if common % n == 0)
    layer = None
    if source.depth == 24:
        offset = isinstance(source.position, Learned) and source.position.offset
        layer = 19 if offset else 21
    recipe = Recipe(
        training=_adam_training(400_000, 4_000, lr=6e-4),
        batch=ExampleBudget(256),
        objective=Distillation(teacher, (Relations(1.0, heads, layer),), masking=None),
    )
    return recipe(encoder)


DISTILLING = {"distilbert": distilbert, "minilm": minilm}
"""The recipes that also need a teacher."""


def distillation(
    teacher: str, student: str | None = None, recipe: str | None = None
) -> PretrainConfig:
    """Return the settings of a run in which a student learns from a teacher.

    A student that differs from the teacher in depth alone starts from the teacher's layers, spread
    from the first to the last: DistilBERT's start. One from a folder starts from its weights, any
    other at random.

    Args:
        teacher: a model folder, the folder of a run, or a Hub id.
        student: a preset, which gets the teacher's vocabulary, or a model folder; None for half of
            the teacher's layers.
        recipe: "distilbert" or "minilm"; None for the first.

    Raises:
        ConfigError: an unknown recipe, or a loss of the recipe does not fit the two.
        FolderError: a folder cannot be read.
    """
    recipe = recipe or "distilbert"
    if recipe not in DISTILLING:
        message, fix = f"unknown recipe {recipe!r}", f"Choose one of {', '.join(DISTILLING)}."
        raise ConfigError(message, where="recipe", fix=fix)
    source = build.start_encoder(teacher)
    if student is None:
        encoder: EncoderConfig = dataclasses.replace(source, depth=max(1, source.depth // 2))
    elif student in PRESETS:
        encoder = with_vocabulary(preset(student), source.vocab, source.pad)
    else:
        encoder = build.start_encoder(student)
    settings = DISTILLING[recipe](encoder, teacher)
    # No sequence is longer than what both read.
    limit = source.max_positions
    phases = tuple(dataclasses.replace(p, length=min(p.length, limit)) for p in settings.phases)
    settings = dataclasses.replace(settings, phases=phases)
    if student is not None and student not in PRESETS:
        return dataclasses.replace(settings, start=student)
    if source.sharing is not None or build.layer_differences(source, encoder):
        return settings
    layers = build.spread_layers(encoder.depth, source.depth)
    return dataclasses.replace(settings, start=teacher, start_layers=layers)


def settings_of(
    recipe: str, encoder: EncoderConfig, start: str | None = None, *, gpu: bool = False
) -> PretrainConfig:
    """Return the settings of a recipe for a model.

    Args:
        gpu: whether the run is on a GPU, which `modern` and `short` then fill.
        start: a model folder or Hub id whose weights the run starts from, with `encoder` its
            configuration. `modern` and `short` then read the longest sequences from the first
            update on, with 15 % masked: their beginning is for random weights.

    Raises:
        ConfigError: no such recipe, or its objective does not fit the encoder.
    """
    require_choice(PretrainRecipe, "recipe", recipe)
    make = RECIPES[recipe]
    if gpu and recipe in ON_GPU:
        make = ON_GPU[recipe]
        # The rate of `short`, see NARROW.
        if encoder.width <= NARROW:
            training = dataclasses.replace(make.training, optimizer=short.training.optimizer)
            make = dataclasses.replace(make, training=training)
    try:
        settings = make(encoder)
    except ConfigError as error:
        if error.where != "objective":
            raise
        message = f"the objective of {recipe!r} is for other models: {error.what}"
        objective = setting("objective", default_objective(encoder).kind)
        fix = f"Choose another model, or {argument(recipe='modern')} and {objective}."
        raise ConfigError(message, where="recipe", fix=fix) from error
    if start is None:
        return settings
    # Phases and masks that help a model in its first updates are not for a trained one.
    if make.early:
        settings = dataclasses.replace(
            settings,
            phases=(dataclasses.replace(settings.phases[-1], share=1.0),),
            objective=with_masking(settings.objective, Masking()),
            batch=TokenBudget(settings.batch.n),
        )
    return dataclasses.replace(settings, encoder=encoder, start=start)


def _changed(
    recipe: str,
    encoder: EncoderConfig,
    start: str | None,
    change: Callable[[PretrainConfig], PretrainConfig],
    gpu: bool,
) -> tuple[PretrainConfig, PretrainConfig]:
    """Return the settings of a recipe, and those after `change`: heads follow the objective."""
    base = settings_of(recipe, encoder, start, gpu=gpu)
    settings = change(base)
    if start is not None:
        return base, settings
    if settings.objective.kind == base.objective.kind:
        detector = RECIPES[recipe].detector
        family = None if detector is None else family_for(settings.encoder)
        if family and detector and family.architecture_with(["replaced"]) is None:
            message = f"transformers has no {family.model_type} that detects replaced tokens"
            fix = f"Choose another shape: {argument(model=detector)}."
            raise ConfigError(message, where="model", fix=fix)
        return base, settings
    heads = _with_heads(encoder, settings.objective)
    shape = dataclasses.replace(base.encoder, readout=heads.readout)
    base = dataclasses.replace(base, encoder=shape)
    return base, change(base)


def chosen_settings(
    recipe: str | None,
    encoder: EncoderConfig,
    start: str | None,
    change: Callable[[PretrainConfig], PretrainConfig],
    gpu_memory: float | None = None,
    file: Path | None = None,
) -> tuple[PretrainConfig, list[str]]:
    """Return the settings of a recipe after `change`, and notes on what was chosen.

    Args:
        recipe: None for the usual one for the length of the changed run.
        gpu_memory: the bytes of the GPU of the run; None on a CPU.
        file: the TOML file that `change` reads.
    """
    name, notes, gpu = recipe or "modern", list[str](), gpu_memory is not None
    base, settings = _changed(name, encoder, start, change, gpu)
    until = settings.training.end
    if recipe is None and isinstance(until, Hours) and until.count <= SHORT_BUDGET.count:
        base, settings = _changed("short", encoder, start, change, gpu)
        notes.append(f"note: the recipe short, for a budget of {until}")
    if gpu_memory is not None:
        most = memory_demand(settings).largest_microbatch(gpu_memory, torch.device("cuda"))
        most = min(most, GPU_MICROBATCH)
        if most:  # else the run says that not one sequence fits
            base = dataclasses.replace(base, microbatch_tokens=1 << most.bit_length() - 1)
            settings = change(base)
    replaced = replaced_members(settings, base, file)
    return settings, [*notes, *(f"note: {note}" for note in replaced)]
