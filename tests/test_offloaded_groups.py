"""What an offloaded optimizer keeps in its groups, and says of its state, is as of any other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from torchfast.memory import OffloadedOptimizer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.1)


def test_a_group_that_is_refused_is_not_there():
    weight = nn.Parameter(torch.ones(4))
    optimizer = OffloadedOptimizer([weight], SGD)

    def refuse(group):
        raise ValueError("not this one")

    optimizer._inner.add_param_group = refuse
    with pytest.raises(ValueError, match="not this one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    weight.grad = torch.ones(4)
    optimizer.step()
    assert float(weight.detach()[0]) == pytest.approx(0.9)


def test_groups_have_what_is_loaded_and_no_more():
    weight = nn.Parameter(torch.ones(4))
    optimizer, plain = OffloadedOptimizer([weight], ADAMW), ADAMW([weight])
    for each in (optimizer, plain):
        saved = each.state_dict()
        each.param_groups[0]["mine"] = 3
        each.load_state_dict(saved)
        assert "mine" not in each.param_groups[0]
        each.param_groups[0]["mine"] = 4
        assert each.state_dict()["param_groups"][0]["mine"] == 4
        del each.param_groups[0]["mine"]
        assert "mine" not in each.state_dict()["param_groups"][0]


def test_hooks_of_the_state_run_as_those_of_any_optimizer():
    weight = nn.Parameter(torch.ones(4))
    for optimizer in (OffloadedOptimizer([weight], SGD), SGD([weight])):
        seen = []
        optimizer.register_state_dict_pre_hook(seen.append)
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        optimizer.register_state_dict_post_hook(lambda _, state: state.update(also=2))
        state = optimizer.state_dict()
        assert (state["mine"], state["also"]) == (1, 2)
        assert seen == [optimizer]
