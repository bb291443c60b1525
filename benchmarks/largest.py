"""The largest batch, and the largest model, that one GPU trains: plain, and with levers on memory.

    PYTHONPATH=. python benchmarks/largest.py [--searches batch model] [--levers plain recompute]
        [--limit-s 600] [--limit-gb 40] [--size smoke] [--device cpu] [--out FILE]

"batch" trains a Llama of 1.1 billion parameters on as many sequences at once as fit; "model" trains
a wider Llama of as many layers as fit, on one sequence. Both have their head, their loss and AdamW
with float32 parameters under bf16, but where the levers say that weights are bf16 themselves. A
size fits if two whole steps of it do: the second one has the optimizer's state from the beginning.
Sizes double until it can be guessed by their peaks which one takes all memory; sizes around that
one are tried, and where the guesses are wrong, they are halved in between. Each set of levers has a
process of its own. One that dies, or is not done in time, counts as a size that does not fit, and
the next size gets another process.

``--limit-gb`` leaves a process only so much of the GPU. On a CPU it is what tensors may take. What
waits on the host takes the host's memory, so the file says how much of that there is.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`). One whose
search ran out of time says so: its figure is a lower bound.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.arms import parser_of, settings_of
from benchmarks.result_rows import ResultRows
from benchmarks.simulated_memory import SimulatedMemory
from benchmarks.workloads.definition import Batch, Size
from benchmarks.workloads.llama import SIZES, Llama, LlamaSize, rotary_table
from benchmarks.workloads.tokens import next_token_loss
from torchfast import LowBitOptions, Plan, TrainStep
from torchfast.losses import linear_cross_entropy
from torchfast.memory.host_pool import default_host_bytes

STEPS = 2
RESOLUTION = 0.03  # of the largest size, and never finer than one
GUESSES = 4
# Of a device, what drivers and libraries take, and what the allocator cannot fill.
NOT_FOR_TENSORS = 0.02
TRY_LIMIT_S = 120.0


class Levers(NamedTuple):
    """What is done about memory.

    Attributes:
        plan: Fields of the plan.
        chunked_loss: Whether logits are made in chunks.
        bf16_weights: Whether parameters are bf16 themselves.
    """

    plan: dict[str, Any]
    chunked_loss: bool = False
    bf16_weights: bool = False

    @property
    def home(self) -> str | None:
        """Where the model is built, if not on the device: that may have no room for all of it."""
        return "cpu" if self.plan.get("offload") == "parameters" else None


LEVERS = {
    "plain": Levers({}),
    "low-bit": Levers({"optimizer": "adamw8bit"}),
    "offload": Levers({"offload": "activations"}),
    "selective recompute": Levers({"recompute": "selective"}),
    "recompute": Levers({"recompute": "blocks"}),
    "recompute, offload": Levers({"recompute": "blocks", "offload": "activations"}),
    "recompute, chunked loss": Levers({"recompute": "blocks"}, chunked_loss=True),
    "recompute, chunked loss, low-bit": Levers(
        {"recompute": "blocks", "optimizer": "adamw8bit"}, chunked_loss=True
    ),
    "recompute, chunked loss, low-bit, bf16 weights": Levers(
        {"recompute": "blocks", "optimizer": LowBitOptions(stochastic_rounding=True)},
        chunked_loss=True,
        bf16_weights=True,
    ),
    "recompute, chunked loss, offload of all": Levers(
        {"recompute": "blocks", "offload": "all"}, chunked_loss=True
    ),
    "recompute, chunked loss, offload of parameters": Levers(
        {"recompute": "blocks", "offload": "parameters"}, chunked_loss=True
    ),
}
WIDE = LlamaSize(1, 4096, 32, 8, 14336, vocabulary=32_000, batch=1, context=4096, lr=1e-4)


@dataclass(frozen=True)
class Search:
    """What grows.

    Attributes:
        size: The rest of the model and of its batch.
        field: "batch" or "layers".
        first: The size that is tried first.
        most: The size from which on nothing larger is tried.
    """

    size: LlamaSize
    field: str
    first: int
    most: int

    def at(self, number: int) -> LlamaSize:
        """Return the whole size."""
        return self.size._replace(**{self.field: number})


SEARCHES: dict[Size, dict[str, Search]] = {
    "full": {
        "batch": Search(SIZES["full"], "batch", first=4, most=1024),
        "model": Search(WIDE, "layers", first=16, most=1024),
    },
    "smoke": {
        "batch": Search(SIZES["smoke"], "batch", first=2, most=64),
        "model": Search(SIZES["smoke"], "layers", first=2, most=64),
    },
}


# -- One size, in a process of its own -------------------------------------------------------------


def chunked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next token, without the logits."""
    assert isinstance(model, Llama)
    tokens, targets = batch
    return linear_cross_entropy(
        model.hidden(tokens).flatten(0, 1), model.output_weight, targets.flatten()
    )


@dataclass(frozen=True)
class Try:
    """What became of a size.

    Attributes:
        number: The size.
        fits: Whether it does.
        why: If not, why.
        num_parameters: Of the model.
        step_s: What the last step took.
        peak_bytes: The most that tensors took.
    """

    number: int
    fits: bool
    why: str = ""
    num_parameters: int = 0
    step_s: float = 0.0
    peak_bytes: int = 0


def built(size: LlamaSize, levers: Levers, device: str) -> Llama:
    """Return the model, where the levers want it.

    Its numbers are drawn on the device: billions of them would take the host minutes.
    """
    with torch.device("meta"):
        model = Llama(size)
    if levers.bf16_weights:
        model.to(torch.bfloat16)
    model.to_empty(device=levers.home or device)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            parameter.copy_(drawn.fill_(1.0) if drawn.dim() == 1 else drawn.normal_(std=0.02))
        for buffer, table in zip(
            (model.cos, model.sin),
            rotary_table(size.width // size.heads, size.context),
            strict=True,
        ):
            buffer.copy_(table)
    return model


def train(size: LlamaSize, levers: Levers, device: str) -> tuple[int, float]:
    """Train some steps, and return the number of parameters and what the last step took."""
    is_cuda = device == "cuda"
    torch.manual_seed(0)
    model = built(size, levers, device)
    tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)
    plan = Plan(precision="bf16" if is_cuda else "as_given", **levers.plan)
    # A low-bit optimizer takes the place of the one that is built here, and knows no other form.
    others = {} if "optimizer" in levers.plan else {"fused": True}
    optimizer = partial(torch.optim.AdamW, lr=size.lr, **others)
    loss_fn = chunked_loss if levers.chunked_loss else next_token_loss
    step = TrainStep(model, optimizer, loss_fn, plan, max_grad_norm=1.0, device=device)
    try:
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        took = 0.0
        for _ in range(STEPS):
            start = time.perf_counter()
            loss = float(step(batch))
            took = time.perf_counter() - start
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}")
        return sum(parameter.numel() for parameter in model.parameters()), took
    finally:
        step.close()


def tried(number: int, search: Search, levers: Levers, device: str, limit_gb: float | None) -> Try:
    """Return whether a size fits, and free all that it took."""
    is_cuda = device == "cuda"
    simulated = None
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    elif limit_gb is not None:
        simulated = SimulatedMemory(int(limit_gb * 1e9))
    try:
        with simulated or contextlib.nullcontext():
            num_parameters, step_s = train(search.at(number), levers, device)
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
        # Its frames hold the step.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return Try(number, fits=False, why=why)
    finally:
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    peak = torch.cuda.max_memory_allocated() if is_cuda else getattr(simulated, "peak_bytes", 0)
    return Try(number, True, "", num_parameters, step_s, peak)


def serve(pipe: Connection, search: Search, name: str, device: str, limit_gb: float | None) -> None:
    """Answer sizes with what became of them, until the other end is gone."""
    with contextlib.suppress(OSError):  # no Linux
        # Where the host's memory is short, this process shall end, and not the search.
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device == "cuda" and limit_gb is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total))
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            pipe.send(tried(pipe.recv(), search, LEVERS[name], device, limit_gb))


class Trier:
    """Tries sizes in another process, and in a new one after one that died or hung.

    Args:
        arguments: Of `serve`, after the pipe.
    """

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, number: int, limit_s: float) -> Try:
        """Return what became of a size."""
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, far_end = context.Pipe()
            self._process = context.Process(target=serve, args=(far_end, *self._arguments))
            self._process.start()
            far_end.close()
        self._pipe.send(number)
        if not self._pipe.poll(limit_s):
            self.stop()
            return Try(number, fits=False, why=f"not done in {limit_s:.0f} s")
        try:
            answer: Try = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            why = f"its process ended with {self._process.exitcode}"
            self.stop()
            return Try(number, fits=False, why=why)
        return answer

    def stop(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._pipe = None


# -- The search ------------------------------------------------------------------------------------


def sizes_to_try(
    fits: Callable[[int], bool],
    first: int,
    most: int,
    resolution: float = RESOLUTION,
    guess: Callable[[], int | None] = lambda: None,
) -> Iterator[int]:
    """Yield sizes until the largest that fits is known.

    Args:
        fits: Answers for those that were yielded.
        first: Is yielded first.
        most: The largest one.
        resolution: How near the answer has to be, as a part of it, and no nearer than one.
        guess: Returns what the largest one seems to be by now. Where it is right, one size above it
            is enough; it is asked so many times only, since it may be wrong each time.
    """
    low, high, number, guesses = 0, most + 1, min(first, most), GUESSES
    while high - low > (near := max(1, int(low * resolution))):
        yield number
        if fits(number):
            low = number
        else:
            high = number
        number = (low + high) // 2 if high <= most else min(2 * low, most)
        if guesses and (guessed := guess()) is not None and low < most:
            guesses -= 1
            above = low + max(1, int(low * resolution))
            number = max(min(guessed, high - near), above)
            if not low < number < high:
                number = (low + high) // 2


def guessed(fitting: Sequence[Try], capacity: int) -> int | None:
    """Return the size that takes all memory, if the peaks of two sizes go on in a line."""
    known = {found.number: found.peak_bytes for found in fitting}
    if len(known) < 2:
        return None
    first, second = sorted(known)[-2:]
    each = (known[second] - known[first]) / (second - first)
    return second + int((capacity - known[second]) / each) if each > 0 else None


def searched(
    name: str, search: Search, trier: Trier, deadline: float, capacity: int
) -> dict[str, Any]:
    """Return the row of one set of levers, on a device of so many bytes."""
    tries: dict[int, Try] = {}
    settled = True

    def guess() -> int | None:
        fitting = [found for found in tries.values() if found.fits]
        number = guessed(fitting, capacity)
        if number is None or "offload" not in LEVERS[name].plan:
            return number
        # It may be the host whose memory ends, so by no more than twice at a time.
        return min(number, 2 * max(found.number for found in fitting))

    sizes = sizes_to_try(lambda number: tries[number].fits, search.first, search.most, guess=guess)
    for number in sizes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            settled = False
            break
        tries[number] = trier(number, min(left_s, TRY_LIMIT_S))
        settled &= left_s >= TRY_LIMIT_S or not tries[number].why.startswith("not done")
        print(f"  {search.field} {number}: {tries[number].why or 'fits'}", flush=True)
    good = [found for found in tries.values() if found.fits]
    best = max(good, key=lambda found: found.number, default=None)
    size = search.at(best.number if best else 1)
    return {
        "levers": name,
        "shape": size._asdict(),
        "largest": best.number if best else 0,
        "settled": settled,
        # Of the machine or of the container: of which a process takes as much as it may.
        "host_bytes": 2 * default_host_bytes(),
        "num_parameters": best.num_parameters if best else None,
        "peak_bytes": best.peak_bytes if best else None,
        "tokens_per_s": size.batch * size.context / best.step_s if best else None,
        "tries": [asdict(found) for found in tries.values()],
    }


def capacity_of(device: str, limit_gb: float | None) -> int:
    """Return what tensors may take."""
    if device != "cuda":
        assert limit_gb is not None
        return int(limit_gb * 1e9)
    total = torch.cuda.get_device_properties(0).total_memory
    limit = total if limit_gb is None else min(total, int(limit_gb * 1e9))
    return int(limit * (1 - NOT_FOR_TENSORS))


def main() -> None:
    """Search, print and write the figures."""
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--size", choices=sorted(SEARCHES), default="full")
    names = list(SEARCHES["full"])
    parser.add_argument("--searches", nargs="+", choices=names, default=names)
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS))
    parser.add_argument("--limit-gb", type=float, help="leave a process only so much memory")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="for all searches")
    args = parser.parse_args()
    args.block_s = None
    if args.device == "cpu" and args.limit_gb is None:
        sys.exit("on a CPU nothing is out of memory: give --limit-gb, such as 0.002")
    orders = [(search, name) for search in args.searches for name in args.levers]
    settings = settings_of(args, {"limit_gb": args.limit_gb})
    rows = ResultRows(args.out, ("search", "levers"), settings)
    ends_at = time.monotonic() + args.limit_s
    capacity = capacity_of(args.device, args.limit_gb)
    for place, (kind, name) in enumerate(orders):
        left_s = ends_at - time.monotonic()
        # An equal share of what is left, so that the last ones get theirs.
        deadline = time.monotonic() + left_s / (len(orders) - place)
        print(f"{kind}: {name}", flush=True)
        search = SEARCHES[args.size][kind]
        trier = Trier(search, name, args.device, args.limit_gb)
        try:
            found = {"search": kind, **searched(name, search, trier, deadline, capacity)}
        finally:
            trier.stop()
        print(line(found), flush=True)
        rows.add(found)


def line(found: dict[str, Any]) -> str:
    """Return a row for the terminal."""
    if not found["largest"]:
        return "  nothing fits" if found["settled"] else "  nothing fitted in the time there was"
    bound = "" if found["settled"] else "at least "
    return (
        f"  -> {bound}{found['largest']}: {found['num_parameters'] / 1e9:.3f}B parameters, "
        f"{found['tokens_per_s']:,.0f} tokens/s, {found['peak_bytes'] / 1e9:.3f} GB"
    )


if __name__ == "__main__":
    main()
