"""What is launched on a real device while a start waits: nobody sees it, and nothing stays."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.syncs import no_syncs
from torchfast.compiler import early_launches


def launch(monkeypatch):
    """Launch, and fail where that would only be logged."""
    failures = []
    monkeypatch.setattr(early_launches.logger, "debug", lambda *told: failures.append(told))
    early_launches.launch_early()
    assert failures == []


def test_what_is_launched_early_is_seen_by_nobody(monkeypatch):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    torch.cuda.synchronize()
    drawn = torch.cuda.get_rng_state()
    with Seen(), torch.autocast("cuda"), no_syncs():
        launch(monkeypatch)
    assert seen == []
    assert torch.equal(torch.cuda.get_rng_state(), drawn)


def test_what_is_launched_early_keeps_no_tensor_and_is_left_out_in_a_capture(monkeypatch):
    launch(monkeypatch)
    before = torch.cuda.memory_allocated()
    launch(monkeypatch)
    assert torch.cuda.memory_allocated() == before

    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(monkeypatch)
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0] * 8
