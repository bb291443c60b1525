"""Which attention a model's own steps run: seen in the first two forwards, at no cost later.

What ran stands in the autograd graph of the first loss: each fused kernel of
``scaled_dot_product_attention`` leaves a node with its name. Why it was that one depends on what
the model gave, so the calls of the second forward are seen by a function mode, and
`attention_report` is asked about each kind of them: shapes, dtype, mask, dropout. The math back-end
leaves no node of its own, and calls within torch's own functions (`torch.nn.MultiheadAttention`)
are not seen by a mode: of these a report knows the one or the other.

Code that torch.compile has made chose its kernels when it was compiled, and a function mode would
have it compiled again. The inductor's code calls them by name, so of it is known which they are,
and not why; of what other back-ends have made, nothing. A capture is never looked at, nor a step
that something else watches.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torchfast._core.decisions import Decision
from torchfast._core.device import is_capturing
from torchfast._core.user_code import owner_of
from torchfast.memory.attention import AttentionReport, attention_report

_KERNELS: Final = {
    "ScaledDotProductFlashAttention": "flash",
    "ScaledDotProductCudnnAttention": "cudnn",
    "ScaledDotProductEfficientAttention": "efficient",
    "ScaledDotProductFusedAttention": "fused",
}
_COMPILED: Final = "CompiledFunction"
_CALLED: Final = re.compile(
    r"torch\.ops\.aten\._scaled_dot_product_(flash|cudnn|efficient|fused)_attention\w*\.\w+\("
)
_MOST_KINDS = 8  # of calls that are told one by one
_MOST_WRAPPERS = 8  # around compiled code
_INPUTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # may come by position


@dataclass
class _Kind:
    """What calls of attention have in common, what torch takes for them, and how many there are."""

    form: str
    line: str
    report: AttentionReport
    count: int = 0

    def __str__(self) -> str:
        backend, said = self.report.backend, self.report.reasons.get("flash", ())
        why = f" (not flash: {' '.join(said)})" if said and backend != "flash" else ""
        times = "call" if self.count == 1 else "calls"
        return f"{self.count} {times} of {self.form} at {self.line}: {backend}{why}"


@final
class AttentionWatch:
    """Watches the first two forwards of a step.

    Numerics: Bitwise equal.
    Synchronizes: Never.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._ran = _Ran()  # in the first forward
        self._calls = _Calls()  # of the second
        self._why_unseen: str | None = None

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self._num_seen != 1 or _is_watched():
            return nullcontext()
        if self._ran.num_compiled or _has_compiled():
            self._why_unseen = "something was compiled, and looking at calls would compile it again"
            return nullcontext()
        return self._calls

    def after_forward(self, loss: Tensor) -> None:
        """Look at what a forward has left; later ones cost a comparison."""
        if self._num_seen > 1 or _is_watched():
            return
        self._num_seen += 1
        if self._num_seen == 1:
            with suppress(Exception):  # a report is not worth a step
                self._ran = _ran_for(loss)

    def decisions(self) -> list[Decision]:
        """Say what was seen; nothing where no call of attention was."""
        ran = self._ran
        parts = [f"the first forward ran {_counted(ran.kernels)}"] if ran.kernels else []
        kinds = sorted(self._calls.kinds.values(), key=lambda kind: -kind.count)
        if ran.compiled_kernels:
            parts.append(
                f"its compiled parts ({ran.num_compiled}) ran {_counted(ran.compiled_kernels)}"
            )
        if ran.num_hidden and parts:
            parts.append(
                f"compiled parts ({ran.num_hidden}) chose their own when they were compiled"
            )
        parts += map(str, kinds[:_MOST_KINDS])
        if len(kinds) > _MOST_KINDS:
            parts.append(f"and {len(kinds) - _MOST_KINDS} other kinds of calls")
        if parts and not kinds:
            why = self._why_unseen or self._calls.problem
            if self._num_seen < 2:
                why = "no second forward ran outside of a graph"
            why = why or "no call of it was seen outside of torch's own functions"
            parts.append(f"shapes and reasons are not known: {why}")
        if not parts:
            return []
        return [Decision(lever="attention", outcome="left alone", detail="; ".join(parts))]


class _Calls(TorchFunctionMode):
    """Counts calls of ``scaled_dot_product_attention`` by kind.

    Attributes:
        kinds: What was seen.
        problem: What went wrong with looking at a call; None if nothing did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[Any, _Kind] = {}
        self.problem: str | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            try:
                self._note(dict(zip(_INPUTS, args, strict=False)) | kwargs)
            except Exception as error:  # torch says what is wrong with a call; a report is no step
                self.problem = f"{type(error).__name__}: {error}"
        return func(*args, **kwargs)

    def _note(self, call: dict[str, Any]) -> None:
        query, mask = call["query"], call.get("attn_mask")
        tensors = [_under_autocast(call[name]) for name in ("query", "key", "value")]
        dropout, causal = float(call.get("dropout_p", 0.0)), bool(call.get("is_causal", False))
        grouped = bool(call.get("enable_gqa", False))
        line = _line()
        key = (
            *((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors),
            None if mask is None else (mask.shape, mask.dtype, mask.requires_grad),
            (dropout, causal, grouped, line),
        )
        kind = self.kinds.get(key)
        if kind is None:
            given = None if mask is None else _under_autocast(mask)
            options = {"dropout_p": dropout, "is_causal": causal, "enable_gqa": grouped}
            report = attention_report(*tensors, attn_mask=given, **options)  # type: ignore[arg-type]
            keys = "" if call["key"].shape == query.shape else f" on {tuple(call['key'].shape)}"
            words = [
                f"{tuple(query.shape)}{keys} {str(tensors[0].dtype).removeprefix('torch.')}",
                *(["causal"] if causal else []),
                *([] if mask is None else [f"a mask {tuple(mask.shape)}"]),
                *([f"dropout {dropout:g}"] if dropout else []),
            ]
            kind = self.kinds[key] = _Kind(", ".join(words), line, report)
        kind.count += 1


def _under_autocast(tensor: Tensor) -> Tensor:
    """Return a tensor as attention gets it: autocast casts it within the call.

    One that is cast is room without contents, which torch does not look at when it chooses.
    """
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point():
        return tensor
    dtype = torch.get_autocast_dtype(kind)
    if tensor.dtype in (dtype, torch.float64):
        return tensor
    room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    return room.requires_grad_(tensor.requires_grad)


@dataclass
class _Ran:
    """The attention that a forward ran.

    Attributes:
        kernels: By what left a node in the autograd graph.
        compiled_kernels: By what the compiled parts call.
        num_compiled: The compiled parts.
        num_hidden: Those of them whose code cannot be read.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    compiled_kernels: Counter[str] = field(default_factory=Counter)
    num_compiled: int = 0
    num_hidden: int = 0


def _ran_for(loss: Tensor) -> _Ran:
    """Return what a loss has run, by its graph."""
    ran = _Ran()
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        name = node.name()
        if name.startswith(_COMPILED):
            ran.num_compiled += 1
            code = _code_of(node)
            ran.num_hidden += code is None
            ran.compiled_kernels.update(_CALLED.findall(code or ""))
        kernel = next((word for start, word in _KERNELS.items() if name.startswith(start)), None)
        if kernel is not None:
            ran.kernels[kernel] += 1
        for other, _ in node.next_functions:
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return ran


def _code_of(node: Any) -> str | None:
    """Return the code of the forward that a compiled part's node is of, if the inductor made it."""
    found: Any = getattr(getattr(node, "_forward_cls", None), "compiled_fw", None)
    for _ in range(_MOST_WRAPPERS):
        code = getattr(found, "source_code", None)
        if isinstance(code, str):
            return code
        found = getattr(found, "__wrapped__", None)
    return None


def _is_watched() -> bool:
    """Whether this forward is captured, or something else looks at each of its operations."""
    return is_capturing() or _get_current_dispatch_mode() is not None


def _has_compiled() -> bool:
    """Whether torch.compile has made any code in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _counted(kernels: Counter[str]) -> str:
    return ", ".join(
        f"{word} {'once' if count == 1 else f'{count} times'}"
        for word, count in kernels.most_common()
    )


def _line() -> str:
    """Return the innermost line of the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        if owner_of(frame) == "user":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"
