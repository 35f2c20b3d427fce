"""The report of a quickstart: settings, results and limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bothways.core.config import reader as configs
from bothways.core.config.tree import flatten
from bothways.core.report import sections as s
from bothways.finetuning.result import FinetuneResult
from bothways.lab.quickstart.story import StoryResult
from bothways.model.config import PreNorm
from bothways.model.parameters import parameter_table
from bothways.pretraining.run_page import curves, read_records
from bothways.tasks.text_examples import TextExample

PRETRAINED, SCRATCH = "pre-trained", "from random weights"

TRIED = (
    "Task. From a pre-trained model of 2 layers × 128 and 2 million tokens: swapped neighbours "
    "66.4 % against 50.6 % from random weights; matching a summary to the name of its function, "
    "51.5 % against 50.7 %, no gain. A task that word counts solve, such as the package of a "
    "docstring, gains nothing. Both were evaluated on test data.",
    "Lengths. With pairs of 64 tokens from the start, 2 layers × 128 predicted at most 16 % of "
    "masked tokens after 5 million tokens. Full sentences of 16 tokens reached 29 % (at that "
    "length) after 1 million; 16 and then 64 reached 27 % at 64 tokens after 2 million.",
    "Masking rate. At 16 tokens and equal tokens read, 40 % masked gave 29.1 %, 15 % masked "
    "23.6 %.",
    "Order of the LayerNorms. At 16 tokens, post-norm gave 29.1 %, pre-norm 15.0 %; the rates of "
    "pre-norm were not searched as thoroughly. An initial range of 0.05 gave 29.1 %, the usual "
    "0.02 gave 25.6 %.",
    "Fine-tuning. From three pre-trained models of 4 layers × 128, four seeds each, on validation "
    "examples: 32 labels per update and five epochs gave 57.3, 64.8 and 60.6 %; 8 labels and three "
    "epochs, in the same time, 58.3, 67.7 and 64.1 %. The seeds of pre-training, of which a run "
    "has one, therefore differ more than those of fine-tuning.",
)
"""Experiments behind the default settings: one run each unless stated, on two cores of a server."""


def quickstart_report(result: StoryResult) -> s.Report:
    """Build the report of a finished quickstart."""
    pre, scratch = _accuracies(result.from_pretrained), _accuracies(result.from_scratch)
    comparison = s.ComparisonChart(
        "Fine-tuned on the same labels",
        "test accuracy",
        {PRETRAINED: pre, SCRATCH: scratch},
        result.counted | {"always the larger class": _majority(result.labelled.dev_examples)},
        percent=True,
        note=f"{len(result.labelled.train):,} training and "
        f"{len(result.labelled.dev):,} test examples; "
        "one dot per seed.",
    )
    gain = comparison.mean(PRETRAINED) - comparison.mean(SCRATCH)
    spread = max(comparison.spread(PRETRAINED), comparison.spread(SCRATCH))
    return s.Report(
        "BERT's claim, on this machine",
        _headline(gain, spread, comparison),
        _lead(result),
        (
            _figures(result, gain, spread),
            comparison,
            *_curves(result),
            _filled(result),
            _runs(result),
            _more_time(result),
            s.Details(
                "Experiments behind the settings",
                (s.Prose("Experiments behind the settings", TRIED),),
            ),
            s.Details(
                "Parameters, settings, time", (_ledger(result), _settings(result), _stages(result))
            ),
        ),
        s.colophon(torch.device("cpu")),
    )


def _accuracies(runs: Sequence[FinetuneResult]) -> list[float]:
    return [run.metrics["accuracy"] for run in runs]


def _majority(examples: Sequence[TextExample]) -> float:
    labels = [example.label for example in examples]
    return max(labels.count(label) for label in set(labels)) / len(labels)


def _headline(gain: float, spread: float, comparison: s.ComparisonChart) -> str:
    means = " against ".join(s.percentage(comparison.mean(n)) for n in (PRETRAINED, SCRATCH))
    if gain > 2 * spread:
        return f"Pre-training wins: {means} test accuracy, a gain of more than twice the spread."
    if gain > 0:
        return (
            f"Pre-training is ahead, {means}, but by less than twice the spread over seeds: "
            "give it more minutes."
        )
    return (
        f"Pre-training does not help here: {means}. "
        "Give it more minutes, or a task that needs word order."
    )


def _lead(result: StoryResult) -> str:
    counts, encoder = result.corpus.manifest.counts, result.settings.encoder
    task = " The task: detect two swapped neighbouring words. Both classes contain the same words."
    which = "with unseen sentences"
    if set(result.labelled.labels) != {"as written", "swapped"}:
        task, which = "", "with your labels"
    return (
        f"A BERT of {encoder.depth} layers × {encoder.width} was pre-trained on "
        f"{counts.documents:,} documents ({counts.tokens:,} tokens) with masked LM and next "
        f"sentence prediction, then fine-tuned on a task {which}, and compared with the same "
        f"architecture from random weights.{task}"
    )


def _figures(result: StoryResult, gain: float, spread: float) -> s.KeyFigures:
    metrics, progress = result.pretrained.metrics, result.pretrained.progress
    figures = [
        s.KeyFigure(
            "gain by pre-training",
            f"{100 * gain:+.1f} points",
            f"spread over seeds: {100 * spread:.1f}",
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
    ]
    if "held-out/accuracy/pair" in metrics:
        right = s.percentage(metrics["held-out/accuracy/pair"])
        figures.append(s.KeyFigure("next sentence correct", right, "of held-out pairs"))
    speed = f"{progress.tokens / progress.seconds:,.0f} tokens/s"
    figures.append(
        s.KeyFigure(
            "speed", speed, f"{progress.tokens / 1e6:.1f} M tokens in {progress.seconds:.0f} s"
        )
    )
    return s.KeyFigures(figures)


def _records(result: StoryResult) -> list[dict[str, Any]]:
    return read_records(Path(result.corpus.folder).parent / "pretraining" / "metrics.jsonl")


def _curves(result: StoryResult) -> list[s.Curves]:
    """Return curves of the training and held-out loss and accuracy over the tokens read."""
    longer = "The training curve jumps where sequences get longer."
    note = longer if len(result.settings.phases) > 1 else ""
    return list(curves(_records(result), result.pretrained.metrics, note))


def _filled(result: StoryResult) -> s.Section:
    examples = [
        s.ReportExample(
            (f"{filled.before} ", s.Marked("[MASK]"), f" {filled.after}"),
            f"{filled.truth} (rank {filled.rank:,}, {s.percentage(filled.probability)})",
            [
                s.ReportGuess(word, probability, word == filled.truth)
                for word, probability in filled.guesses
            ],
        )
        for filled in result.filled
    ]
    note = (
        "From the sentence the model is most sure of to the one it is least sure of, with the true "
        "word's rank among all tokens and its probability."
    )
    return s.ExampleSection("A masked word in unseen sentences", examples, note)


def _runs(result: StoryResult) -> s.TableSection:
    runs = zip(result.story.seeds, result.from_pretrained, result.from_scratch, strict=True)
    rows: list[list[s.Cell]] = []
    for seed, a, b in runs:
        accuracies = (s.percentage(run.metrics["accuracy"]) for run in (a, b))
        rows.append([f"seed {seed}", *accuracies, a.metrics["mcc"], b.metrics["mcc"]])
    names = (PRETRAINED, SCRATCH)
    columns = ["", *(f"accuracy, {name}" for name in names), *(f"MCC, {name}" for name in names)]
    return s.TableSection("Every run", columns, rows)


def _more_time(result: StoryResult) -> s.Prose:
    """Estimate the gain of more time from the held-out losses of this run."""
    progress = result.pretrained.progress
    points = [
        (r["tokens"], r["held-out/loss/masked"])
        for r in _records(result)
        if "held-out/loss/masked" in r
    ]
    half = [loss for tokens, loss in points if tokens <= 0.55 * points[-1][0]]
    drop = half[-1] - points[-1][1] if half else 0.0
    more = progress.seconds / 60
    text = (
        f"The second half of pre-training lowered the held-out loss by {drop:.2f} nats. The same "
        f"amount of text again takes {more:.1f} more minutes (--minutes "
        f"{result.story.minutes + more:.0f}). Part of the drop comes from the decay of the "
        "learning rate, which happens once per run: expect less from doubling the time."
    )
    return s.Prose("The value of more time", [text])


def _ledger(result: StoryResult) -> s.TableSection:
    entries = parameter_table(
        *result.settings.objective.models(result.settings.encoder)["model"]
    ).entries
    rows: list[list[s.Cell]] = [[entry.part, entry.tensors, entry.count] for entry in entries]
    return s.TableSection(
        "Parameters",
        ["part", "tensors", "count"],
        [*rows, ["total", "", sum(e.count for e in entries)]],
        total=True,
    )


def _settings(result: StoryResult) -> s.TableSection:
    tables = {"": result.settings, "fine-tuning.": result.story.method}
    rows: list[list[s.Cell]] = [
        [prefix + name, str(value)]
        for prefix, table in tables.items()
        for name, value in flatten(configs.to_dict(table)).items()
    ]
    encoder = result.settings.encoder
    pre = isinstance(encoder.order, PreNorm)
    order = "pre-norm, saved as megatron-bert" if pre else "post-norm, as in BERT"
    return s.TableSection("Settings", ["setting", "value"], rows, note=f"The blocks are {order}.")


def _stages(result: StoryResult) -> s.TableSection:
    rows: list[list[s.Cell]] = [
        [name, round(seconds, 1)] for name, seconds in result.seconds.items()
    ]
    return s.TableSection(
        "Time",
        ["stage", "seconds"],
        [*rows, ["total", round(sum(result.seconds.values()), 1)]],
        total=True,
    )
