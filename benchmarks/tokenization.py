"""How fast texts become ids: this library against `encode_batch` of tokenizers, on one core, in one run.

    python benchmarks/tokenization.py TEXT_FILE TOKENIZER [--megabytes 20] [--split lines|sentences]

Both read the same list of texts in blocks of 1,024 and end with one int32 array per text. Ours starts with an empty table in each
round, so what it costs to meet a word for the first time is in the figure. Time is processor time of this one thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import time
from collections.abc import Callable

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import tokenizers

from bothways.core.sequence import Ids
from bothways.data.documents import read_documents
from bothways.text.tokenizer import Tokenizer

BLOCK = 1024


def read_texts(name: str, characters: int, split: str) -> list[str]:
    """The first `characters` of a file, as lines or as sentences (cut after . ! ? and a space)."""
    texts: list[str] = []
    for document in read_documents([name]):
        for line in filter(None, document.text.split("\n")):
            texts += re.split(r"(?<=[.!?]) ", line) if split == "sentences" else [line]
            characters -= len(line)
        if characters <= 0:
            break
    return texts


def peer(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    """What a user of tokenizers writes."""
    rows = []
    for start in range(0, len(texts), BLOCK):
        encodings = tokenizer.backend.encode_batch(texts[start : start + BLOCK], add_special_tokens=False)
        rows += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
    return rows


def ours(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    """The same, with an empty table to begin with."""
    return Tokenizer(tokenizer.backend, tokenizer.specials).encode(texts)


def timed(work: Callable[[Tokenizer, list[str]], list[Ids]], tokenizer: Tokenizer, texts: list[str]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    work(tokenizer, texts)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help=".txt, .docs or .jsonl, also compressed")
    parser.add_argument("tokenizer", help="a folder, tokenizer.json or vocab.txt")
    parser.add_argument("--megabytes", type=float, default=20, help="millions of characters to read")
    parser.add_argument("--split", choices=["lines", "sentences"], default="sentences")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.tokenizer)
    texts = read_texts(options.text, int(options.megabytes * 1e6), options.split)
    same = all(np.array_equal(a, b) for a, b in zip(ours(tokenizer, texts), peer(tokenizer, texts), strict=True))
    rounds = [(timed(peer, tokenizer, texts), timed(ours, tokenizer, texts)) for _ in range(options.rounds)]
    theirs, mine = (statistics.median(column) for column in zip(*rounds, strict=True))
    characters = sum(map(len, texts))
    print(f"{len(texts):,} texts, {characters / 1e6:.1f} M characters, ids {'equal' if same else 'DIFFERENT'}")
    print(f"tokenizers.encode_batch  {theirs:6.2f} s  {characters / theirs / 1e6:6.2f} M characters/s")
    print(f"bothways encode          {mine:6.2f} s  {characters / mine / 1e6:6.2f} M characters/s")
    print(f"ratio {theirs / mine:.2f} (rounds: {', '.join(f'{a / b:.2f}' for a, b in rounds)})")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 1 used; Python {platform.python_version()}, "
        f"tokenizers {tokenizers.__version__}, NumPy {np.__version__}"
    )


if __name__ == "__main__":
    main()
