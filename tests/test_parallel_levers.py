"""What a plan does besides, on two ranks: each rank alike, and as one rank would."""

import io
import re
import traceback
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel_training as parity
import ranks
from simulated_copies import PromptCopies
from torchfast import CompileOptions, OffloadOptions, Plan, ShardOptions
from torchfast.memory import activation_offload

STRATEGIES = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": ShardOptions(strategy="hsdp", num_replicas=2),
}
SHARDS = tuple(STRATEGIES)
BY_BLOCKS = CompileOptions(backend="eager", regions="blocks")

# By name: the plan, and what is passed to the trainer.
CASES = {
    "bf16": (Plan(precision="bf16"), {"max_grad_norm": 1.0}),
    "fp16": (Plan(precision="fp16"), {"max_grad_norm": 1.0}),
    "compile": (Plan(compile=BY_BLOCKS), {}),
    "average": (Plan(), {"ema": 0.9}),
    "recompute": (Plan(recompute="blocks"), {"max_grad_norm": 0.5}),
    # Which activations are kept is decided where forward and backward are traced together.
    "recompute compiled": (
        Plan(recompute="blocks", compile=CompileOptions(backend="aot_eager", regions="blocks")),
        {},
    ),
    "offload": (Plan(offload=OffloadOptions(activations=True, min_bytes=64, window_bytes=0)), {}),
}
# AdamW moves as far by a gradient that is too small: where bits differ, it would hide that.
OPTIMIZER_OF = {"bf16": "sgd", "fp16": "sgd"}


def nan_on_the_last_rank_in_step_2():
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        loss = parity.mean_loss(model, batch)
        is_bad = len(calls) == 2 and (not dist.is_initialized() or dist.get_rank() == 1)
        return loss * float("nan") if is_bad else loss

    return loss_fn


def one_case(shard, plan, options, loss_fn=parity.mean_loss, optimizer="adamw"):
    model = parity.fresh()
    loader = parity.batches(dist.get_rank())
    trainer, losses = parity.train(
        model, loader, loss_fn, optimizer, plan.replace(shard=STRATEGIES[shard]), **options
    )
    return {
        "state": parity.full_state(model),
        "losses": losses,
        "evaluation": trainer.evaluate(parity.Own(loader), ema="ema" in options),
        "average": trainer.ema_model and parity.full_state(trainer.ema_model),
        "skipped": trainer.num_skipped,
        "report": str(trainer.report()),
        "sent": trainer.report().counters.get("offload_sent_bytes", 0),
    }


def skipping(shard, optimizer):
    plan = Plan(nonfinite="skip")
    return one_case(
        shard, plan, {"max_grad_norm": 1.0}, nan_on_the_last_rank_in_step_2(), optimizer
    )


def all_cases(rank):
    activation_offload.copy_streams_for = lambda _: PromptCopies()  # of this process only
    work = {
        (shard, name): partial(one_case, shard, *case, optimizer=OPTIMIZER_OF.get(name, "adamw"))
        for shard in SHARDS
        for name, case in CASES.items()
    }
    for shard in SHARDS:
        for optimizer in ("adamw", "fused", "sgd"):
            work[shard, f"skip {optimizer}"] = lambda s=shard, o=optimizer: skipping(s, o)
    results = {}
    for name, run in work.items():
        try:
            results[name] = run()
        except Exception:
            results[name] = traceback.format_exc()
    return parity.packed(results)


@pytest.fixture(scope="module")
def trained():
    return [torch.load(io.BytesIO(told)) for told in ranks.run(all_cases, timeout_s=240)]


def result_of(trained, shard, name):
    results = [of_rank[shard, name] for of_rank in trained]
    for result in results:
        assert isinstance(result, dict), result
    first, second = results
    for key, value in first["state"].items():
        assert torch.equal(second["state"][key], value), f"ranks differ in {key}"
    assert first["evaluation"] == second["evaluation"]
    return first


def on_one(plan, options, optimizer="adamw"):
    model = parity.fresh()
    trainer, _ = parity.train(
        model, parity.batches(None), parity.mean_loss, optimizer, plan, accumulate=2, **options
    )
    return model, trainer


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bits_are_close(shard, name, trained):
    """Within a part of what training moves: a gradient of one rank's alone is half off."""
    result = result_of(trained, shard, name)
    plan, options = CASES[name]
    expected, _ = on_one(plan, options, OPTIMIZER_OF[name])
    start = parity.fresh().state_dict()
    for key, value in expected.state_dict().items():
        moved = (value - start[key]).norm()
        assert (result["state"][key] - value).norm() < 0.05 * moved, key


def test_shards_are_gathered_in_the_precision_of_the_plan(trained):
    assert "gathered in torch.bfloat16" in result_of(trained, "fsdp", "bf16")["report"]


@pytest.mark.parametrize("shard", SHARDS)
def test_compiled_blocks_train_the_same(shard, trained):
    result = result_of(trained, shard, "compile")
    assert "compiled in" in result["report"]
    expected, _ = on_one(Plan(), {})
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(result["state"][key], value, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", ["recompute", "recompute compiled", "offload"])
def test_what_saves_memory_trains_the_same(shard, name, trained):
    result = result_of(trained, shard, name)
    expected, _ = on_one(Plan(), CASES[name][1])
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(result["state"][key], value, rtol=2e-4, atol=2e-6)
    if name == "offload":
        # Weights that are gathered are no activations.
        assert result["sent"] == result_of(trained, "ddp", name)["sent"] > 0
    else:
        assert re.search("recompute +applied", result["report"])


@pytest.mark.parametrize("shard", SHARDS)
def test_the_average_is_that_of_one_rank(shard, trained):
    result = result_of(trained, shard, "average")
    _, trainer = on_one(Plan(), {"ema": 0.9})
    for key, value in trainer.ema_model.state_dict().items():
        torch.testing.assert_close(result["average"][key], value, rtol=2e-4, atol=2e-6)
    everything = [b for rank in range(2) for b in parity.batches(rank)]
    expected = trainer.evaluate(everything, ema=True)["loss"]
    assert result["evaluation"]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd"])
def test_a_nan_on_one_rank_is_skipped_by_all(shard, optimizer, trained):
    result = result_of(trained, shard, f"skip {optimizer}")
    assert result["skipped"] == 1
    assert all(value.isfinite().all() for value in result["state"].values())
    model = parity.fresh()
    loader = [b for step, b in enumerate(parity.batches(None), start=1) if step != 2]
    parity.train(
        model, loader, parity.mean_loss, optimizer, Plan(), accumulate=2, max_grad_norm=1.0
    )
    for key, value in model.state_dict().items():
        torch.testing.assert_close(result["state"][key], value, rtol=2e-4, atol=2e-6)
