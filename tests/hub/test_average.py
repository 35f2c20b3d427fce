"""The mean of the weights of model folders, and of the checkpoints of a run."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import bothways
from bothways.core.errors import FolderError, ResourceError
from bothways.core.files import file_digest
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.heads import LabelHead
from bothways.model.model import Model
from bothways.training.saved_state import IN_PARTS
from commands import run_line
from model_folders import change_settings


def save(folder, tokenizer, seed, *, labels=("bad", "good"), depth=2, heads=2, **settings):
    torch.manual_seed(seed)
    config = EncoderConfig(tokenizer.size, 16, depth, heads, 32, initial_range=0.3, **settings)
    model = Model(config, [LabelHead(len(labels))])
    bothways.save_model(
        folder, model, tokenizer, labels=labels, problem="single_label_classification"
    )
    return folder


def test_the_mean_of_folders_is_that_of_each_tensor(tokenizer, tmp_path):
    folders = [save(tmp_path / f"seed-{n}", tokenizer, n) for n in range(3)]
    run_line("average", *map(str, folders), "--out", str(tmp_path / "mean"))
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    assert mean.keys() == weights[0].keys()
    for name, values in mean.items():
        expected = np.mean([part[name].astype(np.float64) for part in weights], axis=0)
        assert np.array_equal(values, expected.astype(values.dtype)), name
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "mean")
    assert opened.config.id2label == {0: "bad", 1: "good"}
    assert bothways.load(tmp_path / "mean")("the cat sleeps").label in ("bad", "good")
    record = json.loads((tmp_path / "mean" / "bothways.json").read_text())
    assert record["average"] == [str(folder) for folder in folders]
    assert "the mean of 3 models" in (tmp_path / "mean" / "README.md").read_text()


def test_what_is_of_the_first_models_weights_is_not_copied(tokenizer, tmp_path):
    folders = [save(tmp_path / f"seed-{n}", tokenizer, n) for n in range(2)]
    (folders[0] / "onnx").mkdir()
    (folders[0] / "onnx" / "model.onnx").write_text("a graph of the first weights")
    (folders[0] / "README.md").write_text("accuracy 0.92")
    change_settings(folders[0], "bothways.json", metrics={"accuracy": 0.92})
    bothways.average(folders, tmp_path / "mean")
    assert not (tmp_path / "mean" / "onnx").exists()
    assert "0.92" not in (tmp_path / "mean" / "README.md").read_text()
    assert "metrics" not in json.loads((tmp_path / "mean" / "bothways.json").read_text())


def test_further_layers_of_sentence_transformers_must_be_equal(tokenizer, tmp_path):
    """They are copied; a mean of the encoders with the layer of one of them would be no mean."""
    folders = [save(tmp_path / f"seed-{n}", tokenizer, n) for n in range(2)]
    for folder in folders:
        (folder / "2_Dense").mkdir()
        (folder / "2_Dense" / "model.safetensors").write_bytes(b"equal")
        (folder / "2_Dense" / "of" / "notebooks").mkdir(parents=True)
        (folder / "2_Dense" / "of" / "notebooks" / "notes").touch()
    (folders[0] / "2_Dense" / "model.safetensors").chmod(0o444)
    bothways.average(folders, tmp_path / "mean")
    copy = tmp_path / "mean" / "2_Dense" / "model.safetensors"
    assert copy.read_bytes() == b"equal"
    assert copy.stat().st_mode & 0o200  # users who may not write there could not flush it
    (folders[1] / "2_Dense" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(FolderError, match=r"2_Dense/model\.safetensors"):
        bothways.average(folders, tmp_path / "mean")


def test_poolings_must_be_equal_in_whatever_form(tokenizer, tmp_path):
    folders = [save(tmp_path / f"seed-{n}", tokenizer, n) for n in range(2)]
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()
    ]
    forms = {"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean", "include_prompt": True}
    for folder, form in zip(folders, forms, strict=True):
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(form))
    bothways.average(folders, tmp_path / "mean")
    change_settings(folders[1], "1_Pooling/config.json", pooling_mode="cls")
    with pytest.raises(FolderError, match=r"seed-1: differs from .* in pooling"):
        bothways.average(folders, tmp_path / "mean")


def test_a_part_of_a_folder_of_sentence_transformers_is_refused(tokenizer, tmp_path):
    save(tmp_path / "st" / "0_Transformer", tokenizer, 0)
    parts = [
        {
            "idx": 0,
            "name": "0",
            "path": "0_Transformer",
            "type": "sentence_transformers.models.Transformer",
        }
    ]
    (tmp_path / "st" / "modules.json").write_text(json.dumps(parts))
    with pytest.raises(FolderError, match="whose other parts would be lost"):
        bothways.average([tmp_path / "st"] * 2, tmp_path / "mean")


def test_folders_of_no_own_weights_or_class_are_refused(tokenizer, tmp_path):
    folders = [save(tmp_path / f"seed-{n}", tokenizer, n) for n in range(2)]
    counts = load_file(folders[0] / "model.safetensors") | {"position_ids": np.arange(9)}
    save_file(counts, folders[0] / "model.safetensors")
    save_file(counts | {"position_ids": np.ones(9, int)}, folders[1] / "model.safetensors")
    with pytest.raises(FolderError, match=r"seed-1: differs from .*position_ids, which has no me"):
        bothways.average(folders, tmp_path / "mean")
    change_settings(folders[0], "config.json", architectures=["BertForOther"])
    with pytest.raises(FolderError, match="names a class of transformers that is not known here"):
        bothways.average([folders[0]] * 2, tmp_path / "mean")
    (folders[0] / "adapter_config.json").write_text("{}")
    with pytest.raises(FolderError, match="is an adapter, and the mean of low-rank changes"):
        bothways.average([folders[0]] * 2, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


def share_out(step):
    """Save a checkpoint as two ranks do that share the model."""
    (step / "shards").mkdir()
    tensors = load_file(step / "model.safetensors")
    halves = {name: np.array_split(tensor, 2) for name, tensor in tensors.items()}
    for rank in range(2):
        rows = {name: half[rank] for name, half in halves.items()}
        save_file(rows, step / f"shards/{rank:05}.safetensors")
    (step / "model.safetensors").unlink()
    names = ("state.pt", "progress.json", "shards/00000.safetensors", "shards/00001.safetensors")
    digests = {name: file_digest(step / name) for name in names}
    change_settings(step, "manifest.json", format=IN_PARTS, files=digests)


@pytest.mark.parametrize("model", ["albert-base-v2", "modernbert-base"])
def test_the_mean_of_a_runs_checkpoints_is_that_of_its_weights(corpus, tmp_path, model):
    shape = {"width": 16, "heads": 2, "depth": 3, "intermediate_size": 24, "embedding": None}
    run = bothways.pretrain(
        corpus, model, "masked-lm", until="3 steps", out=tmp_path / "run",
        training={"save": "1 steps", "keep": {"last": 3}}, encoder=shape, phases=[{"length": 16}],
    )  # fmt: skip
    with pytest.raises(ResourceError, match="is also an input"):
        bothways.average(tmp_path / "run", run.folder)
    names = bothways.average(tmp_path / "run", tmp_path / "mean")
    assert [name.rpartition("-")[2] for name in names] == ["1", "2", "3"]
    mean = bothways.load_model(tmp_path / "mean").state_dict()
    parts = [load_file(tmp_path / "run" / f"step-{n}" / "model.safetensors") for n in (1, 2, 3)]
    for name in parts[0]:
        expected = np.mean([part[name].astype(np.float64) for part in parts], axis=0)
        actual = mean[name.removeprefix("model.")].numpy()
        assert np.array_equal(actual, expected.astype(np.float32)), name
    step = str(tmp_path / "run/step-3")
    last = bothways.average([step, run.folder], tmp_path / "same")
    assert len(last) == 2
    assert bothways.average(step, tmp_path / "one") == [step]
    assert "1 models" not in (tmp_path / "one" / "README.md").read_text()
    share_out(tmp_path / "run/step-3")
    bothways.average(step, tmp_path / "parts")
    for name in ("same", "one", "parts"):
        same = bothways.load_model(tmp_path / name).state_dict()
        assert all(torch.equal(same[n], value) for n, value in run.model.state_dict().items())


def test_checkpoints_of_phases_with_other_rotary_bases_are_refused(corpus, tmp_path):
    shape = {"width": 16, "heads": 2, "depth": 2, "intermediate_size": 24, "embedding": None}
    run = bothways.pretrain(
        corpus, "modernbert-base", "masked-lm", until="4 steps", out=tmp_path / "run",
        training={"save": "1 steps", "keep": {"last": 9}}, encoder=shape, progress=False,
        phases=[{"length": 16, "share": 0.5, "bases": [100.0]}, {"length": 16, "share": 0.5}],
    )  # fmt: skip
    steps = [tmp_path / "run" / f"step-{n}" for n in (1, 2, 3, 4)]
    for models in (steps, steps[:2], steps[0], [steps[3], steps[1]], [steps[0], run.folder]):
        with pytest.raises(FolderError, match="has other bases of rotary positions"):
            bothways.average(models, tmp_path / "mean")
    bothways.average([steps[3], run.folder], tmp_path / "mean")


def test_models_that_differ_in_more_than_weights_are_refused(tokenizer, corpus, tmp_path):
    first = save(tmp_path / "first", tokenizer, 0)
    for other, difference in (
        (save(tmp_path / "labels", tokenizer, 1, labels=("no", "yes")), "id2label"),
        (save(tmp_path / "deep", tokenizer, 1, depth=3), r"bert\.encoder\.layer\.2"),
        (save(tmp_path / "heads", tokenizer, 1, heads=4), "heads"),  # with tensors of equal shapes
        (save(tmp_path / "order", tokenizer, 1, norm_epsilon=1e-6), "norm_epsilon"),
    ):
        with pytest.raises(FolderError, match=f"differs from .*{difference}"):
            bothways.average([first, other], tmp_path / "mean")
    save(tmp_path / "dropout", tokenizer, 1, dropout=Dropouts(0.3, 0.3))
    bothways.average([first, tmp_path / "dropout"], tmp_path / "mean of dropouts")
    for alone, message in (
        ([first], "first: is one model"),
        ([tmp_path], "has 0 checkpoints"),
        ([tmp_path / "none"], "none: is not the folder of a run"),
        ([], "^models: "),
    ):
        with pytest.raises(FolderError, match=message):
            bothways.average(alone, tmp_path / "mean")
    bothways.pretrain(
        corpus, EncoderConfig(9, 16, 1, 2, 32), "masked-lm", until="2 steps", out=tmp_path / "run",
        training={"save": "1 steps", "keep": {"last": 2}}, phases=[{"length": 16}],
    )  # fmt: skip
    step = tmp_path / "run" / "step-1"
    for load in (bothways.load, bothways.load_model):
        with pytest.raises(FolderError, match=rf"average\b.*{step}.*DIR") as raised:
            load(step)
        assert raised.value.where == step
    (tmp_path / "run" / "model").rename(tmp_path / "moved")
    with pytest.raises(FolderError, match="is not finished"):
        bothways.average([tmp_path / "run"], tmp_path / "mean")
    (tmp_path / "moved").rename(tmp_path / "run" / "model")
    last, made = tmp_path / "run" / "step-2", tmp_path / "run/model/model.safetensors"
    save_file(load_file(made) | {"extra": np.ones(1)}, made)
    with pytest.raises(FolderError, match="step-2: has no tensor for extra, which the model"):
        bothways.average([last, last], tmp_path / "mean")
    (tmp_path / "run/model/2_Dense").mkdir()
    (tmp_path / "run/model/2_Dense/model.safetensors").touch()
    with pytest.raises(FolderError, match="step-2: is of a model with 2_Dense/model"):
        bothways.average([last, last], tmp_path / "mean")
    weights = tmp_path / "run" / "step-1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(bothways.BothwaysError, match="damaged"):
        bothways.average([tmp_path / "run"], tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
    with pytest.raises(bothways.BothwaysError):  # it would replace what it reads
        bothways.average([first, first], first)
