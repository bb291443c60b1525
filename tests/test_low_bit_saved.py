"""State that a LowBitAdamW takes over goes on as it was, or is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn, optim

from eager_torch import EagerTorch
from torchfast import LowBitAdamW, LowBitOptions, Plan, PlanError, StateMismatchError, Trainer
from torchfast._core.compare import differences

KINDS = ("8bit", "4bit", "fp8", "full")


def stepped(kind, *, steps=2, **options):
    """Return a weight that an optimizer of a kind has updated, and the optimizer."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = kind([weight], lr=1e-2, **options)
    for _ in range(steps):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    return weight, optimizer


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_another_kind_are_no_codes_of_this_one(kind, other):
    """Those of 8 bits and of float8 have the same shapes and dtypes, and other values."""
    weight, saved = stepped(LowBitAdamW, state=kind)
    low = LowBitAdamW([weight], state=other)
    if other not in (kind, "full") and kind != "full":
        with pytest.raises(ValueError, match=f"saved by other low bits than '{other}': by '{kind}"):
            low.load_state_dict(saved.state_dict())
        return
    if other == "full" and kind != "full":
        with pytest.raises(ValueError, match="but this LowBitAdamW keeps them in 'full'"):
            low.load_state_dict(saved.state_dict())
        return
    low.load_state_dict(saved.state_dict())
    expected, found = (o.dense_state_dict()["state"][0] for o in (saved, low))
    gap = (found["exp_avg"] - expected["exp_avg"]).abs().max() / expected["exp_avg"].abs().max()
    assert gap < 0.15


def test_small_tensors_go_from_any_kind_to_any_other():
    weight = nn.Parameter(torch.randn(8))
    saved, low = (LowBitAdamW([weight], state=kind) for kind in ("8bit", "fp8"))
    weight.grad = torch.ones(8)
    saved.step()
    low.load_state_dict(saved.state_dict())
    assert torch.equal(low.state[weight]["exp_avg"], saved.state[weight]["exp_avg"])
    # What it is now is what it says.
    assert low.param_groups[0]["state_kind"] == "fp8"


def test_an_adamw_is_given_no_word_that_it_does_not_know():
    weight, low = stepped(LowBitAdamW)
    plain = optim.AdamW([weight])
    plain.load_state_dict(low.dense_state_dict())
    assert set(plain.param_groups[0]) == set(optim.AdamW([weight]).param_groups[0])


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (optim.AdamW, {"maximize": True}, "is of one with maximize=True"),
        (optim.AdamW, {"amsgrad": True}, "is of one with amsgrad=True"),
        (optim.Adam, {"weight_decay": 0.1}, "weight decay within the gradient, as Adam has it"),
        (optim.SGD, {"momentum": 0.9}, r"has no 'step' but \['momentum_buffer'\]"),
        (optim.RMSprop, {}, r"has no 'exp_avg' but \['square_avg', 'step'\]"),
        (optim.Adamax, {}, r"has no 'exp_avg_sq' but \['exp_avg', 'exp_inf', 'step'\]"),
        (optim.NAdam, {}, "is of one with mu_product, which LowBitAdamW has not"),
        (optim.SGD, {}, r"has no 'betas' but \['dampening', 'differentiable'"),
        (optim.RAdam, {}, "is of one with groups without amsgrad, as RAdam and NAdam have them"),
    ],
)
def test_state_of_what_trains_otherwise_is_refused(kind, options, message):
    weight, other = stepped(kind, **options)
    low = LowBitAdamW([weight], lr=0.5)
    with pytest.raises(ValueError, match=message):
        low.load_state_dict(other.state_dict())
    # Nothing of it was taken.
    assert low.param_groups[0]["lr"] == 0.5
    assert not low.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, _: state.update(projector=torch.ones(2)), "is of one with projector, which"),
        (lambda _, group: group.pop("weight_decay"), "has no 'weight_decay' but "),
        (lambda state, _: state.update(max_exp_avg_sq=torch.ones(64, 128)), None),
        (lambda _, group: group.update(rank=4), None),
    ],
)
def test_what_a_state_has_besides_is_not_dropped_unsaid(change, message):
    weight, adamw = stepped(optim.AdamW)
    state = copy.deepcopy(adamw.state_dict())
    change(state["state"][0], state["param_groups"][0])
    low = LowBitAdamW([weight])
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        low.load_state_dict(state)
    assert bool(low.state) is (message is None)


def test_adam_without_weight_decay_is_an_adamw_without():
    weight, adam = stepped(optim.Adam)
    low = LowBitAdamW([weight])
    low.load_state_dict(adam.state_dict())
    assert low.param_groups[0]["weight_decay"] == 0
    assert float(low.state[weight]["step"]) == 2


@pytest.mark.parametrize(("name", "kind"), [("AdamW8bit", "8bit"), ("AdamWFp8", "fp8")])
def test_state_of_torchao_is_taken_over(name, kind, monkeypatch):
    import torchao.optim
    from torchao.optim import adam

    monkeypatch.setattr(adam, "torch", EagerTorch())
    weight, theirs = stepped(getattr(torchao.optim, name))
    low = LowBitAdamW([weight], state=kind)
    low.load_state_dict(theirs.state_dict())
    moments = low.dense_state_dict()["state"][0]
    for moment in ("exp_avg", "exp_avg_sq"):
        expected = theirs.state[weight][moment].dequantize()
        torch.testing.assert_close(moments[moment], expected, rtol=0.02, atol=1e-6)
    assert type(low.state[weight]["exp_avg_codes"]) is torch.Tensor
    assert float(low.state[weight]["step"]) == 2


@pytest.mark.parametrize("betas", [0.9, (0.9,), None])
def test_betas_are_two(betas):
    with pytest.raises(TypeError, match=r"betas must be two numbers, as \(0\.9, 0\.999\), got "):
        LowBitAdamW([nn.Parameter(torch.ones(2))], betas=betas)


def test_codes_are_no_moments_to_an_adamw():
    weight, low = stepped(LowBitAdamW)
    plain = optim.AdamW([weight])
    plain.load_state_dict(low.state_dict())
    weight.grad = torch.ones_like(weight)
    with pytest.raises(KeyError, match="exp_avg"):
        plain.step()


def test_what_is_refused_leaves_the_optimizer_as_it_was():
    _, saved = stepped(LowBitAdamW)
    weight, low = stepped(LowBitAdamW, state="full")
    low.param_groups[0]["lr"] = 0.5
    expected = copy.deepcopy(low.state_dict())
    with pytest.raises(ValueError, match="but this LowBitAdamW keeps them in 'full'"):
        low.load_state_dict(saved.state_dict())
    assert not differences(expected, low.state_dict())
    assert low.param_groups[0]["lr"] == 0.5
    assert low.state[weight]["exp_avg"].dtype == torch.float32


def test_shapes_in_another_order_are_told():
    first, second = nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(64, 64))
    saved, low = LowBitAdamW([first, second]), LowBitAdamW([second, first])
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    saved.step()
    with pytest.raises(ValueError, match=r"or of parameters in another order: .*\(64, 64\)"):
        low.load_state_dict(saved.state_dict())
    assert not low.state


def test_codes_of_a_parameter_that_has_none_are_told():
    first, second = nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(64))
    saved, low = LowBitAdamW([first, second]), LowBitAdamW([second, first])
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    saved.step()
    with pytest.raises(
        ValueError, match=r"in another order: .* of shape \(64,\) has none, but fp32"
    ):
        low.load_state_dict(saved.state_dict())


def test_what_a_hook_makes_of_a_state_is_loaded():
    weight, saved = stepped(LowBitAdamW)
    low = LowBitAdamW([weight])

    def later(_, state_dict):
        states = {k: {**v, "step": torch.tensor(77.0)} for k, v in state_dict["state"].items()}
        return {**state_dict, "state": states}

    low.register_load_state_dict_pre_hook(later)
    low.load_state_dict(saved.state_dict())
    assert float(low.state[weight]["step"]) == 77
    assert len(low._optimizer_load_state_dict_pre_hooks) == 1


def test_a_trainer_goes_on_from_a_checkpoint_of_an_adamw():
    def trained(plan):
        torch.manual_seed(0)
        model = nn.Linear(64, 128)
        return Trainer(model, partial(optim.AdamW, lr=1e-3), square_loss, plan)

    first, then = trained(Plan()), trained(Plan(optimizer="adamw8bit"))
    first.step(torch.randn(4, 64))
    then.load_state_dict(copy.deepcopy(first.state_dict()))
    assert float(then.optimizer.state[then.model.weight]["step"]) == 1
    sgd = Trainer(nn.Linear(64, 128), partial(optim.SGD, lr=0.1, momentum=0.9), square_loss)
    sgd.step(torch.randn(4, 64))
    expected = copy.deepcopy(then.state_dict())
    with pytest.raises(StateMismatchError, match="it is not that of an AdamW"):
        then.load_state_dict(sgd.state_dict())
    assert not differences(expected, then.state_dict())


ADAMW = partial(optim.AdamW, lr=1e-3)


def small(plan, make=ADAMW):
    torch.manual_seed(0)
    return Trainer(nn.Linear(64, 128), make, square_loss, plan)


@pytest.mark.parametrize("offload", [None, "optimizer"])
@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        ("adamw8bit", "adamwfp8", "by other low bits than 'fp8': by '8bit'"),
        ("adamw4bit", LowBitOptions(state="full"), "but this LowBitAdamW keeps them in 'full'"),
    ],
)
def test_codes_that_do_not_fit_change_nothing_of_a_trainer(saved, other, message, offload):
    first, then = small(Plan(optimizer=saved)), small(Plan(optimizer=other, offload=offload))
    first.step(torch.randn(4, 64))
    expected = copy.deepcopy(then.state_dict())
    with pytest.raises(StateMismatchError, match=message):
        then.load_state_dict(first.state_dict())
    assert not differences(expected, then.state_dict())


@pytest.mark.parametrize("make", [optim.SGD, optim.RMSprop])
def test_state_of_others_is_refused_behind_offloading_as_without(make):
    first = small(Plan(), partial(make, lr=0.1, momentum=0.9))
    first.step(torch.randn(4, 64))
    said = []
    for offload in (None, "optimizer"):
        for optimizer in ("adamw8bit", "as_given"):
            with pytest.raises(StateMismatchError) as caught:
                small(Plan(optimizer=optimizer, offload=offload)).load_state_dict(
                    first.state_dict()
                )
            said.append(str(caught.value))
    assert said[:2] == said[2:]


def test_low_bit_state_behind_offloading_is_loaded_and_told_as_without():
    first = small(Plan())
    first.step(torch.randn(4, 64))
    low = [small(Plan(optimizer="adamw8bit", offload=o)) for o in (None, "optimizer")]
    for trainer in low:
        trainer.load_state_dict(copy.deepcopy(first.state_dict()))
        for seed in range(3):
            trainer.step(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)))
    states = [trainer.state_dict() for trainer in low]
    for part in ("model", "optimizer"):
        assert not differences(*(state[part] for state in states))
    for lever in ("optimizer", "optimizer state"):
        with_, without = (
            [d for d in trainer.report().decisions if d.lever == lever] for trainer in low
        )
        assert with_ == without
        assert with_


def square_loss(model, x):
    return model(x).square().mean()


def _hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _scheduled(optimizer):
    optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def _own(optimizer):
    optimizer.step = partial(type(optimizer).step, optimizer)
    return optimizer


def _stepped(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("how", "what"),
    [
        (_hooked, "hooks"),
        (_scheduled, "a scheduler"),
        (_stepped, "state"),
        (_own, r"a step\(\) of its own"),
    ],
)
def test_what_another_optimizer_would_lose_is_refused(how, what):
    build = lambda p: how(optim.AdamW(p, lr=1e-3))  # noqa: E731
    with pytest.raises(PlanError, match=f"this AdamW, which has {what}"):
        Trainer(nn.Linear(64, 128), build, square_loss, Plan(optimizer="adamw8bit"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr must be >= 0, got -1\.0"),
        ({"lr": torch.tensor(-1.0)}, "lr must be >= 0"),
        ({"betas": (2.0, 3.0)}, "betas must be at least 0"),
        ({"eps": -1.0}, "eps must be >= 0"),
        ({"maximize": True}, "LowBitAdamW does not do maximize=True, which a group asks for"),
        ({"amsgrad": True}, "LowBitAdamW does not do amsgrad=True"),
    ],
)
def test_numbers_of_every_group_are_checked(options, message):
    weights = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    with pytest.raises(ValueError, match=message):
        LowBitAdamW([{"params": weights, **options}])
    if not {"maximize", "amsgrad"} & set(options):  # which the constructor does not take at all
        with pytest.raises(ValueError, match=message):
            LowBitAdamW(weights, **options)
    low = LowBitAdamW(weights[:1])
    with pytest.raises(ValueError, match=message):
        low.add_param_group({"params": weights[1:], **options})
    whole = nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ValueError, match=r"of 32 bits or fewer, got torch\.int32"):
        low.add_param_group({"params": [whole]})
    assert len(low.param_groups) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_moments_of_parameters_in_another_order_are_refused(kind):
    """As many values as the other has, which would be coded without a word."""
    weights = [nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(128, 64))]
    adamw = optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    adamw.step()
    low = LowBitAdamW(weights[::-1], state=kind)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(64, 128\), and its parameter \(128"):
        low.load_state_dict(adamw.state_dict())
    assert not low.state
    LowBitAdamW(weights, state=kind).load_state_dict(adamw.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_was_only_read_is_none(kind):
    _, low = stepped(LowBitAdamW, state=kind)
    other = nn.Parameter(torch.randn(4))
    low.add_param_group({"params": [other]})
    assert not low.state[other]  # which makes an empty one
    assert list(low.dense_state_dict()["state"]) == [0]


def test_parameters_that_an_update_in_fp32_would_round_are_refused():
    low = LowBitAdamW([nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match=r"of 32 bits or fewer, got torch\.float64"):
        low.add_param_group({"params": [nn.Parameter(torch.ones(4, dtype=torch.float64))]})
    assert len(low.param_groups) == 1
