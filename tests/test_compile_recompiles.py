"""Why torch compiled again, or no more, is noted in the user's words."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from compiled_functions import Block, compiled, double
from torchfast.compiler import CompiledModule, CompileOptions, compile_callable
from torchfast.compiler.nearest import _RANKS
from torchfast.compiler.recompiles import _REMEDIES, read_guard, readable
from torchfast.compiler.record import CompileRecord

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def record():
    with CompileRecord() as record:
        yield record


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return x * self.steps


def only_change(record):
    [event] = record.summary().recompiles
    return event.change


# --- recompiles ---------------------------------------------------------------------------------


def test_a_size_is_named_with_argument_and_dimension(record):
    model = compiled(Block())
    model({"ids": torch.ones(8, 4)})
    model({"ids": torch.ones(5, 4)})
    change = only_change(record)
    assert change[:5] == ("size", "batch['ids']", 0, "8", "5")
    assert str(change) == "dimension 0 of batch['ids'] changed from 8 to 5"
    assert "mark_dynamic" in change.remedy


def test_a_size_of_one_is_said_to_be_compiled_apart(record):
    function = compiled(double)
    for size in (4, 5, 1):
        function(torch.ones(size))
    change = record.summary().recompiles[-1].change
    assert change[:5] == ("size", "x", 0, "2 or more", "0 or 1")
    assert "always" in change.remedy


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.ones(2), torch.ones(2).double(), ("dtype", "x", None, "float32", "float64")),
        (torch.ones(2), torch.ones(2, 2), ("rank", "x", None, "1", "2")),
        (
            torch.ones(2),
            torch.ones(2, requires_grad=True),
            ("requires_grad", "x", None, "False", "True"),
        ),
        (torch.ones(3, 2), torch.ones(2, 3).t(), ("stride", "x", 0, "2", "1")),
    ],
    ids=["dtype", "rank", "requires_grad", "stride"],
)
def test_another_property_of_a_tensor_is_named(record, first, second, expected):
    function = compiled(double, dynamic=False)
    function(first)
    function(second)
    change = only_change(record)
    assert change[:5] == expected
    kind, source, dimension, before, after = expected
    what = source if dimension is None else f"dimension {dimension} of {source}"
    assert str(change) == f"the {kind} of {what} changed from {before} to {after}"


def test_a_tensor_of_inference_mode_is_not_taken_for_one_of_another_device():
    with CompileRecord() as record:
        function = torch.compile(lambda x: x * 2, backend="eager")
        with torch.inference_mode():
            made = torch.ones(4)
        with torch.no_grad():
            function(made)
            function(torch.ones(4))
    change = record.summary().recompiles[0].change
    assert (change.kind, change.source) == ("inference mode", "x")
    assert (change.before, change.after) == ("on", "off")


def test_a_python_number_is_named(record):
    function = compiled(lambda x, n: x * n, dynamic=False)
    for number in (3, 8):
        function(torch.ones(2), number)
    change = only_change(record)
    assert change[:5] == ("value", "n", None, "3", "8")
    assert change.at.startswith(__file__)


def test_the_users_line_is_named_where_a_region_relies_on_something():
    class Scaled(nn.Module):
        def forward(self, x, n):
            return x * n

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Scaled()

        def forward(self, x, n):
            return self.inner(x, n)

    model = Outer()
    with CompiledModule(model, backend="eager", dynamic=False), CompileRecord() as record:
        for number in (3, 8):
            model(torch.ones(2), number)
    line = Scaled.forward.__code__.co_firstlineno + 1
    assert only_change(record).at == f"{__file__}:{line}"


def test_a_string_is_named(record):
    function = compiled(lambda x, way: x * 2 if way == "up" else x / 2)
    for way in ("up", "down"):
        function(torch.ones(2), way)
    assert only_change(record)[:5] == ("value", "way", None, "'up'", "'down'")


def test_train_and_eval_are_named(record):
    model = Block()
    function = compiled(model)
    function({"ids": torch.ones(2, 4)})
    model.eval()
    function({"ids": torch.ones(2, 4)})
    assert only_change(record)[:5] == ("training", "self.dropout", None, "train", "eval")


def test_grad_mode_is_named(record):
    function = compiled(double)
    function(torch.ones(2))
    with torch.no_grad():
        function(torch.ones(2))
    assert only_change(record)[:5] == ("global state", "grad mode", None, "on", "off")


def test_autocast_is_named(record):
    function = compiled(double)
    function(torch.ones(2))
    with torch.autocast("cpu"):
        function(torch.ones(2))
    change = only_change(record)
    assert change.kind == "global state"
    assert "autocast" in change.source


def test_one_tensor_given_twice_is_named(record):
    function = compiled(lambda x, y: x + y)
    tensor = torch.ones(2)
    function(tensor, torch.ones(2))
    function(tensor, tensor)
    assert only_change(record)[:3] == ("aliasing", "x, y", None)


def test_another_type_is_named(record):
    function = compiled(lambda pair: pair[0] * 2)
    function((torch.ones(2),))
    function([torch.ones(2)])
    assert only_change(record)[:4] == ("type", "pair", None, "tuple")


def test_calls_that_fit_compile_nothing(record):
    model = Block()
    function = compiled(model)
    for _ in range(4):
        function({"ids": torch.ones(2, 4)})
    assert record.summary().recompiles == ()
    assert record.summary().num_graphs == 1


# --- several versions, each of which names something else -----------------------------------------


class Deep(nn.Module):
    """Blocks that share their code; the input of the first needs no gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.run = compiled(lambda block, x: block(x).relu(), dynamic=False)

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


def test_a_size_is_named_where_the_first_block_differs_by_its_gradient(record):
    model = Deep()
    for length in (16, 12, 10):
        model(torch.ones(2, length, 4))
    changes = [event.change[:5] for event in record.summary().recompiles]
    assert changes == [
        ("requires_grad", "x", None, "False", "True"),  # of the second block, at the first length
        ("size", "x", 1, "16", "12"),
        ("size", "x", 1, "16", "12"),
        ("size", "x", 1, "12", "10"),
        ("size", "x", 1, "12", "10"),
    ]
    assert all("size mismatch" in event.guard for event in record.summary().recompiles[1:])


def test_a_size_is_named_at_the_limit_too(record):
    with torch._dynamo.config.patch(recompile_limit=4):
        model = Deep()
        for length in (16, 12, 10):
            model(torch.ones(2, length, 4))
    assert record.summary().limits[0].change[:5] == ("size", "x", 1, "12", "10")


def test_what_is_named_is_new_to_every_version(record):
    """A size that one version takes is none, though others were compiled for another size."""
    function = compiled(lambda x, way, n: x * n if way == "up" else x / 2)
    for size, way, n in ((8, "up", 3), (5, "up", 3), (6, "down", 3), (7, "up", 4)):
        function(torch.ones(size), way, n)
    changes = [event.change[:4] for event in record.summary().recompiles]
    assert changes == [
        ("size", "x", 0, "8"),
        ("value", "way", None, "'up'"),
        ("value", "n", None, "3"),
    ]


def test_two_versions_that_each_know_one_half_are_told_by_the_size(record):
    function = compiled(lambda x, way: x * 2 if way == "up" else x / 2, dynamic=False)
    for size, way in ((8, "up"), (5, "up"), (8, "down"), (5, "down")):
        function(torch.ones(size), way)
    last = record.summary().recompiles[-1].change
    assert last[:5] == ("size", "x", 0, "8", "5")


def test_a_version_of_another_backend_is_no_cause(record):
    first, second = (
        torch.compile(double, backend=lambda graph, inputs: graph.forward, dynamic=False)
        for _ in range(2)
    )
    first(torch.ones(8))
    second(torch.ones(5))
    second(torch.ones(8))
    assert record.summary().recompiles[-1].change[:5] == ("size", "x", 0, "5", "8")
    first(torch.ones(5))
    assert record.summary().recompiles[-1].change[:5] == ("size", "x", 0, "8", "5")


def test_each_kind_of_change_has_a_rank():
    assert set(_RANKS) == {*_REMEDIES} - {"single"}  # of which the kind is a size


# --- the recompile limit ------------------------------------------------------------------------


@pytest.fixture
def few_versions():
    with torch._dynamo.config.patch(recompile_limit=3):
        yield


@pytest.fixture
def no_warnings_of_torch(caplog):
    # Whether the limit is seen must not hang on whether torch logs it.
    logger = logging.getLogger("torch._dynamo.convert_frame")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_a_step_counter_and_the_limit_are_named(record):
    model = Counting()
    function = compiled(model)
    for _ in range(6):
        function(torch.ones(2))
    summary = record.summary()
    assert [e.change[:5] for e in summary.recompiles] == [
        ("counter", "self.steps", None, "0", "1"),
        ("counter", "self.steps", None, "1", "2"),
    ]
    [limit] = summary.limits
    assert limit.code.name == "forward"
    assert limit.code.file == __file__
    assert limit.limit == "recompile_limit (3)"
    assert limit.change[:4] == ("counter", "self.steps", None, "2")
    assert summary.num_graphs == 3
    assert summary.given_up == ()
    assert "runs eagerly since" in str(summary)
    assert "register_buffer" in str(limit)
    assert "stepped aside" in [d.outcome for d in summary.decisions()]
    assert summary.counters()["recompile_limits"] == 1


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_below_the_limit_there_is_none(record):
    function = compiled(Counting())
    for _ in range(3):
        function(torch.ones(2))
    assert record.summary().limits == ()
    assert len(record.summary().recompiles) == 2


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_the_limit_is_named_where_the_first_versions_are_older_than_the_record():
    function = compiled(Counting())
    for _ in range(3):
        function(torch.ones(2))
    with CompileRecord() as record:
        function(torch.ones(2))
    [limit] = record.summary().limits
    assert limit.code.name == "forward"


@pytest.mark.usefixtures("few_versions", "no_warnings_of_torch")
def test_the_limit_under_fullgraph_is_noted_too(record):
    function = compiled(Counting(), fullgraph=True)
    for _ in range(3):
        function(torch.ones(2))
    with pytest.raises(Exception, match="fullgraph"):
        function(torch.ones(2))
    assert len(record.summary().limits) == 1


# --- reading guards ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        (
            "0/0: tensor 'a[0]['b'][1]' size mismatch at index 2. expected 4, actual 5",
            ("size", "a[0]['b'][1]", 2, "4", "5"),
        ),
        (
            "tensor 'self._modules['l']._parameters['weight']' requires_grad mismatch. "
            "expected requires_grad=1. Guard failed on a parameter, consider",
            ("requires_grad", "self.l.weight", None, "True", "False"),
        ),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU), actual "
            "DispatchKeySet(CUDA)",
            ("device", "x", None, "DispatchKeySet(CPU)", "DispatchKeySet(CUDA)"),
        ),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, "
            "BackendSelect), actual DispatchKeySet(CPU, BackendSelect, ADInplaceOrView, "
            "AutogradCPU)",
            ("inference mode", "x", None, "on", "off"),
        ),
        (
            "0/0: tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, "
            "BackendSelect, ADInplaceOrView, AutogradCPU), actual DispatchKeySet(CUDA, "
            "BackendSelect)",
            (
                "device",
                "x",
                None,
                "DispatchKeySet(CPU, BackendSelect, ADInplaceOrView, AutogradCPU)",
                "DispatchKeySet(CUDA, BackendSelect)",
            ),
        ),
        ("0/2: L['n'] == '# 3'  # if n:  # a.py:1 in f", ("value", "n", None, "'# 3'", None)),
        ("0/2: len(xs) == 3", ("structure", "xs", None, "3 entries", None)),
        ("not ___dict_contains('m', batch)", ("structure", "batch['m']", None, "absent", "there")),
        ("___check_obj_id(self.act, 12)", ("object", "self.act", None, None, None)),
        (
            "hasattr(x, '_dynamo_dynamic_indices') == False",
            ("dynamic marking", "x", None, None, None),
        ),
        (
            "0/0: _has_dynamo_dim_marking is present on runtime tensor but was absent at compile",
            ("dynamic marking", "the dimensions marked as dynamic of a tensor", None, None, None),
        ),
        ("something else", ("other", "something else", None, None, None)),
        ("", ("other", "", None, None, None)),
    ],
)
def test_a_guard_is_read(guard, expected):
    change = read_guard(guard)
    assert change[:5] == expected
    assert change.remedy


def test_a_source_is_written_as_the_user_would():
    assert readable("L['self']._modules['layers']._modules['0'].p") == "self.layers[0].p"
    assert readable("L['self'].__dict__['_modules']['l']") == "self.l"
    assert readable("G['LIMIT']") == "LIMIT"


class TakesABatch(nn.Module):
    def forward(self, batch, *more):
        return batch["ids"].sum() + sum(tensor.sum() for tensor in more)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            ({"ids": torch.ones(2)}, torch.ones(3)),
            "dimension 0 of batch['ids'] changed from 8 to 2",
        ),
        (({"ids": torch.ones(8)}, torch.ones(5)), "dimension 0 of args[1] changed from 3 to 5"),
    ],
)
def test_arguments_are_called_as_the_forward_calls_them(second, words):
    model = TakesABatch()
    with CompiledModule(model, backend="eager"), CompileRecord() as record:
        for arguments in (({"ids": torch.ones(8)}, torch.ones(3)), second):
            model(*arguments)
    (event,) = record.summary().recompiles
    assert event.cause == f"TakesABatch: {words}"


def test_arguments_are_called_as_the_loss_function_calls_them():
    def loss_fn(model, batch):
        return model(batch[0]).sum() * batch[1]["scale"]

    with compile_callable(loss_fn, CompileOptions(backend="eager")) as compiled:
        with CompileRecord() as record:
            for scale in (2, 3):
                compiled(nn.Identity(), (torch.ones(8), {"scale": scale}))
        (event,) = record.summary().recompiles
        assert event.cause.startswith("loss_fn: batch[1]['scale'] is no longer 2 (used at ")
    compiled = compile_callable(torch.sin, CompileOptions(backend="eager"))  # has no signature
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin())
    compiled.close()
