"""The report of a quickstart: the gain and whether it can be told from chance, curves, settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from bothways.core.report import sections as s
from bothways.finetuning.result import FinetuneResult
from bothways.lab.quickstart.gain import QuickstartResult
from bothways.pretraining.run_page import curves, read_records

PRETRAINED, SCRATCH = "pre-trained", "from random weights"


def quickstart_report(result: QuickstartResult) -> s.Report:
    """Build the report of a finished quickstart."""
    labels = [example.label for example in result.labelled.dev_examples]
    majority = max(labels.count(label) for label in set(labels)) / len(labels)
    comparison = s.ComparisonChart(
        "Fine-tuned on the same labels",
        "test accuracy",
        {
            PRETRAINED: _accuracies(result.from_pretrained),
            SCRATCH: _accuracies(result.from_scratch),
        },
        {"majority baseline": majority},
        percent=True,
        note=f"{len(result.labelled.train):,} training and {len(labels):,} test examples; "
        "one dot per seed.",
    )
    noise = chance_difference(comparison, len(labels))
    run = Path(result.corpus.folder).parent / "pretraining"
    longer = "The training curve jumps where sequences get longer."
    records = read_records(run / "metrics.jsonl")
    stages: list[list[s.Cell]] = [
        [name, round(seconds, 1)] for name, seconds in result.seconds.items()
    ]
    total = round(sum(result.seconds.values()), 1)
    details = (
        s.settings_table(result.settings),
        s.TableSection("Time", ["stage", "seconds"], [*stages, ["total", total]], total=True),
    )
    return s.Report(
        "BERT's claim, on this machine",
        _headline(result, comparison, noise),
        _lead(result),
        (
            _figures(result, comparison, noise),
            comparison,
            *curves(records, result.pretrained.metrics, longer),
            _runs(result),
            s.Details("Settings, time", details),
        ),
        s.colophon(torch.device("cpu")),
    )


def chance_difference(comparison: s.ComparisonChart, examples: int) -> float:
    """Compute the difference of accuracies that chance explains.

    It is twice the larger of two standard errors: the spread over seeds, and the difference's
    of two accuracies near one half on the test examples.
    """
    spread = max(comparison.spread(PRETRAINED), comparison.spread(SCRATCH))
    return 2 * max(spread, math.sqrt(0.5 / examples))


def _accuracies(runs: Sequence[FinetuneResult]) -> list[float]:
    return [run.metrics["accuracy"] for run in runs]


def _headline(result: QuickstartResult, comparison: s.ComparisonChart, noise: float) -> str:
    means = " against ".join(s.percentage(comparison.mean(n)) for n in (PRETRAINED, SCRATCH))
    gain = comparison.mean(PRETRAINED) - comparison.mean(SCRATCH)
    if gain > noise:
        return f"Pre-training wins: {means} test accuracy."
    headline = (
        f"No gain that can be told from chance: {means} test accuracy; differences up to "
        f"{100 * noise:.1f} points happen between equal models."
    )
    tokens, needed = result.pretrained.progress.tokens, result.pace.shape.tokens
    if tokens < needed:
        return (
            f"{headline} This machine read {tokens:,} tokens, and about {needed:,} are needed: "
            "give it more time by --minutes."
        )
    return f"{headline} Give it more time by --minutes, or a task that needs word order."


def _lead(result: QuickstartResult) -> str:
    counts, encoder = result.corpus.manifest.counts, result.settings.encoder
    generated = set(result.labelled.labels) == {"as written", "swapped"}
    task = " The task: detect two swapped neighbouring words. Both classes contain the same words."
    return (
        f"A BERT of {encoder.depth} layers × {encoder.width} was pre-trained on "
        f"{counts.documents:,} documents ({counts.tokens:,} tokens) with masked LM and next "
        f"sentence prediction, then fine-tuned on a task with "
        f"{'unseen sentences' if generated else 'your labels'}, and compared with the same "
        f"architecture from random weights.{task if generated else ''}"
    )


def _figures(result: QuickstartResult, comparison: s.ComparisonChart, noise: float) -> s.KeyFigures:
    metrics, progress = result.pretrained.metrics, result.pretrained.progress
    gain = comparison.mean(PRETRAINED) - comparison.mean(SCRATCH)
    unigram = s.percentage(metrics["unigram/accuracy/masked"])
    rows = [
        ("gain by pre-training", f"{100 * gain:+.1f} points", f"chance: ±{100 * noise:.1f}"),
        (
            "masked tokens correct",
            s.percentage(metrics["held-out/accuracy/masked"]),
            f"{unigram} for always the most frequent token",
        ),
        (
            "perplexity of masked tokens",
            s.readable_number(round(metrics["held-out/perplexity"], 1)),
            f"{math.exp(metrics['unigram/loss/masked']):,.0f} for token frequencies",
        ),
        (
            "speed",
            f"{progress.tokens / progress.seconds:,.0f} tokens/s",
            f"{progress.tokens / 1e6:.1f} M tokens in {progress.seconds:.0f} s",
        ),
    ]
    return s.KeyFigures([s.KeyFigure(*row) for row in rows])


def _runs(result: QuickstartResult) -> s.TableSection:
    runs = zip(result.from_pretrained, result.from_scratch, strict=True)
    rows: list[list[s.Cell]] = [
        [f"seed {seed}", *(s.percentage(run.metrics["accuracy"]) for run in pair)]
        for seed, pair in enumerate(runs)
    ]
    columns = ["", *(f"accuracy, {name}" for name in (PRETRAINED, SCRATCH))]
    return s.TableSection("Every run", columns, rows)
