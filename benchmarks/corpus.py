"""Speed of building a corpus on one core: this library against `datasets` with `tokenizers`.

    python benchmarks/corpus.py TEXT… --tokenizer FOLDER [--megabytes 20] [--rounds 3]

All contenders get the same documents from memory and write their ids to files.

    ours                 build(workers=1): sentences, ids, deduplication, arrays, digests, manifest
    map, sentences       Dataset.map(batched=True, num_proc=1): the same sentence splitter,
                         encode_batch, ids of each sentence
    map, sentences fast  the same with encode_batch_fast
    map, documents       encode_batch on whole documents: no sentence boundaries, so less work

Each round of this library starts with an empty word cache. The data sets of the peer are made
before the clock starts. Rates are per second of processor time of this process and its children, so
that other load does not matter; wall-clock seconds are shown, too. All run on one core, where the
system lets a process choose.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import numpy as np
import tokenizers
from harness import clocks, machine
from rich.console import Console
from rich.table import Table

from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import Document, read_documents
from bothways.data.sentences import detect_language, split_sentences
from bothways.text.tokenizer import Tokenizer

Batch = dict[str, list[str]]
Ids = dict[str, list[list[list[int]]]] | dict[str, list[list[int]]]


def read_some(inputs: list[str], characters: int) -> list[Document]:
    """Documents of the inputs, up to so many characters."""
    documents = []
    for document in read_documents(inputs):
        documents.append(document)
        characters -= len(document.text)
        if characters <= 0:
            break
    return documents


def by_sentence(backend: tokenizers.Tokenizer, fast: bool) -> Callable[[Batch], Ids]:
    """What a user writes who wants sentence boundaries."""
    encode = backend.encode_batch_fast if fast else backend.encode_batch

    def work(batch: Batch) -> Ids:
        documents = [split_sentences(text, detect_language(text)) for text in batch["text"]]
        encodings = iter(
            encode(
                [sentence for document in documents for sentence in document],
                add_special_tokens=False,
            )
        )
        return {"ids": [[next(encodings).ids for _ in document] for document in documents]}

    return work


def by_document(backend: tokenizers.Tokenizer) -> Callable[[Batch], Ids]:
    """What a user writes who does not."""

    def work(batch: Batch) -> Ids:
        return {
            "ids": [
                encoding.ids
                for encoding in backend.encode_batch(batch["text"], add_special_tokens=False)
            ]
        }

    return work


def mapped(
    data: datasets.Dataset, work: Callable[[Batch], Ids]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Seconds, and the data set of ids, in a file."""
    with tempfile.TemporaryDirectory() as folder:
        start = np.array(clocks())
        result = data.map(
            work,
            batched=True,
            num_proc=1,
            remove_columns=["text"],
            load_from_cache_file=False,
            cache_file_name=str(Path(folder) / "ids.arrow"),
        )
        seconds = np.array(clocks()) - start
        return seconds, result.with_format("numpy")[:]


def built(documents: list[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, Corpus]:
    """Seconds, and the corpus."""
    folder = tempfile.mkdtemp()
    try:
        start = np.array(clocks())
        corpus = write_corpus(documents, tokenizer, Path(folder) / "corpus", workers=1)
        return np.array(clocks()) - start, corpus
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    datasets.disable_progress_bars()

    tokenizer = Tokenizer.load(arguments.tokenizer)
    documents = read_some(arguments.inputs, int(arguments.megabytes * 1e6))
    size = sum(len(document.text.encode()) for document in documents)
    data = datasets.Dataset.from_dict({"text": [document.text for document in documents]})
    backend = tokenizer.backend
    peers = {
        "map, sentences": by_sentence(backend, fast=False),
        "map, sentences fast": by_sentence(backend, fast=True),
        "map, documents": by_document(backend),
    }
    seconds: dict[str, list[np.ndarray]] = {name: [] for name in ("ours", *peers)}
    tokens = 0
    for _ in range(arguments.rounds):
        elapsed, corpus = built(documents, tokenizer)
        seconds["ours"].append(elapsed)
        tokens = len(corpus.tokens)
        for name, work in peers.items():
            elapsed, ids = mapped(data, work)
            seconds[name].append(elapsed)
            if name == "map, sentences":
                flat = np.concatenate(
                    [row for document in ids["ids"] for row in document if len(row)]
                )
                print(f"ids: {len(flat):,} of map, {tokens:,} of ours without duplicates")

    table = Table("", "processor seconds", "on the clock", "MB/s", "tokens/s", "× ours")
    ours = np.median(seconds["ours"], axis=0)[0]
    for name, rounds in seconds.items():
        middle = np.median(rounds, axis=0)[0]
        each = [" ".join(f"{second:.2f}" for second in column) for column in np.transpose(rounds)]
        table.add_row(
            name,
            *each,
            f"{size / 1e6 / middle:.2f}",
            f"{tokens / middle:,.0f}",
            f"{middle / ours:.2f}",
        )
    Console().print(table)
    print(f"{len(documents):,} documents, {size / 1e6:.1f} MB, {tokens:,} tokens")
    print(f"one core of {machine(['datasets', 'tokenizers'])}")


if __name__ == "__main__":
    main()
