"""What a pre-training run is, as one value.

A recipe is a function that returns a complete `PretrainConfig`; a TOML file and dotted overrides
change it; what came out is saved with the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from bothways.core.config import reader as configs
from bothways.core.config.reader import CHANGEABLE, Members
from bothways.core.config.values import (
    Tree,
    read_toml,
    require_at_least,
    require_range,
    require_seed,
)
from bothways.core.errors import ConfigError, argument, setting
from bothways.core.terminal import listed
from bothways.data.corpus_source import Mixture, Smoothed
from bothways.data.loader import BatchSize, TokenBudget
from bothways.data.masking import Masking
from bothways.data.segments import FullSentences, NextSentence, Segments, SentenceOrder
from bothways.model.config import EncoderConfig
from bothways.model.families.family import check_size
from bothways.model.positions import Rotary
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.distillation import Distillation
from bothways.objectives.gpt_bert import GPTBERT
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence, with_masking
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.objectives.span_boundary import MaskedLMSpanBoundary
from bothways.training.optimizers import AdamW, BertAdam, peak_rate
from bothways.training.parallel import Sharding
from bothways.training.run import PEER_NAMES, TRAINING_NAMES, Training, expand_names

AnySegments = FullSentences | NextSentence | SentenceOrder


@dataclass(frozen=True)
class PretrainPhase:
    """A part of the run with sequences of one length.

    Attributes:
        length: the longest sequence, in tokens.
        share: of the run's duration.
        segments: what a sequence is made of; None for the objective's segments.
        masking: which tokens are predicted; None for the objective's masking. A rate that falls in
            the course of a run is a number of phases.
        rate: multiple of the schedule's learning rate.
        bases: of rotary positions, as `encoder.position.bases`; None for the encoder's.
        mixture: how often each of several corpora is read; None for the run's mixture.
    """

    length: int
    share: float = 1.0
    segments: Annotated[Segments | None, Members(AnySegments | None)] = None
    masking: Masking | None = None
    rate: float = 1.0
    bases: tuple[float, ...] | None = None
    mixture: Mixture | None = None


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that decides what a pre-training run computes.

    Attributes:
        encoder: the model.
        training: the optimizer, its schedule, the length of the run, and how often it is evaluated
            and saved.
        objective: what the model learns, from sequences of which segments.
        phases: one after the other; their shares add up to 1.
        batch: sequences or tokens per update, over all ranks; tokens may grow along a ramp.
        microbatch_tokens: the most tokens in memory at once, unless one sequence is longer; changes
            neither data nor update.
        held_out: the share of documents that is never trained on.
        evaluation_tokens: how many tokens of held-out text are scored each time.
        evaluation_masking: the masks of held-out text, for objectives that hide tokens: the same
            whatever is trained on, since losses under different masks do not compare.
        probes: files that the model is scored on at each evaluation, next to held-out text, by the
            accuracy on minimal pairs (a folder, or JSON lines with sentence_good and sentence_bad)
            or of a linear probe (another table with texts and labels). They change no update.
        data_copies: after how many epochs segments and masks repeat (Google's dupe_factor); none
            if never.
        word_milestones: numbers of words of the corpus, ascending; when the run has read one of
            them, its model is saved next to the checkpoints, as chck_3M after three millions.
        mixture: how often each of several corpora is read. None is for one corpus; several are then
            read in smoothed shares.
        sharding: how the ranks of a run share one model; none: each has the whole model; auto: they
            share it only if the memory of one does not suffice. It changes no update.
        seed: of weights, data and dropout.
        start: a model folder or Hub id whose weights the run starts from, with `encoder` its
            configuration, except for dropout; None for random weights.
        start_layers: the layers of `start`, from 1, that become the encoder's, which may
            also lack segments; None for all.
        fresh: heads that `start` lacks and that start at random, such as "masked" for a sentence
            encoder.

    Examples:
        >>> from bothways.pretraining.recipes import modern
        >>> config = modern(bothways.preset("bert-mini"))
        >>> isinstance(config, bothways.PretrainConfig), config.objective.kind
        (True, 'masked_lm_nsp')
    """

    encoder: EncoderConfig
    training: Training
    objective: Annotated[Objective, Members(AnyObjective)] = MaskedLMNextSentence()
    phases: tuple[PretrainPhase, ...] = (PretrainPhase(128),)
    batch: BatchSize = TokenBudget(8192)
    microbatch_tokens: int = field(default=4096, metadata=CHANGEABLE)
    held_out: float = 0.01
    evaluation_tokens: int = field(default=200_000, metadata=CHANGEABLE)
    evaluation_masking: Masking = Masking()
    probes: tuple[str, ...] = field(default=(), metadata=CHANGEABLE)
    data_copies: int | None = None
    word_milestones: tuple[int, ...] = field(default=(), metadata=CHANGEABLE)
    mixture: Mixture | None = None
    sharding: Literal["auto"] | Sharding | None = field(default="auto", metadata=CHANGEABLE)
    seed: int = 0
    start: str | None = None
    start_layers: tuple[int, ...] | None = None
    fresh: tuple[str, ...] = ()

    @property
    def probe_names(self) -> dict[str, str]:
        """The files of probes by their name without endings."""
        return {Path(file).name.split(".")[0]: file for file in self.probes}

    def segments_of(self, phase: PretrainPhase) -> Segments:
        """Return the segments of a phase, its own or the objective's, with its length."""
        segments = phase.segments or self.objective.segments
        return dataclasses.replace(segments, length=phase.length)  # type: ignore[type-var]

    def encoder_of(self, phase: PretrainPhase) -> EncoderConfig:
        """Return the encoder with the rotary bases of a phase."""
        if phase.bases is None:
            return self.encoder
        if not isinstance(self.encoder.position, Rotary):
            message = f"are of rotary positions, and the encoder's are {self.encoder.position.kind}"
            where = f"phases.{self.phases.index(phase)}.bases"
            raise ConfigError(message, where=where, fix="Leave them out.")
        position = dataclasses.replace(self.encoder.position, bases=phase.bases)
        return dataclasses.replace(self.encoder, position=position)

    def objective_of(self, phase: PretrainPhase) -> Objective:
        """Return the objective with the masking of a phase."""
        return with_masking(self.objective, phase.masking)

    def __post_init__(self) -> None:
        require_seed(seed=self.seed)
        require_at_least(1, microbatch_tokens=self.microbatch_tokens)
        require_at_least(1, evaluation_tokens=self.evaluation_tokens)
        milestones = self.word_milestones
        if [*milestones] != sorted({target for target in milestones if target > 0}):
            message = f"must be ascending numbers above 0, not {listed(map(str, milestones))}"
            raise ConfigError(message, where="word_milestones")
        if len(self.probe_names) < len(self.probes):
            message = f"two have one name: {', '.join(self.probes)}"
            raise ConfigError(message, where="probes", fix="Rename one of the files.")
        if self.start_layers is not None and self.start is None:
            message = "names layers of a model that the run does not start from"
            fix = f"Give {argument(start='FOLDER')}, too."
            raise ConfigError(message, where="start_layers", fix=fix)
        if self.fresh and self.start is None:
            message = f"names {', '.join(self.fresh)}, and without start all heads begin at random"
            fix = f"Leave it out, or give {argument(start='FOLDER')}, too."
            raise ConfigError(message, where="fresh", fix=fix)
        check_size(self.encoder, "encoder")
        self.objective.models(self.encoder)  # raises ConfigError if they do not fit
        _ = self.training.end  # raises ConfigError if it is "auto", as for the rate
        if isinstance(self.training.optimizer, AdamW | BertAdam):
            peak_rate(self.training.optimizer)
        total = sum(phase.share for phase in self.phases)
        if abs(total - 1) > 1e-6:
            raise ConfigError(f"the shares add up to {total:g}, not to 1", where="phases")
        for number, phase in enumerate(self.phases):
            self.encoder_of(phase)  # raises ConfigError if it has no rotary positions
            if not 0 < phase.share <= 1 + 1e-6:
                message = f"must be above 0 and at most 1, not {phase.share:g}"
                raise ConfigError(message, where=f"phases.{number}.share")
            require_range("(0, inf)", f"phases.{number}", rate=phase.rate)
            if phase.masking is not None and self.objective.masking is None:
                message = f"the objective {self.objective.kind!r} hides no tokens"
                fix = "Leave it out, or choose another objective."
                raise ConfigError(message, where=f"phases.{number}.masking", fix=fix)
            segments: Any = phase.segments or self.objective.segments
            default = getattr(type(segments), "length", segments.length)
            if segments.length not in (default, phase.length):
                message = f"is {segments.length}, and sequences have the length of their phase"
                where = f"phases.{number}" if phase.segments else "objective"
                fix = f"Set {setting(f'phases.{number}.length', segments.length)} instead."
                raise ConfigError(message, where=f"{where}.segments.length", fix=fix)
            if phase.length > self.encoder.max_positions:
                positions = f"the encoder's {self.encoder.max_positions} positions"
                message = f"sequences of {phase.length} tokens exceed {positions}"
                fix = "Shorten the phase, or set encoder.position.max_positions higher."
                raise ConfigError(message, where=f"phases.{number}.length", fix=fix)


ALL_PEER_NAMES: Mapping[str, str] = {
    **PEER_NAMES, "mlm_probability": "objective.masking.rate",
    "whole_word_mask": "objective.masking.unit", "block_size": "phases.0.length",
    "max_length": "phases.0.length", "max_seq_length": "phases.0.length",
    "hidden_size": "encoder.width", "num_hidden_layers": "encoder.depth",
    "num_attention_heads": "encoder.heads", "hidden_dropout_prob": "encoder.dropout.hidden",
    "attention_probs_dropout_prob": "encoder.dropout.attention",
    "max_position_embeddings": "encoder.position.max_positions",
}  # fmt: skip
"""Those of `training.run`, and of models and masks."""


def load_pretraining(
    base: PretrainConfig, overrides: Tree | Iterable[str] = (), file: Path | None = None
) -> PretrainConfig:
    """Return `base` changed by a TOML file, then by overrides, which may use the common names of
    `training.run`; settings of a mixture without a kind are those of `Smoothed`.

    Raises:
        ConfigError: an unknown setting, or a value that is not allowed.
    """
    tree = expand_names(overrides, TRAINING_NAMES)
    for name in ("batch", "batch_size", "train_batch_size", "per_device_train_batch_size"):
        if isinstance(tree.get(name), int) or str(tree.get(name)).isdecimal():
            message = f"{tree[name]} is given, but a batch is a number of sequences or of tokens"
            kinds = [setting("batch.kind", kind) for kind in ("examples", "tokens")]
            fix = f"Set {setting('batch.n', int(tree[name]))} and {kinds[0]}, or {kinds[1]}."
            raise ConfigError(message, where=name, fix=fix)
    objective = tree.get("objective")
    kind = objective.get("kind") if isinstance(objective, Mapping) else objective
    if getattr(kind, "kind", kind) == CausalLM.kind:  # the recipe's phases hide tokens
        phases = tuple(dataclasses.replace(phase, masking=None) for phase in base.phases)
        base = dataclasses.replace(base, phases=phases)
    if base.mixture is None and "mixture" in {*tree, *(read_toml(file) if file else ())}:
        base = dataclasses.replace(base, mixture=Smoothed())
    return configs.load(
        PretrainConfig,
        base=base,
        file=file,
        overrides=tree,
        aliases=TRAINING_NAMES,
        peers=ALL_PEER_NAMES,
    )


AnyObjective = (
    MaskedLM
    | MaskedLMNextSentence
    | MaskedLMSentenceOrder
    | MaskedLMSpanBoundary
    | ReplacedTokens
    | Distillation
    | CausalLM
    | GPTBERT
)


def default_objective(encoder: EncoderConfig) -> Objective:
    """Return BERT's objective, or the language model that fits a causal encoder."""
    return CausalLM() if encoder.is_causal else MaskedLMNextSentence(NextSentence(short=0.1))
