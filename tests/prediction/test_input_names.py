"""`model_input_names`: segments where a folder's tokenizer lists them, one for all where it does not, as in transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bothways.core.config import reader as configs
from bothways.data.loader import ExampleBudget
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import label
from bothways.hub.model_folder import load_model, save_model
from bothways.model.heads import Head, LabelHead, SpanHead
from bothways.prediction.opening import open_task_model
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from bothways.training.schedules import Steps
from family_tasks import ours, pairs, question, saved, theirs
from toy_corpora import write_texts
from toy_task import fit_task

PAIR = TextExample("ape bee", "cat dog")
LENGTH = 32
CLASSES = LabelHead(3)


def folder_of(family: str, folder: Path, *names: str, head: Head = CLASSES) -> Path:
    """A random model that tells segments apart, with these names for what it reads."""
    saved(family, (head,), folder)
    file = folder / "tokenizer_config.json"
    config = {**json.loads(file.read_text()), "model_input_names": list(names)}
    if not names:
        del config["model_input_names"]
    file.write_text(json.dumps(config))
    return folder


def segments(tokenizer: Tokenizer) -> tuple[int, int]:
    return tokenizer.template.segments


def assert_as_transformers(folder: Path, task: Any, example: Any) -> None:
    opened = open_task_model(str(folder), task, device="cpu")
    np.testing.assert_allclose(ours(opened, example), theirs(folder, example), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["bert", "electra", "albert", "big_bird"])
def test_pairs_are_read_as_transformers_reads_them(family, tmp_path):
    """Logits with and without segments are others, so that the comparison sees them."""
    flat = folder_of(family, tmp_path / "flat", "input_ids", "attention_mask")
    apart = folder_of(family, tmp_path / "apart", "input_ids", "token_type_ids", "attention_mask")
    for folder in (flat, apart):
        assert_as_transformers(folder, "classify", PAIR)
    assert np.abs(theirs(flat, PAIR) - theirs(apart, PAIR)).max() > 1e-3


def test_questions_are_read_as_transformers_reads_them(tmp_path):
    folder = folder_of("bert", tmp_path / "flat", "input_ids", "attention_mask", head=SpanHead())
    assert_as_transformers(folder, "answer", question(3))


def test_without_the_setting_segments_are_told_apart(tmp_path):
    folder = folder_of("bert", tmp_path / "unsaid")
    assert segments(Tokenizer.load(folder)) == (0, 1)
    assert_as_transformers(folder, "classify", PAIR)


@pytest.mark.parametrize(
    "names", [("input_ids", "attention_mask"), ("input_ids", "token_type_ids", "attention_mask")]
)
def test_what_is_fine_tuned_from_a_folder_reads_pairs_as_it_was_trained(names, tmp_path):
    folder = folder_of("bert", tmp_path / "start", *names)
    loaded, tokenizer = load_model(folder), Tokenizer.load(folder)
    assert segments(tokenizer) == (0, int("token_type_ids" in names))
    data = label(ClassificationTask(), tokenizer, pairs(("no", "yes", "perhaps")), [], LENGTH)
    training = replace(finetune_adam(), until=Steps(2), evaluate=None, precision="fp32")
    method = FinetuneConfig(training, LENGTH, ExampleBudget(8), task=ClassificationTask())
    task = fit_task(loaded.model, data, method, device="cpu").task_model
    record = {"task": configs.to_dict(task.task), "length": LENGTH}
    save_model(tmp_path / "model", task.model, tokenizer, labels=data.labels, extra=record)
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert config["model_input_names"] == list(names)
    again = open_task_model(str(tmp_path / "model"), device="cpu")
    np.testing.assert_array_equal(ours(task, PAIR), ours(again, PAIR))
    expected = theirs(tmp_path / "model", PAIR)
    np.testing.assert_allclose(ours(again, PAIR), expected, rtol=0, atol=2e-5)


def test_a_tokenizer_that_is_written_again_lists_the_same(tmp_path):
    folder = folder_of("bert", tmp_path / "flat", "input_ids", "attention_mask")
    Tokenizer.load(folder).save(tmp_path / "again")
    assert segments(Tokenizer.load(tmp_path / "again")) == (0, 0)


def test_a_corpus_tells_segments_apart_whoever_its_tokenizer_is_from(tmp_path):
    """The model that is trained on it says whether it takes them."""
    folder = folder_of("bert", tmp_path / "flat", "input_ids", "attention_mask")
    texts = ["ape bee cat. dog elk."]
    corpus = write_texts(tmp_path / "corpus", Tokenizer.load(folder), texts)
    assert segments(corpus.tokenizer) == (0, 1)
