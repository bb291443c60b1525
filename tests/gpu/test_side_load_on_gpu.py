"""Other work beside replays: what only follows from the order of atomics comes out differently."""

from __future__ import annotations

import pytest
import torch

from gpu.requirements import requires
from torchfast.graphs import side_load
from torchfast.graphs.side_load import SideLoad

pytestmark = requires(gpus=1)
DEVICE = torch.device("cuda")


def captured(function):
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def results(function, count):
    """Return what replays beside other work end in."""
    graph, out = captured(function)
    found, load = [], SideLoad(DEVICE)
    for _ in range(count):
        with load:
            graph.replay()
            graph.replay()
        assert torch.cuda.current_stream().query()  # all is done
        found.append(out.clone())
    return found


def test_the_order_of_atomics_changes():
    values = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).cuda()
    places = torch.randint(16, (2**22,), generator=torch.Generator().manual_seed(1)).cuda()
    found = results(lambda: torch.zeros(16, device=DEVICE).index_add_(0, places, values), 6)
    assert any(not torch.equal(found[0], other) for other in found)
    assert all(torch.allclose(found[0], other, atol=0.05) for other in found)


def test_what_has_no_atomics_stays_as_it_is():
    x = torch.randn(1024, 1024, device=DEVICE)
    found = results(lambda: torch.softmax(x @ x.T, 1) @ x, 6)
    assert all(torch.equal(found[0], other) for other in found)


def test_work_is_launched_until_the_body_is_done(monkeypatch):
    launched = []
    plain = torch.Tensor.bitwise_not_
    monkeypatch.setattr(torch.Tensor, "bitwise_not_", lambda x: launched.append(1) or plain(x))
    with SideLoad(DEVICE):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
    assert len(launched) > 10 * side_load._AT_A_TIME


def test_a_body_that_keeps_the_host_busy_has_company(monkeypatch):
    launched, x = [], torch.ones(8, device=DEVICE)
    plain = torch.Tensor.bitwise_not_
    monkeypatch.setattr(torch.Tensor, "bitwise_not_", lambda x: launched.append(1) or plain(x))
    with SideLoad(DEVICE):
        for _ in range(20000):
            x.add_(1.0)
        within = len(launched)
    assert within > 10 * side_load._AT_A_TIME


def test_its_memory_is_one_piece_however_often_it_is_entered():
    load = SideLoad(DEVICE)
    with load:
        pass
    before = torch.cuda.memory_reserved()
    for _ in range(40):
        with load:
            pass
    assert torch.cuda.memory_reserved() == before


def test_what_fails_within_is_raised_as_it_is():
    with pytest.raises(KeyError, match="mine"), SideLoad(DEVICE):
        raise KeyError("mine")
