"""The plot shows what the figures say, to every reader."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

import benchmark_results
from benchmarks import plots

SVG = "{http://www.w3.org/2000/svg}"


def marks(svg, workload):
    """Return the titles of the marks in a workload's row, and their paths."""
    for row in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if row.findtext(f"{SVG}title") == workload:
            return {
                mark.findtext(f"{SVG}title").rpartition(":")[0]: mark.find(f"{SVG}path")
                for mark in row.findall(f"{SVG}g")
            }
    return None


def test_equal_figures_give_equal_bytes():
    result = benchmark_results.result_of_every_status()
    svg = plots.baseline(result)
    assert plots.baseline(json.loads(json.dumps(result))) == svg
    result["workloads"]["mlp"]["methods"]["naive"]["blocks_ms"] = [3.0] * 20
    assert plots.baseline(result) != svg


def test_a_row_has_the_best_of_alternatives_and_all_others():
    svg = plots.baseline(benchmark_results.result())
    assert list(marks(svg, "gpt-small")) == [
        "naive",
        "tuned",
        "Lightning",
        "Accelerate",
        "compile max-autotune",
        "by hand: graph + compile whole",
        "torchfast eager",
        "torchfast exact",
        "torchfast fast",
    ]


def test_what_does_not_train_is_hollow_and_crossed_and_never_the_best():
    row = marks(plots.baseline(benchmark_results.result_of_every_status()), "mlp")
    broken, best = row["by hand: graph + compile whole"], row["by hand: graph"]
    assert broken.get("fill") == "none"
    assert broken.get("d").endswith("m-4 -4l8 8m0 -8l-8 8")
    assert best.get("fill") != "none"


def test_marks_lie_where_their_ratios_are_on_a_logarithmic_axis():
    quiet = {"noise": 0.0, "busy": 0.0, "bias": 0.0}
    relative = {"naive": 2.0, "tuned": 1.0, "torchfast fast": 0.5}
    row = marks(plots.baseline(benchmark_results.result(relative=relative, **quiet)), "mlp")
    naive, tuned, fast = (float(re.match(r"M([\d.]+)", p.get("d"))[1]) for p in row.values())
    assert plots.LEFT < fast < tuned < naive < plots.RIGHT
    assert tuned - fast == pytest.approx(naive - tuned, abs=0.02)
    assert fast - plots.LEFT == pytest.approx(plots.RIGHT - naive, abs=0.02)


def test_the_plot_can_be_read_aloud_and_without_colours():
    svg = ElementTree.fromstring(plots.baseline(benchmark_results.result_of_every_status()))
    assert svg.findtext(f"{SVG}title") == plots.TITLE
    assert "naive: 1.2" in svg.findtext(f"{SVG}desc")
    assert "does not train" in svg.findtext(f"{SVG}desc")
    texts = {text.text for text in svg.iter(f"{SVG}text")}
    assert {"mlp", "gpt-small", "torchfast fast", "does not train"} <= texts
    assert "llama" not in texts  # nothing of it ran
    looks = [(family.colour, family.shape) for family in plots.FAMILIES]
    assert len(set(looks)) == len(looks)
    lanes = [(family.lane, family.shape) for family in plots.FAMILIES]
    assert len(set(lanes)) == len(lanes)


def test_names_are_escaped():
    result = benchmark_results.result()
    result["machine"]["gpu"] = "A <fast> & good GPU"
    result["workloads"]["a<b"] = result["workloads"].pop("mlp")
    assert marks(plots.baseline(result), "a<b")
