"""Mask filling: a pre-trained model's guesses for hidden tokens (Devlin et al. 2018, section 3.1).

Each [MASK] gets its most probable tokens, given everything else and the other masks as masks.
Several masks of one text also get their best joint fillings, because tokens that are likely one by
one may not go together.

Joint fillings come from a beam search from left to right: the probability of a filling is the
product p(first) · p(second | first, the rest masked) · … A masked model defines no joint
probability, and another order gives another number; left to right is fixed and comparable between
texts. The beam is as wide as `top`. The head is computed at masks only. A text longer than the
model's input is cut to a window around its masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch, Layout, TokenTargets
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, DataError, argument
from bothways.core.source import Sequence
from bothways.model.model import Model
from bothways.tasks.base import EncodedExample, Metrics, Output, Results, TaskModel
from bothways.tasks.predictions import FillPrediction, JointFilling, TokenGuess
from bothways.tasks.text_task import MaskedTask, TextExample, vocabulary_logits
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer


class MaskFiller(TaskModel[TextExample, FillPrediction]):
    """A mask-filling task with a model that has the head "masked"; see `TaskModel`."""

    task: MaskFillingTask

    def outputs(self, batch: Batch) -> list[Output]:
        """Return `(3m + 1, top)` for each sequence with m masks.

        The rows are the tokens of each mask, their probabilities, and the joint fillings, one a
        column: the token of each mask, and last the natural logarithm of the probability.
        """
        index, top = torch.as_tensor(batch.target("masked", TokenTargets).index), self.task.top
        best = [self._logs(x).topk(top) for x in vocabulary_logits(self.model, batch, index)]
        ids = torch.cat([chunk.indices for chunk in best])
        logs = torch.cat([chunk.values for chunk in best])
        owners = batch.layout.sequence_ids[index]
        counts = torch.bincount(owners, minlength=batch.layout.sequences).tolist()
        bounds = itertools.pairwise(batch.layout.cu_seqlens.tolist())
        chunks = zip(*(torch.split(x, counts) for x in (index, ids, logs)), strict=True)
        result = []
        for (start, stop), (positions, tokens, scores) in zip(bounds, chunks, strict=True):
            sequence = batch.ids[start:stop]
            joint, total = self._beam(sequence, positions - start, tokens[0], scores[0])
            rows = torch.cat([tokens.float(), scores.exp(), joint.T.float(), total[None]])
            result.append(rows.cpu().numpy())
        return result

    def _logs(self, logits: Float[Tensor, "n rows"]) -> Float[Tensor, "n rows"]:
        """Return log probabilities; −∞ for rows of the embedding without a token."""
        unnamed = np.ones(logits.shape[1], dtype=np.bool_)
        unnamed[: self.tokenizer.size] = ~self.tokenizer.named
        excluded = torch.from_numpy(unnamed).to(logits.device)
        return logits.log_softmax(-1).masked_fill_(excluded, -torch.inf)

    def _beam(
        self,
        ids: Int[Tensor, " n"],
        places: Int[Tensor, " masks"],
        first: Int[Tensor, " top"],
        scores: Float[Tensor, " top"],
    ) -> tuple[Int[Tensor, "top masks"], Float[Tensor, " top"]]:
        """Return the best fillings of a sequence's masks and their log probabilities.

        Args:
            first, scores: the best tokens of the first mask and their log probabilities.
        """
        top = len(first)
        rows = ids.repeat(top, 1)
        rows[:, places[0]] = first
        layout = Layout.of([len(ids)] * top).to(ids.device)
        for position in places[1:]:
            batch = Batch(rows.flatten(), torch.zeros_like(rows).flatten(), layout)
            positions = layout.first_tokens + position
            logits = torch.cat(list(vocabulary_logits(self.model, batch, positions)))
            # One index over (row, token): all continuations of all rows compete.
            scores, selected = (scores[:, None] + self._logs(logits)).flatten().topk(top)
            rows = rows[selected // logits.shape[1]]
            rows[:, position] = selected % logits.shape[1]
        return rows[:, places], scores

    def decode(
        self, example: TextExample, encoded: EncodedExample, outputs: Many[Output]
    ) -> FillPrediction:
        """Return tokens with probabilities, and the text with each of the fillings in it."""
        (output,) = outputs
        count, name = len(output) // 3, self.tokenizer.token
        # Rows: ids for each mask, probabilities, ids of joint fillings, their log probabilities.
        ids = output.astype(np.int64)
        tokens, probabilities = ids[:count], output[count : 2 * count]
        masks = tuple(
            tuple(TokenGuess(name(id), float(p)) for id, p in zip(*mask, strict=True))
            for mask in zip(tokens, probabilities, strict=True)
        )
        fillings = ids[2 * count : 3 * count].T
        totals = np.exp(output[-1].astype(np.float64))
        texts = _filled_texts(example.text, fillings, self.tokenizer)
        triples = zip(fillings, totals, texts, strict=True)
        joint = (JointFilling(tuple(map(name, ids)), float(p), text) for ids, p, text in triples)
        return FillPrediction(masks, tuple(joint))


@dataclass(frozen=True)
class MaskFillingTask(MaskedTask[FillPrediction]):
    """The tokens behind masks.

    Attributes:
        top: number of tokens for each mask, and of joint fillings.
    """

    model_class = MaskFiller
    aliases = "fill-mask mask-filling mlm"

    top: int = 5
    kind: Literal["fill"] = "fill"

    def __post_init__(self) -> None:
        require_at_least(1, top=self.top)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        """Return [CLS] A [SEP] with its masks as targets; of a long text the part around them.

        Raises:
            DataError: a text has no mask, or its masks are too far apart for the model.
        """
        texts = tokenizer.encode([example.text for example in examples])
        template, mask = tokenizer.template, tokenizer.specials.mask
        room, results = length - template.single, list[EncodedExample]()
        for example, ids in zip(examples, texts, strict=True):
            masks = np.flatnonzero(ids == mask)
            if not len(masks):
                name = tokenizer.token(mask)
                fix = f"Write {name} for the token to find."
                raise DataError(f"the text has no {name}", where=example.where, fix=fix)
            begin, end = int(masks[0]), int(masks[-1]) + 1
            if end - begin > room:
                message = f"its masks span {end - begin} tokens, and the model reads {room} at once"
                fix = "Shorten the text between them."
                raise DataError(message, where=example.where, fix=fix)
            # The masks in the middle of the window, as far as the text permits it
            start = max(0, min((begin + end - room) // 2, len(ids) - room))
            bare = assemble(ids[start : start + room], None, template)
            index = (masks - start + len(template.before)).astype(np.int64)
            target = TokenTargets(index, np.full(len(index), mask, dtype=np.int64))
            sequence = Sequence(bare.ids, bare.segments, {"masked": target})
            results.append(EncodedExample((sequence,), len(ids), max(0, len(ids) - room)))
        return results

    def score(self, results: Results[TextExample, FillPrediction], labels: Many[str]) -> Metrics:
        """Raise a DataError: texts with masks have no answers to compare with."""
        message = "the tokens behind the masks are unknown, so fillings cannot be scored"
        raise DataError(message, fix=f"Score whole texts: {argument(task='likelihood')}.")

    def bind(
        self, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> MaskFiller:
        """Bind the task to a model; ConfigError if `top` exceeds the vocabulary."""
        tokens = int(tokenizer.named.sum())
        if self.top > tokens:
            message = f"must be at most the {tokens} tokens of the vocabulary, not {self.top}"
            raise ConfigError(message, where="top")
        return MaskFiller(self, model, tokenizer, labels, length)


def _filled_texts(text: str, fillings: NDArray[np.int64], tokenizer: Tokenizer) -> list[str]:
    """Return the text with each filling `(fillings, masks)` instead of its masks."""
    (encoded,) = tokenizer.encode_with_offsets([text])
    spans = encoded.offsets[encoded.ids == tokenizer.specials.mask].tolist()
    result = []
    for filling in fillings.tolist():
        done, end = "", 0
        for (start, stop), id in zip(spans, filling, strict=True):
            hole = text[start:stop]  # RoBERTa's mask includes the white space before it.
            preceding = done + text[end:start] + hole[: len(hole) - len(hole.lstrip())]
            piece, end = tokenizer.decode([id]).removeprefix("##"), stop
            if tokenizer.continues[id]:  # a word: no space before it
                done = preceding.rstrip() + piece
                continue
            apart = preceding and not preceding[-1].isspace() and tokenizer.kind != "WordPiece"
            done = preceding + (" " if apart else "") + piece.lstrip()
        result.append(done + text[end:])
    return result
