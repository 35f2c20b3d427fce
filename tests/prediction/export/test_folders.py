"""Exported folders: verified, complete or absent, read by other programs, and computed by `--runtime onnxruntime`."""

import ctypes
import functools
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer as Backend

import bothways
from bothways.core.config import reader as configs
from bothways.core.errors import (
    BothwaysError,
    ConfigError,
    DivergedError,
    FolderError,
    ResourceError,
)
from bothways.core.runtime.tuning import TUNING
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.resolve import PROGRAM
from bothways.model.families.catalogue import preset
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction import session_model
from bothways.prediction.export import folder as exporting
from bothways.prediction.export.folder import write_export
from bothways.prediction.opening import open_task
from bothways.prediction.predictor import Predictor
from bothways.prediction.session_model import FORMATS, open_onnx, open_openvino, openvino_core
from bothways.tasks.sentence_embedding.task import save_sentence_encoder
from commands import run_line
from documents import GUIDE, blocks, run_code
from toy_folder import VOCABULARY, make_examples, make_folder, write_tsv
from toy_predictors import TASKS, predictor

ONNX, OPENVINO = (
    {"fp32": FORMATS[name].fp32, "int8": FORMATS[name].int8} for name in ("onnx", "openvino")
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("bert") / "bert", max_position_embeddings=40)


def saved(bert: Path, name: str, place: Path) -> Path:
    """A folder with random heads for a task, as a run saves it."""
    task_model = predictor(bert, name, length=24).task_model
    kinds = {head.kind for head in task_model.task.heads(task_model.labels, None)}
    heads = [h for h in task_model.model.specification if h.kind in kinds]
    loaded = load_model(bert)
    model = Model(loaded.model.config, heads, loaded.model.encoder)
    torch.manual_seed(8)
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    extra = {"task": configs.to_dict(task_model.task), "length": 24}
    labels = task_model.labels if kinds & {"labels", "tags"} else ()
    save_model(place, model, loaded.tokenizer, labels=labels, extra=extra)
    return place


@pytest.fixture(scope="module")
def classifier(bert, tmp_path_factory) -> Path:
    return saved(bert, "classify", tmp_path_factory.mktemp("classifier") / "model")


@pytest.fixture(scope="module")
def exported(classifier) -> Path:
    write_export(classifier, classifier.parent / "exported")
    return classifier.parent / "exported"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_tsv(tmp_path_factory.mktemp("data") / "dev.tsv", make_examples(24, 2))


def numbers(value: Any) -> list[float]:
    """All numbers in a prediction, in order."""
    match value:
        case dict():
            return [number for each in value.values() for number in numbers(each)]
        case list():
            return [number for each in value for number in numbers(each)]
        case float() | int():
            return [float(value)]
        case _:
            return []


def words(value: Any) -> list[str]:
    """All texts in a prediction, and the names of its fields and labels, in order."""
    match value:
        case dict():
            return [word for key, each in value.items() for word in (str(key), *words(each))]
        case list():
            return [word for each in value for word in words(each)]
        case _:
            return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", TASKS)
def test_every_task_predicts_the_same_in_onnxruntime(bert, name, tmp_path):
    source, inputs = saved(bert, name, tmp_path / "model"), TASKS[name][1][:12]
    write_export(source, tmp_path / "out", task=TASKS[name][0].name)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    mine, theirs = open_task(source), open_task(tmp_path / "out", runtime="onnxruntime")
    assert theirs.task_model.task.name == mine.task_model.task.name
    for ours, other in zip(mine(inputs), theirs(inputs), strict=True):
        assert numbers(other.to_json()) == pytest.approx(numbers(ours.to_json()), abs=2e-5)
        assert words(other.to_json()) == words(ours.to_json())


def test_many_tokens_at_once_are_predicted_by_a_graph(exported, classifier):
    """Enough of them for weights to be packed first, of which a graph has none."""
    texts = ["a good film " * 6] * (TUNING.prepare_tokens // 18 + 1)
    found = bothways.load(exported, runtime="onnxruntime")(texts)
    assert len(found) == len(texts)
    expected = numbers(bothways.load(classifier)(texts[0]).to_json())
    assert numbers(found[-1].to_json()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"pooling": "max"}])
def test_an_index_is_searched_by_a_graph_of_its_model(bert, settings, tmp_path):
    texts = ["a good film", "a bad play", "the rain"]
    index = bothways.build_index(texts, bert, progress=False, **settings)
    write_export(bert, tmp_path / "graph", ["onnx", "openvino"], task="embed")
    for runtime in ("onnxruntime", "openvino"):
        graph = bothways.load(tmp_path / "graph", runtime=runtime)
        hits, expected = (index.search(texts[1], **options) for options in ({"model": graph}, {}))
        assert [hit.id for hit in hits] == [hit.id for hit in expected]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected])
    write_export(bert, tmp_path / "cls", task="embed", settings=["pooling=cls"])
    write_export(bert, tmp_path / "short", task="embed", length=9)
    other = bothways.load(tmp_path / "cls", runtime="onnxruntime")
    if not settings:
        with pytest.raises(ConfigError, match="another length or other settings"):
            index.search(texts[1], model=other)
    with pytest.raises(ConfigError, match="another length or other settings"):
        index.search(texts[1], model=bothways.load(tmp_path / "short", runtime="onnxruntime"))
    write_export(make_folder(tmp_path / "other", seed=5), tmp_path / "of-other", task="embed")
    with pytest.raises(FolderError, match="is not the model of the index"):
        index.search(texts[1], model=bothways.load(tmp_path / "of-other", runtime="onnxruntime"))


def test_a_graph_compares_as_its_folder_says(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "dot")
    task_model = bothways.load(folder, "embed").unprepared()
    task_model.model.kept = {PROGRAM: {"similarity_fn_name": "dot"}}
    save_sentence_encoder(tmp_path / "vectors", task_model)
    write_export(tmp_path / "vectors", tmp_path / "graph")
    graph = bothways.load(tmp_path / "graph", runtime="onnxruntime")
    assert graph.similarity_name == "dot"


def test_sentence_transformers_and_tokenizers_read_the_files(bert, tmp_path):
    formats = ["onnx", "openvino"]
    write_export(bert, tmp_path / "out", formats, task="embed", settings=["pooling=cls"])
    pooling = json.loads((tmp_path / "out/1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_cls_token"]
    text = TASKS["embed"][1][0]
    ids = Backend.from_file(str(tmp_path / "out/tokenizer.json")).encode(text).ids
    given = {"input_ids": np.array([ids]), "attention_mask": np.array([ids]) * 0 + 1}
    given["token_type_ids"] = np.array([ids]) * 0
    wanted = bothways.load(bert, task="embed", pooling="cls").encode(text)
    openvino = open_openvino(tmp_path / "out" / OPENVINO["fp32"])
    for run, _ in (open_onnx(tmp_path / "out" / ONNX["fp32"]), openvino):
        np.testing.assert_allclose(run(given)["sentence_embedding"][0], wanted, atol=1e-5)
    # With weights beside the files, sentence-transformers pools in the same way.
    (tmp_path / "out/model.safetensors").write_bytes((bert / "model.safetensors").read_bytes())
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    np.testing.assert_allclose(theirs.encode(text), wanted, atol=1e-5)


def test_lines_of_the_guide_for_onnxruntime_alone(classifier, tmp_path, monkeypatch):
    """Also with a tokenizer that pads, as the files of many sentence encoders do."""
    source = shutil.copytree(classifier, tmp_path / "model")
    backend = Backend.from_file(str(source / "tokenizer.json"))
    backend.enable_padding(length=20)
    backend.save(str(source / "tokenizer.json"))
    write_export(source, tmp_path / "sst-onnx")
    page = GUIDE / "export.md"
    (code,) = [code for code in blocks(page, "python") if "InferenceSession" in code]
    monkeypatch.chdir(tmp_path)
    logits = run_code(code, page)["logits"]
    chances = bothways.load(classifier)("what a lovely film").probabilities
    np.testing.assert_allclose(np.ptp(logits), np.ptp(np.log([*chances.values()])), atol=1e-5)


def test_int8_is_smaller_and_passes_its_gate(classifier, data, tmp_path):
    gate = {"int8": lambda opened: opened.evaluate(data), "limit": 100.0}
    result = write_export(classifier, tmp_path / "out", "both", **gate)
    assert result.sizes[ONNX["int8"]] < result.sizes[ONNX["fp32"]]
    assert {name for name in result.sizes if name.startswith("onnx")} == {*ONNX.values()}
    report = result.int8["onnxruntime"]
    opened = open_task(tmp_path / "out", precision="int8", runtime="onnxruntime")
    assert (opened.precision, report.metric) == ("int8", "accuracy")
    assert opened.evaluate(data) == report.int8.metrics
    assert report.fp32.metrics == pytest.approx(open_task(classifier).evaluate(data))


def test_openvino_alone(classifier, data, tmp_path):
    out, gate = tmp_path / "out", {"int8": lambda opened: opened.evaluate(data), "limit": 100.0}
    result = write_export(classifier, out, "openvino", **gate)
    assert [comparison.runtime for comparison in result.comparisons] == ["onnxruntime", "OpenVINO"]
    weights = {p: str(Path(name).with_suffix(".bin")) for p, name in OPENVINO.items()}
    assert set(result.sizes) == {*OPENVINO.values(), *weights.values()}
    assert result.sizes[weights["int8"]] < 0.5 * result.sizes[weights["fp32"]]
    text = TASKS["classify"][1][0]
    wanted = open_task(classifier)(text).probabilities
    fp32 = open_task(out, runtime="openvino")
    assert fp32(text).probabilities == pytest.approx(wanted, abs=1e-5)
    texts = [f"{text} {'the ' * (n % 7)}" for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(fp32, texts)) == [fp32(text) for text in texts]
    int8 = open_task(out, runtime="openvino", precision="int8")
    assert int8.evaluate(data) == result.int8["openvino"].int8.metrics
    assert int8(text).probabilities != fp32(text).probabilities
    assert int8(text).probabilities == pytest.approx(wanted, abs=0.05)
    with pytest.raises(FolderError, match=r"has no onnx/model.onnx"):
        open_task(out, runtime="onnxruntime")
    (out / OPENVINO["fp32"]).write_text("<net/>", "utf8")
    with pytest.raises(FolderError, match="OpenVINO cannot open it: "):
        open_task(out, runtime="openvino")
    del fp32, int8
    gc.collect()
    # Else the next signal ends the process.
    assert stack_of_signals_is_mapped()
    # This package reports to the maker what is done; its modules would stay, if it had been read.
    assert not [name for name in sys.modules if name.startswith("openvino_telemetry")]


def test_onnxruntime_reports_nothing(exported, tmp_path):
    # A process that imports it keeps an identifier of the machine, and what it has yet to report.
    settings = {"CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS"}  # each turns it off
    variables = {name: value for name, value in os.environ.items() if name not in settings}
    variables |= dict.fromkeys(("HOME", "XDG_CACHE_HOME"), str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    code = f"import bothways; bothways.load({str(exported)!r}, runtime='onnxruntime')('a film')"
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
    assert [*(tmp_path / "home").rglob(".onnxruntime/*")] == []


def stack_of_signals_is_mapped() -> bool:
    """True if the alternate stack of this thread (`sigaltstack`) is none, or memory of the process."""

    class Stack(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

    stack = Stack()
    assert ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack)) == 0
    maps = Path("/proc/self/maps").read_text("utf8").splitlines()
    ranges = [line.split()[0].split("-") for line in maps]
    mapped = (int(low, 16) <= stack.base < int(high, 16) for low, high in ranges)
    return stack.base is None or any(mapped)


@pytest.mark.slow
def test_shared_weights_are_in_the_files_once(bert, tmp_path):
    """An ALBERT: three layers with the weights of one."""
    config = replace(preset("albert-base-v2"), vocab=len(VOCABULARY), depth=3, width=64, heads=2,
                     embedding=64, intermediate_size=2048, position=Learned(40))  # fmt: skip
    model = Model(config, ())
    save_model(tmp_path / "albert", model, load_model(bert).tokenizer)
    same = {"spearman": 1.0}
    result = write_export(tmp_path / "albert", tmp_path / "out", task="embed", int8=lambda _: same)
    weights = sum(parameter.numel() for parameter in model.encoder.parameters())
    file = tmp_path / "out" / ONNX["fp32"]
    exporting.convert_to_openvino(file, tmp_path / OPENVINO["fp32"], "none")
    converted = (tmp_path / OPENVINO["fp32"]).with_suffix(".bin").stat().st_size
    sizes = [result.sizes[ONNX["fp32"]], converted]
    # Nodes and constants are the rest; a second copy of the layer would be more.
    assert all(3.9 * weights < size < 4.6 * weights for size in sizes)
    assert result.sizes[ONNX["int8"]] < 1.8 * weights
    stored = exporting.with_int8_weights(onnx.load(file)).graph.initializer
    assert len({tensor.name for tensor in stored}) == len(stored)
    assert sum(len(tensor.raw_data) for tensor in stored) < 1.3 * weights


def test_nothing_is_written_if_int8_loses_too_much(classifier, tmp_path):
    def worse(opened: Predictor) -> dict[str, float]:
        return {"accuracy": 0.9 if opened.precision == "fp32" else 0.89}

    with pytest.raises(ConfigError, match=r"int8 loses 1.00 points of accuracy here; the limit"):
        write_export(classifier, tmp_path / "out", int8=worse)
    assert not any(tmp_path.iterdir())


def test_nothing_is_written_if_a_runtime_computes_something_else(classifier, tmp_path, monkeypatch):
    def damaged(*arguments: Any) -> onnx.ModelProto:
        graph = build(*arguments)
        weight = next(t for t in graph.graph.initializer if t.name.endswith("mlp.up.bias"))
        values = onnx.numpy_helper.to_array(weight) + np.float32(1e-2)
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        return graph

    build = exporting.build_graph
    monkeypatch.setattr(exporting, "build_graph", damaged)
    with pytest.raises(DivergedError, match=r"its outputs in onnxruntime differ from the model's"):
        write_export(classifier, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_one_error_in_openvino_too(classifier, tmp_path, monkeypatch):
    def save_model(*_: Any, **__: Any) -> None:
        raise RuntimeError("iostream error")

    openvino_core()
    monkeypatch.setattr(sys.modules["openvino"], "save_model", save_model)
    with pytest.raises(ResourceError, match="cannot be written: by OpenVINO: iostream error"):
        write_export(classifier, tmp_path / "out", "openvino")
    assert not any(tmp_path.iterdir())


def test_many_weights_are_in_a_file_beside_the_graph(classifier, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "INLINE_BYTES", 1000)
    result = write_export(classifier, tmp_path / "out")
    assert sorted(result.sizes) == ["onnx/model.onnx", "onnx/model.onnx_data"]
    found = (open_task(folder, runtime="onnxruntime") for folder in (exported, tmp_path / "out"))
    assert len({opened("a good film").probabilities["pos"] for opened in found}) == 1


def test_an_earlier_export_is_replaced_and_nothing_else(classifier, exported, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(exported, out)
    (out / "openvino").mkdir()
    write_export(classifier, out)
    assert not (out / "openvino").exists()
    (out / "notes.txt").touch()
    with pytest.raises(FolderError, match=r"something other than an export: notes\.txt"):
        write_export(classifier, out)
    with pytest.raises(BothwaysError, match="the output is also an input"):
        write_export(classifier, classifier)
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="is a file, not a folder"):
        write_export(classifier, tmp_path / "file")


def test_what_cannot_be_exported_is_refused(bert, classifier, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="other programs pool the last layer"):
        write_export(bert, out, task="embed", settings=["layers=[0]"])
    with pytest.raises(FolderError, match="is not fine-tuned for a task"):
        write_export(bert, out)
    assert not out.exists()


def test_folders_that_onnxruntime_cannot_open(bert, classifier, exported, tmp_path):
    def opened(folder: Path, task: str | None = None, **settings: Any) -> Predictor:
        return open_task(folder, task, runtime="onnxruntime", **settings)

    with pytest.raises(FolderError, match=r'holds no weights.*\n.*load\(.*, runtime="onnxruntime"'):
        open_task(exported)
    with pytest.raises(FolderError, match=r"has no onnx/model.onnx\n  Export the model first"):
        opened(classifier)
    refusals: list[tuple[dict[str, Any], type[BothwaysError], str]] = [
        ({"precision": "int8"}, FolderError, r"has no onnx/model_quantized.onnx\n.*int8=LABELLED"),
        ({"precision": "bf16"}, ConfigError, "is in fp32 or in int8, not in bf16"),
        ({"device": "cuda"}, ConfigError, "an exported model runs on the CPU, not on cuda"),
        ({"task": "embed"}, FolderError, "reads vectors; this export ends in the head labels"),
        ({"task": "tag"}, FolderError, "the task 'tag' needs the head 'tags'; this model has"),
    ]
    for options, kind, message in refusals:
        with pytest.raises(kind, match=message):
            opened(exported, **options)
    write_export(bert, tmp_path / "vectors", task="embed")
    with pytest.raises(ConfigError, match="an exported model has its last layer alone"):
        opened(tmp_path / "vectors", settings=["layers=[0]"])("good")
    file = tmp_path / "vectors" / ONNX["fp32"]
    graph = onnx.load(file)
    del graph.metadata_props[:]
    onnx.save(graph, file)
    with pytest.raises(FolderError, match="was not written by bothways export"):
        opened(tmp_path / "vectors")
    file.write_bytes(b"no graph")
    with pytest.raises(FolderError, match="onnxruntime cannot open it: "):
        opened(tmp_path / "vectors")


def test_threads_share_one_core_of_openvino(monkeypatch):
    openvino_core()  # imported as the library does
    made, barrier = list[object](), threading.Barrier(4)

    def make() -> object:
        time.sleep(0.01)
        made.append(object())
        return made[-1]

    def call(_: int) -> object:
        barrier.wait()
        return openvino_core()

    monkeypatch.setattr(sys.modules["openvino"], "Core", make)
    fresh = functools.cache(session_model._make_core.__wrapped__)
    monkeypatch.setattr(session_model, "_make_core", fresh)
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(call, range(4))] == made * 4
    assert len(made) == 1


def test_vectors_of_a_graph_are_scored(bert, tmp_path):
    write_export(bert, tmp_path / "out", task="embed")
    texts = TASKS["embed"][1][:9]
    pairs = [
        {"sentence1": a, "sentence2": b, "score": n % 4}
        for n, (a, b) in enumerate(itertools.pairwise(texts))
    ]
    expected = bothways.evaluate(bert, pairs, task="embed", progress=False).metrics
    scored = bothways.evaluate(tmp_path / "out", pairs, runtime="onnxruntime", progress=False)
    assert scored.metrics == pytest.approx(expected, abs=1e-4)


def test_the_command(classifier, data, tmp_path, capsys):
    def run(*words: object) -> str:
        run_line(*words)
        return capsys.readouterr().out

    out = tmp_path / "out"
    said = run("export", classifier, "--out", out, "--int8", data, "--limit", 100)
    assert "onnxruntime: differs by" in said
    assert "int8 loses" in said
    onnxruntime = ("--runtime", "onnxruntime")
    expected = json.loads(run("evaluate", classifier, data, "--json"))
    actual = json.loads(run("evaluate", out, data, "--json", *onnxruntime))
    assert actual == pytest.approx(expected)
    both = run("evaluate", out, data, "--precision", "int8", "--limit", 100, *onnxruntime)
    assert "int8 loses" in both
    (tmp_path / "texts.txt").write_text("a good film\n", encoding="utf8")
    lines = [run("predict", *words) for words in (
        (out, tmp_path / "texts.txt", *onnxruntime), (classifier, tmp_path / "texts.txt"),
    )]  # fmt: skip
    first, second = (numbers(json.loads(line)) for line in lines)
    assert first == pytest.approx(second, abs=1e-5)
    for option, where in ("--limit=1", "limit"), ("--text=wording", "text"):
        with pytest.raises(ConfigError, match=f"^{where}: is for int8"):
            run("export", classifier, "--out", tmp_path / "other", option)
