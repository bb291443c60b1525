"""Every workload of the yardstick trains, on data that is the same each time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import get_args

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import workloads
from benchmarks.workloads import NAMES, Batch, Size, Workload, workload

PARAMETERS_IN_MILLIONS = {
    "mlp": 0.67,
    "mlp-transfer-bound": 0.67,
    "gpt-small": 10.8,
    "gpt2": 124.4,
    "moe": 426.0,
    "resnet50": 25.6,
    "resnet50-input-bound": 25.6,
    "vit": 86.6,
    "dlrm": 167.6,
    "lstm": 14.5,
    "unet": 31.0,
    "llama": 1137.8,
}


def losses_of_a_plain_loop(load: Workload, steps: int = 24) -> list[float]:
    torch.manual_seed(0)
    model = load.build()
    optimizer = torch.optim.AdamW(model.parameters(), load.lr)
    losses = []
    for batch in itertools.islice(itertools.cycle(load.batches()), steps):
        optimizer.zero_grad()
        loss = load.loss_fn(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(one: Iterable[Batch], other: Iterable[Batch]) -> bool:
    return all(
        torch.equal(a, b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def layout(batch: Batch) -> list[tuple[torch.Size, torch.dtype, bool]]:
    return [(tensor.shape, tensor.dtype, tensor.is_contiguous()) for tensor in batch]


class NothingOnTheHost(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            on_host = isinstance(value, torch.Tensor) and value.device.type == "cpu"
            assert not on_host, f"{func} makes a tensor on the host"
        return out


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_within_24_steps(name):
    losses = losses_of_a_plain_loop(workload(name, "smoke"))
    assert sum(losses[-4:]) / 4 < 0.9 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_alike_and_the_same_each_time(name):
    load = workload(name, "smoke")
    torch.manual_seed(1)
    batches = load.batches()
    torch.manual_seed(2)
    assert same(batches, load.batches())
    assert not same(batches[:1], batches[1:2])
    assert all(layout(batch) == layout(batches[0]) for batch in batches)
    assert all(contiguous for _, _, contiguous in layout(batches[0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_as_many_items_as_are_told(name):
    load = workload(name, "smoke")
    first = load.batches()[0][0]
    assert load.items_per_step == (first.numel() if load.unit == "tokens" else len(first))


@pytest.mark.parametrize("name", NAMES)
def test_the_full_size_has_the_parameters_that_it_says(name):
    with torch.device("meta"):
        model = workload(name, "full").build()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(PARAMETERS_IN_MILLIONS[name], rel=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compiled_is_of_a_class_of_its_own(name):
    # Module.compile() changes nothing in torch.nn's own classes, and says nothing.
    load = workload(name, "smoke")
    model = load.build()
    for module in (model, *load.regions(model)):
        assert type(module).__module__.startswith(workloads.__name__)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_stays_on_the_device_and_draws_no_random_numbers(name):
    load = workload(name, "smoke")
    model = load.build().to("meta")  # to read a value of this device is an error
    batch = tuple(tensor.to("meta") for tensor in load.batches()[0])
    state = torch.get_rng_state()
    with NothingOnTheHost():
        load.loss_fn(model, batch).backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_made_on_the_host_is_noticed():
    with NothingOnTheHost(), pytest.raises(AssertionError, match="makes a tensor on the host"):
        torch.arange(3) + torch.zeros(3, device="meta")


@pytest.mark.parametrize("name", [name for name in NAMES if workload(name, "smoke").language])
def test_a_language_model_returns_logits_and_sees_nothing_that_comes_later(name):
    load = workload(name, "smoke")
    model = load.build()
    tokens, targets = load.batches()[0]
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    later = tokens.clone()
    later[:, -1] = (later[:, -1] + 1) % 2
    logits, changed = model(tokens), model(later)
    assert logits.shape[:2] == tokens.shape
    torch.testing.assert_close(logits[:, :-1], changed[:, :-1])
    assert not torch.equal(logits[:, -1], changed[:, -1])


def test_an_expert_that_is_not_picked_gets_no_gradient():
    torch.manual_seed(0)
    experts = workload("moe", "smoke").build().get_submodule("blocks.0.feed_forward")
    experts(torch.randn(1, 1, 32)).sum().backward()
    weights = [p for n, p in experts.named_parameters() if n.endswith("up.weight")]
    assert sum(bool(weight.grad.any()) for weight in weights) == 2


def test_the_loader_yields_the_same_batches_in_every_run_and_with_any_workers():
    load = workload("resnet50-input-bound", "smoke")
    ready = load.batches()
    loader = load.loader(pin_memory=False)
    for _ in range(2):
        assert same(itertools.islice(loader, len(ready)), ready)
    assert layout(next(iter(loader))) == layout(ready[0])


def test_only_the_input_bound_workload_has_a_loader():
    with_loader = [name for name in NAMES if workload(name, "smoke").loader is not None]
    assert with_loader == ["resnet50-input-bound"]


@pytest.mark.parametrize("size", get_args(Size))
def test_names_and_titles(size):
    loads = [workload(name, size) for name in NAMES]
    assert [load.name for load in loads] == list(NAMES)
    assert len({load.title for load in loads}) == len(NAMES)


def test_a_title_is_made_from_the_size():
    assert workload("gpt-small", "full").title == "GPT 10.8M (6 layers, d 384), 16x256 tokens"


def test_an_unknown_name_is_told():
    with pytest.raises(ValueError, match="no workload 'gtp2'; there are: mlp, "):
        workload("gtp2", "smoke")
