"""All objectives that a configuration can name, and the usual one of an encoder."""

from __future__ import annotations

from bothways.data.sentence_pairs import NextSentence
from bothways.model.config import EncoderConfig
from bothways.model.heads import token_head
from bothways.objectives.causal_lm import CausalLM
from bothways.objectives.distillation import Distillation
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence
from bothways.objectives.objective import Objective
from bothways.objectives.replaced_tokens import ReplacedTokens
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.objectives.span_boundary import MaskedLMSpanBoundary

AnyObjective = (
    MaskedLM
    | MaskedLMNextSentence
    | MaskedLMSentenceOrder
    | MaskedLMSpanBoundary
    | ReplacedTokens
    | Distillation
    | CausalLM
)

_USUAL: dict[str, Objective] = {
    "masked": MaskedLMNextSentence(NextSentence(short=0.1)),
    "causal": CausalLM(),
}


def default_objective(encoder: EncoderConfig) -> Objective:
    """Return BERT's objective, or the language model that fits an encoder of another kind."""
    return _USUAL[token_head(encoder).kind]
