"""Other ways to a derivative than a backward work, or say what to do; none gives zeros instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd import functional as autograd_functional
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from large_vocabulary import assert_same, make, plain
from torchfast.losses import LinearCrossEntropy, linear_cross_entropy

# Torch's own, at the first use of its forward mode.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

HIDDEN, WEIGHT, TARGETS, BIAS = (tensor.detach() for tensor in make())
TRANSFORMED = r"no transform of torch\.func \(.*use F\.cross_entropy\(F\.linear\("


def loss_of(hidden):
    return linear_cross_entropy(hidden, WEIGHT, TARGETS, BIAS, chunk_size=4)


def loss_of_each(hidden, targets):
    return linear_cross_entropy(hidden, WEIGHT, targets, reduction="none")


TRANSFORMS = {
    "grad": lambda: grad(loss_of)(HIDDEN),
    "vjp": lambda: vjp(loss_of, HIDDEN),
    "jacrev": lambda: jacrev(loss_of)(HIDDEN),
    "jacfwd": lambda: jacfwd(loss_of)(HIDDEN),
    "jvp": lambda: jvp(loss_of, (HIDDEN,), (HIDDEN,)),
    "hessian": lambda: hessian(loss_of)(HIDDEN),
    "vmap": lambda: vmap(loss_of_each)(HIDDEN, TARGETS),
    "vmap over targets": lambda: vmap(loss_of_each, (None, 0))(HIDDEN[0], TARGETS),
    "vmap beside it": lambda: vmap(lambda x: x * loss_of(HIDDEN))(HIDDEN),
    "vmap of grad": lambda: vmap(grad(lambda h, t: loss_of_each(h, t).sum()))(HIDDEN, TARGETS),
    "functionalize": lambda: functionalize(loss_of)(HIDDEN),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_with_what_to_do(name):
    with pytest.raises(RuntimeError, match=TRANSFORMED):
        TRANSFORMS[name]()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["grad", "jvp", "vmap"])
def test_compiled_they_are_refused_as_well(name):
    """The gradient was zero, as nothing asks for one where it is traced."""
    with pytest.raises(RuntimeError, match=TRANSFORMED):
        torch.compile(TRANSFORMS[name], backend="eager")()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 53, dtype=torch.float64)
        self.loss = LinearCrossEntropy(chunk_size=4)

    def forward(self, hidden, targets):
        return self.loss(hidden, self.head.weight, targets, self.head.bias)


def test_functional_call_works_and_is_no_transform():
    model = Model()
    parameters = {"head.weight": WEIGHT.clone(), "head.bias": BIAS.clone()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    loss = functional_call(model, parameters, (HIDDEN, TARGETS))
    found = torch.autograd.grad(loss, list(parameters.values()))
    weight, bias = WEIGHT.clone().requires_grad_(), BIAS.clone().requires_grad_()
    expected = torch.autograd.grad(plain(HIDDEN, weight, TARGETS, bias), (weight, bias))
    assert_same(found, expected, 1e-13)
    with pytest.raises(RuntimeError, match=TRANSFORMED):
        grad(lambda given: functional_call(model, given, (HIDDEN, TARGETS)))(parameters)


def test_dual_tensors_are_refused_and_others_beside_them_are_not():
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match=r"no forward-mode derivative.*F\.cross_entropy"):
            loss_of(forward_ad.make_dual(HIDDEN, HIDDEN))
        assert_same([loss_of(HIDDEN)], [plain(HIDDEN, WEIGHT, TARGETS, BIAS)], 1e-13)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("of", ["hvp", "jvp", "vhp", "hessian"])
def test_a_second_derivative_is_refused_by_its_shortcuts(of, reduction):
    """They fill in zeros where a gradient hangs on nothing."""

    def loss(weight):
        return linear_cross_entropy(HIDDEN, weight, TARGETS, reduction=reduction).sum()

    given = (WEIGHT,) if of == "hessian" else (WEIGHT, WEIGHT)
    with pytest.raises(RuntimeError, match="has a first derivative only"):
        getattr(autograd_functional, of)(loss, *given)


def test_the_loss_may_be_written_to():
    """By nothing that is kept for a second derivative."""
    for reduction in ("mean", "none"):
        hidden = HIDDEN.clone().requires_grad_()
        loss = linear_cross_entropy(hidden, WEIGHT, TARGETS, reduction=reduction)
        loss /= 2
        (halved,) = torch.autograd.grad(loss.sum(), hidden)
        whole = linear_cross_entropy(hidden, WEIGHT, TARGETS, reduction=reduction).sum()
        assert_same([halved * 2], torch.autograd.grad(whole, hidden), 1e-13)


def test_a_batch_of_gradients():
    hidden = HIDDEN.clone().requires_grad_()
    gradients = torch.linspace(-1, 1, 5, dtype=torch.float64)
    batched = [
        torch.autograd.grad(loss, hidden, gradients, is_grads_batched=True)[0]
        for loss in (loss_of(hidden), plain(hidden, WEIGHT, TARGETS, BIAS))
    ]
    assert_same(batched[:1], batched[1:], 1e-13)
    losses = loss_of_each(hidden, TARGETS)
    with pytest.raises(RuntimeError, match=r"a batch of gradients at once; leave out is_grads"):
        torch.autograd.grad(losses, hidden, losses.new_ones(2, 3, 7), is_grads_batched=True)
