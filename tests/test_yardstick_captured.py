"""The yardstick's own objects are in no plan's way: what it measures as captured is captured.

Loss functions hold the job, which holds the clock of the measurement, and that one the loop.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import worker
from benchmarks.job import Job
from benchmarks.methods import METHODS, plans
from benchmarks.workloads import workload
from tape import counts, reasons
from torchfast import Plan, Trainer

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 6


class EndedError(Exception):
    pass


class Pipe:
    def send(self, figures):
        raise EndedError


@pytest.mark.parametrize("name", ["mlp", "gpt-small", "resnet50", "dlrm", "llama"])
def test_a_plan_is_captured_beside_the_clock(name, tmp_path, monkeypatch):
    made = []

    def trainer(model, optimizer, loss_fn, plan, **options):
        assert plan.cuda_graph
        captured = Plan(cuda_graph=True)  # the rest of the plan has no meaning here
        made.append(Trainer(model, optimizer, loss_fn, captured, device="cpu", **options))
        return made[0]

    monkeypatch.setattr(plans, "Trainer", trainer)
    device = torch.device("cpu")
    method = METHODS["torchfast exact"]
    order = worker.Order(name, method, "smoke", "cpu", train_steps=STEPS, cache=tmp_path)
    job = Job(workload(name, "smoke"), workload(name, "smoke").build(), device, tick=print)
    clock = worker.Clock(order, Pipe(), device)
    clock.start()
    with pytest.raises(EndedError):
        method.train(replace(job, tick=clock.tick))
    assert counts(made[0]) == (1, STEPS - 3, 3, 1), reasons(made[0])
