"""What the memory of a device is taken for, over time, in traces that are made up."""

import pytest

from synthetic_trace import AUTOGRAD, SyntheticTrace, read
from torchfast.profiling.report import report_on


def held(made, time, what, blocks, device="cuda:0"):
    made.events.append(
        {
            "ph": "i",
            "cat": "torchfast_held",
            "name": what,
            "ts": made.base + time,
            "args": {"what": what, "device": device, "blocks": blocks},
        }
    )


def device_use(made, tmp_path):
    (use,) = report_on(read(made, tmp_path)).memory
    return use


def test_what_a_device_holds_beside_is_other(tmp_path):
    made = SyntheticTrace()
    made.op("aten::mm", 0, 100)
    held(made, -5, "parameters", [[10, 600], [11, 100]])
    held(made, -5, "optimizer state", [[12, 1400]])
    made.memory(10, 500, 1, allocated=3000)  # 400 are nobody's
    made.memory(20, -100, 11, allocated=2900)  # parameters that are given back
    made.memory(30, -300, 99, allocated=2600)  # and some of nobody's

    use = device_use(made, tmp_path)

    assert use.peak_bytes == 3000
    assert use.at_peak == {
        "other": 400,
        "parameters": 700,
        "optimizer state": 1400,
        "activations": 500,
    }
    assert use.by_category["other"] == [400, 400, 100]
    assert use.by_category["parameters"] == [700, 600, 600]


def test_what_is_copied_to_a_device_is_input(tmp_path):
    made = SyntheticTrace()
    made.op("aten::to", 0, 20)
    made.op("aten::_to_copy", 1, 19)
    made.memory(5, 800, 1, allocated=800)
    made.copy(30, 40, at=10)
    made.op("aten::mm", 25, 50)
    made.memory(30, 200, 2, allocated=1000)
    made.op("autograd::engine::evaluate_function: Mm", 60, 90)
    made.memory(65, 50, 3, allocated=1050)
    made.memory(70, 70, 4, allocated=1120)
    made.memory(80, -50, 3, allocated=1070)
    made.memory(85, -200, 2, allocated=870)
    made.step(0, 0, 100)

    use = device_use(made, tmp_path)

    assert use.most == {"inputs": 800, "activations": 200, "gradients": 70, "temporary": 50}


def test_gradients_that_an_update_which_takes_nothing_gives_back(tmp_path):
    """As fused kernels do on a device, so that no memory is taken from the backward on."""
    made = SyntheticTrace()
    held(made, -5, "parameters", [[10, 600]])
    for number, base in enumerate((0, 100)):
        made.op("aten::mm", base + 1, base + 20)
        made.memory(base + 5, 200, 1, allocated=800)
        # One span an operator, on autograd's own thread; between them nothing is annotated.
        made.op("autograd::engine::evaluate_function: A", base + 30, base + 40, tid=AUTOGRAD)
        made.memory(base + 32, 70, 2, allocated=870)
        made.memory(base + 34, 30, 3, allocated=900)
        made.op("autograd::engine::evaluate_function: B", base + 45, base + 55, tid=AUTOGRAD)
        made.memory(base + 47, -30, 3, allocated=870)
        made.memory(base + 50, -200, 1, allocated=670)
        made.annotation("Optimizer.step#AdamW.step", base + 60, base + 70)
        made.annotation("Optimizer.zero_grad#AdamW.zero_grad", base + 75, base + 80)
        made.memory(base + 77, -70, 2, allocated=600)
        made.step(number, base, base + 99)

    use = device_use(made, tmp_path)

    assert use.most == {
        "parameters": 600,
        "activations": 200,
        "gradients": 70,
        "temporary": 30,
    }
    assert use.least["gradients"] == 0
    assert use.by_category["gradients"] == [0, 70, 70, 70, 70, 0] * 2


def test_a_batch_that_was_there_before_is_input_as_long_as_it_is_the_last(tmp_path):
    made = SyntheticTrace()
    made.op("aten::mm", 0, 100)
    held(made, 1, "inputs", [[1, 300], [2, 200]])
    made.memory(10, 10, 9, allocated=1010)
    held(made, 20, "inputs", [[3, 400]])
    made.memory(30, 10, 8, allocated=1020)

    use = device_use(made, tmp_path)

    assert use.by_category["inputs"] == [500, 400]
    assert use.by_category["other"] == [500, 600]


def test_a_peak_of_one_moment_among_thousands_is_drawn(tmp_path):
    made = SyntheticTrace()
    made.op("aten::mm", 0, 10_000)
    for number in range(3000):
        made.memory(2 * number + 1, 100, 1, allocated=100)
        if number == 1111:
            made.memory(2 * number + 1.3, 900, 2, allocated=1000)
            made.memory(2 * number + 1.6, -900, 2, allocated=100)
        made.memory(2 * number + 2, -100, 1, allocated=0)

    use = device_use(made, tmp_path)

    assert len(use.times_us) <= 500
    assert max(use.by_category["temporary"]) == use.peak_bytes == 1000


def test_memory_that_is_taken_again_had_been_given_back(tmp_path):
    """On a CPU nobody tells of it, if it was taken before the trace."""
    made = SyntheticTrace()
    made.op("autograd::engine::evaluate_function: Mm", 0, 100)
    held(made, -5, "parameters", [[1, 600]])
    made.memory(10, 500, 2, allocated=1100)
    made.memory(20, 600, 1, allocated=1100)

    use = device_use(made, tmp_path)

    assert use.by_category["parameters"] == [600, 0]
    assert use.by_category["gradients"] == [500, 1100]


@pytest.mark.parametrize(
    "args",
    [
        None,
        {},
        {"blocks": 3},
        {"blocks": [3]},
        {"blocks": [[1]]},
        {"blocks": [["a", None]], "what": 3, "device": 4},
        {"blocks": [[2, -5]], "what": "parameters", "device": "cuda:0"},
        {"blocks": [[1, 1e300]], "what": "no such", "device": "cuda:0"},
    ],
)
def test_notes_that_are_damaged(tmp_path, args):
    made = SyntheticTrace()
    made.op("aten::mm", 0, 100)
    made.events.append({"ph": "i", "cat": "torchfast_held", "name": "", "ts": 1.0, "args": args})
    made.memory(10, 500, 1, allocated=500)

    assert device_use(made, tmp_path).at_peak == {"activations": 500}
