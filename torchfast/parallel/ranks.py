"""The ranks of a run: which one this process is, and what they tell each other on the host.

A launcher such as torchrun starts one process a GPU and tells each by environment variables which
it is. `start_ranks` reads them, takes the GPU, and starts the process group. What the user's script
has done of that is left as it is, and without a launcher there is one rank and nothing to start: so
one script serves a laptop and a cluster.

What ranks must decide alike goes over a group of its own on the CPU: see
`torchfast._core.rank_group`.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfast._core.arguments import check_positive
from torchfast._core.errors import PlanError
from torchfast._core.phases import COMMUNICATION, phase
from torchfast._core.rank_group import RankGroup
from torchfast.parallel.connections import abort_groups
from torchfast.parallel.last_words import LastWords

T = TypeVar("T")

logger = logging.getLogger(__name__)

# By process group, whose own class takes no attributes: both are made by all ranks together, so
# each trainer of a process must find what the first has made.
_known: WeakKeyDictionary[Any, tuple[RankGroup, LastWords]] = WeakKeyDictionary()

_PATIENCE_S = 5.0  # with what is aborted
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@final
@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that train together.

    Attributes:
        rank: This one's number.
        world_size: How many there are.
        local_rank: This one's number on its machine.
        local_world_size: How many there are on its machine.
        group: Over which they agree, on the host.
        last_words: Through which they hear that one has failed; None for one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: RankGroup = field(default_factory=RankGroup.alone, repr=False, compare=False)
    last_words: LastWords | None = field(default=None, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints, logs and writes what is written once."""
        return self.rank == 0

    @property
    def are_many(self) -> bool:
        """Whether there is more than one."""
        return self.world_size > 1

    @property
    def num_machines(self) -> int:
        """How many machines there are, where all have as many ranks."""
        return max(1, self.world_size // self.local_world_size)

    def device_for(self, device: object, model: nn.Module) -> object:
        """Return the device that this rank trains on: ``device``, with the rank's own index.

        An index that was given is kept. Without one, and for a model that lies on a GPU, each rank
        has the GPU of its local number, or the one that the script has chosen.
        """
        current = "cpu"
        if torch.cuda.is_available():
            current = f"cuda:{torch.cuda.current_device()}"
        if device is None:
            first = next(model.parameters(), None)
            kind = None if first is None else first.device.type
            is_free = kind == "meta" or (kind == "cuda" and self.are_many)
            return current if is_free else None
        # Anything else says more, or is refused by whoever asked.
        return current if self.are_many and device in ("cuda", torch.device("cuda")) else device

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes. Synchronizes: The ranks' hosts, not the device."""
        return self.group.all_agree(yes)

    def any_says(self, yes: bool) -> bool:
        """Return whether any rank says yes. Synchronizes: The ranks' hosts, not the device."""
        return any(self.group.gather(yes))

    def have_equal(self, value: Any) -> bool:
        """Return whether all ranks have the same value."""
        first, *others = self.group.gather(value)
        return all(other == first for other in others)

    def of_first(self, value: T) -> T:
        """Return what the first rank has."""
        return self.group.gather(value)[0]


def start_ranks(*, timeout_s: float = 600.0) -> Ranks:
    """Take this process's place among the ranks, and start the process group if nobody has.

    Call it first thing in a script that puts things on ``"cuda"`` itself, so that they lie on this
    rank's GPU; `Trainer` calls it under ``Plan(shard=...)``. A second call changes nothing.

    Args:
        timeout_s: How long a rank waits for the others, where the group is started here.

    Returns:
        The ranks; one where no launcher such as torchrun has started this process.

    Raises:
        PlanError: A launcher's environment is incomplete.

    Example:
        >>> start_ranks().world_size
        1
    """
    check_positive("timeout_s", timeout_s)
    if not dist.is_available():
        return Ranks()
    if not dist.is_initialized():
        if not _was_launched(os.environ):
            return Ranks()
        _take_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        _start_group(timeout_s)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size == 1:
        return Ranks(local_rank=local_rank)
    _take_device(local_rank)
    group, last_words = _meeting(rank, world_size, timeout_s)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        group=group,
        last_words=last_words,
    )


def _was_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several."""
    if "WORLD_SIZE" not in environment and "RANK" not in environment:
        return False
    missing = [name for name in _NEEDED if name not in environment]
    if missing:
        raise PlanError(
            f"the environment names a rank but lacks {', '.join(missing)}; start the script with "
            "torchrun --nproc-per-node N, or unset RANK and WORLD_SIZE to train in one process"
        )
    return True


def _take_device(local_rank: int) -> None:
    """Make the rank's GPU the current one, unless the script has chosen one."""
    if not torch.cuda.is_available() or torch.cuda.current_device() != 0:
        return
    count = torch.cuda.device_count()
    # A launcher that shows each rank one GPU only calls it 0 in all of them.
    if 0 < local_rank < count:
        torch.cuda.set_device(local_rank)


def _start_group(timeout_s: float) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )
    # NCCL warns of groups that are left to the end of the process.
    atexit.register(_end_group)


def _end_group() -> None:
    if not dist.is_initialized():
        return
    found = _known.get(dist.group.WORLD)
    threads = []
    if found is not None:
        group, last_words = found
        if last_words.has_failed:
            # To destroy groups is to wait for their kernels, which may wait for other ranks.
            try:
                threads = abort_groups()
            except RuntimeError:  # Python 3.12 starts no thread at its end
                return
        group.drop_graphs()  # behind what ends the replays that wait
        for thread in threads:
            thread.join(_PATIENCE_S)
        if any(thread.is_alive() for thread in threads):
            return
    with suppress(RuntimeError, ValueError):  # a group that failed, or whose ranks are gone
        dist.destroy_process_group()


def _meeting(rank: int, world_size: int, timeout_s: float) -> tuple[RankGroup, LastWords]:
    """Return over what ranks agree and hear of each other; the same for all calls."""
    world: Any = dist.group.WORLD
    found = _known.get(world)
    if found is None:
        last_words = LastWords(rank, world_size)
        group = RankGroup.join(timeout_s, told=last_words.told)
        found = _known[world] = group, last_words
    return found


def send_from_first(ranks: RankGroup, tensors: Iterable[Tensor]) -> None:
    """Make tensors what they are on the first rank, in place.

    Those on the host go over the ranks' own group: the script's may be one of NCCL alone.
    """
    for tensor in tensors:
        held = tensor.detach()
        for dim, (size, stride) in enumerate(zip(held.shape, held.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: gloo would write all of what is there once
                held = held.narrow(dim, 0, 1)
        sent = held.contiguous()
        if sent.device.type == "cpu":
            ranks.send_from_first(sent)
        else:
            dist.broadcast(sent, src=0)
        if sent is not held:
            held.copy_(sent)


def mean_over_ranks(value: Tensor, ask: Callable[[], None] = lambda: None) -> Tensor:
    """Return the mean over the ranks of a tensor, on its device, without waiting for it.

    ``ask`` is called right before the ranks come together.
    """
    result = value.detach().clone()
    ask()
    if result.device.type == "cpu":  # gloo has no mean
        with phase(COMMUNICATION):
            dist.all_reduce(result)
        return result.div_(dist.get_world_size())
    with phase(COMMUNICATION):
        dist.all_reduce(result, dist.ReduceOp.AVG)
    return result


def largest_over_ranks(value: Tensor) -> Tensor:
    """Return the largest of a tensor's values over the ranks, likewise."""
    result = value.detach().clone()
    with phase(COMMUNICATION):
        dist.all_reduce(result, dist.ReduceOp.MAX)
    return result
