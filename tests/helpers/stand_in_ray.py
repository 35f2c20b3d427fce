"""A stand-in for Ray in this process: what is sent is pickled, and jobs end out of order."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest


class RayError(Exception):
    """The base class of Ray's errors; `cause` is what the function raised."""

    cause: BaseException | None = None


class ActorUnavailableError(RayError):
    """An actor that cannot be reached for the time being."""


class Held:
    """A reference to a result, or to what was put."""

    def __init__(self, content: bytes | RayError) -> None:
        self.content = content


def _value(held: Held) -> Any:
    if isinstance(held.content, RayError):
        raise held.content
    return pickle.loads(held.content)


class Called:
    """A method of an actor."""

    def __init__(self, owner: Actor, name: str) -> None:
        self.owner, self.name = owner, name

    def remote(self, *given: Any) -> Held:
        method = getattr(self.owner.value, self.name)
        try:
            return Held(pickle.dumps(method(*pickle.loads(pickle.dumps(given)))))
        except ActorUnavailableError as error:
            return Held(error)
        except Exception as error:
            failed = RayError("a task failed")
            failed.cause = error
            return Held(failed)


class Actor:
    """An actor: an object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Called:
        return Called(self, name)


class StandInRay(types.ModuleType):
    """The module `ray`, as far as the library calls it."""

    def __init__(self, resources: dict[str, float]) -> None:
        super().__init__("ray")
        self.resources, self.addresses, self.actors = resources, list[Any](), 0
        self.killed = 0
        self.options = dict[str, Any]()
        self.connected = False
        self.exceptions = types.SimpleNamespace(
            RayError=RayError, ActorUnavailableError=ActorUnavailableError
        )

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, address: str | None, **_: Any) -> None:
        if address == "ray://nowhere:1":
            raise ConnectionError("nobody answers\nat all")
        self.addresses.append(address)
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    available_resources = cluster_resources

    def kill(self, actor: Actor) -> None:
        self.killed += 1

    def put(self, value: Any) -> Held:
        return Held(pickle.dumps(value))

    def get(self, held: Held) -> Any:
        return _value(held)

    def wait(self, held: list[Held], num_returns: int) -> tuple[list[Held], list[Held]]:
        assert num_returns == 1
        return [held[-1]], held[:-1]

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options = options

        def make(*given: Any) -> Actor:
            self.actors += 1
            return Actor(kind(*given))

        kind: type = object

        def decorate(given: type) -> Any:
            nonlocal kind
            kind = given
            return types.SimpleNamespace(remote=make)

        return decorate


def stand_in(monkeypatch: pytest.MonkeyPatch, cores: int = 2, gpus: int = 0) -> StandInRay:
    """Return a stand-in that `import ray` gives during the test."""
    ray = StandInRay({"CPU": float(cores), "GPU": float(gpus)})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return ray
