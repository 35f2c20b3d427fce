"""The command line: one verb per job, each a function in `bothways.cli`, imported when called.

An error that the user can fix is one message on stderr and exit status 2, never a traceback.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import itertools
import os
import signal
import stat
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError, Group, Parameter

import bothways
from bothways.cli import mistakes
from bothways.core.errors import AGAIN, BothwaysError, LostRankError, interface, render
from bothways.core.runtime.process import limit_threads, tune_allocator
from bothways.core.terminal import ErrorStream, printable, shortened

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

_OUT_OF_MEMORY = (
    "out of GPU memory\n  In training, halve microbatch_tokens, then set training.recompute=true, "
    "and continue with --resume: checkpoints are complete. For predictions, use --device cpu."
)
_OF_A_DISK = {errno.ENOSPC, errno.EIO, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""Errors of the disk, not of the program: no room, none for this user, a defect, no writing."""
_OF_A_NAME = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM}
"""Errors of names that a user has given, wherever they are noticed."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells, and after other signals that end a program."""
_NARROWEST = 20
"""Smaller values of COLUMNS are ignored."""


def _show_panel(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print a panel of a command's help, with one name for each argument."""
    from cyclopts.help import DefaultFormatter

    entries = []
    for entry in panel.entries:
        names = entry.positive_names
        if getattr(entry, "positional_label", None):
            names = ()
        elif names and not names[0].startswith("-"):
            names = names[:1]  # cyclopts 4, the last for Python 3.10, has the label as first name
        negative_names = () if entry.type is bool else entry.negative_names
        entries.append(entry.copy(positive_names=names, negative_names=negative_names))
    panel.entries = entries
    DefaultFormatter()(console, options, panel)


_PARAMETERS = Group("Arguments and options", help_formatter=_show_panel)
app = App(
    name="bothways",
    version=bothways.__version__,
    help="From raw text to a deployed bidirectional encoder: BERT and its family, end to end.",
    suppress_keyboard_interrupt=False,  # `main` reports it
    group_arguments=_PARAMETERS,
    group_parameters=_PARAMETERS,
    default_parameter=Parameter(
        negative_iterable="",  # no --empty-NAME
        show_default=lambda value: None if value in (None, (), False) else str(value),
    ),
)
_GROUPS = {
    name: Group(name, sort_key=position)
    for position, name in enumerate(
        ("Learn", "Data", "Pre-train", "Fine-tune", "Use", "Deploy", "Help")
    )
}
tokenizer = App(
    name="tokenizer",
    help="Train a vocabulary, encode with it, report how well it fits a text.",
    group=_GROUPS["Data"],
    sort_key=0,
)
corpus = App(
    name="corpus",
    help="Build a memory-mapped corpus from text, and inspect it.",
    group=_GROUPS["Data"],
)
reproduce = App(
    name="reproduce",
    help="Run published experiments and compare with the published results.",
    group=_GROUPS["Learn"],
)
# The commands by group, with their module in bothways.cli and an example; the docstring of the
# function is the help.
_COMMANDS = {
    "Learn": {
        "quickstart": ("lab", "--minutes 5"),
        "demo": ("lab", "demo-data"),
        "show": ("show", 'bert-base-uncased "my dog is cute" "he likes playing"'),
        "describe": ("inspection", "bert-base --length 512"),
        "settings": ("settings", "training.optimizer --command pretrain"),
    },
    "Pre-train": {
        "plan": ("plan", "bert-base --tokens 3e9 --hardware h100"),
        "pretrain": ("training", 'corpus --model bert-mini --out run --until "2 hours"'),
        "adapt": ("training", 'bert-base-uncased "contracts/*.txt" --out adapted'),
        "inspect-step": ("inspection", "run 1200 corpus"),
        "bench": ("lab", "base --rounds 3"),
        "babylm": ("lab", "run evaluation_data/fast_eval --out scores"),
    },
    "Fine-tune": {
        "finetune": ("training", "bert-base-uncased train.csv --dev 20% --out films"),
        "sweep": ("training", "bert-base-uncased train.tsv --dev dev.tsv --grid lr=2e-5,5e-5"),
        "distil": ("training", "films train.tsv --student distilbert-base-uncased --out small"),
        "features": ("lab", "bert-base-cased train.conll --dev dev.conll"),
        "evaluate": ("predict", "films test.tsv --report films.html"),
        "calibrate": ("predict", "films dev.tsv --out calibrated"),
        "compare": ("inspection", "runs/a runs/b test.tsv"),
        "average": ("convert", "seed-0 seed-1 seed-2 --out soup"),
    },
    "Use": {
        "predict": ("predict", "films new.csv --keep id --out labels.csv"),
        "embed": ("predict", "all-MiniLM-L6-v2 texts.txt --out vectors.npy"),
        "index": ("search", "texts.txt --model all-MiniLM-L6-v2 --out notes"),
        "search": ("search", 'notes "how do I change my address?"'),
        "mine": ("search", "pairs.tsv --index notes --out triplets.jsonl"),
    },
    "Deploy": {
        "play": ("serve", "films"),
        "serve": ("serve", "films --port 8080"),
        "export": ("export", "films --out films-onnx"),
        "convert": ("convert", "uncased_L-12_H-768_A-12 --out bert-base-uncased"),
    },
}
_TOKENIZER = {
    "train": ("tokenizer", "articles --size 30000 --out tokenizer"),
    "encode": ("tokenizer", "text.txt --tokenizer bert-base-uncased"),
    "report": ("tokenizer", "text.txt --tokenizer bert-base-uncased"),
}
_CORPUS = {
    "build": ("corpus", "articles --tokenizer bert-base-uncased --out corpus"),
    "inspect": ("corpus", "corpus"),
}
_REPRODUCE = {
    "glue": ("lab", "--model bert-base-uncased --data glue"),
    "squad": ("lab", "--model bert-base-uncased --data squad"),
    "swag": ("lab", "--model bert-base-uncased --data swag"),
    "ner": ("lab", "--model bert-base-cased --data conll"),
    "pretraining": ("lab", "bert-5 --text articles --data glue --dry-run"),
}
_APPS = (
    (app, _COMMANDS),
    (tokenizer, {"": _TOKENIZER}),
    (corpus, {"": _CORPUS}),
    (reproduce, {"": _REPRODUCE}),
)
for _app, _groups in _APPS:
    _words = "bothways" if _app is app else f"bothways {_app.name[0]}"
    for _group, _commands in _groups.items():
        for _order, (_name, (_module, _example)) in enumerate(_commands.items()):
            _app.command(
                f"bothways.cli.{_module}:{_name.replace('-', '_')}",
                name=_name,
                group=_GROUPS.get(_group),
                sort_key=_order,
                help_epilogue=f"Example: `{_words} {_name} {_example}`",
            )
app.command(tokenizer)
app.command(corpus)
app.command(reproduce)
app.register_install_completion_command(group=_GROUPS["Help"])
app["--help"].group = app["--version"].group = _GROUPS["Help"]


def import_for_help(words: list[str]) -> None:
    """Import all commands if these words ask for help, which lists the first line of each."""
    if {"--help", "-h"} & {*words} or words in ([], ["tokenizer"], ["corpus"], ["reproduce"]):
        for group, commands in _APPS:
            for name in itertools.chain(*commands.values()):
                _ = group[name]


def _expand_home(word: str) -> str:
    """Replace the ~ of a path by the home folder; shells do not for --out=~/run."""
    option, equals, path = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + os.path.expanduser(path) if path.startswith("~/") else word


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Write characters that the output's encoding lacks as in JSON: \u00d7, \ud83d\ude00."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = (units[at : at + 2].hex() for at in range(0, len(units), 2))
    return "".join(f"\\u{pair}" for pair in pairs), error.end


def _interrupt_on_signals() -> None:
    """Let the signals that end a program do what Ctrl-C does; a second one ends it at once.

    Runs and servers have handlers of their own. What is ignored stays so: `nohup` ignores SIGHUP. A
    rank is left alone: while it waits for others, in torch, no handler of Python would run.
    """
    if "RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Raise what Ctrl-C raises."""
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt

    for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
        number = getattr(signal, name, None)  # Windows has only the first
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, interrupt)


def main() -> None:
    """Run the command line; exit with 0, 2 (an error the user can fix), 1 (another rank of the run
    is lost, or a traceback) or 130 (interrupted, by Ctrl-C or another signal).
    """
    # Make the streams and the width usable: closed streams, other encodings, COLUMNS=0.
    codecs.register_error("bothways.escape", _escape)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as by `>&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="bothways.escape")
    for name in ("COLUMNS", "LINES"):  # rich and argument help fail at a width of 0
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) < _NARROWEST:
            del os.environ[name]
    limit_threads()
    tune_allocator()
    # A run must not end because its terminal was closed.
    with contextlib.redirect_stderr(ErrorStream(sys.stderr)), interface("command"):
        _run()


def _run() -> None:
    try:
        _interrupt_on_signals()
        words = [_expand_home(word) for word in sys.argv[1:]]
        import_for_help(words)
        words = mistakes.rename_options(app, words)
        app(words, result_action="return_value", print_error=False, exit_on_error=False)
        sys.stdout.flush()  # here, where a full disk or a closed pipe is caught
    except CycloptsError as error:
        _fail(str(mistakes.explain_mistake(error)))
    except BothwaysError as error:
        # Of several ranks that raise it the main one alone prints it.
        if error.on_every_rank and os.environ.get("RANK", "0") != "0":
            sys.exit(2)
        _fail(str(error), 1 if isinstance(error, LostRankError) else 2)
    except RuntimeError as error:
        # torch's error is recognized by name, since importing torch here would slow every command.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail(_OUT_OF_MEMORY)
    except (KeyboardInterrupt, ImportError, SystemError) as error:
        # In the middle of an import in C, the interruption is the cause of another error.
        if not any(isinstance(cause, KeyboardInterrupt) for cause in (error, error.__cause__)):
            raise
        # Another Ctrl-C, while Python shuts down, would print a traceback: it ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output, such as `head`, has finished: end silently, also at exit, where
        # Python flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno in _OF_A_NAME and error.filename is not None:
            message = f"{shortened(os.fsdecode(error.filename))}: cannot be used: {error.strerror}"
            _fail(f"{message}\n  Choose another name, or give this user the permissions.")
        if error.errno not in _OF_A_DISK:
            raise
        if error.filename is not None or not _is_full(sys.stdout.fileno()):
            message = f"{error.filename or 'a file'}: cannot be read or written: {error.strerror}"
            _fail(f"{message}\n  Look at the disk, then {render(AGAIN)}.")
        # Python flushes stdout once more at exit; send that to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"the output cannot be written: {error.strerror}\n  Free some space for it.")


def _is_full(output: int) -> bool:
    """Return True if this open file is on a disk without room, or a device such as /dev/full."""
    mode = os.fstat(output).st_mode
    if stat.S_ISREG(mode) and hasattr(os, "fstatvfs"):
        return os.fstatvfs(output).f_bavail == 0
    null = os.stat(os.devnull).st_rdev
    return stat.S_ISCHR(mode) and not os.isatty(output) and os.fstat(output).st_rdev != null


def _fail(message: str, status: int = 2) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)
    sys.exit(status)
