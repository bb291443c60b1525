"""What an optimizer knows of parameters is put back as it was."""

from __future__ import annotations

import torch
from torch import nn

from torchfast.memory.undo import Undo


def test_state_is_put_back_as_it_was():
    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = torch.optim.SGD([first, second, third], lr=1.0, momentum=0.5)
    momentum = torch.ones(3)
    optimizer.state[first] = {"momentum_buffer": momentum, "count": 1}
    optimizer.state[second] = {"momentum_buffer": None}
    undo = Undo(12)
    assert undo.keep(optimizer, [first, second, third])
    momentum.fill_(7.0)
    optimizer.state[first]["count"] = 2
    optimizer.state[first]["more"] = 1
    optimizer.state[second]["momentum_buffer"] = torch.ones(3)
    optimizer.state[third]["momentum_buffer"] = torch.ones(3)
    undo.take_back(optimizer, [first, second, third])
    assert optimizer.state[first].keys() == {"momentum_buffer", "count"}
    assert optimizer.state[first]["momentum_buffer"] is momentum
    assert torch.equal(momentum, torch.ones(3))
    assert optimizer.state[first]["count"] == 1
    assert optimizer.state[second] == {"momentum_buffer": None}
    assert third not in optimizer.state
    optimizer.state[first]["momentum_buffer"] = torch.ones(4)
    assert not undo.keep(optimizer, [first])
