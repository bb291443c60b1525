"""A script that has a torch.profiler of its own keeps it, and lives: ours gives way.

In processes of their own: where two run at once, torch ends the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import torchfast

LOOP = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps, step=lambda: None):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        step()
def has_mm(profiler):
    return any(event.name == "aten::addmm" for event in profiler.events())
def ready(profiler):
    print("seen", has_mm(profiler))
"""
SCHEDULED = """
schedule = torch.profiler.schedule(wait={wait}, warmup=1, active=2, repeat=1)
with torch.profiler.profile(schedule=schedule, on_trace_ready=ready) as profiler:
    train(24, profiler.step)
"""
AROUND = """
with torch.profiler.profile() as profiler:
    train({steps})
print("seen", has_mm(profiler))
"""
NESTED = """
from torchfast import profile
train(6)
with profile("inner", steps=2, warmup=1, lines=False) as profiling:
    train(4, profiling.step)
print("seen", profiling.report.figures.num_steps == 2)
"""


@pytest.fixture
def run(tmp_path):
    def ran(body, *, steps=4):
        (tmp_path / "train.py").write_text(LOOP + textwrap.dedent(body))
        options = [f"--steps={steps}", "--warmup=3", "--json=out.json"]
        command = [sys.executable, "-m", "torchfast", "profile", *options, "train.py"]
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={"PYTHONPATH": torchfast.__file__.rsplit("/", 2)[0], "PATH": "/usr/bin:/bin"},
        )
        out = tmp_path / "out.json"
        return run, json.loads(out.read_text()) if out.exists() else None

    return ran


@pytest.mark.parametrize(
    ("body", "measured"),
    [
        (SCHEDULED.format(wait=4), 1),  # begins while ours runs, and what ours has seen is kept
        (SCHEDULED.format(wait=1), 4),  # ours begins when it has ended
        (AROUND.format(steps=5) + "train(12)", 4),
        (NESTED + "train(12)", 3),
    ],
    ids=["within", "before", "first", "nested"],
)
def test_the_scripts_own_profiler_goes_first(run, body, measured):
    ended, data = run(body)

    assert ended.returncode == 0, ended.stderr
    assert "seen True" in ended.stdout
    assert "no active profiling session" not in ended.stderr
    assert data["steps"] == measured
    assert any("another torch.profiler ran" in remark for remark in data["remarks"])


def test_a_profiler_around_all_steps_leaves_none(run):
    ended, data = run(AROUND.format(steps=20))

    assert (ended.returncode, data) == (1, None)
    assert "seen True" in ended.stdout
    assert "nothing was profiled: another torch.profiler ran" in ended.stderr


def test_a_profiler_before_and_behind_is_no_matter(run):
    ended, data = run(AROUND.format(steps=1) + "train(12)\n" + AROUND.format(steps=2))

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("seen True") == 2
    assert data["steps"] == 4
    assert not any("another" in remark for remark in data["remarks"])
