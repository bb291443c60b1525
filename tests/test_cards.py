"""Which card's file a table is made from where several have been measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

import benchmark_results
import compile_results
import program_results
from benchmarks import tables
from benchmarks.workloads import NAMES

GPUS = {
    "h200": "NVIDIA H200",
    "h100": "NVIDIA H100 80GB HBM3",
    "a100": "NVIDIA A100-SXM4-80GB",
    "b200": "NVIDIA B200",
}
BASELINE_TABLES = [
    *(name for name, (file, _) in tables.TABLES.items() if file == tables.BASELINE),
    *(f"baseline {name}" for name in NAMES),
]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return what puts made-up results of a card where the tables look for them."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def write(template, card, content):
        content["machine"]["gpu"] = GPUS[card]
        path = tmp_path / benchmark_results.of_card(template, card)
        return benchmark_results.written(path, content)

    return write


def card_of(name):
    """Return the card whose file a table is made from, which is also the one that it names."""
    block = tables.render(name)
    if block is None:
        return None
    (card,) = (card for card in GPUS if f"_{card}.json``" in block)
    assert f"Measured on one {GPUS[card]}, torch " in block
    return card


def test_a_table_is_of_the_preferred_card_that_was_measured(measured):
    template, _ = tables.TABLES["branches"]
    assert card_of("branches") is None
    for card in ("b200", "a100", "h100", "h200"):  # each goes before those that are there
        measured(template, card, program_results.branches())
        assert card_of("branches") == card
    assert list(tables.files(template)) == ["h200", "h100", "a100", "b200"]


def test_a_table_is_of_the_card_that_was_measured_last(measured):
    template, _ = tables.TABLES["branches"]
    for card, date in (("h200", "2026-11-23"), ("h100", "2026-11-24"), ("b200", "2026-11-22")):
        measured(template, card, program_results.branches() | {"date": date})
    assert card_of("branches") == "h100"


def test_a_file_of_another_name_is_no_card_of_it(measured, tmp_path):
    template, _ = tables.TABLES["sweep exact"]
    measured(template, "h200", program_results.sweep())
    (tmp_path / "old_sweep_h200.json").write_text("{}")
    (tmp_path / "sweep_h200.json.part").write_text("{}")
    assert tables.render("sweep") is None
    assert card_of("sweep exact") == "h200"
    (tmp_path / "many_gpus_2xh100.json").write_text("{}")
    (tmp_path / "many_gpus_4xh100.json").write_text("{}")
    assert tables.files(tables.MANY_GPUS) == {"h100": tmp_path / "many_gpus_2xh100.json"}


def test_where_a_card_lacks_rows_the_next_one_has_the_table(measured):
    template, _ = tables.TABLES["below bf16"]
    some = program_results.below_bf16()
    some["rows"] = [row for row in some["rows"] if row["group"] == "curves"]
    measured(template, "h200", some)
    assert tables.render("below bf16") is None
    measured(template, "h100", program_results.below_bf16())
    assert card_of("below bf16") == "h100"
    assert card_of("below bf16 curves") == "h200"


def test_where_a_card_lacks_a_section_the_next_one_has_the_table(measured):
    some = compile_results.compile_cost()
    del some["sections"]["cold"]
    measured(tables.COMPILE, "h200", some)
    assert tables.render("compile cold") is None
    measured(tables.COMPILE, "h100", compile_results.compile_cost())
    assert card_of("compile cold") == "h100"
    assert card_of("compile warm") == "h200"


def test_the_picture_is_of_the_card_of_its_table(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    some = program_results.loader()
    del some["sections"]["timeline"]
    measured(tables.LOADER, "h200", some)
    assert tables.wanted() == {}
    measured(tables.LOADER, "h100", program_results.loader())
    assert card_of("loader memory") == "h200"
    assert card_of("loader timeline") == "h100"
    (picture,) = tables.wanted().values()
    assert GPUS["h100"] in picture


def test_the_tables_of_all_workloads_and_the_plot_are_of_one_card(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    some = benchmark_results.result()
    some["workloads"] = {"mlp": some["workloads"]["mlp"]}  # the other card has more of them
    measured(tables.BASELINE, "h200", some)
    measured(tables.BASELINE, "h100", benchmark_results.result())
    assert {card_of(name) for name in BASELINE_TABLES} == {"h200"}
    assert GPUS["h200"] in tables.wanted()[tables.PLOT]


def test_one_card_without_any_run_does_not_mix_the_tables(measured):
    none = benchmark_results.result()
    none |= {"runs": [], "workloads": {}}
    measured(tables.BASELINE, "h200", none)
    measured(tables.BASELINE, "h100", benchmark_results.result())
    assert {card_of(name) for name in BASELINE_TABLES} == {None}


def test_only_the_card_of_the_anchors_is_held_against_them(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    measured(tables.BASELINE, "h100", benchmark_results.result())
    assert {name: card_of(name) for name in BASELINE_TABLES} == {
        name: None if name == "anchors" else "h100" for name in BASELINE_TABLES
    }
    assert GPUS["h100"] in tables.wanted()[tables.PLOT]
    measured(tables.BASELINE, "h200", benchmark_results.result())
    assert card_of("anchors") == "h200"


def test_tables_are_made_where_no_torch_is():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'torchfast'))\n"  # None: not to be had
        "from benchmarks import tables; assert tables.wanted()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tables.ROOT, timeout=60)
