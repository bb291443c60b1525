"""What the loss function keeps beside the model, in graphs: resumed, evaluated, noticed."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from gpu.requirements import requires
from torchfast import Plan, Trainer
from torchfast._core.compare import differences

pytestmark = [requires(gpus=1), pytest.mark.usefixtures("deterministic")]

FUSED = partial(optim.AdamW, lr=0.01, fused=True)


def batches(number=10, *, poisoned=()):
    generator = torch.Generator().manual_seed(1)
    found = []
    for place in range(number):
        inputs = torch.randn(16, 8, generator=generator)
        inputs = inputs * torch.nan if place in poisoned else inputs
        found.append((inputs.cuda(), torch.arange(16).cuda() % 4))
    return found


class Masked(nn.Module):
    """Draws its masks on the device, from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.generator = torch.Generator("cuda").manual_seed(3)

    def forward(self, x):
        hidden = self.layer(x)
        return hidden * (torch.rand(hidden.shape, generator=self.generator, device="cuda") > 0.2)


def make(plan, model=Masked, **options):
    """Return a trainer whose loss has a head of its own, with statistics and a follower."""
    torch.manual_seed(0)
    model = model().cuda()
    head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).cuda()
    teacher = copy.deepcopy(head[1]).requires_grad_(False).eval()

    def loss_fn(model, batch):
        hidden = head(model(batch[0]))
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), head[1].parameters(), strict=True):
                own.data.mul_(0.9).add_(other.data, alpha=0.1)
        return F.cross_entropy(hidden, batch[1]) + teacher.weight.square().mean()

    optimizer = FUSED([*model.parameters(), *head.parameters()])
    return Trainer(model, optimizer, loss_fn, plan, **options), head


def replays(trainer):
    return trainer.report().counters.get("replays", 0)


def test_a_captured_run_goes_on_from_a_state_to_the_bit():
    whole, whole_head = make("exact")
    losses = [whole.step(batch).clone() for batch in batches()]
    assert replays(whole) > 0, whole.report()

    first, _ = make("exact")
    for batch in batches()[:5]:
        first.step(batch)
    second, second_head = make("exact")
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    found = [second.step(batch).clone() for batch in batches()[5:]]
    assert not differences(losses[5:], found)
    assert not differences(whole_head.state_dict(), second_head.state_dict())
    assert not differences(whole.state_dict()["beside"], second.state_dict()["beside"])


def test_an_evaluation_between_replays_leaves_the_head_alone():
    trainer, head = make("exact")
    plain, plain_head = make("eager")
    for number, batch in enumerate(batches()):
        trainer.step(batch)
        plain.step(batch)
        if number % 3 == 2:
            before = copy.deepcopy(head.state_dict())
            trainer.evaluate(batches(2))
            assert not differences(before, head.state_dict())
    assert replays(trainer) > 0
    assert not differences(plain_head.state_dict(), head.state_dict())


def test_a_skipped_step_in_a_graph_puts_the_head_back():
    trainer, head = make(Plan(nonfinite="skip", cuda_graph=True), model=lambda: nn.Linear(8, 8))
    plain, plain_head = make(Plan(nonfinite="skip"), model=lambda: nn.Linear(8, 8))
    for batch in batches(10, poisoned=[1, 7]):
        trainer.step(batch)
        plain.step(batch)
    assert trainer.num_skipped == plain.num_skipped == 2
    assert all(t.isfinite().all() for t in head.state_dict().values())
    assert not differences(plain_head.state_dict(), head.state_dict())


@pytest.mark.parametrize("plan", ["exact", "eager"])
def test_a_loss_that_reads_the_number_of_steps_is_trained_with_each(plan):
    torch.manual_seed(0)
    model = nn.Linear(8, 4).cuda()
    held = {}

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + held["trainer"].num_steps)

    trainer = held["trainer"] = Trainer(model, FUSED, loss_fn, plan)
    losses = [float(trainer.step(batch)) for batch in batches()]
    fixed = [float(F.cross_entropy(model(x), y).detach()) for x, y in batches()]
    # Each is some tenths off what it was at its own weights, and far from what a frozen 1 makes.
    assert losses[-1] > 5 * fixed[-1]


def test_a_rate_that_a_hook_moves_lets_the_rest_be_captured():
    rates = []
    for plan in ("exact", "eager"):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).cuda()
        optimizer = FUSED(model.parameters())
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        optimizer.register_step_post_hook(lambda *_, schedule=schedule: schedule.step())
        trainer = Trainer(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), plan)
        for batch in batches():
            trainer.step(batch)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


@pytest.mark.parametrize("plan", [Plan(channels_last=True, cuda_graph=True), "fast"])
def test_a_classic_network_with_a_view_trains(plan):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 8 * 8, 4)

        def forward(self, x):
            return self.last(F.relu(self.conv(x)).view(-1, 4 * 8 * 8))

    images = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 4) for _ in range(8)]
    torch.manual_seed(0)
    trainer = Trainer(
        Net(), FUSED, lambda m, b: F.cross_entropy(m(b[0]), b[1]), plan, device="cuda"
    )
    losses = [float(trainer.step(batch)) for batch in trainer.prefetch(images)]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    (layout,) = [d for d in trainer.report().decisions if d.lever == "channels_last"]
    assert layout.outcome == "stepped aside"
    assert replays(trainer) > 0, trainer.report()
