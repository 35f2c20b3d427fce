"""Batch-invariant models: a sequence has the same output alone and in any company, to the bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bothways.core.batch import Batch, Layout
from bothways.model.attention.patterns import Causal, Full
from bothways.model.config import Readout
from bothways.model.families.catalogue import preset
from bothways.model.heads import MaskedHead, NextTokenHead
from bothways.model.kernels import library
from bothways.model.kernels.library import Feature
from bothways.model.model import Model
from bothways.prediction.engine import predict_sequences
from bothways.prediction.predictor import Predictor, read_input
from bothways.prediction.prepared_model import prepare_model
from spread import first_of
from toy_folder import make_folder
from toy_predictors import TASKS, predictor

NAMES = sorted(TASKS.keys() - {"fill", "likelihood"})
"""Tasks whose head is not over the vocabulary."""
HEADS = [tuple(h.kind for h in TASKS[name][0].heads(("a", "b"), None)) for name in NAMES]


@pytest.fixture(params=["fp32", "bf16", "int8"])
def precision(request, processor) -> str:
    """A precision that this processor multiplies in."""
    if request.param == "bf16" and not library.multiplies("bf16"):
        pytest.skip("no products in bf16 here")
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert", max_position_embeddings=600)


def outputs_differ(ready: Predictor, inputs: list[object]) -> list[bool]:
    """For each length, whether the output of a sequence alone differs from that in the company of all.

    Which kernels are taken, and how, depends on lengths alone.
    """
    examples = [read_input(ready.task_model, item, 1) for item in inputs]
    encoded = ready.task_model.encode(examples)
    sequences = [sequence for item in encoded for sequence in item.sequences]
    together = predict_sequences(ready.task_model, sequences)
    indices = {len(sequence): n for n, sequence in enumerate(sequences)}.values()
    alone = {n: predict_sequences(ready.task_model, [sequences[n]])[0] for n in indices}
    return [not np.array_equal(output, together[n]) for n, output in alone.items()]


@pytest.mark.parametrize("name", first_of([(name,) for name in NAMES], HEADS, NAMES))
def test_outputs_are_the_same_bits_in_any_company(folder, name, precision):
    ready = predictor(folder, name, precision, batch_invariant=True)
    assert ready.task_model.model.batch_invariant
    assert not any(outputs_differ(ready, TASKS[name][1]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"], indirect=True)
@pytest.mark.parametrize("head", [MaskedHead(), NextTokenHead()], ids=["masked", "causal"])
def test_a_head_with_a_matrix_of_its_own_is_computed(head, precision):
    """A folder with "tie_word_embeddings": false."""
    torch.manual_seed(1)
    causal = isinstance(head, NextTokenHead)
    patterns, own = (Causal() if causal else Full(),), Readout(output="own")
    config = replace(preset("bert-tiny"), vocab=40, readout=own, patterns=patterns)
    model, ids = Model(config, (head,)).eval(), torch.randint(40, (12,))
    batch = Batch(ids, torch.zeros_like(ids), Layout.of([9, 3]))
    ready = prepare_model(model, precision, batch_invariant=True)
    with torch.no_grad():
        wanted = model(batch, heads=[head.kind]).logits[head.kind]
        with torch.autocast("cpu", ready.autocast_dtype, enabled=precision == "bf16"):
            found = ready(batch, heads=[head.kind]).logits[head.kind]
    tolerance = 1e-5 if precision == "fp32" else 0.05
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=tolerance)


def test_narrow_embeddings_are_projected_alike_in_any_company(precision):
    """As ELECTRA's small sizes have them."""
    torch.manual_seed(0)
    model = Model(replace(preset("bert-tiny"), embedding=48, initial_range=0.3), ()).eval()
    ready, lengths = prepare_model(model, precision, batch_invariant=True), [64, 65, 15, 16, 3]

    def encoded(ids: Tensor, lengths: list[int]) -> Tensor:
        batch = Batch(ids, torch.zeros_like(ids), Layout.of(lengths))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return ready.encoder(batch).last

    assert ready.batch_invariant
    ids = torch.randint(1000, (sum(lengths),))
    together = torch.split(encoded(ids, lengths), lengths)
    for part, wanted in zip(torch.split(ids, lengths), together, strict=True):
        assert torch.equal(encoded(part, [len(part)]), wanted)


@pytest.mark.usefixtures("processor")
def test_a_long_text_does_not_change_the_kernel_of_the_others(folder):
    """Above 512 tokens attention in fp32 is torch's, for all sequences of a batch."""
    ready = predictor(folder, "embed", batch_invariant=True, length=600)
    inputs = [*TASKS["embed"][1][:6], " ".join(["film"] * 590)]
    assert not any(outputs_differ(ready, inputs))


@pytest.mark.skipif(Feature.AMX not in library.available(), reason="no AMX here")
def test_without_it_a_short_text_alone_is_computed_otherwise(folder):
    """Else the tests above could not fail. Vectors always are batch-invariant."""
    ready = predictor(folder, "classify")
    assert not ready.task_model.model.batch_invariant
    assert any(outputs_differ(ready, TASKS["classify"][1]))


def test_heads_that_the_kernel_does_not_take_are_promised_nothing():
    """TinyBERT's have 26 features: its attention is torch's, which depends on the batch."""
    shape = replace(preset("bert-tiny"), width=52)
    assert not prepare_model(Model(shape, ()), batch_invariant=True).batch_invariant


def test_without_the_kernels_it_is_not_promised(folder):
    with library.limit(Feature(0)):
        ready = predictor(folder, "embed", batch_invariant=True)
    assert not ready.task_model.model.batch_invariant
