"""The settings of a server: folders under names, keys, limits."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bothways.core.errors import ConfigError
from bothways.hub.provenance import digest_of_model
from bothways.prediction.predictor import open_task
from bothways.prediction.prepared_model import PredictPrecision
from bothways.serving.app import App
from bothways.serving.limits import DEFAULT_LIMITS, Limits
from bothways.serving.models import ServedModel
from bothways.tasks.catalogue import is_task, task_kind


def read_keys(file: Path) -> tuple[str, ...]:
    """Read the keys in a file, one a line.

    Raises:
        ConfigError: the file cannot be read, or has no key.
    """
    try:
        keys = file.read_text(encoding="utf-8-sig").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=file) from error
    if not keys:
        raise ConfigError("has no key", where=file, fix="Write one a line.")
    return tuple(keys)


class NamedModel(NamedTuple):
    """A served model: a folder and the task to open it for, None for its own."""

    folder: str
    task: str | None = None


@dataclass(frozen=True)
class Deployment:
    """The settings of a server process.

    Attributes:
        models: model folders, folders of runs or Hub ids, by the names that requests use.
        length, device, precision: as `open_task`.
        limits, keys, hosts: as `serving.app`.
        requests: whether each request is a line of the log.
        delay: seconds between a signal to stop and the end of accepting connections.
        playground: as `serving.app`.
    """

    models: Mapping[str, NamedModel]
    length: int | None = None
    device: str = "auto"
    precision: PredictPrecision = "fp32"
    limits: Limits = DEFAULT_LIMITS
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    requests: bool = True
    delay: float = 0.0
    playground: bool = False

    def app(self) -> App:
        """Return the app with all models opened; errors as `open_task`."""
        models = dict[str, ServedModel]()
        for name, (folder, task) in self.models.items():
            predictor = open_task(
                folder,
                task,
                length=self.length,
                device=self.device,
                precision=self.precision,
                batch_invariant=True,
            )
            digest = digest_of_model(folder, whole=True)
            models[name] = ServedModel(name, predictor, int(time.time()), digest)
        return App(models, self.limits, self.keys, self.hosts, self.playground)


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
    models_by_name: dict[str, NamedModel] = {}
    for word in models:
        name, equals, target = word.partition("=")
        if not equals or Path(word).exists():
            name, target = "", word
        # A folder with a colon in its name, or a Hub id, is whole.
        folder, colon, word_task = target.rpartition(":")
        if not colon or Path(target).exists() or not (is_task(word_task) or Path(folder).exists()):
            folder, word_task = target, ""
        if not name:
            path = Path(folder)
            name = path.resolve().name if path.exists() else path.name
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
            message = f'{name!r} is not a name of letters, digits, ".", "_" and "-"'
            raise ConfigError(message, where="models", fix="Give one: NAME=FOLDER.")
        if name in models_by_name:
            message = f"two models are called {name!r}"
            raise ConfigError(message, where="models", fix="Give each a name: NAME=FOLDER.")
        models_by_name[name] = NamedModel(folder, task_kind(word_task) if word_task else task)
    return models_by_name
