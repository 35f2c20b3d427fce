"""A task that the package does not have: the relation of two words of a sentence, as one module.

It defines an example, targets, a head with its module, a task and its task model, and touches no other
file. In the package its head would be entered in the union `Head`; here it is a member by
inheritance. Idea: the vectors of both words, concatenated, go through one dense layer
(Baldini Soares et al. 2019, figure 3d).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bothways.core.batch import IGNORED, Batch, Targets
from bothways.core.source import Sequence
from bothways.core.training_module import Loss
from bothways.model.config import EncoderConfig
from bothways.model.heads import Head, LabelHead, TagHead
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.model import Model
from bothways.tasks.base import (
    Direction,
    EncodedExample,
    Metrics,
    Output,
    Row,
    Task,
    TaskModel,
    nothing_to_score,
    softmax,
)
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.metrics import Confusion, classification_metrics
from bothways.tasks.predictions import ClassPrediction
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RelationExample:
    """A sentence, the places of two of its words, and their relation."""

    words: tuple[str, ...]
    first: int
    second: int
    label: str | None = None
    where: str = "an example"

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class RelationTargets(Targets):
    """The positions of both words and the relation, `(1)` each."""

    POSITIONS = frozenset({"first", "second"})
    first: NDArray[np.int64] | Tensor
    second: NDArray[np.int64] | Tensor
    labels: NDArray[np.int64] | Tensor

    def without_weight(self) -> "RelationTargets":
        return RelationTargets(self.first, self.second, np.full_like(self.labels, IGNORED))


@dataclass(frozen=True)
class RelationHead(TagHead):
    """Returns `count` logits for the vectors of two tokens of each sequence, concatenated."""

    kind: Literal["relation"] = "relation"
    title: ClassVar[str] = "relation head"
    suffix: ClassVar[str | None] = None
    reads_batch: ClassVar[bool] = False

    def build(self, config: EncoderConfig) -> nn.Module:
        return nn.Linear(2 * config.width, self.count)


class RelationClassifier(TaskModel[RelationExample, ClassPrediction]):
    """The task with a model that has the head "relation"."""

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"relation": float((_targets(batch)[2] != IGNORED).sum())}

    def forward(self, batch: Batch) -> Mapping[str, Loss]:
        return {"relation": cross_entropy(self.logits(batch), _targets(batch)[2])}

    def logits(self, batch: Batch) -> Tensor:
        first, second, _ = _targets(batch)
        hidden = self.model.encoder(batch).last
        return self.model.heads["relation"](torch.cat([hidden[first], hidden[second]], -1))

    def outputs(self, batch: Batch) -> list[Output]:
        return list(self.logits(batch).float().cpu().numpy())

    def decode(
        self, example: RelationExample, encoded: EncodedExample, outputs: Many[Output]
    ) -> ClassPrediction:
        index = int(outputs[0].argmax())
        chances = dict(zip(self.labels, softmax(outputs[0]).tolist(), strict=True))
        return ClassPrediction(self.labels[index], index, chances)


@dataclass(frozen=True)
class RelationTask(Task[RelationExample, ClassPrediction]):
    """The relation of two words."""

    metric: ClassVar[str] = "accuracy"
    metrics: ClassVar[Mapping[str, Direction]] = {"accuracy": "highest"}
    model_class: ClassVar[type[RelationClassifier]] = RelationClassifier

    kind: Literal["relation"] = "relation"

    def example(
        self,
        row: Row,
        columns: Any = None,
        labelled: bool | None = None,
        *,
        where: str = "an example",
    ) -> RelationExample:
        values: Mapping[str, Any] = row
        return RelationExample(
            tuple(values["words"]), values["first"], values["second"], values.get("label"), where
        )

    def labels(self, examples: Iterable[RelationExample]) -> tuple[str, ...]:
        return tuple(sorted({e.label for e in examples if e.label is not None}))

    def heads(self, labels: Many[str], dropout: float | None) -> tuple[Head, ...]:
        return (RelationHead(len(labels)),)

    def texts(self, example: RelationExample) -> tuple[str, ...]:
        return (example.text,)

    def encode(
        self, examples: Many[RelationExample], tokenizer: Tokenizer, labels: Many[str], length: int
    ) -> list[EncodedExample]:
        inputs, template = [], tokenizer.template
        for example in examples:
            words = tokenizer.encode(list(example.words))
            starts = np.cumsum([len(template.before), *map(len, words)])
            bare = assemble(np.concatenate(words), None, template)
            label = IGNORED if example.label is None else list(labels).index(example.label)
            positions = (starts[[example.first]], starts[[example.second]])
            target = RelationTargets(*positions, np.array([label], dtype=np.int64))
            sequence = Sequence(bare.ids, bare.segments, {"relation": target})
            inputs.append(EncodedExample((sequence,), len(bare.ids) - template.single, 0))
        return inputs

    def score(
        self, results: Iterable[tuple[RelationExample, ClassPrediction]], labels: Many[str]
    ) -> Metrics:
        index = {label: number for number, label in enumerate(labels)}
        pairs = ((index[str(example.label)], prediction.index) for example, prediction in results)
        confusion = Confusion(len(labels), pairs)
        if not confusion.total:
            raise nothing_to_score()
        return {"accuracy": classification_metrics(confusion)["accuracy"]}

    def grade(
        self, example: RelationExample, prediction: ClassPrediction, labels: Many[str]
    ) -> float:
        return float(prediction.label == example.label)

    def baseline(self, examples: Many[RelationExample]) -> Metrics:
        (_, count), *_ = Counter(example.label for example in examples).most_common(1)
        return {"accuracy": count / len(examples)}


def _targets(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    targets = batch.target("relation", RelationTargets)
    first, second, labels = targets.first, targets.second, targets.labels
    return torch.as_tensor(first), torch.as_tensor(second), torch.as_tensor(labels)


@dataclass(frozen=True)
class TopicTask(ClassificationTask):
    """A task on texts with predictions of a kind that the package has."""

    kind: Literal["topic"] = "topic"  # type: ignore[assignment]


def serve_once(folder: Path, rows: list[dict[str, Any]], file: Path) -> None:
    """Write what a server with the task answers, in a process where its entry precedes the routes."""
    from bothways.tasks.catalogue import ALL_TASKS

    ALL_TASKS["relation"] = RelationTask  # type: ignore[assignment]  # the one entry
    ALL_TASKS["topic"] = TopicTask
    import httpx

    from bothways.hub.model_folder import load_model
    from bothways.prediction.predictor import Predictor
    from bothways.serving.app import App
    from bothways.serving.models import ServedModel
    from running_server import running

    loaded = load_model(folder, heads=(RelationHead(2),))
    task_model = RelationTask().bind(loaded.model, loaded.tokenizer, loaded.labels, 12)
    with running(App({"toy": ServedModel("toy", Predictor(task_model))})) as url:
        routes = httpx.get(url + "/openapi.json").json()["paths"]
        assert "/relation" in routes
        assert "/predict" not in routes, "it takes texts and pairs alone"
        response = httpx.post(url + "/relation", json={"inputs": rows})
        file.write_text(response.raise_for_status().text)
    model = Model(loaded.model.config, (LabelHead(2),), loaded.model.encoder)
    topics = TopicTask().bind(model, loaded.tokenizer, ("one", "two"), 12)
    with running(App({"toy": ServedModel("toy", Predictor(topics))})) as url:
        for route in ("/topic", "/predict", "/"):
            body = {"inputs": rows[0]["words"][0]}
            body |= {"parameters": {"function_to_apply": "softmax"}} if route == "/" else {}
            httpx.post(url + route, json=body).raise_for_status()
