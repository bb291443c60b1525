"""What a training consists of comes back from a checkpoint as it was: types, order, bits.

Trainer, loader, every optimizer and scheduler of torch, and every kind of value in a state.
"""

from __future__ import annotations

import collections
import json
import math
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from checkpointing import assert_same, trainer
from models import DropoutNet, TiedNet, make_batches
from torchfast import CheckpointManager
from torchfast._core.compare import differences
from torchfast.checkpoint.tree import flatten, unflatten

# -- Round trips of training -----------------------------------------------------------------------


@pytest.mark.parametrize("model", [DropoutNet, TiedNet])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_resumed_run_is_the_run_that_went_on(model, blocking, tmp_path):
    batches = make_batches(6)
    whole = trainer(model=model)
    for batch in batches[:3]:
        whole.step(batch)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(whole.state_dict(), whole.num_steps, blocking=blocking)
        losses = [whole.step(batch) for batch in batches[3:]]
    resumed = trainer(seed=1, model=model)
    with CheckpointManager(tmp_path) as checkpoints:
        found = checkpoints.load()
    resumed.load_state_dict(found.state)
    assert [resumed.step(batch) for batch in batches[3:]] == losses
    assert differences(whole.state_dict(), resumed.state_dict()) == []


def test_the_position_of_a_loader(tmp_path):
    def loader():
        return torch.utils.data.DataLoader(torch.arange(10), batch_size=2, shuffle=True)

    run = trainer()
    batches = run.prefetch(loader())
    iterator = iter(batches)
    next(iterator)
    state = {**run.state_dict(), "loader": batches.state_dict()}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
        found = checkpoints.load().state
    left = [batch.tolist() for batch in iterator]
    again = trainer().prefetch(loader())
    again.load_state_dict(found["loader"])
    assert [batch.tolist() for batch in again] == left


OPTIMIZERS = [
    name
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=name != "Muon")
    kind = getattr(optim, name)
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if name == "SparseAdam":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.to_sparse()
        optimizer.step((lambda loss=loss: loss) if name == "LBFGS" else None)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save({"optimizer": optimizer.state_dict()}, 1)
        found = checkpoints.load().state["optimizer"]
    assert_same(found, optimizer.state_dict())
    kind(model.parameters(), lr=0.5).load_state_dict(found)


S = optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda epoch: 0.9),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: S.StepLR(o, 2),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 2, 2]),
    "ConstantLR": S.ConstantLR,
    "LinearLR": S.LinearLR,
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.ConstantLR(o), S.StepLR(o, 2)], [1]),
    "PolynomialLR": S.PolynomialLR,
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 3),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o), S.StepLR(o, 2)]),
    "ReduceLROnPlateau": S.ReduceLROnPlateau,
    "CyclicLR": lambda o: S.CyclicLR(o, 0.1, 0.2),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, 10),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.1),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(name, tmp_path):
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save({"scheduler": scheduler.state_dict()}, 1)
        found = checkpoints.load().state["scheduler"]
    assert_same(found, scheduler.state_dict())
    scheduler.load_state_dict(found)


def test_the_rest_of_a_run(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    scaler = torch.amp.GradScaler("cpu")
    average = optim.swa_utils.AveragedModel(model)
    state = {
        "model": model.state_dict(),
        "ema": average.state_dict(),
        "scaler": scaler.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state()},
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
        found = checkpoints.load().state
    assert_same(found, state)
    assert found["model"]._metadata == state["model"]._metadata
    model.load_state_dict(found["model"])
    average.load_state_dict(found["ema"])
    scaler.load_state_dict(found["scaler"])
    torch.set_rng_state(found["rng"]["torch"])
    np.random.set_state(found["rng"]["numpy"])


# -- Every kind of value ---------------------------------------------------------------------------


def through_json(state):
    """Take a state apart and together again, by way of what a file would hold."""
    tree, tensors = flatten(state)
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    return unflatten(json.loads(json.dumps(tree)), copies)


NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
VALUES = {
    "none": None, "bools": [True, False, 1, 0], "ints": [0, -1, 2**63, -(2**20000)],
    "floats": [0.1, 1e-320, -0.0, math.inf, -math.inf], "texts": ["", "é€😀", "\x00", "nan", "$"],
    "surrogates": ["\udc80", "\ud83d\ude00"], "bytes": [b"\x00\xff", bytearray(b"x")],
    "complex": complex(-0.0, math.inf), "tuples": (1, (2, [3, ()])),
    "sets": [{1, 2}, frozenset("a")],
    "deque": collections.deque([1], maxlen=3), "counter": collections.Counter({3: 2}),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "keys": {1: "a", "1": "b", (1, None): 0},
    "tagged": {"$": "tensor", "key": "x"}, "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
    "size": torch.Size([2, 3]), "numbers": [np.float32(0.1), np.int64(-3), np.bool_(True)],
    "array": np.arange(6, dtype=">u2").reshape(2, 3), "empty array": np.zeros((0, 3)),
    "text array": np.array(["a", "bc"]), "times": np.array(["2024-01-01"], "datetime64[D]"),
    "random": random.getstate(),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_value(name):
    assert_same(through_json({"x": VALUES[name]}), {"x": VALUES[name]})


def test_the_bits_of_nan():
    assert struct.pack(">d", through_json({"x": NAN})["x"]).hex() == "7ff8000000000123"
    bits = torch.tensor([0x7FC00123, 0x7F800001], dtype=torch.int32)
    assert torch.equal(through_json({"x": bits.view(torch.float32)})["x"].view(torch.int32), bits)


def test_order_and_kind_of_keys_that_look_alike():
    state = {"b": 1, "a": {1: torch.ones(1), "1": torch.zeros(1)}, "rank-00000.json": torch.ones(2)}
    assert_same(through_json(state), state)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
KEYS = st.one_of(st.text(), st.integers(), st.none(), st.tuples(st.text(), st.integers()))
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, STATES))
def test_any_nesting(state):
    assert_same(through_json(state), state)


DTYPES = sorted(
    {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    - {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4},
    key=str,
)


def tensor_of(dtype, count=24):
    raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if "bits" not in str(d)], ids=str)
def test_every_dtype(dtype, tmp_path):
    try:
        full = tensor_of(dtype)
    except RuntimeError:
        pytest.skip("this torch has the name and no tensors of it")
    state = {"full": full, "shaped": full.view(2, 3, 4), "scalar": full[0], "empty": full[:0]}
    state["alone"] = tensor_of(dtype, 1)[0]
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
        found = checkpoints.load().state
    for name, value in state.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert bytes_of(found[name]) == bytes_of(value)


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


BASE = torch.arange(120.0).view(2, 3, 4, 5)
LAYOUTS = {
    "channels_last": BASE.to(memory_format=torch.channels_last),
    "transposed": torch.arange(12).view(3, 4).t(),
    "gaps": torch.arange(12)[::3],
    "expanded": torch.ones(1).expand(1000, 1000),
    "overlapping itself": torch.arange(10.0).unfold(0, 4, 1),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": nn.Parameter(torch.ones(2)),
    "no elements": torch.empty(0, 7),
}


@pytest.mark.parametrize("blocking", [True, False])
def test_every_layout(blocking, tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(LAYOUTS, 1, blocking=blocking)
        found = checkpoints.load().state
    for name, tensor in LAYOUTS.items():
        assert torch.equal(found[name], tensor), name
        if name not in ("gaps", "negative"):
            assert found[name].stride() == tensor.stride(), name
        assert type(found[name]) is torch.Tensor
    assert (tmp_path / "step-1" / "rank-00000-0000.bin").stat().st_size < 3000


def test_views_share_again_what_they_shared():
    base = torch.arange(40.0)
    state = {"a": base[2:10], "b": base[5:15], "c": base[20:30], "d": base[20:30], "e": base[31:]}
    state["half"] = base.view(torch.float16)[11:23]
    found = through_json(state)
    assert_same(found, state)
    found["a"][3] = -1.0
    assert found["b"][0] == -1.0
    found["c"][0] = -2.0
    assert found["d"][0] == -2.0


BAD = {
    "function": (lambda: 0, r"is a function; a checkpoint holds tensors"),
    "module": (nn.Linear(1, 1), r"give its state_dict\(\)"),
    "sparse": (torch.eye(2).to_sparse(), r"of layout torch.sparse_coo; store to_dense\(\)"),
    "meta": (torch.empty(1, device="meta"), r"on the meta device"),
    "subclass": (type("Odd", (torch.Tensor,), {})(), r"Odd, a tensor with parts of its own"),
    "objects": (np.array([object()]), r"is a ndarray of dtype object"),
    "records": (np.zeros(1, dtype=[("a", "f4")]), r"is a ndarray of dtype \[\('a', '<f4'\)\]"),
    "generator": (torch.Generator(), r"is a torch._C.Generator"),
    "named": (collections.namedtuple("Pair", "a b")(1, 2), r"Pair; a checkpoint holds"),
    "key": ({object(): 1}, r"\['y'\] has the key <object .* are str, int, float, bool, None"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_form_is_refused_with_its_place(name):
    value, message = BAD[name]
    with pytest.raises(
        TypeError, match=r"state\['x'\]\[0\]\['y'\].*" + message.removeprefix(r"\['y'\]")
    ):
        flatten({"x": [{"y": value}]})


def test_a_state_in_itself_is_refused():
    loop = {}
    loop["again"] = [loop]
    with pytest.raises(ValueError, match=r"contains itself or is nested more than 100 deep"):
        flatten(loop)
