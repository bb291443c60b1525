"""The errors of torchfast, in one tree.

::

    TorchFastError
    ├── PlanError (ValueError)                    a plan that does not exist or contradicts itself
    ├── UnsupportedDeviceError (RuntimeError)     a device that this machine lacks
    ├── UnsupportedOptimizerError (RuntimeError)  an update that is not one step() call
    ├── LossError (RuntimeError)                  a loss that cannot be differentiated
    ├── CaptureError (RuntimeError)               a step that cannot be captured into a graph
    ├── HostSyncError (RuntimeError)              a line that makes the host wait for the device
    ├── CompileError (RuntimeError)               a region that cannot be compiled
    ├── OutOfMemoryError (torch.OutOfMemoryError) a step that did not fit into memory
    ├── NonFiniteError (RuntimeError)             too many updates in a row skipped for NaN
    ├── ClosedError (RuntimeError)                use after close()
    ├── EmptyEpochError (RuntimeError)            an epoch that yielded no batch
    ├── IterationError (RuntimeError)             an iteration that another one ended
    ├── BatchStructureError (RuntimeError)        a batch built otherwise than those before
    ├── StateMismatchError (RuntimeError)         saved state that does not fit
    ├── CheckpointWriteError (RuntimeError)       a checkpoint that could not be written
    ├── CheckpointCorruptError (RuntimeError)     a checkpoint that is damaged or incomplete
    ├── UnsafeCheckpointError (RuntimeError)      a file that would run code if it were loaded
    ├── RankError (RuntimeError)                  another rank failed or cannot be reached
    ├── TraceError (ValueError)                   a file that is no trace of a run
    └── ParityError (AssertionError)              a plan that trains another model

Each also derives from the builtin that fits, so ``except ValueError`` works without importing
torchfast. Bad arguments raise plain ``TypeError`` or ``ValueError``. Every message says what was
expected, what was found, and what to do.
"""

from __future__ import annotations

from typing import Any

import torch


class TorchFastError(Exception):
    """Base of every error that torchfast defines."""


class PlanError(TorchFastError, ValueError):
    """A plan that does not exist, or whose fields contradict each other."""


class UnsupportedDeviceError(TorchFastError, RuntimeError):
    """The device asked for is not in this machine."""


class UnsupportedOptimizerError(TorchFastError, RuntimeError):
    """An optimizer whose update is not a single ``step()`` call."""


class LossError(TorchFastError, RuntimeError):
    """A loss that cannot be differentiated with respect to any parameter."""


class CaptureError(TorchFastError, RuntimeError):
    """A step cannot be captured into a graph; the state is as it was before.

    Where a `Trainer` ran out of memory in the capture, ``account`` says what was in there.
    """

    account: Any = None  # a MemoryAccount


class HostSyncError(TorchFastError, RuntimeError):
    """A line makes the host wait for the device, under a `SyncGuard` that forbids it."""


class CompileError(TorchFastError, RuntimeError):
    """A region or function cannot be compiled; ``__cause__`` is the compiler's own error."""


class OutOfMemoryError(TorchFastError, torch.OutOfMemoryError):
    """A step did not fit into the device's memory; ``account`` says what is in there.

    ``except torch.cuda.OutOfMemoryError`` catches it too. It holds numbers and text only: neither
    tensors nor the frames of the step, so what the step has allocated is free again.
    """

    account: Any = None  # a MemoryAccount


class NonFiniteError(TorchFastError, RuntimeError):
    """So many updates in a row were skipped for what is not finite that training goes nowhere."""


class ClosedError(TorchFastError, RuntimeError):
    """An object was used after its ``close()``."""


STEP_CLOSED = (
    "this step was closed, by close(), the end of its with block or another Trainer on the same "
    "optimizer; build a new Trainer to go on training"
)


class EmptyEpochError(TorchFastError, RuntimeError):
    """An epoch yielded no batch."""


class IterationError(TorchFastError, RuntimeError):
    """An iteration over a loader was asked for more after another one had begun."""


class BatchStructureError(TorchFastError, RuntimeError):
    """Under ``strict``, a batch whose structure is not that of the batches before it."""


class StateMismatchError(TorchFastError, RuntimeError):
    """Saved state does not fit the object it is loaded into; nothing was changed."""


class CheckpointWriteError(TorchFastError, RuntimeError):
    """A checkpoint could not be written; those that were there are as they were."""


class CheckpointCorruptError(TorchFastError, RuntimeError):
    """A checkpoint is damaged or incomplete; the message names the file."""


class UnsafeCheckpointError(TorchFastError, RuntimeError):
    """A file would run code of its own if it were loaded; it was not."""


class RankError(TorchFastError, RuntimeError):
    """Another rank failed or cannot be reached; the message says which where it is known."""


class TraceError(TorchFastError, ValueError):
    """A file is not a trace that torch.profiler wrote, or nothing of it can be used."""


class ParityError(TorchFastError, AssertionError):
    """A plan does not train the same model as the plain loop."""
