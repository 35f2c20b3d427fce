"""Adapters of PEFT: read as the weights that they make, and written so that PEFT computes the same."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bothways
from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError, FolderError
from bothways.finetuning.lora import LoRA, LoRALinear, add_changes, merge_changes
from bothways.hub.adapter import TrainedAdapter
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.provenance import digest_of_model
from bothways.hub.weight_files import Weights, open_weights
from bothways.lab.sweeps.significance import folders
from bothways.model.config import EncoderConfig, Gated
from bothways.model.heads import LabelHead, MaskedHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.text.tokenizer import Tokenizer
from commands import run_line
from drawn_settings import draw_settings
from model_folders import change_settings
from random_weights import perturb
from spread import in_turn
from toy_folder import make_folder

pytestmark = [  # of peft itself
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]
IDS = torch.tensor([2, 7, 5, 9, 11, 3])
FAMILIES = ("bert", "roberta", "modernbert", "deberta-v2")
SETTINGS = "adapter_config.json"


def make_base(folder: Path, kind: str = "bert", name: str = "AutoModel", **settings: Any) -> Path:
    """A random model of transformers, every parameter moved away from where it starts."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**draw_settings(kind, 0, 0.0), **settings})
    config.pad_token_id = 0
    model = getattr(transformers, name).from_config(config)
    perturb(model, 0.1).save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, name: str, **settings: Any) -> nn.Module:
    """Save a random adapter of a random model; return the model with it, in evaluation mode."""
    cls = getattr(transformers, name)
    labels = {"num_labels": 3} if "Classification" in name else {}
    model = cls.from_pretrained(base, **labels)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    adapted.eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder)
    return adapted


def add_random_changes(model: Model, lora: LoRA) -> None:
    add_changes(model, lora, 0)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.out, std=0.2)


def batch() -> Batch:
    return Batch(IDS, torch.zeros_like(IDS), Layout.of([len(IDS)]))


def logits(folder: Path, kind: str = "labels") -> Tensor:
    model = load_model(folder).model
    with torch.no_grad():
        if kind == "labels":
            return model.read(kind, batch())
        return model(batch(), heads=[kind]).logits[kind]


def reference(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input_ids=IDS[None]).logits[0]
    return output


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual.view(expected.shape), expected, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("kind", FAMILIES)
def test_classifier_equals_peft(kind, tmp_path):
    """The base has the head, parts of which "all-linear" changes."""
    name = "AutoModelForSequenceClassification"
    base = make_base(tmp_path / "base", kind, name, num_labels=3)
    expected = make_adapter(
        base, tmp_path / "adapter", name, task_type="SEQ_CLS",
        target_modules="all-linear", r=3, lora_alpha=5,
    )  # fmt: skip
    loaded = load_model(tmp_path / "adapter")
    assert loaded.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert "changed" in loaded.report.adapter
    assert not loaded.report.faults
    assert_equal(logits(tmp_path / "adapter"), reference(expected))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "rank_pattern": {"value": 2}, "alpha_pattern": {"0.attention.*": 3}},
        {"target_modules": ["word_embeddings", "query"]},
        {"target_modules": ["pooler.dense", "key"], "modules_to_save": ["classifier", "layer.1"]},
        {"layers_to_transform": [1], "fan_in_fan_out": False, "init_lora_weights": "gaussian"},
    ],
)
def test_settings_of_lora(settings, tmp_path):
    base = make_base(tmp_path / "base")
    settings = {"target_modules": ["query", "value"], "task_type": "SEQ_CLS", **settings}
    name = "AutoModelForSequenceClassification"
    expected = make_adapter(base, tmp_path / "adapter", name, **settings)
    assert_equal(logits(tmp_path / "adapter"), reference(expected))


@pytest.mark.parametrize(
    ("task", "name", "kind"),
    [("TOKEN_CLS", "AutoModelForTokenClassification", "tags"), (None, "BertForMaskedLM", "masked")],
)
def test_other_classes(task, name, kind, tmp_path):
    base = make_base(tmp_path / "base", name="AutoModelForMaskedLM")
    settings = {"task_type": task, "target_modules": ["query"]}
    expected = make_adapter(base, tmp_path / "adapter", name, **settings)
    assert_equal(logits(tmp_path / "adapter", kind), reference(expected))


def test_tied_embedding_is_refused(tmp_path):
    base = make_base(tmp_path / "base", name="AutoModelForMaskedLM")
    make_adapter(base, tmp_path / "adapter", "BertForMaskedLM", target_modules=["word_embeddings"])
    with pytest.raises(FolderError) as caught:
        load_model(tmp_path / "adapter")
    assert caught.value.where == tmp_path / "adapter" / "adapter_model.safetensors"
    assert "not the output layer that the base model ties to it" in caught.value.what


def test_encoder_with_the_tokenizer_of_its_base(tmp_path, monkeypatch):
    """A relative path of the base may begin at the adapter; the base's content counts in digests."""
    make_folder(tmp_path / "base")
    # A folder of that name next to the current one comes first, once there is one.
    (tmp_path / "some" / "where").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "some" / "where")
    adapted = make_adapter(
        tmp_path / "base", tmp_path / "adapter", "AutoModel",
        task_type="FEATURE_EXTRACTION", target_modules=["query", "dense"],
    )  # fmt: skip
    change_settings(tmp_path / "adapter", SETTINGS, base_model_name_or_path="../base")
    opened = []

    def open_once(folder: Path, names: tuple[str, ...]) -> Weights:
        opened.append(folder)
        return open_weights(folder, names)

    with monkeypatch.context() as patch:
        patch.setattr("bothways.hub.adapter.open_weights", open_once)
        loaded = bothways.load_model(tmp_path / "adapter")
    assert opened == [tmp_path / "adapter"]
    batch = loaded.tokenizer.batch(["the good film"])
    with torch.no_grad():
        expected = adapted(input_ids=batch.ids[None]).last_hidden_state[0]
        assert_equal(loaded(batch).last_hidden_state, expected)
    before = digest_of_model(str(tmp_path / "adapter"))
    (tmp_path / "base/vocab.txt").write_text("changed")
    assert digest_of_model(str(tmp_path / "adapter")) != before
    (tmp_path / "some" / "base").mkdir()
    with pytest.raises(FolderError, match="has no config") as caught:
        load_model(tmp_path / "adapter")
    assert caught.value.where == Path("../base")


def test_texts_are_cut_at_the_length_of_the_tokenizer_that_is_read(tmp_path):
    base, folder = make_folder(tmp_path / "base"), tmp_path / "adapter"
    make_adapter(base, folder, "AutoModel", target_modules=["query"])
    Tokenizer.load(base).save(base, positions=16)
    assert bothways.load(folder, "embed").task_model.length == 16
    Tokenizer.load(base).save(folder, positions=8)
    assert bothways.load(folder, "embed").task_model.length == 8


@pytest.fixture
def adapter(plain, tmp_path) -> Path:
    """A copy of the plain adapter, to be changed."""
    return shutil.copytree(plain / "adapter", tmp_path / "adapter")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A base in the folder "base", and an adapter of its queries in the folder "adapter"."""
    folder = tmp_path_factory.mktemp("plain")
    base = make_base(folder / "base")
    make_adapter(base, folder / "adapter", "BertModel", target_modules=["query"])
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [1]},
        {"a_setting_of_tomorrow": 3},
        {"revision": "v2"},
        {"task_type": "SEQ_2_SEQ_LM", "auto_mapping": None},
        {"r": 5},
        {"lora_alpha": "8"},
        {"task_type": ["SEQ_CLS"]},
        {"use_rslora": "no"},
        {"rank_pattern": [1]},
        {"rank_pattern": {"x(": 3}},
        {"alpha_pattern": "query"},
        {"base_model_name_or_path": None},
        {"base_model_name_or_path": ""},
        {"base_model_name_or_path": "./elsewhere"},
    ],
)
def test_unsupported_settings_are_refused(changes, adapter):
    change_settings(adapter, SETTINGS, **changes)
    with pytest.raises(FolderError) as caught:
        load_model(adapter)
    assert caught.value.where == adapter / SETTINGS
    key = next(iter(changes))
    if key not in ("r", "lora_alpha", "rank_pattern", "base_model_name_or_path"):
        assert key in caught.value.what


def test_a_head_without_outputs_is_refused(adapter):
    file = adapter / "adapter_model.safetensors"
    scalar = {"base_model.model.classifier.weight": torch.tensor(0.0)}
    save_file(load_file(file) | scalar, file)
    change_settings(adapter, SETTINGS, task_type="SEQ_CLS")
    with pytest.raises(FolderError, match=r"classifier\.weight is \[\], not \[2, "):
        load_model(adapter)


@pytest.mark.parametrize(("rename", "change", "message"), [
    (str, lambda tensor: tensor.to(torch.int8), "as int8: quantised weights cannot be read"),
    (str, lambda tensor: tensor.to(torch.float8_e4m3fn), "as float8_e4m3fn: quantised weights"),
    (str, lambda tensor: tensor.to(torch.float8_e8m0fnu), "as F8_E8M0, which cannot be read"),
    (str, torch.flatten, r"factors of .*query that are not matrices"),
    (lambda name: name.replace("lora_A", "lora_C"), torch.clone, "holds .*lora_C.*, which is no tensor of L"),
    (lambda name: name.replace("query.lora_A", "odd"), torch.clone, r"holds .*\.odd.*, which is no tensor of"),
    (lambda name: name * ("lora_A" in name), torch.clone, "holds one factor of .*query without the other"),
    (lambda name: re.sub("layer.0", "layer.7", name), torch.clone, "changes .*layer.7.*model does not have it"),
])  # fmt: skip
def test_malformed_factors_are_refused(rename, change, message, adapter):
    file = adapter / "adapter_model.safetensors"
    factors = {rename(name): change(tensor) for name, tensor in load_file(file).items()}
    factors.pop("", None)
    save_file(factors, file)
    with pytest.raises(FolderError, match=message) as caught:
        load_model(adapter)
    assert caught.value.where == file


def test_embeddings_of_another_number_of_tokens_are_refused(plain, adapter):
    file = adapter / "adapter_model.safetensors"
    name = "embeddings.word_embeddings.weight"
    tokens, width = load_file(plain / "base" / "model.safetensors")[name].shape
    resized = {f"base_model.model.{name}": torch.zeros(tokens + 2, width)}
    save_file(load_file(file) | resized, file)
    with pytest.raises(FolderError, match=rf"\[{tokens + 2}, {width}\], .*\[{tokens}, ") as caught:
        load_model(adapter)
    assert caught.value.where == file


def test_the_base_may_be_a_model_of_the_hub(plain, adapter, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(plain / "base"))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    change_settings(adapter, SETTINGS, base_model_name_or_path="me/bert")
    assert "changed" in load_model(adapter).report.adapter


def test_another_base_is_refused(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "first")
    own = EncoderConfig(60, 16, 1, 2, 24, position=Learned(9), mlp=Gated())
    save_model(tmp_path / "own", Model(own, (MaskedHead(),)))
    for base, message in (("first", "that is an adapter itself"), ("own", "in our own format")):
        change_settings(adapter, SETTINGS, base_model_name_or_path=str(tmp_path / base))
        with pytest.raises(FolderError, match=message) as caught:
            load_model(adapter)
        assert caught.value.where == adapter / SETTINGS
    other = make_base(tmp_path / "other", hidden_size=48)
    change_settings(adapter, SETTINGS, base_model_name_or_path=str(other))
    with pytest.raises(FolderError) as caught:
        load_model(adapter)
    assert "query" in caught.value.what
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FolderError) as caught:
        load_model(adapter)
    assert caught.value.where == adapter


@pytest.mark.parametrize(
    ("kind", "matrices"), in_turn([(value,) for value in FAMILIES], ["all", "query_value"])
)
def test_written_adapter_equals_peft(kind, matrices, tmp_path):
    base = make_base(tmp_path / "base", kind)
    loaded = load_model(base, heads=())
    heads = (LabelHead(3),) if kind != "bert" else (PoolerHead(), LabelHead(3))
    model = Model(loaded.model.config, heads, loaded.model.encoder)
    model.kept = loaded.model.kept
    perturb(model.heads, 0.1)
    lora = LoRA(3, 5.0, matrices)
    add_random_changes(model, lora)
    adapter = TrainedAdapter(str(base), lora.alpha / lora.rank, merge_changes(model))
    save_model(tmp_path / "ours", model, labels=("a", "b", "c"), adapter=adapter)
    assert not (tmp_path / "ours/config.json").exists()
    with torch.no_grad():
        expected = model.eval().read("labels", batch())
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    assert_equal(reference(theirs)[None], expected)
    assert_equal(logits(tmp_path / "ours"), expected)
    assert load_model(tmp_path / "ours").labels == ("a", "b", "c")


def test_transposed_weights(tmp_path):
    """GPT-2 has its matrices the other way round, which PEFT calls fan_in_fan_out."""
    base = make_base(tmp_path / "base", "gpt2")
    targets = ["c_attn", "c_proj", "c_fc"]
    adapted = make_adapter(base, tmp_path / "adapter", "GPT2Model", target_modules=targets)
    with torch.no_grad():
        expected = adapted(input_ids=IDS[None]).last_hidden_state[0]
        assert_equal(load_model(tmp_path / "adapter").model.encoder(batch()).last, expected)
    loaded = load_model(base)
    add_random_changes(loaded.model, LoRA(2, 6.0, "query_value"))
    adapter = TrainedAdapter(str(base), 3.0, merge_changes(loaded.model))
    save_model(tmp_path / "ours", loaded.model, adapter=adapter)
    plain = transformers.GPT2Model.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(plain, tmp_path / "ours")
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS[None]).last_hidden_state[0]
        assert_equal(loaded.model.encoder(batch()).last, expected)


def test_run_with_adapter_only(tmp_path):
    base = make_folder(tmp_path / "base")
    train = [{"tokens": ["the", "good", "film"], "tags": ["O", "B-X", "O"]}] * 8
    out = tmp_path / "runs/seed-0"
    done = bothways.finetune(base, train, task="tag", out=out, epochs=1, adapter_only=True)
    folder = out / "model"
    assert done.folder == folder
    assert folders(str(out.parent)) == [str(out)]  # to be compared with others
    names = {file.name for file in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"config.json", "model.safetensors"}
    text = {"tokens": ["the", "good", "film"]}
    assert bothways.load(out)(text) == done.predictor()(text)
    again = bothways.load_model(out)
    auto = transformers.AutoModelForTokenClassification
    model = auto.from_pretrained(folder, num_labels=len(again.labels)).eval()
    packed = again.tokenizer.batch(["the good film"])
    with torch.no_grad():
        ours = again(packed).logits["tags"]
        assert_equal(ours, model(input_ids=packed.ids[None]).logits[0].view(ours.shape))
    rows = tmp_path / "train.jsonl"
    rows.write_text("\n".join(map(json.dumps, train)))
    with pytest.raises(ConfigError) as caught:  # an adapter of an adapter
        run_line("finetune", out, rows, "--task", "tag", "--epochs", 1, "--adapter-only")
    assert caught.value.where == "lora.adapter_only"
    bothways.finetune(out, train, task="tag", epochs=1, out=tmp_path / "more")
    assert (tmp_path / "more/model/model.safetensors").is_file()
