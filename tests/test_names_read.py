"""The names that code reads, found without running it."""

from __future__ import annotations

import functools

import pytest
import torch

from torchfast._core.code_names import loads_of, names_read


class Reads:
    def __init__(self):
        self._hidden = 1.0

    @property
    def shown(self):
        return self._hidden

    def called(self):
        return helper(self)

    def not_called(self):
        return self.unread


def helper(held):
    return held.by_helper + getattr(held, "by_string")  # noqa: B009


def by_name(held, name):
    return getattr(held, name)


def by_each_name(held):
    return sum(getattr(held, name) for name in ("first", "second"))


def unnamed(function):
    def inner(held):
        return function(held) * held.by_wrapper

    return inner


@unnamed
def in_closure(held):
    return held.by_wrapped


@functools.wraps(in_closure)
def named_so(held):
    return in_closure(held) + held.by_named_so


@torch.no_grad()
def without_graph(held):
    return held.by_decorated


def all_of(held):
    return sum(vars(held).values())


def test_what_code_reads_is_found_through_methods_properties_and_functions():
    def step(held):
        held.step()  # called, not read
        return [held.called() + held.shown for _ in range(2)]

    names = names_read([step], [Reads]).names
    assert {"shown", "_hidden", "by_helper", "by_string"} <= names
    assert not {"unread", "step", "called"} & names
    assert names_read([all_of], [Reads]).all


@pytest.mark.parametrize(
    ("step", "expected"),
    {
        "a string of the caller": (lambda held: by_name(held, "passed"), {"passed"}),
        "strings in a tuple": (by_each_name, {"first", "second"}),
        "a decorator": (in_closure, {"by_wrapper", "by_wrapped"}),
        "one with wraps": (named_so, {"by_named_so", "by_wrapper", "by_wrapped"}),
        "one of torch's": (lambda held: without_graph(held), {"by_decorated"}),
        "one of torch's itself": (without_graph, {"by_decorated"}),
    }.values(),
)
def test_what_code_reads_is_found_behind(step, expected):
    names = names_read([step], [Reads]).names
    assert expected <= names
    assert "unread" not in names


def of_local(model):
    out = model()
    return out.of_call


def of_either(model, held):
    out = held if held else model()
    return out.by_name


def of_item(held):
    for out in held:
        return out.by_name
    return None


def of_both(model, held):
    return model().by_name + held.by_name


@pytest.mark.parametrize(
    ("step", "of_results"),
    [
        (lambda model: model().of_call, {"of_call"}),
        (of_local, {"of_call"}),
        (lambda model, **more: model(**more).of_call, {"of_call"}),
        (lambda held: held.by_name, set()),
        (lambda model, held: (held or model()).by_name, set()),
        (of_either, set()),
        (of_item, set()),
        (of_both, set()),
        (lambda held: getattr(held, "inner").by_name, set()),  # noqa: B009
    ],
)
def test_what_is_read_of_the_result_of_a_call_alone_is_told_apart(step, of_results):
    found = names_read([step], [])
    assert found.of_results == of_results
    assert of_results or "by_name" in found.names
    assert of_results <= found.names


def test_whose_attribute_is_loaded_and_whether_it_is_called():
    """Whatever instructions this version of Python has for it."""

    class Both(Reads):
        def called(self, other):
            return super().called(other), self.called(other), other.called

    loads = [*loads_of("called", [Both.called.__code__])]
    assert [(load.is_called, load.is_own) for load in loads] == [
        (True, False),
        (True, True),
        (False, False),
    ]
