"""Planning of an epoch for corpora of up to 10⁹ sentences, from indexes that are made up.

    python benchmarks/corpus_scale.py FOLDER [--sentences 1e6 1e7 1e8 1e9] [--sequences 131072]

FOLDER gets a corpus of each size: offsets of 1 to 199 tokens a sentence and 1 to 19 sentences a
document, in files as `bothways corpus build` writes them (88 bytes for 10 sentences), and tokens in
a sparse file, which takes no space. A corpus that is there is used again. For each size:

- "first" opens the corpus, splits it, and loads the first step of 256 next-sentence pairs of 128
  tokens; "middle" does so in the middle of an epoch, as a run that is resumed. Each in a new
  process, with the offsets not in the page cache: seconds of processor time and of the clock after
  the imports, MiB that were read from the disk, and the highest amount of memory of its own (RssAnon)
  above that after the imports.
- The order of --sequences sequences from the middle on, against independent uniform draws: the
  correlation of the places of neighbours (0), their mean distance as a share of the corpus (1/3), the
  variance of the mean place of a batch of 256 (1 in units of independent draws), the pairs of
  sequences in a batch that are from one document, and those from two documents of which one is at
  most 256 after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, show
from numpy.typing import NDArray

from bothways.core.source import Cursor
from bothways.data import manifest as files
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import CorpusSource
from bothways.data.epoch_order import BLOCKS, Selection
from bothways.data.loader import ExampleBudget, Loader, unchanged
from bothways.data.segments import NextSentence
from bothways.text.tokenizer import Tokenizer

BATCH, LENGTH, NEAR = 256, 128, 256
AT_ONCE = 2**22
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]


def write_offsets(path: Path, count: int, most: int, seed: int) -> int:
    """Write the ends of `count` things of 1 to `most` parts; return their sum."""
    draw, end = np.random.default_rng(seed), 0
    with path.open("wb") as out:
        out.write(np.zeros(1, np.uint64).tobytes())
        for at in range(0, count, AT_ONCE):
            sizes = draw.integers(1, most, min(AT_ONCE, count - at), endpoint=True)
            ends = end + np.cumsum(sizes)
            out.write(ends.astype(np.uint64).tobytes())
            end = int(ends[-1])
    return end


def make_corpus(folder: Path, sentences: int) -> None:
    """Write a corpus of about so many sentences, with tokens that take no space on the disk."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
    tokenizer = Tokenizer.load(folder / "vocab.txt")
    tokenizer.save(folder)
    documents = sentences // 10
    sentences = write_offsets(folder / files.DOCUMENTS, documents, 19, 1)
    tokens = write_offsets(folder / files.SENTENCES, sentences, 199, 2)
    with (folder / files.TOKENS).open("wb") as out:
        out.truncate(2 * tokens)
    stored = {
        path.name: files.describe_file(path)
        if path.stat().st_size <= files.SMALL
        else files.Stored(path.stat().st_size, "0" * 64)
        for path in folder.iterdir()
    }
    settings = files.CorpusSettings(tokenizer.fingerprint, "en", "none")
    counts = files.Counts(documents, sentences, tokens)
    read, digest = files.TextRead(documents, 0), "0" * 64
    files.write_manifest(
        folder, files.Manifest(counts, "uint16", settings, (), {}, digest, read, (), stored)
    )


class Peak:
    """The highest amount of this process' own memory, looked at every 2 ms."""

    def __init__(self) -> None:
        self.highest = self.before = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("no RssAnon")

    def _watch(self) -> None:
        while True:
            self.highest = max(self.highest, self._now())
            time.sleep(0.002)


def bytes_read() -> int:
    """Return what this process has made the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def source_of(folder: Path) -> CorpusSource:
    """Return the stream that a run with the usual settings trains on."""
    corpus = Corpus.open(folder)
    train, _ = corpus.split(0.01, 0)
    return CorpusSource(corpus, corpus.tokenizer.template, NextSentence(LENGTH), train, 0)


def load_one(folder: Path, cursor: Cursor) -> None:
    """Print what the first step from a cursor on costs, as JSON."""
    peak, read, begin = Peak(), bytes_read(), (time.process_time(), time.perf_counter())
    source = source_of(folder)
    step = next(Loader(source, unchanged, ExampleBudget(BATCH), 2**14, 0).steps(cursor))
    assert step.sequences == BATCH
    record = {
        "processor": time.process_time() - begin[0],
        "clock": time.perf_counter() - begin[1],
        "read": (bytes_read() - read) / 2**20,
        "memory": (peak.highest - peak.before) / 2**20,
    }
    print(json.dumps(record))


def in_new_process(folder: Path, cursor: Cursor) -> dict[str, float]:
    """Return the record of `load_one`, in a process of its own, with an empty page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    words = [sys.executable, __file__, str(folder), "--one", json.dumps(cursor.to_json())]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    record: dict[str, float] = json.loads(done.stdout)
    return record


def order_of(folder: Path, cursor: Cursor, count: int) -> dict[str, float]:
    """Return how the order of so many sequences differs from independent draws."""
    source = source_of(folder)
    sentences, documents = (np.asarray(x).view(np.int64) for x in _offsets(folder))
    stream = source.read(cursor)
    firsts: NDArray[np.int64] = np.array([next(stream)[0].a for _ in range(count)])
    places = firsts / sentences[-1]
    owners = np.searchsorted(documents, np.searchsorted(sentences, firsts, "right") - 1, "right")
    batches = np.sort(owners[: count // BATCH * BATCH].reshape(-1, BATCH), axis=1)
    means = places[: count // BATCH * BATCH].reshape(-1, BATCH).mean(1)
    return {
        "correlation": float(np.corrcoef(places[:-1], places[1:])[0, 1]),
        "distance": float(np.abs(np.diff(places)).mean()),
        "variance": float(means.var() * 12 * BATCH),
        "same": _pairs(batches, 0),
        "near": _pairs(batches, NEAR) - _pairs(batches, 0),
        "near by chance": BATCH * (BATCH - 1) / 2 * 2 * NEAR / len(documents),
    }


def _offsets(folder: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    corpus = Corpus.open(folder)
    return corpus.sentences, corpus.documents


def _pairs(batches: NDArray[np.int64], distance: int) -> float:
    """Return the mean number of pairs of a sorted row that differ by at most `distance`."""
    total = 0
    for row in batches:
        total += int((np.searchsorted(row, row + distance, "right") - np.arange(BATCH) - 1).sum())
    return total / len(batches)


def middle_of(folder: Path) -> Cursor:
    """Return a place in the middle of the first epoch."""
    corpus = Corpus.open(folder)
    selection = Selection(corpus, corpus.split(0.01, 0)[0])
    window = selection.windows // 2
    return Cursor(0, window * BLOCKS + selection.blocks(0, 0, window) // 2, 5)


def main() -> None:
    """Make the corpora, measure, print a table, write records to FOLDER."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sentences", type=float, nargs="+", default=[1e6, 1e7, 1e8, 1e9])
    parser.add_argument("--sequences", type=int, default=2**17)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        load_one(given.folder, Cursor.from_json(json.loads(given.one)))
        return
    print(machine(["numpy"]))
    costs, orders = [], []
    for size in given.sentences:
        folder = given.folder / f"{size:.0e}"
        if not folder.exists():
            make_corpus(folder, int(size))
        middle = middle_of(folder)
        for name, cursor in (("first", Cursor()), ("middle", middle)):
            cost = in_new_process(folder, cursor)
            print(json.dumps({"sentences": size, "from": name, **cost}), flush=True)
            costs.append([f"{size:.0e} {name}", *(f"{value:,.2f}" for value in cost.values())])
        order = order_of(folder, middle, given.sequences)
        print(json.dumps({"sentences": size, **order}), flush=True)
        orders.append([f"{size:.0e}", *(f"{value:.4f}" for value in order.values())])
    show("The first step", ["processor s", "clock s", "MiB read", "MiB of memory"], costs)
    show("The order", ["correlation", "distance", "variance", "same", "near", "by chance"], orders)


if __name__ == "__main__":
    main()
