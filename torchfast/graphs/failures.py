"""Why a step cannot be captured: the cause, the user's own line, and what to do about it."""

from __future__ import annotations

import linecache
import traceback
from dataclasses import dataclass

from torchfast._core.errors import CaptureError
from torchfast._core.user_code import is_compiled, owner_of
from torchfast.graphs.backend import RoomMadeError
from torchfast.graphs.host_facts import CPU_GENERATOR, LATER
from torchfast.graphs.replay_check import Mismatch, Told
from torchfast.graphs.together import OTHERS

_NOT_THE_USERS: tuple[str, ...] = ("<",)

# Of a copy that nobody has taken for one of a constant yet.
IF_CONSTANT = "if it is the same each time, set host_constants=True"
# Of one that differs from the step, where only the same bits will do.
_TOLD = "it was told of the capture, and may compute otherwise then"
_IF_CLOSE = (
    "if what it computes then is as good, set parity='close' (numerics='close' of CUDAGraphStep), "
    "which measures how close it is"
)
RECOMPILES = "torch.compile would have compiled it again"
_KEEPS = "zero_grad(set_to_none=False) keeps them where they are"
NOT_NOW = f"there are no gradients now to which the step would add; {_KEEPS}"
LETS_GO = f"the step uses gradients of before and lets go of them; {_KEEPS}"
ROOM_MADE = "memory ran out beside what the allocator kept, which the next capture finds"
LEFT_OVER = "an autograd graph of an earlier step is still alive and belongs to another stream"

# What torch's messages say, what that means, and what helps. The first that fits is told.
_CAUSES = (
    (
        ("CPU tensors during CUDA graph capture unless the CPU tensor is pinned",),
        "it copies a tensor from the host",
        "make it on the device (torch.full, torch.arange(..., device=...)) or once, as a buffer",
    ),
    (
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture",),
        "it copies between host and device",
        "make the tensor on the device (torch.full, torch.arange(..., device=...)) or once, as a "
        "buffer",
    ),
    (
        ("capturable is False", "capturable=True"),
        "the optimizer keeps its step counter on the host",
        "build it with capturable=True, or with fused=True and capturable=True",
    ),
    (
        ("Offset increment outside graph capture", "CUDA generator not in capture mode"),
        "it draws from a generator that was not named",
        "hold it in an attribute of a module, or name it: state=[..., generator]",
    ),
    (
        ("out of memory",),
        "memory ran out: a graph keeps what a step needs at its peak for itself",
        "use a smaller batch, or recompute activations",
    ),
    (
        ("would make the legacy stream depend on a capturing blocking stream",),
        LEFT_OVER,
        "let go of losses and outputs of earlier steps that were not detached",
    ),
    (
        (
            "operation not permitted when stream is capturing",
            "cudaErrorStreamCapture",
        ),
        "the host waits for the device (.item(), float(), .cpu(), .nonzero(), a boolean mask as "
        "an index, printing a tensor, an if on a tensor)",
        "compute it on the device: torch.where for a choice, masks by multiplication, and read "
        "values only after the step",
    ),
    (
        ("FailOnRecompileLimitHit", "fail_on_recompile", "Recompiling function"),
        RECOMPILES,
        "give more warm-up steps, mark what varies as dynamic, or give views of far larger "
        "tensors as .contiguous()",
    ),
)


@dataclass(frozen=True)
class Failure:
    """Why a step was not captured.

    Attributes:
        reason: In words.
        line: The user's source line, such as ``"model.py:12, in forward: x.item()"``, or None.
        remedy: What to do, or None.
        is_later: Whether its graph was right in what it returned first, and wrong behind that.
    """

    reason: str
    line: str | None = None
    remedy: str | None = None
    is_later: bool = False

    @property
    def is_left_over(self) -> bool:
        """Whether something that the garbage collector may free is in the way."""
        return self.reason == LEFT_OVER

    @property
    def is_passing(self) -> bool:
        """Whether another attempt at the same may succeed."""
        return self.reason in (LATER, OTHERS, ROOM_MADE) or self.is_left_over

    @property
    def is_recompile(self) -> bool:
        """Whether compiled code would have been compiled again."""
        return self.reason == RECOMPILES

    @property
    def is_of_update(self) -> bool:
        """Whether it lies in the update alone."""
        return self.reason.startswith("the update draws from")

    @property
    def is_change(self) -> bool:
        """Whether Python has changed what no replay changes."""
        return self.reason.startswith("the step changes what no replay changes")

    @property
    def is_draw(self) -> bool:
        """Whether all that is in the way is what torch draws on the host."""
        return self.reason.startswith(f"the step draws from {CPU_GENERATOR}, ")

    @property
    def is_wait(self) -> bool:
        """Whether the host waits, perhaps for what never changes."""
        return self.reason.startswith("the host waits")

    @property
    def is_copy(self) -> bool:
        """Whether a copy from the host is in the way, which may be that of a constant."""
        return self.reason.startswith("it copies")

    def __str__(self) -> str:
        place = f" at {self.line}" if self.line else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.reason}{place}{remedy}"


def unlike(mismatch: Mismatch, told: Told | None, parity: str) -> Failure:
    """Return what it means that a graph differs from the step; and a way, if there is one."""
    detail, is_later = mismatch.detail, mismatch.is_later
    if told is None or parity == "close":
        return Failure(detail, is_later=is_later)
    return Failure(f"{detail}; {_TOLD}", remedy=_IF_CLOSE, is_later=is_later)


def explain(error: BaseException) -> Failure:
    """Return what an error in a capture says."""
    # The first error of a chain is the cause; those after it come of the broken capture.
    causes = [error]
    while (before := causes[-1].__cause__ or causes[-1].__context__) is not None:
        if before in causes:
            break
        causes.append(before)
    if any(isinstance(cause, RoomMadeError) for cause in causes):
        return Failure(ROOM_MADE)
    for cause in reversed(causes):
        text = f"{type(cause).__name__}: {cause}"
        for signs, reason, remedy in _CAUSES:
            if any(sign in text for sign in signs):
                return Failure(reason, user_line(cause) or user_line(error), remedy)
    first = causes[-1]
    if isinstance(first, CaptureError):
        return Failure(str(first), user_line(first) or user_line(error))
    summary = (str(first).strip() or "no message").splitlines()[0]
    return Failure(f"{type(first).__name__}: {summary}", user_line(first) or user_line(error))


def user_line(error: BaseException) -> str | None:
    """Return the innermost line of a traceback that somebody who uses torch wrote."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        is_theirs = owner_of(frame) == "user" and not is_compiled(file)
        if is_theirs and not file.startswith(_NOT_THE_USERS):
            found = file, line, frame.f_code.co_name
    if found is None:
        return None
    file, line, name = found
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}, in {name}: {text}" if text else f"{file}:{line}, in {name}"
