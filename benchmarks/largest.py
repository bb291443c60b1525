"""The largest batch, and the largest model, that one GPU trains: plain, and with levers on memory.

    PYTHONPATH=. python benchmarks/largest.py [--searches batch model] [--levers plain recompute]
        [--limit-s 600] [--limit-gb 40] [--size smoke] [--device cpu] [--out FILE]

"batch" trains a Llama of 1.1 billion parameters on as many sequences at once as fit; "model" trains
a wider Llama of as many layers as fit, on one sequence. Both have their head, their loss and AdamW
with float32 parameters under bf16, but where the levers say that weights are bf16 themselves. A
size fits if a whole step of it does, which has the optimizer's state from the beginning: a step on
one sequence has made it. Short steps are done again, and the last one is timed.
Sizes double until it can be guessed by their peaks which one takes all memory; sizes around that
one are tried, and where the guesses are wrong, they are halved in between. Each set of levers has a
process of its own. One that dies, or is not done in time, counts as a size that does not fit, and
the next size gets another process. An error that is not about memory ends the search of these
levers, without a row, and is what the benchmark fails with once the others are through.

``--limit-gb`` leaves a process only so much of the GPU. On a CPU it is what tensors may take. What
waits on the host takes the host's memory, so the file says how much of that there is.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`). One whose
search ran out of time says so: its figure is a lower bound.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.arms import parser_of, settings_of
from benchmarks.largest_tries import LEVERS, Search, Trier, Try
from benchmarks.result_rows import ResultRows
from benchmarks.workloads.definition import Size
from benchmarks.workloads.llama import SIZES, LlamaSize
from torchfast.memory.host_pool import default_host_bytes

RESOLUTION = 0.03  # of the largest size, and never finer than one
GUESSES = 4
# Of a device, what drivers and libraries take, and what the allocator cannot fill.
NOT_FOR_TENSORS = 0.02
TRY_LIMIT_S = 120.0

WIDE = LlamaSize(1, 4096, 32, 8, 14336, vocabulary=32_000, batch=1, context=4096, lr=1e-4)
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


class TryError(Exception):
    """A size ended with an error that is not about memory."""


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
            is enough; it is asked so many times only, since it may be wrong each time. Each one in
            turn that does not fit takes the next one twice as far below it.
    """
    low, high, number, guesses, back = 0, most + 1, min(first, most), GUESSES, 1
    while high - low > max(1, int(low * resolution)):
        yield number
        if fits(number):
            low, back = number, 1
        else:
            high, back = number, 2 * back
        number = (low + high) // 2 if high <= most else min(2 * low, most)
        if guesses and (guessed := guess()) is not None and low < most:
            guesses -= 1
            above = low + max(1, int(low * resolution))
            below = high - max(1, int(high * resolution) * back // 2)
            number = max(min(guessed, below), above)
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
        if tries[number].error:
            raise TryError(f"{name}, {search.field} {number}: {tries[number].error}")
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
        "tries": [
            {key: value for key, value in asdict(found).items() if key != "error"}
            for found in tries.values()
        ],
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
    failures = []
    for place, (kind, name) in enumerate(orders):
        left_s = ends_at - time.monotonic()
        # An equal share of what is left, so that the last ones get theirs.
        deadline = time.monotonic() + left_s / (len(orders) - place)
        print(f"{kind}: {name}", flush=True)
        search = SEARCHES[args.size][kind]
        trier = Trier(search, name, args.device, args.limit_gb)
        try:
            found = {"search": kind, **searched(name, search, trier, deadline, capacity)}
        except TryError as failed:
            failures.append(f"{kind}: {failed}")
            print(f"  {failures[-1]}", flush=True)
            continue
        finally:
            trier.stop()
        print(line(found), flush=True)
        rows.add(found)
    if failures:
        sys.exit("\n".join(failures))


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
