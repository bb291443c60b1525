"""What all tests share: one thread a worker, and the profiles of hypothesis."""

import os

# Workers of xdist share the cores, so each computes with one thread, and so do the processes that
# its tests start. It has to be said before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# A training step has no useful deadline: its first call compiles, allocates and loads libraries.
settings.register_profile("dev", deadline=None)
# In CI the examples are the same in every run, so that a change is judged and not its luck.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
