"""The verdict and the single faults, each on a trace with that fault and on one without."""

from dataclasses import replace

import pytest

from synthetic_trace import GEMM, STEPS, SyntheticTrace, healthy, report, tiny
from torchfast.profiling.places import is_users
from torchfast.profiling.verdict import judge


def kinds(found):
    return {finding.kind for finding in found.findings}


def test_a_busy_device_on_tensor_cores_is_fine(tmp_path):
    found = report(healthy(), tmp_path)

    assert found.verdict.name == "fine"
    assert found.findings == ()
    assert found.verdict.evidence["idle_share"] < 0.02
    assert found.verdict.evidence["tensor_core_share"] == 1.0
    assert found.to_dict()["findings"] == [{"kind": "none", "line": None, "figure": 0.0}]


def test_input_bound(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 1000)
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        made.annotation(name, begin + 1, begin + 590)
        made.line("data.py:5", begin + 100, begin + 500)  # inside of the data set
        made.line("train.py:30", begin, begin + 595)
        made.kernel(begin + 600, begin + 990, GEMM, at=begin + 595)

    found = report(made, tmp_path)

    assert found.verdict.name == "input-bound"
    assert found.verdict.line == "train.py:30"
    assert found.verdict.evidence["idle_data_share"] == pytest.approx(
        3 * 610 / (4 * 1000 - 610), 0.01
    )
    assert kinds(found) == {"slow-data"}


def test_sync_bound_with_the_line_of_another_trace(tmp_path):
    def loop(made):
        for step in range(STEPS):
            begin = step * 1000.0
            made.step(step, begin, begin + 999)
            for i in range(5):
                at = begin + 200 * i
                made.kernel(at + 5, at + 100, GEMM, op="aten::mm", at=at)
                made.op("aten::item", at + 10, at + 120)
                made.op("aten::_local_scalar_dense", at + 11, at + 119)
                made.call("cudaStreamSynchronize", at + 12, at + 103)
                made.op("aten::add", at + 125, at + 198)
        return made

    lined = loop(SyntheticTrace())
    lined.frame("train.py(1): <module>", -10, 5000)
    for step in range(STEPS):
        for i in range(5):
            at = step * 1000.0 + 200 * i
            lined.line("train.py:42", at + 9, at + 121)

    found = report(loop(SyntheticTrace()), tmp_path, lined)

    assert found.verdict.name == "sync-bound"
    assert found.verdict.line == "train.py:42"
    assert kinds(found) == {"host-sync"}
    assert found.findings[0].figure == pytest.approx(5.0)
    assert "aten::item (cudaStreamSynchronize)" in found.findings[0].text


def test_one_wait_a_step_that_costs_nothing_is_no_fault(tmp_path):
    made = healthy()
    for step in range(STEPS):
        made.call("cudaStreamSynchronize", step * 1000.0 + 300, step * 1000.0 + 310)

    assert report(made, tmp_path).verdict.name == "fine"


def test_a_mask_that_sizes_its_result(tmp_path):
    made = healthy()
    for step in range(STEPS):
        for i in range(4):
            at = step * 1000.0 + 10 + 100 * i
            made.op("aten::index", at, at + 20)
            made.op("aten::nonzero", at + 1, at + 19)
            made.call("cudaStreamSynchronize", at + 2, at + 15)
            made.line("model.py:7", at - 1, at + 21)

    found = report(made, tmp_path)

    assert [(x.kind, x.line) for x in found.findings] == [("boolean-mask", "model.py:7")]


def test_launch_bound(tmp_path):
    found = report(tiny(), tmp_path)

    assert found.verdict.name == "launch-bound"
    assert kinds(found) == {"tiny-kernels"}
    assert found.verdict.evidence["tiny_kernel_share"] == 1.0
    assert "CUDA graph" in found.verdict.lever


@pytest.mark.parametrize(
    ("waits", "late", "name"),
    [
        (0.3, 0.2, "sync-bound"),
        (0.2, 0.3, "sync-bound"),  # no graph can hold them, so they have to go first
        (0.1, 0.3, "launch-bound"),
        (0.08, 0.1, "launch-bound"),  # too little to be the limit
    ],
)
def test_waits_come_before_late_launches(tmp_path, waits, late, name):
    seen = report(tiny(), tmp_path).figures
    found = judge(replace(seen, waits_us=waits * seen.window_us, late_us=late * seen.window_us), ())
    assert found.name == name


def test_a_few_tiny_kernels_are_no_fault(tmp_path):
    assert "tiny-kernels" not in kinds(report(tiny(num=50), tmp_path))


def test_python_between_launches(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 999)
        made.line("train.py:17", begin + 410, begin + 900)
        made.kernel(begin + 5, begin + 400, GEMM, op="aten::mm")

    found = report(made, tmp_path)

    assert found.verdict.name == "launch-bound"
    assert [(x.kind, x.line) for x in found.findings] == [("slow-python", "train.py:17")]


def test_recompiles(tmp_path):
    made = healthy()
    made.op("_compile.compile_inner (dynamo_timed)", 500, 700)
    made.op("_compile.compile_inner (dynamo_timed)", 1500, 1700)

    (finding,) = report(made, tmp_path).findings

    assert (finding.kind, finding.figure) == ("recompiles", pytest.approx(0.5))


def test_a_wait_before_a_compilation_or_within_is_not_what_it_costs(tmp_path):
    """The compiler times kernels, and its spans are operators that launch nothing."""
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 999)
        made.kernel(begin + 5, begin + 50, GEMM, op="aten::mm")
        made.op("aten::item", begin + 20, begin + 60)
        made.call("cudaStreamSynchronize", begin + 22, begin + 58)
        made.op("_compile.compile_inner (dynamo_timed)", begin + 70, begin + 900)
        made.op("aten::empty", begin + 100, begin + 300)  # of tensors that are not there
        made.call("cudaDeviceSynchronize", begin + 400, begin + 600)

    found = report(made, tmp_path)

    assert found.verdict.name == "launch-bound"
    assert found.findings[0].kind == "recompiles"
    assert found.verdict.evidence["waits_share"] < 0.05
    assert found.verdict.evidence["late_share"] > 0.75
    assert not [f for f in found.findings if "cudaDeviceSynchronize" in f.text]


def test_communication_bound(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin - 6, begin + 993)
        made.kernel(begin, begin + 600, GEMM)
        made.kernel(begin + 500, begin + 1000, "ncclDevKernel_AllReduce_Sum_f32", stream=9)

    found = report(made, tmp_path)

    assert found.verdict.name == "communication-bound"
    assert found.verdict.evidence["exposed_communication_share"] == pytest.approx(0.4, abs=0.01)
    told = found.to_dict()
    assert told["communication_ms"] == pytest.approx(0.5, abs=0.01)
    assert told["exposed_communication_ms"] == pytest.approx(0.4, abs=0.01)
    assert "20% of it hidden behind other work, 0.400 ms exposed" in str(found)
    found.write_html(page := tmp_path / "page.html")
    assert "<h2>Collectives</h2>" in page.read_text()


def test_a_rank_that_is_late_leaves_the_others_waiting_in_a_collective(tmp_path):
    """Their kernels of the collective run all the while; its own does not."""

    def of_rank(late):
        made = SyntheticTrace()
        for step in range(STEPS):
            begin = step * 1000.0
            made.step(step, begin - 6, begin + 993)
            made.kernel(begin, begin + (900 if late else 400), GEMM)
            ready = begin + (880 if late else 380)
            made.kernel(ready, begin + 960, "ncclDevKernel_AllReduce_Sum_f32", stream=9)
            made.kernel(begin + 960, begin + 1000, GEMM)
        return report(made, tmp_path)

    prompt, late = of_rank(False), of_rank(True)

    assert (prompt.verdict.name, late.verdict.name) == ("communication-bound", "fine")
    assert prompt.to_dict()["exposed_communication_ms"] == pytest.approx(0.56, abs=0.01)
    assert late.to_dict()["exposed_communication_ms"] == pytest.approx(0.06, abs=0.01)


def test_without_collectives_nothing_is_said_of_them(tmp_path):
    found = report(healthy(), tmp_path)

    assert found.to_dict()["communication_ms"] == 0.0
    assert "collectives" not in str(found)


def test_bandwidth_bound(tmp_path):
    found = report(
        healthy(gemm="vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>"), tmp_path
    )

    assert found.verdict.name == "bandwidth-bound"


def test_float32_products_are_compute_bound(tmp_path):
    found = report(healthy(gemm="ampere_sgemm_128x64_nn"), tmp_path)

    assert found.verdict.name == "compute-bound"
    assert kinds(found) == {"fp32-matmul"}
    assert "bf16" in found.verdict.lever


def test_pageable_copies(tmp_path):
    made = healthy()
    for step in range(STEPS):
        at = step * 1000.0 + 200
        made.copy(at, at + 300, num=4_000_000, stream=7)
        made.line("train.py:9", at - 210, at - 190)

    found = report(made, tmp_path)

    assert [(x.kind, x.line) for x in found.findings] == [("pageable-copies", "train.py:9")]
    assert found.findings[0].figure == pytest.approx(4e6)


@pytest.mark.parametrize(
    ("kind", "num"), [("HtoD (Pinned -> Device)", 4_000_000), ("HtoD (Pageable -> Device)", 4)]
)
def test_pinned_and_small_copies_are_no_fault(tmp_path, kind, num):
    made = healthy()
    for step in range(STEPS):
        made.copy(step * 1000.0 + 200, step * 1000.0 + 205, kind, num=num)

    assert report(made, tmp_path).findings == ()


def updating_one_by_one(name, *, own_lines=()):
    """Steps whose optimizer launches 40 kernels; at lines of its own, if it has some."""
    made = SyntheticTrace(ahead=360.0)
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin - 365, begin + 634)
        made.annotation("Optimizer.step#AdamW.step", begin + 235, begin + 633)
        made.line("train.py:50", begin + 234, begin + 633.5)
        for i in range(10):
            made.kernel(begin + 60 * i, begin + 60 * i + 59, GEMM)
        for i in range(40):
            made.kernel(begin + 600 + 10 * i, begin + 609 + 10 * i, name)
            if own_lines:
                at = begin + 239.5 + 10 * i
                made.line(own_lines[i % len(own_lines)], at, at + 3)
    return made


def test_an_update_in_a_loop_over_parameters(tmp_path):
    one_by_one = updating_one_by_one("vectorized_elementwise_kernel<4, MulFunctor<float>>")
    slow = report(one_by_one, tmp_path)
    fused = report(updating_one_by_one("multi_tensor_apply_kernel<FusedAdamMathFunctor>"), tmp_path)

    assert [(x.kind, x.line) for x in slow.findings] == [("unfused-optimizer", "train.py:50")]
    assert slow.findings[0].figure == pytest.approx(40.0)
    assert "unfused-optimizer" not in kinds(fused)


def test_an_update_of_the_user_s_own_has_its_line_and_not_that_of_its_call(tmp_path):
    lines = ("lion.py:8", "lion.py:9", "lion.py:9", "lion.py:9")
    made = updating_one_by_one("MulFunctor<float>", own_lines=lines)

    (finding,) = report(made, tmp_path).findings

    assert (finding.kind, finding.line) == ("unfused-optimizer", "lion.py:9")


CAST = "vectorized_elementwise_kernel<4, bfloat16_copy_kernel_cuda>"


@pytest.mark.parametrize(("us", "share"), [(99, None), (260, 0.21)])
def test_casts(tmp_path, us, share):
    made = healthy()
    for step in range(STEPS):
        at = step * 1000.0
        made.kernel(at + 300, at + 300 + us, CAST, stream=9)

    found = report(made, tmp_path).findings

    # Autocast by itself takes up to a tenth, and is no fault.
    assert [x.kind for x in found] == ([] if share is None else ["dtype-casts"])
    assert [x.figure for x in found] == ([] if share is None else [pytest.approx(share, abs=0.01)])


def test_casts_have_the_line_of_those_that_take_longest(tmp_path):
    made = healthy()
    for step in range(STEPS):
        at = step * 1000.0
        for i in range(6):
            made.kernel(at + 300 + 4 * i, at + 303 + 4 * i, CAST, stream=9)
        made.line("train.py:14", at + 99, at + 123)
        made.kernel(at + 330, at + 600, CAST, stream=9)
        made.line("train.py:15", at + 129, at + 133)

    (finding,) = report(made, tmp_path).findings

    assert (finding.kind, finding.line) == ("dtype-casts", "train.py:15")


def test_convolutions_that_turn_their_layout(tmp_path):
    made = healthy()
    for step in range(STEPS):
        at = step * 1000.0
        name = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>"
        made.kernel(at + 300, at + 350, name, stream=9)

    assert kinds(report(made, tmp_path)) == {"channels-first-convolution"}


def test_frames_serve_where_there_are_no_lines(tmp_path):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 1000.0
        made.step(step, begin, begin + 999)
        made.frame("train.py(10): augment", begin + 410, begin + 900)
        made.frame("torch/nn/functional.py(99): dropout", begin + 500, begin + 800)
        made.kernel(begin + 5, begin + 400, GEMM, op="aten::mm")

    assert report(made, tmp_path).verdict.line == "train.py:10"


@pytest.mark.parametrize(
    ("path", "users"),
    [
        ("train.py", True),
        ("/home/me/train.py", True),
        ("project/model.py", True),
        ("torch/optim/adam.py", False),
        ("runpy.py", False),
        ("<frozen runpy>", False),
        ("/usr/lib/python3.12/threading.py", False),
        ("/env/lib/python3.12/site-packages/timm/models/vit.py", False),
        ("torchfast/trainer.py", False),
        ("sympy/core/expr.py", False),
        ("tqdm/std.py", False),
        ("timm/models/vision_transformer.py", True),
        ("/tmp/torchinductor_me/ab/cab.py", False),
    ],
)
def test_whose_code_a_path_is(path, users):
    assert is_users(path) is users


# --- idle time that no single cause explains ----------------------------------------------------


def test_idle_time_of_several_causes_is_not_fine(tmp_path):
    """Each cause is below the threshold; together they are not."""
    made = SyntheticTrace(ahead=5.0)
    for step in range(8):
        begin = step * 1000.0
        made.step(step, begin - 20, begin + 979)
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        made.kernel(begin, begin + 400, GEMM, op="aten::mm")
        made.annotation(name, begin + 401, begin + 484)
        made.kernel(begin + 490, begin + 930, GEMM, op="aten::mm")

    found = report(made, tmp_path)

    assert all(found.verdict.evidence[f"idle_{cause}_share"] < 0.1 for cause in ("data", "python"))
    assert found.verdict.evidence["idle_share"] > 0.1
    assert found.verdict.name == "input-bound"


@pytest.mark.parametrize("lost", [True, False])
def test_idle_time_of_unknown_cause_is_said_to_be_so(tmp_path, lost):
    """Launches that the trace lacks, or that came in time: the host is not to blame."""
    made = SyntheticTrace(ahead=900.0)
    for step in range(8):
        begin = step * 1000.0
        made.step(step, begin - 910, begin + 85)
        number = made.kernel(begin, begin + 350, GEMM)
        if lost:
            made.more_of(10_000 + number, begin + 650, begin + 1000, GEMM)
        else:
            made.kernel(begin + 650, begin + 1000, GEMM)
    # Work without a launch is placed by its own time, so the last of it needs a step too.
    made.step(8, 7086, 9000)

    found = report(made, tmp_path)

    assert found.verdict.name == "compute-bound"
    assert "cause is unknown" in found.verdict.text
    assert found.verdict.evidence["cause_unknown_share"] > 0.25
    assert "timeline" in found.verdict.lever
    assert found.to_dict()["verdict"]["class"] == "compute-bound"


def test_waits_of_threads_that_launch_nothing_are_no_fault(tmp_path):
    made = healthy()
    for step in range(STEPS):
        for i in range(6):
            at = step * 1000.0 + 100 * i - 200
            made.call("cudaEventSynchronize", at, at + 50, tid=777)

    found = report(made, tmp_path)

    assert (found.verdict.name, found.findings) == ("fine", ())


def test_few_steps_are_remarked(tmp_path):
    few, enough = healthy(), SyntheticTrace()
    for step in range(5):
        enough.step(step, step * 100.0, step * 100.0 + 90)
        enough.kernel(step * 100.0 + 20, step * 100.0 + 60)

    assert any("4 steps are few" in r for r in report(few, tmp_path).remarks)
    assert not any("are few" in r for r in report(enough, tmp_path).remarks)
