"""Steps that people write and a graph could get wrong: each beside the plain loop, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from queue import SimpleQueue

import pytest
import torch
from torch import nn, optim

from tape import counts, plain_order, reasons
from torchfast import CaptureError, CUDAGraphStep
from torchfast._core.compare import differences
from torchfast._core.reachable import held_by, weak_method
from torchfast.graphs.secrecy import Secret

pytestmark = pytest.mark.usefixtures("tape")

BY_TORCH = {"__name__": "torch.optim.optimizer"}


def sgd(parameters):
    return optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)


def zero_at_the_end(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)
        self.register_buffer("current", torch.zeros(2))
        self.register_buffer("previous", torch.ones(2))

    def forward(self, x):
        return self.used(x) * self.previous + self.current


class Shifts(Net):
    """One buffer becomes what another was."""

    def forward(self, x):
        y = self.used(x)
        self.previous = self.current
        self.current = y.detach().mean(0)
        return y + self.current - self.previous


class Counts(Net):
    """In place, in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x):
        self.seen += 1
        return super().forward(x) / self.seen.sqrt()


class Classwide(Net):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def side_by_side(net, make_step, *, event=None, check=True, steps=14, optimizer=sgd):
    """Run both for some steps; return the captured one. ``event(number, model, optimizer)``."""
    torch.manual_seed(0)
    models = [net()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [optimizer(m.parameters()) for m in models]
    plain, own = (make_step(*pair) for pair in zip(models, optimizers, strict=True))
    captured = CUDAGraphStep(own, state=[models[1], optimizers[1]], check=check)
    for number, x in enumerate(torch.randn(steps, 8, 4)):
        if event is not None:
            for pair in zip(models, optimizers, strict=True):
                event(number, *pair)
        assert torch.equal(plain(x), captured(x)), number
        assert not differences(*(model.state_dict() for model in models)), number
        held = [{k: v for k, v in vars(m).items() if isinstance(v, torch.Tensor)} for m in models]
        assert not differences(*held), number
    return captured


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("make_step", [plain_order, zero_at_the_end])
@pytest.mark.parametrize("net", [Net, Shifts, Counts])
def test_it_is_captured_and_right(net, make_step, check):
    assert counts(side_by_side(net, make_step, check=check)) == (1, 11, 3, 1)


def swap(number, model, _):
    if number == 8:
        model.current, model.previous = model.previous, model.current


def mask(number, model, _):
    if number == 6:
        model.mask = model.previous = torch.full((2,), 0.5)
    if number == 9:
        model.mask.zero_()  # the same tensor as the buffer


def other_hook(number, model, _):
    if number == 5:
        model.handle = model.used.register_forward_hook(lambda *args: args[-1] * 2)
    if number == 8:
        model.handle.remove()
        model.handle = model.used.register_forward_hook(lambda *args: args[-1] * 3)


def attribute(number, model, _):
    if number == 8:
        model.scale = 3.0


def attribute_goes(number, model, _):
    if number == 5:
        model.scale = 3.0
    if number == 9:
        del model.scale


def number_becomes_tensor(number, model, _):
    if number == 8:
        model.scale = torch.tensor([2.0, 3.0])


@pytest.mark.parametrize(
    "event", [swap, mask, other_hook, attribute, attribute_goes, number_becomes_tensor]
)
def test_what_happens_between_two_steps_is_seen(event):
    captured = side_by_side(Classwide, plain_order, event=event)
    assert counts(captured)[3] > 1


def test_a_scheduler_inside_a_step_is_refused_though_it_changes_nothing_yet():
    def make_step(model, optimizer):
        scheduler = optim.lr_scheduler.StepLR(optimizer, 6)
        step = plain_order(model, optimizer)

        def with_scheduler(x):
            loss = step(x)
            scheduler.step()
            return loss

        return with_scheduler

    def plain_sgd(parameters):  # no form of which keeps its bits in a graph on the CPU
        return optim.SGD(parameters, lr=0.1, momentum=0.9)

    captured = side_by_side(Net, make_step, optimizer=plain_sgd)
    assert any("the count of StepLR" in reason for reason in reasons(captured))


def test_a_leaf_that_is_no_parameter_trains():
    leaves = [torch.ones(4, requires_grad=True) for _ in range(2)]
    optimizers = [sgd([leaf]) for leaf in leaves]

    def make(leaf, optimizer):
        def step(x):
            loss = (x * leaf).square().mean()
            loss.backward()  # added to what is there
            optimizer.step()
            return loss.detach()

        return step

    plain, own = (make(*pair) for pair in zip(leaves, optimizers, strict=True))
    captured = CUDAGraphStep(own, state=[optimizers[1]])
    for x in torch.randn(14, 8, 4):
        assert torch.equal(plain(x), captured(x))
        assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert torch.equal(*leaves)
    assert counts(captured) == (1, 11, 3, 1)


def test_data_in_a_closure_is_neither_copied_nor_written_to():
    data = torch.randn(64, 4)
    data.requires_grad_(False)
    model = Net()
    optimizer = sgd(model.parameters())

    def step(index):
        optimizer.zero_grad()
        loss = model(data[index]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = CUDAGraphStep(step, state=[model, optimizer])
    for number in range(10):
        captured(torch.arange(8) + number)
    assert data._version == 0
    assert counts(captured)[1] == 7


# --- what a function holds ------------------------------------------------------------------------


class Task:
    def __init__(self):
        self.teacher = nn.Linear(2, 2)

    def loss(self, model, batch):
        return (model(batch) - self.teacher(batch)).square().mean()

    def __call__(self, model, batch):
        return self.loss(model, batch)


def test_what_a_function_holds_is_found():
    task, tensor, generator = Task(), torch.ones(2), torch.Generator()
    scheduler = optim.lr_scheduler.StepLR(optim.SGD([nn.Parameter(torch.ones(1))], 0.1), 1)

    def closure():
        return tensor, [generator], {"s": scheduler}

    def defaults(x, teacher=task.teacher, *, scale=tensor):
        return x, teacher, scale

    assert held_by(task.loss) == held_by(task) == [task.teacher]
    assert {id(v) for v in held_by(closure)} == {id(v) for v in (tensor, generator, scheduler)}
    assert {id(v) for v in held_by(defaults)} == {id(v) for v in (task.teacher, tensor)}
    samples = [torch.ones(1) for _ in range(1000)]
    assert held_by(lambda: samples) == []  # data
    assert held_by(len) == []


def test_a_weak_method_keeps_nothing_alive():
    task = Task()
    method = weak_method(task.loss)
    assert method(task.teacher, torch.ones(1, 2)) == 0
    del task
    with pytest.raises(TypeError):
        method(None, None)


def several(make_step):
    """The same, a few updates a step."""

    def make(model, optimizer):
        update = make_step(model, optimizer)
        return lambda x: torch.stack([update(part) for part in x.split(2)])

    return make


def test_several_updates_are_one_graph():
    def rate_of_the_call(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)

    captured = side_by_side(Shifts, several(plain_order), event=rate_of_the_call)
    assert counts(captured) == (1, 11, 3, 1)


class Asks(Net):
    """Computes another way where it is told that it is captured."""

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            x = x * 1.000001
        return super().forward(x)


class AsksLestItWaits(Net):
    """As transformers does: it looks at a mask, unless it is captured."""

    def forward(self, x):
        if not torch.cuda.is_current_stream_capturing() and bool((x > -100).all()):
            return super().forward(x)
        return super().forward(torch.where(x > -100, x, 0.0))


def test_nobody_is_told_of_a_capture():
    ask = torch.cuda.is_current_stream_capturing
    captured = side_by_side(Asks, plain_order)
    assert counts(captured) == (1, 11, 3, 1)
    assert torch.cuda.is_current_stream_capturing is ask


def test_who_would_make_the_host_wait_is_told_of_the_next():
    captured = side_by_side(AsksLestItWaits, plain_order)
    # One with shadows on the host comes between, unless another test has compiled something.
    assert counts(captured) in ((1, 10, 4, 1), (1, 9, 5, 1))
    assert not reasons(captured)


def test_a_step_that_is_another_once_told_of_its_capture_runs_eagerly():
    class Both(AsksLestItWaits):
        def forward(self, x):
            return super().forward(x) * (2 if torch.cuda.is_current_stream_capturing() else 1)

    captured = side_by_side(Both, plain_order)
    assert counts(captured)[:2] == (0, 0)
    assert "replays" in reasons(captured)[0]


def test_torch_is_told_the_truth():
    told = []

    def step(x):
        told.append(eval("ask()", {"ask": torch.cuda.is_current_stream_capturing, **BY_TORCH}))
        return x * 2

    captured = CUDAGraphStep(step, device="cpu")
    for x in torch.randn(6, 4):
        captured(x)
    assert told[3] is True
    assert told.count(True) == 1


def test_told_once_is_no_attempt_less():
    """Three things in a row are in the way, each of which goes away."""
    errors = SimpleQueue()  # into which nobody looks: a list would be put back
    errors.put("would make the legacy stream depend on a capturing blocking stream")
    errors.put("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
    model = AsksLestItWaits()

    def step(x):
        is_asked = eval("ask()", {"ask": torch.cuda.is_current_stream_capturing, **BY_TORCH})
        if is_asked and not errors.empty():
            raise RuntimeError(errors.get())
        return model(x)

    captured = CUDAGraphStep(step, state=[model], device="cpu", host_constants=True)
    for x in torch.randn(12, 4, 4):
        captured(x)
    assert counts(captured)[0] == 1


@pytest.mark.parametrize("on_failure", ["eager", "raise"])
def test_an_attempt_that_failed_leaves_nothing(on_failure):
    """No tensor of it, and no error that another failure would be put down to."""
    made = []

    class Noted(AsksLestItWaits):
        def forward(self, x):
            made.append(weakref.ref(hidden := self.used(x)))
            return super().forward(x) + hidden

    model = Noted()

    def step(x, kind):
        calls.append(0)
        return model(x) * (len(calls) if kind == 2 else 1)

    calls = []
    captured = CUDAGraphStep(step, state=[model], device="cpu", on_failure=on_failure)
    with torch.no_grad():
        for x in torch.randn(8, 4, 4):
            captured(x, 1)
    assert counts(captured)[0] == 1
    gc.collect()
    assert made[3]() is None
    if on_failure == "raise":
        model.forward = model.used
        with torch.no_grad(), pytest.raises(CaptureError, match="replays") as caught:
            [captured(x, 2) for x in torch.randn(8, 4, 4)]
        assert caught.value.__cause__ is None


def test_captures_that_overlap_leave_torch_as_it_was():
    ask = torch.cuda.is_current_stream_capturing
    first, second = Secret().kept(), Secret().kept()
    first.__enter__()
    second.__enter__()
    assert torch.cuda.is_current_stream_capturing is not ask
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.cuda.is_current_stream_capturing is ask
    with pytest.raises(ValueError, match="within"), Secret().kept():
        raise ValueError("within")
    assert torch.cuda.is_current_stream_capturing is ask
