"""BabyLM's evaluation: every form of its data scored as transformers in float64 scores it, for checkpoints in order."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from bothways.core.errors import DataError, FolderError
from bothways.lab.babylm import evaluate_run, find_checkpoints, find_suites
from commands import run_line
from heard_progress import Heard
from toy_masked import log_probabilities, make_causal, make_masked, make_masked_text
from toy_task import VOCABULARY

MASK, POSITIONS = VOCABULARY.index("[MASK]"), 16


def write(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder, draw = tmp_path_factory.mktemp("data") / "evaluation", random.Random(1)

    def text(longest: int = 4) -> str:
        return make_masked_text(draw, longest, 0)

    blimp = [{"sentence_good": text(), "sentence_bad": text(), "field": "syntax", "UID": f"u{n % 2}"} for n in range(10)]  # fmt: skip
    write(folder / "blimp_fast" / "x.jsonl", blimp)
    write(folder / "supplement_fast" / "turns.jsonl", [{"sentence_good": text(), "sentence_bad": text()} for _ in range(6)])  # fmt: skip
    for name, counts in (("regular", (0, 0, 1)), ("ambiref", (2, 2, 2))):
        rows = [{"input_prefix": f"{text(14)} {text(14)}", "options": [f" {text(2)}" for _ in range(3)], "numops": n} for n in counts]  # fmt: skip
        write(folder / "entity_tracking_fast" / f"{name}.jsonl", rows)
    write(folder / "ewok_fast" / "e.jsonl", [{"Context1": text(), "Context2": text(), "Target1": text(), "Target2": text(), "Domain": f"d{n}"} for n in (0, 0, 1)])  # fmt: skip
    write(folder / "wug" / "w.jsonl", [{"sentences": "a\tb", "ratio": 0.5}])
    words = {word: [{"context": f" {text()} "}, {"context": text()}] for word in ("apes", "bee")}
    (folder / "cdi.json").write_text(json.dumps(words | {"a": [{"context": "ape"}]}))
    (folder / "other.json").write_text('{"size": 3}')
    return folder


@pytest.fixture(scope="module", params=["masked", "both", "causal"])
def scored(request, tmp_path_factory) -> tuple:
    """A folder, its variant, and the log probability of the tokens of an end."""
    import transformers

    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "causal":
        tokenizer, right = make_causal(folder, POSITIONS)
        masked = None
    else:
        _, tokenizer, masked = make_masked(
            folder, positions=POSITIONS, shifted=request.param == "both"
        )
        right = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", is_decoder=True, dtype=torch.double
        ).eval()

    def score(beginning: str, end: str) -> float:
        pieces = [tokenizer.encode([text])[0].tolist() for text in (beginning, beginning + end)]
        since, ids = len(pieces[0]), pieces[1]
        cut = max(0, len(ids) - (POSITIONS - 2))
        ids, since, total = ids[cut:], since - cut, 0.0
        left = log_probabilities(right, [2, *ids, 3])
        for place in range(since, len(ids)):
            hidden = [*ids[:place], MASK, *ids[place + 1 :]]
            logs = {"causal": left[place][ids[place]]}
            if masked is not None:
                at = place + (request.param == "masked")
                own = log_probabilities(masked, [2, *hidden, 3])[at][ids[place]]
                logs |= {"masked": own, "both": (own + logs["causal"]) / 2}
            total += logs[request.param]
        return float(total)

    return folder / "model", request.param, score


def test_every_form_is_scored_as_by_transformers(scored, data, tmp_path):
    folder, variant, score = scored
    heard, settings = Heard(), ["variant=both"] if variant == "both" else []
    [(name, found)] = evaluate_run(
        str(folder), data, tmp_path / "out", settings, device="cpu", progress=heard
    ).items()
    assert name == "main"

    def right(file: str, make) -> list[bool]:
        rows = map(json.loads, (data / file).read_text().splitlines())
        scores = [[score(beginning, end) for end in ends] for beginning, ends in map(make, rows)]
        return [first > max(others) for first, *others in scores]

    pairs = right(
        "blimp_fast/x.jsonl", lambda row: ("", (row["sentence_good"], row["sentence_bad"]))
    )
    assert found.accuracies["blimp_fast"] == {("u0", ""): np.mean(pairs[::2]), ("u1", ""): np.mean(pairs[1::2])}  # fmt: skip
    assert found.metrics["blimp_fast"] == pytest.approx(np.mean(pairs))
    turns = right("supplement_fast/turns.jsonl", lambda row: ("", (row["sentence_good"], row["sentence_bad"])))  # fmt: skip
    assert found.accuracies["supplement_fast"] == {("turns", ""): np.mean(turns)}
    entities = [right(f"entity_tracking_fast/{name}.jsonl", lambda row: (row["input_prefix"], row["options"])) for name in ("ambiref", "regular")]  # fmt: skip
    regular = (np.mean(entities[1][:2]) + entities[1][2]) / 2
    assert found.metrics["entity_tracking_fast"] == (np.mean(entities[0]) + regular) / 2
    domains = right("ewok_fast/e.jsonl", lambda row: (row["Context1"], (f" {row['Target1']}", f" {row['Target2']}")))  # fmt: skip
    assert found.metrics["ewok_fast"] == (np.mean(domains[:2]) + domains[2]) / 2
    words = json.loads((data / "cdi.json").read_text())
    expected = [-score(f"{row['context'].strip()} ", word) for word in ("apes", "bee") for row in words[word]]  # fmt: skip
    np.testing.assert_allclose([row["surprisal"] for row in found.surprisals], expected, rtol=1e-4)
    saved = json.loads((tmp_path / "out" / "surprisal.json").read_text())
    keys = ["step", "target_word", "context_id", "context", "surprisal"]
    assert [*saved["results"][0]] == keys
    assert json.loads((tmp_path / "out" / "results.json").read_text())["main"] == found.to_json()
    notes = "\n".join(heard.messages)
    assert "w.jsonl is not read" in notes
    assert "other.json is not read" in notes


def test_checkpoints_are_scored_in_the_order_of_their_words(data, tmp_path, capsys):
    names = ["chck_0.5M", "chck_9M", "chck_10M", "chck_lastM", "main"]
    for name in ("chck_lastM", "chck_10M", "chck_9M", "chck_0.5M", "model"):
        make_masked(tmp_path / "made", positions=POSITIONS, seed=len(name))
        (tmp_path / "made" / "model").rename(tmp_path / name)
        (tmp_path / "made" / "tokenizer").rename(tmp_path / f"tokenizer of {name}")
    assert [*find_checkpoints(str(tmp_path))] == names
    assert [*find_checkpoints(str(tmp_path / "chck_9M"))] == ["main"]
    run_line("babylm", tmp_path, data, "--json", "--device", "cpu")
    values = json.loads(capsys.readouterr().out)
    assert [*values] == names
    run_line("babylm", tmp_path, data, "--device", "cpu")
    shown = capsys.readouterr().out
    accuracy = f"{100 * values['main']['blimp_fast']:.1f}"
    assert all(words in shown for words in ("chck_10M", "blimp_fast", "surprisal", accuracy))


def test_contexts_of_a_word_in_two_files_are_joined(tmp_path):
    for name, text in (("a", "ape"), ("b", "bee")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"ox": [{"context": text}]}))
    assert find_suites(tmp_path) == ({}, {"ox": ["ape", "bee"]})


def test_what_is_malformed_is_refused(data, tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(DataError, match="is not a folder"):
        evaluate_run("none", folder)
    with pytest.raises(FolderError, match="none"):
        evaluate_run("none", data)
    folder.mkdir()
    with pytest.raises(DataError, match=r"has no \.jsonl file with sentence_good"):
        evaluate_run("none", folder)
    write(
        folder / "a.jsonl",
        [{"sentence_good": "ape", "sentence_bad": "bee"}, {"sentence_good": "ape"}],
    )
    with pytest.raises(DataError, match=r"a\.jsonl:2: lacks sentence_good and sentence_bad"):
        evaluate_run("none", folder)
    for row in (
        {"sentence_good": "ape", "sentence_bad": 3},
        {"input_prefix": "ape", "options": [" bee"], "numops": 0},
        {"input_prefix": "ape", "options": [], "numops": 0},
    ):
        write(folder / "a.jsonl", [row])
        with pytest.raises(DataError, match=r"a\.jsonl:1: .* fewer than two options"):
            evaluate_run("none", folder)
    (folder / "list.json").write_text("[1]")  # of another form: named in a note
    write(folder / "a.jsonl", [{"sentence_good": "ape", "sentence_bad": "bee"}])
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="file: is a file, not a folder"):
        evaluate_run("none", folder, tmp_path / "file")
    make_masked(tmp_path, positions=POSITIONS)
    write(folder / "a.jsonl", [{"sentence_good": "", "sentence_bad": "bee"}])
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: its end has 0 tokens, and the model reads 1 to 14"
    ):
        evaluate_run(str(tmp_path / "model"), folder)
    write(folder / "a.jsonl", [{"sentence_good": "ape " * 20, "sentence_bad": "bee"}])
    with pytest.raises(DataError, match="its end has 20 tokens"):
        evaluate_run(str(tmp_path / "model"), folder)
    (folder / "a.jsonl").unlink()
    (folder / "words.json").write_text(json.dumps({"  ": [{"context": "ape"}]}))
    with pytest.raises(DataError, match="the word '  ' in context 0: its end has 0 tokens"):
        evaluate_run(str(tmp_path / "model"), folder)
