"""`MemoryMonitor`: a leak, fragmentation and a lack are told apart, and none is seen where none is.

The allocator is played by figures; `tests/gpu/test_allocator_on_gpu.py` has the real one.
"""

from __future__ import annotations

import json
import logging
import mmap
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchfast import MemoryMonitor, MemorySample
from torchfast.memory import PoolStatistics
from torchfast.memory import monitor as monitor_module
from torchfast.memory.diagnosis import LEAST_SAMPLES, judge
from torchfast.memory.samples import sample_of, trend
from torchfast.memory.sources import NO_LINE, CUDAMemory, ProcessMemory, line_of

MB = 2**20
LIMIT = 10_000 * MB


class Played:
    """A source whose figures are those of a function of the step."""

    name = "a device"
    limit_bytes = LIMIT
    noise_bytes = MB
    has_segments = True

    def __init__(self, figures, *, lines=None, refuses=None, grows=False, private=0, pools=None):
        self.figures = figures
        self.lines = lines or (lambda step: {})
        self.refuses = refuses
        self.grows = grows
        self.private = private
        self.named = pools or {}
        self.now = 0
        self.looks = []
        self.calls = []

    def read(self, step):
        self.now = step
        figures = self.figures(step)
        return None if figures is None else MemorySample(step=step, **figures)

    def expandable(self):
        self.calls.append("expandable")
        return self.grows

    def private_bytes(self):
        return self.private

    def pools(self):
        return self.named

    def start_trace(self):
        self.calls.append("start")
        return self.refuses

    def live_by_line(self):
        self.looks.append(self.now)
        return self.lines(self.now)

    def stop_trace(self):
        self.calls.append("stop")


def figures(allocated=1000 * MB, reserved=2000 * MB, peak=1900 * MB, **others):
    return {"allocated_bytes": allocated, "reserved_bytes": reserved, "peak_bytes": peak} | others


def watched(source, steps=400, **options):
    monitor = MemoryMonitor("cpu", source=source, **({"every": 4} | options))
    for _ in range(steps):
        monitor.step()
    return monitor


def test_a_healthy_run(caplog):
    source = Played(lambda step: figures())
    monitor = watched(source)
    assert monitor.diagnosis().verdict == "healthy"
    assert len(monitor.samples) == 100
    assert [s.step for s in monitor.samples[:2]] == [4, 8]
    assert source.calls == []
    assert caplog.records == []


def test_too_few_samples_say_nothing():
    monitor = watched(Played(lambda step: figures(allocated=step * MB)), steps=60)
    assert len(monitor.samples) < LEAST_SAMPLES
    assert monitor.diagnosis().verdict == "unknown"


def test_history_is_bounded():
    monitor = watched(Played(lambda step: figures()), history=20)
    assert len(monitor.samples) == 20
    assert monitor.samples[-1].step == 400


LEAK = 300 * 1024


def leaking(step):
    return figures(allocated=1000 * MB + step * LEAK)


def test_a_leak_is_told_with_its_line(caplog):
    source = Played(
        leaking, lines=lambda step: {"train.py:7 in <module>": step * LEAK, "model.py:3": 5}
    )
    monitor = watched(source)
    found = monitor.diagnosis()
    assert found.verdict == "leak"
    assert found.slope_bytes == pytest.approx(LEAK)
    [line] = found.lines
    assert line.line == "train.py:7 in <module>"
    assert line.num_bytes == 12 * LEAK
    assert source.calls == ["start", "stop"]
    assert len(source.looks) == 2
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "the memory of a device at step" in record.message
    assert "train.py:7" in record.message
    assert "without .detach()" in record.message


def test_a_leak_fills_the_device_in_so_many_steps():
    source = Played(lambda step: figures(allocated=step * MB, reserved=9000 * MB, peak=8000 * MB))
    assert "in about 1,000 steps" in watched(source, every=1, steps=20).diagnosis().evidence


def test_a_leak_whose_lines_cannot_be_told(caplog):
    source = Played(leaking, refuses="somebody else looks")
    found = watched(source).diagnosis()
    assert found.lines == ()
    assert "its line was not looked for: somebody else looks" in found.evidence
    assert source.looks == []
    assert len(caplog.records) == 1


def test_lines_are_not_looked_for_if_not_wanted(caplog):
    source = Played(leaking)
    assert "find_lines=False" in watched(source, find_lines=False).diagnosis().evidence
    assert source.calls == []
    assert len(caplog.records) == 1


def test_a_search_that_is_under_way_is_ended_by_close():
    source = Played(leaking)
    watched(source, steps=4 * LEAST_SAMPLES).close()
    assert source.calls == ["start", "stop"]


@pytest.mark.parametrize("kept", [0, 64])
def test_growth_that_ends_is_no_leak(kept):
    """Warm-up, an optimizer's state, a cache that fills; beside it losses in a list."""
    source = Played(lambda step: figures(allocated=min(step, 120) * MB + kept * step))
    assert watched(source, find_lines=False).diagnosis().verdict == "healthy"


@pytest.mark.parametrize("kept", [0, 64])
def test_a_jump_is_no_leak(kept):
    source = Played(lambda step: figures(allocated=(500 if step < 200 else 900) * MB + kept * step))
    assert watched(source, find_lines=False).diagnosis().verdict == "healthy"


def test_a_leak_in_some_of_the_steps():
    source = Played(lambda step: figures(allocated=1000 * MB + step // 50 * 50 * LEAK))
    assert watched(source, find_lines=False).diagnosis().verdict == "leak"


def test_growth_below_the_noise_is_no_leak():
    source = Played(lambda step: figures(allocated=1000 * MB + step * 100))
    assert watched(source).diagnosis().verdict == "healthy"


def test_a_leak_beneath_varying_shapes():
    draw = random.Random(0)
    source = Played(lambda step: figures(allocated=(1000 + draw.randrange(50)) * MB + step * LEAK))
    assert watched(source).diagnosis().verdict == "leak"


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_varying_shapes_are_no_leak(seed):
    draw = random.Random(seed)
    values = [draw.randrange(1000) * MB for _ in range(64)]
    samples = [
        MemorySample(step=i, **figures(allocated=v, peak=1900 * MB)) for i, v in enumerate(values)
    ]
    assert judge(samples, limit_bytes=LIMIT, noise_bytes=MB).verdict == "healthy"


def test_the_slope_is_that_of_least_squares():
    found = trend(range(0, 80, 8), [3 * x + 5 for x in range(0, 80, 8)])
    assert (found.slope, found.growth, found.rises) == (pytest.approx(3), pytest.approx(216), True)
    assert not trend([1, 2, 3], [1, 2, 3]).rises


SPLIT = {"peak": 3000 * MB, "reserved": 6000 * MB, "inactive_split_bytes": 2400 * MB}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda step: {"num_retries": step // 100}, "allocation retries in"),
        (lambda step: {"reserved": 6000 * MB + step * MB}, "reserved grows by 1,048,576 bytes"),
        (lambda step: {"reserved": 9500 * MB}, "are reserved, and never more than"),
    ],
)
def test_fragmentation(more, said):
    source = Played(lambda step: figures(**(SPLIT | more(step))))
    found = watched(source).diagnosis()
    assert found.verdict == "fragmentation"
    assert said in found.evidence
    assert "expandable_segments=True" in found.remedy
    assert found.lines == ()


def test_much_that_is_cached_alone_is_not_fragmentation():
    source = Played(lambda step: figures(**SPLIT))
    assert watched(source).diagnosis().verdict == "healthy"


CACHE = PoolStatistics(name="a", reserved_bytes=2500 * MB, allocated_bytes=500 * MB)


@pytest.mark.parametrize(
    ("options", "others", "remedy"),
    [
        ({"grows": True}, {}, "segments grow already"),
        ({"private": 2500 * MB}, {}, "pools of graphs"),
        ({"pools": {"a": CACHE}}, {}, "2.10 GB of it are free in memory pools"),
        ({}, {"requested_bytes": 500 * MB}, "50% of what is allocated is rounding"),
    ],
)
def test_the_setting_that_helps(options, others, remedy, caplog):
    source = Played(lambda step: figures(**SPLIT, num_retries=step // 100, **others), **options)
    assert remedy in watched(source).diagnosis().remedy
    assert remedy in caplog.text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda step: {"reserved": 9500 * MB, "peak": 9300 * MB}, "9.75 GB are in use at once"),
        (lambda step: {"num_retries": step // 100}, "4 allocation retries"),
        (lambda step: {"num_ooms": step // 300}, "out of memory 1 times"),
    ],
)
def test_a_lack(more, said):
    source = Played(lambda step: figures(**({"peak": 1900 * MB} | more(step))))
    found = watched(source).diagnosis()
    assert found.verdict == "short"
    assert said in found.evidence
    assert "accumulate=" in found.remedy
    assert ("nvidia-smi" in found.remedy) == ("9.75 GB" not in said)


def test_each_verdict_is_told_once(caplog):
    def worse(step):
        return figures(num_retries=step // 100) if step < 600 else figures(**SPLIT, num_retries=99)

    watched(Played(worse), steps=1200, history=32)
    assert [r.message.split(": ")[1] for r in caplog.records] == ["short", "fragmentation"]


def test_the_record_is_json():
    source = Played(
        lambda step: figures(
            requested_bytes=900 * MB, inactive_split_bytes=200 * MB, pools={"small": MB}
        ),
        pools={"a": CACHE},
    )
    record = json.loads(json.dumps(watched(source).to_record()))
    assert record["fragmentation"] == pytest.approx(0.1)
    assert record["rounding"] == pytest.approx(0.1)
    assert record["pools"] == {"small": MB}
    assert record["named_pools"] == {
        "a": {"reserved_bytes": 2500 * MB, "allocated_bytes": 500 * MB}
    }
    assert record["verdict"] == "healthy"
    assert MemoryMonitor("cpu", source=source).to_record() == {}
    assert json.dumps(watched(source).diagnosis().to_dict())


def test_the_report(monkeypatch):
    decision = watched(Played(lambda step: figures())).decision()
    assert (decision.lever, decision.outcome) == ("memory", "applied")
    assert "a device, every 4 steps: healthy" in decision.detail
    # A device that has allocated nothing yet is asked again.
    late = watched(Played(lambda step: figures() if step > 100 else None))
    assert late.samples[0].step == 104


def test_a_system_that_tells_nothing():
    source = Played(lambda step: None)
    source.has_segments = False
    decision = watched(source).decision()
    assert decision.outcome == "stepped aside"
    assert source.now == 4  # asked once


def test_nothing_is_read_during_a_capture(monkeypatch):
    monkeypatch.setattr(monitor_module, "is_capturing", lambda: True)
    assert watched(Played(lambda step: figures())).samples == ()


def test_bad_arguments():
    with pytest.raises(ValueError, match="every must be >= 1"):
        MemoryMonitor("cpu", every=0)
    with pytest.raises(ValueError, match="history must be >= 16"):
        MemoryMonitor("cpu", history=3)
    with pytest.raises(TypeError, match="did you mean 'every'"):
        MemoryMonitor("cpu", evry=3)


# --- the sources --------------------------------------------------------------------------------


def test_the_process_is_what_a_cpu_tells():
    monitor = MemoryMonitor("cpu", every=1)
    kept = []
    for _ in range(64):
        # 2 MB of its own: what tests before have freed may be given to a tensor again.
        kept.append(torch.frombuffer(mmap.mmap(-1, 2 * MB), dtype=torch.float32).fill_(1.0))
        monitor.step()
    if not monitor.samples:
        pytest.skip("this system does not tell what a process holds")
    found = monitor.diagnosis()
    assert found.verdict == "leak"
    assert found.slope_bytes == pytest.approx(2 * MB, rel=0.2)
    assert "on the CPU torch does not note" in found.evidence
    assert "the process" in repr(monitor)


def test_the_process_may_not_tell(monkeypatch):
    monkeypatch.setattr("torchfast.memory.sources.Path.read_text", lambda *a, **k: "nonsense")
    assert ProcessMemory().read(1) is None


def test_torchs_counters_are_read():
    stats = {
        "allocated_bytes": {"all": {"current": 1, "peak": 2}},
        "reserved_bytes": {
            "all": {"current": 3},
            "small_pool": {"current": 1},
            "large_pool": {"current": 2},
        },
        "requested_bytes": {"all": {"current": 1}},
        "inactive_split_bytes": {"all": {"current": 1}},
        "num_alloc_retries": 5,
        "num_ooms": 6,
    }
    assert sample_of(9, stats) == MemorySample(
        step=9,
        allocated_bytes=1,
        reserved_bytes=3,
        requested_bytes=1,
        inactive_split_bytes=1,
        peak_bytes=2,
        num_retries=5,
        num_ooms=6,
        pools={"small": 1, "large": 2},
    )
    # Torch 2.13 tells those of graphs, too.
    held = {(0, 1): {"all": {"current": 2, "peak": 9}}, (3, 0): {"all": {"current": 1, "peak": 1}}}
    private = sample_of(9, stats | {"reserved_bytes_by_private_pools": held})
    assert private.pools == {"small": 1, "large": 2, "private": 3}


def test_the_line_is_the_users():
    def frame(filename, line):
        return {"filename": filename, "line": line, "name": "f"}

    inside = torch.__file__.replace("__init__.py", "nn/functional.py")
    frames = [frame("??", 0), frame(inside, 1), frame("/home/me/train.py", 2), frame("/x.py", 3)]
    assert line_of(frames) == "/home/me/train.py:2 in f"
    assert line_of(frames[:2]) == f"{inside}:1 in f"
    assert line_of(frames[:1]) == line_of([]) == NO_LINE


@pytest.mark.parametrize("is_noted", [False, True])
def test_lines_that_are_noted_already_are_read_and_left_alone(monkeypatch, is_noted):
    """By the program itself, or for the account of a step that does not fit."""
    frames = [{"filename": "/home/me/train.py", "line": 2, "name": "f"}]
    block = {"address": 0, "size": MB, "state": "active_allocated", "frames": frames}
    calls = []
    for name, value in {
        "get_per_process_memory_fraction": lambda device: 1.0,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=LIMIT),
        "memory_snapshot": lambda **kwargs: [{"device": 0, "blocks": [block]}],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: is_noted, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda **kwargs: calls.append(kwargs["enabled"]),
    )
    source = CUDAMemory(torch.device("cuda", 0))
    assert source.start_trace() is None
    assert source.live_by_line() == {"/home/me/train.py:2 in f": MB}
    source.stop_trace()
    assert calls == ([] if is_noted else ["state", None])
