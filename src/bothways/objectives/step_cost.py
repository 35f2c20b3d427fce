"""The operations and the memory of a step of an objective, for forecasts.

Objectives know nothing of them. One from outside the library is counted by its models and by its
masking rate.
"""

from __future__ import annotations

from typing_extensions import assert_never

from bothways.model.config import EncoderConfig
from bothways.model.embedding import Embedding
from bothways.model.flops import BACKWARD, LossFloats, forward_flops
from bothways.model.init import without_weights
from bothways.objectives import distillation as values
from bothways.objectives.objective import PREDICTING, Objective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.objectives.span_boundary import OFFSET_WIDTH, MaskedLMSpanBoundary


def predicted_share(objective: Objective) -> float:
    """Return the fraction of tokens for which logits over the vocabulary are computed."""
    if isinstance(objective, values.Distillation):
        soft = objective.loss(values.SoftTargets)
        if soft is not None and soft.at == "all":
            return 1.0
        return 0.0 if objective.masking is None else objective.masking.rate
    return 1.0 if objective.masking is None else objective.masking.rate


def objective_flops(objective: Objective, encoder: EncoderConfig, length: int) -> float:
    """Return the operations per token of a forward pass of all models, and of the losses' networks.

    That of a model without a backward pass counts by its share of a step.
    """
    predicted = predicted_share(objective)
    operations = sum(
        forward_flops(spec.encoder, spec.heads, length, predicted)
        / (1 + BACKWARD if role in objective.frozen_models else 1)
        for role, spec in objective.models(encoder).items()
    )
    if isinstance(objective, MaskedLMSpanBoundary):
        width, embedded = encoder.width, encoder.embedding_width
        network = (2 * width + OFFSET_WIDTH) * width + width * embedded + embedded * encoder.vocab
        operations += 2 * predicted * network
    return operations


def shared_parameters(objective: Objective, encoder: EncoderConfig) -> int:
    """Return the number of parameters that two models have in common: tables and LayerNorm."""
    if not isinstance(objective, ReplacedTokens) or objective.sharing != "shared":
        return 0
    with without_weights():
        embedding = Embedding(encoder)
    modules = [*embedding.tables().values(), embedding.norm]
    return sum(weight.numel() for module in modules for weight in module.parameters())


def loss_floats(objective: Objective, encoder: EncoderConfig) -> LossFloats:
    """Return the numbers that the losses hold: predictions over the vocabulary and their gradient,
    and of a teacher's pass what they read.
    """
    if isinstance(objective, values.Distillation):
        return _distillation_floats(objective, encoder)
    heads = [spec.heads for spec in objective.models(encoder).values()]
    predicting = sum(any(head.kind in PREDICTING for head in of_model) for of_model in heads)
    return LossFloats(2 * predicted_share(objective) * encoder.vocab * predicting)


def _distillation_floats(objective: values.Distillation, encoder: EncoderConfig) -> LossFloats:
    teacher = objective.models(encoder)["teacher"].encoder
    width, teacher_floats, student_floats, fixed = teacher.width, 0.0, 0.0, 0.0
    if objective.loss(values.SoftTargets) or objective.loss(values.CosineStates):
        teacher_floats += width
    for loss in objective.losses:
        match loss:
            case values.MaskedTokens():
                rate = 0.0 if objective.masking is None else objective.masking.rate
                student_floats += 2 * rate * encoder.vocab
            case values.SoftTargets():
                student_floats += encoder.width
                # Of some tokens at a time the logits, probabilities and gradients of both, and
                # three gradients of the table.
                fixed = (6 * values.LOGIT_ROWS + 3 * encoder.embedding_width) * encoder.vocab
            case values.CosineStates():
                student_floats += 2 * width
            case values.Relations():
                teacher_floats += 3 * width
                student_floats += 6 * encoder.width
            case _:
                assert_never(loss)
    return LossFloats(student_floats, teacher_floats, fixed)
