"""Training as it is and in a graph, on the tape: what comes out has to be the same."""

from __future__ import annotations

import torch

from models import DropoutNet, make_batches, mean_loss
from torchfast import Plan, TrainStep
from torchfast._core.compare import differences


def trained(
    loss_fn,
    batches,
    optimizer,
    *,
    net=DropoutNet,
    cuda_graph=True,
    scheduler=None,
    started=lambda step: None,
    before=lambda number: None,
):
    """Train; return the step, and all that it has left.

    Args:
        loss_fn: Of the model and a batch.
        batches: One for each step, or how many there are to be.
        optimizer: Makes the optimizer of the model's parameters.
        net: Makes the model.
        cuda_graph: Whether steps are captured.
        scheduler: Makes the schedule of the optimizer, if there is one.
        started: Is given the step before the first batch.
        before: Is told the number of each batch before it is trained on.
    """
    torch.manual_seed(0)
    plan = Plan(cuda_graph=cuda_graph)
    step = TrainStep(net(), optimizer, loss_fn, plan, lr_scheduler=scheduler)
    started(step)
    torch.manual_seed(1)
    losses = []
    for number, batch in enumerate(make_batches(batches) if isinstance(batches, int) else batches):
        before(number)
        losses.append(step(batch))
    return step, [losses, step.model.state_dict(), step.optimizer.state_dict()]


def alike(train):
    """Train both ways; return the captured step, which must have trained as the other."""
    _, expected = train(cuda_graph=False)
    step, found = train(cuda_graph=True)
    assert not differences(expected, found)
    return step


def own_step(model, optimizer):
    """Return a step of the user's own, which reaches both by its arguments' defaults."""

    def step(batch, model=model, optimizer=optimizer):
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
