"""bf16 weights that are rounded by chance, as a plan asks for it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

import ranks
from torchfast import LowBitAdamW, LowBitOptions, Plan, PlanError, ShardOptions, Trainer

ROUNDED = LowBitOptions(state="full", stochastic_rounding=True)
ADAMW = partial(optim.AdamW, lr=1e-4, weight_decay=0.0)


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def loss_fn(model, batch):
    return (model(batch) - batch).float().square().mean()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 64, generator=generator).to(torch.bfloat16) for _ in range(count)]


def distance(model):
    weights = zip(model.parameters(), net().parameters(), strict=True)
    return float(sum((a.detach() - b.detach()).float().abs().sum() for a, b in weights))


@pytest.mark.parametrize("state", ["full", "8bit", "fp8"])
def test_a_plan_trains_as_the_optimizer_written_by_hand(state):
    options = LowBitOptions(state=state, stochastic_rounding=True)
    trainer = Trainer(net(), ADAMW, loss_fn, Plan(optimizer=options))
    torch.manual_seed(7)
    losses = [float(trainer.step(batch)) for batch in batches(6)]
    model = net()
    optimizer = LowBitAdamW(
        model.parameters(), lr=1e-4, weight_decay=0.0, state=state, stochastic_rounding=True
    )
    torch.manual_seed(7)
    for batch, found in zip(batches(6), losses, strict=True):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == found
    parameters = zip(model.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in parameters)
    report = str(trainer.report())
    assert f"AdamW with moments in {state}" in report
    assert "4 of 4 parameters are bf16 and rounded by chance" in report


def test_small_updates_add_up_only_where_they_are_rounded_by_chance():
    moved = {}
    for name, plan in {
        "rounded": Plan(optimizer=ROUNDED),
        "not": Plan(optimizer=LowBitOptions(state="full")),
    }.items():
        trainer = Trainer(net(), partial(optim.AdamW, lr=1e-6, weight_decay=0.0), loss_fn, plan)
        for batch in batches(20):
            trainer.step(batch)
        moved[name] = distance(trainer.model)
        assert ("rounded by chance" in str(trainer.report())) == (name == "rounded")
    # 20 steps of 1e-6 for each of 16,576 parameters, the first ones all in one direction.
    assert moved["rounded"] == pytest.approx(20e-6 * 16576, rel=0.5)
    assert moved["not"] < 0.2 * moved["rounded"]


def test_weights_that_are_not_bf16_are_refused():
    with pytest.raises(PlanError, match=r"rounds bf16 weights, .* has none, but float32; train"):
        Trainer(net(torch.float32), ADAMW, loss_fn, Plan(optimizer=ROUNDED))
    model = net(torch.float32)
    own = LowBitAdamW(model.parameters(), state="full", stochastic_rounding=True)
    with pytest.raises(PlanError, match="rounds bf16 weights"):
        Trainer(model, own, loss_fn, Plan(optimizer=ROUNDED))
    mixed = net()
    mixed[0].float()
    Trainer(mixed, ADAMW, loss_fn, Plan(optimizer=ROUNDED))


def test_an_optimizer_that_is_built_must_round_too():
    model = net()
    own = LowBitAdamW(model.parameters(), state="full", stochastic_rounding=True)
    assert Trainer(model, own, loss_fn, Plan(optimizer=ROUNDED)).optimizer is own
    plain = LowBitAdamW(model.parameters(), state="full")
    with pytest.raises(PlanError, match=r"LowBitAdamW\(\.\.\., state='full', stochastic_rounding"):
        Trainer(model, plain, loss_fn, Plan(optimizer=ROUNDED))
    compiled = ROUNDED.__class__(state="full", compiled=False)
    with pytest.raises(PlanError, match=r"optimizer=LowBitOptions\(state='full', compiled=False\)"):
        Trainer(model, plain, loss_fn, Plan(optimizer=compiled))


@pytest.mark.parametrize(
    ("built", "wanted", "message"),
    [
        ({}, {"state": "4bit"}, "has state='8bit', and state='4bit' is asked for"),
        (
            {"state": "4bit"},
            {"state": "full", "stochastic_rounding": True},
            "has state='4bit', stochastic_rounding=False, and state='full', stochastic_rounding=T",
        ),
        ({"compiled": True}, {"compiled": False}, "has compiled=True, and compiled=False is asked"),
    ],
)
def test_an_optimizer_that_the_callable_builds_must_do_what_the_plan_says(built, wanted, message):
    with pytest.raises(PlanError, match=message):
        Trainer(
            net(), partial(LowBitAdamW, **built), loss_fn, Plan(optimizer=LowBitOptions(**wanted))
        )
    low = LowBitAdamW(net().parameters(), **built)
    with pytest.raises(PlanError, match=message):
        LowBitAdamW.like(low, **wanted)


@pytest.mark.parametrize("wanted", [{}, {"state": "8bit"}, {"stochastic_rounding": False}])
def test_an_optimizer_that_the_callable_builds_may_do_more(wanted):
    make = partial(LowBitAdamW, stochastic_rounding=True, compiled=False)
    optimizer = Trainer(net(), make, loss_fn, Plan(optimizer=LowBitOptions(**wanted))).optimizer
    assert (optimizer.stochastic_rounding, optimizer.compiled) == (True, False)
    assert LowBitAdamW.like(optimizer, **wanted) is optimizer


def test_options_are_one_way_to_write_a_plan():
    assert Plan(optimizer=LowBitOptions()) == Plan(optimizer="adamw8bit")
    assert Plan(optimizer=LowBitOptions(state="fp8")).optimizer == "adamwfp8"
    plan = Plan(optimizer=ROUNDED)
    assert repr(plan) == ("Plan(optimizer=LowBitOptions(state='full', stochastic_rounding=True))")
    assert plan.to_json() == '{"optimizer": {"state": "full", "stochastic_rounding": true}}'
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)
    for text in ('{"optimizer": {"state": "2bit"}}', '{"optimizer": {"stochastic": true}}'):
        with pytest.raises(PlanError, match="not a plan in JSON"):
            Plan.from_json(text)
    with pytest.raises(PlanError, match="state must be one of"):
        LowBitOptions(state="2bit")
    with pytest.raises(TypeError, match="compiled must be True or False"):
        LowBitOptions(compiled=1)


@pytest.mark.parametrize("shard", ["ddp", "hsdp"])
def test_replicas_that_would_drift_apart_are_refused(shard):
    def rank(number):
        model = net()
        own = LowBitAdamW(model.parameters(), state="full", stochastic_rounding=True)
        said = []
        for source, plan in ((ADAMW, {"optimizer": ROUNDED}), (own, {})):
            if shard == "hsdp" and source is own:
                continue  # which refuses every optimizer that is built
            with pytest.raises(PlanError) as caught:
                Trainer(model, source, loss_fn, Plan(shard=shard, **plan))
            said.append(str(caught.value))
        return said

    for said in ranks.run(rank):
        assert all(f"stochastic rounding does not go with shard='{shard}'" in s for s in said)
        assert said


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("how", ["ddp", "DistributedDataParallel", "mesh"])
def test_replicas_are_found_behind_offloading_and_where_the_plan_has_not_made_them(
    how, is_offloaded
):
    def rank(number):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, offload = net(), "optimizer" if is_offloaded else None
        if how == "DistributedDataParallel":
            model = nn.parallel.DistributedDataParallel(model)
        elif how == "mesh":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))
        plan = Plan(optimizer=ROUNDED, offload=offload, shard="ddp" if how == "ddp" else None)
        with pytest.raises(PlanError, match="stochastic rounding does not go with"):
            Trainer(model, ADAMW, loss_fn, plan)

    ranks.run(rank)


def test_what_a_mesh_shards_and_replicas_in_fp32_are_taken_as_they_are():
    def rank(number):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sharded = net()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        # Of bf16 there is only what the ranks do not have in common.
        apart = nn.Sequential(nn.Linear(64, 64), net()[2:])
        apart[0].to(torch.float32)
        names = [name for name, p in apart.named_parameters() if p.dtype == torch.bfloat16]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            apart, names
        )
        for model in (sharded, nn.parallel.DistributedDataParallel(apart)):
            Trainer(model, ADAMW, loss_fn, Plan(optimizer=ROUNDED)).close()

    ranks.run(rank)


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_shards_leave_whole_would_drift_apart_and_is_refused(by_hand):
    def rank(number):
        model = net()
        shard = ShardOptions(strategy="fsdp", ignored=("0",))
        plan = Plan(shard=shard) if by_hand else Plan(optimizer=ROUNDED, shard=shard)
        own = partial(LowBitAdamW, state="full", stochastic_rounding=True)
        with pytest.raises(PlanError, match="parameters that 'fsdp' leaves whole"):
            Trainer(model, own if by_hand else ADAMW, loss_fn, plan)

    ranks.run(rank)


def test_replicas_in_fp32_are_not_rounded_and_not_refused():
    def rank(number):
        model = net().float()
        own = LowBitAdamW(model.parameters(), state="full", stochastic_rounding=True)
        Trainer(model, own, loss_fn, Plan(shard="ddp")).close()

    ranks.run(rank)


def test_shards_are_rounded_each_by_the_rank_that_has_them():
    def rank(number):
        plan = Plan(optimizer=ROUNDED, shard="fsdp")
        trainer = Trainer(net(), partial(ADAMW, lr=1e-3), loss_fn, plan)
        data = batches(1) * 20
        losses = [float(trainer.step(batch)) for batch in data]
        whole = [p.full_tensor() for p in trainer.model.parameters()]
        return losses, [w.float().tolist() for w in whole]

    (losses, weights), (_, others) = ranks.run(rank)
    assert losses[-1] < 0.9 * losses[0]
    assert weights == others
