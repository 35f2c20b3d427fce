"""The page of an adaptation: perplexities before and after, fit of the vocabulary, curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from bothways.core.report import sections as s
from bothways.core.report.html import write_html
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import PretrainResult
from bothways.pretraining.run_page import curves, read_records
from bothways.pretraining.vocabulary_fit import VocabularyFit

Scores = Mapping[str, Mapping[str, float]]
NEW_HEAD = (
    "The model had no head that predicts tokens. A new one was trained first, with the encoder "
    "frozen; the values before are those of the original encoder with this head. Vectors of texts "
    "have changed: fine-tune the model again before you compare texts with it."
)
WEAK_HEAD = (
    "With this head the original encoder predicts no better than token frequencies (perplexity "
    "{:,.4g}): the head was trained too briefly, and the values before say little about the "
    "encoder. Lengthen the run: a fifth of its length is added for the head."
)
MASKED = "Of masked tokens, under the same masks before and after, in text that was not trained on."
_SHOWN = 50


def head_note(scores: Scores) -> str:
    """Explain the values before adaptation of a new head, and whether it has learned anything."""
    weak = [
        frequencies
        for metrics in scores.values()
        for name, value in metrics.items()
        if name.startswith("loss/")
        and value >= (frequencies := metrics.get(f"unigram/{name}", math.inf))
    ]
    return f"{NEW_HEAD} {WEAK_HEAD.format(math.exp(weak[0]))}" if weak else NEW_HEAD


def comparison_rows(before: Scores, after: Scores) -> list[list[str | float | None]]:
    """Return a row for each corpus and metric: its value before and after."""
    return [
        [name, metric, value, after.get(name, {}).get(metric)]
        for name, metrics in before.items()
        for metric, value in metrics.items()
        if metric == "perplexity" or metric.startswith(("accuracy/", "f1/"))
    ]


def vocabulary_rows(vocabulary: VocabularyFit) -> list[list[str]]:
    """Return the measures of the vocabulary on the domain and on general text."""
    reports = [vocabulary.domain, *([vocabulary.general] if vocabulary.general else [])]
    return [
        ["tokens per word", *(f"{report.fertility:.3f}" for report in reports)],
        ["unknown tokens", *(f"{report.unknown:.3%}" for report in reports)],
        ["words of one token", *(f"{report.whole_words:.1%}" for report in reports)],
    ]


def write_adapt_page(
    file: Path,
    settings: PretrainConfig,
    run: PretrainResult,
    scores: tuple[Scores, Scores],
    vocabulary: VocabularyFit,
    new_head: bool,
    device: torch.device,
) -> None:
    """Write the page in place of the run's, whose curves and settings it has.

    Raises:
        CheckpointError: the records cannot be read.
        ResourceError: the page cannot be written.
    """
    before, after = scores
    figures = [
        s.KeyFigure(
            f"{name}: perplexity",
            f"{values['perplexity']:.4g} → {after[name]['perplexity']:.4g}",
            "before → after",
        )
        for name, values in before.items()
        if "perplexity" in values
    ]
    columns = ["measure", "domain", *(["general"] if vocabulary.general else [])]
    words: list[list[s.Cell]] = [
        [entry.word, " ".join(entry.pieces), entry.count] for entry in vocabulary.words[:_SHOWN]
    ]
    listed = s.TableSection(
        "Words to add", ["word", "its tokens now", "occurrences"], words,
        note="All are in new_words.txt: bothways convert MODEL --vocabulary new_words.txt.",
    )  # fmt: skip
    state = run.progress
    report = s.Report(
        f"Adaptation: {file.parent.name}",
        "; ".join(f"{entry.label} {entry.value}" for entry in figures) or f"{state.steps:,} steps",
        f"{state.steps:,} steps, {state.tokens:,} tokens, {state.seconds / 60:,.1f} minutes.",
        (
            s.KeyFigures(figures),
            s.TableSection(
                "Before and after", ["text", "metric", "before", "after"],
                comparison_rows(before, after),
                note=f"{MASKED} {head_note(before) if new_head else ''}",
            ),
            s.TableSection("Vocabulary", columns, vocabulary_rows(vocabulary),
                           note=f"Are new words worth adding? {vocabulary.answer}"),
            *([listed] if words else []),
            *curves(read_records(file.with_name("metrics.jsonl")), run.metrics),
            s.Details("Settings", (s.settings_table(settings),)),
        ),
        s.colophon(device),
    )  # fmt: skip
    write_html(report, file)
