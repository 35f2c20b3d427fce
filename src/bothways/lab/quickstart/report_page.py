"""The report of a quickstart: the gain and whether it can be told from chance, curves, settings."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from bothways.core.report import sections as s
from bothways.lab.quickstart.gain import QuickstartResult
from bothways.lab.quickstart.labelled_data import AS_WRITTEN, SWAPPED
from bothways.pretraining.run_page import curves, read_records

PRETRAINED, SCRATCH = "pre-trained", "from random weights"


def quickstart_report(result: QuickstartResult) -> s.Report:
    """Build the report of a finished quickstart."""
    labels = [example.label for example in result.labelled.dev_examples]
    majority = max(labels.count(label) for label in set(labels)) / len(labels)
    starts = {PRETRAINED: result.from_pretrained, SCRATCH: result.from_scratch}
    comparison = s.ComparisonChart(
        "Fine-tuned on the same labels",
        "test accuracy",
        {name: [run.metrics["accuracy"] for run in runs] for name, runs in starts.items()},
        {"majority baseline": majority},
        percent=True,
        note=f"{len(result.labelled.train):,} training and {len(labels):,} test examples; "
        "one dot per seed.",
    )
    noise = chance_difference(comparison, len(labels))
    gain = comparison.mean(PRETRAINED) - comparison.mean(SCRATCH)
    metrics, progress = result.pretrained.metrics, result.pretrained.progress
    figures = [
        s.KeyFigure(
            "gain by pre-training", f"{100 * gain:+.1f} points", f"chance: ±{100 * noise:.1f}"
        ),
        s.KeyFigure(
            "masked tokens correct",
            s.percentage(metrics["held-out/accuracy/masked"]),
            f"{s.percentage(metrics['unigram/accuracy/masked'])} for always the most frequent "
            "token",
        ),
        s.KeyFigure(
            "perplexity of masked tokens",
            s.readable_number(round(metrics["held-out/perplexity"], 1)),
            f"{math.exp(metrics['unigram/loss/masked']):,.0f} for token frequencies",
        ),
        s.KeyFigure(
            "speed",
            f"{progress.tokens / progress.seconds:,.0f} tokens/s",
            f"{progress.tokens / 1e6:.1f} M tokens in {progress.seconds:.0f} s",
        ),
    ]
    records = read_records(Path(result.corpus.folder).parent / "pretraining" / "metrics.jsonl")
    seeds = zip(*comparison.groups.values(), strict=True)
    runs = [[f"seed {seed}", *map(s.percentage, pair)] for seed, pair in enumerate(seeds)]
    return s.Report(
        "BERT's claim, on this machine",
        _headline(result, comparison, gain, noise),
        _lead(result),
        (
            s.KeyFigures(figures),
            comparison,
            *curves(records, metrics, "The training curve jumps where sequences get longer."),
            s.TableSection("Every run", ["", *(f"accuracy, {name}" for name in starts)], runs),
            s.Details("Settings", (s.settings_table(result.settings),)),
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


def _headline(
    result: QuickstartResult, comparison: s.ComparisonChart, gain: float, noise: float
) -> str:
    means = " against ".join(s.percentage(comparison.mean(n)) for n in (PRETRAINED, SCRATCH))
    if gain > noise:
        return f"Pre-training wins: {means} test accuracy."
    headline = (
        f"No gain that can be told from chance: {means} test accuracy; differences up to "
        f"{100 * noise:.1f} points happen between equal models."
    )
    tokens, needed = result.pretrained.progress.tokens, result.shape.tokens
    if tokens < needed:
        return (
            f"{headline} This machine read {tokens:,} tokens, and about {needed:,} are needed: "
            "give it more time by --minutes."
        )
    return f"{headline} Give it more time by --minutes, or a task that needs word order."


def _lead(result: QuickstartResult) -> str:
    counts, encoder = result.corpus.manifest.counts, result.settings.encoder
    data, task = "your labels", ""
    if set(result.labelled.labels) == {AS_WRITTEN, SWAPPED}:
        data = "unseen sentences"
        task = " The task: detect two swapped neighbouring words. Both classes contain the same "
        task += "words."
    return (
        f"A BERT of {encoder.depth} layers × {encoder.width} was pre-trained on "
        f"{counts.documents:,} documents ({counts.tokens:,} tokens) with masked LM and next "
        f"sentence prediction, then fine-tuned on a task with {data}, and compared with the same "
        f"architecture from random weights.{task}"
    )
