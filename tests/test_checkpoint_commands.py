"""``python -m torchfast checkpoint``: what it prints, and what it exits with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchfast import CheckpointManager, import_state_dict
from torchfast.__main__ import main


@pytest.fixture
def run(tmp_path):
    """A folder with the steps 1 and 20."""
    with CheckpointManager(tmp_path / "run") as checkpoints:
        for step in (1, 20):
            state = {"model": nn.Linear(3, 2).state_dict(), "step": step, "rng": torch.ones(4)}
            checkpoints.save(state, step, metrics={"loss": 1 / step})
    return tmp_path / "run"


@pytest.fixture
def command(run, capsys):
    """Run a command on the folder; return its exit status and what it printed."""

    def call(name, *arguments, folder=run):
        status = main(["checkpoint", name, os.fspath(folder), *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_list(command):
    status, out, err = command("list")
    first, second = out.splitlines()
    assert (status, err) == (0, "")
    assert first.startswith("step-1 ")
    assert "kB" in first
    assert second.startswith("step-20")
    assert second.endswith("loss=0.05")


def test_verify(command, run):
    assert command("verify")[0] == 0
    damage(run / "step-1")
    status, out, err = command("verify")
    assert status == 1
    assert "step-20" in out
    assert "whole" in out
    assert str(run / "step-1" / "rank-00000-0000.bin") in err
    assert command("verify", "--step", 20)[0] == 0
    assert command("verify", "--step", 1)[0] == 1
    assert sorted(os.listdir(run))[-2:] == ["step-1", "step-20"]  # nothing was moved


def test_list_goes_on_after_a_bad_one(command, run):
    (run / "step-1" / "manifest.json").write_text("{}")
    status, out, err = command("list")
    assert status == 1
    assert out.startswith("step-20")
    assert "manifest.json" in err


def test_show(command):
    status, out, _ = command("show")
    assert status == 0
    assert "step 20" in out
    assert "metric loss = 0.05" in out
    assert "model: 2 tensors, 32 B" in out
    assert "step: 20" in out
    assert "model/weight" not in out
    _, out, _ = command("show", "--step", 1, "--tensors")
    assert "  model/weight  float32 (2, 3)" in out
    assert "  rng  float32 (4,)" in out


def test_export(command, run, tmp_path):
    path = tmp_path / "out.pt"
    status, out, _ = command("export", path)
    assert (status, out) == (0, f"model of step-20: 2 entries in {path}\n")
    with CheckpointManager(run) as checkpoints:
        expected = checkpoints.load(20).state["model"]
        assert import_state_dict(path).keys() == expected.keys()
        command("export", path, "--step", 1)
        assert torch.equal(
            import_state_dict(path)["weight"], checkpoints.load(1).state["model"]["weight"]
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "--step", 3), "step=3 is not in"),
        (("verify", "--step", 3), "step=3 is not in"),
        (("export", "x.pt", "--part", "ema"), "has no part 'ema'"),
        (("export", "x.pt", "--part", "rng"), "only a mapping of tensors can be exported"),
        (("export", "."), "is a folder, expected the path of a file"),
    ],
)
def test_wrong_arguments(arguments, message, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("name", ["list", "verify", "show"])
def test_a_folder_that_is_not_there(name, command, tmp_path):
    status, _, err = command(name, folder=tmp_path / "nowhere")
    assert status == 2
    assert "nowhere is not there" in err
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_folder(command, tmp_path):
    (tmp_path / "empty").mkdir()
    assert command("list", folder=tmp_path / "empty") == (0, "", "")
    assert command("verify", folder=tmp_path / "empty")[0] == 2


def test_export_of_a_damaged_one(command, run, tmp_path):
    damage(run / "step-20")
    status, _, err = command("export", tmp_path / "out.pt")
    assert status == 1
    assert "rank-00000-0000.bin" in err
    assert not (tmp_path / "out.pt").exists()


def test_usage():
    for arguments in ([], ["checkpoint"], ["checkpoint", "lst", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_from_a_shell_with_a_path_that_is_no_text(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff\xfe"
    with CheckpointManager(os.fsdecode(folder)) as checkpoints:
        checkpoints.save({"a": 1}, 1)
    environment = os.environ | {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    finished = subprocess.run(
        [os.fsencode(sys.executable), b"-m", b"torchfast", b"checkpoint", b"show", folder],
        env=environment,
        capture_output=True,
        check=True,
    )
    assert b"a: 1" in finished.stdout
    assert b"\\udcff" in finished.stdout


def damage(folder):
    path = folder / "rank-00000-0000.bin"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])


def test_what_is_written_in_a_checkpoint_steers_no_terminal(command, run):
    name = "loss\x1b[2J\nwhole"
    with CheckpointManager(run) as checkpoints:
        state = {"model": {name: torch.ones(1)}, name: 1, f"of {name}": [torch.ones(2)]}
        checkpoints.save(state, 30, metrics={name: 1.0})
    escaped = "loss\\x1b[2J\\nwhole"
    for arguments, number in ((["list"], 1), (["show", "--step", 30, "--tensors"], 5)):
        status, out, err = command(*arguments)
        assert (status, err) == (0, "")
        assert out.count(escaped) == number
        assert all(line.isprintable() for line in out.split("\n"))
