"""A compilation in the middle of a run is warned of once, with what changed."""

from __future__ import annotations

import logging
import time
from functools import partial

import pytest
import torch
from torch import nn

from torchfast import CompileOptions, Plan, Trainer
from torchfast.compiler import CompiledModule
from torchfast.compiler.account import STEADY_AFTER
from torchfast.compiler.dynamic_dimensions import DynamicDimension, argument, mark_dimension
from torchfast.compiler.record import CompileRecord
from torchfast.compiler.steady_watch import SteadyWatch
from torchfast.transforms import ModelTransforms

LOGGER = "torchfast.compiler.steady_watch"


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def record():
    with CompileRecord() as record:
        yield record


def marked(arguments, source, dimension):
    """Mark a dimension of what a recompile names; whether there was any."""
    tensor = argument(arguments, source)
    return tensor is not None and mark_dimension(tensor, dimension)


@pytest.fixture
def warnings_given(caplog):
    """The messages of the watch, as a list that grows."""
    caplog.set_level(logging.WARNING, logger=LOGGER)

    def given():
        return [r.getMessage() for r in caplog.records if r.name == LOGGER]

    return given


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch):
        return self.dropout(self.linear(batch["ids"]))


def batch_of(size):
    return {"ids": torch.ones(size, 4)}


def compiled(function, **options):
    return torch.compile(function, backend="eager", **options)


def test_a_recompile_is_warned_of_once(record, warnings_given):
    model = compiled(Model(), dynamic=False)
    model(batch_of(8))
    watch = SteadyWatch(record)
    watch.begin()
    for size in (8, 8, 5, 8, 6, 7):
        model(batch_of(size))
        watch.check()
    [message] = warnings_given()
    assert "dimension 0 of batch['ids'] changed from 8 to 5" in message
    assert "mark_dynamic" in message  # the remedy
    assert "forward" in message
    assert len(watch.recompiles) == 3


def test_check_returns_what_is_new(record):
    model = compiled(Model(), dynamic=False)
    model(batch_of(8))
    watch = SteadyWatch(record)
    watch.begin()
    assert watch.check() == ()
    model(batch_of(5))
    [event] = watch.check()
    assert event.change.after == "5"
    assert watch.check() == ()


def test_a_steady_run_is_silent(record, warnings_given):
    model = compiled(Model())
    model(batch_of(8))
    watch = SteadyWatch(record)
    watch.begin()
    for _ in range(5):
        model(batch_of(8))
        assert watch.check() == ()
    assert warnings_given() == []
    assert watch.recompiles == ()


def test_what_comes_before_the_steady_state_is_not_warned_of(record, warnings_given):
    model = compiled(Model(), dynamic=False)
    watch = SteadyWatch(record)
    assert not watch.is_steady
    for size in (8, 5, 6):
        model(batch_of(size))
        watch.check()
    watch.begin()
    assert watch.is_steady
    model(batch_of(6))
    watch.check()
    assert warnings_given() == []


def test_a_summary_in_between_hides_nothing(record, warnings_given):
    model = compiled(Model())
    model(batch_of(8))
    watch = SteadyWatch(record)
    watch.begin()
    model(batch_of(5))
    record.summary()
    assert not record.has_news()
    watch.check()
    assert len(warnings_given()) == 1


def test_something_new_is_no_recompile(record, warnings_given):
    model = compiled(Model())
    model(batch_of(8))
    watch = SteadyWatch(record)
    watch.begin()
    compiled(lambda x: x + 1)(torch.ones(2))
    watch.check()
    assert warnings_given() == []


def test_the_first_evaluation_is_not_warned_of(record, warnings_given):
    first, second = nn.Dropout(), nn.Dropout()
    function = compiled(lambda x: first(x) + second(x))
    function(torch.ones(2))
    watch = SteadyWatch(record)
    watch.begin()
    first.eval()
    function(torch.ones(2))
    watch.check()
    assert [e.change.kind for e in watch.recompiles] == ["training"]
    assert warnings_given() == []
    # A mode that keeps changing is.
    second.eval()
    function(torch.ones(2))
    watch.check()
    assert [e.change.kind for e in watch.recompiles] == ["training"] * 2
    assert len(warnings_given()) == 1


def test_the_limit_is_warned_of(record, warnings_given):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def forward(self, x):
            self.steps += 1
            return x * self.steps

    watch = SteadyWatch(record)
    watch.begin()
    with torch._dynamo.config.patch(recompile_limit=3):
        function = compiled(Counting())
        for _ in range(8):
            function(torch.ones(2))
            watch.check()
    again, limit = warnings_given()
    assert "self.steps changed from 0 to 1" in again
    assert "compiles a function no more" in limit
    assert "recompile_limit (3)" in limit
    assert "register_buffer" in limit


def test_a_check_costs_next_to_nothing(record):
    model = compiled(Model())
    model(batch_of(8))
    watch = SteadyWatch(record)
    watch.begin()

    def seconds_per_check():
        began = time.perf_counter()
        for _ in range(1000):
            watch.check()
        return (time.perf_counter() - began) / 1000

    # A step of a model takes milliseconds; the machine of the test may be busy.
    assert min(seconds_per_check() for _ in range(5)) < 20e-6


# --- dynamic dimensions -------------------------------------------------------------------------


def test_a_dimension_that_changed_is_marked_in_the_next_batch(record, warnings_given):
    """With its sizes fixed, torch compiles again at each size; with the mark it does so once."""

    def run(mark):
        torch._dynamo.reset()
        model = compiled(Model())
        watch = SteadyWatch(record, mark_dynamic=True)
        # The second size is compiled as a fixed one, as in a run that met it long ago.
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            model(batch_of(8))
            watch.begin()
            model(batch_of(5))
            watch.check()
            for size in (6, 7, 9):
                batch = batch_of(size)
                if mark:
                    assert watch.mark({"batch": batch}) == 1
                model(batch)
                watch.check()
        return watch

    watch = run(mark=True)
    assert watch.dimensions == (DynamicDimension("batch['ids']", 0),)
    assert len(watch.recompiles) == 2  # at 5, and once with the mark
    assert "marked as dynamic" in warnings_given()[0]
    assert "mark_dynamic" not in warnings_given()[0]  # which is on already
    assert len(run(mark=False).recompiles) == 4


def graphs_of(model, shapes, **options):
    """Return how many graphs are compiled of a model whose sizes change once it is steady."""
    torch._dynamo.reset()
    with CompiledModule(model, backend="eager", **options) as handle:
        for shape in shapes:
            for _ in range(STEADY_AFTER):
                model(torch.ones(shape)).sum().backward()  # a mark stays on its tensor
                handle.after_step()
        return handle.report().counters["graphs"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_torch_makes_dynamic_by_itself_is_not_compiled_again_for_a_mark(dynamic, caplog):
    shapes = [(size, 4) for size in (16, 12, 10, 9)]
    marked, plain = (
        graphs_of(nn.Linear(4, 4), shapes, dynamic=dynamic, mark_dynamic=mark)
        for mark in (True, False)
    )
    assert marked == plain == (2 if dynamic is None else 1)
    told = [r.getMessage() for r in caplog.records if "in the middle of the run" in r.getMessage()]
    assert len(told) == (2 if dynamic is None else 0)
    assert all("torch has made it dynamic" in text for text in told[:1])  # with the mark


class Bounded(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def two_kinds():
    return nn.Sequential(*(make(4, 4) for make in (nn.Linear, Bounded) for _ in range(2)))


@pytest.mark.parametrize(
    ("make", "regions", "sizes"),
    [
        (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), ("*",), (16, 12, 10, 9)),
        (two_kinds, ("*",), (16, 12, 10, 9)),
        (lambda: nn.Linear(4, 4), "whole", (16, 12, 1, 10, 9)),
        (lambda: nn.Linear(4, 4), "whole", (16, 1, 10, 9)),
    ],
    ids=["blocks", "two kinds", "then one", "one first"],
)
def test_a_mark_costs_no_compile_where_torch_needs_none(make, regions, sizes):
    shapes = [(size, 4) for size in sizes]
    marked, plain = (
        graphs_of(make(), shapes, regions=regions, mark_dynamic=mark) for mark in (True, False)
    )
    assert marked == plain


def test_a_length_is_marked_in_blocks_of_which_the_first_needs_no_gradient(warnings_given):
    """To the version for that block any later one differs by ``requires_grad`` as well."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    shapes = [(2, length, 4) for length in (16, 12, 10, 9)]
    marked, plain = (
        graphs_of(model, shapes, regions=("*",), dynamic=False, mark_dynamic=mark)
        for mark in (True, False)
    )
    assert marked < plain == 8
    marked, not_marked = warnings_given()
    for told in (marked, not_marked):
        assert "dimension 1 of input changed from 16 to 12" in told
    assert "marked as dynamic from now on" in marked
    assert "mark_dynamic" not in marked  # which is on already
    assert "mark_dynamic" in not_marked


RESHAPED = {"regions": "whole", "backend": "eager", "dynamic": False}


def reshaping():
    """A model that shares its code with any other one, and is compiled for each size."""
    return nn.Sequential(nn.Flatten(), nn.ReLU())


def stepped(handle, model, *sizes):
    for size in sizes:
        handle.before_step()
        model(torch.ones(2, size))
        handle.after_step()


def test_what_another_model_compiles_is_not_this_ones(warnings_given):
    """Two that train in one process, by turns: what the second's first steps compile is its own."""
    first, second = reshaping(), reshaping()
    with CompiledModule(first, **RESHAPED) as one:
        stepped(one, first, *STEADY_AFTER * [8])
        with CompiledModule(second, **RESHAPED) as two:
            stepped(two, second, 7, 6)  # it has the first one's code, which is compiled again
            stepped(one, first, *9 * [8])
            assert warnings_given() == []
            stepped(one, first, 5)
            assert len(warnings_given()) == 1
            stepped(two, second, *STEADY_AFTER * [6], 4)
            assert len(warnings_given()) == 2


def test_what_was_compiled_before_another_came_is_told(warnings_given):
    first, second = reshaping(), nn.Sequential(nn.Linear(8, 8))
    with CompiledModule(first, **RESHAPED) as one:
        stepped(one, first, *STEADY_AFTER * [8], 8, 5)  # and nobody has looked
        assert warnings_given() == []
        with CompiledModule(second, **RESHAPED) as two:
            stepped(two, second, 8, 8)
            assert len(warnings_given()) == 1


def test_what_is_compiled_between_steps_is_told(warnings_given):
    """As by an evaluation, whose model nobody knows, with another one in its first steps."""
    first, second = reshaping(), nn.Sequential(nn.Linear(8, 8))
    with CompiledModule(first, **RESHAPED) as one, CompiledModule(second, **RESHAPED) as two:
        stepped(two, second, 8)
        stepped(one, first, *(STEADY_AFTER + 1) * [8])
        first(torch.ones(2, 5))
        stepped(two, second, 8)
        assert len(warnings_given()) == 1


def test_a_look_in_the_first_steps_is_enough(monkeypatch):
    looks = []
    take = SteadyWatch._take
    monkeypatch.setattr(SteadyWatch, "_take", lambda watch: looks.append(watch) or take(watch))
    first, second = reshaping(), nn.Sequential(nn.Linear(8, 8))
    with CompiledModule(first, **RESHAPED) as one, CompiledModule(second, **RESHAPED) as two:
        stepped(one, first, 8)
        stepped(two, second, 8)
        looks.clear()
        stepped(one, first, *5 * [8])
        stepped(two, second, *5 * [8])
    assert looks == []


def test_what_is_measured_before_a_step_is_nobodys_to_be_warned_of(warnings_given, monkeypatch):
    """Float8's recipes, say, which are compiled one after another to be timed."""
    options = CompileOptions(regions="whole", backend="eager", dynamic=False)
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

    def made():
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
        make = partial(torch.optim.SGD, lr=0.1)
        return Trainer(model, make, lambda m, x: m(x).sum(), Plan(compile=options))

    def measure(self, number, forward):
        if number == 1:
            double(torch.ones(3))
            double(torch.ones(4))

    with made() as one, monkeypatch.context() as patched:
        for _ in range(STEADY_AFTER):
            one.step(torch.ones(2, 4))
        patched.setattr(ModelTransforms, "looks_at_batches", True)
        patched.setattr(ModelTransforms, "before_step", measure)
        with made() as two:
            for _ in range(STEADY_AFTER):
                two.step(torch.ones(2, 4))
                one.step(torch.ones(2, 4))
            assert warnings_given() == []
            double(torch.ones(5))
            one.step(torch.ones(2, 4))
            assert len(warnings_given()) == 2  # outside of a step it may be either's


def test_nothing_is_marked_unasked(record, warnings_given):
    model = compiled(Model())
    model(batch_of(8))
    watch = SteadyWatch(record)
    watch.begin()
    model(batch_of(5))
    watch.check()
    assert watch.dimensions == ()
    assert watch.mark({"batch": batch_of(6)}) == 0
    assert "marked as dynamic" not in warnings_given()[0]


def test_a_single_sample_is_not_said_to_be_marked(record, warnings_given):
    """Torch compiles a size of 1 apart, whatever is marked."""
    model = compiled(Model(), dynamic=False)
    model(batch_of(8))
    watch = SteadyWatch(record, mark_dynamic=True)
    watch.begin()
    model(batch_of(1))
    watch.check()
    assert watch.mark({"batch": batch_of(1)}) == 0
    [message] = warnings_given()
    assert "marked as dynamic" not in message
    assert "pad or drop the odd batch" in message.lower()


def test_only_sizes_are_marked(record):
    function = compiled(lambda x: x * 2)
    watch = SteadyWatch(record, mark_dynamic=True)
    function(torch.ones(4))
    watch.begin()
    function(torch.ones(4).double())
    watch.check()
    assert watch.dimensions == ()


class Pair:
    def __init__(self, first):
        self.first = first


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        ({"x": torch.ones(3, 4)}, "x"),
        ({"batch": {"ids": torch.ones(3, 4)}}, "batch['ids']"),
        ({"batch": (0, [torch.ones(3, 4)])}, "batch[1][0]"),
        ({"args": ({"a": {1: torch.ones(3, 4)}},)}, "args[0]['a'][1]"),
        ({"batch": Pair([torch.ones(3, 4)])}, "batch.first[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_is_found_by_its_source(arguments, source):
    assert marked(arguments, source, 1)
    tensor = eval(source, {}, arguments)
    assert tensor._dynamo_weak_dynamic_indices == {1}


@pytest.mark.parametrize(
    ("source", "dimension"),
    [
        ("batch['other']", 0),
        ("batch['ids']", 2),
        ("batch['ids']", -1),
        ("batch['name']", 0),
        ("batch.ids", 0),
        ("self.x", 0),
        ("batch['ids'].size()", 0),
        ("grad mode", 0),
        ("", 0),
    ],
)
def test_what_is_not_there_is_not_marked(source, dimension):
    batch = {"ids": torch.ones(3, 4), "name": "a"}
    assert not marked({"batch": batch}, source, dimension)
    assert not hasattr(batch["ids"], "_dynamo_weak_dynamic_indices")


@pytest.mark.parametrize("size", [0, 1])
def test_a_size_that_torch_compiles_apart_is_not_marked(size):
    tensor = torch.ones(size, 4)
    assert not marked({"x": tensor}, "x", 0)
    assert not hasattr(tensor, "_dynamo_weak_dynamic_indices")


# --- arguments ----------------------------------------------------------------------------------


def test_bad_arguments_are_refused(record):
    with pytest.raises(TypeError, match="record must be a CompileRecord, got NoneType"):
        SteadyWatch(None)
    with pytest.raises(TypeError, match="mark_dynamic must be True or False"):
        SteadyWatch(record, mark_dynamic=1)
    with pytest.raises(TypeError, match="did you mean 'mark_dynamic'"):
        SteadyWatch(record, mark_dynamics=True)
