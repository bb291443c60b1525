"""The benchmarks of float8 and low-bit state run without a GPU, and keep what they have."""

from __future__ import annotations

import json

import pytest
import torch
from torchao.optim import AdamW4bit, AdamW8bit

from benchmarks import below_bf16, float8_choice, taking_turns


def test_below_bf16_holds_each_method_against_the_first(monkeypatch, tmp_path, capsys):
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--smoke", "--rounds", "2", "--turn-steps", "1", "--steps", "3"]

    def run(*more):
        monkeypatch.setattr("sys.argv", ["benchmark.py", *options, "--out", str(out), *more])
        below_bf16.main()
        return json.loads(out.read_text())["rows"]

    rows = run("--groups", "state", "curves", "--methods", "fused AdamW", "8 bit")
    there = [("state", "fused AdamW"), ("state", "8 bit"), ("curves", "8 bit")]
    assert [(row["group"], row["method"]) for row in rows] == there
    assert rows[1]["reference"] == "fused AdamW"
    assert rows[1]["state_bytes"] <= rows[0]["state_bytes"]  # weights so small keep theirs
    assert len(rows[1]["turns_ms"]) == 2
    assert len(rows[2]["losses"]) == 3
    for name in ("8bit", "weights 3"):
        with pytest.raises(SystemExit):
            run("--groups", "state", "--methods", name)
        assert f"no method '{name}' in these groups; there are ['4 bit', '8 bit', 'float8" in (
            capsys.readouterr().err
        )
    # Another run adds the one it is asked for, beside the same first one.
    more = run("--groups", "state", "--methods", "4 bit")
    assert more[:3] == rows
    assert (more[3]["method"], more[3]["reference"]) == ("4 bit", "fused AdamW")
    assert "4 bit" in capsys.readouterr().out


def test_the_state_of_few_bits_is_counted_as_it_lies_in_memory():
    def bytes_with(kind):
        layer = torch.nn.Linear(256, 256, bias=False)
        optimizer = kind(layer.parameters())
        layer(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        return taking_turns.state_bytes(optimizer)

    moment = 256 * 256 * 4
    assert bytes_with(torch.optim.AdamW) == 2 * moment + 4
    # A scale of 4 bytes for 256 numbers, and a table of what each code stands for.
    assert 0.25 < bytes_with(AdamW8bit) / (2 * moment) < 0.27
    assert 0.125 < bytes_with(AdamW4bit) / (2 * moment) < 0.16


def test_a_curve_that_is_cut_off_keeps_what_it_has(monkeypatch, tmp_path):
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--smoke", "--steps", "20", "--out", str(out)]
    curves = ["--groups", "curves", "--methods", "bf16", "bf16, weights 1"]
    monkeypatch.setattr("sys.argv", ["benchmark.py", *options, *curves])
    steps = []
    step = taking_turns.Ours.step

    def cut_off(self, batch):
        steps.append(1)
        if len(steps) == 35:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(taking_turns.Ours, "step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        below_bf16.main()
    found = {row["method"]: row["losses"] for row in json.loads(out.read_text())["rows"]}
    assert {name: len(losses) for name, losses in found.items()} == {
        "bf16": 20,
        "bf16, weights 1": 14,  # of every second step one
    }
    # Other weights, and the same batches.
    assert found["bf16"][0] != found["bf16, weights 1"][0]


def test_curves_begin_as_their_names_say():
    for name, run in below_bf16.CURVES.items():
        plan, _, seed = name.partition(", weights ")
        assert run == (plan, int(seed or 0))


def test_searches_for_kernels_take_turns_with_none(monkeypatch, tmp_path):
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--smoke", "--rounds", "1", "--turn-steps", "1"]
    arguments = ["benchmark.py", *options, "--out", str(out), "--groups", "kernels"]
    monkeypatch.setattr("sys.argv", arguments)
    below_bf16.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == [
        "torchfast float8, all layers",
        "pointwise kernels searched",
        "kernels by coordinate descent",
    ]


def test_the_options_hold_in_its_steps_alone(monkeypatch):
    seen = []
    options = ("max_autotune_pointwise", "coordinate_descent_tuning")

    def noting(self, batch):
        seen.append([getattr(below_bf16.inductor_config, name) for name in options])

    monkeypatch.setattr(taking_turns.Ours, "step", noting)
    below_bf16.Searched(None, None, None, None, max_autotune_pointwise=True).step(None)
    taking_turns.Ours(None, None, None, None).step(None)
    assert seen == [[True, False], [False, False]]


def test_the_learning_rate_grows_first_and_falls_where_a_curve_says_so(monkeypatch, tmp_path):
    options = ["--device", "cpu", "--smoke", "--steps", "20", "--methods", "bf16"]
    rates = []
    step = taking_turns.Ours.step

    def noting(self, batch):
        rates.append(self.trainer.optimizer.param_groups[0]["lr"])
        return step(self, batch)

    monkeypatch.setattr(taking_turns.Ours, "step", noting)
    out = tmp_path / "figures.json"
    monkeypatch.setattr(
        "sys.argv",
        ["benchmark.py", *options, "--out", str(out), "--groups", "curves", "warm-up", "decay"],
    )
    below_bf16.main()
    constant, growing, falling = (torch.tensor(rates).reshape(3, 20) / rates[0]).unbind()
    assert set(constant.tolist()) == {1.0}
    torch.testing.assert_close(growing[:5], torch.tensor([0.25, 0.4375, 0.625, 0.8125, 1.0]))
    assert set(growing[4:].tolist()) == {1.0}
    rows = {row["group"]: row["losses"] for row in json.loads(out.read_text())["rows"]}
    assert torch.equal(falling[:5], growing[:5])
    torch.testing.assert_close(falling[4:], 1 - 0.9 * torch.arange(16) / 16)
    assert rows["curves"] != rows["warm-up"]
    assert rows["decay"][:5] == rows["warm-up"][:5]
    assert rows["decay"] != rows["warm-up"]


@pytest.fixture
def choose(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--size", "smoke", "--rounds", "2", "--turn-steps", "1"]
    monkeypatch.setattr(taking_turns, "WARM_UP_STEPS", 1)

    def choose(*more):
        monkeypatch.setattr("sys.argv", ["benchmark.py", *options, "--out", str(out), *more])
        float8_choice.main()
        return json.loads(out.read_text())

    return choose


def test_the_choice_of_float8_takes_turns_with_bf16(choose, capsys):
    found = choose("--models", "Qwen2 0.5B", "ViT large")
    assert [row["model"] for row in found["rows"]] == ["Qwen2 0.5B", "ViT large"]
    for row in found["rows"]:
        assert row["choice"].startswith("no layer; in bf16: ")  # emulated, it is never faster
        assert len(row["turns_ms"]) == 2
        assert row["ratio"] > 0
    assert "ViT large" in capsys.readouterr().out


def test_a_model_that_fails_and_one_without_time_are_named(choose, monkeypatch):
    outside = float8_choice.MODELS["BERT large"]._replace(config="NoSuchConfig")
    monkeypatch.setitem(float8_choice.MODELS, "BERT large", outside)
    found = choose("--models", "BERT large", "--steps", "compiled")
    assert found["rows"] == []
    assert "BERT large, compiled: AttributeError: " in found["left_out"][0]
    found = choose("--models", "OPT 1.3B", "--limit-s", "-1")
    assert found["left_out"][1] == "OPT 1.3B, captured: no time was left"


def test_what_a_device_compiles_and_captures_for_the_choice():
    for step in float8_choice.STEPS:
        plain, float8 = (float8_choice.plans(step, "cuda")[kind] for kind in ("bf16", "float8"))
        assert plain.cuda_graph
        assert bool(plain.compile) == (step == "compiled")
        assert float8 == plain.replace(precision=float8.precision)
        assert float8.float8_options.recipe == "auto"
