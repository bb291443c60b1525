"""Two costs of nearly every test, of which none learns anything."""

from __future__ import annotations

import os

from torch._dynamo import guards


def leave_out():
    """Leave them out in this process, and in those that it forks."""
    os.fsync = handed_over
    # For a line of its log torch times the guards of each compilation, with all caches flushed
    # before: more than half of what it takes to compile a small function.
    guards.profile_guard_manager = lambda *_: 0.0


def handed_over(descriptor):
    """Stand in for `os.fsync`: nobody pulls the plug, so what the kernel has is as safe.

    Which calls are made, and in which order, is as ever; a descriptor that is closed is an error.
    """
    os.fstat(descriptor)
