"""StaticEmbedding folders of sentence-transformers: equal vectors, saved again, not fine-tuned."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import bothways
from bothways.core.errors import ConfigError, FolderError, TokenizerError
from bothways.tasks.sentence_embedding.task import save_sentence_encoder

TEXTS = ["the old cat", "", "a CAT sat, unseen", "cat " * 40, "the mat"]


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def make_folder(
    folder: Path, *, max_length: int | None = None, dense: bool = False, direction: str = "right"
) -> Path:
    """A folder as sentence-transformers saves it; its tokenizer has no [CLS], [SEP] and [MASK]."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding

    words = ["[UNK]", "the", "cat", "sat", "mat", "a", "##s", ",", "old"]
    model = tokenizers.models.WordPiece({word: at for at, word in enumerate(words)})
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if max_length is not None:
        backend.enable_truncation(max_length, direction=direction)
    torch.manual_seed(0)
    module = StaticEmbedding(backend, torch.randn(len(words), 12).numpy())
    others = [Dense(12, 8), Normalize()] if dense else []
    prompts = {"query": "the mat "}
    SentenceTransformer(
        modules=[module, *others], device="cpu", prompts=prompts, similarity_fn_name="dot"
    ).save(str(folder))
    return folder


@pytest.mark.parametrize("changes", [{}, {"max_length": 6}, {"dense": True}])
def test_vectors_equal_sentence_transformers(changes, tmp_path):
    folder = make_folder(tmp_path / "static", **changes)
    reference = sentence_transformer(folder)
    embed = bothways.load(folder)
    for settings in ({}, {"prompt_name": "query"}):
        expected = reference.encode(TEXTS, **settings)
        actual = embed.encode(TEXTS, **settings)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    expected = reference.similarity(expected, expected).numpy()
    np.testing.assert_allclose(embed.similarity(actual, actual), expected, rtol=0, atol=1e-5)
    save_sentence_encoder(tmp_path / "saved", embed.unprepared())
    assert "library_name: sentence-transformers" in (tmp_path / "saved/README.md").read_text()
    again = sentence_transformer(tmp_path / "saved")
    np.testing.assert_array_equal(again.encode(TEXTS), reference.encode(TEXTS))
    saved = bothways.load(tmp_path / "saved", task="embed")
    np.testing.assert_array_equal(saved.encode(TEXTS), embed.encode(TEXTS))
    copy = pickle.loads(pickle.dumps(embed))
    np.testing.assert_array_equal(copy.encode(TEXTS), embed.encode(TEXTS))


def test_rows_of_model2vec_are_shared_and_weighted(tmp_path):
    folder = make_folder(tmp_path / "static")
    (file,) = folder.rglob("model.safetensors")
    table = load_file(file)["embedding.weight"]
    mapping, weights = torch.tensor([0, 1, 2, 2, 3, 1, 0, 4, 5]), torch.rand(9)
    save_file({"embeddings": table[:6], "mapping": mapping, "weights": weights}, file)
    # model2vec puts the files into the folder itself, which it calls ".".
    for part in [*file.parent.iterdir()]:
        part.rename(folder / part.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "."
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config.json").write_text('{"model_type": "model2vec"}')
    expected = sentence_transformer(folder).encode(TEXTS)
    np.testing.assert_allclose(bothways.load(folder).encode(TEXTS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mapping", "weights"), [([0] * 8 + [9], 9), ([[0]] * 9, 9), ([0] * 9, 4)])
def test_a_mapping_or_weights_that_do_not_fit_are_refused(mapping, weights, tmp_path):
    folder = make_folder(tmp_path / "static")
    (file,) = folder.rglob("model.safetensors")
    table, mapping = load_file(file)["embedding.weight"], torch.tensor(mapping)
    save_file({"embeddings": table, "mapping": mapping, "weights": torch.rand(weights)}, file)
    with pytest.raises(FolderError) as caught:
        bothways.load(folder)
    assert caught.value.where == file


def test_a_machine_with_a_gpu_trains_them_on_its_processor(tmp_path, monkeypatch):
    names = list[str]()

    def choose(name: str) -> torch.device:
        names.append(name)
        return torch.device("cpu")

    monkeypatch.setattr("bothways.finetuning.run.choose_device", choose)
    pairs = [{"anchor": "the cat", "positive": "a mat"}, {"anchor": "old", "positive": "sat"}]
    bothways.finetune(make_folder(tmp_path / "static"), pairs, task="embed", epochs=1)
    assert names == ["cpu"]


def test_other_uses_are_refused(tmp_path):
    folder = make_folder(tmp_path / "static")
    with pytest.raises(FolderError) as caught:
        bothways.finetune(folder, [{"text": "a cat", "label": "x"}] * 4, epochs=1)
    assert caught.value.where == folder
    assert "without a Transformer, compute its vectors with task=" in str(caught.value.fix)
    with pytest.raises(FolderError) as caught:
        bothways.load(folder, task="classify")
    assert caught.value.where == folder
    for settings in ({"precision": "int8"}, {"device": "cuda"}):
        with pytest.raises(ConfigError) as refused:
            bothways.load(folder, **settings)
        assert refused.value.where in settings
    with pytest.raises(ConfigError, match=r"has vectors of tokens, and no layers\n.*\[-1\]"):
        bothways.load(folder, layers=[0]).encode(TEXTS)
    (file,) = folder.rglob("model.safetensors")
    for name, message in (
        ("embedding.weight", "has 3 vectors for 9 tokens"),
        ("x", "holds x, not"),
    ):
        save_file({name: torch.zeros(3, 12)}, file)
        with pytest.raises(FolderError, match=message) as caught:
            bothways.load(folder)
        assert caught.value.where == file
    modules = [{"path": "0_StaticEmbedding", "type": "StaticEmbedding"}]
    (folder / "modules.json").write_text(json.dumps(modules))  # a copy without inner folders
    with pytest.raises(FolderError) as caught:
        bothways.load(folder)
    assert caught.value.where == folder / "0_StaticEmbedding"
    make_folder(tmp_path / "left", max_length=6, direction="left")
    with pytest.raises(TokenizerError, match=r'at their beginning\n  Set its "truncation" to null'):
        bothways.load(tmp_path / "left")
