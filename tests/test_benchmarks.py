"""What the documentation says was measured is what the raw figures say."""

from __future__ import annotations

import json

import pytest

import benchmark_results
import compile_results
import parallel_results
import profiling_results
import program_results
from benchmarks import (
    tables,
)
from benchmarks.methods import METHODS
from benchmarks.workloads import NAMES

PAGES = tables.pages()
FILES = {
    "baseline_CARD.json": benchmark_results.result_of_every_status,
    "searched_CARD.json": benchmark_results.result_of_every_status,
    "below_bf16_CARD.json": program_results.below_bf16,
    "branches_CARD.json": program_results.branches,
    "checkpoint_cost_CARD.json": program_results.checkpoint_cost,
    "compile_cost_CARD.json": compile_results.compile_cost,
    "loader_CARD.json": program_results.loader,
    "many_gpus_2xCARD.json": parallel_results.many_gpus,
    "compiled_update_CARD.json": compile_results.compiled_update,
    "losses_CARD.json": compile_results.losses,
    "float8_choice_CARD.json": program_results.float8_choice,
    "fragmentation_CARD.json": program_results.fragmentation,
    "largest_CARD.json": program_results.largest,
    "offload_CARD.json": program_results.offload,
    "offload_training_CARD.json": program_results.offload_training,
    "offload_update_CARD.json": program_results.offload_update,
    "out_of_memory_CARD.json": program_results.out_of_memory,
    "recompute_CARD.json": program_results.recompute,
    "slow_scripts_CARD.json": profiling_results.slow_scripts,
    "slow_to_fast_CARD.json": profiling_results.slow_to_fast,
    "sweep_captured_CARD.json": program_results.sweep,
    "sweep_bf16_CARD.json": program_results.sweep,
    "sweep_exact_CARD.json": program_results.sweep,
    "sweep_CARD.json": program_results.sweep,
    "watching_CARD.json": profiling_results.watching,
    "graph_events_CARD.json": profiling_results.graph_events,
    "first_replay_CARD.json": profiling_results.first_replay,
    "compare_check_CARD.json": profiling_results.compare_check,
    "main_job_curves_CARD.json": program_results.main_job,
}


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Put results that were made up where the tables look for them; return how to write one."""

    def write(file, content):
        benchmark_results.written(tmp_path / benchmark_results.of_card(file), content)

    for file, build in FILES.items():
        write(file, build())
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return write


def test_every_table_has_its_place_and_no_other():
    found = {name for page in PAGES for name in tables.BLOCK.findall(page.read_text())}
    assert found == set(tables.TABLES) | {f"baseline {name}" for name in NAMES}


def test_every_table_and_the_plot_are_what_their_figures_say():
    for path, text in tables.wanted().items():
        assert path.exists(), f"{path.name}: run benchmarks/tables.py"
        assert path.read_text() == text, f"{path.name}: run benchmarks/tables.py"


def test_a_workload_without_a_table_would_be_seen():
    paths = tables.files(tables.BASELINE).values()
    if not paths:
        pytest.skip("the baseline is not measured yet")
    for path in paths:
        assert set(json.loads(path.read_text())["workloads"]) <= set(NAMES)


def test_a_changed_figure_changes_the_page(made_up):
    pages = [page.read_text() for page in PAGES]
    num_blocks = sum(len(tables.BLOCK.findall(page)) for page in pages)
    for file, build in FILES.items():
        made_up(file, json.loads(json.dumps(build()).replace("2026-11-21", "1999-01-01")))
    changed = "".join(map(tables.rewritten, pages))
    assert changed.count("1999-01-01") == num_blocks


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("baseline summary", "| mlp | 2.0"),
        ("baseline plot", "](_static/baseline.svg)"),
        ("baseline gpt-small", "gpt-small, made up; 256 items a step"),
        ("anchors", "| mlp | one graph | 0.185 | 0.5"),
        ("branches", "| 4, 8, 16 | graph | 2.50 | 1.80 times | 1 MiB and 2 MiB | yes |"),
        (
            "below bf16",
            "| torchfast float8 | 195 | 84,021 | 0.985 (0.980 to 0.990) | 48.0 | 8.00 |  |",
        ),
        ("below bf16", "| 8 bit | 195 | 84,021 | 0.985 (0.980 to 0.990) | 48.0 | 2.00 | 25.0% |"),
        ("below bf16 curves", "| bf16 | 20 | 2.0000 | +0.00% | +0.00% | +0.00% |  |"),
        ("below bf16 curves", "| bf16, weights 2 | 20 | 2.0200 | +1.00% | +1.00% | +0.05% |  |"),
        ("below bf16 curves", "| 8 bit | 20 | 2.0100 | +0.50% | +5.00% | +0.55% | yes |"),
        ("below bf16 curves", "| 4 bit | 20 | 2.0400 | +2.00% | +2.00% | +0.11% | **no** |"),
        ("below bf16 curves", "| float8 | 10 | 4.0400 | +1.00% | +1.00% | +0.10% |"),
        # Beside bf16 from the same weights.
        (
            "below bf16 curves",
            "| float8, weights 1 | 20 | 2.0000 | +0.50% | +0.50% | +0.03% | yes |",
        ),
        ("below bf16 curves", "bf16 ends from itself with other weights: 1.00%, with 2 of them."),
        ("below bf16 warm-up", "| float8, weights 1 | 20 | 4.0800 | +2.00% | +2.00% | +0.20% |  |"),
        ("below bf16 decay", "| float8, weights 1 | 20 | 4.0800 | +2.00% | +2.00% | +0.20% |  |"),
        (
            "float8 choice",
            "| one | 8,192 tokens | captured | 8 of 29 linear layers (8 tensorwise) | 25.0 "
            "| 20.0 | 0.800 (0.790 to 0.810) | yes |",
        ),
        ("float8 choice", "| no layer | 25.0 | 25.8 | 1.030 (1.020 to 1.040) | **no** |"),
        ("checkpoint cost", "| a save holds training up for | 0.250 s (0.240 to 0.270, 3 saves) |"),
        ("compile cold", "| by blocks | 8.00 | 20.0 | 2 | 7.5 |"),
        ("compile cold", "| not compiled | 1.00 | 30.0 | 0 |  |"),
        ("compile cold", "starts in 20.0% of the time of whole (a third is asked for), and"),
        ("compile warm", "| cold | 20.0 | 0 | 4 | 5.0 |"),
        ("compile warm", "| warm | 1.50 | 8 | 0 | 5.0 |"),
        ("compile warm", "misses nothing: held"),
        ("compile curves", "| 1 | 2.5200 | 2.5300 |"),
        ("compile curves", "-0.0025, within what the seeds differ by (0.0400)"),
        ("compile workloads", "| mlp | 9.00 | 0.125 | 2 | 7.5 | 1 | 0 | captured, compiled |"),
        ("compile workloads", "| moe | failed: not done in / 60 s |"),
        ("compiled update", "| gpt2 | RMSprop | 62.5 (62.4 to 62.6) | 60.0 (59.9 to 60.1) | 2.50"),
        ("compiled update", "| 63.0 (62.9 to 63.1) | -1.00 | as it is | 3.0e-05 |"),
        ("losses", "| plain eager | 20.0 (19.0 to 21.0) | 6,144 | 1.2 | 0.00123 |"),
        ("losses", "| torchfast graph | 15.0 (14.0 to 16.0) |  | 1.2 |"),
        ("loader efficiency", "| 0.993 (0.990 to 0.995) | 0.992 | held |"),
        ("loader overlap", "| 97.5% | 2.0, 0.710 | 54.2 | all | 97% | never | held |"),
        ("loader next", "| list | yes | sleeps | 41.2 | 60.0 | held |"),
        ("loader memory", "| 121.6 +0.0 |  | 64 +2 | 5 +0 | 899.0 +0.5 | as it should be |"),
        ("loader peers", "| 0.800 (0.790 to 0.810) of timm |"),
        ("loader timeline", "](../_static/loader_timeline.svg)"),
        (
            "offload",
            "| 8 of width 4,096, 4 x 2,048 | eager | offload | 125 | 1.050 | 6.25 | 4.00 |",
        ),
        (
            "offload training",
            "| offload auto | 310 | 1.070 (1.060 to 1.080) | 41.25 | 55% | 12.34 | 83% | yes |",
        ),
        (
            "offload training",
            "| offload optimizer | 310 | 1.070 (1.060 to 1.080) | 41.25 | 55% | 12.34 |  | 0.12% |",
        ),
        (
            "offload update",
            "| 8 | host | 16 | 2,500 | 1.250 (1.200 to 1.300) |  | 450 | 41.25 |  |  |",
        ),
        (
            "offload update",
            "| host, overlap | 16 | 2,500 | 1.250 (1.200 to 1.300) | 0.950 (0.940 to 0.960) | 450 "
            "| 41.25 | 7, 1 | yes |",
        ),
        ("offload update", "| 450 | 41.25 | 7, 1 | **no** |"),
        ("largest", "On one device. Batch: sequences of 4,096 tokens, 16 layers of width 2,048."),
        ("largest", "The host has 137 GB, for what waits there."),
        ("largest", "| plain | 12 | 1.00 | 51,000 | 4.50B (20 layers) | 1.00 | 9,000 |"),
        ("largest", "| recompute | at least 42 | at least 3.50 | 43,210 | nothing fits |  |  |"),
        ("recompute", "| GPT | graph | none | 25.0 | 1.250 (1.200 to 1.300) | 1.275 | 310 | 300 |"),
        ("recompute", "| GPT | graph | stages | 25.0 | 1.250 (1.200 to 1.300) |  | 310 |  |"),
        ("fragmentation", "| after so many steps | 50 | 5,000 |"),
        ("fragmentation", "| torch's own settings, device full 2 times | 1.18 | 3.61 |"),
        ("fragmentation", "| variable-shapes | 1.07 | 1.07 |"),
        ("fragmentation", "At the end tensors have needed 1.02 GB at most."),
        ("out of memory", "| forward | 156.3 | 0.000% | 1.230% | 0.040% | 81.0 | yes |"),
        ("out of memory", "| capture | 156.3 | 0.000% | 1.230% | 0.040% | 81.0 | **no** |"),
        ("slow scripts", "| one | it reads a number | sync-bound | host-sync | right |"),
        (
            "slow scripts",
            "| other | it reads a number | fine, **not right** | none, **not right** |",
        ),
        ("slow scripts", "| last | it reads a number | failed |"),
        ("sweep", "| timm resnet18 |"),
        ("compare check", "| mlp | the same code twice | no difference: 2, slower: 1 |"),
        ("compare check", "| mlp | 3% planted | slower: 1 |"),
        ("first replay", "| gpt-small | 8.00 | 12.0 | 1.50 | 3.25 |"),
        (
            "graph events",
            "| mlp | 3.50 | +0.40% (+0.30% to +0.50%) | +0.40% | 1.00 / 2.00 / 0.500 "
            "| 1.00 / 2.00 / 0.500 | 100.0% | 0%, 100% |",
        ),
        (
            "watching",
            "| eager | as it is | 5.02 | no times | +0.30% (+0.20% to +0.50%) | 0.22% "
            "| +0.25% (+0.10% to +0.40%) |",
        ),
        ("main job", "| bf16 | 1.5500 |"),
    ],
)
def test_a_table_has_its_own_figures_and_names_their_source(made_up, name, figure):
    block = tables.render(name)
    assert figure in block
    source = benchmark_results.of_card(tables.table_named(name)[0])
    assert "Measured on one NVIDIA H200, torch 2.11.0+cu130: 2026-11-21, commit " in block
    assert f"Raw figures in ``benchmarks/results/{source}``" in block


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        (
            "many gpus",
            "| gpt2 | ddp, no graph by hand | 60.0 | 1.500 |  | 273,067 | 65.0% | 1.50 |",
        ),
        (
            "many gpus",
            "| gpt2 | ddp, graph by hand | 40.0 |  | 1.50 times | 409,600 | 97.5% | 1.50 |",
        ),
        (
            "many gpus",
            "| gpt2 | ddp, torchfast | 41.0 | 1.025 | 1.46 times | 399,610 | 95.1% | 1.50 |",
        ),
        ("many gpus", "| gpt2 | fsdp, Lightning | failed: Error: a \\| b | | | | | |"),
        ("many gpus", "| gpt2 | one GPU, torchfast | 39.0 |  |  | 210,051 |  |  |"),
        ("exact on ranks", "| gpt2 | ddp, torchfast | 24 | 12 | the same in 1,500 tensors"),
        ("exact on ranks", "| gpt2 | fsdp, torchfast | 24 | 12 | other: rank 1: head.weight |"),
        ("exact on ranks", "| gpt2 | hsdp, torchfast | | | failed: Error: c \\| d |"),
        ("communication", "| gpt2 | ddp, torchfast | 0 | 41.0 | 20.0 | 1.00 | 95.0% |"),
        ("communication", "| gpt2 | ddp, torchfast | 1 | 41.0 | 0 | 1.00 |  |"),
        ("communication", "| gpt2 | fsdp, torchfast |  | failed: Error: e \\| f | | | |"),
    ],
)
def test_a_table_of_several_gpus_says_on_how_many(made_up, name, figure):
    block = tables.render(name)
    assert figure in block
    assert "Measured on 2 of NVIDIA H200, torch 2.11.0+cu130: 2026-11-21, commit " in block


def test_a_table_of_some_rows_names_the_runs_of_these(made_up):
    result = program_results.below_bf16()
    for number, row in enumerate(result["rows"]):
        row["run"] = {"date": "2026-11-20", "commit": f"c{number}", "command": f"run {number}"}
    made_up("below_bf16_CARD.json", result)
    block = tables.render("below bf16")
    assert "in 4 runs on 2026-11-20" in block
    assert "commit c0, by ``run 0``\n- 2026-11-20, commit c1, by ``run 1``" in block
    assert "run 4" not in block
    block = tables.render("below bf16 curves")
    assert "commit c4, by ``run 4``\n- 2026-11-20, commit c5, by ``run 5``" in block
    assert "run 3" not in block


def test_a_table_whose_rows_are_not_there_yet_is_none(made_up):
    result = program_results.below_bf16()
    result["rows"] = [row for row in result["rows"] if row["group"] == "curves"]
    made_up("below_bf16_CARD.json", result)
    assert tables.render("below bf16") is None
    assert tables.render("below bf16 curves") is not None


def test_a_table_of_a_section_names_the_runs_of_its_rows(made_up):
    result = compile_results.compile_cost()
    section = result["sections"]["workloads"]
    section["run"] = {"date": "2026-11-20", "commit": "c0", "command": "run 0"}
    section["rows"][0]["run"] = {"date": "2026-11-20", "commit": "c1", "command": "run 1"}
    made_up("compile_cost_CARD.json", result)
    block = tables.render("compile workloads")
    assert "in 2 runs on 2026-11-20" in block
    assert "commit c1, by ``run 1``" in block


def test_a_sweep_names_the_runs_of_its_models(made_up):
    result = program_results.sweep()
    for number, model in enumerate(result["models"].values()):
        if number != 3:  # as a file has it that one run wrote
            commit = f"c{min(number, 1)}"
            model["run"] = {"date": "2026-11-20", "commit": commit, "command": f"run {commit}"}
    made_up("sweep_CARD.json", result)
    block = tables.render("sweep")
    assert "in 3 runs on 2026-11-20 and 2026-11-21" in block
    assert "- 2026-11-20, commit c0, by ``run c0``\n- 2026-11-20, commit c1" in block
    assert "- 2026-11-21, commit abc1234, by ``PYTHONPATH=. python benchmarks/sweep.py``" in block


def test_a_curve_without_that_of_bf16_has_no_drift(made_up):
    result = program_results.below_bf16()
    result["rows"] = [row for row in result["rows"] if row["method"] != "bf16"]
    made_up("below_bf16_CARD.json", result)
    assert "| 8 bit | 20 | 2.0100 |  |" in tables.render("below bf16 curves")


def test_a_table_of_a_file_measured_in_parts_names_the_runs_it_is_from(made_up):
    result = benchmark_results.result()
    result["runs"] = [
        {"date": f"2026-11-2{n}", "commit": f"c{n}", "command": f"run {n}"} for n in range(3)
    ]
    for number, name in enumerate(("mlp", "gpt-small")):
        for method in result["workloads"][name]["methods"].values():
            method["run"] = number
    result["workloads"]["mlp"]["methods"]["naive"]["run"] = 2
    made_up(tables.BASELINE, result)
    block = tables.render("baseline mlp")
    assert "in 2 runs on 2026-11-20 and 2026-11-22" in block
    assert "- 2026-11-20, commit c0, by ``run 0``\n- 2026-11-22, commit c2" in block
    block = tables.render("baseline gpt-small")
    assert "``run 1``" in block
    assert "run 0" not in block
    assert "run 2" not in block
    summary = tables.render("baseline summary")
    assert all(f"run {number}" in summary for number in range(3))


def test_a_table_names_the_runs_of_the_sections_it_is_made_from(made_up):
    result = program_results.loader()
    for number, section in enumerate(result["sections"].values()):
        section["run"] = {"date": "2026-11-20", "commit": f"c{number}", "command": f"run {number}"}
    made_up(tables.LOADER, result)
    names = list(result["sections"])
    assert f"``run {names.index('memory')}``" in tables.render("loader memory")
    assert f"``run {names.index('eta')}``" not in tables.render("loader memory")
    efficiency = tables.render("loader efficiency")
    for name in ("eta", "eta again 2"):
        assert f"``run {names.index(name)}``" in efficiency
    assert f"``run {names.index('memory')}``" not in efficiency


def test_a_table_is_made_again_from_itself(made_up):
    for page in PAGES:
        once = tables.rewritten(page.read_text())
        assert tables.rewritten(once) == once


def test_without_its_figures_a_page_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    wanted = tables.wanted()
    assert wanted == {page: page.read_text() for page in PAGES}


def test_a_table_that_does_not_exist_is_an_error():
    with pytest.raises(SystemExit, match=r"step overhead.*anchors.*baseline NAME"):
        tables.rewritten("<!-- figures: step overhead -->\n<!-- end -->")


def test_check_writes_nothing_and_tells_what_is_stale(made_up, monkeypatch, tmp_path, capsys):
    docs = tmp_path / "docs"
    docs.mkdir()
    page = docs / "page.md"
    page.write_text("# Page\n\n<!-- figures: sweep -->\n<!-- end -->\n")
    picture = docs / "_static" / "loader_timeline.svg"
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PLOT", docs / "_static" / "baseline.svg")

    def status(*options):
        monkeypatch.setattr("sys.argv", ["tables.py", *options])
        with pytest.raises(SystemExit) as left:
            tables.main()
        return left.value.code

    before = page.read_text()
    assert status("--check") == 1
    assert page.read_text() == before
    assert not tables.PLOT.exists()
    assert not picture.exists()
    assert "docs/page.md" in capsys.readouterr().out
    assert status() == 0
    assert "timm resnet18" in page.read_text()
    assert tables.PLOT.read_text().startswith("<svg")
    assert "the GPU computes 75% of the time" in picture.read_text()
    assert status("--check") == 0


def test_the_page_lists_every_workload_and_what_every_method_is_given():
    page = (tables.ROOT / "docs" / "benchmarks.md").read_text()
    for name in NAMES:
        assert f"\n| {name} | " in page
    for method in METHODS.values():
        row = f"| {method.name} | {method.given} |"
        assert f"\n{row}\n" in page, f"the page should have: {row}"
