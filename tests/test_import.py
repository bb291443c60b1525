"""Importing torchfast is free: no CUDA, no torchao, no thread, and hardly any time.

Each probe is a process of its own, since this one has imported everything already. Runs against
the installed wheel too, from outside the repository.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_PROBES = 6
# Of the time that torch's own import takes in the same process.
MOST_ADDED = 0.1

# Prints what the statement in argv[1] does to a process that has imported torch. Bytecode is cached
# in argv[2], so that a read-only or fresh checkout is not timed while it compiles. Processor time
# is what is counted, in proportion to that of torch's import: a busy machine stretches both.
PROBE = """
import gc, json, os, sys, threading, time
start = time.process_time()
import torch
torch_s = time.process_time() - start

def num_threads():
    tasks = "/proc/self/task"  # the threads of native code are here too
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()

sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[2], False
# torch leaves the collector on the brink of going through all that it has made, which takes longer
# than all of this import; whose allocation tips it over is chance.
gc.collect()
modules, threads, start = set(sys.modules), num_threads(), time.process_time()
exec(sys.argv[1], {})
print(json.dumps({
    "added": (time.process_time() - start) / torch_s,
    "new_threads": num_threads() - threads,
    "new_modules": sorted(set(sys.modules) - modules),
    "cuda_initialized": torch.cuda.is_initialized(),
}))
"""

EVERYTHING = "import torchfast\nfor name in torchfast.__all__: getattr(torchfast, name)"

# What costs much to import and is wanted by few; it waits until somebody asks for it.
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.onnx",
)
# What may come along that is neither of the standard library nor torch nor torchfast.
THIRD_PARTY = {"numpy", "typing_extensions"}


def probe(statement, cache, extra_path=()):
    """Run a statement in a process that has imported torch; return what it did to the process."""
    spec = importlib.util.find_spec("torchfast")
    paths = [*extra_path, Path(spec.origin).parents[1], *filter(None, [os.getenv("PYTHONPATH")])]
    finished = subprocess.run(
        [sys.executable, "-c", PROBE, statement, str(cache)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout)


def unwelcome(modules):
    """Return those of the modules that importing torchfast must not import."""
    known = sys.stdlib_module_names | THIRD_PARTY | {"torch", "torchfast"}
    return [
        name
        for name in modules
        if name.partition(".")[0] not in known
        or any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)
    ]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Bytecode of all that is imported, so that only the first probe compiles it."""
    return tmp_path_factory.mktemp("bytecode")


@pytest.mark.parametrize(
    "statement",
    [
        "import torchfast",
        "from torchfast import Trainer",
        "import torchfast, torchfast.losses",  # which makes an operator for the compiler
        EVERYTHING,
    ],
)
def test_import_has_no_side_effects(statement, cache):
    found = probe(statement, cache)

    assert "torchfast" in found["new_modules"]
    assert unwelcome(found["new_modules"]) == []
    assert found["new_threads"] == 0
    assert not found["cuda_initialized"]


def test_import_is_fast(cache):
    statement = "from torchfast import CUDAGraphStep, Plan, PrefetchingLoader, Trainer"
    added = []
    # What is slow is slow each time; what else the machine does can only add to one.
    while len(added) < MOST_PROBES and (not added or added[-1] >= MOST_ADDED):
        added.append(probe(statement, cache)["added"])

    assert added[-1] < MOST_ADDED, f"measured: {added}"


def test_the_probe_sees_side_effects(tmp_path):
    (tmp_path / "careless.py").write_text(CARELESS)

    found = probe("import careless", tmp_path, extra_path=[tmp_path])

    assert unwelcome(found["new_modules"]) == ["careless", "torch._dynamo"]
    assert found["new_threads"] == 1
    assert found["cuda_initialized"]
    assert found["added"] > MOST_ADDED


CARELESS = f"""
import sys, threading, time, types
import torch

sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
threading.Thread(target=threading.Event().wait, daemon=True).start()
torch.cuda._initialized = True
stop = time.process_time() * (1 + 1.5 * {MOST_ADDED})  # torch's import is most of it
while time.process_time() < stop:
    pass
"""
