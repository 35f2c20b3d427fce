"""`distil --to static`: Model2Vec's recipe, by formulas; folders of StaticEmbedding; training them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn.decomposition import PCA

import bothways
from bothways.core.errors import BothwaysError, ConfigError, ResourceError, TokenizerError
from bothways.finetuning import run as finetuning
from bothways.model.heads import MaskedHead
from bothways.prediction.static_distillation import kept_tokens
from bothways.serving import app as application_of
from bothways.text.tokenizer import Tokenizer
from commands import run_line
from family_tasks import encoder_of, tokenizer_of
from heard_progress import Heard
from running_server import refusal, running
from toy_folder import BAD, FILLERS, GOOD, make_examples, make_folder, make_tokenizer
from toy_text import odd_texts, write_vocabulary
from toy_training import signal_at

KEPT = ("[PAD]", "[UNK]", *GOOD, *BAD, *FILLERS)
SENTENCES = [example.text for example in make_examples(12, 0)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a teacher, its corpus, and the table that is distilled of it."""
    folder = tmp_path_factory.mktemp("static")
    make_folder(folder / "teacher", hidden_size=16)
    (folder / "text.txt").write_text("\n".join(SENTENCES) + "\n", "utf8")
    make_tokenizer(folder / "t").save(folder / "t")
    bothways.build_corpus(folder / "text.txt", folder / "t", folder / "corpus", workers=1)
    bothways.distil(folder / "teacher", to="static", width=6, out=folder / "out", progress=False)
    return folder


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def cosines(rows: np.ndarray) -> np.ndarray:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit @ unit.T


def test_the_precision_that_computed_is_named(place, monkeypatch):
    monkeypatch.setattr("bothways.core.runtime.devices.has_bf16", lambda device: True)
    data, heard = place / "text.txt", Heard()
    bothways.predict(place / "out", data, place / "o.npy", precision="auto", progress=heard)
    assert heard.messages == ["note: predicted in fp32"]


def test_an_empty_text_has_zeros_and_no_angle(place):
    embed = bothways.load(place / "out")
    pair = embed(("", "a film")).to_json()
    assert (pair["vectors"][0], pair["cosine"]) == ([0.0] * 6, 0.0)
    heard = Heard()
    bothways.build_index(["a film", " "], embed, progress=heard)
    assert heard.messages == [
        "warning: 1 of 2 examples (50.0%) has an empty text, and was answered"
    ]


def test_a_forked_process_with_threads_is_refused(place, monkeypatch):
    """Its sums over many texts would wait forever for threads that are gone."""
    embed = bothways.load(place / "out")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for call in (embed, embed.encode):
        with pytest.raises(ResourceError):
            call(SENTENCES)
    with pytest.raises(ConfigError, match=r"^batch_size: "):
        embed.encode(SENTENCES, batch_size=0)


@pytest.mark.parametrize("counted", [False, True])
def test_table_is_that_of_the_recipe(counted, place):
    from transformers import AutoModel, AutoTokenizer

    corpus = bothways.Corpus.open(place / "corpus")
    data = corpus if counted else None
    result = bothways.distil(place / "teacher", data, to="static", width=6, progress=False)
    model = AutoModel.from_pretrained(place / "teacher").eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "teacher")
    ids = tokenizer.convert_tokens_to_ids(list(KEPT))
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    with torch.no_grad():
        states = model(torch.tensor([[cls, id, sep] for id in ids])).last_hidden_state
    pca = PCA(6, svd_solver="full")
    components = pca.fit_transform(states.mean(1).double().numpy())
    ranks = 1 / np.arange(2, len(KEPT) + 2)
    frequencies = corpus.token_counts[ids] if counted else ranks
    expected = components * (1e-4 / (1e-4 + frequencies / frequencies.sum()))[:, None]
    encoder: Any = result.task_model.model.encoder
    actual = encoder.token.weight[:-1].detach().double().numpy()
    vocabulary = result.task_model.tokenizer.backend.get_vocab()
    assert vocabulary == {token: at for at, token in enumerate(KEPT)}
    # The row of [UNK] is zero, as Model2Vec drops [UNK] from its means.
    words = [at for at, token in enumerate(KEPT) if token != "[UNK]"]
    assert not actual[KEPT.index("[UNK]")].any()
    np.testing.assert_allclose(cosines(actual[words]), cosines(expected[words]), atol=1e-5)
    sizes = [np.linalg.norm(rows[words], axis=1) for rows in (actual, expected)]
    np.testing.assert_allclose(*sizes, rtol=1e-5)
    share = pca.explained_variance_ratio_.sum()
    assert result.explained == pytest.approx(share, abs=1e-6)
    assert "tokens=23, width=6" in repr(result)


def test_folder_is_opened_by_every_command_for_vectors(place, monkeypatch, capsys):
    texts = [*odd_texts(400), *SENTENCES, "", "[MASK] good ##s"]
    embed = bothways.load(place / "out")
    reference = sentence_transformer(place / "out" / "model")
    actual = embed.encode(texts)
    np.testing.assert_allclose(actual, reference.encode(texts), rtol=0, atol=1e-6)
    # One text, a batch, a stream, a generator and rows take two ways to the same bits.
    ways = [embed.encode(iter(texts)), np.stack([item.vectors[0] for item in embed.stream(texts)])]
    ways += [np.stack([embed.encode(text) for text in texts[:50]])]
    for way in ways:
        np.testing.assert_array_equal(way, actual[: len(way)])
    prompted = embed.encode(SENTENCES, prompt="good film ")
    np.testing.assert_array_equal(prompted, embed.encode([f"good film {t}" for t in SENTENCES]))
    with pytest.raises(BothwaysError) as caught:
        embed.encode(["good", 3])
    assert caught.value.where == "input 2"

    assert "SentenceTransformer(" in (place / "out" / "model" / "README.md").read_text("utf8")
    monkeypatch.chdir(place)
    commands = [
        ["embed", "out", "text.txt", "--out", "vectors.npy"],
        ["index", "text.txt", "--model", "out", "--out", "index"],
        ["search", "index", SENTENCES[0]],
        ["distil", "teacher", "corpus", "--to", "static", "--width", "5", "--out", "counted"],
    ]
    for words in commands:
        run_line(*words)
    assert SENTENCES[0] in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(place / "vectors.npy"), embed.encode(SENTENCES))
    assert bothways.load("counted").encode(SENTENCES).shape == (12, 5)


def test_static_model_is_trained_on_the_processor_of_a_machine_with_a_gpu(place, monkeypatch):
    chosen: list[str] = []
    monkeypatch.setattr(
        finetuning, "choose_device", lambda name: chosen.append(name) or torch.device("cpu")
    )
    rows = [{"text": text, "label": at % 2} for at, text in enumerate(SENTENCES)]
    common = {"task": "embed", "epochs": 1, "progress": False}
    bothways.finetune(place / "out", rows, rows, **common)
    bothways.finetune(place / "teacher", rows, rows, **common)
    assert chosen == ["cpu", "auto"]


def test_static_model_is_trained_by_the_losses_of_vectors(place, tmp_path):
    good, bad = ([f"{a} {b}" for a in words for b in FILLERS[:4]] for words in (GOOD, BAD))
    rows = [{"text": text, "label": "g"} for text in good]
    rows += [{"text": text, "label": "b"} for text in bad]
    before = bothways.load(place / "out").evaluate(rows)
    pairs = [
        {"sentence1": good[at], "sentence2": text, "score": at} for at, text in enumerate(bad[:9])
    ]
    scored = bothways.evaluate(place / "out", pairs).metrics
    assert scored == bothways.load(place / "out").evaluate(pairs)
    common: dict[str, Any] = {"task": "embed", "batch_size": 8, "seed": 1, "progress": False}
    result = bothways.finetune(place / "out", rows, rows, epochs=4, out=tmp_path / "run", **common)
    assert result.metrics["ndcg@10"] > before["ndcg@10"] + 0.05
    texts = [*good, "", "unseen"]
    trained = bothways.load(tmp_path / "run")
    expected = sentence_transformer(tmp_path / "run" / "model").encode(texts)
    np.testing.assert_allclose(trained.encode(texts), expected, rtol=0, atol=1e-6)
    assert not trained.encode("").any()
    # GradCache over several microbatches has the same gradient, and a stopped run the same bits.
    options = {"epochs": 4, "microbatch_tokens": 8, **common}
    small = bothways.finetune(place / "out", rows, rows, **options).predictor()
    np.testing.assert_allclose(small.encode(texts), trained.encode(texts), atol=1e-4)
    options = {"out": tmp_path / "stopped", "epochs": 4, **common}
    with pytest.raises(KeyboardInterrupt):
        bothways.finetune(place / "out", rows, rows, on_event=signal_at(3), **options)
    resumed = bothways.finetune(place / "out", rows, rows, resume=True, **options)
    np.testing.assert_array_equal(resumed.predictor().encode(texts), trained.encode(texts))


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "big_bird"])
def test_vocabularies_of_other_kinds(family, tmp_path):
    torch.manual_seed(3)
    tokenizer = tokenizer_of(family)
    teacher = bothways.Model(encoder_of(family, tokenizer), (MaskedHead(),))
    bothways.save_model(tmp_path / "teacher", teacher, tokenizer)
    result = bothways.distil(
        tmp_path / "teacher", to="static", width=4, out=tmp_path, progress=False
    )
    special = {tokenizer.token(id) for id in (tokenizer.specials.cls, tokenizer.specials.sep)}
    kept = result.task_model.tokenizer.backend.get_vocab()
    assert not special & {*kept}
    texts = ["a cat sat", "the old cat, the mat", "", *odd_texts(200)]
    actual = bothways.load(tmp_path).encode(texts)
    expected = sentence_transformer(tmp_path / "model").encode(texts)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    # The ids are renumbered with the table: each token keeps the vector that the teacher gave it.
    rows = load_file(tmp_path / "model" / "0_StaticEmbedding" / "model.safetensors")
    assert len(rows["embedding.weight"]) == len(kept) == max(kept.values()) + 1


def test_a_narrow_teacher_keeps_its_width(place):
    result = bothways.distil(place / "teacher", to="static", progress=False)
    assert result.predictor().encode("the cat").shape == (16,)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"width": 17}, "width"), ({"width": 0}, "width"), ({"student": "bert-tiny"}, "student"),
        ({"lr": 1e-3}, "lr"), ({"log": False}, "log"), ({"data": "train.tsv"}, "data"), ({"resume": True}, "resume"),
        ({"to": "table"}, "to"), ({"to": "model", "width": 6, "data": "corpus"}, "width"),
    ],
)  # fmt: skip
def test_what_does_not_apply_is_refused(settings, where, place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(ConfigError) as caught:
        bothways.distil("teacher", **{"to": "static", "progress": False, **settings})
    assert caught.value.where == where
    assert settings.get("width") != 0 or "not 0" in str(caught.value)


def test_server_shows_no_attention_and_no_masks_of_a_static_model(place):
    table = bothways.load(place / "out")
    with running(application_of(table, playground=True)) as url, httpx.Client(base_url=url) as one:
        reason = "a static model has no attention, and is not trained on masked tokens"
        for method in ("masked_lm", "attention"):
            body = {"method": method, "inputs": SENTENCES[0]}
            assert refusal(one, "/explain", body) == (422, "invalid", "method", reason)


def test_teachers_that_do_not_fit_are_refused(place, tmp_path):
    Tokenizer.load(write_vocabulary(tmp_path / "words")).save(tmp_path / "other")
    bothways.build_corpus(place / "text.txt", tmp_path / "other", tmp_path / "corpus", workers=1)
    with pytest.raises(ConfigError, match="data: the corpus has another vocabulary than"):
        bothways.distil(place / "teacher", tmp_path / "corpus", to="static", progress=False)
    pytest.importorskip("fugashi")
    kind = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}
    folder = write_vocabulary(tmp_path / "mecab", subword_tokenizer_type="wordpiece", **kind)
    with pytest.raises(TokenizerError, match="divides words by MeCab") as caught:
        kept_tokens(Tokenizer.load(folder))
    assert str(folder) in str(caught.value.where)
