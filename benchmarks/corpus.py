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
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import tokenizers
from harness import against, interleaved, machine, show, span

from bothways.data.corpus import write_corpus
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


def mapped(data: datasets.Dataset, work: Callable[[Batch], Ids]) -> None:
    """Write the ids of a data set to a file."""
    with tempfile.TemporaryDirectory() as folder:
        data.map(
            work,
            batched=True,
            num_proc=1,
            remove_columns=["text"],
            load_from_cache_file=False,
            cache_file_name=str(Path(folder) / "ids.arrow"),
        )


def built(documents: list[Document], tokenizer: Tokenizer) -> int:
    """Write a corpus; return its number of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        return len(write_corpus(documents, tokenizer, Path(folder) / "corpus", workers=1).tokens)


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
    size = sum(len(document.text.encode()) for document in documents) / 1e6
    data = datasets.Dataset.from_dict({"text": [document.text for document in documents]})
    peers = {
        "map, sentences": by_sentence(tokenizer.backend, fast=False),
        "map, sentences fast": by_sentence(tokenizer.backend, fast=True),
        "map, documents": by_document(tokenizer.backend),
    }
    tokens, rows = built(documents, tokenizer), peers["map, sentences"](data[:])["ids"]
    count = sum(len(sentence) for document in rows for sentence in document)
    print(f"ids: {count:,} of map, {tokens:,} of ours without duplicates")
    works: dict[str, Callable[[], object]] = {"ours": lambda: built(documents, tokenizer)}
    works |= {name: functools.partial(mapped, data, work) for name, work in peers.items()}
    lines = against(interleaved(works, arguments.rounds, warm=0), "ours", threads=1)
    columns = ["processor seconds", "on the clock", "MB/s", "tokens/s", "speed × ours"]
    show(
        f"{len(documents):,} documents, {size:.1f} MB, {tokens:,} tokens",
        columns,
        (
            [line.name, f"{line.seconds:.2f}", f"{line.clock:.2f}", f"{size / line.seconds:.2f}",
             f"{tokens / line.seconds:,.0f}", span(line.speed)]
            for line in lines
        ),
    )  # fmt: skip
    print(f"one core of {machine(['datasets', 'tokenizers'])}")


if __name__ == "__main__":
    main()
