"""Sentence vectors: layers are transformers', pooling is that of a plain loop, cosines are scored as scipy scores them."""

import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import bothways
from bothways.core.batch import pack
from bothways.core.errors import ConfigError, DataError
from bothways.hub.sentence_transformers import read_program_config
from bothways.prediction.analysis.evaluation import sweep_layers
from bothways.prediction.engine import evaluate_task, predict
from bothways.prediction.opening import open_task_model
from bothways.tasks.predictions import VectorPrediction
from bothways.tasks.sentence_embedding.examples import EmbedColumns, VectorExample
from bothways.tasks.sentence_embedding.task import (
    PromptedText,
    SentenceEmbeddingTask,
    save_sentence_encoder,
)
from bothways.tasks.sentence_embedding.vectors import retrieval
from bothways.tasks.text_task import TextExample
from closeness import assert_close
from commands import run_line
from spread import in_turn
from toy_masked import make_masked_text


@torch.no_grad()
def layers_of(theirs: Any, tokenizer: Any, text: str, room: int = 22) -> list[np.ndarray]:
    """transformers' hidden states `(n, width)`, embeddings first."""
    ids = [2, *tokenizer.encode([text])[0].tolist()[:room], 3]
    output = theirs.bert(torch.tensor([ids]), output_hidden_states=True)
    return [x[0].numpy() for x in output.hidden_states]


POOL = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0)}


@pytest.mark.parametrize(
    ("layers", "combine", "pooling"),
    in_turn([((-1,), "mean"), ((1, 2), "mean"), ((-3, 0, 2), "concat")], ["cls", "mean", "max"]),
)
def test_vectors_are_those_of_a_plain_loop(made, pooling, layers, combine):
    model, tokenizer, theirs = made
    draw = random.Random(0)
    texts = [make_masked_text(draw, longest, 0) for longest in (1, 5, 9, 3, 60)] + [""]
    hidden = {text: layers_of(theirs, tokenizer, text) for text in texts}
    for normalised, components in ((False, None), (True, None), (False, 5), (True, 20)):
        settings = {"pooling": pooling, "layers": layers, "combine": combine}
        settings |= {"normalised": normalised, "components": components}
        definition = SentenceEmbeddingTask(**settings)
        task = definition.bind(model, tokenizer, (), 24).train()
        found = predict(task, map(TextExample, texts), window=4)
        for text, (example, prediction) in zip(texts, found, strict=True):
            assert example.text == text
            chosen = [hidden[text][layer] for layer in layers]
            joined = np.concatenate(chosen, -1) if combine == "concat" else np.mean(chosen, 0)
            expected = POOL[pooling](joined)
            expected = (expected / (np.linalg.norm(expected) if normalised else 1))[:components]
            assert prediction.vectors.shape == (1, definition.width(model))
            np.testing.assert_allclose(prediction.vectors[0], expected, atol=1e-5)
    model.eval()


def test_a_pair_is_two_vectors_and_a_cosine(made):
    model, tokenizer, _ = made
    task = SentenceEmbeddingTask().bind(model, tokenizer, (), 24)
    examples = [TextExample("ape bee", "cats"), TextExample("ape bee"), TextExample("cats")]
    pair, a, b = (prediction for _, prediction in predict(task, examples))
    np.testing.assert_allclose(pair.vectors, np.concatenate([a.vectors, b.vectors]), atol=1e-6)
    cosine = np.dot(*pair.vectors) / np.prod(np.linalg.norm(pair.vectors, axis=1))
    assert pair.cosine == pytest.approx(cosine, abs=1e-6)
    assert a.cosine is None
    assert set(pair.to_json()) == {"vectors", "cosine"}
    written = np.array(a.to_json()["vector"], dtype=np.float32)
    assert (written == a.vectors[0]).all()
    with pytest.raises(ConfigError, match="no grade for each example"):
        task.grade(TextExample("ape bee", "cats"), pair)


def test_inputs_of_several_forms_are_read_together(made):
    """Those that could be trained on, with targets, and plain texts share a batch."""
    task = SentenceEmbeddingTask().bind(*made[:2], (), 24)
    examples = [VectorExample("ape", "bee"), TextExample("ape bees dog"), VectorExample("cat")]
    for order in itertools.permutations(examples):
        widths = {e: len(p.vectors) for e, p in predict(task, order)}
        assert [widths[e] for e in examples] == [2, 1, 1]
    classes = [VectorExample("ape", None, "x"), TextExample("bee", where="f:2")]
    with pytest.raises(DataError, match=r"^f:2: has no class"):
        evaluate_task(task, classes)


def test_a_vector_of_zeros_is_like_no_other():
    zeros = VectorPrediction(np.zeros((2, 4), np.float32))
    assert zeros.to_json()["cosine"] == 0
    triplet = VectorPrediction(np.eye(3, dtype=np.float32))  # with a positive and a negative
    assert triplet.to_json() == {"vectors": np.eye(3).tolist()}
    other = VectorPrediction(np.array([[1, 0, 0, 0], [0, 1, 0, 0]], np.float32))
    pairs = [(VectorExample("a", "b"), zeros), (VectorExample("c", "d"), other)]
    assert retrieval(pairs)["mrr@10"] == 0.75  # all cosines are 0: each order is as likely


def test_pairs_are_scored_as_scipy_scores_them(made):
    model, tokenizer, _ = made
    draw = random.Random(0)
    texts = [make_masked_text(draw, 6, 0) for _ in range(60)]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    examples = [TextExample(*pair, str(draw.random())) for pair in pairs]
    task = SentenceEmbeddingTask(normalised=True).bind(model, tokenizer, (), 24)
    found = task.score(predict(task, examples, window=7))
    predictions = [p for _, p in predict(task, examples)]
    cosines, scores = [p.cosine for p in predictions], [float(e.label or 0) for e in examples]
    assert found["pearson"] == pytest.approx(stats.pearsonr(cosines, scores).statistic, abs=1e-5)
    assert found["spearman"] == pytest.approx(stats.spearmanr(cosines, scores).statistic, abs=1e-5)
    rows = np.concatenate([p.vectors for p in predictions])
    mean = (rows @ rows.T)[~np.eye(60, dtype=bool)].mean()
    assert found["anisotropy"] == pytest.approx(mean, abs=1e-5)


def test_the_columns_of_sts_are_known(tmp_path):
    """GLUE's file has quotes that are quotes, and columns that nobody asks for."""
    file = tmp_path / "sts.tsv"
    names = "index\tsource1\tsentence1\tsentence2\tscore"
    file.write_text(f'{names}\n0\tnone\tA "man\tA dog.\t2.500\n', encoding="utf8")
    reading = SentenceEmbeddingTask().read(str(file))
    assert reading.task.columns == EmbedColumns("sentence1", "sentence2", "score")
    assert list(reading.examples) == [VectorExample('A "man', "A dog.", "2.500", f"{file}:2")]
    trained = SentenceEmbeddingTask(EmbedColumns("source1", "sentence2", "score"))
    assert trained.read(str(file)).task == trained
    bare = SentenceEmbeddingTask().read(str(file), EmbedColumns("sentence2"), labelled=False)
    (texts,) = bare.examples
    assert (texts.text, texts.text_b, texts.label) == ("A dog.", None, None)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (TextExample("a", None, "1", "f:2"), "^f:2: has one text; similarity needs two"),
        (TextExample("a", "b", "good", "f:3"), "^f:3: the score 'good' is not a number"),
        (TextExample("a", "b", "inf", "f:3"), "^f:3: the score 'inf' is not a number"),
        (TextExample("a", "b", None, "f:4"), "^f:4: has no score"),
        (VectorExample("a", None, "", "f:4"), "^f:4: has no class"),
        (TextExample("a", "b", "1", "f:5"), "^correlation needs at least two pairs, and there are"),
    ],
)
def test_what_cannot_be_scored_is_refused(made, example, message):
    model, tokenizer, _ = made
    with pytest.raises(DataError, match=message):
        evaluate_task(SentenceEmbeddingTask().bind(model, tokenizer, (), 24), [example])


@pytest.mark.parametrize(("text_b", "answer"), [(None, ""), ("b", ""), ("b", "x")])
def test_dev_rows_without_an_answer_are_found_before_training(text_b, answer):
    train = [VectorExample(text, text * 2) for text in "cd"]
    dev = [VectorExample("a", text_b, "1"), VectorExample("e", text_b, answer, "dev:2")]
    (finding,) = (f for f in SentenceEmbeddingTask().check(train, dev) if f.severity == "error")
    assert (finding.check, "1 dev example" in finding.what) == ("labels", True)
    assert "dev:2" in finding.what


def test_negatives_of_a_class_are_refused():
    row = {"text": "a", "label": "x", "negative": "b"}
    with pytest.raises(DataError, match="column 'negative', and no positive") as caught:
        SentenceEmbeddingTask().example(row, where="row 1")
    assert caught.value.where == "row 1"


def test_layers_and_numbers_of_components_that_cannot_be_are_refused(made):
    model, tokenizer, _ = made
    for layer in (3, -4):
        message = rf"^layers: the model has layers 0 \(the embeddings\) to 2, .* not {layer}"
        with pytest.raises(ConfigError, match=message):
            SentenceEmbeddingTask(layers=(-1, layer)).bind(model, tokenizer, (), 24)
    width = model.config.width
    with pytest.raises(ConfigError, match=rf"^widths: must be at most {width}, .* not {width + 1}"):
        SentenceEmbeddingTask(widths=(8, width + 1)).bind(model, tokenizer, (), 24)
    with pytest.raises(ConfigError, match=r"^layers: must name at least one layer"):
        SentenceEmbeddingTask(layers=())
    with pytest.raises(ConfigError, match=r"^components: must be at least 1, not 0"):
        SentenceEmbeddingTask(components=0)


TEXTS = ["the film was a play", "x", "", "old men in rain", "it ends " * 20]


@functools.lru_cache
def opened(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def theirs(folder: Path, texts: list[str], **prompts: str) -> np.ndarray:
    return opened(folder).encode(texts, show_progress_bar=False, **prompts)


def made_by_another(place: Path, **settings: Any) -> bothways.Predictor:
    from toy_folder import make_folder

    folder = place / "bert"
    if not folder.exists():
        make_folder(folder, initializer_range=0.4)
    return bothways.load(folder, task="embed", **settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[bool, Path]:
    """Folders of ours for sentence-transformers, with prompts, by whether these are pooled."""
    place = tmp_path_factory.mktemp("small")
    made_by_another(place)
    prompts = {"query": "the film ", "passage": "a play "}
    settings = {"prompts": prompts, "prompt_name": "passage", "normalised": True}
    for pooled in (False, True):
        settings["include_prompt"] = pooled
        task_model = open_task_model(place / "bert", "embed", length=24, settings=settings)
        save_sentence_encoder(place / f"saved {pooled}", task_model)
    return {pooled: place / f"saved {pooled}" for pooled in (False, True)}


@pytest.fixture(scope="module")
def small(folders) -> Path:
    return folders[False]


@pytest.mark.parametrize("pooled", [False, True])
def test_vectors_are_those_of_sentence_transformers(folders, pooled, tmp_path):
    small = folders[pooled]
    embed = bothways.load(small)
    expected = theirs(small, TEXTS, prompt_name="query")
    found = embed.encode(TEXTS, prompt_name="query")
    assert_close(found, expected)
    assert_close(embed.encode(TEXTS[0], prompt_name="query"), found[0])
    by_default = theirs(small, TEXTS)
    assert_close(embed.encode(TEXTS), by_default)
    assert_close([p.vectors[0] for p in embed(TEXTS)], embed.encode(TEXTS))
    assert np.abs(found - by_default).max() > 0.05
    for own in ("old men ", ""):
        assert_close(embed.encode(TEXTS, prompt=own), theirs(small, TEXTS, prompt=own))
    pair = embed((TEXTS[0], TEXTS[3])).vectors
    assert_close(pair, by_default[[0, 3]])
    # Written again, both read the same; another default is that of the other program, too.
    again = open_task_model(small, settings={"prompt_name": "query"})
    save_sentence_encoder(tmp_path / "ours", again)
    assert_close(theirs(tmp_path / "ours", TEXTS), expected)
    (tmp_path / "ours" / "bothways.json").unlink()
    assert_close(bothways.load(tmp_path / "ours").encode(TEXTS), expected)


def test_the_command_line(small, tmp_path, capsys):
    embed, texts = bothways.load(small), ["old men in rain", "it ends"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    for options, settings in (
        ([], {}),
        (["--prompt-name", "query"], {"prompt_name": "query"}),
        (["prompt_name=query"], {"prompt_name": "query"}),
        (["--prompt", ""], {"prompt": ""}),
        (["--prompt", "the film "], {"prompt": "the film "}),
    ):
        run_line("embed", small, tmp_path / "texts.txt", *options, "--out", tmp_path / "v.npy")
        assert_close(np.load(tmp_path / "v.npy"), embed.encode(texts, **settings))
    capsys.readouterr()


def test_queries_and_documents_have_the_prompts_of_their_names():
    prompts = {"query": "q: ", "passage": "p: ", "sts": "s: "}
    for settings, expected in (
        ({}, ["q: ", "p: "]),
        ({"prompt_name": "sts"}, ["q: ", "p: "]),
        ({"prompt": "x "}, ["x ", "x "]),
        ({"prompts": {"sts": "s: "}, "prompt_name": "sts"}, ["s: ", "s: "]),
    ):
        task = SentenceEmbeddingTask(**{"prompts": prompts, **settings})
        assert [task.role_prompt("query"), task.role_prompt("document")] == expected


def test_evaluation_uses_the_prompt(small):
    embed = bothways.load(small, prompt_name="query")
    firsts = "old men in rain", "the film ends", "it was a good play"
    seconds = "men in the rain", "two men and a play", "a good play it was"
    pairs = [TextExample(*row) for row in zip(firsts, seconds, "405", strict=True)]
    metrics, cells = embed.evaluate(pairs), sweep_layers(embed.task_model, pairs).cells
    (best,) = [cell for cell in cells if (cell.layer, cell.pooling) == (2, "mean")]
    assert best.correlation.pearson == pytest.approx(metrics["pearson"], abs=1e-5)
    vectors = embed.encode([text for e in pairs for text in (e.text, e.text_b or "")])
    cosines = (vectors[::2] * vectors[1::2]).sum(1)
    expected = np.corrcoef(cosines, [4, 0, 5])[0, 1]
    assert metrics["pearson"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("pooling", "layers"), [("cls", (-1,)), ("max", (1, 2))])
def test_texts_of_several_prompts_share_a_batch(tmp_path, pooling, layers):
    """The tokens of a prompt are read, and not pooled."""
    settings = {"pooling": pooling, "layers": list(layers), "include_prompt": False}
    embed = made_by_another(tmp_path, **settings)
    model, tokenizer = embed.task_model.model, embed.task_model.tokenizer
    texts, prompts = ("old men", "play and it ends", "", "rain " * 90), ("the film ", "a ", "")
    pairs = itertools.product(texts, prompts)
    examples = [PromptedText(text, prompt=prompt) for text, prompt in pairs]
    for example, found in zip(examples, embed(examples), strict=True):
        (encoded,) = embed.task_model.encode([example])
        with torch.no_grad():
            hidden = model.encoder(pack(encoded.sequences), keep_layers=True).layers
        x = np.mean([hidden[layer].numpy() for layer in layers], axis=0)
        count = len(tokenizer.encode(example.prompt))
        assert_close(found.vectors[0], POOL[pooling](x[1 + count :] if count else x))


def test_each_window_of_a_long_text_begins_with_the_prompt(tmp_path):
    embed = made_by_another(tmp_path, long_texts="windows", prompt="the film ", length=12)
    (encoded,) = embed.task_model.encode([TextExample("old men in rain " * 5)])
    lead = embed.task_model.tokenizer.encode("the film")
    assert len(encoded.sequences) > 2
    for sequence in encoded.sequences:
        assert sequence.ids[1:3].tolist() == lead.tolist()
        assert len(sequence) <= 12
    assert (encoded.tokens, encoded.cut) == (22, 0)
    with pytest.raises(ConfigError, match=r"prompt: has 10 tokens, and a sequence has 12"):
        embed.encode("old", prompt="the film " * 5)


def test_windows_are_joined_by_each_way_of_pooling(tmp_path):
    text = "old men in rain " * 5
    ways = "mean", "max"
    settings = ({"pooling": way} for way in (*ways, ways))
    mean, highest, both, cut = (
        made_by_another(tmp_path, long_texts="windows", length=12, **setting).encode(text)
        for setting in (*settings, {"pooling": ways, "components": 40})
    )
    assert_close(both, np.concatenate([mean, highest]))
    assert_close(cut, both[:40])


def test_prompts_that_do_not_exist(tmp_path):
    embed = made_by_another(tmp_path)
    with pytest.raises(ConfigError, match=r"has no prompt 'query'; it has none\n  Name one"):
        embed.encode("a", prompt_name="query")
    with pytest.raises(ConfigError, match="a prompt is given, and the name of one"):
        embed.encode("a", prompt_name="query", prompt="query: ")
    with pytest.raises(ConfigError, match=r"prompt_name: the model has no prompt 'x'"):
        made_by_another(tmp_path, prompt_name="x")
    with pytest.raises(ConfigError, match=r"prompts: .* is given, but it must be"):
        made_by_another(tmp_path, prompts={"query": 3})


def test_a_prompt_without_a_name_is_saved_as_the_default_one(tmp_path):
    settings = {"prompt": "the film ", "prompts": {"query": "a "}}
    embed = made_by_another(tmp_path, **settings)
    task_model = open_task_model(tmp_path / "bert", "embed", settings=settings)
    save_sentence_encoder(tmp_path / "saved", task_model)
    config = read_program_config(tmp_path / "saved", 32)
    assert config.prompts == {"query": "a ", "default": "the film "}
    assert config.prompt_name == "default"
    assert_close(theirs(tmp_path / "saved", ["old men"]), embed.encode(["old men"]))
    assert bothways.load(tmp_path / "saved").task_model.task.prompt == "the film "
    off = SentenceEmbeddingTask(prompts={"query": "a "}, prompt_name="query", prompt="")
    assert (off.default_prompt, off.named_prompts) == ("", ({"query": "a "}, None))


def test_another_vocabulary_keeps_pooling_and_prompts(small, tmp_path):
    (tmp_path / "words.txt").write_text("cinema\n")
    words = ["--vocabulary", str(tmp_path / "words.txt"), "--out", str(tmp_path / "new")]
    run_line("convert", small, *words)
    assert read_program_config(tmp_path / "new", 32) == read_program_config(small, 32)
    texts = ["old men in rain", "it ends " * 20]
    expected = bothways.load(small).encode(texts)
    assert_close(bothways.load(tmp_path / "new").encode(texts), expected)
    assert_close(theirs(tmp_path / "new", texts), expected)
    saved = json.loads((tmp_path / "new" / "config_sentence_transformers.json").read_text())
    assert saved["default_prompt_name"] == "passage"
