"""What a task is: a learner whose sequences come from examples, and whose outputs become typed, scored predictions.

    examples → encode → sequences → (packed, through the model) → outputs → decode → predictions → score

One example may give many sequences (the windows of a long text, the choices of a question); their outputs meet again in
`decode`. Everything streams: what is held is one window of examples, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError
from bothways.core.learner import Learner
from bothways.core.sequence import Sequence
from bothways.model.model import Model
from bothways.tasks.task import E, Metrics, P, Task
from bothways.text.tokenizer import Tokenizer

Output = NDArray[np.float32]
"""What the model says of one sequence, as the task wants it: a vector of logits, or one per token."""

SHORTEST = 5
"""[CLS], a token, [SEP], a token, [SEP]."""


@dataclass(frozen=True)
class EncodedExample:
    """What an example becomes.

    Attributes:
        sequences: with targets where the example has its answer.
        tokens: of its texts, without special tokens, before anything was cut.
        cut: how many of these are in no sequence.
    """

    sequences: tuple[Sequence, ...]
    tokens: int
    cut: int


class TaskLearner(Learner, Generic[E, P]):
    """A learner over examples. Subclasses define the methods below that raise, `weights` and `forward`.

    Args:
        definition: what the task is.
        model: the encoder with the heads that the definition asks for.
        tokenizer: of its ids.
        labels: names of the outputs, in order.
        length: the longest text in tokens, specials included.

    Raises:
        ConfigError: a length that the model cannot have.
    """

    def __init__(
        self,
        definition: Task[E, P],
        model: Model,
        tokenizer: Tokenizer,
        labels: Many[str],
        length: int,
    ) -> None:
        super().__init__()
        positions = model.config.max_positions
        if not SHORTEST <= length <= positions:
            what = f"must be from {SHORTEST} to the encoder's {positions} positions, not {length}"
            raise ConfigError(
                what, where="length", fix=f"Set length={min(max(length, SHORTEST), positions)}."
            )
        self.definition, self.model, self.tokenizer = definition, model, tokenizer
        self.labels, self.length = tuple(labels), length

    def encode(self, examples: Many[E]) -> list[EncodedExample]:
        """What each example becomes; as the definition has it."""
        return self.definition.encode(examples, self.tokenizer, self.labels, self.length)

    def outputs(self, batch: Batch) -> list[Output]:
        """What the model says of each sequence of a batch on its device."""
        raise NotImplementedError

    def decode(self, example: E, outputs: Many[Output]) -> P:
        """The prediction for an example, from the outputs of its sequences."""
        raise NotImplementedError

    def score(self, results: Iterable[tuple[E, P]]) -> Metrics:
        """The metrics of examples with their predictions, in one pass and constant memory."""
        raise NotImplementedError

    def grade(self, example: E, prediction: P) -> float:
        """How good one prediction is, more being better: 1 for a right label, 0 for a wrong one. For tests between models."""
        raise NotImplementedError

    def tuned(self, results: Iterable[tuple[E, P]]) -> Task[E, P]:
        """The definition with what is best chosen from predictions on development data, such as thresholds."""
        return self.definition

    def prepare(self, sequence: Sequence, rng: np.random.Generator) -> Sequence:
        """The sequence as it is: its targets came with its example."""
        return sequence
