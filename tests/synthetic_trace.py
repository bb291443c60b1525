"""Traces with known figures, written as torch.profiler writes them."""

from __future__ import annotations

import gzip
import itertools
import json

from torchfast.profiling.figures import measure_trace
from torchfast.profiling.report import analyse_trace
from torchfast.profiling.trace import read_trace

MAIN = 100
AUTOGRAD = 200
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"
STEPS = 4


class SyntheticTrace:
    """Events of one process, in microseconds; what each figure has to be is known by construction.

    Launches take 2 us, and a kernel is launched `ahead` before it begins unless said otherwise.
    `zero` is the instant that times count from, in nanoseconds since 1970.
    """

    def __init__(self, *, ahead=5.0, base=4_468_626_000_000.0, device=True, zero=0):
        self.ahead = ahead
        self.base = base
        self.events = []
        self.device = device
        self.zero = zero
        self._numbers = itertools.count(1)

    def _add(self, cat, name, start, end, tid, **args):
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 7,
                "tid": tid,
                "ts": self.base + start,
                "dur": end - start,
                "args": args,
            }
        )

    def kernel(
        self,
        start,
        end,
        name="elementwise_kernel",
        *,
        at=None,
        tid=MAIN,
        stream=7,
        call="cudaLaunchKernel",
        op=None,
        device=0,
    ):
        number = next(self._numbers)
        at = start - self.ahead if at is None else at
        if op is not None:
            self.op(op, at - 0.5, at + 3.0, tid=tid)
        self._add("cuda_runtime", call, at, at + 2.0, tid, correlation=number)
        self._work("kernel", name, start, end, number, stream, device)
        return number

    def more_of(self, number, start, end, name="elementwise_kernel", *, stream=7):
        """Another kernel of the same launch, as a graph has."""
        self._work("kernel", name, start, end, number, stream, 0)

    def copy(
        self,
        start,
        end,
        kind="HtoD (Pageable -> Device)",
        *,
        num=1000,
        at=None,
        stream=7,
        us=2.0,
        tid=MAIN,
    ):
        """A copy whose call takes so long."""
        number = next(self._numbers)
        at = start - self.ahead if at is None else at
        self._add("cuda_runtime", "cudaMemcpyAsync", at, at + us, tid, correlation=number)
        self._work("gpu_memcpy", f"Memcpy {kind}", start, end, number, stream, 0, bytes=num)

    def _work(self, cat, name, start, end, number, stream, device, **more):
        args = {"device": device, "stream": stream, "correlation": number, **more}
        self._add(cat, name, start, end, stream, **args)

    def call(self, name, start, end, *, tid=MAIN):
        self._add("cuda_runtime", name, start, end, tid, correlation=next(self._numbers))

    def op(self, name, start, end, *, tid=MAIN, dims=None, types=None, node=None, of=None):
        """An operator; ``node`` is its number in autograd, ``of`` the thread of its forward."""
        args = {"Input Dims": dims, "Input type": types} if dims else {}
        args |= {"Sequence number": node} if node else {}
        args |= {"Fwd thread id": of} if of else {}
        self._add("cpu_op", name, start, end, tid, **args)

    def annotation(self, name, start, end, *, tid=MAIN):
        self._add("user_annotation", name, start, end, tid)

    def frame(self, name, start, end, *, tid=MAIN):
        self._add("python_function", name, start, end, tid)

    def line(self, name, start, end, *, tid=MAIN):
        self._add("torchfast_line", name, start, end, tid)

    def step(self, number, start, end):
        self.annotation(f"ProfilerStep#{number}", start, end)

    def memory(self, time, num_bytes, address, allocated, reserved=1 << 20):
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "pid": 7,
                "tid": MAIN,
                "ts": self.base + time,
                "args": {
                    "Total Reserved": reserved,
                    "Total Allocated": allocated,
                    "Bytes": num_bytes,
                    "Addr": address,
                    "Device Id": 0,
                    "Device Type": 1,
                },
            }
        )

    def text(self):
        """As torch writes it: facts first, then a metadata event, then the rest."""
        properties = [{"id": 0, "name": "Test Device"}] if self.device else []
        named = {"ph": "M", "name": "process_name", "ts": self.base, "pid": 7, "tid": 0, "args": {}}
        head = {
            "schemaVersion": 1,
            "deviceProperties": properties,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self.zero,
        }
        events = [named, *self.events]
        return json.dumps(head | {"traceEvents": events, "traceName": "trace.json"}, indent=1)

    def write(self, path):
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def read(made, tmp_path):
    return read_trace(made.write(tmp_path / "trace.json"))


def figures_of(made, tmp_path):
    return measure_trace(read(made, tmp_path))


def healthy(made=None, *, length=1000.0, gemm=GEMM):
    """Steps of products that leave no idle time but a little; the host is ahead."""
    made = made or SyntheticTrace(ahead=200.0)
    for step in range(STEPS):
        begin = step * length
        made.step(step, begin - 250, begin + length - 250.5)
        for i in range(9):
            made.kernel(begin + 100 * i, begin + 100 * i + 99, gemm, op="aten::mm")
        made.kernel(
            begin + 900, begin + 990, "multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>"
        )
    return made


def report(made, tmp_path, lines=None):
    path = made.write(tmp_path / "trace.json")
    lined = lines.write(tmp_path / "lines.json") if lines else None
    return analyse_trace(path, lines=lined)


def replayed(num=150, *, every_us=1000.0):
    """A step that is one graph of small kernels, with which the host is late."""
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * every_us
        made.step(step, begin - 6, begin + every_us - 7)
        number = made.kernel(begin, begin + 3, call="cudaGraphLaunch")
        for i in range(1, num):
            made.more_of(number, begin + 4 * i, begin + 4 * i + 3)
    return made


def tiny(num=150):
    made = SyntheticTrace()
    for step in range(STEPS):
        begin = step * 20.0 * num
        made.step(step, begin - 6, begin + 20.0 * num - 7)
        for i in range(num):
            made.kernel(begin + 20 * i, begin + 20 * i + 3, op="aten::add")
    return made
