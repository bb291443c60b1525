"""Steps whose host reads what never changes: positions, made of a range and plain numbers."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import tape
from tape import counts, plain_order, reasons
from torchfast import CUDAGraphStep, Plan, StepBatches, Trainer
from torchfast._core.compare import differences
from torchfast.graphs import manner
from torchfast.graphs.host_shadows import HostShadows

STEPS = 10


@pytest.fixture(autouse=True)
def on_tape(monkeypatch):
    monkeypatch.setattr(manner, "has_compiled_code", lambda: False)  # by another test
    with tape.taped(monkeypatch):
        yield


def positions(x):
    return (torch.arange(x.shape[1], device=x.device) + 0).unsqueeze(0)


def is_one_sequence(positions):
    """As transformers finds out whether sequences are packed, and as rotary embeddings grow."""
    before = positions[:, :1] - 1
    steps = torch.diff(positions, prepend=before, dim=-1)
    return ((steps != 1).cumsum(-1)[:, -1] == 0).all()


class Reads(nn.Module):
    """Computes by what it reads of its positions; and, told of a capture, another way."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        y = self.layer(x)
        if torch.cuda.is_current_stream_capturing() or not self.read(x):
            return y * (1 + 1e-4)
        return y

    def read(self, x):
        return is_one_sequence(positions(x))


class ReadsNumbers(Reads):
    def read(self, x):
        p = positions(x)
        longest = int(torch.max(p)) + 1
        return longest == p.shape[1] and p.max().item() + 1 == longest and p[0].tolist()[-1] == 3


class WritesInPlace(Reads):
    def read(self, x):
        p = positions(x)
        p += 1
        p.sub_(1)
        return bool((p == positions(x)).all())


def pair(net):
    torch.manual_seed(0)
    models = [net()]
    models.append(copy.deepcopy(models[0]))
    return [(m, optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True)) for m in models]


def side_by_side(net, steps=STEPS):
    plain, own = pair(net)
    captured = CUDAGraphStep(plain_order(*own), state=list(own))
    reference = plain_order(*plain)
    for number, x in enumerate(torch.randn(steps, 8, 4)):
        assert torch.equal(reference(x), captured(x)), number
        assert not differences(plain[0].state_dict(), own[0].state_dict()), number
    return captured


@pytest.mark.parametrize("net", [Reads, ReadsNumbers])
def test_what_never_changes_is_read_without_waiting_and_nobody_is_told(net):
    captured = side_by_side(net)
    assert counts(captured) == (1, STEPS - 4, 4, 1)
    assert not reasons(captured)
    (note,) = [d.detail for d in captured.report().decisions if "replays" in d.detail]
    assert note.endswith(f"constants read on the host: {1 if net is Reads else 3}")


def test_several_steps_in_one_graph_read_as_one_does():
    torch.manual_seed(0)
    models = [Reads()]
    models.append(copy.deepcopy(models[0]))
    plain, several = (
        Trainer(
            model,
            lambda parameters: optim.SGD(parameters, lr=0.1, fused=True),
            lambda model, x: model(x).square().mean(),
            Plan(cuda_graph=True),
        )
        for model in models
    )
    batches = torch.randn(24, 8, 4)
    found = [loss for group in batches.split(4) for loss in several.steps(StepBatches([*group]))]
    assert [float(plain.step(x)) for x in batches] == [float(loss) for loss in found]
    assert not differences(*(model.state_dict() for model in models))
    notes = [d.detail for d in several.report().decisions if "replays" in d.detail]
    assert any("4 steps" in note and "constants read on the host: 4" in note for note in notes), (
        notes
    )
    plain.close()
    several.close()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "GPTNeoX", "Gemma2", "Phi3"])
def test_decoders_of_transformers_ask_whether_sequences_are_packed(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    more = {"intermediate_size": 32, "num_key_value_heads": 2, "vocab_size": 32, "use_cache": False}
    config = getattr(transformers, f"{name}Config")(**sizes, **more, pad_token_id=1)
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    models = [kind(config).train()]
    models.append(copy.deepcopy(models[0]))
    plain, captured = (
        Trainer(
            model,
            lambda parameters: optim.AdamW(parameters, lr=1e-3, fused=True),
            lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
            plan,
        )
        for model, plan in zip(models, ("eager", "exact"), strict=True)
    )
    for number in range(8):
        tokens = torch.arange(16).view(2, 8) + number
        assert torch.equal(plain.step(tokens), captured.step(tokens)), number
    assert not differences(*(model.state_dict() for model in models))
    assert captured.report().counters["replays"] == 4
    (note,) = [d.detail for d in captured.report().decisions if "replays" in d.detail]
    assert "constants read on the host: " in note
    plain.close()
    captured.close()


# --- what is not known on the host ----------------------------------------------------------------


class OfInput(Reads):
    """Is the same in each batch here, which nobody can know."""

    def read(self, x):
        return bool((positions(x) + (x > 100).sum() >= 0).all())


class OfWeights(Reads):
    def read(self, x):
        p = positions(x)
        p += (self.layer.weight > 100).sum()
        return is_one_sequence(p)


class ThroughView(Reads):
    def read(self, x):
        p = positions(x)
        p[:, 1:].add_((x > 100).sum())
        return is_one_sequence(p)


class ThroughData(Reads):
    def read(self, x):
        p = positions(x)
        p.data.add_((x > 100).sum())
        return is_one_sequence(p)


class ThroughChunk(Reads):
    """By a view that is no shadow's."""

    def read(self, x):
        p = positions(x)
        p.chunk(2, dim=1)[0].data.add_((x > 100).sum())
        return is_one_sequence(p)


class Replaced(Reads):
    def read(self, x):
        p = torch.arange(1, device=x.device)
        p.data = (x > 100).sum().view(1)
        return p.item() == 0


class Given(Reads):
    """To somebody else's kernel, by its address."""

    def read(self, x):
        p = positions(x)
        assert p.data_ptr()
        return is_one_sequence(p)


class Drawn(Reads):
    def read(self, x):
        return bool((torch.randint_like(positions(x), 5) < 5).all())


class Zeros(Reads):
    """In what somebody else's kernel may have counted."""

    def read(self, x):
        return bool((torch.zeros(2, dtype=torch.int64, device=x.device) == 0).all())


class Floats(Reads):
    """Which another device may round otherwise."""

    def read(self, x):
        return bool((positions(x) * 0.1 < 1).all())


class InSlice(Reads):
    def read(self, x):
        return bool((positions(x)[:, : (x < 100).sum()] >= 0).all())


@pytest.mark.parametrize(
    "net",
    [
        OfInput,
        OfWeights,
        ThroughView,
        ThroughData,
        ThroughChunk,
        Replaced,
        Given,
        Drawn,
        Zeros,
        Floats,
        InSlice,
        WritesInPlace,
    ],
)
def test_what_may_change_is_not_taken_for_known(net):
    captured = side_by_side(net)
    assert counts(captured)[:2] == (0, 0)  # told of its capture it computes something else
    assert "told of the capture" in reasons(captured)[0]


class Teacher(nn.Module):
    """Has a part in eval mode, for which torch has another way unless a mode is active."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.teacher = [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()]

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher[0](x[None])[0]
        return self.layer(x) - target


def test_what_needs_no_shadow_runs_without_a_mode():
    assert counts(side_by_side(Teacher)) == (1, STEPS - 3, 3, 1)


def test_where_ranks_may_write_nothing_is_shadowed(monkeypatch):
    monkeypatch.setattr(manner.dist, "is_initialized", lambda: True)
    assert counts(side_by_side(Reads))[:2] == (0, 0)


def test_beside_compiled_code_nothing_is_shadowed(monkeypatch):
    monkeypatch.setattr(manner, "has_compiled_code", lambda: True)
    assert counts(side_by_side(Reads))[:2] == (0, 0)


# --- a shadow -------------------------------------------------------------------------------------


@contextmanager
def shadows():
    with HostShadows(torch.device("cpu")) as found:
        yield found


def is_shadowed(tensor, found):
    return found._is_known(tensor)


def test_a_large_mask_has_none():
    with shadows() as found:
        p = torch.arange(1024)
        assert is_shadowed(p, found)
        assert is_shadowed(p[:, None] >= p[None, :], found)
        q = torch.arange(1025)
        assert not is_shadowed(q[:, None] >= q[None, :], found)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.arange(4.0),
        lambda p: torch.arange(4, out=torch.empty(4, dtype=torch.int64)),
        lambda p: p.to(torch.int32),
        lambda p: torch.empty_like(p),
        lambda p: p / 2,
        lambda p: p * 0.5,
        lambda p: p[: torch.tensor(2)],
        lambda p: p.clone(memory_format=torch.preserve_format).remainder_(7),
        lambda p: torch.add(p, 1, out=torch.empty_like(p)),
    ],
)
def test_others_have_none(make):
    with shadows() as found:
        assert not is_shadowed(make(torch.arange(4)), found)


def test_bounds_of_a_slice_are_no_others_shadows():
    """Those on the host come and go, and an address is used again."""
    with shadows():
        p = torch.arange(8)
        for _ in range(500):
            part = p[torch.tensor(3) : torch.tensor(5)]
            assert part.tolist() == [3, 4]
            first, last = torch.arange(5)[2], torch.arange(8)[4]
            assert p[first.add_(1) : last.add_(1)].tolist() == [3, 4]


def test_shadows_of_what_is_gone_are_gone():
    with shadows() as found:
        p = torch.arange(1024)
        for _ in range(10):
            _ = p[:, None] - p[None, :]
        assert len(found._shadows) <= 2


def test_a_default_device_is_not_the_shadows():
    torch.set_default_device("meta")
    try:
        with shadows() as found:
            p = torch.arange(4, device="cpu")
            assert found._shadows[id(p)].value.device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_what_is_computed_on_the_host_is_no_operation_of_the_step():
    """Selective checkpointing counts them."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen(), shadows():
        assert (torch.arange(4) * 2).tolist()[-1] == 6
    assert len(seen) == 2


def test_it_ends_with_the_capture():
    with shadows() as found:
        p = torch.arange(4)
    assert not is_shadowed(p, found)
    assert not found._shadows
