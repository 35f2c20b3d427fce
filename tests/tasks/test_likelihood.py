"""Pseudo-log-likelihood: token by token as a plain loop over transformers in float64 has it, in both variants."""

import math
import random

import numpy as np
import pytest

from bothways.core.errors import DataError
from bothways.prediction.engine import PredictConfig, evaluate_task, predict
from bothways.tasks import text_task as untrained
from bothways.tasks.likelihood import task as likelihood
from bothways.tasks.likelihood.task import LikelihoodTask
from bothways.tasks.mask_filling.task import MaskFillingTask
from bothways.tasks.text_task import TextColumns, TextExample
from toy_masked import log_probabilities, make_masked, make_masked_text
from toy_task import VOCABULARY

MASK = VOCABULARY.index("[MASK]")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple:
    return make_masked(tmp_path_factory.mktemp("masked"))


def by_hand(theirs: object, words: list[list[int]], variant: str, room: int) -> list[float]:
    """The log probability of each token; words as lists of ids, texts read `room` tokens at a time."""
    ids = [id for word in words for id in word]
    word_of = [at for at, word in enumerate(words) for _ in word]
    result = []
    for start in range(0, len(ids), room):
        piece, owners = ids[start : start + room], word_of[start : start + room]
        for at, id in enumerate(piece):
            hidden = list(piece)
            hidden[at] = MASK
            for later in range(at + 1, len(piece)):
                if variant == "word_l2r" and owners[later] == owners[at]:
                    hidden[later] = MASK
            result.append(log_probabilities(theirs, [2, *hidden, 3])[at + 1][id])
    return result


@pytest.mark.parametrize("variant", ["original", "word_l2r"])
@pytest.mark.parametrize("training", [False, True])
def test_it_is_that_of_a_plain_loop(made, variant, training):
    model, tokenizer, theirs = made
    draw = random.Random()
    texts = [make_masked_text(draw, longest, 0) for longest in (1, 4, 9, 9, 30)] + [
        "apesss bees",
        "",
    ]
    task = LikelihoodTask(variant=variant).bind(model, tokenizer, (), 12).train(training)  # type: ignore[arg-type]
    found = [
        prediction
        for _, prediction in predict(
            task, [TextExample(text) for text in texts], PredictConfig(tokens=60, window=3)
        )
    ]
    assert task.training is training
    model.eval()
    for text, prediction in zip(texts, found, strict=True):
        words = [tokenizer.encode([word])[0].tolist() for word in text.split()]
        expected = by_hand(theirs, words, variant, 10)
        assert prediction.tokens == tuple(VOCABULARY[id] for word in words for id in word)
        np.testing.assert_allclose(prediction.log_likelihoods, expected, atol=1e-4)
        assert prediction.log_likelihood == pytest.approx(math.fsum(expected), abs=1e-3)


def test_many_tokens_are_read_in_parts(made, monkeypatch):
    """Logits over a vocabulary are held of some positions at once, which is not to be seen."""
    model, tokenizer, _ = made
    tasks = (
        LikelihoodTask(variant="word_l2r").bind(model, tokenizer, (), 24),
        MaskFillingTask().bind(model, tokenizer, (), 24),
    )

    def numbers() -> list[float]:
        ((_, scored),) = predict(tasks[0], [TextExample("ape bees cats dog")])
        ((_, filled),) = predict(tasks[1], [TextExample("[MASK] ape [MASK] [MASK] bees")])
        return [
            *scored.log_likelihoods,
            *(guess.probability for mask in filled.masks for guess in mask),
        ]

    whole = numbers()
    for module in (untrained, likelihood):
        monkeypatch.setattr(module, "ROWS", 2)
    assert numbers() == pytest.approx(whole, rel=1e-4)


def test_hiding_the_rest_of_a_word_matters_inside_words_only(made):
    model, tokenizer, _ = made
    pair = []
    for variant in ("original", "word_l2r"):
        task = LikelihoodTask(variant=variant).bind(model, tokenizer, (), 24)  # type: ignore[arg-type]
        pair += [prediction for _, prediction in predict(task, [TextExample("ape bees dog")])]
    same = [
        a == pytest.approx(b, abs=1e-5)
        for a, b in zip(*(p.log_likelihoods for p in pair), strict=True)
    ]
    assert pair[0].tokens == ("ape", "bee", "##s", "dog")
    assert same == [True, False, True, True]


def test_pseudo_perplexity_is_of_all_tokens_together(made):
    model, tokenizer, theirs = made
    task = LikelihoodTask().bind(model, tokenizer, (), 24)
    texts = ["ape bee", "cat dog elk fox", "", "gnus"]
    total = sum(
        sum(by_hand(theirs, [tokenizer.encode([t])[0].tolist()], "original", 22)) for t in texts
    )
    found = evaluate_task(task, (TextExample(text) for text in texts))
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(-total / 8), rel=1e-4)
    assert found["pll"] == pytest.approx(total, rel=1e-5)
    assert (found["tokens"], found["texts"]) == (8, 4)
    (_, prediction), *_ = predict(task, [TextExample(texts[1])])
    assert prediction.pseudo_perplexity == pytest.approx(math.exp(-prediction.log_likelihood / 4))
    assert task.grade(TextExample(texts[1]), prediction) == pytest.approx(
        prediction.log_likelihood / 4
    )


def test_what_has_no_likelihood_is_refused(made, tmp_path):
    model, tokenizer, _ = made
    task = LikelihoodTask().bind(model, tokenizer, (), 24)
    with pytest.raises(
        DataError,
        match=r"^t\.txt:2: the text has a \[MASK\], whose token is unknown\n  .*task=\"fill\"",
    ):
        list(predict(task, [TextExample("ape [MASK]", where="t.txt:2")]))
    with pytest.raises(DataError, match="there is no token to score"):
        evaluate_task(task, [TextExample("")])
    (tmp_path / "pairs.tsv").write_text("sentence1\tsentence2\nape\tbee\n")
    with pytest.raises(
        DataError,
        match=r"has two texts a row, 'sentence1' and 'sentence2'; one is read\n  Name one",
    ):
        task.task.read(str(tmp_path / "pairs.tsv"))
    reading = task.task.read(str(tmp_path / "pairs.tsv"), TextColumns("sentence2"))
    assert [example.text for example in reading.examples] == ["bee"]


def test_sequences_of_a_text_share_their_ids(made):
    """A text of n tokens is n sequences, and must not take n² numbers."""
    _, tokenizer, _ = made
    (made_of,) = LikelihoodTask().encode([TextExample("ape bee cats")], tokenizer, (), 24)
    assert len(made_of.sequences) == 4
    assert len({id(sequence.ids) for sequence in made_of.sequences}) == 1
