"""A glance at a named state: whatever changes is seen, and what changes in every step is not.

Each case has its negative control: with the half of the glance taken away that is to see it, it is
not seen.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from models import DropoutNet, make_batches
from tape import CPU, Twins, counts
from torchfast import CUDAGraphOptions, Plan
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.steady import Steady
from torchfast.graphs.watch import Glance, StateWatch

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
VALUES, OBJECTS, HOOKS = "_values_now", "_objects_now", "_no_hooks"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(3)
        self.scale, self.power, self.mode = 0.5, 1, "one"
        self.sizes, self.table = [3], {"inner": []}

    def forward(self, x):
        return self.norm(self.dropout(self.first(x))) * self.scale


class Function:
    mode = "a"

    def __init__(self):
        self.weight = 1.0

    def __call__(self, x):
        return x * self.weight if self.mode == "a" else x


class Named:
    """A module, optimizers, of which one reads its rates on the device, and a scaler."""

    def __init__(self):
        self.net = Net()
        self.net.first.register_forward_hook(lambda *_: None)
        self.net.norm.weight.register_hook(lambda grad: grad)
        self.frozen_rate = optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
        groups = [
            {"params": [*self.net.first.parameters()]},
            {"params": [*self.net.norm.parameters()]},
        ]
        self.optimizer = optim.AdamW(groups, lr=0.01)
        self.group["initial_lr"] = 0.01  # as a scheduler does
        self.after = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        self.net(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.scaler = torch.amp.GradScaler("cpu")
        self.function = Function()
        self.state = NamedState(
            [self.net, self.optimizer, self.frozen_rate, self.scaler],
            updated_after=[self.after],
            function=self.function,
        )
        self.state.rates = [LearningRates(self.optimizer)]
        self.watch = StateWatch(self.state, CPU)

    @property
    def group(self):
        return self.optimizer.param_groups[0]

    @property
    def entry(self):
        return self.optimizer.state[self.net.first.weight]


@pytest.fixture
def named():
    return Named()


def set_data(n):
    n.net.first.weight.data = n.net.first.weight.data.clone()


def swap_between_groups(n):
    # The same parameters in the same order, the border elsewhere.
    first, second = n.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def swap_names(n):
    n.group["other"] = n.group.pop("initial_lr")


def load_own_state(n):
    n.optimizer.load_state_dict(copy.deepcopy(n.optimizer.state_dict()))


def replace_state(n):
    n.optimizer.state = copy.copy(n.optimizer.state)


def replace_groups(n):
    n.optimizer.param_groups = [dict(group) for group in n.optimizer.param_groups]


def equal_step(n):
    n.entry["step"] = n.entry["step"].clone()


def hide_method(n):
    n.net.first.forward = n.net.first.forward


SEEN = {
    "memory of a parameter": (set_data, VALUES),
    "eval()": (lambda n: n.net.eval(), OBJECTS),
    "eval() of one module": (lambda n: n.net.dropout.eval(), OBJECTS),
    "requires_grad_()": (lambda n: n.net.first.weight.requires_grad_(False), VALUES),
    "a number of a module": (lambda n: setattr(n.net.dropout, "p", 0.2), OBJECTS),
    "a number that is a tensor now": (
        lambda n: setattr(n.net, "scale", torch.tensor(0.5)),
        OBJECTS,
    ),
    "a number that is gone": (lambda n: delattr(n.net, "scale"), OBJECTS),
    "a number of another type": (lambda n: setattr(n.net, "power", 1.0), OBJECTS),
    "a string of a module": (lambda n: setattr(n.net, "mode", "other"), OBJECTS),
    "the content of a list": (lambda n: n.net.sizes.__setitem__(0, 4), OBJECTS),
    "the length of a list": (lambda n: n.net.sizes.append(4), OBJECTS),
    "the content of a dictionary": (lambda n: n.net.table["inner"].append(1), OBJECTS),
    "a value of the function": (lambda n: setattr(n.function, "weight", 2.0), OBJECTS),
    "a new value of the function": (lambda n: setattr(n.function, "mode", "b"), VALUES),
    "a method that is hidden": (hide_method, VALUES),
    "a setting of the scaler": (lambda n: n.scaler.set_growth_interval(7), VALUES),
    "a new name in a group": (lambda n: n.group.update(mode=7), VALUES),
    "another name in a group": (swap_names, VALUES),
    "a rate that is a tensor now": (lambda n: n.group.update(lr=torch.tensor(0.01)), VALUES),
    "a border between groups": (swap_between_groups, VALUES),
    "a hook of a parameter": (lambda n: n.net.first.weight.register_hook(lambda g: g), VALUES),
    "a hook behind the gradient": (
        lambda n: n.net.first.weight.register_post_accumulate_grad_hook(lambda p: None),
        VALUES,
    ),
    "a second hook": (lambda n: n.net.first._forward_hooks.update({10**9: print}), VALUES),
    "no hook any more": (lambda n: n.net.first._forward_hooks.clear(), VALUES),
    "no hook of the parameter any more": (
        lambda n: n.net.norm.weight._backward_hooks.clear(),
        VALUES,
    ),
    "a hook by hand": (lambda n: n.net.norm._forward_hooks.update({10**9: print}), HOOKS),
    "a hook of an optimizer by hand": (
        lambda n: n.optimizer._optimizer_step_pre_hooks.update({10**9: print}),
        HOOKS,
    ),
    "a parameter": (lambda n: setattr(n.net.first, "bias", nn.Parameter(torch.ones(3))), OBJECTS),
    "a parameter that is gone": (lambda n: delattr(n.net.norm, "bias"), OBJECTS),
    "a buffer": (lambda n: setattr(n.net.norm, "running_var", torch.ones(3)), OBJECTS),
    "an equal buffer": (
        lambda n: setattr(
            n.net.norm, "num_batches_tracked", n.net.norm.num_batches_tracked.clone()
        ),
        OBJECTS,
    ),
    "a module": (lambda n: setattr(n.net, "dropout", nn.Dropout(0.1)), OBJECTS),
    "an equal entry of the state": (equal_step, OBJECTS),
    "an entry that is gone": (lambda n: n.entry.popitem(), OBJECTS),
    "a table of the state": (
        lambda n: n.optimizer.state.update({n.net.first.weight: dict(n.entry)}),
        OBJECTS,
    ),
    "a loaded state": (load_own_state, OBJECTS),
    "all of the state": (replace_state, OBJECTS),
    "groups": (replace_groups, OBJECTS),
    "weight decay": (lambda n: n.group.update(weight_decay=0.3), OBJECTS),
    "weight decay as a tensor": (
        lambda n: n.group.update(weight_decay=torch.tensor(n.group["weight_decay"])),
        OBJECTS,
    ),
    "betas": (lambda n: n.group.update(betas=(0.8, 0.9)), OBJECTS),
    "a parameter of a group": (
        lambda n: n.group["params"].__setitem__(0, nn.Parameter(torch.ones(3, 4))),
        OBJECTS,
    ),
    "the parameters of a group": (
        lambda n: n.group.update(params=list(n.group["params"])),
        OBJECTS,
    ),
    "a group that is added": (
        lambda n: n.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        OBJECTS,
    ),
    "a rate that is frozen": (lambda n: n.frozen_rate.param_groups[0].update(lr=0.2), OBJECTS),
    "a parameter that is updated behind": (
        lambda n: n.after.param_groups[0]["params"].__setitem__(0, nn.Parameter(torch.ones(2))),
        OBJECTS,
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_changes_is_seen(name, named):
    change, _ = SEEN[name]
    glance = named.watch.glance()
    assert glance.is_as_it_was()
    change(named)
    assert not glance.is_as_it_was()


@pytest.mark.parametrize("name", SEEN)
def test_without_the_half_that_sees_it_it_is_not_seen(name, named, monkeypatch):
    change, half = SEEN[name]
    glance = named.watch.glance()
    change(named)
    if half == HOOKS:
        glance._no_hooks = []
    else:
        known = {VALUES: glance._values, OBJECTS: glance._objects}[half]
        monkeypatch.setattr(Glance, half, lambda self: known)
    seen_by_the_others = {
        # A change that shows in more than one place.
        "a hook of a parameter", "a group that is added", "a parameter that is gone", "groups",
        "a number that is gone",
    }  # fmt: skip
    if name not in seen_by_the_others:
        assert glance.is_as_it_was()


CUDA = torch.backends.cuda
SURROUNDINGS = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (
        partial(torch.is_autocast_enabled, "cuda"),
        partial(torch.set_autocast_enabled, "cuda"),
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    "efficient attention": (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
    "plain attention": (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
    "attention of cuDNN": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
    "the type of autocast": (
        partial(torch.get_autocast_dtype, "cuda"),
        partial(torch.set_autocast_dtype, "cuda"),
        torch.bfloat16,
    ),
    "the type of tensors": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "the precision of products": (
        lambda: CUDA.matmul.fp32_precision,
        partial(setattr, CUDA.matmul, "fp32_precision"),
        "tf32",
    ),
    "the precision of convolutions": (
        lambda: torch.backends.cudnn.conv.fp32_precision,
        partial(setattr, torch.backends.cudnn.conv, "fp32_precision"),
        "ieee",
    ),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_surroundings_are_seen(name, named):
    read, put, *value = SURROUNDINGS[name]
    now = read()
    glance, mode = named.watch.glance(), named.watch.mode()
    put(*(value or [not now]))
    try:
        assert not glance.is_as_it_was()
        assert named.watch.mode() != mode
    finally:
        put(now)
    assert glance.is_as_it_was()
    assert named.watch.mode() == mode


def test_values_that_were_noted_anew_are_not_as_they_were(named):
    glance, values = named.watch.glance(), named.watch.attributes
    values.take, values.out_of = values.take[:-1], values.out_of[:-1]  # one is written by the step
    assert not glance.is_as_it_was()


def rate_of_a_scheduler(n):
    n.group["lr"] = n.group["lr"] * 0.3


def update_in_place(n):
    n.optimizer.step()


@pytest.mark.parametrize(
    "change", [rate_of_a_scheduler, update_in_place, lambda n: n.net.zero_grad()]
)
def test_what_changes_in_every_step_takes_no_closer_look(change, named):
    glance = named.watch.glance()
    change(named)
    assert glance.is_as_it_was()


@pytest.mark.parametrize(
    "make",
    [
        lambda n: n.group.update(betas=[0.9, 0.99]),  # may change and stay the same list
        lambda n: n.net.__dict__.pop("training"),
    ],
)
def test_what_can_change_and_stay_the_same_object_gets_no_glance(make, named):
    assert named.watch.glance() is not None
    make(named)
    assert named.watch.glance() is None


def test_where_hooks_are_not_counted_each_takes_a_closer_look(named, monkeypatch):
    monkeypatch.delattr(RemovableHandle, "next_id")
    assert named.watch.glance() is None


# --- What is made of it ---------------------------------------------------------------------------


def looks(monkeypatch):
    """Count the closer looks, and what is done at once."""
    seen = {"closer": 0, "at a glance": 0}
    moved, goes_on = StateWatch.moved, Steady.goes_on

    def closer(self):
        seen["closer"] += 1
        return moved(self)

    def at_a_glance(self):
        found = goes_on(self)
        seen["at a glance"] += found
        return found

    monkeypatch.setattr(StateWatch, "moved", closer)
    monkeypatch.setattr(Steady, "goes_on", at_a_glance)
    return seen


@pytest.mark.usefixtures("tape")
def test_a_steady_run_takes_no_closer_look(monkeypatch):
    twins = Twins(DropoutNet, ADAMW)
    batches = make_batches(30)
    for batch in batches[:6]:
        twins.step(batch)
    seen = looks(monkeypatch)
    for batch in batches[6:]:
        twins.step(batch)
    assert not twins.differences()
    assert seen == {"closer": 0, "at a glance": 24}


def cut(batches, sizes):
    return [
        tuple(tensor[:size] for tensor in batch) for batch, size in zip(batches, sizes, strict=True)
    ]


@pytest.mark.usefixtures("tape")
def test_two_shapes_are_both_known(monkeypatch):
    twins = Twins(DropoutNet, ADAMW)
    batches = cut(make_batches(40), [3, 4] * 20)
    for batch in batches[:12]:
        twins.step(batch)
    seen = looks(monkeypatch)
    for batch in batches[12:]:
        twins.step(batch)
    assert not twins.differences()
    assert seen == {"closer": 0, "at a glance": 28}


@pytest.mark.usefixtures("tape")
def test_a_graph_that_went_for_another_is_known_no_more():
    plan = Plan(cuda_graph=CUDAGraphOptions(max_graphs=1))
    twins = Twins(DropoutNet, ADAMW, plan=plan)
    for batch in cut(make_batches(15), [3] * 7 + [4] * 4 + [3] * 4):
        twins.step(batch)
    assert not twins.differences()
    assert counts(twins.captured)[3] == 3  # the first shape twice


@pytest.mark.usefixtures("tape")
def test_a_glance_that_does_not_last_is_not_taken_again_soon(monkeypatch):
    twins = Twins(DropoutNet, ADAMW)
    batches = make_batches(30)
    for batch in batches[:6]:
        twins.step(batch)
    taken = []
    glance = StateWatch.glance
    monkeypatch.setattr(StateWatch, "glance", lambda self: taken.append(1) or glance(self))
    for batch in batches[6:]:
        # Another object that says the same: a closer look finds that nothing has changed.
        for module in (twins.plain, twins.model):
            for each in module.modules():
                each.register_forward_hook(lambda *_: None).remove()
        twins.step(batch)
    assert not twins.differences()
    assert counts(twins.captured)[3] == 1  # captured once
    assert len(taken) <= 3
