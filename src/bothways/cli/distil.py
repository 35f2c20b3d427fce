"""`bothways distil`: a smaller model learns from a teacher, pre-trained or fine-tuned."""

from __future__ import annotations

from pathlib import Path

import bothways
from bothways.cli import options
from bothways.cli.finetune import conclude_finetuning
from bothways.cli.pretrain import conclude_pretraining
from bothways.core.bar import error_console
from bothways.training.shorthands import DistilRecipe


def distil(  # noqa: PLR0913 – one option per question a run answers
    teacher: str,
    data: str,
    *overrides: str,
    student: str | None = None,
    dev: options.DevData = None,
    recipe: DistilRecipe | None = None,
    out: options.RunFolder = Path("distilled"),
    end: options.RunLength = options.RunLength(),  # noqa: B008 – frozen
    config: options.ConfigFile = None,
    resume: options.Resume = False,
    device: options.Device = "auto",
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
    recipe
        With a corpus: distilbert (the default: predictions, masked LM, cosine), tinybert (hidden
        states and attention scores) or minilm (relations of one layer, for any width). With
        labelled data: modern (the default) or paper, as in `bothways finetune`, or tinybert (the
        teacher's layers, then its answers).
    """
    from bothways.finetuning.result import FinetuneResult

    if resume:
        options.check_begun(out)
    settings = options.settings_for(bothways.distil, overrides, until=end.duration)
    console = error_console()
    options.say_kernels(device)
    with options.run_progress(out, console) as progress:
        done = bothways.distil(
            teacher,
            data,
            student,
            dev,
            recipe=recipe,
            config=config,
            out=out,
            resume=resume,
            device=device,
            progress=progress,
            **settings,
        )
    if isinstance(done, FinetuneResult):
        conclude_finetuning(done, out, console)
    else:
        conclude_pretraining(done, console)
