"""DeBERTa where transformers has no class, or another layout: the decoder, published files, the head of replaced tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bothways.core.batch import Batch, Layout
from bothways.finetuning.stability import level
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.weight_files import open_weights
from bothways.model.families.catalogue import family_for, preset
from bothways.model.families.deberta import DEBERTA_V2
from bothways.model.heads import ChoiceHead, LabelHead, MaskedHead, ReplacedHead
from bothways.model.model import Model
from model_folders import change_settings
from random_weights import perturb

LENGTHS = [7, 11, 1, 9]
TABLE = "deberta.embeddings.position_embeddings.weight"
SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 20,
    "max_position_embeddings": 24, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LATER: dict[str, Any] = SMALL | {
    "position_buckets": 6, "share_att_key": True, "norm_rel_ebd": "layer_norm",
}  # fmt: skip
SHAPE = {"vocab": 9, "width": 16, "depth": 1, "heads": 2, "intermediate_size": 9}


def moved(model: Any) -> Any:
    return perturb(model, 0.15).eval()


def inputs(seed: int = 0) -> tuple[Batch, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(4, 50, kept.shape, generator=generator)
    packed = Batch(ids[kept], torch.zeros_like(ids[kept]), Layout.of(LENGTHS))
    return packed, {"input_ids": ids * kept, "attention_mask": kept.long()}, kept


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors")


def published(folder: Path, stem: str, settings: dict[str, Any]) -> tuple[Any, nn.Embedding]:
    """A folder as the authors publish it: no class, `lm_predictions`, absolute positions; the model, and that table."""
    cls = getattr(transformers, f"{stem}ForMaskedLM")
    theirs, table = moved(cls(cls.config_class(**settings, legacy=False))), nn.Embedding(24, 16)
    theirs.save_pretrained(folder)
    change_settings(folder, architectures=None, legacy=None)
    add(folder, {TABLE: table.weight.detach()})
    return theirs, table


def decoded(theirs: Any, table: nn.Embedding, padded: dict[str, Tensor], kept: Tensor) -> Tensor:
    """The authors' decoder, from transformers' parts: the last layer twice, on what the layer before it gave."""
    encoder = theirs.deberta.encoder
    states = theirs.deberta(**padded, output_hidden_states=True).hidden_states[-2]
    mask = encoder.get_attention_mask(padded["attention_mask"])
    queries = states + table(torch.arange(states.shape[1]))
    for _ in range(2):
        queries, _ = encoder.layer[-1](
            states, mask, query_states=queries, relative_pos=encoder.get_rel_pos(states),
            rel_embeddings=encoder.get_rel_embedding(),
        )  # fmt: skip
    logits: Tensor = theirs.lm_predictions(queries, theirs.deberta.embeddings.word_embeddings)
    return logits[kept]


def logits_of(model: Model, batch: Batch) -> Tensor:
    x = model.masked_vectors(batch, model.encoder(batch))
    logits: Tensor = model.heads["masked"](x, model.encoder.embedding.token.weight)
    return logits


@pytest.mark.parametrize(
    "changes", [{}, {"position_buckets": -1, "share_att_key": False}, {"conv_kernel_size": 3}]
)
def test_a_published_file_predicts_with_its_decoder(changes, tmp_path):
    """Equal in outputs and gradients to the decoder written out; written back in the same layout, tensor by tensor."""
    theirs, table = published(tmp_path / "theirs", "DebertaV2", LATER | changes)
    change_settings(tmp_path / "theirs", tie_word_embeddings=bool(changes))
    loaded = load_model(tmp_path / "theirs")
    assert set(loaded.model.heads) == {"masked"}
    assert not loaded.report.unused
    batch, padded, kept = inputs()
    found, wanted = logits_of(loaded.model, batch), decoded(theirs, table, padded, kept)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    weights = torch.randn_like(wanted)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    mine = loaded.model.heads["masked"].position.weight.grad
    assert table.weight.grad is not None
    torch.testing.assert_close(mine, table.weight.grad, rtol=1e-4, atol=1e-4)

    save_model(tmp_path / "ours", loaded.model)
    before, after = open_weights(tmp_path / "theirs"), open_weights(tmp_path / "ours")
    assert set(after.shapes) == set(before.shapes)
    assert all(torch.equal(before.read(name), after.read(name)) for name in after.shapes)
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert not again.config.legacy
    assert load_model(tmp_path / "ours").model.config == loaded.model.config


@pytest.mark.parametrize(
    ("positions", "reach", "buckets"),
    [(100, -1, 256), (128, -1, 256), (129, -1, 256), (24, 20, 46)],
)
def test_few_positions_with_many_buckets(positions, reach, buckets, tmp_path):
    """No distance is so large that buckets widen: outputs and the table's gradient for the longest input, and a short one."""
    sized = {
        "max_position_embeddings": positions, "max_relative_positions": reach, "position_buckets": buckets,
    }  # fmt: skip
    theirs = moved(transformers.DebertaV2Model(transformers.DebertaV2Config(**LATER | sized)))
    theirs.save_pretrained(tmp_path)
    mine = load_model(tmp_path).model
    for length in (positions, 7):
        ids = torch.randint(4, 50, (length,))
        found = mine.encoder(Batch(ids, torch.zeros_like(ids), Layout.of([length]))).last
        wanted = theirs(input_ids=ids[None]).last_hidden_state[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        weights = torch.randn_like(wanted)
        (found * weights).sum().backward()
        (wanted * weights).sum().backward()
    gradients = (mine.encoder.relative.table.weight.grad, theirs.encoder.rel_embeddings.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stem", ["Deberta", "DebertaV2"])
def test_a_class_without_a_decoder_in_the_new_layout(stem, tied, tmp_path):
    """Read from `lm_predictions`, written in the other layout, with equal predictions in transformers.

    That layout always predicts with the embedding, whatever the settings say of it.
    """
    cls = getattr(transformers, f"{stem}ForMaskedLM")
    theirs = moved(cls(cls.config_class(**SMALL, legacy=False, tie_word_embeddings=tied)))
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    batch, padded, kept = inputs()
    wanted = theirs(**padded).logits[kept]
    torch.testing.assert_close(logits_of(loaded.model, batch), wanted, rtol=0, atol=1e-5)
    save_model(tmp_path / "ours", loaded.model)
    again, report = cls.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(again(**padded).logits[kept], wanted, rtol=0, atol=1e-6)


def test_a_head_that_transformers_trained_has_no_decoder(tmp_path):
    """Though its file may still hold the table."""
    theirs = moved(transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**LATER)))
    theirs.save_pretrained(tmp_path)
    add(tmp_path, {TABLE: torch.randn(24, 16)})
    loaded = load_model(tmp_path)
    assert loaded.report.unused == {TABLE: "the configuration has no place for it"}
    batch, padded, kept = inputs()
    torch.testing.assert_close(
        logits_of(loaded.model, batch), theirs(**padded).logits[kept], rtol=0, atol=1e-5
    )


def test_a_published_discriminator(tmp_path):
    """Its head sums each token and the first one before LayerNorm; what is not known is said; it comes back from our folder."""
    published(tmp_path / "theirs", "DebertaV2", LATER)
    norm, dense, classifier = nn.LayerNorm(16, 1e-7), nn.Linear(16, 16), nn.Linear(16, 1)
    head = moved(nn.ModuleDict({"LayerNorm": norm, "dense": dense, "classifier": classifier}))
    tensors = {f"mask_predictions.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors["deberta.embeddings.word_embeddings._weight"] = torch.zeros(50, 16)
    add(tmp_path / "theirs", tensors | {"ebd_decoder.weight": torch.zeros(3)})
    loaded = load_model(tmp_path / "theirs")
    assert set(loaded.model.heads) == {"masked", "replaced"}
    assert loaded.report.unused == {
        "deberta.embeddings.word_embeddings._weight": "the configuration has no place for it",
        "ebd_decoder.weight": "not a known part of this family",
    }
    batch, _, _ = inputs()
    with torch.no_grad():
        x = loaded.model.encoder(batch).last
        found = loaded.model.heads["replaced"](x, batch.layout)
        for part, start in zip(x.split(LENGTHS), batch.layout.cu_seqlens.tolist(), strict=False):
            wanted = classifier(torch.nn.functional.gelu(dense(norm(part[0] + part)))).squeeze(-1)
            torch.testing.assert_close(found[start : start + len(part)], wanted, rtol=0, atol=1e-5)
    save_model(tmp_path / "ours", loaded.model)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "bothways"
    again = load_model(tmp_path / "ours").model
    with torch.no_grad():
        torch.testing.assert_close(
            again.heads["replaced"](again.encoder(batch).last, batch.layout), found
        )


def test_other_heads_leave_the_decoder_in_the_file(tmp_path):
    """A classifier of a published file has no absolute positions, says what it left, and transformers agrees with it."""
    published(tmp_path / "theirs", "DebertaV2", LATER)
    loaded = load_model(tmp_path / "theirs", [LabelHead(3)], fresh=["labels"])
    reasons = set(loaded.report.unused.values())
    assert TABLE in loaded.report.unused
    assert reasons == {"the masked head was not requested"}
    save_model(tmp_path / "ours", loaded.model)
    theirs, report = transformers.DebertaV2ForSequenceClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values())
    batch, padded, _ = inputs()
    torch.testing.assert_close(
        loaded.model.read("labels", batch), theirs(**padded).logits, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("heads", [(ChoiceHead(),), (ReplacedHead(),)])
def test_what_no_class_of_version_1_has_is_a_folder_of_our_own(heads, tmp_path):
    model = Model(replace(preset("deberta-base"), **SHAPE), heads).eval()
    save_model(tmp_path / "ours", model)
    again = load_model(tmp_path / "ours").model
    assert again.config == model.config
    assert all(
        torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items()
    )


def test_a_decoder_with_an_output_layer_of_its_own_is_a_folder_of_our_own(tmp_path):
    """transformers has neither layout for both."""
    base = preset("deberta-v3-xsmall")
    config = replace(base, **SHAPE, readout=replace(base.readout, output="own"))
    assert family_for(config) is None
    save_model(tmp_path, Model(config, (MaskedHead(),)))
    assert load_model(tmp_path).model.config == config


DROPOUTS = {
    "embedding.dropout": "embeddings.dropout",
    "attention.position_dropout": "self.pos_dropout",
    "blocks.0.attention": "self.dropout",
    "blocks.0.attention_dropout": "attention.output.dropout",
    "blocks.0.mlp_dropout": "layer.0.output.dropout",
    "convolution.dropout": "conv.dropout",
}


@pytest.mark.parametrize(
    ("stem", "name"),
    [("DebertaV2", name) for name in DROPOUTS]
    + [pytest.param("Deberta", name, marks=pytest.mark.slow) for name in list(DROPOUTS)[:-1]],
)
def test_dropout_acts_where_theirs_does(stem, name, tmp_path):
    """Each dropout alone: mean and covariance of the outputs."""
    torch.manual_seed(0)
    cls = getattr(transformers, f"{stem}Model")
    settings = (LATER if stem == "DebertaV2" else SMALL) | {
        "num_hidden_layers": 1, "conv_kernel_size": 3, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3,
    }  # fmt: skip
    theirs = moved(cls(cls.config_class(**settings))).train()
    theirs.save_pretrained(tmp_path)
    mine = load_model(tmp_path).model.train()
    for other, module in theirs.named_modules():
        if isinstance(module, nn.Dropout) and not other.endswith(DROPOUTS[name]):
            module.p = 0.0
    for other, module in mine.named_modules():
        if hasattr(module, "rate") and not other.endswith(name):
            module.rate = 0.0
    # Draws for positions are the same for a whole batch, so a batch is one sample of them.
    times, copies, length = (400, 1, 4) if "position" in name else (10, 120, 4)
    ids = torch.randint(4, 50, (length,)).repeat(copies)
    batch = Batch(ids, torch.zeros_like(ids), Layout.of([length] * copies))
    with torch.no_grad():
        ours = [mine.encoder(batch).last for _ in range(times)]
        others = [theirs(ids.view(copies, -1)).last_hidden_state for _ in range(times)]
    a, b = (torch.stack(x).double().view(times * copies, -1) for x in (ours, others))
    error = ((a.var(0) + b.var(0)) / len(a)).sqrt()
    assert (a.mean(0) - b.mean(0)).abs().lt(5 * error).all()
    found, wanted = a.T.cov(), b.T.cov()
    torch.testing.assert_close(found.trace(), wanted.trace(), rtol=0.1, atol=0)
    assert (found - wanted).norm() < 0.3 * wanted.norm()


def test_one_text_of_terms_is_a_list_of_them():
    position = DEBERTA_V2.config_rules.read(LATER | {"pos_att_type": "P2C | c2p"}, "").position
    assert position.terms == ("p2c", "c2p")


def test_layers_of_rates_count_its_parts():
    config = replace(preset("deberta-v2-xlarge"), **SHAPE | {"depth": 2})
    names = [name for name, _ in Model(config, (MaskedHead(),)).named_parameters()]
    assert {level(name, 2) for name in names if ".relative." in name} == {0}
    assert {level(name, 2) for name in names if ".convolution." in name} == {1}
