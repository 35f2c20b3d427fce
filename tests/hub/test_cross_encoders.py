"""Folders of cross-encoders of every version of sentence-transformers: scores equal those of its CrossEncoder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bothways
from bothways.core.errors import FolderError
from bothways.hub.model_folder import load_model
from bothways.hub.sentence_transformers import read_program_config
from closeness import assert_close
from commands import run_line
from model_folders import change_settings
from toy_folder import make_folder, save_classifier

QUERY = "the old film"
DOCUMENTS = ["a good play", "it ends", " ".join(["two men in rain"] * 8), "bad", "bad"]
PROGRAM = "config_sentence_transformers.json"
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A classifier with one output, as transformers knows it."""
    place = tmp_path_factory.mktemp("cross")
    bert = make_folder(place / "bert", initializer_range=0.3)
    save_classifier(place / "plain", bert, ("LABEL_0",))
    (place / "plain" / "bothways.json").unlink()
    return place / "plain"


def theirs(folder: Path, **settings: Any) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(folder), device="cpu", **settings)


LAYOUTS = {
    "3": {"sbert_ce_default_activation_function": IDENTITY},
    "3 without": {"sbert_ce_default_activation_function": None},
    "4": {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}},
    "5": {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
    "6": {},
    "6 all": {
        "activation_fn": torch.nn.Identity(),
        "max_length": 16,
        "prompts": {"ask": "it ends "},
        "default_prompt_name": "ask",
    },
}


@pytest.fixture(scope="module")
def saved(plain, tmp_path_factory) -> Path:
    """The folder that the newest sentence-transformers saves of it."""
    return newest(plain, tmp_path_factory.mktemp("saved") / "model")


def newest(source: Path, place: Path, **settings: Any) -> Path:
    theirs(source, **settings).save_pretrained(str(place))
    return place


def check_equal(folder: Path, opened: bothways.Predictor) -> None:
    other = theirs(folder)
    expected = {each["corpus_id"]: each["score"] for each in other.rank(QUERY, DOCUMENTS)}
    ranking = opened((QUERY, DOCUMENTS)).ranking
    in_order = [expected[each.index] for each in ranking]
    assert_close([each.score for each in ranking], in_order)
    assert_close(in_order, sorted(in_order, reverse=True))  # equal scores have either order
    pairs = [(QUERY, document) for document in DOCUMENTS]
    assert_close([opened(pair).scores[0] for pair in pairs], other.predict(pairs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_opens_as_a_reranker(plain, tmp_path, layout):
    if layout.startswith("6"):
        folder = newest(plain, tmp_path / "model", **LAYOUTS[layout])
    else:
        folder = shutil.copytree(plain, tmp_path / "model")
        config = json.loads((folder / "config.json").read_text()) | LAYOUTS[layout]
        (folder / "config.json").write_text(json.dumps(config))
    opened = bothways.load(folder)
    assert opened.task_model.task.name == "rerank"
    assert opened.task_model.length == (16 if layout == "6 all" else 32)
    identity = IDENTITY in str(LAYOUTS[layout]) or "Identity" in str(LAYOUTS[layout])
    assert opened.task_model.task.activation == ("identity" if identity else "sigmoid")
    check_equal(folder, opened)
    # Of the folder's files nothing is unknown, and each task that is named still opens.
    assert load_model(folder).report.unknown_settings == {}
    assert bothways.load(folder, task="regress").task_model.task.name == "regress"
    assert bothways.load(folder, task="embed").encode("it ends").shape == (32,)


MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_LogitScore", "type": "sentence_transformers.models.LogitScore"},
]


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
     r"scores are made by 'torch\.nn\.modules\.activation\.Tanh'\n  Supported are Sigmoid and"),
    (PROGRAM, {"activation_fn": 3}, r"scores are made by 3\n"),
    (PROGRAM, {"default_prompt_name": "ask", "prompts": {"x": "y"}},
     r"default_prompt_name 'ask' is not among its prompts: x"),
    ("sentence_bert_config.json", {"query_length": 4}, "not supported: query_length"),
    ("modules.json", MODULES, r"its modules are Transformer, LogitScore\n  Supported"),
])  # fmt: skip
def test_what_would_change_scores_is_refused(saved, tmp_path, name, settings, message):
    folder = shutil.copytree(saved, tmp_path / "model")
    change_settings(folder, PROGRAM, activation_fn=None)  # so that another place may name it
    if isinstance(settings, list):
        (folder / name).write_text(json.dumps(settings))
    else:
        change_settings(folder, name, **settings)
    with pytest.raises(FolderError, match=message):
        bothways.load(folder)


def test_a_plain_classifier_with_one_output_is_a_reranker_by_name(plain):
    assert bothways.load(plain).task_model.task.name == "regress"
    check_equal(plain, bothways.load(plain, task="rerank"))


def test_a_cross_encoder_with_classes_is_a_classifier(plain, tmp_path):
    three = save_classifier(tmp_path / "three", plain, ("a", "b", "c"))
    folder = newest(three, tmp_path / "nli")
    opened = bothways.load(folder)
    assert opened.task_model.task.name == "classify"
    expected = torch.tensor(theirs(folder).predict([("it ends", "bad")])[0]).softmax(0)
    found = list(opened(("it ends", "bad")).probabilities.values())
    assert_close(found, expected)


def test_another_vocabulary_and_more_positions_keep_its_files(plain, tmp_path):
    folder = newest(plain, tmp_path / "model", **LAYOUTS["6 all"])
    (tmp_path / "words.txt").write_text("cinema\n")
    words = ("--vocabulary", str(tmp_path / "words.txt"))
    run_line("convert", folder, *words, "--out", tmp_path / "new")
    assert read_program_config(tmp_path / "new", 32) == read_program_config(folder, 32)
    opened = bothways.load(tmp_path / "new")
    assert_close(
        opened((QUERY, DOCUMENTS)).logits, bothways.load(folder)((QUERY, DOCUMENTS)).logits
    )
    check_equal(tmp_path / "new", opened)
