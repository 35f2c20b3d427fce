"""Zero-shot classification by a model of entailment (Yin et al. 2019).

Each candidate makes a sentence, "This example is {}.", and the model judges whether the text
entails it. The logits of "entailment" go through a softmax over the candidates; if each candidate
is judged by itself, those of "contradiction" and "entailment" through a softmax of the two. The
pairs of a text are sequences of one example, so they are packed and computed together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from bothways.core.errors import ConfigError, argument
from bothways.model.model import Model
from bothways.tasks import base
from bothways.tasks.classification.task import ClassScores
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_task import LabelModel, TextExample, TextTask, check_single_texts
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

NEEDS_ENTAILMENT = "Choose a model for natural language inference, such as one trained on MNLI."
"""What to do about a model that was trained on something else."""


class EntailmentClassifier(LabelModel[TextExample, ClassPrediction]):
    """Candidates with a model that has outputs for entailment; see `TaskModel`.

    Raises:
        ConfigError: there is no candidate, or the model has no output that the task needs.
    """

    task: ZeroShotTask

    def __init__(
        self, task: ZeroShotTask, model: Model, tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> None:
        super().__init__(task, model, tokenizer, labels, length)
        if not task.candidates:
            fix = f"Name them: {argument(labels='A, B')}"
            raise ConfigError("there is no label to choose from", where="labels", fix=fix)
        # By name: MNLI's models have them in every order, and some only "not_entailment".
        names = [label.lower() for label in labels]
        entailed = [n for n, name in enumerate(names) if name.startswith("entail")]
        against = [n for n, name in enumerate(names) if "contra" in name or name.startswith("not")]
        self._outputs = [*against[:1], *entailed[:1]]
        for name, label_id in (("entailment", entailed), ("contradiction", against)):
            if not label_id and (name == "entailment" or task.by_itself):
                message = f"the model has no output for {name}: its labels are {', '.join(labels)}"
                raise ConfigError(message, where="labels", fix=NEEDS_ENTAILMENT)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.candidates

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> ClassPrediction:
        """Return the most probable candidate and all probabilities; they sum to 1, unless each
        candidate is judged by itself.
        """
        logits = np.stack(outputs)[:, self._outputs].astype(np.float64)
        chances = base.softmax(logits)[:, 1] if self.task.by_itself else base.softmax(logits[:, -1])
        index = int(chances.argmax())
        label = self.classes[index] if chances[index] >= self.task.abstain else None
        return ClassPrediction(label, index, dict(zip(self.classes, chances.tolist(), strict=True)))


@dataclass(frozen=True)
class ZeroShotTask(ClassScores, TextTask[ClassPrediction]):
    """Classes that a model of natural language inference was not trained on.

    Attributes:
        candidates: the labels to choose from.
        template: the sentence of a label, with {} in its place.
        multi_label: judge each label by itself; a single one always is.
        abstain: the probability below which a prediction has no label.
    """

    aliases = "zero-shot-classification"
    model_class = EntailmentClassifier
    window: ClassVar[int] = 256

    candidates: tuple[str, ...] = ()
    template: str = "This example is {}."
    multi_label: bool = False
    abstain: float = 0.0
    kind: Literal["zero-shot"] = "zero-shot"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{}" not in self.template:
            message = f"must have {{}} where the label goes, not {self.template!r}"
            raise ConfigError(message, where="template", fix='Such as "It is about {}."')
        repeated = {name for name in self.candidates if self.candidates.count(name) > 1}
        if repeated or not all(name.strip() for name in self.candidates):
            message = f"must be different texts, not {', '.join(map(repr, self.candidates))}"
            raise ConfigError(message, where="labels")

    @property
    def by_itself(self) -> bool:
        """True if each candidate is judged without the others."""
        return self.multi_label or len(self.candidates) == 1

    @property
    def hypotheses(self) -> tuple[str, ...]:
        """The sentence of each candidate."""
        return tuple(self.template.replace("{}", name) for name in self.candidates)

    check_columns = check_single_texts

    def texts(self, example: TextExample) -> tuple[str, ...]:
        """Return the text and the sentences that are compared with it."""
        return (example.text, *self.hypotheses)

    def encode(
        self, examples: Many[TextExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[base.EncodedExample]:
        """Return a pair for each candidate, of which only the text is cut."""
        hypotheses, template = tokenizer.encode([*self.hypotheses]), tokenizer.template
        both = length - template.pair  # the tokens of a text and a sentence
        room = both - max(map(len, hypotheses))
        if room < 1:
            message = f"leaves no room for a text: a sequence has {length} tokens"
            raise ConfigError(message, where="template", fix="Shorten template or labels.")
        results = []
        for ids in tokenizer.encode([example.text for example in examples]):
            pairs = (assemble(ids[: both - len(b)], b, template) for b in hypotheses)
            # [CLS], which the head reads, is global in Longformer.
            sequences = tuple(
                dataclasses.replace(pair, global_attention_mask=np.arange(len(pair)) == 0)
                for pair in pairs
            )
            results.append(base.EncodedExample(sequences, len(ids), max(0, len(ids) - room)))
        return results

    def score(
        self, results: base.Results[TextExample, ClassPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return the metrics of classification; `labels` are the model's, not the candidates."""
        return super().score(results, self.candidates)
