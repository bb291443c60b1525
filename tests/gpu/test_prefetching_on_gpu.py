"""The ring on a real device: streams that are made late on purpose, memory, overlap, capture."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from containers import CONTAINERS
from drawing_loaders import LOADERS, trained
from gpu.syncs import no_syncs
from models import mean_loss
from simulated_device import stagers, wait_until
from test_prefetching import SHAPES, ragged
from torchfast import PrefetchingLoader, Trainer
from torchfast._core.batches import tensors
from torchfast._core.rng import same_rng_state
from torchfast.data import loader as loader_module
from torchfast.data import stager
from torchfast.data.transport import CUDATransport

SIZE, LARGE = 4096, 2**15  # elements: packed with others, and in a block of its own
STEPS, FEW = 10_000, 40
LONG = 20_000_000  # cycles, about 10 ms: Python is many steps ahead by then


@pytest.fixture(autouse=True)
def with_a_thread(monkeypatch):
    """Batches that lie ready would be fetched without one."""
    monkeypatch.setattr(stager, "TOO_SLOW_S", 0.0)
    yield
    gc.collect()
    wait_until(lambda: not stagers())


def numbered(count, size=SIZE):
    for number in range(count):
        yield torch.full((size,), number), torch.full((3,), float(number))


class Late(CUDATransport):
    """Its copy stream sleeps before some of its copies."""

    def upload(self, slot, *copies):
        if self._num_uploads % 7 == 0:
            with torch.cuda.stream(self._copy_stream):
                torch.cuda._sleep(self._random.randrange(200_000))
        return super().upload(slot, *copies)

    _random = random.Random(0)


class LateCopies(CUDATransport):
    """Its copy stream sleeps long before each copy."""

    def upload(self, slot, *copies):
        with torch.cuda.stream(self._copy_stream):
            torch.cuda._sleep(LONG)
        return super().upload(slot, *copies)


class WithoutReady(LateCopies):
    """A batch is read before it is there."""

    def receive(self, slot):
        slot.stream = torch.cuda.current_stream()


class WithoutSettling(LateCopies):
    """The next batch is written into pinned memory before the last one has been copied from it."""

    def settle(self, slot):
        pass


class WithoutFree(CUDATransport):
    """The next batch is copied over the last one; before that is read, if reads are late."""

    def upload(self, slot, *copies):
        slot.free = torch.cuda.Event()  # never recorded
        return super().upload(slot, *copies)


def num_wrong(
    monkeypatch, transport, depth, *, steps, reuse=True, size=SIZE, read_after=None, **options
):
    """Return in how many steps the device read something else than what was sent.

    Each read comes so many cycles late; None makes some of them a little late.
    """
    monkeypatch.setattr(loader_module, "transport_for", transport)
    loader = PrefetchingLoader(numbered(steps, size), "cuda", depth=depth, reuse=reuse, **options)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    lateness = random.Random(1)
    for number, (x, y) in enumerate(loader):
        if read_after is not None:
            torch.cuda._sleep(read_after)
        elif number % 5 == 0:
            torch.cuda._sleep(lateness.randrange(200_000))
        wrong += (x != number).any() | (y != number).any()
    assert number == steps - 1
    return int(wrong)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_ten_thousand_batches_arrive_whole_whatever_is_late(monkeypatch, depth, reuse, background):
    options = {"steps": STEPS, "reuse": reuse, "background": background}
    assert num_wrong(monkeypatch, Late, depth, **options) == 0


def test_so_they_do_behind_a_transform(monkeypatch):
    options = {"transform": lambda batch: (batch[0].int(), batch[1] + 0), "reuse": False}
    assert num_wrong(monkeypatch, Late, 2, steps=2000, **options) == 0
    options["reuse"] = True
    assert num_wrong(monkeypatch, Late, 2, steps=2000, **options) == 0


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("size", [SIZE, LARGE])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(
    ("kind", "read_after"), [(LateCopies, 0), (CUDATransport, LONG), (LateCopies, LONG)]
)
def test_so_they_do_when_the_device_is_far_behind(
    monkeypatch, kind, read_after, reuse, size, background
):
    options = {"read_after": read_after, "reuse": reuse, "size": size, "background": background}
    assert num_wrong(monkeypatch, kind, 1, steps=FEW, **options) == 0


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("size", [SIZE, LARGE])
@pytest.mark.parametrize(
    ("kind", "read_after"), [(WithoutReady, 0), (WithoutSettling, 0), (WithoutFree, LONG)]
)
def test_without_any_of_the_events_they_do_not(monkeypatch, kind, read_after, size, background):
    options = {"steps": FEW, "read_after": read_after, "size": size, "background": background}
    assert num_wrong(monkeypatch, kind, 1, **options) > 0


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_arrives_as_the_type_it_was(name, reuse):
    make, tensor_of = CONTAINERS[name]
    batches = [make() for _ in range(6)]
    expected = [tensor_of(batch).clone() for batch in batches]
    loader = PrefetchingLoader(iter(batches), "cuda", reuse=reuse)
    for number, batch in enumerate(loader):
        assert type(batch) is type(batches[number])
        assert tensor_of(batch).device.type == "cuda"
        assert torch.equal(tensor_of(batch).cpu(), expected[number])


def can_be_pinned(tensor):
    is_plain = not (tensor.is_sparse or tensor.requires_grad or tensor.is_conj())
    return is_plain and 0 not in tensor.stride()  # elements that are one in memory are refused


PINNABLE = [name for name, tensor in SHAPES.items() if can_be_pinned(tensor)]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(
    ("name", "pinned"),
    [*((name, False) for name in SHAPES), *((name, True) for name in PINNABLE)],
)
def test_a_tensor_arrives_as_to_would_send_it(name, reuse, pinned):
    tensor = SHAPES[name].pin_memory() if pinned else SHAPES[name]
    plain = tensor.to("cuda")
    for x, again in PrefetchingLoader([(tensor, tensor)] * 4, "cuda", reuse=reuse):
        assert x is again
        assert type(x) is type(plain)
        assert x.dtype == plain.dtype
        assert x.requires_grad == plain.requires_grad
        if not tensor.is_sparse:
            assert x.stride() == plain.stride()
        assert torch.equal(x.to_dense(), plain.to_dense())


def test_large_pinned_tensors_go_directly():
    large = [torch.full((512, 512), float(i)).pin_memory() for i in range(8)]
    loader = PrefetchingLoader(
        [{"x": x, "y": torch.tensor(i)} for i, x in enumerate(large)], "cuda"
    )
    for number, batch in enumerate(loader):
        assert torch.equal(batch["x"].cpu(), large[number])
        assert int(batch["y"]) == number
        assert loader._ring.slots[0].pinned.numel() < 2**16


def test_a_generator_may_fill_one_pinned_block_again_and_again():
    block = torch.empty(2**18, pin_memory=True)

    def batches():
        for number in range(200):
            block.fill_(number)
            yield block

    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number, batch in enumerate(PrefetchingLoader(batches(), "cuda", depth=4)):
        torch.cuda._sleep(100_000)
        wrong += (batch != number).any()
    assert int(wrong) == 0


@pytest.mark.parametrize("reuse", [True, False])
def test_ragged_batches(reuse):
    batches = ragged(90)
    out = []
    for batch in PrefetchingLoader(iter(batches), "cuda", reuse=reuse):
        torch.cuda._sleep(50_000)
        out.append(batch.clone())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(out, batches, strict=True))


def test_batches_can_be_kept_and_let_go():
    torch.cuda.synchronize()
    loader = PrefetchingLoader(numbered(300), "cuda", depth=2)
    kept = []
    for number, batch in enumerate(loader):
        torch.cuda._sleep(50_000)
        if number % 3 == 0:
            kept.append((number, batch))
        if len(kept) > 20:
            del kept[::2]
    for number, (x, y) in kept:
        assert x.unique().tolist() == [number]
        assert y.unique().tolist() == [number]


def test_tensors_on_the_device_pass_by_identity():
    batches = [(torch.full((4,), float(i), device="cuda"), torch.full((4,), i)) for i in range(5)]
    for reuse in (True, False):
        for given, got in zip(
            batches, PrefetchingLoader(batches, "cuda", reuse=reuse), strict=True
        ):
            assert got[0] is given[0]
            assert torch.equal(got[1].cpu(), given[1])


def test_the_consumer_may_work_on_another_stream(monkeypatch):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert num_wrong(monkeypatch, Late, 2, steps=1000) == 0


def test_a_batch_is_free_behind_the_stream_that_received_it():
    side = torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    batches = iter(PrefetchingLoader(numbered(300), "cuda", depth=1, reuse=True))
    for number in range(300):
        with torch.cuda.stream(side):
            x, _ = next(batches)
            torch.cuda._sleep(200_000)
            wrong += (x != number).any()
        if number % 2:  # asked for from elsewhere, while the other stream still reads
            torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert int(wrong) == 0


def test_a_graph_can_be_captured_in_the_default_mode_while_paused():
    loader = PrefetchingLoader(numbered(200), "cuda", depth=4)
    static = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    out = []
    for number, (x, _) in enumerate(loader):
        static.copy_(x)
        if number == 50:
            graph = torch.cuda.CUDAGraph()
            with loader.paused(), torch.cuda.graph(graph):
                result = static.sum()
        if number >= 50:
            graph.replay()
            out.append(result.clone())
    assert [float(o) for o in out] == [float(SIZE * number) for number in range(50, 200)]


def test_memory_is_flat_over_epochs():
    data = TensorDataset(torch.randn(64, 3, 64, 64), torch.arange(64))
    upstream = DataLoader(data, 8, shuffle=True, num_workers=2, persistent_workers=True)
    loader = PrefetchingLoader(
        upstream, "cuda", depth=2, transform=lambda b: (b[0] * 2, b[1]), across_epochs=True
    )
    reserved = []
    for epoch in range(40):
        for number, (x, y) in enumerate(loader):
            x.mean() + y.sum()
            if epoch % 5 == 4 and number == 3:
                break
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved[3:])) == 1, reserved
    loader.close()


def test_the_consumers_thread_waits_for_nothing():
    loader = PrefetchingLoader(numbered(60), "cuda", depth=2)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with no_syncs():
        total = sum(x.sum() for x, _ in batches)
    assert int(total) == SIZE * sum(range(5, 60))


@pytest.mark.parametrize("name", LOADERS)
def test_random_numbers_fall_as_in_a_plain_loop(name):
    class Real:
        """Stands where the simulated device does; its consumer is the current stream."""

        transports = (type("Transport", (), {"consumer": torch.cuda.current_stream()}),)

    expected, state, _ = trained(LOADERS[name], None)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(
            "drawing_loaders.PrefetchingLoader",
            lambda loader, _, **options: PrefetchingLoader(loader, "cuda", **options),
        )
        log, own, loader = trained(LOADERS[name], Real)
    assert log == expected
    assert same_rng_state(own, state)
    loader.close()


def test_a_transform_that_draws_on_the_device_takes_its_turn():
    def noisy(batch):
        return batch + torch.rand_like(batch)

    def run(batches):
        torch.manual_seed(1)
        return [(x + torch.rand(3, device="cuda")).tolist() for x in batches]

    batches = [torch.full((3,), float(i)) for i in range(20)]
    expected = run(noisy(batch.cuda()) for batch in batches)
    loader = PrefetchingLoader(batches, "cuda", transform=noisy)
    assert run(loader) == expected
    assert "draws random numbers" in str(loader.report())


class Images(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.full((3, 32, 32), index % 251, dtype=torch.uint8), index


def test_fit_on_uint8_images_trains_what_a_plain_loop_trains():
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 1)).cuda()
        return Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-5), mean_loss, "exact")

    def transform(batch):
        return batch[0].float() / 255, batch[1][:, None].float() / 512

    upstream = DataLoader(Images(), 64, num_workers=2)
    plain = make()
    for _ in range(2):
        for images, labels in upstream:
            plain.step(transform((images.cuda(), labels.cuda())))
    other = make()
    other.fit(other.prefetch(upstream, transform=transform, reuse=True), epochs=2, progress=False)
    for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_graph_can_be_captured_while_batches_are_fetched():
    weight = torch.ones(SIZE, device="cuda")
    static = torch.zeros(SIZE, device="cuda")
    stream = torch.cuda.Stream()
    out = []
    loader = PrefetchingLoader(numbered(400), "cuda", depth=4)
    for number, (x, _) in enumerate(loader):
        static.copy_(x)
        if number == 100:
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                result = (static * weight).sum()
                graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        if number >= 100:
            graph.replay()
            out.append(result.clone())
    assert [float(o) for o in out] == [float(SIZE * number) for number in range(100, 400)]


def test_a_bus_that_is_too_slow_is_named():
    batches = [torch.zeros(2**26, dtype=torch.uint8).pin_memory()] * 4 * 48
    loader = PrefetchingLoader(batches, "cuda", depth=2, reuse=True)
    for batch in loader:
        batch[:1024].sum()
    statistics = loader.statistics()
    assert statistics.copy_ms > 0.5
    assert statistics.verdict == "transfer-bound", loader.report()


def test_a_default_device_does_not_matter():
    with torch.device("cuda"):
        batches = [(torch.full((4,), float(i), device="cpu"), i) for i in range(6)]
        for (x, number), (given, _) in zip(
            PrefetchingLoader(batches, "cuda"), batches, strict=True
        ):
            assert x.device.type == "cuda"
            assert torch.equal(x.cpu(), given)
            assert isinstance(number, int)


def test_a_fed_device_is_called_fed():
    batches = [torch.zeros(2**16, dtype=torch.uint8)] * 400
    loader = PrefetchingLoader(batches, "cuda", depth=2, reuse=True)
    for _ in loader:
        torch.cuda._sleep(4_000_000)  # about 2 ms
    statistics = loader.statistics()
    assert statistics.verdict == "fed", loader.report()
    assert statistics.supply_over_demand > 2


def test_objects_and_nested_batches_keep_their_values_when_late(monkeypatch):
    monkeypatch.setattr(loader_module, "transport_for", Late)
    batches = [{"a": [torch.full((50,), i), {"b": torch.full((9,), -i)}]} for i in range(300)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number, batch in enumerate(PrefetchingLoader(iter(batches), "cuda", depth=3)):
        first, second = tensors(batch)
        wrong += (first != number).any() | (second != -number).any()
    assert int(wrong) == 0
