"""A corpus at a URL: the arrays and the sequences of the folder, through a cache of bounded size."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec", reason="needs the extra 'remote'")

from bothways.core import part_cache, urls
from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.part_cache import Cache, CachedFile, fetch_ahead
from bothways.core.source import Cursor
from bothways.core.urls import Url
from bothways.data import merge_shards
from bothways.data.corpus import Corpus, build_corpus
from bothways.data.corpus_source import CorpusSource
from bothways.data.documents import Document
from bothways.data.epoch_order import (
    AllExcept,
    EpochBlock,
    Selection,
    Windows,
    bytes_at_hand,
    sample_clustered,
)
from bothways.data.remote_arrays import RemoteArray
from bothways.data.segments import FullSentences
from bothways.data.sentence_pairs import NextSentence, SentenceOrder
from bothways.text.tokenizer import Tokenizer
from far_corpus import URL, cut, put
from flaky_store import FlakyStore

START = Cursor()
WINDOWS = Windows(documents=24, run=6)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyStore]]:
    monkeypatch.setattr(urls, "WAITS", (0.0,) * 5)
    monkeypatch.setattr(part_cache, "_TOUCHED", 0.0)
    FlakyStore.clear()
    yield FlakyStore
    idle()
    FlakyStore.clear()


@pytest.fixture
def far(store: type[FlakyStore], corpus: Corpus, tmp_path: Path) -> Corpus:
    """The corpus of the tests at a URL."""
    url = put(Path(corpus.folder), tmp_path, 512)
    return Corpus.open(url, Cache(tmp_path / "cache", 2**20))


def idle() -> None:
    """Wait until nothing more is fetched ahead."""
    for _ in range(2000):
        if fetch_ahead().idle:
            return
        time.sleep(0.005)
    raise AssertionError


def sizes(cache: Cache) -> dict[Path, int]:
    sizes = {}
    for path in cache.folder.glob("*/*.bin.*"):
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            sizes[path] = path.stat().st_size
    return sizes


def held(cache: Cache) -> int:
    """The bytes in a cache at one moment, that between two scans: others write during a scan."""
    before, after = sizes(cache), sizes(cache)
    return sum(size for path, size in before.items() if path in after)


def test_a_corpus_at_a_url_is_that_of_the_folder(far: Corpus, corpus: Corpus) -> None:
    assert far.fingerprint == corpus.fingerprint
    assert len(far) == len(corpus)
    draws = np.random.default_rng(0)
    for name in ("tokens", "sentences", "documents"):
        near, array = getattr(corpus, name), getattr(far, name)
        assert isinstance(array, RemoteArray)
        places = draws.integers(-len(near), len(near), (30, 2))
        assert (array[places] == near[places]).all()
        for start, stop in places:
            assert (array[start:stop] == near[start:stop]).all()
        assert (array[-1], array[0]) == (near[-1], near[0])
        assert (np.asarray(array) == near).all()
        assert len(array[places[:0]]) == 0
        with pytest.raises(IndexError):
            array[len(near)]
    assert far.unknown_share == corpus.unknown_share
    assert (far.token_counts == corpus.token_counts).all()
    far.verify()


def test_the_parts_of_a_corpus_have_digests(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_shards, "PART", 64)
    texts = ["A dog barks. A hound is barking.", "It is late.", "A dog."] * 9
    documents = [Document(f"{text} {'dog ' * n}.", "") for n, text in enumerate(texts)]
    built = build_corpus(documents, tokenizer, tmp_path / "corpus", workers=1, words="spaces")
    stored = built.manifest.files
    cut(tmp_path / "corpus", 64)
    assert Corpus.open(tmp_path / "corpus").manifest.files == stored
    assert len(stored["tokens.bin"].parts) > 5
    assert len(stored["words.bin"].parts) != 1


@pytest.mark.parametrize(
    ("shuffle", "segments"), [(WINDOWS, FullSentences(24)), (None, NextSentence(24))]
)
def test_sequences_depend_neither_on_the_place_nor_on_the_cache(
    far: Corpus, corpus: Corpus, shuffle: Windows | None, segments: Any, tmp_path: Path
) -> None:
    chosen = np.arange(0, len(corpus), 2)

    def source(of: Corpus) -> CorpusSource:
        return CorpusSource(of, corpus.tokenizer.template, segments, chosen, 3, None, shuffle)

    def read(of: Corpus, cursor: Cursor = START) -> list[tuple[list[int], Cursor]]:
        stream = source(of)
        plans = itertools.takewhile(lambda pair: pair[1].epoch < 2, stream.read(cursor))
        return [(stream.build(plan).ids.tolist(), after) for plan, after in plans]

    near = read(corpus)
    assert read(far) == near
    small = Cache(tmp_path / "small", 40 * 512)
    assert held(small) == 0
    assert read(Corpus.open(URL, small)) == near
    idle()
    assert 0 < held(small) <= small.bytes
    assert read(Corpus.open(URL, small), near[99][1]) == near[100:]
    far_left, near_left = (source(each).unread(near[20][1]) for each in (far, corpus))
    np.testing.assert_array_equal(far_left[0], near_left[0])
    assert far_left[1] == near_left[1]


def opened(selection: Selection, epoch: int) -> list[EpochBlock]:
    blocks, block = [], 0
    while block is not None:
        blocks.append(selection.open(1, epoch, block))
        block = selection.following(1, epoch, block)
    return blocks


def test_windows_are_those_of_the_setting_in_another_order_each_epoch(corpus: Corpus) -> None:
    orders = []
    for epoch in range(2):
        blocks = opened(Selection(corpus, AllExcept(len(corpus)), WINDOWS), epoch)
        assert len(blocks) == 7  # of 150 documents
        order = np.concatenate([block.owners for block in blocks])
        assert sorted(order) == list(range(len(corpus)))
        orders.append(order.tolist())
        runs = [set((block.owners // 6).tolist()) for block in blocks]
        assert sum(map(len, runs)) == 25  # windows share no run
        assert all(3 <= len(one) <= 4 for one in runs)
        assert any(max(one) - min(one) > 4 for one in runs)
        inside = np.diff(blocks[0].owners)
        assert (inside < 0).any()
        assert (inside > 0).any()
    assert orders[0] != orders[1]


@pytest.mark.parametrize("segments", [NextSentence(24), SentenceOrder(24, single="random")])
def test_the_other_document_of_a_pair_is_from_the_same_window(
    corpus: Corpus, segments: Any
) -> None:
    ends = np.asarray(corpus.sentences)[np.asarray(corpus.documents)]
    selection = Selection(corpus, np.arange(0, len(corpus), 2), WINDOWS)
    others = 0
    for block in opened(selection, 0):
        inside = set(selection.ids[block.owners].tolist())
        for plan in segments.plan(block, selection, np.random.default_rng(0)):
            one, other = np.searchsorted(ends, [plan.a, plan.b], side="right") - 1
            assert {one, other} <= inside
            others += one != other
    assert others


def test_windows_fetch_a_part_once_an_epoch(
    corpus: Corpus, store: type[FlakyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = Corpus.open(put(Path(corpus.folder), tmp_path, 128), Cache(tmp_path / "cache", 2**20))
    fetched: list[tuple[str, int]] = []
    real = CachedFile._get

    def get(self: CachedFile, number: int, start: int, stop: int) -> bytes:
        data = real(self, number, start, stop)
        fetched.append((self.url.name, number))
        return data

    monkeypatch.setattr(CachedFile, "_get", get)
    shuffle = Windows(documents=24, run=6)
    needed = bytes_at_hand(far, shuffle)
    whole = bytes_at_hand(far, None)
    assert needed < whole == sum(map(os.path.getsize, (tmp_path / "sent").glob("*.bin")))
    text = Corpus.open(URL, Cache(tmp_path / "some", needed))
    source = CorpusSource(
        text, text.tokenizer.template, FullSentences(24), np.arange(len(text)), 1, None, shuffle
    )
    for plan, after in source.read(START):
        if after.block and not after.item:
            idle()
        source.build(plan)
        if after.epoch:
            break
    idle()
    counts = Counter(name for name, _ in fetched)
    times = Counter(fetched)
    tokens = text.tokens.file.parts
    # A part at the edge of two groups is in two windows.
    assert counts["tokens.bin"] < 1.5 * tokens
    assert sum(1 for (name, _), count in times.items() if name == "tokens.bin") == tokens
    assert held(text.tokens.file.cache) <= needed


def file_of(path: Path, cache: Cache, part: int = 1000) -> CachedFile:
    data = path.read_bytes()
    pieces = [data[at : at + part] for at in range(0, len(data), part)]
    digests = tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
    return CachedFile(Url(f"file://{path}"), cache, "key", len(data), part, digests)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    path.write_bytes(random.Random(0).randbytes(39_500))
    (tmp_path / "cache").mkdir()
    return path


def test_the_parts_that_were_read_the_longest_time_ago_make_way(
    data: Path, store: type[FlakyStore], tmp_path: Path
) -> None:
    cache = Cache(tmp_path / "cache", 4000)
    file = file_of(data, cache)

    def present() -> list[int]:
        return sorted(int(path.suffix[1:]) for path in cache.folder.glob("key/tokens.bin.*"))

    content = data.read_bytes()
    for number in (0, 1, 2, 3, 0, 2):
        assert file.array(number).tobytes() == content[1000 * number :][:1000]
    assert present() == [0, 1, 2, 3]
    mapped = file.array(1)
    file.fetch(9)
    assert present() == [0, 1, 2, 9]  # 3 was read before them
    file.fetch(10)
    assert present() == [1, 2, 9, 10]
    file.fetch(39)  # the last one, of 500 bytes
    file.fetch(11)
    assert 1 not in present()
    assert mapped.tobytes() == content[1000:2000]  # who reads a part keeps it
    smaller = Cache(cache.folder, 2000)  # the bound of a later run
    file_of(data, smaller).fetch(20)
    assert held(smaller) <= 2000


def test_parts_read_before_the_clock_was_set_back_make_way_first(
    data: Path, store: type[FlakyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They seemed to be read last, for as long as the clock had been ahead."""
    cache, real = Cache(tmp_path / "cache", 4000), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 86_400 * 10**9)
    ahead = file_of(data, cache)
    for number in (0, 1, 0, 1):
        ahead.array(number)
    monkeypatch.setattr(time, "time_ns", real)
    file = file_of(data, cache)
    for number in (2, 3, 2, 3, 4, 5):
        file.array(number)
    assert sorted(int(path.suffix[1:]) for path in cache.folder.glob("key/*")) == [2, 3, 4, 5]


def test_damaged_parts_are_fetched_again(
    data: Path, store: type[FlakyStore], tmp_path: Path
) -> None:
    cache = Cache(tmp_path / "cache", 10_000)
    first = file_of(data, cache).read(500, 2500)
    for number, rest in enumerate((b"y" * 1000, b"x" * 1000)):  # as a power failure leaves them
        (cache.folder / f"key/tokens.bin.{number:06d}").write_bytes(rest)
    (cache.folder / "key/tokens.bin.000002").write_bytes(b"")
    (cache.folder / ".used").unlink()
    assert file_of(data, cache).read(500, 2500) == first == data.read_bytes()[500:2500]
    wrong = file_of(data, cache)
    data.write_bytes(bytes(39_500))
    with pytest.raises(ResourceError, match=r"bytes 9,000 to 10,000 are not those that the man"):
        wrong.read(9000, 9001)
    assert not [*cache.folder.glob("key/.writing-*")]
    assert int((cache.folder / ".used").read_text()) == held(cache)


def _read_at_random(path: Path, cache: Cache, seed: int) -> None:
    file, draws, data = file_of(path, cache), random.Random(seed), path.read_bytes()
    for _ in range(60):
        start = draws.randrange(len(data))
        stop = min(start + draws.randrange(2500), len(data))
        if file.read(start, stop) != data[start:stop]:
            os._exit(3)
        if seed % 2:
            file.array(draws.randrange(file.parts))


def _stop_while_fetching(path: Path, cache: Cache) -> None:
    CachedFile._get = lambda self, *_: time.sleep(60)  # type: ignore[method-assign]
    file_of(path, cache).fetch(7)


@pytest.mark.parametrize("room", [6000, 100_000])
def test_processes_share_a_cache(
    room: int, data: Path, store: type[FlakyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, log, real = Cache(tmp_path / "cache", room), tmp_path / "log", CachedFile._get

    def get(self: CachedFile, number: int, start: int, stop: int) -> bytes:
        with log.open("a") as file:
            file.write(f"{number}\n")
        return real(self, number, start, stop)

    monkeypatch.setattr(CachedFile, "_get", get)
    context: Any = multiprocessing.get_context("fork")
    killed = context.Process(target=_stop_while_fetching, args=(data, cache))
    killed.start()
    while not [*cache.folder.glob("key/.writing-*")]:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    readers = [context.Process(target=_read_at_random, args=(data, cache, n)) for n in range(3)]
    for reader in readers:
        reader.start()
    highest = 0
    while any(reader.is_alive() for reader in readers):
        highest = max(highest, held(cache))
        time.sleep(0.02)
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert 0 < highest <= room
    fetched = Counter(log.read_text().split())
    assert len(fetched) == 40
    if room > 40_000:
        assert max(fetched.values()) == 1  # whoever asked first, for all


@pytest.mark.parametrize("number", [7, 8])
def test_room_of_a_killed_process_is_free_at_once(
    number: int, data: Path, store: type[FlakyStore], tmp_path: Path
) -> None:
    cache, context = Cache(tmp_path / "cache", 1500), multiprocessing.get_context("fork")
    killed = context.Process(target=_stop_while_fetching, args=(data, cache))
    killed.start()
    while not [*cache.folder.glob("key/.writing-*")]:
        time.sleep(0.01)
    killed.kill()
    killed.join()
    reader = threading.Thread(target=file_of(data, cache).fetch, args=(number,), daemon=True)
    reader.start()
    reader.join(5)
    assert not reader.is_alive()
    assert [path.suffix for path in cache.folder.glob("key/*")] == [f".{number:06d}"]
    assert int((cache.folder / ".used").read_text()) == held(cache) == 1000


def test_room_is_kept_for_a_process_that_is_slow_whatever_the_clock_says(
    data: Path, store: type[FlakyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real = Cache(tmp_path / "cache", 1500), CachedFile._get
    begun, go_on = threading.Event(), threading.Event()

    def get(self: CachedFile, number: int, start: int, stop: int) -> bytes:
        if number == 7:
            os.utime(*cache.folder.glob("key/.writing-*"), (0, 0))
            begun.set()
            go_on.wait(20)
        return real(self, number, start, stop)

    monkeypatch.setattr(CachedFile, "_get", get)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(file_of(data, cache).read, 7000, 8000)
        begun.wait(20)
        other = threads.submit(file_of(data, cache).read, 8000, 9000)
        time.sleep(0.1)
        assert not other.done()
        go_on.set()
        assert slow.result(20) + other.result(20) == data.read_bytes()[7000:9000]


def test_mistakes(
    far: Corpus, store: type[FlakyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "other", 2**20)

    def failure(kind: type[Exception] = DataError, of: Cache = cache) -> str:
        with pytest.raises(kind) as caught:
            Corpus.open(URL, of)
        return str(caught.value)

    place, files = "bucket/corpus", dict(store.files)
    assert "BOTHWAYS_CACHE_GB: must be at least 1.64e-05 GB, not 1e-05" in failure(
        ConfigError, Cache(cache.folder, 10_000)
    )
    del store.files[f"{place}/tokens.bin"]
    assert failure().startswith(f"{URL}/tokens.bin: is missing\n")
    store.files[f"{place}/tokens.bin"] = b"short"
    assert f"{URL}/tokens.bin: has 5 bytes; the manifest says " in failure()
    tree = json.loads(files[f"{place}/manifest.json"])
    for key, value in (("part", 500), ("part", 1024), ("part", -8), ("format", "another")):
        store.files = files | {f"{place}/manifest.json": json.dumps(tree | {key: value}).encode()}
        assert failure().startswith(f"{URL}/manifest.json: is ")
    store.files = files | {f"{place}/tokenizer.json": b"{}"}
    fresh = Cache(tmp_path / "fresh", 2**20)
    assert f"{URL}/tokenizer.json: has 2 bytes; the manifest" in failure(of=fresh)
    store.files = files
    del store.files[f"{place}/manifest.json"]
    assert f"{URL}: is not a corpus, or is unfinished: it has no manifest.json" in failure()
    (tmp_path / "file").touch()
    store.files[f"{place}/manifest.json"] = json.dumps(tree).encode()
    assert "cannot be written" in failure(ResourceError, Cache(tmp_path / "file" / "a", 2**20))
    for value in ("0", "much", "-1", "inf", "nan"):
        monkeypatch.setenv("BOTHWAYS_CACHE_GB", value)
        with pytest.raises(ConfigError, match=f"BOTHWAYS_CACHE_GB: '{value}' is not a positive"):
            Cache.from_environment()
    monkeypatch.setenv("BOTHWAYS_CACHE_GB", "0.5")
    monkeypatch.setenv("BOTHWAYS_CACHE", "~/parts")
    assert Cache.from_environment() == Cache(Path.home() / "parts", 500_000_000)
    with pytest.raises(
        ConfigError, match=r"shuffle.documents: must be at least the 4,096 of a run, not 10"
    ):
        Windows(documents=10)


def test_held_out_documents_come_from_few_places(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bothways.data.epoch_order.CLUSTER", 5)
    chosen = np.arange(1, len(corpus), 3)
    tokens = np.diff(np.asarray(corpus.sentences)[np.asarray(corpus.documents)].astype(np.int64))
    for wanted in (50, 400, 10**6):
        few = sample_clustered(corpus, chosen, wanted, 0)
        assert tokens[few].sum() >= min(wanted, tokens[chosen].sum())
        places = set((few // 5).tolist())
        assert few.tolist() == [each for each in chosen if each // 5 in places]
    one, other = (sample_clustered(corpus, chosen, 50, seed).tolist() for seed in (0, 1))
    assert one != other
    assert len(one) < len(chosen) / 4
    assert sample_clustered(corpus, chosen[:1], 1, 0).tolist() == chosen[:1].tolist()


def test_remote_arrays_of_words(
    tokenizer: Tokenizer, store: type[FlakyStore], tmp_path: Path
) -> None:
    documents = [Document(f"A dog barks. {'A hound is barking. ' * n}", "") for n in range(30)]
    near = build_corpus(documents, tokenizer, tmp_path / "near", workers=1, words="spaces")
    assert near.words is not None
    text = Corpus.open(put(tmp_path / "near", tmp_path, 256), Cache(tmp_path / "cache", 2**20))
    sources = [
        CorpusSource(each, tokenizer.template, FullSentences(24), np.arange(len(near)), 1)
        for each in (near, text)
    ]
    streams = [itertools.islice(source.read(START), 20) for source in sources]
    for (plan, _), (other, _) in zip(*streams, strict=True):
        one, two = sources[0].build(plan), sources[1].build(other)
        assert (one.ids == two.ids).all()
        assert one.word_starts is not None
        assert (one.word_starts == two.word_starts).all()
    text.verify()
    assert dataclasses.replace(text.manifest, files={}, part=1) == dataclasses.replace(
        near.manifest, files={}, part=1
    )
