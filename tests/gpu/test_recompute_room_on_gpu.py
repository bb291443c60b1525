"""The planner of recompute where the device has less memory than a way needs."""

from __future__ import annotations

import gc
import json
import sys

import torch

from gpu.own_process import told_by
from gpu.requirements import requires
from recomputed import GPT, token_loss, tokens
from torchfast import plan_recompute

pytestmark = requires(gpus=1)


def planned(between):
    """Return what each way needs where there is all memory, then where there is less.

    Args:
        between: How much less: the part of the way from blocks' need to that of none.
    """
    torch.manual_seed(0)
    model, batch = GPT(layers=6).cuda(), tokens(256, 128).cuda()

    def needs():
        plan = plan_recompute(model, token_loss, batch, memory_gb=20.0, repeats=1)
        needed = {choice.name: choice.needed_bytes for choice in plan.choices}
        return needed, {choice.name: choice.fits for choice in plan.choices}, plan.fixed_bytes

    roomy, fit, fixed = needs()
    assert all(fit.values())
    room = roomy["blocks"] + between * (roomy["none"] - roomy["blocks"]) - fixed
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    return needs()[:2]


def test_what_runs_out_of_memory_on_the_device_does_not_fit():
    """In a process of its own: what other tests leave is room of which nothing is known."""
    needed, fit = told_by(__file__, json.dumps(0.5))
    assert needed["none"] is None
    assert not fit["none"]
    needed, fit = told_by(__file__, json.dumps(1.5))
    assert needed["none"] is not None
    assert fit["none"]


if __name__ == "__main__":
    print(json.dumps(planned(json.loads(sys.argv[1]))))  # noqa: T201
