"""Uploads, with a stand-in for the Hub's client."""

import fnmatch
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bothways.core.errors import FolderError
from bothways.hub.model_card import Card
from bothways.hub.model_folder import save_model
from bothways.hub.publish import push_to_hub
from model_folders import own


class Api:
    """The part of `HfApi` that an upload uses; it keeps what it is given."""

    repos: dict[str, bool | None]
    files: dict[str, str]

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
        assert exist_ok
        type(self).repos[repo_id] = private
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(
        self, *, repo_id: str, folder_path: Path, commit_message: str, allow_patterns: list[str]
    ) -> Any:
        assert repo_id in self.repos
        for file in folder_path.rglob("*"):
            name = file.relative_to(folder_path).as_posix()
            if file.is_file() and any(fnmatch.fnmatch(name, known) for known in allow_patterns):
                type(self).files[name] = file.read_bytes().decode("latin-1")
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/{commit_message}")


@pytest.fixture
def api(monkeypatch) -> type[Api]:
    Api.repos, Api.files = {}, {}
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return Api


def test_a_folder_is_uploaded_without_foreign_files(tmp_path, api):
    beside = {"1_Pooling/config.json": {}, "modules.json": []}
    save_model(tmp_path / "model", own("ForMaskedLM"), extra_files=beside)
    (tmp_path / "model" / "notes.txt").write_text("private")
    url = push_to_hub(tmp_path / "model", "me/mine", private=True, message="first")
    assert url == "https://hub/me/mine/first"
    assert api.repos == {"me/mine": True}
    assert set(api.files) == {
        "README.md",
        "bothways.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "1_Pooling/config.json",
    }


def test_a_model_in_memory_is_saved_and_uploaded(api):
    push_to_hub(own("ForMaskedLM"), "me/mine", card=Card("A title"))
    assert json.loads(api.files["config.json"])["architectures"] == ["BertForMaskedLM"]
    assert "# A title" in api.files["README.md"]


def test_what_cannot_be_uploaded_is_one_error(tmp_path, api, monkeypatch):
    with pytest.raises(FolderError, match=r"is not a model folder: it has no config\.json"):
        push_to_hub(tmp_path, "me/mine")

    def refuse(*_: object, **__: object) -> None:
        raise OSError("403 Forbidden\nlong advice")

    monkeypatch.setattr(api, "create_repo", refuse)
    with pytest.raises(FolderError, match=r"me/mine: cannot be uploaded .*: 403 Forbidden"):
        push_to_hub(own("ForMaskedLM"), "me/mine")
