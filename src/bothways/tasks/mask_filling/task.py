"""Filling masks: what a pre-trained model makes of hidden tokens (Devlin et al. 2018, section 3.1, task #1).

Each [MASK] gets its most probable tokens, given everything else and the other masks as masks. Several masks of one text also
get their best common fillings, because tokens that are likely one by one may not go together.

Notable choices. The common fillings come from a beam search from left to right: the probability of a filling is the product
of p(first), p(second | first in its place, the rest masked) … A masked model defines no joint probability, and another order
gives another number; left to right is fixed and comparable between texts. The beam is as wide as `top`. The head computes at
masks only. A text longer than the model is cut to a window around its masks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch
from bothways.core.config.checks import require_at_least
from bothways.core.errors import ConfigError, DataError
from bothways.core.layout import Layout
from bothways.core.sequence import Ids, Sequence
from bothways.core.targets import TokenTargets
from bothways.model.head_config import Head, MaskedHead
from bothways.model.model import Model
from bothways.tasks.predictions import FillPrediction, JointFilling, TokenGuess
from bothways.tasks.task import Metrics
from bothways.tasks.task_learner import EncodedExample, Output, TaskLearner
from bothways.tasks.text_examples import NOT_NAMED, TextColumns, TextExample
from bothways.tasks.zero_shot import ZeroShotTask, counts_of, vocabulary_logits
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MaskFillingTask(ZeroShotTask[FillPrediction]):
    """The tokens behind masks.

    Attributes:
        columns: where the texts are.
        top: how many tokens for each mask, and how many fillings of all masks together.
    """

    columns: TextColumns = NOT_NAMED
    top: int = 5
    kind: Literal["fill"] = "fill"

    def __post_init__(self) -> None:
        require_at_least(1, top=self.top)

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        """The masked head."""
        return (MaskedHead(),)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """[CLS] A [SEP] with its masks as targets; of a long text what lies around them.

        Raises:
            DataError: a text without a mask, or whose masks lie too far apart for the model.
        """
        texts = tokenizer.encode([example.text for example in examples])
        return [
            _input(example, ids, tokenizer, length)
            for example, ids in zip(examples, texts, strict=True)
        ]

    def task(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> MaskFiller:
        """With a model that has the head "masked"."""
        tokens = int(tokenizer.named.sum())
        if self.top > tokens:
            raise ConfigError(
                f"must be at most the {tokens} tokens of the vocabulary, not {self.top}",
                where="top",
            )
        return MaskFiller(self, model, tokenizer, labels, length)


def _input(example: TextExample, ids: Ids, tokenizer: Tokenizer, length: int) -> EncodedExample:
    masks, room = np.flatnonzero(ids == tokenizer.specials.mask), length - tokenizer.template.single
    mask = tokenizer.token(tokenizer.specials.mask)
    if not len(masks):
        raise DataError(
            f"the text holds no {mask}",
            where=example.where,
            fix=f"Write {mask} where a token is to be found.",
        )
    first, last = int(masks[0]), int(masks[-1])
    if last - first >= room:
        what = f"its masks span {last - first + 1} tokens, and the model reads {room} at once"
        raise DataError(what, where=example.where, fix="Shorten the text between them.")
    start = max(0, min((first + last + 1 - room) // 2, len(ids) - room))
    bare = assemble(ids[start : start + room], None, tokenizer.template)
    index = (masks - start + len(tokenizer.template.before)).astype(np.int64)
    targets = {
        "masked": TokenTargets(index, np.full(len(index), tokenizer.specials.mask, dtype=np.int64))
    }
    return EncodedExample(
        (Sequence(bare.ids, bare.segments, targets),), len(ids), max(0, len(ids) - room)
    )


class MaskFiller(TaskLearner[TextExample, FillPrediction]):
    """A model with the head "masked", as a task."""

    definition: MaskFillingTask

    def outputs(self, batch: Batch) -> list[Output]:
        """For each sequence with m masks `(3m + 1, top)`: the tokens of each mask, their probabilities, then the fillings of
        all masks together, one a column: the token of each mask and, last, the natural logarithm of the probability.
        """
        index, top = (
            cast(Tensor, cast(TokenTargets, batch.targets["masked"]).index),
            self.definition.top,
        )
        best = [self._logs(part).topk(top) for part in vocabulary_logits(self.model, batch, index)]
        ids, logs = (
            torch.cat([part.indices for part in best]),
            torch.cat([part.values for part in best]),
        )
        counts = counts_of(batch.layout.sequence_ids[index], batch.layout.sequences)
        result = []
        for at, (places, tokens, scores) in enumerate(
            zip(*(torch.split(x, counts) for x in (index, ids, logs)), strict=True)
        ):
            start, stop = int(batch.layout.cu_seqlens[at]), int(batch.layout.cu_seqlens[at + 1])
            joint, total = self._beam(batch.ids[start:stop], places - start, tokens[0], scores[0])
            rows = torch.cat([tokens.float(), scores.exp(), joint.T.float(), total[None]])
            result.append(rows.cpu().numpy())
        return result

    def _logs(self, logits: Float[Tensor, "n rows"]) -> Float[Tensor, "n rows"]:
        """Log probabilities among all rows of the embedding; −∞ for a row that no token has, so that it is never chosen."""
        void = np.ones(logits.shape[1], dtype=np.bool_)
        void[: self.tokenizer.size] = ~self.tokenizer.named
        return logits.log_softmax(-1).masked_fill_(
            torch.from_numpy(void).to(logits.device), -torch.inf
        )

    def _beam(
        self,
        ids: Int[Tensor, " n"],
        places: Int[Tensor, " masks"],
        first: Int[Tensor, " top"],
        scores: Float[Tensor, " top"],
    ) -> tuple[Int[Tensor, "top masks"], Float[Tensor, " top"]]:
        """The best fillings of all masks of a sequence with their log probabilities, begun with the first mask's tokens."""
        top = len(first)
        rows = ids.repeat(top, 1)
        rows[:, places[0]] = first
        layout = Layout.of([len(ids)] * top).to(ids.device)
        for place in places[1:]:
            batch = Batch(rows.flatten(), torch.zeros_like(rows).flatten(), layout)
            logits = torch.cat(
                list(vocabulary_logits(self.model, batch, layout.first_tokens + place))
            )
            scores, found = (scores[:, None] + self._logs(logits)).flatten().topk(top)
            rows = rows[found // logits.shape[1]]
            rows[:, place] = found % logits.shape[1]
        return rows[:, places], scores

    def decode(self, example: TextExample, outputs: Many[Output]) -> FillPrediction:
        """Tokens with probabilities, and the text with each of the fillings in it."""
        (output,) = outputs
        count, name = len(output) // 3, self.tokenizer.token
        ids = output.astype(np.int64)
        masks = tuple(
            tuple(
                TokenGuess(name(id), float(p)) for id, p in zip(tokens, probabilities, strict=True)
            )
            for tokens, probabilities in zip(ids[:count], output[count : 2 * count], strict=True)
        )
        texts = self._texts(example.text, ids[2 * count : 3 * count].T)
        columns = zip(
            ids[2 * count : 3 * count].T, np.exp(output[-1].astype(np.float64)), texts, strict=True
        )
        return FillPrediction(
            masks,
            tuple(JointFilling(tuple(map(name, ids)), float(p), text) for ids, p, text in columns),
        )

    def _texts(self, text: str, fillings: NDArray[np.int64]) -> list[str]:
        """The text with each of these fillings `(fillings, masks)` in place of its masks; all else stays as it was typed."""
        (encoded,) = self.tokenizer.encode_with_offsets([text])
        spans = encoded.offsets[encoded.ids == self.tokenizer.specials.mask].tolist()
        result = []
        for filling in fillings.tolist():
            done, end = "", 0
            for (start, stop), id in zip(spans, filling, strict=True):
                hole = text[start:stop]  # RoBERTa's mask takes the white space before it
                before = done + text[end:start] + hole[: len(hole) - len(hole.lstrip())]
                done, end = self._joined(before, id), stop
            result.append(done + text[end:])
        return result

    def _joined(self, before: str, id: int) -> str:
        """A text with a token behind it: what goes on with a word touches it, what is marked as a beginning does not."""
        piece = self.tokenizer.decode([id]).removeprefix("##")
        if self.tokenizer.continues[id]:
            return before.rstrip() + piece
        apart = before and not before[-1].isspace() and self.tokenizer.kind != "WordPiece"
        return before + (" " if apart else "") + piece.lstrip()

    def score(self, results: Iterable[tuple[TextExample, FillPrediction]]) -> Metrics:
        """Raises DataError: a text with masks does not say what belongs there."""
        what = "what belongs behind a mask is not known, so fillings cannot be scored"
        raise DataError(what, fix="Score whole texts: --task likelihood.")
