"""Gradients that a loss takes by itself, of a model in shards."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from parallel_training import full_state
from torchfast import Plan, PlanError, ShardOptions, Trainer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def penalty(model, batch):
    inputs, targets = batch
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    return F.mse_loss(outputs, targets) + gradient.square().mean()


def adversarial(model, batch):
    """The gradient is a value only, and another forward follows."""
    inputs, targets = batch
    inputs = inputs.clone().requires_grad_()
    loss = F.mse_loss(model(inputs), targets)
    (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    return loss + F.mse_loss(model((inputs + 0.1 * gradient.sign()).detach()), targets)


def plain(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def trained(rank, loss_fn, shard, steps=3, again=None):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(6, 3))
    losses = {"now": loss_fn}
    trainer = Trainer(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda model, batch: losses["now"](model, batch),
        Plan(shard=shard),
    )
    drawn = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(4, 6, generator=drawn), torch.randn(4, 3, generator=drawn))
        for _ in range(steps)
    ]
    if again is not None:
        with pytest.raises(PlanError, match=r"gradient penalty does.*blocks=\(\).*shard='ddp'"):
            trainer.step(batches[0])
        losses["now"] = again
    for batch in batches:
        trainer.step(batch)
    return {name: value.tolist() for name, value in full_state(model).items()}


def assert_same(found, expected):
    for of_rank, other in zip(found, expected, strict=True):
        for name, values in other.items():
            torch.testing.assert_close(torch.tensor(of_rank[name]), torch.tensor(values))


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_penalty_through_sharded_blocks_is_refused_and_all_go_on(prefetch, reshard):
    options = ShardOptions(strategy="fsdp", prefetch=prefetch, reshard_after_forward=reshard)
    found = ranks.run(trained, 2, penalty, options, 3, plain)
    assert_same(found, ranks.run(trained, 2, plain, "ddp"))


def test_a_penalty_of_a_model_in_one_piece():
    found = ranks.run(trained, 2, penalty, ShardOptions(strategy="fsdp", blocks=()))
    assert_same(found, ranks.run(trained, 2, penalty, "ddp"))


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_gradient_that_is_only_a_value_goes_with_blocks(prefetch):
    options = ShardOptions(strategy="fsdp", prefetch=prefetch)
    found = ranks.run(trained, 2, adversarial, options)
    assert_same(found, ranks.run(trained, 2, adversarial, "ddp"))
