"""BERT's claim on this machine, in minutes: with pre-training, a model learns more from few labels.

Text → vocabulary → corpus → pre-training with masked LM and next sentence prediction → fine-tuning
on a labelled task, compared with the same architecture fine-tuned from random weights, several
seeds each. The text is the documentation inside the Python installation, or files of the user; the
labelled task is made from documents that pre-training never saw (`word_order`), or is a file of
the user.

Two settings let a BERT of this size learn in so little time. Sequences start at 16 tokens without
pairs: short sequences teach attention to look at neighbours; before it does, a model at full
length predicts by frequency alone for millions of tokens. And 40 % of the tokens are masked, so
that each sequence has more targets. On a processor without bf16 the model is narrower: it reads
twice the text in the same time, which is worth more than the width.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bothways.core.config import reader as configs
from bothways.core.errors import ResourceError, os_errors
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.runtime.devices import choose_device, has_bf16
from bothways.data.batching import ExampleBudget, TokenBudget
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.full_sentences import FullSentences
from bothways.data.masking import Masking
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.result import FinetuneResult
from bothways.finetuning.run import finetune
from bothways.hub.model_folder import save_model
from bothways.lab.quickstart.fill_masks import FilledMask, fill_masks
from bothways.lab.quickstart.labelled_data import (
    counting_baselines,
    gather_documents,
    labelled_examples,
    split_documents,
)
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.positions import Learned
from bothways.objectives.masked_lm import MaskedLMNextSentence
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.recipes import short
from bothways.pretraining.run import PretrainResult, pretrain
from bothways.tasks.text_examples import TextExample
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import WordPiece, train_tokenizer
from bothways.training.checkpoint import latest_checkpoint
from bothways.training.durations import Epochs, Hours
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Linear

MARK = ".quickstart"
"""Empty file that marks the folder of a quickstart, which a later quickstart may resume."""

SHAPES = {True: (256, 1e-3), False: (128, 2e-3)}
"""Width and peak learning rate of pre-training, with and without bf16 in hardware.

On an fp32 core, in equal time, width 128 reads 2.5 times the tokens and reaches a held-out
perplexity of 167 (at 1e-3: 197); width 256 reaches 574, close to the unigram baseline.
"""

FINE_TUNING = 0.45
"""Share of the time reserved for fine-tuning and the report."""


def _fitting() -> tuple[int, float]:
    return SHAPES[has_bf16(choose_device())]


def _shape(width: int) -> EncoderConfig:
    return EncoderConfig(
        4000, width, 4, width // 64, 4 * width,
        position=Learned(128), dropout=Dropouts(0.0, 0.0), initial_range=0.05,
    )  # fmt: skip


@dataclass(frozen=True)
class Story:
    """Settings of a quickstart.

    Attributes:
        minutes: total time; pre-training takes what the other stages leave.
        words: maximum number of words of installed documentation.
        vocabulary: size of the vocabulary.
        encoder: shape of the encoder, whose width depends on the machine (`SHAPES`); `vocab` is
            replaced by the size of the trained vocabulary.
        phases: phases of pre-training.
        batch: tokens per pre-training update.
        rate: peak learning rate of pre-training.
        masked: share of tokens that are predicted.
        set_aside: share of the documents kept for the labelled task.
        labels: maximum number of examples to fine-tune on; at most half of the examples are used.
        method: fine-tuning settings of both contenders.
        seeds: seeds of the fine-tuning runs of each contender.
        filled: number of sentences with a filled mask.
    """

    minutes: float = 5.0
    words: int = 2_500_000
    vocabulary: int = 4000
    encoder: EncoderConfig = field(default_factory=lambda: _shape(_fitting()[0]))
    phases: tuple[PretrainPhase, ...] = (
        PretrainPhase(16, 0.5, FullSentences()),
        PretrainPhase(64, 0.5),
    )
    batch: int = 512
    rate: float = field(default_factory=lambda: _fitting()[1])
    masked: float = 0.4
    set_aside: float = 0.15
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
    seeds: tuple[int, ...] = (0, 1, 2)
    filled: int = 6


@dataclass(frozen=True)
class StoryResult:
    """Results of a quickstart.

    Attributes:
        pretrained: the pre-training run with its held-out metrics.
        settings: settings of pre-training.
        labelled: data of the task.
        from_pretrained, from_scratch: one fine-tuning run per seed.
        counted: test accuracy of the word-counting baselines by name.
        filled: sentences with a masked word.
        seconds: duration of each stage by name, in order.
    """

    story: Story
    corpus: Corpus
    settings: PretrainConfig
    pretrained: PretrainResult
    labelled: LabelledData
    from_pretrained: tuple[FinetuneResult, ...]
    from_scratch: tuple[FinetuneResult, ...]
    counted: dict[str, float]
    filled: tuple[FilledMask, ...]
    seconds: dict[str, float]


def settings_for(story: Story, tokenizer: Tokenizer, seconds: float) -> PretrainConfig:
    """Return the settings of pre-training for a number of seconds."""
    recipe = short(dataclasses.replace(story.encoder, vocab=tokenizer.size))
    training = dataclasses.replace(
        recipe.training,
        until=Hours(seconds / 3600),
        optimizer=AdamW(lr=story.rate, betas=(0.9, 0.98), eps=1e-6, decay=0.01),
        evaluate=Hours(seconds / 3600 / 8),
        save=None,
    )
    return dataclasses.replace(
        recipe,
        training=training,
        objective=MaskedLMNextSentence(masking=Masking(story.masked)),
        phases=story.phases,
        batch=TokenBudget(story.batch),
        microbatch_tokens=8192,
        held_out=0.02,
    )


def run_story(
    story: Story,
    out: Path,
    *,
    files: Sequence[str] | None = None,
    labels: Path | None = None,
    progress: Progress = SILENT,
) -> StoryResult | None:
    """Run or resume a quickstart in a folder; return `None` if it was interrupted.

    Args:
        files: text files; `None` for the installed documentation.
        labels: a labelled file; `None` for a task made from the text.
        progress: receives the stages, and a line at the start of each.

    Raises:
        ResourceError: the folder holds something else, or cannot be written.
    """
    _check_own(out)
    stages = _Stages(progress)
    tokenizer, corpus, train_on, test_on = _read_text(story, out, files, labels, stages, progress)
    data = label(story.method.task, tokenizer, train_on, test_on, story.method.length)
    for finding in data.findings:
        if finding.severity == "warning":
            progress.message(f"warning: {finding}")
    left = max(5.0, 60 * story.minutes * (1 - FINE_TUNING) - stages.passed)
    stages.begin(
        "pre-training",
        f"pre-training on {corpus.manifest.counts.tokens:,} tokens, about {left:.0f} s",
    )
    settings = settings_for(story, tokenizer, left)
    run = out / "pretraining"
    resume = latest_checkpoint(run) is not None
    if resume:  # with the settings, and the time, with which the run started
        settings = configs.load(PretrainConfig, base=settings, file=run / "config.toml")
    pretrained = pretrain(settings, corpus, run, resume=resume, progress=progress)
    if not pretrained.finished(settings.training):
        return None
    stages.begin(
        "fine-tuning",
        f"fine-tuning on {len(train_on):,} labels, {len(story.seeds)} times from each start",
    )
    ours, bare = _fine_tune(story, data, pretrained, progress)
    save_model(
        out / "finetuned",
        ours[0].learner.model,
        tokenizer,
        labels=data.labels,
        problem="single_label_classification",
    )
    stages.begin("words hidden", "filling masks in sentences that were held out")
    _, held_out = corpus.split(settings.held_out, settings.seed)
    places = held_out.tolist()
    filled = tuple(fill_masks(pretrained.model, corpus, places, story.filled, seed=0))
    counted = counting_baselines(train_on, test_on)
    stages.begin("report", "writing the report")
    return StoryResult(
        story, corpus, settings, pretrained, data, ours, bare, counted, filled, stages.seconds
    )


def _read_text(
    story: Story,
    out: Path,
    files: Sequence[str] | None,
    labels: Path | None,
    stages: _Stages,
    progress: Progress,
) -> tuple[Tokenizer, Corpus, list[TextExample], list[TextExample]]:
    """Return tokenizer and corpus of the text, and the examples to train and to test on."""
    origin = "the text" if files else "the documentation of this Python installation"
    stages.begin("text", f"reading {origin}")
    share = 0.0 if labels else story.set_aside
    kept, aside = split_documents(gather_documents(files, story.words), share)
    examples = labelled_examples(kept, aside, labels, story.labels)
    size = f"{story.vocabulary:,} from {len(kept):,} documents"
    stages.begin("vocabulary", f"learning a WordPiece vocabulary of {size}")
    tokenizer = train_tokenizer((document.text for document in kept), WordPiece(story.vocabulary))
    stages.begin("corpus", "building the corpus")
    with os_errors(out, "Choose another folder."):
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()
    return tokenizer, build_corpus(kept, tokenizer, out / "corpus", progress=progress), *examples


def _check_own(out: Path) -> None:
    with os_errors(out, "Choose another folder."):
        if out.exists() and not (out / MARK).exists() and any(out.iterdir()):
            what = "is not empty, and not the folder of a quickstart"
            raise ResourceError(what, where=out, fix="Choose another folder: --out NAME.")


class _Stages:
    """Announces and times the stages."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._start = progress, time.perf_counter()
        self._begun: dict[str, float] = {}

    def begin(self, name: str, what: str) -> None:
        """Start a stage and end the previous one."""
        self._begun[name] = time.perf_counter()
        self._progress.message(f"[{len(self._begun)}/7] {what}")
        self._progress.stage(name)

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def seconds(self) -> dict[str, float]:
        """Duration of each stage; of the current one until now."""
        edges = [*self._begun.values(), time.perf_counter()]
        return {
            name: end - start
            for name, start, end in zip(self._begun, edges, edges[1:], strict=False)
        }


def _fine_tune(
    story: Story,
    data: LabelledData,
    pretrained: PretrainResult,
    progress: Progress,
) -> tuple[tuple[FinetuneResult, ...], tuple[FinetuneResult, ...]]:
    """Fine-tune the pre-trained model, then random weights, with the same seeds."""
    model, half = pretrained.model, len(story.seeds)
    starts = [model] * half + [model.config] * half
    fitted = [
        finetune(
            dataclasses.replace(story.method, seed=seed),
            start=start,
            train=data,
            progress=Part(progress, f"fine-tuning {number} of {len(starts)}"),
        )
        for number, (start, seed) in enumerate(zip(starts, story.seeds * 2, strict=True), 1)
    ]
    return tuple(fitted[:half]), tuple(fitted[half:])
