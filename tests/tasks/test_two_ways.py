"""Likelihoods of a model that was trained both ways, by transformers in float64: masked, causal and both."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest

from bothways.core.errors import ConfigError, DataError, FolderError
from bothways.model.families import gpt
from bothways.model.heads import NextTokenHead
from bothways.model.model import Model
from bothways.prediction.engine import predict
from bothways.prediction.opening import open_task
from bothways.tasks.masked_lm.task import CompletionTask, LikelihoodTask, MinimalPairTask
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from commands import run_line
from toy_masked import MASK, likelihoods, log_probabilities, make_masked, make_masked_text
from toy_task import VOCABULARY, make_tokenizer

ROOM = 10


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple:
    """The folder, its tokenizer, transformers' masked and its causal model."""
    import transformers

    folder = tmp_path_factory.mktemp("both")
    _, tokenizer, masked = make_masked(folder, positions=ROOM + 2, shifted=True)
    causal = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", is_decoder=True, dtype=masked.dtype
    ).eval()
    return folder / "model", tokenizer, masked, causal


@pytest.mark.parametrize("variant", ["word_l2r", "causal", "both"])
def test_tokens_and_pairs_have_the_likelihoods_of_transformers(made, variant):
    draw = random.Random(5)
    texts = [make_masked_text(draw, 12, 0) for _ in range(6)]
    task = open_task(made[0], "likelihood", device="cpu", settings=[f"variant={variant}"])
    found = task(texts)
    assert max(len(prediction.tokens) for prediction in found) > ROOM, "one text is read in pieces"
    sums = list[float]()
    for text, prediction in zip(texts, found, strict=True):
        expected = likelihoods(text, variant, *made[1:])
        np.testing.assert_allclose(prediction.log_likelihoods, expected, rtol=1e-5, atol=1e-5)
        sums.append(sum(expected))
    prefer = open_task(made[0], "prefer", device="cpu", settings=[f"variant={variant}"])
    pairs = prefer(list(zip(texts[::2], texts[1::2], strict=True)))
    numbers = [number for pair in pairs for number in pair.log_likelihoods]
    np.testing.assert_allclose(numbers, sums, rtol=1e-5, atol=1e-4)


def test_a_suite_is_scored_in_each_variant(made, tmp_path, capsys):
    draw, suite = random.Random(7), tmp_path / "suite"
    suite.mkdir()
    pairs = [(make_masked_text(draw, 5, 0), make_masked_text(draw, 5, 0)) for _ in range(20)]
    rows = [{"sentence_good": good, "sentence_bad": bad} for good, bad in pairs]
    (suite / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for variant in ("", "word_l2r", "both"):
        settings = [f"variant={variant}"] if variant else []
        run_line("evaluate", made[0], *settings, "--blimp", suite, "--json")
        values = json.loads(capsys.readouterr().out)
        found[variant] = values["variant"], values["accuracy"]
    assert found[""] == found["word_l2r"]
    for variant in ("word_l2r", "both"):
        prefer = open_task(made[0], "prefer", device="cpu", settings=[f"variant={variant}"])
        right = [prediction.preferred == "first" for prediction in prefer(pairs)]
        assert found[variant] == (variant, np.mean(right))


def test_masks_are_filled_from_the_token_before(made):
    folder, tokenizer, masked, _ = made
    (found,) = open_task(folder, "fill", device="cpu")(["ape [MASK] bee"])
    ids = [2, *tokenizer.encode(["ape"])[0], MASK, *tokenizer.encode(["bee"])[0], 3]
    expected = np.exp(log_probabilities(masked, ids)[ids.index(MASK) - 1])
    best = found.masks[0][0]
    assert best.probability == pytest.approx(expected[VOCABULARY.index(best.token)], rel=1e-4)


def test_models_that_have_not_learned_it_are_refused(tmp_path):
    make_masked(tmp_path)
    for task, variant in itertools.product(("likelihood", "prefer"), ("causal", "both")):
        with pytest.raises(
            (ConfigError, FolderError),
            match=r"(?s)(left to right|needs the head 'causal').*gpt_bert",
        ):
            open_task(tmp_path / "model", task, device="cpu", settings=[f"variant={variant}"])
    assert MinimalPairTask().variant == LikelihoodTask().variant == "original"


def test_the_head_is_not_exported(made, tmp_path):
    with pytest.raises(FolderError, match="predicts a token from the vector before it"):
        run_line("export", made[0], "--task", "fill", "--out", tmp_path / "graph")


def test_without_a_token_before_it_the_first_one_of_a_text_is_not_predicted(tmp_path):
    shape = dataclasses.replace(gpt.base(), vocab=len(VOCABULARY), width=16, depth=1, heads=2)
    make_tokenizer(tmp_path / "a").save(tmp_path / "b")
    bare = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    for name, change in (
        ("tokenizer.json", {"post_processor": bare}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        file = tmp_path / "b" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    tokenizer, model = Tokenizer.load(tmp_path / "b"), Model(shape, (NextTokenHead(),))
    assert not tokenizer.template.before
    texts = ["ape bee cat", "dog elk", "fox gnu hen ibis"]
    scorer = CompletionTask(variant="causal").bind(model, tokenizer, (), 16).eval()
    ends = [TextExample("", text) for text in texts]
    completed = [prediction.log_likelihood for _, prediction in predict(scorer, ends)]
    pairs = MinimalPairTask(variant="causal").bind(model, tokenizer, (), 16).eval()
    alike = [TextExample(text, text) for text in texts]
    assert completed == pytest.approx([p.first for _, p in predict(pairs, alike)], abs=1e-5)
    for end in ("ape", ""):
        with pytest.raises(DataError, match="its end has 0 tokens"):
            list(predict(scorer, [TextExample("", end)]))
