"""Which rank a process is, what it takes, and what is refused."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from parallel_training import Net, batches, fresh, full_state, mean_loss, train
from torchfast import Plan, PlanError, Ranks, ShardOptions, Trainer, start_ranks

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def test_one_process_is_one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = start_ranks()
    assert found == Ranks()
    assert found.is_first
    assert not found.are_many


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(PlanError, match=r"lacks .*MASTER_ADDR.*torchrun"):
        start_ranks()


@pytest.mark.parametrize("shard", ["ddp", "fsdp", "hsdp"])
def test_one_rank_trains_as_without(shard):
    plain, sharded = fresh(), fresh()
    train(plain, batches(0), mean_loss, "adamw", "exact")
    trainer, _ = train(sharded, batches(0), mean_loss, "adamw", Plan(cuda_graph=True, shard=shard))
    assert all(map(torch.equal, plain.state_dict().values(), sharded.state_dict().values()))
    assert type(sharded) is Net
    assert "one rank, so there is nothing to spread" in str(trainer.report())


@pytest.mark.parametrize("shard", ["fsdp", "hsdp"])
def test_an_optimizer_that_is_built_is_refused_on_any_number_of_ranks(shard):
    """Trap 16: it would hold the parameters from before, and train nothing."""
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        PlanError, match=r"replaces the model's parameters.*the SGD given is built already"
    ):
        Trainer(model, optimizer, mean_loss, Plan(shard=shard))
    Trainer(model, optimizer, mean_loss, Plan(shard="ddp")).close()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Plan(shard="zero"), PlanError, "shard must be one of"),
        (lambda: Plan(shard=2), TypeError, r"shard must be None, one of .*, got 2 \(int\)"),
        (lambda: ShardOptions(strategy="dpp"), PlanError, "strategy must be one of.*did you mean"),
        (
            lambda: ShardOptions(prefetch=2),
            PlanError,
            "prefetch=2 has no meaning for strategy='ddp'",
        ),
        (lambda: ShardOptions(strategy="fsdp", bucket_mb=1), PlanError, "bucket_mb=1"),
        (lambda: ShardOptions(bucket_mb=0), ValueError, "bucket_mb must be"),
        (lambda: ShardOptions(strategy="fsdp", blocks="layers"), TypeError, "blocks must be paths"),
        (lambda: ShardOptions(strategy="fsdp", ignored=[3]), TypeError, "ignored must be paths"),
        (lambda: ShardOptions(strategi="ddp"), TypeError, "did you mean 'strategy'"),
        (lambda: start_ranks(timeout_s=0), ValueError, "timeout_s"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "shard", ["ddp", "hsdp", ShardOptions(strategy="fsdp", blocks=(nn.Linear, "a.*"), prefetch=2)]
)
def test_a_plan_goes_through_json(shard):
    plan = Plan(shard=shard)
    if isinstance(shard, str):
        assert Plan.from_json(plan.to_json()) == plan
    else:
        assert '"blocks": ["Linear", "a.*"]' in plan.to_json()
    assert Plan(shard=ShardOptions.of("fsdp")).shard == "fsdp"


def refusals(rank):
    """Return the messages of what only several ranks can refuse."""
    found = []
    for shard, model in (
        (ShardOptions(strategy="hsdp", num_replicas=3), fresh()),
        (ShardOptions(strategy="fsdp", blocks=("layers.*",)), fresh()),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            Trainer(model, SGD, mean_loss, Plan(shard=shard))
        found.append(str(caught.value))
    model = fresh()
    Trainer(model, SGD, mean_loss, Plan(shard="fsdp"))
    with pytest.raises(PlanError) as caught:
        Trainer(model, SGD, mean_loss, Plan(shard="fsdp"))
    return [*found, str(caught.value)]


def test_what_ranks_refuse():
    for messages in ranks.run(refusals):
        assert "num_replicas=3 does not divide the 2 ranks" in messages[0]
        assert "blocks names 'layers.*', which no module of the model matches" in messages[1]
        assert "FSDPNet is sharded already" in messages[2]


def on_meta(rank):
    with torch.device("meta"):
        model = Net()
    options = ShardOptions(strategy="fsdp")
    trainer = Trainer(model, SGD, mean_loss, Plan(shard=options), device="cpu")
    loss = float(trainer.step(batches(rank)[0]))
    rows = model.head.weight.full_tensor()
    assert len(rows.unique(dim=0)) == len(rows), "ranks have filled their parts alike"
    own = nn.Module()
    own.weight = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(PlanError) as caught:
        Trainer(own, SGD, mean_loss, Plan(shard=options), device="cpu")
    filled = ShardOptions(strategy="fsdp", initialize=lambda m: nn.init.constant_(m.weight, 2.0))
    Trainer(own, SGD, mean_loss, Plan(shard=filled), device="cpu")
    return loss, str(caught.value), own.weight.full_tensor().tolist(), own.weight.to_local().numel()


def test_a_model_without_memory_is_sharded_and_then_filled():
    results = ranks.run(on_meta)
    for loss, message, weight, share in results:
        assert 0 < loss < 10
        assert "have no reset_parameters() to fill what they hold: the model (Module)" in message
        assert weight == [2.0, 2.0, 2.0]
        assert share < 3


def meta_net(tied=True):
    with torch.device("meta"):
        model = Net()
        if tied:
            model.head.weight = model.embedding.weight
    return model


def meta_replicas(rank):
    """A tied model without memory, under each strategy; and with a function that fills it."""
    found = {}
    for shard in ("ddp", "fsdp"):
        model = meta_net()
        torch.manual_seed(3 + rank)
        trainer = Trainer(model, SGD, mean_loss, Plan(shard=shard), device="cpu", ema=0.5)
        before = full_state(model)
        losses = [float(trainer.step(batch)) for batch in batches(rank)]
        after = full_state(model)
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        sums = {name: value.double().sum().item() for name, value in after.items()}
        is_tied = model.head.weight is model.embedding.weight
        is_tied_twin = trainer.ema_model.head.weight is trainer.ema_model.embedding.weight
        found[shard] = losses, len(moved) == len(before), sums, is_tied, is_tied_twin
    options = ShardOptions(strategy="fsdp", ignored=("head", "blocks.1"))
    model = meta_net(tied=False)
    torch.manual_seed(3 + rank)
    trainer = Trainer(model, SGD, mean_loss, Plan(shard=options), device="cpu", ema=0.5)
    for batch in batches(rank):
        trainer.step(batch)
    states = full_state(model), full_state(trainer.ema_model)
    found["partly whole"] = [{n: v.tolist() for n, v in state.items()} for state in states]
    model = meta_net()
    options = ShardOptions(initialize=lambda m: [nn.init.constant_(p, 2.0) for p in m.parameters()])
    Trainer(model, SGD, mean_loss, Plan(shard=options), device="cpu")
    found["filled"] = {value for p in model.parameters() for value in p.flatten().tolist()}
    model = meta_net()
    with pytest.raises(PlanError) as caught:
        Trainer(model, SGD(model.parameters()), mean_loss, Plan(shard="ddp"), device="cpu")
    found["built"] = str(caught.value)
    return found


def test_replicas_of_a_model_without_memory_are_filled_alike():
    first, second = ranks.run(meta_replicas)
    for shard in ("ddp", "fsdp"):
        losses, all_moved, sums, is_tied, is_tied_twin = first[shard]
        assert 0 < losses[0] < 20
        assert all_moved
        assert sums == second[shard][2]
        assert is_tied
        assert is_tied_twin
    assert first["partly whole"] == second["partly whole"]
    assert first["filled"] == {2.0}
    assert "gets other parameters with its memory" in first["built"]
    assert "functools.partial(SGD" in first["built"]


def test_a_model_without_memory_and_without_ranks():
    with pytest.raises(PlanError, match=r"Net was built on the meta device.*to_empty"):
        Trainer(meta_net(), SGD, mean_loss, "exact", device="cpu")
    model = meta_net()
    with pytest.raises(PlanError, match="gets other parameters with its memory"):
        Trainer(model, SGD(model.parameters()), mean_loss, Plan(shard="ddp"), device="cpu")
    trainer = Trainer(model, SGD, mean_loss, Plan(shard="ddp"), device="cpu")
    assert model.head.weight is model.embedding.weight
    before = model.head.weight.detach().clone()
    trainer.step(batches(0)[0])
    assert not torch.equal(before, model.head.weight)


def draws(rank):
    torch.manual_seed(5)
    expected = torch.rand(1).item()
    torch.manual_seed(5)
    Trainer(fresh_without_seed(), SGD, mean_loss, Plan(shard="ddp"))
    shared = torch.rand(1).item()
    torch.manual_seed(5 + rank)
    model = fresh_without_seed()
    before = torch.get_rng_state()
    trainer = Trainer(model, SGD, mean_loss, Plan(shard="ddp"))
    kept = torch.equal(before, torch.get_rng_state())
    weights = torch.cat([p.flatten() for p in model.parameters()])
    return expected, shared, kept, weights.sum().item(), "random" in str(trainer.report())


def fresh_without_seed():
    state = torch.get_rng_state()
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(state.sum() % 7)  # another one on each rank, if that was seeded so
    torch.set_rng_state(state)
    return model


def test_ranks_begin_with_one_model_and_draw_numbers_of_their_own():
    (expected, first, kept, weights, told), (_, second, kept_too, weights_too, _) = ranks.run(draws)
    assert first == expected  # as a run without ranks
    assert second != first
    assert kept  # who seeds each rank is left alone
    assert kept_too
    assert weights == weights_too
    assert told


def on_the_host(rank, monkeypatch):
    """Build trainers of a model on the host as where NCCL is all that the script's group has."""
    broadcast = dist.broadcast

    def of_nccl(tensor, src, group=None):
        if group is None:
            raise RuntimeError("No backend type associated with device type cpu")
        return broadcast(tensor, src=src, group=group)

    monkeypatch.setattr(dist, "broadcast", of_nccl)
    found = {}
    for shard in ("ddp", "fsdp"):
        torch.manual_seed(rank)
        model = Net()
        model.register_buffer("turned", torch.randn(3, 2).t())  # not contiguous
        Trainer(model, SGD, mean_loss, Plan(shard=shard))
        found[shard] = full_state(model)
    return found


def test_weights_on_the_host_do_not_need_a_group_of_the_scripts_for_them(monkeypatch):
    first, second = ranks.run(on_the_host, 2, monkeypatch)
    for shard, state in first.items():
        for name, value in state.items():
            assert torch.equal(value, second[shard][name]), (shard, name)


def test_a_script_runs_alone_and_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torchfast\n"
        "from torchfast import Plan, Trainer\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=4)\n"
        "trainer = Trainer(model, lambda p: torch.optim.SGD(p, lr=0.1),\n"
        "                  lambda m, x: m(x).square().mean(), Plan(shard='fsdp'))\n"
        "result = trainer.fit(loader, epochs=1, log_every=1, progress='plain')\n"
        "import sys\n"
        # In one write: the ranks share the stream.
        "sys.stdout.write(f'RANKS {torchfast.start_ranks().world_size} {result.num_steps}\\n')\n"
    )
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert "RANKS 1 8" in alone.stdout, alone.stderr
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    both = subprocess.run([*command, script], capture_output=True, text=True, timeout=240)
    assert both.stdout.count("RANKS 2 4") == 2, both.stderr
    lines = re.findall(r"^step \S+ ", both.stdout + both.stderr, re.MULTILINE)
    assert len(lines) <= 4, "only the first rank prints"
