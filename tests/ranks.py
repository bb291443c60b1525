"""Runs a function in several processes that are ranks of one gloo group, on this machine.

Forked, so that a rank starts in milliseconds: what this process has imported is there already. The
ranks find each other through a file, so no port can be taken by somebody else.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch._dynamo  # which the first operation of a DTensor asks for, in each rank for itself
import torch._functorch.aot_autograd  # which what a rank compiles asks for, with 400 modules
import torch.distributed as dist

import torchfast.parallel.fully_sharded  # noqa: F401  # which a plan with shards asks for

TIMEOUT_S = 60
GROUP_TIMEOUT_S = 30


def run(work, num_ranks=2, *arguments, timeout_s=TIMEOUT_S, ends=None, joined=True):
    """Call ``work(rank, *arguments)`` on each rank; return what each returned, by rank.

    Args:
        work: Any callable, a closure too.
        num_ranks: How many processes.
        arguments: Its further arguments.
        timeout_s: The ranks that still run then are killed, and the test fails.
        ends: Exit codes by rank, of ranks that are meant to die; these return None.
        joined: Whether there is a process group already when ``work`` begins.
    """
    ends = ends or {}
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        receivers, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            target = (work, rank, num_ranks, store, arguments, sender, joined)
            processes.append(context.Process(target=_rank, args=target))
            processes[-1].start()
            sender.close()  # so that the end of the process is the end of the pipe
            receivers.append(receiver)
        try:
            told = _collect(receivers, time.monotonic() + timeout_s)
            for process in processes:
                process.join(5)
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    failures = [f"rank {rank}:\n{text}" for rank, (fine, text) in sorted(told.items()) if not fine]
    died = sorted(codes.keys() - told.keys() - ends.keys())
    failures += [f"rank {rank} died without a word: exit code {codes[rank]}" for rank in died]
    assert not failures, "\n\n".join(failures)
    assert not late, f"ranks {late} do not end, though the work of all that told is done: {told}"
    assert codes == {rank: ends.get(rank, 0) for rank in range(num_ranks)}
    assert set(told) == set(range(num_ranks)) - set(ends)
    return [told[rank][1] if rank in told else None for rank in range(num_ranks)]


def _collect(receivers, deadline):
    told, pending = {}, dict(enumerate(receivers))
    while pending:
        ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            told |= dict.fromkeys(pending, (False, "has not ended in time"))
            break
        for rank in [rank for rank, receiver in pending.items() if receiver in ready]:
            try:
                told[rank] = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                continue  # it died without a word
    return told


def _rank(work, rank, num_ranks, store, arguments, sender, joined):
    torch.set_num_threads(1)
    # Threads of gloo may crash as well, of which faulthandler knows nothing.
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    try:
        if joined:
            join(rank, num_ranks, store)
        result = work(rank, *arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    # As plain bytes: multiprocessing would pass memory that ends with this process.
    sender.send_bytes(pickle.dumps((True, result)))


def join(rank, num_ranks, store):
    """Become a rank of the group."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
