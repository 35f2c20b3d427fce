"""Distillation to a static model: what an encoder computes for each token alone becomes a table.

The recipe is Model2Vec's (Tulkens and van Dongen 2024): the mean over [CLS] token [SEP], PCA over
the vocabulary, and weights of smooth inverse frequency, a / (a + p) (Arora et al. 2017), by which
"the" counts less than "bank". Without a corpus, p is Zipf's: trainers of vocabularies give the
first ids to the most frequent tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64

from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, TokenizerError
from bothways.core.progress import Progress
from bothways.core.runtime.devices import choose_device
from bothways.core.terminal import result_line
from bothways.data.corpus import Corpus
from bothways.hub.model_card import Card
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.hub.static_embedding import UNLIMITED, StaticEncoder, static_tokenizer
from bothways.prediction.engine import predict_sequences
from bothways.prediction.predictor import Predictor
from bothways.prediction.prepared_model import UnpackedModel
from bothways.tasks.sentence_embedding.task import (
    Embedder,
    SentenceEmbeddingTask,
    save_sentence_encoder,
)
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer

SMOOTHING = 1e-4
"""The constant a of the weights: a token of this probability counts half."""
_UNUSED = re.compile(r"\[unused\d+\]")
_WINDOW = 4096


@dataclass(frozen=True)
class StaticResult:
    """A distilled table of vectors.

    Attributes:
        task_model: the task with its model, which embeds texts.
        explained: the share of the variance of the teacher's vectors that the table keeps.
        folder: the model folder; None in memory.
    """

    task_model: Embedder
    explained: float
    folder: Path | None = None

    def __repr__(self) -> str:
        shape = self.task_model.model.config
        return result_line(
            "StaticResult", {"explained": self.explained},
            tokens=shape.vocab - 1, width=shape.width, folder=self.folder,
        )  # fmt: skip

    def predictor(self) -> Predictor:
        """Return the model prepared for predictions."""
        return Predictor(self.task_model)


def distil_static(
    teacher: str,
    corpus: Corpus | None,
    width: int | None,
    folder: Path | None,
    device: str,
    progress: Progress,
) -> StaticResult:
    """Distil a model to a vector for each token of its vocabulary.

    Args:
        corpus: text in which tokens are counted; None for Zipf's law.
        width: number of components; at most the teacher's. None for 256 or all of fewer.
        folder: the model folder to write; None for none.

    Raises:
        ConfigError: the width is larger than the teacher's, or the corpus has another vocabulary.
        FolderError, ResourceError: a folder cannot be read or written.
        TokenizerError: the tokenizer divides words by a program that its file does not contain.
    """
    loaded = load_model(resolve_run(teacher), whole=False)
    tokenizer, of_teacher = loaded.tokenizer, loaded.model.config.width
    default = min(256, of_teacher)
    width = default if width is None else width
    fix = f"It is at most that of the teacher: set it to {default}."
    require_range(f"[1, {of_teacher}]", width=width, fix=fix)
    if corpus is not None and (difference := tokenizer.difference(corpus.tokenizer)):
        message = f"the corpus has another vocabulary than {teacher}: {difference}"
        raise ConfigError(message, where="data", fix="Build it with the teacher's tokenizer.")
    content, kept = kept_tokens(tokenizer)
    length = loaded.model.config.max_positions
    embedder = Embedder(SentenceEmbeddingTask(), loaded.model, tokenizer, (), length)
    embedder.to(choose_device(device)).eval()
    rows = [assemble(kept[at : at + 1], None, tokenizer.template) for at in range(len(kept))]
    progress.stage("embedding the vocabulary", len(rows))
    vectors = list[Any]()
    for at in range(0, len(rows), _WINDOW):
        vectors += predict_sequences(embedder, rows[at : at + _WINDOW])
        progress.advance(len(vectors))
    # Tokens that the teacher was never trained on may have any value, NaN included.
    table, explained = principal_components(np.nan_to_num(np.stack(vectors)), width)
    ranks = np.arange(2, len(kept) + 2)
    frequencies = 1 / ranks if corpus is None else corpus.token_counts[kept].astype(np.float64)
    frequencies /= frequencies.sum() or 1.0
    table *= (SMOOTHING / (SMOOTHING + frequencies))[:, None]
    # Model2Vec drops [UNK] from a mean. A row of zeros in it gives the same direction.
    static = static_tokenizer(content)
    table[static.specials.unknown] = 0.0
    encoder = StaticEncoder(torch.from_numpy(table.astype(np.float32)), UNLIMITED)
    task = SentenceEmbeddingTask(normalised=True)
    result = task.bind(UnpackedModel(encoder, {}), static, (), UNLIMITED)
    if folder is not None:
        summary = f"A vector of each token, from the model {teacher}; that of a text is their mean."
        save_sentence_encoder(folder, result, Card("Static vectors", summary), {"teacher": teacher})
    return StaticResult(result, explained, folder)


def kept_tokens(tokenizer: Tokenizer) -> tuple[str, Int64[np.ndarray, " kept"]]:
    """Return the `tokenizer.json` of the tokens that occur in text, and their ids in the teacher.

    Special tokens other than padding and [UNK], and "[unused7]", are in no text.

    Raises:
        TokenizerError: the division into words is in no file.
    """
    if tokenizer.words is not None:
        message = "divides words by MeCab, which a tokenizer.json cannot name"
        raise TokenizerError(message, where=tokenizer.where, fix="Choose another teacher.")
    spec = json.loads(tokenizer.backend.to_str())
    special = tokenizer.special.copy()
    special[[tokenizer.specials.pad, tokenizer.specials.unknown]] = False
    vocabulary = sorted(tokenizer.backend.get_vocab().items(), key=lambda item: item[1])
    kept = [id for token, id in vocabulary if not special[id] and not _UNUSED.match(token)]
    new = {old: at for at, old in enumerate(kept)}
    model = spec["model"]
    if model["type"] == "Unigram":  # its vocabulary is a list
        model["vocab"] = [entry for id, entry in enumerate(model["vocab"]) if id in new]
        model["unk_id"] = new.get(model["unk_id"])
    else:
        model["vocab"] = {word: new[id] for word, id in model["vocab"].items() if id in new}
    spec["added_tokens"] = [
        {**token, "id": new[token["id"]]} for token in spec["added_tokens"] if token["id"] in new
    ]
    splitter = spec["pre_tokenizer"] or {}
    for step in [splitter, *splitter.get("pretokenizers", [])]:
        if step.get("type") == "ByteLevel":  # the first word of a text is as any other
            step["add_prefix_space"] = True
    spec |= {"post_processor": None, "truncation": None, "padding": None}
    return json.dumps(spec, ensure_ascii=False), np.array(kept, dtype=np.int64)


def principal_components(
    vectors: Float[np.ndarray, "rows width"], width: int
) -> tuple[Float[np.ndarray, "rows components"], float]:
    """Return the first principal components of rows, and the share of the variance they have.

    As many components as rows would fit anything: the rows then stay as they are, in full width.
    """
    if width >= len(vectors):
        return vectors.astype(np.float64), 1.0
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    variances, axes = np.linalg.eigh(centred.T @ centred)
    scores = centred @ axes[:, ::-1][:, :width]
    # An axis has no sign: the largest score of each is positive, as in Model2Vec.
    largest = np.take_along_axis(scores, np.abs(scores).argmax(0)[None], 0)
    return scores * np.sign(largest), float(variances[::-1][:width].sum() / variances.sum())
