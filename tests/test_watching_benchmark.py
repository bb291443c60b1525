"""What being watched costs: planted costs are found with their size, and the same code is free."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from argparse import Namespace

import pytest
import torch

from benchmarks import paired_steps, watching, watching_steps, watching_within
from benchmarks.cores import pinned
from benchmarks.paired_steps import Timed, cost_against, paired_cost, usual_ms
from benchmarks.watching_within import Spent, guard_within, passed_calls
from benchmarks.workloads import workload
from torchfast import SyncGuard
from torchfast._core.syncs import WATCH
from torchfast.profiling import StepTimer, step_timer
from torchfast.profiling.step_timer import EVERY


def spend(ms):
    begun = time.perf_counter()
    while (time.perf_counter() - begun) * 1e3 < ms:
        pass


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(*more):
        out = tmp_path / "figures.json"
        options = ["--device", "cpu", "--size", "smoke", "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["watching.py", *options, *more])
        watching.main()
        found = json.loads(out.read_text())
        return {row["arm"]: row for row in found["rows"]}, found["settings"], capsys.readouterr()

    return run


class NoisyClock:
    """Time that is told: steps of 7 ms, all slower or faster for a while, some interrupted."""

    def __init__(self, monkeypatch):
        self.now_s, self._num_steps, self._slow = 0.0, 0, 1.0
        self._draws = random.Random(1)
        for module in (watching_steps, watching_within):
            monkeypatch.setattr(module, "time", Namespace(perf_counter=lambda: self.now_s))
        iterate = watching.Endless.__iter__
        monkeypatch.setattr(watching.Endless, "__iter__", lambda b: map(self._step, iterate(b)))

    def _step(self, batch):
        if not self._num_steps % 61:
            self._slow = self._draws.uniform(0.95, 1.05)
        self._num_steps += 1
        self.spend(self._slow * self._draws.gauss(7.0, 0.05))
        self.spend(self._draws.uniform(1.0, 20.0) * (self._draws.random() < 0.02))
        return batch

    def spend(self, ms):
        self.now_s += ms / 1e3


# --- the estimate ---------------------------------------------------------------------------------


def noisy(blocks, **costs):
    """Return steps of each arm on a host that is now slower and now faster, and interrupted."""
    draws = random.Random(1)
    steps = {arm: [] for arm in costs}
    for block in range(blocks):
        if not block % 16:
            slow = draws.uniform(0.95, 1.05)
        for arm, (plain, sampled) in costs.items():
            is_sampled = not block % EVERY
            ms = slow * draws.gauss(7.0, 0.1) + plain + sampled * is_sampled
            ms += draws.uniform(1.0, 20.0) * (draws.random() < 0.02)
            steps[arm].append(Timed(ms, is_sampled and sampled > 0))
    return steps


def test_half_a_hundredth_is_told_from_nothing_on_a_noisy_host():
    steps = noisy(2500, none=(0.0, 0.0), same=(0.0, 0.0), dear=(0.035, 0.0), seldom=(0.0, 0.56))
    for arm, expected in (("same", 0.0), ("dear", 0.005), ("seldom", 0.005)):
        cost, (low, high) = paired_cost(steps[arm], steps["none"])
        assert cost == pytest.approx(expected, abs=0.001), arm
        assert low <= expected <= high, arm
        assert high - low < 0.003, arm


def test_steps_of_a_kind_count_as_often_as_they_come():
    steps = [Timed(1.0)] * 15 + [Timed(2.6, "sampled")]
    others = [Timed(1.0)] * 16
    assert usual_ms(steps) == pytest.approx(1.1)
    assert paired_cost(steps * 20, others * 20)[0] == pytest.approx(0.1)


def test_what_came_into_a_step_from_elsewhere_is_compared_with_nothing():
    record = Timed(9.0, counts=False)
    ours, others = [Timed(1.1), record, Timed(1.1)], [Timed(1.0), Timed(1.0), record]
    found, interval = paired_cost(ours * 40, others * 40)
    assert found == pytest.approx(0.1)
    assert interval == pytest.approx([0.1, 0.1])
    assert usual_ms(ours) == pytest.approx(1.1)


@pytest.mark.parametrize(("more", "is_dear"), [(0.03, True), (0.0, False)])
def test_ways_alternate_until_it_is_clear_which_side_of_a_limit_they_are_on(more, is_dear):
    draws = random.Random(1)
    done = []

    def other():
        done.append(0)
        return draws.gauss(1.0, 0.05)

    cost, (low, high) = cost_against(0.01, lambda: other() * (1 + more), other, seconds=60)
    assert cost == pytest.approx(more, abs=0.01)
    assert (low > 0.01, high < 0.01) == (is_dear, not is_dear)
    assert not len(done) % (2 * 20 * paired_steps.RUN)


def test_pinned_threads_share_a_core_and_go_back():
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    here, on, tids = threading.Event(), threading.Event(), []

    def wait():
        tids.append(threading.get_native_id())
        here.set()
        on.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    here.wait()
    try:
        with pinned() as core:
            assert os.sched_getaffinity(0) == os.sched_getaffinity(tids[0]) == {core}
            assert torch.get_num_threads() == 1
            later = threading.Thread(target=wait)
            later.start()
            while len(tids) < 2:
                pass
            assert os.sched_getaffinity(tids[1]) == {core}
        assert os.sched_getaffinity(0) == before
        assert all(os.sched_getaffinity(tid) == before for tid in tids)
        assert torch.get_num_threads() == num_threads
    finally:
        on.set()
        thread.join()
        later.join()


# --- within ---------------------------------------------------------------------------------------


def test_what_is_clocked_is_added_up():
    spent = Spent()
    clocked = spent.clocked(lambda ms: spend(ms) or "done")
    assert clocked(5.0) == "done"
    assert 4.9 < spent.ms < 50.0


def test_reading_the_clock_is_no_part_of_what_is_clocked(monkeypatch):
    reads = itertools.count()
    clock = Namespace(perf_counter=lambda: next(reads) * 1e-6)  # a microsecond to each reading
    monkeypatch.setattr(watching_within, "time", clock)
    spent = Spent()
    nothing = spent.clocked(lambda: None)
    for _ in range(1000):
        nothing()
    assert spent.ms == pytest.approx(0.0, abs=1e-6)


def test_what_passes_beneath_is_measured_by_a_number_of_the_device(monkeypatch):
    """One on the host passes nothing of a guard's for CUDA, which would cost nothing then."""
    devices, ones = [], torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda *size, device=None: devices.append(device) or ones(*size)
    )
    monkeypatch.setattr(watching_within, "SyncGuard", lambda *_, **__: SyncGuard(device="cpu"))
    watched_ms, held_ms = watching_within._passing_below_ms("cuda")
    assert devices == ["cuda"]
    assert watched_ms > held_ms > 0


def test_what_a_guard_is_asked_is_counted_and_has_its_price():
    x = torch.ones(4)
    with SyncGuard(device="cpu") as guard, passed_calls() as passed:
        with guard:
            x[0], x[1], x.to(torch.float64)
        with WATCH.during("loader"):
            pass
        x.sum().item()
    assert passed.calls["__getitem__"] == 2
    assert passed.calls["to"] == passed.calls["item"] == 1
    assert len(passed.entered) == 1
    assert len(passed.during) == 2
    guard.close()
    found = guard_within(passed, "cpu")
    assert found.calls == sum(passed.calls.values()) >= 4
    assert 0 < found.held_ms < found.watched_ms < 1.0
    assert not WATCH._holders


# --- the benchmark --------------------------------------------------------------------------------


def test_each_arm_is_watched_by_what_it_is_named_after(run, monkeypatch):
    begun, arms = [], []
    begin, end = StepTimer.begin_step, StepTimer.end_step
    be, affinity = watching_steps.StepWatchers.be, os.sched_getaffinity(0)
    pinned_to = set()

    def be_told(watchers, arm):
        be(watchers, arm)
        pinned_to.add(len(os.sched_getaffinity(0)))
        arms.append(arm)

    def told(timer):
        begun.append((arms[-1], timer))
        begin(timer)

    monkeypatch.setattr(StepTimer, "begin_step", told)
    monkeypatch.setattr(watching_steps.StepWatchers, "be", be_told)
    rows, settings, printed = run("--eager-s", "0")
    assert list(rows) == list(watching_steps.ARMS)
    assert settings["pinned"] is True
    assert pinned_to == {1}
    assert os.sched_getaffinity(0) == affinity
    blocks = 2 * paired_steps.RUN
    each = blocks + watching_steps.WARM_UP_STEPS
    assert {arm: arms.count(arm) for arm in rows} == {
        # With the end of the fit, and a step of the guard ahead of the one that is counted.
        **dict.fromkeys(rows, each),
        "no times": each + 1,
        "guard": each + 1,
    }
    # Each with a timer of its own.
    by_arm = {arm: {t for a, t in begun if a == arm} for arm in arms}
    assert not by_arm["no times"]
    assert {len(timers) for arm, timers in by_arm.items() if arm != "no times"} == {1}
    assert len({*by_arm["as it is"], *by_arm["again"], *by_arm["within"], *by_arm["guard"]}) == 4
    samples = rows["as it is"]["samples"]
    assert samples["forward"] >= blocks // EVERY
    assert all(
        row["against"] == watching.AGAINST[arm] for arm, row in rows.items() if "cost" in row
    )
    assert all(
        row["usual_interval"][0] <= row["usual"] <= row["usual_interval"][1]
        for row in rows.values()
        if "cost" in row
    )
    assert "cost" not in rows["no times"]
    assert rows["as it is"]["within"] > 0
    assert rows["guard"]["within"] > rows["guard"]["held"] >= 0
    assert "within" not in rows["again"]
    assert "as it is" in printed.out
    assert (StepTimer.begin_step, StepTimer.end_step) == (told, end)
    assert not WATCH._entered
    assert not WATCH._holders


@pytest.mark.parametrize(
    ("planted", "each_ms", "sampled_ms"),
    [("each step", 0.05, 0.0), ("sampled steps", 0.0, 1.0), ("nothing", 0.0, 0.0)],
)
def test_a_planted_cost_is_found_with_its_size(run, monkeypatch, planted, each_ms, sampled_ms):
    clock, begin = NoisyClock(monkeypatch), StepTimer.begin_step
    # Time is told, so what is trained may be small.
    monkeypatch.setattr(watching, "workload", lambda _, size: workload("mlp", size))

    def dear(timer):
        begin(timer)
        clock.spend(each_ms + sampled_ms * (timer._sample is not None))

    monkeypatch.setattr(StepTimer, "begin_step", dear)
    monkeypatch.setattr(step_timer, "BUDGET", 1.0)  # this machine's times are not the clock's
    rows, settings, _ = run("--no-pin", "--eager-s", "20")
    assert settings["pinned"] is False
    expected_ms = each_ms + sampled_ms / EVERY
    for arm, expected in (("as it is", expected_ms / 7.0), ("again", 0.0)):
        low, high = rows[arm]["usual_interval"]
        assert low <= expected <= high, (arm, rows[arm]["usual"])
        assert high - low < 0.005
    assert rows["as it is"]["usual"] == pytest.approx(expected_ms / 7.0, abs=0.001)
    assert rows["as it is"]["within"] == pytest.approx(expected_ms / 7.0, rel=0.03)


def test_an_error_in_a_step_puts_all_back(monkeypatch):
    args = Namespace(size="smoke", device="cpu", pin=False, eager_s=0.0)
    said = [getattr(StepTimer, name) for name in watching_steps.SAID]
    be = watching_steps.StepWatchers.be

    def fails(watchers, arm):
        be(watchers, arm)
        if arm == "guard":
            raise RuntimeError("in a step that is watched")

    monkeypatch.setattr(watching_steps.StepWatchers, "be", fails)
    with pytest.raises(RuntimeError, match="in a step that is watched"):
        watching.eager_rows(args)
    assert [getattr(StepTimer, name) for name in watching_steps.SAID] == said
    assert not WATCH._entered
    assert not WATCH._holders


def test_turns_of_a_graph(monkeypatch):
    begun, entered, arms = [], [], []
    begin, enter, be = StepTimer.begin_step, SyncGuard.__enter__, watching.Watchers.be
    monkeypatch.setattr(StepTimer, "begin_step", lambda t: begun.append(arms[-1:]) or begin(t))
    monkeypatch.setattr(SyncGuard, "__enter__", lambda g: entered.append(arms[-1]) or enter(g))
    monkeypatch.setattr(watching.Watchers, "be", lambda w, arm: arms.append(arm) or be(w, arm))
    # Of a device without graphs, whose steps are eager.
    rows = watching.graph_rows(Namespace(size="smoke", device="cpu", rounds=2, block_s=0.001))
    assert [row["arm"] for row in rows] == list(watching.ARMS)
    assert "cost" not in rows[0]
    assert all(row["against"] in watching.ARMS and row["ms"] > 0 for row in rows[1:])
    assert all(
        low <= row["usual"] <= high for row in rows[1:] for low, high in [row["usual_interval"]]
    )
    turn = watching.LEAD_STEPS + rows[0]["steps_of_a_turn"]
    first = watching.WARM_UP_STEPS + watching.EVERY
    assert {row["steps"] for row in rows} == {first + 2 * len(watching.ARMS) * turn}
    assert rows[0]["samples"]["forward"] > 2 * 3
    # Each arm has its turns, in which it is watched by what it is named after.
    assert sorted(arms) == sorted(2 * watching.ARMS)
    assert begun.count([]) == first
    assert {arm: begun.count([arm]) for arm in watching.ARMS} == {
        "no times": 0,
        **dict.fromkeys(watching.AGAINST, 2 * turn),
    }
    assert set(entered) == {"guard"}
    # Around the gradients and around the update; and once a turn, as around the loop of `fit`.
    assert len(entered) == 2 * (2 * turn + 1)
    assert not WATCH._entered
    assert SyncGuard.__enter__ is not enter  # as the test has set it
    assert StepTimer.end_step.__name__ == "end_step"


def test_a_floor_is_not_moved_by_neighbours():
    quiet, disturbed = [1.0, 1.01] * 8, [1.02, 1.5, 1.03, 1.9] * 4
    found = watching.figures(disturbed, quiet)
    assert found["floor"] == pytest.approx(0.02)
    assert found["cost"] > 0.2
