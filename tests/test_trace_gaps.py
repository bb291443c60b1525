"""Idle time of a device, and its causes, on traces whose figures are known by construction."""

import random

import pytest

from synthetic_trace import AUTOGRAD, SyntheticTrace, figures_of

# --- gaps ---------------------------------------------------------------------------------------


def gap_of(made, tmp_path):
    """The only gap of a trace; kernels run at 0 to 100 and from 500."""
    figures = figures_of(made, tmp_path)
    (gap,) = figures.gaps
    assert gap.length == pytest.approx(400.0)
    assert figures.idle_us == pytest.approx(400.0)
    return gap


def test_idle_because_of_the_loader(tmp_path):
    made = SyntheticTrace()
    made.kernel(0, 100)
    made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 50, 480)
    made.kernel(500, 600)

    assert gap_of(made, tmp_path).cause == "data"


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def parts_of(made, tmp_path):
    """What a gap from 0 to 1000 is divided into: where each part ends, and its cause."""
    made.kernel(-100, 0, at=-110)
    made.kernel(1000, 1100, at=995)
    gaps = figures_of(made, tmp_path).gaps
    begin = gaps[0].start
    assert [gap.start for gap in gaps[1:]] == [gap.end for gap in gaps[:-1]]
    assert gaps[-1].end - begin == pytest.approx(1000)
    return [(round(gap.end - begin), gap.cause) for gap in gaps]


@pytest.mark.parametrize("begin", [200, 20])
@pytest.mark.parametrize("end", [700, 970])
def test_what_the_host_does_beside_a_wait_for_a_batch_is_not_the_loaders(tmp_path, begin, end):
    made = SyntheticTrace()
    made.annotation(LOADER, begin, end)
    before = [(begin, "python")] if begin == 200 else []
    behind = [(1000, "python")] if end == 700 else []

    expected = [*before, (end if behind else 1000, "data"), *behind]
    assert parts_of(made, tmp_path) == expected


def test_two_batches_before_one_launch(tmp_path):
    made = SyntheticTrace()
    made.annotation("torchfast.data_wait", 10, 400)
    made.annotation(LOADER, 20, 390)
    made.annotation("torchfast.data_wait", 410, 990)

    assert parts_of(made, tmp_path) == [(400, "data"), (1000, "data")]


@pytest.mark.parametrize(("end", "behind"), [(300, "sync"), (700, "launch")])
def test_behind_a_long_wait_for_a_batch_one_for_the_device_is_forgotten(tmp_path, end, behind):
    made = SyntheticTrace()
    made.call("cudaStreamSynchronize", -50, 5)
    made.op("aten::add", 6, 190)
    made.annotation(LOADER, 200, end)
    made.op("aten::add", end + 1, 994)

    assert parts_of(made, tmp_path) == [(200, "sync"), (end, "data"), (1000, behind)]


def test_a_batch_that_was_there_divides_nothing(tmp_path):
    made = SyntheticTrace()
    made.op("aten::add", 1, 390)
    made.annotation(LOADER, 400, 440)
    made.op("aten::add", 450, 994)

    assert parts_of(made, tmp_path) == [(1000, "launch")]


def test_idle_after_a_wait_of_the_host(tmp_path):
    made = SyntheticTrace()
    made.kernel(0, 100, at=-5)
    made.call("cudaStreamSynchronize", 10, 103)
    made.op("aten::add", 105, 495)
    made.kernel(500, 600)

    gap = gap_of(made, tmp_path)

    assert (gap.cause, gap.what) == ("sync", "cudaStreamSynchronize")


def test_a_wait_long_before_the_gap_is_not_its_cause(tmp_path):
    made = SyntheticTrace()
    made.call("cudaStreamSynchronize", -200, -150)
    made.kernel(0, 100, at=-5)
    made.op("aten::add", 0, 495)
    made.kernel(500, 600)

    assert gap_of(made, tmp_path).cause == "launch"


def test_idle_because_the_host_runs_python(tmp_path):
    made = SyntheticTrace()
    made.kernel(0, 100, op="aten::mul")
    made.frame("train.py(12): augment", 90, 490)
    made.kernel(500, 600, op="aten::mul")

    assert gap_of(made, tmp_path).cause == "python"


def test_python_after_a_wait_is_not_the_waits(tmp_path):
    """The wait was over soon; what kept the device idle is what the host did then."""
    made = SyntheticTrace()
    made.kernel(0, 100, at=-5)
    made.call("cudaStreamSynchronize", 10, 103)
    made.kernel(500, 600, op="aten::mul")

    gap = gap_of(made, tmp_path)

    assert (gap.cause, gap.moment) == ("python", pytest.approx(303.75))


def test_work_of_the_main_thread_before_autograds_launch_is_no_idle_python(tmp_path):
    made = SyntheticTrace()
    made.step(1, -20, 700)
    made.kernel(0, 100)
    made.op("aten::view", 90, 480)
    made.kernel(500, 600, tid=AUTOGRAD)

    assert gap_of(made, tmp_path).cause == "launch"


def test_idle_because_of_many_launches(tmp_path):
    made = SyntheticTrace()
    made.kernel(0, 100)
    for i in range(20):
        made.op("aten::as_strided", 100 + 20 * i, 118 + 20 * i)
    made.kernel(500, 600, at=499)

    assert gap_of(made, tmp_path).cause == "launch"


def test_idle_although_it_was_launched(tmp_path):
    made = SyntheticTrace()
    made.kernel(0, 100, at=-10)
    made.kernel(500, 600, at=-5)

    assert gap_of(made, tmp_path).cause == "device"


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate"])
def test_idle_because_of_memory_from_the_driver(tmp_path, call):
    made = SyntheticTrace()
    made.kernel(0, 100)
    made.call(call, 110, 480)
    made.kernel(500, 600)

    assert gap_of(made, tmp_path).cause == "allocation"


def test_idle_because_of_a_compilation(tmp_path):
    made = SyntheticTrace()
    made.kernel(0, 100)
    made.op("_compile.compile_inner (dynamo_timed)", 100, 490)
    made.kernel(500, 600)

    assert gap_of(made, tmp_path).cause == "compile"


def test_idle_is_what_no_stream_is_busy_in(tmp_path):
    """Idle time is the window less the union of all kernels and copies, whatever their streams."""
    draw = random.Random(3)
    made = SyntheticTrace()
    moments = set()
    for _ in range(200):
        start = draw.randrange(0, 5000)
        end = start + draw.randrange(1, 60)
        moments |= set(range(start, end))
        if draw.random() < 0.2:
            made.copy(start, end, stream=draw.choice([13, 14]))
        else:
            made.kernel(start, end, stream=draw.choice([7, 9, 11]))

    figures = figures_of(made, tmp_path)

    assert figures.busy_us == pytest.approx(len(moments))
    assert figures.idle_us == pytest.approx(max(moments) + 1 - min(moments) - len(moments))
    assert sum(figures.idle_by_cause.values()) == pytest.approx(figures.idle_us)
