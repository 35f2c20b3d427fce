"""Folders that are replaced: whole, or as they were."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bothways.core import files
from bothways.core.errors import ConfigError, DataError, ResourceError, os_errors
from bothways.core.files import check_output_path, replace_file, replace_folder, replace_text
from bothways.data.corpus import Corpus
from bothways.data.text_io import file_at
from bothways.hub.resolve import resolve
from bothways.text.tokenizer import Tokenizer


def write_model(parent: Path, text: str) -> Path:
    """Replace a folder by one with a file of this text."""
    with replace_folder(parent / "model") as hidden:
        (hidden / "a").write_text(text)
    return parent / "model"


def test_a_folder_that_cannot_take_its_place_leaves_what_stood_there(tmp_path, monkeypatch):
    place, usual = write_model(tmp_path, "former"), Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing-new-"):
            raise PermissionError(13, "in use")
        return usual(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(ResourceError):
        write_model(tmp_path, "later")
    assert (place / "a").read_text() == "former"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_second_writer_is_refused_and_the_first_ends_well(tmp_path):
    """It took the place of the first one's folder, with a part of each and without an error."""
    with replace_folder(tmp_path / "model") as hidden:
        (hidden / "a").write_text("first")
        with pytest.raises(ResourceError, match="is being written by another process"):
            replace_folder(tmp_path / "model").__enter__()
        (hidden / "b").write_text("first")
    assert {file.name for file in (tmp_path / "model").iterdir()} == {"a", "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_lock_of_a_killed_writer_holds_nobody(tmp_path):
    (tmp_path / ".writing-use-model").touch()
    with replace_folder(tmp_path / "model") as hidden:
        (hidden / "a").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_in_folders_within_are_flushed_too(tmp_path, monkeypatch):
    flushed: list[str] = []
    monkeypatch.setattr(
        files, "_flush", lambda path: flushed.append(os.path.relpath(path, tmp_path))
    )
    with replace_folder(tmp_path / "model") as hidden:
        (hidden / "1_Pooling").mkdir()
        (hidden / "1_Pooling" / "config.json").write_text("{}")
    new = ".writing-new-model"
    assert set(flushed) == {f"{new}/1_Pooling/config.json", f"{new}/1_Pooling", new, "."}


def test_a_file_without_a_folder_is_told_before_it_is_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("nowhere/v.npy", r"v\.npy: the parent folder does not exist"),
        (".", "is a folder, not a file"),
        ("pipe", "is a pipe or a device"),
    ):
        with pytest.raises(ResourceError, match=message):
            replace_file(tmp_path / name, Path.touch)


def test_a_place_without_permission_is_refused_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)  # root may write anywhere
    (tmp_path / "inner").mkdir()
    with pytest.raises(ResourceError, match=r"page\.html: permission denied"):
        check_output_path(tmp_path / "page.html")
    check_output_path(tmp_path / "inner" / "page.html")


@pytest.mark.parametrize("open_path", [file_at, resolve, Tokenizer.load, Corpus.open])
def test_a_path_that_a_user_may_not_see_is_not_called_missing(open_path, tmp_path, monkeypatch):
    usual = os.stat

    def stat(path: str, *arguments: object, **settings: object) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "locked")):  # root may look anywhere
            raise PermissionError(13, "Permission denied", path)
        return usual(path, *arguments, **settings)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(ResourceError) as caught:
        open_path(str(tmp_path / "locked" / "inner"))
    assert caught.value.where == str(tmp_path / "locked" / "inner")


def test_a_text_with_a_name_that_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.toml: cannot hold U\+DCE9 at character 3"):
        replace_text(tmp_path / "a.toml", "caf\udce9")
    assert not list(tmp_path.iterdir())


def test_a_link_to_a_file_stays_one_and_the_mode_of_the_file(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data/file")
    (tmp_path / "data" / "file").touch(0o600)
    for text in ("new", "newer"):
        replace_file(tmp_path / "link", lambda place, text=text: place.write_text(text))
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "data" / "file").read_text() == text
        assert (tmp_path / "data" / "file").stat().st_mode & 0o777 == 0o600


def test_a_link_in_place_of_the_hidden_file_is_not_written_through(tmp_path):
    (tmp_path / "other").write_text("precious")
    (tmp_path / ".writing-new-a").symlink_to("other")
    replace_text(tmp_path / "a", "text")
    assert (tmp_path / "other").read_text() == "precious"
    assert (tmp_path / "a").read_text() == "text"
    assert not (tmp_path / "a").is_symlink()


def test_threads_that_write_one_file_do_not_collide(tmp_path):
    barrier = threading.Barrier(3)

    def write(hidden: Path) -> None:
        hidden.write_text("text")
        barrier.wait(30)  # all have written before one replaces the file

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(replace_file, tmp_path / "a", write) for _ in range(2)]
        replace_file(tmp_path / "a", write)
        assert [other.result() for other in others] == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_to_a_folder_stays_one(tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/model")
    for text in ("new", "newer"):
        with replace_folder(tmp_path / "link") as hidden:
            (hidden / "a").write_text(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "model" / "a").read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "disk", "link", "model"]
    (tmp_path / "disk" / "model").rename(tmp_path / "disk" / ".writing-old-model")
    files.recover_folder(tmp_path / "link")
    assert (tmp_path / "link" / "a").read_text() == "newer"


@pytest.mark.parametrize("name", [".", "..", ""])
def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch, name):
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    with pytest.raises(ConfigError, match="is the current folder"), replace_folder(Path(name)):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["current"]


def test_a_replacement_that_was_killed_between_its_renames_is_undone(tmp_path):
    place = write_model(tmp_path, "former")
    place.rename(tmp_path / ".writing-old-model")
    with pytest.raises(ZeroDivisionError), replace_folder(place):
        raise ZeroDivisionError
    assert (place / "a").read_text() == "former"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_reader_that_takes_the_pause_between_two_renames_for_a_crash_does_no_harm(
    tmp_path, monkeypatch
):
    place, usual, tries = write_model(tmp_path, "former"), Path.rename, iter(range(2))

    def rename(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing-new-") and next(tries) == 0:
            files.recover_folder(place)
        return usual(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    write_model(tmp_path, "later")
    assert (place / "a").read_text() == "later"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_names_the_folder_that_will_be_not_the_hidden_one(tmp_path):
    for inner in ("", "tokenizer.json"):
        with (
            pytest.raises(ResourceError) as caught,
            replace_folder(tmp_path / "model") as hidden,
            os_errors(hidden / inner, "Make room."),
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert caught.value.where == tmp_path / "model" / inner
    with pytest.raises(ResourceError, match="of no file"), replace_folder(tmp_path / "model"):
        raise ResourceError("of no file")
    assert not [*tmp_path.iterdir()]


def test_a_name_that_is_too_long_has_nothing_to_recover(tmp_path):
    files.recover_folder(tmp_path / ("a" * 255))  # with ".writing-old-" before it


def test_where_a_user_may_not_write_no_space_is_advised(tmp_path):
    with pytest.raises(ResourceError, match="give this user write permission") as caught:  # noqa: SIM117
        with replace_folder(tmp_path / "model"):
            raise PermissionError(13, "Permission denied")
    assert "space" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["gb18030", "ascii"])
def test_a_name_is_utf8_if_its_bytes_are(encoding, tmp_path, monkeypatch):
    """In a locale of another encoding the characters of a name tell nothing of its bytes."""
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode(encoding, "surrogateescape"))
    files.require_utf8(tmp_path / "模型".encode().decode("ascii", "surrogateescape"))
    with pytest.raises(ConfigError, match="has a name that is not UTF-8"):
        files.require_utf8(tmp_path / "模型".encode("gb18030").decode(encoding, "surrogateescape"))
