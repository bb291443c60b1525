"""What to try when a step does not fit: in the order of what it costs to try, given the account.

First what is wasted, since getting it back costs nothing: other processes, pieces between tensors,
memory that graphs keep. Then the largest category, by what makes it smaller. No figure is promised:
what a lever gives depends on the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torchfast.memory.account import (
    CACHED,
    GRAPHS,
    GRAPHS_KEPT,
    PIECES,
    POOLS_KEPT,
    REST,
    Found,
    HeldTensor,
)
from torchfast.memory.moment import MemoryMoment
from torchfast.memory.offload_options import OffloadOptions
from torchfast.memory.owners import BATCH, GRADIENTS, OPTIMIZER, PARAMETERS

_MUCH = 0.1  # the share of what is reserved from which a category is worth a word
_VOCABULARY = 16_384  # a last dimension from here on looks like logits over a vocabulary
_MOST = 6
_A_LITTLE = 0.05  # of the step's time, as a beginning


def advice(
    found: Found,
    moment: MemoryMoment,
    stage: str,
    facts: Mapping[str, Any],
    num_samples: int | None = None,
) -> tuple[str, ...]:
    """Return what to try, the most promising first.

    Args:
        found: What the blocks are.
        moment: The allocator's figures.
        stage: Where memory ran out.
        facts: The plan's fields by name; what a plan does not have is not advised.
        num_samples: Those of what was run at once, where that is known. One is not halved.
    """
    told = _advice(found, moment, stage, facts, num_samples)
    return tuple(dict.fromkeys(told))[:_MOST]


def _advice(
    found: Found,
    moment: MemoryMoment,
    stage: str,
    facts: Mapping[str, Any],
    num_samples: int | None,
) -> Iterator[str]:
    total = moment.reserved_bytes or sum(line.num_bytes for line in found.in_use) or 1
    sizes = {line.name: line.num_bytes for line in (*found.in_use, *found.not_in_use)}

    def is_much(*names: str) -> bool:
        return sum(sizes.get(name, 0) for name in names) >= _MUCH * total

    yield from _of_others(moment)
    wasted = sizes.get(PIECES, 0) + sizes.get(CACHED, 0)
    if moment.requested_bytes is not None and wasted >= moment.requested_bytes:
        yield (
            "enough is reserved but free in pieces that are too small: "
            "Plan(allocator='variable-shapes'), before the first allocation"
        )
    if is_much(GRAPHS, GRAPHS_KEPT):
        yield (
            "graphs keep memory for each shape of the batch: pad or bucket to fewer shapes, "
            "Plan(cuda_graph=CUDAGraphOptions(max_graphs=...)) with a lower number, or "
            "Plan(cuda_graph=False)"
        )
    if is_much(POOLS_KEPT):
        yield "memory pools keep what is free in them: let go of one, and of its tensors, after use"
    in_activations = stage in ("forward", "backward", "capture", "step")
    if in_activations and (is_much(REST, GRAPHS) or not found.not_in_use):
        yield from _of_activations(found, facts)
        if num_samples != 1:
            yield from _of_the_batch(facts)
    if is_much(OPTIMIZER) or stage == "update":
        yield (
            "the optimizer's state: AdamW with less of it (Plan(optimizer='adamw8bit')), its state "
            "on the host (Plan(offload='optimizer')), or " + _sharding(facts)
        )
    if is_much(PARAMETERS, GRADIENTS):
        blocks = ""
        offload = facts.get("offload")
        are_on_host = offload == "parameters" or getattr(offload, "parameters", None) is not None
        if "offload" in facts and not are_on_host and facts.get("shard") is None:
            blocks = "those of blocks on the host (Plan(offload='parameters')), or "
        yield f"parameters and gradients: {blocks}{_sharding(facts)}"
    if is_much(BATCH):
        yield "the batch: trainer.prefetch(loader, depth=1) holds fewer of them on the device"


def _of_others(moment: MemoryMoment) -> Iterator[str]:
    if moment.total_bytes is None or moment.free_bytes is None:
        return
    outside = moment.total_bytes - moment.free_bytes - moment.reserved_bytes
    if outside >= 0.2 * moment.total_bytes:
        yield "others hold much of this device: look with nvidia-smi who, and end what is left over"
    if moment.limit_bytes is not None and moment.limit_bytes < moment.total_bytes:
        yield (
            "this process may not take the whole device: raise per_process_memory_fraction of "
            "AllocatorConfig, or torch.cuda.set_per_process_memory_fraction"
        )


def _of_activations(found: Found, facts: Mapping[str, Any]) -> Iterator[str]:
    if any(_is_logits(held) for held in found.largest):
        yield (
            "logits over a vocabulary: torchfast.losses.linear_cross_entropy computes the loss "
            "without them"
        )
    if _format(facts.get("precision")) in ("as_given", "fp32", "tf32"):
        yield "activations in half the bytes: Plan(precision='bf16'), which is close, not exact"
    if "recompute" in facts and not facts["recompute"]:
        yield "activations computed again in the backward pass: Plan(recompute='blocks')"
    elif facts.get("recompute") == "selective":
        yield "all of a block computed again, not only what is cheap: Plan(recompute='blocks')"
    if "offload" in facts and not facts["offload"]:
        yield "activations on the host until the backward pass: Plan(offload='activations')"
    elif _offloaded(facts.get("offload")) == "auto":
        yield from _of_more_than_hides(OffloadOptions.of(facts["offload"]))


def _of_the_batch(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "a smaller batch with more of them in a step: accumulate=2 and half the batch size"
    action = getattr(facts.get("out_of_memory"), "action", facts.get("out_of_memory"))
    if action == "raise":
        yield (
            "steps that do not fit run in parts, by themselves: Plan(out_of_memory='split'), for a "
            "loss_fn that returns a mean over samples or (sum, metrics, weight)"
        )


def _of_more_than_hides(options: OffloadOptions) -> Iterator[str]:
    sent = "hides and may be waited for"
    if not options.max_slowdown:
        sent, slower = "hides", replace(options, max_slowdown=_A_LITTLE)
        yield (
            "more activations on the host than hide, as many as the computation waits for no "
            f"longer than {_A_LITTLE:.0%} of its time: Plan(offload={slower})"
        )
    word = "all" if options.optimizer else "activations"
    yield f"all activations on the host, not only what {sent}: Plan(offload={word!r})"


def _format(precision: Any) -> str:
    return precision if isinstance(precision, str) else str(getattr(precision, "format", ""))


def _offloaded(offload: Any) -> Any:
    return getattr(offload, "activations", offload)


def _is_logits(held: HeldTensor) -> bool:
    last = re.match(r"\((?:\d+, )+(\d+)\)", held.form)
    return held.category == REST and last is not None and int(last[1]) >= _VOCABULARY


def _sharding(facts: Mapping[str, Any]) -> str:
    strategy = getattr(facts.get("shard"), "strategy", facts.get("shard"))
    if strategy in ("fsdp", "hsdp"):
        return "more devices to shard it over"
    if "shard" in facts:
        return "Plan(shard='fsdp') over several devices"
    return "torch.distributed.fsdp.fully_shard over several devices"
