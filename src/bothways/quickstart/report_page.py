"""The quickstart's report: what was done, what came of it, what it does not show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

import bothways
from bothways.core.config import reader as configs
from bothways.core.config.tree import flatten
from bothways.finetuning.in_memory_run import FitResult
from bothways.model.config import EncoderConfig, PreNorm
from bothways.model.parameters import parameter_table
from bothways.pretraining.build import heads_for
from bothways.quickstart.story import StoryResult
from bothways.report import sections as s
from bothways.runtime.devices import describe_device
from bothways.tasks.text_examples import TextExample

PRETRAINED, SCRATCH = "pre-trained", "from random weights"

TRIED = (
    "Which task. From a pre-trained model of 2 layers × 128 and 2 million tokens: swapped neighbours 66.4 % against 50.6 % "
    "from random weights; does this summary belong to this function's name, 51.5 % against 50.7 %, no gain. A task that "
    "counting words can do, such as the package a docstring is from, gains nothing. Both were looked at on test data.",
    "Which lengths. With pairs of 64 tokens from the start, 2 layers × 128 got no further than 16 % of masked tokens in "
    "5 million tokens. Full sentences of 16 tokens gave 29 % (at their length) after 1 million; 16 and then 64 gave 27 % at 64 "
    "tokens after 2 million.",
    "Which masking rate. At 16 tokens and equal tokens read, 40 % masked gave 29.1 % right, 15 % masked 23.6 %.",
    "Which order of the LayerNorms. At 16 tokens, post-norm gave 29.1 %, pre-norm 15.0 %; the rates of pre-norm were not "
    "searched as thoroughly. An initial range of 0.05 gave 29.1 %, the usual 0.02 gave 25.6 %.",
    "Which fine-tuning. From three pre-trained models of 4 layers × 128, four seeds each, on examples that are not tested on: "
    "32 labels an update and five epochs gave 57.3, 64.8 and 60.6 %; 8 and three epochs, in the same time, 58.3, 67.7 and "
    "64.1 %. So the seeds of pre-training, of which a run has one, differ more than those of fine-tuning.",
)
"""What was looked at before these settings were chosen: one run each unless it says so, on two cores of a server."""


def quickstart_report(told: StoryResult) -> s.Report:
    """The report of a finished run."""
    pre, scratch = _accuracies(told.from_pretrained), _accuracies(told.from_scratch)
    comparison = s.ComparisonChart(
        "Fine-tuned on the same labels",
        "test accuracy",
        {PRETRAINED: pre, SCRATCH: scratch},
        told.counted | {"always the larger class": _majority(told.labelled.dev_examples)},
        percent=True,
        note=f"{len(told.labelled.train):,} labels to train on, {len(told.labelled.dev):,} to test on; one dot a seed.",
    )
    gain = comparison.mean(PRETRAINED) - comparison.mean(SCRATCH)
    spread = max(comparison.spread(PRETRAINED), comparison.spread(SCRATCH))
    return s.Report(
        "BERT's claim, on this machine",
        _headline(gain, spread, comparison),
        _lead(told),
        (
            _figures(told, gain, spread),
            comparison,
            *_curves(told),
            _filled(told),
            _outcome(told),
            _more(told),
            s.Details("What was tried before", (s.Prose("What was tried before", TRIED),)),
            s.Details(
                "Parameters, settings, time", (_ledger(told), _settings(told), _stages(told))
            ),
        ),
        f"bothways {bothways.__version__}, {datetime.now(timezone.utc):%Y-%m-%d}, {describe_device(torch.device('cpu'))}",
    )


def _accuracies(runs: Sequence[FitResult]) -> list[float]:
    return [run.metrics["accuracy"] for run in runs]


def _majority(examples: Sequence[TextExample]) -> float:
    labels = [example.label for example in examples]
    return max(labels.count(label) for label in set(labels)) / len(labels)


def _headline(gain: float, spread: float, comparison: s.ComparisonChart) -> str:
    means = f"{s.percentage(comparison.mean(PRETRAINED))} against {s.percentage(comparison.mean(SCRATCH))}"
    if gain > 2 * spread:
        return f"Pre-training wins: {means} test accuracy, by far more than the seeds differ."
    if gain > 0:
        return f"Pre-training is ahead, {means}, but not by more than twice the spread of the seeds: give it more minutes."
    return f"Pre-training does not help here: {means}. Give it more minutes, or a task that needs the order of words."


def _lead(told: StoryResult) -> str:
    counts, encoder = told.corpus.manifest.counts, told.settings.encoder
    task, which = (
        " The task: are two neighbouring words swapped? Both classes have the same words.",
        "whose sentences it had never seen",
    )
    if _own_labels(told):
        task, which = "", "of your labels"
    return (
        f"A BERT of {encoder.depth} layers × {encoder.width} was pre-trained on {counts.documents:,} documents "
        f"({counts.tokens:,} tokens) with masked LM and next sentence prediction. Then it was fine-tuned on a task "
        f"{which}, next to the same architecture from random weights.{task}"
    )


def _own_labels(told: StoryResult) -> bool:
    return set(told.labelled.labels) != {"as written", "swapped"}


def _figures(told: StoryResult, gain: float, spread: float) -> s.KeyFigures:
    metrics, progress = told.pretrained.metrics, told.pretrained.progress
    figures = [
        s.KeyFigure(
            "gain by pre-training",
            f"{100 * gain:+.1f} points",
            f"the seeds spread by {100 * spread:.1f}",
        ),
        s.KeyFigure(
            "masked tokens right",
            s.percentage(metrics["held-out/accuracy/masked"]),
            f"{s.percentage(metrics['unigram/accuracy/masked'])} by always saying the most frequent",
        ),
        s.KeyFigure(
            "perplexity of masked tokens",
            s.readable_number(round(metrics["held-out/perplexity"], 1)),
            f"{math.exp(metrics['unigram/loss/masked']):,.0f} by frequency alone",
        ),
    ]
    if "held-out/accuracy/pair" in metrics:
        right = s.percentage(metrics["held-out/accuracy/pair"])
        figures.append(s.KeyFigure("next sentence right", right, "of held-out pairs"))
    speed = f"{progress.tokens / progress.seconds:,.0f} tokens/s"
    figures.append(
        s.KeyFigure(
            "speed", speed, f"{progress.tokens / 1e6:.1f} M tokens in {progress.seconds:.0f} s"
        )
    )
    return s.KeyFigures(figures)


def _records(told: StoryResult) -> list[dict[str, Any]]:
    lines = (
        (told.corpus.folder.parent / "pretraining" / "metrics.jsonl")
        .read_text(encoding="utf8")
        .splitlines()
    )
    return [json.loads(line) for line in lines]


def _curves(told: StoryResult) -> list[s.Section]:
    """Training and held-out loss of masked tokens, and their accuracy, over the tokens read."""
    records, metrics = _records(told), told.pretrained.metrics
    result: list[s.Section] = []
    for key, title, unit, percent in (
        ("loss/masked", "Loss of masked tokens", "nats", False),
        ("accuracy/masked", "Masked tokens right", "share", True),
    ):
        lines = []
        for name, prefix in (("training", ""), ("held-out", "held-out/")):
            points = [
                (record["tokens"] / 1e6, record[prefix + key])
                for record in records
                if prefix + key in record
            ]
            lines.append(s.Line(name, *_thinned(points)))
        baselines = {"unigram baseline": metrics[f"unigram/{key}"]}
        note = (
            "Sequences get longer on the way: the training curve jumps where they do."
            if len(told.settings.phases) > 1
            else ""
        )
        result.append(s.Curves(title, "million tokens read", unit, lines, baselines, percent, note))
    return result


def _thinned(points: list[tuple[float, float]], most: int = 200) -> tuple[list[float], list[float]]:
    """Means of neighbouring points, so that there are at most so many."""
    size = max(1, math.ceil(len(points) / most))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    xs = [sum(x for x, _ in group) / len(group) for group in groups]
    return xs, [sum(y for _, y in group) / len(group) for group in groups]


def _filled(told: StoryResult) -> s.Section:
    examples = [
        s.ReportExample(
            (f"{filled.before} ", s.Marked("[MASK]"), f" {filled.after}"),
            filled.truth,
            [
                s.ReportGuess(word, probability, word == filled.truth)
                for word, probability in filled.guesses
            ],
        )
        for filled in told.filled
    ]
    return s.ExampleSection("A word hidden in sentences it has never read", examples)


def _outcome(told: StoryResult) -> s.TableSection:
    runs = zip(told.story.seeds, told.from_pretrained, told.from_scratch, strict=True)
    rows: list[list[s.Cell]] = [
        [
            f"seed {seed}",
            *(s.percentage(run.metrics["accuracy"]) for run in (a, b)),
            a.metrics["mcc"],
            b.metrics["mcc"],
        ]
        for seed, a, b in runs
    ]
    columns = [
        "",
        f"accuracy, {PRETRAINED}",
        f"accuracy, {SCRATCH}",
        f"MCC, {PRETRAINED}",
        f"MCC, {SCRATCH}",
    ]
    return s.TableSection("Every run", columns, rows)


def _more(told: StoryResult) -> s.Prose:
    """What more time would buy, from the held-out losses of this run."""
    progress = told.pretrained.progress
    points = [
        (r["tokens"], r["held-out/loss/masked"])
        for r in _records(told)
        if "held-out/loss/masked" in r
    ]
    half = [loss for tokens, loss in points if tokens <= 0.55 * points[-1][0]]
    drop = half[-1] - points[-1][1] if half else 0.0
    more = progress.seconds / 60
    said = (
        f"The second half of pre-training lowered the held-out loss by {drop:.2f} nats. As much text again takes "
        f"{more:.1f} minutes more on this machine (--minutes {told.story.minutes + more:.0f}). "
        "A part of that drop comes from the decay of the learning rate, which every run has once: expect less than this from "
        "doubling the time."
    )
    return s.Prose("What more time would buy", [said])


def _ledger(told: StoryResult) -> s.TableSection:
    entries = parameter_table(
        told.settings.encoder, heads_for(told.settings.encoder, told.settings.segments)
    ).entries
    rows: list[list[s.Cell]] = [[entry.part, entry.formula, entry.count] for entry in entries]
    return s.TableSection(
        "Parameters",
        ["part", "formula", "count"],
        [*rows, ["all", "", sum(e.count for e in entries)]],
        total=True,
    )


def _settings(told: StoryResult) -> s.TableSection:
    tables = {"": told.settings, "fine-tuning.": told.story.method}
    rows: list[list[s.Cell]] = [
        [prefix + name, str(value)]
        for prefix, table in tables.items()
        for name, value in flatten(configs.to_dict(table)).items()
    ]
    encoder = told.settings.encoder
    pre = isinstance(encoder, EncoderConfig) and isinstance(encoder.order, PreNorm)
    order = "pre-norm, saved as megatron-bert" if pre else "post-norm, as BERT has it"
    return s.TableSection("Settings", ["setting", "value"], rows, note=f"The blocks are {order}.")


def _stages(told: StoryResult) -> s.TableSection:
    rows: list[list[s.Cell]] = [[name, round(seconds, 1)] for name, seconds in told.seconds.items()]
    return s.TableSection(
        "Time",
        ["stage", "seconds"],
        [*rows, ["all", round(sum(told.seconds.values()), 1)]],
        total=True,
    )
