"""Replaced token detection, as ELECTRA (Clark et al. 2020, section 2) and DeBERTa version 3 (He et
al. 2021).

A small generator learns masked LM; tokens drawn from its predictions replace the masked ones; the
discriminator learns to detect, at every token, whether it was replaced:

    text            the  chef  cooked  the  meal
    generator       the  [MASK]  cooked  the  [MASK]
    discriminator   the  guest   cooked  the  meal      replaced: 0 1 0 0 0

A drawn token that equals the original counts as original. No gradient passes through the draw. The
loss is the generator's plus 50 times the discriminator's. The two networks may share
the embedding (`Sharing`).

Google's code draws the masked positions with replacement; here they are distinct.

DeBERTa's code updates the generator first, and then the discriminator with the table that the
generator has just changed. Here both have one backward pass and one update. Since no gradient of
the discriminator's loss reaches the generator, the gradients are the two updates', except
that the discriminator reads the generator's table of one update before. Clipping is by the norm of
both networks together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import assert_never

from bothways.core.batch import Batch, Targets, TokenTargets
from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, setting
from bothways.core.source import Sequence
from bothways.core.training_module import Loss, TrainingModule
from bothways.data.masking import Masking, Vocabulary
from bothways.data.segments import FullSentences
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead, ReplacedHead
from bothways.model.init import without_weights
from bothways.model.kernels.cross_entropy import row_chunks
from bothways.model.model import Model
from bothways.objectives.losses import binary_cross_entropy
from bothways.objectives.masked_lm import MaskedObjective, masked_prediction
from bothways.objectives.objective import ModelSpec, require_head
from bothways.training.meter import EvaluationScores

Sharing = Literal["none", "shared", "disentangled"]
"""How the discriminator's embedding depends on the generator's.

    none           separate embeddings
    shared         one embedding, its tables and its LayerNorm, which both losses train (ELECTRA)
    disentangled   table = stop_gradient(generator's table) + difference; the difference, which
                   begins at 0, is trained by the discriminator's loss, and the generator's table by
                   the generator's loss alone (He et al. 2021, section 3.3)
"""


@dataclass(frozen=True)
class _GeneratorSize:
    share: float

    def __post_init__(self) -> None:
        fix = "It is a share: a generator larger than the discriminator is too hard to detect."
        require_range("(0, 1]", "objective.generator", share=self.share, fix=fix)


@dataclass(frozen=True)
class Narrower(_GeneratorSize):
    """A generator with a share of the discriminator's width, heads and feed-forward layer.

    It has as many layers, and embeddings as wide (ELECTRA).
    """

    share: float = 0.25
    kind: Literal["narrower"] = "narrower"


@dataclass(frozen=True)
class Shallower(_GeneratorSize):
    """A generator with a share of the discriminator's layers, each as wide (DeBERTa version 3)."""

    share: float = 0.5
    kind: Literal["shallower"] = "shallower"


@dataclass(frozen=True)
class Replacements(Targets):
    """The positions that the discriminator judges `(tokens)`, and one draw per masked token.

    The draws are uniform on [0, 1). They belong to the sequence, so that the tokens drawn by them
    depend neither on microbatches and ranks nor on resuming.
    """

    POSITIONS = frozenset({"judged"})
    judged: NDArray[np.int64] | Tensor
    draws: NDArray[np.float64] | Tensor


@dataclass(frozen=True)
class ReplacedTokens(MaskedObjective):
    """Masked LM by a generator, and detection of the tokens that it replaced, as ELECTRA.

    Attributes:
        generator: the shape of the generator.
        sharing: dependence of the discriminator's embedding on the generator's.
        replaced: the factor of the discriminator's loss.
        temperature: temperature of the softmax from which replacements are drawn.
    """

    segments: FullSentences = FullSentences()
    masking: Masking = Masking(0.15, mask=1.0, random=0.0)
    generator: Narrower | Shallower = Narrower()
    sharing: Sharing = "shared"
    replaced: float = 50.0
    temperature: float = 1.0
    kind: Literal["replaced_tokens"] = "replaced_tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("(0, inf)", "objective", replaced=self.replaced, temperature=self.temperature)

    def models(self, encoder: EncoderConfig) -> dict[str, ModelSpec]:
        """Return the discriminator, "model", and the generator."""
        require_head(self, encoder, MaskedHead())
        try:
            generator = generator_of(encoder, self.generator)
        except ConfigError as error:  # of a size that the user has not set
            message = f"the generator cannot be built: {error.where}: {error.what}"
            fix = "Choose another share."
            raise ConfigError(message, where="objective.generator", fix=fix) from error
        differs = generator.width != encoder.width
        if self.sharing == "shared" and differs and encoder.norm_after_projection:
            message = (
                "the two networks share the embedding's LayerNorm, which in this encoder follows "
                "the projection to a width of its own"
            )
            fix = f"Set {setting('objective.generator', 'shallower')} or "
            fix += f"{setting('objective.sharing', 'disentangled')}."
            raise ConfigError(message, where="encoder.embedding", fix=fix)
        return {
            "model": ModelSpec(encoder, (ReplacedHead(),)),
            "generator": ModelSpec(generator, (MaskedHead(),)),
        }

    @property
    def copied_tables(self) -> Mapping[str, str]:
        """With disentangled sharing a new generator begins with the discriminator's tables."""
        return {"generator": "model"} if self.sharing == "disentangled" else {}

    def prepare(
        self, sequence: Sequence, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> Sequence:
        """Return the sequence with tokens hidden, and the targets "masked" and "replaced"."""
        sequence = super().prepare(sequence, vocabulary, rng)
        masked = sequence.target("masked", TokenTargets)
        draws = rng.random(len(masked.ids))
        replacements = Replacements(np.arange(len(sequence)), draws)
        targets = {**sequence.targets, "replaced": replacements}
        return dataclasses.replace(sequence, targets=targets)

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> ReplacedTokensModule:
        return ReplacedTokensModule(models["model"], models["generator"], self)

    def metrics(self, scores: EvaluationScores, predicts: tuple[str, ...]) -> dict[str, float]:
        """Return the generator's perplexity and how well replaced tokens are detected.

        Since few tokens are replaced, "always original" has a high accuracy. Precision, recall and
        F1 are of the class "replaced", "rate/replaced" is its share r of all tokens, and
        "entropy/replaced" = −r ln r − (1 − r) ln(1 − r) is the loss of a discriminator that
        knows nothing but r.
        """
        result = super().metrics(scores, predicts)
        if "replaced/replaced" not in scores.rates:
            return result
        # Shares of all tokens: replaced, called replaced, and both.
        rate, flagged, detected = (
            scores.rates[f"replaced/{name}"] for name in ("replaced", "flagged", "found")
        )
        return result | {
            "precision/replaced": detected / flagged if flagged else 0.0,
            "recall/replaced": detected / rate if rate else 0.0,
            "f1/replaced": 2 * detected / (rate + flagged) if rate + flagged else 0.0,
            "rate/replaced": rate,
            "entropy/replaced": -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0),
        }


def generator_of(encoder: EncoderConfig, size: Narrower | Shallower) -> EncoderConfig:
    """Return the generator of a discriminator; its embeddings are as wide.

    A smaller width is rounded to a multiple of the heads. ELECTRA-small: 256 wide, 4 heads,
    1/4 → 64, 1. DeBERTa-v3-base: 12 layers, 1/2 → 6.
    """
    match size:
        case Shallower(share=share):
            return dataclasses.replace(encoder, depth=max(1, round(encoder.depth * share)))
        case Narrower(share=share):
            heads = max(1, round(encoder.heads * share))
            # The width nearest to the share that the heads divide.
            width = heads * max(1, round(encoder.width * share / heads))
        case _:
            assert_never(size)
    return dataclasses.replace(
        encoder,
        width=width,
        heads=heads,
        key_value_heads=encoder.key_value_heads and math.gcd(heads, encoder.key_value_heads),
        intermediate_size=max(1, round(encoder.intermediate_size * width / encoder.width)),
        embedding=None if encoder.embedding_width == width else encoder.embedding_width,
    )


class Offset(nn.Module):
    """A parametrization: a table is another one, without gradient, plus a difference.

    Args:
        base: the other table; it stays part of its own model only.
    """

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple, which does not register it as a submodule

    def forward(self, difference: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Return the table for a difference."""
        return self._base[0].weight.detach() + difference

    def right_inverse(self, table: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Return the difference for a table."""
        return table - self._base[0].weight.detach()


@torch.no_grad()
def sample_tokens(
    logits: Float[Tensor, "targets vocab"], draws: Float[Tensor, " targets"], temperature: float
) -> Int[Tensor, " targets"]:
    """Return a token per row with the probabilities softmax(logits / temperature).

    A row's token is the first whose cumulative probability exceeds its draw, uniform on [0, 1).
    The distribution is that of argmax(logits / temperature + Gumbel noise), with one draw instead
    of one per entry of the vocabulary. Softmax is in fp32 or finer and the sum in float64, also
    under autocast: in bf16, rare tokens would never be drawn.

        probabilities 0.5 0.2 0.3, draw 0.6 → cumulative 0.5 0.7 1.0 → token 1
    """
    tokens = [logits.new_zeros(0, dtype=torch.int64)]
    exact = torch.promote_types(logits.dtype, torch.float32)
    for rows in row_chunks(logits):
        # Rounding leaves the last sum a little off 1, so the draw is scaled by it.
        below = torch.softmax(logits[rows].to(exact) / temperature, 1)
        below = below.cumsum(1, dtype=torch.float64)
        token = torch.searchsorted(below, draws[rows, None] * below[:, -1:], right=True)
        tokens.append(token[:, 0].clamp(max=logits.shape[1] - 1))
    return torch.cat(tokens)


class ReplacedTokensModule(TrainingModule):
    """Trains a generator and a discriminator.

    Args:
        model: the discriminator, an encoder with a "replaced" head.
        generator: an encoder with a "masked" head; with shared embeddings it takes over those of
            the other.
        objective: its factor, temperature and sharing.
    """

    predicts = ("masked",)

    def __init__(self, model: Model, generator: Model, objective: ReplacedTokens) -> None:
        super().__init__()
        self.model, self.generator, self.objective = model, generator, objective
        self.coefficients = {"replaced": objective.replaced}
        # Neither embedding changes its output, and the projections stay their own.
        embedding, generator_embedding = model.encoder.embedding, generator.encoder.embedding
        match objective.sharing:
            case "none":
                pass
            case "shared":
                for name in ("token", "position", "segment", "task", "norm"):
                    setattr(generator_embedding, name, getattr(embedding, name))
            case "disentangled":
                bases = generator_embedding.tables()
                for name, table in embedding.tables().items():
                    parametrize.register_parametrization(table, "weight", Offset(bases[name]))
            case _:
                assert_never(objective.sharing)

    @torch.no_grad()
    def saved(self) -> Mapping[str, Model]:
        """Return the discriminator, "model", with tables of its own, and the generator."""
        if self.objective.sharing != "disentangled":
            return {"model": self.model, "generator": self.generator}
        # Sums in place of differences; all other weights are those of the discriminator.
        state = self.model.state_dict()
        for name, table in self.model.named_modules():
            if parametrize.is_parametrized(table):
                del state[f"{name}.parametrizations.weight.original"]
                state[f"{name}.weight"] = table.weight
        with without_weights():
            model = Model(self.model.config, self.model.specification)
        model.load_state_dict(state, assign=True)
        model.kept = self.model.kept
        return {"model": model.train(self.model.training), "generator": self.generator}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the numbers of masked tokens and of all tokens."""
        return {
            "masked": float(len(batch.target("masked", TokenTargets).ids)),
            "replaced": float(len(batch.target("replaced", Replacements).judged)),
        }

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        """Return the generator's loss "masked" and the discriminator's, "replaced"."""
        masked, temperature = batch.target("masked", TokenTargets), self.objective.temperature
        replacements = batch.target("replaced", Replacements)
        index, originals = torch.as_tensor(masked.index), torch.as_tensor(masked.ids)
        sources = self.generator.masked_sources(batch, index)
        hidden = self.generator.encoder(batch, only=sources)
        loss, logits = masked_prediction(self.generator, batch, hidden)
        drawn = sample_tokens(logits, torch.as_tensor(replacements.draws), temperature)
        changed = dataclasses.replace(batch, ids=batch.ids.index_copy(0, index, drawn))
        with parametrize.cached():  # a disentangled table is computed once
            hidden = self.model.encoder(changed)
        judged = torch.as_tensor(replacements.judged)
        scores = self.model.heads["replaced"](hidden.last, batch.layout)[judged]
        # A token that was not masked is original; of a masked one the draw decides.
        differs = torch.zeros_like(batch.ids, dtype=torch.bool)
        labels = differs.index_copy(0, index, drawn != originals)[judged]
        detection = binary_cross_entropy(scores[:, None], labels[:, None].to(scores.dtype))
        flagged = scores > 0
        counts = {
            "replaced": labels.sum(),
            "flagged": flagged.sum(),
            "found": (flagged & labels).sum(),
        }
        return {"masked": loss, "replaced": dataclasses.replace(detection, counts=counts)}
