"""A file takes the place of another whole, or leaves it as it was."""

from __future__ import annotations

import os
import stat

import pytest

from torchfast._core.replacing import replacing, write_all


def test_the_new_one_stands_there_whole(tmp_path):
    file, temporary = tmp_path / "file", tmp_path / "new"
    file.write_bytes(b"old")
    with replacing(file, temporary) as fd:
        write_all(fd, b"new")
        assert file.read_bytes() == b"old"
    assert file.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_whatever_fails_the_old_one_stays_and_nothing_is_left(tmp_path, monkeypatch, call, kind):
    def fails(*_, **__):
        raise kind

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(kind), replacing(tmp_path / "file", tmp_path / "new") as fd:
        write_all(fd, b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_temporary_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "new").write_bytes(b"theirs")
    with pytest.raises(FileExistsError), replacing(tmp_path / "file", tmp_path / "new"):
        pass
    assert os.listdir(tmp_path) == ["new"]
    assert (tmp_path / "new").read_bytes() == b"theirs"


@pytest.mark.parametrize(
    ("mode", "umask", "expected"), [(0o666, 0o022, 0o644), (0o666, 0o777, 0o600), (0o600, 0, 0o600)]
)
def test_its_owner_can_use_it_under_any_umask(tmp_path, mode, umask, expected):
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "file", tmp_path / "new", mode=mode) as fd:
            write_all(fd, b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == expected


def test_within_a_folder_that_is_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    folder = os.open(tmp_path / "folder", os.O_RDONLY)
    try:
        with replacing("file", "new", folder=folder) as fd:
            write_all(fd, b"new")
    finally:
        os.close(folder)
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["file"]
