"""What keeps torch from compiling, or from running what it has compiled, without a word."""

from __future__ import annotations

import torch

_IN_FORCE = "torch.compiler.set_stance({!r}) is in force"


def why_off() -> str | None:
    """Return what keeps torch from compiling anything now; None if nothing does."""
    from torch._dynamo import config

    if config.disable:
        return "the compiler is switched off (TORCH_COMPILE_DISABLE or torch._dynamo.config)"
    stance = stance_in_force()
    return why_bypassed() if stance == "default" else _IN_FORCE.format(stance)


def why_bypassed() -> str | None:
    """Return what keeps torch from running what is compiled already; None if nothing does."""
    stance = stance_in_force()
    if stance == "force_eager":
        return _IN_FORCE.format(stance)
    mode = active_dispatch_mode()
    if mode is not None:
        return f"the TorchDispatchMode {mode} is active, under which torch compiles nothing"
    return None


def stance_in_force() -> str:
    """Return the stance of ``torch.compiler.set_stance``."""
    from torch._dynamo import eval_frame

    return str(getattr(getattr(eval_frame, "_stance", None), "stance", "default"))


def is_traced() -> bool:
    """Whether ``torch.jit.trace``, ``torch.fx`` or ``make_fx`` is following what runs.

    Torch refuses to trace what it has compiled; as it is it can be traced.
    """
    return bool(torch._C._is_tracing()) or torch.fx._symbolic_trace.is_fx_symbolic_tracing()


def active_dispatch_mode() -> str | None:
    """Return the class of a user's dispatch mode that is active; None if there is none."""
    if not torch._C._len_torch_dispatch_stack():
        return None
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for mode in _get_current_dispatch_mode_stack():
        own = [getattr(type(mode), n, None) for n in ("is_infra_mode", "ignore_compile_internals")]
        if not any(asks is not None and asks() for asks in own):
            return type(mode).__name__
    return None
