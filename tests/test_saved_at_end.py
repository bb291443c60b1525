"""What a block saves at its end is kept where that costs nothing: its second run ends before it."""

from __future__ import annotations

import gc
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from recomputed import (
    Live,
    Operations,
    ResNet,
    as_if_compiled,
    image_loss,
    images,
    live_bytes,
    with_and_without,
)
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences
from torchfast.memory import saved_tensor

BLOCKS = pytest.mark.parametrize("what", ["blocks", "selective"])


def ran_in_backward(model, loss_fn, batch, what="blocks", steps=2):
    """Return how often each operation ran in a backward, the second runs of blocks in it."""
    with Recompute(model, what):
        for _ in range(steps - 1):
            loss_fn(model, batch).backward()
        loss = loss_fn(model, batch)
        with Operations() as ran:
            loss.backward()
    return ran.counts


class Ends(nn.Module):
    """A block of one layer with what stands behind it."""

    def __init__(self, end, width=128):
        super().__init__()
        self.line, self.end = nn.Linear(width, width), end

    def forward(self, x):
        return self.end(self.line(x))


class InPairs(Ends):
    """Returns what it saves, and something else."""

    def forward(self, pair):
        x, _ = pair
        hidden = torch.tanh(self.line(x))
        return self.end(hidden), hidden


class Named(Ends):
    """Returns a dictionary, a tensor in it twice."""

    def forward(self, there):
        out = self.end(self.line(there["x"]))
        return {"x": out, "same": out.view_as(out)}


class Row(nn.Module):
    """Blocks in a row, with something between them."""

    def __init__(self, block, count=3, between=None, first=None, last=None):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.between, self.first, self.last = between, first, last

    def forward(self, x):
        x = x if self.first is None else self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0 and self.between is not None:
                x = self.between(x)
        return x if self.last is None else self.last(x)


def square(model, x):
    return model(x).square().mean()


def features(rows=128, width=128):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0))


ENDS = {
    "relu": partial(Ends, nn.ReLU()),
    "relu in place": partial(Ends, nn.ReLU(inplace=True)),
    "sigmoid": partial(Ends, nn.Sigmoid()),
    "softmax": partial(Ends, nn.Softmax(-1)),
    "layer norm": lambda: Ends(nn.LayerNorm(128)),
    "batch norm": lambda: Ends(nn.BatchNorm1d(128)),
    "norm and relu": lambda: Ends(nn.Sequential(nn.BatchNorm1d(128), nn.ReLU(inplace=True))),
    "dropout": lambda: Ends(nn.Sequential(nn.Tanh(), nn.Dropout(0.3))),
    "post-norm": lambda: nn.TransformerEncoderLayer(128, 2, 64, batch_first=True),
}


@BLOCKS
@pytest.mark.parametrize("end", ENDS)
def test_bits(end, what):
    make = partial(Row, ENDS[end])
    options = {"steps": 4}
    assert differences(*with_and_without(make, what, square, features, **options)) == []


@BLOCKS
@pytest.mark.parametrize("between", [nn.Identity(), nn.Dropout(0.2), nn.Sigmoid()])
def test_bits_of_containers_and_with_layers_between(what, between):
    pairs = partial(
        Row,
        partial(InPairs, nn.ReLU()),
        between=lambda pair: (between(pair[0]), pair[1]),
        first=lambda x: (x, x),
        last=lambda pair: pair[0] + pair[1],
    )
    named = partial(
        Row,
        partial(Named, nn.Sigmoid()),
        between=lambda there: {"x": between(there["same"])},
        first=lambda x: {"x": x},
        last=lambda there: there["x"] * there["same"],
    )
    for make in (pairs, named):
        results = with_and_without(make, what, square, features, steps=4)
        assert differences(*results) == []


@pytest.mark.parametrize(
    ("end", "operation"),
    [
        ("relu", "relu"),
        ("sigmoid", "sigmoid"),
        ("softmax", "_softmax"),
        ("relu in place", "relu_"),
        ("layer norm", "native_layer_norm"),
        ("batch norm", "native_batch_norm"),
        ("norm and relu", "native_batch_norm"),
    ],
)
def test_what_is_there_is_not_computed_again(end, operation):
    torch.manual_seed(0)
    counts = ran_in_backward(Row(ENDS[end]), square, features())
    # What the last block returns nobody keeps, but a norm's result nobody saves.
    saves_result = "relu" in end or end in ("sigmoid", "softmax")
    assert counts[operation] == int(saves_result)
    # The layers of the others: those that end in a norm need theirs, the input of that.
    assert counts["addmm"] == (1 if saves_result and end != "norm and relu" else 3)


@pytest.mark.parametrize(("what", "num_norms"), [("blocks", 2 + 2 + 3), ("selective", 1)])
def test_a_residual_network_ends_before_its_last_norm(what, num_norms, monkeypatch):
    as_if_compiled(monkeypatch)
    torch.manual_seed(0)
    counts = ran_in_backward(ResNet(), image_loss, images(), what, steps=3)
    # Nobody keeps what the last block returns.
    assert counts["native_batch_norm"] == counts["relu_"] == num_norms


def test_what_a_later_layer_writes_to_is_computed_again():
    """Without recompute that is an error: autograd has saved it."""

    def written(is_in_place):
        torch.manual_seed(0)
        model = Row(ENDS["sigmoid"], between=(lambda x: x.add_(1)) if is_in_place else torch.add)
        model.between = (lambda x: x.add_(1.0)) if is_in_place else (lambda x: x + 1.0)
        return model

    plain, model = written(False), written(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square(written(True), features()).backward()
    with Recompute(model, "blocks"):
        for one in (plain, model):
            square(one, features()).backward()
    found = [[p.grad for p in one.parameters()] for one in (plain, model)]
    assert all(map(torch.equal, *found))


def test_what_is_written_to_once_it_is_kept_is_computed_again():
    """By the loop, behind the forward, as far as nothing else has saved it."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return (x + 1.0) * self.factor

    torch.manual_seed(0)
    model = nn.Sequential(Ends(nn.Sigmoid()), Last())
    returned = []
    model[0].register_forward_hook(lambda module, args, out: returned.append(out.detach()))

    def gradients(is_written):
        model.zero_grad()
        loss = square(model, features())
        if is_written:
            returned[-1].zero_()
        loss.backward()
        return [p.grad for p in model[0].parameters()]

    expected = gradients(is_written=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(is_written=True)
    with Recompute(model, RecomputeOptions(regions=(Ends, Last))):
        gradients(is_written=False)
        with pytest.raises(RuntimeError, match="an input of a block that is recomputed"):
            gradients(is_written=True)  # the next block needs it
    with Recompute(model, RecomputeOptions(regions=(Ends,))):
        assert all(map(torch.equal, expected, gradients(is_written=True)))


def test_a_graph_of_gradients_and_a_graph_that_is_kept():
    torch.manual_seed(0)
    model = Row(ENDS["sigmoid"])
    x = features().requires_grad_()

    def gradients():
        loss = square(model, x)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [x, *model.parameters()])
        loss = square(model, x)
        kept = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
        return [first, *second, *kept]

    expected = gradients()
    with Recompute(model, "blocks"):
        found = gradients()
    assert all(map(torch.equal, expected, found))


def test_nothing_is_kept_where_others_move_what_is_saved():
    torch.manual_seed(0)
    model, on_host = Row(ENDS["norm and relu"]), []

    def pack(tensor):
        on_host.append(tensor.detach().clone())
        return len(on_host) - 1

    with Recompute(model, "blocks"):
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, on_host.__getitem__):
                loss = square(model, features())
            with Operations() as ran:
                loss.backward()
    assert ran.counts["native_batch_norm"] == 3
    assert not len(saved_tensor._returned)


def test_parameters_are_those_that_stand_there_in_the_backward():
    """Others may bring them to the device for each call alone, into other memory."""

    def gradients(what, is_in_place=False):
        torch.manual_seed(0)
        model = Row(ENDS["layer norm"])
        recompute = None if what is None else Recompute(model, what)
        for _ in range(2):
            model.zero_grad()
            loss = square(model, features())
            with torch.no_grad():
                for block in model.blocks:
                    weight = block.end.weight
                    if is_in_place:
                        weight.mul_(2.0)
                    else:
                        weight.data = weight.data * 2.0
            loss.backward()
        if recompute is not None:
            recompute.close()
        return [p.grad for p in model.parameters()]

    expected = gradients(None)
    assert all(map(torch.equal, expected, gradients("blocks")))
    # Without recompute an error: autograd would have needed the former.
    assert all(map(torch.equal, expected, gradients("blocks", is_in_place=True)))


class Small(Ends):
    """Writes to something small that is saved at its end."""

    def __init__(self, is_in_place):
        super().__init__(nn.Identity())
        self.is_in_place = is_in_place

    def forward(self, x):
        x = self.line(x)
        small = torch.sigmoid(x[:, 0])
        out = x + small[:, None]
        if self.is_in_place:
            small.add_(1.0)
        return out


def test_what_a_block_writes_to_is_computed_again():
    """Without recompute that is an error, too."""

    def gradients(is_in_place, what):
        torch.manual_seed(0)
        model = Row(partial(Small, is_in_place))
        recompute = None if what is None else Recompute(model, what)
        for _ in range(2):
            model.zero_grad()
            square(model, features()).backward()
        if recompute is not None:
            recompute.close()
        return [p.grad for p in model.parameters()]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(True, None)
    assert all(map(torch.equal, gradients(False, None), gradients(True, "blocks")))


class Saving(Ends):
    """What it returns first is saved as what an operation in it gets."""

    def forward(self, pair):
        hidden = self.line(pair[0])
        return hidden, torch.sin(hidden)


@pytest.mark.parametrize("kind", ["images", "pairs"])
def test_nothing_is_left_behind(kind):
    torch.manual_seed(0)
    if kind == "images":
        model, batch, loss_fn = ResNet(), images(), image_loss
    else:
        pairs = partial(Saving, nn.Identity())
        model = Row(pairs, first=lambda x: (x, x), last=lambda pair: pair[0] * pair[1])
        batch, loss_fn = features(), square
    with Recompute(model, "blocks"):
        for _ in range(3):
            loss_fn(model, batch).backward()
        gc.collect()
        assert not len(saved_tensor._returned)
        loss = loss_fn(model, batch)
        del loss  # and no backward comes
        gc.collect()
        assert not len(saved_tensor._returned)


# --- what is tiny ---------------------------------------------------------------------------------


class GatedByFirst(nn.Module):
    """Adds to all positions what the first one's features give, a tiny view of large ones."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + torch.sigmoid(self.out(hidden[:, 0]))[:, None]


class Decays(nn.Module):
    """A loop over positions, each tiny beside all of them."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            state = torch.tanh(state * self.decay + x[:, position])
            states.append(state)
        return torch.stack(states, 1)


@pytest.mark.parametrize("block", [GatedByFirst, Decays])
def test_what_is_tiny_is_little_altogether(block):
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(4)))
    x = torch.randn(8, 512, 16)
    with Recompute(model, "blocks"):
        for _ in range(2):
            square(model, x).backward()
        kept = live_bytes(model, square, x)
    # The inputs of four blocks, and of what is tiny a sixteenth of that at most.
    assert kept <= (4 + 4 / 16 + 0.01) * x.nbytes


def test_memory_that_its_owner_frees_is_free():
    """As pipelines do with what a stage has sent."""
    torch.manual_seed(0)
    model, x, outs = nn.Sequential(*(ENDS["sigmoid"]() for _ in range(2))), features(), []
    with Recompute(model, "blocks"):
        square(model, x).backward()
        with Live() as live:
            sizes = []
            for _ in range(4):
                outs.append(model(x))
                outs[-1].data = torch.empty(1)
                sizes.append(live.live_bytes())
    # Each adds what lies between the blocks, and nothing else.
    assert all(b - a <= 1.01 * x.nbytes for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("end", "num_layers"), [("batch norm", 0), ("layer norm", 3), ("small", 3)]
)
def test_ranks_end_alike_whatever_sizes_their_data_have(monkeypatch, end, num_layers):
    """Collectives in a block would not match: only what has the shape of a parameter is tiny."""

    class Scored(Ends):
        def forward(self, x):
            x = self.line(x)
            return x * torch.sigmoid(x[:, :1].detach().clone().requires_grad_())

    ends = {**ENDS, "small": partial(Scored, nn.Identity())}
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    torch.manual_seed(0)
    name = {"batch norm": "native_batch_norm", "layer norm": "native_layer_norm"}.get(end, "mul")
    counts = ran_in_backward(Row(ends[end]), square, features())
    assert (counts[name] >= 3) == (num_layers == 3)
