"""Every fault of a folder is one error that names the file; no code in it is ever run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bothways.core.errors import BothwaysError, FolderError
from bothways.hub.model_folder import load_model
from model_folders import change_settings, folder_of, peer, truncate


class Bomb:
    """What a pickle can do to who opens it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {BOMBED}",)


BOMBED = "bombed"


def to_pickle(folder: Path, content: object) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def to_index(folder: Path, tree: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(tree))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "is not a model folder: it has no config.json",
    ),
    "config no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json: is not JSON",
    ),
    "config in Latin-1": (
        lambda folder: (folder / "config.json").write_bytes(b'{"\xff": 1}'),
        "is not UTF-8 text",
    ),
    "config a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "holds a JSON list, not an object",
    ),
    "no family": (lambda folder: change_settings(folder, model_type=None), "names no model_type"),
    "other family": (
        lambda folder: change_settings(folder, model_type="t5"),
        "model_type 't5' is unknown",
    ),
    "odd labels": (
        lambda folder: change_settings(folder, id2label={"1": "a"}),
        "id2label must name the outputs 0, 1, 2",
    ),
    "labels a list": (
        lambda folder: change_settings(folder, id2label=["a"]),
        "id2label must name the outputs 0, 1, 2",
    ),
    "no labels": (
        lambda folder: change_settings(folder, id2label={}),
        "must have 1 to 1,000,000 outputs, not 0",
    ),
    "fewer than no labels": (
        lambda folder: change_settings(folder, num_labels=-1),
        "must have 1 to 1,000,000 outputs, not -1",
    ),
    "odd classes": (
        lambda folder: change_settings(folder, architectures=5),
        "architectures must be a list of class names, not 5",
    ),
    "odd problem": (
        lambda folder: change_settings(folder, problem_type="guess"),
        "problem_type 'guess' has no counterpart",
    ),
    "odd dropout": (
        lambda folder: change_settings(folder, classifier_dropout=1.5),
        "heads.labels.dropout: must be in",
    ),
    "a decoder": (
        lambda folder: change_settings(folder, is_decoder=True),
        "is_decoder True has no counterpart here",
    ),
    "a record of odd dropouts": (
        lambda folder: (folder / "bothways.json").write_text('{"dropouts": [1]}'),
        "bothways.json: dropouts must be an object",
    ),
    "a record of an odd dropout": (
        lambda folder: (folder / "bothways.json").write_text('{"dropouts": {"labels": "a"}}'),
        "bothways.json: labels must be a number",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds no weights: none of model.saf",
    ),
    "half a file": (
        lambda folder: truncate(folder / "model.safetensors", 0.5),
        "model.safetensors: is not a complete safetensors",
    ),
    "half a header": (
        lambda folder: truncate(folder / "model.safetensors", 0.05),
        "is not a complete safetensors file",
    ),
    "an empty file": (
        lambda folder: truncate(folder / "model.safetensors", 0),
        "is not a complete safetensors file",
    ),
    "a pointer": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"),
        "unresolved Git LFS pointer",
    ),
    "a pickle with code": (
        lambda folder: to_pickle(folder, {"a": Bomb()}),
        "pytorch_model.bin: is refused: it is not a plain pickle",
    ),
    "a pickled model": (
        lambda folder: to_pickle(folder, peer("Bert", "Model")),
        "is refused: it is not a plain pickle",
    ),
    "a pickled list": (
        lambda folder: to_pickle(folder, [torch.zeros(2)]),
        "is refused: it holds more than dense tensors",
    ),
    "a nested state": (
        lambda folder: to_pickle(folder, {"state": {}}),
        "is refused: it holds more than dense tensors by name",
    ),
    "a state by number": (
        lambda folder: to_pickle(folder, {1: torch.zeros(2)}),
        "more than dense tensors by name",
    ),
    "a sparse state": (
        lambda folder: to_pickle(folder, {"a": torch.eye(2).to_sparse()}),
        "more than dense tensors by name",
    ),
    "a state of shapes": (
        lambda folder: to_pickle(folder, {"a": torch.zeros(2, device="meta")}),
        "more than dense tensors",
    ),
    "index without map": (
        lambda folder: to_index(folder, {}),
        "has no weight_map from tensors to files",
    ),
    "index to nowhere": (
        lambda folder: to_index(folder, {"weight_map": {"a": "model-2.safetensors"}}),
        "names a shard that is not",
    ),
    "index to outside": (
        lambda folder: to_index(folder, {"weight_map": {"a": "../x"}}),
        r"not in its folder: '\.\./x'",
    ),
    "index to a number": (
        lambda folder: to_index(folder, {"weight_map": {"a": 3}}),
        "not in its folder: 3",
    ),
    "index to another": (
        lambda folder: to_index(folder, {"weight_map": {"a": "model-00001-of-00001.safetensors"}}),
        "says that model-00001-of-00001.safetensors holds a, which it does not",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
def test_a_bad_folder_is_refused_with_its_file(spoil, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = folder_of(peer("Bert", "ForSequenceClassification"), tmp_path / "theirs")
    spoil(folder)
    with pytest.raises(BothwaysError, match=message.replace("(", r"\(")):
        load_model(folder)
    assert not (tmp_path / BOMBED).exists()


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("new", [True, False])
def test_a_truncated_pickle_is_refused(share, new, tmp_path):
    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    truncate(folder / "pytorch_model.bin", share)
    with pytest.raises(FolderError, match="is refused"):
        load_model(folder)


def test_quantised_weights_are_refused(tmp_path):
    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            **tensors,
            "pooler.dense.weight": (tensors["pooler.dense.weight"] * 50).to(torch.int8),
        }

    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs", quantise)
    with pytest.raises(
        FolderError, match=r"holds pooler\.dense\.weight as int8: quantised weights cannot be read"
    ):
        load_model(folder)
