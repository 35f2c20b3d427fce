"""Options under the names of other libraries, and mistakes of a command line in our words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from bothways.core.errors import BothwaysError, ConfigError

SETTABLE = {"pretrain", "adapt", "finetune", "distil", "sweep", "plan", "features"}
"""Commands with settings of a training run."""
_OPTIONS = {"output_dir": "--out", "vocab_size": "--size"}
"""Names of other libraries that mean an option."""
_SETTINGS = {"seed", "dropout", "length", "metric"}
"""Settings without a dotted path and without a shorthand."""
_COMMANDS = {
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
_TYPES = {int: "a whole number", float: "a number", bool: "true or false"}


def rename_options(app: App, words: Sequence[str]) -> list[str]:
    """Replace options of other libraries by ours, or by settings, which follow at the end.

    Example: finetune m d.tsv --num-train-epochs 3 --weight-decay=0.1 →
    finetune m d.tsv --epochs 3 weight_decay=0.1
    """
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
        if not (setting or option in option_names) or not (equals or left):
            result.append(word)  # unknown, or without a value
            continue
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
        case MissingArgumentError(keyword=None):
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
        case MissingArgumentError():
            return ConfigError("needs a value", where=error.keyword, fix=fix)
        case RepeatArgumentError(token=token):
            return ConfigError("is given twice", where=token.keyword, fix="Leave out one.")
        case CoercionError(token=token) if token is not None and error.msg is None:
            kind: Any = error.target_type
            choices = [*map(str, get_args(kind))]
            domain = _TYPES.get(kind, f"a {getattr(kind, '__name__', kind)}")
            if get_origin(kind) is Literal:
                domain = f"one of {', '.join(choices)}"
            message = f"{token.value!r} is not {domain}{_did_you_mean(_near(token.value, choices))}"
            place = token.keyword or _shown(error)
            is_table = place == "--format" and token.value in ("csv", "tsv")
            # They are formats of one file, which its ending names.
            advice = f"Name a file instead: --out FILE.{token.value}" if is_table else None
            return ConfigError(message, where=place, fix=advice)
        case UnknownOptionError(token=token):
            option = (token.keyword or token.value).partition("=")[0]
            return _unknown_option(option, _names(error.argument_collection), command)
        case ValidationError() if error.exception_message.startswith(_UNKNOWN):
            assert error.app is not None
            names = _names(error.app.assemble_argument_collection())
            return _unknown_option(error.exception_message.removeprefix(_UNKNOWN), names, command)
        case UnknownCommandError(unused_tokens=[word, *_]):
            commands = [name for name in error.app or () if not name.startswith("-")]
            message = f"there is no command {word!r}"
            group = command.removeprefix("bothways").strip()
            near = (_COMMANDS.get(word) if not group else None) or _near(word, commands)
            return ConfigError(
                message + _did_you_mean(near),
                fix=f"The commands are {', '.join(sorted(commands))}.",
            )
        case UnusedCliTokensError(unused_tokens=[*words]):
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


def _unknown_option(option: str, options: Iterable[str], command: str) -> ConfigError:
    """Return the error of an option that the command does not have, with the nearest name."""
    from bothways.finetuning.config import SHORTHANDS

    name = option.lstrip("-").replace("-", "_")
    fix = f"{command} --help lists the options."
    if {*command.split()} & SETTABLE:
        near_settings = [f"{near}=VALUE" for near in _near(name, SHORTHANDS)]
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
