"""Names to folders, with the Hub's client replaced: what is asked of it, and what each of its failures says to the user."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors

from bothways.core.errors import FolderError
from bothways.hub.model_folder import push_to_hub
from bothways.hub.resolve import MODEL_FILES, PICKLE_FILES, portable_name, resolve

Calls = list[tuple[str, list[str]]]


def hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, list[str]], str]) -> Calls:
    """A Hub that answers so; the calls it gets are listed."""
    calls: Calls = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        calls.append((repo_id, allow_patterns))
        return answer(repo_id, allow_patterns)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    return calls


def test_a_folder_is_itself_and_asks_nobody(tmp_path, monkeypatch):
    calls = hub(monkeypatch, lambda *_: "")
    (tmp_path / "bert-base-uncased").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(tmp_path) == tmp_path
    assert resolve("bert-base-uncased") == Path("bert-base-uncased")
    assert resolve("~/bert-base-uncased") == tmp_path / "bert-base-uncased"
    assert not calls


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("google-bert/bert-base-uncased", "google-bert/bert-base-uncased"),
        ("hub:a_b/c.d-1", "a_b/c.d-1"),
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("hub:xlm-roberta-base", "FacebookAI/xlm-roberta-base"),
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        (
            "paraphrase-multilingual-MiniLM-L12-v2",
            "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2",
        ),
    ],
)
def test_an_id_downloads_what_a_model_needs_and_no_pickle(name, hub_id, tmp_path, monkeypatch):
    calls = hub(monkeypatch, lambda *_: str(tmp_path))
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    assert resolve(name) == tmp_path
    assert calls == [(hub_id, list(MODEL_FILES))]
    assert not any("bin" in pattern for pattern in MODEL_FILES)


def test_a_pickle_is_fetched_where_there_is_nothing_else(tmp_path, monkeypatch):
    calls = hub(monkeypatch, lambda *_: str(tmp_path))
    resolve("old/model")
    assert [patterns for _, patterns in calls] == [list(MODEL_FILES), list(PICKLE_FILES)]


def test_the_folder_inside_that_the_modules_name_is_fetched(tmp_path, monkeypatch):
    calls = hub(monkeypatch, lambda *_: str(tmp_path))
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"},
        {"type": "Pooling", "path": "1"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert resolve("old/model") == tmp_path / "0_Transformer"
    inner = [[f"0_Transformer/{name}" for name in files] for files in (MODEL_FILES, PICKLE_FILES)]
    assert [patterns for _, patterns in calls] == [list(MODEL_FILES), *inner]
    modules[0]["path"] = "../elsewhere"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert resolve(tmp_path) == tmp_path


def test_a_name_that_is_found_from_elsewhere_is_an_id_or_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert portable_name("mine") == str(tmp_path / "mine")
    assert portable_name("hub:a_b/c.d-1") == "a_b/c.d-1"
    assert portable_name("bert-base-uncased") == "google-bert/bert-base-uncased"


@pytest.mark.parametrize("name", [
    "./models/mine", "a/b/c", "models/", "/nowhere/at/all", "two words", "ends/with/", "数据/模型",
])  # fmt: skip
def test_what_can_be_no_id_is_a_missing_folder(name, monkeypatch):
    calls = hub(monkeypatch, lambda *_: "")
    message = f"{name}: no such folder, and not the id of a Hub model\n  Give the folder"
    with pytest.raises(FolderError, match=re.escape(message)):
        resolve(name)
    assert not calls


def test_a_preset_is_refused_as_a_shape(monkeypatch):
    calls = hub(monkeypatch, lambda *_: "")
    message = r"^bert-tiny: is a shape without weights\n  Pre-train it"
    with pytest.raises(FolderError, match=message):
        resolve("bert-tiny")
    assert not calls


def test_a_mistyped_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    calls = hub(monkeypatch, lambda *_: "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "my-bert").mkdir(parents=True)
    with pytest.raises(FolderError, match=r"model: no such folder.*\n  Did you mean models\?"):
        resolve("model")
    with pytest.raises(FolderError, match=r"no such folder.*\n  Did you mean models/my-bert\?"):
        resolve("models/my-bret")
    with pytest.raises(FolderError, match=r"no such folder.*\n  Give the folder .* hub:owner/name"):
        resolve("models/other")
    assert not calls
    assert resolve("hub:models/other") == Path()
    assert calls[0][0] == "models/other"


def test_a_file_or_a_missing_path_is_no_model_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(FolderError, match="is a file, not a model folder"):
        resolve("model.safetensors")
    with pytest.raises(FolderError, match="no such folder"):
        resolve(tmp_path / "missing")


def refused(kind: type[Exception]) -> Exception:
    """An error of the Hub's client as it makes one from an answer."""
    response = SimpleNamespace(headers={}, request=None, status_code=401)
    return kind("Repository Not Found\n\nlong advice", response=response)


UNKNOWN = "some/model: is neither a folder here nor a model on the Hub\n  Check the name"
GATED = "is open only to users who have accepted its conditions\n  Accept its conditions"
FAILED = "could not be downloaded from the Hub:"
FAILURES: dict[str, tuple[Exception, str]] = {
    "unknown": (refused(errors.RepositoryNotFoundError), UNKNOWN),
    "gated": (refused(errors.GatedRepoError), GATED),
    "server": (refused(errors.HfHubHTTPError), f"{FAILED} Repository Not Found\n  Check"),
    "no route": (ConnectionError(), f"{FAILED} ConnectionError\n  Check the network"),
    "no cache": (PermissionError(13, "Permission denied", "/root/.cache"), "HF_HOME"),
    "no home": (RuntimeError("Could not determine home directory."), "HF_HOME"),
    "bad id": (errors.HFValidationError("Has -- in it"), f"{FAILED} Has -- in it"),
}


@pytest.mark.parametrize(("failure", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_says_what_to_do(failure, message, monkeypatch):
    def fail(*_: Any) -> str:
        raise failure

    hub(monkeypatch, fail)
    with pytest.raises(FolderError, match=re.escape(message)):
        resolve("some/model")


@contextmanager
def broken_hub(monkeypatch: pytest.MonkeyPatch, answer: bytes | None) -> Iterator[None]:
    """A Hub that answers so and closes; None: it accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if answer is not None:
                        held[-1].recv(1 << 16)
                        held[-1].sendall(answer)
                        held.pop().close()

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.2)
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


@pytest.mark.parametrize("answer", [None, b"", b"hello\r\n\r\n"])
def test_a_hub_without_an_answer_is_an_error(answer, tmp_path, monkeypatch):
    with broken_hub(monkeypatch, answer):
        with pytest.raises(FolderError, match=FAILED) as raised:
            resolve("some/model")
        assert raised.value.where == "some/model"
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(FolderError, match="cannot be uploaded") as raised:
            push_to_hub(tmp_path, "some/model")
        assert raised.value.where == "some/model"


def test_a_downloaded_model_opens_while_the_hub_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    (snapshot / "model.safetensors").write_text("")
    with broken_hub(monkeypatch, None):
        assert resolve("some/model") == snapshot
