"""Where compiling is forbidden, as in a capture: what is called by code around blocks."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch._dynamo.utils import counters

from torchfast import CompiledModule, CompileOptions, Plan, Trainer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
FORBIDDEN = partial(torch.compiler.set_stance, "fail_on_recompile")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Calls functions of the user's between its blocks, when it is told to."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.__dict__["between"] = []
        self.number = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.number is not None:
                self.number = scaled(self.number)
            for function in self.between:
                x = function(x)
        return x


def scaled(number, x=None):
    return number + 1 if x is None else x * number


@pytest.fixture
def warm():
    """A trainer that has compiled what it needs."""
    plan = Plan(compile=CompileOptions(regions="blocks", backend="eager"))
    trainer = Trainer(
        Net(), partial(optim.SGD, lr=0.1), lambda model, x: model(x).square().mean(), plan
    )
    with trainer:
        for _ in range(3):
            trainer.step(BATCH)
        yield trainer


def graphs():
    return counters["stats"]["unique_graphs"]


def test_a_function_that_the_user_compiled_is_not_compiled_either(warm):
    mine = torch.compile(lambda x: x * 2, backend="eager")
    warm.model.between.append(mine)
    before = graphs()
    with FORBIDDEN(), pytest.raises(RuntimeError, match="fail_on_recompile"):
        warm.step(BATCH)
    assert graphs() == before
    warm.step(BATCH)
    assert graphs() > before
    with FORBIDDEN():
        warm.step(BATCH)


def test_the_stance_is_nobody_elses_to_lift(warm):
    """It is the process's, and other threads go by it too."""
    from torch._dynamo import eval_frame

    seen = []

    @torch.compiler.disable
    def look(x):
        seen.append(eval_frame._stance.stance)
        return x

    warm.model.between.append(look)
    with FORBIDDEN(skip_guard_eval_unsafe=True):
        warm.step(BATCH)
    assert seen == ["fail_on_recompile"] * 3


def test_a_function_that_had_no_tensors_may_be_compiled_later(warm):
    """Torch would leave its code alone for ever, silently, whoever compiles it."""
    warm.model.number = 3
    with FORBIDDEN():
        warm.step(BATCH)
    assert warm.model.number == 6
    before = graphs()
    assert torch.equal(torch.compile(scaled, backend="eager")(3, BATCH), BATCH * 3)
    assert graphs() == before + 1


def test_an_exception_of_the_users_leaves_the_compiler_as_it_was(warm):
    @torch.compiler.disable
    def fails(_):
        raise KeyError("mine")

    warm.model.between.append(fails)
    with FORBIDDEN(), pytest.raises(KeyError, match="mine"):
        warm.step(BATCH)
    assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
    warm.model.between.clear()
    with FORBIDDEN():
        warm.step(BATCH)


def test_another_thread_steps_under_the_stance(warm):
    losses = []
    with FORBIDDEN():
        thread = threading.Thread(target=lambda: losses.append(warm.step(BATCH)))
        thread.start()
        thread.join()
    assert len(losses) == 1


def test_another_thread_that_is_compiling_meanwhile_goes_on():
    """The stance is the process's, and its call began before."""
    is_inside, may_go_on, losses = threading.Event(), threading.Event(), []
    plan = Plan(compile=CompileOptions(regions="blocks", backend="eager"))
    trainer = Trainer(
        Net(), partial(optim.SGD, lr=0.1), lambda model, x: model(x).square().mean(), plan
    )
    calls = []

    @torch.compiler.disable
    def wait(x):
        calls.append(1)
        if len(calls) == 3:  # behind the last block, what is left is code around them
            is_inside.set()
            assert may_go_on.wait(60)
        return x

    trainer.model.between.append(wait)
    thread = threading.Thread(target=lambda: losses.append(trainer.step(BATCH)))
    thread.start()
    assert is_inside.wait(60)
    with FORBIDDEN():
        may_go_on.set()
        thread.join()
    assert len(losses) == 1
    trainer.close()


def test_a_region_that_does_not_fit_is_told_as_torch_tells_it():
    model = Net()
    with CompiledModule(model, regions="blocks", backend="eager", dynamic=False):
        model(BATCH)
        with FORBIDDEN(), pytest.raises(RuntimeError, match="size mismatch at index 0"):
            model(BATCH[:5])
