"""Which calls share a graph, how many graphs there are, and what comes back of a call."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import optim
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from containers import CONTAINERS
from models import BATCHES, DropoutNet, make_batches
from tape import Twins, counts, reasons
from torchfast import CompileOptions, CUDAGraphOptions, MicroBatches, Plan, Trainer
from torchfast.graphs import CUDAGraphStep
from torchfast.graphs.signature import describe, shapes
from torchfast.graphs.static_inputs import StaticInputs

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
Pair = namedtuple("Pair", "a b")
Other = namedtuple("Other", "a b")


@dataclass
class Sample:
    a: object
    b: object = None


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def t(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def same(a, b):
    return describe(a).key == describe(b).key


# --- the signature of a call ----------------------------------------------------------------------

X = t(2, 3)
ALIKE = {
    "values of tensors": (torch.zeros(2), torch.ones(2)),
    "tuples": ((t(2), t(3)), (t(2), t(3))),
    "dicts": ({"a": t(2), "n": 3}, {"a": t(2), "n": 3}),
    "named tuples": (Pair(t(2), 1), Pair(t(2), 1)),
    "dataclasses": (Sample(t(2), "x"), Sample(t(2), "x")),
    "one tensor twice": ((X, X), (X + 1,) * 2),
    "enums": (Color.RED, Color.RED),
    "numpy scalars": (np.float32(2.0), np.float32(2.0)),
    "strings": (("a", t(1)), ("a", t(1))),
    "ranges and sizes": ((range(3), torch.Size([2])), (range(3), torch.Size([2]))),
    "packed": (pack_sequence([t(3), t(2)]), pack_sequence([t(3) + 1, t(2)])),
    "no tensors": ((), ()),
}
DIFFERENT = {
    "shapes": (t(2), t(3)),
    "dtypes": (t(2), t(2, dtype=torch.float64)),
    "strides": (t(2, 3), t(3, 2).T),
    "requires_grad": (t(2), t(2).requires_grad_()),
    "a tuple and a list": ((t(2),), [t(2)]),
    "nesting": ((t(2), (t(2),)), ((t(2), t(2)),)),
    "two named tuples": (Pair(t(2), 1), Other(t(2), 1)),
    "a dict's keys": ({"a": t(2)}, {"b": t(2)}),
    "a dict's order": ({"a": t(2), "b": t(2)}, OrderedDict(b=t(2), a=t(2))),
    "a number": ((t(2), 1.0), (t(2), 2.0)),
    "an int and a float": (1, 1.0),
    "True and 1": (True, 1),
    "None and 0": (None, 0),
    "enums": (Color.RED, Color.BLUE),
    "objects": (object(), object()),
    "numpy scalars": (np.float32(2.0), np.float32(3.0)),
    "dataclass fields": (Sample(t(2), 1), Sample(t(2), 2)),
    "one tensor twice and two alike": ((X, X), (X, X + 1)),
    "which of two is twice": ((X, X + 1, X), ((y := t(2, 3)) + 1, y, y)),
    "a group's size": ((t(2),), (t(2), t(2))),
    "packed lengths": (pack_sequence([t(3), t(2)]), pack_sequence([t(4), t(1)])),
    "packed order": (
        pack_padded_sequence(t(3, 2), [3, 2], enforce_sorted=True),
        pack_padded_sequence(t(3, 2), [3, 2], enforce_sorted=False),
    ),
    "a tensor and its absence": ((t(2), None), (t(2), t(2))),
}


@pytest.mark.parametrize("name", ALIKE)
def test_calls_share_a_graph(name):
    assert same(*ALIKE[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_do_not_share_a_graph(name):
    assert not same(*DIFFERENT[name])


def test_each_tensor_is_listed_once_and_in_order():
    a, b = t(2), t(3)
    assert [id(x) for x in describe(((a, {"k": b}), [a])).tensors] == [id(a), id(b)]


def test_a_key_in_words():
    key = describe((t(16, 256, dtype=torch.int64), 3, t(), {"m": t(2, dtype=torch.bool)})).key
    assert shapes(key) == "16x256 int64, scalar float32, 2 bool"
    assert shapes(describe((1, "a")).key) == "no tensors"


def test_static_inputs_keep_structure_strides_and_what_is_one_tensor():
    x, y = t(3, 2).T, torch.arange(4.0)
    given = Sample({"x": x, "again": x}, [y, "name", None])
    call = describe(given)
    static = StaticInputs(given, call.tensors, torch.device("cpu"))
    static.fill(call.tensors)
    own = static.inputs
    assert type(own) is Sample
    assert own.a["x"] is own.a["again"]
    assert own.a["x"].stride() == x.stride()
    assert own.b[1:] == ["name", None]
    assert own.b[0] is not y
    assert torch.equal(own.b[0], y)


WIDE = torch.arange(8 * 33.0).view(8, 33)
STRIDED = {
    "all columns but the last": WIDE[:, :-1],
    "all columns but the first": WIDE[:, 1:],
    "every second column": WIDE[:, ::2],
    "transposed, with gaps": WIDE.T[3:9],
    "repeated rows": torch.arange(4).expand(3, 4),
    "repeated columns": torch.arange(3).view(3, 1).expand(3, 5),
    "one value everywhere": torch.tensor(1.0).expand(2, 2),
    "with a gradient": WIDE[:, :3].clone().requires_grad_()[:, :2].detach().requires_grad_(),
    "repeated, with a gradient": torch.ones(3).expand(2, 3).requires_grad_(),
    "channels last, with gaps": torch.ones(2, 3, 4, 4).contiguous(
        memory_format=torch.channels_last
    )[:, :2],
    "no elements": torch.empty(3, 0).expand(3, 0),
    "one row of many": WIDE[:1, :5],
}


@pytest.mark.parametrize("name", STRIDED)
def test_static_inputs_have_the_strides_of_views(name):
    given = STRIDED[name]
    call = describe((given,))
    static = StaticInputs((given,), call.tensors, torch.device("cpu"))
    static.fill(call.tensors)
    (own,) = static.inputs
    assert own.stride() == given.stride()
    assert torch.equal(own, given)
    assert own.requires_grad == given.requires_grad
    assert own.is_leaf
    assert describe(static.inputs).key == call.key
    assert own.untyped_storage().data_ptr() != given.untyped_storage().data_ptr() or not own.numel()


def test_static_inputs_whose_elements_overlap_or_lie_far_apart_are_dense():
    far_apart = torch.empty(4, 10_000_000)[:, :4].fill_(2.0)
    for given in (torch.arange(8.0).unfold(0, 4, 2), far_apart):
        call = describe((given,))
        static = StaticInputs((given,), call.tensors, torch.device("cpu"))
        static.fill(call.tensors)
        (own,) = static.inputs
        assert own.is_contiguous()
        assert torch.equal(own, given)
        assert own.untyped_storage().nbytes() == given.numel() * given.itemsize


def test_what_was_compiled_for_a_view_is_not_compiled_again_for_the_graphs_copy(fresh_dynamo):
    embed = torch.nn.Embedding(48, 48)
    plan = Plan(compile=CompileOptions(backend="eager"), cuda_graph=True)
    trainer = Trainer(
        embed,
        ADAMW,
        lambda m, b: torch.nn.functional.cross_entropy(m(b[0]).mT, b[1]),
        plan,
    )
    for number in range(8):
        tokens = (torch.arange(8 * 33).view(8, 33) + number) % 48
        trainer.step((tokens[:, :-1], tokens[:, 1:]))
    assert counts(trainer)[:3] == (1, 5, 3)
    # The check of the graph against eager steps gives the graph's own memory to the compiled code.
    counters = trainer.report().counters
    assert counters["compile_graphs"] == 1
    assert counters.get("compile_recompiles", 0) == 0


def test_a_sparse_input_runs_as_it_is_and_says_why():
    step = CUDAGraphStep(lambda x: x.to_dense() * 2, device="cpu")
    for _ in range(5):
        assert step(torch.eye(2).to_sparse()).tolist() == [[2.0, 0.0], [0.0, 2.0]]
    assert counts(step)[:3] == (0, 0, 5)
    assert "layout torch.sparse_coo" in reasons(step)[0]


# --- steps on all kinds of calls ------------------------------------------------------------------


@pytest.mark.parametrize("kind", BATCHES)
def test_every_kind_of_batch_is_captured(kind):
    twins = Twins(DropoutNet, ADAMW)
    twins.run(make_batches(8, kind=kind))
    # A dict of models.py has a list of names, which are told by value.
    assert twins.counts == (1, 5, 3, 1)


def test_keywords_and_packed_sequences_reach_the_step():
    layer = torch.nn.Linear(2, 3)

    def fn(x, *, scale, packed: PackedSequence):
        first = packed.batch_sizes.tolist()[0]  # on the host
        return layer(packed.data)[:first] * scale + x.sum()

    step = CUDAGraphStep(fn, state=[layer])
    with torch.no_grad():
        for number in range(12):
            x = torch.randn(2)
            lengths = (3, 2) if number % 2 else (4, 1)
            packed = pack_sequence([torch.randn(n, 2) for n in lengths])
            expected = fn(x, scale=2.0, packed=packed)
            assert torch.equal(step(x, scale=2.0, packed=packed), expected)
    assert counts(step) == (2, 8, 4, 2)


def test_groups_of_each_size_have_a_graph_of_their_own():
    twins = Twins(DropoutNet, ADAMW, accumulate=3)
    batches = make_batches(3)
    for _ in range(4):
        for size in (1, 2, 3):
            twins.step(*batches[:size])
            twins.check()
    assert twins.counts[0] == 3
    assert reasons(twins.captured) == []


def test_a_batch_with_one_tensor_twice_reads_it_once():
    step = CUDAGraphStep(lambda pair: pair[0] * 10 + pair[1], device="cpu")
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        x = torch.full((1,), value)
        assert step((x, x)).tolist() == [11 * value]
    assert counts(step) == (1, 2, 3, 1)


# --- how many graphs ------------------------------------------------------------------------------


def doubled(**options):
    return CUDAGraphStep(lambda x, *_: x * 2, device="cpu", **{"warm_up_steps": 1, **options})


def call(step, size, *rest):
    x = torch.arange(float(size))
    assert torch.equal(step(x, *rest), x * 2)


def test_the_least_recently_used_graph_goes_first():
    step = doubled(max_graphs=2)
    for size in (1, 1, 2, 2):
        call(step, size)
    assert counts(step) == (2, 2, 2, 2)
    call(step, 1)  # now 2 is the oldest
    call(step, 3)
    call(step, 3)
    kept = [d.detail.partition(":")[0] for d in step.report().decisions]
    assert kept == ["1 float32", "3 float32"]
    call(step, 1)
    assert counts(step) == (2, 5, 3, 3)
    call(step, 2)  # known and warm: captured again at once
    assert counts(step) == (2, 6, 3, 4)


def test_new_shapes_may_run_as_they_are():
    step = doubled(new_shapes="eager")
    for size in (4, 4, 4, 3, 3, 4):
        call(step, size)
    assert counts(step) == (1, 3, 3, 1)
    (told,) = reasons(step)
    assert told.startswith("3 float32: other inputs than the first, and new_shapes='eager'")


def test_another_mode_of_the_first_shape_is_no_new_shape():
    model = DropoutNet()
    step = CUDAGraphStep(model, state=[model], new_shapes="eager", warm_up_steps=1)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for is_training in (True, False, True, False):
            model.train(is_training)
            step(x)
            step(x)
    assert counts(step) == (2, 6, 2, 2)


def test_values_that_differ_each_time_are_warned_of_once(caplog):
    step = doubled(max_graphs=2)
    for number in range(40):
        call(step, 2, float(number))
    assert counts(step)[1] == 0
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "an input that is no tensor has another value each time; pass it as a tensor" in warning
    assert warning.endswith("the latest is 16.0 (float)")


def test_shapes_that_differ_each_time_are_warned_of_once(caplog):
    step = doubled(max_graphs=2)
    for size in range(1, 41):
        call(step, size)
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "pad or bucket the batches to fewer shapes, or raise max_graphs" in warning


def test_shapes_that_chase_each_other_out_end_as_they_are():
    step = doubled(max_graphs=2)
    for _ in range(10):
        for size in (1, 2, 3):
            call(step, size)
    graphs, replays, eager, captures = counts(step)
    assert replays + eager == 30
    assert graphs <= 2
    assert captures < 15
    assert any("max_graphs" in reason for reason in reasons(step))


def test_what_is_known_of_kinds_stays_bounded():
    step = doubled(max_graphs=1)
    for number in range(300):
        call(step, 2, number)
    assert len(step._engine.store.entries) < 20


# --- what comes back ------------------------------------------------------------------------------


def test_outputs_are_safe_to_keep_and_detached():
    weight = torch.nn.Linear(2, 2)
    step = CUDAGraphStep(weight, state=[weight])
    inputs = [torch.randn(1, 2) for _ in range(8)]
    kept = [step(x) for x in inputs]
    for x, out in zip(inputs, kept, strict=True):
        assert torch.equal(out, weight(x))
        assert not out.requires_grad
    assert len({out.data_ptr() for out in kept}) == 8
    assert counts(step) == (1, 5, 3, 1)  # the check, too, would not take one for another


def outputs_of(x):
    total = x.sum()
    return {
        "pair": Pair(total, total * 2),
        "sample": Sample(x * 2, [total + 1, None, "word", 3]),
        "same": (total, total),
        "count": x.new_ones((), dtype=torch.int64),
        "none": None,
    }


def test_outputs_of_nested_types_come_back_as_they_are():
    step = CUDAGraphStep(outputs_of, device="cpu")
    for value in range(6):
        x = torch.full((2,), float(value))
        out, expected = step(x), outputs_of(x)
        assert type(out["pair"]) is Pair
        assert type(out["sample"]) is Sample
        assert out["sample"].b[1:] == [None, "word", 3]
        assert out["none"] is None
        assert out["same"][0] is out["same"][1]
        assert describe(out).key == describe(expected).key
        for a, b in zip(describe(out).tensors, describe(expected).tensors, strict=True):
            assert torch.equal(a, b)
    assert counts(step) == (1, 3, 3, 1)


def test_an_output_that_is_state_is_a_copy_of_it():
    total = torch.nn.Module()
    total.register_buffer("value", torch.zeros(1))

    def fn(x):
        total.value.add_(x)
        return total.value

    step = CUDAGraphStep(fn, state=[total])
    assert [step(torch.ones(1)).tolist() for _ in range(6)] == [[n + 1.0] for n in range(6)]
    kept = [step(torch.ones(1)) for _ in range(3)]
    assert [out.tolist() for out in kept] == [[7.0], [8.0], [9.0]]
    assert counts(step) == (1, 6, 3, 1)


def test_a_number_that_comes_back_another_each_time_is_not_frozen():
    calls = []

    def fn(x):
        calls.append(1)
        return x * 2, len(calls)

    step = CUDAGraphStep(fn, device="cpu")
    numbers = [step(torch.ones(1))[1] for _ in range(8)]
    assert numbers == sorted(set(numbers))
    assert counts(step)[1] == 0


def test_an_output_that_is_an_input_is_not_the_graphs_own_memory():
    step = CUDAGraphStep(lambda x: (x, x + 1), device="cpu")
    kept = [step(torch.full((1,), float(n)))[0] for n in range(6)]
    assert [out.tolist() for out in kept] == [[float(n)] for n in range(6)]


def test_a_trainer_keeps_at_most_as_many_graphs_as_it_may():
    plan = Plan(cuda_graph=CUDAGraphOptions(max_graphs=1, warm_up_steps=1))
    trainer = Trainer(DropoutNet(), ADAMW, lambda m, b: m(b[0]).square().mean(), plan, accumulate=2)
    batches = make_batches(2)
    for size in (1, 1, 2, 2, 2):
        trainer.step(MicroBatches(batches[:size]))
    assert counts(trainer) == (1, 3, 2, 2)


@pytest.mark.parametrize("name", CONTAINERS)
def test_any_container_comes_back_as_the_type_it_was(name):
    make, tensor_of = CONTAINERS[name]
    step = CUDAGraphStep(lambda value: value, device="cpu")
    for _ in range(6):
        given = make()
        found = step(given)
        assert type(found) is type(given)
        assert torch.equal(tensor_of(found), tensor_of(given))
