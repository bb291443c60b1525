"""Shallow copies of a compiled model compute with their own parameters, never with the model's."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

from compile_models import Net, compiled, tokens
from torchfast import CompiledModule
from torchfast.compiler.in_place import Region
from torchfast.compiler.record import CompileRecord

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Greedy(Net):
    """Its copies take every attribute along."""

    def __getstate__(self):
        return self.__dict__.copy()


class Calls(Net):
    """Has a call of its own, as the layers of transformers have."""

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def of_dict(module):
    twin = module.__new__(type(module))
    twin.__dict__ = module.__dict__.copy()
    return twin


def with_own_head(twin):
    """Give a shallow copy a head of its own, of zeros, and return it."""
    twin._modules = dict(twin._modules)
    twin.head = nn.Linear(8, 16)
    nn.init.zeros_(twin.head.weight)
    nn.init.zeros_(twin.head.bias)
    return twin


def replica_of(model):
    """Return what nn.DataParallel runs on a device: copies of all modules, with other tensors."""
    twins = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, twin in twins.items():
        for name, child in module._modules.items():
            setattr(twin, name, twins[child])
        for name, parameter in module._parameters.items():
            setattr(twin, name, parameter.detach().clone().requires_grad_() * 2)
    return twins[model]


def eager_replica_of(model):
    with torch.no_grad():
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.mul_(2)
    return twin


@pytest.mark.parametrize(
    ("net", "copied"),
    [
        (Net, of_dict),
        (Net, lambda module: module._replicate_for_data_parallel()),
        (Net, copy.copy),
        (Greedy, copy.copy),
        (Calls, of_dict),
    ],
    ids=["__dict__", "replica", "copy", "copy of all", "with a call of its own"],
)
def test_a_shallow_copy_computes_with_its_own_parameters(net, copied):
    model = net()
    with compiled(model, regions="whole") as handle:
        expected = model(tokens())
        twin = with_own_head(copied(model))
        assert not twin(tokens()).any()
        twin(tokens()).sum().backward()
        assert model.head.weight.grad is None
        assert twin.head.bias.grad.any()
        assert torch.equal(model(tokens()), expected)
        assert handle.status == {"": "compiled"}
        assert handle.report().counters["graphs"] == 1


@pytest.mark.parametrize("regions", ["whole", "blocks"])
def test_replicas_compute_what_they_do_without(regions, caplog):
    torch.manual_seed(0)
    model = Net()
    expected = eager_replica_of(model)(tokens())
    with compiled(model, regions=regions) as handle:
        model(tokens())
        for _ in range(2):
            torch.testing.assert_close(replica_of(model)(tokens()), expected)
        told = [r.getMessage() for r in caplog.records if r.name.startswith("torchfast")]
        assert len(told) == 1
        assert "a shallow copy of it was called, such as nn.DataParallel makes" in told[0]
        (decision,) = (d for d in handle.decisions() if "shallow copy" in d.detail)
        assert decision.outcome == "stepped aside"
        assert "runs eagerly in part" in decision.detail
        assert set(handle.status.values()) == {"compiled"}


def test_replicas_may_be_called_in_threads():
    torch.manual_seed(0)
    model = Net()
    expected, found = eager_replica_of(model)(tokens()), []
    with compiled(model, regions="whole"):
        model(tokens())
        threads = [
            threading.Thread(target=lambda: found.append(replica_of(model)(tokens())))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("gone", [False, True], ids=["closed", "and the model gone"])
def test_a_copy_outlives_what_it_is_a_copy_of(gone):
    model = Net()
    with compiled(model, regions="whole"):
        model(tokens())
        twin = with_own_head(of_dict(model))
    assert isinstance(vars(twin)[Region.ATTRIBUTE], Region)
    if gone:
        del model
        gc.collect()
    assert not twin(tokens()).any()


def test_an_empty_module_is_itself():
    """A module of length 0 counts as false."""

    class Empty(nn.Sequential):
        def forward(self, x):
            return x * 2

    model = Empty()
    with compiled(model, regions="whole") as handle:
        assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
        assert handle.status == {"": "compiled"}


def test_a_copy_can_be_compiled_by_itself():
    model = Net()
    with compiled(model, regions="whole") as handle:
        expected = model(tokens())
        twin = with_own_head(of_dict(model))
        with compiled(twin, regions="whole") as own:
            assert not twin(tokens()).any()
            assert own.status == {"": "compiled"}
            assert "set aside" not in str(own.report())
        assert Region.ATTRIBUTE not in vars(twin)
        assert not twin(tokens()).any()
        assert torch.equal(model(tokens()), expected)
        assert handle.status == {"": "compiled"}
        with pytest.raises(ValueError, match="compiled by another CompiledModule already"):
            CompiledModule(model)


# -- Within what the user compiles -----------------------------------------------------------------


def called(net, x):
    return net(x) + 1


def called_behind_a_break(net, x):
    x = x + 0
    torch._dynamo.graph_break()
    return net(x) + 1


@torch._dynamo.disable(recursive=False)
def _as_it_is(net, x):
    return net(x)


def called_by_what_is_not_compiled(net, x):
    return _as_it_is(net, x) + 1


def called_by_its_method(net, x):
    return net.__call__(x) + 1


WAYS = [called, called_behind_a_break, called_by_what_is_not_compiled, called_by_its_method]


@pytest.mark.parametrize("order", ["copy first", "model first"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("net", [Net, Calls])
def test_a_copy_within_something_larger_computes_with_its_own(net, way, order):
    model = net()
    with compiled(model, regions="whole"):
        model(tokens())
        twin = with_own_head(of_dict(model))
        expected = {model: model(tokens()) + 1, twin: torch.ones(2, 48, 16)}
        outer = torch.compile(way, backend="aot_eager")
        nets = [twin, model] if order == "copy first" else [model, twin]
        for each in nets * 2:
            torch.testing.assert_close(outer(each, tokens()), expected[each])


def test_a_copy_that_has_to_be_part_of_one_graph_is_refused():
    model = Calls()
    with compiled(model, regions="whole"):
        outer = torch.compile(called, backend="aot_eager", fullgraph=True)
        with pytest.raises(Unsupported, match="a shallow copy of a compiled module is called"):
            outer(with_own_head(of_dict(model)), tokens())


@pytest.mark.parametrize("way", [called, called_by_its_method])
@pytest.mark.parametrize("net", [Net, Calls])
def test_the_model_itself_is_one_graph_with_something_larger(net, way):
    model = net()
    expected = model(tokens()) + 1
    with compiled(model, regions="whole") as handle:
        outer = torch.compile(way, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(outer(model, tokens()), expected)
        assert handle.status == {"": "not called"}


def test_behind_what_is_not_compiled_the_model_is_its_own_region():
    model = Net()
    expected = model(tokens()) + 1
    with compiled(model, regions="whole") as handle, CompileRecord() as record:
        outer = torch.compile(called_by_what_is_not_compiled, backend="aot_eager")
        for _ in range(3):
            torch.testing.assert_close(outer(model, tokens()), expected)
        assert handle.status == {"": "compiled"}
        names = [frame.code.name for frame in record.summary().frames]
        # And nothing of what compiles it is.
        assert {name for name in names if not name.startswith("region_")} == {outer.__name__}


def test_an_export_of_a_copy_is_one_of_its_own_parameters():
    model = Net()
    with compiled(model, regions="whole"):
        twin = with_own_head(of_dict(model))
        exported = torch.export.export(twin, (tokens(),), strict=False)
        assert not exported.module()(tokens()).any()


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_stands_for_compiled_code_is_not_copied_but_its_model_is(use):
    model = nn.Linear(2, 2)
    with CompiledModule(model, backend="eager") as handle:
        with pytest.raises(TypeError, match="copy or pickle the model"):
            use(handle)
        use(model)
