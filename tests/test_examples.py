"""The examples do one job, and the README shows the whole difference between them."""

from __future__ import annotations

import difflib
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import warm_python
from torchfast._core.compare import differences

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(name, folder, *options):
    done = warm_python.run(EXAMPLES / name, "--device", "cpu", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_loop_and_the_trainer_end_with_the_same_model(tmp_path):
    plain = run("00_plain_loop.py", tmp_path, "--steps", "2")
    planned = run("01_trainer.py", tmp_path, "--steps", "2")
    models = [
        torch.load(tmp_path / "runs" / kind / "model.pt", weights_only=True)
        for kind in ("plain", "trainer")
    ]
    assert differences(*models) == []
    # The same held-out figure and the same generated code, down to the last byte.
    assert held_out(plain) == held_out(planned)
    assert plain.partition("\n\n")[2] == planned.partition("\n\n")[2]
    assert (tmp_path / "runs" / "trainer" / "curves.svg").read_text().startswith("<svg")
    assert (tmp_path / "runs" / "trainer" / "log.jsonl").read_text().count("\n") >= 3


@pytest.mark.parametrize("name", ["04_any_step_in_one_graph.py", "05_gan_in_one_graph.py"])
def test_where_there_are_no_graphs_the_step_runs_as_it_is(name, tmp_path):
    output = run(name, tmp_path, "--steps", "3")
    assert output.count("no graphs on a CPU: the step runs as it is") == 1
    assert re.search(r"^step 3  .*\d\.\d+$", output, re.MULTILINE)


def test_the_loss_in_chunks_is_the_plain_loss(tmp_path):
    name = "06_large_vocabulary.py"
    outputs = [run(name, tmp_path, "--steps", "2", "--loss", kind) for kind in ("chunks", "plain")]
    chunks, plain = (re.findall(r"^step \d  loss ([\d.]+)$", out, re.MULTILINE) for out in outputs)
    assert len(chunks) == 2
    assert [float(loss) for loss in chunks] == pytest.approx([float(loss) for loss in plain], 1e-3)


def test_what_is_slow_is_found_and_cured(tmp_path):
    output = run("10_find_what_is_slow.py", tmp_path, "--steps", "3")
    source = (EXAMPLES / "10_find_what_is_slow.py").read_text().split("\n")
    for kind, text in (("boolean mask", "losses[weights > 0.1]"), ("item", "(loss.item())")):
        line = [n for n, each in enumerate(source, 1) if each.endswith(text)][-1]  # not the docs'
        assert f"{kind} at 10_find_what_is_slow.py:{line}, in slow_lo" in output
    assert "the slow loop: input-bound" in output
    assert "without the faults the host waits at no line" in output


def test_a_llama_below_bf16_trains(tmp_path):
    output = run("09_below_bf16.py", tmp_path, "--steps", "3")
    assert len(re.findall(r"^step \d  loss \d\.\d+$", output, re.MULTILINE)) == 3
    assert "14 of 15 linear layers (14 tensorwise, emulated)" in output
    assert "beside bf16, update 1: loss" in output
    assert "AdamW with moments in 8bit" in output


def test_a_gpt_trains_within_the_memory_that_it_is_given(tmp_path):
    name = "11_fit_into_memory.py"
    scarce, ample = (
        run(name, tmp_path, "--steps", "3", "--memory-gb", size) for size in ("0.012", "1")
    )
    assert re.search(r"^none .* too large$", scarce, re.MULTILINE)
    assert re.search("recompute +applied: ", scarce)
    assert "takes recompute=False" in ample
    assert not re.search("recompute +applied: ", ample)
    losses = [re.findall(r"^step \d  loss [\d.]+$", out, re.MULTILINE) for out in (scarce, ample)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]  # what is computed again is the same
    done = warm_python.run(EXAMPLES / name, "--device", "cpu", "--memory-gb", "0.003", cwd=tmp_path)
    assert done.returncode == 1
    assert "nothing fits into 0.003 GB" in done.stderr


def test_a_llama_trains_alone_and_goes_on_with_two_ranks(tmp_path):
    name = "08_many_gpus.py"
    alone = run(name, tmp_path, "--steps", "2")
    assert "one rank, so there is nothing to spread" in alone
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    texts = []
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / f"{rank}.txt").open("w+")) for rank in range(2)]
        processes = [
            warm_python.Process(
                EXAMPLES / name, "--device", "cpu", "--steps", "4", cwd=tmp_path,
                env={**os.environ, **group, "RANK": str(rank)}, stdout=files[rank],
            )
            for rank in range(2)
        ]  # fmt: skip
        for process in processes:
            stack.callback(process.kill)
        for process, file in zip(processes, files, strict=True):
            code = process.wait(100)
            file.seek(0)
            texts.append(file.read())
            assert code == 0, texts[-1]
    assert re.findall(r"^step (\d)/4", texts[0], re.MULTILINE) == ["3", "4"]
    assert "2 blocks and the rest, over 2 ranks" in texts[0]
    assert "loss" not in texts[1]  # the first one prints
    weights = torch.load(tmp_path / "runs" / "many_gpus" / "model.pt", weights_only=True)
    assert weights["0.weight"].shape == (256, 64)  # whole, and not one rank's


def held_out(output):
    found = re.search(r"held-out: ([\d.]+) bits per byte", output)
    assert found
    return float(found[1])


def difference():
    first, second = (
        (EXAMPLES / name).read_text().splitlines() for name in ("00_plain_loop.py", "01_trainer.py")
    )
    lines = list(difflib.unified_diff(first, second, lineterm="", n=0))[2:]
    return [re.sub(r"^@@.*@@$", "@@", line) for line in lines]


def test_the_readme_shows_the_whole_difference():
    block = re.search(r"<!-- diff -->\n```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block
    assert block[1].splitlines() == difference()


def test_the_difference_is_small_and_lines_vanish():
    removed = sum(line.startswith("-") for line in difference())
    added = sum(line.startswith("+") for line in difference())
    assert added < removed
    assert added + removed <= 80


def test_every_example_is_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert all(length <= 200 for length in lengths.values()), lengths
