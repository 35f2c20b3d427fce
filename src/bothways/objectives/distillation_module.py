"""The learner of distillation: a student, a frozen teacher, and the losses between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.core.loss import Loss
from bothways.core.targets import TokenTargets
from bothways.core.training_module import TrainingModule
from bothways.model.encoder import Hidden, recorded_projections
from bothways.model.init import initialise
from bothways.model.model import Model
from bothways.objectives import distillation_losses, distillation_values
from bothways.objectives.masked_lm import masked_prediction

if TYPE_CHECKING:
    from bothways.objectives.distillation import Distillation

LOGIT_ROWS = 512
"""Tokens whose logits over the vocabulary exist at a time: 62 MB in fp32 with 30,522 entries."""


@dataclass(frozen=True)
class _Read:
    """What a forward pass gives: vectors, and the projections of some layers."""

    hidden: Hidden
    projections: Mapping[int, Float[Tensor, "tokens 3 heads d"]]


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
        widths = model.config.width, teacher.config.width
        self.project: nn.Module = nn.Identity()
        if objective.loss(distillation_values.HiddenStates) and widths[0] != widths[1]:
            self.project = nn.Linear(*widths)
            initialise(self.project, model.config.initial_range)
        factors = {
            name: loss.weight
            for loss in objective.losses
            for name in distillation_values.loss_names(loss)
        }
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
        read_last = (
            distillation_values.MaskedTokens,
            distillation_values.SoftTargets,
            distillation_values.CosineStates,
            distillation_values.HiddenStates,
        )
        return not any(map(self.objective.loss, read_last)) or super().partial

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the numbers of tokens, of tokens × features, of pairs × heads by loss."""
        counted = torch.as_tensor(batch.target("counted", distillation_values.Counted).weight)
        tokens = float(counted.sum(dtype=torch.float64))
        result: dict[str, float] = {}
        for loss in self.objective.losses:
            match loss:
                case distillation_values.MaskedTokens():
                    weight = float(len(batch.target("masked", TokenTargets).ids))
                case distillation_values.SoftTargets():
                    masked = loss.at == "masked"
                    weight = (
                        float(len(batch.target("masked", TokenTargets).ids)) if masked else tokens
                    )
                case distillation_values.CosineStates():
                    weight = tokens
                case distillation_values.HiddenStates():
                    weight = tokens * self.teacher.config.width
                case distillation_values.AttentionScores():
                    lengths = batch.layout.cu_seqlens.diff()[batch.layout.sequence_ids]
                    pairs = float((counted * lengths).sum(dtype=torch.float64))
                    weight = pairs * self.model.config.heads
                case distillation_values.Relations():
                    weight = tokens * loss.heads
                case _:
                    assert_never(loss)
            result |= dict.fromkeys(distillation_values.loss_names(loss), weight)
        return result

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the losses by name."""
        with torch.no_grad():
            theirs = self._read(self.teacher, batch, self._layers(teacher=True))
        ours = self._read(self.model, batch, self._layers(teacher=False))
        counted = torch.as_tensor(batch.target("counted", distillation_values.Counted).weight)
        losses: dict[str, Loss] = {}
        for loss in self.objective.losses:
            match loss:
                case distillation_values.MaskedTokens():
                    losses["masked"] = masked_prediction(self.model, batch, ours.hidden)[0]
                case distillation_values.SoftTargets():
                    losses["soft"] = Loss(self._soft(loss, batch, ours, theirs, counted))
                case distillation_values.CosineStates():
                    total = distillation_losses.cosine_distance(
                        ours.hidden.last, theirs.hidden.last, counted
                    )
                    losses["cosine"] = Loss(total)
                case distillation_values.HiddenStates():
                    losses |= self._hidden(ours, theirs, counted)
                case distillation_values.AttentionScores():
                    losses["attention"] = Loss(self._attention(batch, ours, theirs, counted))
                case distillation_values.Relations():
                    losses |= self._relations(loss, batch, ours, theirs, counted)
                case _:
                    assert_never(loss)
        return losses

    def _layers(self, teacher: bool) -> frozenset[int]:
        """Return the layers whose projections are compared, of one of the two."""
        result: set[int] = set()
        if loss := self.objective.loss(distillation_values.Relations):
            result.add(self._relation_layers(loss)[teacher])
        if self.objective.loss(distillation_values.AttentionScores):
            result |= {pair[teacher] for pair in self._pairs()}
        return frozenset(result)

    def _relation_layers(self, loss: distillation_values.Relations) -> tuple[int, int]:
        """Return the layer of the student and that of the teacher."""
        student, teacher = self.model.config.depth, self.teacher.config.depth
        return loss.student_layer or student, loss.teacher_layer or teacher

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the layers of the student, each with its layer of the teacher."""
        student, teacher = self.model.config.depth, self.teacher.config.depth
        return [*enumerate(self.objective.layer_map(student, teacher), 1)]

    def _read(self, model: Model, batch: Batch, layers: frozenset[int]) -> _Read:
        """Run an encoder as far as the losses need it."""
        encoder, objective = model.encoder, self.objective
        soft = objective.loss(distillation_values.SoftTargets)
        masked = objective.loss(distillation_values.MaskedTokens) or (soft and soft.at == "masked")
        only: Tensor | None = batch.ids.new_zeros(0)
        if masked:
            only = torch.as_tensor(batch.target("masked", TokenTargets).index)
        if objective.loss(distillation_values.CosineStates) or (soft and soft.at == "all"):
            only = None
        keep = objective.loss(distillation_values.HiddenStates) is not None
        with recorded_projections(encoder, layers) as found:
            hidden = encoder(batch, keep_layers=keep, only=only)
        return _Read(hidden, {layer: qkv[: len(batch.ids)] for layer, qkv in found.items()})

    def _soft(
        self,
        loss: distillation_values.SoftTargets,
        batch: Batch,
        ours: _Read,
        theirs: _Read,
        counted: Tensor,
    ) -> Tensor:
        """Compare predictions, for some tokens at a time."""
        if loss.at == "masked":
            index = torch.as_tensor(batch.target("masked", TokenTargets).index)
        else:
            index = torch.arange(len(batch.ids), device=batch.ids.device)
        head, vocab = self.model.heads["masked"], self.model.config.vocab
        x = self.model.before_masked(batch, ours.hidden, index)[index]
        with torch.no_grad():
            y = self.teacher.before_masked(batch, theirs.hidden, index)[index]
        weight = counted[index]

        def compute(rows: Tensor, part: slice) -> Tensor:
            """Return the loss of a part of the tokens."""
            with torch.no_grad():
                # An embedding may have more rows than there are tokens, to a round number.
                target = self.teacher.heads["masked"](y[part], theirs.hidden.table)[:, :vocab]
            logits = head(rows, ours.hidden.table)
            return distillation_losses.soft_divergence(
                logits, target, weight[part], loss.temperature
            )

        learned = [p for name, p in head.named_parameters() if not name.startswith("position.")]
        return distillation_losses.in_parts(compute, x, [ours.hidden.table, *learned], LOGIT_ROWS)

    def _hidden(self, ours: _Read, theirs: _Read, counted: Tensor) -> dict[str, Loss]:
        def distance(student: int, teacher: int) -> Tensor:
            """Compare the outputs of two layers; 0 is the embedding."""
            x = self.project(ours.hidden.layers[student])
            return distillation_losses.squared_distance(x, theirs.hidden.layers[teacher], counted)

        layers = torch.stack([distance(*pair) for pair in self._pairs()]).sum()
        return {"embedding": Loss(distance(0, 0)), "hidden": Loss(layers)}

    def _attention(self, batch: Batch, ours: _Read, theirs: _Read, counted: Tensor) -> Tensor:
        parts = []
        for pair in self._pairs():
            (q, k, _), (qt, kt, _) = (
                read.projections[layer].unbind(1)
                for read, layer in zip((ours, theirs), pair, strict=True)
            )
            parts.append(
                distillation_losses.compare_pairs(
                    distillation_losses.squared_difference, batch.layout, counted, (q, k), (qt, kt)
                )
            )
        return torch.stack(parts).sum()

    def _relations(
        self,
        loss: distillation_values.Relations,
        batch: Batch,
        ours: _Read,
        theirs: _Read,
        counted: Tensor,
    ) -> dict[str, Loss]:
        pair = self._relation_layers(loss)
        student, teacher = (
            read.projections[layer].reshape(len(batch.ids), 3, loss.heads, -1).unbind(1)
            for read, layer in zip((ours, theirs), pair, strict=True)
        )
        return {
            name: Loss(
                distillation_losses.compare_pairs(
                    distillation_losses.relation_divergence, batch.layout, counted, (a, a), (t, t)
                )
            )
            for name, a, t in zip(distillation_values.RELATIONS, student, teacher, strict=True)
        }
