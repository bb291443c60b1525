"""Batches of every kind through a pool of shared memory: they arrive as they were."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pooling import Line, registry
from torchfast._core.batches import tensors


@pytest.fixture(autouse=True)
def torch_as_it_was():
    with registry():
        yield


def as_it_is(batch):
    return batch


Pair = collections.namedtuple("Pair", "a b")


class Custom:
    def __init__(self, tensor):
        self.inside = {"x": [tensor]}


class Named(dict):
    extra = None


def base():
    return torch.arange(24.0).reshape(2, 3, 4)


def shared_views():
    x = torch.arange(10)
    return [x, x[2:5], x[4:6], x]


BATCHES = {
    "a tensor": base,
    "tuple": lambda: (base(), 3, "text", None),
    "named tuple": lambda: Pair(base(), [b"bytes"]),
    "nested": lambda: {"a": {"b": [(base(), {"c": base() + 1})]}},
    "ordered": lambda: collections.OrderedDict(z=base(), a=base() * 2),
    "default dict": lambda: collections.defaultdict(list, x=[base()]),
    "own dict": lambda: Named(x=base()),
    "own class": lambda: Custom(base()),
    "packed": lambda: pack_sequence([torch.ones(3), torch.zeros(2)]),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: base().permute(2, 0, 1),
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 1000),
    "gaps": lambda: torch.arange(20.0)[::2],
    "wide gaps": lambda: torch.arange(2000.0).reshape(100, 20)[:, 0],
    "a part of a large one": lambda: torch.arange(10**5)[500:503],
    "empty": lambda: [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, 5), base()],
    "only empty": lambda: torch.empty(3, 0),
    "no tensor": lambda: ["a", 1, {"b": 2.0}],
    "scalar": lambda: torch.tensor(3.5),
    "views": shared_views,
    "the same twice": lambda: [base()] * 2,
    "dtypes": lambda: [
        torch.arange(4).to(dtype)
        for dtype in (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.uint16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
        )
    ],
    "float8": lambda: torch.arange(4.0).to(torch.float8_e4m3fn),
    "gradient": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "sparse": lambda: [torch.eye(3).to_sparse(), base()],
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "overlapping": lambda: (lambda x: [x[:6], x[3:]])(torch.arange(10)),
    "larger later": lambda: (lambda x: [x[2:4], x])(torch.arange(10)),
}


def leaves(batch):
    if isinstance(batch, Custom):
        return batch.inside["x"]
    return list(tensors(batch))


def same_bytes(a, b):
    if a.is_sparse or a.layout is not torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    if a.is_quantized:
        return torch.equal(a.int_repr(), b.int_repr())
    if a.dtype == torch.float8_e4m3fn:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*quant.*", "ignore:Sparse")
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_arrives_as_it_was(name):
    torch.manual_seed(0)
    line = Line(as_it_is)
    for _ in range(3):
        batch = BATCHES[name]()
        arrived = line(batch)
        assert type(arrived) is type(batch)
        if isinstance(batch, dict):
            assert list(arrived) == list(batch)
            assert getattr(arrived, "default_factory", None) is getattr(
                batch, "default_factory", None
            )
        if isinstance(batch, PackedSequence):
            assert torch.equal(arrived.batch_sizes, batch.batch_sizes)
        if name == "no tensor":
            assert arrived == batch
        old, new = leaves(batch), leaves(arrived)
        assert len(old) == len(new)
        for a, b in zip(old, new, strict=True):
            assert type(a) is type(b)
            assert same_bytes(a, b)
            assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
            assert a.requires_grad == b.requires_grad
            assert a.layout is not torch.strided or a.stride() == b.stride()
        # What was one object is one object.
        assert [[x is y for y in old] for x in old] == [[x is y for y in new] for x in new]


@pytest.mark.parametrize("name", ["views", "overlapping", "larger later"])
def test_tensors_that_see_the_same_memory_still_do(name):
    line = Line(as_it_is)
    line(base())
    arrived = line(BATCHES[name]())
    expected = BATCHES[name]()
    for some in (arrived, expected):
        some[1].fill_(77)
    if line.statistics.num_ordinary == 0:
        assert all(torch.equal(a, b) for a, b in zip(arrived, expected, strict=True))
    else:  # by the test's own pickle, which copies; torch's own way is tried with workers
        assert name != "views"


def test_a_conjugate_goes_as_torch_sends_it():
    # Which is without its conjugation: torch's own pickling of shared tensors drops it.
    source = torch.tensor([1 + 2j]).conj()
    assert Line(as_it_is)([source])[0].tolist() == [1 + 2j]
    assert Line(as_it_is)([source.resolve_conj()])[0].tolist() == [1 - 2j]


def test_a_batch_is_not_of_the_worker_any_more():
    source = torch.ones(3)
    line = Line(as_it_is)
    arrived = line([source])
    arrived[0].zero_()
    assert source.sum() == 3
