"""Which attention runs: the back-end that torch takes for given tensors, and why not another one.

`scaled_dot_product_attention` chooses without a word. Flash and cuDNN attention never write the
matrix of all pairs of positions; the math back-end writes it several times, in the square of the
length. A mask that is a tensor, a head that is too wide, float32, or a device that is too old are
enough to end there. `attention_report` asks torch what it would take and notes what it says of each
back-end that it does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda as cuda_backends
from torch.utils._python_dispatch import _disable_current_modes

from torchfast._core.arguments import check_choice, check_not_negative

_NAMES: Final = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


@dataclass(frozen=True, kw_only=True)
class AttentionReport:
    """What torch takes for one call.

    Attributes:
        backend: ``"flash"``, ``"cudnn"``, ``"efficient"``, ``"math"``, or torch's name of another;
            ``"none"`` where none of those that may be used can run, and the call raises.
        usable: Those of the first three that could run.
        reasons: Of each of them that could not, what torch says, line by line.
        num_bytes: What the matrix of all pairs takes once, in the dtype of the query. The math
            back-end writes it several times and saves it for the backward; others never do.
        device: Where it runs.
    """

    backend: str
    usable: tuple[str, ...]
    reasons: dict[str, tuple[str, ...]]
    num_bytes: int
    device: torch.device

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready builtins."""
        return {
            "backend": self.backend,
            "usable": list(self.usable),
            "reasons": {name: list(lines) for name, lines in self.reasons.items()},
            "num_bytes": self.num_bytes,
            "device": str(self.device),
        }

    def __str__(self) -> str:
        """Return what runs, and a line for each reason."""
        lines = [f"attention on {self.device} runs {self.backend}"]
        if self.backend == "none":
            lines[0] += ", as no back-end that is switched on can, and the call raises"
        if self.backend == "math":
            lines[0] += f", which writes a matrix of {self.num_bytes / 1e6:,.1f} MB several times"
        for name, said in self.reasons.items():
            lines += [f"  not {name}: {line}" for line in said]
        return "\n".join(lines)


def attention_report(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> AttentionReport:
    """Return which back-end ``scaled_dot_product_attention`` takes for these arguments, and why.

    Nothing is computed. Whether a gradient is needed counts too, so give tensors as the step has
    them, under its autocast dtype.

    Args:
        query: ``(batch, heads, length, width)``.
        key: Likewise; with ``enable_gqa`` of fewer heads.
        value: Likewise.
        attn_mask: As in the call.
        dropout_p: As in the call.
        is_causal: As in the call.
        enable_gqa: As in the call.

    Raises:
        TypeError: Not tensors.
        ValueError: Tensors that are not four-dimensional, or a call that torch refuses.

    Numerics: Nothing is changed.
    Synchronizes: Never.

    Example:
        >>> query = torch.randn(1, 2, 16, 8)
        >>> attention_report(query, query, query, is_causal=True).backend
        'flash'
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {tensor!r} ({type(tensor).__name__})")
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(
            "query, key and value must be (batch, heads, length, width), got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    check_not_negative("dropout_p", dropout_p)
    _check_call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    choose = partial(
        torch._fused_sdp_choice,
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    backend = _chosen(choose)
    reasons: dict[str, tuple[str, ...]] = {}
    usable: list[str] = []
    asked = query.is_cuda
    if asked:
        parameters = cuda_backends.SDPAParams(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa
        )
        for name, can_use in _QUESTIONS.items():
            if can_use(parameters):
                usable.append(name)
            else:
                reasons[name] = _why_not(name, choose) or ("torch gives no reason",)
    if not asked:
        usable = [backend] if backend in _QUESTIONS else []
        others = f"torch has no such kernel on {query.device.type}"
        reasons = {name: (others,) for name in _QUESTIONS if name != backend}
        if "flash" in reasons and query.device.type == "cpu":  # which has that one
            reasons["flash"] = _why_not("flash", choose) or ("torch gives no reason",)
    pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return AttentionReport(
        backend=backend,
        usable=tuple(usable),
        reasons=reasons,
        num_bytes=pairs * query.element_size(),
        device=query.device,
    )


def _check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Raise where torch would, of which the choice of a back-end knows nothing."""

    def alike(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    # Of other classes, and under autocast, torch does something else first.
    is_plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_nested for t in given)
    if not is_plain or torch.is_autocast_enabled(query.device.type):
        return
    why = None
    if not 0.0 <= dropout_p <= 1.0:
        why = f"dropout_p is a probability, got {dropout_p}"
    elif not query.is_floating_point():
        why = f"attention computes with floating-point numbers, got {query.dtype}"
    elif len({tensor.device for tensor in (query, key, value)}) > 1:
        why = f"its tensors are on {query.device}, {key.device} and {value.device}"
    elif attn_mask is not None and attn_mask.dim() < 2:
        why = f"attn_mask has {attn_mask.dim()} dimensions, got {tuple(attn_mask.shape)}"
    else:
        try:
            with _disable_current_modes(), torch.no_grad(), attention_backends("math"):
                F.scaled_dot_product_attention(
                    alike(query),
                    alike(key),
                    alike(value),
                    attn_mask=None if attn_mask is None else alike(attn_mask),
                    dropout_p=dropout_p,
                    is_causal=is_causal and attn_mask is None,  # some kernels take both
                    enable_gqa=enable_gqa,
                )
        except RuntimeError as error:
            why, *_ = str(error).splitlines()
    if why is not None:
        raise ValueError(f"scaled_dot_product_attention refuses this call: {why}")


@contextmanager
def attention_backends(*names: str) -> Iterator[None]:
    """Let attention take only these back-ends, the first that can run, within the block.

    Args:
        *names: ``"flash"``, ``"cudnn"``, ``"efficient"``, ``"math"``, in the order of preference.

    Raises:
        ValueError: No name, or one that does not exist.

    Numerics: Another back-end may differ by rounding.

    Example:
        >>> query = torch.randn(1, 2, 16, 8)
        >>> with attention_backends("math"):
        ...     attention_report(query, query, query).backend
        'math'
    """
    if not names:
        raise ValueError(f"give at least one of {list(_NAMES)}")
    # Imported here, since it imports more of torch than a step needs.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name in names:
        check_choice("names", name, _NAMES)
    _settle_order()
    with sdpa_kernel([getattr(SDPBackend, _NAMES[n]) for n in names], set_priority=len(names) > 1):
        yield


AttentionState = tuple[tuple[bool, ...], tuple[int, ...]]


def attention_state() -> AttentionState:
    """Return which back-ends attention may take, and in which order it tries them."""
    _settle_order()
    flags = tuple(is_on() for is_on, _ in _SWITCHES)
    return flags, tuple(torch._C._get_sdp_priority_order())


@contextmanager
def attention_as(state: AttentionState) -> Iterator[None]:
    """Let attention choose in the body as it did where the state was noted."""
    now = attention_state()
    if now == state:
        yield
        return
    _set_attention(state)
    try:
        yield
    finally:
        _set_attention(now)


def _settle_order() -> None:
    """Let torch order its back-ends now, if it has not yet.

    At the first choice of a process torch puts cuDNN first on some devices, over the order there
    is. Who noted that one before, and sets it again after it, has another kernel from then on.
    """
    if torch.cuda.is_initialized():
        _choose_once()


@cache
def _choose_once() -> None:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        some = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        # The order is made before the choice, which may fail: none that is on may run this one.
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._fused_sdp_choice(some, some, some)


def _set_attention(state: AttentionState) -> None:
    flags, order = state
    for (_, switch), is_on in zip(_SWITCHES, flags, strict=True):
        switch(is_on)
    torch._C._set_sdp_priority_order(list(order))


# What torch's ``sdpa_kernel`` switches.
_SWITCHES: Final[tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...]] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
)
_QUESTIONS: Final[dict[str, Callable[..., bool]]] = {
    "flash": cuda_backends.can_use_flash_attention,
    "cudnn": cuda_backends.can_use_cudnn_attention,
    "efficient": cuda_backends.can_use_efficient_attention,
}
# What torch's account of one begins with, and whether it may be used at all.
_SAID_OF: Final[dict[str, tuple[str, Callable[[], bool]]]] = {
    "flash": ("flash", cuda_backends.flash_sdp_enabled),
    "cudnn": ("cudnn", cuda_backends.cudnn_sdp_enabled),
    "efficient": ("mem", cuda_backends.mem_efficient_sdp_enabled),
}


def _why_not(name: str, choose: Callable[[], Any]) -> tuple[str, ...]:
    """Return what torch warns of where a back-end that cannot run is the only one.

    The questions themselves, asked with ``debug=True``, print past Python's warnings.
    """
    header, is_on = _SAID_OF[name]
    if not is_on():
        return ("it is switched off, by torch.backends.cuda or torch.nn.attention.sdpa_kernel",)
    with warnings.catch_warnings(record=True) as caught, attention_backends(name):
        warnings.simplefilter("always")
        with suppress(RuntimeError):  # that no kernel is left
            choose()
    said: list[str] = []
    is_ours = False
    for warning in caught:
        text = str(warning.message).partition(" (Triggered internally")[0].strip()
        if text.endswith("not used because:"):
            is_ours = text.lower().startswith(header)
        elif is_ours:
            said.append(text)
    return tuple(dict.fromkeys(said))


def _chosen(choose: Callable[[], Any]) -> str:
    """Return what torch takes; "none" where what may be used cannot run, and the call raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reasons, which are asked for one by one
            return _name_of(int(choose()))
    except RuntimeError as error:
        if "No viable backend" not in str(error):
            raise
        return "none"


def _name_of(choice: int) -> str:
    from torch.nn.attention import SDPBackend

    found = next(
        (b.name for b in SDPBackend.__members__.values() if b.value == choice), str(choice)
    )
    return next((name for name, known in _NAMES.items() if known == found), found.lower())
