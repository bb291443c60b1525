"""Plan: what torchfast does to a training step, as a value.

One field a lever, each a plain scalar or an options object. A plan decides nothing by itself: the
step reads it, asks the device what is possible, and says in its report what came of it.

A step applies a plan in this order: channels_last, which lays the storage of parameters out anew
but keeps the parameter objects, and with them the optimizer's state; then compilation, in place;
then the optimizer's form; then the graph, which holds all of it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchfast._core.arguments import check_choice, explain_init_keywords, suggestion
from torchfast._core.errors import PlanError
from torchfast.compiler import CompileOptions
from torchfast.graphs import CUDAGraphOptions
from torchfast.precision import NonfiniteOptions, PrecisionOptions

Precision = Literal["as_given", "auto", "fp32", "tf32", "bf16", "fp16"]


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done to a step. The default changes no number.

    Presets, by name wherever a plan is taken:

    - ``"eager"``: nothing, the plain loop.
    - ``"exact"``: only what cannot change a number: the whole step in one CUDA graph.
    - ``"fast"``: that, and bf16 where the device computes it natively, channels_last for
      convolutions, on CUDA torch.compile, the fused optimizer. Close, not exact.

    Args:
        precision: ``"as_given"``, ``"auto"``, ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"`` or
            `PrecisionOptions`.
        channels_last: Lay 4-d parameters and batch tensors out as NHWC, if the model convolves.
        optimizer: ``"as_given"``, or ``"fused"``: the fused update where torch has one.
        nonfinite: What to do about a NaN or infinite loss or gradient: ``"propagate"``, as a
            plain loop does, ``"skip"``, which leaves parameters, optimizer state and buffers as
            they were, or `NonfiniteOptions`.
        compile: Compile the loss function with the model: True, False, ``"auto"`` (on CUDA devices
            only) or `CompileOptions`.
        cuda_graph: Capture the whole step into one CUDA graph: True, False or `CUDAGraphOptions`.

    Raises:
        PlanError: A value that does not exist, or fields that contradict each other.

    Example:
        >>> Plan.preset("exact").replace(precision="fp16")
        Plan(precision='fp16', cuda_graph=True)
        >>> Plan.from_json(Plan(precision="bf16").to_json())
        Plan(precision='bf16')
    """

    precision: Precision | PrecisionOptions = "as_given"
    channels_last: bool = False
    optimizer: Literal["as_given", "fused"] = "as_given"
    nonfinite: Literal["propagate", "skip"] | NonfiniteOptions = "propagate"
    compile: bool | Literal["auto"] | CompileOptions = False
    cuda_graph: bool | CUDAGraphOptions = False

    PRESETS: ClassVar[tuple[str, ...]] = ("eager", "exact", "fast")

    def __post_init__(self) -> None:
        options = PrecisionOptions.of(self.precision)
        if not options.scaling:  # one way to write each plan, so that equal plans are equal
            object.__setattr__(self, "precision", options.format)
        if not isinstance(self.channels_last, bool):
            raise TypeError(f"channels_last must be True or False, got {self.channels_last!r}")
        check_choice("optimizer", self.optimizer, ("as_given", "fused"), PlanError)
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

    @classmethod
    def preset(cls, name: str) -> Plan:
        """Return the preset plan of this name."""
        check_choice("plan", name, cls.PRESETS, PlanError)
        if name == "fast":
            return cls(
                precision="auto",
                channels_last=True,
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

    @property
    def nonfinite_options(self) -> NonfiniteOptions:
        """What to do about what is not finite, as an options object."""
        return NonfiniteOptions.of(self.nonfinite)

    @property
    def compile_options(self) -> CompileOptions | None:
        """How the loss function is compiled, as an options object; None if it is not."""
        if isinstance(self.compile, CompileOptions):
            return self.compile
        return CompileOptions() if self.compile else None

    @property
    def graph_options(self) -> CUDAGraphOptions | None:
        """How the step is captured, as an options object; None if it is not."""
        if isinstance(self.cuda_graph, CUDAGraphOptions):
            return self.cuda_graph
        return CUDAGraphOptions() if self.cuda_graph else None

    def replace(self, **changes: Any) -> Plan:
        """Return a copy with some fields changed."""
        return type(self)(**{**{f: getattr(self, f) for f in _fields(type(self))}, **changes})

    def to_json(self) -> str:
        """Return the plan as a JSON object, defaults left out."""
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
            if isinstance(values.get("precision"), dict):
                values["precision"] = PrecisionOptions(**values["precision"])
            if isinstance(values.get("nonfinite"), dict):
                values["nonfinite"] = NonfiniteOptions(**values["nonfinite"])
            if isinstance(values.get("compile"), dict):
                values["compile"] = CompileOptions(**values["compile"])
            if isinstance(values.get("cuda_graph"), dict):
                values["cuda_graph"] = CUDAGraphOptions(**values["cuda_graph"])
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise PlanError(f"not a plan in JSON: {error}") from error

    def _changed(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def __repr__(self) -> str:
        """Return the call that makes this plan, defaults left out."""
        return f"Plan({', '.join(f'{k}={v!r}' for k, v in self._changed().items())})"


def _fields(cls: type[Plan]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def _to_plain(value: Any) -> Any:
    if isinstance(value, PrecisionOptions):
        return {"format": value.format, **value.scaling}
    if isinstance(value, NonfiniteOptions):
        return dataclasses.asdict(value)
    if isinstance(value, CUDAGraphOptions | CompileOptions):
        return value.changed
    return value
