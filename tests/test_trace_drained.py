"""What waits of the host cost: against the same loop on the same machine without them."""

from __future__ import annotations

import pytest

from synthetic_trace import SyntheticTrace, figures_of, read
from torchfast.profiling.findings import find_faults
from torchfast.profiling.verdict import judge
from torchfast.profiling.waits import wait_sites

STEPS, KERNELS = 6, 20
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"


def loop(launch_us, kernel_us, waits=(), log_bytes=0):
    """A host that launches one kernel after another and waits behind some of each step's."""
    made = SyntheticTrace()
    now = free = 0.0
    for step in range(STEPS):
        begin = now
        for number in range(KERNELS):
            start = max(free, now + 5.0)
            free = start + (kernel_us[number] if isinstance(kernel_us, list) else kernel_us)
            made.kernel(start, free, GEMM, at=now, op="aten::mm")
            now += launch_us
            if number in waits:
                asked = now
                if log_bytes:
                    made.copy(
                        free + 1, free + 2, "DtoH (Device -> Pageable)", num=log_bytes, at=now
                    )
                    free += 2.0
                until = max(now, free) + 2.0
                made.call("cudaStreamSynchronize", asked + 2.5, until)
                made.op("aten::to", asked - 0.1, until + 0.5)
                made.line("train.py:9", asked - 0.2, until + 0.6)
                now = until + 1.0
        made.step(step, begin, now)
    return made


@pytest.mark.parametrize(
    ("launch_us", "kernel_us"),
    [(10.0, 30.0), (25.0, 30.0), (30.0, 10.0), (30.0, 29.0)],
)
@pytest.mark.parametrize("waits", [(KERNELS - 1,), (4, 9, 14, 19)])
def test_the_cost_is_what_the_loop_without_waits_does_not_have(
    tmp_path, launch_us, kernel_us, waits
):
    found = figures_of(loop(launch_us, kernel_us, waits), tmp_path)
    without = figures_of(loop(launch_us, kernel_us), tmp_path)
    cost = found.idle_by_cause.get("sync", 0.0) + found.drained_us
    # A wait that ends takes the host a few microseconds, whatever is left of it.
    assert cost == pytest.approx(found.idle_us - without.idle_us, abs=8.0 * STEPS * len(waits))


def test_a_queue_that_is_emptied_makes_a_step_sync_bound(tmp_path):
    """While the long kernels run, a host that does not wait launches the short ones."""
    uneven = [8.0] * 10 + [60.0] * 10
    ahead = figures_of(loop(30.0, uneven), tmp_path)
    assert ahead.idle_us < 0.1 * ahead.window_us
    behind = figures_of(loop(30.0, uneven, waits=(KERNELS - 1,)), tmp_path)
    assert behind.idle_by_cause["launch"] > 0.15 * behind.window_us
    assert behind.drained_us > 0.7 * behind.idle_by_cause["launch"]
    assert judge(behind, ()).name == "sync-bound"
    slow = figures_of(loop(60.0, 30.0, waits=(4, 9, 14, 19)), tmp_path)
    assert judge(slow, ()).name == "launch-bound"
    assert slow.drained_us < 0  # after a wait the next launch would have been late as well


def test_a_site_costs_what_its_waits_do(tmp_path):
    made = loop(30.0, 30.0, waits=(4, 9, 14, 19))
    trace, figures = read(made, tmp_path), figures_of(made, tmp_path)
    (site,) = wait_sites(trace, figures.gaps, cost_us=100.0)
    assert (site.num, site.idle_us) == (4 * STEPS, pytest.approx(100.0))
    more = figures.idle_by_cause["sync"] + 50.0
    (site,) = wait_sites(trace, figures.gaps, cost_us=more)
    assert site.idle_us == pytest.approx(more)


def test_without_waits_nothing_is_drained(tmp_path):
    assert figures_of(loop(30.0, 10.0), tmp_path).drained_us == 0.0


def test_what_is_logged_whole_is_told_from_a_number(tmp_path):
    for num_bytes, kind in ((4, "host-sync"), (1 << 20, "big-log-sync")):
        made = loop(10.0, 30.0, waits=(4, 9, 14, 19), log_bytes=num_bytes)
        trace = read(made, tmp_path)
        (finding,) = find_faults(trace, figures_of(made, tmp_path), trace)
        assert (finding.kind, finding.line) == (kind, "train.py:9")


def test_batches_that_are_copied_while_nothing_runs(tmp_path):
    for beside in (False, True):
        made = SyntheticTrace(ahead=200.0)
        for step in range(STEPS):
            begin = step * 1000.0
            made.step(step, begin - 250.0, begin + 749.5)
            made.copy(begin, begin + 400.0, num=50_000_000, stream=8, at=begin - 240.0)
            made.kernel(begin if beside else begin + 400.0, begin + 999.0, GEMM, at=begin - 200.0)
        figures = figures_of(made, tmp_path)
        findings = find_faults(read(made, tmp_path), figures)
        verdict = judge(figures, findings)
        assert figures.exposed_h2d_us == pytest.approx(0.0 if beside else 400.0 * STEPS)
        assert (verdict.name == "input-bound") is not beside
        if not beside:
            assert "pin_memory=True" in verdict.lever
