"""The tables of the workloads, of the anchors and of the sweep, made from made-up figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import benchmark_results
import program_results
from benchmarks import anchors, baseline_tables, main_job_curves, plots, sweep_tables
from benchmarks.methods import METHODS
from benchmarks.workloads import NAMES


def rows_of(lines):
    """Return the cells of a Markdown table, by the first one."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    assert len({len(row) for row in cells}) == 1, "every row has every cell"
    head, _, *rows = cells
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_the_summary_has_a_cell_for_every_kind_of_status():
    lines = baseline_tables.summary(benchmark_results.result_of_every_status())
    rows = rows_of(lines)
    assert rows["mlp"]["tuned"] == "1.67"
    # The fastest of all is broken, so the next is the fastest that trains.
    assert rows["mlp"]["hand, whole"] == "broken"
    assert rows["mlp"]["hand"].startswith("**")
    assert rows["mlp"]["transf."] == "–¹"
    assert rows["gpt-small"]["hand, whole"].startswith("**")
    assert rows["gpt-small"]["comp. m-a"] == "–²"
    assert rows["resnet50"]["Lightning"] == ""
    assert rows["llama"]["tuned"] == "–³"
    assert sum("**" in cell for row in rows.values() for cell in row.values()) == 3
    text = "\n".join(lines)
    assert "¹ left out: Trainer wants a model that returns its loss / and a dict;" in text
    assert "² failed: not done in 90 s; ³ failed." in text
    assert "comp. m-a: compile max-autotune;" in text


def test_a_reason_that_holds_twice_has_one_footnote():
    result = benchmark_results.result()
    for workload in result["workloads"].values():
        workload["methods"]["naive"] = {"status": "failed", "reason": "no memory", "run": 0}
    lines = baseline_tables.summary(result)
    assert {row["naive"] for row in rows_of(lines).values()} == {"–¹"}
    assert lines[-1] == "¹ failed: no memory."


def test_columns_are_in_order_whichever_workload_has_them():
    result = benchmark_results.result()
    result["workloads"]["mlp"]["methods"] = {
        name: result["workloads"]["mlp"]["methods"][name] for name in ("torchfast fast", "tuned")
    }
    result["workloads"]["mlp"]["methods"]["another"] = {"status": "failed", "run": 0}
    head = baseline_tables.summary(result)[0]
    assert re.search("naive .* tuned .* Lightning .* tf fast .* another", head)


def test_the_table_of_a_workload_has_every_figure():
    result = benchmark_results.result_of_every_status()
    naive = result["workloads"]["mlp"]["methods"]["naive"]
    naive |= {
        "median_ms": 1234.5,
        "spread": 0.0123,
        "blocks_ms": [2.0, 2.2, 2.4, 2.6],
        "reference_blocks_ms": [2.0, 2.0, 2.0, 2.0],
        "host_ms": 0.98765,
        "device_ms": 0.5,
        "peak_bytes": 12_340_000_000,
        "cold_start_s": 31.4159,
        "host_syncs": 2.0,
        "num_kernels": 1812.0,
        "num_launches": 812.5,
        "losses": [2.3456, 1.0, 0.5],
    }
    lines = baseline_tables.workload(result, "mlp")
    assert lines[0] == "mlp, made up; 256 items a step, 1,000,000 parameters, bf16."
    rows = rows_of(lines)
    assert list(rows["naive"].values()) == [
        "naive",
        "1,230 (1.2%)",
        "1.150 (1.025 to 1.275)",
        "0.988",
        "0.500",
        "12.3",
        "31.4",
        "2",
        "1,812",
        "812.5",
        "2.346 → 0.500 after 3 steps",
    ]
    assert rows["tuned"]["× tuned (quartiles)"] == "1.000 (1.000 to 1.000)"
    broken = rows["by hand: graph + compile whole"]["loss"]
    assert broken == "**broken**: 2.300 → nan after 3 steps"
    reason = rows["transformers Trainer"]["ms (spread)"]
    assert reason == "left out: Trainer wants a model that returns its loss / and a dict"


def test_what_a_cpu_lacks_is_left_empty():
    result = benchmark_results.result_of_every_status()
    row = rows_of(baseline_tables.workload(result, "gpt-small"))["naive"]
    lacking = ("device ms", "peak GB", "host syncs", "kernels", "launches")
    assert {row[name] for name in lacking} == {""}
    assert row["host ms"]


def test_a_workload_that_was_not_measured_says_so():
    assert baseline_tables.workload(benchmark_results.result(), "dlrm") == ["Not measured."]
    rows = rows_of(baseline_tables.workload(benchmark_results.result_of_every_status(), "llama"))
    assert rows["tuned"]["ms (spread)"] == "failed"


def test_any_subset_gives_every_table():
    empty = benchmark_results.result(workloads={})
    lone = benchmark_results.result(relative={"tuned": 1.0}, rounds=2)
    for result in (empty, lone):
        for table in (baseline_tables.summary, baseline_tables.anchor_table):
            assert table(result)
        assert baseline_tables.workload(result, "mlp")
        ElementTree.fromstring(plots.baseline(result))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1854, "0.185"),
        (1.99, "1.99"),
        (9.999, "10.0"),
        (228.6, "229"),
        (1234.5, "1,230"),
        (0, "0"),
        (None, ""),
        (0.00012, "0.000120"),
    ],
)
def test_figures_have_three_significant_digits(value, text):
    assert baseline_tables.figure(value) == text


# -- The anchors -----------------------------------------------------------------------------------


def anchored(methods):
    """Return the row of gpt-small's best anchor, 1.99 ms, where these methods took these times."""
    result = benchmark_results.result(workloads={"gpt-small": 1.0})
    measured = result["workloads"]["gpt-small"]["methods"]
    ran = measured["tuned"]
    measured.clear()
    for name, (ms, trains) in methods.items():
        measured[name] = ran | {"median_ms": ms, "trains": trains}
    lines = baseline_tables.anchor_table(result)
    (row,) = (line for line in lines if "| 1.99 |" in line)
    return [cell.strip() for cell in row.strip("|").split("|")][3:]


def test_an_anchor_is_held_against_the_fastest_that_is_the_same_and_trains():
    assert anchored({"by hand: graph + compile whole": (2.189, True)}) == ["2.19", "+10.0%"]
    both = {
        "by hand: graph + compile whole": (3.0, True),
        "by hand: graph + compile by block": (1.99, True),
        "by hand: graph": (1.0, True),
        "torchfast fast": (0.5, True),
    }
    assert anchored(both) == ["1.99", "+0.0%"]
    assert anchored({"by hand: graph + compile whole": (1.9899, True)}) == ["1.99", "+0.0%"]
    both["by hand: graph + compile by block"] = (1.99, False)
    assert anchored(both)[0] == "3.00"
    assert anchored({"by hand: graph": (1.0, True)}) == ["none ran and trained", ""]


def test_every_anchor_names_a_workload_and_a_method_that_exist():
    for anchor in (*anchors.BESTS, *anchors.PEERS):
        assert anchor.workload in NAMES
        assert any(re.search(anchor.methods, name) for name in METHODS), anchor


def test_every_method_has_a_column_and_a_mark():
    assert set(METHODS) == set(baseline_tables.HEADS)
    for name in METHODS:
        fitting = [f for f in plots.FAMILIES if re.fullmatch(f.methods, name)]
        assert len(fitting) == 1, name


def test_the_sweep_has_models_that_ran_and_models_that_failed():
    summary, _, *lines = sweep_tables.sweep(program_results.sweep())
    assert summary == (
        "Plan ``fast``: 3 of 4 models ran; parity held for 2, to the bit for 1; median gain 1.50; "
        "eager: 2; captured, compiled: 1; measured in 412 s, 2 at a time."
    )
    assert lines[-4:] == [
        "",
        "Not captured, and why:",
        "",
        r"- timm vit: cuda\_graph: a \*copy\* at my\_model.py:3 in \<module>",
    ]
    rows = rows_of(lines[:-4])
    assert list(rows["timm resnet18"].values()) == [
        "timm resnet18",
        "to the bit",
        "9.50",
        "9.50",
        "1.000 (0.990 to 1.010)",
        "eager",
        "1 → 0.5",
    ]
    assert rows["timm vit"]["parity"] == "held"
    assert rows["timm vit"]["host waits, plain → plan"] == ""
    assert rows["transformers gpt2"]["parity"] == "**not held**"
    assert rows["transformers t5"]["parity"] == "failed: RuntimeError: no / such shape"


def test_the_sweep_tells_what_bf16_alone_does_to_what_is_not_held():
    result = program_results.sweep()
    tolerance = {"loss": 0.05, "update": 0.5}
    near, far = ({"loss_error": 0.01, "update_error": error} for error in (0.7, 0.3))
    for name, plain in (("timm vit", near), ("transformers gpt2", far)):
        errors = {"loss_error": 0.02, "update_error": 0.72}
        parity = {"held": False, "exact": False, "tolerance": tolerance, **errors}
        result["models"][name]["parity"] = {**parity, "rounding": plain}
    summary, _, *lines = sweep_tables.sweep(result)
    assert (
        "parity held for 1, to the bit for 1; "
        "not held, but within 1.25 times the plain bf16 loop: 1 of 2; median gain" in summary
    )
    rows = rows_of(lines[:-4])
    assert rows["timm vit"]["parity"] == "**not held** (update 0.72; plain bf16 loop 0.70)"
    assert rows["transformers gpt2"]["parity"] == (
        "**not held** (update 0.72; plain bf16 loop 0.30)"
    )


def test_the_sweep_names_files_of_packages_from_the_package_on():
    result = program_results.sweep()
    result["models"]["timm vit"]["stepped_aside"] = [
        "cuda_graph: a read and/or a wait (at /usr/lib/python3.11/site-packages/timm/a.py:3, "
        "/b/dist-packages/b.py:4), /my env/site-packages/c.py:5 and /home/me/model.py:6"
    ]
    assert sweep_tables.sweep(result)[-1] == (
        r"- timm vit: cuda\_graph: a read and/or a wait (at timm/a.py:3, b.py:4), "
        "/my env/site-packages/c.py:5 and /home/me/model.py:6"
    )


def test_a_sweep_in_which_nothing_ran():
    result = program_results.sweep()
    result["models"] = {"timm vit": {"status": "failed", "reason": "not done in 60 s"}}
    del result["elapsed_s"]  # as files have it that were measured before
    summary = sweep_tables.sweep(result)[0]
    assert summary == "Plan ``fast``: 0 of 1 models ran; parity held for 0."


@pytest.mark.parametrize(("gap", "within"), [(0.01, True), (0.5, False)])
def test_the_summary_tells_a_format_that_learns_less(gap, within):
    runs = [
        {
            "format": fmt,
            "seed": seed,
            "held_out_bits_per_byte": 1.5 + 0.02 * seed + (gap if fmt == "bf16" else 0),
            "train_bits_per_byte": [(20, 2.0)],
        }
        for fmt in main_job_curves.FORMATS
        for seed in range(3)
    ]
    summary = main_job_curves.summarise(runs)
    assert summary["seed_noise_bits_per_byte"] == pytest.approx(0.02)
    assert summary["bf16"]["within_noise"] is within
    assert summary["bf16"]["mean_difference_from_fp32"] == pytest.approx(gap)
    assert summary["tf32"]["within_noise"] is True
