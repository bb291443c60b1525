"""A small model, its losses, optimizers and batches, for training on two ranks and on one."""

import io

import torch
import torch.distributed.fsdp  # here, and not in each of the forked ranks
import torch.distributed.tensor
from torch import nn
from torch.nn import functional as F

from torchfast import MicroBatches, Trainer

STEPS = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=8, classes=7):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, classes, bias=False)

    def hidden(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def mean_loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def leaving_out(at, step):
    """Return a mean loss with which one block is left out in one call."""
    steps = []

    def loss_fn(model, batch):
        tokens, targets = batch
        steps.append(batch)
        x = model.embedding(tokens)
        for number, block in enumerate(model.blocks):
            if not (number == at and len(steps) == step):
                x = block(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())

    return loss_fn, steps


def summed_loss(model, batch):
    tokens, targets = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, {"first": tokens.float().mean()}, targets.numel()


def inner_loss(model, batch):
    """Never calls the model itself: a method of it, and a weight."""
    tokens, targets = batch
    logits = F.linear(model.hidden(tokens), model.head.weight)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def twice_loss(model, batch):
    tokens, targets = batch
    both = model(tokens) + model(targets)
    return both.square().mean()


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, foreach=False),
}


def batches(rank, *, accumulate=1, lengths=(5, 5)):
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        of_ranks = [
            [
                torch.randint(0, 7, (2, 4, lengths[r]), generator=generator)
                for _ in range(accumulate)
            ]
            for r in range(2)
        ]
        mine = of_ranks[rank] if rank is not None else of_ranks[0] + of_ranks[1]
        group = [(pair[0], pair[1]) for pair in mine]
        found.append(group[0] if len(group) == 1 else MicroBatches(group))
    return found


class Own(list):
    """Batches of one rank alone, which are not to be dealt out."""

    is_sharded = True


def fresh(width=8):
    torch.manual_seed(0)
    return Net(width)


def train(model, loader, loss_fn, optimizer, plan, **options):
    torch.manual_seed(1)
    trainer = Trainer(model, OPTIMIZERS[optimizer], loss_fn, plan, **options)
    losses = [trainer.step(batch) for batch in loader]
    return trainer, torch.stack(losses)


def full_state(model):
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


def packed(value):
    """As bytes: tensors would be sent by files that end with the process."""
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()
