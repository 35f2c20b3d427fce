"""`bothways distil`: a smaller model learns from a teacher, pre-trained or fine-tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bothways.commands.finetune import conclude_finetuning
from bothways.commands.options import Device
from bothways.commands.pretrain import conclude_pretraining
from bothways.commands.progress import (
    check_begun,
    error_console,
    say_kernels,
    terminal_progress,
)


def distil(  # noqa: PLR0913 – one option per question a run answers
    teacher: str,
    data: str,
    *overrides: str,
    student: str | None = None,
    dev: str | None = None,
    recipe: Literal["distilbert", "tinybert", "minilm", "modern", "paper"] | None = None,
    out: Path = Path("distilled"),
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
        A folder made by `bothways corpus build … --tokenizer TEACHER`, or labelled data as for
        `bothways finetune`.
    overrides
        Settings by dotted path, such as training.until="2 hours" encoder.depth=4
        objective.losses.0.temperature=3, or with labelled data teacher.weight=0.7.
    student
        With a corpus a preset, such as distilbert-base-uncased, or a model folder; default: half of
        the teacher's layers. With labelled data a model folder or Hub id.
    dev
        Labelled data by which the best checkpoint is chosen.
    recipe
        With a corpus: distilbert (the default: predictions, masked LM, cosine), tinybert (hidden
        states and attention scores) or minilm (relations of one layer, for any width). With
        labelled data: modern (the default) or paper, as in `bothways finetune`.
    out
        The run's folder: checkpoints, metrics, and at the end model/, a Hugging Face folder.
    config
        A TOML file with settings; the overrides win over it.
    resume
        Continue from the newest checkpoint in the folder, or start a run if there is none.
    """
    from bothways.core.config import reader as configs
    from bothways.core.errors import ConfigError
    from bothways.data.corpus import Corpus
    from bothways.finetuning import run as finetuning
    from bothways.finetuning.prepare import load_config, taught_finetuning
    from bothways.pretraining import run as pretraining
    from bothways.pretraining.config import PretrainConfig
    from bothways.pretraining.distilling import distillation

    if resume:
        check_begun(out)
    say_kernels(device)
    console = error_console()
    if Path(data).is_dir():
        if dev is not None:
            what = f"is for labelled data, and {data} is a folder: a corpus"
            raise ConfigError(what, where="dev", fix="Leave it out; held_out=0.01 sets aside text.")
        text = Corpus.open(Path(data))
        usual = distillation(teacher, text, student, recipe)
        settings = configs.load(PretrainConfig, base=usual, file=config, overrides=overrides)
        with terminal_progress(console) as progress:
            done = pretraining.pretrain(
                settings, text, out, resume=resume, device=device, progress=progress
            )
        conclude_pretraining(done, settings, console)
        return
    base = taught_finetuning(teacher, data, student, recipe, dev)
    with terminal_progress(console) as progress:
        tuned = finetuning.finetune(
            load_config(base, overrides, config),
            out,
            resume=resume,
            device=device,
            progress=progress,
        )
    conclude_finetuning(tuned, out, console)
