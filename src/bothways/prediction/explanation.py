"""Explanations of predictions: leave one out, integrated gradients, attention and its rollout.

    task model = bothways.load("runs/sst").unprepared()
    example = task model.task.from_texts(("what a lovely film",))
    integrated_gradients(task model, example, ExplainedOutput("positive"))

None of these is a proof. What a model computes without a word is a fact about another text;
gradients depend on the baseline; attention shows which vectors are mixed, not what they are used
for (Jain and Wallace 2019, "Attention is not explanation"; Wiegreffe and Pinter 2019 reply).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64
from numpy.typing import NDArray
from torch import Tensor, nn

from bothways.core.batch import Batch, pack
from bothways.core.errors import ConfigError, DataError
from bothways.core.sequence import Sequence
from bothways.core.targets import TokenTargets
from bothways.model.encoder import Encoder, recorded_attentions
from bothways.tasks import predictions
from bothways.tasks.base import EncodedExample, TaskModel
from bothways.tasks.classification.task import TextClassifier
from bothways.tasks.mask_filling.task import MaskFiller
from bothways.tasks.multilabel.task import MultilabelClassifier
from bothways.tasks.regression.task import Regressor
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.tagging.task import Tagger
from bothways.tasks.zero_shot import vocabulary_logits
from bothways.text.template import assemble, truncated
from bothways.text.tokenizer import Tokenizer

WHOLE_TEXT = "Shorten the text, so that the model reads it in one piece."


class ExplainedOutput(NamedTuple):
    """The output that is explained.

    Attributes:
        label: of a class or a tag, or the token for a mask; None for a score or a cosine.
        word: whose tag, or which mask, from 0.
    """

    label: str | None = None
    word: int = 0


class Word(NamedTuple):
    """A word of an example, as its tokenizer cuts words.

    Attributes:
        text: a slice of its text.
        start, stop: its characters there.
        part: 0 in the first text, 1 in the second.
        ids: its tokens.
    """

    text: str
    start: int
    stop: int
    part: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Attribution:
    """The share of each word in the difference between an output and that for the baseline.

    Attributes:
        words: of the example.
        effects: one for each word; 0 for what the model does not read.
        value: of the target for the example: log odds of a class, a tag or a token; a score.
        baseline: the same where each token is [PAD].
    """

    words: Many[Word]
    effects: NDArray[np.float64]
    value: float
    baseline: float

    @property
    def error(self) -> float:
        """The error of the integration: the sum of the effects, less `value` − `baseline`."""
        return float(self.effects.sum() - (self.value - self.baseline))


def words_of(tokenizer: Tokenizer, example: Any) -> list[Word]:
    """Return the words of an example.

    Raises:
        DataError: its task is not for one text or two.
    """
    if isinstance(example, TagExample):
        spans, sentence = example.spans, example.whole
        rows = tokenizer.encode(list(example.words))
        unknown = (tokenizer.specials.unknown,)  # a word without a token is read as [UNK]
        return [
            Word(sentence[start:stop], start, stop, 0, tuple(row.tolist()) or unknown)
            for (start, stop), row in zip(spans, rows, strict=True)
        ]
    texts = [getattr(example, name, None) for name in ("text", "text_b")]
    if not isinstance(texts[0], str):
        raise DataError("only texts and pairs of texts can be explained", where="method")
    words = []
    for number, text in enumerate(text for text in texts if isinstance(text, str)):
        (encoded,) = tokenizer.encode_with_offsets([text])
        columns = (encoded.words.tolist(), encoded.ids.tolist(), encoded.offsets.tolist())
        tokens_by_word = itertools.groupby(zip(*columns, strict=True), key=lambda row: row[0])
        for _, group in tokens_by_word:
            tokens = list(group)
            start, stop = min(t[2][0] for t in tokens), max(t[2][1] for t in tokens)
            start += len(text[start:stop]) - len(text[start:stop].lstrip())
            words.append(Word(text[start:stop], start, stop, number, tuple(t[1] for t in tokens)))
    return words


# ---- leave one out ----


def without(example: Any, words: Many[Word], index: int) -> Any:
    """Return an example without one of its words, and without the space before or after it."""
    word = words[index]
    if isinstance(example, TagExample):
        words_left = (*example.words[:index], *example.words[index + 1 :])
        return TagExample(
            words_left, where=example.where, before=example.before, after=example.after
        )
    name = "text_b" if word.part else "text"
    text = getattr(example, name)
    left, right = text[: word.start], text[word.stop :]
    if right[:1].isspace() and (not left or left[-1].isspace()):
        right = right[1:]
    elif not right and left[-1:].isspace():
        left = left[:-1]
    return dataclasses.replace(example, **{name: left + right})


def value_of(prediction: Any, target: ExplainedOutput, labels: Many[str]) -> float:
    """Return the value of a target in a prediction: a probability, a score or a cosine.

    Raises:
        DataError: the prediction is of another kind, or has no such label or word.
    """
    match prediction:
        case predictions.ClassPrediction() | predictions.MultilabelPrediction():
            return prediction.probabilities[_known(target.label, labels)]
        case predictions.ScorePrediction():
            return prediction.score
        case predictions.TagPrediction():
            index = [*labels].index(_known(target.label, labels))
            if not 0 <= target.word < len(prediction.words):
                raise _no_word(target.word, len(prediction.words))
            return float(prediction.probabilities[target.word, index])
        case predictions.VectorPrediction() if prediction.cosine is not None:
            return prediction.cosine
        case predictions.VectorPrediction():
            raise DataError("give two texts: their cosine is explained", where="inputs")
        case _:
            message = f"a {type(prediction).__name__} has no number that a word could change"
            raise DataError(message, where="method")


def effect_without(
    prediction: Any, index: int, target: ExplainedOutput, labels: Many[str]
) -> float:
    """Return `value_of` for a prediction that was made without a word.

    NaN for the word whose own tag is the target.
    """
    if isinstance(prediction, predictions.TagPrediction):
        if index == target.word:
            return float("nan")
        target = target._replace(word=target.word - (index < target.word))
    return value_of(prediction, target, labels)


# ---- integrated gradients ----


class PathPart(NamedTuple):
    """A part of the path: its contribution to each token, and the target's values on it."""

    effects: NDArray[np.float64]
    values: list[float]


@dataclass(frozen=True)
class GradientPath:
    """The straight line from a baseline to an example, in the space of token embeddings.

    The baseline has [PAD] for each token but the special ones; positions and segments are those
    of the example. The integral is by Gauss-Legendre quadrature; the first and the last point,
    which are the ends of the line, have no weight.

    Source: Sundararajan et al. 2017, "Axiomatic attribution for deep networks", section 3.

    Attributes:
        words: of the example.
        sequence: the model's input.
        owners: the word of each token; −1 for special tokens.
        target: the output.
        points, weights: of the quadrature, from 0 to 1.
    """

    words: Many[Word]
    sequence: Sequence
    owners: NDArray[np.int64]
    target: ExplainedOutput
    points: NDArray[np.float64]
    weights: NDArray[np.float64]

    def parts(self, size: int) -> list[slice]:
        """Return the path in parts of at most `size` points."""
        return [slice(at, at + size) for at in range(0, len(self.points), size)]

    def attribution(self, segments: Many[PathPart]) -> Attribution:
        """Return the sum of all parts, by word."""
        tokens = sum((segment.effects for segment in segments), np.zeros(len(self.owners)))
        values = [value for segment in segments for value in segment.values]
        effects = np.zeros(len(self.words))
        owned = self.owners >= 0
        np.add.at(effects, self.owners[owned], tokens[owned])
        return Attribution(self.words, effects, values[-1], values[0])


def gradient_path(
    task_model: TaskModel[Any, Any],
    example: Any,
    encoded: EncodedExample,
    target: ExplainedOutput,
    steps: int,
) -> GradientPath:
    """Return the path for an example; nothing is computed.

    Args:
        task_model: the task with its tokenizer; the model is not used.
        encoded: the example, by the same task.
        steps: points of the quadrature.

    Raises:
        DataError: the task has no gradients, or the model reads the example in several pieces; the
            target does not exist.
    """
    explained = TextClassifier | MultilabelClassifier | Regressor | Tagger | MaskFiller
    if not isinstance(task_model, explained):
        message = f"integrated gradients are not available for the task {task_model.task.name!r}"
        raise DataError(message, where="method", fix="Use another method.")
    _check_target(task_model, encoded, target)
    if len(encoded.sequences) != 1:
        raise DataError("the text is read in several windows", where="inputs", fix=WHOLE_TEXT)
    (sequence,) = encoded.sequences
    words = words_of(task_model.tokenizer, example)
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    return GradientPath(
        words,
        sequence,
        _owners(task_model.tokenizer, words, sequence),
        target,
        np.array([0.0, *((nodes + 1) / 2), 1.0]),
        np.array([0.0, *(weights / 2), 0.0]),
    )


def path_part(task_model: TaskModel[Any, Any], path: GradientPath, segment: slice) -> PathPart:
    """Compute a part of a path by a model as it is saved, whose weights need no gradients.

    Raises:
        ConfigError: the encoder has no embeddings of tokens to follow.
    """
    encoder = task_model.model.encoder
    if not isinstance(encoder, Encoder):
        raise ConfigError("gradients are for Transformer encoders", where="method")
    points, table = path.points[segment], encoder.embedding.token
    batch = pack([path.sequence] * len(points)).to(table.weight.device)
    ids = torch.from_numpy(path.sequence.ids.astype(np.int64)).to(table.weight.device)
    base = torch.from_numpy(path.owners >= 0).to(ids.device) & (
        ids != task_model.tokenizer.specials.mask
    )
    plain = torch.where(base, torch.full_like(ids, task_model.tokenizer.specials.pad), ids)
    with torch.enable_grad():
        start, end = (nn.functional.embedding(x, table.weight).detach() for x in (plain, ids))
        scale = torch.tensor(points, dtype=start.dtype, device=ids.device)[:, None, None]
        x = (start + scale * (end - start)).flatten(0, 1).requires_grad_()
        with _embedded_as(table, x):
            values = target_values(task_model, batch, path.target)
        (gradient,) = torch.autograd.grad(values.sum(), x)
    weights = torch.tensor(path.weights[segment], dtype=torch.float64, device=ids.device)
    slopes = gradient.view(len(points), len(ids), -1).double() * (end - start).double()
    effects = (slopes.sum(-1) * weights[:, None]).sum(0)
    return PathPart(effects.cpu().numpy(), values.detach().double().tolist())


def integrated_gradients(
    task_model: TaskModel[Any, Any], example: Any, target: ExplainedOutput, steps: int = 32
) -> Attribution:
    """Return the attribution of an output to the words of an example.

    Args:
        task_model: with a model as it is saved, see `Predictor.unprepared`.
        steps: points of the quadrature; `Attribution.error` shows whether they suffice.

    Raises:
        DataError: as `gradient_path`.
        ConfigError: as `path_part`.
    """
    (encoded,) = task_model.encode([example])
    path = gradient_path(task_model, example, encoded, target, steps)
    return path.attribution([path_part(task_model, path, segment) for segment in path.parts(8)])


def target_values(
    task_model: TaskModel[Any, Any], batch: Batch, target: ExplainedOutput
) -> Float[Tensor, " sequences"]:
    """Return the explained output for each sequence of a batch, with its graph.

    It is the log odds log(p / (1 − p)) of a class, a tag or a token, or a score.
    """
    match task_model:
        case TextClassifier():
            return _log_odds(task_model.scores(batch), _label(task_model, target))
        case MultilabelClassifier():
            return task_model.scores(batch)[:, _label(task_model, target)]
        case Regressor():
            return task_model.scores(batch)
        case Tagger():
            scores = task_model.scores(batch)
            scores = scores.view(batch.layout.sequences, -1, scores.shape[1])
            return _log_odds(scores[:, target.word], _label(task_model, target))
        case MaskFiller():
            index = torch.as_tensor(batch.target("masked", TokenTargets).index)
            rows = index.view(batch.layout.sequences, -1)[:, target.word]
            logits = torch.cat(list(vocabulary_logits(task_model.model, batch, rows)))
            return _log_odds(logits, _label(task_model, target))
        case _:
            raise TypeError(type(task_model))


def _label(task_model: TaskModel[Any, Any], target: ExplainedOutput) -> int:
    """Return the index of the label, for masks the id of the token; errors as `gradient_path`."""
    if not isinstance(task_model, MaskFiller):
        return [*task_model.labels].index(_known(target.label, task_model.labels))
    id = None if target.label is None else task_model.tokenizer.id(target.label)
    if id is None:
        fix = "Give a token as the prediction has it."
        raise DataError(f"there is no token {target.label!r}", where="label", fix=fix)
    return id


def _log_odds(scores: Float[Tensor, "rows classes"], index: int) -> Float[Tensor, " rows"]:
    rivals = torch.cat([scores[:, :index], scores[:, index + 1 :]], 1)
    return scores[:, index] - rivals.logsumexp(1)


def _check_target(
    task_model: TaskModel[Any, Any], encoded: EncodedExample, target: ExplainedOutput
) -> None:
    if isinstance(task_model, Regressor):
        return
    _label(task_model, target)
    if isinstance(task_model, Tagger | MaskFiller):
        name = "tag" if isinstance(task_model, Tagger) else "masked"
        targets = (sequence.target(name, TokenTargets).index for sequence in encoded.sequences)
        count = sum(map(len, targets))
        if not 0 <= target.word < count:
            raise _no_word(target.word, count)


def _known(label: str | None, labels: Many[str]) -> str:
    if label is None or label not in labels:
        fault = "is missing" if label is None else f"{label[:100]!r} is not one of the model's"
        message = f"the label {fault}; there are {len(labels)}"
        raise DataError(message, where="label", fix="Give one of those in a prediction.")
    return label


def _no_word(word: int, count: int) -> DataError:
    return DataError(f"there is no word {word}: there are {count}, from 0", where="word")


def _owners(tokenizer: Tokenizer, words: Many[Word], sequence: Sequence) -> NDArray[np.int64]:
    """Return the word of each token of a sequence; −1 for special tokens.

    Raises:
        DataError: the sequence is not the beginning of the words.
    """
    template, owners, ids = tokenizer.template, [], []
    for number in (0, 1):
        pairs = [(n, id) for n, word in enumerate(words) if word.part == number for id in word.ids]
        owners.append([n for n, _ in pairs])
        ids.append(np.array([id for _, id in pairs], dtype=np.int32))
    if any(word.part for word in words):
        lengths = truncated(len(ids[0]), len(ids[1]), len(sequence) - template.pair)
        gaps = tuple(map(len, (template.first, template.between, template.last)))
        bare = assemble(ids[0][: lengths[0]], ids[1][: lengths[1]], template)
    else:
        lengths = (len(sequence) - template.single, 0)
        gaps = (len(template.before), len(template.after), 0)
        bare = assemble(ids[0][: lengths[0]], None, template)
    if not np.array_equal(bare.ids, sequence.ids):
        message = "the model reads another part of the text than its beginning"
        raise DataError(message, where="inputs", fix=WHOLE_TEXT)
    lead, middle, trail = ([-1] * gap for gap in gaps)
    return np.array([*lead, *owners[0][: lengths[0]], *middle, *owners[1][: lengths[1]], *trail])


@contextmanager
def _embedded_as(table: nn.Embedding, x: Tensor) -> Iterator[None]:
    """Let a table return these rows, whatever it is asked for; its weight needs no gradient."""
    if table.weight.requires_grad:
        raise ConfigError("its weights need gradients: call requires_grad_(False)", where="model")
    hook = table.register_forward_hook(lambda module, arguments, output: x)
    try:
        yield
    finally:
        hook.remove()


# ---- attention ----

HeadWeights = Many[Float32[np.ndarray, "heads n n"]]
"""For each layer, the share of each token (second axis) that reads each token (third axis)."""


def attentions(task_model: TaskModel[Any, Any], sequence: Sequence) -> HeadWeights:
    """Return the attention probabilities of each layer for a sequence.

    Raises:
        ConfigError: the encoder has no attention, or one without a probability for each pair.
    """
    encoder = task_model.model.encoder
    if not isinstance(encoder, Encoder):
        raise ConfigError("this encoder has no attention", where="method")
    bare = Sequence(
        sequence.ids, sequence.segments, {}, sequence.parts, sequence.global_attention_mask
    )
    batch = pack([bare]).to(encoder.embedding.token.weight.device)
    with torch.no_grad(), recorded_attentions(encoder) as layers:
        encoder(batch)
    return [layer[0].float().cpu().numpy() for layer in layers]


def rollout(layers: HeadWeights) -> Float64[np.ndarray, "n n"]:
    """Compute the flow of each input token (second axis) into each output token, by attention.

    Each layer mixes the mean of its heads and its residual path in equal shares; the layers are
    multiplied.

    Source: Abnar and Zuidema 2020, "Quantifying attention flow in transformers", equation 1.
    """
    result = np.eye(layers[0].shape[-1])
    for heads in layers:
        mixed = 0.5 * heads.astype(np.float64).mean(0) + 0.5 * np.eye(len(result))
        result = mixed / mixed.sum(1, keepdims=True) @ result
    return result
