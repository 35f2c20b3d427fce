"""Hard negatives: equal to a search by hand, without positives and likely positives; stopped runs go on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError, ResourceError
from bothways.prediction.search import mining
from commands import run_line
from toy_folder import BAD, FILLERS, GOOD

TEXTS = [f"{a} {b} {c}" for a, b, c in itertools.product(GOOD + BAD, FILLERS[1:9], ("film", "men"))]


@pytest.fixture(scope="module")
def index(folder, tmp_path_factory) -> Any:
    out = tmp_path_factory.mktemp("place") / "index"
    return bothways.build_index(TEXTS, folder, out, bm25=True, device="cpu", progress=False)


def pairs(count: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    drawn = (draw.choice(TEXTS, 2, False) for _ in range(count))
    return [{"anchor": anchor, "positive": positive} for anchor, positive in drawn]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"margin": None}, {"margin": None, "absolute_margin": 0.1}, {"margin": 0.2, "skip": 2},
        {"margin": None, "depth": 5}, {"margin": None, "depth": 9, "skip": 4, "choose": "random"},
    ],
    ids=str,
)  # fmt: skip
def test_negatives_are_those_of_a_search_by_hand(settings, index, folder, tmp_path):
    rows = [*pairs(8), {"anchor": TEXTS[0], "positive": [TEXTS[1], TEXTS[2]]}]
    rows.append({"anchor": TEXTS[0], "positive": TEXTS[5]})  # of one query, in two rows
    done = bothways.mine(
        rows, index, tmp_path / "out.jsonl", progress=False, device="cpu", **settings
    )
    encode = bothways.load(folder, "embed", device="cpu", normalised=True).encode
    vectors = dict(zip(TEXTS, encode(TEXTS).astype(np.float64), strict=True))
    likely = {(line["row"], line["candidate"]) for line in lines(done.likely_file)}
    depth, drawn = settings.get("depth", 100), settings.get("choose") == "random"
    ranks = list[int]()
    for number, (row, mined) in enumerate(zip(rows, lines(done.file), strict=True)):
        query, positives = row["anchor"], row["positive"]
        positives = [positives] if isinstance(positives, str) else positives
        assert (mined["anchor"], mined["positive"]) == (query, positives)
        answers = {query, *positives}
        answers |= {TEXTS[1], TEXTS[2], TEXTS[5]} if query == TEXTS[0] else set()
        scores = {text: float(vectors[query] @ vectors[text]) for text in TEXTS}
        lowest = min(scores[text] for text in positives)
        margin, absolute = settings.get("margin", 0.05), settings.get("absolute_margin")
        bars = [lowest - margin * abs(lowest)] if margin is not None else []
        bars += [lowest - absolute] if absolute is not None else []
        bar = min(bars, default=np.inf)
        # The last query has five answers: a ranking is read deeper by so many documents.
        deepest = sorted(TEXTS, key=lambda t: -scores[t])[: depth + 5]
        ranked = [t for t in deepest if t not in answers]
        expected = [t for t in ranked if scores[t] <= bar]
        skip = settings.get("skip", 0)
        if drawn:  # with the query and its answers, which are found and not chosen
            among = [t for t in deepest[skip:depth] if t not in answers]
            assert {*mined["negative"]} <= {*among}
            ranks += map(among.index, mined["negative"])
        else:
            assert mined["negative"] == expected[skip : skip + 3]
        near = {t for t in ranked if scores[t] > bar}
        assert {text for at, text in likely if at == number} == near
    assert not drawn or len({*ranks}) > 3
    assert (done.rows, done.likely) == (10, len(likely))
    assert done.negatives == sum(len(line["negative"]) for line in lines(done.file))


def test_negatives_that_a_row_has_are_not_found_again(index, folder, tmp_path):
    [plain], out = pairs(1), tmp_path / "out.jsonl"
    bothways.mine([plain], index, out, margin=None, progress=False)
    found = lines(out)[0]["negative"]
    bothways.mine([{**plain, "negative": found[:2]}], index, out, margin=None, progress=False)
    negatives = lines(out)[0]["negative"]
    assert (negatives[:3], len({*negatives})) == (found, 5)
    twice = bothways.build_index(TEXTS * 2, folder, device="cpu", progress=False)
    bothways.mine([plain], twice, out, margin=None, progress=False)
    assert len({*lines(out)[0]["negative"]}) == 3


def test_random_ones_and_those_of_bm25_are_no_positives(index, tmp_path):
    rows = pairs(6)
    for name, options in (
        ("random", {"choose": "random", "depth": 40, "margin": None}),
        ("words", {"mode": "bm25", "margin": None}),
    ):
        done = bothways.mine(rows, index, tmp_path / f"{name}.jsonl", progress=False, **options)
        for row, mined in zip(rows, lines(done.file), strict=True):
            assert len({*mined["negative"]}) == 3
            assert not {row["anchor"], row["positive"]} & {*mined["negative"]}
            if name == "words":
                assert all({*row["anchor"].split()} & {*text.split()} for text in mined["negative"])


def test_a_stopped_run_goes_on(index, tmp_path, monkeypatch):
    monkeypatch.setattr(mining, "WINDOW", 4)
    rows, options = pairs(14), {"choose": "random", "progress": False}
    whole = bothways.mine(rows, index, tmp_path / "whole.jsonl", **options)
    mined, calls = mining.mine_window, list[int]()

    def stop(examples: Any, first: int, *rest: Any) -> Any:
        """Mine, but for the second window of the first try."""
        calls.append(first)
        for number, each in enumerate(mined(examples, first, *rest)):
            if (len(calls), number) == (2, 1):
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(mining, "mine_window", stop)
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bothways.mine(rows, index, out, **options)
    assert not out.exists()
    with pytest.raises(BothwaysError, match="other settings"):
        bothways.mine(rows, index, out, seed=1, **options)
    with (tmp_path / "out.jsonl.part").open("ab") as file:
        file.write(b'{"anchor": "cut')
    again = bothways.mine(rows, index, out, **options)
    assert calls == [0, 4, 4, 8, 12]
    # One that was killed between its last two renamings, of which the first is done.
    copy = tmp_path / "copy.jsonl"
    rename = Path.replace

    def killed(path: Path, target: Path) -> Any:
        if path.name == "copy.likely.jsonl.part":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            bothways.mine(rows, index, copy, **options)
    assert bothways.mine(rows, index, copy, **options).file.read_bytes() == whole.file.read_bytes()
    for file in tmp_path.glob("copy.*"):
        file.unlink()
    assert out.read_bytes() == whole.file.read_bytes()
    assert again.likely_file.read_bytes() == whole.likely_file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.jsonl", "out.likely.jsonl", "whole.jsonl", "whole.likely.jsonl"
    ]  # fmt: skip


def test_a_command_that_was_stopped_at_once_has_kept_nothing(index, tmp_path, monkeypatch, capsys):
    (tmp_path / "pairs.jsonl").write_text("")  # is next to the output, and no part of it

    def stop(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bothways, "mine", stop)
    inputs = (tmp_path / "pairs.jsonl", "--index", index.folder)
    with pytest.raises(KeyboardInterrupt):
        run_line("mine", *inputs, "--out", tmp_path / "o.jsonl")
    assert "Nothing is finished, and nothing is left behind." in capsys.readouterr().err


def test_the_command_trains_what_it_mines(index, folder, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(20)))
    out = tmp_path / "hard.jsonl"
    inputs = (tmp_path / "pairs.jsonl", "--index", index.folder)
    run_line("mine", *inputs, "--out", out, "--margin", "none")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "60 negatives for 20 rows" in printed.err
    result = bothways.finetune(folder, out, None, "embed", epochs=1, device="cpu", progress=False)
    assert result.task_model.task.loss.kind == "softmax"


@pytest.mark.parametrize(
    ("rows", "options", "error", "where"),
    [
        ([{"text": "good film", "label": "a"}], {}, DataError, "pair 1"),
        ([{**pairs(1)[0], "score": 0.1}], {}, DataError, "pair 1"),
        ([{**pairs(1)[0], "negative": "a", "scores": [3, 1]}], {}, DataError, "pair 1"),
        ([], {}, DataError, "pairs"),
        ([None], {}, DataError, "pair 1"),
        (pairs(2), {"negatives": 0}, ConfigError, "negatives"),
        (pairs(2), {"depth": 2}, ConfigError, "depth"),
        (pairs(2), {"margin": -0.1}, ConfigError, "margin"),
        (pairs(2), {"seed": -1, "choose": "random"}, ConfigError, "seed"),
        (pairs(2), {"seed": 1}, ConfigError, "seed"),
        (pairs(2), {"out": "x.csv"}, ConfigError, "out"),
    ],
)
def test_what_cannot_be_mined_is_refused(rows, options, error, where, index, tmp_path):
    out = tmp_path / options.pop("out", "out.jsonl")
    with pytest.raises(error) as caught:
        bothways.mine(rows, index, out, progress=False, **options)
    assert caught.value.where == where


def test_columns_that_cannot_be_named_are_to_be_renamed(index, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"q": "a good film", "a": "a fine film"}\n')
    for rows in (pairs, [{"q": "a good film", "a": "a fine film"}]):
        with pytest.raises(DataError, match="Call it 'anchor'") as caught:
            bothways.mine(rows, index, tmp_path / "out.jsonl")
        assert "text=" not in str(caught.value)


def test_neither_the_pairs_nor_the_index_are_written_over(index, tmp_path):
    source = tmp_path / "out.likely.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in pairs(2)))
    (texts,) = index.folder.glob("texts-*.jsonl")
    for rows, out, file in ((source, tmp_path / "out.jsonl", source), (pairs(2), texts, texts)):
        before = file.read_bytes()
        with pytest.raises(ResourceError, match="the output is also an input"):
            bothways.mine(rows, index, out, progress=False)
        assert file.read_bytes() == before


def test_words_of_an_index_without_them_leave_no_file(folder, tmp_path):
    plain = bothways.build_index(TEXTS, folder, tmp_path / "plain", device="cpu", progress=False)
    with pytest.raises(ConfigError, match="built without BM25"):
        bothways.mine(pairs(2), plain, tmp_path / "out.jsonl", mode="bm25", progress=False)
    assert [*tmp_path.iterdir()] == [tmp_path / "plain"]
