"""What a profile advises for a step that is one CUDA graph already."""

from __future__ import annotations

from synthetic_trace import STEPS, replayed, report, tiny
from torchfast.profiling.verdict import judge


def test_what_is_replayed_already_is_not_told_to_be_captured(tmp_path):
    found = report(replayed(), tmp_path)

    assert found.verdict.name == "launch-bound"
    assert found.figures.num_replayed == found.figures.num_kernels == 150 * STEPS
    assert "several steps in each replay: trainer.fit(unroll=8)" in found.verdict.lever
    told = [found.verdict.lever, *(f"{each.text} {each.lever}" for each in found.findings)]
    assert not [text for text in told if "CUDA graph" in text or "their launch" in text]
    # What else the host does is told first.
    assert {each.kind for each in found.findings} == {"tiny-kernels", "slow-python"}
    assert found.verdict.lever.startswith("move the line out of the loop")
    assert judge(found.figures, ()).lever.startswith("run several steps in each replay")


def test_a_few_replays_beside_many_launches_are_no_captured_step(tmp_path):
    made = tiny()
    for step in range(STEPS):
        number = made.kernel(step * 3000.0 + 2990, step * 3000.0 + 2991, call="cudaGraphLaunch")
        for i in range(1, 5):
            made.more_of(number, step * 3000.0 + 2991 + i, step * 3000.0 + 2991.5 + i)

    assert "launch the step as one CUDA graph" in report(made, tmp_path).verdict.lever
