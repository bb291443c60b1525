"""Plan: what torchfast does to a training step, as a value.

One field a lever, each a plain scalar or an options object. A plan decides nothing by itself: the
step reads it, asks the device what is possible, and says in its report what came of it.

A step applies a plan in this order: what changes the model (float8, recompute, sharding; see
`transforms`), since an optimizer must be built behind it; channels_last, which lays the storage of
parameters out anew but keeps the parameter objects, and with them the optimizer's state; then
compilation, in place; then the optimizer's form; then the graph, which holds all of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from torchfast._core.arguments import check_choice, check_flag, explain_init_keywords, suggestion
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields
from torchfast.compiler import CompileOptions
from torchfast.graphs import CUDAGraphOptions
from torchfast.memory import OffloadOptions, OutOfMemoryOptions, RecomputeOptions
from torchfast.parallel import ShardOptions
from torchfast.precision import (
    LOW_BIT_WORDS,
    Float8Options,
    LowBitOptions,
    NonfiniteOptions,
    PrecisionOptions,
    precision_from,
)
from torchfast.profiling import SYNC_MODES

if TYPE_CHECKING:
    from torchfast.memory import AllocatorConfig


def _read_allocator(text: str) -> AllocatorConfig:
    from torchfast.memory import AllocatorConfig  # which few plans name

    return AllocatorConfig.parse(text)


# What ranks that train together must have alike: collectives, or numbers, depend on it.
_SHARED: Final = ("shard", "precision", "nonfinite", "optimizer", "cuda_graph")
# The fields that may be an options object, and its class, for reading a plan.
_OPTIONS: Final[dict[str, Callable[..., Any]]] = {
    "precision": precision_from,
    "optimizer": LowBitOptions,
    "nonfinite": NonfiniteOptions,
    "recompute": RecomputeOptions,
    "compile": CompileOptions,
    "cuda_graph": CUDAGraphOptions,
    "offload": OffloadOptions,
    "shard": ShardOptions,
    "allocator": _read_allocator,
    "out_of_memory": OutOfMemoryOptions,
}

Precision = Literal["as_given", "auto", "fp32", "tf32", "bf16", "fp16", "fp8"]
UpdateForm = Literal["as_given", "fused", "adamw8bit", "adamw4bit", "adamwfp8"]
Recomputed = bool | float | str | tuple[Any, ...] | list[Any] | set[Any] | RecomputeOptions


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done to a step. The default changes no number.

    Presets, by name wherever a plan is taken:

    - ``"eager"``: nothing, the plain loop.
    - ``"exact"``: only what cannot change a number: the whole step in one CUDA graph.
    - ``"fast"``: that, and bf16 where the device computes it natively, channels_last and
      measured kernels for convolutions, on CUDA torch.compile, the fused optimizer. Close, not
      exact.

    Args:
        precision: ``"as_given"``, ``"auto"``, ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"`` or
            `PrecisionOptions`; ``"fp8"`` or `Float8Options` for linear layers in float8.
        channels_last: Lay 4-d parameters and batch tensors out as NHWC, if the model convolves.
        cudnn_benchmark: Have cuDNN try its kernels where a convolution meets a new shape, and take
            the fastest; for up to 8 shapes of batches, and not under deterministic algorithms.
        optimizer: ``"as_given"``, or ``"fused"``: the fused update where torch has one. Or an
            AdamW with moments in fewer bits, built in place of the AdamW that the callable given
            builds: ``"adamw8bit"``, ``"adamw4bit"``, ``"adamwfp8"`` (see `LowBitAdamW`), or
            `LowBitOptions`, which can round bf16 weights by chance besides.
        nonfinite: What to do about a NaN or infinite loss or gradient: ``"propagate"``, as a
            plain loop does, ``"skip"``, which leaves parameters, optimizer state and buffers as
            they were, or `NonfiniteOptions`.
        recompute: Compute activations again in the backward, and do not keep them: ``"blocks"``,
            ``"selective"``, paths and module classes, a number between 0 and 1 (the memory budget
            of the compiler, with ``compile`` only), or `RecomputeOptions`.
        compile: Compile the loss function with the model: True, False, ``"auto"`` (on CUDA devices,
            where it is not slower) or `CompileOptions`.
        cuda_graph: Capture the whole step into one CUDA graph: True, False or `CUDAGraphOptions`.
        offload: Keep in the host's memory what the device does not need yet: ``"activations"``,
            ``"auto"`` (those whose copies hide behind the computation), ``"optimizer"`` (its state,
            with the update), ``"all"`` (activations and state), ``"parameters"`` (those of blocks
            that are not computed, with state and update), `OffloadOptions`, which can let copies
            hold up the computation for a stated part of its time, or None.
        shard: Train on several ranks: ``"ddp"``, ``"fsdp"``, ``"hsdp"``, `ShardOptions`, or None,
            in which case each process trains by itself.
        sync_guard: Find the lines that make the host wait for the device: ``"off"``, ``"record"``
            (in the report), ``"warn"`` or ``"raise"``; see `SyncGuard`.
        allocator: Settings of torch's memory allocators, made before anything else: a preset's
            name or `AllocatorConfig`. They are the process's, and stay.
        out_of_memory: What to do about a step that does not fit into memory: ``"raise"`` an
            `OutOfMemoryError` with an account; ``"split"``, which does the step again with its
            micro-batches in parts, on all ranks, and is close; or `OutOfMemoryOptions`.

    Raises:
        PlanError: A value that does not exist, or fields that contradict each other.

    Example:
        >>> Plan.preset("exact").replace(precision="fp16")
        Plan(precision='fp16', cuda_graph=True)
        >>> Plan.from_json(Plan(precision="bf16").to_json())
        Plan(precision='bf16')
    """

    precision: Precision | PrecisionOptions | Float8Options = "as_given"
    channels_last: bool = False
    cudnn_benchmark: bool = False
    optimizer: UpdateForm | LowBitOptions = "as_given"
    nonfinite: Literal["propagate", "skip"] | NonfiniteOptions = "propagate"
    recompute: Recomputed = False
    compile: bool | Literal["auto"] | CompileOptions = False
    cuda_graph: bool | CUDAGraphOptions = False
    offload: (
        Literal["activations", "auto", "optimizer", "all", "parameters"] | OffloadOptions | None
    ) = None
    shard: Literal["ddp", "fsdp", "hsdp"] | ShardOptions | None = None
    sync_guard: Literal["off", "record", "warn", "raise"] = "off"
    allocator: str | AllocatorConfig | None = None
    out_of_memory: Literal["raise", "split"] | OutOfMemoryOptions = "raise"

    PRESETS: ClassVar[tuple[str, ...]] = ("eager", "exact", "fast")

    def __post_init__(self) -> None:
        options = PrecisionOptions.of(self.precision)
        # One way to write each plan, so that equal plans are equal.
        if not options.scaling and self.float8_options in (None, Float8Options()):
            object.__setattr__(self, "precision", options.format)
        check_flag("channels_last", self.channels_last)
        check_flag("cudnn_benchmark", self.cudnn_benchmark)
        if isinstance(self.optimizer, LowBitOptions):
            object.__setattr__(self, "optimizer", self.optimizer.word or self.optimizer)
        else:
            known = "as_given", "fused", *LOW_BIT_WORDS
            check_choice("optimizer", self.optimizer, known, PlanError)
        nonfinite = NonfiniteOptions.of(self.nonfinite)
        if nonfinite.stop_after is None:
            object.__setattr__(self, "nonfinite", nonfinite.action)
        if not isinstance(self.compile, bool | CompileOptions) and self.compile != "auto":
            raise TypeError(
                f"compile must be True, False, 'auto' or CompileOptions, got {self.compile!r}"
            )
        if self.compile == CompileOptions():
            object.__setattr__(self, "compile", True)
        if not isinstance(self.cuda_graph, bool | CUDAGraphOptions):
            raise TypeError(
                f"cuda_graph must be True, False or CUDAGraphOptions, got {self.cuda_graph!r}"
            )
        if self.cuda_graph == CUDAGraphOptions():
            object.__setattr__(self, "cuda_graph", True)
        if self.shard is not None:
            options_of_shard = ShardOptions.of(self.shard)
            if options_of_shard == ShardOptions.of(options_of_shard.strategy):
                object.__setattr__(self, "shard", options_of_shard.strategy)
        recompute = self.recompute_options
        if recompute is not None:
            object.__setattr__(self, "recompute", recompute.shortest)
            if recompute.budget is not None and self.compile is False:
                raise PlanError(
                    f"recompute={recompute.budget} is a memory budget for the compiler, and "
                    "compile=False; add compile=True, or use recompute='blocks' or 'selective'"
                )
        if self.offload is not None:
            offload = OffloadOptions.of(self.offload)
            object.__setattr__(self, "offload", offload.word or offload)
            self._check_offload(offload)
        if self.shard is not None and (self.compile_options or CompileOptions()).mode == "auto":
            # Each rank would run as many backwards as its own watch allows.
            raise PlanError(
                "CompileOptions(mode='auto') does not go with shard=...: ranks that measure by "
                "themselves wait for each other for ever; search in one process without shard, "
                "and name the mode that it takes"
            )
        if (float8 := self.float8_options) is not None and float8.all_gather:
            self._check_gather()
        if self.compiles_update and self.shard is not None:
            # Where one could not, its replica would round otherwise than the others', for ever.
            raise PlanError(
                "CompileOptions(update=...) does not go with shard=...: each rank would compile "
                "its update by itself; leave update out, and take optimizer='fused'"
            )
        check_choice("sync_guard", self.sync_guard, ("off", *SYNC_MODES), PlanError)
        _ = self.allocator_config  # or raise
        out_of_memory = OutOfMemoryOptions.of(self.out_of_memory)
        if out_of_memory == OutOfMemoryOptions(action=out_of_memory.action):
            object.__setattr__(self, "out_of_memory", out_of_memory.action)

    @classmethod
    def preset(cls, name: str) -> Plan:
        """Return the preset plan of this name."""
        if name in PrecisionOptions.FORMATS:
            raise PlanError(
                f"plan must be one of {list(cls.PRESETS)} or a Plan, got {name!r}; that is a "
                f"precision: plan=Plan(precision={name!r})"
            )
        check_choice("plan", name, cls.PRESETS, PlanError)
        if name == "fast":
            return cls(
                precision="auto",
                channels_last=True,
                cudnn_benchmark=True,
                optimizer="fused",
                compile="auto",
                cuda_graph=True,
            )
        return cls(cuda_graph=name == "exact")

    @classmethod
    def of(cls, plan: object) -> Plan:
        """Return a plan from a preset's name or from a plan."""
        if isinstance(plan, cls):
            return plan
        if isinstance(plan, str):
            return cls.preset(plan)
        raise TypeError(
            f"plan must be one of {list(cls.PRESETS)} or a Plan, "
            f"got {plan!r} ({type(plan).__name__})"
        )

    @property
    def precision_options(self) -> PrecisionOptions:
        """The precision as an options object."""
        return PrecisionOptions.of(self.precision)

    def optimizer_source(self, source: Any) -> Any:
        """Return what builds the optimizer, given an optimizer or what builds one."""
        options = self.low_bit_options
        if options is None:
            return source
        from torchfast.precision import low_bit_source  # which few plans need

        return low_bit_source(source, options)

    @property
    def low_bit_options(self) -> LowBitOptions | None:
        """The AdamW that is built in place of another, as an options object; None if none is."""
        return LowBitOptions.of(self.optimizer)

    @property
    def float8_options(self) -> Float8Options | None:
        """Which layers are in float8 and how; None if none is."""
        return Float8Options.of(self.precision)

    @property
    def nonfinite_options(self) -> NonfiniteOptions:
        """What to do about what is not finite, as an options object."""
        return NonfiniteOptions.of(self.nonfinite)

    @property
    def recompute_options(self) -> RecomputeOptions | None:
        """What is recomputed, as an options object; None if nothing is."""
        return RecomputeOptions.of(self.recompute)

    @property
    def compile_options(self) -> CompileOptions | None:
        """How the loss function is compiled, as an options object; None if it is not."""
        if isinstance(self.compile, CompileOptions):
            return self.compile
        return CompileOptions() if self.compile else None

    @property
    def compiles_update(self) -> bool:
        """Whether the optimizer's update may be compiled."""
        options = self.compile_options
        return options is not None and options.update is not False

    @property
    def graph_options(self) -> CUDAGraphOptions | None:
        """How the step is captured, as an options object; None if it is not."""
        if isinstance(self.cuda_graph, CUDAGraphOptions):
            return self.cuda_graph
        return CUDAGraphOptions() if self.cuda_graph else None

    @property
    def offload_options(self) -> OffloadOptions | None:
        """What waits on the host, as an options object; None if nothing does."""
        return None if self.offload is None else OffloadOptions.of(self.offload)

    @property
    def shard_options(self) -> ShardOptions | None:
        """How the model is spread over ranks, as an options object; None if it is not."""
        return None if self.shard is None else ShardOptions.of(self.shard)

    @property
    def allocator_config(self) -> AllocatorConfig | None:
        """The allocator's settings as an object; None if they are left alone."""
        if self.allocator is None:
            return None
        from torchfast.memory import check_allocator  # which few plans need

        return check_allocator(self.allocator)

    @property
    def out_of_memory_options(self) -> OutOfMemoryOptions:
        """What to do about a step that does not fit, as an options object."""
        return OutOfMemoryOptions.of(self.out_of_memory)

    def replace(self, **changes: Any) -> Plan:
        """Return a copy with some fields changed."""
        return type(self)(**{**{f: getattr(self, f) for f in _fields(type(self))}, **changes})

    @property
    def shared(self) -> dict[str, object]:
        """What must be the same on all ranks, JSON-ready."""
        changed = self._changed()
        shared: dict[str, object] = {name: _to_plain(changed.get(name)) for name in _SHARED}
        options = self.out_of_memory_options  # each may write a snapshot of its own
        return shared | {"out_of_memory": options.action, "max_parts": options.max_parts}

    def to_json(self) -> str:
        """Return the plan as a JSON object, defaults left out, classes and functions by name."""
        return json.dumps({k: _to_plain(v) for k, v in self._changed().items()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: Not a JSON object, or a field or value that this version does not know.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise PlanError(f"not a plan in JSON: {error}") from error
        if not isinstance(values, dict):
            raise PlanError(f"a plan in JSON is an object, got {type(values).__name__}")
        for name in values:
            if name not in _fields(cls):
                known = _fields(cls)
                raise PlanError(f"Plan has no field {name!r}{suggestion(name, known)}")
        try:
            for name, options in _OPTIONS.items():
                if isinstance(values.get(name), dict):
                    values[name] = options(**values[name])
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise PlanError(f"not a plan in JSON: {error}") from error

    def _check_offload(self, offload: OffloadOptions) -> None:
        if not (offload.optimizer or offload.parameters):
            return
        sharded, other = self.shard_options, None
        if sharded is not None and sharded.is_sharded:
            other = (
                f"shard={sharded.strategy!r}: ShardOptions(offload=True) keeps shards on the host"
            )
        elif PrecisionOptions.of(self.precision).format == "fp16":
            other = "precision='fp16', whose updates are called off on the device: take bf16"
        elif self.nonfinite_options.action == "skip":
            other = "nonfinite='skip', which calls updates off on the device"
        elif self.compiles_update:
            other = "CompileOptions(update=...): an update on the host is not compiled"
        elif offload.parameters:
            other = self._beside_parameters()
        if other is not None:
            what = "the optimizer" if offload.optimizer else "parameters"
            raise PlanError(f"offload of {what} does not go with {other}")

    def _beside_parameters(self) -> str | None:
        """Return what does not go with parameters that come and go, and why."""
        if self.shard is not None:
            return f"shard={self.shard!r}, whose ranks reduce gradients on the device: shard='fsdp'"
        if self.compile is not False:
            return f"compile={self.compile!r}, whose code holds the parameters: compile=False"
        if self.float8_options is not None:
            return "precision='fp8', which casts parameters on the device: take bf16"
        if self.low_bit_options is not None:
            return f"optimizer={self.optimizer!r}, whose update is on the device: take 'fused'"
        return None

    def _check_gather(self) -> None:
        sharded = self.shard_options
        if sharded is None or not sharded.is_sharded:
            raise PlanError(
                f"Float8Options(all_gather=True) gathers shards, and shard={self.shard!r} has "
                "none; take shard='fsdp' or 'hsdp', or leave all_gather out"
            )
        if sharded.offload:
            raise PlanError(
                "Float8Options(all_gather=True) casts shards where they are gathered, and "
                "ShardOptions(offload=True) keeps them on the host; leave out one of them"
            )

    def _changed(self) -> dict[str, Any]:
        return changed_fields(self)

    def __repr__(self) -> str:
        """Return the call that makes this plan, defaults left out."""
        return call_of(self, self._changed())


def _fields(cls: type[Plan]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _to_plain(value: Any) -> Any:
    if isinstance(value, PrecisionOptions):
        return {"format": value.format, **value.scaling}
    if isinstance(value, Float8Options):
        return {"format": "fp8", **value.changed}
    if isinstance(value, NonfiniteOptions):
        return dataclasses.asdict(value)
    if hasattr(value, "to_text"):  # an AllocatorConfig
        return {"text": value.to_text()}
    changed = getattr(value, "changed", None)  # of an options object
    return value if changed is None else changed
