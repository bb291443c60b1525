"""What happens between steps: noticed before the next replay, as if there were no graph."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn, optim

from models import make_batches, mean_loss
from poison import BufferNet
from tape import CPU, Twins, counts, reasons
from torchfast import MicroBatches
from torchfast._core.rng import get_rng_state, preserved_rng, set_rng_state
from torchfast.graphs import CUDAGraphStep
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.watch import StateWatch

pytestmark = pytest.mark.usefixtures("tape")

WHOLE = partial(optim.AdamW, lr=0.01, fused=True)
HALF = partial(optim.AdamW, lr=0.01)
SMALL = make_batches(4, size=4, seed=2)


def last_frozen():
    """The last layer trains only once add_param_group has it."""
    net = BufferNet()
    net.last.requires_grad_(False)
    return net


def trainable(make):
    return lambda params: make([p for p in params if p.requires_grad])


class Events(Twins):
    """Twins to which things happen."""

    def __init__(self, make, *, bare=False):
        super().__init__(last_frozen, trainable(make), clip=0.5, bare=bare)
        self.is_whole = make is not HALF
        self.batches = iter(make_batches(200))
        self.saved = None
        self.steps(1)
        self.save()

    def steps(self, count):
        for _ in range(count):
            self.step(next(self.batches))
            self.check(gradients=not self.is_whole)

    def train(self):
        self.both(lambda model, _: model.train())

    def eval(self):
        self.both(lambda model, _: model.eval())

    def norm_alone(self):
        self.both(lambda model, _: model.norm.eval())

    def rate(self):
        self.both(lambda _, optimizer: scale(optimizer, "lr", 0.7))

    def decay(self):
        self.both(lambda _, optimizer: scale(optimizer, "weight_decay", 2.0))

    def freeze(self):
        self.both(lambda model, _: model.first.requires_grad_(False))

    def thaw(self):
        self.both(lambda model, _: model.first.requires_grad_(True))

    def zero_grad(self):
        self.both(lambda _, optimizer: optimizer.zero_grad(set_to_none=True))

    def other_shape(self):
        for batch in SMALL[:3]:
            self.step(batch)
            self.check(gradients=not self.is_whole)

    def save(self):
        parts = (self.plain, self.optimizer), (self.model, self.own)
        self.saved = [[copy.deepcopy(part.state_dict()) for part in pair] for pair in parts]

    def load(self):
        if len(self.saved[0][1]["param_groups"]) != len(self.own.param_groups):
            return
        pairs = (self.plain, self.optimizer), (self.model, self.own)
        for pair, states in zip(pairs, self.saved, strict=True):
            for part, state in zip(pair, states, strict=True):
                part.load_state_dict(copy.deepcopy(state))

    def add_group(self):
        if len(self.own.param_groups) > 1:
            return

        def add(model, optimizer):
            last = model.last.requires_grad_(True)
            optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.003})

        self.both(add)

    def move(self):
        """Another memory under the same parameter, as model.to() leaves behind."""
        self.both(lambda model, _: setattr(model.last.weight, "data", model.last.weight.clone()))

    def edit(self):
        self.both(lambda model, _: nn.init.zeros_(model.norm.running_mean))

    def halves(self):
        """The step in two halves, which is never captured, against the plain one."""
        batch = next(self.batches)
        if self._bare:
            return
        whole, self.captured = self.captured, _InHalves(self.captured)
        self.step(batch)
        self.captured = whole
        self.check()

    def evaluate(self):
        """A forward pass of the user's own in between, which moves statistics and draws."""
        batch = next(self.batches)[0]
        with preserved_rng(CPU):
            for model, name in ((self.plain, "rng"), (self.model, "own_rng")):
                set_rng_state(getattr(self, name), CPU)
                model(batch).sum()
                setattr(self, name, get_rng_state(CPU))


class _InHalves:
    def __init__(self, step):
        self.step = step
        self.report = step.report

    def __call__(self, batch):
        loss = self.step.forward_backward(batch)
        self.step.update()
        return loss


def scale(optimizer, name, factor):
    for group in optimizer.param_groups:
        group[name] = group[name] * factor


EVENTS = (
    *("train", "eval", "norm_alone", "rate", "decay", "freeze", "thaw", "zero_grad"),
    *("other_shape", "save", "load", "add_group", "move", "edit", "halves", "evaluate"),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    make=st.sampled_from([WHOLE, HALF]),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=1, max_size=10),
)
def test_any_sequence_of_events_is_exact(make, events):
    twins = Events(make)
    twins.steps(4)
    for name, count in events:
        getattr(twins, name)()
        twins.steps(count)
    twins.steps(1)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=1, max_size=8),
)
def test_any_sequence_of_events_around_a_bare_step_is_exact(events):
    twins = Events(WHOLE, bare=True)
    twins.steps(4)
    for name, count in events:
        getattr(twins, name)()
        twins.steps(count)
    twins.steps(1)


# Graphs, replays, eager steps and captures when an event stands between two replays and ten more
# steps follow: what each costs. The graph was there after step 4.
COSTS = {
    "eval": (2, 6 + 9, 4, 2),  # its own graph, warmed up once; the other stays
    "norm_alone": (2, 6 + 9, 4, 2),
    "rate": (1, 16, 3, 1),  # filled into the graph's own
    "zero_grad": (1, 16, 3, 1),
    "save": (1, 16, 3, 1),
    "edit": (1, 16, 3, 1),
    "evaluate": (1, 16, 3, 2),  # the forward has replaced a buffer
    "halves": (1, 16, 3, 1),
    "other_shape": (2, 16 + 2, 4, 2),
    "load": (1, 16, 3, 1),  # copied to where the graph reads it
    "move": (1, 16, 3, 2),
    "decay": (1, 16, 3, 2),
}
OF_THE_HALF = {
    "decay": (1, 16, 3, 1),  # read by the update, behind the graph
    "add_group": (1, 15, 4, 2),  # the last layer trains now, which is another step
}


@pytest.mark.parametrize("event", COSTS)
def test_what_an_event_costs(event):
    twins = Events(WHOLE)
    twins.steps(8)
    assert twins.counts == (1, 6, 3, 1)
    getattr(twins, event)()
    twins.steps(10)
    assert twins.counts == COSTS[event]
    assert reasons(twins.captured) == []


@pytest.mark.parametrize("event", OF_THE_HALF)
def test_what_an_event_costs_where_the_update_is_behind_the_graph(event):
    twins = Events(HALF)
    twins.steps(8)
    getattr(twins, event)()
    twins.steps(10)
    assert twins.counts == OF_THE_HALF[event]


def test_a_new_group_is_captured_after_a_step_that_makes_its_state():
    twins = Events(WHOLE)
    twins.steps(8)
    twins.add_group()
    twins.steps(10)
    assert twins.counts == (1, 6 + 9, 3 + 1, 2)
    assert reasons(twins.captured) == []


def test_back_in_a_known_mode_its_graph_is_valid_again():
    twins = Events(WHOLE)
    twins.steps(4)
    for _ in range(3):
        twins.eval()
        twins.steps(2)
        twins.train()
        twins.steps(2)
    assert twins.counts == (2, 2 + 6 + 5, 4, 2)


def test_thawed_parameters_train_again_in_the_first_graph():
    twins = Events(WHOLE)
    twins.steps(4)
    twins.freeze()
    twins.steps(3)
    before = twins.model.first.weight.detach().clone()
    twins.steps(1)
    assert torch.equal(before, twins.model.first.weight)
    twins.thaw()
    twins.steps(1)
    assert not torch.equal(before, twins.model.first.weight)
    assert twins.counts == (2, 2 + 3 + 1, 4, 2)


def test_a_hyperparameter_that_changes_rarely_is_captured_again_each_time():
    twins = Events(WHOLE)
    twins.steps(3)
    for _ in range(3):
        twins.steps(11)
        twins.decay()
    twins.steps(1)
    assert twins.counts == (1, 1 + 3 * 11 + 1, 3, 4)
    assert reasons(twins.captured) == []


@pytest.mark.parametrize("make", [WHOLE, HALF], ids=["whole", "half"])
def test_a_first_half_without_update_leaves_no_gradient_to_a_later_replay(make):
    twins = Events(make)
    twins.steps(5)
    batch = SMALL[0]
    twins.captured.forward_backward(MicroBatches([batch]))
    twins.plain.load_state_dict(twins.model.state_dict())  # what that forward has moved
    twins.plain.seen.copy_(twins.model.seen)
    twins.steps(3)
    assert twins.counts == (1, 6, 3, 1)


def test_gradients_that_a_step_adds_to_are_state():
    """Those of parameters that no optimizer has, which clipping sees nevertheless."""
    without_last = partial(optim.SGD, lr=0.1)
    twins = Twins(BufferNet, lambda params: without_last(list(params)[:-2]), clip=0.5)
    twins.run(make_batches(12))
    assert twins.counts == (1, 9, 3, 1)


def test_a_step_that_only_adds_to_gradients_can_be_captured():
    plain = nn.Linear(8, 4)
    model = copy.deepcopy(plain)
    step = CUDAGraphStep(lambda batch: mean_loss(model, batch).backward(), state=[model])
    for batch in make_batches(12):
        mean_loss(plain, batch).backward()
        step(batch)
        assert torch.equal(plain.weight.grad, model.weight.grad)
    assert counts(step) == (1, 9, 3, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.update(weight_decay=torch.tensor(0.1)),  # 0.1 equals its float32
        lambda group: group.update(mode=7),
        lambda group: group.update(initial_lr=0.1, betas=[0.9, 0.999]),
    ],
)
def test_a_setting_that_looks_alike_is_another(change):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
    watch = StateWatch(NamedState([optimizer]), CPU)
    before = watch.frozen()
    assert watch.is_frozen_as(before)
    change(optimizer.param_groups[0])
    assert not watch.is_frozen_as(before)


def test_a_tensor_as_a_setting_is_told_by_being_it():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([parameter], lr=0.1)
    group = optimizer.param_groups[0]
    group["weight_decay"] = torch.tensor(0.5)
    watch = StateWatch(NamedState([optimizer]), CPU)
    before = watch.frozen()
    group["weight_decay"].mul_(2)  # the graph reads its memory
    assert watch.is_frozen_as(before)
    group["weight_decay"] = group["weight_decay"].clone()
    assert not watch.is_frozen_as(before)


def test_what_a_scheduler_adds_is_nothing_that_a_step_reads():
    optimizer = optim.AdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    watch = StateWatch(NamedState([optimizer]), CPU)
    before = watch.frozen()
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert "initial_lr" in optimizer.param_groups[0]
    assert watch.is_frozen_as(before)
