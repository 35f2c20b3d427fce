"""Graphs against the model in onnxruntime and OpenVINO: every family, every class, every head, any shape."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from bothways.core.errors import FolderError
from bothways.hub.model_folder import load_model
from bothways.hub.sentence_transformers import Pooling, Projection, SentenceEncoderConfig
from bothways.model.attention.patterns import Blocks, Causal, Full, Window
from bothways.model.config import (
    Bias,
    EncoderConfig,
    FromVector,
    Gated,
    Own,
    PreNorm,
    Readout,
    Sharing,
)
from bothways.model.families.catalogue import FAMILIES
from bothways.model.families.family import Architecture, Family
from bothways.model.heads import HEADS, Head
from bothways.model.model import Model
from bothways.model.positions import (
    Convolution,
    Disentangled,
    DistanceBias,
    Learned,
    Rotary,
    Sinusoidal,
)
from bothways.prediction.export.encoder_graph import ExportedPart, HeadKind, Separators
from bothways.prediction.export.folder import compare_outputs, convert_to_openvino
from bothways.prediction.export.model_graph import build_graph, head_kind
from bothways.prediction.session_model import Arrays, open_openvino
from family_peers import peer
from random_weights import perturb
from spread import first_of

CASES = [
    (family, architecture)
    for family in FAMILIES
    for architecture in family.architectures
    if not architecture.own
]
NAMES = [architecture.name for _, architecture in CASES]
SEPARATORS = Separators(3, 2)
OTHER = ("deberta-v2", "longformer", "big_bird", "modernbert", "gpt2")
"""The families that differ in their operations, in addition to BERT and ALBERT in `test_folders.py`."""
NEAR = 1e-5
"""Of these small models; ten times less than an export may differ."""


def in_session(graph: onnx.ModelProto) -> Callable[[Arrays], dict[str, Any]]:
    """The graph in onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return lambda given: dict(zip(names, session.run(names, dict(given)), strict=True))


def moved(config: Any, heads: tuple[Head, ...]) -> Model:
    """A model whose parameters have all moved away from where they start."""
    torch.manual_seed(3)
    return perturb(Model(config, heads).eval(), 0.15)


def loaded(family: Family, architecture: Architecture, seed: int, folder: Path) -> Model:
    peer(family, architecture, seed).save_pretrained(folder)
    return load_model(folder).model


@pytest.mark.parametrize(
    ("family", "architecture"), first_of(CASES, [family.model_type for family, _ in CASES], NAMES)
)
def test_every_class_of_transformers(family, architecture, tmp_path):
    model = loaded(family, architecture, CASES.index((family, architecture)), tmp_path)
    kinds = {head for head in model.heads if head != "pooler"} or {"none"}
    for kind in kinds:
        part = ExportedPart(head_kind(kind), None, SEPARATORS)
        graph = build_graph(model, part)
        onnx.checker.check_model(graph, full_check=True)
        found = compare_outputs(model, part, in_session(graph), "onnxruntime")
        assert found.largest < NEAR, kind


DEBERTA = Disentangled(40, buckets=6, max_distance=20, shared=True, norm=True)
SHAPES: dict[str, tuple[dict[str, Any], HeadKind]] = {
    "sines": ({"position": Sinusoidal(30, scaled=True)}, "masked"),
    "sines, apart": ({"position": Sinusoidal(31, interleaved=False), "segments": 0}, "tags"),
    "offset": ({"position": Learned(20, offset=2, scaled=True), "segments": 1}, "tags"),
    "distance bias": ({"position": Learned(40, bias=DistanceBias(8, 12))}, "masked"),
    "task": ({"task_types": 3}, "tags"),
    "groups": ({"heads": 4, "key_value_heads": 2, "norm": "rms", "order": PreNorm()}, "tags"),
    "direct": ({"readout": Readout(masked="direct", output="own")}, "masked"),
    "late": ({"readout": Readout(labels=Own("gelu", reads="late"))}, "labels"),
    "rotary, scaled": ({"position": Rotary(50, factor=1.5), "bias": Bias(up=False)}, "tags"),
    "rotary": ({"position": Rotary(50, (30.0, 1e4)), "order": PreNorm(True)}, "masked"),
    "window": ({"patterns": (Full(), Window(3)), "position": Learned(60)}, "tags"),
    "global": ({"patterns": (Window(3, global_attention=True),)}, "span"),
    "blocks": ({"patterns": (Blocks(3, 2),), "position": Learned(80)}, "none"),
    "causal": ({"patterns": (Causal(),)}, "causal"),
    "causal labels": ({"patterns": (Causal(),), "order": PreNorm()}, "labels"),
    "shared": ({"depth": 4, "sharing": Sharing(2, 2), "embedding": 6}, "masked"),
    "no biases": ({"bias": Bias(*[False] * 7), "mlp": Gated(), "activation": "silu"}, "tags"),
    "no key bias": ({"bias": Bias(key=False)}, "choice"),
    "mean of the tokens": (
        {"readout": Readout(labels=Own("gelu_tanh", norm=True, reads="mean"))},
        "labels",
    ),
    "vector": ({"readout": Readout(labels=FromVector())}, "labels"),
    "first vector": ({"readout": Readout(labels=FromVector("first"))}, "labels"),
    "untied": ({"readout": Readout(output="own")}, "masked"),
    "deberta": ({"position": DEBERTA}, "masked"),
    "deberta, decoder": ({"position": replace(DEBERTA, absolute="decoder")}, "masked"),
    "deberta, input": (
        {"position": replace(DEBERTA, absolute="input", shared=False, terms=("p2c",))},
        "tags",
    ),
    "deberta, convolution": (
        {"position": replace(DEBERTA, convolution=Convolution(5, 2), terms=("c2p",))},
        "none",
    ),
    "replaced, with the first": ({"readout": Readout(replaced="with_first")}, "replaced"),
}


def shaped(name: str) -> tuple[Model, ExportedPart]:
    settings, kind = SHAPES[name]
    config = EncoderConfig(**{"vocab": 50, "width": 16, "depth": 3, "heads": 2,
                              "intermediate_size": 24, **settings})  # fmt: skip
    counted = {"count": 3} if kind in ("labels", "tags") else {}
    heads = () if kind == "none" else (HEADS[kind](**counted),)
    return moved(config, heads), ExportedPart(kind, None, SEPARATORS)


@pytest.mark.parametrize("name", SHAPES)
def test_every_axis_of_the_configuration(name):
    model, part = shaped(name)
    graph = build_graph(model, part)
    onnx.checker.check_model(graph, full_check=True)
    assert compare_outputs(model, part, in_session(graph), "onnxruntime").largest < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        (family, next(known for known in family.architectures if not known.own))
        for family in FAMILIES
        if family.model_type in OTHER
    ],
)
def test_every_kind_of_graph_in_openvino(family, architecture, tmp_path):
    model = loaded(family, architecture, 1, tmp_path)
    kind = next(head for head in reversed(list(model.heads)) if head != "pooler")
    part = ExportedPart(head_kind(kind), None, SEPARATORS)
    onnx.save_model(build_graph(model, part), tmp_path / "model.onnx")
    convert_to_openvino(tmp_path / "model.onnx", tmp_path / "model.xml", part.head)
    run, _ = open_openvino(tmp_path / "model.xml")
    assert compare_outputs(model, part, run, "OpenVINO").largest < NEAR


@pytest.mark.parametrize("name", ["BertModel", "DebertaV2Model", "AlbertModel", "ModernBertModel"])
def test_against_transformers_itself(name, tmp_path):
    """Each row padded to the longest, as its users give it."""
    family, architecture = CASES[NAMES.index(name)]
    theirs = peer(family, architecture, 4).eval()
    theirs.save_pretrained(tmp_path)
    graph = build_graph(load_model(tmp_path).model, ExportedPart("none"))
    torch.manual_seed(0)
    kept = torch.arange(19) < torch.tensor([[19], [1], [7]])
    given = {"input_ids": torch.randint(4, 50, kept.shape) * kept, "attention_mask": kept.long()}
    named = {value.name for value in graph.graph.input}
    if "token_type_ids" in named:
        given["token_type_ids"] = torch.randint(2, kept.shape) * kept
    assert set(given) == named
    with torch.no_grad():
        wanted = theirs(**given).last_hidden_state
    arrays = {key: value.numpy() for key, value in given.items()}
    found = torch.from_numpy(in_session(graph)(arrays)["last_hidden_state"])
    torch.testing.assert_close(found[kept], wanted[kept], rtol=0, atol=1e-5)


def test_deberta_at_every_length():
    model, part = shaped("deberta")
    run = in_session(build_graph(model, part))
    for length in range(1, model.config.max_positions + 1):
        ids = np.arange(length)[None] % 50
        given = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
        padded = {name: np.pad(value, ((0, 1), (0, 0))) for name, value in given.items()}
        assert np.allclose(run(padded)["logits"][:1], run(given)["logits"], atol=1e-5)


@pytest.mark.parametrize("name", ["window", "blocks", "causal", "deberta", "mean of the tokens"])
def test_a_row_of_padding_is_finite_and_changes_nothing(name):
    model, part = shaped(name)
    graph = build_graph(model, part)
    run, ids = in_session(graph), np.arange(36).reshape(2, 18) % 50
    mask = np.array([[1] * 18, [0] * 18])
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0}
    given = {name: given[name] for name in [v.name for v in graph.graph.input]}
    alone = run({name: value[:1] for name, value in given.items()})
    for key, values in run(given).items():
        assert np.isfinite(values).all()
        np.testing.assert_allclose(values[:1], alone[key], atol=2e-6)


@pytest.mark.parametrize("pooling", [*get_args(Pooling), ("cls", "weightedmean")])
@pytest.mark.parametrize(("normalised", "components"), [(True, None), (False, 5)])
def test_vectors_of_sentences(pooling, normalised, components):
    model, _ = shaped("window")
    part = ExportedPart("none", SentenceEncoderConfig(pooling, normalised, components, 60))
    graph = build_graph(model, part)
    assert compare_outputs(model, part, in_session(graph), "onnxruntime").largest < NEAR
    names = [output.name for output in graph.graph.output]
    assert names == ["last_hidden_state", "sentence_embedding"]


def test_dense_layers_are_in_the_graph():
    model, _ = shaped("window")
    layers = [torch.nn.Linear(2 * model.config.width, 6), torch.nn.Linear(6, 7, bias=False)]
    model.heads["projection"] = Projection(layers, ["tanh", None])
    part = ExportedPart("none", SentenceEncoderConfig(("cls", "mean"), True, None, 60))
    graph = build_graph(model, part)
    assert compare_outputs(model, part, in_session(graph), "onnxruntime").largest < NEAR
    assert graph.graph.output[1].type.tensor_type.shape.dim[1].dim_value == 7


def test_choices_of_several_questions():
    model, part = shaped("no key bias")
    run = in_session(build_graph(model, part))
    ids = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    given = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    together = run(given)["logits"]
    apart = run({name: value.reshape(6, 1, 5) for name, value in given.items()})["logits"]
    assert together.shape == (2, 3)
    np.testing.assert_allclose(together.reshape(6, 1), apart, atol=1e-6)


@pytest.mark.parametrize("name", ["shared", "sines", "deberta", "untied"])
def test_each_weight_is_stored_once(name):
    model, part = shaped(name)
    graph = build_graph(model, part)
    stored = [t for t in graph.graph.initializer if not t.name.startswith("constant")]
    held = {name.name.removesuffix(".T") for name in stored}
    assert len(held) == len(stored)
    constants = {"sinusoids", "falling_distances", "rising_distances"}
    assert held - constants <= set(dict(model.named_parameters()))


def test_a_graph_is_the_same_every_time():
    model, part = shaped("global")
    first, second = (build_graph(model, part).SerializeToString() for _ in range(2))
    assert first == second


def test_names_and_axes_are_those_that_programs_expect():
    graph = build_graph(*shaped("sines")).graph
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    rows = ["batch", "sequence"]
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert axes == {**dict.fromkeys(names, rows), "logits": [*rows, 50]}


def test_models_without_a_graph_are_refused():
    with pytest.raises(FolderError, match="the head 'lm' cannot be exported\n  Heads that can"):
        head_kind("lm")
