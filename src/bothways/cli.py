"""The command line: one verb per job, each a function in `bothways.commands`, imported when called.

An error that the user can fix is one message on stderr and exit status 2, never a traceback.
"""

from __future__ import annotations

import codecs
import errno
import os
import signal
import sys

from cyclopts import App

import bothways
from bothways.core.errors import BothwaysError
from bothways.runtime.allocator import tune_allocator
from bothways.runtime.limits import limit_threads

_OUT_OF_MEMORY = (
    "out of GPU memory\n  In training, halve microbatch_tokens, then set training.recompute=true, "
    "and continue with --resume: checkpoints are complete. For predictions, use --device cpu."
)
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""
_NARROWEST = 20
"""Smaller values of COLUMNS are ignored."""

app = App(
    name="bothways",
    version=bothways.__version__,
    help="From raw text to a deployed bidirectional encoder: BERT and its family, end to end.",
    suppress_keyboard_interrupt=False,  # `main` reports it
)
tokenizer = App(
    name="tokenizer", help="Train a vocabulary, encode with it, report how well it fits a text."
)
corpus = App(name="corpus", help="Build a memory-mapped corpus from text, and inspect it.")
reproduce = App(
    name="reproduce", help="Run published experiments and compare with the published results."
)
app.command(tokenizer)
app.command(corpus)
app.command(reproduce)

# name: (function in bothways.commands, one line of help)
_COMMANDS = {
    "quickstart": (
        "quickstart:quickstart",
        "Measure the gain of pre-training on this machine, in five minutes.",
    ),
    "pretrain": ("pretrain:pretrain", "Pre-train with masked LM and next sentence prediction."),
    "adapt": ("adapt:adapt", "Continue pre-training on text of a domain, and measure the effect."),
    "finetune": ("finetune:finetune", "Fine-tune a model folder on labelled data."),
    "distil": ("distil:distil", "Train a smaller model on what a teacher computes."),
    "evaluate": ("evaluate:evaluate", "Score a model on labelled data, a corpus or minimal pairs."),
    "predict": ("predict:predict", "Predict labels with probabilities, as JSON lines."),
    "features": ("features:features", "Tag words with a BiLSTM on a frozen encoder's vectors."),
    "embed": ("embed:embed", "Compute a vector per text, into .npy, .parquet or .jsonl."),
    "serve": ("serve:serve", "Serve models over HTTP, for every task and for existing clients."),
    "play": ("serve:play", "Try models in the browser: predictions as pictures, tokens, and why."),
    "search": ("search:search", "Fine-tune over a grid of settings, and keep the best model."),
    "compare": ("compare:compare", "Test whether two fine-tuned models differ significantly."),
    "compare-runs": (
        "compare:compare_runs",
        "Compare the curves, settings and speed of runs on one page.",
    ),
    "inspect-step": (
        "inspect_step:inspect_step",
        "Repeat one step of a pre-training run, sequence by sequence.",
    ),
    "convert": (
        "convert:convert",
        "Convert a TensorFlow checkpoint, or a model to a Longformer or another vocabulary.",
    ),
    "export": ("export:export", "Write a model for onnxruntime, OpenVINO or a browser."),
    "describe": ("describe:describe", "Show a model's configuration and its parameters by part."),
    "speedrun": ("speedrun:speedrun", "Time pre-training to a fixed held-out loss."),
    "plan": ("plan:plan", "Forecast time, memory and price of a pre-training run."),
    "bench": ("bench:bench", "Measure this machine against transformers, or a server on it."),
}
_TOKENIZER = {
    "train": ("tokenizer:train", "Train a WordPiece, byte-level BPE or Unigram vocabulary."),
    "encode": ("tokenizer:encode", "Encode lines of text to ids, tokens and offsets."),
    "report": ("tokenizer:report", "Report unknown rate, fertility and coverage on a text."),
}
_CORPUS = {
    "build": ("corpus:build", "Build a corpus: documents, sentences, token ids."),
    "inspect": ("corpus:inspect", "Show a corpus' counts, lengths and some documents."),
}
_REPRODUCE = {
    "glue": ("reproduce:glue", "GLUE: table 1 of the paper."),
    "squad": ("reproduce:squad", "SQuAD 1.1 and 2.0: tables 2 and 3."),
    "swag": ("reproduce:swag", "SWAG: table 4."),
    "ner": ("reproduce:ner", "Named entities, fine-tuned and by frozen features: table 7."),
    "pretraining": (
        "reproduce:pretraining",
        "Tables on pre-training: tasks, sizes, masks, of BERT and its successors.",
    ),
}
_GROUPS = (
    (app, _COMMANDS), (tokenizer, _TOKENIZER), (corpus, _CORPUS), (reproduce, _REPRODUCE),
)  # fmt: skip
for _group, _verbs in _GROUPS:
    for _name, (_home, _summary) in _verbs.items():
        _group.command(f"bothways.commands.{_home}", name=_name, help=_summary)
app.register_install_completion_command()


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


def _prepare_terminal() -> None:
    """Make the streams and the width usable: closed streams, other encodings, COLUMNS=0."""
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


def main() -> None:
    """Run the command line; exit with 0, 2 (an error the user can fix) or 130 (interrupted)."""
    _prepare_terminal()
    limit_threads()
    tune_allocator()
    try:
        app([_expand_home(word) for word in sys.argv[1:]], result_action="return_value")
        sys.stdout.flush()  # here, where a full disk or a closed pipe is caught
    except BothwaysError as error:
        _fail(str(error))
    except RuntimeError as error:
        # torch's error is recognized by name, since importing torch here would slow every command.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail(_OUT_OF_MEMORY)
    except KeyboardInterrupt:
        # Another Ctrl-C, while Python shuts down, would print a traceback: it ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output, such as `head`, has finished: end silently.
        sys.stderr.close()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # Python flushes stdout once more at exit; send that to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"the output cannot be written: {error.strerror}\n  Free some space for it.")


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
