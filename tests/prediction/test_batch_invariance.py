"""Batch-invariant models: a sequence has the same output alone and in any company, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bothways.kernels import library
from bothways.kernels.library import Feature
from bothways.prediction.engine import predict_sequences
from bothways.prediction.predictor import Predictor, read_input
from bothways.prediction.prepared_model import PredictPrecision, PreparedModel
from toy_folder import make_folder
from toy_predictors import TASKS, predictor

OVER_THE_VOCABULARY = {"fill", "likelihood"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("place") / "bert", max_position_embeddings=600)


def outputs_differ(ready: Predictor, inputs: list[object]) -> list[bool]:
    """For each sequence, whether its output alone differs from that in the company of all."""
    examples = [read_input(ready.task, item, 1) for item in inputs]
    sequences = [sequence for item in ready.task.encode(examples) for sequence in item.sequences]
    together = predict_sequences(ready.task, sequences)
    alone = [predict_sequences(ready.task, [sequence])[0] for sequence in sequences]
    return [not np.array_equal(*pair) for pair in zip(alone, together, strict=True)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", sorted(TASKS.keys() - OVER_THE_VOCABULARY))
@pytest.mark.usefixtures("processor")
def test_outputs_are_the_same_bits_in_any_company(
    folder: Path, name: str, precision: PredictPrecision
) -> None:
    if precision == "bf16" and not library.multiplies("bf16"):
        pytest.skip("no products in bf16 here")
    ready = predictor(folder, name, precision, batch_invariant=True)
    assert isinstance(ready.task.model, PreparedModel)
    assert ready.task.model.batch_invariant
    assert not any(outputs_differ(ready, TASKS[name][1]))


@pytest.mark.usefixtures("processor")
def test_a_long_text_does_not_change_the_kernel_of_the_others(folder: Path) -> None:
    """Above 512 tokens attention in fp32 is torch's, for all sequences of a batch."""
    ready = predictor(folder, "embed", batch_invariant=True, length=600)
    inputs = [*TASKS["embed"][1][:6], " ".join(["film"] * 590)]
    assert not any(outputs_differ(ready, inputs))


@pytest.mark.skipif(Feature.AMX not in library.available(), reason="no AMX here")
def test_without_it_a_short_text_alone_is_computed_otherwise(folder: Path) -> None:
    """Else the tests above could not fail."""
    ready = predictor(folder, "embed")
    assert not ready.task.model.batch_invariant  # type: ignore[union-attr]
    assert any(outputs_differ(ready, TASKS["embed"][1]))


def test_without_the_kernels_it_is_not_promised(folder: Path) -> None:
    with library.limit(Feature(0)):
        ready = predictor(folder, "embed", batch_invariant=True)
    assert not ready.task.model.batch_invariant  # type: ignore[union-attr]
