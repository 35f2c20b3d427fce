"""Material of the fuzzers: valid inputs, and ways to damage them."""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bothways.cli.main import app

WORDS = [
    "the", "film", "was", "a", "good", "play", "and", "it", "ends", "with", "two", "old", "men",
    "in", "rain", "bad", "poor", "fine",
]  # fmt: skip
HOSTILE = (
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"\t", b"\r", b"\n\n", b"[" * 5000,
    b'{"a":' * 5000, b"9" * 5000, b"-1", b"1e999", b"NaN", b"null", b"\x1b[31m", b"../../x", b",",
)  # fmt: skip
"""Bytes that parsers stumble over: invalid text, delimiters, deep nesting, numbers out of range."""


@dataclass(frozen=True)
class Case:
    """One input with the code that reads it."""

    name: str
    run: Callable[[], object]


def bothways(*words: object) -> Callable[[], object]:
    """Return a call of the command line in this process."""
    return functools.partial(app, [*map(str, words)], result_action="return_value")


class Workshop:
    """A folder with valid files to damage.

    Args:
        folder: temporary folder.
        rng: source of all random choices.
    """

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.folder, self.rng = folder, rng

    def sentence(self) -> str:
        """Return a random sentence."""
        return " ".join(self.rng.choice(WORDS, int(self.rng.integers(3, 12)))) + "."

    def damage(self, content: bytes) -> bytes:
        """Return the content with one to four random damages."""
        for _ in range(int(self.rng.integers(1, 5))):
            at = int(self.rng.integers(0, len(content) + 1))
            stop = min(len(content), at + int(self.rng.integers(1, 40)))
            match int(self.rng.integers(5)):
                case 0:
                    content = content[:at]
                case 1:
                    content = content[:at] + content[stop:]
                case 2:
                    content = content[:at] + content[at:stop] * 3 + content[stop:]
                case 3:
                    flipped = bytes(self.rng.integers(0, 256, stop - at, dtype=np.uint8))
                    content = content[:at] + flipped + content[stop:]
                case _:
                    hostile = HOSTILE[int(self.rng.integers(len(HOSTILE)))]
                    content = content[:at] + hostile + content[at:]
        return content

    def write(self, name: str, content: bytes) -> Path:
        """Write a file into the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def compressed(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Compress the content by a random method, and name it by its suffix."""
        match int(self.rng.integers(4)):
            case 0:
                return f"{name}.gz", gzip.compress(content)
            case 1:
                return f"{name}.bz2", bz2.compress(content)
            case 2:
                return f"{name}.xz", lzma.compress(content)
            case _:
                return name, content

    @functools.cached_property
    def text(self) -> Path:
        """A text file of a few hundred documents."""
        lines = (f"{self.sentence()}\n{self.sentence()}\n" for _ in range(200))
        return self.write("text.txt", "\n".join(lines).encode())

    @functools.cached_property
    def tokenizer(self) -> Path:
        """A small WordPiece vocabulary."""
        out = self.folder / "tokenizer"
        bothways("tokenizer", "train", self.text, "--size", "120", "--out", out)()
        return out

    @functools.cached_property
    def corpus(self) -> Path:
        """A corpus of the text."""
        out = self.folder / "corpus"
        words = ("corpus", "build", self.text, "--tokenizer", self.tokenizer, "--out", out)
        bothways(*words, "--workers", "1")()
        return out

    @functools.cached_property
    def model(self) -> Path:
        """A pre-trained model of two layers."""
        run = self.folder / "run"
        self.pretrain(run)()
        return run / "model"

    @functools.cached_property
    def classifier(self) -> Path:
        """The model after some steps of fine-tuning."""
        rows = (f"{self.sentence()}\t{self.rng.choice(['yes', 'no'])}" for _ in range(60))
        train = self.write("train.tsv", ("text\tlabel\n" + "\n".join(rows) + "\n").encode())
        out = self.folder / "tuned"
        settings = ("training.until=2 steps", "length=16")
        bothways("finetune", self.model, train, *settings, "--out", out)()
        return out / "model"

    def pretrain_words(self, out: Path, steps: int, *more: object) -> list[str]:
        """Return the command that pre-trains a tiny model with a checkpoint at every step."""
        settings = (
            f"training.until={steps} steps", "training.save=1 steps",
            "encoder.width=16", "encoder.heads=2", "encoder.intermediate_size=32",
            "phases.0.length=16", "batch.kind=tokens", "batch.n=64", "training.precision=fp32",
        )  # fmt: skip
        words = ("pretrain", self.corpus, "--out", out, "--model", "bert-tiny", *settings)
        return [*map(str, (*words, "--device", "cpu", *more))]

    def pretrain(self, out: Path, steps: int = 4, *more: object) -> Callable[[], object]:
        """Return a call that pre-trains a tiny model."""
        return bothways(*self.pretrain_words(out, steps, *more))

    def copy(self, source: Path, name: str) -> Path:
        """Copy a folder, replacing an earlier copy."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return target


def replace_value(workshop: Workshop, tree: object) -> object:
    """Replace one random value of a JSON tree by an unusual one."""
    odd = [None, -1, 10**9, 10**30, 1e308, "", "x" * 5000, [], {}, [[]], True, "\ud800", "../x"]
    if isinstance(tree, dict) and tree and workshop.rng.random() < 0.95:
        key = str(workshop.rng.choice(list(tree)))
        return {**tree, key: replace_value(workshop, tree[key])}
    if isinstance(tree, list) and tree and workshop.rng.random() < 0.7:
        at = int(workshop.rng.integers(len(tree)))
        return [*tree[:at], replace_value(workshop, tree[at]), *tree[at + 1 :]]
    return odd[int(workshop.rng.integers(len(odd)))]


def damage_file(workshop: Workshop, path: Path) -> None:
    """Damage a file: bytes of any file, or a value of a JSON file."""
    if path.suffix == ".json" and workshop.rng.random() < 0.7:
        tree = replace_value(workshop, json.loads(path.read_text("utf8")))
        path.write_text(json.dumps(tree), "utf8")
    else:
        path.write_bytes(workshop.damage(path.read_bytes()))
