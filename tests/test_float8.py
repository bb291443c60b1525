"""float8 layers: which are converted and why not the others, and what stays."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import sys
import types

import pytest
import torch
from torch import nn, optim

from float8_models import (
    EMULATED,
    MEASURED,
    applied,
    batches,
    bf16_loss,
    gpt,
    loss_fn,
)
from torchfast import Float8Linears, Float8Options, Plan, PlanError, Trainer
from torchfast._core.blocks import find_blocks
from torchfast._core.compare import differences
from torchfast._core.device import float8_obstacle
from torchfast._core.errors import UnsupportedDeviceError
from torchfast.precision.float8_conversion import Float8Conversion
from torchfast.precision.float8_options import RECIPES

CPU = torch.device("cpu")


# --- conversion ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_model_keeps_its_object_parameters_and_keys(recipe):
    model = gpt()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    options = Float8Options(recipe=recipe, smallest=16, emulate=True)
    plain = float(bf16_loss(model.eval(), batches(1)[0]).detach())
    with Float8Linears(model, options) as float8:
        assert float8.recipes == dict.fromkeys(
            ["blocks.0.0", "blocks.0.3", "blocks.1.0", "blocks.1.3"], recipe
        )
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == keys
        assert not model.blocks[0][0].training
        loss = bf16_loss(model, batches(1)[0])
        loss.backward()
        assert float(loss.detach()) == pytest.approx(plain, 0.01)
        assert float(loss.detach()) != plain  # it is float8 that computes
        assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
    assert [type(m) for m in model.modules()] == [type(m) for m in gpt().modules()]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert float(bf16_loss(model, batches(1)[0]).detach()) == plain


def test_what_is_left_out_has_a_reason():
    class Strange(nn.Linear):
        pass

    model = gpt()
    model.strange = Strange(32, 32)
    model.made = nn.Linear(32, 32)
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model.made)
    model.settled = nn.Linear(32, 32)
    model.settled.config = "mine"
    model.double = nn.Linear(32, 32, dtype=torch.float64)
    model.small = nn.Linear(16, 32)
    model.named = nn.Linear(32, 32)
    model.parent = nn.Linear(32, 32)
    model.parent.lora = nn.Linear(32, 32)
    options = Float8Options(recipe="rowwise", smallest=32, emulate=True, keep=("nam*",))
    with Float8Linears(model, options) as float8:
        detail = float8.decision().detail
    for name, reason in {
        "gate": "32 to 3 features are not divisible by 16",
        "head": "it gives the logits of the vocabulary",
        "strange": "it is a Strange, not nn.Linear itself",
        "made": "its weight is no parameter of it",
        "parent": "it has modules of its own (lora)",
        "settled": "it has an attribute 'config', which torchao's layers use",
        "double": "its weight is torch.float64",
        "small": "too small to gain: 16 to 32 features",
        "named": "keep names it",
    }.items():
        assert f"'{name}' ({reason})" in detail
    assert detail.startswith("5 of 14 linear layers (5 rowwise, emulated)")


def test_a_table_of_positions_is_no_vocabulary():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.positions = nn.Embedding(96, 32), nn.Embedding(32, 32)
            self.inner = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
            self.head = nn.Linear(32, 96)

    with Float8Linears(Square(), EMULATED) as float8:
        assert list(float8.recipes) == ["inner.0", "inner.1"]
    model = Square()
    model.inner = nn.Linear(32, 32)  # a smaller vocabulary has one layer of logits
    options = Float8Options(recipe="tensorwise", smallest=16, emulate=True, vocabulary=True)
    with Float8Linears(model, options) as float8:
        assert list(float8.recipes) == ["inner", "head"]
    with pytest.raises(PlanError, match=r"'inner', 'head' \(it may give the logits"):
        Float8Linears(model, EMULATED).apply()


def test_a_layer_held_twice_is_converted_once():
    shared = nn.Linear(32, 32)
    shared.note = "mine"
    model = nn.ModuleDict(
        {"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.Linear(32, 3))}
    )
    with Float8Linears(model, EMULATED):
        assert model["a"][0] is model["b"][0] is shared
        assert type(shared) is not nn.Linear
        assert shared.note == "mine"
    assert model["a"][0] is model["b"][0] is shared


@pytest.mark.parametrize("name", ["a.0", "b.0", "b.*"])
def test_a_layer_held_twice_has_both_names(name):
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict(
        {"a": nn.Sequential(shared, nn.Linear(32, 32)), "b": nn.Sequential(shared)}
    )
    with Float8Linears(model, dataclasses.replace(EMULATED, keep=(name,))) as float8:
        assert list(float8.recipes) == ["a.1"]
    with Float8Linears(model, dataclasses.replace(EMULATED, only=(name,))) as float8:
        assert list(float8.recipes) == ["a.0"]


def test_leaving_takes_along_what_was_loaded_meanwhile():
    model, other = gpt(), gpt()
    nn.init.ones_(other.blocks[0][0].weight)
    with Float8Linears(model, EMULATED) as float8:
        model.load_state_dict(other.state_dict(), assign=True)
        with float8.left():
            assert type(model.blocks[0][0]) is nn.Linear
            assert model.blocks[0][0].weight.eq(1).all()
        assert type(model.blocks[0][0]) is not nn.Linear
    assert model.blocks[0][0].weight is dict(model.named_parameters())["blocks.0.0.weight"]
    assert differences(other.state_dict(), model.state_dict()) == []


def test_copies_and_pickles_hold_plain_layers():
    model = gpt()
    with Float8Linears(model, EMULATED):
        nn.init.ones_(model.blocks[0][0].weight)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(m) for m in copied.modules()] == [type(m) for m in gpt().modules()]
            assert differences(model.state_dict(), copied.state_dict()) == []
            assert copied.head.weight is copied.embed.weight
        assert type(model.blocks[0][0]) is not nn.Linear


def test_leaving_spares_what_the_user_put_in_its_place():
    model = gpt()
    float8 = applied(model, EMULATED)
    mine = model.blocks[0][0] = nn.Linear(32, 64)
    float8.close()
    assert model.blocks[0][0] is mine
    assert type(model.blocks[0][3]) is nn.Linear


# --- what cannot be ------------------------------------------------------------------------------


def test_a_model_that_is_a_layer_is_refused():
    with pytest.raises(PlanError, match=r"put it into a container: nn\.Sequential\(model\)"):
        Float8Linears(nn.Linear(32, 32), EMULATED)


def test_a_second_conversion_is_refused():
    model = gpt()
    first = applied(model, EMULATED)
    with pytest.raises(PlanError, match=r"layer 'blocks\.0\.0' is in float8 already"):
        Float8Linears(model, EMULATED).apply()
    first.close()
    applied(model, EMULATED).close()


def test_dimensions_that_are_not_divisible_are_refused_where_nothing_else_is_left():
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    with pytest.raises(PlanError, match=r"'0' \(30 to 20 features are not divisible by 16\)"):
        Float8Linears(model, EMULATED).apply()
    options = Float8Options(recipe="tensorwise", only=("gate",), emulate=True)
    with pytest.raises(
        PlanError, match="only names layer 'gate', which cannot be in float8: 32 to"
    ):
        Float8Linears(gpt(), options).apply()


def test_only_names_what_is_converted():
    options = Float8Options(recipe="tensorwise", only=("blocks.0.0", "head"), emulate=True)
    with Float8Linears(gpt(), options) as float8:
        assert float8.recipes == {"blocks.0.0": "tensorwise", "head": "tensorwise"}


@pytest.mark.parametrize("argument", ["keep", "only"])
def test_a_name_without_a_layer_suggests_another(argument):
    options = Float8Options(**{argument: ("blocks.0.00",)}, emulate=True)
    with pytest.raises(
        PlanError, match=r"no linear layer of that name; did you mean 'blocks\.0\.0'"
    ):
        Float8Linears(gpt(), options).apply()


def test_a_device_without_float8_is_refused():
    assert float8_obstacle(CPU) == "this step runs on cpu"
    model = gpt()
    with pytest.raises(UnsupportedDeviceError, match=r"capability 8\.9 or later .* runs on cpu"):
        Trainer(model, optim.SGD(model.parameters(), lr=0.1), loss_fn, Plan(precision="fp8"))


def test_a_recipe_that_the_device_refuses_is_refused_before_anything_is_converted(monkeypatch):
    def product(*_):
        raise NotImplementedError("no such product here")

    whole = Float8Conversion.by

    def by(self, recipe):
        return whole(self, recipe) if recipe == "tensorwise" else lambda _: product

    monkeypatch.setattr(Float8Conversion, "by", by)
    Float8Linears(gpt(), EMULATED)
    Float8Linears(gpt(), MEASURED)  # which leaves out what is refused
    named = dataclasses.replace(EMULATED, recipe="rowwise")
    with pytest.raises(
        UnsupportedDeviceError, match=r"refuses float8 with recipe='rowwise' \(.*no such product"
    ):
        Float8Linears(gpt(), named)


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    assert float8_obstacle(torch.device("cuda")) == "an A100 has compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert float8_obstacle(torch.device("cuda")) is None


@pytest.mark.parametrize("version", [None, "0.9.1"])
def test_without_torchao_or_with_an_old_one_the_error_says_so(monkeypatch, version):
    old = types.ModuleType("torchao")
    old.__version__ = version
    monkeypatch.setitem(sys.modules, "torchao", old if version else None)
    said = "cannot be imported here" if version is None else "another torchao than 0.9.1"
    with pytest.raises(ImportError, match=f"{said}.*; pip install 'torchao>=0.17'"):
        Float8Linears(gpt(), EMULATED)


def test_an_optimizer_of_another_model_is_refused():
    model = gpt()
    mixed = [*list(gpt().parameters())[:3], *list(model.parameters())[3:]]
    with Float8Linears(model, EMULATED) as float8:
        float8.check_optimizer(optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(PlanError, match=r"lacks the weight of 'blocks\.0\.0'"):
            float8.check_optimizer(optim.SGD(mixed, lr=0.1))


@pytest.mark.parametrize("repeated", [False, True])
def test_blocks_are_the_same_with_their_layers_in_float8(repeated):
    """Or layers would be compiled and recomputed one by one, and their casts fused with nothing."""
    chain = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)]
    model = nn.Sequential(*chain, *copy.deepcopy(chain))
    if repeated:
        model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(chain)) for _ in range(3)))
    plain = find_blocks(model)
    assert [group.class_name for group in plain] == ["Sequential"] * repeated
    float8 = Float8Linears(model, EMULATED)
    float8.apply()
    assert len(float8.recipes) >= 4
    assert find_blocks(model) == plain


def test_weights_with_products_of_their_own_keep_them():
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantize_(model[0], Int8MixedPrecisionTrainingConfig(module_swap=False))
    assert type(model[0]) is nn.Linear
    with Float8Linears(model, EMULATED) as float8:
        assert set(float8.recipes) == {"1"}
        reason = "'0' (its weight is a Int8MixedPrecisionTrainingLinearWeight, which has products"
        assert reason in float8.decision().detail


def test_layers_without_sizes_yet_are_an_error():
    model = nn.Sequential(nn.Linear(32, 32), nn.LazyLinear(32))
    with pytest.raises(PlanError, match=r"'1' is a LazyLinear .* call the model once"):
        Float8Linears(model, EMULATED).apply()
    model(torch.ones(1, 32))
    with Float8Linears(model, EMULATED) as float8:
        assert set(float8.recipes) == {"0", "1"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"recipe": "rowise"}, "did you mean 'rowwise'"),
        ({"keep": "head"}, "keep must be a tuple of names"),
        ({"only": (1,)}, "only must hold names"),
        ({"watch_at": 3}, "watch_at must be a tuple of numbers"),
        ({"watch_at": (0,)}, "watch_at must be >= 1"),
        ({"watch_every": 0}, "watch_every must be >= 1"),
        ({"smallest": -1}, "smallest must be >= 0"),
        ({"emulate": 1}, "emulate must be True or False"),
        ({"loss_drift": 0}, "loss_drift must be > 0"),
        ({"budget_s": float("inf")}, "budget_s must be finite"),
        ({"recipes": "auto"}, "did you mean 'recipe'"),
    ],
)
def test_bad_options_are_refused(options, error):
    with pytest.raises((TypeError, ValueError), match=error):
        Float8Options(**options)


def test_a_plan_with_float8_is_written_and_read():
    assert Plan(precision=Float8Options()) == Plan(precision="fp8")
    plan = Plan(precision=Float8Options(recipe="rowwise", keep=("head",), watch_at=(5, 1)))
    assert plan.to_json() == (
        '{"precision": {"format": "fp8", "keep": ["head"], "recipe": "rowwise", '
        '"watch_at": [1, 5]}}'
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json('{"precision": "fp8"}').float8_options == Float8Options()
    assert Plan(precision="bf16").float8_options is None


def test_a_torchao_that_breaks_while_it_is_imported_is_told(monkeypatch, tmp_path):
    importlib.import_module("torchao.float8")  # which is put back
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("import torch\ntorch.no_such_name\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"cannot be imported here \(.*no_such_name.*; pip"):
        Float8Linears(gpt(), EMULATED)
    (tmp_path / "torchao" / "__init__.py").write_text("__version__ = '0.18.0'\n")
    (tmp_path / "torchao" / "float8.py").write_text("import torch\ntorch.no_such_name\n")
    sys.modules.pop("torchao", None)
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match=r"torchao 0\.18\.0 .* too old or too new .*no_such_name"):
        Float8Linears(gpt(), EMULATED)


@pytest.mark.parametrize("options", [EMULATED, MEASURED])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torchao.float8", "convert_to_float8_training"),
        ("torchao.float8.float8_linear", "matmul_with_hp_or_float8_args"),
        ("torchao.float8.config", "ScalingType"),
    ],
)
def test_a_name_that_torchao_has_no_longer_is_told(module, name, options, monkeypatch):
    monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match=rf"needs {module}\.{name}, .* too old or too new"):
        Float8Linears(gpt(), options)
