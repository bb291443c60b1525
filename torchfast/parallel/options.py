"""What a user can say about training on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn

from torchfast._core.arguments import (
    check_callable,
    check_choice,
    check_flag,
    check_int,
    check_positive,
    check_type,
    explain_init_keywords,
)
from torchfast._core.decisions import Decision, Outcome
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields, json_ready

Strategy = Literal["ddp", "fsdp", "hsdp"]
GatherDtype = Literal["auto", "fp32", "bf16", "fp16"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard_decision(outcome: Outcome, detail: str) -> Decision:
    """Return what became of the lever, as a value."""
    return Decision(lever="shard", outcome=outcome, detail=detail)


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How a model trains on several ranks.

    Args:
        strategy: ``"ddp"``: each rank has the whole model, and gradients are averaged.
            ``"fsdp"``: parameters, gradients and optimizer state are sharded over all ranks.
            ``"hsdp"``: sharded within a group of ranks, by default those of one node, and
            replicated over the groups.
        num_replicas: Under ``"hsdp"``, how many groups; None means one a node.
        mesh: A ``DeviceMesh`` of your own, of all ranks: of one dimension, or under ``"hsdp"`` of
            two, (replicas, shards), with names. None makes one.
        blocks: What is sharded by the piece, so that only one piece at a time is whole in memory:
            ``"auto"`` takes the repeated blocks; or name them by paths, in which ``*`` stands for
            one name, and by module classes.
        reshard_after_forward: Whether a block is taken apart again after its forward, and gathered
            a second time in the backward; False keeps it whole, for memory. A number, as
            ``fully_shard`` has it, takes it apart over so many ranks only: a divisor of those that
            share a model, such as the GPUs of a machine.
        gather_dtype: Dtype in which parameters are gathered and used; ``"auto"`` takes the
            precision of the plan where that has 16 bits, else their own.
        reduce_dtype: Dtype in which gradients are reduced.
        mp_policy: torch's ``MixedPrecisionPolicy`` as it is, in place of these two; also casts
            what goes into blocks, and what the model returns, as it says.
        offload: Keep shards in host memory, and gather from there.
        bucket_mb: Under ``"ddp"``, how much of the gradients is reduced at a time, in MiB;
            ``"auto"`` measures some sizes on the first batch.
        prefetch: Blocks that are gathered ahead of the one that runs, forward and backward;
            ``"auto"`` measures some depths on the first batch.
        ignored: Paths or module classes whose parameters ``"fsdp"`` and ``"hsdp"`` do not shard:
            each rank has them whole, and their gradients are averaged behind the backward, one that
            no rank has as zeros. So it is with parameters without dimensions and, where shards are
            gathered in bf16, with those of BatchNorm beside its statistics in fp32. Those that are
            a ``DTensor`` already are left to you.
        unused_parameters: Under ``"ddp"``, whether a step may leave parameters without a gradient;
            it costs a walk through the graph of each forward.
        initialize: ``initialize(model)`` fills parameters of a model that was built on the meta
            device; None calls ``reset_parameters()`` of the modules that own them.
        timeout_s: How long a rank waits for the others.

    Raises:
        PlanError: A choice that does not exist, or options of one strategy given for another.

    Example:
        >>> ShardOptions(strategy="fsdp", reshard_after_forward=False)
        ShardOptions(strategy='fsdp', reshard_after_forward=False)
    """

    strategy: Strategy = "ddp"
    num_replicas: int | None = None
    mesh: Any = None  # a DeviceMesh, whose class takes long to import, as does the next one's
    blocks: Literal["auto"] | tuple[str | type[nn.Module], ...] = "auto"
    reshard_after_forward: bool | int = True
    gather_dtype: GatherDtype = "auto"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    mp_policy: Any = None
    offload: bool = False
    bucket_mb: float | Literal["auto"] = 25.0
    prefetch: int | Literal["auto"] = 1
    ignored: tuple[str | type[nn.Module], ...] = ()
    unused_parameters: bool = False
    initialize: Callable[[Any], Any] | None = None
    timeout_s: float = 600.0

    STRATEGIES: ClassVar[tuple[str, ...]] = ("ddp", "fsdp", "hsdp")

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, self.STRATEGIES, PlanError)
        if self.num_replicas is not None:
            check_int("num_replicas", self.num_replicas, minimum=1)
        for name in ("blocks", "ignored"):
            object.__setattr__(self, name, _selection(name, getattr(self, name)))
        if type(self.reshard_after_forward) is int:
            check_int("reshard_after_forward", self.reshard_after_forward, minimum=2)
        else:
            check_flag("reshard_after_forward", self.reshard_after_forward)
        self._check_torchs()
        check_choice("gather_dtype", self.gather_dtype, ("auto", *DTYPES), PlanError)
        check_choice("reduce_dtype", self.reduce_dtype, tuple(DTYPES), PlanError)
        check_flag("offload", self.offload)
        if self.bucket_mb != "auto":
            check_positive("bucket_mb", self.bucket_mb)
        if self.prefetch != "auto":
            check_int("prefetch", self.prefetch, minimum=1)
        check_flag("unused_parameters", self.unused_parameters)
        check_positive("timeout_s", self.timeout_s)
        if self.initialize is not None:
            check_callable("initialize", self.initialize, "initialize(model)")
        self._check_strategy()

    @classmethod
    def of(cls, value: object) -> ShardOptions:
        """Return options from the scalar form ``"fsdp"`` or from options."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            check_choice("shard", value, cls.STRATEGIES, PlanError)
            return cls(strategy=cast(Strategy, value))
        raise TypeError(
            f"shard must be None, one of {list(cls.STRATEGIES)} or ShardOptions, "
            f"got {value!r} ({type(value).__name__})"
        )

    @property
    def is_measured(self) -> bool:
        """Whether something is to be found out on the first batch."""
        return "auto" in (self.bucket_mb, self.prefetch)

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded, so that they become others."""
        return self.strategy != "ddp"

    @property
    def changed(self) -> dict[str, object]:
        """The strategy and what is not as by default, JSON-ready: classes and functions by name."""
        return {name: json_ready(value) for name, value in self._changed().items()}

    def _changed(self) -> dict[str, Any]:
        return {"strategy": self.strategy, **changed_fields(self)}

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, self._changed())

    def _check_torchs(self) -> None:
        """Check what is an object of torch's."""
        if self.mesh is not None:
            from torch.distributed.device_mesh import DeviceMesh  # when one is there, at the latest

            check_type("mesh", self.mesh, DeviceMesh)
            if self.num_replicas is not None:
                raise PlanError(
                    "mesh and num_replicas both say how many replicas there are; leave one out"
                )
        if self.mp_policy is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            check_type("mp_policy", self.mp_policy, MixedPrecisionPolicy)
            if (self.gather_dtype, self.reduce_dtype) != ("auto", "fp32"):
                raise PlanError(
                    "mp_policy says in which dtypes to gather and to reduce; leave out it, or "
                    "gather_dtype and reduce_dtype"
                )

    def _check_strategy(self) -> None:
        """Refuse what would have no effect under this strategy."""
        of_others = {
            "ddp": (
                "blocks", "reshard_after_forward", "gather_dtype", "reduce_dtype", "mp_policy",
                "offload", "prefetch", "ignored", "num_replicas",
            ),
            "fsdp": ("bucket_mb", "unused_parameters", "num_replicas"),
            "hsdp": ("bucket_mb", "unused_parameters"),
        }  # fmt: skip
        odd = [name for name in of_others[self.strategy] if name in self._changed()]
        if odd:
            raise PlanError(
                f"{odd[0]}={getattr(self, odd[0])!r} has no meaning for "
                f"strategy={self.strategy!r}; drop it, or choose another strategy"
            )


def _selection(name: str, value: object) -> object:
    if name == "blocks" and value == "auto":
        return value
    chosen = tuple(value) if isinstance(value, list) else value
    if not isinstance(chosen, tuple) or not all(isinstance(c, str | type) for c in chosen):
        raise TypeError(f"{name} must be paths or module classes in a tuple, got {value!r}")
    return chosen
