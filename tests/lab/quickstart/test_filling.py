"""Words hidden in a corpus: whole ones, of its sentences, filled from what stands around them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bothways.data.corpus import build_corpus
from bothways.data.documents import Document
from bothways.lab.quickstart.fill_masks import GUESSES, fill_masks, whole_words
from bothways.model.config import EncoderConfig
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction.engine import predict
from bothways.tasks.mask_filling.task import MaskFillingTask
from bothways.tasks.text_examples import TextExample
from bothways.text.tokenizer import Tokenizer
from toy_animals import WORDS

DOCUMENTS = [
    "The cat sleeps in the barn.",  # seven tokens: too short
    "The dog eats in the wood near the hills. The owl sings.",
    "The cow cow cow cow cow cow cow cow.",  # no word of four letters
    "The fox walks near the lake in the town.",
    "The hen sleeps near the barn in the hills.",
    "The owl sings near the lake in the wood.",
]


def test_a_hidden_word_is_a_whole_one_of_a_sentence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = build_corpus(
        [Document(text, f"made:{at}") for at, text in enumerate(DOCUMENTS)],
        tokenizer,
        tmp_path / "corpus",
        workers=1,
    )
    torch.manual_seed(0)
    model = Model(
        EncoderConfig(len(WORDS), 16, 1, 2, 32, position=Learned(16), initial_range=0.5),
        (MaskedHead(),),
    ).eval()
    filled = fill_masks(model, corpus, range(len(corpus)), 3, seed=1)
    assert len(filled) == 3
    sentences = [ids.tolist() for document in range(6) for ids in corpus.sentences_of(document)]
    task = MaskFillingTask(top=int(tokenizer.named.sum())).learner(model, tokenizer, (), 16)
    for one in filled:
        assert tokenizer.encode([f"{one.before} {one.truth} {one.after}"])[0].tolist() in sentences
        assert len(one.truth) >= 4
        ((_, expected),) = predict(task, [TextExample(f"{one.before} [MASK] {one.after}")])
        ranked = [(guess.token, guess.probability) for guess in expected.masks[0]]
        assert [word for word, _ in one.guesses] == [word for word, _ in ranked[:GUESSES]]
        assert ranked[one.rank - 1] == (one.truth, pytest.approx(one.probability, rel=1e-4))
    assert fill_masks(model, corpus, range(len(corpus)), 3, seed=1) == filled
    assert fill_masks(model, corpus, range(len(corpus)), 3, seed=2) != filled


def test_examples_are_drawn_evenly_by_how_sure_the_model_is(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    documents = [Document(text, f"made:{at}") for at, text in enumerate(DOCUMENTS * 4)]
    corpus = build_corpus(documents, tokenizer, tmp_path / "corpus", workers=1)
    torch.manual_seed(0)
    config = EncoderConfig(len(WORDS), 16, 1, 2, 32, position=Learned(16), initial_range=0.5)
    model = Model(config, (MaskedHead(),))
    every = fill_masks(model, corpus, range(len(corpus)), 100, seed=1)
    sure = [one.guesses[0][1] for one in every]
    assert sure == sorted(sure, reverse=True)
    few = fill_masks(model, corpus, range(len(corpus)), 3, seed=1)
    assert [one.guesses[0][1] for one in few] == [
        sure[0],
        sure[round((len(sure) - 1) / 2)],
        sure[-1],
    ]


def test_a_piece_of_a_word_is_not_hidden(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["near hills the lake in barns barn."])
    assert [tokenizer.token(int(ids[at])) for at in whole_words(ids, tokenizer)] == [
        "near",
        "lake",
        "barn",
    ]
