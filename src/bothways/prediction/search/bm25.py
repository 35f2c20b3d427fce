"""BM25 by bm25s (Lù 2024), in Lucene's form: ranks by words that a query and a document share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from numpy.typing import NDArray

from bothways.core.errors import optional
from bothways.tasks.sentence_embedding.vectors import Found, Nearest

_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
_WORDS = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]{{2,}}")
"""Letters of scripts without spaces, such as ideographs, and words of two characters or more."""


def search_words(text: str) -> list[str]:
    """Return the words of a text that BM25 counts.

    Example: "The cats, 两只猫" → ["cats", "两", "只", "猫"].
    """
    from bm25s.stopwords import STOPWORDS_EN

    return [word for word in _WORDS.findall(text.lower()) if word not in STOPWORDS_EN]


class BM25:
    """The words of documents, counted.

    Args:
        scorer: of bm25s, indexed.
    """

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    @classmethod
    def of(cls, texts: Iterable[str]) -> BM25:
        """Count the words of texts, at least one.

        Raises:
            ResourceError: bm25s is not installed.
        """
        with optional("search", "BM25"):
            import bm25s
        ids, documents = dict[str, int](), list[list[int]]()
        for text in texts:
            documents.append([ids.setdefault(word, len(ids)) for word in search_words(text)])
        scorer = bm25s.BM25()
        ids = ids or {"": 0}
        with np.errstate(invalid="ignore"):  # the mean length of empty texts is 0
            scorer.index(bm25s.tokenization.Tokenized(documents, ids), show_progress=False)
        return cls(scorer)

    @classmethod
    def load(cls, folder: Path) -> BM25:
        """Open a folder that `save` has written; its arrays are memory-mapped."""
        with optional("search", "BM25"):
            import bm25s
        return cls(bm25s.BM25.load(folder, mmap=True))

    def save(self, folder: Path) -> None:
        """Write the counts to a folder."""
        self.scorer.save(folder, show_progress=False)

    def search(
        self,
        query: str,
        k: int,
        *,
        names: Shaped[np.ndarray, " rows"] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and rows of the k best documents that share a word with a query.

        Equal scores are ordered as by `nearest.top_k`.
        """
        words = [word for word in search_words(query) if word in self.scorer.vocab_dict]
        if not words:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        scores = self.scorer.get_scores(words).astype(np.float32)
        # Without a shared word the score is 0: such documents are no hits.
        scores[scores <= 0] = -np.inf
        nearest = Nearest(k, lambda _, rows: scores[rows], np.zeros(1), names)
        nearest.add(0, scores[None])
        found: Found = nearest.result()
        return found[0][0], found[1][0]
