"""What a folder lacks starts at random only if it is asked for; what is not taken is listed with the reason."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bothways.core.errors import ConfigError, FolderError
from bothways.hub.model_folder import load_model, save_model
from bothways.model.heads import LabelHead, MaskedHead, PairHead, PoolerHead
from model_folders import VOCAB, WIDTH, change_settings, folder_of, peer, with_decoder


def is_random(model: nn.Module, prefix: str) -> bool:
    """Whether this part of a model stands where a fresh one starts: no bias but 0."""
    return not any(
        tensor.any()
        for name, tensor in model.state_dict().items()
        if name.startswith(prefix) and name.endswith("bias")
    )


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
    for line in (
        "2 start at random, as requested: heads.labels.dense.weight",
        "2 unused (the pair head was not requested)",
    ):
        assert line in str(loaded.report)


def test_a_head_that_is_there_can_be_started_anew(tmp_path):
    folder = folder_of(peer("Bert", "ForSequenceClassification"), tmp_path / "theirs")
    torch.manual_seed(0)
    first = load_model(folder, (PoolerHead(), LabelHead(2)), fresh=["labels"])
    torch.manual_seed(0)
    second = load_model(folder, (PoolerHead(), LabelHead(2)), fresh=["labels"])
    assert is_random(first.model, "heads.labels")
    assert torch.equal(
        first.model.heads["labels"].dense.weight, second.model.heads["labels"].dense.weight
    )
    assert (
        first.report.unused["classifier.weight"] == "the labels head starts at random, as requested"
    )
    with pytest.raises(FolderError, match=r"classifier\.bias is \[3\], not \[2\]"):
        load_model(folder, (PoolerHead(), LabelHead(2)))


def test_the_encoder_alone(tmp_path):
    folder = folder_of(peer("Bert", "ForPreTraining"), tmp_path / "theirs")
    loaded = load_model(folder, heads=())
    assert not list(loaded.model.heads)
    assert loaded.report.unused["bert.pooler.dense.weight"] == "the pooler head was not requested"


def test_a_missing_pooler_is_never_random_in_silence(tmp_path):
    def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler")}

    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs", drop)
    with pytest.raises(FolderError, match="does not hold the head pooler"):
        load_model(folder)
    assert not list(load_model(folder, heads=()).model.heads)


def test_fresh_heads_must_be_wanted(tmp_path):
    folder = folder_of(peer("Bert", "ForMaskedLM"), tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"fresh: \['labels'\] must be among the model's heads"):
        load_model(folder, fresh=["labels"])


def test_a_missing_layer_is_no_matter_of_heads(tmp_path):
    def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if "layer.1" not in name}

    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs", drop)
    with pytest.raises(FolderError, match=r"does not hold the encoder.*16 missing:"):
        load_model(folder)


def test_a_layer_too_many_is_listed(tmp_path):
    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs")
    change_settings(folder, num_hidden_layers=1)
    unused = load_model(folder).report.unused
    assert len(unused) == 16
    assert set(unused.values()) == {"the configuration has no place for it"}


@pytest.mark.parametrize("architectures", [["BertForSomethingElse"], None])
@torch.no_grad()
def test_a_class_that_is_not_known_gives_the_heads_that_its_file_holds(architectures, tmp_path):
    """A classifier is not among them: it may read each token, or the pooled vector."""
    theirs = peer("Bert", "ForSequenceClassification")
    folder = folder_of(
        theirs, tmp_path / "theirs", lambda tensors: {**tensors, "extra.weight": torch.zeros(2)}
    )
    change_settings(folder, architectures=architectures)
    loaded = load_model(folder)
    assert set(loaded.model.heads) == {"pooler"}
    assert (
        loaded.report.unused["classifier.weight"]
        == "the labels or tags or choice head was not requested"
    )
    assert loaded.report.unused["extra.weight"] == "not a known part of this family"


def test_a_tensor_under_two_names_is_said(tmp_path):
    folder = folder_of(
        peer("Bert", "Model"),
        tmp_path / "theirs",
        lambda tensors: {**tensors, "bert.pooler.dense.bias": torch.ones(WIDTH)},
    )
    loaded = load_model(folder)
    assert loaded.report.unused == {"pooler.dense.bias": "bert.pooler.dense.bias is the same"}
    assert bool((loaded.model.heads["pooler"].dense.bias == 1).all())


def test_an_output_layer_of_its_own_that_settings_deny_is_refused_where_it_matters(tmp_path):
    def untie(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = with_decoder(tensors)
        changed["cls.predictions.decoder.weight"][3, 4] += 1
        return changed

    folder = folder_of(peer("Bert", "ForPreTraining"), tmp_path / "theirs", untie)
    with pytest.raises(FolderError) as caught:
        load_model(folder)
    said = str(caught.value)
    assert (
        "different values for cls.predictions.decoder.weight and bert.embeddings.word_embeddings.weight"
        in said
    )
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
    assert loaded.report.unused == {
        "cls.predictions.bias": "heads.masked.bias is read in its place"
    }
    assert load_model(folder, (PoolerHead(),), fresh=["pooler"]).report.unused[
        "cls.predictions.bias"
    ] == ("the masked head was not requested")
    save_model(tmp_path / "ours", loaded.model)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert torch.equal(written["cls.predictions.bias"], decoder)
    assert torch.equal(written["cls.predictions.decoder.bias"], decoder)

    del written["cls.predictions.decoder.bias"]
    save_file(written, folder / "model.safetensors")
    loaded = load_model(folder)
    assert torch.equal(loaded.model.heads["masked"].bias, decoder)
    assert not loaded.report.unused
