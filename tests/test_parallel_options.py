"""What `ShardOptions` takes from torch, and parameters that are not sharded."""

import io
import re
import traceback
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import ranks
from parallel_training import OPTIMIZERS, Net, batches, fresh, full_state, mean_loss, packed
from torchfast import Plan, PlanError, ShardOptions, Trainer
from torchfast.parallel.whole_parameters import WholeParameters

BF16 = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    output_dtype=torch.bfloat16,
    cast_forward_inputs=True,
)
FOREACH = {
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw": OPTIMIZERS["adamw"],
    "sgd": OPTIMIZERS["sgd"],
}


class Scaled(nn.Module):
    """A scalar parameter, as CLIP's logit_scale, and one of one dimension, beside blocks."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, tokens):
        return self.net(tokens) * self.scale.exp() + self.bias


def scaled():
    torch.manual_seed(0)
    return Scaled()


# --- parameters that are not sharded --------------------------------------------------------------

IGNORED = {
    "scalar": ShardOptions(strategy="fsdp"),
    "more": ShardOptions(strategy="fsdp", ignored=("bias", "net.blocks.1")),
    "replicas": ShardOptions(strategy="hsdp", num_replicas=2, ignored=("bias",)),
    "offload": ShardOptions(strategy="fsdp", offload=True, ignored=("bias",)),
}
PLANS = {
    "clipped": (Plan(), {"max_grad_norm": 0.5}),
    "skip": (Plan(nonfinite="skip"), {"ema": 0.9}),
}


def trained(optimizer, plan, options, loader, accumulate):
    model = scaled()
    trainer = Trainer(model, FOREACH[optimizer], mean_loss, plan, accumulate=accumulate, **options)
    norms = []
    for batch in loader:
        trainer.step(batch)
        norms.append(float(trainer.metrics.get("grad_norm", 0.0)))
    average = trainer.ema_model and full_state(trainer.ema_model)
    return full_state(model), average, norms, str(trainer.report())


# Each two of shard, optimizer and plan meet.
CASES = [
    (name, optimizer, list(PLANS)[(row + column) % 2])
    for row, name in enumerate(IGNORED)
    for column, optimizer in enumerate(FOREACH)
]


def whole_parameters(rank):
    found = {}
    for name, optimizer, plan_name in CASES:
        plan, options = PLANS[plan_name]
        loader = batches(rank, accumulate=2)
        found[name, optimizer, plan_name] = trained(
            optimizer, plan.replace(shard=IGNORED[name]), options, loader, 2
        )
    return packed(found)


@pytest.fixture(scope="module")
def with_whole_parameters():
    return [torch.load(io.BytesIO(told)) for told in ranks.run(whole_parameters, timeout_s=240)]


@pytest.mark.parametrize(("name", "optimizer", "plan"), CASES)
def test_whole_parameters_train_as_on_one_rank(name, optimizer, plan, with_whole_parameters):
    first, second = (of_rank[name, optimizer, plan] for of_rank in with_whole_parameters)
    loader = batches(None, accumulate=2)
    state, average, norms, _ = trained(optimizer, *PLANS[plan], loader, 4)
    for found, other, expected in ((first[0], second[0], state), (first[1], second[1], average)):
        for key, value in (expected or {}).items():
            assert torch.equal(found[key], other[key]), f"ranks differ in {key}"
            torch.testing.assert_close(found[key], value, rtol=2e-4, atol=2e-6)
    assert first[2] == pytest.approx(norms, rel=1e-5)
    assert re.search(r"\d+ parameters whole on each rank \((scale|bias, )", first[3])


def unused(rank):
    """Each rank uses another scalar; nobody uses the third."""

    def loss_fn(model, batch):
        return mean_loss(model.net, batch) * (model.first if rank == 0 else model.second)

    model = nn.Module()
    model.net = fresh()
    model.first, model.second, model.third = (nn.Parameter(torch.tensor(1.0)) for _ in range(3))
    shard = ShardOptions(strategy="fsdp", blocks=())
    Trainer(model, OPTIMIZERS["sgd"], loss_fn, Plan(shard=shard)).forward_backward(batches(rank)[0])
    return [float(p.grad) for p in (model.first, model.second, model.third)]


def test_a_whole_parameter_that_one_rank_does_not_use_stays_alike():
    first, second = ranks.run(unused)
    assert first == second
    assert all(value > 0.5 for value in first[:2])
    assert first[2] == 0.0


@pytest.mark.parametrize("ignored", ["head", "head.weight", "embedding", nn.Linear])
def test_a_tied_parameter_stays_whole_by_any_of_its_names(ignored):
    model = Net()
    model.head.weight = model.embedding.weight
    options = ShardOptions(strategy="fsdp", ignored=(ignored,), blocks=())
    whole = WholeParameters(model, options, None)
    assert model.head.weight in whole.of(model)
    assert sum(p is model.head.weight for p in whole.plain(model)) == 1


def test_buffers_that_got_memory_beside_shards_on_the_host_go_to_the_device():
    device = torch.device("cuda", 0)
    memory = SimpleNamespace(to=lambda where: f"moved to {where}")
    on_host = SimpleNamespace(device=torch.device("cpu"), data=memory)
    there = SimpleNamespace(device=device, data="left alone")
    without = SimpleNamespace(device=torch.device("meta"), data="left alone")
    model = SimpleNamespace(
        named_parameters=lambda **_: (), buffers=lambda: [on_host, there, without]
    )
    WholeParameters(model, ShardOptions(strategy="fsdp"), None).move(model, device)
    assert [b.data for b in model.buffers()] == ["moved to cuda:0", "left alone", "left alone"]


# --- torch's own objects --------------------------------------------------------------------------


def counted_loss(model, batch):
    """A sum and a number of items that has no exact bf16 form."""
    tokens, targets = batch
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    held = model.blocks[1].up.weight  # what this rank has of it behind the forward
    told = {
        "sixteen": torch.tensor(float(logits.dtype is torch.bfloat16)),
        "held": torch.tensor(float(getattr(held, "_local_tensor", held).numel())),
    }
    return 257.0 * loss, told, torch.tensor(257.0)


def of_four(rank):
    """On four ranks: meshes, resharding over two of them, a policy."""
    row = init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    cases = {
        "default": {"strategy": "fsdp"},
        "row": {"strategy": "fsdp", "mesh": row},
        "ddp": {"mesh": row},
        "square": {"strategy": "hsdp", "mesh": square},
        "over two": {"strategy": "fsdp", "reshard_after_forward": 2},
        "over four": {"strategy": "fsdp", "reshard_after_forward": 4},
        "policy": {"strategy": "fsdp", "mp_policy": BF16},
        "a square for fsdp": {"strategy": "fsdp", "mesh": square},
        "a part": {"strategy": "fsdp", "mesh": square["parts"]},
        "no names": {"strategy": "hsdp", "mesh": init_device_mesh("cpu", (2, 2))},
        "over three": {"strategy": "fsdp", "reshard_after_forward": 3},
    }
    found = {}
    for name, fields in cases.items():
        model = fresh()
        try:
            trainer = Trainer(
                model, OPTIMIZERS["sgd"], counted_loss, Plan(shard=ShardOptions(**fields))
            )
            losses = [float(trainer.step(batch)) for batch in batches(rank % 2)]
            told = {name: float(value) for name, value in trainer.metrics.items()}
            mesh = getattr(model.head.weight, "device_mesh", None)
            found[name] = (
                losses,
                told,
                full_state(model),
                mesh and (tuple(mesh.shape), mesh.mesh_dim_names),
            )
        except PlanError as error:
            found[name] = str(error)
        except Exception:
            found[name] = traceback.format_exc()
    return packed(found)


@pytest.fixture(scope="module")
def on_four():
    return [torch.load(io.BytesIO(told)) for told in ranks.run(of_four, 4, timeout_s=240)]


@pytest.mark.parametrize("name", ["row", "ddp", "square", "over two", "over four"])
def test_a_mesh_of_ones_own_and_resharding_train_the_same(name, on_four):
    for of_rank in on_four:
        expected, found = of_rank["default"], of_rank[name]
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for key, value in expected[2].items():
            torch.testing.assert_close(found[2][key], value, rtol=2e-4, atol=2e-6)


def test_meshes_and_sizes_are_those_that_were_asked_for(on_four):
    found = on_four[0]
    assert found["row"][3] == ((4,), ("ranks",))
    assert found["square"][3] == ((2, 2), ("replicas", "parts"))
    assert found["over two"][1]["held"] == 64  # half of 16 x 8
    assert found["over four"][1]["held"] == 32


def test_a_policy_is_taken_as_it_is(on_four):
    for of_rank in on_four:
        losses, told, state, _ = of_rank["policy"]
        assert told["sixteen"] == 1.0
        assert state["head.weight"].dtype is torch.float32
        # Loss and weight are not cast as what the model returns: 257 is 256 in bf16.
        assert losses == pytest.approx(of_rank["default"][0], rel=1e-2)
        assert losses != of_rank["default"][0]
        for loss in losses:
            assert loss != float(torch.tensor(loss).bfloat16())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a square for fsdp", "mesh has 2 dimensions, and strategy='fsdp' takes 1"),
        ("a part", "mesh holds 2 ranks, and the run has 4"),
        ("no names", "mesh has no names for its two dimensions"),
        ("over three", "reshard_after_forward=3 does not divide the 4 ranks"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(name, message, on_four):
    for of_rank in on_four:
        assert message in of_rank[name]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"mesh": 3}, TypeError, "mesh must be torch's DeviceMesh, got 3"),
        (
            {"mp_policy": "bf16"},
            TypeError,
            "mp_policy must be torch's MixedPrecisionPolicy, got 'bf16'",
        ),
        ({"mp_policy": BF16, "gather_dtype": "bf16"}, PlanError, "mp_policy says in which dtypes"),
        ({"reshard_after_forward": 1}, ValueError, "reshard_after_forward must be >= 2"),
        ({"reshard_after_forward": "no"}, TypeError, "reshard_after_forward must be"),
        ({"strategy": "ddp", "mp_policy": BF16}, PlanError, "no meaning for strategy='ddp'"),
    ],
)
def test_bad_input(fields, error, message):
    with pytest.raises(error, match=message):
        ShardOptions(**{"strategy": "fsdp", **fields})


def refusals(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(PlanError, match="both say how many replicas"):
        ShardOptions(strategy="hsdp", mesh=mesh, num_replicas=1)

    def refused(model, **fields):
        plan = Plan(shard=ShardOptions(strategy="fsdp", **fields.pop("shard", {})), **fields)
        with pytest.raises(PlanError) as caught:
            Trainer(model, OPTIMIZERS["sgd"], mean_loss, plan).step(batches(rank)[0])
        return str(caught.value)

    half = fresh()
    half.blocks[1].norm.bfloat16()
    sparse = fresh()
    sparse.embedding = nn.Embedding(7, 8, sparse=True)
    frozen = fresh()
    frozen.blocks[1].norm.bfloat16().requires_grad_(False)
    Trainer(frozen, OPTIMIZERS["sgd"], mean_loss, Plan(shard="fsdp"))
    return (
        refused(half),
        refused(sparse, shard={"ignored": ("embedding",)}),
        refused(scaled(), precision="fp16"),
    )


def test_what_shards_cannot_do_is_refused():
    for dtypes, sparse, scales in ranks.run(refusals):
        assert "'blocks.1.norm.weight' is torch.bfloat16 and 'blocks.1.up.weight' is" in dtypes
        assert "the gradient of 'embedding.weight' is sparse" in sparse
        assert "precision='fp16' does not go with 1 parameters whole on each rank (scale)" in scales
