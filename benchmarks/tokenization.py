"""Speed of tokenization on one core: this library against `encode_batch` of tokenizers.

    python benchmarks/tokenization.py TEXT_FILE TOKENIZER [--megabytes 20]
                                      [--split lines|sentences] [--rounds 3]

All read the same list of texts and return one int32 array per text; tokenizers gets blocks of
1,024. This library starts each round with an empty word cache, so the figure includes the first
occurrence of each word. Time is processor time of this thread.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Callable, Iterator

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from harness import against, interleaved, machine, span

from bothways.core.source import Ids
from bothways.data.documents import read_documents
from bothways.text.tokenizer import Tokenizer

BLOCK = 1024
Encode = Callable[[Tokenizer, list[str]], list[Ids]]


def read_texts(name: str, characters: float, split: str) -> list[str]:
    """The first `characters` of a file, as lines or as sentences (cut after . ! ? and a space)."""
    texts: list[str] = []
    for document in read_documents([name]):
        for line in filter(None, document.text.split("\n")):
            texts += re.split(r"(?<=[.!?]) ", line) if split == "sentences" else [line]
            characters -= len(line)
        if characters <= 0:
            break
    return texts


def blocks(texts: list[str]) -> Iterator[list[str]]:
    return (texts[start : start + BLOCK] for start in range(0, len(texts), BLOCK))


def encode_batch(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    """What a user of tokenizers writes."""
    encodings = (
        tokenizer.backend.encode_batch(block, add_special_tokens=False) for block in blocks(texts)
    )
    return [np.array(encoding.ids, dtype=np.int32) for block in encodings for encoding in block]


def encode_batch_fast(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    """The same, without offsets."""
    encodings = (
        tokenizer.backend.encode_batch_fast(block, add_special_tokens=False)
        for block in blocks(texts)
    )
    return [np.array(encoding.ids, dtype=np.int32) for block in encodings for encoding in block]


def ours(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    """This library, with an empty table to begin with."""
    return Tokenizer(tokenizer.backend, tokenizer.specials).encode(texts)


CONTENDERS: dict[str, Encode] = {
    "tokenizers encode_batch": encode_batch,
    "tokenizers encode_batch_fast": encode_batch_fast,
    "bothways encode": ours,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help=".txt, .docs or .jsonl, also compressed")
    parser.add_argument("tokenizer", help="a folder, tokenizer.json or vocab.txt")
    parser.add_argument(
        "--megabytes", type=float, default=20, help="millions of characters to read"
    )
    parser.add_argument("--split", choices=["lines", "sentences"], default="sentences")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.tokenizer)
    texts = read_texts(options.text, options.megabytes * 1e6, options.split)
    same = all(map(np.array_equal, ours(tokenizer, texts), encode_batch(tokenizer, texts)))
    works = {
        name: functools.partial(encode, tokenizer, texts) for name, encode in CONTENDERS.items()
    }
    lines = against(
        interleaved(works, options.rounds, warm=0), "tokenizers encode_batch", threads=1
    )
    characters = sum(map(len, texts)) / 1e6
    print(
        f"{len(texts):,} {options.split}, {characters:.1f} M characters, ids {'equal' if same else 'DIFFERENT'}"
    )
    for line in lines:
        print(
            f"{line.name:30}{line.seconds:7.2f} s {characters / line.seconds:7.2f} M characters/s   {span(line.speed)}"
        )
    print(f"one core of {machine(['tokenizers', 'numpy'])}")


if __name__ == "__main__":
    main()
