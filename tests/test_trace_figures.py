"""Projection, step times, kernels and copies, on traces whose figures are known by construction."""

import math
import random

import pytest
import torch

from synthetic_trace import AUTOGRAD, MAIN, SyntheticTrace, figures_of, read
from torchfast.profiling.ceilings import Ceilings
from torchfast.profiling.figures import measure_trace
from torchfast.profiling.intervals import enclosing, gaps, intersection, length, overlap, union
from torchfast.profiling.projection import phase_of, project
from torchfast.profiling.report import report_on
from torchfast.profiling.trace import HostSpan, read_trace

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute"


# --- intervals ----------------------------------------------------------------------------------


def test_intervals_agree_with_counting_moments():
    draw = random.Random(1)
    for _ in range(200):
        sets = []
        for _ in range(2):
            pairs = [sorted(draw.sample(range(60), 2)) for _ in range(draw.randint(0, 8))]
            sets.append([(float(a), float(b)) for a, b in pairs])
        one, other = map(union, sets)
        moments = [{t for a, b in s for t in range(int(a), int(b))} for s in sets]

        assert length(one) == len(moments[0])
        assert length(intersection(one, other)) == len(moments[0] & moments[1])
        assert overlap(one, 10.0, 30.0) == len(moments[0] & set(range(10, 30)))
        if one:
            inside = set(range(int(one[0][0]), int(one[-1][1])))
            assert length(gaps(one)) == len(inside - moments[0])


def test_enclosing_agrees_with_looking_at_every_span():
    draw = random.Random(2)
    for _ in range(100):
        pairs = [sorted(draw.sample(range(40), 2)) for _ in range(draw.randint(0, 12))]
        spans = [HostSpan(str(i), "op", a, b, "1") for i, (a, b) in enumerate(pairs)]
        moments = sorted(draw.choices(range(40), k=10))
        for moment, found in zip(moments, enclosing(spans, moments), strict=True):
            assert set(found) == {s for s in spans if s.start <= moment <= s.end}
            assert list(found) == sorted(found, key=lambda s: (s.start, -s.end))


# --- projection ---------------------------------------------------------------------------------


def one_step(made, begin):
    """A step whose kernels run long after the host has gone on to the next phase."""
    made.step(int(begin), begin, begin + 1000)
    made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, begin + 9)
    made.copy(begin + 20, begin + 40, at=begin + 12, num=4096)
    for i in range(4):  # forward: launched at 20 to 50, runs until 440
        made.kernel(begin + 40 + 100 * i, begin + 140 + 100 * i, GEMM, at=begin + 20 + 10 * i)
    for i in range(2):  # backward, on a thread of its own, while the main thread waits
        at = begin + 70 + 10 * i
        op = "autograd::engine::evaluate_function: MmBackward0"
        made.op(op, at - 2, at + 5, tid=AUTOGRAD)
        made.kernel(begin + 440 + 150 * i, begin + 590 + 150 * i, GEMM, at=at, tid=AUTOGRAD)
    made.kernel(
        begin + 600, begin + 760, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(foo)", stream=9,
        at=begin + 92, tid=AUTOGRAD,
    )  # fmt: skip
    made.annotation("Optimizer.step#AdamW.step", begin + 100, begin + 200)
    made.kernel(begin + 760, begin + 800, "multi_tensor_apply_kernel<FusedAdam>", at=begin + 150)
    made.copy(begin + 800, begin + 802, "DtoH (Device -> Pageable)", at=begin + 210, num=4)


def test_kernels_belong_to_the_phase_that_launched_them(tmp_path):
    made = SyntheticTrace()
    for step in range(3):
        one_step(made, step * 1000.0)

    figures = figures_of(made, tmp_path)
    phases = {p.phase: p for p in figures.phases}

    assert figures.num_steps == 3
    assert {n: round(p.kernel_us, 3) for n, p in phases.items()} == {
        "h2d": 60.0,
        "forward": 1200.0,
        "backward": 900.0,
        "communication": 480.0,
        "update": 120.0,
        "d2h": 6.0,
    }
    assert phases["forward"].num_launches == 12
    # The collective hides behind the backward pass but for 20 us of a step.
    assert figures.communication_us == pytest.approx(480.0)
    assert figures.exposed_communication_us == pytest.approx(60.0)


def test_elapsed_times_of_the_phases_add_up_to_the_window(tmp_path):
    made = SyntheticTrace()
    for step in range(3):
        one_step(made, step * 1000.0)

    figures = figures_of(made, tmp_path)

    assert sum(p.elapsed_us for p in figures.phases) == pytest.approx(figures.window_us)
    assert figures.busy_us + figures.idle_us == pytest.approx(figures.window_us)
    # From 802 of a step to 20 of the next there is nothing.
    assert figures.idle_us == pytest.approx(2 * 218.0)
    assert figures.window_us == pytest.approx(2802.0 - 20.0)


def test_own_annotations_go_before_what_is_inferred(tmp_path):
    made = SyntheticTrace()
    made.annotation("torchfast.forward", 0, 100)
    made.annotation("torchfast.backward", 100, 200)
    made.annotation("torchfast.update", 200, 300)
    made.kernel(500, 510, at=50)
    made.kernel(510, 530, at=150, tid=AUTOGRAD)  # nothing stands on its own thread
    made.kernel(530, 560, at=250)
    made.copy(560, 600, at=260)

    phases = {p.phase: p.kernel_us for p in figures_of(made, tmp_path).phases}

    assert phases == pytest.approx({"forward": 10.0, "backward": 20.0, "update": 70.0})


def test_a_replay_is_one_phase(tmp_path):
    made = SyntheticTrace()
    made.annotation("torchfast.forward", 0, 30)
    number = made.kernel(20, 40, at=10, call="cudaGraphLaunch")
    made.more_of(number, 41, 60)
    made.more_of(number, 61, 80)

    report = report_on(read(made, tmp_path))

    assert [(p.phase, p.num_launches) for p in report.figures.phases] == [("replay", 1)]
    assert report.figures.num_launches == 1
    assert report.figures.num_kernels == 3
    assert any("its phases are one, replay" in remark for remark in report.remarks)


def test_work_without_a_launch_is_remarked(tmp_path):
    made = SyntheticTrace()
    made.kernel(10, 20)
    made.more_of(999, 30, 40)

    report = report_on(read(made, tmp_path))

    assert any("1 kernels or copies have no launch" in remark for remark in report.remarks)
    assert report.figures.idle_by_cause == {"unknown": pytest.approx(10.0)}


def test_what_was_launched_outside_of_the_steps_is_left_out(tmp_path):
    made = SyntheticTrace()
    made.step(1, 100, 200)
    made.kernel(20, 60, at=15)
    made.kernel(120, 140)
    made.kernel(140, 150)

    figures = figures_of(made, tmp_path)

    assert (figures.num_kernels, figures.window_us) == (2, pytest.approx(30.0))


def test_the_busiest_of_several_devices_is_shown(tmp_path):
    made = SyntheticTrace()
    made.kernel(10, 20, device=0)
    made.kernel(10, 90, device=1)

    report = report_on(read(made, tmp_path))

    assert (report.figures.device, report.figures.num_devices) == (1, 2)
    assert any("device 1 is shown" in remark for remark in report.remarks)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("torchfast.communication", "communication"),
        ("torchfast.something", ""),
        ("Optimizer.zero_grad#SGD.zero_grad", "update"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "data_wait"),
        ("ProfilerStep#3", ""),
        ("my own block", ""),
    ],
)
def test_phase_of_an_annotation(name, phase):
    assert phase_of(HostSpan(name, "annotation", 0, 1, "1")) == phase


@pytest.mark.parametrize("num", [2, 3, 10])
def test_the_time_of_a_step_is_from_step_to_step(tmp_path, num):
    """Half of each step the device does nothing; the window of two steps is 1.5 of them."""
    made = SyntheticTrace()
    for step in range(num):
        made.step(step, step * 1000.0, step * 1000.0 + 999)
        made.kernel(step * 1000.0 + 10, step * 1000.0 + 510)

    report = report_on(read(made, tmp_path))

    assert report.figures.step_us == pytest.approx(1000.0)
    assert report.to_dict()["step_ms"] == report.verdict.evidence["step_ms"] == pytest.approx(1.0)
    assert "1.000 ms" in str(report)


def test_copies_that_are_steps_ahead_are_no_step(tmp_path):
    """The host is ahead and copies all batches at once; the device computes one after the other."""
    made = SyntheticTrace()
    for step in range(4):
        made.step(step, step * 100.0, step * 100.0 + 99)
        made.copy(step * 100.0 + 5, step * 100.0 + 30, stream=20)
        made.kernel(step * 1000.0 + 40, step * 1000.0 + 1040, at=step * 100.0 + 10)

    figures = figures_of(made, tmp_path)

    assert figures.step_us == pytest.approx(1000.0)
    assert figures.busy_us / figures.num_steps <= figures.step_us * 1.01


def test_a_checkpoint_in_one_step_is_not_what_steps_are_counted_by(tmp_path):
    """Its copies on a stream of their own take longer than all that the steps compute."""
    made = SyntheticTrace()
    for step in range(4):
        made.step(step, step * 1000.0, step * 1000.0 + 999)
        made.kernel(step * 1000.0 + 10, step * 1000.0 + 510)
    made.copy(1100.0, 3900.0, "DtoH (Device -> Pinned)", stream=20)

    assert figures_of(made, tmp_path).step_us == pytest.approx(1000.0)


@pytest.mark.parametrize(("end", "time"), [(510, 999.0), (2010, 2000.0)])
def test_the_time_of_a_single_step(tmp_path, end, time):
    made = SyntheticTrace()
    made.step(1, 0, 999)
    made.kernel(10, end)

    assert figures_of(made, tmp_path).step_us == pytest.approx(time)


def test_steps_without_work_count(tmp_path):
    made = SyntheticTrace()
    for step in range(5):
        made.step(step, step * 1000.0, step * 1000.0 + 999)
        if step % 2 == 0:
            made.kernel(step * 1000.0 + 10, step * 1000.0 + 510)

    assert figures_of(made, tmp_path).step_us == pytest.approx(1000.0)


def test_attention_is_held_against_no_ceiling(tmp_path):
    """A causal one does half of the operations, and its shapes are the same."""
    made = SyntheticTrace()
    made.op(
        "aten::_scaled_dot_product_flash_attention",
        0,
        20,
        dims=[[2, 8, 512, 64]] * 3,
        types=["c10::BFloat16"] * 3,
    )
    made.kernel(30, 40, "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", at=5)
    ceilings = Ceilings(device="x", flops={"bfloat16": 4e14}, bytes_a_second=3e12)

    (row,) = report_on(read(made, tmp_path), None, ceilings).roofline

    assert row.flops > 0
    assert (row.bound, row.to_dict()["of_ceiling"]) == ("", None)


# --- copies and operators -------------------------------------------------------------------------


def test_copies_hidden_behind_kernels(tmp_path):
    made = SyntheticTrace()
    made.kernel(0, 100)
    made.copy(60, 140, "HtoD (Pinned -> Device)", num=8000, stream=13)
    made.copy(150, 160, num=500)

    copies = {c.name: c for c in figures_of(made, tmp_path).copies}

    pinned = copies["Memcpy HtoD (Pinned -> Device)"]
    assert (pinned.total_us, pinned.hidden_us) == (pytest.approx(80.0), pytest.approx(40.0))
    assert (pinned.num_bytes, pinned.num) == (8000, 1)
    assert copies["Memcpy HtoD (Pageable -> Device)"].hidden_us == 0.0


def test_operators_and_casts(tmp_path):
    made = SyntheticTrace()
    made.op("aten::to", 0, 20)
    made.op("aten::_to_copy", 1, 19)
    made.op("aten::copy_", 2, 18)
    made.kernel(30, 50, "direct_copy_kernel_cuda", at=5)
    made.kernel(60, 70, "direct_copy_kernel_cuda", at=52, op="aten::contiguous")

    figures = figures_of(made, tmp_path)

    assert [(r.name, r.total_us) for r in figures.top_operators] == [
        ("aten::copy_", pytest.approx(20.0)),
        ("aten::contiguous", pytest.approx(10.0)),
    ]
    assert figures.cast_us == pytest.approx(20.0)


# --- the host alone, memory and roofline --------------------------------------------------------


def test_a_trace_without_a_device_shows_the_host(tmp_path):
    made = SyntheticTrace(device=False)
    for step in range(2):
        begin = 1000.0 * step
        made.step(step, begin, begin + 1000)
        made.annotation("enumerate(DataLoader)#_Base.__next__", begin, begin + 600)
        made.op("aten::linear", begin + 600, begin + 700)
        made.op("aten::addmm", begin + 610, begin + 690)
        made.annotation("Optimizer.step#SGD.step", begin + 800, begin + 900)

    report = report_on(read(made, tmp_path))

    assert report.figures.host_phases == pytest.approx(
        {"data_wait": 1200.0, "update": 200.0, "rest": 600.0}
    )
    assert [(r.name, r.total_us) for r in report.figures.top_operators] == [
        ("aten::addmm", pytest.approx(160.0)),
        ("aten::linear", pytest.approx(40.0)),
    ]
    assert report.verdict.name == "input-bound"
    assert report.findings[0].kind == "slow-data"
    assert any("no work of a device" in remark for remark in report.remarks)


def test_memory_by_what_it_was_taken_for(tmp_path):
    made = SyntheticTrace()
    made.op("aten::mm", 0, 100)
    made.memory(10, 500, 1, allocated=1500)
    made.op("autograd::engine::evaluate_function: Mm", 20, 40)
    made.memory(30, 300, 2, allocated=1800)
    made.memory(45, -500, 1, allocated=1300)
    made.annotation("Optimizer.step#SGD.step", 50, 60)
    made.memory(55, 100, 3, allocated=1400)

    (use,) = report_on(read(made, tmp_path)).memory

    assert use.device == "cuda:0"
    assert use.peak_bytes == 1800
    assert use.at_peak == {"other": 1000, "activations": 500, "gradients": 300}
    assert use.by_category["optimizer state"][-1] == 100
    assert use.by_category["activations"][-1] == 0


def test_roofline_places_operators_by_their_shapes(tmp_path):
    made = SyntheticTrace()
    made.op(
        "aten::mm",
        0,
        20,
        dims=[[1024, 1024], [1024, 1024]],
        types=["c10::BFloat16", "c10::BFloat16"],
    )
    made.kernel(30, 40, GEMM, at=5)
    ceilings = Ceilings(device="x", flops={"bfloat16": 4e14}, bytes_a_second=3e12)

    (row,) = report_on(read(made, tmp_path), None, ceilings).roofline

    operations, moved = 2 * 1024**3, 3 * 1024**2 * 2
    assert row.dtype == "bfloat16"
    assert row.flops == pytest.approx(operations / 10e-6)
    assert row.intensity == pytest.approx(operations / moved)
    assert row.bound == "compute"
    assert row.of_ceiling == pytest.approx(operations / 10e-6 / 4e14)
    (bare,) = report_on(read(made, tmp_path)).roofline
    assert math.isnan(bare.of_ceiling)


def test_a_real_trace_of_the_host(tmp_path):
    """What torch writes here and now is understood."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, schedule=schedule, record_shapes=True, profile_memory=True
    ) as run:
        for _ in range(4):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    path = tmp_path / "trace.json.gz"
    run.export_chrome_trace(str(path))

    trace = read_trace(path)
    figures = measure_trace(trace)

    assert len(trace.steps) == 3
    assert {"backward", "update", "rest"} <= set(figures.host_phases)
    assert all(us > 0 for us in figures.host_phases.values())
    assert "aten::addmm" in {row.name for row in figures.top_operators}
    assert trace.memory
    assert any(s.facts for s in trace.spans if s.name == "aten::addmm")
    assert project(trace) == []
    assert trace.main_thread() != str(MAIN)
