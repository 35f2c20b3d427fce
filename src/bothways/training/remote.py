"""A copy of a run's checkpoints at a URL that fsspec opens, such as s3://bucket/run.

    s3://bucket/run/step-120/…              the files of the checkpoint
                    step-120/manifest.json  uploaded last, deleted first

A checkpoint without its manifest is incomplete, and is never read. What is read is verified by the
checksums in the manifest, as on a disk.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from bothways.core.atomic_files import file_digest, replace_folder
from bothways.core.errors import ResourceError
from bothways.core.urls import open_store, retry

MANIFEST = "manifest.json"
RECORDS = ("metrics.jsonl", "config.toml", "steps.bin", "data.json")
"""The files of a run that are copied besides its checkpoints."""

T = TypeVar("T")


class Remote:
    """The copy of a run at a URL.

    Raises:
        ConfigError: fsspec does not know the URL.
        ResourceError: a package is not installed, or a transfer fails again and again.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._files, root = open_store(url, "training.keep.remote")
        self._root = root.rstrip("/")

    def send(self, folder: Path, files: Iterable[Path]) -> None:
        """Copy files of a checkpoint, given by their places in or below `folder`."""
        name = folder.name.rpartition(".writing-new-")[2]
        for file in files:
            self._upload(file, f"{self._root}/{name}/{file.relative_to(folder).as_posix()}")

    def complete(self, folder: Path) -> None:
        """Copy what is missing of a checkpoint, and its manifest last."""
        path = f"{self._root}/{folder.name}"
        there = set(self._names(path))
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        missing = [file for file in files if file.relative_to(folder).as_posix() not in there]
        self.send(folder, (file for file in missing if file.name != MANIFEST))
        self.send(folder, [folder / MANIFEST])

    def send_records(self, run: Path) -> None:
        """Copy the records of a run and its settings."""
        for name in RECORDS:
            if (run / name).exists():
                self._upload(run / name, f"{self._root}/{name}")

    def checkpoints(self) -> dict[str, int]:
        """Return the steps of the complete checkpoints by name, oldest first."""
        files = self._names(self._root)
        names = [path.split("/")[0] for path in files if path.endswith(f"/{MANIFEST}")]
        steps = {name: name.removeprefix("step-") for name in names if name.startswith("step-")}
        complete = {name: int(step) for name, step in steps.items() if step.isdecimal()}
        return dict(sorted(complete.items(), key=lambda item: item[1]))

    def fetch(self, name: str, run: Path) -> None:
        """Copy a checkpoint into the folder of a run, whole or not at all.

        Raises:
            ResourceError: a file is not what its checksum says.
        """
        with replace_folder(run / name) as folder:
            for file_name in self._names(f"{self._root}/{name}"):
                target = folder / file_name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._download(f"{self._root}/{name}/{file_name}", target)
            digests = json.loads((folder / MANIFEST).read_text("utf8"))["files"]
            for file_name, digest in digests.items():
                if not (folder / file_name).is_file() or file_digest(folder / file_name) != digest:
                    message = f"{file_name} is damaged: it is not what was saved"
                    fix = "Delete this checkpoint there, to continue from the one before it."
                    raise ResourceError(message, where=f"{self.url}/{name}", fix=fix)

    def fetch_records(self, run: Path) -> None:
        """Copy the records of a run where its folder has none."""
        there = self._names(self._root)
        for name in RECORDS:
            if name in there and not (run / name).exists():
                self._download(f"{self._root}/{name}", run / name)

    def keep_only(self, names: Iterable[str]) -> None:
        """Delete the checkpoints with other names; the manifest first."""
        stay = {*names}
        for name in self.checkpoints():
            if name not in stay:
                path = f"{self._root}/{name}"
                self._retry(
                    lambda path=path: self._files.rm(f"{path}/{MANIFEST}"), f"deleting {path}"
                )
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm(path, recursive=True)

    def _upload(self, file: Path, path: str) -> None:
        self._retry(lambda: self._put(file, path), f"writing {path}")

    def _download(self, path: str, file: Path) -> None:
        self._retry(lambda: self._get(path, file), f"reading {path}")

    def _get(self, path: str, file: Path) -> None:
        self._files.get_file(path, str(file))

    def _put(self, file: Path, path: str) -> None:
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), path)

    def _names(self, path: str) -> list[str]:
        return self._retry(lambda: self._find(path), f"listing {path}")

    def _find(self, path: str) -> list[str]:
        """Return the files below a place, relative to it."""
        self._files.invalidate_cache()
        root = self._files._strip_protocol(path).rstrip("/") + "/"
        return [name.removeprefix(root) for name in self._files.find(path)]

    def _retry(self, transfer: Callable[[], T], action: str) -> T:
        fix = "Look at the connection and the rights; the run can be resumed."
        return retry(transfer, action, self.url, fix)
