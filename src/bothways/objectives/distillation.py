"""Distillation in pre-training: a student learns what a frozen teacher computes from the same text.

| loss | compares | source |
|---|---|---|
| `SoftTargets` | softmax(z/T) over the vocabulary | DistilBERT (Sanh et al. 2019) |
| `MaskedTokens` | nothing: masked LM, from the text | DistilBERT |
| `CosineStates` | the directions of last vectors | DistilBERT |
| `HiddenStates` | embeddings and outputs of layers | TinyBERT (Jiao et al. 2019) |
| `AttentionScores` | queries · keys in layers | TinyBERT |
| `Relations` | queries, keys and values, each with themselves | MiniLMv2 (Wang et al. 2020) |

The teacher reads what the student reads, masks included. It is in no optimizer and no checkpoint,
has no gradient, and stays in evaluation mode. Means are over real tokens: there is no padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from bothways.core.advice import call
from bothways.core.batch import Batch
from bothways.core.config.checks import require_at_least
from bothways.core.config.reader import CHANGEABLE
from bothways.core.errors import ConfigError
from bothways.core.finding import Finding
from bothways.core.loss import Loss
from bothways.core.sequence import Sequence
from bothways.core.targets import Targets, TokenTargets
from bothways.core.training_module import TrainingModule
from bothways.data.corpus import Corpus
from bothways.data.masking import Masking, Vocabulary, mask_tokens
from bothways.data.segments import FullSentences
from bothways.hub.hf_config import open_model, read_hf_config
from bothways.hub.infer_heads import heads_of
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.attention.patterns import Full
from bothways.model.config import EncoderConfig
from bothways.model.encoder import Hidden, recorded_projections
from bothways.model.heads import MaskedHead
from bothways.model.init import initialise
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.objectives import distillation_losses as sums
from bothways.objectives.masked_lm import masked_prediction
from bothways.objectives.objective import ModelSpec, Objective, require_head
from bothways.text.tokenizer import Tokenizer

LossT = TypeVar("LossT")
LayerPairs = tuple[tuple[int, int], ...]
"""Layers of the student, each with its layer of the teacher, from 1."""

LOGIT_ROWS = 512
"""Tokens whose logits over the vocabulary exist at a time: 62 MB in fp32 with 30,522 entries."""


@dataclass(frozen=True)
class TokenWeights(Targets):
    """1 for each token of a sequence `(tokens)`; 0 where a rank has no sequence left."""

    weight: NDArray[np.float32] | Tensor

    def without_weight(self) -> TokenWeights:
        """Return the weight 0."""
        return type(self)(np.zeros_like(self.weight))


@dataclass(frozen=True)
class Pass:
    """Outputs of one of the two models: vectors, and projections by layer."""

    model: Model
    hidden: Hidden
    projections: Mapping[int, Float[Tensor, "tokens 3 heads d"]]


@dataclass(frozen=True)
class ComparedPasses:
    """Outputs of student and teacher for a batch.

    Attributes:
        weight: weight of each token.
        layers: layers that are compared by the losses on layers.
        project: map from the student's width to the teacher's.
    """

    batch: Batch
    student: Pass
    teacher: Pass
    weight: Float[Tensor, " tokens"]
    layers: LayerPairs
    project: nn.Module

    def compare_vectors(self, student: int, teacher: int) -> Tensor:
        """Compare the outputs of two layers by squared distance; 0 is the embedding."""
        x = self.project(self.student.hidden.layers[student])
        return sums.squared_distance(x, self.teacher.hidden.layers[teacher], self.weight)


class StudentLoss:
    """Base class of the losses: frozen dataclasses with the fields `weight` and `kind`.

    Attributes:
        names: losses in the records of a run.
        vectors: vectors that it reads of an encoder: the last ones of masked tokens or of all, or
            those of all layers.
        by_layer: True if each layer of the student is compared with one of the teacher.
    """

    names: ClassVar[tuple[str, ...]]
    vectors: ClassVar[Literal["none", "masked", "all", "layers"]] = "none"
    by_layer: ClassVar[bool] = False

    def check(self, student: EncoderConfig, teacher: EncoderConfig, location: str) -> None:
        """Raise ConfigError if the two encoders cannot be compared."""

    def projections(self, layers: LayerPairs, student: int, teacher: int) -> LayerPairs:
        """Return the layers whose projections are compared, given the depths of the encoders."""
        return ()

    def count(self, batch: Batch, student: EncoderConfig, teacher: EncoderConfig) -> float:
        """Return the number that the sums are divided by, of tokens by default."""
        return float(_token_weights(batch).sum(dtype=torch.float64))

    def compute(self, compared: ComparedPasses) -> tuple[Loss, ...]:
        """Return the sums in the order of `names`."""
        raise NotImplementedError


@dataclass(frozen=True)
class MaskedTokens(StudentLoss):
    """Masked LM: cross-entropy of the hidden tokens; the loss "masked"."""

    weight: float = 1.0
    kind: Literal["masked_tokens"] = "masked_tokens"
    names = ("masked",)
    vectors = "masked"

    def count(self, batch: Batch, student: EncoderConfig, teacher: EncoderConfig) -> float:
        """Return the number of masked tokens."""
        return float(len(batch.target("masked", TokenTargets).ids))

    def compute(self, compared: ComparedPasses) -> tuple[Loss, ...]:
        """Return the sum over masked tokens."""
        student = compared.student
        return (masked_prediction(student.model, compared.batch, student.hidden)[0],)


@dataclass(frozen=True)
class SoftTargets(StudentLoss):
    """T² · KL(teacher ‖ student) of softmax(z/T) over the vocabulary; the loss "soft".

    Attributes:
        weight: factor of the mean over tokens.
        temperature: T.
        at: all tokens, as in DistilBERT's code by default, or the masked ones: less to compute.
    """

    weight: float = 1.0
    temperature: float = 2.0
    at: Literal["all", "masked"] = "all"
    kind: Literal["soft_targets"] = "soft_targets"
    names = ("soft",)

    def count(self, batch: Batch, student: EncoderConfig, teacher: EncoderConfig) -> float:
        """Return the number of tokens that are compared."""
        if self.at == "masked":
            return float(len(batch.target("masked", TokenTargets).ids))
        return super().count(batch, student, teacher)

    def compute(self, compared: ComparedPasses) -> tuple[Loss, ...]:
        """Compare predictions, for some tokens at a time."""
        batch, student, teacher = compared.batch, compared.student, compared.teacher
        if self.at == "masked":
            index = torch.as_tensor(batch.target("masked", TokenTargets).index)
        else:
            index = torch.arange(len(batch.ids), device=batch.ids.device)
        head, vocab = student.model.heads["masked"], student.model.config.vocab
        x = student.model.before_masked(batch, student.hidden, index)[index]
        with torch.no_grad():
            y = teacher.model.before_masked(batch, teacher.hidden, index)[index]
        weight = compared.weight[index]

        def compute(rows: Tensor, chunk: slice) -> Tensor:
            """Return the loss of a chunk of the tokens."""
            with torch.no_grad():
                # An embedding may have more rows than there are tokens, to a round number.
                target = teacher.model.heads["masked"](y[chunk], teacher.hidden.table)[:, :vocab]
            logits = head(rows, student.hidden.table)
            return sums.soft_divergence(logits, target, weight[chunk], self.temperature)

        trained = [p for name, p in head.named_parameters() if not name.startswith("position.")]
        return (Loss(sums.in_parts(compute, x, [student.hidden.table, *trained], LOGIT_ROWS)),)


@dataclass(frozen=True)
class CosineStates(StudentLoss):
    """1 − cosine of the last vectors; the loss "cosine"."""

    weight: float = 1.0
    kind: Literal["cosine"] = "cosine"
    names = ("cosine",)
    vectors = "all"

    def check(self, student: EncoderConfig, teacher: EncoderConfig, location: str) -> None:
        """Raise ConfigError for two widths."""
        if student.width != teacher.width:
            message = (
                f"the cosine is between vectors of one width, and the student has "
                f"{student.width}, the teacher {teacher.width}"
            )
            fix = f"Set encoder.width={teacher.width}, or leave out this loss."
            raise ConfigError(message, where=location, fix=fix)

    def compute(self, compared: ComparedPasses) -> tuple[Loss, ...]:
        """Return the sum over tokens."""
        student, teacher = compared.student.hidden.last, compared.teacher.hidden.last
        return (Loss(sums.cosine_distance(student, teacher, compared.weight)),)


@dataclass(frozen=True)
class HiddenStates(StudentLoss):
    """Squared error of embeddings and outputs of layers: the losses "embedding" and "hidden".

    The mean over tokens and features, summed over the layers of the student. If the widths differ,
    one linear map for all layers, which is not saved, makes the student's vectors as wide as the
    teacher's. TinyBERT's code has this map for equal widths, too.
    """

    weight: float = 1.0
    kind: Literal["hidden"] = "hidden"
    names = "embedding", "hidden"
    vectors = "layers"
    by_layer = True

    def count(self, batch: Batch, student: EncoderConfig, teacher: EncoderConfig) -> float:
        """Return the number of tokens · features."""
        return super().count(batch, student, teacher) * teacher.width

    def compute(self, compared: ComparedPasses) -> tuple[Loss, ...]:
        """Return the sums for the embeddings and for the layers."""
        layers = torch.stack([compared.compare_vectors(*pair) for pair in compared.layers]).sum()
        return Loss(compared.compare_vectors(0, 0)), Loss(layers)


@dataclass(frozen=True)
class AttentionScores(StudentLoss):
    """Squared error of attention scores, before softmax; the loss "attention".

    The mean over heads and pairs of tokens of a sequence, summed over the layers of the student.
    """

    weight: float = 1.0
    kind: Literal["attention"] = "attention"
    names = ("attention",)
    by_layer = True

    def check(self, student: EncoderConfig, teacher: EncoderConfig, location: str) -> None:
        """Raise ConfigError for other scores than dense ones of as many heads."""
        for encoder in (student, teacher):
            absolute = isinstance(encoder.position, Learned) and not encoder.has_relative_scores
            if not absolute or not all(isinstance(pattern, Full) for pattern in encoder.patterns):
                message = (
                    "attention scores are compared between encoders with full attention and "
                    "absolute positions, and one has others"
                )
                fix = 'Set objective.losses=["relations"].'
                raise ConfigError(message, where=location, fix=fix)
        if student.heads != teacher.heads:
            message = (
                f"the student has {student.heads} attention heads, the teacher {teacher.heads}"
            )
            fix = f"Set encoder.heads={teacher.heads}, or compare relations."
            raise ConfigError(message, where=location, fix=fix)

    def projections(self, layers: LayerPairs, student: int, teacher: int) -> LayerPairs:
        """Return all layers of the student with the teacher's."""
        return layers

    def count(self, batch: Batch, student: EncoderConfig, teacher: EncoderConfig) -> float:
        """Return the number of pairs of tokens · heads."""
        lengths = batch.layout.cu_seqlens.diff()[batch.layout.sequence_ids]
        pairs = float((_token_weights(batch) * lengths).sum(dtype=torch.float64))
        return pairs * student.heads

    def compute(self, compared: ComparedPasses) -> tuple[Loss, ...]:
        """Return the sum over layers, heads and pairs of tokens."""
        totals = []
        for student, teacher in compared.layers:
            q, k, _ = compared.student.projections[student].unbind(1)
            target_q, target_k, _ = compared.teacher.projections[teacher].unbind(1)
            totals.append(
                sums.compare_pairs(
                    sums.squared_difference, compared.batch.layout, compared.weight,
                    (q, k), (target_q, target_k),
                )
            )  # fmt: skip
        return (Loss(torch.stack(totals).sum()),)


@dataclass(frozen=True)
class Relations(StudentLoss):
    """KL(teacher ‖ student) of softmax(A Aᵀ/√d), for A the queries, keys and values of one layer.

    The heads of a layer are joined and cut again into relation heads of d features, for teacher and
    student alike, so that widths and numbers of attention heads may differ. The losses "queries",
    "keys" and "values" are means over relation heads and tokens. What the student's layer does
    after its projections gets no gradient.

    Source: Wang et al. 2020 (MiniLMv2), section 3.

    Attributes:
        weight: factor of each of the three.
        heads: relation heads; they divide both widths.
        teacher_layer, student_layer: layer, from 1; None for the last one.
    """

    weight: float = 1.0
    heads: int = 48
    teacher_layer: int | None = None
    student_layer: int | None = None
    kind: Literal["relations"] = "relations"
    names = "queries", "keys", "values"  # in the order of an encoder's projections

    def check(self, student: EncoderConfig, teacher: EncoderConfig, location: str) -> None:
        """Raise ConfigError for heads that do not divide the widths, or an absent layer."""
        require_at_least(1, location, heads=self.heads)
        if student.width % self.heads or teacher.width % self.heads:
            message = (
                f"{self.heads} relation heads must divide the widths {student.width} of the "
                f"student and {teacher.width} of the teacher"
            )
            fix = f"Choose a divisor of {math.gcd(student.width, teacher.width)}."
            raise ConfigError(message, where=f"{location}.heads", fix=fix)
        for name, encoder in (("teacher_layer", teacher), ("student_layer", student)):
            layer = getattr(self, name)
            if layer is not None and not 1 <= layer <= encoder.depth:
                message = f"must be from 1 to {encoder.depth}, not {layer}"
                raise ConfigError(message, where=f"{location}.{name}")

    def projections(self, layers: LayerPairs, student: int, teacher: int) -> LayerPairs:
        """Return one layer of each encoder."""
        return ((self.student_layer or student, self.teacher_layer or teacher),)

    def count(self, batch: Batch, student: EncoderConfig, teacher: EncoderConfig) -> float:
        """Return the number of tokens · relation heads."""
        return super().count(batch, student, teacher) * self.heads

    def compute(self, compared: ComparedPasses) -> tuple[Loss, ...]:
        """Return the sums for queries, keys and values."""
        passes = compared.student, compared.teacher
        [pair] = self.projections((), *(outputs.model.config.depth for outputs in passes))
        student, teacher = (
            outputs.projections[layer].reshape(len(compared.batch.ids), 3, self.heads, -1).unbind(1)
            for outputs, layer in zip(passes, pair, strict=True)
        )
        return tuple(
            Loss(
                sums.compare_pairs(
                    sums.relation_divergence, compared.batch.layout, compared.weight, (a, a), (t, t)
                )
            )
            for a, t in zip(student, teacher, strict=True)
        )


DistilLoss = MaskedTokens | SoftTargets | CosineStates | HiddenStates | AttentionScores | Relations


@dataclass(frozen=True)
class Distillation(Objective):
    """Learning from a teacher, on running text.

    Attributes:
        teacher: a model folder, the folder of a run, or a Hub id; with the corpus' vocabulary.
        losses: losses between student and teacher, at most one of each kind; DistilBERT's by
            default.
        layers: for `HiddenStates` and `AttentionScores`, the teacher's layer, from 1, for each of
            the student's; None spreads them evenly, the last for the last.
        masking: choice of the tokens that are hidden from both; None for none.

    Examples:
        >>> from bothways.objectives.distillation import Distillation, Relations
        >>> objective = Distillation("my-bert", (Relations(heads=8),), masking=None)
        >>> objective.kind
        'distillation'
    """

    teacher: str = field(metadata=CHANGEABLE)  # the run knows it by its SHA-256
    losses: tuple[DistilLoss, ...] = SoftTargets(5.0), MaskedTokens(2.0), CosineStates(1.0)
    layers: tuple[int, ...] | None = None
    segments: FullSentences = FullSentences()
    masking: Masking | None = Masking()
    kind: Literal["distillation"] = "distillation"

    def __post_init__(self) -> None:
        location, kinds = "objective.losses", [loss.kind for loss in self.losses]
        if not kinds or len({*kinds}) < len(kinds):
            names = ", ".join(kinds) or "none"
            message = f"must be one loss or several, each kind once, not {names}"
            raise ConfigError(message, where=location)
        for number, loss in enumerate(self.losses):
            if not (loss.weight > 0 and math.isfinite(loss.weight)):
                message, fix = f"must be above 0, not {loss.weight}", "Leave this loss out."
                raise ConfigError(message, where=f"{location}.{number}.weight", fix=fix)
        soft = self.loss(SoftTargets)
        if soft is not None and not 0 < soft.temperature < math.inf:
            message = f"the temperature must be above 0, not {soft.temperature}"
            raise ConfigError(message, where=location)
        if self.masking is None and "masked" in self.vectors:
            message = "is none, and a loss is about masked tokens"
            raise ConfigError(
                message, where="objective.masking", fix="Give objective.masking.rate."
            )

    def loss(self, cls: type[LossT]) -> LossT | None:
        """Return the loss of a kind, if there is one."""
        return next((loss for loss in self.losses if isinstance(loss, cls)), None)

    @property
    def vectors(self) -> set[str]:
        """The vectors that the losses read, as `StudentLoss.vectors`."""
        vectors: set[str] = {
            loss.at if isinstance(loss, SoftTargets) else loss.vectors for loss in self.losses
        }
        return vectors - {"none"}

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return the student, "model", and the teacher with as many layers as are read."""
        heads, soft = (MaskedHead(),), self.loss(SoftTargets)
        predicts = soft or self.loss(MaskedTokens)
        if predicts:
            require_head(self, encoder, MaskedHead())
        config, weights = open_model(resolve(resolve_run(self.teacher)))
        kinds = {head.kind for head in heads_of(config, weights.shapes)} if soft else set()
        if soft and "masked" not in kinds:
            message = f"{self.teacher} has no masked LM head, which soft targets are read from"
            fix = 'Choose another teacher, or losses without it: objective.losses=["relations"]'
            raise ConfigError(message, where="objective.teacher", fix=fix)
        teacher = config.encoder
        layers = self.layer_pairs(encoder.depth, teacher.depth)
        for number, loss in enumerate(self.losses):
            loss.check(encoder, teacher, f"objective.losses.{number}")
        if teacher.sharing is None and all(
            isinstance(loss, Relations | AttentionScores | MaskedTokens) for loss in self.losses
        ):
            pairs = (loss.projections(layers, encoder.depth, teacher.depth) for loss in self.losses)
            depth = max([1, *(layer for several in pairs for _, layer in several)])
            teacher = dataclasses.replace(teacher, depth=depth)
        return {
            "model": ModelSpec(encoder, heads if predicts else ()),
            "teacher": ModelSpec(teacher, heads if soft else ()),
        }

    @property
    def frozen_models(self) -> Mapping[str, str]:
        """The teacher's folder."""
        return {"teacher": self.teacher}

    def layer_pairs(self, student: int, teacher: int) -> LayerPairs:
        """Return the layers that are compared, given the depths; none without losses on layers.

        Raises:
            ConfigError: they cannot be spread evenly, or are out of range.
        """
        if not any(loss.by_layer for loss in self.losses):
            return ()
        layers = self.layers
        if layers is None:
            if teacher % student:
                message = (
                    f"{teacher} layers of the teacher cannot be spread evenly over {student} of "
                    "the student"
                )
                fix = "Name the teacher's layer for each of the student's: objective.layers=2,4,6"
                raise ConfigError(message, where="objective.layers", fix=fix)
            layers = tuple(range(teacher // student, teacher + 1, teacher // student))
        if len(layers) != student or not all(1 <= layer <= teacher for layer in layers):
            message = (
                f"must be {student} layers, one for each of the student, from 1 to {teacher}, not "
                f"{', '.join(map(str, layers))}"
            )
            raise ConfigError(message, where="objective.layers")
        return tuple(enumerate(layers, 1))

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with tokens hidden, and the weight of its tokens."""
        if self.masking is not None:
            sequence = mask_tokens(sequence, self.masking, vocabulary, rng)
        weights = TokenWeights(np.ones(len(sequence), dtype=np.float32))
        return dataclasses.replace(sequence, targets={**sequence.targets, "weights": weights})

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> DistillationModule:
        """Return the module to train."""
        return DistillationModule(models["model"], models["teacher"], self)

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings about the corpus: the teacher must be able to read it."""
        folder, location = resolve(resolve_run(self.teacher)), "objective.teacher"
        difference = Tokenizer.load(folder).difference(corpus.tokenizer)
        findings, positions = super().check(corpus), read_hf_config(folder).encoder.max_positions
        if self.segments.length > positions:
            message = (
                f"sequences of {self.segments.length} tokens are longer than the {positions} "
                f"positions of the teacher {self.teacher}"
            )
            fix = f"Set phases.0.length={positions} or less."
            findings.append(Finding("positions", "error", message, location, fix))
        if difference is not None:
            message = (
                f"the corpus has another vocabulary than the teacher {self.teacher}: {difference}"
            )
            command = call("corpus build", "…", tokenizer=self.teacher)
            fix = f"Build it with the teacher's: {command}"
            findings.append(Finding("ids", "error", message, location, fix))
        return findings


class DistillationModule(TrainingModule):
    """Trains a student on what a frozen teacher computes; see `Distillation`.

    Args:
        model: the student.
        teacher: the teacher, which stays as it is.
        objective: the losses.
    """

    predicts = ("masked",)

    def __init__(self, model: Model, teacher: Model, objective: Distillation) -> None:
        super().__init__()
        self.model, self.teacher, self.objective = model, teacher.requires_grad_(False), objective
        depths = model.config.depth, teacher.config.depth
        self.layers = objective.layer_pairs(*depths)
        self.projected = {
            pair for loss in objective.losses for pair in loss.projections(self.layers, *depths)
        }
        widths = model.config.width, teacher.config.width
        self.project: nn.Module = nn.Identity()
        if "layers" in objective.vectors and widths[0] != widths[1]:
            self.project = nn.Linear(*widths)
            initialise(self.project, model.config.initial_range)
        factors = {name: loss.weight for loss in objective.losses for name in loss.names}
        self.coefficients = {name: factor for name, factor in factors.items() if factor != 1.0}

    def saved(self) -> Mapping[str, Model]:
        """Return the student, without what only compares it with the teacher."""
        return {"model": self.model}

    def frozen(self) -> tuple[str, ...]:
        """Return the prefix of the teacher."""
        return ("teacher.",)

    @property
    def partial(self) -> bool:
        """True if no loss reads the last vectors, so that the end of the student is not trained."""
        return not self.objective.vectors or super().partial

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the numbers of tokens, of tokens × features, of pairs × heads by loss."""
        configs = self.model.config, self.teacher.config
        return {
            name: loss.count(batch, *configs)
            for loss in self.objective.losses
            for name in loss.names
        }

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses by name."""
        with torch.no_grad():
            teacher = self._read(self.teacher, batch, {layer for _, layer in self.projected})
        student = self._read(self.model, batch, {layer for layer, _ in self.projected})
        compared = ComparedPasses(
            batch, student, teacher, _token_weights(batch), self.layers, self.project
        )
        losses: dict[str, Loss] = {}
        for loss in self.objective.losses:
            losses |= zip(loss.names, loss.compute(compared), strict=True)
        return losses

    def _read(self, model: Model, batch: Batch, layers: set[int]) -> Pass:
        """Run an encoder as far as the losses need it."""
        vectors = self.objective.vectors
        only: Tensor | None = batch.ids.new_zeros(0)
        if "masked" in vectors:
            only = torch.as_tensor(batch.target("masked", TokenTargets).index)
        if "all" in vectors:
            only = None
        with recorded_projections(model.encoder, frozenset(layers)) as recorded:
            hidden = model.encoder(batch, keep_layers="layers" in vectors, only=only)
        # Rows beyond the batch fill it up to a round number.
        projections = {layer: qkv[: len(batch.ids)] for layer, qkv in recorded.items()}
        return Pass(model, hidden, projections)


def _token_weights(batch: Batch) -> Float[Tensor, " tokens"]:
    return torch.as_tensor(batch.target("weights", TokenWeights).weight)
