"""Recompute of convolutional networks on a device, whose batch norms are those of cuDNN."""

from __future__ import annotations

import functools

import pytest
import torch

from convolutional import Functional, Leaves, Net, Shortcut
from gpu.requirements import requires
from recomputed import Operations, as_if_compiled, image_loss, images
from torchfast import Plan, Recompute, RecomputeOptions, Trainer
from torchfast._core.compare import differences

pytestmark = requires(gpus=1)

adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
BLOCKS = {block.__name__: block for block in (Leaves, Functional, Shortcut)}


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Calls are looked at only as long as nothing has been compiled in the process."""
    as_if_compiled(monkeypatch)


def on_gpu(seed=0):
    return tuple(tensor.cuda() for tensor in images(seed=seed))


def run(block, plan, steps=8):
    torch.manual_seed(0)
    model = Net(BLOCKS[block]).cuda()
    with Trainer(model, adamw(model.parameters()), image_loss, plan) as trainer:
        losses = [trainer.step(on_gpu(seed)).clone() for seed in range(steps)]
        state = {k: v for k, v in trainer.state_dict().items() if k != "plan"}
        return {"losses": losses, "state": state}, trainer.report()


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("block", BLOCKS)
def test_bits_eagerly_and_in_a_graph(deterministic, block, what, precision, channels_last):
    plain = Plan(precision=precision, channels_last=channels_last)
    expected, _ = run(block, plain)
    eager, _ = run(block, plain.replace(recompute=what))
    assert differences(expected, eager) == []
    captured, report = run(block, plain.replace(recompute=what, cuda_graph=True))
    assert report.counters["replays"] >= 1, str(report)
    assert differences(expected, captured) == []


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize(
    ("block", "what", "num_norms"),
    [("Leaves", "blocks", 7), ("Leaves", "selective", 1), ("Shortcut", "selective", 2)],
)
def test_norms_that_nobody_waits_for_do_not_run_again(
    block, what, num_norms, precision, channels_last
):
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = Net(BLOCKS[block]).cuda().to(memory_format=layout)
    pixels, labels = on_gpu()
    batch = pixels.to(memory_format=layout), labels
    # So small that what norms save of each channel is not little.
    options = RecomputeOptions(selective=True, share=0.6) if what == "selective" else what
    with Recompute(model, options):
        for _ in range(3):
            with torch.autocast("cuda", precision, enabled=precision is not None):
                loss = image_loss(model, batch)
            with Operations() as ran:
                loss.backward()
    forward = [name for name in ran.counts if "batch_norm" in name and "backward" not in name]
    assert sum(ran.counts[name] for name in forward) == num_norms
