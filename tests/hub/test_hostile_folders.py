"""Folders that were made or damaged to harm: one clear error, soon, and nothing outside is read."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bothways.core.errors import BothwaysError, FolderError
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.sentence_transformers import read_program_config
from bothways.hub.weight_files import plan_loading
from bothways.model.config import EncoderConfig
from bothways.model.families.bert import BERT
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer
from model_folders import change_settings, folder_of, peer, truncate
from toy_folder import make_folder

DEEP = "[" * 100_000
HUGE = '{"vocab_size": ' + "9" * 5_000 + "}"


@pytest.fixture
def folder(tmp_path) -> Path:
    return folder_of(peer("Bert", "ForSequenceClassification"), tmp_path / "theirs")


@pytest.mark.parametrize("content", [DEEP, HUGE], ids=["deep", "huge"])
@pytest.mark.parametrize("name", ["config.json", "bothways.json", "model.safetensors.index.json"])
def test_nesting_and_digits_are_one_error(name, content, folder):
    if "index" in name:
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(content)
    with pytest.raises(BothwaysError, match=name):
        load_model(folder)


@pytest.mark.parametrize("content", [DEEP, HUGE, '[{"type": "a.Transformer"}]'])
def test_odd_modules_are_one_error(content, folder):
    (folder / "modules.json").write_text(content)
    with pytest.raises(BothwaysError, match=r"modules\.json"):
        read_program_config(folder, 20)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_link_to_nothing_is_an_error_with_its_target(name, folder):
    """A snapshot of the Hub's cache that was copied without its blobs has such links."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/4d7a")
    with pytest.raises(FolderError, match=r"is a link to \.\./\.\./blobs/4d7a.*\n.*cp -rL"):
        load_model(folder)


@pytest.mark.parametrize("content", [DEEP, '{"pooling_mode": 3}', '{"pooling_mode": [["cls"]]}'])
def test_an_odd_pooling_is_one_error(content, folder):
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(BothwaysError, match=r"1_Pooling.config\.json"):
        read_program_config(folder, 20)


@pytest.mark.parametrize(
    "outside", ["../outside", "{absolute}", "a/../../outside", "..", "x" * 5000]
)
def test_modules_are_not_followed_out_of_the_folder(outside, folder):
    secret = folder.parent / "outside"
    secret.mkdir()
    (secret / "config.json").write_text('{"pooling_mode": "a secret"}')
    path = outside.format(absolute=secret.absolute())
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(FolderError, match="must be in the model's folder") as caught:
        read_program_config(folder, 20)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", [10**9, 9_000])
@pytest.mark.parametrize(
    "key", ["num_labels", "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "max_position_embeddings"]
)  # fmt: skip
def test_huge_sizes_are_one_error_soon(key, value, folder):
    change_settings(folder, **{key: value})
    start = time.process_time()
    with pytest.raises(FolderError) as caught:
        load_model(folder)
    assert time.process_time() - start < 5
    assert Path(caught.value.where).parent == folder


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_one_error(number, tmp_path):
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["encoder.layer.0.output.dense.weight"][1, 2] = number
        return tensors

    place = folder_of(peer("Bert", "Model"), tmp_path / "theirs", spoil)
    with pytest.raises(FolderError, match="NaN or infinity in 1 of its tensors:"):
        load_model(place)


def test_weights_whose_sum_overflows_are_finite(tmp_path):
    def fill(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["encoder.layer.0.output.dense.weight"].fill_(3e38)
        return tensors

    load_model(folder_of(peer("Bert", "Model"), tmp_path / "theirs", fill))


def test_many_empty_tensors_take_little_time():
    """As in a file with many tensors that no model has, and with old names next to new ones."""
    names = [f"bert.encoder.layer.{at}.extra.weight" for at in range(10_000)]
    names += [f"{at}.{kind}" for at in range(5_000) for kind in ("gamma", "weight")]
    start = time.process_time()
    report = plan_loading(BERT.keys, {}, dict.fromkeys(names, (0,)), ())
    assert len(report.unused) == len(names)
    assert str(report)
    assert time.process_time() - start < 3


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{at}" for at in range(20))]


def with_vocabulary(folder: Path, words: list[str]) -> Path:
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return folder


def saved(folder: Path) -> Path:
    config = EncoderConfig(vocab=len(WORDS), width=8, depth=1, heads=2, intermediate_size=8)
    save_model(folder, Model(config, (MaskedHead(),)))
    return with_vocabulary(folder, WORDS)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda words: words[:-3], "has 22 tokens, and the model's embedding 25 rows"),
        (lambda words: [*words, "x"], "tokenizer has 26 ids, and the model's embedding 25 rows"),
        (lambda words: [*words[:10], "[CLS]", *words[11:]], r"has several lines for \[CLS\]"),
    ],
)
def test_a_damaged_vocabulary_is_refused(spoil, message, tmp_path):
    folder = saved(tmp_path / "model")
    assert load_model(folder).tokenizer.size == len(WORDS)
    with_vocabulary(folder, spoil(WORDS))
    with pytest.raises(FolderError, match=message):
        _ = load_model(folder).tokenizer


def test_the_vocabulary_is_the_one_that_was_saved(tmp_path):
    folder = saved(tmp_path / "model")
    loaded = load_model(folder)
    save_model(tmp_path / "ours", loaded.model, loaded.tokenizer)
    again = load_model(tmp_path / "ours")
    assert again.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    assert again.extra == {}
    words = [*WORDS[:5], *reversed(WORDS[5:])]
    other = Tokenizer.load(with_vocabulary(folder, words) / "vocab.txt")
    other.save(tmp_path / "ours")
    with pytest.raises(FolderError, match="holds another vocabulary than the model was saved with"):
        _ = load_model(tmp_path / "ours").tokenizer


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
)
@pytest.mark.parametrize("kind", ["pipe", "device", "size"])
def test_files_without_an_end_are_refused(name, kind, tmp_path):
    folder = make_folder(tmp_path / "bert")
    file = folder / name
    if name == "vocab.txt":
        (folder / "tokenizer.json").unlink(missing_ok=True)
    file.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "size":
            with file.open("wb") as sparse:
                sparse.truncate(2**40)
    with pytest.raises(BothwaysError) as error:
        _ = load_model(folder).tokenizer
    assert str(error.value.where) in {str(file), str(folder)}


class Bomb:
    """What a pickle can do to who opens it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {BOMBED}",)


BOMBED = "bombed"


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": None}, "names no model_type"),
    ({"id2label": {"1": "a"}}, "id2label must name the outputs 0, 1, 2"),
    ({"id2label": ["a"]}, "id2label must name the outputs 0, 1, 2"),
    ({"id2label": {"0": None}}, "id2label must name the outputs 0, 1, 2"),
    ({"id2label": {}}, "must have 1 to 1,000,000 outputs, not 0"),
    ({"num_labels": -1}, "must have 1 to 1,000,000 outputs, not -1"),
    ({"architectures": 5}, "architectures must be a list, not 5"),
    ({"problem_type": "guess"}, "problem_type 'guess' has no counterpart"),
    ({"classifier_dropout": 1.5}, "heads.labels.dropout: must be at least 0 and below 1"),
    ({"is_decoder": True}, "is_decoder True has no counterpart here"),
]
FILES = [
    ("config.json", b"{", "config.json: is not JSON"),
    ("config.json", b'{"\xff": 1}', "is not UTF-8 text"),
    ("config.json", b"[]", "holds a JSON list, not an object"),
    ("bothways.json", b'{"dropouts": [1]}', "bothways.json: dropouts must be an object"),
    ("bothways.json", b'{"untrained": 5}', "bothways.json: untrained must be a list, not 5"),
    ("bothways.json", b'{"dropouts": {"labels": "a"}}', "bothways.json: labels must be a number"),
    ("model.safetensors", b"version https://git-lfs", "unresolved Git LFS pointer"),
    ("model.safetensors", 0.5, "model.safetensors: is not a complete safetensors"),
    ("model.safetensors", 0, "is not a complete safetensors file"),
    ("model.safetensors", None, "holds no weights: none of model.saf"),
    ("config.json", None, "is not a model folder: it has no config.json"),
]
PICKLES: list[tuple[Callable[[], object], str]] = [
    (lambda: {"a": Bomb()}, "pytorch_model.bin: is refused: it is not a plain pickle"),
    (lambda: peer("Bert", "Model"), "is refused: it is not a plain pickle"),
    (lambda: [torch.zeros(2)], "is refused: it holds more than dense tensors"),
    (lambda: {"state": {}}, "is refused: it holds more than dense tensors by name"),
    (lambda: {1: torch.zeros(2)}, "more than dense tensors by name"),
    (lambda: {"a": torch.eye(2).to_sparse()}, "more than dense tensors by name"),
    (lambda: {"a": torch.zeros(2, device="meta")}, "more than dense tensors"),
]
SHARD = "model-00001-of-00001.safetensors"
INDEXES: list[tuple[dict[str, Any], str]] = [
    ({}, "has no weight_map from tensors to files"),
    ({"weight_map": {"a": "model-2.safetensors"}}, "names a shard that is not"),
    ({"weight_map": {"a": "x" * 5_000}}, "names a shard that is not a .safetensors file"),
    ({"weight_map": {"a": "model.bin"}}, "names a shard that is not a .safetensors file"),
    ({"weight_map": {"a": "../x"}}, "in its folder: '../x'"),
    ({"weight_map": {"a": 3}}, "in its folder: 3"),
    ({"weight_map": {"a": SHARD}}, f"says that {SHARD} holds a, which it does not"),
]


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(BothwaysError, match=re.escape(message)):
        load_model(folder)


@pytest.mark.parametrize(("changes", "message"), SETTINGS)
def test_bad_settings_are_refused(changes, message, folder):
    change_settings(folder, **changes)
    assert_refused(folder, message)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_a_user_may_not_read_are_not_called_incomplete(name, folder, monkeypatch):
    usual = Path.open
    (folder / "model.safetensors").rename(folder / name)

    def open_file(path: Path, *arguments: Any, **settings: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return usual(path, *arguments, **settings)

    monkeypatch.setattr(Path, "open", open_file)
    assert_refused(folder, f"{name}: permission denied")


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_files_that_lack_or_damage_the_model_are_refused(name, content, message, folder):
    """Content is bytes, the share of the file that is left, or nothing for a file that is not there."""
    match content:
        case bytes():
            (folder / name).write_bytes(content)
        case None:
            (folder / name).unlink()
        case _:
            truncate(folder / name, content)
    assert_refused(folder, message)


@pytest.mark.parametrize(("build", "message"), PICKLES)
def test_pickles_that_hold_more_than_tensors_are_refused(build, message, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder / "model.safetensors").unlink()
    torch.save(build(), folder / "pytorch_model.bin")
    assert_refused(folder, message)
    assert not Path(BOMBED).exists()


@pytest.mark.parametrize(("index", "message"), INDEXES)
def test_a_bad_index_of_shards_is_refused(index, message, folder):
    (folder / "model.safetensors").rename(folder / SHARD)
    torch.save({"a": torch.zeros(2)}, folder / "model.bin")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(folder, message)


@pytest.mark.parametrize("share", [0.02, 0.7, 0.99])
@pytest.mark.parametrize("new", [True, False])
def test_a_truncated_pickle_is_refused(share, new, tmp_path):
    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    truncate(folder / "pytorch_model.bin", share)
    with pytest.raises(FolderError, match="is refused"):
        load_model(folder)
