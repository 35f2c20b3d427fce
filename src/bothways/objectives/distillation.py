"""Distillation in pre-training: a student learns what a frozen teacher makes of the same text.

What is compared is a tuple of values (`distillation_values`): DistilBERT's soft targets, masked LM
and cosine, TinyBERT's hidden states and attention scores, MiniLMv2's relations, or a mix of them.

The teacher reads what the student reads, masks included. It is in no optimizer and no checkpoint,
has no gradient, and stays in evaluation mode. Means are over real tokens: there is no padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from typing_extensions import assert_never

from bothways.core.advice import call
from bothways.core.config.checks import require_at_least
from bothways.core.config.reader import CHANGEABLE
from bothways.core.errors import ConfigError
from bothways.core.finding import Finding
from bothways.core.sequence import Sequence
from bothways.data.corpus import Corpus
from bothways.data.full_sentences import FullSentences
from bothways.data.masking import Masking, Vocabulary, mask_tokens
from bothways.hub.hf_config import open_model, read_hf_config
from bothways.hub.infer_heads import heads_of
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.attention.patterns import Full
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.objectives import distillation_values
from bothways.objectives.distillation_module import DistillationModule
from bothways.objectives.objective import ModelSpec, Objective, require_head
from bothways.text.tokenizer import Tokenizer

L = TypeVar("L")


@dataclass(frozen=True)
class Distillation(Objective):
    """Learning from a teacher, on running text.

    Attributes:
        teacher: a model folder, the folder of a run, or a Hub id; with the corpus' vocabulary.
        losses: what is learned from it, at most one of each kind; DistilBERT's by default.
        layers: for `HiddenStates` and `AttentionScores`, the teacher's layer, from 1, for each of
            the student's; None spreads them evenly, the last for the last.
        masking: which tokens are hidden from both; None for none.

    Examples:
        >>> from bothways.objectives.distillation import Distillation, Relations
        >>> objective = Distillation("my-bert", (Relations(heads=8),), masking=None)
        >>> objective.kind
        'distillation'
    """

    teacher: str = field(metadata=CHANGEABLE)  # the run knows it by its SHA-256
    losses: tuple[distillation_values.DistilLoss, ...] = (
        distillation_values.SoftTargets(5.0),
        distillation_values.MaskedTokens(2.0),
        distillation_values.CosineStates(1.0),
    )
    layers: tuple[int, ...] | None = None
    segments: FullSentences = FullSentences()
    masking: Masking | None = Masking()
    kind: Literal["distillation"] = "distillation"

    def __post_init__(self) -> None:
        kinds = [loss.kind for loss in self.losses]
        if not kinds or len({*kinds}) < len(kinds):
            what = f"must be one loss or several, each kind once, not {', '.join(kinds) or 'none'}"
            raise ConfigError(what, where="objective.losses")
        for number, loss in enumerate(self.losses):
            if not (loss.weight > 0 and math.isfinite(loss.weight)):
                what, where = f"must be above 0, not {loss.weight}", f"losses.{number}.weight"
                fix = "Leave out a loss that does not count."
                raise ConfigError(what, where=f"objective.{where}", fix=fix)
        if (
            soft := self.loss(distillation_values.SoftTargets)
        ) and not 0 < soft.temperature < math.inf:
            what = f"the temperature must be above 0, not {soft.temperature}"
            raise ConfigError(what, where="objective.losses")
        masked = self.loss(distillation_values.MaskedTokens) or (
            soft is not None and soft.at == "masked"
        )
        if self.masking is None and masked:
            what = "is none, and a loss is about masked tokens"
            raise ConfigError(what, where="objective.masking", fix="Give objective.masking.rate.")

    def loss(self, cls: type[L]) -> L | None:
        """Return the loss of a kind, if there is one."""
        return next((loss for loss in self.losses if isinstance(loss, cls)), None)

    @property
    def masks(self) -> bool:
        """True if tokens are hidden."""
        return self.masking is not None

    @property
    def needs_counts(self) -> bool:
        """True if `prepare` reads `Vocabulary.counts`."""
        return self.masking is not None and self.masking.needs_counts

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return the student, "model", and the teacher with as many layers as are read."""
        heads = (MaskedHead(),)
        predicts = self.loss(distillation_values.SoftTargets) or self.loss(
            distillation_values.MaskedTokens
        )
        if predicts:
            require_head(self, encoder, MaskedHead())
        teacher = self._teacher()
        self._check_fit(encoder, teacher)
        read = dataclasses.replace(teacher, depth=self._depth_read(encoder, teacher))
        return {
            "model": ModelSpec(encoder, heads if predicts else ()),
            "teacher": ModelSpec(read, heads if self.loss(distillation_values.SoftTargets) else ()),
        }

    @property
    def frozen_models(self) -> Mapping[str, str]:
        """The teacher's folder."""
        return {"teacher": self.teacher}

    def _teacher(self) -> EncoderConfig:
        """Return the configuration of the teacher."""
        folder = resolve(resolve_run(self.teacher))
        config, weights = open_model(folder)
        if self.loss(distillation_values.SoftTargets):
            known = heads_of(config, weights.shapes)
            if "masked" not in {head.kind for head in known}:
                what = f"{self.teacher} has no masked LM head, which soft targets are read from"
                fix = 'Choose another teacher, or losses without it: objective.losses=["relations"]'
                raise ConfigError(what, where="objective.teacher", fix=fix)
        return config.encoder

    def _depth_read(self, student: EncoderConfig, teacher: EncoderConfig) -> int:
        """Return the number of the teacher's layers that the losses read."""
        if teacher.sharing is not None or not all(
            isinstance(
                loss,
                distillation_values.Relations
                | distillation_values.AttentionScores
                | distillation_values.MaskedTokens,
            )
            for loss in self.losses
        ):
            return teacher.depth
        relations, deepest = self.loss(distillation_values.Relations), 1
        if relations is not None:
            deepest = relations.teacher_layer or teacher.depth
        if self.loss(distillation_values.AttentionScores):
            deepest = max(deepest, *self.layer_map(student.depth, teacher.depth))
        return deepest

    def layer_map(self, student: int, teacher: int) -> tuple[int, ...]:
        """Return the teacher's layer for each of the student's, from 1.

        Raises:
            ConfigError: they cannot be spread evenly, or are out of range.
        """
        where = "objective.layers"
        if self.layers is None:
            if teacher % student:
                what = (
                    f"{teacher} layers of the teacher cannot be spread evenly over {student} of "
                    "the student"
                )
                fix = "Name the teacher's layer for each of the student's: objective.layers=2,4,6"
                raise ConfigError(what, where=where, fix=fix)
            return tuple(range(teacher // student, teacher + 1, teacher // student))
        if len(self.layers) != student or not all(1 <= layer <= teacher for layer in self.layers):
            what = (
                f"must be {student} layers, one for each of the student, from 1 to {teacher}, not "
                f"{', '.join(map(str, self.layers))}"
            )
            raise ConfigError(what, where=where)
        return self.layers

    def _check_fit(self, student: EncoderConfig, teacher: EncoderConfig) -> None:
        """Raise ConfigError if a loss does not fit the two encoders."""
        for number, loss in enumerate(self.losses):
            where = f"objective.losses.{number}"
            match loss:
                case distillation_values.MaskedTokens() | distillation_values.SoftTargets():
                    pass
                case distillation_values.CosineStates():
                    if student.width != teacher.width:
                        what = (
                            f"the cosine is between vectors of one width, and the student has "
                            f"{student.width}, the teacher {teacher.width}"
                        )
                        fix = f"Set encoder.width={teacher.width}, or leave out this loss."
                        raise ConfigError(what, where=where, fix=fix)
                case distillation_values.HiddenStates():
                    self.layer_map(student.depth, teacher.depth)
                case distillation_values.AttentionScores():
                    self.layer_map(student.depth, teacher.depth)
                    for one in (student, teacher):
                        _check_scores(one, where)
                    _check_heads(student, teacher, where)
                case distillation_values.Relations():
                    _check_relations(loss, student, teacher, where)
                case _:
                    assert_never(loss)

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with tokens hidden, and the weight of its tokens."""
        if self.masking is not None:
            sequence = mask_tokens(sequence, self.masking, vocabulary, rng)
        counted = distillation_values.Counted(np.ones(len(sequence), dtype=np.float32))
        return dataclasses.replace(sequence, targets={**sequence.targets, "counted": counted})

    def learner(self, models: Mapping[str, Model], vocabulary: Vocabulary) -> DistillationModule:
        """Return the module to train."""
        return DistillationModule(models["model"], models["teacher"], self)

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings about the corpus: the teacher must be able to read it."""
        folder = resolve(resolve_run(self.teacher))
        difference = Tokenizer.load(folder).difference(corpus.tokenizer)
        findings, most = super().check(corpus), read_hf_config(folder).encoder.max_positions
        if self.segments.length > most:
            what = (
                f"sequences of {self.segments.length} tokens are longer than the {most} positions "
                f"of the teacher {self.teacher}"
            )
            fix = f"Set phases.0.length={most} or less."
            findings.append(Finding("positions", "error", what, "objective.teacher", fix))
        if difference is None:
            return findings
        what = f"the corpus has another vocabulary than the teacher {self.teacher}: {difference}"
        fix = f"Build it with that one: {call('corpus build', '…', tokenizer=self.teacher)}"
        return [*findings, Finding("ids", "error", what, "objective.teacher", fix)]


def _check_scores(encoder: EncoderConfig, where: str) -> None:
    absolute = isinstance(encoder.position, Learned) and not encoder.has_relative_scores
    if not absolute or not all(isinstance(pattern, Full) for pattern in encoder.patterns):
        what = (
            "attention scores are compared between encoders with full attention and absolute "
            "positions, and one has others"
        )
        raise ConfigError(what, where=where, fix='Set objective.losses=["relations"].')


def _check_heads(student: EncoderConfig, teacher: EncoderConfig, where: str) -> None:
    if student.heads != teacher.heads:
        what = f"the student has {student.heads} attention heads, the teacher {teacher.heads}"
        fix = f"Set encoder.heads={teacher.heads}, or compare relations."
        raise ConfigError(what, where=where, fix=fix)


def _check_relations(
    loss: distillation_values.Relations, student: EncoderConfig, teacher: EncoderConfig, where: str
) -> None:
    require_at_least(1, where, heads=loss.heads)
    if student.width % loss.heads or teacher.width % loss.heads:
        common = math.gcd(student.width, teacher.width)
        what = (
            f"{loss.heads} relation heads must divide the widths {student.width} of the student "
            f"and {teacher.width} of the teacher"
        )
        fix = f"Choose a divisor of {common}."
        raise ConfigError(what, where=f"{where}.heads", fix=fix)
    for name, encoder in (("teacher_layer", teacher), ("student_layer", student)):
        layer = getattr(loss, name)
        if layer is not None and not 1 <= layer <= encoder.depth:
            what = f"must be from 1 to {encoder.depth}, not {layer}"
            raise ConfigError(what, where=f"{where}.{name}")
