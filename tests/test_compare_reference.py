"""A method set against another one than the file's own reference."""

from __future__ import annotations

import random

import pytest

from benchmark_results import result, written
from benchmarks import compare, compare_check

ONE = {"gpt-small": 13.9}
CAPTURED = "torchfast exact"
BY_HAND = "by hand: graph"


def busy_host(content, seed):
    """Disturb, in each block, what waits for the host; what waits for the device is not."""
    draw = random.Random(seed)
    methods = content["workloads"]["gpt-small"]["methods"]
    reference = [ms * draw.lognormvariate(0.05, 0.1) for ms in methods["tuned"]["blocks_ms"]]
    for name, method in methods.items():
        method["reference_blocks_ms"] = method["reference_best_ms"] = reference
        if name == "tuned":
            method["blocks_ms"] = method["best_ms"] = reference
    return content


def compared(tmp_path, seed, factor, reference):
    files = []
    for number, part in enumerate((1.0, factor)):
        content = result(
            2 * seed + number,
            workloads=ONE,
            relative={"tuned": 1.0, BY_HAND: 0.3, CAPTURED: 0.3 * part},
        )
        path = tmp_path / f"{number}.json"
        files.append(compare.ResultFile(written(path, busy_host(content, 2 * seed + number))))
    found = compare.compare(*files, methods=f"^{CAPTURED}$", reference=reference)
    (row,) = found.rows
    return row.verdict


@pytest.mark.parametrize("seed", range(10))
def test_a_busy_host_does_not_hide_what_the_device_does(tmp_path, seed):
    assert compared(tmp_path, seed, 1.0, BY_HAND) == "no difference"
    assert compared(tmp_path, seed, 1.03, BY_HAND) == "slower"
    assert compared(tmp_path, seed, 1 / 1.03, BY_HAND) == "faster"


def test_against_a_method_that_waits_for_it_it_does(tmp_path):
    told = {compared(tmp_path, seed, 1.0, "tuned") for seed in range(10)}
    assert told != {"no difference"}


def test_another_run_is_no_reference(tmp_path, capsys):
    content = result(0, workloads=ONE)
    content["workloads"]["gpt-small"]["methods"][BY_HAND]["run"] = 1
    path = str(written(tmp_path / "one.json", content))
    assert compare.main([path, path, "--reference", BY_HAND, "--methods", CAPTURED]) == 2
    said = capsys.readouterr().err
    assert BY_HAND in said
    assert "was measured in another run than 'torchfast exact'" in said


def test_the_reference_of_the_command_line_is_told(tmp_path, capsys):
    path = str(written(tmp_path / "one.json", result(0, workloads=ONE)))
    assert compare.main([path, path, "--reference", BY_HAND]) == 0
    said = capsys.readouterr().out
    assert f"times are relative to {BY_HAND!r}" in said
    assert f"Absolute, for orientation: gpt-small, {BY_HAND}" in said
    assert "gpt-small              tuned " in said


def test_the_check_sets_what_is_captured_against_what_is():
    assert compare_check.reference_on("cuda") == BY_HAND
    assert compare_check.reference_on("cpu") == "tuned"
