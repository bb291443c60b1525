"""The measurement of compilation runs without a GPU, and sees what is slow and what is broken."""

from __future__ import annotations

import json
import multiprocessing
import time

import pytest

import compile_results
from benchmarks import compile_cost, compile_tables
from benchmarks.compile_work import DEEP, Training, Work, workload_of
from torchfast import Plan

EAGER = Plan().to_json()


def started(tmp_path, name="mlp", limit_s=60.0, **details):
    work = Work(workload=name, plan=EAGER, size="smoke", device="cpu", **details)
    training = Training(multiprocessing.get_context("spawn"), work, tmp_path)
    try:
        return training.first_steps(limit_s), training.step_ms(2)
    finally:
        training.stop()


# -- The whole run ---------------------------------------------------------------------------------


def test_all_sections_run_without_a_gpu_and_their_figures_are_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHFAST_COMMIT", "made up")
    out = tmp_path / "figures.json"
    compile_cost.main(["--size", "smoke", "--device", "cpu", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert figures["machine"]["commit"] == "made up"
    sections = figures["sections"]
    assert list(sections) == list(compile_cost.SHARES)
    for section in sections.values():
        assert section["status"] == "ran", section
        assert section["summary"]["missing"] == 0
    cold = {row["compiled"]: row for row in sections["cold"]["rows"]}
    assert cold["by blocks"]["compile"]["compiled"] == 6
    assert cold["by blocks"]["compile"]["graphs"] < 6
    assert cold["whole"]["compile"]["graphs"] == 1
    assert "compile" not in cold["not compiled"]
    # Which of them started sooner is not asked: a busy machine may hold up either.
    first_step_s = {name: row["first_step_s"] for name, row in cold.items()}
    start = first_step_s["by blocks"] / first_step_s["whole"]
    assert sections["cold"]["summary"]["start"] == start
    assert all(len(row["rounds_ms"]) == compile_cost.ROUNDS for row in cold.values())
    warm = sections["warm"]["summary"]
    assert (warm["proved"], warm["misses"]) == (True, 0)
    assert warm["hits"] > 0
    assert sections["warm"]["rows"][0]["compile"]["cache_autograd_misses"] > 0
    for row in sections["warm"]["rows"]:
        assert 0.01 <= row["spans_s"]["_compile.compile_inner"] < row["first_step_s"]
    assert sections["curves"]["summary"]["held"]
    assert len(sections["curves"]["rows"]) == 4
    assert sections["workloads"]["summary"]["graphs"] > 0
    printed = capsys.readouterr().out
    for name in sections:
        assert f"== {name}, at most some" in printed
    assert not multiprocessing.active_children()


class FakeBench:
    """Yields what it is told to, and then breaks."""

    def __init__(self, workloads, *, breaks=False):
        self.workloads = workloads
        self.breaks = breaks
        self.closed = False

    def rows(self, section):
        if section == "workloads":
            for name in self.workloads:
                yield {"workload": name, "status": "failed", "reason": "made up"}
        if self.breaks:
            raise RuntimeError("no such luck")

    def close(self):
        self.closed = True


def test_workloads_are_added_to_those_that_were_measured(capsys):
    before = {"date": "2026-11-20", "commit": "c0", "command": "run 0"}
    rows = [{"workload": name, "status": "ran", "n": name} for name in ("a", "b")]
    earlier = {"rows": rows, "run": before}
    noted = []
    compile_cost.measured(FakeBench(["b", "c"]), "workloads", 1, earlier, noted.append)
    assert [row["workload"] for row in noted[-1]["rows"]] == ["a", "b", "c"]
    assert [row["status"] for row in noted[-1]["rows"]] == ["ran", "failed", "failed"]
    assert [row["run"] == before for row in noted[-1]["rows"]] == [True, False, False]
    assert noted[-1]["summary"]["missing"] == 2
    assert "b: failed: made up" in capsys.readouterr().out


def test_a_section_that_breaks_is_told_and_ends_its_trainings(capsys):
    bench, noted = FakeBench([], breaks=True), []
    compile_cost.measured(bench, "cold", 1, {}, noted.append)
    assert (noted[-1]["status"], noted[-1]["reason"]) == ("failed", "RuntimeError: no such luck")
    assert bench.closed
    assert "FAILED: RuntimeError: no such luck" in capsys.readouterr().out


# -- One process -----------------------------------------------------------------------------------


def test_a_training_tells_what_its_first_steps_took(tmp_path):
    row, step_ms = started(tmp_path, "gpt-small", num_losses=14)
    assert 0 < row["first_step_s"] < row["first_steps_s"]
    assert row["form"] == "eager"
    assert "compile" not in row
    assert len(row["losses"]) == 14
    assert row["losses"][-1] < row["losses"][0]
    assert step_ms > 0


def test_a_training_that_fails_or_hangs_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(
        compile_cost, "start_server", lambda device: multiprocessing.get_context("spawn")
    )
    bench = compile_cost.Bench(compile_cost.Settings("smoke", "cpu"), tmp_path, [])
    bench.deadline = time.monotonic() + 60
    row, training = bench._started({"workload": "x"}, "no such workload", EAGER)
    assert training is None
    assert row["status"] == "failed"
    assert row["reason"].startswith("ValueError: no workload 'no such workload'")
    bench.deadline = time.monotonic() + 0.2
    row, training = bench._started({"workload": "x"}, "mlp", EAGER)
    assert training is None
    assert row["reason"] == "not done in 0 s"
    row, training = bench._started({"workload": "x"}, "mlp", EAGER)
    assert (row["status"], row["reason"]) == ("left out", "no time was left")
    assert not multiprocessing.active_children()
    assert compile_cost.line(row) == "x: left out: no time was left"


def test_the_deep_model_is_deep():
    deep, other = workload_of(DEEP, "full"), workload_of("mlp", "smoke")
    assert "24 layers, d 1024" in deep.title
    assert other.name == "mlp"


# -- What the rows say -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_s", "step_ms", "held"),
    [(9.9, 10.1, True), (10.1, 10.1, False), (9.9, 10.3, False)],
)
def test_by_blocks_has_to_start_sooner_and_to_run_as_fast(start_s, step_ms, held):
    rows = [
        {"compiled": "by blocks", "first_step_s": start_s, "rounds_ms": [step_ms] * 4},
        {"compiled": "whole", "first_step_s": 30.0, "rounds_ms": [10.0] * 4},
    ]
    assert compile_cost.of_cold(rows)["held"] is held
    assert compile_cost.of_cold(rows[:1]) == {}


@pytest.mark.parametrize(
    ("start_s", "counts", "proved", "held"),
    [
        (2.9, {"cache_autograd_hits": 1, "cache_graph_hits": 2}, True, True),
        (3.1, {"cache_autograd_hits": 1}, True, False),
        (2.9, {}, False, False),  # fast, but why
        (2.9, {"cache_autograd_hits": 1, "cache_graph_misses": 1}, False, False),
    ],
)
def test_a_warm_start_has_to_come_of_the_cache(start_s, counts, proved, held):
    rows = [
        {"cache": "cold", "first_step_s": 30.0, "cache_bytes": 5},
        {"cache": "warm", "first_step_s": start_s, "compile": counts, "cache_bytes": 5},
    ]
    found = compile_cost.of_warm(rows)
    assert (found["proved"], found["held"]) == (proved, held)
    assert compile_cost.of_warm(rows[1:]) == {}


@pytest.mark.parametrize(("shift", "held"), [(0.04, True), (-0.04, True), (0.06, False)])
def test_the_ends_of_the_curves_have_to_agree_within_the_noise_of_a_seed(shift, held):
    rows = [
        {
            "compiled": is_compiled,
            "seed": seed,
            # What comes before the last losses does not count.
            "losses": [100.0 * is_compiled] * 3
            + [2.0 + 0.05 * seed + shift * is_compiled] * compile_cost.LAST_LOSSES,
        }
        for seed in (0, 1)
        for is_compiled in (True, False)
    ]
    found = compile_cost.of_curves(rows)
    assert found["difference"] == pytest.approx(shift)
    assert found["noise"] == pytest.approx(0.05)
    assert found["held"] is held
    assert compile_cost.of_curves(rows[:3]) == {}


def test_what_compiling_does_not_hold_is_told():
    result = compile_results.compile_cost()
    sections = result["sections"]
    for section in sections.values():
        section["summary"] |= {"held": False, "proved": False}
    assert "**not held**" in compile_tables.cold(result)[-1]
    assert "**misses some**: **not held**" in compile_tables.warm(result)[-1]
    assert "**beyond** what" in compile_tables.curves(result)[-1]
    late = {"status": "failed", "reason": "late"}
    sections["cold"] = {"rows": [{"compiled": "whole", **late}], "summary": {"missing": 1}}
    sections["warm"] = {"rows": [{"cache": "cold", **late}], "summary": {"missing": 1}}
    del sections["curves"]
    assert "| whole | failed: late |  |  |  |" in compile_tables.cold(result)
    assert "| cold | failed: late |  |  |  |" in compile_tables.warm(result)
    assert compile_tables.curves(result) == ["Not measured."]
