"""Steps that compute another way where they are told of their capture, as models of transformers.

Such a step looks at a mask on the host unless it is captured. Told of the capture it does without,
by other kernels and so with other bits; its own two ways are what a graph may differ by.
"""

from __future__ import annotations

import copy
from queue import SimpleQueue

import pytest
import torch
from torch import nn, optim

from tape import counts, plain_order, reasons
from torchfast import CUDAGraphOptions, CUDAGraphStep, Plan, PlanError, Trainer
from torchfast.graphs import manner
from torchfast.graphs.secrecy import pretended
from torchfast.levers import _graph_options

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 12


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(manner, "has_compiled_code", lambda: False)  # by another test


# A warm-up, an attempt in secret, one with shadows on the host, and from then on as told.
FIRST_TOLD = 5


class Masks(nn.Module):
    """Two ways that are close, of which one makes the host wait."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        if not torch.cuda.is_current_stream_capturing() and bool((x > -100).all()):
            return self.layer(x)
        return self.told(x)

    def told(self, x):
        return self.layer(x) * (1 + 1e-4)


class Far(Masks):
    """Returns something else once it is told."""

    def told(self, x):
        return self.layer(x) * 1.1


class Detached(Masks):
    """Returns the same once it is told, and trains by another gradient."""

    def told(self, x):
        y = self.layer(x)
        return y.detach() + 1e-3 * (y - y.detach())


class Reversed(Masks):
    """Returns the same once it is told, and trains uphill."""

    def told(self, x):
        y = self.layer(x)
        return 2 * y.detach() - y


class OneLayer(Masks):
    """Trains one of two layers once it is told."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))

    def told(self, x):
        return self.layer[1:](self.layer[0](x).detach())


class NotFinite(Masks):
    """Has a loss and no gradient once it is told."""

    def told(self, x):
        return self.layer(x) + 0 * torch.sqrt((self.layer.weight * 0).sum())


class Temperature(Masks):
    """Does not train one number once it is told."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return super().forward(x) * self.scale

    def told(self, x):
        return self.layer(x) * self.scale.detach() / self.scale


class Seen(Masks):
    """Does not count batches once it is told."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if not torch.cuda.is_current_stream_capturing():
            self.seen += 1
        return super().forward(x)


class Counts(Masks):
    """Depends, once it is told, on a count besides, where nobody looks for one."""

    calls = SimpleQueue()

    def told(self, x):
        self.calls.put(None)
        return self.layer(x) * (1 + 1e-4 * (self.calls.qsize() % 3))


def pair(net):
    torch.manual_seed(0)
    models = [net()]
    models.append(copy.deepcopy(models[0]))
    return [(m, optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, fused=True)) for m in models]


def captured_and_plain(net, numerics, returns=True):
    plain, own = pair(net)
    captured = CUDAGraphStep(plain_order(*own, returns=returns), state=list(own), numerics=numerics)
    return captured, plain_order(*plain, returns=returns)


def test_close_will_do_and_the_graph_is_the_step_that_is_told():
    captured, plain = captured_and_plain(Masks, "close")
    for number, x in enumerate(torch.randn(STEPS, 8, 4)):
        found = captured(x)
        if number < FIRST_TOLD:
            expected = plain(x)
        else:
            with pretended():
                expected = plain(x)
        assert torch.equal(found, expected), number
    assert counts(captured) == (1, STEPS - FIRST_TOLD, FIRST_TOLD, 1)
    assert not reasons(captured)
    (note,) = [d.detail for d in captured.report().decisions if "replays" in d.detail]
    assert "told of the capture, it returns what is 2.0e-04 apart" in note


def test_exact_takes_no_graph_of_another_step_and_names_the_way():
    captured, plain = captured_and_plain(Masks, "exact")
    for x in torch.randn(STEPS, 8, 4):
        assert torch.equal(captured(x), plain(x))
    assert counts(captured)[:2] == (0, 0)
    assert reasons(captured)[0].endswith(
        "it was told of the capture, and may compute otherwise then; if what it computes then is "
        "as good, set parity='close' (numerics='close' of CUDAGraphStep), which measures how close "
        "it is"
    )


NOT_CLOSE = [Detached, Reversed, OneLayer, NotFinite, Temperature, Seen]


@pytest.mark.parametrize(
    ("net", "returns"), [(Far, True), *((net, r) for net in NOT_CLOSE for r in (True, False))]
)
def test_what_is_not_close_runs_eagerly(net, returns):
    captured, plain = captured_and_plain(net, "close", returns=returns)
    for x in torch.randn(STEPS, 8, 4):
        found, expected = captured(x), plain(x)
        assert not returns or torch.equal(found, expected)
    assert counts(captured)[:2] == (0, 0)
    assert "told of the capture, the step computes something else" in reasons(captured)[0]


class ByHand(optim.Optimizer):
    """Reads on the host, so that it runs behind the graph."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.abs().max().item() >= 0:
                    parameter.sub_(parameter.grad * group["lr"])


@pytest.mark.parametrize(
    ("net", "num_graphs"), [(Masks, 1), (Detached, 0), (Reversed, 0), (OneLayer, 0)]
)
def test_gradients_are_compared_where_the_update_is_behind_the_graph(net, num_graphs):
    torch.manual_seed(0)
    plan = Plan(cuda_graph=CUDAGraphOptions(parity="close"))
    trainer = Trainer(net(), lambda p: ByHand(p), lambda model, x: model(x).square().mean(), plan)
    for x in torch.randn(STEPS, 8, 4):
        trainer.step(x)
    assert trainer.report().counters["graphs"] == num_graphs
    trainer.close()


def test_what_a_graph_gets_wrong_is_seen_in_a_step_that_is_told():
    captured, plain = captured_and_plain(Counts, "close")
    for x in torch.randn(STEPS, 8, 4):
        assert torch.equal(captured(x), plain(x))
    assert counts(captured)[:2] == (0, 0)
    assert "replays" in reasons(captured)[0]


# --- what asks for it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "parity"),
    [
        (Plan.preset("exact"), "exact"),
        (Plan.preset("fast"), "close"),
        (Plan(cuda_graph=True, precision="bf16"), "close"),
        (Plan(cuda_graph=True, optimizer="fused"), "close"),
        (Plan(cuda_graph=True, optimizer="fused", nonfinite="skip"), "close"),
        (Plan(cuda_graph=True, nonfinite="skip", recompute="blocks"), "exact"),
        (Plan(cuda_graph=CUDAGraphOptions(parity="close")), "close"),
        (Plan(cuda_graph=CUDAGraphOptions(parity="exact"), precision="bf16"), "exact"),
    ],
)
def test_a_plan_is_as_near_as_its_levers(plan, parity):
    assert _graph_options(plan).parity == parity


def test_another_word_is_refused():
    with pytest.raises(PlanError, match="parity must be one of"):
        CUDAGraphOptions(parity="near")


@pytest.mark.parametrize(("parity", "num_graphs"), [("auto", 0), ("close", 1)])
def test_a_trainer_takes_it_as_its_plan_says(parity, num_graphs):
    torch.manual_seed(0)
    trainer = Trainer(
        Masks(),
        lambda parameters: optim.SGD(parameters, lr=1e-3, fused=True),
        lambda model, batch: model(batch).square().mean(),
        Plan(cuda_graph=CUDAGraphOptions(parity=parity)),
    )
    for x in torch.randn(STEPS, 8, 4):
        trainer.step(x)
    assert trainer.report().counters.get("graphs", 0) == num_graphs
    trainer.close()
