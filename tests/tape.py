"""Graph semantics on the CPU: a backend that records operations and runs them again.

What a CUDA graph does, and where it bites, holds for the tape as well:

- a capture computes nothing: what it wrote to memory that was there before is undone;
- a replay runs the recorded operations on the recorded memory; no Python of the step runs;
- numbers that the host knew are frozen; reading a value from a tensor during capture raises;
- intermediate results and outputs stand at fixed addresses, written over by the next replay;
- the default generator, and those that were named, go on at each replay; one that was not named
  draws the same numbers again;
- where the default generator is set back within a capture to where it was, as a second run of a
  block does, each replay sets it back to where it was in that replay.

On the CPU the host has no need to wait, so reading a value is what stands for a host sync.
"""

from __future__ import annotations

import copy
import gc
import time
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from models import mean_loss
from torchfast import MicroBatches, TrainStep, levers
from torchfast._core.building import build_scheduler
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state, preserved_rng, seed_everything, set_rng_state
from torchfast.graphs import CUDAGraphStep, engine, failures, trials
from torchfast.testing import plain_step

CPU = torch.device("cpu")
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
# What their schemas do not tell: they write to the running statistics.
SILENT_WRITES = {aten.native_batch_norm.default: (3, 4)}
NOT_PERMITTED = "operation not permitted when stream is capturing"


class TapeGraph:
    def __init__(self, tape):
        self.tape = tape

    def replay(self):
        self.tape.replay()

    def reset(self):
        self.tape = None


class Tape(TorchDispatchMode):
    """Records what runs under it.

    With ``draws_on_host`` a single number that is drawn belongs to the host, as beside a device
    with a generator of its own: it is drawn at once and may be read, and no replay draws it.
    """

    draws_on_host = False

    def __init__(self, generators):
        super().__init__()
        self.calls = []
        # Another Python object stands for the same generator each time.
        self.named = {g._cdata for g in generators}
        self.kept = []  # nothing that was computed may have its memory given to another
        self.made = set()
        self.before = {}
        self.on_host = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_on_host(func, args):
            result = func(*args, **kwargs)
            self.kept.append(result)
            self.on_host.update(t.untyped_storage().data_ptr() for t in tensors_of(result))
            return result
        if func in READS or is_read_by_mask(func, args):
            raise RuntimeError(NOT_PERMITTED)
        written = written_to(func, args, kwargs)
        for tensor in written:
            self.save(tensor)
        generator = kwargs.get("generator")
        unnamed = generator is not None and generator._cdata not in self.named
        state = generator.get_state() if unnamed else None
        result = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        self.kept.append((args, kwargs, outputs))
        inputs = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
        fresh = [t for t in outputs if t.untyped_storage().data_ptr() not in inputs]
        self.made.update(t.untyped_storage().data_ptr() for t in fresh)
        if written or fresh:  # a view needs no work again
            self.calls.append((func, args, kwargs, result, fresh, generator, state))
        return result

    def is_on_host(self, func, args):
        if not self.draws_on_host:
            return False
        read = {t.untyped_storage().data_ptr() for t in tensors_of(args)}
        return read <= self.on_host if read else func is aten.rand.default

    def get_rng_state(self):
        """Note where the generator is, and let each replay note it in the same place."""
        state = torch.default_generator.get_state()
        self.calls.append((None, state, "get", None, None, None, None))
        return state

    def set_rng_state(self, state):
        torch.default_generator.set_state(state)
        self.calls.append((None, state, "set", None, None, None, None))

    def save(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
            self.before[storage.data_ptr()] = storage, storage.clone()

    def undo(self):
        for storage, content in self.before.values():
            storage.copy_(content)
        self.before = {}

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, _, fresh, generator, state in self.calls:
                if func is None:
                    if kwargs == "moment":
                        args.passed_at = time.perf_counter()
                    elif kwargs == "get":
                        args.copy_(torch.default_generator.get_state())
                    else:
                        torch.default_generator.set_state(args)
                    continue
                if state is not None:
                    now = generator.get_state()
                    generator.set_state(state)
                result = func(*args, **kwargs)
                if state is not None:
                    generator.set_state(now)
                if fresh:
                    known = {id(t) for t in fresh}
                    pairs = zip(tree_flatten(_)[0], tree_flatten(result)[0], strict=True)
                    for old, new in pairs:
                        if id(old) in known:
                            old.copy_(new)


class TapeMoment:
    """A place on the tape."""

    def __init__(self, backend):
        self.backend, self.passed_at = backend, None

    def record(self):
        self.backend.tape.calls.append((None, self, "moment", None, None, None, None))

    def has_passed(self):
        return self.passed_at is not None

    def ms_since(self, earlier):
        return (self.passed_at - earlier.passed_at) * 1e3


class TapeBackend:
    """Stands in for CUDA's."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.num_captures = 0
        self.on_side_stream = 0
        self.num_released = 0
        self.tape = None  # while something is captured

    @contextmanager
    def side_stream(self):
        self.on_side_stream += 1
        try:
            yield
        finally:
            self.on_side_stream -= 1

    def capture(self, body, generators):
        tape = Tape(generators)
        state = torch.get_rng_state()
        own = [(g, g.get_state()) for g in generators]
        gc.collect()
        ask = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: True
        get, put = torch.get_rng_state, torch.set_rng_state
        torch.get_rng_state, torch.set_rng_state = tape.get_rng_state, tape.set_rng_state
        try:
            self.tape = tape
            with self.side_stream(), tape:
                result = body()
        finally:
            self.tape = None
            torch.get_rng_state, torch.set_rng_state = get, put
            torch.cuda.is_current_stream_capturing = ask
            tape.undo()
            if not tape.draws_on_host:
                torch.set_rng_state(state)
            for generator, before in own:
                generator.set_state(before)
        self.num_captures += 1
        return TapeGraph(tape), result

    def moment(self):
        return TapeMoment(self)

    def pool_bytes(self):
        return 0

    def release_scratch(self):
        self.num_released += 1


def tensors_of(value):
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def is_read_by_mask(func, args):
    if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def written_to(func, args, kwargs):
    """Return the tensors that an operation writes to, by its schema."""
    found = tensors_of([args[place] for place in SILENT_WRITES.get(func, ())])
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.kwarg_only or position >= len(args):
            value = kwargs.get(argument.name)
        else:
            value = args[position]
        found += tensors_of(value)
    return found


# --- a captured step beside the plain loop --------------------------------------------------------


def plain_order(model, optimizer, *, returns=True):
    """Return a step of one's own, which returns its loss or nothing."""

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach() if returns else None

    return step


@contextmanager
def taped(monkeypatch):
    """Let every step of the body be captured on tape; yield the backends, newest last."""
    backends = []

    def backend_for(device):
        backends.append(TapeBackend(device))
        return backends[-1]

    with monkeypatch.context() as patch:
        patch.setattr(engine, "backend_for", backend_for)
        patch.setattr(trials, "backend_for", backend_for)
        patch.setattr(levers, "has_graphs", lambda device: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        # The tape raises where CUDA would, so its own line is not the user's.
        patch.setattr(failures, "_NOT_THE_USERS", (*failures._NOT_THE_USERS, __file__))
        yield backends


class Twins:
    """The plain loop and a captured step from one seed, each with generators of its own.

    ``captured`` is what captures: a TrainStep, or with ``bare`` a CUDAGraphStep around the plain
    loop's own step.
    """

    def __init__(
        self,
        net,
        optimizer,
        loss_fn=mean_loss,
        *,
        plan="exact",
        accumulate=1,
        clip=None,
        scheduler=None,
        bare=False,
        seed=0,
        **options,
    ):
        with preserved_rng(CPU):
            seed_everything(seed)
            self.plain = net()
            self.model = copy.deepcopy(self.plain)
            self.optimizer = optimizer(self.plain.parameters())
            self.scheduler = build_scheduler(scheduler, self.optimizer)
            self.rng = get_rng_state(CPU)
        self._loss_fn, self._clip, self._bare = loss_fn, clip, bare
        with preserved_rng(CPU):
            seed_everything(seed)
            net()  # draws as for the first
            if bare:
                own = optimizer(self.model.parameters())
                self.own_scheduler = build_scheduler(scheduler, own)
                self.captured = CUDAGraphStep(
                    lambda *group: plain_step(
                        self.model, self.own, loss_fn, group, max_grad_norm=clip
                    ),
                    state=[self.model, own],
                    **options,
                )
            else:
                self.captured = TrainStep(
                    self.model,
                    optimizer,
                    loss_fn,
                    plan,
                    max_grad_norm=clip,
                    accumulate=accumulate,
                    lr_scheduler=scheduler,
                    **options,
                )
                own, self.own_scheduler = self.captured.optimizer, self.captured.lr_scheduler
            self.own = own
            self.own_rng = get_rng_state(CPU)
        self.num_steps = 0

    def step(self, *group):
        """Take a step both ways; return the two losses."""
        with preserved_rng(CPU):
            set_rng_state(self.rng, CPU)
            plain = plain_step(
                self.plain,
                self.optimizer,
                self._loss_fn,
                group,
                max_grad_norm=self._clip,
                lr_scheduler=self.scheduler,
            )
            self.rng = get_rng_state(CPU)
        with preserved_rng(CPU):
            set_rng_state(self.own_rng, CPU)
            loss = self.captured(*group) if self._bare else self.captured(MicroBatches(group))
            if self._bare and self.own_scheduler is not None:
                self.own_scheduler.step()
            self.own_rng = get_rng_state(CPU)
        self.num_steps += 1
        self.losses = plain, loss.clone()
        return self.losses

    def both(self, event):
        """Do the same to both models and optimizers."""
        event(self.plain, self.optimizer)
        event(self.model, self.own)

    def differences(self, *, gradients=True):
        """Return what differs: losses, gradients, model, optimizer, schedule, generators."""
        plain = self._state(self.losses[0], self.plain, self.optimizer, self.scheduler, self.rng)
        own = self._state(self.losses[1], self.model, self.own, self.own_scheduler, self.own_rng)
        if not gradients:  # after a replay that holds the update too, they may be None
            plain["gradients"] = own["gradients"] = {}
        return differences(plain, own)

    def check(self, *, gradients=True):
        found = self.differences(gradients=gradients)
        assert not found, f"at step {self.num_steps}: " + "\n".join(map(str, found[:5]))

    def run(self, batches, accumulate=1, *, gradients=True):
        """Take steps, each compared with the plain loop."""
        for start in range(0, len(batches), accumulate):
            self.step(*batches[start : start + accumulate])
            self.check(gradients=gradients)

    @property
    def counts(self):
        """Graphs, replays, eager steps, captures."""
        return counts(self.captured)

    def _state(self, loss, model, optimizer, scheduler, rng):
        return {
            "loss": loss,
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),  # those that are not saved too
            "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            "optimizer": optimizer.state_dict(),
            "scheduler": {} if scheduler is None else scheduler.state_dict(),
            "generators": rng,
        }


def counts(captured):
    """Return graphs, replays, eager steps, captures of a captured step."""
    found = captured.report().to_dict()["counters"]
    return tuple(found[name] for name in ("graphs", "replays", "eager steps", "captures"))


def reasons(captured):
    """Return why something about the graph stepped aside, in words."""
    return [d.detail for d in captured.report().stepped_aside if d.lever == "cuda_graph"]


def without_check(monkeypatch):
    """Take the comparison of replays with eager steps away: it sees what other guards miss."""
    monkeypatch.setattr(engine.GraphEngine, "_mismatch", lambda *_: None)


def drifts(twins, batches, event=None, at=6):
    """Train on; return whether anything ever differs from the plain loop."""
    for number, batch in enumerate(batches):
        if number == at and event is not None:
            twins.both(event)
        twins.step(batch)
        if twins.differences():
            return True
    assert twins.counts[1] > 0  # something was replayed, or it would prove nothing
    return False
