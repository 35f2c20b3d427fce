"""The enhanced mask decoder of DeBERTa version 1 against the formulas of its paper, written out (He et al. 2020, 3.1 and 3.2).

transformers has no decoder, and its version 1 fails where queries are given apart from keys; so the whole model is written out
here, by the names of a published file. As in the authors' code, the decoder's first queries are what the last layer reads plus
absolute positions, its residual path is the queries', and both terms of position take the distance query − key.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_deberta import LENGTHS, SMALL, TABLE, inputs, logits_of, published
from torch import Tensor

from bothways.core.batch import TokenTargets
from bothways.hub.model_folder import load_model
from bothways.model.families.deberta import DEBERTA
from bothways.model.families.weight_names import to_file_names
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule

LAYER = "deberta.encoder.layer.{}"
EPSILON = 1e-7
Weights = dict[str, Tensor]


def normed(w: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / ((centred**2).mean(-1, keepdim=True) + EPSILON).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def dense(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def attended(
    w: Weights, layer: int, heads: int, reach: int, states: Tensor, queries: Tensor
) -> Tensor:
    """Equation 4, head by head: softmax((Qc·Kc + Qc·Kr[δ] + Kc·Qr[δ]) / √3d) · V, with δ as in equation 3."""
    its, width = f"{LAYER.format(layer)}.attention.self", states.shape[1]
    d, places = width // heads, torch.arange(len(states))
    delta = (places[:, None] - places[None, :] + reach).clamp(0, 2 * reach - 1)
    relative = w["deberta.encoder.rel_embeddings.weight"]
    given = []
    for head in range(heads):
        # Its rows: for each head queries, keys and values.
        q_rows, k_rows, v_rows = w[f"{its}.in_proj.weight"].view(heads, 3, d, width)[head]
        own = slice(head * d, (head + 1) * d)
        q = queries @ q_rows.T + w[f"{its}.q_bias"][own]
        k = states @ k_rows.T
        v = states @ v_rows.T + w[f"{its}.v_bias"][own]
        r_keys = (relative @ w[f"{its}.pos_proj.weight"].T)[:, own]
        r_queries = dense(w, f"{its}.pos_q_proj", relative)[:, own]
        scores = q @ k.T + torch.einsum("id,ijd->ij", q, r_keys[delta])
        scores = scores + torch.einsum("jd,ijd->ij", k, r_queries[delta])
        given.append((scores / math.sqrt(3 * d)).softmax(-1) @ v)
    return torch.cat(given, -1)


def block(
    w: Weights, layer: int, heads: int, reach: int, states: Tensor, queries: Tensor
) -> Tensor:
    its = LAYER.format(layer)
    seen = dense(
        w, f"{its}.attention.output.dense", attended(w, layer, heads, reach, states, queries)
    )
    x = normed(w, f"{its}.attention.output.LayerNorm", queries + seen)
    inner = gelu(dense(w, f"{its}.intermediate.dense", x))
    return normed(w, f"{its}.output.LayerNorm", x + dense(w, f"{its}.output.dense", inner))


def predicted(w: Weights, settings: dict[str, Any], ids: Tensor) -> Tensor:
    """One sequence → logits of every token."""
    heads, most, depth = (
        settings[key]
        for key in ("num_attention_heads", "max_position_embeddings", "num_hidden_layers")
    )
    reach = settings.get("max_relative_positions", most)
    table = w["deberta.embeddings.word_embeddings.weight"]
    states = normed(w, "deberta.embeddings.LayerNorm", table[ids])
    for layer in range(depth - 1):
        states = block(w, layer, heads, reach, states, states)
    queries = states + w[TABLE][: len(ids)]
    for _ in range(2):
        queries = block(w, depth - 1, heads, reach, states, queries)
    x = normed(
        w,
        "lm_predictions.lm_head.LayerNorm",
        gelu(dense(w, "lm_predictions.lm_head.dense", queries)),
    )
    return x @ table.T + w["lm_predictions.lm_head.bias"]


def double(folder: Path, settings: dict[str, Any]) -> tuple[Model, Weights]:
    """A published model in fp64, and its tensors with gradients."""
    published(folder, "Deberta", settings)
    tensors = load_file(folder / "model.safetensors").items()
    weights = {name: tensor.double().requires_grad_() for name, tensor in tensors}
    return load_model(folder).model.double(), weights


def assert_same_gradients(model: Model, w: Weights) -> None:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    mine = to_file_names(DEBERTA.keys_for(model.config), gradients)
    assert mine.keys() == w.keys()
    largest = max(float(gradient.abs().max()) for gradient in mine.values())
    for name, tensor in w.items():
        assert tensor.grad is not None
        torch.testing.assert_close(mine[name], tensor.grad, rtol=1e-9, atol=1e-10 * largest)


@pytest.mark.parametrize("changes", [{}, {"max_relative_positions": 4}])
def test_version_1_decodes_by_the_formulas(changes, tmp_path):
    """Outputs and all gradients, in fp64."""
    torch.manual_seed(4)
    settings = SMALL | changes
    (model, w), (batch, _, _) = double(tmp_path, settings), inputs()
    assert model.config.position.absolute == "decoder"
    found = logits_of(model, batch)
    wanted = torch.cat([predicted(w, settings, ids) for ids in batch.ids.split(LENGTHS)])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(wanted)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert_same_gradients(model, w)


@pytest.mark.parametrize("recompute", [False, True])
def test_training_decodes_the_masked_tokens_by_the_formulas(recompute, tmp_path):
    """The loss of masked LM in training mode, in which only masked tokens are computed, and all gradients, in fp64."""
    torch.manual_seed(5)
    (model, w), (batch, _, _) = double(tmp_path, SMALL), inputs()
    model.encoder.recompute = recompute
    index = torch.tensor([0, 3, 6, 9, 12, 18, 27])  # the third sequence, one token, has a target
    hidden = torch.randint(4, 50, index.shape)
    targets = {"masked": TokenTargets(index, hidden)}
    training_module = MaskedLMModule(model, z_loss=0.1).train()
    losses = training_module(dataclasses.replace(batch, targets=targets))
    logits = torch.cat([predicted(w, SMALL, ids) for ids in batch.ids.split(LENGTHS)])[index]
    expected = {
        "masked": torch.nn.functional.cross_entropy(logits, hidden, reduction="sum"),
        "z": logits.logsumexp(1).square().sum(),
    }
    assert losses.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(losses[name].total, wanted, rtol=1e-9, atol=1e-9)
    (losses["masked"].total + 0.1 * losses["z"].total).backward()
    (expected["masked"] + 0.1 * expected["z"]).backward()
    assert_same_gradients(model, w)
