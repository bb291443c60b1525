"""What only a GPU shows: forms, formats, layouts, moves and exact resume there."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from models import (
    BatchNormNet,
    DropoutNet,
    counted_loss,
    make_batches,
    mean_loss,
    weighted_loss,
)
from test_parity import OPTIMIZERS, SCHEDULERS
from torchfast import MicroBatches, Plan, PrecisionOptions, Trainer, TrainStep
from torchfast.testing import Tolerance, assert_parity


@pytest.mark.parametrize("plan", ["eager", "exact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_exact(name, plan):
    for loss_fn in (mean_loss, weighted_loss, counted_loss):
        result = assert_parity(
            DropoutNet,
            OPTIMIZERS[name],
            loss_fn,
            make_batches(7),
            plan,
            accumulate=3,
            max_grad_norm=0.5,
            lr_scheduler=SCHEDULERS["LambdaLR"],
            device="cuda",
        )
        assert result.exact


@pytest.mark.parametrize(
    "precision",
    ["fp32", "tf32", "bf16", PrecisionOptions(format="fp16", init_scale=1024.0)],
    ids=str,
)
def test_every_format_is_close(precision):
    # No dropout: its mask on a GPU depends on the dtype, by the width of the vectors it draws.
    result = assert_parity(
        BatchNormNet,
        partial(optim.SGD, lr=0.05, momentum=0.9),
        mean_loss,
        make_batches(24, size=64),
        Plan(precision=precision),
        accumulate=2,
        max_grad_norm=1.0,
        device="cuda",
        tolerance=Tolerance(loss=0.02, update=0.05),
    )
    assert result.num_steps == 12


def test_tf32_is_on_in_the_step_and_off_after_it():
    model = nn.Linear(512, 512).cuda()
    x = torch.randn(512, 512, device="cuda")
    seen = []

    def loss_fn(model, x):
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return model(x).square().mean()

    def loss(precision):
        step = TrainStep(
            copy.deepcopy(model), partial(optim.SGD, lr=0.1), loss_fn, Plan(precision=precision)
        )
        return step(x)

    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    full, tf32 = loss("fp32"), loss("tf32")
    assert seen == ["ieee", "tf32"]
    assert full != tf32
    torch.testing.assert_close(full, tf32, rtol=1e-2, atol=0)
    after = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    assert before == after


@pytest.mark.parametrize(
    "name", ["AdamW", "SGD", "SGD momentum", "SGD nesterov fused", "RMSprop", "NAdam", "Adafactor"]
)
def test_fp16_skips_what_a_gradscaler_loop_skips(name):
    """The update is GradScaler's: the same steps skipped, the same scale, close parameters."""
    make = OPTIMIZERS[name]
    # The fused SGD of a plain GradScaler loop is no reference: its momentum is uninitialised
    # memory once the first update was skipped.
    reference = partial(make, fused=False) if name.startswith("SGD") else make
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).cuda()
    ours = copy.deepcopy(plain)
    batches = [tuple(t.cuda() for t in b) for b in make_batches(20, size=32)]
    batches[7] = (batches[7][0] * 1e6, batches[7][1])  # overflows whatever the scale

    def loss_fn(model, batch):
        return mean_loss(model, batch)

    optimizer, scaler = (
        reference(plain.parameters()),
        torch.amp.GradScaler("cuda", init_scale=2.0**24),
    )
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = loss_fn(plain, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    options = PrecisionOptions(format="fp16", init_scale=2.0**24)
    step = TrainStep(ours, make, loss_fn, Plan(precision=options), max_grad_norm=1.0)
    for batch in batches:
        step(batch)
    scale = step.state_dict()["scaler"]["scaler"]["scale"]
    assert scale == scaler.get_scale()
    assert step.num_skipped >= 2
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.isfinite().all()
        # The forms differ by rounding, which twenty steps of a small net amplify.
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-4)


def test_fp16_says_when_it_reads_the_host():
    model = nn.Linear(8, 4).cuda()
    step = TrainStep(model, OPTIMIZERS["Adafactor"], mean_loss, Plan(precision="fp16"))
    batch = make_batches(1)[0]
    step(batch)
    step(batch)
    aside = {d.lever: d.detail for d in step.report().stepped_aside}
    assert "reads one flag" in aside["loss scaling"]


def test_the_fused_form_comes_off_again():
    model = DropoutNet().cuda()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, mean_loss, "fast")
    batches = make_batches(4)
    for batch in batches:
        trainer.step(batch)
    state = optimizer.state[next(model.parameters())]
    assert optimizer.param_groups[0]["fused"] is True
    assert state["step"].device.type == "cuda"
    saved = trainer.state_dict()["optimizer"]
    assert saved["param_groups"][0]["fused"] is None
    assert saved["state"][0]["step"].device.type == "cpu"
    trainer.close()
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.state[next(model.parameters())]["step"].device.type == "cpu"
    optimizer.step()


def test_loading_a_plain_state_keeps_the_form():
    """A file of a plain loop says fused=None; loading it must not take the form off."""
    model = DropoutNet().cuda()
    plain = optim.AdamW(model.parameters(), lr=0.01)
    mean_loss(model, tuple(t.cuda() for t in make_batches(1)[0])).backward()
    plain.step()
    saved = copy.deepcopy(plain.state_dict())
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, mean_loss, "fast")
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.state[next(model.parameters())]["step"].device.type == "cuda"
    trainer.step(make_batches(1)[0])


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.norm = nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.norm(self.conv2(F.relu(self.conv1(x)))).mean((2, 3)))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def images(count):
    return [(torch.randn(8, 3, 16, 16), torch.randint(10, (8,))) for _ in range(count)]


@pytest.mark.parametrize("form", ["as_given", "fused"])
def test_channels_last_trains_with_state_that_was_there_before(form):
    model = ConvNet().cuda()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    batches = images(4)
    with Trainer(model, optimizer, classify) as trainer:
        trainer.step(batches[0])
    strides = model.conv2.weight.stride()
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return classify(model, batch)

    plan = Plan(channels_last=True, optimizer=form)
    with Trainer(model, optimizer, loss_fn, plan) as trainer:
        assert model.conv2.weight.is_contiguous(memory_format=torch.channels_last)
        for batch in batches:
            trainer.step(batch)
        trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
        trainer.step(batches[0])
    assert all(seen)
    assert model.conv2.weight.stride() == strides
    moments = optimizer.state[model.conv2.weight]["exp_avg"]
    assert moments.stride() == strides


def test_channels_last_is_close():
    assert_parity(
        ConvNet,
        partial(optim.SGD, lr=0.05, momentum=0.9),
        classify,
        images(10),
        Plan(channels_last=True),
        device="cuda",
        tolerance=Tolerance(loss=1e-3, update=1e-2),
    )


def test_device_moves_model_and_optimizer_state():
    model = DropoutNet()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    batches = make_batches(3)
    with Trainer(model, optimizer, mean_loss) as trainer:
        trainer.step(batches[0])
    with Trainer(model, optimizer, mean_loss, device="cuda") as trainer:
        trainer.step(batches[1])
    parameter = next(model.parameters())
    assert parameter.device.type == "cuda"
    assert optimizer.state[parameter]["exp_avg"].device.type == "cuda"
    assert optimizer.state[parameter]["step"].device.type == "cpu"


def test_device_out_of_range_lists_what_there_is():
    with pytest.raises(ValueError, match=r"'cuda:99' does not exist.*'cuda:0'"):
        Trainer(DropoutNet(), partial(optim.SGD, lr=0.1), mean_loss, device="cuda:99")


@pytest.mark.parametrize("plan", ["exact", "fast", Plan(precision="fp16")], ids=str)
def test_resume_is_exact(plan):
    batches = make_batches(12)

    def fresh():
        torch.manual_seed(0)
        return Trainer(
            DropoutNet().cuda(),
            OPTIMIZERS["AdamW"],
            mean_loss,
            plan,
            accumulate=2,
            max_grad_norm=1.0,
            lr_scheduler=SCHEDULERS["CosineAnnealingLR"],
        )

    groups = [MicroBatches(batches[i : i + 2]) for i in range(0, 12, 2)]
    whole = fresh()
    losses = [whole.step(group) for group in groups]
    first = fresh()
    for group in groups[:3]:
        first.step(group)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second = fresh()
    torch.rand(5, device="cuda")
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    resumed = [second.step(group) for group in groups[3:]]
    assert torch.equal(torch.stack(losses[3:]), torch.stack(resumed))
    for mine, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_cudnn_measures_while_gradients_are_computed_and_the_graph_keeps_its_choice():
    """Close to the plain loop: other kernels round otherwise."""
    seen = []

    class Seen(nn.Sequential):
        def forward(self, x):
            seen.append(torch.backends.cudnn.benchmark)
            return super().forward(x)

    def build(plan):
        torch.manual_seed(0)
        model = Seen(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Trainer(model.cuda(), optimizer, lambda m, x: m(x).square().mean(), plan)

    batches = [torch.randn(4, 3, 16, 16, device="cuda") for _ in range(12)]
    losses = []
    for plan in (Plan(), Plan(cudnn_benchmark=True, cuda_graph=True)):
        with build(plan) as trainer:
            losses.append([float(trainer.step(batch)) for batch in batches])
            replays = trainer.report().counters.get("replays", 0)
    assert replays > 0
    assert set(seen[: len(batches)]) == {False}
    assert set(seen[len(batches) :]) == {True}
    assert torch.backends.cudnn.benchmark is False
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
