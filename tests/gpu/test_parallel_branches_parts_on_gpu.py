"""What each part of `ParallelBranches` is for: with it the result is right, without it wrong."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch
import torch.nn.functional as F

from gpu.late import SLOW, Late
from torchfast import ParallelBranches
from torchfast.graphs import parallel_branches

SIZE = 1500  # so that a matrix is a block of its own


@pytest.fixture(autouse=True)
def deterministic():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    yield
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def emptied():
    """Let the next request for a matrix get memory that holds no right result."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.full((8, SIZE, SIZE), torch.nan, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def forked_and_joined():
    emptied()
    x = torch.zeros(SIZE, SIZE, device="cuda")
    branches = ParallelBranches(2)
    poisoned = branches([lambda x: x + torch.nan] * 2, x)
    del poisoned
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * SLOW)
    x.fill_(3.0)

    def branch(x):
        torch.cuda._sleep(SLOW)
        return x * 2.0

    outputs = branches([branch, branch], x)
    return bool((outputs[0] + outputs[1] == 12.0).all())


def outputs_kept():
    emptied()
    streams = []

    def branch(x):
        streams.append(torch.cuda.current_stream())
        return x * 2.0

    outputs = ParallelBranches(2)([branch, branch], torch.ones(SIZE, SIZE, device="cuda"))
    torch.cuda._sleep(SLOW)
    result = outputs[0] + 0.0
    del outputs
    with torch.cuda.stream(streams[0]):  # as a backward there, which waits for its gradient only
        torch.full((SIZE, SIZE), torch.nan, device="cuda")
    return bool((result == 2.0).all())


def inputs_kept():
    """Let only the branches save their input, and the main stream go on with another backward."""
    emptied()
    weights = [torch.ones(SIZE, SIZE, device="cuda", requires_grad=True) for _ in range(2)]
    z = torch.ones(SIZE, SIZE, device="cuda", requires_grad=True)
    other = (z * 5.0).sin().exp().cos()
    x = torch.full((SIZE, SIZE), 1.0, device="cuda") * 2.0
    # Branch 0 is the last in the backward: with it the memory is free, and it is late to read it.
    outputs = ParallelBranches(2).map(
        lambda x, w, cycles: Late.apply(x @ w, 0, cycles), [x, x], weights, [3 * SLOW, 0]
    )
    del x
    loss = other.sum() + outputs[0].sum() + outputs[1].sum()
    del other, outputs
    loss.backward()
    return all(bool((w.grad == 2.0 * SIZE).all()) for w in weights)


def passed_on_kept():
    """Let a branch be late to read a gradient that it has passed on to what the branches share."""
    emptied()
    x = torch.ones(SIZE, SIZE, device="cuda", requires_grad=True) * 1.0
    own = [torch.ones(SIZE, SIZE, device="cuda", requires_grad=True) for _ in range(2)]
    outputs = ParallelBranches(2).map(lambda p: x + Late.apply(p, 0, SLOW), own)
    ((outputs[0] * 3.0).sum() + (outputs[1] * 5.0).sum()).backward()
    return all(bool((p.grad == c).all()) for p, c in zip(own, (3.0, 5.0), strict=True))


def casts_kept():
    """Let one branch be late to cast a weight that the next one uses too."""
    emptied()
    weight = torch.full((SIZE, SIZE), 0.5, device="cuda", requires_grad=True)
    x = torch.ones(8, SIZE, device="cuda")

    def branch(cycles):
        torch.cuda._sleep(cycles)
        return F.linear(x, weight)

    with torch.autocast("cuda", torch.bfloat16):
        outputs = ParallelBranches(2).map(branch, [SLOW, 0])
    expected = F.linear(x.bfloat16(), weight.detach().bfloat16())
    return all(torch.equal(output, expected) for output in outputs)


def nothing(*args):
    return None


CUDA = parallel_branches.CUDASideStreams
ORDER = parallel_branches._BackwardOrder
PARTS = {
    "fork": (forked_and_joined, CUDA, "fork", nothing),
    "join": (forked_and_joined, CUDA, "join", nothing),
    "record outputs": (outputs_kept, CUDA, "record", nothing),
    "record inputs": (inputs_kept, CUDA, "record", nothing),
    "order of the backward": (passed_on_kept, ORDER, "_begin", nothing),
    "no shared casts": (
        casts_kept,
        parallel_branches,
        "_no_shared_casts",
        contextlib.nullcontext,
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_read_too_early_nor_overwritten(part):
    check, *_ = PARTS[part]
    assert all(check() for _ in range(3))


@pytest.mark.parametrize("part", PARTS)
def test_without_it_the_result_is_wrong(part, monkeypatch):
    check, owner, name, instead = PARTS[part]
    monkeypatch.setattr(owner, name, instead)
    assert not all(check() for _ in range(3))
    torch.cuda.synchronize()
