"""Distillation: a student learns what a frozen teacher computes from the same text.

| loss | compares | source |
|---|---|---|
| `SoftTargets` | softmax(z/T) over the vocabulary | DistilBERT (Sanh et al. 2019) |
| `MaskedTokens` | nothing: masked LM, from the text | DistilBERT |
| `CosineStates` | the directions of last vectors | DistilBERT |
| `Relations` | queries, keys and values, each with themselves | MiniLMv2 (Wang et al. 2020) |

The teacher reads what the student reads, masks included. It is in no optimizer and no checkpoint,
has no gradient, and stays in evaluation mode. Means are over real tokens: there is no padding.

Arrays of vocabulary size, and of one number per pair of tokens, are the peak of memory. Here they
exist for a few rows at a time: each chunk goes from its scores to its gradient while it is in the
cache, and only the gradient for the student's vectors is kept.

`Teacher` has the settings of a teacher in fine-tuning (`finetuning.distillation`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bothways.core.batch import Batch, Layout, Targets, TokenTargets
from bothways.core.config.reader import CHANGEABLE
from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, Finding, argument, call, setting
from bothways.core.runtime.tuning import TUNING
from bothways.core.source import Sequence
from bothways.core.training_module import Loss, TrainingModule
from bothways.data.corpus import Corpus
from bothways.data.masking import Masking, Vocabulary, mask_tokens
from bothways.data.segments import FullSentences
from bothways.hub.hf_config import open_model, read_hf_config
from bothways.hub.model_folder import heads_of
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead
from bothways.model.kernels.cross_entropy import row_chunks
from bothways.model.model import Hidden, Model, recorded_projections
from bothways.objectives.masked_lm import masked_prediction
from bothways.objectives.objective import ModelSpec, Objective, require_head
from bothways.text.tokenizer import Tokenizer

LossT = TypeVar("LossT")

LOGIT_ROWS = 512
"""Tokens whose logits over the vocabulary exist at a time: 62 MB in fp32 with 30,522 entries."""
PAIR_ARRAYS = 4
"""Arrays of scores that exist at once. One Xeon core with AMX, 48 relation heads, 128 tokens: parts
of a quarter of `loss_chunk_elements_cpu` take 0.6 of the time of whole ones."""


@dataclass(frozen=True)
class Teacher:
    """A fine-tuned model that a smaller one learns from.

    The loss is (1 − weight) · that of the labels + weight · the mean of the soft loss: T² ·
    KL(teacher ‖ student) of softmax(z/T) over classes, choices or the tokens of a span, of each
    label by itself in a multilabel task, and the squared difference of numbers.

    Source: Hinton et al. 2015; Sanh et al. 2019, section 3, "an additional step of distillation".

    Attributes:
        folder: a model folder, the folder of a run, or a Hub id; of the same task, labels and
            vocabulary.
        weight: the share of the soft loss, from 0 to 1.
        temperature: T.
        unlabelled: further data of the task, without labels: for the soft loss alone.

    Examples:
        >>> from bothways.objectives.distillation import Teacher
        >>> Teacher("my-classifier", weight=0.7).temperature
        2.0
    """

    folder: str = field(metadata=CHANGEABLE)  # the run knows the teacher by its SHA-256
    weight: float = 0.5
    temperature: float = 2.0
    unlabelled: str | None = field(default=None, metadata=CHANGEABLE)

    def __post_init__(self) -> None:
        require_range("[0, 1]", "teacher", weight=self.weight)
        require_range("(0, inf)", "teacher", temperature=self.temperature)


def check_teacher(
    folder: str, tokenizer: Tokenizer, length: tuple[str, int], location: str, fix: str
) -> list[Finding]:
    """Return errors if a teacher cannot read a tokenizer's sequences of this length.

    Args:
        length: the setting of the length of sequences, and its value.
        location: the setting that names the teacher.
        fix: advice for another vocabulary.
    """
    path, findings = resolve(resolve_run(folder)), []
    if difference := Tokenizer.load(path).difference(tokenizer):
        message = f"the teacher {folder} has another vocabulary than the student: {difference}"
        findings.append(Finding("ids", "error", message, location, fix))
    if length[1] > (positions := read_hf_config(path).encoder.max_positions):
        message = f"the teacher {folder} reads {positions} tokens, and sequences have {length[1]}"
        fix = f"Set {setting(length[0], positions)}, or less."
        findings.append(Finding("positions", "error", message, location, fix))
    return findings


@dataclass(frozen=True)
class TokenWeights(Targets):
    """1 for each token of a sequence `(tokens)`; 0 where a rank has no sequence left."""

    weight: NDArray[np.float32] | Tensor


class Pass(NamedTuple):
    """Outputs of one of the two models: vectors, and the projections of the layer compared."""

    model: Model
    hidden: Hidden
    projections: Float[Tensor, "tokens 3 heads d"] | None


class StudentLoss:
    """Base class of the losses: frozen dataclasses with the fields `weight` and `kind`.

    Attributes:
        names: losses in the records of a run.
    """

    names: ClassVar[tuple[str, ...]]

    @property
    def vectors(self) -> Literal["none", "masked", "all"]:
        """The last vectors that it reads of an encoder: none, those of masked tokens, or all."""
        return "none"

    def count(self, batch: Batch) -> float:
        """Return the number that the sums are divided by: of the tokens that are compared."""
        if self.vectors == "masked":
            return float(len(batch.target("masked", TokenTargets).ids))
        return float(_token_weights(batch).sum(dtype=torch.float64))

    def compute(self, batch: Batch, student: Pass, teacher: Pass) -> tuple[Loss, ...]:
        """Return the sums in the order of `names`."""
        raise NotImplementedError


@dataclass(frozen=True)
class MaskedTokens(StudentLoss):
    """Masked LM: cross-entropy of the hidden tokens; the loss "masked"."""

    weight: float = 1.0
    kind: Literal["masked_tokens"] = "masked_tokens"
    names = ("masked",)
    vectors = "masked"

    def compute(self, batch: Batch, student: Pass, teacher: Pass) -> tuple[Loss, ...]:
        """Return the sum over masked tokens."""
        return (masked_prediction(student.model, batch, student.hidden)[0],)


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

    @property
    def vectors(self) -> Literal["masked", "all"]:
        return self.at

    def compute(self, batch: Batch, student: Pass, teacher: Pass) -> tuple[Loss, ...]:
        """Compare predictions, for some tokens at a time."""
        if self.at == "masked":
            index = torch.as_tensor(batch.target("masked", TokenTargets).index)
        else:
            index = torch.arange(len(batch.ids), device=batch.ids.device)
        head = student.model.heads["masked"]
        # An embedding may have more rows than there are tokens, to a round number.
        vocab = min(outputs.model.config.vocab for outputs in (student, teacher))
        x = student.model.masked_vectors(batch, student.hidden, index)
        with torch.no_grad():
            y = teacher.model.masked_vectors(batch, teacher.hidden, index)
        weight = _token_weights(batch)[index]

        def compute(rows: Tensor, chunk: slice) -> Tensor:
            """Return the loss of a chunk of the tokens."""
            with torch.no_grad():
                target = teacher.model.heads["masked"](y[chunk], teacher.hidden.table)[:, :vocab]
            logits = head(rows, student.hidden.table)[:, :vocab]
            return soft_divergence(logits, target, weight[chunk], self.temperature)

        trained = [p for name, p in head.named_parameters() if not name.startswith("position.")]
        return (Loss(in_parts(compute, x, [student.hidden.table, *trained])),)


@dataclass(frozen=True)
class CosineStates(StudentLoss):
    """1 − cosine of the last vectors; the loss "cosine"."""

    weight: float = 1.0
    kind: Literal["cosine"] = "cosine"
    names = ("cosine",)
    vectors = "all"

    def compute(self, batch: Batch, student: Pass, teacher: Pass) -> tuple[Loss, ...]:
        """Return the sum over tokens."""
        exact = torch.promote_types(student.hidden.last.dtype, torch.float32)
        x, y = (outputs.hidden.last.to(exact) for outputs in (student, teacher))
        cosine = F.cosine_similarity(x, y, dim=1)
        return (Loss(((1 - cosine) * _token_weights(batch)).sum()),)


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

    def layers(self, student: EncoderConfig, teacher: EncoderConfig) -> tuple[int, int]:
        """Return the layer of each encoder whose projections are compared."""
        return self.student_layer or student.depth, self.teacher_layer or teacher.depth

    def count(self, batch: Batch) -> float:
        """Return the number of tokens · relation heads."""
        return super().count(batch) * self.heads

    def compute(self, batch: Batch, student: Pass, teacher: Pass) -> tuple[Loss, ...]:
        """Return the sums for queries, keys and values."""
        pairs = (
            outputs.projections.reshape(len(batch.ids), 3, self.heads, -1).unbind(1)
            for outputs in (student, teacher)
            if outputs.projections is not None
        )
        weight = _token_weights(batch)
        return tuple(
            Loss(relation_divergence(batch.layout, weight, *pair))
            for pair in zip(*pairs, strict=True)
        )


DistilLoss = MaskedTokens | SoftTargets | CosineStates | Relations


@dataclass(frozen=True)
class Distillation(Objective):
    """Learning from a teacher, on running text.

    Attributes:
        teacher: a model folder, the folder of a run, or a Hub id; with the corpus' vocabulary.
        losses: losses between student and teacher, at most one of each kind; DistilBERT's by
            default.
        masking: choice of the tokens that are hidden from both; None for none.

    Examples:
        >>> from bothways.objectives.distillation import Distillation, Relations
        >>> objective = Distillation("my-bert", (Relations(heads=8),), masking=None)
        >>> objective.kind
        'distillation'
    """

    teacher: str = field(metadata=CHANGEABLE)  # the run knows it by its SHA-256
    losses: tuple[DistilLoss, ...] = SoftTargets(5.0), MaskedTokens(2.0), CosineStates(1.0)
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
            fix = "Leave this loss out."
            require_range("(0, inf)", f"{location}.{number}", weight=loss.weight, fix=fix)
            if isinstance(loss, SoftTargets):
                require_range("(0, inf)", f"{location}.{number}", temperature=loss.temperature)
        if self.masking is None and "masked" in self.vectors:
            message = "is none, and a loss is about masked tokens"
            fix = f"Set {setting('objective.masking.rate', 0.15)}."
            raise ConfigError(message, where="objective.masking", fix=fix)

    def loss(self, cls: type[LossT]) -> LossT | None:
        """Return the loss of a kind, if there is one."""
        return next((loss for loss in self.losses if isinstance(loss, cls)), None)

    @property
    def vectors(self) -> set[Literal["none", "masked", "all"]]:
        """The vectors that the losses read, as `StudentLoss.vectors`."""
        return {loss.vectors for loss in self.losses} - {"none"}

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
            relation_loss = setting("objective.losses", '["relations"]')
            losses = f"{argument(recipe='minilm')} of distil, or {relation_loss}"
            fix = f"Choose another teacher, or losses without it: {losses}"
            raise ConfigError(message, where="objective.teacher", fix=fix)
        teacher = config.encoder
        self._check_shapes(encoder, teacher)
        relations = self.loss(Relations)
        if teacher.sharing is None and all(
            isinstance(loss, Relations | MaskedTokens) for loss in self.losses
        ):
            # Layers above the last one that a loss reads need not be computed.
            depth = 1 if relations is None else relations.layers(encoder, teacher)[1]
            teacher = dataclasses.replace(teacher, depth=depth)
        return {
            "model": ModelSpec(encoder, heads if predicts else ()),
            "teacher": ModelSpec(teacher, heads if soft else ()),
        }

    def _check_shapes(self, student: EncoderConfig, teacher: EncoderConfig) -> None:
        """Raise ConfigError if a loss cannot compare the two encoders."""
        widths = f"{student.width} of the student and {teacher.width} of the teacher"
        for number, loss in enumerate(self.losses):
            location = f"objective.losses.{number}"
            if isinstance(loss, CosineStates) and student.width != teacher.width:
                message = f"the cosine is between vectors of one width, not {widths}"
                fix = f"Set {setting('encoder.width', teacher.width)}, or leave out this loss."
                raise ConfigError(message, where=location, fix=fix)
            if not isinstance(loss, Relations):
                continue
            require_at_least(1, location, heads=loss.heads)
            if student.width % loss.heads or teacher.width % loss.heads:
                message = f"{loss.heads} relation heads must divide the widths {widths}"
                fix = f"Choose a divisor of {math.gcd(student.width, teacher.width)}."
                raise ConfigError(message, where=f"{location}.heads", fix=fix)
            for name, encoder in (("teacher_layer", teacher), ("student_layer", student)):
                layer = {name: getattr(loss, name)}
                require_range(f"[1, {encoder.depth}]", location, fix=None, **layer)

    @property
    def frozen_models(self) -> Mapping[str, str]:
        """The teacher's folder."""
        return {"teacher": self.teacher}

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
        return DistillationModule(models["model"], models["teacher"], self)

    def check(self, corpus: Corpus) -> list[Finding]:
        """Return the findings about the corpus: the teacher must be able to read it."""
        build = call("corpus build", "…", tokenizer=self.teacher)
        fix, length = f"Build it with the teacher's: {build}", self.segments.length
        return super().check(corpus) + check_teacher(
            self.teacher, corpus.tokenizer, ("phases.0.length", length), "objective.teacher", fix
        )


class DistillationModule(TrainingModule):
    """Trains a student, `model`, on what a frozen teacher computes; see `Distillation`."""

    predicts = ("masked",)

    def __init__(self, model: Model, teacher: Model, objective: Distillation) -> None:
        super().__init__()
        self.model, self.teacher, self.objective = model, teacher.requires_grad_(False), objective
        factors = {name: loss.weight for loss in objective.losses for name in loss.names}
        self.coefficients = {name: factor for name, factor in factors.items() if factor != 1.0}

    def saved(self) -> Mapping[str, Model]:
        return {"model": self.model}

    def frozen(self) -> tuple[str, ...]:
        """Return the prefix of the teacher."""
        return ("teacher.",)

    @property
    def partial(self) -> bool:
        """True if no loss reads the last vectors, so that the end of the student is not trained."""
        return not self.objective.vectors or super().partial

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the numbers of tokens, or of tokens × relation heads, by loss."""
        losses = self.objective.losses
        return {name: loss.count(batch) for loss in losses for name in loss.names}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        layers: tuple[int | None, int | None] = None, None
        if relations := self.objective.loss(Relations):
            layers = relations.layers(self.model.config, self.teacher.config)
        with torch.no_grad():
            teacher = self._read(self.teacher, batch, layers[1])
        student = self._read(self.model, batch, layers[0])
        losses: dict[str, Loss] = {}
        for loss in self.objective.losses:
            losses |= zip(loss.names, loss.compute(batch, student, teacher), strict=True)
        return losses

    def _read(self, model: Model, batch: Batch, layer: int | None) -> Pass:
        """Run an encoder as far as the losses need it."""
        vectors = self.objective.vectors
        only: Tensor | None = batch.ids.new_zeros(0)
        if "masked" in vectors:
            index = torch.as_tensor(batch.target("masked", TokenTargets).index)
            only = model.masked_sources(batch, index)
        if "all" in vectors:
            only = None
        with recorded_projections(model.encoder, () if layer is None else (layer,)) as recorded:
            hidden = model.encoder(batch, only=only)
        # Those of relative positions follow the tokens' where one product makes both.
        projections = None if layer is None else recorded[layer][: len(batch.ids)]
        return Pass(model, hidden, projections)


def _token_weights(batch: Batch) -> Float[Tensor, " tokens"]:
    return torch.as_tensor(batch.target("weights", TokenWeights).weight)


def soft_divergence(
    logits: Float[Tensor, "rows classes"],
    target: Float[Tensor, "rows classes"],
    weight: Float[Tensor, " rows"],
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """Return T² · Σ over rows of weight · KL(teacher ‖ student), of softmax(z/T).

    The gradient for the logits is weight · T · (softmax(z/T) − softmax(t/T)): T² keeps its size
    whatever the temperature. In fp32 or finer, also under autocast. Logits are z, and the target
    is t, which gets no gradient.

    Source: Hinton et al. 2015, section 2.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)

    def compute(needed: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        total = logits.new_zeros((), dtype=exact)
        gradient = torch.empty_like(logits) if needed else None
        for chunk in row_chunks(logits):
            log_q = torch.log_softmax(logits[chunk].to(exact) / temperature, 1)
            log_p = torch.log_softmax(target[chunk].to(exact) / temperature, 1)
            w, p = weight[chunk, None].to(exact), log_p.exp()
            total += temperature**2 * (w * p * (log_p - log_q)).sum()
            if gradient is not None:
                gradient[chunk] = (log_q.exp_() - p) * (w * temperature)
        return total, (gradient,)

    return _with_gradients(compute, logits)


def relation_divergence(
    layout: Layout,
    weight: Float[Tensor, " tokens"],
    student: Float[Tensor, "tokens heads d"],
    teacher: Float[Tensor, "tokens heads e"],
) -> Float[Tensor, ""]:
    """Return Σ over heads and tokens of weight · KL(teacher ‖ student) of softmax(A Aᵀ/√d).

    The softmax is over the tokens of a sequence. Products are in fp32 or finer, also under
    autocast. The teacher's vectors, of any width, get no gradient.
    """
    exact, heads = torch.promote_types(student.dtype, torch.float32), student.shape[1]
    elements = (
        TUNING.loss_chunk_elements_cuda if student.is_cuda else TUNING.loss_chunk_elements_cpu
    )

    def compute(needed: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        total = student.new_zeros((), dtype=exact)
        gradients = list[Tensor]()
        for rectangle in layout.rectangles:
            # A matrix `(longest, d)` for each sequence and head.
            a, t = (
                rectangle.pad(x).transpose(1, 2).flatten(0, 1).to(exact) for x in (student, teacher)
            )
            w = rectangle.pad(weight.to(exact)).repeat_interleave(heads, 0)
            keep = rectangle.keep
            if keep is not None:
                keep = keep.repeat_interleave(heads, 0)
            gradient, scale = torch.empty_like(a), a.shape[-1] ** -0.5
            count = max(1, elements // (PAIR_ARRAYS * a.shape[1] ** 2))
            for at in (slice(start, start + count) for start in range(0, len(a), count)):
                scores = (a[at] * scale) @ a[at].mT
                target = (t[at] * t.shape[-1] ** -0.5) @ t[at].mT
                if keep is not None:
                    for values in (scores, target):
                        values.masked_fill_(~keep[at, None], torch.finfo(exact).min)
                log_q, log_p = torch.log_softmax(scores, -1), torch.log_softmax(target, -1)
                p = log_p.exp()
                total += (torch.linalg.vecdot(p, log_p.sub_(log_q)) * w[at]).sum()
                if needed:
                    # dKL/dS = q − p, and S = scale · A Aᵀ: rows of A are queries and keys, and as
                    # queries have the gradient dS A, as keys dSᵀ A.
                    slope = log_q.exp_().sub_(p).mul_(w[at, :, None] * scale)
                    gradient[at] = slope @ a[at] + slope.mT @ a[at]
            rows = gradient.reshape(rectangle.rows, -1, *gradient.shape[1:])
            gradients.append(rectangle.unpad(rows.transpose(1, 2)).to(student.dtype))
        return total, (torch.cat(gradients),) if needed else ()

    with torch.autocast(student.device.type, enabled=False):
        return _with_gradients(compute, student)


def in_parts(
    compute: Callable[[Float[Tensor, "rows width"], slice], Float[Tensor, ""]],
    x: Float[Tensor, "tokens width"],
    parameters: Iterable[Tensor],
) -> Float[Tensor, ""]:
    """Return Σ over parts of `compute(x[part], part)`, made with its gradient part by part.

    What `compute` makes of a part of `LOGIT_ROWS` rows, its logits, exists for one part at a time;
    `parameters` are all other tensors that need a gradient of it.
    """
    chunks = [slice(at, at + LOGIT_ROWS) for at in range(0, len(x), LOGIT_ROWS)]
    if not torch.is_grad_enabled():
        return torch.stack([x.new_zeros(()), *(compute(x[chunk], chunk) for chunk in chunks)]).sum()
    learned = [p for p in parameters if p.requires_grad]

    def accumulate(needed: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        total: Tensor = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        grad_x, gradients = torch.zeros_like(x), [torch.zeros_like(p) for p in learned]
        for chunk in chunks:
            # A Function's `forward` records nothing by itself; each chunk's graph is freed at once.
            with torch.enable_grad():
                inputs = x[chunk].detach().requires_grad_()
                value = compute(inputs, chunk)
            total += value.detach()
            grad_x[chunk], *additions = torch.autograd.grad(
                value, [inputs, *learned], allow_unused=True
            )
            for gradient, addition in zip(gradients, additions, strict=True):
                if addition is not None:
                    gradient.add_(addition)
        return total, (grad_x, *gradients)

    return _with_gradients(accumulate, x, *learned)


def _with_gradients(
    compute: Callable[[bool], tuple[Tensor, tuple[Tensor | None, ...]]], *inputs: Tensor
) -> Float[Tensor, ""]:
    """Return a sum of losses whose gradients are made along with it.

    Args:
        compute: returns the sum and the gradients for `inputs`, which need them if it is called
            with True.
    """
    apply: Callable[..., Tensor] = _WithGradients.apply
    return apply(compute, *inputs)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *inputs: Tensor) -> Tensor:
        total: Tensor
        total, gradients = compute(any(ctx.needs_input_grad))
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Any, ...]:
        return None, *(gradient * grad_total for gradient in ctx.saved_tensors)
