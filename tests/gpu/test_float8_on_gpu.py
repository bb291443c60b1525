"""float8 and low-bit state where their kernels are: products, graphs, compiled updates, syncs."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import ExponentialLR

from float8_models import TinyGPT, loss_fn
from gpu.requirements import requires
from gpu.syncs import no_syncs
from torchfast import Float8Linears, Float8Options, LowBitAdamW, Plan, Trainer
from torchfast._core.compare import differences
from torchfast.precision.float8_options import RECIPES

pytestmark = requires(gpus=1, sm=90)

WIDTH = 256


def gpt():
    torch.manual_seed(0)
    return TinyGPT(vocabulary=48, width=WIDTH).cuda()


def batches(count, rows=8):
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(48, (rows, 33), generator=generator).cuda() for _ in range(count)]
    return [(t[:, :32], t[:, 1:]) for t in tokens]


def float8(recipe="tensorwise", **options):
    return Float8Options(recipe=recipe, smallest=64, **{"watch_at": (), **options})


def run(plan, steps=12, optimizer=None, data=None, **options):
    model = gpt()
    optimizer = optimizer or partial(optim.AdamW, lr=1e-3, fused=True)
    trainer = Trainer(model, optimizer, loss_fn, plan, max_grad_norm=1.0, **options)
    losses = [float(trainer.step(b)) for b in data or batches(1) * steps]
    return trainer, losses


# --- float8 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_as_bf16_does(recipe, compiled):
    _, plain = run(Plan(precision="bf16", compile=compiled))
    trainer, losses = run(Plan(precision=float8(recipe), compile=compiled))
    assert "4 of 6 linear layers" in str(trainer.report())
    assert losses != plain
    assert losses == pytest.approx(plain, 0.05, abs=0.02)
    trainer.close()
    assert type(trainer.model.blocks[0][0]) is nn.Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_replays_float8_to_the_bit(recipe, deterministic):
    trained = {}
    for graph in (False, True):
        trainer, losses = run(Plan(precision=float8(recipe), cuda_graph=graph), data=batches(10))
        trained[graph] = losses, copy.deepcopy(trainer.model.state_dict())
        if graph:
            assert trainer.report().counters["replays"] > 0
        trainer.close()
    assert trained[True][0] == trained[False][0]
    assert differences(trained[False][1], trained[True][1]) == []


def test_the_real_product_is_that_of_the_emulation():
    model = gpt().eval()
    batch = batches(1)[0]
    found = []
    for emulate in (False, True):
        with (
            Float8Linears(model, float8(emulate=emulate)),
            torch.autocast("cuda", dtype=torch.bfloat16),
        ):
            found.append(float(loss_fn(model, batch).detach()))
    assert found[0] == pytest.approx(found[1], 1e-2)


def test_measured_recipes_take_what_is_faster_alone():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = nn.Linear(4096, 8192), nn.Linear(8192, 16)

        def forward(self, x):
            return self.narrow(self.wide(x).relu())

    model = Wide().cuda()
    trainer = Trainer(
        model,
        partial(optim.SGD, lr=1e-3),
        lambda m, x: m(x).float().square().mean(),
        Plan(precision=Float8Options(budget_s=3.0, watch_at=()), compile=True, cuda_graph=True),
    )
    batch = torch.randn(8192, 4096, device="cuda")
    for _ in range(6):
        trainer.step(batch)
    report = str(trainer.report())
    assert "float8 recipes measured on" in report
    assert "forward and backward of the whole step took" in report
    assert "is not taken: all is in bf16" not in report
    # A wide product with many rows gains on every GPU that has the units.
    assert type(model.wide) is not nn.Linear
    assert type(model.narrow) is nn.Linear
    assert trainer.report().counters["replays"] > 0


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(compile=True), Plan(cuda_graph=True), Plan(compile=True, cuda_graph=True)],
    ids=["eager", "compiled", "captured", "compiled and captured"],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_last_batch_whose_rows_are_not_divisible_trains_as_in_bf16(recipe, plan):
    whole = batches(1)[0]
    last = tuple(t[:, :7] for t in batches(1, 9)[0])  # 7 tokens of 9 sequences: 63 rows
    data = [*[whole] * 6, last] * 3
    found = {}
    for precision in ("bf16", float8(recipe)):
        trainer, found[precision] = run(plan.replace(precision=precision), data=data)
        assert (trainer.report().counters.get("replays", 0) > 0) == bool(plan.cuda_graph)
        trainer.close()
    assert found[float8(recipe)] == pytest.approx(found["bf16"], 0.05, abs=0.02)
    assert found[float8(recipe)] != found["bf16"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_rows_and_none(recipe, compiled):
    torch.compiler.reset()  # the recipes before are of the same code, of which torch keeps eight
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH)).cuda()
    model = copy.deepcopy(plain)
    with Float8Linears(model, float8(recipe)):
        call = torch.compile(model, fullgraph=True) if compiled else model
        for rows in (64, 63, 1, 0, 17):
            found = []
            for run_layer, own in ((plain, plain), (call, model)):
                own.zero_grad()
                inputs = torch.linspace(-1, 1, rows * WIDTH, device="cuda").view(rows, WIDTH)
                inputs.requires_grad_()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    out = run_layer(inputs)
                out.float().square().sum().backward()
                found.append([out.detach(), inputs.grad, *(p.grad for p in own.parameters())])
            for one, other in zip(*found, strict=True):
                assert one.shape == other.shape
                scale = float(one.float().abs().max()) if one.numel() else 0.0
                # Two bits of mantissa: an eighth of a value, which one row does not even out.
                torch.testing.assert_close(other.float(), one.float(), rtol=0, atol=0.25 * scale)


def test_the_watch_waits_for_nothing(caplog):
    model = gpt()
    plan = Plan(precision=float8(watch_at=(4, 6)), cuda_graph=True)
    trainer = Trainer(model, partial(optim.AdamW, lr=1e-3, fused=True), loss_fn, plan)
    for number, batch in enumerate(batches(10), start=1):
        if number == 6:
            with no_syncs():
                trainer.step(batch)
        else:
            trainer.step(batch)
    report = str(trainer.report())
    assert "beside bf16, update 4: loss" in report
    assert "update 6: loss" in report
    assert trainer.report().counters["replays"] > 0
    assert not [r for r in caplog.records if "float8" in r.getMessage()]


def test_the_watch_changes_nothing(deterministic):
    found = []
    for watch_at in ((), (1, 3, 7)):
        trainer, losses = run(
            Plan(precision=float8(watch_at=watch_at), cuda_graph=True), data=batches(9)
        )
        found.append((losses, copy.deepcopy(trainer.model.state_dict())))
        trainer.close()
    assert found[0][0] == found[1][0]
    assert differences(found[0][1], found[1][1]) == []


# --- low-bit state -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8"])
def test_the_compiled_update_is_in_the_graph_to_the_bit(kind, deterministic):
    trained = {}
    for graph in (False, True):
        trainer, losses = run(
            Plan(precision="bf16", cuda_graph=graph),
            optimizer=partial(LowBitAdamW, lr=1e-3, state=kind),
            data=batches(10),
            lr_scheduler=partial(ExponentialLR, gamma=0.8),
        )
        assert "the update is compiled" in str(trainer.report())
        trained[graph] = losses, copy.deepcopy(trainer.model.state_dict())
        if graph:
            assert trainer.report().counters["replays"] > 0
            assert "the update of LowBitAdamW can be in the graph as it is" in str(trainer.report())
        trainer.close()
    assert trained[True][0] == trained[False][0]
    assert differences(trained[False][1], trained[True][1]) == []


def test_a_low_bit_step_waits_for_nothing():
    trainer, _ = run(
        Plan(optimizer="adamw8bit", cuda_graph=True),
        steps=6,
        optimizer=partial(optim.AdamW, lr=1e-3),
    )
    batch = batches(1)[0]
    with no_syncs():
        for _ in range(3):
            trainer.step(batch)


@pytest.mark.parametrize("kind", ["8bit", "fp8"])
def test_the_compiled_update_is_close_to_that_of_torchao(kind):
    import torchao.optim

    ours, theirs = gpt(), gpt()
    for model in (ours, theirs):
        # Behind which a bias has a gradient: before BatchNorm it is rounding alone, and Adam makes
        # steps of a whole learning rate of that.
        model.norm = nn.LayerNorm(WIDTH, device="cuda")
    name = {"8bit": "AdamW8bit", "fp8": "AdamWFp8"}[kind]
    for model, optimizer in (
        (ours, LowBitAdamW(ours.parameters(), lr=1e-3, state=kind)),
        (theirs, getattr(torchao.optim, name)(theirs.parameters(), lr=1e-3)),
    ):
        torch.manual_seed(0)
        for batch in batches(5):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    weights = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert max(float((a - b).abs().max().detach()) for a, b in weights) < 2e-3


def test_bf16_weights_draw_anew_at_each_replay():
    weight = nn.Parameter(torch.ones(512, 512, dtype=torch.bfloat16, device="cuda"))
    model = nn.ParameterList([weight])
    optimizer = LowBitAdamW([weight], lr=1e-4, weight_decay=0.0, stochastic_rounding=True)
    trainer = Trainer(
        model, optimizer, lambda m, x: (m[0].float() * x).sum(), Plan(cuda_graph=True)
    )
    for _ in range(40):
        trainer.step(torch.ones((), device="cuda"))
    assert trainer.report().counters["replays"] > 20
    moved = 1 - float(weight.detach().float().mean())
    assert moved == pytest.approx(40 * 1e-4, 0.1)  # the same draws again and again would not add up


def test_peak_memory_of_the_state():
    held = {}
    for kind in ("full", "8bit", "4bit"):
        torch.cuda.empty_cache()
        weight = nn.Parameter(torch.zeros(4096, 4096, device="cuda"))
        weight.grad = torch.ones_like(weight)
        before = torch.cuda.memory_allocated()
        optimizer = LowBitAdamW([weight], state=kind)
        optimizer.step()
        held[kind] = torch.cuda.memory_allocated() - before
        del optimizer, weight
    assert held["8bit"] <= 0.27 * held["full"]
    assert held["4bit"] <= 0.145 * held["full"]
