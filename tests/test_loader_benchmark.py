"""The loader's measurements run without a GPU, and their verdicts follow from their figures."""

from __future__ import annotations

import json
import os
import time
from xml.etree import ElementTree

import pytest
import torch
from torch.utils.data import DataLoader

import warm_python
from benchmarks import (
    loader,
    loader_batches,
    loader_eta,
    loader_memory,
    loader_overlap,
    loader_peers,
    loader_timeline,
    loader_timeline_plot,
    results,
)
from benchmarks.loader_work import Settings, Work, attempt

SMOKE = Settings(device="cpu", smoke=True, workers=1, peer_workers=1, images=2, rounds=2)
SVG = "{http://www.w3.org/2000/svg}"


def run(*options):
    return warm_python.run(
        results.ROOT / "benchmarks" / "loader.py",
        *("--device", "cpu", "--smoke", *options),
        check=True,
        cwd=results.ROOT,
        env={**os.environ, "PYTHONPATH": ".", "TORCHFAST_COMMIT": "made up"},
    ).stdout


# -- The whole run ---------------------------------------------------------------------------------


def test_all_sections_run_without_a_gpu_and_their_figures_are_written_and_printed(tmp_path):
    out = tmp_path / "figures.json"
    printed = run("--out", str(out))
    figures = json.loads(out.read_text())
    assert figures["machine"]["commit"] == "made up"
    assert set(figures["sections"]) == set(loader.SECTIONS)
    for name, section in figures["sections"].items():
        assert section["status"] == "ran", section
        assert section["rows"]
        assert [row["status"] for row in section["rows"]] == ["ran"] * len(section["rows"]), name
        assert f"== {name}:" in printed
    assert all(row["every_byte_right"] for row in figures["sections"]["eta"]["rows"])
    assert loader_timeline_plot.drawn(figures).startswith("<svg")


def command_line(*options):
    return loader.arguments(["--device", "cpu", "--smoke", *options])


def test_a_section_that_takes_too_long_is_ended_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(loader, "GRACE_S", 0.1)
    start = time.monotonic()
    section = loader.isolated("next", command_line(), 0.1)
    assert time.monotonic() - start < 10
    assert section["status"] == "failed"
    assert section["reason"] == "it took too long"


def test_a_section_in_a_process_of_its_own_brings_its_rows():
    section = loader.isolated("next", command_line(), 60)
    assert section["status"] == "ran", section
    assert [row["status"] for row in section["rows"]] == ["ran"] * 7


def test_a_section_that_fails_keeps_the_rows_it_had(monkeypatch):
    def rows(_settings):
        yield {"status": "ran", "value": 1}
        raise RuntimeError("out of luck")

    broken = loader.SECTIONS["next"]._replace(measure=rows, line=lambda row: f"{row['value']}")
    monkeypatch.setitem(loader.SECTIONS, "next", broken)
    noted = []
    section = loader.measured("next", SMOKE, lambda section: noted.append(len(section["rows"])))
    assert noted == [1]
    assert section["status"] == "failed"
    printed = "\n".join(loader.printed({"next": section}))
    assert "\n1\nFAILED: RuntimeError: out of luck" in printed


def test_a_row_that_fails_says_why_and_one_that_is_late_is_left_out():
    def fail():
        raise ValueError("no such thing")

    row = attempt(SMOKE, {"depth": 2}, fail)
    assert row == {"depth": 2, "status": "failed", "reason": "ValueError: no such thing"}
    assert loader.without_figures(row) == "depth 2: failed: ValueError: no such thing"
    late = Settings(device="cpu", deadline=time.monotonic() - 1)
    assert attempt(late, {}, fail)["status"] == "left out"


def test_efficiency_is_measured_again_in_fresh_processes():
    assert command_line().isolate is False
    args = command_line("--isolate", "--sections", "eta", "next")
    assert loader.names(args) == ["eta", "next", "eta again 2"]
    assert loader.arguments(["--device", "cpu"]).isolate is True
    with pytest.raises(SystemExit):
        command_line("--sections", "no such section")


# -- What is loaded, and what is done with it ------------------------------------------------------


def test_workers_hand_on_whole_batches_in_shared_memory():
    template = loader_batches.images(2, 8)
    made = {
        "decode": template[0] // 16 * 17,
        "runs": template[0][:, :1, :1, :1].expand_as(template[0]),
    }
    for how in loader_batches.HOWS:
        batches = loader_batches.data_loader(loader_batches.Batches(template, how, 3), workers=1)
        assert isinstance(batches, DataLoader)
        for pictures, labels in batches:
            wanted = made.get(how, template[0])
            torch.testing.assert_close(pictures, wanted, rtol=0, atol=0)
            torch.testing.assert_close(labels, template[1], rtol=0, atol=0)
            assert pictures.is_shared()
            assert not pictures.is_pinned()


def test_shared_memory_that_is_too_small_is_said_beforehand(monkeypatch):
    monkeypatch.setattr(loader_batches, "shared_memory_bytes", lambda: 64_000_000)
    loader_batches.check_shared_memory(1_000_000, 2)
    with pytest.raises(RuntimeError, match=r"12 workers need 1\.4 GB of /dev/shm"):
        loader_batches.check_shared_memory(38_000_000, 12)


def test_the_step_reads_every_byte_of_every_kind_of_batch():
    work = Work("cpu")
    for kind in loader_peers.kinds(SMOKE):
        before = work.sum_of(kind.template)
        for tensor in loader_batches.leaves(kind.template):
            tensor.view(-1).view(torch.uint8)[-1] ^= 1
            after = work.sum_of(kind.template)
            assert after != before
            before = after
    assert len(list(loader_batches.leaves(loader_batches.nested(2)))) == 12


# -- Verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("etas", "supply_ms", "right", "verdict"),
    [
        ([0.995, 0.992, 0.999], 0.5, True, "held"),
        ([0.995, 0.98, 0.97], 0.5, True, "missed"),
        ([0.995, 0.98, 0.97], 0.9, True, "supply-bound"),
        ([0.995, 0.992, 0.999], 0.5, False, "WRONG BYTES"),
    ],
)
def test_efficiency_is_judged_only_where_the_supply_is_sufficient(etas, supply_ms, right, verdict):
    bench = loader_eta.Bench(SMOKE)
    row = {"etas": etas, "supply_ms": supply_ms, "resident_ms": 1.0, "every_byte_right": right}
    assert bench._judged(row)["verdict"] == verdict


@pytest.mark.parametrize(
    ("copy_ms", "runs_ms", "ratio"),
    [
        (1.0, 0.9, 0.74 / 0.9 / 1.2 / 1.05),
        (0.8, 0.7, None),  # which is enough at the highest ratio of all
        (2.0, 1.9, None),  # which is not more than there is already
    ],
)
def test_the_highest_ratio_is_that_which_the_fastest_workers_supply(copy_ms, runs_ms, ratio):
    bench = loader_eta.Bench(SMOKE)
    bench.transfer_ms, bench.step_ms = 0.74, 0.6
    supplies = {"decode": 2.4, "copy": copy_ms, "runs": runs_ms, "ready": 2.5}
    bench._supply = {(how, True): {"supply_ms": ms} for how, ms in supplies.items()}
    assert bench.highest_ratio() == (ratio if ratio is None else pytest.approx(ratio))
    bench._measure = lambda *_: {"etas": [1.0] * 3, "resident_ms": 0.6, "every_byte_right": True}
    row = bench.from_workers(2, True, True)
    assert (row["upstream"], row["supply_ms"]) == ("runs", runs_ms)
    bench.close()


def device_event(kind, name, start, end, stream):
    return {"cat": kind, "name": name, "ts": start, "dur": end - start, "args": {"stream": stream}}


def test_overlap_is_the_part_of_the_copies_beside_kernels():
    events = [
        device_event("kernel", "gemm", 0.0, 100.0, 7),
        device_event("kernel", "sum", 90.0, 110.0, 7),
        device_event("gpu_memcpy", loader_overlap.PINNED, 20.0, 60.0, 13),
        device_event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 110.0, 150.0, 7),
        device_event("gpu_memcpy", loader_overlap.PINNED, 100.0, 140.0, 13),
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1, "tid": 1},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 1, "dur": 1, "tid": 1},
        {"cat": "cuda_runtime", "name": "cudaEventSynchronize", "ts": 1, "dur": 1, "tid": 2},
        {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 9, "dur": 1, "tid": 1},
    ]
    found = loader_overlap.summary(events, 2, 4_000_000)
    assert found["overlap"] == pytest.approx(50 / 80)
    assert found["held"] is False
    assert found["all_pinned"]
    assert found["copies_a_step"] == 1
    assert found["copy_gb_s"] == pytest.approx(100.0)
    assert found["streams"] == {"kernels": 1, "copies": 1, "both": 0}
    assert found["host_waits_of_the_loop"] == {"cudaStreamSynchronize": 1}
    events[2]["name"] = "Memcpy HtoD (Pageable -> Device)"
    assert not loader_overlap.summary(events, 2, 4_000_000)["all_pinned"]
    assert loader_overlap.summary(events[:2], 2, 4_000_000)["overlap"] is None
    row = {"measure": "overlap", "upstream": "copy", "reuse": True, **found}
    assert "overlap 0.6250; 1.0 copies a step, all pinned" in loader_overlap.line(row)


def test_memory_that_grows_after_it_has_settled_is_seen():
    seen = [{"reserved_bytes": value} for value in (1, 2, 3, 4, 5, 6, 6, 6)]
    assert loader_memory.growth(seen, "reserved_bytes") == 0
    assert loader_memory.growth([*seen, {"reserved_bytes": 8}], "reserved_bytes") == 2
    assert loader_memory.growth([*seen, {"reserved_bytes": None}], "reserved_bytes") is None


def test_methods_are_compared_with_the_best_of_the_others_round_by_round():
    blocks = {
        "resident": [1.0, 1.0, 1.0],
        "by hand": [2.0, 4.0, 2.0],
        "timm": [3.0, 3.0, 3.0],
        "torchfast": [1.0, 2.0, 1.2],
    }
    found = loader_peers.compared(blocks)
    assert found["best_peer"] == "by hand"
    assert set(found["ratio_to_best_peer"]) == {"torchfast"}
    assert found["ratio_to_best_peer"]["torchfast"]["median"] == pytest.approx(0.5)
    with pytest.raises(RuntimeError, match="no other method ran"):
        loader_peers.compared({"torchfast": [1.0], "resident": [1.0]})


# -- The timeline ----------------------------------------------------------------------------------


def timeline_events():
    def at(kind, name, start, end):
        return device_event(kind, name, 1000.0 + start, 1000.0 + end, 7)

    return [
        at(*loader_timeline.MARK, 0.0, 1.0),
        at("kernel", "before the window", -500.0, 500.0),
        at("kernel", "gemm", 510.0, 20_000.0),
        at("kernel", "gemm", 30_000.0, 60_000.0),
        at("gpu_memcpy", loader_overlap.PINNED, 2_000.0, 4_000.0),
        at("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2_000.0, 4_000.0),
    ]


def test_the_window_of_a_timeline_begins_at_the_mark_and_clocks_agree():
    loaded = [(1, 99.0, 100.010), (0, 100.005, 100.015), (0, 101.0, 102.0)]
    found = loader_timeline.panel(timeline_events(), loaded, 100.0, 40.0, on_cuda=True)
    assert found["window_ms"] == 40.0
    assert found["copy"] == [(2.0, 4.0)]
    # Kernels close together are drawn as one; what is busy is not.
    assert found["compute"] == [(0.0, 20.0), (30.0, 40.0)]
    assert found["busy"] == pytest.approx((0.5 + 19.49 + 10) / 40)
    assert [[round(value, 3) for value in span] for span in found["fetch"]] == [
        [0, 5.0, 15.0],
        [1, 0.0, 10.0],
    ]


def test_the_picture_is_made_from_the_file_without_a_gpu(tmp_path, monkeypatch):
    loaded = [(3, 100.0, 100.010), (0, 100.005, 100.015)]
    panel = loader_timeline.panel(timeline_events(), loaded, 100.0, 40.0, on_cuda=True)
    panels = [{"title": "a <naive> loop", **panel}, {"title": "ahead", **panel}]
    panels.append({"title": "broken", "status": "failed", "reason": "no luck"})
    machine = {"gpu": "A <fast> GPU", "torch": "2.11"}
    source, picture = tmp_path / "timeline.json", tmp_path / "timeline.svg"
    source.write_text(json.dumps({"machine": machine, "panels": panels}))
    monkeypatch.setattr("sys.argv", ["loader_timeline.py", "--draw", str(source), str(picture)])
    loader_timeline.main()
    svg = ElementTree.fromstring(picture.read_text())
    assert "ahead: the GPU computes 75%." in svg.findtext(f"{SVG}desc")
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert {"a <naive> loop", "load (CPU)", "copy (bus)", "compute (GPU)", "40"} <= set(texts)
    assert any("A <fast> GPU" in text for text in texts)
    bars = [bar for bar in svg.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert len(bars) == 2 * (2 + 1 + 2)
    for bar in bars:
        left, width = float(bar.get("x")), float(bar.get("width"))
        assert loader_timeline_plot.LEFT <= left <= left + width <= loader_timeline_plot.RIGHT + 1
