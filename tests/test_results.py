"""The files of raw figures: what stands in them, and who may write to them."""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import results, tables

CONFINED = r"(CUDA_VISIBLE_DEVICES=\d(,\d)* )?(taskset -c [\d,-]+ )?"
RAN = rf"PYTHONPATH=\. {CONFINED}python (benchmarks/|-m benchmarks\.)"


def test_raw_figures_name_machine_command_and_date():
    for path in tables.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        card = path.stem.rpartition("_")[2].removeprefix("2x")
        assert card == results.card(result["machine"]["gpu"]), path.name
        assert result["machine"]["torch"]
        assert result["machine"]["commit"] != "unknown"
        assert re.match(RAN, result["command"]), result["command"]
        assert "--out" not in result["command"]
        assert result["date"] >= "2026"


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA TITAN V", "nvidia-titan-v"),
        (None, "cpu"),
    ],
)
def test_a_card_is_called_by_its_model(name, card):
    assert results.card(name) == card


def test_the_gpu_is_that_of_torch(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert results.gpu() == results.machine()["gpu"] == "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert results.gpu() is None
    assert results.machine()["gpu"] is None


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch):
    """As where ``python benchmarks/x.py`` runs; the tests may run as a module."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)


def test_a_module_is_named_without_its_place(monkeypatch, tmp_path):
    spec = SimpleNamespace(name="benchmarks.slow_scripts.check")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr("sys.argv", ["/some/place/check.py", "--limit", "3"])
    results.write(tmp_path / "x.json", {})
    command = json.loads((tmp_path / "x.json").read_text())["command"]
    assert command == "PYTHONPATH=. python -m benchmarks.slow_scripts.check --limit 3"


def test_a_result_is_written_without_the_place_of_its_output(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["benchmarks/x.py", "--out", "/secret", "--pairs", "3"])
    results.write(tmp_path / "deep" / "x.json", {"figures": {"a": 1}})
    written = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert written["command"] == "PYTHONPATH=. python benchmarks/x.py --pairs 3"
    assert written["figures"] == {"a": 1}


def test_a_result_is_written_without_the_places_of_code(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["benchmarks/x.py"])
    own = Path(results.__file__).resolve()
    results.write(tmp_path / "x.json", {"cause": f"{own}:44, in {pytest.__file__}:2"})
    written = json.loads((tmp_path / "x.json").read_text())["cause"]
    assert written == "benchmarks/results.py:44, in site-packages/pytest/__init__.py:2"


@pytest.mark.skipif(sys.platform != "linux", reason="cores are given to a process on Linux only")
def test_a_result_says_what_its_run_was_confined_to(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["benchmarks/x.py"])
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 8, 10, 11})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    results.write(tmp_path / "x.json", {})
    written = json.loads((tmp_path / "x.json").read_text())
    confined = "PYTHONPATH=. CUDA_VISIBLE_DEVICES=1 taskset -c 0-3,8,10-11 python benchmarks/x.py"
    assert written["command"] == confined
    assert re.match(RAN, confined)
    assert written["machine"]["cpu_cores"] == 7


def test_runs_that_add_to_one_file_lose_nothing(tmp_path):
    """As on a host with several GPUs, each of which measures some of the rows."""
    path = tmp_path / "deep" / "x.json"

    def add(number):
        with results.alone(path):
            rows = json.loads(path.read_text())["rows"] if path.exists() else []
            time.sleep(0.002)  # in which another would read what this one is about to change
            results.write(path, {"rows": [*rows, number]})

    with ThreadPoolExecutor(8) as several:
        list(several.map(add, range(40)))
    assert sorted(json.loads(path.read_text())["rows"]) == list(range(40))
    assert [found.name for found in path.parent.iterdir()] == ["x.json"]
