"""Folders of transformers open here with equal outputs, in every layout that their files have had."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError, FolderError
from bothways.hub.hf_config import read_hf_config
from bothways.hub.model_folder import load_model, save_model
from bothways.model.families.catalogue import FAMILIES
from bothways.model.heads import LabelHead, MaskedHead, PairHead, PoolerHead
from drawn_settings import draw_settings
from model_folders import (
    VOCAB,
    WIDTH,
    assert_same_outputs,
    change_settings,
    folder_of,
    outputs,
    peer,
    peer_outputs,
    with_decoder,
)


def renamed(*changes: tuple[str, str]) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """A change of the names of tensors, by regular expressions and their replacements."""

    def change(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [*tensors]
        for pattern, new in changes:
            names = [re.sub(pattern, new, name) for name in names]
        return dict(zip(names, tensors.values(), strict=True))

    return change


POSITIONS = {"bert.embeddings.position_ids": torch.arange(20)[None]}
COPIES = {
    "cls.predictions.decoder.weight": "a copy of encoder.embedding.token.weight",
    "cls.predictions.decoder.bias": "a copy of heads.masked.bias",
}


@pytest.mark.parametrize(
    ("name", "change", "unused"),
    [
        ("Model", renamed(("^", "bert.")), {}),
        ("ForPreTraining", renamed(("^bert.", "")), {}),
        ("ForPreTraining", renamed(("Norm.weight", "Norm.gamma"), ("Norm.bias", "Norm.beta")), {}),
        ("ForPreTraining", with_decoder, COPIES),
        ("ForMaskedLM", renamed(("predictions.bias", "predictions.decoder.bias")), {}),
        (
            "ForPreTraining",
            lambda tensors: tensors | POSITIONS,
            dict.fromkeys(POSITIONS, "computed here"),
        ),
    ],
    ids=["prefix", "no prefix", "gamma and beta", "decoder", "decoder bias alone", "position_ids"],
)
@torch.no_grad()
def test_old_layouts_of_the_file_open_here(name, change, unused, tmp_path):
    theirs = peer("Bert", name)
    loaded = load_model(folder_of(theirs, tmp_path / "theirs", change))
    assert_same_outputs(outputs(loaded.model), peer_outputs(theirs))
    assert loaded.report.unused == unused


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "old bin"])
@torch.no_grad()
def test_all_kinds_of_weight_files_open_here(kind, shards, tmp_path):
    theirs = peer("Bert", "ForPreTraining")
    folder = folder_of(theirs, tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, ending = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    names, files = sorted(tensors), {f"{stem}.{ending}": sorted(tensors)}
    if shards:
        files = {f"{stem}-0000{at}-of-00002.{ending}": names[at::2] for at in range(2)}
    for file, held in files.items():
        part = {name: tensors[name] for name in held}
        if kind == "safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file, _use_new_zipfile_serialization=kind == "bin")
    if shards:
        weight_map = {name: file for file, held in files.items() for name in held}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same_outputs(outputs(load_model(folder).model), peer_outputs(theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_weights_become_single(dtype, tmp_path):
    theirs = peer("Bert", "Model").to(dtype)
    loaded = load_model(folder_of(theirs, tmp_path / "theirs"))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert_same_outputs(outputs(loaded.model), peer_outputs(theirs.float()))


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("Model", {"num_labels": 0, "id2label": None}),
        ("ForMaskedLM", {"id2label": {"1": "a", "2": "b"}}),
    ],
)
def test_outputs_are_read_only_where_a_head_has_them(name, outputs, tmp_path):
    theirs = peer("Bert", name)
    change_settings(folder_of(theirs, tmp_path), **outputs)
    loaded = load_model(tmp_path)
    assert theirs.num_parameters() == sum(p.numel() for p in loaded.model.parameters())
    assert loaded.labels == ()


def test_a_number_of_outputs_that_contradicts_stored_names_is_refused(tmp_path):
    folder_of(peer("Bert", "ForSequenceClassification"), tmp_path)
    change_settings(tmp_path, num_labels=3)
    assert load_model(tmp_path).labels == ("no", "maybe", "yes")
    change_settings(tmp_path, num_labels=2)
    with pytest.raises(FolderError, match=r"num_labels is 2, .* 3 outputs") as caught:
        load_model(tmp_path)
    assert caught.value.where == tmp_path / "config.json"


@pytest.mark.parametrize(
    ("pattern", "new", "wrappers"),
    [
        ("^", "module.", ("module.",)),
        ("^", "_orig_mod.", ("_orig_mod.",)),
        ("^", "module._orig_mod.", ("module.", "_orig_mod.")),
        ("(?<=encoder.)", "_fsdp_wrapped_module.", ("_fsdp_wrapped_module.",)),
    ],
)
@torch.no_grad()
def test_modules_that_only_wrap_are_removed_from_names(pattern, new, wrappers, tmp_path):
    """DataParallel, torch.compile, both, and FSDP around a part."""
    theirs = peer("Bert", "ForSequenceClassification")
    loaded = load_model(folder_of(theirs, tmp_path, renamed((pattern, new))))
    assert loaded.report.wrappers == wrappers
    assert f"without {' and '.join(wrappers)}" in str(loaded.report)
    assert_same_outputs(outputs(loaded.model), peer_outputs(theirs))


def test_an_unknown_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta-xl"}))
    with pytest.raises(FolderError, match="'xlm-roberta-xl' is unknown") as caught:
        load_model(tmp_path)
    assert '"model_type": "bert"' not in str(caught.value.fix)


def test_files_that_may_be_a_part_of_the_model_are_not_passed_over(tmp_path):
    """SetFit's head, another safetensors file, and a pooling without modules.json are reported."""
    folder_of(peer("Bert", "Model"), tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    for name in ("model_head.pkl", "head.safetensors", "tf_model.h5", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
    report = load_model(tmp_path).report
    assert report.unread_files == ("1_Pooling", "head.safetensors", "model_head.pkl")
    assert "not read: 1_Pooling, head.safetensors, model_head.pkl" in str(report)


def test_weights_under_another_name_are_named(tmp_path):
    folder_of(peer("Bert", "Model"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(FolderError, match="holds no weights") as caught:
        load_model(tmp_path)
    assert "weights.safetensors" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["checkpoint-500", "snapshots/0a1b"])
def test_a_folder_of_models_names_them(name, tmp_path):
    folder_of(peer("Bert", "Model"), tmp_path / name)
    with pytest.raises(FolderError, match="has no config") as caught:
        load_model(tmp_path)
    assert str(tmp_path / name) in str(caught.value.fix)


@pytest.mark.parametrize(("stem", "pad"), [("GPT2", -1), ("OpenAIGPT", 50)])
def test_a_family_without_padding_reads_no_odd_padding(stem, pad, tmp_path):
    small = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": pad}
    config = getattr(transformers, f"{stem}Config")(**small, **ids)
    theirs = getattr(transformers, f"{stem}Model")(config).eval()
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    assert model.config.pad is None
    ids = torch.arange(4, 9)
    with torch.no_grad():
        found = model.encoder(Batch(ids, torch.zeros_like(ids), Layout.of([5]))).last
        torch.testing.assert_close(found, theirs(ids[None]).last_hidden_state[0], rtol=0, atol=1e-5)


def is_random(model: nn.Module, prefix: str) -> bool:
    """Whether this part of a model stands where a fresh one starts: no bias but 0."""
    parameters = model.get_submodule(prefix).named_parameters()
    return not any(weight.any() for name, weight in parameters if name.endswith("bias"))


@torch.no_grad()
def test_a_new_head_starts_at_random_only_if_it_is_asked_for(tmp_path):
    folder = folder_of(peer("Bert", "ForPreTraining"), tmp_path / "theirs")
    heads = (PoolerHead(), LabelHead(5))
    with pytest.raises(FolderError, match="does not hold the head labels") as error:
        load_model(folder, heads)
    assert "2 missing: classifier.bias, classifier.weight" in str(error.value)
    loaded = load_model(folder, heads, fresh=["labels"])
    assert loaded.report.fresh == ("heads.labels.dense.weight", "heads.labels.dense.bias")
    assert is_random(loaded.model, "heads.labels")
    assert not is_random(loaded.model, "heads.pooler")
    assert loaded.labels == ()
    assert loaded.report.unused["cls.seq_relationship.weight"] == "the pair head was not requested"
    assert loaded.report.unused["cls.predictions.bias"] == "the masked head was not requested"
    text = str(loaded.report)
    assert "2 start at random, as requested: heads.labels.dense.weight" in text
    assert "2 unused (the pair head was not requested)" in text


def test_a_head_that_is_there_can_be_started_anew(tmp_path):
    folder = folder_of(peer("Bert", "ForSequenceClassification"), tmp_path / "theirs")
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        loaded = load_model(folder, (PoolerHead(), LabelHead(2)), fresh=["labels"])
        weights.append(loaded.model.heads["labels"].dense.weight)
    assert is_random(loaded.model, "heads.labels")
    assert torch.equal(*weights)
    reason = loaded.report.unused["classifier.weight"]
    assert reason == "the labels head starts at random, as requested"
    with pytest.raises(FolderError, match=r"classifier\.bias is \[3\], not \[2\]"):
        load_model(folder, (PoolerHead(), LabelHead(2)))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [("pooler", "the head pooler"), ("encoder.layer.1", "the encoder.*16 missing:")],
)
def test_a_part_that_is_missing_is_never_random_in_silence(prefix, message, tmp_path):
    def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name] for name in tensors if not name.startswith(prefix)}

    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs", drop)
    with pytest.raises(FolderError, match=f"does not hold {message}"):
        load_model(folder)


def test_names_of_another_program_and_other_sizes_are_no_damage(tmp_path):
    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"backbone.{name}": tensors[name] for name in tensors}

    folder = folder_of(peer("Bert", "Model"), tmp_path / "wrapped", rename)
    with pytest.raises(FolderError, match=r"\n  .*such as \S*backbone\.embeddings"):
        load_model(folder)
    folder = folder_of(peer("Bert", "Model"), tmp_path / "sizes")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 7}))
    with pytest.raises(FolderError, match=r"of another shape: .*\n  Correct config\.json"):
        load_model(folder)


def test_labels_with_two_orders_are_a_warning(tmp_path, caplog):
    folder = folder_of(peer("Bert", "ForSequenceClassification"), tmp_path / "theirs")
    file = folder / "config.json"
    orders = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": "2", "c": 1}}
    file.write_text(json.dumps(json.loads(file.read_text()) | orders))
    assert load_model(folder).labels == ("a", "b", "c")
    assert caplog.messages == [
        f"{folder}: label2id in config.json disagrees with id2label, which is used, on b, c"
    ]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"label2id": ["a", "b", "c"]}))
    with pytest.raises(FolderError, match="label2id"):
        load_model(folder)


def test_an_adapter_within_a_model_is_to_be_merged(tmp_path):
    """As of a base model that PEFT has changed and that is saved as if it was whole."""

    def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("query.", "query.base_layer."): tensors[name] for name in tensors}

    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs", split)
    with pytest.raises(FolderError, match="does not hold the encoder") as caught:
        load_model(folder)
    assert "merge_and_unload" in (caught.value.fix or "")


def test_fresh_heads_must_be_wanted(tmp_path):
    folder = folder_of(peer("Bert", "ForMaskedLM"), tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"fresh: labels must be among the model's heads"):
        load_model(folder, fresh="labels")
    with pytest.raises(ConfigError, match=r"heads: <class .*LabelHead'> is not a head"):
        load_model(folder, [LabelHead])
    one = load_model(folder, LabelHead(2), "labels").model  # and the pooler that it reads
    several = load_model(folder, [LabelHead(2)], ["labels"]).model
    assert one.specification == several.specification


@pytest.mark.parametrize("architectures", [["BertForSomethingElse"], None])
@torch.no_grad()
def test_a_class_that_is_not_known_gives_the_heads_that_its_file_holds(architectures, tmp_path):
    """A classifier is not among them: it may read each token, or the pooled vector."""
    theirs = peer("Bert", "ForSequenceClassification")
    extra = {"extra.weight": torch.zeros(2)}
    folder = folder_of(theirs, tmp_path / "theirs", lambda tensors: tensors | extra)
    change_settings(folder, architectures=architectures)
    loaded = load_model(folder)
    assert set(loaded.model.heads) == {"pooler"}
    unused = loaded.report.unused
    assert unused["classifier.weight"] == "the labels or tags or choice head was not requested"
    assert unused["extra.weight"] == "not a known part of this family"


def test_a_tensor_under_two_names_is_said(tmp_path):
    again = {"bert.pooler.dense.bias": torch.ones(WIDTH)}
    theirs = peer("Bert", "Model")
    loaded = load_model(folder_of(theirs, tmp_path / "theirs", lambda tensors: tensors | again))
    assert loaded.report.unused == {"pooler.dense.bias": "bert.pooler.dense.bias is the same"}
    assert bool((loaded.model.heads["pooler"].dense.bias == 1).all())


def test_names_that_a_wrapper_keeps_apart_stay_as_they_are(tmp_path):
    """Else one of two tensors would be passed over in silence."""
    again = {"module.pooler.dense.bias": torch.ones(WIDTH)}
    theirs = peer("Bert", "Model")
    loaded = load_model(folder_of(theirs, tmp_path / "theirs", lambda tensors: tensors | again))
    assert loaded.report.unused == dict.fromkeys(again, "not a known part of this family")


def test_an_output_layer_of_its_own_that_settings_deny_is_refused_where_it_matters(tmp_path):
    def untie(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = with_decoder(tensors)
        changed["cls.predictions.decoder.weight"][3, 4] += 1
        return changed

    folder = folder_of(peer("Bert", "ForPreTraining"), tmp_path / "theirs", untie)
    with pytest.raises(FolderError) as caught:
        load_model(folder)
    said = str(caught.value)
    assert "cls.predictions.decoder.weight and bert.embeddings.word_embeddings.weight" in said
    assert 'set "tie_word_embeddings": false' in said
    report = load_model(folder, (PoolerHead(), PairHead())).report
    assert report.unused["cls.predictions.decoder.weight"] == "the masked head was not requested"
    assert load_model(folder, (MaskedHead(),), fresh=["masked"]).report.fresh


def test_an_output_layer_that_settings_promise_is_missed(tmp_path):
    folder = folder_of(peer("Bert", "ForMaskedLM"), tmp_path / "theirs")
    change_settings(folder, tie_word_embeddings=False)
    with pytest.raises(FolderError, match=r"does not hold the head masked .*1 missing:"):
        load_model(folder)
    change_settings(folder, tie_word_embeddings="no")
    with pytest.raises(FolderError, match="tie_word_embeddings 'no' has no counterpart here"):
        load_model(folder)


def test_of_two_biases_that_of_the_output_layer_counts(tmp_path):
    """transformers 5 keeps both apart, 4 wrote the other name for the one that it had; both are written for both to read."""
    decoder, other = torch.randn(2, VOCAB)

    def untie(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = with_decoder(tensors)
        changed["cls.predictions.decoder.weight"][3, 4] += 1
        return changed | {"cls.predictions.decoder.bias": decoder, "cls.predictions.bias": other}

    folder = folder_of(peer("Bert", "ForMaskedLM"), tmp_path / "theirs", untie)
    change_settings(folder, tie_word_embeddings=False)
    loaded = load_model(folder)
    assert torch.equal(loaded.model.heads["masked"].bias, decoder)
    name = "cls.predictions.bias"
    assert loaded.report.unused == {name: "heads.masked.bias is read in its place"}
    report = load_model(folder, (PoolerHead(),), fresh=["pooler"]).report
    assert report.unused[name] == "the masked head was not requested"
    save_model(tmp_path / "ours", loaded.model)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert torch.equal(written["cls.predictions.bias"], decoder)
    assert torch.equal(written["cls.predictions.decoder.bias"], decoder)

    del written["cls.predictions.decoder.bias"]
    save_file(written, folder / "model.safetensors")
    loaded = load_model(folder)
    assert torch.equal(loaded.model.heads["masked"].bias, decoder)
    assert not loaded.report.unused


families = pytest.mark.parametrize("family", FAMILIES, ids=[f.model_type for f in FAMILIES])


def written(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@families
@pytest.mark.parametrize("seed", range(2))
def test_every_setting_that_transformers_writes_is_known(family, seed, tmp_path):
    drawn = draw_settings(family.model_type, seed)
    config = transformers.CONFIG_MAPPING[family.model_type](**drawn)
    full = json.loads(config.to_json_string(use_diff=False))
    for settings in (full, json.loads(config.to_json_string())):
        settings["model_type"] = family.model_type
        assert read_hf_config(written(tmp_path / "model", settings)).unknown == {}


@families
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qk_norm", True),
        ("sliding_window", 128),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("pruned_heads", {"0": [1]}),
        ("num_key_value_heads", 3),
    ],
)
def test_a_setting_that_changes_outputs_is_refused(family, key, value, tmp_path):
    settings = draw_settings(family.model_type, 1) | {"model_type": family.model_type}
    with pytest.raises(FolderError, match=r"config\.json: .*") as caught:
        read_hf_config(written(tmp_path / "model", settings | {key: value}))
    assert key.removeprefix("num_") in str(caught.value) or "rope_type" in str(caught.value)
    counted = family.model_type == "eurobert" and key == "num_key_value_heads"
    for off in (None,) if counted else (None, False, {}):
        if key != "rope_scaling" or off != {}:
            read_hf_config(written(tmp_path / "model", settings | {key: off}))


def test_an_unknown_setting_is_in_the_load_report(tmp_path, caplog):
    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs")
    assert load_model(folder).report.unknown_settings == {}
    change_settings(folder, use_cache=False)
    assert load_model(folder).report.warnings == caplog.messages == []
    change_settings(folder, residual_gain=0.5)
    report = load_model(folder).report
    assert report.unknown_settings == {"residual_gain": 0.5}
    line = "config.json has 1 unknown setting, not used: residual_gain = 0.5"
    assert line in str(report).splitlines()
    assert caplog.messages == [f"{folder}: {line}"]


def test_unused_layers_are_a_warning(tmp_path, caplog):
    """A head that was not requested is none."""
    folder = folder_of(peer("Bert", "ForMaskedLM"), tmp_path / "theirs")
    load_model(folder, [])
    assert caplog.messages == []
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change_settings(folder, num_hidden_layers=layers - 1)
    load_model(folder)
    assert [message.split(":")[1] for message in caplog.messages] == [" 16 tensors not used"]
