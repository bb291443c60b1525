"""Parameters on the host in odd models and odd loops, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from parameter_offloading import Expert, mean_square, model_of, prompt_copies, same, trained
from torchfast import CaptureError, ParameterOffload, PlanError


@pytest.fixture
def copies(monkeypatch):
    return prompt_copies(monkeypatch)


def test_recurrent_layers(copies):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(3))

        def forward(self, x):
            for cell in self.cells:
                x = cell(x)[0]
            return x

    torch.manual_seed(0)
    model, batch = Recurrent(), torch.randn(2, 5, 8)
    expected = trained(copy.deepcopy(model), mean_square, batch)
    ParameterOffload(model, ("cells.*",))
    assert same(trained(model, mean_square, batch), expected)
    for cell in model.cells:
        assert all(map(lambda a, b: a is b, cell._flat_weights, cell.parameters()))


def test_a_block_that_is_shared_and_parameters_that_are_tied(copies):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.other = Expert(), Expert()
            self.other.up.weight = self.block.up.weight
            self.third = nn.Sequential(self.block.down, nn.Linear(8, 8))

        def forward(self, x):
            for _ in range(3):
                x = self.other(self.block(x))
            return self.third(torch.cat([x, x], -1))

    torch.manual_seed(0)
    model, batch = Shared(), torch.randn(4, 8)
    expected = trained(copy.deepcopy(model), mean_square, batch, num_micro=2)
    ParameterOffload(model, ("block", "other", "third"))
    assert same(trained(model, mean_square, batch, num_micro=2), expected)


def test_parts_of_a_block_that_are_called_alone(copies):
    model = nn.ModuleList(Expert() for _ in range(2))
    batch = torch.randn(4, 8)

    def loss_fn(model, x):
        for expert in model:
            x = expert.down(torch.relu(expert.up(x)))
        return x.square().mean()

    expected = trained(copy.deepcopy(model), loss_fn, batch)
    ParameterOffload(model)
    assert same(trained(model, loss_fn, batch), expected)


def test_frozen_parameters_sparse_gradients_and_hooks_of_parameters(copies):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8, sparse=True)
            self.frozen = Expert().requires_grad_(False)
            self.expert = Expert()

        def forward(self, x):
            return self.expert(self.frozen(self.embed(x)))

    def run(model):
        seen = []
        model.expert.up.weight.register_hook(lambda g: g * 2.0)
        model.expert.up.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
        for _ in range(2):
            mean_square(model, torch.tensor([1, 3, 3])).backward()
        return [*seen, *(p.grad.to_dense() for p in model.parameters() if p.grad is not None)]

    torch.manual_seed(0)
    model = Towers()
    expected = run(copy.deepcopy(model))
    ParameterOffload(model, ("embed", "frozen", "expert"))
    assert same(run(model), expected)
    assert model.embed.weight.grad.is_sparse


def test_a_frozen_tower_that_is_written_through_data_between_steps(copies):
    """As a teacher that follows its student: no backward comes through it."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
    expected = copy.deepcopy(teacher)
    offload = ParameterOffload(teacher, ("0",))
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(teacher(x), expected(x), rtol=0, atol=0)
        for model in (teacher, expected):
            for parameter in model.parameters():
                parameter.data.mul_(0.9).add_(0.1)
    assert offload.counters()["offload_fetched_blocks"] == 3


def test_gradients_of_gradients_and_a_graph_that_is_kept(copies):
    def run(model, x):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        twice = torch.autograd.grad(mean_square(model, x), list(model.parameters()))
        penalized = torch.autograd.grad(
            mean_square(model, x), list(model.parameters()), create_graph=True
        )
        sum(g.square().sum() for g in penalized).backward()
        return [*twice, *(p.grad for p in model.parameters())]

    torch.manual_seed(0)
    model = nn.Sequential(Expert(), Expert())
    x = torch.randn(4, 8, requires_grad=True)
    expected = run(copy.deepcopy(model), x)
    ParameterOffload(model)
    assert same(run(model, x), expected)


def test_a_graph_outlives_its_model(copies):
    def run(is_offloaded):
        torch.manual_seed(0)
        model = nn.Sequential(*(Expert() for _ in range(4)))
        offload = ParameterOffload(model) if is_offloaded else None
        parameters = list(model.parameters())
        loss = mean_square(model, torch.randn(4, 8))
        del model, offload
        gc.collect()
        loss.backward()
        return [p.grad for p in parameters]

    assert same(run(is_offloaded=True), run(is_offloaded=False))


def test_under_anomaly_detection(copies):
    model = nn.Sequential(Expert(), Expert())
    ParameterOffload(model)
    with torch.autograd.set_detect_anomaly(True):
        mean_square(model, torch.randn(4, 8)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_evaluation_and_inference_mode_between_steps(copies):
    model, loss_fn, batch, _ = model_of("resnet")
    twin = copy.deepcopy(model)
    ParameterOffload(model)
    for mode in (torch.no_grad, torch.inference_mode):
        for each in (model, twin):
            loss_fn(each.train(), batch).backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.sub_(0.1 * parameter.grad)
        with mode():
            assert torch.equal(loss_fn(model.eval(), batch), loss_fn(twin.eval(), batch))
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_loaded_state_replaced_parameters_and_errors_in_a_forward(copies):
    model, loss_fn, batch, _ = model_of("gpt")
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    ParameterOffload(model, max_resident_blocks=3)
    loss_fn(model, batch)  # its blocks are there now
    for assign in (False, True):
        state = other.state_dict() if assign else twin.state_dict()
        for each in (model, twin):
            each.load_state_dict(copy.deepcopy(state), assign=assign)
        assert torch.equal(loss_fn(model, batch), loss_fn(twin, batch))
    with pytest.raises(RuntimeError, match="size"):
        model.blocks[0](torch.ones(2, 3, 7))
    assert all(isinstance(p, nn.Parameter) for m in model.modules() for p in m._parameters.values())
    assert torch.equal(loss_fn(model, batch), loss_fn(twin, batch))


def test_a_parameter_that_is_written_between_forward_and_backward_is_an_error(copies):
    model = nn.Sequential(Expert(), Expert())
    ParameterOffload(model)
    loss = mean_square(model, torch.randn(4, 8))
    with torch.no_grad():
        model[0].down.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = mean_square(model, torch.randn(4, 8))
    model[0].down.weight = nn.Parameter(torch.ones(8, 16))
    with pytest.raises(RuntimeError, match=r"a parameter of block '0' was replaced between"):
        loss.backward()


def test_a_forward_that_writes_to_its_parameters_is_an_error(copies):
    class Writing(Expert):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = nn.Sequential(Writing(), Writing())
    ParameterOffload(model)
    with pytest.raises(RuntimeError, match=r"the forward of block '0' writes to its parameter"):
        model(torch.randn(4, 8))


def test_a_capture_is_refused(copies):
    model = nn.Sequential(Expert(), Expert())
    ParameterOffload(model)
    copies.capturing = True
    with pytest.raises(CaptureError, match=r"block '0' has its parameters on the host"):
        model(torch.randn(4, 8))


def test_closing_leaves_the_model_as_it_was(copies):
    model, loss_fn, batch, _ = model_of("gpt")
    expected = trained(copy.deepcopy(model), loss_fn, batch)
    with ParameterOffload(model) as offload:
        loss_fn(model, batch).backward()
        copied = copy.deepcopy(model)
        assert type(copied.blocks[0]).forward is copied.blocks[0].forward.__func__
    assert offload.is_closed
    offload.close()
    model.zero_grad()
    assert same(trained(model, loss_fn, batch), expected)
    reference = weakref.ref(model)
    ParameterOffload(model)  # of one that nobody holds any more
    ParameterOffload(model)
    assert same(trained(copied, loss_fn, batch), expected)
    del model, offload, copied
    gc.collect()
    assert reference() is None


def test_on_the_cpu_it_steps_aside():
    model, *_ = model_of("gpt")
    offload = ParameterOffload(model)
    assert offload.decision.outcome == "stepped aside"
    assert offload.counters() == {}
    assert not any("forward" in vars(module) for module in model.modules())
    assert repr(offload) == "ParameterOffload(GPT: blocks.0 to blocks.2, max_resident_blocks=2)"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_refused(copies):
    model, *_ = model_of("gpt")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        ParameterOffload(None)
    with pytest.raises(ValueError, match="max_resident_blocks must be >= 1"):
        ParameterOffload(model, max_resident_blocks=0)
    with pytest.raises(ValueError, match=r"parameters names 'block\.\*'.*did you mean"):
        ParameterOffload(model, ("block.*",))
    with pytest.raises(PlanError, match=r"names the blocks that a model repeats, and Linear has"):
        ParameterOffload(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="parameters must be one of"):
        ParameterOffload(model, "blocks.0")
    kept = ParameterOffload(model)
    with pytest.raises(ValueError, match=r"another ParameterOffload .* module 'blocks\.0'"):
        ParameterOffload(model)
    kept.close()
    model.head.weight = model.embed.weight
    with pytest.raises(ValueError, match=r"'embed\.weight' is tied to 'head\.weight', which stays"):
        ParameterOffload(model, ("embed",))
    ParameterOffload(model, ("embed", "head")).close()
    lazy = nn.Sequential(Expert(), Expert()).to("meta")
    with pytest.raises(ValueError, match=r"'0\.up\.weight' cannot be on the host: it is on the me"):
        ParameterOffload(lazy, device="cpu")
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be .* \(UninitializedParameter\)"):
        ParameterOffload(nn.Sequential(nn.LazyLinear(2)), (nn.LazyLinear,), device="cpu")
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"parameters of module '0' cannot .* TorchScript"):
        ParameterOffload(scripted, ("0",))
