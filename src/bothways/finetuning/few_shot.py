"""Few-shot: the encoder brings texts of a class together, then a logistic head reads its vectors.

    texts ──▶ pairs of a class ──▶ contrastive training ──▶ vectors ──▶ logistic regression

Each text begins as many pairs, so their number grows with the texts and not with their
square, and of unequal classes each has pairs in proportion to its texts.

Source: Tunstall et al. 2022 (SetFit), which draws from all pairs of a class and of two classes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bothways.core.batch import LabelTargets, WindowWeight
from bothways.core.errors import Finding, argument, require
from bothways.core.source import Sequence, rng
from bothways.core.terminal import quantity
from bothways.core.training_module import evaluating
from bothways.data.loader import in_batches
from bothways.finetuning.config import FewShot, FinetuneConfig
from bothways.hub.sentence_transformers import Pooling, SentenceEncoderConfig, read_program_config
from bothways.model.config import FromVector
from bothways.model.heads import LabelHead, VectorOutput
from bothways.model.model import Model
from bothways.tasks.base import TaskModel
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.sentence_embedding import losses
from bothways.tasks.sentence_embedding.task import Embedder, SentenceEmbeddingTask
from bothways.tasks.text_task import together

MOST_PAIRS = 50_000
"""The most pairs of a run: an enormous file has more texts, and labels that are not few."""
ITERATIONS = 1000
"""The most steps of the solver; scikit-learn's 100 are too few for 77 classes."""
TOLERANCE = 1e-7
"""The gradient at which the solver ends. At scikit-learn's 1e-4 the rounding of the vectors moves
probabilities by 1e-3."""


def with_vector_head(model: Model, folder: Path | None) -> Model:
    """Return the model with its label head on the sentence vector in place of [CLS].

    The vector is the folder's, as far as a head can read it; else the mean of the tokens.

    Raises:
        FolderError: the folder's settings cannot be read.
        ResourceError: scikit-learn is not installed.
    """
    require("report", "few-shot training", "sklearn")
    positions, is_token = model.config.max_positions, False
    program = None if folder is None else read_program_config(folder, positions)
    if isinstance(program, SentenceEncoderConfig):
        is_token = program.pooling == ("lasttoken" if model.config.is_causal else "cls")
    source = FromVector("first" if is_token else "mean")
    readout = dataclasses.replace(model.config.readout, labels=source)
    heads = [head for head in model.specification if isinstance(head, LabelHead)]
    result = Model(dataclasses.replace(model.config, readout=readout), heads, model.encoder)
    result.kept = model.kept
    result.heads.requires_grad_(False)  # the solver's
    return result


def check_few_shot(sequences: Many[Sequence], settings: FewShot | None) -> list[Finding]:
    """Return warnings of classes with one text, and of more texts than few; none without it."""
    findings = list[Finding]()
    if settings is None:
        return findings
    counts = Counter(map(_label, sequences))
    pairs = len(sequences) * settings.per_text(len(sequences))
    if alone := sum(count == 1 for count in counts.values()):
        fault = "text(s) is|are alone in a class, and paired with itself|themselves"
        fix = "Give two texts of each class, or more."
        findings.append(Finding("pairs", "warning", quantity(alone, fault), fix=fix))
    if pairs > MOST_PAIRS:
        message = f"few-shot training reads {MOST_PAIRS:,} pairs of texts at most, not {pairs:,}"
        fix = f"With as many labels, train on them: {argument(recipe='modern')}."
        findings.append(Finding("pairs", "warning", message, fix=fix))
    return findings


def sample_pairs(sequences: Many[Sequence], settings: FewShot, seed: int) -> list[Sequence]:
    """Return pairs of texts of a class: all texts in turn, each with a random other one.

    A text that is alone in its class is paired with itself: dropout makes two vectors of it.
    """
    labels = np.array([_label(sequence) for sequence in sequences])
    members = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    pairs = list[Sequence]()
    for turn in range(settings.per_text(len(sequences))):
        draws = rng(seed, "few-shot", epoch=turn)
        for index in draws.permutation(len(sequences))[: MOST_PAIRS - len(pairs)]:
            others = members[labels[index]]
            # Of n others one of the n − 1 behind this one, in a circle
            step = draws.integers(1, len(others)) if len(others) > 1 else 0
            other = others[(np.searchsorted(others, index) + step) % len(others)]
            # The two texts do not attend to each other; their class is the key.
            key, no_score = np.array([labels[index]]), np.array([np.nan], dtype=np.float32)
            texts = list[Sequence]()
            for role, row in ((losses.ANCHOR, index), (losses.POSITIVE, other)):
                target = losses.TextTargets(np.array([role]), key, no_score)
                texts.append(dataclasses.replace(sequences[row], targets={"texts": target}))
            pairs.append(together(texts))
    return pairs


def _label(sequence: Sequence) -> int:
    return int(sequence.target("label", LabelTargets).labels[0])


def pair_module(task_model: TaskModel[Any, Any], settings: FewShot) -> Embedder:
    """Return the module that learns pairs: the same model, by the vector that its head reads."""
    head = task_model.model.heads["labels"]
    assert isinstance(head, VectorOutput)
    pooling: Pooling = "mean"
    if head.reads == "first":
        pooling = "lasttoken" if head.causal else "cls"
    task = SentenceEmbeddingTask(
        pooling=pooling, loss=losses.SupervisedContrastive(settings.temperature)
    )
    return task.bind(task_model.model, task_model.tokenizer, task_model.labels, task_model.length)


def fit_head(
    task_model: TaskModel[Any, Any], sequences: Many[Sequence], settings: FinetuneConfig
) -> None:
    """Fit the head to the vectors of the texts as they are now, in place; only in few-shot runs."""
    if settings.few_shot is None:
        return
    from sklearn.linear_model import LogisticRegression

    model, head = task_model.model, task_model.model.heads["labels"]
    assert isinstance(head, VectorOutput)
    rows = np.empty((len(sequences), model.config.width))
    batches = in_batches(sequences, settings.microbatch_tokens, head.dense.weight.device)
    with evaluating(model), torch.no_grad():
        for indices, batch in batches:
            rows[indices] = head.pool(model.encoder(batch).last, batch.layout).cpu().numpy()
    windows = [
        float(text.target("weight", WindowWeight).weight[0]) if "weight" in text.targets else 1.0
        for text in sequences
    ]
    task = task_model.task
    assert isinstance(task, ClassificationTask)
    weighting = task.weighting  # not "balanced": the weights are counted by now
    solver = LogisticRegression(
        C=settings.few_shot.inverse_regularisation,
        class_weight=dict(enumerate(weighting)) if isinstance(weighting, tuple) else None,
        max_iter=ITERATIONS,
        tol=TOLERANCE,
    )
    solver.fit(rows, [_label(text) for text in sequences], windows)
    weight, bias = solver.coef_, solver.intercept_
    if len(weight) == 1:  # of two classes: sigmoid(z) is the softmax of (−z/2, z/2)
        weight, bias = (np.concatenate([-some, some]) / 2 for some in (weight, bias))
    with torch.no_grad():
        head.dense.weight.copy_(torch.from_numpy(weight))
        head.dense.bias.copy_(torch.from_numpy(bias))
