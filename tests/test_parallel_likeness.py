"""Ranks that were given different models, settings or names say so, all of them, and go on."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ranks
from parallel_training import OPTIMIZERS, batches, fresh, mean_loss
from torchfast import Plan, PlanError, ShardOptions, Trainer
from torchfast._core.rank_group import RankGroup
from torchfast.parallel.likeness import difference

TOKENS = torch.arange(96).reshape(32, 3) % 7


def trainer_of(shard="ddp", loss_fn=mean_loss, model=None, **options):
    plan = options.pop("plan", None) or Plan(shard=shard)
    return Trainer(model or fresh(), OPTIMIZERS["sgd"], loss_fn, plan, **options)


def with_more(rank):
    model = fresh()
    if rank == 1:
        model.extra = nn.Linear(3, 3)
    return model


def with_frozen(rank):
    model = fresh()
    model.head.requires_grad_(rank == 0)
    return model


def named(rank):
    return lambda model, batch: (mean_loss(model, batch), {"ab"[rank]: 1.0})


def more_names(rank):
    return lambda model, batch: (mean_loss(model, batch), {"a": 1.0, "b": 1.0} if rank else {})


def late_name(rank):
    """The other name comes behind a log step whose names were the same."""
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        return mean_loss(model, batch), {"late" if rank and len(calls) == 3 else "early": 1.0}

    return loss_fn


def optimized(shard, build):
    """The optimizer is built from the model's parameters, as a list."""
    return Trainer(fresh(), lambda ps: build(list(ps)), mean_loss, Plan(shard=shard))


def grouped(parameters, rank):
    rest = parameters[1:]
    groups = [{"params": parameters[:1], "weight_decay": 0.1 * rank}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=torch.tensor(0.01))


def other_rates(rank):
    """The ranks' schedulers part only later."""

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=[1.0, 0.5][rank])

    return Trainer(fresh(), OPTIMIZERS["sgd"], mean_loss, Plan(shard="ddp"), lr_scheduler=schedule)


def fit(trainer, **options):
    given = {"steps": 4, "log_every": 1, "progress": False, **options}
    return trainer.fit(DataLoader(TensorDataset(TOKENS, TOKENS), 2), **given)


JOBS = {
    "a layer more": lambda r: trainer_of("ddp", model=with_more(r)),
    "a layer more, sharded": lambda r: trainer_of("fsdp", model=with_more(r)),
    "another width": lambda r: trainer_of("ddp", model=fresh(8 + 8 * r)),
    "frozen": lambda r: trainer_of("fsdp", model=with_frozen(r)),
    "strategy": lambda r: trainer_of(["ddp", "fsdp"][r]),
    "clipping": lambda r: trainer_of("fsdp", max_grad_norm=[None, 1.0][r]),
    "average": lambda r: trainer_of("ddp", ema=[None, 0.9][r]),
    "precision": lambda r: trainer_of(plan=Plan(shard="ddp", precision=["fp32", "bf16"][r])),
    "graphs": lambda r: trainer_of(plan=Plan(shard="ddp", cuda_graph=[True, False][r])),
    "parts": lambda r: trainer_of(plan=Plan(shard="ddp", out_of_memory=["split", "raise"][r])),
    "bucket": lambda r: trainer_of(ShardOptions(bucket_mb=[1.0, 2.0][r])),
    "optimizer": lambda r: optimized("ddp", [torch.optim.AdamW, torch.optim.Adam][r]),
    "optimizer, sharded": lambda r: optimized("fsdp", [torch.optim.SGD, torch.optim.Adagrad][r]),
    "rate": lambda r: optimized("ddp", lambda ps: torch.optim.SGD(ps, lr=0.01 * (r + 1))),
    "option of a group": lambda r: optimized("fsdp", lambda ps: grouped(ps, r)),
    "order": lambda r: optimized("fsdp", lambda ps: torch.optim.AdamW(ps[:: 1 - 2 * r])),
    "fewer": lambda r: optimized("ddp", lambda ps: torch.optim.AdamW(ps[r:])),
    "scheduler": lambda r: fit(other_rates(r)),
    "steps": lambda r: fit(trainer_of(), steps=2 + r),
    "evaluation": lambda r: fit(trainer_of(), evaluate=[None, dict][r]),
    "names": lambda r: fit(trainer_of("ddp", named(r))),
    "more names": lambda r: fit(trainer_of("ddp", more_names(r))),
}
EXPECTED = {
    "a layer more": "(rank 0 has nothing more, rank 1 has extra.weight: (3, 3), torch.float32, tr",
    "a layer more, sharded": "(rank 0 has nothing more, rank 1 has extra.weight: (3, 3), torch.f",
    "another width": "embedding.weight: (7, 8), torch.float32, trained, rank 1 has embedding.wei",
    "frozen": "float32, trained, rank 1 has head.weight: (7, 8), torch.float32, frozen",
    "strategy": "(rank 0 has shard='ddp', rank 1 has shard='fsdp')",
    "clipping": "(rank 0 has max_grad_norm=None, rank 1 has max_grad_norm=1.0)",
    "average": "(rank 0 has ema=None, rank 1 has ema=EMAOptions(decay=0.9",
    "precision": "(rank 0 has precision='fp32', rank 1 has precision='bf16')",
    "graphs": "(rank 0 has cuda_graph=True, rank 1 has cuda_graph=None)",
    "parts": "(rank 0 has out_of_memory='split', rank 1 has out_of_memory='raise')",
    "bucket": "'bucket_mb': 1.0}, rank 1 has shard={'strategy': 'ddp', 'bucket_mb': 2.0}",
    "optimizer": "(rank 0 has the optimizer AdamW, rank 1 has the optimizer Adam)",
    "optimizer, sharded": "(rank 0 has the optimizer SGD, rank 1 has the optimizer Adagrad)",
    "rate": "(rank 0 has lr=0.01 in group 0, rank 1 has lr=0.02 in group 0)",
    "option of a group": "(rank 0 has weight_decay=0.0 in group 0, rank 1 has weight_decay=0.1 in ",
    "order": "(rank 0 has embedding.weight in group 0, rank 1 has head.weight in group 0)",
    "fewer": "(rank 0 has embedding.weight in group 0, rank 1 has blocks.0.norm.weight in group 0)",
    "scheduler": "the ranks have different learning rates (here 0.",
    "steps": "different arguments of fit (rank 0 has steps=2, rank 1 has steps=3)",
    "evaluation": "(rank 0 has nothing in evaluate=, rank 1 has a callable in evaluate=)",
    "names": "the ranks have different metrics (here: items, loss, metric ",
    "more names": "the ranks have different metrics (here: items, loss",
}


def all_jobs(rank):
    told = {}
    for name, work in JOBS.items():
        with pytest.raises((PlanError, ValueError)) as caught:
            work(rank)
        told[name] = str(caught.value)
    alike = trainer_of("fsdp", max_grad_norm=1.0, ema=0.9)  # and all of them can go on
    told["loss"] = float(alike.step(batches(rank)[0]))
    with pytest.raises(Exception, match="metric"):
        fit(trainer_of("ddp", late_name(rank)))
    return told


@pytest.fixture(scope="module")
def told():
    return ranks.run(all_jobs)


@pytest.mark.parametrize("name", list(JOBS))
def test_what_differs_between_ranks_is_told_by_all_of_them(name, told):
    for of_rank in told:
        assert EXPECTED[name] in of_rank[name]


def test_ranks_that_all_raised_go_on(told):
    for of_rank in told:
        assert 0 < of_rank["loss"] < 10


def test_one_process_differs_from_nobody():
    assert difference(RankGroup.alone(), ["steps=3"]) == ""


def uninitialized(rank):
    del rank
    with pytest.raises(ValueError, match="LazyModules Call `forward` with a dummy batch"):
        trainer_of("ddp", model=nn.LazyLinear(4))


def test_a_model_that_has_no_shapes_yet_is_told_what_to_do():
    ranks.run(uninitialized)
