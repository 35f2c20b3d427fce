"""`bothways distil`: a smaller model learns from a teacher, pre-trained or fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bothways.api.progress import check_begun, run_progress, say_kernels, say_replaced
from bothways.cli.finetune import conclude_finetuning
from bothways.cli.options import Device, RunLength
from bothways.cli.pretrain import conclude_pretraining
from bothways.core.bar import error_console


def distil(  # noqa: PLR0913 – one option per question a run answers
    teacher: str,
    data: str,
    *overrides: str,
    student: str | None = None,
    dev: str | None = None,
    recipe: Literal["distilbert", "tinybert", "minilm", "modern", "paper"] | None = None,
    out: Path = Path("distilled"),
    end: RunLength = RunLength(),  # noqa: B008 – frozen
    config: Path | None = None,
    resume: bool = False,
    device: Device = "auto",
) -> None:
    """Train a smaller model on what a teacher computes.

    With a corpus, the student is pre-trained: it learns from the teacher's predictions, vectors or
    relations between tokens. With labelled data, it is fine-tuned for the teacher's task, on the
    labels and the teacher's outputs. Both have the vocabulary of the teacher.

    Parameters
    ----------
    teacher
        A model folder, the folder of a run, or a Hub id; with labelled data a fine-tuned one.
    data
        A folder made by `bothways corpus build … --tokenizer TEACHER`, or its URL, or labelled data
        as for `bothways finetune`.
    overrides
        Settings by dotted path, such as encoder.depth=4 objective.losses.0.temperature=3, or with
        labelled data teacher.weight=0.7.
    student
        With a corpus a preset, such as distilbert-base-uncased, or a model folder; default: half of
        the teacher's layers. With labelled data a model folder or Hub id.
    dev
        Labelled data by which the best checkpoint is chosen, or its share of TRAIN, such as 20%;
        without it the last checkpoint is kept.
    recipe
        With a corpus: distilbert (the default: predictions, masked LM, cosine), tinybert (hidden
        states and attention scores) or minilm (relations of one layer, for any width). With
        labelled data: modern (the default) or paper, as in `bothways finetune`, or tinybert (the
        teacher's layers, then its answers).
    out
        The run's folder: checkpoints, metrics, and at the end model/, a Hugging Face folder.
    config
        A TOML file with settings; settings on the command line have priority.
    resume
        Continue from the newest checkpoint in the folder, or start a run if there is none.
    """
    from bothways.data.manifest import holds_corpus

    if resume:
        check_begun(out)
    say_kernels(device)
    run = _Run(out, (*overrides, *end.settings), config, resume, device)
    if not (Path(data).is_dir() or holds_corpus(data)):
        _finetune_student(teacher, data, student, recipe, dev, run)
    elif dev is None:
        _pretrain_student(teacher, data, student, recipe, run)
    else:
        from bothways.core.errors import ConfigError

        what = f"is for labelled data, and {data} is a corpus"
        raise ConfigError(what, where="dev", fix="Leave it out; held_out=0.01 sets aside text.")


@dataclass(frozen=True)
class _Run:
    """What a run of either kind is given."""

    out: Path
    overrides: tuple[str, ...]
    config: Path | None
    resume: bool
    device: str


def _pretrain_student(
    teacher: str, corpus: str, student: str | None, recipe: str | None, run: _Run
) -> None:
    """Pre-train a student on a corpus, and print its metrics."""
    from bothways.data.corpus import Corpus
    from bothways.pretraining import run as job
    from bothways.pretraining.config import load_config
    from bothways.pretraining.distilling import distillation

    text, console = Corpus.open(corpus), error_console()
    usual = distillation(teacher, text, student, recipe)
    settings = load_config(usual, run.overrides, run.config)
    say_replaced(settings, usual)
    with run_progress(run.out, console) as progress:
        done = job.pretrain(
            settings, text, run.out, resume=run.resume, device=run.device, progress=progress
        )
    conclude_pretraining(done, settings, console)


def _finetune_student(
    teacher: str, train: str, student: str | None, recipe: str | None, dev: str | None, run: _Run
) -> None:
    """Fine-tune a student for the task of its teacher, and print its metrics."""
    from bothways.finetuning import run as job
    from bothways.finetuning.config import load_config
    from bothways.finetuning.distillation import taught_finetuning

    base, console = taught_finetuning(teacher, train, student, recipe, dev), error_console()
    settings = load_config(base, run.overrides, run.config)
    say_replaced(settings, base)
    with run_progress(run.out, console) as progress:
        done = job.finetune(
            settings, run.out, resume=run.resume, device=run.device, progress=progress
        )
    conclude_finetuning(done, run.out, console)
