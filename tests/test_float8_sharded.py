"""float8 in a sharded model: gathered in float8, measured behind the sharding, and taken back."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (  # here, and not in each of the forked ranks
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import ranks
from float8_models import (
    EMULATED,
    MEASURED,
    batches,
    gpt,
    gpt_without_batch_norm,
    loss_fn,
    timer_of,
)
from parallel_training import full_state, packed
from torchfast import (
    CompileOptions,
    Float8Linears,
    Float8Options,
    MicroBatches,
    Plan,
    PlanError,
    ShardOptions,
    Trainer,
)
from torchfast.precision.float8_options import RECIPES

GATHERED = Float8Options(
    recipe="tensorwise", smallest=16, emulate=True, watch_at=(), all_gather=True
)
FSDP = ShardOptions(strategy="fsdp", gather_dtype="fp32")
STEPS = 3


def steps_of(number, accumulate):
    """Return the steps of one rank, each with data of its own."""
    own = batches(STEPS * accumulate, seed=number)
    groups = [own[i : i + accumulate] for i in range(0, len(own), accumulate)]
    return [g[0] if accumulate == 1 else MicroBatches(g) for g in groups]


def trained(
    number, options, shard=FSDP, accumulate=1, between=lambda trainer: None, loss=loss_fn, **rest
):
    model = gpt_without_batch_norm()
    torch.manual_seed(1)
    plan = Plan(precision=options, shard=shard, **rest)
    trainer = Trainer(
        model,
        partial(optim.AdamW, lr=3e-3),
        loss,
        plan,
        max_grad_norm=1.0,
        accumulate=accumulate,
    )
    kinds = weights_seen(model)
    losses, told = [], []
    for batch in steps_of(number, accumulate):
        losses.append(trainer.step(batch))
        told.append(between(trainer))
    return trainer, {
        "losses": torch.stack(losses),
        "state": full_state(model),
        "kinds": kinds,
        "told": told,
        "report": str(trainer.report()),
    }


def weights_seen(model):
    """Return a set that will hold what the weight of a layer in float8 is where it is used."""
    kinds = set()
    model.blocks[0][0].register_forward_pre_hook(lambda m, _: kinds.add(type(m.weight).__name__))
    return kinds


# --- gathered in float8 --------------------------------------------------------------------------


def replace_weights(trainer):
    trainer.model.load_state_dict(trainer.model.state_dict(), assign=True)


def evaluated(trainer):
    return trainer.evaluate(batches(1, seed=7))["loss"]


def replace_weights_and_evaluate(trainer):
    replace_weights(trainer)
    return evaluated(trainer)  # before a step takes the new ones over


def touch(trainer):
    with torch.no_grad():
        trainer.model.blocks[0][0].weight.mul_(1.5)


def touch_and_evaluate(trainer):
    touch(trainer)
    return evaluated(trainer)


def sharded(**options):
    return ShardOptions(**{"strategy": "fsdp", "gather_dtype": "fp32", **options})


CASES = {
    "touched weights": {"between": touch_and_evaluate},
    "replaced weights": {"between": replace_weights, "recompute": "blocks"},
    "replaced and evaluated": {"between": replace_weights_and_evaluate},
    "kept whole": {"accumulate": 2, "shard": sharded(reshard_after_forward=False)},
    "piece by layer": {"shard": sharded(blocks=("blocks.*.0", "blocks.*.3"))},
    "hsdp": {"accumulate": 2, "shard": sharded(strategy="hsdp", num_replicas=1)},
}


def both_ways(rank, cases):
    """Return the training of each case with weights that are cast behind the gather, and before."""
    return packed(
        {
            name: [trained(rank, options, **case)[1] for options in (EMULATED, GATHERED)]
            for name, case in cases.items()
        }
    )


def check_equal(told):
    for of_rank in map(torch.load, map(io.BytesIO, told)):
        for name, (behind, before) in of_rank.items():
            assert torch.equal(before["losses"], behind["losses"]), name
            for key, value in behind["state"].items():
                assert torch.equal(before["state"][key], value), (name, key)
            assert before["told"] == behind["told"], name
            assert behind["kinds"] == {"Parameter"}
            assert before["kinds"] == {"Float8TrainingTensor"}, name
            assert "the weights of 4 gathered in float8" in before["report"]
            assert "gathered in float8" not in behind["report"]


def test_what_is_gathered_in_float8_trains_the_same_to_the_bit():
    check_equal(ranks.run(both_ways, 2, CASES))


def test_parts_that_are_not_equally_long():
    check_equal(ranks.run(both_ways, 3, {"three ranks": {}}))


def test_the_numbers_are_those_of_torchao():
    def rank(number):
        def shard(model):
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)

        def train(model, optimizer, behind_step):
            torch.manual_seed(2)
            losses = []
            for batch in batches(STEPS, seed=number):
                loss = loss_fn(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                behind_step()
                losses.append(loss.detach())
            return torch.stack(losses), full_state(model)

        ours = gpt_without_batch_norm()
        float8 = Float8Linears(ours, GATHERED, is_sharded=True)
        float8.apply()
        shard(ours)
        float8.gather()
        found = train(ours, optim.AdamW(ours.parameters(), lr=1e-3), lambda: None)

        theirs = gpt_without_batch_norm()
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        names = set(float8.recipes)
        convert_to_float8_training(
            theirs, module_filter_fn=lambda _, name: name in names, config=config
        )
        shard(theirs)
        optimizer = optim.AdamW(theirs.parameters(), lr=1e-3)
        expected = train(
            theirs, optimizer, lambda: precompute_float8_dynamic_scale_for_fsdp(theirs)
        )
        assert torch.equal(found[0], expected[0])
        for key, value in expected[1].items():
            assert torch.equal(found[1][key], value), key

    ranks.run(rank)


def test_states_and_what_is_left_are_plain():
    def rank(number):
        trainer, result = trained(number, GATHERED)
        model = trainer.model
        torch.save(trainer.state_dict(), saved := io.BytesIO())
        torch.save(model.state_dict(), saved)
        assert b"torchao" not in saved.getvalue()
        assert all(type(v._local_tensor) is torch.Tensor for v in model.state_dict().values())
        own = gpt_without_batch_norm()
        own.load_state_dict(result["state"])
        trainer.close()
        trainer.close()
        assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [nn.Linear] * 6
        assert not any("config" in vars(m) for m in model.modules())
        batch = batches(1)[0]
        with torch.no_grad():
            assert torch.equal(loss_fn(model.eval(), batch), loss_fn(own.eval(), batch))

    ranks.run(rank)


def test_a_layer_that_is_a_piece_finds_its_classes_again():
    def rank(number):
        model = gpt_without_batch_norm()
        float8 = Float8Linears(model, GATHERED, is_sharded=True)
        float8.apply()
        layers = [block[0] for block in model.blocks]
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        float8.gather()
        kinds = [type(layer) for layer in layers]
        plain = set()
        for _ in range(2):
            with float8.left():
                plain |= {type(layer) for layer in layers}
            assert [type(layer) for layer in layers] == kinds
        assert len(plain) == 1
        float8.close()
        for kind in (*kinds, *plain, *map(type, layers)):
            assert kind.__name__.startswith("FSDP")
            assert "__deepcopy__" in vars(kind)

    ranks.run(rank)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # returns its last product
def test_a_weight_that_is_looked_up_too_is_gathered_as_it_is():
    def rank(number):
        options = Float8Options(
            recipe="tensorwise", smallest=16, emulate=True, watch_at=(1,), all_gather=True,
            only=("head", "blocks.0.0"),
        )  # fmt: skip
        result = trained(number, options)[1]
        assert "(2 tensorwise, emulated), the weights of 1 gathered" in result["report"]
        assert "head weight" in result["report"]
        assert "Float8TrainingTensor" in result["kinds"]

    ranks.run(rank)


def test_bf16_and_low_bit_state_beside_it():
    def rank(number):
        plan = {"shard": "fsdp", "optimizer": "adamw8bit"}
        _, behind = trained(number, EMULATED, **plan)
        _, before = trained(number, GATHERED, **plan)
        assert not torch.equal(before["losses"], behind["losses"])  # cast once, not twice
        assert torch.allclose(before["losses"], behind["losses"], rtol=5e-3)

    ranks.run(rank)


def test_compiled_blocks_use_what_was_gathered():
    def rank(number):
        by_blocks = CompileOptions(backend="aot_eager", regions="blocks")
        eager, compiled = (trained(number, GATHERED, compile=c)[1] for c in (False, by_blocks))
        assert "compiled in" in compiled["report"]
        assert torch.allclose(compiled["losses"], eager["losses"], rtol=1e-6)

    ranks.run(rank)


def test_a_step_that_fails_leaves_no_scale_behind():
    def rank(number):
        broken = []

        def loss(model, batch):
            found = loss_fn(model, batch)
            return 1 / 0 if broken else found

        trainer, _ = trained(number, GATHERED, loss=loss)
        broken.append(True)
        with pytest.raises(ZeroDivisionError):
            trainer.step(batches(1)[0])
        broken.clear()
        touch(trainer)
        found = evaluated(trainer)
        own = gpt_without_batch_norm()
        own.load_state_dict(full_state(trainer.model))
        alone = Trainer(own, partial(optim.AdamW, lr=1e-3), loss_fn, Plan(precision=EMULATED))
        alone.forward_backward(batches(1)[0])  # converts
        assert found == pytest.approx(evaluated(alone), rel=1e-6)

    ranks.run(rank)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"shard": None}, "gathers shards, and shard=None has none; take shard='fsdp'"),
        ({"shard": "ddp"}, "gathers shards, and shard='ddp' has none"),
        (
            {"shard": ShardOptions(strategy="fsdp", offload=True)},
            "keeps them on the host; leave out one of them",
        ),
    ],
)
def test_gathering_needs_shards_on_the_device(plan, error):
    with pytest.raises(PlanError, match=error):
        Plan(precision=GATHERED, **plan)


@pytest.mark.parametrize("recipe", ["auto", "rowwise", "rowwise_with_gw_hp"])
def test_gathering_needs_one_scale_a_tensor(recipe):
    with pytest.raises(PlanError, match=f"does not go with recipe='{recipe}'"):
        Float8Options(recipe=recipe, all_gather=True)


def test_gathering_needs_a_sharded_model():
    with pytest.raises(PlanError, match="this model is not to be sharded; take Plan"):
        Float8Linears(gpt(), GATHERED)
    float8 = Float8Linears(gpt(), GATHERED, is_sharded=True)
    float8.apply()
    with pytest.raises(PlanError, match=r"this TinyGPT is not sharded, .* behind fully_shard"):
        float8.gather()


def test_one_rank_has_nothing_to_gather():
    trainer = Trainer(
        gpt(), partial(optim.AdamW, lr=1e-3), loss_fn, Plan(precision=GATHERED, shard="fsdp")
    )
    trainer.step(batches(1)[0])
    assert "gathered" not in str(trainer.report())


def test_a_plan_with_it_is_written_and_read():
    plan = Plan(precision=GATHERED, shard="fsdp")
    assert '"all_gather": true' in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


# --- measured ------------------------------------------------------------------------------------


def test_recipes_are_measured_in_a_sharded_model():
    def rank(number):
        seconds = {"bf16": 1.0, "tensorwise": 2.0, "rowwise": 0.8 + number, **dict.fromkeys(
            RECIPES[2:], 3.0)}  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchfast.precision.float8_choice._on_device", timer_of(seconds))
            trainer, measured = trained(number, MEASURED, shard="fsdp")
        assert "(4 rowwise, emulated)" in measured["report"]
        assert "float8 recipes measured on cpu" in measured["report"]
        named = Float8Options(recipe="rowwise", smallest=16, emulate=True, watch_at=())
        _, expected = trained(number, named, shard="fsdp")
        assert torch.equal(measured["losses"], expected["losses"])
        resumed = Trainer(
            gpt_without_batch_norm(),
            partial(optim.AdamW, lr=3e-3),
            loss_fn,
            Plan(precision=MEASURED, shard="fsdp"),
            max_grad_norm=1.0,
        )
        resumed.load_state_dict(trainer.state_dict())
        assert resumed.state_dict()["float8"] == trainer.state_dict()["float8"]
        both = []
        for each in (resumed, trainer):
            torch.manual_seed(2)
            both.append(each.step(steps_of(number, 1)[0]))
        assert torch.equal(*both)
        trainer.close()
        assert type(trainer.model.blocks[0][0]) is nn.Linear

    ranks.run(rank)


def test_the_weights_are_measured_as_they_are_gathered():
    def rank(number):
        seen = []

        def choose(layers, *_, **__):
            seen.extend(use.dtype for use, _ in layers.values())
            raise ZeroDivisionError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchfast.precision.float8.choose_recipes", choose)
            for shard in ("fsdp", FSDP):
                with pytest.raises(ZeroDivisionError):
                    trained(number, MEASURED, shard=shard)
        assert seen == [torch.bfloat16] * 4 + [torch.float32] * 4
        dist.barrier()

    ranks.run(rank)
