"""The comparison of two result files says what the files allow to say, and no more."""

from __future__ import annotations

import json
import math
import random

import pytest

from benchmark_results import METHODS, result, written
from benchmarks import compare
from benchmarks.result_file import MIN_ROUNDS

ONE = {"gpt-small": 13.9}


def compared(tmp_path, before, after, **options):
    files = [
        compare.ResultFile(written(tmp_path / f"{name}.json", content))
        for name, content in (("before", before), ("after", after))
    ]
    return compare.compare(*files, **options)


def verdicts(tmp_path, before, after, **options):
    return {row.verdict for row in compared(tmp_path, before, after, **options).rows}


def slowed(factor):
    return {name: part * (1 if name == "tuned" else factor) for name, part in METHODS.items()}


# -- The rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", range(10))
def test_the_same_code_twice_is_no_difference(tmp_path, pair):
    before, after = (result(2 * pair + run, workloads=ONE) for run in range(2))
    found = compared(tmp_path, before, after)
    assert {row.verdict for row in found.rows} == {"no difference"}
    assert found.status == 0


@pytest.mark.parametrize("pair", range(10))
@pytest.mark.parametrize(("factor", "verdict"), [(1.03, "slower"), (1 / 1.03, "faster")])
def test_a_planted_change_is_found(tmp_path, pair, factor, verdict):
    before = result(2 * pair, workloads=ONE)
    after = result(2 * pair + 1, workloads=ONE, relative=slowed(factor))
    found = compared(tmp_path, before, after)
    assert {row.verdict for row in found.rows} == {verdict}
    assert found.status == (1 if verdict == "slower" else 0)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.011, 1.5, "slower"),
        (1.009, 1.029, "no difference"),
        (0.971, 1.029, "no difference"),
        (0.969, 1.0, "cannot tell"),
        (1.0, 1.031, "cannot tell"),
        (0.971, 0.991, "no difference"),
        (0.5, 0.989, "faster"),
        (0.5, 1.5, "cannot tell"),
    ],
)
def test_what_bounds_allow_to_say(low, high, verdict):
    assert compare.verdict_of(compare.Bounds(1.0, low, high), 0.03) == verdict


# -- Files -----------------------------------------------------------------------------------------


def test_a_run_on_a_machine_twice_as_slow_is_no_difference(tmp_path):
    after = result(1, workloads=ONE, machine_speed=2.0)
    after["machine"]["gpu"] = "NVIDIA L4"
    found = compared(tmp_path, result(0, workloads=ONE), after)
    assert found.status == 0
    assert len(found.references) == 1
    assert "NVIDIA H200" in found.references[0]
    assert "NVIDIA L4" in found.references[0]
    assert {row.method for row in found.rows} == set(METHODS) - {"tuned"}


def test_wide_noise_cannot_be_told(tmp_path, capsys):
    files = [
        written(tmp_path / f"{seed}.json", result(seed, workloads=ONE, noise=0.2))
        for seed in range(2)
    ]
    assert compare.main([str(file) for file in files]) == 2
    assert "more rounds, or on a quieter machine" in capsys.readouterr().out


def test_the_smallest_difference_of_the_command_line_counts(tmp_path, capsys):
    quiet = {"workloads": ONE, "noise": 0.0005, "busy": 0.0, "bias": 0.0}
    before = written(tmp_path / "before.json", result(0, **quiet))
    after = written(tmp_path / "after.json", result(1, relative=slowed(1.01), **quiet))
    assert compare.main([str(before), str(after)]) == 0
    assert compare.main([str(before), str(after), "--smallest", "0.005"]) == 1


def test_runs_may_differ_in_their_rounds(tmp_path):
    before, after = result(0, workloads=ONE, rounds=20), result(1, workloads=ONE, rounds=30)
    assert verdicts(tmp_path, before, after) == {"no difference"}


def test_the_worst_comes_first(tmp_path):
    after = result(1, workloads=ONE, relative=METHODS | {"Accelerate": METHODS["Accelerate"] * 2})
    rows = compared(tmp_path, result(0, workloads=ONE), after).rows
    assert rows[0].method == "Accelerate"
    assert [row.bounds.change for row in rows] == sorted(
        (row.bounds.change for row in rows), reverse=True
    )
    assert rows[0].before == pytest.approx(1.05, rel=0.01)
    assert rows[0].after == pytest.approx(2.1, rel=0.01)


# -- Other regressions -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "harmless", "worse", "said"),
    [
        ("peak_bytes", 2_019_000_000, 2_021_000_000, "peak_bytes 2.000 GB before, 2.021 GB after"),
        ("host_syncs", 1.5, 1.6, "host_syncs a step 1.0 before, 1.6 after"),
        ("num_launches", 812.5, 813.0, "num_launches a step 812.0 before, 813.0 after"),
        ("trains", True, False, "trained before and does not now"),
    ],
)
def test_more_than_time_can_get_worse(tmp_path, figure, harmless, worse, said):
    before, after = result(0, workloads=ONE), result(1, workloads=ONE)
    method = after["workloads"]["gpt-small"]["methods"]["torchfast exact"]
    method[figure] = harmless
    assert compared(tmp_path, before, after).status == 0
    method[figure] = worse
    found = compared(tmp_path, before, after)
    assert found.status == 1
    assert found.regressions == [f"gpt-small, torchfast exact: {said}"]


@pytest.mark.parametrize("figure", ["peak_bytes", "host_syncs", "num_launches"])
def test_what_a_cpu_lacks_is_no_regression(tmp_path, figure):
    before, after = result(0, workloads=ONE), result(1, workloads=ONE)
    before["workloads"]["gpt-small"]["methods"]["naive"][figure] = None
    assert compared(tmp_path, before, after).status == 0


def test_a_method_that_no_longer_runs(tmp_path, capsys):
    before, after = result(0, workloads=ONE), result(1, workloads=ONE)
    failed = {"status": "failed", "reason": "not done in 90 s"}
    after["workloads"]["gpt-small"]["methods"]["Lightning"] = failed
    found = compared(tmp_path, before, after)
    assert found.status == 1
    assert found.regressions == [
        "gpt-small, Lightning: ran before, now 'failed' (not done in 90 s)"
    ]
    found = compared(tmp_path, after, before)
    assert (found.status, found.regressions) == (0, [])
    assert found.notes == ["gpt-small, Lightning: runs now, before 'failed'"]
    found = compared(tmp_path, after, after)
    assert (found.status, found.notes) == (0, [])


def test_a_regression_outweighs_what_cannot_be_told(tmp_path):
    before, after = (result(seed, workloads=ONE, noise=0.2) for seed in range(2))
    after["workloads"]["gpt-small"]["methods"]["naive"]["trains"] = False
    assert compared(tmp_path, before, after).status == 1


# -- What a floor does not show --------------------------------------------------------------------


def stalling(content, part, chance=1.0):
    """Make blocks of one method longer, but not their best bursts."""
    method = content["workloads"]["gpt-small"]["methods"]["torchfast exact"]
    draw = random.Random(0)
    method["blocks_ms"] = [ms * (1 + part * (draw.random() < chance)) for ms in method["blocks_ms"]]
    return content


def test_stalls_between_the_best_bursts_are_noted(tmp_path):
    before = result(0, workloads=ONE)
    found = compared(tmp_path, before, stalling(result(1, workloads=ONE), 0.1))
    assert {row.verdict for row in found.rows} == {"no difference"}
    assert found.status == 0
    assert len(found.notes) == 1
    assert found.notes[0].startswith("gpt-small, torchfast exact: blocks usually take 1")
    assert compared(tmp_path, stalling(before, 0.1), result(1, workloads=ONE)).notes == []


def test_stalls_in_fewer_than_half_of_the_blocks_are_not(tmp_path):
    after = stalling(result(1, workloads=ONE), 0.1, chance=0.2)
    assert compared(tmp_path, result(0, workloads=ONE), after).notes == []


# -- Files that do not match -----------------------------------------------------------------------


def test_missing_methods_and_workloads_are_named(tmp_path):
    before, after = result(0), result(1)
    del after["workloads"]["mlp"]
    del before["workloads"]["resnet50"]["methods"]["naive"]
    found = compared(tmp_path, before, after)
    assert found.status == 2
    missing = [("after.json", "workloads > mlp"), ("before.json", "methods > naive")]
    assert len(found.mismatches) == 2
    for mismatch, (file, name) in zip(found.mismatches, missing, strict=True):
        assert file in mismatch
        assert name in mismatch
        assert "--methods" in mismatch
    options = {"workloads": "gpt|resnet", "methods": "^(?!naive)"}
    assert compared(tmp_path, before, after, **options).status == 0


@pytest.mark.parametrize("key", compare.WORKLOAD_KEYS)
def test_a_workload_of_another_size_is_not_compared(tmp_path, key):
    before, after = result(0), result(1)
    after["workloads"]["mlp"][key] = 7
    found = compared(tmp_path, before, after)
    assert found.status == 2
    assert "mlp" not in {row.workload for row in found.rows}
    assert "mlp" in found.mismatches[0]
    assert key in found.mismatches[0]


def test_other_settings_are_refused(tmp_path):
    after = result(1)
    after["settings"]["size"] = "tiny"
    with pytest.raises(compare.ComparisonError, match="size 'full' before and 'tiny' after"):
        compared(tmp_path, result(0), after)
    after["settings"] |= {"size": "full", "rounds": 40, "cold_start_limit_s": 10}
    compared(tmp_path, result(0), after)


def test_nothing_compared_is_no_success(tmp_path):
    with pytest.raises(compare.ComparisonError, match="nothing to compare"):
        compared(tmp_path, result(0), result(1), workloads="no such")


# -- Malformed files -------------------------------------------------------------------------------


def without(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def setting(value, *keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


NAIVE = ("workloads", "gpt-small", "methods", "naive")


@pytest.mark.parametrize(
    ("change", "named", "remedy"),
    [
        (without("settings"), "settings", "yardstick.py"),
        (without("workloads"), "workloads", "yardstick.py"),
        (setting([], "workloads"), "workloads", "yardstick.py"),
        (without(*NAIVE, "status"), "naive > status", "yardstick.py"),
        (without(*NAIVE, "best_ms"), "naive > best_ms", "yardstick.py"),
        (without(*NAIVE, "host_syncs"), "naive > host_syncs: missing", "yardstick.py"),
        (without(*NAIVE, "trains"), "naive > trains: missing", "yardstick.py"),
        (
            setting([1.0] * 19, *NAIVE, "best_ms"),
            "20 rounds where best_ms of 'naive' has 19",
            "yardstick",
        ),
        (setting([math.nan] * 20, *NAIVE, "best_ms"), "nan is no time", "yardstick.py"),
        (setting(["1"] * 20, *NAIVE, "best_ms"), "'1' is no time", "yardstick.py"),
        (setting([0.0] * 20, *NAIVE, "reference_best_ms"), "0.0 is no time", "yardstick.py"),
        (setting("many", *NAIVE, "peak_bytes"), "peak_bytes: got 'many'", "yardstick.py"),
        (setting(True, *NAIVE, "num_launches"), "num_launches: got True", "yardstick.py"),
    ],
)
def test_a_malformed_file_is_named_with_key_and_remedy(tmp_path, capsys, change, named, remedy):
    content = result(1, workloads=ONE)
    change(content)
    before = written(tmp_path / "before.json", result(0, workloads=ONE))
    after = written(tmp_path / "after.json", content)
    for files in ((before, after), (after, before)):
        assert compare.main([str(file) for file in files]) == 2
        message = capsys.readouterr().err
        assert str(after) in message
        assert named in message
        assert remedy in message


def test_too_few_rounds_say_how_many_are_needed(tmp_path, capsys):
    files = [
        written(tmp_path / f"{rounds}.json", result(0, workloads=ONE, rounds=rounds))
        for rounds in (20, 3)
    ]
    assert compare.main([str(file) for file in files]) == 2
    message = capsys.readouterr().err
    assert "3.json" in message
    assert f"at least {MIN_ROUNDS} rounds" in message


@pytest.mark.parametrize("text", [None, "", "[]", '{"settings"'])
def test_a_file_that_is_no_result(tmp_path, capsys, text):
    before = written(tmp_path / "before.json", result(0, workloads=ONE))
    after = tmp_path / "after.json"
    if text is not None:
        after.write_text(text)
    assert compare.main([str(before), str(after)]) == 2
    assert str(after) in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--methods", "("], ["--workloads", "*"], ["--smallest", "3"], ["--smallest", "x"]]
)
def test_bad_options_are_refused(options):
    with pytest.raises(SystemExit, match="2"):
        compare.main(["a.json", "b.json", *options])


def test_the_printed_table(tmp_path, capsys):
    before, after = result(0, workloads=ONE), result(1, workloads=ONE, relative=slowed(1.1))
    after["workloads"]["gpt-small"]["methods"]["naive"]["host_syncs"] = 3.0
    files = [
        written(tmp_path / f"{name}.json", content)
        for name, content in (("before", before), ("after", after))
    ]
    assert compare.main([str(file) for file in files]) == 1
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("gpt-small")]
    assert len(rows) == len(METHODS) - 1
    assert all(row.endswith("slower") for row in rows)
    assert "Regression: gpt-small, naive: host_syncs a step 1.0 before, 3.0 after" in printed
    assert json.loads(files[0].read_text()) == before
