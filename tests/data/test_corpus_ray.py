"""A corpus that a Ray cluster encodes: `make ray` runs these tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bothways.core.atomic_files import file_digest
from bothways.core.jobs.workers import RayWorkers
from bothways.data import encode_shards
from bothways.data.corpus import WORK, build_corpus
from bothways.data.documents import Document
from heard_progress import Heard
from ray_cluster import MARKS, Killing, actor_processes, two_machines
from toy_folder import make_tokenizer

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_machines() as found:
        yield found


class Losing(Heard):
    """Ends a machine of the cluster without notice after some shards."""

    def __init__(self, cluster: Any, after: int) -> None:
        super().__init__()
        self.cluster, self.after = cluster, after

    def advance(self, done: float | int, note: str | None = None) -> None:
        super().advance(done, note)
        self.after -= 1
        if self.after == 0:
            other = next(node for node in self.cluster.list_all_nodes() if not node.head)
            self.cluster.remove_node(other, allow_graceful=False)


class Interrupting(Heard):
    """Ctrl-C after some shards."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def advance(self, done: float | int, note: str | None = None) -> None:
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


def make_documents(count: int) -> list[Document]:
    draw = random.Random(3)
    words = ["ape", "bee", "cat", "dog", "elk"]
    return [
        Document(
            ". ".join(" ".join(draw.choices(words, k=draw.randint(2, 9))) for _ in range(6)) + ".",
            f"document {number}",
        )
        for number in range(count)
    ]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: file_digest(file) for file in folder.iterdir() if file.name != ".lock"}


def test_a_cluster_writes_the_bytes_of_one_machine_whoever_dies(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_shards, "SHARD_CHARACTERS", 2000)
    documents, tokenizer = make_documents(600), make_tokenizer(tmp_path / "tokenizer")
    build_corpus(documents, tokenizer, tmp_path / "one", workers=1)
    expected, shards = digests(tmp_path / "one"), sum(len(each.text) for each in documents) // 2000
    assert shards > 30
    assert len(expected) >= 6

    killing = Killing(8)
    build_corpus(documents, tokenizer, tmp_path / "a", workers=RayWorkers("auto"), progress=killing)
    assert killing.killed
    assert killing.killed not in actor_processes()
    assert digests(tmp_path / "a") == expected

    # Ctrl-C, then the other machine: the shards that were finished are not made again.
    with pytest.raises(KeyboardInterrupt):
        build_corpus(
            documents, tokenizer, tmp_path / "b", workers=RayWorkers("auto"),
            progress=Interrupting(9),
        )  # fmt: skip
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "b" / WORK).glob("*.npz")}
    assert len(kept) == 9

    class Watching(Losing):
        def stage(self, name: str, total: float | int | None = None) -> None:
            super().stage(name, total)
            if name == "merging":
                for path, made in kept.items():
                    assert path.stat().st_mtime_ns == made

    losing = Watching(cluster, 5)
    build_corpus(documents, tokenizer, tmp_path / "b", workers=RayWorkers("auto"), progress=losing)
    assert losing.names == ["encoding", "merging"]
    assert len(losing.done("encoding")) < shards, "fewer than all"
    assert digests(tmp_path / "b") == expected
