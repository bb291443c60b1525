"""A benchmark finds torch's Python compiled, also where it is installed without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from benchmarks import python_files


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Torch, as far as it is asked for, without compiled files."""
    folder = tmp_path / "torch"
    (folder / "_inductor").mkdir(parents=True)
    (folder / "_inductor" / "compile_fx.py").touch()
    monkeypatch.setattr(torch, "__path__", [str(folder)])
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


@pytest.fixture
def ran(monkeypatch):
    """Commands, with their environments; they do nothing."""
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, *, env, **_: commands.append((command, env))
    )
    return commands


def test_compiled_files_that_are_there_are_used(installed, ran, tmp_path):
    kept = (
        installed / "_inductor" / "__pycache__" / f"compile_fx.{sys.implementation.cache_tag}.pyc"
    )
    kept.parent.mkdir()
    kept.touch()
    with python_files.compiled_python(tmp_path / "python", "cpu") as were_none:
        assert not were_none
        assert "PYTHONPYCACHEPREFIX" not in os.environ
    assert ran == []


def test_those_that_this_process_has_written_do_not_count(installed, ran, tmp_path):
    own = installed / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
    own.parent.mkdir()
    own.touch()
    with python_files.compiled_python(tmp_path / "python", "cpu") as were_none:
        assert were_none
    assert len(ran) == 1


def test_they_are_made_though_python_is_told_to_write_none(installed, ran, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    folder = str(tmp_path / "python")
    with python_files.compiled_python(tmp_path / "python", "cpu"):
        assert os.environ["PYTHONPYCACHEPREFIX"] == folder
        # Of whoever is measured, as before.
        assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"
    assert "PYTHONPYCACHEPREFIX" not in os.environ
    [(command, environment)] = ran
    assert command[1:] == ["-m", "benchmarks.python_files", "--device", "cpu"]
    assert environment["PYTHONPYCACHEPREFIX"] == folder
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_without_them_it_goes_on(installed, tmp_path, monkeypatch, capsys):
    def fail(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    with python_files.compiled_python(tmp_path / "python", "cpu") as were_none:
        assert were_none
    assert "torch's Python was not compiled beforehand" in capsys.readouterr().out


def test_what_is_to_be_imported_can_be(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    python_files.import_all("cpu")
    assert "torch._inductor.compile_worker.__main__" in sys.modules
