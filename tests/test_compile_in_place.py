"""A compiled model is the same object with the same hooks and copies, and is given back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_models import Net, compiled, tokens
from torchfast import Plan, Trainer
from torchfast.compiler import CompileOptions, compile_callable
from torchfast.compiler.in_place import Region

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def appearance(model):
    return type(model), repr(model), [*model.state_dict()], [n for n, _ in model.named_modules()]


def test_the_object_stays_what_it_is():
    model = Net()
    before = appearance(model)
    with compiled(model) as handle:
        model(tokens())
        assert appearance(model) == before
        assert handle.model is model
        assert isinstance(model, Net)
        assert not any("_orig_mod" in name for name in model.state_dict())


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_eager_and_their_own(kind):
    model = Net()
    with compiled(model, regions="whole") as handle:
        expected = model(tokens())
        if kind == "deepcopy":
            twin = copy.deepcopy(model)
        elif kind == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert not any(isinstance(v, Region) for m in twin.modules() for v in vars(m).values())
        torch.testing.assert_close(twin(tokens()), expected)
        nn.init.zeros_(twin.head.weight)
        nn.init.zeros_(twin.head.bias)
        assert not twin(tokens()).any()
        assert handle.status == {"": "compiled"}


def test_copies_that_take_every_attribute_are_eager_too():
    class Greedy(Net):
        def __getstate__(self):
            return self.__dict__.copy()

    with compiled(model := Greedy(), regions="whole"):
        model(tokens())
        twin = copy.deepcopy(model)
        nn.init.zeros_(twin.head.weight)
        nn.init.zeros_(twin.head.bias)
        assert not twin(tokens()).any()


@pytest.mark.parametrize("early", [True, False], ids=["before", "after the first call"])
@pytest.mark.parametrize("inner", [False, True], ids=["of the region", "inside"])
@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward"])
def test_hooks_run(hook, inner, early):
    model, seen = Net(depth=2), []

    def note(*args):
        seen.append(hook)

    with compiled(model):
        if not early:
            model(tokens()).sum().backward()
        module = model.blocks[1].up if inner else model.blocks[1]
        handle = getattr(module, f"register_{hook}_hook")(note)
        model(tokens()).sum().backward()
        assert len(seen) == 1
        model(tokens()).sum().backward()
        assert len(seen) == 2
        handle.remove()
        model(tokens()).sum().backward()
        assert len(seen) == 2


def test_a_hook_that_changes_the_output_does_so():
    model = Net(depth=2)
    eager = copy.deepcopy(model)
    with compiled(model):
        model(tokens())
        for twin in (model, eager):
            twin.blocks[0].register_forward_hook(lambda module, args, output: output * 3)
        torch.testing.assert_close(model(tokens()), eager(tokens()))


def test_global_hooks_run_and_the_regions_eagerly(caplog):
    model, seen = Net(depth=2), []
    with compiled(model) as handle:
        model(tokens())
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append(type(module).__name__)
        )
        try:
            model(tokens())
            model(tokens())
        finally:
            hook.remove()
        assert seen.count("LayerNorm") == 4
        told = [r.getMessage() for r in caplog.records if r.name.startswith("torchfast")]
        assert len(told) == 1
        assert "global module hooks" in told[0]
        assert "global module hooks" in str(handle.report())


def test_train_and_eval_are_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(64, 4)
    with compiled(model, regions="whole"):
        assert (model(x) == 0).any()
        model.eval()
        assert not (model(x) == 0).any()
        model.train()
        assert (model(x) == 0).any()


def test_replaced_parameters_and_loaded_state_are_used():
    model, other = Net(), Net()
    with compiled(model):
        model(tokens())
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(tokens()), other(tokens()))
        model.load_state_dict(other.state_dict(), assign=True)
        torch.testing.assert_close(model(tokens()), other(tokens()))


@pytest.mark.parametrize("keep", [False, True])
def test_a_block_that_was_replaced_is_not_called_compiled(keep):
    model = Net()
    kept = model.blocks[1] if keep else None
    with compiled(model) as handle:
        model(tokens())
        assert set(handle.status.values()) == {"compiled"}
        model.blocks[1] = Net().blocks[1]
        del model.blocks[3]
        handle.suspend()
        expected = model(tokens())
        handle.resume()
        torch.testing.assert_close(model(tokens()), expected)
        assert handle.status["blocks.0"] == handle.status["blocks.2"] == "compiled"
        for path in ("blocks.1", "blocks.3"):
            assert handle.status[path].startswith("eager: the module that was compiled there has")
            assert f"{path} runs eager: the module" in str(handle.report())
        assert handle.report().counters["compiled"] == 2
    assert kept is None or "_compiled_call_impl" not in vars(kept)


def test_close_takes_everything_back():
    model = Net()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    handle = compiled(model)
    model(tokens())
    assert any(isinstance(v, Region) for m in model.modules() for v in vars(m).values())
    handle.close()
    handle.close()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert handle.is_closed
    with compiled(model):  # and it can be had again
        model(tokens())


def test_close_restores_the_users_own_compile():
    model = Net()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model.compile(backend=backend)
    theirs = model._compiled_call_impl
    handle = compiled(model, regions="whole")
    model(tokens())
    assert not calls
    assert "set aside until close()" in str(handle.report())
    handle.close()
    assert model._compiled_call_impl is theirs
    model(tokens())
    assert len(calls) == 1


def test_close_leaves_what_the_user_compiled_since():
    model = Net()
    handle = compiled(model, regions="whole")
    model.compile(backend="eager")
    theirs = model._compiled_call_impl
    handle.close()
    assert model._compiled_call_impl is theirs


def test_a_second_handle_and_a_wrapped_model_are_refused():
    model = Net()
    with compiled(model):
        with pytest.raises(ValueError, match="compiled by another CompiledModule already"):
            compiled(model, regions="whole")
        with pytest.raises(ValueError, match="compiled by another CompiledModule already"):
            compiled(model.blocks[0], regions="whole")
    with pytest.raises(ValueError, match="model is compiled already: OptimizedModule is what"):
        compiled(torch.compile(model, backend="eager"))
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with pytest.raises(ValueError, match=r"its module blocks\.1 is what torch.compile returned"):
        compiled(model)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
        compiled(lambda x: x)


def test_the_handle_does_not_keep_the_model():
    model = Net()
    handle = compiled(model)
    model(tokens()).sum().backward()
    alive = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="no longer exists"):
        handle(tokens())
    handle.close()


def test_the_class_is_not_patched():
    with compiled(Net()) as handle:
        assert "_compiled_call_impl" not in vars(Net)
        assert vars(nn.Module)["_compiled_call_impl"] is None
        other = Net()
        other(tokens())
        assert set(handle.status.values()) == {"not called"}


class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.ran = []

    @torch.compiler.disable
    def forward(self, x):
        self.ran.append(torch.compiler.is_compiling())
        return self.line(x)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), Disabled()

    def forward(self, x):
        return self.inner(self.before(x)) * 2


def test_disabled_parts_are_respected():
    model = Around()
    with compiled(model, regions="whole") as handle:
        for _ in range(3):
            model(torch.ones(2, 8))
        assert model.inner.ran == [False] * 3
        assert handle.status == {"": "compiled"}


def test_a_part_that_torch_is_told_to_leave_alone_is_left_alone():
    model = Around()
    model.inner = torch.compiler.disable(nn.Linear(8, 8))
    x = torch.ones(2, 8)
    expected = model(x)
    with compiled(model, regions="whole") as handle:
        torch.testing.assert_close(model(x), expected)
        assert handle.status == {"": "compiled"}


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("wrapped", [lambda function: function, partial], ids=["", "partial"])
@pytest.mark.parametrize("regions", ["auto", "whole", "blocks"])
def test_a_loss_function_that_torch_is_told_to_leave_alone(regions, wrapped):
    ran = []

    @wrapped
    @torch.compiler.disable
    def loss_fn(model, batch):
        ran.append(torch.compiler.is_compiling())
        return model(batch).square().mean()

    losses = []
    for compile_ in (False, CompileOptions(backend="aot_eager", regions=regions)):
        torch.manual_seed(0)
        model = Three()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Trainer(model, optimizer, loss_fn, Plan(compile=compile_)) as trainer:
            losses.append([trainer.step(torch.ones(2, 8)) for _ in range(3)])
            report = trainer.report()
    torch.testing.assert_close(*losses)
    assert not any(ran)
    assert report.counters["compile_graphs"] > 0
    assert not [d for d in report.decisions if d.lever == "compile" and d.outcome != "applied"]


def test_a_script_has_a_status():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(8, 8))
    with compiled(scripted) as handle:
        handle_status = handle.status
        scripted(torch.ones(2, 8))
        assert handle_status == {"": "not called"}
        assert handle.status[""].startswith("eager: ")


def test_a_model_of_which_nothing_is_compiled_is_not_called_compiled():
    # Torch leaves the frame of Sequential alone, and with the graph break that is all there is.
    for model in (Disabled(), nn.Sequential(nn.Linear(8, 8), Disabled())):
        with compiled(model, regions="whole") as handle:
            model(torch.ones(2, 8))
            model(torch.ones(2, 8))
            assert handle.status[""].startswith("eager: ")
            assert "torch.compiler.disable" in handle.status[""]
            assert handle.decisions()[0].outcome == "stepped aside"
    for model in (nn.LSTM(8, 8), nn.Identity()):
        with compiled(model, regions="whole") as handle:
            model(torch.ones(2, 8))
            status = handle.status[""]
            assert status.startswith("eager: ")
            assert "nn.LSTM" in status or not isinstance(model, nn.LSTM)
            assert "\n" not in status


def mean_loss(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def test_a_callable_is_compiled_with_its_loss():
    model = Net()
    eager = copy.deepcopy(model)
    loss_fn = compile_callable(mean_loss, CompileOptions(backend="aot_eager", fullgraph=True))
    assert loss_fn.status == "not called"
    for twin, function in ((model, loss_fn), (eager, mean_loss)):
        function(twin, tokens()).backward()
    torch.testing.assert_close(model.head.weight.grad, eager.head.weight.grad)
    assert loss_fn.status == "compiled"
    assert loss_fn.report().counters["graphs"] == 1
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss_fn.close()
    loss_fn(model, tokens(5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_regions_inside_of_a_compiled_callable_are_parts_of_it():
    model = Net()
    with compiled(model) as handle:
        loss_fn = compile_callable(mean_loss, CompileOptions(backend="aot_eager", fullgraph=True))
        torch.testing.assert_close(loss_fn(model, tokens()), mean_loss(model, tokens()))
        assert loss_fn.report().counters["graphs"] == 1
        assert handle.report().counters["graphs"] == 1


def test_a_callable_that_is_compiled_or_none_is_refused():
    options = CompileOptions(backend="eager")
    with pytest.raises(ValueError, match="function mean_loss is compiled already"):
        compile_callable(torch.compile(mean_loss, backend="eager"), options)
    with pytest.raises(TypeError, match="function must be callable as"):
        compile_callable(3, options)


def test_two_models_do_not_make_each_others_sizes_dynamic():
    # Torch remembers sizes by the name of the code: the second model would be compiled for any.
    shapes = []

    def backend(graph, inputs):
        shapes.append([type(i).__name__ for i in inputs if not isinstance(i, torch.Tensor)])
        return graph.forward

    for rows in (2, 3, 4):
        model = Net(depth=1)
        with compiled(model, regions="whole", backend=backend):
            model(tokens(rows))
    assert shapes == [[], [], []]
