"""``python -m torchfast env``: what it prints, and that a shell understands it."""

from __future__ import annotations

import os
import subprocess

import pytest

from torchfast.__main__ import main
from torchfast.memory.allocator_environment import VARIABLES


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command in an environment; return its exit status and what it printed."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def call(*arguments, **environ):
        for name, text in environ.items():
            monkeypatch.setenv(name, text)
        status = main(["env", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_a_preset(command):
    status, out, err = command("--preset", "variable-shapes")
    assert status == 0
    assert out == "export PYTORCH_ALLOC_CONF=expandable_segments:True\n"
    assert err.startswith("# variable-shapes: each new largest shape makes a segment grow")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("version", "knows"), [("2.12", False), ("2.13", True)])
def test_a_preset_for_another_torch_has_what_that_one_knows(command, version, knows):
    status, out, err = command("--preset", "long-runs", "--torch", version)
    assert status == 0
    assert "expandable_segments:True" in out
    assert ("pinned_max_round_threshold_mb" in out) == knows
    assert ("(pinned_max_round_threshold_mb left out: a later torch knows it)" in err) != knows


def test_settings_are_added_to_a_preset(command):
    _, out, _ = command("--preset", "variable-shapes", "large_segment_size_mb=64")
    assert "large_segment_size_mb:64,expandable_segments:True" in out


def test_a_shell_understands_it(command):
    list_ = "roundup_power2_divisions=[256:1,512:2,>:8]"
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    _, out, _ = command(list_, **environ)
    told = subprocess.run(
        ["sh", "-c", f"{out}env"],
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert "PYTORCH_ALLOC_CONF=roundup_power2_divisions:[256:1,512:2,>:8]" in told
    assert not any(line.startswith("PYTORCH_CUDA_ALLOC_CONF") for line in told)


@pytest.mark.parametrize(
    ("shell", "lines"),
    [
        (
            "fish",
            [
                "set -e PYTORCH_CUDA_ALLOC_CONF",
                "set -gx PYTORCH_ALLOC_CONF 'expandable_segments:True'",
            ],
        ),
        (
            "powershell",
            [
                "Remove-Item Env:PYTORCH_CUDA_ALLOC_CONF",
                "$env:PYTORCH_ALLOC_CONF = 'expandable_segments:True'",
            ],
        ),
    ],
)
def test_other_shells(command, shell, lines):
    _, out, _ = command("--shell", shell, "expandable_segments=True", PYTORCH_CUDA_ALLOC_CONF="")
    assert out.splitlines() == lines


def test_what_is_overridden_is_said(command):
    before = "max_split_size_mb:64,expandable_segments:False"
    status, _, err = command("expandable_segments=True", PYTORCH_CUDA_ALLOC_CONF=before)
    assert status == 0
    assert err.splitlines() == [
        "# PYTORCH_CUDA_ALLOC_CONF is taken away, since it would beat PYTORCH_ALLOC_CONF",
        "# max_split_size_mb=64 of PYTORCH_CUDA_ALLOC_CONF is dropped; --keep keeps it",
        "# expandable_segments=False of PYTORCH_CUDA_ALLOC_CONF becomes True",
    ]


def test_keep(command):
    before = "max_split_size_mb:64,release_lock_on_cudamalloc:False"
    _, out, err = command("--keep", "release_lock_on_cudamalloc=True", PYTORCH_ALLOC_CONF=before)
    assert "max_split_size_mb:64,release_lock_on_cudamalloc:True" in out
    assert "dropped" not in err


def test_an_environment_that_cannot_be_read_can_be_replaced(command):
    status, out, err = command("expandable_segments=True", PYTORCH_ALLOC_CONF="nonsense:1")
    assert status == 0
    assert "expandable_segments:True" in out
    assert "cannot be read" in err


def test_without_arguments_it_says_what_is(command):
    environ = {
        "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.5",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    status, out, _ = command(**environ)
    assert status == 0
    assert "PYTORCH_ALLOC_CONF='expandable_segments:True' is ignored" in out
    assert "  garbage_collection_threshold = 0.5" in out
    assert "note: garbage_collection_threshold does nothing without" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["expandable_segment=True"], "did you mean 'expandable_segments'"),
        (["expandable_segments=true"], "must be spelled True"),
        (["expandable_segments"], "write it as KEY=VALUE"),
        (["max_split_size_mb=12"], "must be >= large_segment_size_mb"),
        (["--torch", "2.12", "pinned_max_cached_size_mb=1"], "known to torch 2.13 and later"),
        (["--torch", "2.10", "expandable_segments=True"], "version must be from 2.11 to 2.15"),
        (["--torch", "2.9", "--preset", "graphs"], "version must be from 2.11 to 2.15"),
        (["--torch", "abc"], "version must be written as '2.13'"),
        (["roundup_power2_divisions=256:1,512:2"], "lists in brackets: key:[256:1,512:2]"),
    ],
)
def test_wrong_arguments(command, arguments, message):
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert message in err
