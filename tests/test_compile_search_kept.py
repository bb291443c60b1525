"""What modules keep in attributes, and in containers there, is after a search what it was."""

from __future__ import annotations

import collections
import copy
import random
import weakref

import numpy as np
import pytest
import torch

from models import BatchNormNet
from search_lab import BATCH, Lab, Net
from torchfast._core.compare import differences


class Keeps(Net):
    """Changes, in each forward, what it keeps in an attribute."""

    def __init__(self, kept, change):
        super().__init__()
        self.kept, self.change = kept, change

    def forward(self, x):
        self.change(self)
        return super().forward(x)


def append(module):
    module.kept.append(1)


def write_first(module):
    module.kept[0].add_(1.0)


def replace_first(module):
    module.kept[0] = module.kept[0] + 1


def count(module):
    module.kept["calls"] += 1
    module.kept["new"] = torch.ones(1)


def add(module):
    module.kept.add(len(module.kept))


def clear(module):
    module.kept.clear()


def fill_array(module):
    module.kept += 1.0


def fill_first_array(module):
    module.kept[0] += 1.0


def write_deep(module):
    inner = module.kept["a"][0]["b"]
    inner[0].add_(1.0)
    inner[1].append(2)


def write_named(module):
    module.kept.inputs.add_(1.0)
    module.kept.runs.append(1)


def replace_whole(module):
    module.kept = [*module.kept, 1]


def take_away(module):
    vars(module).pop("kept", None)


def to_none(module):
    module.kept = None


Named = collections.namedtuple("Named", ["inputs", "runs"])
KEPT = {
    "a list appended to": (list, append),
    "a long one": (lambda: list(range(1000)), append),
    "tensors in a list": (lambda: [torch.zeros(2)], write_first),
    "tensors in a list, others": (lambda: [torch.zeros(2)], replace_first),
    "tensors that may be one in memory": (lambda: [torch.zeros(1).expand(3)], replace_first),
    "numbers in a list": (lambda: [0.0], replace_first),
    "a dict that counts": (lambda: {"calls": 0}, count),
    "a counter": (lambda: collections.Counter(calls=2), count),
    "a dict with a default": (lambda: collections.defaultdict(int), count),
    "an ordered dict": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda module: module.kept.move_to_end("a"),
    ),
    "a set": (set, add),
    "a deque": (lambda: collections.deque([3, 4], maxlen=2), append),
    "a cleared one": (lambda: {"a": torch.ones(1)}, clear),
    "an array": (lambda: np.zeros(3), fill_array),
    "arrays in a list": (lambda: [np.zeros(3)], fill_first_array),
    "a tuple": (lambda: Named(torch.zeros(2), []), write_named),
    "nested ones": (lambda: {"a": ({"b": [torch.zeros(2), []]},)}, write_deep),
    "a list that was replaced": (lambda: [0], replace_whole),
    "a list that was taken away": (lambda: [0], take_away),
    "an object that was taken away": (object, to_none),
}


def contents(value):
    """Return a value as text, and every object in it, in order."""
    items = list(value.values()) if isinstance(value, dict) else value
    is_container = isinstance(items, list | tuple | set | collections.deque)
    return repr(value), [(item, contents(item)) for item in items] if is_container else []


def is_same(now, then):
    return now[0] == then[0] and all(
        a is b and is_same(inner, other)
        for (a, inner), (b, other) in zip(now[1], then[1], strict=True)
    )


@pytest.mark.parametrize(("make", "change"), KEPT.values(), ids=KEPT)
def test_what_modules_keep_is_what_it_was(make, change):
    kept = make()
    before = contents(kept)
    lab = Lab(Keeps(kept, change))
    lab.search(lab.candidate("a", 0.9))
    assert lab.model.kept is kept
    assert is_same(contents(kept), before)


def test_a_list_in_itself_ends_no_search():
    kept = [1]
    kept.append(kept)
    lab = Lab(Keeps(kept, append))
    lab.search(lab.candidate("a", 0.9))
    assert len(kept) == 2
    assert kept[1] is kept


def test_each_candidate_begins_with_what_was_kept():
    seen = []

    def note(module):
        seen.append((lab.in_force, len(module.kept)))
        module.kept.append(1)

    lab = Lab(Keeps([], note))
    lab.search(lab.candidate("a", 0.9), lab.candidate("b", 0.8))
    assert {("eager", 0), ("a", 0), ("b", 0)} <= set(seen)
    # What a candidate leaves is not the next one's.
    assert next(length for name, length in seen if name == "b") == 0


def test_what_came_to_be_kept_is_gone():
    def make_more(module):
        module.more, module.pair, module.array = [1], (torch.ones(1),), np.ones(2)

    lab = Lab(Keeps(0, make_more))
    lab.search(lab.candidate("a", 0.9))
    assert not {"more", "pair", "array"} & vars(lab.model).keys()


@pytest.mark.parametrize("in_list", [True, False])
@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(1), lambda g: g.random()),
        (lambda: np.random.default_rng(1), lambda g: g.random()),
        (lambda: np.random.RandomState(1), lambda g: g.rand()),
        (
            lambda: torch.Generator().manual_seed(1),
            lambda g: torch.rand(1, generator=g),
        ),
    ],
    ids=["Python", "NumPy", "NumPy, old", "torch"],
)
def test_generators_that_modules_keep_are_put_back(make, draw, in_list):
    generator = make()
    kept = [generator] if in_list else generator
    expected = draw(make())
    lab = Lab(Keeps(kept, lambda module: draw(generator)))
    lab.search(lab.candidate("a", 0.9))
    assert draw(generator) == expected


def test_generators_of_the_host_that_work_refers_to_are_put_back():
    lab = Lab()
    generator, plain = np.random.default_rng(1), lab.work

    def work():
        generator.random()
        return plain()

    lab.work = work
    lab.search(lab.candidate("a", 0.9))
    assert generator.random() == np.random.default_rng(1).random()


def test_a_module_in_a_list_is_put_back_with_its_gradients():
    teacher = BatchNormNet()
    teacher.seen = []
    parameter = next(teacher.parameters())
    parameter.grad = gradient = torch.ones_like(parameter)
    loose = torch.zeros(2, requires_grad=True)
    before = copy.deepcopy(teacher.state_dict())

    def teach(module):
        module.kept[0].seen.append(1)
        with torch.no_grad():
            parameter.add_(1.0)
        (module.kept[0](BATCH[0]).sum() + loose.sum()).backward()

    lab = Lab(Keeps([teacher, loose], teach))
    lab.search(lab.candidate("a", 0.9))
    assert differences(before, teacher.state_dict()) == []
    assert teacher.seen == []
    assert parameter.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert loose.grad is None


class Owner:
    pass


def test_a_proxy_of_what_is_gone_ends_no_search():
    kept = [weakref.proxy(owner := Owner())]
    model = Keeps(kept, lambda module: None)
    model.proxy = kept[0]
    del owner
    lab = Lab(model)
    lab.search(lab.candidate("a", 0.9))
    assert lab.model.kept is kept


def test_a_tensor_that_cannot_be_written_to_ends_no_search():
    """Its elements are one in memory, and what they are a view of is kept nowhere."""
    base = torch.zeros(1)
    lab = Lab(Keeps([base.expand(3)], lambda module: base.add_(1.0)))
    lab.search(lab.candidate("a", 0.9))
