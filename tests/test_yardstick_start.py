"""What starts beside others in the yardstick, and what alone."""

from __future__ import annotations

from benchmarks.methods import METHODS, plans
from benchmarks.workloads import workload
from benchmarks.yardstick import Measurement, Settings
from torchfast import CompileOptions


def test_what_measures_at_its_start_is_alone_and_has_the_time_for_it():
    measurement = Measurement(workload("mlp", "smoke"), Settings(device="cpu", size="smoke"), {})
    events = []

    class Fake:
        alive = True

        def __init__(self, method):
            self.method = method

        def send(self, what):
            events.append((what, self.method.name))

        def answer(self, limit_s, asked_at=None):
            events.append((limit_s, self.method.name))
            return {"reserved_bytes": 0}

    names = ["torchfast fast, searched", "torchfast fast", "compile default"]
    measurement.warm_up([Fake(METHODS[name]) for name in names])
    searched, fast, default = names
    assert events[-6:] == [
        *(("start", name) for name in (fast, default)),
        *((Settings.cold_start_limit_s, name) for name in (fast, default)),
        ("start", searched),
        (Settings.cold_start_limit_s + 90, searched),
    ]


def test_the_method_that_searches_does_so_for_as_long_as_it_says():
    method = METHODS["torchfast fast, searched"]
    plan = plans.plan_of("fast", compiled=True, search_s=method.search_s)
    assert plan.compile == CompileOptions(mode="auto", budget_s=90.0)
    assert method.train.keywords["search_s"] == method.search_s
    assert plan == plans.plan_of("fast", compiled=True).replace(compile=plan.compile)
