"""What the tests of averaged weights share: torch's own average beside ours, in lockstep."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tape import Twins
from torchfast import EMAOptions
from torchfast._core.compare import differences


def reference(model, ema):
    """Return torch's average with the same rule, to be moved by hand after each update."""
    options = EMAOptions.of(ema)
    rule = get_ema_multi_avg_fn(options.decay)
    if options.warm_up:

        def rule(averages, weights, num_averaged):
            n = int(num_averaged)
            torch._foreach_lerp_(averages, weights, 1 - min(options.decay, (1 + n) / (10 + n)))

    averaged = AveragedModel(model, multi_avg_fn=rule, use_buffers=options.use_buffers)
    for module in averaged.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride():  # expanded, which torch would refuse to write to
                module.register_buffer(name, buffer.clone(memory_format=torch.contiguous_format))
    return averaged


def weights_of(model):
    """Return parameters and buffers, those that are not saved too."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def comparable(reference, own, *, use_buffers):
    """Return both averages. torch rounds averaged integers; ours are those of the model."""
    pair = [weights_of(reference.module), weights_of(own)]
    if use_buffers:
        pair = [{n: t for n, t in side.items() if t.is_floating_point()} for side in pair]
    return pair


class AveragedTwins:
    """A captured step that averages, beside the plain loop and torch's own average."""

    def __init__(self, net, optimizer, *args, ema=0.9, **options):
        self.options = EMAOptions.of(ema)
        self.twins = Twins(net, optimizer, *args, ema=ema, **options)
        self.reference = reference(self.twins.plain, ema)

    def step(self, *group):
        self.twins.step(*group)
        self.reference.update_parameters(self.twins.plain)

    def differences(self):
        own = self.twins.captured.ema_model
        pair = comparable(self.reference, own, use_buffers=self.options.use_buffers)
        return self.twins.differences() + differences(*pair)

    def run(self, batches, accumulate=1):
        """Take steps, each compared bit by bit."""
        for start in range(0, len(batches), accumulate):
            self.step(*batches[start : start + accumulate])
            found = self.differences()
            assert not found, f"at step {self.twins.num_steps}: " + "\n".join(map(str, found[:5]))

    def drifts(self, batches, event=None, at=6):
        """Train on; return whether anything ever differs."""
        for number, batch in enumerate(batches):
            if number == at and event is not None:
                self.twins.both(event)
            self.step(batch)
            if self.differences():
                return True
        assert self.twins.counts[1] > 0  # something was replayed, or it would prove nothing
        return False


class MixedNet(nn.Module):
    """Parameters of three dtypes, and integers that do not train."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16).double()
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4).bfloat16()
        self.scale = nn.Parameter(torch.ones(()))
        self.index = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x):
        self.phase += 1j
        x = torch.relu(self.first(x.double())).float()
        x = torch.relu(self.second(x) * self.scale)
        return self.third(x.bfloat16()).float()[:, self.index]
