"""Under the compiler a block's second run reads what the first one found, not what it has left.

The negative control is torch's own checkpoint, which computes another gradient (the last part).
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from recomputed import GPTBlock, ResNet, RotaryBlock, image_loss, images, train
from torchfast import Plan, Recompute, Trainer
from torchfast._core import traced_uses
from torchfast.compiler import CompiledModule, CompileOptions
from torchfast.memory import traced_writes
from writing_blocks import (
    EACH,
    Block,
    Hidden,
    Left,
    Within,
)


def three(make):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), make(), make(), make()).double()


def square(model, batch):
    return model(batch).square().mean()


def rows(number=4):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(number, 8, dtype=torch.float64, generator=generator)


def close(found, expected):
    for part in ("losses", "grads", "state"):
        torch.testing.assert_close(found[part], expected[part], rtol=1e-9, atol=1e-12)


def trained(make, what, *, backend="aot_eager", regions="whole", **options):
    """Train as it is, and compiled with recompute; return both results."""
    plain = three(make)
    own = copy.deepcopy(plain)
    expected = train(plain, square, rows())
    with (
        Recompute(own, what),
        CompiledModule(own, backend=backend, regions=regions, **options),
    ):
        return expected, train(own, square, rows())


@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("make", EACH)
def test_the_second_run_reads_what_the_first_found(make, regions):
    expected, found = trained(make, (make,), regions=regions)
    close(found, expected)


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("make", [Block, Hidden])
def test_under_inductor(make, what):
    expected, found = trained(make, what, backend="inductor")
    close(found, expected)


@pytest.mark.parametrize("make", [Hidden, Left])
def test_selective(make):
    expected, found = trained(make, "selective", regions="blocks")
    close(found, expected)


@pytest.mark.parametrize("what", [(Block,), (Within,), (Within, Block, Hidden)])
def test_blocks_within_blocks_and_blocks_that_are_called_twice(what):
    expected, found = trained(Within, what)
    close(found, expected)


def test_sizes_that_vary():
    plain = three(Block)
    own = copy.deepcopy(plain)
    with Recompute(own):
        compiled = torch.compile(own, backend="aot_eager", dynamic=True)
        for number in (4, 6, 3):
            expected, found = (train(m, square, rows(number), 1) for m in (plain, compiled))
            torch.testing.assert_close(found["losses"], expected["losses"])
            torch.testing.assert_close([*found["grads"].values()], [*expected["grads"].values()])


@pytest.mark.parametrize("regions", ["whole", "blocks"])
def test_in_a_trainer(regions):
    results = []
    for plan in (
        Plan(),
        Plan(recompute="blocks", compile=CompileOptions(backend="aot_eager", regions=regions)),
    ):
        model = three(Block)
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        with Trainer(model, sgd(model.parameters()), square, plan) as own:
            losses = [own.step(rows(number)) for number in (4, 4, 4)]
            results.append({"losses": losses, "state": own.state_dict()["model"]})
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


def test_equal_blocks_share_their_code():
    model = three(Block)
    with Recompute(model), CompiledModule(model, backend="aot_eager", regions="blocks") as own:
        train(model, square, rows())
        counted = own.report().counters
    assert (counted["graphs"], counted["graph_breaks"]) == (1, 0)


# --- what is not written to, or read by nobody ---------------------------------------------------


class OnlyWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        y = torch.tanh(self.line(x))
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
            self.calls.add_(1)
        return y


def copies_in(model, loss_fn, batch):
    """Count what is compiled, and the values that are kept in it."""
    counts = []

    def backend(graph, inputs):
        counts.append(sum("value_of" in str(node.target) for node in graph.graph.nodes))
        return aot_eager(graph, inputs)

    with Recompute(model):
        loss_fn(torch.compile(model, backend=backend, fullgraph=True), batch).backward()
    return counts


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (GPTBlock, torch.randn(2, 8, 32)),
        (RotaryBlock, torch.randn(2, 8, 32)),
        (OnlyWritten, torch.randn(4, 8)),
    ],
)
def test_other_blocks_are_compiled_as_ever(make, batch):
    assert copies_in(nn.Sequential(make(), make()), square, batch) == [0]


def test_norms_are_compiled_as_ever():
    assert copies_in(ResNet(), image_loss, images()) == [0]


def test_what_is_kept_is_counted():
    """The control of these two."""
    assert copies_in(three(Block), square, rows()) == [3]


# --- kernels, which say what they write to -------------------------------------------------------


def test_of_a_kernel_that_counts_which_it_writes(monkeypatch):
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    monkeypatch.setattr(wrap, "get_mutated_tensors", lambda *_: ["out"])
    with FakeTensorMode() as mode:
        out, read = torch.ones(8), torch.ones(8)

        def body(out, read):
            wrap.triton_kernel_wrapper_mutation(
                kernel_idx=0,
                constant_args_idx=0,
                grid=[(1, 1, 1)],
                tma_descriptor_metadata={},
                kwargs={"out": out, "read": read},
            )

        with traced_uses.without_data(mode) as uses:
            body(out, read)
        assert uses.written & uses.read == traced_uses.memory_of(out)


# --- another torch -------------------------------------------------------------------------------


def test_a_torch_that_traces_in_another_way_is_told_once(monkeypatch, caplog):
    def broken():
        raise AttributeError("no graph")

    traced_uses._TOLD.clear()
    monkeypatch.setattr(traced_writes, "_keep_what_is_written", broken)
    copies_in(three(Block), square, rows())
    traced_uses._TOLD.clear()
    (record,) = [r for r in caplog.records if r.name == traced_writes.__name__]
    assert "(AttributeError: no graph): if it reads a buffer of its own" in record.message


# --- the negative control ------------------------------------------------------------------------


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_torch_alone_computes_another_gradient():
    """Once torch does not any more, there is nothing left to be mended here."""
    compiled = torch.compile(three(Checkpointed), backend="aot_eager")
    expected, found = (train(model, square, rows(), 1) for model in (three(Block), compiled))
    grads = [[*result["grads"].values()] for result in (expected, found)]
    assert max((a - b).abs().max() for a, b in zip(*grads, strict=True)) > 1e-3
