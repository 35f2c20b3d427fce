"""Weights are copies of their file: no write reaches the file, none of the file reaches the model, in memory of one copy."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bothways.core.batch import Batch, Layout
from bothways.core.errors import FolderError
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.weight_files import open_weights
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.heads import MaskedHead, PairHead, PoolerHead
from bothways.model.model import Model
from bothways.training.optimizers import AdamW, build_optimizer, update
from child_processes import measure_opening
from toy_training import exit_code

SMALL = EncoderConfig(60, 16, 2, 2, 24, dropout=Dropouts(0.0, 0.0))


def vectors(model: Model) -> Tensor:
    layout = Layout.of([5, 3])
    ids = torch.arange(8) + 5
    result: Tensor = model.encoder(Batch(ids, torch.zeros_like(ids), layout)).last
    return result


def saved(folder: Path, config: EncoderConfig = SMALL) -> Path:
    save_model(folder, Model(config, (MaskedHead(), PoolerHead(), PairHead())))
    return folder


def test_training_changes_no_file(tmp_path):
    """Neither the weights' nor those of a model that was opened beside it."""
    file = saved(tmp_path / "model") / "model.safetensors"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    trained, beside = load_model(file.parent).model, load_model(file.parent).model
    expected = vectors(beside).detach().clone()
    optimizer = build_optimizer(AdamW(lr=0.1), trained.named_parameters())
    vectors(trained.train()).square().sum().backward()
    update(optimizer, None)
    assert not torch.allclose(vectors(trained), expected, atol=1e-3)
    assert torch.equal(vectors(beside), expected)
    assert torch.equal(vectors(load_model(file.parent).model), expected)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before


def test_a_model_outlives_its_folder(tmp_path):
    """One that is replaced, as `save_model` does it, also by the model's own next weights; and one that is removed."""
    folder = saved(tmp_path / "model")
    opened = load_model(folder).model
    expected = vectors(opened).detach().clone()
    saved(folder)
    assert torch.equal(vectors(opened), expected)
    assert not torch.equal(vectors(load_model(folder).model), expected)
    with torch.no_grad():
        opened.encoder.embedding.token.weight.mul_(2)
    save_model(folder, opened)
    assert torch.equal(vectors(load_model(folder).model), vectors(opened))
    for file in folder.iterdir():
        file.unlink()
    assert torch.isfinite(vectors(opened)).all()


@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_no_two_parameters_share_memory(tmp_path, kind):
    folder = saved(tmp_path / "model")
    if kind == "pickle":
        weights = open_weights(folder)
        whole = torch.cat([weights.read(name).flatten() for name in weights.shapes])
        parts = whole.split([weights.read(name).numel() for name in weights.shapes])
        views = {
            name: part.view(shape)
            for (name, shape), part in zip(weights.shapes.items(), parts, strict=True)
        }
        torch.save(views, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    model = load_model(folder).model
    named = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for name, parameter in named.items():
        with torch.no_grad():
            parameter.add_(1)
        for other, value in before.items():
            assert torch.equal(named[other], value) == (other != name)
        with torch.no_grad():
            parameter.copy_(before[name])


def test_files_that_are_overwritten_in_place_leave_the_model_as_it_was(tmp_path):
    """As `cp` does, which keeps the file and changes its bytes; a mapped file changes the model, or ends the program."""
    folder = saved(tmp_path / "model")
    file = folder / "model.safetensors"
    opened = load_model(folder).model
    expected = vectors(opened).detach().clone()
    with file.open("r+b") as stream:
        stream.seek(4096)
        stream.write(bytes(file.stat().st_size - 4096))
    assert torch.equal(vectors(opened), expected)
    with file.open("r+b") as stream:
        stream.truncate(100)
    assert torch.equal(vectors(opened), expected)


@pytest.mark.parametrize("change", ["written", "shortened", "replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, change):
    file = saved(tmp_path / "model") / "model.safetensors"
    weights = open_weights(file.parent)
    name = next(iter(weights.shapes))
    weights.read(name)
    if change == "replaced":
        shutil.copy(file, tmp_path / "other")
        (tmp_path / "other").replace(file)
    else:
        size = 100 if change == "shortened" else file.stat().st_size
        with file.open("r+b") as stream:
            stream.truncate(size)
        os.utime(file, ns=(1, 1))
    with pytest.raises(FolderError) as caught:
        weights.read(name)
    assert caught.value.where == file


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_takes_the_memory_of_one_copy(tmp_path):
    """Of 32 MiB of embedding and a small block, with no second copy on the way."""
    saved(tmp_path / "small")
    saved(tmp_path / "model", EncoderConfig(2**15, 256, 1, 4, 1024))
    assert exit_code(measure_opening, tmp_path) == 0
    assert float((tmp_path / "peak").read_text()) < 32 + 16
