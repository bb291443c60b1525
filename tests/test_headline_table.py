"""The README's table of speeds, and where a page says which runs its figures are from."""

from __future__ import annotations

import pytest

import benchmark_results
from benchmarks import tables

BASELINE = benchmark_results.of_card(tables.BASELINE)


@pytest.fixture
def headline(monkeypatch, tmp_path):
    """Return what makes the rows of the table, by workload, of a made-up result."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def rows(result):
        benchmark_results.written(tmp_path / BASELINE, result)
        lines = tables.render("baseline headline").splitlines()
        cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        return {name: figures for name, *figures in cells}

    return rows


def test_the_best_of_a_kind_is_the_fastest_that_trains(headline):
    result = benchmark_results.result(noise=0.0, busy=0.0, bias=0.0)
    methods = result["workloads"]["mlp"]["methods"]
    methods["by hand: graph + float8 + compile by block"] = dict(methods["naive"], median_ms=0.01)
    assert headline(result)["mlp"][:4] == ["1.84", "1.75", "0.751", "0.334"]
    methods["by hand: graph + compile whole"]["trains"] = False
    assert headline(result)["mlp"][3] == "0.501"


def test_the_gain_is_by_the_reference_of_the_same_run(headline):
    """A peer that was measured on a machine of half the speed has twice the milliseconds."""
    result = benchmark_results.result(noise=0.0, busy=0.0, bias=0.0)
    slow = benchmark_results.result(machine_speed=2.0, noise=0.0, busy=0.0, bias=0.0)
    methods = result["workloads"]["mlp"]["methods"]
    methods["Lightning"] = {**slow["workloads"]["mlp"]["methods"]["Lightning"], "run": 1}
    row = headline(result)["mlp"]
    assert (row[0], row[-1]) == ("3.67", "1.22 ×")


def test_what_one_run_measured_is_compared_round_by_round(headline):
    """What the reference took in those rounds is not in it."""
    result = benchmark_results.result(noise=0.0, busy=0.0, bias=0.0)
    methods = result["workloads"]["mlp"]["methods"]
    hand, fast = methods["by hand: graph + compile whole"], methods["torchfast fast"]
    hand["blocks_ms"], fast["blocks_ms"] = [1.0, 2.0, 4.0], [1.1, 2.2, 2.0]
    fast["reference_blocks_ms"] = hand["reference_blocks_ms"] = [10.0, 5.0, 5.0]
    methods["Lightning"]["run"] = 2
    assert headline(result)["mlp"][-2] == "1.100"
    fast["run"] = 1
    fast["reference_blocks_ms"] = [20.0, 20.0, 20.0]
    assert headline(result)["mlp"][-2] == f"{(2.0 / 20) / (2.0 / 5):.3f}"


def test_what_a_search_finds_is_beside_the_loop_by_hand(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    result = benchmark_results.result(noise=0.0, busy=0.0, bias=0.0)
    methods = result["workloads"]["mlp"]["methods"]
    for name, ms in (
        ("by hand: graph", 2.0),
        ("by hand: graph + compile whole", 1.0),
        ("torchfast fast", 1.25),
        ("torchfast fast, searched", 1.1),
    ):
        methods[name] = {**methods["by hand: graph"], "median_ms": ms, "blocks_ms": [ms] * 3}
        methods[name] |= {"reference_blocks_ms": [9.0] * 3, "cold_start_s": 60.0}
    result["workloads"] = {"mlp": result["workloads"]["mlp"]}
    benchmark_results.written(tmp_path / benchmark_results.of_card("searched_CARD.json"), result)
    lines = tables.render("searched").splitlines()
    assert "| mlp | 2.00 | 1.00 | 1.25 | 1.10 | 0.500 | 1.100 | 60.0 |" in lines

    # Where compiling by hand loses, what is captured alone is the best.
    methods["by hand: graph"] |= {"median_ms": 0.5, "blocks_ms": [0.5] * 3}
    benchmark_results.written(tmp_path / benchmark_results.of_card("searched_CARD.json"), result)
    lines = tables.render("searched").splitlines()
    assert "| mlp | 0.500 | 1.00 | 1.25 | 1.10 | 2.000 | 2.200 | 60.0 |" in lines


def test_what_was_not_done_has_a_dash_and_what_was_not_tried_no_row(headline):
    result = benchmark_results.result()
    mlp, gpt = (result["workloads"][name]["methods"] for name in ("mlp", "gpt-small"))
    mlp["torchfast fast"] = {"status": "failed", "reason": "not done in 75 s", "run": 0}
    del gpt["torchfast fast"]
    rows = headline(result)
    assert rows["mlp"][-2:] == ["–", "–"]
    assert "gpt-small" not in rows
    assert "resnet50" in rows


def test_runs_are_listed_once_on_a_page(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    result = benchmark_results.result()
    result["runs"] = [{"date": "2026-11-20", "commit": "c", "command": f"run {n}"} for n in (0, 1)]
    result["workloads"]["mlp"]["methods"]["naive"]["run"] = 1
    benchmark_results.written(tmp_path / BASELINE, result)
    blocks = [f"<!-- figures: {name} -->\n<!-- end -->\n" for name in ("anchors", "baseline plot")]
    page = tables.rewritten("".join(blocks))
    assert page.count("<summary>The runs</summary>") == page.count("``run 1``") == 1
    assert page.index("``run 1``") < page.index("in 2 runs on 2026-11-20, those listed above.")
    # Another page, and a table of other runs, have lists of their own.
    assert "``run 1``" in tables.rewritten(blocks[1])
    other = tables.rewritten(blocks[0] + "<!-- figures: baseline gpt-small -->\n<!-- end -->")
    assert other.count("``run 0``") == 2


def test_a_table_without_figures_says_so_and_keeps_what_it_had(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    told = tables.rewritten("<!-- figures: losses -->\n<!-- end -->\n")
    assert told == "<!-- figures: losses -->\n\n*Not measured yet.*\n\n<!-- end -->\n"
    had = "<!-- figures: losses -->\n\n| old | figures |\n\n<!-- end -->\n"
    assert tables.rewritten(had + told) == had + told
