"""Functions that make the host wait, one a kind, and listeners that are told of it."""

from __future__ import annotations

import inspect
import io
import warnings
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import unique

from torchfast._core import syncs

read = torch.Tensor.item  # a name of one's own, bound before any guard
PATCHED = ("item", "__bool__", "__getitem__", "cpu", "nonzero", "to", "copy_")


@contextmanager
def torch_left_as_it_was():
    """Behind it nothing of a guard is left in torch."""
    before = {name: getattr(torch.Tensor, name) for name in PATCHED}
    functions = (torch.nonzero, torch.where, torch.unique, torch.cuda.synchronize)
    yield
    assert {name: getattr(torch.Tensor, name) for name in PATCHED} == before
    assert "item" not in vars(torch.Tensor)
    assert functions == (torch.nonzero, torch.where, torch.unique, torch.cuda.synchronize)
    assert not any(isinstance(entry[1], syncs._SyncFilter) for entry in warnings.filters)


# One function a kind: the line that waits is the one with the mark.


def read_item(x):
    return x + x.sum().item()  # waits: item


def read_float(x):
    return x * float(x.sum())  # waits: float


def read_int(x):
    return x * int(x.sum())  # waits: int


def branch(x):
    if x.sum() > 0:  # waits: bool
        x = x + 1
    return x


def show(x):
    text = f"{str(x)[:0]}"  # waits: print
    return x + len(text)


def to_host(x):
    return x + x.cpu().numel()  # waits: cpu


def to_numpy(x):
    return x + np.asarray(x).size  # waits: numpy


def to_list(x):
    return x + len(x.tolist())  # waits: tolist


def find(x):
    return x + x.nonzero().shape[0]  # waits: nonzero


def find_by_function(x):
    return x + torch.nonzero(x > 0).shape[0]  # waits: nonzero


def find_by_where(x):
    return x + len(torch.where(x > 0))  # waits: nonzero


def select(x):
    mask = x > 0
    return x + x[mask].numel()  # waits: boolean mask


def select_rows(x):
    mask = x[:, 0] > 0
    return x + x[mask, 1:].numel()  # waits: boolean mask


def write_selected(x):
    mask, y = torch.ones_like(x, dtype=torch.bool), x.clone()
    y[mask] = x.flatten()  # waits: boolean mask
    return y


def select_by_number(x):
    return x + x[x.argmax() // x.shape[1]]  # waits: boolean mask


def masked(x):
    return x + x.masked_select(x > 0).numel()  # waits: boolean mask


def distinct(x):
    return x + torch.unique(x).numel()  # waits: unique


def count(x):
    return x + torch.bincount(x.flatten().abs().long()).numel()  # waits: bincount


def same(x):
    return x + (1 if torch.equal(x, x) else 0)  # waits: compare


def repeat(x):
    times = torch.ones(x.shape[0], dtype=torch.long, device=x.device)
    return x + torch.repeat_interleave(x, times, dim=0)  # waits: repeat_interleave


def invert(x):
    square = x @ x.T + torch.eye(x.shape[0], device=x.device)
    return torch.linalg.inv(square) @ x  # waits: linalg


KINDS = (
    read_item,
    read_float,
    read_int,
    branch,
    show,
    to_host,
    to_numpy,
    to_list,
    find,
    find_by_function,
    find_by_where,
    select,
    select_rows,
    write_selected,
    select_by_number,
    masked,
    distinct,
    count,
    same,
    repeat,
    invert,
)


# What has no name that could be listened to, or one that was bound before: C++ that reads a tensor.


def make_as_many(x):
    n = x.abs().max().long()
    return torch.arange(n, device=x.device)  # waits: item


def make_so_large(x):
    n = x.abs().max().long()
    return torch.zeros(n, device=x.device)  # waits: item


def view_as_large(x):
    n = x.new_full((), x.shape[0], dtype=torch.long)
    return x.view(n, -1)  # waits: item


def repeat_as_often(x):
    n = x.abs().max().long()
    return x.repeat(n, 1)  # waits: item


def make_complex(x):
    return x + complex(x.sum()).real  # waits: item


def add_scaled(x):
    return x.add(x, alpha=x.sum())  # waits: item


def one_hot(x):
    return F.one_hot(x.abs().long())  # waits: item


def to_sparse(x):
    return x.to_sparse().to_dense()  # waits: nonzero


def combine(x):
    return torch.combinations(x[0])  # waits: boolean mask


def put_selected(x):
    mask, y = x > 0, x.clone()
    return y.index_put_((mask,), x[0, :1].expand(7))  # waits: nonzero


def distinct_by_an_earlier_name(x):
    return unique(x)  # waits: unique


def item_by_an_earlier_name(x):
    return x + read(x.sum())  # waits: item


def to_the_hosts_type(x):
    return x + x.type("torch.FloatTensor").numel()  # waits: cpu


def invert_by_another_name(x):
    square = x @ x.T + 9 * torch.eye(x.shape[0], device=x.device)
    return torch.inverse(square)  # waits: linalg


def decompose(x):
    return torch.linalg.svdvals(x)  # waits: linalg


def make_from_values(x):
    return x.new_tensor([1.0, 2.0])  # waits: pageable copy


def save(x):
    torch.save({"x": [x]}, io.BytesIO())  # waits: save
    return x


BELOW = (
    make_as_many,
    make_so_large,
    view_as_large,
    repeat_as_often,
    make_complex,
    add_scaled,
    one_hot,
    to_sparse,
    combine,
    put_selected,
    distinct_by_an_earlier_name,
    item_by_an_earlier_name,
    to_the_hosts_type,
    invert_by_another_name,
    decompose,
    make_from_values,
    save,
)


def marked(function):
    """Return the line of a function that waits, and the kind of its wait."""
    lines, first = inspect.getsourcelines(function)
    ((index, text),) = [(i, line) for i, line in enumerate(lines) if "# waits: " in line]
    return first + index, text.partition("# waits: ")[2].strip()


def found(guard):
    return [(s.file, s.line, s.function, s.kind, s.count) for s in guard.report().syncs]


def expected(function, times):
    line, kind = marked(function)
    return [(__file__, line, function.__name__, kind, times)]


class Seen:
    """A listener that keeps what it is told."""

    def __init__(self, device_type):
        self.device_type = device_type
        self.expected, self.heard = [], []

    def expect(self, place):
        self.expected.append((place.kind, place.line))

    def hear(self, place, milliseconds):
        self.heard.append((place.kind, place.line, milliseconds))


@contextmanager
def listening(listener, watch=syncs.WATCH):
    watch.hold(listener.device_type)
    watch.enter(listener)
    try:
        yield listener
    finally:
        watch.leave(listener)
        watch.release()


def batch():
    return torch.arange(12.0).reshape(3, 4) - 4


def here():
    return inspect.currentframe().f_back.f_lineno
