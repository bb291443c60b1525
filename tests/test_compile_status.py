"""A status, a counter and a report say "compiled" of what runs compiled, and of nothing else."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compile_models import Net, compiled, tokens
from compiled_training import BATCHES, Deep, compiled_in
from stepping import make_trainer
from torchfast import CompileOptions, Plan
from torchfast.compiler import CompiledModule, compile_callable

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROWS = torch.ones(2, 8)


class Graphs:
    """A backend that counts how often compiled code runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


class Worded(nn.Module):
    """Compiled once for each word."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x, word):
        return self.line(x) * len(word)


WORDS = ["a" * number for number in range(1, 8)]


@pytest.fixture
def graphs():
    return Graphs()


@pytest.fixture
def limit():
    with torch._dynamo.config.patch(recompile_limit=3):
        yield


def says_compiled(decisions):
    return [d for d in decisions if re.search(r"compiled in [\d.]+ s", d.detail)]


def assert_eager(handle, words, paths=("",)):
    """The handle says of regions that they run eagerly, wherever it says something."""
    for path in paths:
        assert handle.status[path].startswith("eager: ")
        assert words in handle.status[path]
    counted = handle.report().counters
    assert counted["eager"] == len(paths)
    assert counted["compiled"] == len(handle.status) - len(paths)
    assert any(words in d.detail for d in handle.decisions() if d.outcome == "stepped aside")
    if len(paths) == len(handle.status):
        assert handle.decisions()[0].outcome == "stepped aside"
        assert not says_compiled(handle.decisions())


# -- Past the recompile limit ----------------------------------------------------------------------


@pytest.mark.usefixtures("limit")
def test_past_the_limit_a_call_is_compiled_or_not(graphs, caplog):
    model = Worded()
    with CompiledModule(model, backend=graphs) as handle:
        for word in WORDS:
            before = graphs.runs
            torch.testing.assert_close(model(ROWS, word), model.line(ROWS) * len(word))
            assert graphs.runs - before == (len(word) <= 3)
            if len(word) <= 3:
                assert handle.status == {"": "compiled"}
            else:
                assert_eager(handle, "the recompile limit is reached")
        assert handle.report().counters["graphs"] == 3
        # A version that fits is run, and the last one is not what holds for ever.
        model(ROWS, WORDS[0])
        assert handle.status == {"": "compiled"}
        assert handle.decisions()[0].outcome == "applied"
        assert "in part" in handle.decisions()[1].detail
    assert caplog.text.count("the recompile limit is reached, and") == 1


@pytest.mark.usefixtures("limit")
def test_past_the_limit_each_region_knows_of_itself(graphs):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Worded() for _ in range(2))

        def forward(self, x, first, second):
            return self.blocks[1](self.blocks[0](x, first), second)

    model = Two()
    with CompiledModule(model, regions=("blocks.*",), backend=graphs) as handle, torch.no_grad():
        for word in WORDS:
            model(ROWS, word, WORDS[0])
        assert_eager(handle, "the recompile limit is reached", paths=("blocks.0",))
        assert handle.status["blocks.1"] == "compiled"
        assert "runs eagerly in part" in handle.decisions()[1].detail
        # Of the fixture's three, and one for the second region.
        assert "reached recompile_limit (4)" in str(handle.report())


@pytest.mark.usefixtures("limit")
def test_past_the_limit_of_all_that_a_region_calls_it_is_eager(graphs):
    """Its own frame cannot be compiled, for the break in a loop; what it calls is."""

    class Looping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Worded()

        def forward(self, x, word):
            for _ in range(2):
                x = self.inner(x, word)
                torch._dynamo.graph_break()
            return x

    model = Looping()
    with CompiledModule(model, backend=graphs) as handle:
        model(ROWS, WORDS[0])
        assert graphs.runs == 2
        assert handle.status == {"": "compiled"}
        for word in WORDS:
            model(ROWS, word)
        assert_eager(handle, "the recompile limit is reached")


@pytest.mark.usefixtures("limit")
def test_past_the_limit_a_callable_is_not_called_compiled(graphs):
    function = compile_callable(lambda x, word: x * len(word), CompileOptions(backend=graphs))
    with function:
        for word in WORDS:
            function(ROWS, word)
        assert function.status.startswith("eager: the recompile limit is reached")
        assert not function.is_compiled
        function(ROWS, WORDS[0])
        assert function.status == "compiled"


@pytest.mark.usefixtures("limit")
def test_after_a_reset_nothing_is_past_the_limit(graphs):
    model = Worded()
    with CompiledModule(model, backend=graphs) as handle:
        for word in WORDS:
            model(ROWS, word)
        torch._dynamo.reset()
        model(ROWS, WORDS[-1])
        assert handle.status == {"": "compiled"}


@pytest.mark.usefixtures("limit")
def test_past_the_limit_a_call_runs_where_compiling_is_forbidden(graphs):
    """As in a capture: nothing would be compiled, so that there is nothing to forbid."""
    model = Worded()
    with CompiledModule(model, backend=graphs) as handle:
        for word in WORDS:
            model(ROWS, word)
        with torch.compiler.set_stance("fail_on_recompile"):
            expected = model.line(ROWS) * len(WORDS[-1])
            torch.testing.assert_close(model(ROWS, WORDS[-1]), expected)
            before = graphs.runs
            model(ROWS, WORDS[0])
            assert graphs.runs == before + 1
            model(ROWS, WORDS[-1])
        model(ROWS, WORDS[0])
        assert handle.status == {"": "compiled"}


# -- What is compiled is not run -------------------------------------------------------------------


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def global_hook():
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (lambda: torch.compiler.set_stance("force_eager"), "set_stance('force_eager')"),
        (global_hook, "global module hooks"),
        (Watching, "TorchDispatchMode Watching"),
    ],
    ids=["stance", "hooks", "dispatch mode"],
)
@pytest.mark.parametrize("calls", [0, 2])
def test_what_is_kept_from_running_is_not_called_compiled(around, words, calls, graphs):
    model = Net()
    with compiled(model, backend=graphs) as handle:
        model(tokens())
        with around():
            before = graphs.runs
            for _ in range(calls):
                model(tokens())
            assert graphs.runs == before
            assert_eager(handle, words, paths=handle.regions)
        model(tokens())
        assert graphs.runs == before + len(handle.regions)
        assert set(handle.status.values()) == {"compiled"}


@pytest.mark.parametrize("regions", ["whole", "blocks"])
def test_a_trainer_says_so_too(regions):
    plan = Plan(compile=CompileOptions(backend="eager", regions=regions))
    with make_trainer(net=Deep, plan=plan) as trainer:
        trainer.step(BATCHES[0])
        assert says_compiled(compiled_in(trainer))
        with torch.compiler.set_stance("force_eager"):
            trainer.step(BATCHES[1])
            told = compiled_in(trainer)
        assert any("set_stance('force_eager')" in d.detail for d in told)
        assert not says_compiled(told)


def test_what_the_user_compiled_since_stands_in_place_of_it(graphs):
    model, theirs = Net(depth=2), Graphs()
    with compiled(model, backend=graphs) as handle:
        model(tokens())
        assert graphs.runs == 2
        model.blocks[1].compile(backend=theirs)
        model(tokens())
        assert (graphs.runs, theirs.runs) == (3, 1)
        assert handle.status["blocks.0"] == "compiled"
        assert handle.status["blocks.1"].startswith("set aside: compile() of the module was called")
        assert handle.report().counters["compiled"] == 1
        assert "blocks.1 is set aside: " in str(handle.report())
        model.blocks[0].compile(backend=theirs)
        assert handle.report().counters["compiled"] == 0
        assert handle.decisions()[0].outcome == "stepped aside"
        assert not says_compiled(handle.decisions())
        # What was taken out by its owner is not set aside by anybody.
        del model.blocks[0]._compiled_call_impl, model.blocks[1]._compiled_call_impl
        handle.suspend()
        assert set(handle.status.values()) == {"compiled"}
        handle.resume()
        model(tokens())
        assert graphs.runs == 5


# -- Within something larger -----------------------------------------------------------------------


@pytest.mark.parametrize("larger", ["module", "callable"])
def test_what_is_a_part_of_something_compiled_is_told_so(larger, graphs):
    model = Net()
    if larger == "module":
        whole = CompiledModule(model, regions="whole", backend=graphs)
        run = model
    else:
        run = whole = compile_callable(lambda x: model(x).sum(), CompileOptions(backend=graphs))
    with whole, CompiledModule(model.head, backend=graphs) as handle:
        assert handle.status == {"": "not called"}
        run(tokens())
        assert graphs.runs == 1
        assert handle.status == {"": "compiled as a part of what calls it"}
        assert handle.report().counters["compiled"] == 1
        assert "compiled as a part of what calls it" in handle.decisions()[1].detail
        with torch.compiler.set_stance("force_eager"):
            assert_eager(handle, "force_eager")
        model.head(torch.ones(2, 8))
        assert handle.status == {"": "compiled"}


class Traced(nn.Module):
    """Calls its head where it is traced, and nowhere else."""

    def __init__(self, breaks):
        super().__init__()
        self.head, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x):
        y = x * 2
        for _ in range(2):
            y = self.head(y) if torch.compiler.is_compiling() else y * 2
            if self.breaks:
                torch._dynamo.graph_break()
        return y


def fails(graph, inputs):
    raise NotImplementedError("no such kernel")


@pytest.mark.parametrize(
    ("breaks", "backend", "expected"),
    [
        (False, "eager", "compiled as a part of what calls it"),
        (True, "eager", "not called"),
        (False, fails, "not called"),
    ],
    ids=["compiled", "broken in the loop", "failed"],
)
def test_what_could_not_be_compiled_made_no_parts(breaks, backend, expected):
    model = Traced(breaks)
    with (
        CompiledModule(model, regions="whole", backend=backend),
        CompiledModule(model.head, backend="eager") as handle,
    ):
        model(ROWS)
        assert handle.status == {"": expected}


def test_what_torch_alone_compiled_is_left_open():
    """Nothing tells the handle of it, so that it does not say that nobody calls it."""
    model = Net()
    with CompiledModule(model.head, backend="eager") as handle:
        torch.compile(model, backend="eager")(tokens())
        assert "unless within what torch.compile(...) has compiled" in str(handle.report())


# -- What answers to any name ----------------------------------------------------------------------


class Proxy(nn.Module):
    """Has whatever it is asked for."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None

    def forward(self, x):
        return self.line(x)


class Answering:
    def __getattr__(self, name):
        return 3

    def __call__(self, x):
        return x * 2


def test_what_answers_to_any_name_is_not_compiled_already(graphs):
    model = Proxy()
    with CompiledModule(model, backend=graphs) as handle:
        model(ROWS)
        assert handle.status == {"": "compiled"}
    with compile_callable(Answering(), CompileOptions(backend=graphs)) as function:
        assert function(ROWS).tolist() == (ROWS * 2).tolist()
        assert function.status == "compiled"
        assert "Answering" in str(function.report())
