"""torch's sync debug mode, which turns a host that waits into an error."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import torch


def forbid_syncs(on: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error" if on else "default")


@contextmanager
def no_syncs():
    torch.cuda.synchronize()
    forbid_syncs(True)
    try:
        yield
    finally:
        forbid_syncs(False)
