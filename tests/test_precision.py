"""Number formats: what is set, when, and that it is put back; the traps of autocast and scaling."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from models import make_batches, mean_loss
from test_parity import OPTIMIZERS
from torchfast import Plan, PlanError, PrecisionOptions, Trainer, TrainStep
from torchfast._core.fp32_switches import fp32_precision
from torchfast.precision import PrecisionPolicy

CPU = torch.device("cpu")


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def switches():
    return (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


# --- switches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_fp32_switches_are_put_back(value):
    before = switches()
    with fp32_precision(value, "cuda"):
        assert torch.backends.cuda.matmul.fp32_precision == value
        assert torch.backends.cudnn.conv.fp32_precision == value
    assert switches() == before


def test_fp32_switches_are_put_back_after_an_error():
    before = switches()
    with pytest.raises(ZeroDivisionError), fp32_precision("tf32", "cuda"):
        raise ZeroDivisionError
    assert switches() == before


def test_fp32_is_full_precision_on_a_cpu_too(monkeypatch):
    seen = []

    def loss_fn(model, batch):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return mean_loss(model, batch)

    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        for plan in (Plan(precision="fp32"), Plan()):
            TrainStep(net(), OPTIMIZERS["SGD"], loss_fn, plan)(make_batches(1)[0])
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert seen == ["ieee", "bf16"]


def test_autocast_covers_the_forward_alone():
    seen = {}

    def loss_fn(model, batch):
        seen["forward"] = torch.is_autocast_enabled("cpu")
        logits = model(batch[0])
        seen["dtype"] = logits.dtype
        return nn.functional.cross_entropy(logits, batch[1])

    model = net()
    model[0].weight.register_hook(lambda g: seen.update(backward=torch.is_autocast_enabled("cpu")))
    step = TrainStep(model, OPTIMIZERS["AdamW"], loss_fn, Plan(precision="bf16"))
    step(make_batches(1)[0])
    assert seen == {"forward": True, "dtype": torch.bfloat16, "backward": False}
    assert not torch.is_autocast_enabled("cpu")
    assert model[0].weight.dtype == torch.float32


def test_autocast_ends_when_the_loss_function_raises():
    def loss_fn(model, batch):
        raise ZeroDivisionError

    step = TrainStep(net(), OPTIMIZERS["AdamW"], loss_fn, Plan(precision="bf16"))
    with pytest.raises(ZeroDivisionError):
        step(make_batches(1)[0])
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("plan", ["eager", "exact"])
def test_as_given_touches_nothing(plan):
    with torch.autocast("cpu", torch.bfloat16):
        step = TrainStep(net(), OPTIMIZERS["AdamW"], mean_loss, plan)
        before = switches()
        step(make_batches(1)[0])
        assert torch.is_autocast_enabled("cpu")
    assert switches() == before


# --- the autocast cache --------------------------------------------------------------------------


def train_inside_autocast(monkeypatch, *, cleared):
    """Train with the whole loop inside one autocast context, as people do by mistake."""
    torch.manual_seed(0)
    model = net()
    step = TrainStep(model, partial(optim.SGD, lr=0.5), mean_loss)
    if not cleared:
        monkeypatch.setattr(PrecisionPolicy, "after_update", staticmethod(lambda: None))
    batch = make_batches(1, size=32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        return torch.stack([step(batch) for _ in range(5)])


def test_a_step_inside_autocast_sees_updated_weights(monkeypatch):
    losses = train_inside_autocast(monkeypatch, cleared=True)
    assert (losses.diff() < 0).all()


def test_the_autocast_cache_would_go_stale(monkeypatch):
    """The control: without the clearing, every forward sees the first weights."""
    losses = train_inside_autocast(monkeypatch, cleared=False)
    assert (losses == losses[0]).all()


def test_evaluation_inside_autocast_does_not_take_the_graph_away():
    model = net()
    trainer = Trainer(model, partial(optim.SGD, lr=0.5), mean_loss)
    batches = make_batches(2, size=32)
    with torch.autocast("cpu", torch.bfloat16):
        trainer.evaluate(batches)
        trainer.step(batches[0])
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


# --- fp16 ----------------------------------------------------------------------------------------


def fp16(**scaling):
    return Plan(precision=PrecisionOptions(format="fp16", **scaling))


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "Rprop"])
def test_fp16_skips_what_a_gradscaler_loop_skips(name):
    """Same skipped steps, same scale, same parameters as torch's GradScaler loop.

    Its scale starts far too high, so the first updates are skipped, and one batch overflows
    whatever the scale is.
    """
    torch.manual_seed(0)
    plain = net()
    ours = copy.deepcopy(plain)
    batches = make_batches(30, size=32)
    batches[17] = (batches[17][0] * 1e6, batches[17][1])
    # A plain GradScaler loop with fused SGD is wrong when its first update is skipped (the test
    # below), so the unfused form is the reference.
    fused_sgd = {"fused": False} if name.startswith("SGD") else {}
    optimizer = OPTIMIZERS[name](plain.parameters(), **fused_sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    skipped = 0
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mean_loss(plain, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before

    step = TrainStep(ours, OPTIMIZERS[name], mean_loss, fp16(init_scale=2.0**22), max_grad_norm=1.0)
    for batch in batches:
        step(batch)
    assert step.state_dict()["scaler"]["scaler"]["scale"] == scaler.get_scale()
    assert step.num_skipped == skipped
    assert skipped >= 3
    assert step.num_steps == 30
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_skipped_first_update_leaves_fused_sgd_without_momentum(monkeypatch):
    """torch counts it as done and leaves the buffer uninitialised: poison shows who reads it."""
    empty_like = torch.empty_like

    def poisoned(tensor, **options):
        return empty_like(tensor, **options).fill_(torch.nan)

    def train(step):
        for batch in make_batches(12, size=32):
            step(batch)

    torch.manual_seed(0)
    plain, ours = net(), net()
    make = partial(optim.SGD, lr=0.1, momentum=0.9, fused=True)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**22), make(plain.parameters())

    def plain_step(batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mean_loss(plain, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    monkeypatch.setattr(torch, "empty_like", poisoned)
    step = TrainStep(ours, make, mean_loss, fp16(init_scale=2.0**22))
    train(step)
    assert step.num_skipped > 0
    assert all(p.isfinite().all() for p in ours.parameters())
    train(plain_step)  # the control: torch's own loop reads the poison
    assert not all(p.isfinite().all() for p in plain.parameters())


def test_fp16_gradients_are_unscaled_between_the_halves():
    torch.manual_seed(0)
    scaled, plain = net(), None
    plain = copy.deepcopy(scaled)
    batch = make_batches(1, size=32)[0]
    step = TrainStep(scaled, OPTIMIZERS["AdamW"], mean_loss, fp16(init_scale=1024.0))
    step.forward_backward(batch)
    mean_loss(plain, batch).backward()
    for mine, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=1e-3)
    step.forward_backward(batch)  # a second one discards the first
    step.update()
    with pytest.raises(RuntimeError, match="call forward_backward"):
        step.update()


def test_fp16_clips_the_true_gradient():
    step = TrainStep(
        net(), partial(optim.SGD, lr=0.1), mean_loss, fp16(init_scale=1024.0), max_grad_norm=1e-3
    )
    step.forward_backward(make_batches(1)[0])
    norm = torch.cat([p.grad.flatten() for p in step.model.parameters()]).norm()
    step.update()
    torch.testing.assert_close(step.metrics["grad_norm"], norm)
    clipped = torch.cat([p.grad.flatten() for p in step.model.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(1e-3), rtol=1e-3, atol=0)


def test_fp16_says_when_it_reads_the_host():
    class Counting(optim.SGD):
        """An optimizer whose state we know nothing of."""

    Counting.__module__ = "somewhere.else"
    step = TrainStep(net(), partial(Counting, lr=0.1), mean_loss, fp16())
    step(make_batches(1)[0])
    aside = {d.lever: d.detail for d in step.report().stepped_aside}
    assert "reads one flag" in aside["loss scaling"]
    step = TrainStep(net(), OPTIMIZERS["AdamW fused"], mean_loss, fp16())
    step(make_batches(1)[0])
    assert step.report().stepped_aside == ()


def test_a_skipped_first_update_steps_the_scheduler_in_peace():
    """Otherwise torch warns that the scheduler ran before the optimizer, which is an error here."""
    scheduler = partial(optim.lr_scheduler.StepLR, step_size=1)
    step = TrainStep(
        net(), OPTIMIZERS["RMSprop"], mean_loss, fp16(init_scale=2.0**24), lr_scheduler=scheduler
    )
    step(make_batches(1, size=32)[0])
    assert step.num_skipped == 1
    assert step.lr_scheduler.last_epoch == 1


def test_scaling_state_is_resumed():
    batches = make_batches(8, size=32)

    def fresh():
        torch.manual_seed(0)
        plan = fp16(init_scale=2.0**20, growth_interval=2)
        return TrainStep(net(), OPTIMIZERS["AdamW"], mean_loss, plan)

    whole, first, second = fresh(), fresh(), fresh()
    losses = [whole(b) for b in batches]
    for b in batches[:4]:
        first(b)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.num_skipped == first.num_skipped > 0
    assert torch.equal(torch.stack([second(b) for b in batches[4:]]), torch.stack(losses[4:]))


# --- what is possible ----------------------------------------------------------------------------


def test_auto_takes_bf16_only_where_it_is_native(monkeypatch):
    import torchfast.precision.policy as policy

    for native in (True, False):
        monkeypatch.setattr(policy, "has_fast_bf16", lambda device, native=native: native)
        chosen = PrecisionPolicy(PrecisionOptions(format="auto"), CPU)
        assert chosen.format == ("bf16" if native else "as_given")
        assert chosen.decision.outcome == ("applied" if native else "left alone")


def test_tf32_steps_aside_on_a_cpu():
    chosen = PrecisionPolicy(PrecisionOptions(format="tf32"), CPU)
    assert chosen.format == "as_given"
    assert "no tf32 units" in chosen.decision.detail


def test_scaling_without_fp16_is_a_contradiction():
    with pytest.raises(PlanError, match="init_scale belongs to loss scaling"):
        PrecisionOptions(format="bf16", init_scale=2.0)
    with pytest.raises(PlanError, match="growth_factor must be > 1"):
        PrecisionOptions(format="fp16", growth_factor=1.0)
    with pytest.raises(PlanError, match="backoff_factor must be < 1"):
        PrecisionOptions(format="fp16", backoff_factor=1.0)


# --- channels_last -------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))


def test_channels_last_is_put_on_and_taken_off():
    model = ConvNet()
    parameter, strides, values = model.conv.weight, model.conv.weight.stride(), None
    values = parameter.detach().clone()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return mean_loss(model, batch)

    batch = (torch.randn(4, 3, 6, 6), torch.randint(4, (4,)))
    with Trainer(model, optimizer, loss_fn, Plan(channels_last=True)) as trainer:
        assert model.conv.weight is parameter
        assert parameter.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(parameter, values)
        trainer.step(batch)
        for prefetched in trainer.prefetch([batch]):
            assert prefetched[0].is_contiguous(memory_format=torch.channels_last)
            trainer.step(prefetched)
        moments = optimizer.state[parameter]["exp_avg"]
        assert moments.stride() == parameter.stride()
    assert seen == [True, True]
    assert parameter.stride() == strides
    assert optimizer.state[parameter]["exp_avg"].stride() == strides


def test_channels_last_realigns_loaded_state():
    model = ConvNet()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, fused=True)
    batch = (torch.randn(4, 3, 6, 6), torch.randint(4, (4,)))
    with Trainer(model, optimizer, mean_loss) as trainer:
        trainer.step(batch)
        saved = copy.deepcopy(trainer.state_dict())
    with Trainer(model, optimizer, mean_loss, Plan(channels_last=True)) as trainer:
        trainer.load_state_dict(saved)
        moments = optimizer.state[model.conv.weight]["exp_avg"]
        assert moments.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(moments, saved["optimizer"]["state"][0]["exp_avg"])
        trainer.step(batch)


def test_channels_last_leaves_a_model_without_convolutions_alone():
    trainer = Trainer(net(), OPTIMIZERS["SGD"], mean_loss, Plan(channels_last=True))
    decision = next(d for d in trainer.report().decisions if d.lever == "channels_last")
    assert decision.outcome == "left alone"
    assert "no 2-d convolution" in decision.detail


def masked_loss(model, batch):
    inputs, targets, mask = batch
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    return (losses * mask).sum(), {}, mask.sum()


def test_fp16_skips_a_batch_of_no_weight():
    """0 / 0 arises in the division by the weight, which the finite check has to see."""
    step = TrainStep(net(), OPTIMIZERS["AdamW"], masked_loss, fp16(init_scale=256.0))
    inputs, targets = make_batches(1)[0]
    step((inputs, targets, torch.ones(len(targets))))
    before = copy.deepcopy(step.model.state_dict())
    step((inputs, targets, torch.zeros(len(targets))))
    assert step.num_skipped == 1
    assert all(torch.equal(v, before[k]) for k, v in step.model.state_dict().items())


def test_fp16_clipping_refuses_gradients_that_nobody_unscales():
    model = net()
    head = model[2].parameters()
    with pytest.raises(ValueError, match=r"2 are not \(0.weight, 0.bias\)"):
        TrainStep(model, optim.SGD(head, lr=0.1), mean_loss, fp16(), max_grad_norm=1.0)


def test_a_nested_evaluation_does_not_leave_autocast_on():
    def loss_fn(model, batch):
        trainer.evaluate([batch]) if model.training else None
        return mean_loss(model, batch)

    trainer = Trainer(net(), OPTIMIZERS["SGD"], loss_fn, Plan(precision="bf16"))
    trainer.step(make_batches(1)[0])
    assert not torch.is_autocast_enabled("cpu")


def test_an_inherited_fp32_switch_stays_inherited():
    holder = torch.backends.cuda.matmul
    before = holder.fp32_precision
    try:
        holder.fp32_precision = "none"  # though another test has left a value
        torch.backends.fp32_precision = "tf32"
        with fp32_precision("ieee", "cuda"):
            pass
        torch.backends.fp32_precision = "none"
        assert holder.fp32_precision == "none"
    finally:
        torch.backends.fp32_precision = "none"
        holder.fp32_precision = before


def test_channels_last_leaves_shared_storage_tied():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
            self.b.weight.data = self.a.weight.data

        def forward(self, x):
            return self.b(self.a(x)).mean((2, 3))

    model = Twins()
    Trainer(model, OPTIMIZERS["SGD"], mean_loss, Plan(channels_last=True))
    assert model.a.weight.data_ptr() == model.b.weight.data_ptr()
