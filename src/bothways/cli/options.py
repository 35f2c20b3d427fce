"""Options that several commands share, predictions in parts, progress, and how to resume."""

from __future__ import annotations

import glob
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from cyclopts import Parameter

import bothways
from bothways.core.config.values import is_integer, split_overrides
from bothways.core.errors import ConfigError, is_interruption
from bothways.core.files import is_url
from bothways.core.progress import terminal_progress
from bothways.core.terminal import output_console, show_lines, write_stderr
from bothways.prediction import PredictPrecision

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bothways.core.progress import Progress

Command = TypeVar("Command", bound=Callable[..., object])
Device = Annotated[str, Parameter(help="auto (a GPU, if there is one), cpu, cuda or cuda:N.")]
GroupColumn = Annotated[
    str | None,
    Parameter(
        help="With --dev 20%: a column whose equal values stay on one side of the split, such as a "
        "user or a patient."
    ),
]
Precision = Annotated[
    PredictPrecision,
    Parameter(
        help="Precision of matrix products: fp32 is equal on every machine; auto is bf16 where the "
        "hardware has it; int8 is faster on a CPU and less exact (see `bothways evaluate`)."
    ),
]
JsonOutput = Annotated[bool, Parameter(help="Write one JSON object instead of a table.")]
MaxLength = Annotated[
    int | None, Parameter(help="Maximum length in tokens; default: as in training.")
]
Abstain = Annotated[
    float | None,
    Parameter(
        help="For classify: give no label where the most probable one is less probable than "
        "this, such as 0.9."
    ),
]
DevData = Annotated[
    str | None,
    Parameter(
        help="Labelled data by which the best checkpoint is chosen, or its share of TRAIN, such as "
        "20%; without it the last checkpoint is kept."
    ),
]
PaperSettings = Annotated[str, Parameter(help="Settings by dotted path that override the paper's.")]


@Parameter(name="*")
@dataclass(frozen=True)
class RunLength:
    """The options for the length of a run; each gives the setting `training.until`."""

    epochs: Annotated[
        float | None,
        Parameter(help="How many times the data is read; default: the length of the recipe."),
    ] = None
    until: Annotated[
        str | None,
        Parameter(
            help='End of the run instead of --epochs, such as "2 hours", "10000 steps", "2e9 '
            'tokens".'
        ),
    ] = None

    @property
    def duration(self) -> str | None:
        """The length as a text; None without an option.

        Raises:
            ConfigError: both options are given; a number without a unit, which without quotation
                marks would be taken for a file.
        """
        if self.epochs is not None and self.until is not None:
            message = f"the length is given twice: {self.epochs:g} epochs and {self.until!r}"
            raise ConfigError(message, where="--until", fix="Leave out --epochs or --until.")
        if self.until is not None and is_integer(self.until):
            fix = f'Give it with its unit, in quotation marks: --until "{self.until} minutes".'
            raise ConfigError(f"{self.until!r} has no unit", where="--until", fix=fix)
        return self.until if self.epochs is None else f"{self.epochs:g} epochs"


def _check_names(kind: object, names: str | Iterable[str] | None) -> None:
    """Raise ValueError for an unknown option: a word with a hyphen, unless a file has that name."""
    for name in [names] if isinstance(names, str) else names or ():
        if name.startswith("-") and name != "-" and not os.path.exists(name):
            raise ValueError(f"Unknown option: {name}")


INPUTS = Parameter(allow_leading_hyphen=True, validator=_check_names)
"""File names as arguments of a command, including "-"."""


_SETTING = re.compile(r"\w+(?:\.\w+)*=")
_FILE_NAME = re.compile(r"[~./].*|.*\w\.[A-Za-z]\w{0,7}")
"""What cannot be a text: a path, or a name with a suffix."""


def split_inputs(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files and the settings among words: "pooling=max" is a setting, if no file."""
    settings = tuple(word for word in words if _SETTING.match(word) and not os.path.exists(word))
    return tuple(word for word in words if word not in settings), settings


_PYTHON_ONLY = re.compile(r"[;,] (?:or )?in Python (?:`[^`]*`|[^`;.])*")
"""The part of a description that a command line cannot use: "; in Python also a predictor"."""


def documented_by(function: Callable[..., object]) -> Callable[[Command], Command]:
    """Complete the help of a command by the arguments of the public function that it calls.

    What the command's own docstring describes, such as the settings among its words, stays. So does
    that of a class of options, which is completed like a command.
    """

    def complete(command: Command) -> Command:
        help_text, document = inspect.getdoc(command) or "", inspect.getdoc(function) or ""
        if "\nParameters\n" not in help_text:
            help_text += "\n\nParameters\n----------"
        arguments = document.partition("Args:\n")[2].partition("\n\n")[0]
        for entry in re.split(r"\n(?= {4}\w)", arguments):
            name, _, text = _PYTHON_ONLY.sub("", " ".join(entry.split())).partition(": ")
            text = text.replace("`out`", "--out")
            if name in inspect.signature(command).parameters and f"\n{name}\n" not in help_text:
                help_text += f"\n{name}\n    {text[:1].upper()}{text[1:]}"
        command.__doc__ = help_text
        return command

    return complete


@documented_by(bothways.evaluate)
@Parameter(name="*")
@dataclass(frozen=True)
class DataColumns:
    """The options that name the columns of labelled data."""

    text: str | None = None
    text_b: str | None = None
    label: str | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The columns that are named, by role."""
        return {role: column for role, column in vars(self).items() if column is not None}


def settings_for(
    function: Callable[..., object], words: Iterable[str], **options: object
) -> dict[str, Any]:
    """Return settings to call a public function with: words such as "lr=3e-5", then options.

    Args:
        options: settings that have an option; None for those that were not used.

    Raises:
        ConfigError: a word is not a setting, or names an argument or an option that is used.
    """
    used = {name: value for name, value in options.items() if value is not None}
    settings: dict[str, Any] = {**split_overrides(words)}
    if is_integer(settings.get("seed", "").removeprefix("-")):
        settings["seed"] = int(settings["seed"])  # an argument of the function, of its own type
    arguments = inspect.signature(function).parameters.keys() - _SETTINGS
    for name in settings.keys() & arguments:
        fix = f"Write --{name.replace('_', '-')} {settings[name]}, if the help lists that option."
        raise ConfigError("is an argument of the command, not a setting", where=name, fix=fix)
    for name in settings.keys() & used:
        message = "is given as an option and as a setting"
        raise ConfigError(message, where=name, fix="Leave out one of the two.")
    return settings | used


_SETTINGS = {"objective", "seed", "until"}
"""Arguments of public functions that commands take as settings."""


def is_word(word: str) -> bool:
    """Decide whether an argument is a text of one word: "node.js", but not "queries.txt" or "-"."""
    from bothways.data.tables import HUB, SUFFIXES
    from bothways.data.text_io import suffix_of

    is_source = word == "-" or word.startswith(HUB) or suffix_of(word) in SUFFIXES
    return not is_source and not os.path.exists(word)


def argument_text(words: tuple[str, ...]) -> str | None:
    """Return the only word if it is a text to predict, and not the name of a file.

    A text has blanks or letters outside ASCII, as Chinese has; it is not the name of what exists,
    does not begin like a path, and has no suffix: "a good film.", but not "my data.csv".
    """
    if len(words) != 1:
        return None
    [word] = words
    written = any(character.isspace() for character in word) or not word.isascii()
    if not written or _FILE_NAME.fullmatch(word) or is_url(word):
        return None
    exists = os.path.exists(word) or os.path.isdir(os.path.dirname(word)) or glob.glob(word)
    return None if exists else word


class CommandTable(NamedTuple):
    """A table of a command; the first `left` columns are names, the others are right-aligned."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def __rich__(self) -> RenderableType:
        """Return the table with its title above it."""
        from bothways.core.report.terminal import FittedTable, titled

        numeric = [index >= self.left for index in range(len(self.columns))]
        return titled(self.title, FittedTable(self.columns, self.rows, numeric, framed=True))


def metric_table(
    title: str,
    metrics: Mapping[str, Mapping[str, float]],
    head: str = "metric",
    shown: Callable[[str, float], str] = lambda name, value: (
        f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
    ),
) -> CommandTable:
    """Return the metrics of one or more models, which have equal names, by column."""
    rows = [
        [name, *(shown(name, values[name]) for values in metrics.values())]
        for name in next(iter(metrics.values()))
    ]
    return CommandTable(title, [head, *metrics], rows)


def show_tables(*tables: CommandTable) -> None:
    """Print tables as the result of a command."""
    show_lines(output_console(), *tables)


def kernels(device: str) -> str | None:
    """Return the line about the kernels that a long command computes with; None for a GPU."""
    from bothways.core.runtime.devices import choose_device
    from bothways.model.kernels.library import describe_kernels

    return describe_kernels() if choose_device(device).type == "cpu" else None


def on_main_rank() -> bool:
    """Return True in the process that prints results."""
    from bothways.training.parallel import is_main, plan_here

    return is_main(plan_here())


@contextmanager
def resumable(
    out: Path, subject: str = "Finished work", device: str | None = None
) -> Iterator[Progress]:
    """Show the progress of work that the same command continues.

    Report on Ctrl-C which work is kept, in a folder or a file, and how to resume.

    Args:
        device: where a model computes; None where none does.
    """
    announced = None if device is None else kernels(device)
    try:
        with terminal_progress(announced=announced) as progress:
            yield progress
    except (KeyboardInterrupt, ValueError) as error:
        if not is_interruption(error):
            raise
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would cut the message
        left = "Nothing is finished, and nothing is left behind."
        if out.is_file() or any(out.glob("*")):
            left = f"{subject} is kept in {out}; run the same command to continue."
        try:
            write_stderr(f"Stopped. {left}")
        finally:
            signal.signal(signal.SIGINT, handler)
        raise


@contextmanager
def training(out: Path, resume: bool, device: str, notes: Iterable[str] = ()) -> Iterator[Progress]:
    """Begin a run in a folder, show its progress, and report on Ctrl-C how to resume.

    All ranks raise the interruption: one that ended with status 0 would tell torchrun that its part
    of the run is finished, and its machine would not be used again.

    Args:
        notes: messages about the settings of the run.
    """
    from bothways.training.checkpoint import resume_command

    if resume and not out.exists():
        write_stderr(f"note: {out} has no run to resume: starting one")
    announced = kernels(device) if on_main_rank() else None
    try:
        with terminal_progress(announced=announced) as progress:
            for note in notes:
                progress.message(note)
            yield progress
    except KeyboardInterrupt as error:  # in a step, the run has saved and says so
        message = "Stopped before the first checkpoint: the same command begins again."
        if next(out.rglob("step-*/manifest.json"), None) is not None:
            restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            condition = "If torchrun does not start it again" if restarts else "To resume"
            saved = str(error) or "The checkpoints are kept."
            message = f"{saved} {condition}: {resume_command(sys.argv[1:])}"
        if on_main_rank():
            write_stderr(message)
        raise
