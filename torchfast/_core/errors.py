"""The errors of torchfast, in one tree.

::

    TorchFastError
    ├── PlanError (ValueError)                    a plan that does not exist or contradicts itself
    ├── UnsupportedDeviceError (RuntimeError)     a device that this machine lacks
    ├── UnsupportedOptimizerError (RuntimeError)  an update that is not one step() call
    ├── LossError (RuntimeError)                  a loss that cannot be differentiated
    ├── ClosedError (RuntimeError)                use after close()
    ├── EmptyEpochError (RuntimeError)            an epoch that yielded no batch
    ├── StateMismatchError (RuntimeError)         saved state that does not fit
    └── ParityError (AssertionError)              a plan that trains another model

Each also derives from the builtin that fits, so ``except ValueError`` works without importing
torchfast. Bad arguments raise plain ``TypeError`` or ``ValueError``. Every message says what was
expected, what was found, and what to do.
"""

from __future__ import annotations


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


class ClosedError(TorchFastError, RuntimeError):
    """An object was used after its ``close()``."""


class EmptyEpochError(TorchFastError, RuntimeError):
    """An epoch yielded no batch."""


class StateMismatchError(TorchFastError, RuntimeError):
    """Saved state does not fit the object it is loaded into; nothing was changed."""


class ParityError(TorchFastError, AssertionError):
    """A plan does not train the same model as the plain loop."""
