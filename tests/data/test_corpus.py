"""A corpus: the same bytes however it was built, nothing that looks whole and is not, and the ids of the plain pipeline."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from bothways.cli import data as commands
from bothways.core.errors import ConfigError, DataError, ResourceError
from bothways.core.files import file_digest, lock_folder
from bothways.data import corpus as corpus_module, shards
from bothways.data.cleaning.config import Cleaning, make_cleaning
from bothways.data.cleaning.rules import StopWords, TerminalPunctuation
from bothways.data.corpus import WORK, Corpus, length_percentiles, write_corpus
from bothways.data.documents import Document, read_documents
from bothways.data.manifest import MANIFEST
from bothways.data.sentences import detect_language, split_sentences
from bothways.data.shards import first_occurrences
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import SPECIALS, WordPiece, train_vocabulary
from child_processes import assert_they_end, children
from heard_progress import Heard

WORDS = [
    "the", "cat", "dog", "sat", "ran", "mat", "house", "unhappiness", "don't", "3.5", "U.S.",
    "Ünïcode", "数学", "，",
]  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    letters = string.ascii_lowercase + string.digits + string.punctuation + "数学"
    tokens = [*SPECIALS, *letters, *(f"##{c}" for c in letters), "the", "cat", "un", "##happi"]
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(tokens), encoding="utf-8")
    return Tokenizer.load(path)


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 2000)


def some_documents(count: int, seed: int = 0) -> list[Document]:
    draw = random.Random(seed)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 12))).capitalize() + draw.choice(
            [".", "!", "。"]
        )

    def text() -> str:
        lines = ([sentence() for _ in range(draw.randint(0, 4))] for _ in range(draw.randint(1, 3)))
        return "\n".join(map(" ".join, lines))

    return [Document(text(), f"document {i}") for i in range(count)]


CLEANING = make_cleaning("c4", near_duplicates=0.6)


def with_copies(documents: list[Document]) -> list[Document]:
    """Add copies, some of them changed a little, and documents of the kinds that C4 leaves out."""
    more = [f"{one.text}{more}" for one in documents[:60:3] for more in ("", " One more is there.")]
    kinds = ("Home", "We use cookies on all of these.", "Then comes lorem ipsum, and more.")
    return [*documents, *(Document(text, "more") for text in (*more, *kinds))]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def plain(
    documents: Iterable[Document], tokenizer: Tokenizer, min_tokens: int = 1
) -> list[list[list[int]]]:
    """The same by the slow road: the backend on one sentence after the other, a set for what was seen."""
    result, seen = [], set[str]()
    for document in documents:
        sentences = split_sentences(document.text, detect_language(document.text))
        ids = [
            tokenizer.backend.encode(sentence, add_special_tokens=False).ids
            for sentence in sentences
        ]
        key = "\n".join(sentences)
        if sum(map(len, ids)) >= min_tokens and key not in seen:
            seen.add(key)
            result.append([row for row in ids if row])
    return result


def as_lists(corpus: Corpus) -> list[list[list[int]]]:
    return [
        [ids.tolist() for ids in corpus.sentences_of(document)] for document in range(len(corpus))
    ]


# What is in a corpus


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("min_tokens", [1, 30])
def test_it_holds_the_ids_of_the_plain_pipeline(tmp_path, tokenizer, min_tokens):
    documents = some_documents(300)
    spaced = Document(documents[7].text.replace("\n", "\r\n  "), "the same but for white space")
    documents += [documents[5], spaced]
    cleaning = Cleaning(min_tokens=min_tokens)
    corpus = write_corpus(documents, tokenizer, tmp_path / "c", cleaning=cleaning, workers=1)
    expected = plain(documents, tokenizer, min_tokens)
    assert as_lists(corpus) == expected
    counts, left_out = corpus.manifest.counts, corpus.manifest.left_out
    assert (counts.documents, counts.sentences) == (len(expected), sum(map(len, expected)))
    tokens = sum(len(ids) for document in expected for ids in document)
    assert counts.tokens == len(corpus.tokens) == tokens
    short = sum(not plain([document], tokenizer, min_tokens) for document in documents)
    assert left_out("min_tokens") == short > 0
    assert counts.documents + left_out("duplicates") + short == len(documents)
    assert left_out("duplicates") >= 1
    assert f", left_out={left_out('duplicates') + short})" in repr(corpus)
    assert corpus.tokens.dtype == np.uint16
    assert corpus.sentences.dtype == corpus.documents.dtype == np.uint64


def test_large_vocabularies_take_four_bytes(tmp_path, tokenizer):
    assert (shards.token_type(2**16), shards.token_type(2**16 + 1)) == ("uint16", "uint32")
    spec = json.loads(tokenizer.backend.to_str())
    spec["model"]["vocab"]["last"] = 2**16 + 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    large = Tokenizer.load(tmp_path / "tokenizer.json")
    corpus = write_corpus([Document("last cat", "d")], large, tmp_path / "c", workers=1)
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens.tolist() == [2**16 + 5, tokenizer.id("cat")]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["The cat."], (1, 1, 3)), (["cat. cat.", "\0\x01"], (1, 2, 4)), (["\ud800 cat"], (1, 1, 1))],
)
def test_next_to_nothing(tmp_path, tokenizer, texts, expected):
    documents = [Document(text, "d") for text in texts]
    manifest = write_corpus(documents, tokenizer, tmp_path, workers=2).manifest
    counts = manifest.counts
    assert (counts.documents, counts.sentences, counts.tokens) == expected
    assert counts.documents + manifest.left_out("min_tokens") == len(texts)
    assert len(Corpus.open(tmp_path)) == counts.documents


@given(hnp.arrays(np.uint8, st.tuples(st.integers(0, 60), st.just(2)), elements=st.integers(0, 3)))
def test_first_occurrences(few):
    digests = np.zeros((len(few), 16), dtype=np.uint8)
    # Several parts, and digests that differ in one word alone.
    digests[:, 0], digests[:, 15] = few[:, 0] * 80, few[:, 1]
    rows = [bytes(row) for row in digests]
    assert first_occurrences(digests).tolist() == [
        rows.index(row) == i for i, row in enumerate(rows)
    ]


@given(st.lists(st.integers(0, 9)), st.lists(st.floats(0, 100), min_size=1, max_size=4))
def test_percentiles(lengths, points):
    offsets = np.cumsum([0, *lengths]).astype(np.uint64)
    expected = np.percentile(lengths, points, method="inverted_cdf").tolist() if lengths else []
    assert length_percentiles(offsets, points, chunk=3) == expected


def on_advance(call: Callable[[], object]) -> Heard:
    """Return a receiver of progress that calls a function whenever it advances."""
    heard = Heard()
    heard.advance = lambda *_: call()
    return heard


# The same bytes


@pytest.mark.usefixtures("small_shards")
def test_any_workers_write_the_same_bytes(tmp_path, tokenizer):
    documents = with_copies(some_documents(200))
    one = write_corpus(documents, tokenizer, tmp_path / "1", cleaning=CLEANING, workers=1)
    write_corpus(documents, tokenizer, tmp_path / "3", cleaning=CLEANING, workers=3)
    assert contents(tmp_path / "3") == contents(tmp_path / "1")
    none = [step.name for step in one.manifest.steps if not step.documents + step.lines]
    assert none == ["min_tokens"]
    assert set(contents(tmp_path / "1")) == {
        *("manifest.json", "tokens.bin", "sentences.bin", "documents.bin"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    }


SCRIPT = """
import sys, time
from bothways.data.cleaning.config import make_cleaning
from bothways.data import shards
from bothways.data.corpus import write_corpus
from bothways.data.documents import read_documents
from bothways.text.tokenizer import Tokenizer
from heard_progress import Heard
shards.SHARD_CHARACTERS = 2000
text, tokenizer, out, workers, last_words = sys.argv[1:]
cleaning = make_cleaning("c4", near_duplicates=0.6)
class Report(Heard):
    def advance(self, done):
        if self.names[-1] == last_words:
            print(last_words, flush=True)
            time.sleep(0.05)  # to be killed in
write_corpus(read_documents([text]), Tokenizer.load(tokenizer), out, cleaning=cleaning, workers=int(workers), progress=Report())
"""


def write_jsonl(path: Path, documents: list[Document]) -> Path:
    lines = (json.dumps({"text": document.text}) for document in documents)
    path.write_text("\n".join(lines) + "\n")
    return path


SLOW = pytest.param(1, "finding near-duplicates", marks=pytest.mark.slow)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(("workers", "last_words"), [(2, "encoding"), SLOW, (1, "merging")])
def test_a_killed_build_goes_on(tmp_path, tokenizer, workers, last_words):
    text, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_jsonl(text, with_copies(some_documents(200)))
    tokenizer.save(tmp_path / "tokenizer")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = map(str, (text, tmp_path / "tokenizer", out, workers, last_words))
    command = [sys.executable, "-c", SCRIPT, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for _ in range(3):
            assert process.stdout.readline(), "the build ended by itself"
        process.send_signal(signal.SIGKILL)
    with pytest.raises(DataError, match="not a corpus, or is unfinished"):
        Corpus.open(out)
    kept = {path: path.stat().st_mtime_ns for path in (out / WORK).glob("*.npz")}
    assert len(kept) >= 3
    made: list[str] = []
    store = shards.store_shard

    def watch(path: Path, shard: shards.Shard) -> None:
        made.append(path.name)
        store(path, shard)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "store_shard", watch)
        write_corpus(read_documents([str(text)]), tokenizer, out, cleaning=CLEANING, workers=1)
    assert not {path.name for path in kept} & set(made), "what was done is not done again"
    fresh = tmp_path / "fresh"
    write_corpus(read_documents([str(text)]), tokenizer, fresh, cleaning=CLEANING, workers=1)
    assert contents(out) == contents(tmp_path / "fresh")


@pytest.fixture(scope="module")
def long_text(tmp_path_factory) -> Path:
    """Text of four shards."""
    place = tmp_path_factory.mktemp("long") / "a.txt"
    line = " ".join(f"the cat {n % 977} sat on mat {n % 31}." for n in range(150))
    count = 4 * shards.SHARD_CHARACTERS // len(line)
    place.write_text("".join(f"Document {n}. {line}\n" for n in range(count)))
    return place


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("again", [None, 0.0, 0.03])
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_of_the_command_is_one_message_and_leaves_no_process(
    tmp_path, tokenizer, long_text, workers, again
):
    tokenizer.save(tmp_path / "tokenizer")
    out, environment = tmp_path / "out", os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["corpus", "build", str(long_text), "--tokenizer", str(tmp_path / "tokenizer")]
    process = subprocess.Popen(
        [sys.executable, "-m", "bothways", *words, "--out", str(out), "--workers", str(workers)],
        env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not any((out / WORK).glob("[!.]*.npz")):
        assert process.poll() is None
        time.sleep(0.005)
    own = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    if again is not None:
        time.sleep(again)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate()
    # A second one may end the process, which shells also report as 130.
    assert process.returncode in ((130,) if again is None else (130, -signal.SIGINT))
    message = f"Stopped. Finished work is kept in {out}; run the same command to continue."
    assert told.splitlines() == [message, "interrupted"]
    assert len(own) == (workers if workers > 1 else 0)
    assert_they_end(own)
    assert not (out / MANIFEST).exists()
    if again is None:
        write_corpus(read_documents([str(long_text)]), tokenizer, out, workers=1)
        write_corpus(read_documents([str(long_text)]), tokenizer, tmp_path / "fresh", workers=1)
        assert contents(out) == contents(tmp_path / "fresh")


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_build_may_be_turned_into_another(tmp_path, tokenizer):
    def interrupt() -> None:
        raise KeyboardInterrupt

    progress = on_advance(interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(some_documents(200), tokenizer, tmp_path / "a", workers=1, progress=progress)
    assert not (tmp_path / "a" / MANIFEST).exists()
    assert [*(tmp_path / "a" / WORK).glob("*.npz")], "what is done is kept"
    others = some_documents(50, seed=1)
    notes = []
    for name in ("a", "b"):
        heard = Heard()
        write_corpus(others, tokenizer, tmp_path / name, language="en", workers=1, progress=heard)
        notes.append([text for text in heard.messages if "unfinished" in text])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert [len(texts) for texts in notes] == [1, 0]


def test_building_again_does_nothing(tmp_path, tokenizer, monkeypatch):
    documents = some_documents(20)
    text = write_jsonl(tmp_path / "a.jsonl", documents)
    write_corpus(read_documents([str(text)]), tokenizer, tmp_path / "c", workers=1)
    before = contents(tmp_path / "c")
    (tmp_path / "c" / WORK).mkdir()  # as a build leaves it that was killed after its manifest

    def refuse(*_: Any) -> None:
        raise AssertionError("nothing is to be encoded")

    monkeypatch.setattr(shards, "encode_shard", refuse)
    reader = read_documents([str(text)])
    write_corpus(reader, tokenizer, tmp_path / "c", workers=1)
    assert reader.position == 0, "unchanged files are not read"
    os.utime(text, ns=(1, 1))
    write_corpus(read_documents([str(text)]), tokenizer, tmp_path / "c", workers=1)
    write_corpus(documents, tokenizer, tmp_path / "c", workers=2)
    assert contents(tmp_path / "c") == before


def test_a_corpus_is_not_overwritten_by_another(tmp_path, tokenizer):
    documents = some_documents(20)
    write_corpus(documents, tokenizer, tmp_path / "c", workers=1)
    before = contents(tmp_path / "c")
    cleaning = Cleaning(min_tokens=9)
    for others, settings, message in (
        (documents[1:], {}, "holds a corpus of other documents"),
        (documents, {"language": "en"}, "language 'auto', not 'en'"),
        (documents, {"cleaning": cleaning}, r"another cleaning \(now min_tokens = 9\)"),
    ):
        with pytest.raises(DataError, match=message):
            write_corpus(others, tokenizer, tmp_path / "c", workers=1, **settings)
    other = train_vocabulary(["another text"], WordPiece(size=100))
    with pytest.raises(DataError, match="that was built with another tokenizer\n"):
        write_corpus(documents, other, tmp_path / "c", workers=1)
    assert contents(tmp_path / "c") == before


# What goes wrong


@pytest.mark.parametrize(
    ("name", "value"), [("language", "english"), ("workers", 0), ("cleaning", "gopher")]
)
def test_settings_that_cannot_be(tmp_path, tokenizer, name, value):
    with pytest.raises(ConfigError) as caught:
        write_corpus([], tokenizer, tmp_path / "c", **{name: value})
    assert caught.value.where == name
    assert not (tmp_path / "c").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path, tokenizer):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        DataError, match=r"is not empty, and not the folder of a corpus: it holds thesis\.tex"
    ):
        write_corpus([], tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_in_use(tmp_path, tokenizer):
    message = f"in use by process {os.getpid()}"
    with lock_folder(tmp_path / "c"), pytest.raises(ResourceError, match=message):
        write_corpus([], tokenizer, tmp_path / "c")


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("writes", [0, 3, 10**9])
def test_a_full_disk(tmp_path, tokenizer, monkeypatch, writes):
    documents, fsync, left = some_documents(200), os.fsync, [writes]

    def full(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0 or any((tmp_path / "a" / WORK).glob("*.bin")):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match=r"cannot be written: No space left on device\n"):
        write_corpus(documents, tokenizer, tmp_path / "a", workers=1)
    assert not (tmp_path / "a" / MANIFEST).exists()
    work = tmp_path / "a" / WORK
    assert not [*work.glob("*.bin"), *work.glob(".writing*")]
    monkeypatch.undo()
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 2000)
    write_corpus(documents, tokenizer, tmp_path / "a", workers=1)
    write_corpus(documents, tokenizer, tmp_path / "b", workers=1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


BROKEN = '{"text": "fine"}\n{"text": \n'


@pytest.mark.parametrize(("text", "workers", "message"), [
    (BROKEN, 1, r"a\.jsonl:2: is not JSON"),
    (BROKEN, 2, r"a\.jsonl:2: is not JSON"),
    ('{"body": "fine"}\n', 1, r"a\.jsonl:1: has no column 'text'"),
])  # fmt: skip
def test_a_refused_build_leaves_what_was_there_before(tmp_path, tokenizer, text, workers, message):
    source = tmp_path / "a.jsonl"
    source.write_text(text)

    def left(out: Path) -> set[str]:
        """Build, and return the names of what is there afterwards."""
        with pytest.raises((DataError, ResourceError), match=message):
            write_corpus(read_documents([str(source)]), tokenizer, out, workers=workers)
        return {path.relative_to(out).as_posix() for path in out.rglob("*")} - {".lock"}

    assert left(tmp_path / "new" / "inner") == set()
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    assert left(tmp_path / "empty") == set()
    assert (tmp_path / "empty").exists()
    work = tmp_path / "begun" / WORK
    work.mkdir(parents=True)
    (tmp_path / "begun" / "notes.txt").touch()
    (work / ".writing-new-0000000.npz").touch()  # of a build that was killed before a shard
    before = {WORK, "notes.txt", f"{WORK}/.writing-new-0000000.npz"}
    assert left(tmp_path / "begun") == before
    (work / "0000000.npz").touch()
    assert left(tmp_path / "begun") > before | {f"{WORK}/0000000.npz"}


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("damage", [b"", b"PK\3\4 and more"])
def test_a_shard_that_was_damaged_is_made_again(tmp_path, tokenizer, damage):
    documents = some_documents(100)

    def spoil() -> None:
        if len(found := sorted((tmp_path / "a" / WORK).glob("*.npz"))) == 2:
            found[0].write_bytes(damage)

    with pytest.raises(DataError, match="was damaged on disk"):
        write_corpus(documents, tokenizer, tmp_path / "a", workers=1, progress=on_advance(spoil))
    write_corpus(documents, tokenizer, tmp_path / "a", workers=1)
    write_corpus(documents, tokenizer, tmp_path / "b", workers=1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def file(name: str, content: bytes | None) -> Callable[[Path], object]:
    return lambda folder: (
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    )


def manifest(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        tree = json.loads((folder / MANIFEST).read_text()) | changes
        remaining = {key: value for key, value in tree.items() if value is not None}
        (folder / MANIFEST).write_text(json.dumps(remaining))

    return edit


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Change a file or make it, and what the manifest says of it."""

    def edit(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))
        files = json.loads((folder / MANIFEST).read_text())["files"]
        files[name] = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        manifest(files=files)(folder)

    return edit


def value(name: str, dtype: type, index: int, new: int) -> Callable[[Path], object]:
    def change(content: bytes) -> bytes:
        array = np.frombuffer(content, dtype=dtype).copy()
        array[index] = new
        return array.tobytes()

    return rewritten(name, change)


@pytest.mark.parametrize(("spoil", "message"), [
    (shutil.rmtree, "no such folder"),
    (lambda folder: (shutil.rmtree(folder), folder.touch()), "is a file, not the folder of a"),
    (file(MANIFEST, None), "is not a corpus, or is unfinished"),
    (file(MANIFEST, b"{"), "manifest.json: is not JSON"),
    (manifest(format="model"), "manifest.json: is not the manifest of a corpus"),
    (manifest(version=7), "is a corpus of version 7; this program reads version 2"),
    (manifest(counts={"documents": 1}), "manifest.json: is damaged at counts.sentences"),
    (manifest(text=None), "manifest.json: is damaged at text"),
    (manifest(files={}), "manifest.json: is damaged at files."),
    (manifest(files={"../a": {"bytes": 1, "sha256": ""}}), "is damaged at files."),
    (manifest(token_type="object"), "manifest.json: is damaged at token_type"),
    (value("sentences.bin", np.uint64, 1, 10**6), "sentences.bin: holds offsets that contra"),
    (value("sentences.bin", np.uint64, -1, 3), "sentences.bin: holds offsets that contradict"),
    (value("documents.bin", np.uint64, 1, 0), "documents.bin: holds offsets that contradict"),
    (value("tokens.bin", np.uint16, 0, 60_000), "tokens.bin: holds ids that the tokenizer"),
    (rewritten("sentences.bin", lambda _: b"123"), "sentences.bin: is not an array of uint64"),
    (rewritten("words.bin", lambda _: b"123"), "words.bin: holds 24 bits for"),
    (file("sentences.bin", None), "sentences.bin: is missing"),
    (file("tokens.bin", b"123"), "tokens.bin: has 3 bytes; the manifest says"),
    (lambda folder: (folder / "vocab.txt").write_bytes(
        (folder / "vocab.txt").read_bytes().replace(b"cat", b"dog")
    ), "vocab.txt: has changed"),
])  # fmt: skip
def test_a_folder_that_is_no_whole_corpus(tmp_path, tokenizer, spoil, message):
    write_corpus(some_documents(5), tokenizer, tmp_path / "c", workers=1)
    spoil(tmp_path / "c")
    with pytest.raises(DataError) as caught:
        Corpus.open(tmp_path / "c")
    assert message in str(caught.value)
    assert caught.value.fix


def test_a_corpus_with_a_similar_name_is_suggested(tmp_path, tokenizer):
    write_corpus(some_documents(5), tokenizer, tmp_path / "corpus", workers=1)
    with pytest.raises(DataError, match=r"Did you mean .*corpus\?"):
        Corpus.open(tmp_path / "corpsu")


def test_verify_reads_what_open_does_not(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("bothways.data.manifest.SMALL", 10)
    write_corpus(some_documents(5), tokenizer, tmp_path, workers=1).verify()
    changed = bytearray((tmp_path / "tokens.bin").read_bytes())
    changed[0] ^= 1
    (tmp_path / "tokens.bin").write_bytes(changed)
    with pytest.raises(DataError, match=r"tokens\.bin: has changed"):
        Corpus.open(tmp_path).verify()


# Held-out documents


def test_split(tmp_path, tokenizer):
    documents = [Document(f"Number {i}.", "d") for i in range(200)]
    corpus = write_corpus(documents, tokenizer, tmp_path, workers=1)
    train, held = corpus.split(0.1, 7)
    assert len(held) == 20
    assert sorted([*train, *held]) == list(range(200))
    same, other = (corpus.split(0.1, seed)[1].tolist() for seed in (7, 8))
    assert held.tolist() == sorted(held) == same != other
    for share, size in ((1e-9, 2), (1 - 1e-9, 198)):
        assert len(corpus.split(share, 0)[1]) == size
    many = [corpus.split(0.25, seed)[1] for seed in range(400)]
    often = np.bincount(np.concatenate(many), minlength=200)
    assert abs(often - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)
    for share in (0.0, 1.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="held_out: must be above 0 and below 1"):
            corpus.split(share, 0)


@pytest.mark.parametrize(("documents", "held"), [(1, 0), (2, 1), (3, 1), (4, 2), (20, 2), (149, 2)])
def test_two_documents_are_held_out_where_two_stay(tmp_path, tokenizer, documents, held):
    texts = [Document(f"The cat {number}.", "d") for number in range(documents)]
    corpus = write_corpus(texts, tokenizer, tmp_path, workers=1)
    if documents == 1:
        with pytest.raises(DataError, match="1 document cannot be split"):
            corpus.split(0.5, 0)
    else:
        assert [len(side) for side in corpus.split(0.01, 0)] == [documents - held, held]


# Memory

MEASURE = """
import sys
from pathlib import Path
from bothways.data.corpus import write_corpus
from bothways.data import shards
from bothways.data.documents import read_documents
from bothways.text.tokenizer import Tokenizer
shards.SHARD_CHARACTERS = 2**17
write_corpus(read_documents([sys.argv[1]]), Tokenizer.load(sys.argv[2]), sys.argv[3], workers=1)
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer")
    line = " ".join(f"the cat {i % 977} sat on mat {i % 31}." for i in range(150))
    peaks = {}
    for megabytes in (3, 28):  # below, the first shards are not full
        text = tmp_path / f"{megabytes}.txt"
        count = megabytes * 2**20 // len(line)
        text.write_text("".join(f"Document {i}. {line}\n" for i in range(count)))
        path = {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
        words = map(str, (text, tmp_path / "tokenizer", tmp_path / f"c{megabytes}"))
        command = [sys.executable, "-c", MEASURE, *words]
        done = subprocess.run(command, env=os.environ | path, stdout=-1, text=True, check=True)
        peaks[megabytes] = int(done.stdout) * 1024
    assert peaks[28] - peaks[3] < 10 * 2**20  # what is written is 13 MiB more, what is read 25


# Commands


def test_the_commands_build_and_show(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("The cat sat. " * 20 + "\n\nThe dog ran.\n\nThe dog ran.\n")
    folders = {"tokenizer": tmp_path / "tokenizer", "out": tmp_path / "c"}
    for again in (False, True):
        commands.build(str(tmp_path / "a.txt"), **folders, workers=1)
        printed = capsys.readouterr()
        assert ("nothing to do" in " ".join(printed.err.split())) == again
        assert "documents" in printed.out
    commands.inspect(tmp_path / "c", documents=5, verify=True)
    shown = capsys.readouterr().out
    for expected in ("All files match the manifest", "left out: duplicates", "the dog ran.", "…"):
        assert expected in shown
    with pytest.raises(DataError, match="no input was given"):
        commands.build(**folders)


def test_the_command_says_how_to_go_on(tmp_path, tokenizer, capsys, monkeypatch):
    def interrupt(*_: Any, **__: Any) -> Iterator[None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_module, "write_corpus", interrupt)
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("The cat sat.")
    (tmp_path / "c" / WORK).mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        commands.build(
            str(tmp_path / "a.txt"), tokenizer=tmp_path / "tokenizer", out=tmp_path / "c"
        )
    assert "run the same command to continue" in " ".join(capsys.readouterr().err.split())


def test_the_cleaning_is_an_option_with_settings_and_is_shown(tmp_path, tokenizer, capsys):
    tokenizer.save(tmp_path / "tokenizer")
    lines = [f"The cat sat on mat {n}. The dog ran on it. Was it a house?" for n in range(4)]
    lines[2:2] = [
        "Lorem ipsum is the text of no house. The cat sat. The dog ran.",
        lines[0] + " No!",
    ]
    lines.append("The cat sat on one of [b] the mats here. The dog ran.")
    text = tmp_path / "a.txt"
    text.write_text("\n\n".join(f"Home\n{line}" for line in lines), encoding="utf-8")
    folders = {"tokenizer": tmp_path / "tokenizer", "out": tmp_path / "c"}
    options = commands.CleaningOptions("c4", near_duplicates=0.7)
    # The settings lower a rule, leave one out, and add one of the other set.
    settings = ["sentence_count.least=2", "near_duplicates.shingle=2", "ellipsis_lines.most=0.5"]
    commands.build(str(text), *settings, **folders, cleaning=options, language="zh")
    assert "unwanted_lines looks for English phrases" in capsys.readouterr().err
    commands.inspect(tmp_path / "c", documents=0)
    rows = {
        row.split("│")[1].strip(): row.split("│")[2].split("(")[0].strip()
        for row in capsys.readouterr().out.splitlines()
        if row.count("│") == 3
    }
    assert rows["documents of the inputs"] == "7"
    assert rows["removed lines: terminal punctuation"] == "7"
    assert rows["left out: unwanted text"] == "1"
    assert rows["left out: ellipsis lines"] == rows["left out: sentence count"] == "0"
    assert int(rows["left out: near duplicates"]) > 0
    with pytest.raises(ConfigError, match=r"near_duplicates\.shingles"):
        commands.build(str(text), "near_duplicates.shingles=2", **folders)


GERMAN = [Document(f"Das ist ein Satz, der {n} ist.", "made") for n in range(5)]
LINES = Cleaning(terminal_punctuation=TerminalPunctuation())


@pytest.mark.parametrize(("documents", "cleaning", "message", "step"), [
    ([], None, r"the inputs have no document\n", None),
    ([Document(" ", "made")], None, "no document with 1 tokens or more", None),
    (GERMAN, Cleaning(min_tokens=99), "no document with 99 tokens or more; 5 have fewer", None),
    (GERMAN, make_cleaning("gopher"), "left out all 5 documents: word_count 5", "word_count"),
    ([Document("a menu", "made")], LINES, "terminal_punctuation 1 lines, min_tokens 1", "terminal_punctuation"),
])  # fmt: skip
def test_a_corpus_of_nothing_is_none_and_the_build_goes_on_with_what_is_mended(
    tmp_path, tokenizer, documents, cleaning, message, step
):
    with pytest.raises(DataError, match=message) as error:
        write_corpus(documents, tokenizer, tmp_path / "c", cleaning=cleaning, workers=1)
    assert (f'such as {step}="none"' in str(error.value.fix)) == (step is not None)
    assert not (tmp_path / "c").exists()
    assert len(write_corpus(GERMAN, tokenizer, tmp_path / "c", workers=1)) == 5


@pytest.mark.parametrize(("language", "expected"), [
    ("de", "stop_words is a list for en: it leaves out no document in de."),
    ("auto", "stop_words left out 83% of the documents. If they are not English, give their language=CODE."),
])  # fmt: skip
def test_a_note_names_a_step_that_does_not_fit(tmp_path, tokenizer, language, expected):
    documents = [*GERMAN, Document("The cat sat on the mat of the dog.", "made")]
    settings = {"language": language, "cleaning": Cleaning(stop_words=StopWords()), "workers": 1}
    heard = Heard()
    write_corpus(documents, tokenizer, tmp_path / "c", progress=heard, **settings)
    (note,) = heard.messages
    assert note.startswith(expected)
