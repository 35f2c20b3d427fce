"""Saved folders: what is in them, their card, what a crash leaves, and their upload."""

import fnmatch
import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.utils import prune

import bothways
from bothways.core.errors import ConfigError, Finding, FolderError, ResourceError
from bothways.finetuning.data import DataSource
from bothways.hub.hf_config import format_note
from bothways.hub.model_card import (
    UNSEEN,
    Card,
    data_of_corpus,
    limits_of_finetuned,
    limits_of_pretrained,
    render_card,
)
from bothways.hub.model_folder import load_model, push_to_hub, save_model
from bothways.hub.resolve import resolve_run
from bothways.model.config import EncoderConfig
from bothways.model.families.family import Architecture
from bothways.model.heads import LabelHead, MaskedHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.text.tokenizer import Tokenizer
from child_processes import killed_in_save
from model_folders import (
    STEMS_AND_NAMES,
    VOCAB,
    WIDTH,
    assert_same_outputs,
    folder_of,
    outputs,
    own,
    peer,
    peer_outputs,
)
from toy_folder import make_folder, make_sentence_encoder, save_classifier
from toy_training import exit_code


@STEMS_AND_NAMES
@torch.no_grad()
def test_ours_open_in_transformers_with_equal_outputs_and_here(stem, name, tmp_path):
    model = own(name, stem)
    labels = ["a", "b", "c"] if "labels" in model.heads else []
    extra = {"threshold": 0.25, "seeds": [1, 2]}
    save_model(tmp_path / "ours", model, labels=labels, extra=extra)
    named = getattr(transformers, stem + name)
    theirs, report = named.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert_same_outputs(outputs(model), peer_outputs(theirs.eval()))
    by_config = getattr(transformers, "AutoModel" + name.replace("Model", ""))
    assert type(by_config.from_pretrained(tmp_path / "ours")) is named
    if "labels" in model.heads:
        assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
        assert theirs.config.label2id == {"a": 0, "b": 1, "c": 2}
    assert not format_note(tmp_path / "ours")
    loaded = load_model(str(tmp_path / "ours"))
    assert loaded.model.config == model.config
    assert loaded.model.specification == model.specification
    state = model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in loaded.model.state_dict().items())
    assert loaded.extra == extra
    assert loaded.labels == tuple(labels)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression", None])
def test_what_the_label_head_is_for_is_kept(problem, tmp_path):
    model = Model(own("Model").config, (PoolerHead(), LabelHead(1, dropout=0.3)))
    save_model(tmp_path / "ours", model, labels=["score"], problem=problem)
    loaded = load_model(tmp_path / "ours")
    assert (loaded.problem, loaded.labels) == (problem, ("score",))
    assert loaded.model.heads["labels"].dropout.rate == 0.3
    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert theirs.config.problem_type == problem
    assert theirs.config.num_labels == 1
    assert theirs.dropout.p == 0.3


def test_the_folder_holds_a_card_and_a_record(tmp_path):
    settings = {"steps": 10, "text": "a | b\nc"}
    card = Card("A | model\nof mine", "For\n<b> \x1b[2J.", settings, {"accuracy": 0.87654})
    save_model(tmp_path / "ours", own("ForMaskedLM"), card=card)
    lines = (tmp_path / "ours" / "README.md").read_text(encoding="utf8").splitlines()
    assert lines[0] == "---"
    assert {
        "pipeline_tag: fill-mask",
        "# A | model of mine",
        r"For &lt;b> \x1b[2J.",
        "| steps | 10 |",
        r"| text | a \| b c |",
        "| accuracy | 0.8765 |",
        f"| torch | {torch.__version__} |",
        "| format | Hugging Face transformers, BertForMaskedLM |",
    } <= {*lines}
    assert not {"## Limits", "## Data"} & set(lines)
    assert any("BertForMaskedLM.from_pretrained" in line for line in lines)
    record = json.loads((tmp_path / "ours" / "bothways.json").read_text())
    assert record == {"bothways": bothways.__version__}
    files = {file.name for file in (tmp_path / "ours").iterdir()}
    assert files == {"README.md", "bothways.json", "config.json", "model.safetensors"}


def tokenizer(tmp_path: Path, size: int = VOCAB) -> Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{at}" for at in range(size - 5))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    return Tokenizer.load(tmp_path / "vocab.txt")


def test_the_tokenizer_goes_with_the_model(tmp_path):
    save_model(tmp_path / "ours", own("ForMaskedLM"), tokenizer(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs("w3 w9 unheard", return_token_type_ids=False)["input_ids"] == [2, 8, 14, 1, 3]
    # It is replaced whole: the tokenizer of before does not stay beside new weights.
    save_model(tmp_path / "ours", own("ForMaskedLM"))
    assert not list((tmp_path / "ours").glob("tokenizer*"))
    bothways.load_model(tmp_path / "ours").save(tmp_path / "again")
    assert not list((tmp_path / "again").glob("tokenizer*"))
    with pytest.raises(FolderError, match="the tokenizer has 61 ids, and the model's embedding"):
        save_model(tmp_path / "other", own("ForMaskedLM"), tokenizer(tmp_path, VOCAB + 1))
    assert not (tmp_path / "other").exists()


@torch.no_grad()
def test_a_text_ends_where_it_did(tmp_path):
    """The folder says which token ends one; without a tokenizer it is said again, with one it is the tokenizer's."""
    small = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 20}
    config = transformers.GPT2Config(**small, bos_token_id=1, eos_token_id=[9, 3])
    theirs = transformers.GPT2LMHeadModel(config)
    # It predicts nothing but that.
    theirs.transformer.ln_f.bias.copy_(theirs.transformer.wte.weight[3] * 1e3)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs").model
    save_model(tmp_path / "ours", model)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for generating in (again, theirs):
        texts = generating.generate(torch.tensor([[5, 6]]), **settings)
        assert texts.tolist() == [[5, 6, 3]]
    save_model(tmp_path / "ours", model, tokenizer(tmp_path))
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    for id, use in ((2, "bos"), (3, "eos"), (2, "cls"), (3, "sep")):
        assert getattr(again, f"{use}_token_id") == id


def test_special_tokens_are_those_of_the_tokenizer(tmp_path):
    """BigBird's has names of its own for the ends, beside [CLS] and [SEP]; EuroBERT's default mask is beyond a small vocabulary."""
    names = ("<pad>", "</s>", "<s>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "\u2581a")
    original = transformers.BigBirdTokenizer(vocab=[(name, 0.0) for name in names])
    original.save_pretrained(tmp_path / "tokenizer")
    save_model(tmp_path / "ours", own("ForMaskedLM"), Tokenizer.load(tmp_path / "tokenizer"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    for id, use in ((2, "bos"), (1, "eos"), (4, "cls"), (5, "sep"), (6, "mask")):
        assert getattr(again, f"{use}_token_id") == getattr(theirs, f"{use}_token_id") == id


def test_outputs_that_do_not_fit_are_refused(tmp_path):
    config = own("Model").config
    with pytest.raises(FolderError, match="2 labels for 3 outputs: a, b"):
        save_model(tmp_path / "ours", own("ForSequenceClassification"), labels=["a", "b"])
    one = Model(config, (PoolerHead(), LabelHead(1)))
    with pytest.raises(FolderError, match="single-label classification needs two outputs or more"):
        save_model(tmp_path / "ours", one, problem="single_label_classification")
    with pytest.raises(FolderError, match="1 label for 0 outputs"):
        save_model(tmp_path / "ours", own("Model"), labels=["a"])
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_all_files_have_the_mode_that_the_umask_asks_for(umask, tmp_path):
    before = os.umask(umask)
    try:
        save_model(tmp_path / "ours", own("Model"), tokenizer(tmp_path))
    finally:
        os.umask(before)
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "ours").iterdir()}
    assert modes == {0o666 & ~umask}


def test_nothing_but_a_model_is_ever_replaced(tmp_path):
    (tmp_path / "ours").mkdir()
    save_model(tmp_path / "ours", own("Model"))
    save_model(tmp_path / "ours", own("ForMaskedLM"))
    assert "masked" in load_model(tmp_path / "ours").model.heads
    (tmp_path / "ours" / "thesis.tex").write_text("years of work")
    with pytest.raises(FolderError, match="holds files of something other than a model"):
        save_model(tmp_path / "ours", own("Model"))
    assert (tmp_path / "ours" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(FolderError, match="is a file, not a folder"):
        save_model(tmp_path / "ours" / "thesis.tex", own("Model"))


def test_no_room_leaves_the_older_model_whole(tmp_path):
    """The limit on the size of a file stands for a full disk: writing fails in the middle of the weights."""
    save_model(tmp_path / "ours", own("Model"))
    before = {file.name: file.read_bytes() for file in (tmp_path / "ours").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        with pytest.raises(ResourceError, match=r"ours: cannot be written: .*\n  Free some space"):
            save_model(tmp_path / "ours", own("ForMaskedLM"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in (tmp_path / "ours").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["ours"]


def test_an_interruption_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bothways.hub.model_folder.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "ours", own("Model"))
    assert not list(tmp_path.iterdir())


def test_what_an_earlier_crash_left_is_in_nobodys_way(tmp_path):
    for kind in ("new", "old"):
        folder_of(peer("Bert", "Model"), tmp_path / f".writing-{kind}-ours")
    for _ in range(2):
        save_model(tmp_path / "ours", own("Model"))
    assert [file.name for file in tmp_path.iterdir()] == ["ours"]


def test_a_save_that_was_killed_between_its_renames_is_undone_when_the_model_is_opened(tmp_path):
    for place, name in ((tmp_path / "ours", "ours"), (tmp_path / "run" / "model", "run")):
        save_model(place, own("Model"))
        before = {file.name: file.read_bytes() for file in place.iterdir()}
        assert exit_code(killed_in_save, place) == -signal.SIGKILL
        assert not place.exists()
        load_model(resolve_run(str(tmp_path / name)))
        assert {file.name: file.read_bytes() for file in place.iterdir()} == before
        save_model(place, own("Model"))  # what the killed process was writing is removed
        assert [file.name for file in place.parent.iterdir() if "writing" in file.name] == []


FINDINGS = (
    Finding("balance", "warning", "97 % of the training examples are 'x'"),
    Finding("time", "note", "about a minute"),
    Finding("truncation", "warning", "half of the texts are cut."),
)


@pytest.mark.parametrize(
    ("heads", "task"),
    [
        ((), "feature-extraction"), (("masked", "pooler", "pair"), "fill-mask"), (("pooler", "labels"), "text-classification"),
        (("tags",), "token-classification"), (("span",), "question-answering"), (("pooler", "choice"), "multiple-choice"),
        (("causal",), "text-generation"),
    ],
)  # fmt: skip
def test_the_hub_is_told_what_a_model_is_for(heads, task):
    for ours, library in ((False, "transformers"), (True, "bothways")):
        lines = render_card(Card(), Architecture("Any", frozenset(heads), own=ours)).splitlines()
        named = [f"library_name: {library}", f"pipeline_tag: {task}"]
        assert lines[:6] == ["---", *named, "tags:", "- bothways", "---"]


def test_warnings_of_the_preflight_are_limits_and_notes_are_not():
    limits = limits_of_finetuned(128, 7, FINDINGS, evaluated=True)
    assert limits[0] == UNSEEN
    assert "97 % of the training examples are 'x'." in limits
    assert "Half of the texts are cut." in limits
    assert not any("minute" in limit for limit in limits)
    assert "with seed 7" in limits[-1]
    limits = limits_of_finetuned(128, 7, (), evaluated=False)
    assert "Nothing was measured: there was no dev data." in limits


def test_a_pretrained_model_tells_which_positions_are_untrained(corpus):
    encoder = EncoderConfig(30, 16, 1, 2, 32, position=Learned(64))
    tokens = corpus.manifest.counts.tokens
    limits = "\n".join(limits_of_pretrained(encoder, (16, 48), 2 * tokens, tokens))
    assert "at most 48 tokens; its last 16 positions are untrained." in limits
    assert "2 times its corpus" in limits
    limits = "\n".join(limits_of_pretrained(encoder, (64,), tokens, tokens))
    assert "at most 64 tokens.\n" in limits + "\n"


def test_the_card_has_sections_for_data_and_limits(corpus):
    data = {"train": DataSource("a.tsv", 1234, "abc"), **data_of_corpus(corpus, "def")}
    card = Card("T", data=data, limits=("One\nthing.", "Another."))
    text = render_card(card, Architecture("BertModel", frozenset()))
    assert "## Limits\n\n- One thing.\n- Another.\n" in text
    assert "| train | a.tsv, 1,234 examples, sha256 abc |" in text
    counts = corpus.manifest.counts
    assert counts.sentences < counts.tokens
    amounts = f"150 documents, {counts.sentences:,} sentences, {counts.tokens:,} tokens"
    assert f"| corpus | {amounts} |" in text
    assert "| from | unknown |" in text
    assert "| sha256 | def |" in text
    assert "## Versions" in text


class Api:
    """The part of `HfApi` that an upload uses; it keeps what it is given."""

    repos: dict[str, bool | None]
    files: dict[str, str]

    def model_info(self, repo_id: str, *, timeout: float) -> None:
        assert timeout > 0

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
        assert exist_ok
        type(self).repos[repo_id] = private
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, allow_patterns: list[str]
    ) -> Any:
        assert repo_id in self.repos
        for file in folder_path.rglob("*"):
            name = file.relative_to(folder_path).as_posix()
            if file.is_file() and any(fnmatch.fnmatch(name, known) for known in allow_patterns):
                type(self).files[name] = file.read_bytes().decode("latin-1")
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/{commit_message}")


@pytest.fixture
def api(monkeypatch) -> type[Api]:
    Api.repos, Api.files = {}, {}
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return Api


def test_a_folder_is_uploaded_without_foreign_files(tmp_path, api):
    beside = {"1_Pooling/config.json": {}, "modules.json": []}
    save_model(tmp_path / "model", own("ForMaskedLM"), extra_files=beside)
    (tmp_path / "model" / "notes.txt").write_text("private")
    url = push_to_hub(tmp_path, "me/mine", private=True, message="first")  # the folder of a run
    assert url == "https://hub/me/mine/first"
    assert api.repos == {"me/mine": True}
    written = {"README.md", "bothways.json", "config.json", "model.safetensors"}
    assert set(api.files) == written | {*beside}
    for name, value in (("tokenizer", tokenizer(tmp_path)), ("card", Card())):
        with pytest.raises(ConfigError) as caught:
            push_to_hub(tmp_path, "me/mine", **{name: value})
        assert caught.value.where == name


def test_weights_of_torch_are_uploaded(tmp_path, api):
    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    push_to_hub(folder, "me/mine")
    assert {*api.files} == {"config.json", "pytorch_model.bin"}


def test_a_model_in_memory_is_saved_and_uploaded(api):
    push_to_hub(own("ForMaskedLM"), "me/mine", card=Card("A title"))
    assert json.loads(api.files["config.json"])["architectures"] == ["BertForMaskedLM"]
    assert "# A title" in api.files["README.md"]


def test_a_model_that_was_opened_is_saved_and_uploaded_with_what_its_folder_says(tmp_path, api):
    """Not as one of classes, with LABEL_0 and without a tokenizer."""
    bert = make_folder(tmp_path / "bert")
    labels, problem = ["yes", "no"], "multi_label_classification"
    save_classifier(tmp_path / "own", bert, labels=labels, problem=problem)
    model = bothways.load_model(tmp_path / "own")
    push_to_hub(model, "me/mine")
    bothways.save_model(tmp_path / "saved", model)
    assert json.loads(api.files["config.json"])["problem_type"] == problem
    assert "tokenizer.json" in api.files
    for folder in (tmp_path / "own", tmp_path / "saved"):
        assert bothways.load(folder).task_model.task.name == "multilabel"
        assert bothways.load(folder).classes_.tolist() == labels
    model.labels = np.array([3, 4])
    assert bothways.load(model.save(tmp_path / "numbers")).classes_.tolist() == ["3", "4"]
    model.labels = "ab"
    with pytest.raises(ConfigError, match="labels: must be a list of names, not 'ab'"):
        model.save(tmp_path / "saved")


def test_modules_that_are_not_saved_are_named(tmp_path, caplog):
    model = bothways.load_model(make_sentence_encoder(tmp_path / "encoder"))
    model.save(tmp_path / "saved")
    assert "encoder: pooling and other modules" in caplog.text


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [
        (own("ForMaskedLM"), "tokenizer", "tokenizer: must be a bothways.Tokenizer, not str"),
        (torch.nn.Linear(1, 1), None, "model: must be a bothways.Model, not Linear"),
    ],
)
def test_what_is_of_another_library_is_not_saved(tmp_path, model, tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        bothways.save_model(tmp_path / "saved", model, tokenizer)


def test_what_cannot_be_uploaded_is_one_error(tmp_path, api, monkeypatch):
    with pytest.raises(FolderError, match=r"is not a model folder: it has no config\.json"):
        push_to_hub(tmp_path, "me/mine")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("403 Forbidden\nlong advice")

    monkeypatch.setattr(api, "create_repo", refuse)
    with pytest.raises(FolderError, match=r"me/mine: cannot be uploaded .*: 403 Forbidden"):
        push_to_hub(own("ForMaskedLM"), "me/mine")


@pytest.mark.parametrize("kinds", [(LabelHead(2),), (LabelHead(2), MaskedHead())])
def test_the_code_of_a_card_opens_its_folder(tmp_path, kinds):
    loaded = load_model(make_folder(tmp_path / "bert"))
    model = Model(loaded.model.config, (PoolerHead(), *kinds), loaded.model.encoder)
    save_model(tmp_path / "saved", model, loaded.tokenizer)
    code = (tmp_path / "saved" / "README.md").read_text().split("```")[1].removeprefix("python\n")
    exec(code.replace("…", str(tmp_path / "saved")), names := {})
    assert names["model"].encoder if len(kinds) > 1 else names["tokenizer"]("a film").input_ids


def test_a_home_folder_is_one_for_what_is_written_as_for_what_is_read(tmp_path, monkeypatch):
    """Python has no shell that replaces ~: a folder called ~ would be made here."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model = bothways.load_model(make_folder(tmp_path / "home" / "bert"))
    model.save("~/own")
    model.tokenizer.save("~/tokenizer")
    bothways.average(["~/own", "~/own"], "~/mean")
    rows = [{"text": text, "label": text} for text in ("good", "bad")] * 2
    settings = {"out": "~/run", "epochs": 1, "progress": False}
    bothways.finetune("~/bert", train=rows, task="classify", **settings).save("~/saved")
    (tmp_path / "texts.txt").write_text("a good film\nit ends\n")
    tokenizer = bothways.Tokenizer.load("~/tokenizer")
    corpus = bothways.build_corpus("texts.txt", tokenizer, "~/corpus", progress=False)
    bothways.build_index(["a good film", "it ends"], "~/bert", "~/index", progress=False)
    bothways.predict("~/run", "texts.txt", "~/out.jsonl", progress=False)
    bothways.evaluate("~/saved", rows, report="~/report.html", progress=False)
    assert len(bothways.Corpus.open("~/corpus")) == len(corpus)
    names = {"bert", "own", "tokenizer", "mean", "run", "saved", "corpus", "index", "out.jsonl"}
    names.add("report.html")
    assert {path.name for path in (tmp_path / "home").iterdir()} >= names
    assert {path.name for path in tmp_path.iterdir()} == {"home", "texts.txt"}


def test_pruned_weights_are_refused_until_they_are_plain(tmp_path):
    """Under other names, they made a folder that could not be opened."""
    model = own("Model", "Bert")
    dense = model.encoder.blocks[0].mlp.down
    prune.l1_unstructured(dense, "weight", amount=0.5)
    with pytest.raises(ConfigError, match="weight_mask"):
        save_model(tmp_path / "model", model)
    assert not (tmp_path / "model").exists()
    prune.remove(dense, "weight")
    save_model(tmp_path / "model", model)
    state = load_model(tmp_path / "model").model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
