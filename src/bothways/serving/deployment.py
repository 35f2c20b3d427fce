"""What a server answers by: folders under names, and keys; both are read again while it runs."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bothways.core.errors import BothwaysError, ConfigError, FolderError
from bothways.hub.provenance import digest_of_folder
from bothways.prediction.predictor import Predictor, open_task
from bothways.prediction.prepared_model import PredictPrecision
from bothways.serving.app import App
from bothways.serving.limits import DEFAULT_LIMITS, Limits
from bothways.serving.models import ServedModel
from bothways.serving.tracing import Tracing, tracing
from bothways.tasks.catalogue import is_task, task_kind

events_log = logging.getLogger("bothways.serving.events")


def read_keys(file: Path) -> list[str]:
    """Return the keys in a file, one a line.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    try:
        keys = file.read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=file) from error
    if not keys:
        raise ConfigError("has no key", where=file, fix="Write one a line.")
    return keys


class NamedModel(NamedTuple):
    """What is served under a name: a folder and the task to open it for, None for its own."""

    folder: str
    task: str | None = None


@dataclass(frozen=True)
class Deployment:
    """The settings of a server process.

    Attributes:
        models: model folders, folders of runs or Hub ids, by the names that requests use.
        length, device, precision: as `open_task`.
        limits, hosts: as `serving.app`.
        keys: as `serving.app`, or a file with one a line.
        traces: the address of an OpenTelemetry collector; None for no traces.
        requests: whether each request is a line of the log.
        delay: seconds between a signal to stop and the end of accepting connections.
        playground: as `serving.app`.
    """

    models: Mapping[str, NamedModel]
    length: int | None = None
    device: str = "auto"
    precision: PredictPrecision = "fp32"
    limits: Limits = DEFAULT_LIMITS
    keys: tuple[str, ...] | Path = ()
    hosts: tuple[str, ...] | None = None
    traces: str | None = None
    requests: bool = True
    delay: float = 0.0
    playground: bool = False

    def open(self, name: str) -> Predictor:
        """Return the predictor of a name; errors as `open_task`."""
        return open_task(
            *self.models[name],
            length=self.length,
            device=self.device,
            precision=self.precision,
            batch_invariant=True,
        )

    def served(self, name: str) -> ServedModel:
        """Return the model of a name, opened now."""
        digest = digest_of_folder(self.models[name].folder)  # first: a later change is then noticed
        return ServedModel(name, self.open(name), int(time.time()), digest)

    def app(self) -> App:
        """Return the app with all models opened; errors as `open_task`."""
        spans: Tracing | None = None if self.traces is None else tracing(self.traces)
        models = {name: self.served(name) for name in self.models}
        return App(models, self.limits, self.key_list(), self.hosts, spans, self.playground)

    def key_list(self) -> Many[str]:
        """Return the keys as they are now; errors as `read_keys`."""
        return read_keys(self.keys) if isinstance(self.keys, Path) else self.keys


class Reloader:
    """Reads the keys again, and opens folders that have changed, while the old models answer.

    A file of keys that cannot be read or has none leaves the old keys in place.

    A folder that cannot be opened, whose model fails, or which has another task leaves the old
    model in place, with a line in the log. Requests under way are answered by the model they began
    with.

    Args:
        application: whose keys and models are replaced.
        deployment: how they are read and opened.
    """

    def __init__(self, application: App, deployment: Deployment) -> None:
        self.application, self.deployment = application, deployment
        self._running: asyncio.Task[None] | None = None
        self._again = False

    def request(self) -> None:
        """Look at keys and folders; once more after a pass that is under way."""
        self._again = True
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._again:
            self._again = False
            if isinstance(self.deployment.keys, Path):
                self._reload_keys()
            for name in self.deployment.models:
                await self._reload(name)

    def _reload_keys(self) -> None:
        line: dict[str, Any] = {"event": "keys"}
        try:
            keys = self.deployment.key_list()
            changed = self.application.replace_keys(keys)
            line |= {"result": "replaced" if changed else "unchanged", "count": len(keys)}
        except BothwaysError as error:
            line |= {"result": "failed", "message": f"the old keys stay: {error}"}
        events_log.info(line)

    async def _reload(self, name: str) -> None:
        loop, old = asyncio.get_running_loop(), self.application.models.named(name)
        line: dict[str, Any] = {"event": "reload", "model": name}
        try:
            folder = self.deployment.models[name].folder
            digest = await loop.run_in_executor(None, digest_of_folder, folder)
            if digest == old.digest:
                line["result"] = "unchanged"
                return
            new = await loop.run_in_executor(None, self.deployment.served, name)
            if await loop.run_in_executor(None, digest_of_folder, folder) != new.digest:
                what, fix = "was changed while it was read", "Send SIGHUP when it is complete."
                raise FolderError(what, where=folder, fix=fix)
            if new.kind != old.kind:
                what = f"the new model is for {new.kind}, and the served one for {old.kind}"
                raise ConfigError(what, where=folder, fix="Serve it under another name.")
            await self.application.warm_up(new)
            self.application.models.replace(new)
            self.application.metrics.loaded(name, new.created)
            line |= {"result": "replaced", "digest": new.digest}
        except Exception as error:
            line |= {"result": "failed", "message": f"the old model stays: {error}"}
        finally:
            self.application.metrics.reload(name, line["result"])
            events_log.info(line)


def named_models(models: Many[str], task: str | None = None) -> dict[str, NamedModel]:
    """Return the models that words such as FOLDER, NAME=FOLDER and NAME=FOLDER:TASK name.

    Args:
        task: of models for which no task is named.

    Raises:
        ConfigError: there is none; a name occurs twice, or has other characters than letters,
            digits, ".", "_" and "-"; a task is unknown.
    """
    if not models:
        fix = "Name one: bothways serve FOLDER, or NAME=FOLDER."
        raise ConfigError("there is no model to serve", where="models", fix=fix)
    found: dict[str, NamedModel] = {}
    for word in models:
        name, equals, named = word.partition("=")
        if not equals or Path(word).exists():
            name, named = "", word
        folder, own = _folder_and_task(named)
        if not name:
            place = Path(folder)
            name = place.resolve().name if place.exists() else place.name
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
            what = f'{name!r} is not a name of letters, digits, ".", "_" and "-"'
            raise ConfigError(what, where="models", fix="Give one: NAME=FOLDER.")
        if name in found:
            what = f"two models are called {name!r}"
            raise ConfigError(what, where="models", fix="Give each a name: NAME=FOLDER.")
        found[name] = NamedModel(folder, own or task)
    return found


def _folder_and_task(word: str) -> tuple[str, str | None]:
    """Return the parts of FOLDER:TASK; a folder with a colon in its name, or a Hub id, is whole.

    Raises:
        ConfigError: the folder exists, and there is no such task.
    """
    folder, colon, task = word.rpartition(":")
    if not colon or Path(word).exists() or not (is_task(task) or Path(folder).exists()):
        return word, None
    return folder, task_kind(task)
