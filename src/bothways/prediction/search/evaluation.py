"""Retrieval on folders as BEIR's: how high a model and BM25 rank relevant documents."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence as Many
from pathlib import Path

import numpy as np

from bothways.core.progress import SILENT, Progress
from bothways.core.terminal import listed
from bothways.prediction.predictor import Predictor
from bothways.prediction.search import ranking
from bothways.tasks.sentence_embedding import examples as beir
from bothways.tasks.sentence_embedding.vectors import top_k

Scores = Mapping[str, float]
CUTOFFS = (10, 100)
_WINDOW = 4096
_SPLITS = ("test", "dev", "train")


def beir_folders(path: Path) -> list[Path]:
    """Return a folder as BEIR's, or those that a folder holds, as NanoBEIR's; [] for others."""
    folders = [path] if beir.corpus_file(path) else sorted(path.iterdir()) if path.is_dir() else []
    return [folder for folder in folders if beir.corpus_file(folder)]


def evaluate_retrieval(
    embedder: Predictor, folders: Many[Path], progress: Progress = SILENT
) -> dict[str, dict[str, Scores]]:
    """Return the metrics of `score_run` by folder and ranking: "vectors", "bm25" if installed.

    Several folders also have their mean, under "mean". Grades are those of test, else of dev, else
    of train.
    """
    has_words = importlib.util.find_spec("bm25s") is not None
    if not has_words:
        progress.message("note: pip install 'bothways[search]' shows BM25 beside the model")
    results = dict[str, dict[str, Scores]]()
    for folder in folders:
        splits = beir.splits_of(folder)
        split = next((name for name in _SPLITS if name in splits), "test")
        data = beir.read_beir(folder, split)
        if len(splits) > 1:
            progress.message(f"note: {folder.name}: of {listed(splits)}, the grades are of {split}")
        runs = {"vectors": rank_by_vectors(embedder, data, max(CUTOFFS), progress)}
        if has_words:
            runs["bm25"] = rank_by_words(data, max(CUTOFFS))
        results[folder.name] = {
            name: beir.score_run(run, data.grades, CUTOFFS) for name, run in runs.items()
        }
    if len(results) > 1:
        first = next(iter(results.values()))
        results["mean"] = {
            name: {
                metric: float(np.mean([scores[name][metric] for scores in results.values()]))
                for metric in values
            }
            for name, values in first.items()
        }
    return results


def rank_by_vectors(
    embedder: Predictor, data: beir.RetrievalData, k: int, progress: Progress = SILENT
) -> beir.Run:
    """Return the k + 1 nearest documents of each query; one of them may have the query's own id."""
    normalised = embedder.similarity_name == "cosine"

    def embed(encode: Callable[..., np.ndarray], texts: Many[str]) -> np.ndarray:
        vectors = list[np.ndarray]()
        progress.stage(f"embedding {data.folder.name}", len(texts))
        for start in range(0, len(texts), _WINDOW):
            window = texts[start : start + _WINDOW]
            vectors.append(encode(window, normalize_embeddings=normalised))
            progress.advance(start + len(window))
        return np.concatenate(vectors)

    documents = embed(embedder.encode_document, list(data.documents.values()))
    queries = embed(embedder.encode_query, list(data.queries.values()))
    ids = list(data.documents)
    scores, rows = top_k(queries, documents, k + 1, names=ranking.encode_ids(ids))
    return {
        query: {ids[row]: float(score) for row, score in zip(rows[n], scores[n], strict=True)}
        for n, query in enumerate(data.queries)
    }


def rank_by_words(data: beir.RetrievalData, k: int) -> beir.Run:
    """Return the k + 1 best documents of each query by BM25, of those that share a word with it."""
    scorer, ids = ranking.build_bm25(data.documents.values()), list(data.documents)
    names, run = ranking.encode_ids(ids), dict[str, dict[str, float]]()
    for query, text in data.queries.items():
        scores, rows = ranking.search_bm25(scorer, text, k + 1, names)
        run[query] = {ids[row]: float(score) for score, row in zip(scores, rows, strict=True)}
    return run
