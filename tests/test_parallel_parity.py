"""Training on two ranks against training on one with the batches of both."""

import io
import re
import traceback

import pytest
import torch
import torch.distributed as dist

import ranks
from parallel_training import (
    Block,
    batches,
    fresh,
    full_state,
    inner_loss,
    mean_loss,
    packed,
    summed_loss,
    train,
    twice_loss,
)
from torchfast import Plan, ShardOptions

# Cases by name: the strategy or the whole plan, and how one rank would train the same.
CASES = {
    **{
        f"{shard} {optimizer}": {"shard": shard, "optimizer": optimizer, "max_grad_norm": 0.5}
        for shard in ("ddp", "fsdp", "hsdp")
        for optimizer in ("adamw", "sgd")
    },
    **{
        f"fsdp {name}": {"shard": "fsdp", "optimizer": name}
        for name in ("fused", "adagrad", "rmsprop")
    },
    **{
        f"{shard} {loss_fn.__name__}": {"shard": shard, "loss_fn": loss_fn}
        for shard in ("ddp", "fsdp")
        for loss_fn in (inner_loss, twice_loss)
    },
    **{
        f"{shard} accumulate": {"shard": shard, "accumulate": 3, "max_grad_norm": 0.5}
        for shard in ("ddp", "fsdp")
    },
    **{
        f"{shard} weights": {
            "shard": shard,
            "loss_fn": summed_loss,
            "lengths": (3, 9),
            "accumulate": 2,
            "max_grad_norm": 0.5,
        }
        for shard in ("ddp", "fsdp")
    },
    "fsdp kept whole": {"shard": ShardOptions(strategy="fsdp", reshard_after_forward=False)},
    "fsdp prefetch 2": {"shard": ShardOptions(strategy="fsdp", prefetch=2)},
    "fsdp in one piece": {"shard": ShardOptions(strategy="fsdp", blocks=())},
    "fsdp named blocks": {"shard": ShardOptions(strategy="fsdp", blocks=(Block, "head"))},
    "fsdp offload": {"shard": ShardOptions(strategy="fsdp", offload=True)},
    "hsdp one replica": {"shard": ShardOptions(strategy="hsdp", num_replicas=1)},
    "hsdp two replicas": {"shard": ShardOptions(strategy="hsdp", num_replicas=2)},
    "ddp measured": {"shard": ShardOptions(bucket_mb="auto"), "max_grad_norm": 0.5},
    "fsdp measured": {"shard": ShardOptions(strategy="fsdp", prefetch="auto")},
    "ddp small buckets": {"shard": ShardOptions(strategy="ddp", bucket_mb=0.001)},
}


def on_two_ranks(shard, loss_fn=mean_loss, optimizer="adamw", *, lengths=(5, 5), **options):
    """Train on this rank; runs on both."""
    model = fresh()
    loader = batches(dist.get_rank(), accumulate=options.get("accumulate", 1), lengths=lengths)
    trainer, losses = train(model, loader, loss_fn, optimizer, Plan(shard=shard), **options)
    return {
        "state": full_state(model),
        "losses": losses,
        "norm": trainer.metrics.get("grad_norm"),
        "class": type(model).__name__,
        "report": str(trainer.report()),
    }


def on_one(shard, loss_fn=mean_loss, optimizer="adamw", *, lengths=(5, 5), **options):
    accumulate = options.pop("accumulate", 1)
    model = fresh()
    loader = batches(None, accumulate=accumulate, lengths=lengths)
    trainer, losses = train(
        model, loader, loss_fn, optimizer, "eager", accumulate=2 * accumulate, **options
    )
    return model.state_dict(), losses, trainer.metrics.get("grad_norm")


def all_cases(rank):
    results = {}
    for name, case in CASES.items():
        try:
            results[name] = on_two_ranks(**case)
        except Exception:
            results[name] = traceback.format_exc()
    return packed(results)


@pytest.fixture(scope="module")
def trained():
    return [torch.load(io.BytesIO(told)) for told in ranks.run(all_cases, timeout_s=240)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_what_one_would(name, trained):
    expected, losses, norm = on_one(**CASES[name])
    results = [of_rank[name] for of_rank in trained]
    for result in results:
        assert isinstance(result, dict), result
        assert list(result["state"]) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(result["state"][key], value, rtol=2e-4, atol=2e-6)
        if norm is not None:
            torch.testing.assert_close(result["norm"], norm, rtol=1e-5, atol=1e-6)
    mean = torch.stack([result["losses"] for result in results]).mean(0)
    torch.testing.assert_close(mean, losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "values"), [("ddp measured", "25.0 5.0 100.0"), ("fsdp measured", "1 2 3")]
)
def test_what_is_measured_is_the_same_on_all_ranks(name, values, trained):
    told = [
        re.search(r"(\S+) was measured the best \(ms: (.*)\)", r[name]["report"]) for r in trained
    ]
    first, second = (found.groups() for found in told)
    assert first == second
    assert [item.split()[0] for item in first[1].split(", ")] == values.split()
    assert first[0] in values.split()


def test_replicas_keep_the_class_of_the_model(trained):
    assert trained[0]["ddp adamw"]["class"] == "Net"
