"""Ways to train on several GPUs: as a person would write it, with torchfast, and with others.

"graph by hand" captures forward, backward, collectives, clipping and update as one would by hand;
"no graph" is the same loop as it is. Shards are gathered by hand in the dtype in which torchfast
gathers them, so that both send as much.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.workloads import Batch, Workload
from torchfast import CompileOptions, Plan, Trainer

MAX_GRAD_NORM = 1.0
# As many steps as DistributedDataParallel wants before a capture, and one more.
WARM_UP_STEPS = 12
BY_BLOCKS = CompileOptions(regions="blocks")
# Shards, and whether blocks are compiled: what matters most first.
KINDS = (("fsdp", True), ("ddp", True), ("fsdp", False), ("ddp", False))

Step = Callable[[], Tensor]


class Arm(NamedTuple):
    """One way to train.

    Attributes:
        name: What tables call it.
        make: Returns a step on one batch and what ends it, of the workload, the batch and the
            device.
        is_alone: Whether the first rank trains by itself.
        plan: Torchfast's, where that is what it is.
    """

    name: str
    make: Callable[[Workload, Batch, torch.device], tuple[Step, Callable[[], None]]]
    is_alone: bool = False
    plan: Plan | None = None


def groups() -> list[list[Arm]]:
    """Return the ways to train, what is to be compared by the tens of per mil in one group."""
    on_gpu = torch.cuda.is_available()
    found: list[list[Arm]] = []
    for shard, compiled in KINDS:
        form = f"{shard}, blocks compiled" if compiled else shard
        by = partial(by_hand, shard=shard, compiled=compiled)
        plan = Plan(
            precision="bf16" if on_gpu else "as_given",
            shard=shard,  # type: ignore[arg-type]
            compile=BY_BLOCKS if compiled else False,
            cuda_graph=True,
        )
        found.append(
            [
                Arm(f"{form}, graph by hand", partial(by, graph=True)),
                Arm(f"{form}, torchfast", partial(by_torchfast, plan=plan), plan=plan),
                Arm(f"{form}, no graph by hand", partial(by, graph=False)),
            ]
        )
    alone = found[0][1].plan
    assert alone is not None
    name = "one GPU, blocks compiled, torchfast"
    made = partial(by_torchfast, plan=alone.replace(shard=None))
    others = [Arm("fsdp, Accelerate", by_accelerate), Arm("fsdp, Lightning", by_lightning)]
    return [found[0], [Arm(name, made, is_alone=True)], found[1], others, *found[2:]]


def fresh(item: Workload, device: torch.device | str = "cpu") -> nn.Module:
    """Return the model, the same on every rank: made on a GPU in no time, if it is to be there."""
    torch.manual_seed(0)
    with torch.device(device):
        return item.build().to(device)  # also what is not made where that says


def adamw(item: Workload, parameters: Any) -> torch.optim.AdamW:
    """Return the optimizer of all arms: the fused one, which a graph can hold."""
    on_gpu = torch.cuda.is_available()
    return torch.optim.AdamW(parameters, lr=item.lr, fused=True, capturable=on_gpu)


def trainer_of(item: Workload, device: torch.device, plan: Plan) -> Trainer:
    """Return a trainer of a new model."""
    model = fresh(item, device)
    return Trainer(model, partial(adamw, item), item.loss_fn, plan, max_grad_norm=MAX_GRAD_NORM)


def by_torchfast(
    item: Workload, batch: Batch, device: torch.device, *, plan: Plan
) -> tuple[Step, Callable[[], None]]:
    """Return a step of torchfast's."""
    trainer = trainer_of(item, device, plan)
    if device.type == "cuda":
        for _ in range(WARM_UP_STEPS + 4):
            trainer.step(batch)
        found = trainer.report().counters
        if plan.cuda_graph and not found.get("graphs"):
            raise RuntimeError(f"nothing was captured: {trainer.report()}")
    return partial(trainer.step, batch), trainer.close


def by_hand(
    item: Workload,
    batch: Batch,
    device: torch.device,
    *,
    shard: str,
    compiled: bool,
    graph: bool,
) -> tuple[Step, Callable[[], None]]:
    """Return a step as one would write it."""
    on_gpu = device.type == "cuda"
    side = torch.cuda.Stream() if on_gpu else None
    model: Any = fresh(item, device)
    if compiled:
        for block in item.regions(model):
            block.compile(dynamic=False)
    if shard == "fsdp":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if on_gpu else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # autocast casts what it must
        )
        for block in item.regions(model):
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif shard == "ddp":
        with torch.cuda.stream(side):
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(item, model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=shard != "ddp")
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = item.loss_fn(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return loss.detach()

    if not graph or side is None:
        return step, lambda: None
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=side, capture_error_mode="thread_local"):
        loss = step()

    def replay(_held: object = step) -> Tensor:
        # With model and optimizer: what a graph reads lives only as long as somebody has it.
        captured.replay()
        return loss.clone()

    return replay, captured.reset


def by_accelerate(
    item: Workload, batch: Batch, device: torch.device
) -> tuple[Step, Callable[[], None]]:
    """Return a step as Accelerate's documentation has it, on the same engine."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    model: Any = fresh(item)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(item.regions(model)[0]).__name__],
        reshard_after_forward=True,
    )
    precision = "bf16" if device.type == "cuda" else "no"
    # One for the process, which would keep the plugin of another workload.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        mixed_precision=precision, fsdp_plugin=plugin, cpu=device.type == "cpu"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=item.lr, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> Tensor:
        loss = item.loss_fn(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, accelerator.free_memory


def by_lightning(
    item: Workload, batch: Batch, device: torch.device
) -> tuple[Step, Callable[[], None]]:
    """Return a step of Lightning's Fabric with its sharding strategy."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import FSDPStrategy

    model: Any = fresh(item)
    # Fabric asks the launcher's environment, which here is this program.
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "benchmark")
    fabric = Fabric(
        accelerator=device.type,
        devices=dist.get_world_size(),
        precision="bf16-mixed" if device.type == "cuda" else "32-true",
        strategy=FSDPStrategy(
            auto_wrap_policy={type(item.regions(model)[0])},
            cluster_environment=TorchElasticEnvironment(),
        ),
    )
    fabric.launch()
    model = fabric.setup_module(model)
    optimizer: Any = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=item.lr, fused=True)
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = item.loss_fn(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        return loss.detach()

    return step, lambda: None
