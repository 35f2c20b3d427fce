"""BERT's claim on this machine, in minutes: with pre-training, a model learns more from few labels.

Text → vocabulary → corpus → pre-training with masked LM and next sentence prediction → fine-tuning
on a labelled task, compared with the same architecture fine-tuned from random weights, several
seeds each. The text is the documentation inside the Python installation, or files of the user; the
labelled task is made from documents that pre-training never saw (`labelled_data`), or is a file of
the user.

Two settings let a BERT of this size learn in so little time. Sequences start at 16 tokens without
pairs: short sequences teach attention to look at neighbours; before it does, a model at full
length predicts by frequency alone for millions of tokens. And 40 % of the tokens are masked, so
that each sequence has more targets. The shape and its tokens depend on the machine (`speed`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bothways.core.config import reader as configs
from bothways.core.errors import ResourceError, os_errors
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.terminal import quantity, time_text
from bothways.data.batching import ExampleBudget, TokenBudget
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.full_sentences import FullSentences
from bothways.data.masking import Masking
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.result import FinetuneResult
from bothways.finetuning.run import finetune
from bothways.hub.model_folder import save_model
from bothways.lab.quickstart import labelled_data, speed
from bothways.objectives.masked_lm import MaskedLMNextSentence
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.recipes import short
from bothways.pretraining.run import PretrainResult, pretrain
from bothways.tasks.text_examples import TextExample
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import WordPiece, train_tokenizer
from bothways.training.checkpoint import latest_checkpoint
from bothways.training.durations import Duration, Epochs, Hours, Tokens, part_of
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear

MARK = ".quickstart"
"""Empty file that marks the folder of a quickstart, which a later quickstart may resume."""


LIMIT = 8.0
"""Time limit in minutes, unless the user sets a time."""


@dataclass(frozen=True)
class Quickstart:
    """Settings of a quickstart.

    Attributes:
        minutes: total time, all of it used; `None` for as long as the model needs, up to `LIMIT`.
        words: maximum number of words of installed documentation.
        vocabulary: size of the vocabulary.
        shapes: models to choose from, the largest first.
        phases: phases of pre-training.
        batch: tokens per pre-training update.
        masked: fraction of tokens that are predicted.
        set_aside: fraction of the documents kept for the labelled task.
        labels: maximum number of examples to fine-tune on; at most half of the examples are used.
        method: fine-tuning settings from both starts.
    """

    minutes: float | None = None
    words: int = 1_500_000
    vocabulary: int = 4000
    shapes: tuple[speed.Shape, ...] = speed.SHAPES
    phases: tuple[PretrainPhase, ...] = (
        PretrainPhase(16, 0.6, FullSentences()),
        PretrainPhase(64, 0.4),
    )
    batch: int = 512
    masked: float = 0.4
    set_aside: float = 0.2
    labels: int = 1200
    method: FinetuneConfig = field(
        default_factory=lambda: FinetuneConfig(
            training=Training(
                Epochs(3.0),
                AdamW(lr=5e-4, betas=(0.9, 0.98), eps=1e-6),
                Linear(0.1),
                evaluate=Epochs(3.0),
            ),
            length=64,
            batch=ExampleBudget(8),
        )
    )


@dataclass(frozen=True)
class QuickstartResult:
    """Results of a quickstart.

    Attributes:
        pace: shape and measured speed.
        pretrained: the pre-training run with its held-out metrics.
        settings: settings of pre-training.
        labelled: data of the task.
        from_pretrained, from_scratch: one fine-tuning run per seed.
        seconds: duration of each stage by name, in order.
    """

    quickstart: Quickstart
    pace: speed.MeasuredShape
    corpus: Corpus
    settings: PretrainConfig
    pretrained: PretrainResult
    labelled: LabelledData
    from_pretrained: tuple[FinetuneResult, ...]
    from_scratch: tuple[FinetuneResult, ...]
    seconds: dict[str, float]


def pretraining_settings(
    quickstart: Quickstart, shape: speed.Shape, vocabulary: int, until: Duration
) -> PretrainConfig:
    """Build the settings of pre-training."""
    recipe = short(shape.encoder(vocabulary))
    training = dataclasses.replace(
        recipe.training,
        until=until,
        optimizer=AdamW(lr=shape.rate, betas=(0.9, 0.98), eps=1e-6, decay=0.01),
        evaluate=part_of(until, 1 / 8),
        save=None,
    )
    return dataclasses.replace(
        recipe,
        training=training,
        objective=MaskedLMNextSentence(masking=Masking(quickstart.masked)),
        phases=quickstart.phases,
        batch=TokenBudget(quickstart.batch),
        microbatch_tokens=8192,
        held_out=0.02,
        # The default, read nine times, would take as long as the training.
        evaluation_tokens=10_000,
    )


def run_quickstart(
    quickstart: Quickstart,
    out: Path,
    *,
    files: Sequence[str] | None = None,
    labels: Path | None = None,
    progress: Progress = SILENT,
) -> QuickstartResult | None:
    """Run or resume a quickstart in a folder; return `None` if it was interrupted.

    Args:
        files: text files; `None` for the installed documentation.
        labels: a labelled file; `None` for a task made from the text.
        progress: receives the stages, and a line at the start of each.

    Raises:
        ResourceError: the folder holds something else, or cannot be written.
    """
    threads = torch.get_num_threads()
    try:
        return _run(quickstart, out, files, labels, progress)
    finally:
        torch.set_num_threads(threads)


def _run(
    quickstart: Quickstart,
    out: Path,
    files: Sequence[str] | None,
    labels: Path | None,
    progress: Progress,
) -> QuickstartResult | None:
    with os_errors(out, "Choose another folder."):
        if out.exists() and not (out / MARK).exists() and any(out.iterdir()):
            message = "is not empty, and not the folder of a quickstart"
            raise ResourceError(message, where=out, fix="Choose another folder: --out NAME.")
    stages = _Stages(progress)
    source = "the text" if files else "the documentation of this Python installation"
    stages.begin("text", f"reading {source}")
    train_documents, aside = labelled_data.split_documents(
        labelled_data.gather_documents(files, quickstart.words),
        0.0 if labels else quickstart.set_aside,
    )
    train_on, test_on = labelled_data.labelled_examples(
        train_documents, aside, labels, quickstart.labels
    )
    size = f"{quickstart.vocabulary:,} from {len(train_documents):,} documents"
    stages.begin("vocabulary", f"learning a WordPiece vocabulary of {size}")
    texts = (document.text for document in train_documents)
    tokenizer = train_tokenizer(texts, WordPiece(quickstart.vocabulary))
    stages.begin("corpus", "building the corpus")
    with os_errors(out, "Choose another folder."):
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()
    corpus = build_corpus(train_documents, tokenizer, out / "corpus", progress=progress)
    method = quickstart.method
    data = label(method.task, tokenizer, train_on, test_on, method.length)
    for finding in data.findings:
        if finding.severity == "warning":
            progress.message(f"warning: {finding}")
    stages.begin("speed", "measuring the speed of this machine")
    tuning = fine_tuning_tokens(method, tokenizer, train_on, test_on)
    limit = 60 * (quickstart.minutes or LIMIT)
    pace = speed.choose_pace(
        tokenizer.size, quickstart.batch, limit - stages.passed, tuning, quickstart.shapes
    )
    until, plan = _plan(pace, tuning, limit, stages.passed, use_all=quickstart.minutes is not None)
    stages.begin("pre-training", plan)
    settings = pretraining_settings(quickstart, pace.shape, tokenizer.size, until)
    run = out / "pretraining"
    resume = latest_checkpoint(run) is not None
    if resume:  # with the shape and the length with which the run started
        settings = configs.load(PretrainConfig, base=settings, file=run / "config.toml")
    pretrained = pretrain(settings, corpus, run, resume=resume, progress=progress)
    if not pretrained.finished(settings.training):
        return None
    seeds = range(pace.shape.seeds)
    stages.begin(
        "fine-tuning",
        f"fine-tuning on {len(train_on):,} labels, {len(seeds)} times from each start",
    )
    starts = [pretrained.model] * len(seeds) + [pretrained.model.config] * len(seeds)
    fitted = [
        finetune(
            dataclasses.replace(method, seed=seed),
            start=start,
            train=data,
            progress=Part(progress, f"fine-tuning {number} of {len(starts)}"),
        )
        for number, (start, seed) in enumerate(zip(starts, [*seeds, *seeds], strict=True), 1)
    ]
    from_pretrained, from_scratch = tuple(fitted[: len(seeds)]), tuple(fitted[len(seeds) :])
    save_model(
        out / "finetuned",
        from_pretrained[0].task_model.model,
        tokenizer,
        labels=data.labels,
        problem="single_label_classification",
    )
    stages.begin("report", "writing the report")
    return QuickstartResult(
        quickstart, pace, corpus, settings, pretrained, data, from_pretrained, from_scratch,
        stages.seconds,
    )  # fmt: skip


def fine_tuning_tokens(
    method: FinetuneConfig,
    tokenizer: Tokenizer,
    train_on: Sequence[TextExample],
    test_on: Sequence[TextExample],
) -> int:
    """Count the tokens of fine-tuning from both starts with one seed, as those of pre-training.

    A small batch takes about one and a half times as long per token; a prediction, a third.
    """
    assert isinstance(method.training.until, Epochs)
    train, test = (
        sum(map(len, tokenizer.encode([example.text for example in examples])))
        for examples in (train_on, test_on)
    )
    return round(2 * (1.5 * train * method.training.until.count + test / 3))


def _plan(
    pace: speed.MeasuredShape, tuning: int, limit: float, passed: float, use_all: bool
) -> tuple[Duration, str]:
    """Choose the length of pre-training; return it with the line that announces it.

    Args:
        tuning: see `fine_tuning_tokens`.
        limit, passed: seconds of the quickstart, in all and until now.
        use_all: use all of the time.
    """
    left = max(5.0, limit - passed)
    shape, rate = pace.shape, pace.tokens_per_second
    fine_tuning = tuning * shape.seeds / rate
    fits = pace.seconds(tuning) <= left
    seconds = shape.tokens / rate
    if use_all or not fits:
        seconds = max(left / 2, left - fine_tuning)
    tokens = round(seconds * rate, -4) if seconds * rate > 1e4 else seconds * rate
    message = (
        f"pre-training a BERT of {shape.depth} layers × {shape.width} on about {tokens:,.0f} "
        f"tokens at {rate:,.0f} tokens/s with {quantity(pace.threads, 'thread(s)')}: "
        f"{time_text(seconds)}, then {time_text(fine_tuning)} of fine-tuning"
    )
    if tokens < shape.tokens:
        minutes = math.ceil((pace.seconds(tuning) - left + limit) / 60)
        message += (
            f". Too slow for a gain, which needs {shape.tokens:,} tokens: --minutes {minutes}"
        )
    return Tokens(shape.tokens) if fits and not use_all else Hours(seconds / 3600), message


class _Stages:
    """Announces and times the stages."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._started = progress, list[tuple[str, float]]()

    def begin(self, name: str, message: str) -> None:
        """Start a stage and end the previous one."""
        self._started.append((name, time.perf_counter()))
        self._progress.message(f"[{len(self._started)}/7] {message}")
        self._progress.stage(name)

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started[0][1]

    @property
    def seconds(self) -> dict[str, float]:
        """Duration of each stage; of the current one until now."""
        ends = [*(start for _, start in self._started[1:]), time.perf_counter()]
        return {name: end - start for (name, start), end in zip(self._started, ends, strict=True)}
