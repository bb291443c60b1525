"""A steady step makes the host wait for nothing.

Two detectors: torch's sync debug mode here, and in a process of its own (it cannot be switched off
again) the runtime's trace, which also sees explicit synchronisation of devices, streams and events.
Each is shown to fire.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from gpu.own_process import told_by
from gpu.syncs import forbid_syncs, no_syncs
from torchfast import MicroBatches, Plan, Trainer

STEPS = 50


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x):
        return self.head(self.dropout(F.gelu(self.norm(self.conv(x)))).flatten(1))


def loss_fn(model, batch):
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, {"accuracy": (logits.argmax(1) == labels).float().mean()}, float(len(labels))


def make_batch(device="cuda"):
    return torch.randn(16, 3, 8, 8, device=device), torch.randint(10, (16,), device=device)


CASES = {
    "eager": ("eager", partial(optim.AdamW, lr=1e-3)),
    "exact": ("exact", partial(optim.AdamW, lr=1e-3)),
    "exact fused": ("exact", partial(optim.AdamW, lr=1e-3, fused=True)),
    "fast": ("fast", partial(optim.AdamW, lr=1e-3)),
    "fast SGD": ("fast", partial(optim.SGD, lr=1e-3, momentum=0.9)),
    "fast RMSprop": ("fast", partial(optim.RMSprop, lr=1e-3)),
    "tf32": (Plan(precision="tf32"), partial(optim.AdamW, lr=1e-3)),
    "fp16": (Plan(precision="fp16"), partial(optim.AdamW, lr=1e-3)),
    "fp16 SGD": (Plan(precision="fp16"), partial(optim.SGD, lr=1e-3)),
    "fp16 RMSprop": (Plan(precision="fp16"), partial(optim.RMSprop, lr=1e-3)),
    "fp16 NAdam": (Plan(precision="fp16"), partial(optim.NAdam, lr=1e-3)),
    "fp16 Adamax": (Plan(precision="fp16"), partial(optim.Adamax, lr=1e-3)),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_fifty_steady_steps_read_nothing(name, accumulate):
    plan, optimizer = CASES[name]
    trainer = Trainer(
        Net().cuda(),
        optimizer,
        loss_fn,
        plan,
        max_grad_norm=1.0,
        accumulate=accumulate,
        lr_scheduler=partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    )
    batches = [make_batch() for _ in range(accumulate)]
    batch = batches[0] if accumulate == 1 else MicroBatches(batches)
    for _ in range(5):
        trainer.step(batch)
    losses = []
    with no_syncs():
        losses += [trainer.step(batch) for _ in range(STEPS)]
        assert trainer.metrics["grad_norm"].device.type == "cuda"
    assert torch.stack(losses).isfinite().all()
    assert trainer.num_steps == 5 + STEPS


def test_pinned_batches_are_copied_without_waiting():
    trainer = Trainer(Net().cuda(), partial(optim.AdamW, lr=1e-3), loss_fn, "fast")
    loader = [tuple(t.pin_memory() for t in make_batch("cpu")) for _ in range(5)]
    for batch in trainer.prefetch(loader):
        trainer.step(batch)
    with no_syncs():
        for batch in loader:
            trainer.step(batch)
        for batch in trainer.prefetch(loader):
            trainer.step(batch)


def test_fit_reads_nothing_until_its_end():
    trainer = Trainer(
        Net().cuda(), partial(optim.AdamW, lr=1e-3), loss_fn, "fast", max_grad_norm=1.0
    )
    loader = [make_batch()]
    seen = []

    def callback(event):
        if event.kind == "step" and event.num_steps in (10, 60):
            forbid_syncs(event.num_steps == 10)
        if event.kind == "log":
            seen.append(event.num_steps)

    result = trainer.fit(loader, steps=61, log_every=5, progress=False, callbacks=[callback])
    # Records appeared while the loop ran, not all at its end.
    assert len([step for step in seen if step <= 60]) >= 6
    assert len(result.history) == 13
    assert all(r["step_ms"]["p50"] > 0 and r["grad_norm"] > 0 for r in result.history)


def test_the_detector_fires():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_syncs():
        x.sum().item()


def trace(name: str) -> list[str]:
    """Run this file on a case; return the synchronisations that the runtime's trace saw."""
    return told_by(__file__, name)


@pytest.mark.parametrize("name", ["exact", "fast", "fp16", "fp16 RMSprop"])
def test_the_trace_sees_no_synchronisation(name):
    assert trace(name) == []


def test_the_trace_fires():
    assert trace("control") == ["device", "stream", "event"]


def test_a_step_that_reads_the_loss_is_found():
    def reading(model, batch):
        loss, metrics, weight = loss_fn(model, batch)
        metrics["loss"] = loss.item()
        return loss, metrics, weight

    trainer = Trainer(Net().cuda(), partial(optim.AdamW, lr=1e-3), reading)
    batch = make_batch()
    trainer.step(batch)
    with pytest.raises(RuntimeError, match="synchroniz"), no_syncs():
        trainer.step(batch)


def main(name: str) -> None:
    """Print the synchronisations of fifty steps of a case, or of three planted ones."""
    torch._C._activate_gpu_trace()
    from torch.cuda import _gpu_trace

    seen: list[str] = []
    _gpu_trace.register_callback_for_device_synchronization(lambda: seen.append("device"))
    _gpu_trace.register_callback_for_stream_synchronization(lambda _: seen.append("stream"))
    _gpu_trace.register_callback_for_event_synchronization(lambda _: seen.append("event"))
    batch = make_batch()
    if name == "control":
        event = torch.cuda.Event()
        event.record()
        seen.clear()
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()
        event.synchronize()
    else:
        plan, optimizer = CASES[name]
        trainer = Trainer(Net().cuda(), optimizer, loss_fn, plan, max_grad_norm=1.0)
        for _ in range(5):
            trainer.step(batch)
        seen.clear()
        for _ in range(STEPS):
            trainer.step(batch)
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
