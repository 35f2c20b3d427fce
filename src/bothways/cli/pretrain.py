"""`bothways pretrain`: a corpus becomes a pre-trained model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import bothways
from bothways.cli import options
from bothways.core.bar import error_console
from bothways.core.terminal import output_console, say, show_lines
from bothways.training.shorthands import PretrainRecipe

if TYPE_CHECKING:
    from rich.console import Console

    from bothways.pretraining.run import PretrainResult


def pretrain(  # noqa: PLR0913 – one option per question a run answers
    corpus: str,
    *more: str,
    out: options.RunFolder,
    model: str | None = None,
    recipe: PretrainRecipe | None = None,
    start: str | None = None,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    config: options.ConfigFile = None,
    resume: options.Resume = False,
    device: options.Device = "auto",
) -> None:
    """Pre-train an encoder on a corpus with masked LM and next sentence prediction, or on full
    sentences as RoBERTa.

    Several GPUs or machines: torchrun --nproc-per-node=N -m bothways pretrain …

    Parameters
    ----------
    corpus
        A folder made by `bothways corpus build`, here or at a URL such as s3://bucket/corpus. What
        is read of it there is kept in a folder of bounded size (BOTHWAYS_CACHE,
        BOTHWAYS_CACHE_GB); shuffle=windows is for a corpus that is larger.
    more
        Further corpora, built with the same tokenizer, and settings by dotted path, such as
        objective.masking.rate=0.2, or by a common name, such as lr=5e-4. Several corpora are mixed
        by mixture.alpha (0.7; 1 reads them by size, 0 equally), or by weights:
        mixture.kind=by_weight mixture.weights.NAME=0.9, with the names of their folders.
    model
        The shape to start from: bert-tiny, bert-mini, bert-small, bert-medium, bert-base,
        bert-large, roberta-base and others; default: bert-mini. Vocabulary and padding are the
        corpus' own.
    recipe
        modern is current practice; paper has the settings of Devlin et al. 2018; short is for
        minutes: many small updates, on short sequences at first; electra is ELECTRA-small's, with
        a generator; roberta, albert, spanbert, deberta and deberta_v3 are the settings of these
        papers, with large batches. Without it, short for a budget of 30 minutes or less, else
        modern.
    start
        A model folder or Hub id whose pre-training to continue, instead of --model; build the
        corpus with its tokenizer. Name the heads that it lacks, to start them at random:
        fresh=masked,pair.
    """
    if resume:
        options.check_begun(out)
    corpora, words = options.split_inputs(more)
    settings = options.settings_for(bothways.pretrain, words, until=end.duration)
    console = error_console()
    options.say_kernels(device)
    with options.run_progress(out, console) as progress:
        done = bothways.pretrain(
            [corpus, *corpora] if corpora else corpus,
            model,
            start=start,
            recipe=recipe,
            config=config,
            out=out,
            resume=resume,
            device=device,
            progress=progress,
            **settings,
        )
    conclude_pretraining(done, console)


def conclude_pretraining(done: PretrainResult, console: Console) -> None:
    """Print the metrics of a finished run; raises KeyboardInterrupt if the run was interrupted."""
    from bothways.core.report.terminal import metric_table
    from bothways.hub.hf_config import format_note
    from bothways.training.parallel import is_main, plan_here

    steps, tokens = done.progress.steps, done.progress.tokens
    if done.folder is None:
        options.stop_saved(console, f"Saved after step {steps:,}.")
    if not is_main(plan_here()):
        return
    title = f"After {steps:,} steps and {tokens:,} tokens, on held-out documents"
    show_lines(output_console(), metric_table(title, {"": done.metrics}, "", _shown))
    say(console, f"The model is in {done.folder}. {format_note(done.folder)}".strip())
    if (page := done.folder.parent / "report.html").exists():
        say(console, f"Curves, metrics and settings: {page}")


def _shown(name: str, value: float) -> str:
    return f"{value:.1%}" if "accuracy" in name else f"{value:,.3f}"
