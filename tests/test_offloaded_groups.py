"""What an offloaded optimizer keeps in its groups, and says of its state, is as of any other."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from torchfast import Plan, Trainer, UnsupportedOptimizerError
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


def test_a_tensor_is_no_list_of_parameters():
    with pytest.raises(TypeError, match="should be an iterable of Tensors"):
        OffloadedOptimizer(torch.ones(3), SGD)


def test_a_scheduler_that_would_change_nothing_is_refused():
    def scheduled(parameters):
        optimizer = SGD(parameters)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return optimizer

    with pytest.raises(UnsupportedOptimizerError, match=r"with a scheduler that make\(\) builds"):
        OffloadedOptimizer([nn.Parameter(torch.ones(4))], scheduled)


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


def test_names_of_parameters_are_in_the_groups_as_without():
    named = [("weight", nn.Parameter(torch.ones(4))), ("bias", nn.Parameter(torch.ones(2)))]
    for make in (ADAMW, lambda parameters: ADAMW([{"params": list(parameters)}])):
        optimizer, plain = OffloadedOptimizer(named, make), make(named)
        assert optimizer.param_groups == plain.param_groups
        assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_trainer_takes_a_callable_that_groups_or_leaves_out_what_is_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()

    def make(parameters):
        trained = [p for p in parameters if p.requires_grad]
        decayed, rest = ([p for p in trained if (p.dim() > 1) is wide] for wide in (True, False))
        return ADAMW([{"params": rest, "weight_decay": 0.0}, {"params": decayed}])

    plan = Plan(offload="optimizer")
    with Trainer(model, make, lambda m, x: m(x).square().mean(), plan) as trainer:
        losses = [float(trainer.step(torch.ones(2, 4))) for _ in range(4)]
        first, second = (group["params"] for group in trainer.optimizer.param_groups)
        assert first[0] is model[1].bias
        assert second[0] is model[1].weight
    assert losses[-1] < losses[0]
    assert torch.equal(model[0].weight, frozen)


def trained(optimizer, weight, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("change", ["replaced", "taken out", "group"])
def test_parameters_that_are_others_are_refused(change):
    weight, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = OffloadedOptimizer([{"params": [weight]}, {"params": [other]}], SGD)
    trained(optimizer, weight)
    parameters = optimizer.param_groups[0]["params"]
    if change == "replaced":
        parameters[0] = nn.Parameter(torch.zeros(1))
    elif change == "taken out":
        parameters.clear()
    else:
        optimizer.param_groups.pop()
    for act in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="have been replaced or taken out"):
            act()


@pytest.mark.parametrize("make", [SGD, ADAMW, partial(torch.optim.Adagrad, lr=0.1)])
@pytest.mark.parametrize("how", ["all", "one", "emptied"])
def test_state_that_is_taken_away_begins_anew(make, how):
    ends = []
    for build in (make, partial(OffloadedOptimizer, make=make)):
        weight = nn.Parameter(torch.zeros(1))
        optimizer = build([weight])
        trained(optimizer, weight, 3)
        if make.func is not torch.optim.Adagrad:  # which makes its state at the beginning only
            if how == "all":
                optimizer.state.clear()
            elif how == "one":
                del optimizer.state[weight]
            else:
                optimizer.state[weight] = {}
        ends.append(trained(optimizer, weight, 2))
    assert torch.equal(*ends)


def test_a_copy_is_refused():
    optimizer = OffloadedOptimizer([nn.Parameter(torch.ones(1))], SGD)
    for copy_of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an OffloadedOptimizer cannot be copied or pickled"):
            copy_of(optimizer)


@pytest.mark.parametrize(
    "changed", [{"lr": 0.5}, {"betas": (0.1, 0.2)}, {"weight_decay": 0.9}, {"eps": 1.0}]
)
def test_what_is_changed_in_a_group_holds(changed):
    ends = []
    for build in (ADAMW, partial(OffloadedOptimizer, make=ADAMW)):
        weight = nn.Parameter(torch.ones(1))
        optimizer = build([weight])
        trained(optimizer, weight)
        optimizer.param_groups[0].update(changed)
        saved = optimizer.state_dict()["param_groups"][0]  # before the next step
        assert {name: saved[name] for name in changed} == changed
        ends.append(trained(optimizer, weight, 2))
    assert torch.equal(*ends)
