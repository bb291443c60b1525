"""The measurement of checkpoints runs without a GPU, and sees what is slow and what is broken."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch

from benchmarks import checkpoint_cost, checkpoint_work, tables
from tape import taped
from torchfast import CheckpointManager
from torchfast.checkpoint.saving import Saver
from torchfast.checkpoint.staging import Staged, Stager
from torchfast.step import TrainStep

PLANTED_S = 0.2


@pytest.fixture(autouse=True)
def _unchanged():
    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def run(tmp_path):
    def run(*options):
        command = ["--size", "smoke", "--device", "cpu", "--folder", str(tmp_path / "folder")]
        return checkpoint_cost.main([*command, *options])

    return run


def slowed(method, seconds):
    def slow(*args, **kwargs):
        time.sleep(seconds)
        return method(*args, **kwargs)

    return slow


def rows(figures, section):
    return figures["sections"][section]["rows"]


# -- The whole run ---------------------------------------------------------------------------------


def test_all_sections_run_without_a_gpu_and_their_figures_are_written(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHFAST_COMMIT", "made up")
    out = tmp_path / "figures.json"
    run("--out", str(out))
    figures = json.loads(out.read_text())
    assert figures["machine"]["commit"] == "made up"
    assert figures["place"]["write_gb_s"] > 0
    sections = figures["sections"]
    assert [section["status"] for section in sections.values()] == ["ran"] * 3
    assert [row["kind"] for row in rows(figures, "stall")] == ["first", "running", "blocking"]
    for row in rows(figures, "stall"):
        assert row["stall_s"] == row["with_s"] - row["without_s"]
        assert min(row["call_s"], row["written_s"]) > 0
        assert row["bytes"] > figures["num_parameters"] * checkpoint_work.BYTES_PER_PARAMETER
    for row in rows(figures, "throughput"):
        assert row["cost"] == row["with_s"] / row["without_s"] - 1
    assert sections["throughput"]["summary"]["pairs"] == 2
    resumed = sections["resume"]["summary"]
    assert resumed["held"]
    assert resumed["same"] == resumed["cuts"] == 5
    assert resumed["twice"] == 3
    assert resumed["large"]["same"]
    printed = capsys.readouterr().out
    for section in sections:
        assert f"\n{section}: ran, held: " in printed
    assert "OTHER" not in printed
    assert list((tmp_path / "folder").iterdir()) == []
    assert "| the next 6 steps | the same bits |" in tables.checkpoint_cost(figures)


def test_with_little_time_what_is_missing_is_left_out(run):
    figures = run("--sections", "stall", "throughput", "--limit-s", "0")
    first, *others = rows(figures, "stall")
    assert first["status"] == "ran"
    assert {row["status"] for row in others} == {"left out"}
    assert [row["status"] for row in rows(figures, "throughput")] == ["left out"]
    assert "| the first save holds it up for |" in "\n".join(tables.checkpoint_cost(figures))


def test_too_little_room_is_said_beforehand(run, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_cost.Settings, "room_bytes", 1 << 60)
    with pytest.raises(SystemExit, match=r"too little room: 2 checkpoints .* --folder"):
        run()
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_section_that_fails_says_why_and_the_others_run(run, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Saver, "save", fail)
        figures = run("--sections", "stall", "throughput")
    assert {section["status"] for section in figures["sections"].values()} == {"failed"}
    assert "No space left" in figures["sections"]["stall"]["reason"]


def test_the_folder_with_most_room_is_taken(monkeypatch, tmp_path):
    room = {"/dev/shm": 1, str(tmp_path / "large"): 3, str(tmp_path): 2}
    (tmp_path / "large").mkdir()
    usage = type("Usage", (), {})

    def disk_usage(path):
        found = usage()
        found.free = room[str(path)]
        return found

    monkeypatch.setattr(checkpoint_work.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(checkpoint_work.tempfile, "gettempdir", lambda: str(tmp_path / "large"))
    monkeypatch.chdir(tmp_path)
    assert checkpoint_work.roomiest() == tmp_path / "large"


# -- What is planted is seen -----------------------------------------------------------------------


def test_a_save_that_holds_training_up_is_seen(run, monkeypatch):
    monkeypatch.setattr(CheckpointManager, "save", slowed(CheckpointManager.save, PLANTED_S))
    figures = run("--sections", "stall", "throughput")
    for row in rows(figures, "stall"):
        assert row["call_s"] >= PLANTED_S
        assert row["stall_s"] >= 0.5 * PLANTED_S
    for row in rows(figures, "throughput"):
        assert row["with_s"] - row["without_s"] >= 0.5 * PLANTED_S
    assert not figures["sections"]["throughput"]["summary"]["held"]


def test_a_slow_write_holds_up_the_next_save_only(run, monkeypatch):
    monkeypatch.setattr(Saver, "save", slowed(Saver.save, 2 * PLANTED_S))
    figures = run("--sections", "stall", "throughput")
    for row in rows(figures, "stall"):
        assert row["written_s"] >= 2 * PLANTED_S
        is_held_up = row["kind"] == "blocking"
        assert (row["stall_s"] >= PLANTED_S) == is_held_up
    for row in rows(figures, "throughput"):
        assert row["call_s"] >= PLANTED_S


def test_a_resume_that_forgets_the_generators_is_seen(run, monkeypatch, capsys):
    monkeypatch.setattr("torchfast.training_state.set_rng_state", lambda state, device: None)
    figures = run("--sections", "resume")
    summary = figures["sections"]["resume"]["summary"]
    assert not summary["held"]
    assert summary["same"] < summary["cuts"]
    assert "OTHER BITS" in capsys.readouterr().out


def test_a_resume_that_forgets_the_moments_is_seen(run, monkeypatch):
    load = TrainStep.load_state_dict

    def forgetful(self, state):
        load(self, state)
        for moments in self.optimizer.state.values():
            moments["exp_avg"].zero_()

    monkeypatch.setattr(TrainStep, "load_state_dict", forgetful)
    check_large_is_other(run("--sections", "resume", "--limit-s", "0"))


def test_a_save_that_copies_nothing_before_the_next_step_is_seen(run, monkeypatch):
    monkeypatch.setattr(Stager, "stage", lambda _, given: Staged(lambda: dict(given)))
    monkeypatch.setattr(Saver, "save", slowed(Saver.save, PLANTED_S))
    check_large_is_other(run("--sections", "resume", "--limit-s", "0"))


def check_large_is_other(figures):
    large = rows(figures, "resume")[-1]
    assert large["model"] == "large"
    assert not large["same_losses"]
    assert not large["same_state"]
    assert any("optimizer" in text or "model" in text for text in large["differing"])
    assert "**other bits**" in "\n".join(tables.checkpoint_cost(figures))


# -- With a graph ----------------------------------------------------------------------------------


def test_cuts_between_replays_are_counted(run, monkeypatch):
    with taped(monkeypatch):
        figures = run("--sections", "resume", "--plan", "exact")
    summary = figures["sections"]["resume"]["summary"]
    assert summary["held"]
    assert (summary["live_graph"], summary["cuts"]) == (4, 5)  # the first step is the warm-up
    assert summary["large"]["live_graph"]
