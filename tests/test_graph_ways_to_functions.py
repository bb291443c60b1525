"""Functions that a step calls by ways that its code does not name: what they read is watched."""

from __future__ import annotations

import collections
import dataclasses
import operator
import weakref
from functools import partial, partialmethod

import pytest

from host_values import ADAMW, CHANGED_AT, train
from models import DropoutNet, mean_loss
from tape import Twins, reasons
from torchfast._core.any_name import takes_any_name
from torchfast.graphs import places

pytestmark = pytest.mark.usefixtures("tape")

TABLE = {"weight": 1.0}
FUN = "fun"
GET, CALL = operator.attrgetter(FUN), operator.methodcaller(FUN)


def weight():
    """Is named by nothing here that a step runs: steps have it in an attribute."""
    return TABLE["weight"]


class Holder:
    def __init__(self):
        self.fun, self.kind = weight, FUN


class Forwarding(Holder):
    def __getattr__(self, name):
        if name.startswith("_") or name not in ("forwarded",):
            raise AttributeError(name)
        return object.__getattribute__(self, FUN)


class OfMeta(type):
    def __getattr__(cls, name):
        if name not in cls.table:
            raise AttributeError(name)
        return cls.table[name]


class WithTable(metaclass=OfMeta):
    table = {"found": weight}  # noqa: RUF012  # what a registry is


class Operators(Holder):
    def __rmul__(self, other):
        return other * self.fun()

    def __enter__(self):
        return self.fun()

    def __exit__(self, *_):
        pass

    def __float__(self):
        return float(self.inner())

    def inner(self):
        return self.fun()

    def __bool__(self):
        return self.fun() == 1.0

    def __eq__(self, other):
        return self.fun() == other

    __hash__ = None


class Descriptor:
    def __init__(self):
        self.fun = weight

    def __get__(self, holder, _=None):
        return self if holder is None else self.fun()


class WithDescriptor:
    value = Descriptor()


class Partial(Holder):
    def times(self, factor):
        return self.fun() * factor

    once = partialmethod(times, 1.0)


@dataclasses.dataclass
class Matched:
    fun: object = weight


class Chained(collections.ChainMap):
    pass


def matched(value):
    match value:
        case Matched(found):
            return found()


def within(value):
    with value as found:
        return found


HELD = weakref.ref(weight)

WAYS = {
    "a name in an attribute": (Holder(), lambda h: getattr(h, h.kind)()),
    "a name that is put together": (Holder(), lambda h: getattr(h, f"fu{'n'[:1]}")()),
    "a global name": (Holder(), lambda h: getattr(h, FUN)()),
    "getattr in map": (Holder(), lambda h: next(map(getattr, [h], [FUN]))()),
    "attrgetter with dots": (
        type("Outer", (), {"__init__": lambda self: setattr(self, "inner", Holder())})(),
        lambda h: operator.attrgetter("inner.fun")(h)(),
    ),
    "a global attrgetter": (Holder(), lambda h: GET(h)()),
    "a global methodcaller": (Holder(), lambda h: CALL(h)),
    "__getattr__": (Forwarding(), lambda h: h.forwarded()),
    "__getattr__ of a metaclass": (WithTable, lambda h: h.found()),
    "an operator": (Operators(), lambda h: 1.0 * h),
    "with": (Operators(), within),
    "float": (Operators(), float),
    "bool": (Operators(), lambda h: 1.0 if h else 0.5),
    "a comparison": (Operators(), lambda h: 1.0 if h == 1.0 else 0.5),
    "a descriptor": (WithDescriptor(), lambda h: h.value),
    "partialmethod": (Partial(), lambda h: h.once()),
    "a pattern": (Matched(), matched),
    "fields": (Matched(), lambda h: getattr(h, dataclasses.fields(h)[0].name)()),
    "ChainMap": (Chained({"held": weight}), lambda h: h["held"]()),
    "a weak reference": (Holder(), lambda _: HELD()()),
    "eval": (Holder(), lambda h: eval("h.fun()", {"h": h})),
}


def loss_of(way):
    holder, call = WAYS[way]
    return lambda model, batch: mean_loss(model, batch) * call(holder)


@pytest.fixture(autouse=True)
def table():
    TABLE["weight"] = 1.0


@pytest.mark.parametrize("way", WAYS)
def test_what_the_function_reads_is_watched(way):
    twins = Twins(DropoutNet, ADAMW, loss_of(way))
    assert train(twins, lambda _: TABLE.update(weight=0.5)) is None
    assert twins.counts == (1, 15, 3, 2), reasons(twins.captured)


@pytest.mark.parametrize("way", ["a name in an attribute", "a descriptor", "a global attrgetter"])
def test_by_names_alone_it_would_train_wrong(way, monkeypatch):
    monkeypatch.setattr(places, "_ways", lambda read, *_: read)
    twins = Twins(DropoutNet, ADAMW, loss_of(way))
    assert train(twins, lambda _: TABLE.update(weight=0.5)) == CHANGED_AT


OPEN = [
    lambda h: getattr(h, h.kind),
    lambda h: getattr(h, "a" + h.kind, None),
    lambda h: getattr(h, f"a{h.kind}", None),
    lambda h: getattr(h, *h.names),
    lambda h: getattr(h, "a" if h.kind else h.name),
    lambda h: getattr(getattr(h, h.kind), "a"),  # noqa: B009
    lambda h: getattr(getattr(h, "a"), h.kind),  # noqa: B009
    lambda h: (h.call(h, "a"), getattr(h, h.kind)),
    lambda h: partial(getattr, h)(h.kind),
    lambda h: h.read(getattr),
    lambda h: eval("h.a"),
    matched,
]
NAMED = [
    lambda h: h.a,
    lambda h: getattr(h, "a"),  # noqa: B009
    lambda h: getattr(h, "a", None) or getattr(h, "b", 1.0),
    lambda h: getattr(getattr(h, "a"), "b", False),  # noqa: B009
    lambda h: getattr(h.one(h.kind, *h.names, two=h.b), "a", None)(h.kind),
    lambda h: h.eval(),
]


@pytest.mark.parametrize("function", OPEN)
def test_code_that_reads_by_any_name(function):
    assert takes_any_name(function.__code__)


@pytest.mark.parametrize("function", NAMED)
def test_code_that_reads_by_names_written_in_it(function):
    assert not takes_any_name(function.__code__)
