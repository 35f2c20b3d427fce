"""Classification of texts and of pairs (Devlin et al. 2018, section 4.1 and figure 4a, b).

The pooled vector of [CLS] goes through dropout and one dense layer to the logits of the classes;
all weights are trained. Examples are `TextExample`s: one or two texts and a label, as in GLUE's
CoLA or RTE. Optionally, targets are smoothed and classes weighted against their frequency.

Zero-shot classification is by a model of entailment (Yin et al. 2019). Each candidate makes a
sentence, "This example is {}.", and the model judges whether the text entails it. The logits of
"entailment" go through a softmax over the candidates; if each candidate is judged by itself, those
of "contradiction" and "entailment" through a softmax of the two. The pairs of a text are sequences
of one example, so they are packed and computed together.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from bothways.core.batch import IGNORED, Batch, LabelTargets
from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, Finding, argument, setting
from bothways.core.terminal import listed
from bothways.core.training_module import Loss
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.objectives.losses import weighted_cross_entropy
from bothways.tasks import base, text_checks, text_task
from bothways.tasks.columns import unlabelled_marks
from bothways.tasks.metrics import Confusion, classification_metrics, negative_log
from bothways.tasks.predictions import ClassPrediction
from bothways.tasks.text_task import LongTextTask, TextExample, TextTask
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

MANY = 20
"""Number of classes from which labels that are fractions look like scores."""
_FRACTION = re.compile(r"-?\d+\.\d+")


class TextClassifier(base.TaskModel[TextExample, ClassPrediction]):
    """A classification task with a model that has the head "labels"; see `TaskModel`."""

    task: ClassificationTask
    scale = "classes"

    @property
    def class_weights(self) -> Float64[Tensor, " labels"]:
        """The weight of each class in the loss."""
        weighting = self.task.weighting
        numbers = weighting if isinstance(weighting, tuple) else (1.0,) * len(self.labels)
        return torch.tensor(numbers, dtype=torch.float64)

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the summed weights of the labels: of their class, and of their window."""
        labels = text_task.targets_of(batch)
        labelled = labels != IGNORED
        weights = self.class_weights[labels[labelled]] * text_task.window_weight(batch)[labelled]
        return {"label": float(weights.sum())}

    def losses(self, scores: Tensor, batch: Batch) -> Mapping[str, Loss]:
        """Return the cross-entropy of the labels. Weighted labels have no count of hits."""
        labels, smoothing = text_task.targets_of(batch), self.task.smoothing
        weighted = self.task.long_texts == "windows" or self.task.weighting != "equal"
        if not weighted and smoothing == 0:
            return {"label": cross_entropy(scores, labels)}
        classes, weight = self.class_weights.to(scores.device), text_task.window_weight(batch)
        loss = weighted_cross_entropy(scores, labels, classes, smoothing, weight)
        return {"label": dataclasses.replace(loss, hits=None) if weighted else loss}

    def decode(
        self, example: TextExample, encoded: base.EncodedExample, outputs: Many[base.Output]
    ) -> ClassPrediction:
        """Return the most probable label, if the model is sure enough, and all probabilities."""
        logits = text_task.averaged(outputs)
        index, chances, least = int(logits.argmax()), base.softmax(logits), self.task.conformal
        label = self.labels[index] if chances[index] >= self.task.abstain else None
        label_set = None
        if least is not None:
            label_set = tuple(self.labels[n] for n in np.argsort(-chances) if chances[n] >= least)
        probabilities = dict(zip(self.labels, chances.tolist(), strict=True))
        return ClassPrediction(label, index, probabilities, label_set)


class ClassScores:
    """The metrics of tasks whose predictions are classes.

    Attributes:
        abstain: the probability below which a prediction has no label.
    """

    metric: ClassVar[str] = "accuracy"
    problem: ClassVar[Literal["single_label_classification"]] = "single_label_classification"
    abstain: float

    def __post_init__(self) -> None:
        require_range("[0, 1]", abstain=self.abstain)

    def directions(self, labels: Many[str]) -> Mapping[str, base.Direction]:
        """Return accuracy, F1, Matthews correlation and loss."""
        of_two = ("f1",) * (len(labels) == 2)
        return base.directions("accuracy", "f1_macro", "mcc", *of_two, lowest="loss")

    def score(
        self, results: base.Results[TextExample, ClassPrediction], labels: Many[str]
    ) -> base.Metrics:
        """Return accuracy, F1, Matthews correlation and mean cross-entropy ("loss", in nats).

        If the task abstains, also the share of examples that have a label ("coverage"), and the
        accuracy of these ("accuracy_covered", absent without any). With conformal sets the share
        of sets that hold the right label ("set_coverage"), and their mean size ("set_size").
        """
        index = {label: position for position, label in enumerate(labels)}
        confusion, loss = Confusion(len(index)), 0.0
        covered, right, held, size, conformal = 0, 0, 0, 0, False
        for example, prediction in results:
            label = base.required(example.label, example.where)
            confusion.pairs[_index(example, index), prediction.index] += 1
            loss += negative_log(prediction.probabilities[label])
            covered += prediction.label is not None
            right += prediction.label == example.label
            conformal = prediction.label_set is not None
            held += example.label in (prediction.label_set or ())
            size += len(prediction.label_set or ())
        if not (total := confusion.total):
            raise base.nothing_to_score()
        metrics = {**classification_metrics(confusion), "loss": loss / total}
        if self.abstain > 0:
            metrics |= {"coverage": covered / total}
            metrics |= {"accuracy_covered": right / covered} if covered else {}
        if conformal:
            metrics |= {"set_coverage": held / total, "set_size": size / total}
        return metrics

    def grade(self, example: TextExample, prediction: ClassPrediction, labels: Many[str]) -> float:
        return float(prediction.label == example.label)


@dataclass(frozen=True)
class ClassificationTask(ClassScores, LongTextTask[ClassPrediction]):
    """One of several classes for a text or a pair of texts.

    Attributes:
        smoothing: share of each target that is spread evenly over all classes. Reported metrics,
            including the loss, ignore it.
        weighting: weights of the classes in training: "equal", "balanced", or a number above 0 for
            each label in order. Balanced weights are counted in the training data of a run
            (`adapted`), and replace "balanced" in the task.
        abstain: the probability below which a prediction has no label.
        conformal: the least probability of a label in the set that holds the right label as often
            as guaranteed; `bothways calibrate` chooses it. None for no sets.
    """

    aliases = "binary classification intent nli sentiment sentiment-analysis text-classification"
    model_class = TextClassifier

    smoothing: float = 0.0
    weighting: Literal["equal", "balanced"] | tuple[float, ...] = "equal"
    abstain: float = 0.0
    conformal: float | None = None
    kind: Literal["classify"] = "classify"

    def __post_init__(self) -> None:
        super().__post_init__()
        LongTextTask.__post_init__(self)
        require_range("[0, 1)", smoothing=self.smoothing)
        require_range("[0, 1]", conformal=self.conformal)
        for weight in self.weighting if isinstance(self.weighting, tuple) else ():
            require_range("(0, inf)", weighting=weight)

    def adapted(self, train: Many[TextExample], labels: Many[str] = ()) -> ClassificationTask:
        if self.weighting != "balanced":
            return self
        # n / (classes · count): all classes weigh the same, 1 on average, as by
        # `class_weight="balanced"` of scikit-learn (King and Zeng 2001).
        counts = Counter(example.label for example in train if example.label is not None)
        names = labels or self.labels(train)
        weights = (counts.total() / (len(counts) * counts[name]) for name in names)
        return dataclasses.replace(self, weighting=tuple(weights))

    def check_binding(self, model: Model, tokenizer: Tokenizer, labels: Many[str]) -> None:
        if self.weighting == "balanced":
            message = "balanced weights are counted in training data, and none was read"
            fix = "Count them: task.adapted(examples); or give a number for each label."
            raise ConfigError(message, where="task.weighting", fix=fix)
        if self.weighting != "equal" and len(self.weighting) != len(labels):
            message = f"there are {len(self.weighting)} for {len(labels)} labels "
            fix = "Give one for each label, in this order."
            raise ConfigError(f"{message}({', '.join(labels)})", where="task.weighting", fix=fix)

    def labels(self, examples: Iterable[TextExample]) -> tuple[str, ...]:
        labels = (example.label for example in examples)
        return text_task.in_order(label for label in labels if label is not None)

    def check(self, train: Many[TextExample], dev: Many[TextExample]) -> list[Finding]:
        labels = {e.label for e in (*train, *dev) if e.label is not None}
        marks = unlabelled_marks(labels)
        train, dev = (
            [dataclasses.replace(e, label=None) if e.label in marks else e for e in some]
            for some in (train, dev)
        )
        findings = text_checks.check_examples(train, dev, self.texts, lambda e: e.label, marks)
        first_labels = {self.texts(e): e.label for e in reversed(train)}
        fault = "training example(s) has|have the text of an earlier one and another label"
        findings += text_checks.check_rows(
            train, fault, lambda e: e.label != first_labels[self.texts(e)],
            "Correct one of the labels, or keep one example.", "warning", "labels",
        )  # fmt: skip
        known = labels - marks
        if "-1" in known and known <= {"-1", "0", "1"}:
            message = "the label -1 is learned as a class, as in a scale from -1 to 1"
            fix = "If it marks rows without a label, remove them."
            findings.append(Finding("labels", "warning", message, fix=fix))
        names = self.labels(train)
        if len(names) == 1:
            message = f"training needs at least two classes, and the only label is {names[0]!r}"
            fix = "Name another label column, or give more data."
            findings.append(Finding("labels", "error", message, fix=fix))
        findings += text_checks.check_known(
            names, ((e.label, e.where) for e in dev if e.label is not None)
        )
        if len(names) > MANY and 2 * len(list(filter(_FRACTION.fullmatch, names))) > len(names):
            message = f"the {len(names)} labels look like scores ({listed(names, 5)}), not classes"
            fix = f"To learn them as scores, set {argument(task='regress')}."
            findings.append(Finding("labels", "warning", message, fix=fix))
        elif len(names) > MANY and len(names) == sum(e.label is not None for e in train):
            message = (
                f"each of the {len(names)} labels has one training example ({listed(names, 5)})"
            )
            fix = (
                f"Such labels cannot be learned; is another column meant? {argument(label='NAME')}."
            )
            findings.append(Finding("labels", "warning", message, fix=fix))
        counts = Counter(e.label for e in train if e.label is not None)
        if len(counts) > 1:
            (top, top_count), total = counts.most_common(1)[0], counts.total()
            findings += text_checks.check_constant(counts)
            if top_count / total > text_checks.COMMON:
                share = f"{top_count / total:.1%} of the training examples"
                message = f"{share} are {top!r}: accuracy says little here"
                fix = f"Choose checkpoints by another metric: {setting('metric', 'f1_macro')}."
                findings.append(Finding("balance", "warning", message, fix=fix))
            findings += text_checks.check_rare(counts, total, "classes")
        return findings

    def target(self, example: TextExample, index: Mapping[str, int]) -> LabelTargets:
        return LabelTargets(np.array([_index(example, index)], dtype=np.int64))

    def baseline(self, examples: Many[TextExample]) -> base.Metrics:
        """Return the metrics of the most frequent class.

        The loss is the class frequencies'; it is absent with smoothing or weights.
        """
        labels, counts = self.labels(examples), Counter(example.label for example in examples)
        # The best constant probabilities are the frequencies: the loss is their entropy
        shares = {label: counts[label] / counts.total() for label in labels}
        top = max(labels, key=counts.__getitem__)
        constant = ClassPrediction(top, labels.index(top), shares)
        metrics = ClassificationTask().score(((e, constant) for e in examples), labels)
        plain = self.smoothing == 0 and self.weighting == "equal"
        return metrics if plain else {n: value for n, value in metrics.items() if n != "loss"}


def _index(example: TextExample, index: Mapping[str, int]) -> int:
    if example.label is None:
        return IGNORED
    if example.label not in index:
        raise base.unknown_label(f"label {example.label!r}", example.label, [*index], example.where)
    return index[example.label]


NEEDS_ENTAILMENT = "Choose a model for natural language inference, such as one trained on MNLI."
"""What to do about a model that was trained on something else."""


class EntailmentClassifier(base.TaskModel[TextExample, ClassPrediction]):
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

    check_columns = text_task.check_single_texts

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
