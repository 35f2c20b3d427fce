"""Data sets of the Hugging Face Hub, or folders of the same form, read as a stream of rows.

Rows come from the files of the revision that was opened. A request that fails is repeated by the
library datasets.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

from bothways.core.errors import DataError, ResourceError, optional

HUB = "hub:"
"""The beginning of the name of a data set."""


class HubName(NamedTuple):
    """A split of a data set; `revision` is a commit, a branch or a tag."""

    repository: str
    revision: str | None
    config: str | None
    split: str


def parse_hub_name(name: str) -> HubName:
    """Parse `"hub:owner/name[@revision][:configuration][:split]"`.

    `"hub:nyu-mll/glue:cola"` gives `("nyu-mll/glue", None, "cola", "train")`.

    Raises:
        DataError: it has another form.
    """
    address, *options = name.removeprefix(HUB).split(":")
    repository, mark, revision = address.partition("@")
    if not repository or (mark and not revision) or len(options) > 2:
        fix = f"Write {HUB}owner/name, {HUB}owner/name:configuration or with :split at the end."
        raise DataError("is not the name of a Hub data set", where=name, fix=fix)
    config, split = [*options, "", ""][:2]
    return HubName(repository, revision or None, config or None, split or "train")


def without_revision(name: str) -> str:
    """Return the name of a source without a revision: "hub:a/b@v1:en" → "hub:a/b:en"."""
    if not name.startswith(HUB):
        return name
    address, colon, options = name.removeprefix(HUB).partition(":")
    return f"{HUB}{address.partition('@')[0]}{colon}{options}"


class HubData:
    """A split of a data set, in the revision that it has when it is opened.

    Attributes:
        source: its name, with "hub:".
    """

    def __init__(self, source: str) -> None:
        """Open a data set.

        Raises:
            DataError: there is no such data set, or it cannot be read.
            ResourceError: the package datasets is not installed.
        """
        with optional("data", "reading Hub data sets"):
            from datasets import load_dataset_builder

        self.source = source
        repository, revision, config, self._split = parse_hub_name(source)
        with _errors(source):
            self._builder = load_dataset_builder(repository, config, revision=revision)

    @property
    def version(self) -> str:
        """The commit, or a digest of what is known of the files; another one if they change."""
        files = self._builder.config.data_files or {}
        origins = sorted({entry for split in files.values() for entry in split.origin_metadata})
        if len(origins) == 1 and len(origins[0]) == 2:  # repository and commit
            return str(origins[0][1])
        return hashlib.sha256(repr(origins).encode()).hexdigest()[:16]

    @functools.cached_property
    def stream(self) -> Any:
        """The rows from the first on, as an IterableDataset.

        Raises:
            DataError: there is no such split.
        """
        with _errors(self.source):
            return self._builder.as_streaming_dataset(split=self._split)

    @property
    def classes(self) -> dict[str, list[str]]:
        """The names of the classes of each column that holds classes."""
        return class_names(getattr(self.stream, "features", None) or {})

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows; classes become their names, and negative classes (unknown) None.

        Raises:
            DataError: there is no such split, or a row cannot be read.
            ResourceError: the connection failed.
        """
        classes, number = self.classes, 0
        try:
            for row in self.stream:
                number += 1
                yield named_classes(row, classes)
        except ValueError as error:  # a damaged file
            raise _unreadable(self.source, error) from error
        except Exception as error:  # every store has errors of its own
            message = f"reading row {number + 1:,}: {error or type(error).__name__}"
            fix = "Check the connection, and run the same command again."
            raise ResourceError(message, where=self.source, fix=fix) from error


@contextlib.contextmanager
def _errors(source: str) -> Iterator[None]:
    try:
        yield
    # RuntimeError: a data set that is a program, which is not run.
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: Exception) -> DataError:
    fix = (
        f"Check the name, {HUB}owner/name[@revision][:configuration][:split], and the "
        "connection. Instead of a data set with a loading script, use its Parquet copy."
    )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"cannot be read: {reason}", where=source, fix=fix)


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of the classes of each column that holds classes, or lists of them."""
    from datasets import ClassLabel

    kinds = {
        name: kind[0] if isinstance(kind, list) else getattr(kind, "feature", kind)
        for name, kind in features.items()
    }  # a list of one is that of datasets before 4
    return {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}


def named_classes(row: Mapping[str, Any], classes: Mapping[str, Many[str]]) -> dict[str, Any]:
    """Return a row in which classes are their names, and negative classes (unknown) None."""
    class_values = {
        name: _named(row[name], names) for name, names in classes.items() if name in row
    }
    return {**row, **class_values}


def _named(value: Any, names: Many[str]) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value  # an array or a tensor
    if isinstance(value, list):
        return [_named(item, names) for item in value]
    return None if value is None or value < 0 else names[value]
