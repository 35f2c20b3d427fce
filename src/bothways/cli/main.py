"""The command line: one verb per job, each a function in `bothways.cli`, imported when called.

An error that the user can fix is one message on stderr and exit status 2, never a traceback.
Options under the names of other libraries are replaced by ours, or by settings.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import errno
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from cyclopts import UNSET, App, ArgumentCollection, CycloptsError, Group, Parameter, exceptions
from cyclopts.completion.install import create_install_completion_command

import bothways
from bothways.core import errors
from bothways.core.errors import BothwaysError, ConfigError
from bothways.core.runtime.process import END_SIGNALS, limit_threads, tune_allocator
from bothways.core.terminal import ErrorStream, shortened, write_stderr

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions


_OUT_OF_MEMORY = (
    "out of {}memory\n  In training, halve microbatch_tokens, then set training.recompute=true, "
    "and continue with --resume: checkpoints are complete. For predictions, {}."
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


def _check_words(arguments: ArgumentCollection) -> None:
    """Raise ConfigError for an empty word, and a whole number with a full stop.

    The parser would take the first for this folder, and round the second.
    """
    for argument in arguments:
        for token in argument.tokens:
            name = token.keyword or (argument.name or "").lstrip("-").upper()
            flag = token.implicit_value is not UNSET
            if not token.value and not flag and name != "--prompt":  # a prompt may be none
                fix = "Leave it out, or check the variable that gives it."
                raise ConfigError("is empty", where=name, fix=fix)
            if isinstance(argument.value, int) and "." in token.value:
                raise ConfigError(f"{token.value!r} is not a whole number", where=name)


_PARAMETERS = Group("Arguments and options", help_formatter=_show_panel, validator=_check_words)
app = App(
    name="bothways",
    version=bothways.__version__,
    help="From raw text to a deployed bidirectional encoder: BERT and its family, end to end.",
    suppress_keyboard_interrupt=False,  # `main` reports it
    group_arguments=_PARAMETERS,
    group_parameters=_PARAMETERS,
    default_parameter=Parameter(
        negative_iterable="",  # no --empty-NAME
        show_default=lambda value: None if value in (None, (), False, "") else str(value),
    ),
)
_GROUPS = {
    name: Group(name, sort_key=position)
    for position, name in enumerate(
        ("Learn", "Data", "Pre-train", "Fine-tune", "Use", "Deploy", "Help")
    )
}
_HELP = {
    "tokenizer": "Train a vocabulary, encode with it, report how well it fits a text.",
    "corpus": "Build a memory-mapped corpus from text, and inspect it.",
    "reproduce": "Run published experiments and compare with the published results.",
}
PARENTS = {"": app, **{name: App(name=name, help=text) for name, text in _HELP.items()}}
"""The program, and its commands that have commands of their own."""
PARENTS["tokenizer"].group = PARENTS["corpus"].group = _GROUPS["Data"]
PARENTS["reproduce"].group, PARENTS["tokenizer"].sort_key = _GROUPS["Learn"], 0
# The commands by group, with their module in bothways.cli and an example; the docstring of the
# function is the help.
_COMMANDS = {
    "Learn": {
        "quickstart": ("lab", "--minutes 5"),
        "demo": ("lab", "demo-data"),
        "show": ("inspection", 'bert-base-uncased "my dog is cute" "he likes playing"'),
        "describe": ("inspection", "bert-base --length 512"),
        "settings": ("inspection", "training.optimizer --command pretrain"),
        "reproduce glue": ("lab", "--model bert-base-uncased --data glue"),
        "reproduce squad": ("lab", "--model bert-base-uncased --data squad"),
        "reproduce swag": ("lab", "--model bert-base-uncased --data swag"),
        "reproduce ner": ("lab", "--model bert-base-cased --data conll"),
        "reproduce pretraining": ("lab", "bert-5 --text articles --data glue --dry-run"),
    },
    "Data": {
        "tokenizer train": ("data", "articles --size 30000 --out tokenizer"),
        "tokenizer encode": ("data", "text.txt --tokenizer bert-base-uncased"),
        "tokenizer report": ("data", "text.txt --tokenizer bert-base-uncased"),
        "corpus build": ("data", "articles --tokenizer bert-base-uncased --out corpus"),
        "corpus inspect": ("data", "corpus"),
    },
    "Pre-train": {
        "plan": ("training", "bert-base --tokens 3e9 --hardware h100"),
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
        "average": ("deploy", "seed-0 seed-1 seed-2 --out soup"),
    },
    "Use": {
        "predict": ("predict", "films new.csv --keep id --out labels.csv"),
        "embed": ("predict", "all-MiniLM-L6-v2 texts.txt --out vectors.npy"),
        "index": ("predict", "texts.txt --model all-MiniLM-L6-v2 --out notes"),
        "search": ("predict", 'notes "how do I change my address?"'),
        "mine": ("predict", "pairs.tsv --index notes --out triplets.jsonl"),
    },
    "Deploy": {
        "play": ("deploy", "films"),
        "serve": ("deploy", "films --port 8080"),
        "export": ("deploy", "films --out films-onnx"),
        "convert": ("deploy", "uncased_L-12_H-768_A-12 --out bert-base-uncased"),
    },
}
for _group, _commands in _COMMANDS.items():
    for _order, (_name, (_module, _example)) in enumerate(_commands.items()):
        _parent, _, _verb = _name.rpartition(" ")
        PARENTS[_parent].command(
            f"bothways.cli.{_module}:{_verb.replace('-', '_')}",
            name=_verb,
            group=None if _parent else _GROUPS[_group],
            sort_key=_order,
            help_epilogue=f"Example: `bothways {_name} {_example}`",
        )
for _name in _HELP:
    app.command(PARENTS[_name])


def _install_completion(shell: str, output: Path | None, add_to_startup: bool) -> Path:
    """Install the completion of a shell, which completes names of files where it has no word.

    Most arguments are files, or may be. Readline adds the slash of a folder and quotes blanks.
    """
    path = app.install_completion(shell=shell, output=output, add_to_startup=add_to_startup)  # type: ignore[arg-type]
    script = path.read_text("utf8")
    if shell == "bash":
        script = script.replace('$(compgen -f -- "${cur}")', "")
        script = script.replace("\ncomplete -F ", "\ncomplete -o bashdefault -o default -F ")
    if shell == "zsh":  # a message of _arguments keeps it from inserting anything
        files = "  (( compstate[nmatches] )) || { compstate[insert]=unambiguous; _files }\n}\n"
        script = script.rstrip().removesuffix("}") + files
    path.write_text(script, "utf8")  # fish completes files by itself
    return path


app.command(
    create_install_completion_command(_install_completion, add_to_startup=True),
    name="--install-completion",
    group=_GROUPS["Help"],
)
app["--help"].group = app["--version"].group = _GROUPS["Help"]


def import_for_help(words: list[str]) -> None:
    """Import all commands if these words ask for help, which lists the first line of each."""
    if {"--help", "-h"} & {*words} or " ".join(words) in PARENTS:
        for parent in PARENTS.values():
            for name in parent:
                _ = parent[name]


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

    for number in END_SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, interrupt)


def run_command_line() -> None:
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
            # Files are read as UTF-8 in every locale, so what becomes a file is written as UTF-8.
            data = stream is sys.stdout and not stream.isatty()
            utf8 = data and "PYTHONIOENCODING" not in os.environ
            stream.reconfigure(encoding="utf-8" if utf8 else None, errors="bothways.escape")
    for name in ("COLUMNS", "LINES"):  # rich and argument help fail at a width of 0
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) < _NARROWEST:
            del os.environ[name]
    limit_threads()
    tune_allocator()
    # A run must not end because its terminal was closed.
    with contextlib.redirect_stderr(ErrorStream(sys.stderr)), errors.interface("command"):
        _run()


def _run() -> None:
    try:
        _interrupt_on_signals()
        words = [_expand_home(word) for word in sys.argv[1:]]
        # `bothways help finetune`, as in git, pip and conda.
        words = [*words[1:], "--help"] if words[:1] == ["help"] else words
        import_for_help(words)
        words = rename_options(app, words)
        app(words, result_action="return_value", print_error=False, exit_on_error=False)
        sys.stdout.flush()  # here, where a full disk or a closed pipe is caught
    except CycloptsError as error:
        _fail(str(explain_mistake(error)))
    except BothwaysError as error:
        # Of several ranks that raise it the main one alone prints it.
        if error.on_every_rank and os.environ.get("RANK", "0") != "0":
            sys.exit(2)
        _fail(str(error), 1 if isinstance(error, errors.LostRankError) else 2)
    except (RuntimeError, MemoryError) as error:
        if not (message := _out_of_memory(error)):
            raise
        _fail(message)
    except (KeyboardInterrupt, ImportError, SystemError, ValueError) as error:
        if not errors.is_interruption(error):
            raise
        # Another Ctrl-C, while Python shuts down, would print a traceback: it ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        write_stderr("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output, such as `head`, has finished: end silently, also at exit, where
        # Python flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _fail_of_system(error)


def _fail_of_system(error: OSError) -> None:
    """End the program with the message for an error of names, the disk or temporary files.

    Raises:
        OSError: it is another one.
    """
    if error.errno in _OF_A_NAME and error.filename is not None:
        message = f"{shortened(os.fsdecode(error.filename))}: cannot be used: {error.strerror}"
        _fail(f"{message}\n  Choose another name, or give this user the permissions.")
    if "temporary directory" in str(error.strerror):  # by tempfile, where nothing is writable
        _fail(f"{error.strerror}\n  Set the variable TMPDIR to a folder that can be written.")
    if error.errno not in _OF_A_DISK:
        raise error
    if error.filename is not None or not _is_full(sys.stdout.fileno()):
        message = f"{error.filename or 'a file'}: cannot be read or written: {error.strerror}"
        _fail(f"{message}\n  Look at the disk, then {errors.render(errors.AGAIN)}.")
    # Python flushes stdout once more at exit; send that to /dev/null.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _fail(f"the output cannot be written: {error.strerror}\n  Free some space for it.")


def _out_of_memory(error: Exception) -> str:
    """Return the message for an error that means too little memory; "" for any other.

    torch's error for a GPU is recognized by its name, since importing torch would slow every
    command; its error for a processor is a RuntimeError with this text.
    """
    if type(error).__name__ == "OutOfMemoryError":
        return _OUT_OF_MEMORY.format("GPU ", "use --device cpu")
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return _OUT_OF_MEMORY.format("", "end other programs, or raise the limit of this one")
    return ""


def _is_full(output: int) -> bool:
    """Return True if this open file is on a disk without room, or a device such as /dev/full."""
    mode = os.fstat(output).st_mode
    if stat.S_ISREG(mode) and hasattr(os, "fstatvfs"):
        return os.fstatvfs(output).f_bavail == 0
    null = os.stat(os.devnull).st_rdev
    return stat.S_ISCHR(mode) and not os.isatty(output) and os.fstat(output).st_rdev != null


def _fail(message: str, status: int = 2) -> None:
    if message.startswith("error: "):  # of the option with this name
        message = f"--{message}"
    write_stderr(f"error: {message}")
    sys.exit(status)


SETTABLE = {"pretrain", "adapt", "finetune", "distil", "sweep", "plan", "features"}
"""Commands with settings of a training run."""
_OPTIONS = {"output_dir": "--out", "vocab_size": "--size"}
"""Names of other libraries that mean an option."""
_SETTINGS = {"seed", "dropout", "length", "metric", "objective"}
"""Settings without a dotted path and without a shorthand."""
_MEANT_COMMANDS = {
    "train": ["finetune", "pretrain", "tokenizer train"],
    "test": ["evaluate"],
    "eval": ["evaluate"],
    "infer": ["predict"],
    "encode": ["embed", "tokenizer encode"],
    "build": ["corpus build"],
    "speedrun": ["python benchmarks/speedrun.py"],
}
"""Words for which spelling suggests another command than is meant, and the commands."""
_NEAR = 0.7
"""The least similarity of a name that is suggested; at 0.6, "patience" is near "teacher"."""


_DASHES = re.compile("-?[\u2010-\u2015\u2212\uff0d]+-?(?=[a-z])")
"""What programs for text make of the two hyphens of an option: a dash, or full-width hyphens."""


def _refuse_dashes(app: App, words: Sequence[str]) -> None:
    """Raise ConfigError for an option with a dash, which would be read as a text or a file."""
    for word in filter(_DASHES.match, words):
        name = _DASHES.sub("--", word, count=1).partition("=")[0]
        if name in _names(app.parse_commands(words)[1][-1].assemble_argument_collection()):
            message = f"{word!r} begins with a dash instead of two hyphens"
            raise ConfigError(message, fix=f"Type {name}.")


def rename_options(app: App, words: Sequence[str]) -> list[str]:
    """Replace options of other libraries by ours, or by settings, which follow at the end.

    Example: finetune m d.tsv --num-train-epochs 3 --weight-decay=0.1 →
    finetune m d.tsv --epochs 3 weight_decay=0.1
    """
    _refuse_dashes(app, words)
    chain, apps, _ = app.parse_commands(words)
    options = {word for word in words if word.startswith("-")}
    if not {*chain} & SETTABLE or not options or options & {"--help", "-h", "--version"}:
        return list(words)
    from bothways.finetuning.config import SAME, SHORTHANDS

    option_names = _names(apps[-1].assemble_argument_collection())
    result, settings, left = list[str](), list[str](), list(words)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or option in option_names:
            result.append(word)
            continue
        setting_name, form = SAME.get(name, (name, "{}"))
        option = _OPTIONS.get(name, f"--{setting_name.replace('_', '-')}")
        setting = name in SAME or name in SHORTHANDS or name in _SETTINGS or "." in name
        if not (setting or option in option_names):
            result.append(word)
            continue
        if not equals and (not left or left[0].startswith("--")):
            raise ConfigError("needs a value", where=word, fix=f"Type {word} VALUE.")
        value = value if equals else left.pop(0)
        if option in option_names:
            result += [option, form.format(value)]
        else:
            settings.append(f"{name}={value}")
    return result + settings


def _names(arguments: ArgumentCollection) -> set[str]:
    return {name for argument in arguments for name in argument.names}


def explain_mistake(error: CycloptsError) -> BothwaysError:
    """Return the error of a command line as one of ours: what, where, and what to type."""
    command = " ".join(["bothways", *(error.command_chain or ())])
    fix = f"{command} --help lists the options."
    match error:
        case exceptions.MissingArgumentError(keyword=None):
            about = ""
            if error.argument is not None and error.app is not None:
                # cyclopts reads the help of arguments from docstrings for a help page only.
                described = error.app.assemble_argument_collection(parse_docstring=True)
                texts = {
                    name: item.parameter.help or "" for item in described for name in item.names
                }
                about = next((texts[name] for name in error.argument.names if name in texts), "")
            fix = f"{' '.join(about.split())} {fix}".strip()
            return ConfigError("is missing", where=_shown(error), fix=fix)
        case exceptions.MissingArgumentError():
            return ConfigError("needs a value", where=error.keyword, fix=fix)
        case exceptions.ArgumentOrderError(token=word):
            arguments = error.prior_positional_or_keyword_supplied_as_keyword_arguments
            options = " and ".join(str(argument.tokens[0].keyword) for argument in arguments)
            message = f"{word!r} has no name, and {options} before it has"
            return ConfigError(message, where=command, fix=f"Leave out {options}.")
        case exceptions.RepeatArgumentError(token=token):
            return ConfigError("is given twice", where=token.keyword, fix="Leave out one.")
        case exceptions.CoercionError(token=token) if token is not None and error.msg is None:
            from bothways.core.config.reader import describe_type

            kind: Any = error.target_type
            choices = [*map(str, get_args(kind))] if get_origin(kind) is Literal else []
            near = _did_you_mean(_near(token.value, choices))
            message = f"{token.value!r} is not {describe_type(kind)}{near}"
            location = token.keyword or _shown(error)
            is_table = location == "--format" and token.value in ("csv", "tsv")
            # They are formats of one file, which its ending names.
            advice = f"Name a file instead: --out FILE.{token.value}" if is_table else None
            return ConfigError(message, where=location, fix=advice)
        case exceptions.UnknownOptionError(token=token):
            option = (token.keyword or token.value).partition("=")[0]
            return _unknown_option(option, _names(error.argument_collection), command)
        case exceptions.ValidationError() if error.exception_message.startswith(_UNKNOWN):
            assert error.app is not None
            names = _names(error.app.assemble_argument_collection())
            return _unknown_option(error.exception_message.removeprefix(_UNKNOWN), names, command)
        case exceptions.UnknownCommandError(unused_tokens=[word, *_]):
            return _unknown_command(word, error.app or (), command)
        case exceptions.UnusedCliTokensError(unused_tokens=[*words]):
            return ConfigError(f"one argument too many: {' '.join(words)}", where=command, fix=fix)
        case _:
            error.verbose = False
            return ConfigError(str(error), fix=fix)


_UNKNOWN = "Unknown option: "
"""What `options.INPUTS` says of an option among names of files."""


def _shown(error: CycloptsError) -> str:
    """Return the name of an argument as the usage writes it: MODEL, --out."""
    assert error.argument is not None
    positional = error.argument.index is not None
    name = error.argument.name
    return name.lstrip("-").upper() if positional else name


def _unknown_command(word: str, names: Iterable[str], command: str) -> ConfigError:
    """Return the error of a word that is no command, or of an option in the place of one."""
    if word.startswith("-"):
        fix = f"Options follow the command: {command} COMMAND … {word}."
        return ConfigError("stands before the command", where=word, fix=fix)
    commands = sorted(name for name in names if not name.startswith("-"))
    group = command.removeprefix("bothways").strip()
    near = (_MEANT_COMMANDS.get(word) if not group else None) or _near(word, commands)
    message = f"there is no command {word!r}{_did_you_mean(near)}"
    return ConfigError(message, fix=f"The commands are {', '.join(commands)}.")


def _unknown_option(option: str, options: Iterable[str], command: str) -> ConfigError:
    """Return the error of an option that the command does not have, with the nearest name."""
    from bothways.finetuning.config import SHORTHANDS
    from bothways.pretraining.config import ALL_PEER_NAMES
    from bothways.training.run import PEER_NAMES

    name = option.lstrip("-").replace("-", "_")
    fix = f"{command} --help lists the options."
    if {*command.split()} & SETTABLE:
        peers = ALL_PEER_NAMES if {*command.split()} & {"pretrain", "adapt"} else PEER_NAMES
        settings = [peers[name]] if name in peers else _near(name, SHORTHANDS)
        near_settings = [f"{near}=VALUE" for near in settings]
        fix += " Settings have no dashes: lr=3e-5."
    else:
        near_settings = []
    plain = {
        plain_name.lstrip("-"): plain_name for plain_name in options if plain_name.startswith("--")
    }
    same_name = _OPTIONS.get(name, option).lstrip("-")
    near = [plain[plain_name] for plain_name in _near(same_name, plain)]
    message = f"unknown option{_did_you_mean(near or near_settings)}"
    return ConfigError(message, where=option, fix=fix)


def _near(word: str, candidates: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, list(candidates), n=1, cutoff=_NEAR)


def _did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""
