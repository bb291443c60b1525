"""AdamW with low-bit moments: torchao's numbers, plain state, resume, graphs, plans."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import ranks
from eager_torch import EagerTorch
from tape import Twins, drifts, taped, without_check
from torchfast import (
    LowBitAdamW,
    NonfiniteOptions,
    Plan,
    PlanError,
    Trainer,
)
from torchfast._core.compare import differences

KINDS = ("8bit", "4bit", "fp8")
SHAPES = ((64, 128), (128, 64), (128,), (64, 65))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def loss_fn(model, batch):
    return (model(batch) - batch).square().mean()


def batches(count, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(32, 64, generator=generator).to(dtype) for _ in range(count)]


def train(model, optimizer, data):
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "theirs"), [("8bit", "8bit"), ("4bit", "4bit"), ("fp8", "Fp8")])
def test_the_update_is_torchaos_to_the_bit(kind, theirs, monkeypatch):
    import torchao.optim
    from torchao.optim import adam

    monkeypatch.setattr(adam, "torch", EagerTorch())
    ours, other = net(), net()
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1}
    losses = train(ours, LowBitAdamW(ours.parameters(), state=kind, **options), batches(8))
    reference = getattr(torchao.optim, f"AdamW{theirs}")(other.parameters(), **options)
    assert losses == train(other, reference, batches(8))
    assert differences(other.state_dict(), ours.state_dict()) == []


@pytest.mark.parametrize("kind", [*KINDS, "full"])
def test_it_learns_as_adamw_does(kind):
    model, other = net(), net()
    losses = train(model, LowBitAdamW(model.parameters(), lr=1e-2, state=kind), batches(20))
    plain = train(other, optim.AdamW(other.parameters(), lr=1e-2), batches(20))
    assert losses[-1] == pytest.approx(plain[-1], 1e-5 if kind == "full" else 0.2)
    assert losses[-1] < 0.25 * losses[0]


def test_bf16_weights_move_by_less_than_their_last_digit():
    moved = []
    for rounded in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
        optimizer = LowBitAdamW([weight], lr=1e-4, weight_decay=0.0, stochastic_rounding=rounded)
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved.append(1 - float(weight.detach().float().mean()))
    assert moved[0] == 0  # each step rounds to nothing
    assert moved[1] == pytest.approx(20 * 1e-4, 0.1)


@pytest.mark.parametrize(("kind", "most"), [("8bit", 0.27), ("4bit", 0.145), ("fp8", 0.27)])
def test_what_the_state_takes(kind, most):
    weight = nn.Parameter(torch.zeros(256, 256))
    optimizer = LowBitAdamW([weight], state=kind)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state[weight].values()
    found = sum(t.numel() * t.element_size() for t in state if t.dim())
    assert found < most * 8 * weight.numel()
    assert all(type(t) is torch.Tensor for t in state)
    assert f"{found:,} bytes of state, fp32 takes 524,288" in optimizer.decision().detail


def test_what_is_frozen_is_not_counted_as_state():
    model = net(torch.bfloat16)
    model[0].requires_grad_(False)
    optimizer = LowBitAdamW(model.parameters(), state="full", stochastic_rounding=True)
    train(model, optimizer, batches(1, dtype=torch.bfloat16))
    found = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    detail = optimizer.decision().detail
    assert f"{found:,} bytes of state, fp32 takes {found:,}" in detail
    assert "2 of 2 parameters are bf16 and rounded by chance" in detail


def test_small_and_uneven_tensors_keep_fp32_moments():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = LowBitAdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    coded = ["exp_avg_scale" in optimizer.state[p] for p in parameters]
    assert coded == [True, True, False, False]


# --- hyperparameters -----------------------------------------------------------------------------


def test_a_tensor_as_rate_gives_the_bits_of_the_float():
    model, other = net(), net()
    train(model, LowBitAdamW(model.parameters(), lr=1e-2 / 3), batches(4))
    train(other, LowBitAdamW(other.parameters(), lr=torch.tensor(1e-2 / 3)), batches(4))
    assert differences(model.state_dict(), other.state_dict()) == []


def test_rates_stay_floats_and_are_followed():
    model, other = net(), net()
    scheduled = LowBitAdamW(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(scheduled, 0.5)
    by_hand = LowBitAdamW(other.parameters(), lr=0.1)
    for number, batch in enumerate(batches(4)):
        assert scheduled.param_groups[0]["lr"] == 0.1 * 0.5**number
        by_hand.param_groups[0]["lr"] = 0.1 * 0.5**number
        assert train(model, scheduled, [batch]) == train(other, by_hand, [batch])
        scheduler.step()
    assert differences(model.state_dict(), other.state_dict()) == []


def test_each_group_has_its_own_rate():
    model = net()
    before = copy.deepcopy(model.state_dict())
    groups = [
        {"params": model[0].parameters(), "lr": 0.0, "weight_decay": 0.0},
        {"params": model[2].parameters()},
    ]
    train(model, LowBitAdamW(groups, lr=0.1), batches(2))
    assert {d.key for d in differences(before, model.state_dict())} == {"2.weight", "2.bias"}


@pytest.mark.parametrize("name", ["eps", "betas", "weight_decay"])
def test_each_group_has_its_own_numbers(name):
    values = {"eps": (1e-8, 1e-2), "betas": ((0.9, 0.999), (0.5, 0.6)), "weight_decay": (0.0, 0.5)}

    def updated(kind, **options):
        parameters = [nn.Parameter(torch.full((64, 128), 0.5)) for _ in range(2)]
        pairs = zip(parameters, values[name], strict=True)
        optimizer = kind([{"params": [p], name: value} for p, value in pairs], lr=0.1, **options)
        for size in (1.0, 0.01, 0.3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, size)
            optimizer.step()
        return [float(parameter.detach()[0, 0]) for parameter in parameters]

    found = updated(LowBitAdamW, state="full")
    assert found == pytest.approx(updated(optim.AdamW), rel=1e-5)
    assert found[0] != pytest.approx(found[1], rel=1e-3)


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_loads_without_torchao_and_goes_on_to_the_bit(kind, dtype):
    model = net(dtype)
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2, state=kind)
    train(model, optimizer, batches(3, dtype=dtype))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    losses = train(model, optimizer, batches(3, 2, dtype))
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = net(dtype)
    resumed.load_state_dict(state["model"])
    other = LowBitAdamW(resumed.parameters(), lr=3.0, state=kind)
    kept = copy.deepcopy(state["optimizer"])
    other.load_state_dict(state["optimizer"])
    assert other.param_groups[0]["lr"] == 1e-2
    assert train(resumed, other, batches(3, 2, dtype)) == losses
    assert differences(model.state_dict(), resumed.state_dict()) == []
    # What was loaded is nobody else's: none of it went on with the training.
    assert differences(kept, state["optimizer"]) == []
    assert differences(state["optimizer"]["state"], other.state_dict()["state"]) != []


def test_copies_keep_their_kind():
    model = net()
    optimizer = LowBitAdamW(model.parameters(), state="4bit", stochastic_rounding=True)
    train(model, optimizer, batches(1))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.kind, other.stochastic_rounding) == ("4bit", True)
        assert differences(optimizer.state_dict(), other.state_dict()) == []
        for parameter in other.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        other.step()


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_from_an_adamw_and_goes_back(kind):
    model = net()
    plain = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, plain, batches(5))
    low = LowBitAdamW(model.parameters(), state=kind)
    low.load_state_dict(plain.state_dict())
    assert low.param_groups[0]["lr"] == 1e-2
    assert set(low.param_groups[0]) == {*low.defaults, "params"}
    back = optim.AdamW(model.parameters())
    back.load_state_dict(low.dense_state_dict())
    weight = model[0].weight
    assert float(back.state[weight]["step"]) == 5
    for moment in ("exp_avg", "exp_avg_sq"):
        expected, found = plain.state[weight][moment], back.state[weight][moment]
        gap = (found - expected).abs().max() / expected.abs().max()
        assert 0 < gap < (0.15 if kind == "4bit" else 0.05)
    train(model, back, batches(1))


def test_state_of_other_bits_is_refused():
    model = net()
    low = LowBitAdamW(model.parameters(), state="4bit")
    train(model, low, batches(1))
    with pytest.raises(ValueError, match="saved by other low bits than '8bit'"):
        LowBitAdamW(model.parameters(), state="8bit").load_state_dict(low.state_dict())
    with pytest.raises(ValueError, match="holds moments in low bits, but this LowBitAdamW keeps"):
        LowBitAdamW(model.parameters(), state="full").load_state_dict(low.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_parameters_are_updated_as_whole_ones(kind):
    """Blocks lie within a rank's rows here, so that the parts have the scales of the whole."""

    def rank(number):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = LowBitAdamW(model.parameters(), lr=1e-2, state=kind)
        losses = train(model, optimizer, batches(3))
        saved = copy.deepcopy(optimizer.state_dict())
        losses += train(model, optimizer, batches(2, 2))
        again = LowBitAdamW(model.parameters(), lr=1e-2, state=kind)
        again.load_state_dict(saved)
        state = {
            name: value.full_tensor()
            for name, value in again.state[next(model.parameters())].items()
            if name != "step"
        }
        weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        return losses, state, weights, optimizer.decision().detail

    model = net()
    optimizer = LowBitAdamW(model.parameters(), lr=1e-2, state=kind)
    losses = train(model, optimizer, batches(3))
    state = copy.deepcopy({**optimizer.state[model[0].weight]})
    losses += train(model, optimizer, batches(2, 2))
    for found in ranks.run(rank):
        # The ranks' gradients are added and halved, which rounds in another place.
        assert found[0] == pytest.approx(losses, 1e-4)
        assert found[1]["exp_avg_codes"].dtype == torch.uint8
        assert {n: v.shape for n, v in found[1].items()} == {
            n: v.shape for n, v in state.items() if n != "step"
        }
        assert torch.allclose(found[1]["exp_avg_scale"], state["exp_avg_scale"], rtol=1e-3)
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[2][name], parameter, atol=2e-3)
        assert "fp32 takes 66,304" in found[3]  # a half


# --- in a step -----------------------------------------------------------------------------------


def trainer_of(model, optimizer=None, plan=None, **options):
    optimizer = optimizer or LowBitAdamW(model.parameters(), lr=1e-2)
    return Trainer(model, optimizer, loss_fn, plan or Plan(), **options)


def test_a_step_is_the_plain_loop_to_the_bit():
    model, other = net(), net()
    trainer = trainer_of(model)
    losses = [float(trainer.step(batch)) for batch in batches(5)]
    assert losses == train(other, LowBitAdamW(other.parameters(), lr=1e-2), batches(5))
    assert differences(other.state_dict(), model.state_dict()) == []


@pytest.mark.parametrize("kind", [*KINDS, "full"])
def test_a_graph_holds_the_update(kind, monkeypatch):
    with taped(monkeypatch):
        twins = Twins(
            net,
            partial(LowBitAdamW, lr=1e-2, state=kind),
            loss_fn,
            clip=1.0,
            scheduler=partial(ExponentialLR, gamma=0.7),
        )
        twins.run(batches(8), gradients=False)
    assert twins.counts[1] > 0
    assert "the update of LowBitAdamW can be in the graph as it is" in str(twins.captured.report())


def test_a_counter_on_the_host_would_be_seen(monkeypatch):
    update, counts = LowBitAdamW._update, {}

    def counted_on_host(self, parameter, group, rate):
        counts[parameter] = counts.get(parameter, 0) + 1
        self.state[parameter]["step"].fill_(counts[parameter])
        update(self, parameter, group, rate)

    monkeypatch.setattr(LowBitAdamW, "_update", counted_on_host)
    without_check(monkeypatch)
    with taped(monkeypatch):
        assert drifts(Twins(net, partial(LowBitAdamW, lr=1e-2), loss_fn), batches(8))


def test_a_graph_draws_anew_for_each_rounding(monkeypatch):
    with taped(monkeypatch):
        twins = Twins(
            partial(net, torch.bfloat16),
            partial(LowBitAdamW, lr=1e-3, stochastic_rounding=True),
            loss_fn,
        )
        twins.run(batches(6, dtype=torch.bfloat16), gradients=False)
    assert twins.counts[1] > 0


def test_skipped_updates_change_nothing():
    model = net()
    trainer = trainer_of(model, plan=Plan(nonfinite=NonfiniteOptions()), max_grad_norm=1.0, ema=0.9)
    data = batches(3)
    trainer.step(data[0])
    before = copy.deepcopy((model.state_dict(), trainer.optimizer.state_dict()))
    trainer.step(torch.full_like(data[0], torch.nan))
    assert trainer.num_skipped == 1
    assert differences(before, (model.state_dict(), trainer.optimizer.state_dict())) == []
    assert "undone on the device" in str(trainer.report())
    trainer.step(data[2])
    assert differences(before[0], model.state_dict()) != []


def test_a_checkpoint_goes_on_to_the_bit(tmp_path):
    def run(model, steps, folder):
        trainer = trainer_of(model, partial(optim.AdamW, lr=1e-2), Plan(optimizer="adamw8bit"))
        trainer.fit(batches(8), steps=steps, checkpoint=folder, checkpoint_every=2, resume="auto")
        return trainer

    straight = run(net(), 8, tmp_path / "a")
    run(net(), 4, tmp_path / "b")
    resumed = run(net(), 8, tmp_path / "b")
    assert resumed.num_steps == 8
    expected, found = straight.state_dict(), resumed.state_dict()
    for part in ("model", "optimizer"):
        assert differences(expected[part], found[part]) == []


# --- as a plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_builds_it_in_place_of_an_adamw(kind):
    model, other = net(), net()
    groups = partial(optim.AdamW, lr=1e-2, betas=(0.8, 0.95))
    schedule = partial(OneCycleLR, max_lr=0.1, total_steps=9)
    plan = Plan(optimizer=f"adamw{kind}")
    trainer = trainer_of(model, groups, plan, lr_scheduler=schedule)
    assert type(trainer.optimizer) is LowBitAdamW
    assert trainer.optimizer.kind == kind
    losses = [float(trainer.step(batch)) for batch in batches(4)]
    optimizer = LowBitAdamW(other.parameters(), lr=1e-2, betas=(0.8, 0.95), state=kind)
    scheduler = schedule(optimizer)
    for batch, loss in zip(batches(4), losses, strict=True):
        assert train(other, optimizer, [batch]) == [loss]
        scheduler.step()
    assert f"AdamW with moments in {kind}" in str(trainer.report())
    assert "applied: LowBitAdamW, with the groups" in str(trainer.report())


def test_a_built_optimizer_is_refused_where_another_is_to_be_built():
    model = net()
    plan = Plan(optimizer="adamw8bit")
    with pytest.raises(PlanError, match=r"functools\.partial\(AdamW, lr=\.\.\.\)"):
        trainer_of(model, optim.AdamW(model.parameters()), plan)
    with pytest.raises(PlanError, match="but the optimizer is SGD"):
        trainer_of(model, partial(optim.SGD, lr=0.1), plan)
    with pytest.raises(PlanError, match="has amsgrad=True"):
        trainer_of(model, partial(optim.AdamW, amsgrad=True), plan)
    with pytest.raises(TypeError, match="got the class AdamW"):
        trainer_of(model, optim.AdamW, plan)
    own = LowBitAdamW(model.parameters())
    assert trainer_of(model, own, plan).optimizer is own


def test_fast_takes_it_without_a_warning(caplog):
    trainer = trainer_of(net(), plan="fast")
    assert not caplog.records
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"state": "2bit"}, "state must be one of .*'8bit'"),
        ({"lr": -1.0}, "lr must be >= 0"),
        ({"betas": (0.9, 1.0)}, "betas must be at least 0 and below 1"),
        ({"stochastic_rounding": 1}, "stochastic_rounding must be True or False"),
        ({"bits": 8}, "no argument 'bits'"),
    ],
)
def test_bad_options_are_refused(options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        LowBitAdamW(net().parameters(), **options)


def test_parameters_and_gradients_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"of 32 bits or fewer, got torch\.complex64"):
        LowBitAdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    weight = nn.Parameter(torch.zeros(4, 2))
    nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="takes no sparse gradients"):
        LowBitAdamW([weight]).step()
