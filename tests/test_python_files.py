"""Python's compiled files of torch are made for a benchmark where an image has none."""

import os
from types import SimpleNamespace

import torch

from benchmarks import python_files


def test_they_are_there_already(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    there = tmp_path / "__init__.pyc"
    there.touch()
    monkeypatch.setattr(torch, "__spec__", SimpleNamespace(cached=str(there)))
    assert not python_files.keep_python_files(tmp_path / "python")
    assert "PYTHONPYCACHEPREFIX" not in os.environ
    assert not (tmp_path / "python").exists()


def test_they_are_made_though_python_is_told_not_to(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")  # so that it is put back
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(torch, "__spec__", SimpleNamespace(cached=str(tmp_path / "none.pyc")))
    monkeypatch.setattr(python_files, "_IMPORTS", "import json.tool")
    assert python_files.keep_python_files(tmp_path / "python")
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(tmp_path / "python")
    assert [file.name for file in (tmp_path / "python").rglob("tool.*.pyc")]
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"  # of whoever is measured, as before
