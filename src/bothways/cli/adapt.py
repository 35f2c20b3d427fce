"""`bothways adapt`: continue the pre-training of a model on text of a domain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import bothways
from bothways.cli import options
from bothways.core.errors import ConfigError
from bothways.core.terminal import output_console, say, show_lines

if TYPE_CHECKING:
    from bothways.pretraining.adapt import Adaptation


def adapt(
    model: options.StartModel,
    /,
    *texts: Annotated[str, options.INPUTS],
    out: Path,
    replay: list[str] | None = None,
    replay_share: float = 0.1,
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    length: int = 128,
    resume: options.Resume = False,
    device: options.Device = "auto",
) -> None:
    """Adapt a model to a domain: continue its pre-training on text, measured before and after.

    Without --epochs or --until it reads the text once, with at least 1,000 updates.

    Parameters
    ----------
    texts
        Text of the domain: files (.txt, .jsonl, .parquet, also compressed), folders or globs; or
        the folder of a corpus. Then settings of pretrain by dotted path or common name, such as
        lr=1e-5.
    out
        The run's folder: corpora, checkpoints, and at the end model/ and report.html. The words
        that the vocabulary lacks are in new_words.txt.
    replay
        General text, or a corpus of it: read among that of the domain against forgetting, and
        measured.
    replay_share
        The share of the sequences that are of general text; 0 only measures it.
    length
        Tokens of a sequence.
    """
    from bothways.core.bar import error_console, terminal_progress
    from bothways.training.parallel import is_main, plan_here

    if resume:
        options.check_begun(out)
    files, words = options.split_inputs(texts)
    if not files:
        fix = "Name files, folders or a corpus: bothways adapt MODEL TEXTS --out FOLDER"
        raise ConfigError("names no text of the domain", where="texts", fix=fix)
    settings = options.settings_for(bothways.adapt, words, until=end.duration)
    console = error_console()
    options.say_kernels(device)
    try:
        with terminal_progress(console) as progress:
            done = bothways.adapt(
                model, files, out, replay=replay or (), replay_share=replay_share, length=length,
                resume=resume, device=device, progress=progress, **settings,
            )  # fmt: skip
    except KeyboardInterrupt:
        options.stop_saved(console, "What is finished is kept.")
    if done.folder is None:
        options.stop_saved(console, f"Saved after step {done.run.progress.steps:,}.")
    if not is_main(plan_here()):
        return
    _show(done)
    say(console, f"The model is in {done.folder}. The report: {out / 'report.html'}")


def _show(done: Adaptation) -> None:
    """Print the perplexities before and after, and the fit of the vocabulary."""
    from rich import box
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from bothways.core.report.terminal import titled
    from bothways.pretraining.adapt_page import comparison_rows, head_note, vocabulary_rows

    scores = Table("text", "metric", "before", "after", box=box.SIMPLE)
    for name, metric, before, after in comparison_rows(done.before, done.after):
        scores.add_row(str(name), str(metric), f"{before:,.4g}", f"{after:,.4g}")
    general = ["general"] if done.vocabulary.general else []
    table = Table("vocabulary", "domain", *general, box=box.SIMPLE)
    for row in vocabulary_rows(done.vocabulary):
        table.add_row(*row)
    lines: list[RenderableType] = [
        titled("Held-out text, the same masks before and after", scores),
        table,
        Text(f"Are new words worth adding? {done.vocabulary.answer}"),
    ]
    if done.new_head:
        lines.append(Text(head_note(done.before)))
    show_lines(output_console(), *lines)
