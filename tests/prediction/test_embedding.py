"""All layers in one pass, files of vectors, and the commands for tasks that need no training, as one types them."""

import io
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

import bothways
from bothways.core.errors import BothwaysError, DataError
from bothways.prediction.analysis import evaluation
from bothways.prediction.analysis.evaluation import POOLINGS, sweep_layers
from bothways.prediction.engine import PredictionCounts, evaluate_task, predict
from bothways.prediction.opening import open_task, open_task_model
from bothways.tasks.sentence_embedding.task import save_sentence_encoder
from bothways.tasks.text_task import TextExample
from commands import run_line
from toy_folder import FILLERS, make_folder


def make_text(draw: random.Random) -> str:
    return " ".join(draw.choices(FILLERS[:-1], k=draw.randint(1, 9)))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a pre-trained model, texts, and scored pairs."""
    folder, draw = tmp_path_factory.mktemp("place"), random.Random(3)
    make_folder(folder / "bert")
    texts = [*(make_text(draw) for _ in range(30)), "", "film " * 60]
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts))
    rows = [
        f"{at}\t{make_text(draw)}\t{make_text(draw)}\t{draw.randrange(50) / 10}\n"
        for at in range(40)
    ]
    (folder / "sts.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "".join(rows))
    (folder / "masks.txt").write_text("the [MASK] was fine\nA [MASK] and [MASK]\n")
    return folder


@pytest.fixture
def run(place, monkeypatch) -> Callable[[str], None]:
    """Run a command in the folder."""
    monkeypatch.chdir(place)
    return lambda line: run_line(*line.split())


def test_tables_have_the_vectors_of_their_texts_with_the_prompt(place):
    import pandas

    texts = ["the film was fine", "a film"]
    embed = open_task(place / "bert", "embed", device="cpu")
    for prompt in ("", "film "):
        vectors = embed.encode(texts, prompt=prompt)
        frame = pandas.DataFrame({"text": texts, "id": [3, 4]})
        np.testing.assert_array_equal(embed.encode(frame, prompt=prompt), vectors)
        one = embed.encode({"text": texts[0]}, prompt=prompt)
        np.testing.assert_allclose(one, vectors[0], rtol=0, atol=1e-6)
    assert embed({"sentence1": texts[0], "sentence2": texts[1], "score": 3}).cosine is not None


def test_a_sentence_encoder_is_scored_as_one_and_it_is_said(place, run, capsys):
    embedder = open_task_model(str(place / "bert"), "embed")
    save_sentence_encoder(place / "encoder", embedder)
    (place / "encoder" / "bothways.json").unlink()  # as sentence-transformers would write it
    run("evaluate encoder sts.tsv")
    assert "encoder is a sentence encoder and is scored as embed" in capsys.readouterr().err
    run("evaluate encoder sts.tsv --task embed")
    assert "sentence encoder" not in capsys.readouterr().err


@pytest.mark.parametrize("settings", [{}, {"components": 7}])
def test_one_pass_gives_what_each_embedding_gives(place, settings, monkeypatch):
    monkeypatch.setattr(evaluation, "WINDOW", 7)
    task = open_task_model(str(place / "bert"), "embed", settings=settings)
    examples = list(task.task.read(str(place / "sts.tsv")).examples)
    tally = PredictionCounts()
    found = sweep_layers(task, iter(examples), tally)
    assert (found.pairs, tally.examples, task.training) == (40, 40, False)
    cells = [(cell.layer, cell.pooling) for cell in found.cells]
    assert cells == [*itertools.product(range(3), POOLINGS)]
    for cell in found.cells:
        chosen = {**settings, "layers": [cell.layer], "pooling": cell.pooling}
        alone = open_task_model(str(place / "bert"), "embed", settings=chosen)
        assert vars(cell.correlation) == pytest.approx(evaluate_task(alone, examples), abs=1e-5)
    # [CLS] among the embeddings is the same for every text.
    assert found.cells[0].correlation.anisotropy == pytest.approx(1)
    highest = max(cell.correlation.spearman for cell in found.cells[1:])
    assert found.best.correlation.spearman == highest
    assert found.to_json()["best"]["spearman"] == highest
    assert len(found.to_json()["cells"]) == 9


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, True), ({"pooling": "cls"}, True), ({"pooling": "weightedmean"}, False),
        ({"layers": [1]}, False), ({"long_texts": "windows", "length": 6}, False),
    ],
    ids=str,
)  # fmt: skip
def test_metrics_are_those_of_the_vectors_of_the_model(place, settings, shown):
    """A table of layers and poolings is shown beside them if the vectors are among its own."""
    folder, data = place / "bert", place / "sts.tsv"
    expected = bothways.load(folder, "embed", **settings).evaluate(data)
    done = bothways.evaluate(folder, data, task="embed", **settings)
    assert done.metrics == pytest.approx(expected, abs=1e-5)
    assert (done.layers is not None) == shown
    assert done.to_json()["spearman"] == done.metrics["spearman"]


def test_files_hold_the_vectors_of_all_parts_in_order(place, run, monkeypatch):
    """From standard input, too, whose parts are gone when the file is complete."""
    for name in ("v.npy", "v.parquet", "v.jsonl"):
        run(f"embed bert texts.txt --rows 10 --out {name}")
    vectors = np.load(place / "v.npy", mmap_mode="r")
    assert (vectors.shape, vectors.dtype) == ((32, 32), np.float32)
    assert parquet.read_table(place / "v.parquet")["vector"].to_pylist() == vectors.tolist()
    rows = [json.loads(line)["vector"] for line in (place / "v.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(np.array(rows, dtype=np.float32), vectors)
    piped = io.TextIOWrapper(io.BytesIO((place / "texts.txt").read_bytes()))
    monkeypatch.setattr("sys.stdin", piped)
    run("embed bert - --rows 10 --out piped.npy")
    np.testing.assert_array_equal(np.load(place / "piped.npy"), vectors)
    reader, writer = os.pipe()
    os.write(writer, (place / "texts.txt").read_bytes())
    os.close(writer)
    run(f"embed bert /dev/fd/{reader} --rows 10 --out fifo.npy")  # <(command)
    np.testing.assert_array_equal(np.load(place / "fifo.npy"), vectors)
    assert not [*place.glob(".*")]


def test_files_that_cannot_be_embedded_are_named_and_leave_nothing(place, run, monkeypatch):
    (place / "empty.txt").touch()
    with pytest.raises(DataError, match="holds no row") as caught:
        run("embed bert empty.txt --out none.npy")
    assert caught.value.where == "empty.txt"
    for text in ('{"a": 1}', '{"text": 3', "\x00\x01"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(DataError) as caught:
            run("embed bert - --text text --out none.npy")
        assert str(caught.value.where).startswith("standard input")
    assert not [*place.glob(".*"), *place.glob("none*")]


def test_embed_writes_a_row_for_each_text(place, run, capsys):
    run("embed bert texts.txt pooling=max layers=[-2,-1] combine=concat --out v.npy")
    said = capsys.readouterr().err
    assert "1 of 32 examples (3.1%) was longer than the model reads, and was cut" in said
    assert "32 rows in v.npy" in said
    settings = ["pooling=max", "layers=[-2,-1]", "combine=concat"]
    task = open_task_model("bert", "embed", settings=settings)
    texts = (place / "texts.txt").read_text().splitlines()
    expected = [prediction.vectors[0] for _, prediction in predict(task, map(TextExample, texts))]
    np.testing.assert_allclose(np.load(place / "v.npy"), np.stack(expected), atol=1e-6)
    run("embed bert sts.tsv --text sentence2 --out v.parquet")
    assert parquet.read_table(place / "v.parquet").num_rows == 40


def test_evaluate_shows_every_layer_and_names_the_best(run, capsys):
    run("evaluate bert sts.tsv --task embed --json")
    found = json.loads(capsys.readouterr().out)
    assert found["pairs"] == 40
    run("evaluate bert sts.tsv --task embed")
    shown = capsys.readouterr().out
    (best,) = [line for line in shown.splitlines() if "best" in line]
    assert f"{found['best']['spearman']:.4f}" in best
    assert found["best"]["pooling"] in best


def test_predict_does_every_task(place, run, monkeypatch, capsys):
    run("predict bert masks.txt top=2 --task fill")
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert [len(mask) for mask in two["masks"]] == [2, 2]
    assert len(one["fillings"]) == 2
    assert "[MASK]" not in one["text"]
    run("predict bert texts.txt --task likelihood")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 32
    total = sum(log for _, log in rows[0]["tokens"])
    assert rows[0]["log_likelihood"] == pytest.approx(total, rel=1e-4)
    assert rows[30] == {"log_likelihood": 0.0, "pseudo_perplexity": None, "tokens": []}
    run("evaluate bert texts.txt --task likelihood --json")
    total = json.loads(capsys.readouterr().out)
    assert total["pll"] == pytest.approx(sum(row["log_likelihood"] for row in rows), rel=1e-4)
    assert (total["tokens"], total["texts"]) == (sum(len(row["tokens"]) for row in rows), 32)
    (place / "words.txt").write_text("the films was\n")
    for verb, more in (("evaluate", "--json"), ("predict", "")):
        said = []
        for settings in ("", "variant=word_l2r"):
            run(f"{verb} bert words.txt {settings} --task likelihood {more}")
            said.append(json.loads(capsys.readouterr().out)["pseudo_perplexity"])
        assert said[0] != pytest.approx(said[1], rel=1e-3)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the film\na play\n")))
    run("predict bert --task embed")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(row["vector"]) for row in rows] == [32, 32]


def test_encode_leaves_no_second_text_out(place):
    import pandas

    embed = open_task(place / "bert", "embed")
    pairs = pandas.DataFrame({"sentence1": ["a film", "a play"], "sentence2": ["x", "y"]})
    for given in ([("a film", "x")], [["a film", "x"]], pairs, {"text": "a film", "text_b": "x"}):
        with pytest.raises(DataError, match=r"^input 1: has two texts, and encode returns one"):
            embed.encode(given)
    assert len(embed(pairs)[0].vectors) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("embed bert texts.txt --out v.csv", r"^out: 'v\.csv' must end in \.npy, \.parquet or"),
        ("embed bert sts.tsv --out v.npy", r"^sts\.tsv: has two .*, 'sentence1' and 'sentence2'"),
        ("embed bert texts.txt layers=[5] --out v.npy", r"^layers: the model has layers 0 .* to 2"),
        (
            "embed bert texts.txt --prompt x --prompt-name y --out v.npy",
            r"^prompt: a prompt is given, and the name of one\n  Leave one of them out",
        ),
        ("embed bert texts.txt poling=max --out v.npy", r"^poling: .*did you mean pooling"),
        ("predict bert sts.tsv --out p.json", r"^out: 'p\.json' has no format of predictions"),
        ("predict bert sts.tsv --out p.csv.gz", r"(?s)^out: 'p\.csv\.gz' .*: p\.jsonl, \.csv"),
        ("evaluate bert sts.tsv --task embed --report p.csv", "^report: 'p.csv' must end in .html"),
        ("predict bert texts.txt --task fill", r"^texts\.txt:1: the text has no \[MASK\]"),
        ("evaluate bert masks.txt --task likelihood", r"^masks\.txt:1: the text has a \[MASK\]"),
        ("evaluate bert texts.txt --task embed", r"texts\.txt"),
    ],
)
def test_mistakes_are_told(run, words, message):
    with pytest.raises(BothwaysError, match=message):
        run(words)
