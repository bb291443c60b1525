"""The SVG plot, parsed back: where its points are, what it says, how it is written."""

import errno
import math
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from torchfast.reporting import plot_lines

# --- plot_lines -----------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


class Plot:
    """A plot, drawn and parsed back."""

    def __init__(self, path, series, **options):
        plot_lines(path, series, **options)
        self.root = ET.fromstring(path.read_bytes())
        self.texts = ["".join(text.itertext()) for text in self.root.iter(f"{SVG}text")]
        groups = [g for g in self.root.iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]
        self.series = {g.findtext(f"{SVG}title"): g for g in groups}

    def runs(self, name):
        """The pixel coordinates of each unbroken piece of a line."""
        path = self.series[name].find(f"{SVG}path")
        if path is None:
            return []
        return [
            [tuple(map(float, point.split())) for point in piece.split("L")]
            for piece in path.get("d").split("M")[1:]
        ]

    def dots(self, name):
        return [
            (float(c.get("cx")), float(c.get("cy"))) for c in self.series[name].iter(f"{SVG}circle")
        ]

    def tick_pixels(self, axis):
        """The pixel of each tick, by label."""
        place, anchor = ("x", "middle") if axis == "x" else ("y", "end")
        ticks = [
            text
            for text in self.root.iter(f"{SVG}text")
            if text.get("text-anchor") == anchor and text.get(place)
        ]
        if axis == "x":  # its label stands below all of them
            highest = min(float(text.get("y")) for text in ticks)
            ticks = [text for text in ticks if float(text.get("y")) == highest]
        return {text.text: float(text.get(place)) - (4 if axis == "y" else 0) for text in ticks}


@pytest.fixture
def draw(tmp_path):
    return lambda series, **options: Plot(tmp_path / "plot.svg", series, **options)


def test_known_points_lie_on_their_ticks(draw):
    plot = draw({"a": [(0, 0.0), (50, 2.0), (100, 10.0)]})
    ((first, middle, last),) = plot.runs("a")
    x, y = plot.tick_pixels("x"), plot.tick_pixels("y")
    assert list(x) == ["0", "20", "40", "60", "80", "100"]
    assert list(y) == ["0", "2", "4", "6", "8", "10"]
    assert first == pytest.approx((x["0"], y["0"]), abs=0.02)
    assert middle == pytest.approx(((x["40"] + x["60"]) / 2, y["2"]), abs=0.02)
    assert last == pytest.approx((x["100"], y["10"]), abs=0.02)
    assert last[0] == 692
    assert first[1] == 384


def test_logarithmic_axis_maps_decades_evenly(draw):
    plot = draw({"a": [(0, 0.01), (1, 0.1), (2, 1.0), (3, 10.0)]}, log_y=True)
    (points,) = plot.runs("a")
    y = plot.tick_pixels("y")
    assert [pixel for _, pixel in points] == pytest.approx(
        [y["0.01"], y["0.1"], y["1"], y["10"]], abs=0.02
    )
    steps = np.diff([pixel for _, pixel in points])
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)


def test_logarithmic_axis_of_less_than_a_decade_is_logarithmic(draw):
    plot = draw({"a": [(0, 2.0), (1, 2.5), (2, 3.0)]}, log_y=True)
    y = plot.tick_pixels("y")
    middle = y["2.0"] + (y["3.0"] - y["2.0"]) * math.log(2.5 / 2) / math.log(3 / 2)
    assert plot.runs("a")[0][1][1] == pytest.approx(middle, abs=0.02)


@pytest.mark.parametrize("log_y", [False, True])
def test_monotone_data_give_monotone_pixels_inside_the_frame(draw, log_y):
    plot = draw({"a": [(i, 5 * math.exp(-i / 100)) for i in range(1, 800)]}, log_y=log_y)
    (points,) = plot.runs("a")
    xs, ys = zip(*points, strict=True)
    assert len(points) == 799
    assert list(xs) == sorted(set(xs))
    assert list(ys) == sorted(ys)  # the loss falls, so y in pixels grows
    assert len(set(ys)) > 600
    assert min(xs) > 40
    assert max(xs) <= 692
    assert min(ys) > 40
    assert max(ys) <= 384


def test_non_finite_points_break_the_line(draw):
    values = [1, 2, math.nan, 3, 4, math.inf, 5, -math.inf, 6, 7, 8]
    plot = draw({"a": list(enumerate(values)), "b": [(0, 1), (math.nan, 2), (2, 3), (3, 1)]})
    assert [len(run) for run in plot.runs("a")] == [2, 2, 3]
    assert len(plot.dots("a")) == 1
    assert [len(run) for run in plot.runs("b")] == [2]
    assert len(plot.dots("b")) == 1
    assert not any("nan" in (e.get("d") or "") + (e.get("cy") or "") for e in plot.root.iter())


def test_points_that_a_logarithm_does_not_have_break_the_line(draw):
    data = {"a": [(0, 1.0), (1, 2.0), (2, 0.0), (3, 3.0), (4, 4.0), (5, -1.0)]}
    assert [len(run) for run in draw(data, log_y=True).runs("a")] == [2, 2]
    assert [len(run) for run in draw(data).runs("a")] == [6]


def test_single_point_is_a_dot(draw):
    plot = draw({"a": [(100, 2.5)], "b": [(0, 0), (200, 5)]})
    assert plot.runs("a") == []
    ((x, y),) = plot.dots("a")
    assert x == pytest.approx(plot.tick_pixels("x")["100"], abs=0.02)
    assert plot.dots("b") == []
    (line,) = plot.runs("b")
    assert y == pytest.approx((line[0][1] + line[1][1]) / 2, abs=0.02)


def test_spikes_survive_thinning(draw):
    data = [(i, math.sin(i / 2000)) for i in range(30_000)]
    data[3_141] = (3_141, 50.0)
    data[27_777] = (27_777, -50.0)
    (points,) = draw({"a": data}).runs("a")
    assert 900 <= len(points) <= 1000
    assert min(points, key=lambda p: p[1])[0] == pytest.approx(
        points[0][0] + (points[-1][0] - points[0][0]) * 3_141 / 29_999, abs=0.02
    )
    ys = [y for _, y in points]
    assert ys.index(min(ys)) < ys.index(max(ys))
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_thinning_keeps_both_ends(draw):
    # At both ends lies a point that is neither the lowest nor the highest of its bucket.
    plot = draw({"a": [(i, (0, 1, -1)[i % 3]) for i in range(3001)]})
    (points,) = plot.runs("a")
    ends = [
        (plot.tick_pixels("x")["0"], plot.tick_pixels("y")["0"]),
        (692, plot.tick_pixels("y")["0"]),
    ]
    assert [points[0], points[-1]] == [pytest.approx(end, abs=0.02) for end in ends]


def test_thinning_keeps_breaks_and_the_bound(draw):
    data = [(i, float(i % 7)) for i in range(20_000)]
    data[8_000] = (8_000, math.nan)
    runs = draw({"a": data}).runs("a")
    assert len(runs) == 2
    assert sum(map(len, runs)) <= 1000
    # Every other point missing: isolated points, and no more of them.
    plot = draw({"a": [(i, 1.0 if i % 2 else math.nan) for i in range(5_000)]})
    assert plot.runs("a") == []
    assert 0 < len(plot.dots("a")) <= 1000


def test_up_to_a_thousand_points_are_all_drawn(draw):
    (points,) = draw({"a": [(i, i % 3) for i in range(1000)]}).runs("a")
    assert len(points) == 1000


def test_output_is_deterministic_and_self_contained(tmp_path):
    series = {"a": [(i, math.cos(i)) for i in range(3000)], "b": [(0, 1)]}
    for name in ("one.svg", "two.svg"):
        plot_lines(tmp_path / name, series, title="t")
    content = (tmp_path / "one.svg").read_bytes()
    assert content == (tmp_path / "two.svg").read_bytes()
    assert len(content) < 40_000
    for word in (b"href", b"script", b"url(", b"@import", b"id="):
        assert word not in content


def test_card_and_size(draw):
    plot = draw({"a": [(0, 1)]})
    assert (plot.root.get("width"), plot.root.get("height")) == ("720", "440")
    assert plot.root.get("viewBox") == "0 0 720 440"
    assert plot.root.find(f"{SVG}rect").get("fill") == "#ffffff"


def test_labels_and_legend_with_last_value(draw):
    plot = draw(
        {"eager": [(1, 4.0), (2, 3.14159)], "bad": [(1, 2.0), (2, math.nan)]},
        title="Loss of it",
        x_label="tokens",
        y_label="nats",
    )
    for text in ("Loss of it", "tokens", "nats", "eager 3.142", "bad nan"):
        assert text in plot.texts
    assert plot.root.findtext(f"{SVG}title") == "Loss of it"
    plot = draw({"a": [(1, 4.0)]})
    assert plot.root.findtext(f"{SVG}title") == "loss by step"
    assert "step" in plot.texts
    assert "" not in plot.texts


def test_text_is_escaped(draw):
    name = """<b>&"'\x00\x1b\ud800 é 😀"""
    plot = draw({name: [(0, 1)]}, title=name, x_label=name, y_label=name)
    clean = name.replace("\x00", "\ufffd").replace("\x1b", "\ufffd").replace("\ud800", "\ufffd")
    assert plot.texts.count(clean) == 3
    assert list(plot.series) == [clean]


def test_long_texts_are_shortened_but_not_lost(draw):
    name = "n" * 200
    plot = draw({name: [(0, 1)]}, title="t" * 200)
    assert max(map(len, plot.texts)) <= 64
    assert name in plot.series
    assert plot.root.findtext(f"{SVG}title") == "t" * 200


def test_many_series_wrap_and_stay_apart(draw):
    plot = draw({f"series {index}": [(0, index), (1, index)] for index in range(40)})
    (more,) = [text for text in plot.texts if "more" in text]
    shown = [text for text in plot.texts if text.startswith("series")]
    assert len(shown) + int(re.search(r"\d+", more).group()) == 40
    assert len(plot.series) == 40
    starts = {
        (text.get("x"), text.get("y"))
        for text in plot.root.iter(f"{SVG}text")
        if "".join(text.itertext()).startswith("series")
    }
    assert len(starts) == len(shown)
    assert all(float(x) < 680 and float(y) < 120 for x, y in starts)
    # The legend is above the highest line.
    assert min(y for name in plot.series for run in plot.runs(name) for _, y in run) > max(
        float(y) for _, y in starts
    )
    strokes = [
        (path.get("stroke"), path.get("stroke-dasharray"))
        for path in (plot.series[f"series {index}"].find(f"{SVG}path") for index in range(21))
    ]
    assert len(set(strokes)) == 21


@pytest.mark.parametrize(
    ("points", "log_y", "axis", "expected"),
    [
        ([(1, 0), (20_000, 1)], False, "x", ["0", "5k", "10k", "15k", "20k"]),
        ([(0, 0), (3, 1)], False, "x", ["0", "1", "2", "3"]),
        ([(1, 0), (4_000_000, 1)], False, "x", ["0", "1M", "2M", "3M", "4M"]),
        ([(5000, 0), (9000, 1)], False, "x", ["5,000", "6,000", "7,000", "8,000", "9,000"]),
        ([(0, -1.0), (1, 1.0)], False, "y", ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        ([(0, 0.5), (1, 0.50002)], False, "y", ["0.500000", "0.500005", "0.500010"]),
        ([(0, 0), (1, 4e-6)], False, "y", ["0", "1e-6", "2e-6", "3e-6", "4e-6"]),
        ([(0, 0), (1, 5e12)], False, "y", ["0", "1e12", "2e12", "3e12", "4e12", "5e12"]),
        ([(0, 1.0), (1, 10.0)], True, "y", ["1", "2", "5", "10"]),
        ([(0, 2.1), (1, 2.9)], True, "y", ["2.0", "2.2", "2.4", "2.6", "2.8", "3.0"]),
        ([(0, 1e-4), (1, 1e4)], True, "y", ["1e-4", "0.001", "0.01", "0.1", "1"]),
    ],
)  # fmt: skip
def test_ticks_are_nice_numbers(draw, points, log_y, axis, expected):
    ticks = draw({"a": points}, log_y=log_y).tick_pixels(axis)
    assert list(ticks)[: len(expected)] == expected
    assert len(ticks) <= 9
    pixels = list(ticks.values())
    assert pixels == sorted(pixels, reverse=axis == "y")


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [2.5] * 5,
        [0.0, 0.0],
        [1e300, -1e300, 1e308],
        [5e-324, 1e-320],
        [0.0, 5e-324],
        [1.0, 1.0 + 1e-15],
        [1e-300, 1e300],
        [math.nan, math.inf],
        [-3.0, -2.0],
        [2.0, 5.999],
        [1e-12, 2.9e-12],
    ],
)
def test_odd_ranges_are_drawn_inside_the_frame(draw, values, log_y):
    far = [(1e9, values[0]), (1e9 + 1, values[1])]
    plot = draw({"a": list(enumerate(values)), "b": far}, log_y=log_y)
    pixels = [p for name in "ab" for run in [*plot.runs(name), plot.dots(name)] for p in run]
    assert all(0 < x <= 692 and 30 < y <= 384 for x, y in pixels)
    labels = [
        text.text for text in plot.root.iter(f"{SVG}text") if text.get("text-anchor") == "end"
    ]
    assert len(set(labels)) == len(labels) >= 2


def test_arrays_and_generators_of_names_work(draw):
    array = np.array([[0, 1.0], [1, 2.0]], dtype=np.float32)
    assert len(draw({"a": array}).runs("a")[0]) == 2


@pytest.mark.parametrize(
    ("series", "error", "match"),
    [
        ({}, ValueError, "series is empty"),
        ({"a": [(0, 1)], "b": []}, ValueError, r"series\['b'\] is empty"),
        ([(0, 1)], TypeError, "series="),
        ({1: [(0, 1)]}, TypeError, "name 1"),
        ({"a": [(0, 1), (1, 2, 3)]}, ValueError, r"series\['a'\]\[1\]"),
        ({"a": [(0, 1), 5]}, TypeError, r"series\['a'\]\[1\]"),
        ({"a": [(0, "1")]}, TypeError, r"series\['a'\]\[0\]"),
        ({"a": [("0", 1)]}, TypeError, r"series\['a'\]\[0\]"),
        ({"a": [(0, None)]}, TypeError, r"series\['a'\]\[0\]"),
        ({"a": [(0, 10**400)]}, ValueError, r"series\['a'\]\[0\]"),
    ],
)
def test_bad_series_are_named_and_nothing_is_written(tmp_path, series, error, match):
    with pytest.raises(error, match=match):
        plot_lines(tmp_path / "plot.svg", series)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["title", "x_label", "y_label"])
def test_labels_that_are_no_text_are_named(tmp_path, name):
    with pytest.raises(TypeError, match=f"{name}=3"):
        plot_lines(tmp_path / "plot.svg", {"a": [(0, 1)]}, **{name: 3})


def test_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "plot.svg"
    plot_lines(path, {"a": [(0, 1)]}, title="old")
    before = path.read_bytes()
    assert os.listdir(path.parent) == ["plot.svg"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()

    def fail(self, target):
        # At this point the whole new file is there, under another name in the same folder.
        assert self.parent == target.parent
        assert b"new title" in self.read_bytes()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            plot_lines(path, {"a": [(0, 1)]}, title="new title")
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["plot.svg"]
    plot_lines(path, {"a": [(0, 1)]}, title="new title")
    assert b"new title" in path.read_bytes()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
