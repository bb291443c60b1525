"""What the documentation says was measured is what the raw figures say."""

from __future__ import annotations

import json

import pytest

from benchmarks import main_job_curves, results, tables


def test_every_table_is_what_its_figures_say():
    pages = list((tables.ROOT / "docs").rglob("*.md"))
    found = [name for page in pages for name in tables.BLOCK.findall(page.read_text())]
    assert set(found) == set(tables.TABLES)
    for page in pages:
        text = page.read_text()
        assert tables.rewritten(text) == text, f"{page.name}: run benchmarks/tables.py"


def test_a_changed_figure_changes_the_page(monkeypatch, tmp_path):
    for file, _ in tables.TABLES.values():
        result = json.loads((tables.RESULTS / file).read_text())
        result["date"] = "1999-01-01"
        (tmp_path / file).write_text(json.dumps(result))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tables.ROOT / "docs" / "benchmarks.md"
    assert tables.rewritten(page.read_text()).count("1999-01-01") == len(tables.TABLES)


def test_raw_figures_name_machine_command_and_date():
    for path in tables.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert result["machine"]["torch"]
        assert result["machine"]["commit"] != "unknown"
        assert result["command"].startswith("PYTHONPATH=. python benchmarks/")
        assert "--out" not in result["command"]
        assert result["date"] >= "2026"


def test_a_result_is_written_without_the_place_of_its_output(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["benchmarks/x.py", "--out", "/secret", "--pairs", "3"])
    results.write(tmp_path / "deep" / "x.json", {"figures": {"a": 1}})
    written = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert written["command"] == "PYTHONPATH=. python benchmarks/x.py --pairs 3"
    assert written["figures"] == {"a": 1}


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
