"""What waits of the host cost: against the same loop on the same machine without them."""

from __future__ import annotations

import re

import pytest

from synthetic_trace import SyntheticTrace, figures_of, read
from torchfast.profiling.figures import BY_HOST, measure_trace
from torchfast.profiling.findings import find_faults
from torchfast.profiling.report import report_on
from torchfast.profiling.verdict import judge
from torchfast.profiling.waits import wait_sites

STEPS, KERNELS = 6, 20
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"


def loop(launch_us, kernel_us, waits=(), log_bytes=0, *, log_every=1, steps=STEPS):
    """A host that launches one kernel after another and waits behind some of a step's."""
    made = SyntheticTrace()
    now = free = 0.0
    for step in range(steps):
        begin = now
        for number in range(KERNELS):
            start = max(free, now + 5.0)
            free = start + (kernel_us[number] if isinstance(kernel_us, list) else kernel_us)
            made.kernel(start, free, GEMM, at=now, op="aten::mm")
            now += launch_us
            if number in waits and step % log_every == log_every - 1:
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
    # A wait that ends takes the host a few microseconds, whatever is left of it.
    more = found.idle_us - without.idle_us
    assert found.waits_us == pytest.approx(more, abs=8.0 * STEPS * len(waits))
    assert found.waits_us + found.late_us == pytest.approx(by_host(found))


def test_a_queue_that_is_emptied_makes_a_step_sync_bound(tmp_path):
    """While the long kernels run, a host that does not wait launches the short ones."""
    uneven = [8.0] * 10 + [60.0] * 10
    ahead = figures_of(loop(30.0, uneven), tmp_path)
    assert ahead.idle_us < 0.1 * ahead.window_us
    behind = figures_of(loop(30.0, uneven, waits=(KERNELS - 1,)), tmp_path)
    assert behind.idle_by_cause["launch"] > 0.15 * behind.window_us
    assert behind.waits_us > 0.7 * by_host(behind)
    assert judge(behind, ()).name == "sync-bound"
    slow = figures_of(loop(60.0, 30.0, waits=(4, 9, 14, 19)), tmp_path)
    assert judge(slow, ()).name == "launch-bound"
    # After a wait the next launch would have been late as well.
    assert slow.waits_us < slow.idle_by_cause["sync"]


def test_a_site_costs_what_its_waits_do(tmp_path):
    made = loop(30.0, 30.0, waits=(4, 9, 14, 19))
    trace, figures = read(made, tmp_path), figures_of(made, tmp_path)
    (site,) = wait_sites(trace, figures.gaps, cost_us=100.0)
    assert (site.num, site.idle_us) == (4 * STEPS, pytest.approx(100.0))
    more = figures.idle_by_cause["sync"] + 50.0
    (site,) = wait_sites(trace, figures.gaps, cost_us=more)
    assert site.idle_us == pytest.approx(more)


def test_without_waits_they_cost_nothing(tmp_path):
    figures = figures_of(loop(30.0, 10.0), tmp_path)
    assert figures.waits_us == 0.0
    assert figures.late_us == pytest.approx(by_host(figures))
    assert figures.pace == 1.0


def by_host(figures):
    return sum(figures.idle_by_cause.get(cause, 0.0) for cause in BY_HOST)


@pytest.mark.parametrize("waits", [(), (KERNELS - 1,), (4, 9, 14, 19)])
@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_a_host_that_the_profiler_makes_slower_is_taken_at_its_own_pace(tmp_path, waits, slower):
    """Each launch takes longer in the trace; told is what the loop has without."""
    own = figures_of(loop(25.0, 30.0, waits), tmp_path)
    trace = read(loop(25.0 * slower, 30.0, waits), tmp_path)
    traced, paced = measure_trace(trace), measure_trace(trace, untraced_us=host_step_us(own))
    assert traced.late_us > 0.15 * traced.window_us
    # Where the device is the limit between two waits, a host that is faster still makes no odds.
    assert 0.98 / slower < paced.pace < (1.3 if waits else 1.05) / slower
    # Shares: the two windows are of two lengths.
    assert paced.share(paced.late_us) == pytest.approx(own.share(own.late_us), abs=0.05)
    assert paced.share(paced.waits_us) == pytest.approx(own.share(own.waits_us), abs=0.05)
    # Times are those without the profiler, too.
    both = paced.own_ms(paced.late_us + paced.waits_us)
    idle_us = (own.late_us + own.waits_us) / STEPS
    assert both * 1e3 == pytest.approx(idle_us, abs=0.05 * own.window_us / STEPS)
    assert paced.own_time == pytest.approx(own.window_us / traced.window_us, rel=0.1)
    assert judge(traced, ()).name == "launch-bound"
    assert judge(paced, ()).name == judge(own, ()).name != "launch-bound"


def test_what_is_told_are_times_without_the_profiler(tmp_path):
    """A host that launches in 60 us, and in 120 under the profiler, beside kernels of 30."""
    waits = (4, 9, 14, 19)
    own = figures_of(loop(60.0, 30.0, waits), tmp_path)
    trace = read(loop(120.0, 30.0, waits), tmp_path)
    report = report_on(trace, untraced_us=host_step_us(own))
    late_ms = own.per_step_ms(own.late_us)
    (told,) = re.findall(r"\(([\d.]+) ms a step\)", report.verdict.text)
    assert report.verdict.name == "launch-bound"
    assert "under the profiler; at the host's own pace, for" in report.verdict.text
    assert float(told) == pytest.approx(late_ms, rel=0.15)
    (row,) = [line for line in str(report).splitlines() if "it is late all the same" in line]
    assert float(row.split()[-3]) == pytest.approx(float(told), abs=0.006)
    (site,) = [finding for finding in report.findings if finding.kind == "host-sync"]
    assert "makes the host wait 4 times a step" in site.text
    (idle,) = re.findall(r"the device is idle ([\d.]+) ms", site.text)
    assert float(idle) == pytest.approx(own.per_step_ms(own.waits_us), abs=0.02)
    plain = report_on(trace)
    assert plain.figures.own_time == 1.0
    assert "profiler" not in plain.verdict.text


def host_step_us(figures):
    return figures.host_phases["rest"] / figures.num_steps


@pytest.mark.parametrize("faster", [0.95, 0.8, 0.1])
def test_a_device_that_was_slower_is_not_taken_for_the_host(tmp_path, faster):
    """While it computes the host is ahead, and however fast it were a step would not be shorter."""
    trace = read(loop(10.0, 30.0, waits=(KERNELS - 1,)), tmp_path)
    step_us = trace.steps[1].end - trace.steps[1].start
    figures = measure_trace(trace, untraced_us=faster * step_us)
    assert figures.pace == pytest.approx(max(faster, 0.2), rel=0.01)
    assert figures.waits_us > 0.0


@pytest.mark.parametrize("steps", [4, 5, 10])
@pytest.mark.parametrize("log_every", [2, 3])
@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_a_wait_in_some_steps_is_not_taken_for_the_profiler(tmp_path, steps, log_every, slower):
    """The usual step before the profiler did not wait; nor does the usual one in the trace."""
    uneven = [8.0] * 10 + [60.0] * 10
    made = loop(30.0 * slower, uneven, (KERNELS - 1,), log_every=log_every, steps=steps)
    trace = read(made, tmp_path)
    figures = measure_trace(trace, untraced_us=30.0 * KERNELS)
    assert figures.pace == pytest.approx(1.0 / slower, rel=0.02)
    own = loop(30.0, uneven, (KERNELS - 1,), log_every=log_every, steps=steps)
    without = figures_of(loop(30.0, uneven, steps=steps), tmp_path)
    more = figures_of(own, tmp_path).idle_us - without.idle_us
    assert figures.waits_us == pytest.approx(more, rel=0.25)


def test_threads_that_fetch_batches_ahead_make_nobody_late(tmp_path):
    """They wait for batches, and for their copies to the device, while the main thread works."""
    alone = loop(30.0, 10.0)
    trace = read(alone, tmp_path)
    wanted = measure_trace(trace), measure_trace(trace, untraced_us=300.0)
    made = loop(30.0, 10.0)
    made.annotation("torchfast.data_wait", 0.0, STEPS * 600.0, tid=300)
    for step in range(STEPS):
        begin = step * 600.0
        made.copy(
            begin + 20.0, begin + 24.0, "HtoD (Pinned -> Device)", stream=9, at=begin + 9, tid=300
        )
        made.call("cudaEventSynchronize", begin + 13.0, begin + 590.0, tid=300)
    trace = read(made, tmp_path)
    found = measure_trace(trace), measure_trace(trace, untraced_us=300.0)
    for one, other in zip(found, wanted, strict=True):
        assert one.waits_us == 0.0
        assert one.pace == pytest.approx(other.pace, abs=0.01)
        assert one.share(one.late_us) == pytest.approx(other.share(other.late_us), abs=0.02)
        assert judge(one, ()).name == "launch-bound"


def test_a_host_that_waits_for_batches_is_not_made_faster(tmp_path):
    """Half of a step it waits for a batch, and the rest of it took twice as long as by itself."""
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 1000.0)
        made.annotation("torchfast.data_wait", begin, begin + 500.0)
        for number in range(10):
            start = begin + 500.0 + 50.0 * number
            made.kernel(start + 5.0, start + 15.0, GEMM, at=start, op="aten::mm")
    trace = read(made, tmp_path)
    figures = measure_trace(trace, untraced_us=750.0)
    assert figures.pace == pytest.approx(0.5, abs=0.05)
    assert judge(figures, ()).name == "input-bound"


def test_an_operator_that_waits_goes_with_its_wait(tmp_path):
    """Indexing by a mask launches five kernels to find out how many there are: all its cost."""
    made = SyntheticTrace()
    now = free = 0.0
    for step in range(STEPS):
        begin = now
        for _ in range(10):
            start = max(free, now + 5.0)
            free = start + 40.0
            made.kernel(start, free, GEMM, at=now, op="aten::mm")
            now += 20.0
            asked = now
            for _ in range(5):
                start = max(free, now + 5.0)
                free = start + 2.0
                made.kernel(start, free, at=now)
                now += 20.0
            now = max(now, free) + 5.0
            made.call("cudaStreamSynchronize", now - 6.0, now - 1.0)
            made.op("aten::nonzero", asked + 1.0, now - 0.5)
            made.op("aten::index", asked - 0.5, now)
            made.line("train.py:9", asked - 0.6, now + 0.1)
        made.step(step, begin, now)
    trace, figures = read(made, tmp_path), figures_of(made, tmp_path)
    assert figures.waits_us > 0.8 * by_host(figures)
    findings = find_faults(trace, figures, trace)
    assert judge(figures, findings).name == "sync-bound"
    assert (findings[0].kind, findings[0].line) == ("boolean-mask", "train.py:9")


def test_a_copy_to_memory_that_is_not_pinned_is_a_wait(tmp_path):
    """Its call returns when the copy is done, and what synchronizes behind it takes no time."""
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 999.0)
        for number in range(5):
            made.kernel(begin + 20.0 * number, begin + 20.0 * number + 15.0, GEMM)
        for number in range(4):
            at = begin + 100.0 + 220.0 * number
            made.copy(
                at + 5.0, at + 45.0, "DtoH (Device -> Pageable)", num=1 << 24, at=at, us=200.0
            )
            made.call("cudaStreamSynchronize", at + 201.0, at + 202.0)
            made.op("aten::to", at - 1.0, at + 203.0)
            made.line("train.py:9", at - 2.0, at + 204.0)
    trace, figures = read(made, tmp_path), figures_of(made, tmp_path)
    findings = find_faults(trace, figures, trace)
    assert judge(figures, findings).name == "sync-bound"
    (finding,) = findings
    assert (finding.kind, finding.line) == ("big-log-sync", "train.py:9")
    assert finding.figure == 4.0  # times a step: the copy and what synchronizes are one wait


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


@pytest.mark.parametrize("computed_us", [0.0, 400.0])
def test_what_the_host_computes_of_what_it_fetched_goes_with_the_wait(tmp_path, computed_us):
    """Histograms of all weights, say: they are there because the weights were fetched."""
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 999.0)
        made.copy(begin + 5.0, begin + 15.0, "DtoH (Device -> Pageable)", at=begin, us=20.0)
        made.op("aten::to", begin - 0.5, begin + 21.0)
        if computed_us:
            made.op("aten::histc", begin + 50.0, begin + 50.0 + computed_us)
        for number in range(10):
            start = begin + 500.0 + 49.0 * number
            made.kernel(start + 5.0, start + 15.0, GEMM, at=start, op="aten::mm")
    figures = figures_of(made, tmp_path)
    computed = figures.waits_us / STEPS
    assert computed == pytest.approx(20.0 + (30.0 + computed_us if computed_us else 0.0), abs=25.0)
