"""What the tables of the loader say of a result: nothing is judged that cannot be."""

from __future__ import annotations

import pytest

import benchmark_results
import program_results
from benchmarks import loader_eta, loader_host, loader_peers, loader_tables, tables

TABLES = [table for name, (_, table) in tables.TABLES.items() if name.startswith("loader ")]


def tables_in(lines):
    """Return the tables among the lines, each as a list of its rows' cells, without the heads."""
    found, rows = [], []
    for line in [*lines, ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            assert len({len(row) for row in rows}) == 1, "every row has every cell"
            found.append(rows[2:])
            rows = []
    return found


@pytest.fixture
def result():
    return program_results.loader()


def test_only_what_the_upstream_could_feed_is_judged(result):
    lines = loader_tables.efficiency(result)
    assert "Held: 1 of 2 rows that can be judged." in lines[0]
    (rows,) = tables_in(lines)
    assert [row[-1] for row in rows] == [
        "held",
        "missed",
        "supply-bound, not judged",
        "**wrong bytes**",
        "left out: no time was left",
    ]
    assert [row[3] for row in rows[:2]] == ["ready, recycled", "pinned list"]
    assert [row[4] for row in rows[:3]] == ["2.80", "in memory", "0.900"]
    assert rows[4][:3] == ["50%", "4", "yes"]  # the ratio that was wanted: none was measured


def test_other_processes_stand_beside_the_form_they_measured(result):
    again = result["sections"]["eta again 2"]["rows"]
    again.append({**again[0], "depth": 1, "eta": 0.5})
    again.append({**again[0], "recycled": False, "eta": 0.25})
    (rows,) = tables_in(loader_tables.efficiency(result))
    assert [row[8] for row in rows] == ["0.992", "", "", "0.500", ""]


def test_overlap_is_judged_where_the_device_computes_and_a_control_has_to_fail(result):
    traced, guarded = tables_in(loader_tables.overlap(result))
    assert [row[-1] for row in traced] == [
        "held",
        "missed",
        "supply-bound, not judged",
        "as a control should be",
        "left out: no time was left",
    ]
    assert traced[1][5] == "**not all**"
    assert traced[3][7] == "cudaStreamSynchronize 3x"
    assert guarded[0][2:] == ["100", "nothing waited", "as it should be"]
    assert guarded[1][2:] == ["100", "a / b", "**not held**"]
    for row in result["sections"]["overlap"]["rows"]:
        row["held"] = True
    traced, _ = tables_in(loader_tables.overlap(result))
    assert traced[3][-1] == "**the control overlaps**"


def test_without_a_bus_there_is_no_overlap(result):
    row = result["sections"]["overlap"]["rows"][0]
    row |= {"overlap": None, "reason": "there is no bus"}
    traced, _ = tables_in(loader_tables.overlap(result))
    assert traced[0] == ["copy, recycled", "yes", *[""] * 6, "there is no bus"]


def test_next_is_held_against_its_target_and_a_short_step_says_what_starved_it(result):
    lines = loader_tables.next_cost(result)
    calls, steps = tables_in(lines)
    assert [row[2:] for row in calls] == [
        ["sleeps", "41.2", "60.0", "held"],
        ["sleeps", "51.0", "70.0", "missed"],
        ["computes", "300.0", "500.0", "for comparison"],
        ["sleeps", "", "", "left out: no time was left"],
    ]
    assert [row[2] for row in steps] == ["in memory", "0.120, supply-bound"]
    assert steps[0][5] == "+13.0"
    assert any("event.record 10.5" in line for line in lines)


def test_memory_shows_growth_and_its_control_has_to_grow(result):
    (rows,) = tables_in(loader_tables.memory(result))
    grows = "the control, which keeps its batches, grows"
    assert [row[-1] for row in rows] == ["as it should be", "**not held**", grows]
    assert rows[0][4] == ""  # what this version of torch does not tell
    result["sections"]["memory"]["rows"][2]["held"] = False
    (rows,) = tables_in(loader_tables.memory(result))
    assert rows[2][-1] == "**the control does not grow**"


def test_peers_have_a_column_each_and_what_is_absent_a_reason(result):
    lines = loader_tables.peers(result)
    (rows,) = tables_in(lines)
    assert rows == [
        [
            *("images", "38.5", "5.90, pinned 7.50", "10.0", "15.0", "14.5", "–", "–"),
            *("11.6", "–", "–", "–", "0.800 (0.790 to 0.810) of timm"),
        ]
    ]
    text = "\n".join(lines)
    assert "Left out: Accelerate on images: accelerate is not here." in text
    assert "The rest was not measured. (failed: it took / too long)" in text
    result["sections"]["peers"]["rows"][0]["ratio_to_best_peer"] = {}
    (rows,) = tables_in(loader_tables.peers(result))
    assert rows[0][-1] == "torchfast did not run"


def test_the_picture_is_drawn_if_anything_ran(result, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    picture = tmp_path / "docs" / "_static" / loader_tables.PICTURE

    def wanted():
        file = benchmark_results.of_card(tables.LOADER)
        benchmark_results.written(tmp_path / file, result)
        return tables.wanted()

    assert "a naive loop: the GPU computes 50%." in wanted()[picture]
    assert "with the loader, the GPU computes 75%" in loader_tables.timeline(result)[0]
    for row in result["sections"]["timeline"]["rows"]:
        row |= {"status": "failed", "reason": "no profiler"}
    assert picture not in wanted()
    assert loader_tables.timeline(result)[2:] == ["| failed: no profiler |"] * 2


@pytest.mark.parametrize("table", TABLES)
def test_what_was_not_measured_is_said(result, table):
    for section in result["sections"].values():
        section |= {"rows": [], "status": "left out", "reason": "no time was left"}
    said = "This part was not measured. (left out: no time was left)"
    assert table(result)[-1] == said
    result["sections"] = {}
    assert table(result)[-1] == "This part was not measured. (left out)"


def test_the_words_are_those_of_the_measurements():
    assert set(loader_peers.METHODS) == {*loader_tables.PEERS, *loader_tables.OURS}
    assert loader_tables.OURS == loader_peers.OURS
    assert loader_tables.ENOUGH == loader_eta.ENOUGH
    assert f"target {loader_host.TARGET_US:g} µs" in "".join(
        loader_tables.next_cost(program_results.loader())
    )
    page = (tables.ROOT / "docs" / "how-it-works" / "prefetching.md").read_text()
    assert f"The target is\n{loader_eta.TARGET}" in page
    assert f"at least {loader_eta.ENOUGH} times" in page
    assert f"{loader_peers.OVER_SUPPLY} times" in loader_tables.STEPS
