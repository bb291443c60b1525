"""Compiled steps on a real device: captured with their kernels, close to eager, and undone."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from benchmarks.outside_models import MODELS, without_dropout
from benchmarks.workloads.gpt import GPT
from benchmarks.workloads.tokens import next_token_loss
from gpu.compile_jobs import (
    FAST,
    STEPS,
    WARM_UP,
    assert_captured,
    gpt,
    image_loss,
    nothing_compiled,
    sgd,
    text,
    trained_on_gpu,
)
from gpu.graph_jobs import on_gpu
from gpu.syncs import no_syncs
from torchfast import CompileOptions, MicroBatches, Trainer
from torchfast.compiler import CompileRecord
from torchfast.testing import Tolerance, assert_parity

# bf16 against fp32: losses within 2 %, what training did to the parameters within a quarter.
CLOSE = Tolerance(loss=0.02, update=0.25)
# Normalised over a few small images, what bf16 rounds is amplified.
ROUGH = Tolerance(loss=0.05, update=0.5)


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left():
    with nothing_compiled():
        yield


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 16, 32, 32]
        self.convs = nn.ModuleList(
            nn.Conv2d(*pair, 3, padding=1) for pair in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2)
        return self.head(x.mean((2, 3)))


def images(count):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(32) % 10
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    return [
        (patterns[labels] + 0.5 * torch.randn(32, 3, 32, 32, generator=generator), labels)
        for _ in range(count)
    ]


def outside_model():
    return without_dropout(MODELS["transformers GPT-2"].build())


def outside_batches(count):
    generator = torch.Generator().manual_seed(0)
    return [MODELS["transformers GPT-2"].batch(generator) for _ in range(count)]


# -- Fast ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "loss_fn", "batches", "tolerance"),
    [
        (gpt, next_token_loss, text, CLOSE),
        (ConvNet, image_loss, images, ROUGH),
        (outside_model, MODELS["transformers GPT-2"].loss_fn, outside_batches, ROUGH),
    ],
    ids=["GPT", "ConvNet", "transformers GPT-2"],
)
def test_fast_is_captured_with_compiled_kernels_and_close_to_eager(
    make, loss_fn, batches, tolerance
):
    if make is outside_model:
        pytest.importorskip("transformers")
    result = assert_parity(
        make,
        sgd,
        loss_fn,
        batches(2 * STEPS),
        "fast",
        accumulate=2,
        max_grad_norm=1.0,
        device="cuda",
        tolerance=tolerance,
    )
    assert not result.exact
    assert_captured(result.report, STEPS, breaks=None if make is outside_model else 0)


@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_by_blocks_and_whole(regions):
    plan = FAST.replace(compile=CompileOptions(regions=regions))
    result = assert_parity(
        gpt, sgd, next_token_loss, text(STEPS), plan, device="cuda", tolerance=CLOSE
    )
    assert_captured(result.report, STEPS)
    found = result.report.counters
    told = [found.get(f"compile_{name}", 0) for name in ("regions", "kinds", "compiled")]
    assert told == ([4, 1, 4] if regions == "blocks" else [0, 0, 0])


def test_by_blocks_the_loss_is_compiled_too():
    told = {}
    for regions in ("blocks", ("blocks.*",)):
        plan = FAST.replace(compile=CompileOptions(regions=regions), cuda_graph=False)
        trainer = trained_on_gpu(plan)
        batches = on_gpu(text(4))
        for batch in batches:
            trainer.step(batch)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            trainer.step(batches[0])
            torch.cuda.synchronize()
        told[regions] = {event.key for event in profile.key_averages()}
        trainer.close()
    assert "aten::_log_softmax" in told[("blocks.*",)]  # the blocks alone
    assert "aten::_log_softmax" not in told["blocks"]


@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_a_steady_step_compiles_nothing_and_never_waits(regions):
    plan = FAST.replace(compile=CompileOptions(regions=regions))
    trainer = trained_on_gpu(plan, max_grad_norm=1.0)
    batches = on_gpu(text(8))
    for batch in batches[:WARM_UP]:
        trainer.step(batch)
    # The capture is of the fourth step: nothing is compiled in it, nor ever after.
    with CompileRecord() as record:
        for batch in batches * 3:
            trainer.step(batch)
        torch.cuda.synchronize()
        assert record.summary().frames == ()
        assert record.summary().backwards == ()
    with no_syncs():
        for batch in batches * 3:
            trainer.step(batch)
    assert_captured(trainer.report(), WARM_UP + 48)


@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_views_of_one_tensor_are_captured_as_they_are(regions):
    trainer = trained_on_gpu(FAST.replace(compile=CompileOptions(regions=regions)))
    for inputs, targets in on_gpu(text(STEPS)):
        tokens = torch.cat([inputs, targets[:, -1:]], 1)
        views = tokens[:, :-1], tokens[:, 1:]
        assert not any(view.is_contiguous() for view in views)
        trainer.step(views)
    assert_captured(trainer.report(), STEPS)


def test_a_ragged_last_batch_gets_a_graph_of_its_own():
    epoch = [*text(5), *text(1, batch=5)]
    result = assert_parity(
        gpt, sgd, next_token_loss, epoch * 4, "fast", device="cuda", tolerance=CLOSE
    )
    found = result.report.counters
    # The short one is warmed up once.
    assert (found["graphs"], found["replays"], found["eager steps"]) == (2, 17 + 3, 3 + 1)
    trainer = trained_on_gpu()
    batches = on_gpu(epoch)
    for batch in batches * 2:
        trainer.step(batch)
    with CompileRecord() as record:
        for batch in batches * 3:
            trainer.step(batch)
        assert record.summary().frames == ()


def test_dropout_draws_anew_in_each_replay():
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))

    def loss_fn(model, x):
        return model(x).square().mean()

    torch.manual_seed(0)
    model = Net().cuda()
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.0, momentum=0.9), loss_fn, "fast")
    x = torch.randn(32, 64, device="cuda")
    losses = {float(trainer.step(x)) for _ in range(STEPS)}
    assert len(losses) == STEPS
    assert_captured(trainer.report(), STEPS)


# -- What cannot be compiled -----------------------------------------------------------------------


def loss_that_breaks(model, batch):
    tokens, targets = batch
    logits = model(tokens).flatten(0, 1)
    print("", end="")  # noqa: T201 - what the compiler cannot put into a graph
    return F.cross_entropy(logits, targets.flatten())


def test_a_graph_break_in_the_loss_is_captured_all_the_same():
    result = assert_parity(
        gpt, sgd, loss_that_breaks, text(STEPS), "fast", device="cuda", tolerance=CLOSE
    )
    assert_captured(result.report, STEPS, breaks=1)


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Relu(Tanh):
    def forward(self, x):
        return x + torch.relu(self.linear(x))


def compiler_without_tanh(graph, inputs):
    if any(node.target is torch.tanh for node in graph.graph.nodes):
        raise RuntimeError("there is no tanh here")
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


def test_a_region_that_fails_goes_on_eagerly_and_the_step_is_captured():
    def loss_fn(model, batch):
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, 16, 64, generator=generator)
    options = CompileOptions(backend=compiler_without_tanh, regions=(Tanh, Relu))
    result = assert_parity(
        lambda: nn.Sequential(Tanh(), Relu(), Tanh(), Relu()),
        sgd,
        loss_fn,
        [(draw(), draw()) for _ in range(STEPS)],
        FAST.replace(compile=options),
        device="cuda",
        tolerance=CLOSE,
    )
    found = result.report.counters
    assert (found["compile_compiled"], found["compile_eager"]) == (2, 2)
    assert (found["graphs"], found["replays"]) == (1, STEPS - WARM_UP)
    (aside,) = [d for d in result.report.stepped_aside if d.lever == "compile"]
    assert "there is no tanh here" in aside.detail


# -- Between steps, and after them -----------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_evaluating_between_steps_leaves_the_graph_valid(regions):
    plan = FAST.replace(compile=CompileOptions(regions=regions))
    batches = on_gpu(text(STEPS))
    plain, evaluated = trained_on_gpu(plan), trained_on_gpu(plan)
    expected = [plain.step(batch) for batch in batches]
    losses = []
    for number, batch in enumerate(batches):
        losses.append(evaluated.step(batch))
        if number % 4 == 3:
            held_out = evaluated.evaluate(batches[:2])
            assert 0 < held_out["loss"] < 10
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)
    found = evaluated.report().counters
    assert (found["captures"], found["replays"]) == (1, STEPS - WARM_UP)


def test_micro_batches_share_what_is_compiled():
    trainer = trained_on_gpu(accumulate=3)
    batches = on_gpu(text(3 * STEPS))
    groups = [MicroBatches(batches[i : i + 3]) for i in range(0, len(batches), 3)]
    for group in groups:
        trainer.step(group)
    assert_captured(trainer.report(), STEPS)
    assert trainer.report().counters["compile_graphs"] == 1


@pytest.mark.parametrize("regions", ["blocks", "whole"])
def test_closing_gives_the_eager_model_back(regions):
    trainer = trained_on_gpu(FAST.replace(compile=CompileOptions(regions=regions)))
    batches = on_gpu(text(STEPS))
    keys = list(trainer.model.state_dict())
    for batch in batches:
        trainer.step(batch)
    trainer.close()
    model = trainer.model
    assert list(model.state_dict()) == keys
    assert type(model) is GPT
    twin = gpt().cuda()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    with CompileRecord() as record, torch.no_grad():
        assert torch.equal(model(batches[0][0]), twin(batches[0][0]))
        assert model(batches[0][0]).dtype is torch.float32
        assert record.summary().frames == ()
