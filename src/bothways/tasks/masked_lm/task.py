"""What a language model's head computes: tokens for masks, likelihoods of texts, and of two texts.

Mask filling (Devlin et al. 2018, section 3.1): each [MASK] gets its most probable tokens, given
everything else and the other masks as masks. Several masks of one text also get their best joint
fillings, because tokens that are likely one by one may not go together.

Joint fillings come from a beam search from left to right: the probability of a filling is the
product p(first) · p(second | first, the rest masked) · … A masked model defines no joint
probability, and another order gives another number; left to right is fixed and comparable between
texts. The beam is as wide as `top`. The head is computed at masks only. A text longer than the
model's input is cut to a window around its masks.

Pseudo-log-likelihood (PLL) and pseudo-perplexity of texts (Salazar et al. 2020): each token is
masked in turn and predicted from all others; the PLL is the sum of the log probabilities. Masking
one piece of a word while its other pieces are visible makes long words look likely, so the variant
"word_l2r" (Kauf & Ivanova 2023) also masks the pieces of the word to the right of the predicted
one.

A model that was trained both ways (`objectives.gpt_bert`) also has log p(token | tokens before it),
"causal", and the mean of both, "both": half of the sum by which Charpentier and Samuel 2024 rank.

A text of n tokens is n sequences that share one array of ids: masks are written on the device. The
head is computed at the predicted token only. A text longer than the model's input is read in
pieces, one after the other and each by itself, so that no token is dropped. The pseudo-perplexity
of several texts is exp(−ΣPLL / Σtokens); special tokens are visible but not predicted, and do not
count.

The texts of a minimal pair differ in one point of grammar, and the first is right, as in BLiMP
(Warstadt et al. 2020). A model is right if the log-likelihood of the first text is higher: for a
masked language model the pseudo-log-likelihood (Salazar et al. 2020), for one that reads left to
right the sum of log p(token | tokens before it). No label and no training is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.batch import Batch, Layout, TokenTargets
from bothways.core.config.values import require_at_least
from bothways.core.errors import ConfigError, DataError, argument
from bothways.core.source import Ids, Sequence
from bothways.core.training_module import perplexity
from bothways.model.heads import Head, MaskedHead, NextTokenHead
from bothways.model.model import Model
from bothways.tasks import base
from bothways.tasks.base import P
from bothways.tasks.predictions import (
    FillPrediction,
    JointFilling,
    LikelihoodPrediction,
    PreferencePrediction,
    TokenGuess,
)
from bothways.tasks.text_task import TEXT, TextColumns, TextExample, TextTask, check_single_texts
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

ROWS = 1024
"""Number of positions whose logits over the vocabulary are in memory at once."""


@dataclass(frozen=True)
class MaskedTask(TextTask[P]):
    """A task on single texts for the masked head, which reads no labels.

    Its metric, if any, does not select weights.
    """

    column_table = (TEXT,)
    check_columns = check_single_texts

    def answered(self, example: TextExample, answer: Any) -> TextExample:
        """Raise a DataError: texts are scored by themselves."""
        message = f"the task {self.name!r} needs no answers"
        raise DataError(message, where="answers", fix="Leave them out.")

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (MaskedHead(),)


def vocabulary_logits(model: Model, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
    """Yield the logits for these tokens, `ROWS` at a time `(part, vocab)`.

    They are of the masked head, or of the head that predicts the next token.
    """
    causal = "causal" in model.heads
    sources = rows - 1 if causal else model.masked_sources(batch, rows)
    hidden = model.encoder(batch, only=sources)
    x = hidden.last[sources] if causal else model.masked_vectors(batch, hidden, rows)
    for chunk in torch.split(x, ROWS):
        yield model.heads["causal" if causal else "masked"](chunk, hidden.table).float()


class MaskFiller(base.TaskModel[TextExample, FillPrediction]):
    """A mask-filling task with a model that has the head "masked"; see `TaskModel`."""

    task: MaskFillingTask

    def outputs(self, batch: Batch) -> list[base.Output]:
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
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
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
    example_input = "the cat [MASK] here"

    top: int = 5
    kind: Literal["fill"] = "fill"

    def __post_init__(self) -> None:
        require_at_least(1, top=self.top)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return [CLS] A [SEP] with its masks as targets; of a long text the part around them.

        Raises:
            DataError: a text has no mask, or its masks are too far apart for the model.
        """
        texts = tokenizer.encode([example.text for example in examples])
        template, mask = tokenizer.template, tokenizer.specials.mask
        room, results = length - template.single, list[base.EncodedExample]()
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
            results.append(base.EncodedExample((sequence,), len(ids), max(0, len(ids) - room)))
        return results

    def score(
        self, results: base.Results[TextExample, FillPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Raise a DataError: texts with masks have no answers to compare with."""
        message = "the tokens behind the masks are unknown, so fillings cannot be scored"
        raise DataError(message, fix=f"Score whole texts: {argument(task='likelihood')}.")

    def check_binding(self, model: Model, tokenizer: Tokenizer, labels: Many[str]) -> None:
        tokens = int(tokenizer.named.sum())
        if self.top > tokens:
            message = f"must be at most the {tokens} tokens of the vocabulary, not {self.top}"
            raise ConfigError(message, where="top")


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


Variant = Literal["original", "word_l2r", "causal", "both"]
NEEDS_DIRECTION = (
    "Choose variant=original or variant=word_l2r, or a model that was trained with "
    "objective=gpt_bert or objective=causal_lm."
)
"""What to do about a variant that reads from left to right with a model that does not."""


def check_direction(task: Any, model: Model, tokenizer: Tokenizer, labels: Many[str]) -> None:
    """Raise a ConfigError if a model does not read in the variant's direction."""
    is_causal = "causal" in model.heads or model.config.readout.shifted
    if task.variant in ("causal", "both") and not is_causal:
        message = f"{task.variant!r} reads from left to right, which this model has not learned"
        raise ConfigError(message, where="variant", fix=NEEDS_DIRECTION)


class MaskedScorer(base.TaskModel[TextExample, base.P]):
    """A task on likelihoods; see `TaskModel`."""

    def outputs(self, batch: Batch) -> list[base.Output]:
        """Return log probabilities in nats for each sequence: of its first masked token `(1)`, or
        in one that is read from left to right of all predicted tokens `(tokens)`.
        """
        targets = batch.target("masked", TokenTargets)
        index, truth = torch.as_tensor(targets.index), torch.as_tensor(targets.ids)
        owners = batch.layout.sequence_ids[index]
        counts = torch.bincount(owners, minlength=batch.layout.sequences)
        # Of the masked tokens of a sequence, the first is the one that is predicted
        scored = torch.zeros_like(index, dtype=torch.bool)
        scored, hidden = scored.index_fill(0, counts.cumsum(0) - counts, True), index
        if batch.causal is not None:
            causal = batch.causal[index]
            scored, hidden = scored | causal, index[~causal]
        ids = batch.ids.index_fill(0, hidden, self.tokenizer.specials.mask)
        logits = vocabulary_logits(self.model, dataclasses.replace(batch, ids=ids), index[scored])
        pairs = zip(logits, torch.split(truth[scored], ROWS), strict=True)
        logs = [chunk.log_softmax(-1).gather(1, ids[:, None])[:, 0] for chunk, ids in pairs]
        sizes = torch.bincount(owners[scored], minlength=batch.layout.sequences).cumsum(0)
        return np.split(torch.cat(logs).cpu().numpy(), sizes[:-1].cpu().numpy())


class LikelihoodScorer(MaskedScorer[LikelihoodPrediction]):
    """The likelihood of texts; see `TaskModel`."""

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> LikelihoodPrediction:
        """Return the tokens of the text, each with its log probability."""
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for item, logs in zip(encoded.sequences, outputs, strict=True):
            ids = item.target("masked", TokenTargets).ids[: len(logs)]
            parts[item.causal] += zip(ids.tolist(), logs.tolist(), strict=True)
        # A token that is predicted both ways has the mean.
        scored = [part for part in parts.values() if part] or [[]]
        tokens = tuple(self.tokenizer.token(id) for id, _ in scored[0])
        means = (statistics.fmean(log for _, log in both) for both in zip(*scored, strict=True))
        return LikelihoodPrediction(tokens, tuple(means))


@dataclass(frozen=True)
class LikelihoodTask(MaskedTask[LikelihoodPrediction]):
    """The pseudo-log-likelihood of texts.

    Attributes:
        variant: what is masked with a token: nothing else, or the rest of its word too. For models
            that were trained both ways: "causal", nothing, but only the tokens before it are read;
            "both", the mean of "original" and "causal".
    """

    aliases = "perplexity pll"
    model_class = LikelihoodScorer
    check_binding = check_direction
    metric = "pseudo_perplexity"
    metrics = base.directions(lowest="pseudo_perplexity")
    window = 256
    long_texts = "windows"

    variant: Variant = "original"
    kind: Literal["likelihood"] = "likelihood"

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return a sequence for each token; its targets are the masked tokens, the predicted first.

        Raises:
            DataError: a text has a mask, whose token is unknown.
        """
        texts = tokenizer.encode_with_offsets([example.text for example in examples])
        room, mask, result = length - tokenizer.template.single, tokenizer.specials.mask, []
        for example, text in zip(examples, texts, strict=True):
            if mask in text.ids:
                message = f"the text has a {tokenizer.token(mask)}, whose token is unknown"
                fix = f"To predict it, use {argument(task='fill')}."
                raise DataError(message, where=example.where, fix=fix)
            sequences = list[Sequence]()
            for start in range(0, len(text.ids), room):
                chunk = slice(start, start + room)
                sequences += self._sequences(text.ids[chunk], text.words[chunk], tokenizer)
            result.append(base.EncodedExample(tuple(sequences), len(text.ids), 0))
        return result

    def _sequences(
        self, ids: Ids, words: NDArray[np.int32], tokenizer: Tokenizer, since: int = 0
    ) -> Iterator[Sequence]:
        """Yield the sequences in which the tokens from `since` on are predicted.

        Args:
            words: the word of each token, ascending `(tokens)`.
        """
        bare, first = assemble(ids, None, tokenizer.template), len(tokenizer.template.before)
        starts = stops = np.arange(first, first + len(ids))
        if self.variant == "word_l2r":
            # In "un ##happi ##ness", "##happi" is predicted with "##ness" masked, too
            stops = np.searchsorted(words, words, side="right") + first - 1
        ways = [(np.arange(*ends), False) for ends in zip(starts, stops + 1, strict=True)][since:]
        if self.variant in ("causal", "both"):
            ways = ways if self.variant == "both" else []
            ways.append((starts[since:], True))
        for index, causal in ways:
            targets = {"masked": TokenTargets(index, bare.ids[index].astype(np.int64))}
            yield Sequence(bare.ids, bare.segments, targets, causal=causal)

    def score(
        self, results: base.Results[TextExample, LikelihoodPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return "pseudo_perplexity" of all texts, their "pll" in nats, and counts."""
        texts, tokens, total = 0, 0, 0.0
        for _, prediction in results:
            texts, tokens = texts + 1, tokens + len(prediction.tokens)
            total += prediction.log_likelihood
        if not tokens:
            raise base.nothing_to_score("token")
        mean = perplexity(-total / tokens)
        return {"pseudo_perplexity": mean, "pll": total, "tokens": tokens, "texts": texts}

    def grade(
        self, example: TextExample, prediction: LikelihoodPrediction, labels: Many[str]
    ) -> float:
        """Return the mean log probability of a token; NaN for a text without one."""
        count = len(prediction.tokens)
        return prediction.log_likelihood / count if count else math.nan


@dataclass(frozen=True)
class CompletionTask(LikelihoodTask):
    """The likelihood of the ends of texts, given what precedes them.

    An example has the beginning of a text and its end, `text` and `text_b`, which are joined as
    they are. The tokens with a character of the end are predicted. Of a text that is longer than
    the model reads, the beginning is cut. Models that only read left to right are scored, too.
    """

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return ()  # the head of either kind serves

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return a sequence for each predicted token, or one for all.

        Raises:
            DataError: an end has no token, or more tokens than the model reads.
        """
        texts = [example.text + (example.text_b or "") for example in examples]
        room, result = length - tokenizer.template.single, []
        for example, text in zip(examples, tokenizer.encode_with_offsets(texts), strict=True):
            cut = max(0, len(text.ids) - room)
            since = int((text.offsets[:, 1] <= len(example.text)).sum()) - cut
            if self.variant == "causal" and not since and not tokenizer.template.before:
                since = min(1, len(text.ids))  # nothing precedes the first token
            if since < 0 or since + cut == len(text.ids):
                count = len(text.ids) - since - cut
                message = f"its end has {count} tokens, and the model reads 1 to {room}"
                raise DataError(message, where=example.where, fix="Correct the row, or remove it.")
            chunk = self._sequences(text.ids[cut:], text.words[cut:], tokenizer, since)
            result.append(base.EncodedExample(tuple(chunk), len(text.ids), cut))
        return result


class PairScorer(MaskedScorer[PreferencePrediction]):
    """Minimal pairs with a model that has the head of the task's variant; see `TaskModel`."""

    task: MinimalPairTask

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> PreferencePrediction:
        """Return the log-likelihoods of both texts."""
        share = 0.5 if self.task.variant == "both" else 1.0
        first, second = encoded.by_text([math.fsum(output.tolist()) for output in outputs])
        return PreferencePrediction(share * math.fsum(first), share * math.fsum(second))


@dataclass(frozen=True)
class MinimalPairTask(MaskedTask[PreferencePrediction]):
    """The choice between two texts by their log-likelihood.

    Attributes:
        variant: "original" and "word_l2r" are for masked models, "both" for models that were
            trained both ways (`LikelihoodTask`), "causal" for these and for models that read left
            to right. Without a setting it is the one for the model's head.
    """

    aliases = "blimp minimal-pairs"
    metric = "accuracy"
    metrics = base.directions("accuracy")
    window = 128
    long_texts = "windows"
    example_input: ClassVar[Any] = [["the cats sleep", "the cats sleeps"]]
    model_class = PairScorer
    check_binding = check_direction

    variant: Variant = "original"
    kind: Literal["prefer"] = "prefer"

    def fitted(self, model: Model) -> MinimalPairTask:
        """Return the task for the head that predicts tokens."""
        if "causal" in model.heads:
            return dataclasses.replace(self, variant="causal")
        trained = "masked" in model.heads and model.config.readout.shifted
        return TwoWayPairTask(variant=self.variant) if trained else self

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (NextTokenHead() if self.variant == "causal" else MaskedHead(),)

    def check_columns(self, columns: TextColumns, where: str) -> None:
        """Raise a DataError for single texts."""
        if columns.text_b is None:
            message = f"has one text a row, {columns.text!r}; two are compared, the right one first"
            fix = f"Name both: {argument(text='NAME', text_b='NAME')}."
            raise DataError(message, where=where, fix=fix)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return the sequences of both texts; errors as `LikelihoodTask.encode`."""
        located = ((text, e.where) for e in examples for text in (e.text, e.text_b or ""))
        texts = [TextExample(text, where=where) for text, where in located]
        if NextTokenHead() not in self.heads(labels, None):
            scored = LikelihoodTask(variant=self.variant)
            encoded = scored.encode(texts, tokenizer, labels, length)
        else:  # a text is a sequence, or several if it is longer than the model reads
            encoded, room = [], length - tokenizer.template.single
            for ids in tokenizer.encode([text.text for text in texts]):
                chunks = (ids[start : start + room] for start in range(0, len(ids), room))
                sequences = list[Sequence]()
                for bare in (assemble(chunk, None, tokenizer.template) for chunk in chunks):
                    # All tokens but the first are predicted, [SEP] included
                    index = np.arange(1, len(bare.ids))
                    targets = {"masked": TokenTargets(index, bare.ids[index].astype(np.int64))}
                    if len(index):
                        sequences.append(dataclasses.replace(bare, targets=targets, causal=True))
                encoded.append(base.EncodedExample(tuple(sequences), len(ids), 0))
        pairs = zip(encoded[::2], encoded[1::2], strict=True)
        return [base.EncodedExample.of_texts(pair) for pair in pairs]

    def score(
        self, results: base.Results[TextExample, PreferencePrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return "accuracy", the share of pairs whose first text is more likely, and "pairs"."""
        correct = [self.grade(example, prediction, labels) for example, prediction in results]
        if not correct:
            raise base.nothing_to_score("pair")
        return {"accuracy": sum(correct) / len(correct), "pairs": len(correct)}

    def grade(
        self, example: TextExample, prediction: PreferencePrediction, labels: Many[str]
    ) -> float:
        """Return 1 if the first text is more likely than the second, else 0."""
        return float(prediction.first > prediction.second)


class TwoWayPairTask(MinimalPairTask):
    """The same for a model that was trained both ways, whose one head serves all variants."""

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (MaskedHead(),)
