"""The loop written by hand is a bar only if it trains what the plain loop trains."""

from __future__ import annotations

import pytest
import torch

from benchmarks.job import Job
from benchmarks.methods import METHODS, by_hand
from benchmarks.workloads import NAMES, workload

STEPS = 16


class Finished(Exception):  # noqa: N818 - not an error
    """Ends a loop that would go on for ever."""


def losses(name, method):
    """Return the losses of the first steps."""
    device = torch.device("cuda")
    job_workload = workload(name, "smoke")
    torch.manual_seed(0)
    with device:
        model = job_workload.build()
    found = []

    def tick(loss):
        found.append(loss.detach().clone())
        if len(found) == STEPS:
            raise Finished

    with pytest.raises(Finished):
        METHODS[method].train(Job(job_workload, model, device, tick))
    torch.cuda.synchronize()
    return [loss.item() for loss in found]


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_trains_as_the_tuned_loop_does(name):
    assert losses(name, "by hand: graph") == pytest.approx(losses(name, "tuned"), rel=0.02)


def test_a_graph_that_is_fed_the_wrong_batch_is_told_apart(monkeypatch):
    honest = losses("gpt-small", "tuned")
    copies = []

    def forget(targets, sources):
        copies.append(sources)
        if len(copies) <= by_hand.WARM_UP_STEPS:
            by_hand_copy(targets, sources)

    by_hand_copy = by_hand.copy_into
    monkeypatch.setattr(by_hand, "copy_into", forget)
    assert losses("gpt-small", "by hand: graph") != pytest.approx(honest, rel=0.02)
