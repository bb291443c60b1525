"""Parameters on the host that are written in ways that torch keeps no count of.

Fused updates do not raise a tensor's version, nor do writes through ``.data``. A block that is
still on the device from an earlier forward must not pass for what its parameters are by now.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torchs_optimizer

from parameter_offloading import Expert, mean_square, mixture, prompt_copies
from torchfast import OffloadOptions, ParameterOffload, Plan, Trainer
from torchfast._core.compare import differences
from torchfast.memory import resident_blocks


@pytest.fixture
def copies(monkeypatch):
    return prompt_copies(monkeypatch)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(Expert() for _ in range(3)))


def fused(model):
    return optim.AdamW(model.parameters(), lr=0.05, fused=True)


def test_a_fused_update_leaves_no_trace(copies):
    """The control: else the tests below show nothing."""
    model = chain()
    mean_square(model, torch.randn(4, 8)).backward()
    versions = [p._version for p in model.parameters()]
    fused(model).step()
    assert [p._version for p in model.parameters()] == versions


@pytest.mark.parametrize("max_resident_blocks", [1, 2, 4])
def test_a_fused_update_behind_a_forward_whose_backward_never_comes(copies, max_resident_blocks):
    def run(model):
        found, optimizer = [], fused(model)
        for number in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 32).view(4, 8) + number
            loss = mean_square(model, x)
            loss.backward()
            found += [loss.detach(), model(x).max().detach()]  # a figure for the log
            optimizer.step()
        return [*found, *(p.detach().clone() for p in model.parameters())]

    model = chain()
    expected = run(copy.deepcopy(model))
    ParameterOffload(model, max_resident_blocks=max_resident_blocks)
    assert all(map(torch.equal, run(model), expected))


def test_a_fused_update_where_parts_are_called_alone(copies):
    def run(model):
        found, optimizer = [], fused(model)
        for number in range(3):
            x = torch.linspace(-1, 1, 32).view(4, 8) + number
            model[2](model[0](x)).square().mean().backward()
            found.append(model[0](x).detach())
            optimizer.step()
            found.append(model[0](x).detach())
        return found

    model = chain()
    expected = run(copy.deepcopy(model))
    gc.collect()  # what other tests have let go of
    hooks = len(torchs_optimizer._global_optimizer_post_hooks)
    with ParameterOffload(model):
        assert len(torchs_optimizer._global_optimizer_post_hooks) == hooks + 1
        assert all(map(torch.equal, run(model), expected))
    assert len(torchs_optimizer._global_optimizer_post_hooks) == hooks
    dropped = chain()
    ParameterOffload(dropped)
    del dropped
    gc.collect()
    assert len(torchs_optimizer._global_optimizer_post_hooks) == hooks


@pytest.mark.parametrize("calls", ["the model", "its parts"])
def test_a_step_in_halves_with_an_evaluation_between_them(copies, calls):
    """An evaluation in which a wrong guess brings an expert that is not called, and an update."""

    def loss_fn(model, batch):
        x, path = batch
        run = model if calls == "the model" else partial(Paths.forward, model)
        return run(x, path).square().mean()

    def run(plan):
        torch.manual_seed(0)
        model = Paths()
        trainer = Trainer(model, fused(model), loss_fn, plan)
        x, losses = torch.linspace(-1, 1, 32).view(4, 8), []
        for path in ((0, 1), (0, 1), (0, 2), (0, 1), (1, 0)):
            trainer.forward_backward((x, path))
            losses += [*trainer.evaluate([(x, (0,))]).values()]  # behind which 1 is expected
            model.experts[0](x)
            trainer.update()
        return losses, [p.detach().clone() for p in model.parameters()]

    losses, expected = run(Plan())
    found_losses, found = run(Plan(offload=OffloadOptions(parameters=("experts.*",))))
    assert found_losses == losses
    assert all(map(torch.equal, found, expected))


class Paths(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x, path):
        for number in path:
            x = x + self.experts[number](x)
        return self.last(x)


@pytest.mark.parametrize("grad", [True, False])
def test_weights_that_are_swapped_through_data_behind_a_forward(copies, grad):
    """As an average is put in for an evaluation, and taken out again."""
    model = mixture()
    twin, x = copy.deepcopy(model), torch.randn(16, 8)
    ParameterOffload(model, ("*.experts.*",), max_resident_blocks=8)
    for factor in (0.5, 2.0, 0.25):
        for rows in (x, x[:3], x[5:]):
            with torch.set_grad_enabled(grad):
                assert torch.equal(model(rows), twin(rows))
        for each in (model, twin):
            for parameter in each.parameters():
                parameter.data.mul_(factor)


def test_a_backward_that_fails_leaves_nothing_that_is_taken_for_current(copies):
    model = chain()
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    ParameterOffload(model, max_resident_blocks=4)

    def fails(gradient):
        raise ValueError("in the backward")

    middle = model[0](x)
    middle.register_hook(fails)
    with pytest.raises(ValueError, match="in the backward"):
        mean_square(model[1:], middle).backward()
    for each in (model, twin):
        for parameter in each.parameters():
            parameter.grad = None
            parameter.data.mul_(0.5)
    assert torch.equal(model(x), twin(x))


def test_a_write_while_a_block_is_copied_is_noticed(copies, monkeypatch):
    """As by an optimizer that runs in hooks of the backward, in the thread of the host."""
    model = chain()
    twin, x = copy.deepcopy(model), torch.randn(4, 8)
    ParameterOffload(model, max_resident_blocks=4)
    written = []
    engine = resident_blocks.ResidentBlocks
    is_fetched = engine._fetch

    def writing(self, block, home):
        event = type(self._back).record_event

        def record(stream):
            if stream is self._back and not written:
                written.append(True)
                for each in (model, twin):
                    with torch.no_grad():
                        each[0].up.weight.mul_(2.0)
            return event(stream)

        with monkeypatch.context() as patch:
            patch.setattr(type(self._back), "record_event", record)
            return is_fetched(self, block, home)

    monkeypatch.setattr(engine, "_fetch", writing)
    model[0](x)
    assert written
    assert torch.equal(model[0](x), twin[0](x))


def test_the_model_is_called_as_ever_and_given_back(copies):
    model = chain()
    before = copy.deepcopy(model.state_dict())
    with ParameterOffload(model):
        copied = copy.deepcopy(model)
        assert "forward" not in vars(copied) or vars(copied)["forward"].__self__ is copied
        assert type(pickle.loads(pickle.dumps(model))) is nn.Sequential
    assert "forward" not in vars(model)
    assert differences(before, model.state_dict()) == []
    for _ in range(2):  # of one that nobody holds any more
        offload = weakref.ref(ParameterOffload(model))
        gc.collect()
        assert offload() is None
    ParameterOffload(model).close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_captured_update_of_another_model_waits_for_no_copy(copies):
    """To wait for an event in a capture is an error, and the hook is of all optimizers."""
    model, x = chain(), torch.randn(4, 8)
    offload = ParameterOffload(model)
    for _ in range(2):
        mean_square(model, x).backward()  # the order is known then
    model[0](x)  # begins to bring the next block, which nothing calls
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    optimizer = fused(other)

    def num_unused():
        return offload.counters()["offload_unused_blocks"]

    before = num_unused()
    copies.capturing = True
    optimizer.step()
    copies.capturing = False
    assert num_unused() == before
    optimizer.step()
    assert num_unused() == before + 1
