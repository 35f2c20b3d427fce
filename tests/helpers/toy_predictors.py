"""Every task with inputs for it, and predictors with random heads on the toy encoder."""

from pathlib import Path
from typing import Any

import torch

from bothways.hub.model_folder import load_model
from bothways.model.heads import ChoiceHead, LabelHead, MaskedHead, PoolerHead, SpanHead, TagHead
from bothways.model.model import Model
from bothways.prediction.predictor import Predictor
from bothways.prediction.prepared_model import PredictPrecision
from bothways.tasks.catalogue import AnyTask
from bothways.tasks.choice.task import ChoiceExample, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask, ZeroShotTask
from bothways.tasks.masked_lm.task import LikelihoodTask, MaskFillingTask
from bothways.tasks.multilabel.task import MultilabelTask
from bothways.tasks.question_answering.task import QuestionAnsweringTask
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.reranking.task import RerankingTask
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask
from bothways.tasks.tagging.task import TaggingTask
from toy_folder import make_examples

TEXTS = [example.text for example in make_examples(48, 3)]
PAIRS = list(zip(TEXTS, TEXTS[1:] + TEXTS[:1], strict=True))
TASKS: dict[str, tuple[AnyTask, list[Any]]] = {
    "classify": (ClassificationTask(), TEXTS),
    "regress": (RegressionTask(), PAIRS),
    "rerank": (RerankingTask(), [(a, [b, a]) for a, b in PAIRS]),
    "label": (MultilabelTask(), TEXTS),
    "choice": (ChoiceTask(), [ChoiceExample(a, (b, a, f"{b} {a}")) for a, b in PAIRS]),
    "tag": (TaggingTask(), TEXTS),
    "answer": (QuestionAnsweringTask(), [(a, " ".join([b] * 4)) for a, b in PAIRS]),
    "fill": (MaskFillingTask(top=3), [f"{text} [MASK] [MASK]" for text in TEXTS]),
    "likelihood": (LikelihoodTask(), TEXTS),
    "zero-shot": (ZeroShotTask(candidates=("good", "rain")), TEXTS),
    "embed": (SentenceEmbeddingTask(prompts={"ask": "the film ", "passage": "good "}), TEXTS),
}


def predictor(
    folder: Path,
    name: str,
    precision: PredictPrecision = "fp32",
    *,
    batch_invariant: bool = False,
    length: int = 32,
    device: str = "cpu",
) -> Predictor:
    """A predictor with random heads."""
    definition = TASKS[name][0]
    labels = {
        "zero-shot": ("entailment", "contradiction"),
        "regress": ("score",),
        "rerank": ("relevance",),
        "tag": ("O", "B-X", "I-X"),
    }.get(name, ("neg", "pos"))
    heads = (PoolerHead(), MaskedHead(), SpanHead(), ChoiceHead(), LabelHead(len(labels)))
    kinds = {head.kind for head in (*heads, TagHead(3))}
    further = [head for head in definition.heads(labels, None) if head.kind not in kinds]
    loaded = load_model(folder)
    torch.manual_seed(4)
    heads = (*heads, TagHead(3), *further)
    model = Model(loaded.model.config, heads, loaded.model.encoder).to(device)
    task_model = definition.bind(model, loaded.tokenizer, labels, length)
    return Predictor(
        task_model, precision, batch_invariant=batch_invariant, reopen=lambda: task_model
    )
