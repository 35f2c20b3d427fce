"""The command line: one verb per job, each a function in `bothways.commands`, imported when it is called.

A user's mistake is one message on stderr and exit status 2, never a traceback.
"""

from __future__ import annotations

import errno
import os
import sys

from cyclopts import App

import bothways
from bothways.core.errors import BothwaysError
from bothways.runtime.limits import limit_threads

_OUT_OF_MEMORY = (
    "the GPU has no memory left for this\n  In training, halve microbatch_tokens, then set training.recompute=true, and go on "
    "with --resume: checkpoints are whole. In predictions, take --device cpu."
)
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

app = App(
    name="bothways",
    version=bothways.__version__,
    help="From raw text to a deployed bidirectional encoder: BERT and its family, end to end.",
    suppress_keyboard_interrupt=False,  # `main` says what became of it
)
tokenizer = App(
    name="tokenizer", help="Train a vocabulary, encode with it, report how well it fits a text."
)
corpus = App(name="corpus", help="Build a memory-mapped corpus from text, and look into it.")
app.command(tokenizer)
app.command(corpus)

for group, name, home, summary in (
    (
        app,
        "quickstart",
        "quickstart:quickstart",
        "See BERT's claim hold on this machine, in five minutes.",
    ),
    (
        tokenizer,
        "train",
        "tokenizer:train",
        "Train a WordPiece, byte-level BPE or Unigram vocabulary.",
    ),
    (tokenizer, "encode", "tokenizer:encode", "Encode lines of text to ids, tokens and offsets."),
    (
        tokenizer,
        "report",
        "tokenizer:report",
        "Report unknown rate, fertility and coverage on a text.",
    ),
    (corpus, "build", "corpus:build", "Build a corpus: documents, sentences, token ids."),
    (corpus, "inspect", "corpus:inspect", "Show a corpus' counts, lengths and some documents."),
    (
        app,
        "pretrain",
        "pretrain:pretrain",
        "Pre-train with masked LM and next sentence prediction.",
    ),
    (app, "finetune", "finetune:finetune", "Fine-tune a model folder on labelled data."),
    (app, "evaluate", "evaluate:evaluate", "Score a fine-tuned model on labelled data."),
    (app, "predict", "predict:predict", "Predict labels with probabilities, as JSON lines."),
    (
        app,
        "features",
        "features:features",
        "Tag words with a BiLSTM on a frozen encoder's vectors.",
    ),
    (app, "embed", "embed:embed", "Make a vector of each text, into .npy, .parquet or .jsonl."),
    (
        app,
        "reproduce",
        "reproduce:reproduce",
        "Run the paper's experiments, measured beside published.",
    ),
    (app, "search", "search:search", "Fine-tune over a grid of settings, keep the best model."),
    (app, "compare", "compare:compare", "Compare two fine-tuned models: is the difference chance?"),
    (
        app,
        "convert",
        "convert:convert",
        "Make a model folder of a TensorFlow checkpoint of Google's.",
    ),
    (
        app,
        "describe",
        "describe:describe",
        "Show a model's configuration and count its parameters part by part.",
    ),
    (app, "bench", "bench:bench", "Measure this machine against transformers."),
):
    group.command(f"bothways.commands.{home}", name=name, help=summary)
app.register_install_completion_command()


def _at_home(word: str) -> str:
    """An argument, with the home folder for the ~ of a path: a shell leaves that of --out=~/run to us."""
    option, equals, path = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + os.path.expanduser(path) if path.startswith("~/") else word


def main() -> None:
    """Run the command line; exits with 0, 2 (a mistake of the user's) or 130 (interrupted)."""
    limit_threads()
    try:
        app([_at_home(word) for word in sys.argv[1:]], result_action="return_value")
        sys.stdout.flush()  # here, where a refusal is caught
    except BothwaysError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if (
            type(error).__name__ != "OutOfMemoryError"
        ):  # torch's; without importing it for every command
            raise
        print(f"error: {_OUT_OF_MEMORY}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output, `head` say, has what it wanted. Closing quietly is what it expects.
        sys.stderr.close()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        print(
            f"error: the output cannot be written: {error.strerror}\n  Make room where it goes.",
            file=sys.stderr,
        )
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what Python still flushes as it ends
        sys.exit(2)
