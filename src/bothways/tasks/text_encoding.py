"""Model inputs of texts and pairs of texts, and the choices for texts that are too long.

truncate     the first tokens                                       (Google's run_classifier.py)
head_tail    the first quarter of the room and the last tokens      (Sun et al. 2019, section 5.3.1)
windows      all tokens, in overlapping windows whose outputs are averaged
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import assert_never

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.sequence import Ids, Sequence
from bothways.core.targets import Targets, WindowWeight
from bothways.tasks.base import EncodedExample, Output
from bothways.tasks.text_examples import Texts
from bothways.tasks.windows import windows
from bothways.text.template import Template, assemble, truncated
from bothways.text.tokenizer import Tokenizer

T = TypeVar("T")
LongTexts = Literal["truncate", "head_tail", "windows"]
HEAD = 4
"""The head of a text that is cut in the middle is the room divided by this: 128 of 510 tokens."""


@dataclass(frozen=True)
class EncodedTexts(EncodedExample):
    """The sequences of texts that have outputs of their own.

    Attributes:
        windows: number of sequences of each text.
    """

    windows: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, texts: Many[EncodedExample]) -> EncodedTexts:
        """Join the sequences of several texts."""
        return cls(
            tuple(sequence for text in texts for sequence in text.sequences),
            sum(text.tokens for text in texts),
            sum(text.cut for text in texts),
            tuple(len(text.sequences) for text in texts),
        )

    def by_text(self, values: Many[T]) -> list[Many[T]]:
        """Return the values of each text from the values of its sequences."""
        ends = np.cumsum(self.windows).tolist()
        return [values[end - count : end] for end, count in zip(ends, self.windows, strict=True)]


@dataclass(frozen=True)
class Fit:
    """The treatment of texts that are longer than the model's input.

    Attributes:
        length: maximum length of a sequence in tokens, special tokens included.
        long_texts: what to do with longer texts.
        stride: tokens from one window to the next; None for half a window.
    """

    length: int
    long_texts: LongTexts = "truncate"
    stride: int | None = None

    def single(self, ids: Ids, template: Template, prompt: int = 0) -> tuple[list[Sequence], int]:
        """Return the sequences of a text, and the number of tokens that are in none of them.

        Args:
            prompt: the number of tokens at the start of `ids` that begin each sequence.

        Raises:
            ConfigError: the prompt leaves no room for a text.
        """
        room = self.length - template.single - prompt
        if room < 1:
            message = f"has {prompt} tokens, and a sequence has {self.length}"
            raise ConfigError(message, where="prompt", fix="Shorten the prompt, or set a length.")
        lead, remaining = ids[:prompt], ids[prompt:]
        chunks, cut = self._parts(remaining, room)
        chunks = [np.concatenate([lead, chunk]) for chunk in chunks] if prompt else chunks
        return [assemble(chunk, None, template) for chunk in chunks], cut

    def pair(self, a: Ids, b: Ids, template: Template) -> tuple[list[Sequence], int]:
        """Return the sequences of two texts, and the number of tokens that are in none of them.

        Windows move over the longer text; the other one keeps at most half of the room.
        """
        room = self.length - template.pair
        first, second = truncated(len(a), len(b), room)
        if self.long_texts == "windows" and len(a) + len(b) > room:
            if len(a) > len(b):
                second = min(len(b), room // 2)
                first = room - second
                chunks, cut = self._parts(a, first)
                pairs = [(chunk, b[:second]) for chunk in chunks]
                return [assemble(*both, template) for both in pairs], cut + len(b) - second
            first = min(len(a), room // 2)
            chunks, cut = self._parts(b, room - first)
            pairs = [(a[:first], chunk) for chunk in chunks]
            return [assemble(*both, template) for both in pairs], cut + len(a) - first
        ((a_ids,), cut_a), ((b_ids,), cut_b) = self._parts(a, first), self._parts(b, second)
        return [assemble(a_ids, b_ids, template)], cut_a + cut_b

    def _parts(self, ids: Ids, room: int) -> tuple[list[Ids], int]:
        """Return the parts of a text, of at most `room` tokens, and how many tokens are missing."""
        if len(ids) <= room:
            return [ids], 0
        match self.long_texts:
            case "truncate":
                return [ids[:room]], len(ids) - room
            case "head_tail":
                head = room // HEAD
                head_and_tail = np.concatenate([ids[:head], ids[len(ids) - (room - head) :]])
                return [head_and_tail], len(ids) - room
            case "windows":
                stride = self.stride or max(1, room // 2)
                chunks = windows(len(ids), room, stride, full=True)
                return [ids[chunk.start : chunk.stop] for chunk in chunks], 0
            case _:
                assert_never(self.long_texts)


def encode_texts(
    examples: Many[Texts], targets: Many[Targets], tokenizer: Tokenizer, fit: Fit
) -> list[EncodedExample]:
    """Encode texts and pairs; each sequence has its example's target under the name "label".

    Where long texts are read in windows, each sequence also has its "weight": the windows of a text
    weigh as much together as one short text.
    """
    firsts = tokenizer.encode([example.text for example in examples])
    seconds = iter(
        tokenizer.encode([example.text_b for example in examples if example.text_b is not None])
    )
    template, results = tokenizer.template, []
    for example, a, target in zip(examples, firsts, targets, strict=True):
        if example.text_b is None:
            tokens, (chunks, cut) = len(a), fit.single(a, template)
        else:
            b = next(seconds)
            tokens, (chunks, cut) = len(a) + len(b), fit.pair(a, b, template)
        targets_of_example: dict[str, Targets] = {"label": target}
        if fit.long_texts == "windows":
            targets_of_example["weight"] = WindowWeight(
                np.array([1 / len(chunks)], dtype=np.float32)
            )
        # [CLS], which the head reads, is global in Longformer.
        masks = (np.arange(len(chunk)) == 0 for chunk in chunks)
        sequences = tuple(
            Sequence(chunk.ids, chunk.segments, targets_of_example, global_attention_mask=mask)
            for chunk, mask in zip(chunks, masks, strict=True)
        )
        results.append(EncodedExample(sequences, tokens, cut))
    return results


def window_weight(batch: Batch) -> Float[Tensor, " sequences"]:
    """Return the weight of each sequence's label: 1, or less where texts are read in windows."""
    if "weight" not in batch.targets:
        return torch.ones(batch.layout.sequences, device=batch.ids.device)
    return torch.as_tensor(batch.target("weight", WindowWeight).weight)


def averaged(outputs: Many[Output]) -> Output:
    """Return the mean output of the windows of a text."""
    return outputs[0] if len(outputs) == 1 else np.mean(outputs, axis=0, dtype=np.float32)
