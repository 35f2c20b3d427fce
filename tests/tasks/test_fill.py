"""Filling masks: probabilities are transformers', joint fillings are products of its conditionals, texts keep their form."""

import copy
import itertools
import json
import math
import random

import numpy as np
import pytest
import tokenizers
import torch

from bothways.core.errors import ConfigError, DataError
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.masked_lm.task import MaskFillingTask
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from toy_masked import MASK, log_probabilities, make_masked, make_masked_text
from toy_task import VOCABULARY


@pytest.mark.parametrize("training", [False, True])
def test_tokens_and_probabilities_are_those_of_transformers(made, training):
    """Also in training mode: predictions are without dropout, and the mode stays."""
    # In float64: rounding in fp32 exchanges tokens that are nearly as likely.
    model, theirs = (copy.deepcopy(made[index]).double() for index in (0, 2))
    tokenizer, draw = made[1], random.Random(0)
    texts = [make_masked_text(draw, 8, masks) for masks in (1, 1, 2, 3, 1, 4)]
    task = MaskFillingTask(top=6).bind(model, tokenizer, (), 24).train(training)
    results = predict(task, map(TextExample, texts), window=4)
    found = [prediction for _, prediction in results]
    assert task.training is training
    model.eval()
    for text, prediction in zip(texts, found, strict=True):
        ids = [2, *tokenizer.encode([text])[0].tolist(), 3]
        logs = log_probabilities(theirs, ids)
        places = [place for place, id in enumerate(ids) if id == MASK]
        for place, mask in zip(places, prediction.masks, strict=True):
            order = np.argsort(-logs[place])[:6]
            assert [guess.token for guess in mask] == [VOCABULARY[id] for id in order]
            chances = [guess.probability for guess in mask]
            np.testing.assert_allclose(chances, np.exp(logs[place][order]), rtol=1e-6)


def with_a_gap(tokenizer: Tokenizer) -> Tokenizer:
    """The same with the last token two ids further on; no token has those between."""
    spec = json.loads(tokenizer.backend.to_str())
    spec["model"]["vocab"][VOCABULARY[-1]] += 2
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), tokenizer.specials)


@pytest.mark.parametrize("gap", [False, True])
def test_a_row_without_a_token_is_never_chosen(gap, tmp_path):
    """It keeps its share of the probability, as in transformers, whose pipeline gives it as a token of no text."""
    import transformers

    model, tokenizer, theirs = make_masked(tmp_path, spare=6)
    tokenizer = with_a_gap(tokenizer) if gap else tokenizer
    names = {id: tokenizer.token(id) for id in np.flatnonzero(tokenizer.named).tolist()}
    assert sorted(names.values()) == sorted(VOCABULARY)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, mask_token="[MASK]", pad_token="[PAD]"
    )
    fast.model_input_names = ["input_ids", "attention_mask"]
    options = {"model": theirs, "tokenizer": fast, "top_k": 22, "device": "cpu"}
    pipeline = transformers.pipeline("fill-mask", **options)
    task = MaskFillingTask(top=16).bind(model.eval(), tokenizer, (), 24)
    texts = "ape [MASK] cat", "ape [MASK] [MASK] dog"
    ((_, single), (_, double)) = predict(task, map(TextExample, texts))
    rows = [row for row in pipeline("ape [MASK] cat") if row["token"] in names]
    guesses, scores = single.masks[0], [row["score"] for row in rows]
    assert [guess.token for guess in guesses] == [names[row["token"]] for row in rows]
    np.testing.assert_allclose([guess.probability for guess in guesses], scores, rtol=1e-4)
    # A single mask is filled jointly as alone.
    assert [f.tokens for f in single.fillings] == [(guess.token,) for guess in guesses]
    np.testing.assert_allclose([f.probability for f in single.fillings], scores, rtol=1e-4)
    assert sum(row["score"] for row in rows) < 0.99
    ids = [2, 5, MASK, MASK, 8, 3]
    first, pairs = log_probabilities(theirs, ids)[2], {}
    for a, name in names.items():
        second = log_probabilities(theirs, [2, 5, a, *ids[3:]])[3]
        pairs |= {(name, other): first[a] + second[b] for b, other in names.items()}
    best = sorted(pairs, key=lambda pair: -pairs[pair])[:16]
    assert [f.tokens for f in double.fillings] == best
    logs = [math.log(filling.probability) for filling in double.fillings]
    np.testing.assert_allclose(logs, [pairs[pair] for pair in best], atol=1e-4)


def test_fillings_of_many_masks_are_products_of_conditionals(made):
    model, tokenizer, theirs = made
    draw = random.Random(0)
    examples = [TextExample(make_masked_text(draw, 6, masks)) for masks in (3, 4, 2)]
    task = MaskFillingTask(top=3).bind(model, tokenizer, (), 24)
    for example, prediction in predict(task, examples):
        logs = [math.log(f.probability) for f in prediction.fillings]
        assert logs == sorted(logs, reverse=True)
        assert len({f.tokens for f in prediction.fillings}) == 3
        ids = [2, *tokenizer.encode([example.text])[0].tolist(), 3]
        places = [at for at, id in enumerate(ids) if id == MASK]
        for filling, log in zip(prediction.fillings, logs, strict=True):
            filled, total = list(ids), 0.0
            for place, token in zip(places, filling.tokens, strict=True):
                id = VOCABULARY.index(token)
                total += log_probabilities(theirs, filled)[place][id]
                filled[place] = id
            assert log == pytest.approx(total, abs=1e-4)


def test_the_text_stays_as_it_was_typed(made):
    """Only masks are replaced: case and white space stay, and a piece of a word joins the word before it."""
    model, tokenizer, _ = made
    task = MaskFillingTask(top=len(VOCABULARY)).bind(model, tokenizer, (), 24)
    examples = map(TextExample, ("  APE\t[MASK], Cat  ", "[MASK][MASK] Elk"))
    ((_, single), (_, double)) = predict(task, examples)
    texts = {f.tokens[0]: f.text for f in single.fillings}
    assert len(texts) == len(VOCABULARY)
    for token, text in texts.items():
        assert text == ("  APEs, Cat  " if token == "##s" else f"  APE\t{token}, Cat  ")
    assert single.text == single.fillings[0].text
    for filling in double.fillings:
        a, b = (token.removeprefix("##") for token in filling.tokens)
        assert filling.text == f"{a}{b} Elk"


def test_a_long_text_is_cut_to_a_window_around_its_masks(made):
    model, tokenizer, _ = made
    task = MaskFillingTask().bind(model, tokenizer, (), 12)
    words = [VOCABULARY[5 + at % 10] for at in range(60)]
    for first, last, begin in ((0, 3, 0), (30, 34, 27), (31, 40, 31), (57, 59, 50), (20, 20, 15)):
        masked = [("[MASK]" if at in (first, last) else word) for at, word in enumerate(words)]
        (made_of,) = task.encode([TextExample(" ".join(masked))])
        assert (made_of.tokens, made_of.cut) == (60, 50)
        ids = made_of.sequences[0].ids.tolist()
        assert ids == [2, *(VOCABULARY.index(word) for word in masked[begin : begin + 10]), 3]
        index = made_of.sequences[0].targets["masked"].index
        assert [ids[at] for at in index] == [MASK] * len({first, last})
    (whole,) = task.encode([TextExample("ape [MASK]")])
    assert whole.cut == 0


def test_what_cannot_be_filled_is_refused(made):
    model, tokenizer, _ = made
    task = MaskFillingTask().bind(model, tokenizer, (), 12)
    with pytest.raises(DataError, match=r"^t\.txt:3: the text has no \[MASK\]\n  Write \[MASK\]"):
        task.encode([TextExample("ape [MASK]"), TextExample("ape", where="t.txt:3")])
    with pytest.raises(DataError, match=r"^t\.txt:4: its masks span 11 tokens"):
        task.encode([TextExample("[MASK] " + "ape " * 9 + "[MASK]", where="t.txt:4")])
    with pytest.raises(DataError, match=r"fillings cannot be scored\n  .*task=\"likelihood\""):
        evaluate_task(task, [TextExample("ape [MASK]")])
    with pytest.raises(ConfigError, match=r"^top: must be at least 1, not 0"):
        MaskFillingTask(top=0)
    with pytest.raises(ConfigError, match=r"^top: must be at most the 16 tokens"):
        MaskFillingTask(top=17).bind(model, tokenizer, (), 12)


def test_the_head_computes_at_masks_alone(made):
    model, tokenizer, _ = made
    rows = []
    texts = map(" ".join, itertools.product(["ape bee cat", "dog"], ["[MASK]", "[MASK] elk"]))
    hook = lambda module, inputs, output: rows.append(len(output))  # noqa: E731
    task = MaskFillingTask().bind(model, tokenizer, (), 24)
    with model.heads["masked"].register_forward_hook(hook):
        list(predict(task, map(TextExample, texts)))
    assert rows == [4]
    assert torch.is_grad_enabled()
