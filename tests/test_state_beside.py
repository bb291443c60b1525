"""What a loss function keeps beside the model, and generators: a resumed run goes on with them."""

from __future__ import annotations

import copy
import functools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torchfast import StateMismatchError, Trainer
from torchfast._core import beside
from torchfast._core.compare import differences
from torchfast.state_beside import BESIDE

BATCHES = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(8)]


class Masked(nn.Module):
    """Draws its masks from a generator of its own."""

    def __init__(self, generator):
        super().__init__()
        self.first, self.generator = nn.Linear(4, 6), generator
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.first(x)
        if isinstance(self.generator, torch.Generator):
            keep = torch.rand(hidden.shape, generator=self.generator)
        elif isinstance(self.generator, random.Random):
            keep = torch.tensor([self.generator.random() for _ in range(6)])
        else:
            keep = torch.from_numpy(self.generator.random(hidden.shape)).float()
        return self.last(hidden * (keep > 0.3))


class Centred(nn.Module):
    """A criterion with a running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, logits, targets):
        with torch.no_grad():
            self.centre.mul_(0.9).add_(logits.mean(0), alpha=0.1)
        return F.cross_entropy(logits - self.centre, targets)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def with_generator(make):
    return lambda: (Masked(make()), cross_entropy, [])


def with_head():
    model, head = nn.Linear(4, 6), nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def loss_fn(model, batch):
        return F.cross_entropy(head(model(batch[0])), batch[1])

    return model, loss_fn, [*head.parameters()]


def with_criterion():
    criterion = Centred()
    return nn.Linear(4, 3), lambda model, batch: criterion(model(batch[0]), batch[1]), []


def with_tensor():
    queue = torch.zeros(3)

    def loss_fn(model, batch):
        logits = model(batch[0])
        loss = F.cross_entropy(logits + queue, batch[1])
        queue.mul_(0.9).add_(logits.detach().mean(0))
        return loss

    return nn.Linear(4, 3), loss_fn, []


def with_follower(moved):
    def make():
        model = nn.Linear(4, 3)
        follower = copy.deepcopy(model).requires_grad_(False)

        def loss_fn(model, batch):
            logits = model(batch[0])
            loss = F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, follower(batch[0]))
            with torch.no_grad():
                for own, other in zip(follower.parameters(), model.parameters(), strict=True):
                    moved(own, other)
            return loss

        return model, loss_fn, []

    return make


def with_teacher_that_follows():
    """In eval mode, as teachers are, and moved by what torch does not count."""
    model, loss_fn, others = with_follower(by_data)()
    loss_fn.__closure__[0].cell_contents.eval()
    return model, loss_fn, others


def by_data(own, other):
    own.data.mul_(0.9).add_(other.data, alpha=0.1)  # which torch does not count


def moving(centre, model, batch):
    """Return a loss that moves a centre in place."""
    logits = model(batch[0])
    loss = F.cross_entropy(logits + centre, batch[1])
    centre.mul_(0.9).add_(logits.detach().mean(0))
    return loss


def with_global():
    global centre
    centre = torch.zeros(3)
    return nn.Linear(4, 3), lambda model, batch: moving(centre, model, batch), []


def with_global_that_is_assigned():
    global centre
    centre = torch.zeros(3)

    def loss_fn(model, batch):
        global centre
        logits = model(batch[0])
        loss = F.cross_entropy(logits + centre, batch[1])
        centre = 0.9 * centre + logits.detach().mean(0)
        return loss

    return nn.Linear(4, 3), loss_fn, []


def with_partial():
    return nn.Linear(4, 3), functools.partial(moving, torch.zeros(3)), []


def with_default():
    def loss_fn(model, batch, centre=torch.zeros(3)):  # noqa: B008
        return moving(centre, model, batch)

    return nn.Linear(4, 3), loss_fn, []


def with_dictionary():
    held = {"centres": [torch.zeros(3)]}
    return nn.Linear(4, 3), lambda model, batch: moving(held["centres"][0], model, batch), []


class Held:
    def __init__(self):
        self.centre, self.beside = torch.zeros(3), torch.zeros(3)


def with_object():
    held = Held()
    return nn.Linear(4, 3), lambda model, batch: moving(held.centre, model, batch), []


def with_averaged_model():
    """Whose parameters need gradients, by what they say."""
    model = nn.Linear(4, 3)
    teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def loss_fn(model, batch):
        with torch.no_grad():
            targets = teacher(batch[0])
        teacher.update_parameters(model)
        return F.mse_loss(model(batch[0]), targets) + F.cross_entropy(model(batch[0]), batch[1])

    return model, loss_fn, []


class Recurrent(nn.Module):
    """Goes on from where it was, by a buffer that is not saved or by an attribute."""

    def __init__(self, is_buffer):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        if is_buffer:
            self.register_buffer("hidden", torch.zeros(3), persistent=False)
        else:
            self.hidden = torch.zeros(3)

    def forward(self, x):
        found = self.layer(x) + self.hidden
        self.hidden = found.detach().mean(0)
        return found


KEPT = {
    "generator of torch": with_generator(lambda: torch.Generator().manual_seed(3)),
    "generator of NumPy": with_generator(lambda: np.random.default_rng(3)),
    "generator of Python": with_generator(lambda: random.Random(3)),
    "statistics of a head": with_head,
    "buffer of a criterion": with_criterion,
    "tensor": with_tensor,
    "follower": with_follower(lambda own, other: own.lerp_(other, 0.1)),
    "follower by data": with_follower(by_data),
    "teacher that follows": with_teacher_that_follows,
    "global tensor": with_global,
    "global tensor that is assigned": with_global_that_is_assigned,
    "tensor in a partial": with_partial,
    "default value": with_default,
    "tensor in a dictionary": with_dictionary,
    "tensor in an object": with_object,
    "averaged model": with_averaged_model,
}


def make_trainer(make):
    torch.manual_seed(0)
    model, loss_fn, others = make()
    optimizer = torch.optim.AdamW([*model.parameters(), *others], lr=0.05)
    return Trainer(model, optimizer, loss_fn)


def train(trainer, batches):
    return [trainer.step(batch).clone() for batch in batches]


def state_of_half(make):
    """Return the state of a run that has ended in its middle."""
    first = make_trainer(make)
    train(first, BATCHES[:4])
    return copy.deepcopy(first.state_dict())


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_a_run_goes_on_from_a_state_as_if_it_had_not_ended(make):
    whole = make_trainer(make)
    losses = train(whole, BATCHES)

    state, second = state_of_half(make), make_trainer(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(state)

    assert not differences(losses[4:], train(second, BATCHES[4:]))
    assert not differences(whole.state_dict(), second.state_dict())


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_without_it_the_run_would_be_another(make):
    """The control."""
    whole = make_trainer(make)
    losses = train(whole, BATCHES)
    state, second = state_of_half(make), make_trainer(make)
    state.pop(BESIDE, None)
    state["rng"].pop("held", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.load_state_dict(state)
    # Statistics are not read while they are counted.
    found = [train(second, BATCHES[4:]), second.state_dict()]
    assert differences([losses[4:], whole.state_dict()], found)


@pytest.mark.parametrize("make", [KEPT["generator of torch"], with_head, with_criterion])
def test_fit_resumes_with_it(make, tmp_path):
    whole = make_trainer(make)
    whole.fit(BATCHES, steps=8, progress=False)
    make_trainer(make).fit(BATCHES, steps=4, checkpoint=tmp_path, progress=False)
    resumed = make_trainer(make)
    resumed.fit(BATCHES, steps=8, checkpoint=tmp_path, progress=False)
    assert not differences(whole.state_dict()["model"], resumed.state_dict()["model"])


def with_weights(weights):
    criterion = nn.CrossEntropyLoss(weight=torch.tensor(weights))
    return lambda: (nn.Linear(4, 3), lambda m, b: criterion(m(b[0]), b[1]), [])


def with_teacher():
    teacher = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).requires_grad_(False).eval()

    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0]), teacher(batch[0]))

    return nn.Linear(4, 3), loss_fn, []


def with_critic():
    """Of a GAN: another optimizer trains it, and saves it."""
    critic = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    return nn.Linear(4, 3), lambda model, batch: -critic(model(batch[0])).mean(), []


CONSTANT = {
    "nothing": lambda: (nn.Linear(4, 3), cross_entropy, []),
    "weights of classes": with_weights([1.0, 2.0, 3.0]),
    "frozen teacher": with_teacher,
}


@pytest.mark.parametrize("make", CONSTANT.values(), ids=CONSTANT)
def test_what_is_constant_is_not_saved(make):
    trainer = make_trainer(make)
    train(trainer, BATCHES)
    state = trainer.state_dict()
    assert BESIDE not in state
    assert "held" not in state["rng"]


def test_what_another_optimizer_trains_is_left_to_it():
    trainer = make_trainer(with_critic)
    train(trainer, BATCHES)
    names = trainer.state_dict().get(BESIDE, {})
    assert not any(name.endswith("weight") for name in names)


def test_a_program_with_other_constants_keeps_them():
    first = make_trainer(with_weights([1.0, 1.0, 1.0]))
    train(first, BATCHES[:2])
    second = make_trainer(with_weights([1.0, 2.0, 3.0]))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    control = make_trainer(with_weights([1.0, 2.0, 3.0]))
    assert not differences(train(second, BATCHES[2:3]), _stepped_from(first, control))


def _stepped_from(first, control):
    control.model.load_state_dict(first.model.state_dict())
    control.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    return train(control, BATCHES[2:3])


def test_what_is_kept_once_is_saved_from_then_on():
    first = make_trainer(with_criterion)
    train(first, BATCHES[:2])
    second = make_trainer(with_criterion)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert list(second.state_dict()[BESIDE]) == ["0.centre"]


def test_a_state_that_does_not_fit_changes_nothing():
    first = make_trainer(with_criterion)
    train(first, BATCHES[:2])
    state = copy.deepcopy(first.state_dict())
    second = make_trainer(with_criterion)
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(StateMismatchError, match="'beside' must be a mapping, got list"):
        second.load_state_dict({**state, BESIDE: [torch.zeros(3)]})
    assert not differences(before, second.state_dict())


def test_what_is_not_there_any_more_is_told():
    first = make_trainer(with_criterion)
    train(first, BATCHES[:2])
    plain = make_trainer(CONSTANT["nothing"])
    with pytest.warns(UserWarning, match=r"not there any more, or of another shape \['0.centre'\]"):
        plain.load_state_dict(copy.deepcopy(first.state_dict()))
    drawing = make_trainer(KEPT["generator of torch"])
    state = copy.deepcopy(drawing.state_dict())
    del state["rng"]["held"]
    with pytest.warns(UserWarning, match=r"without a saved state \['model\..generator.0'\]"):
        drawing.load_state_dict(state)


class Losses:
    """Keeps a centre, and lists in which tensors come and go."""

    def __init__(self):
        self.centre, self.seen = torch.zeros(3), []

    def of(self, model, batch):
        logits = model(batch[0])
        self.seen.append(logits.detach())
        with torch.no_grad():
            self.centre.add_(logits.mean(0))
        return F.cross_entropy(logits - self.centre, batch[1])


def test_tensors_are_known_by_their_names():
    losses = Losses()
    trainer = make_trainer(lambda: (nn.Linear(4, 3), losses.of, []))
    train(trainer, BATCHES[:2])
    assert list(trainer.state_dict()[BESIDE]) == ["centre"]
    trainer = make_trainer(with_tensor)
    train(trainer, BATCHES[:2])
    assert list(trainer.state_dict()[BESIDE]) == ["queue"]


def test_one_of_another_shape_is_left_alone():
    first = make_trainer(with_criterion)
    train(first, BATCHES[:2])
    state = copy.deepcopy(first.state_dict())
    second = make_trainer(with_criterion)
    with pytest.warns(UserWarning, match=r"of another shape \['0.centre'\]"):
        second.load_state_dict({**state, BESIDE: {"0.centre": torch.zeros(5)}})
    assert not differences(first.state_dict()["model"], second.state_dict()["model"])


class Results:
    """Keeps results, which are no state: they are made anew, and have another size each time."""

    def __init__(self):
        self.logits, self.labels = None, torch.arange(8)
        self.history = torch.zeros(0)

    def of(self, model, batch):
        self.logits = model(batch[0]).detach()
        self.labels = torch.arange(len(batch[0]))
        loss = cross_entropy(model, batch)
        self.history = torch.cat([self.history, loss.detach()[None]])
        return loss


def test_results_are_no_state():
    def make():
        return nn.Linear(4, 3), Results().of, []

    first = make_trainer(make)
    train(first, [*BATCHES[:2], tuple(part[:5] for part in BATCHES[2])])
    state = copy.deepcopy(first.state_dict())
    assert BESIDE not in state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(make).load_state_dict(state)


class Wrapped(torch.Tensor):
    """As those of quantized weights, with few of a tensor's functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "sum" in str(func) or "view" in str(func):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_tensors_of_other_kinds_are_left_alone():
    with torch.inference_mode():
        frozen = torch.ones(3)
    others = (
        torch.ones(3).as_subclass(Wrapped),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(3, device="meta"),
        frozen,
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.bool),
        torch.zeros(0),
    )
    first, *_, last = others

    def loss_fn(model, batch, others=others):
        assert first is others[0]
        assert last is others[-1]
        return cross_entropy(model, batch)

    holder = nn.Module()
    for place, tensor in enumerate(others):
        setattr(holder, f"of_{place}", tensor)

    class Loss:
        def __init__(self):
            vars(self).update({f"of_{place}": tensor for place, tensor in enumerate(others)})

        def __call__(self, model, batch):
            return cross_entropy(model, batch)

    for loss in (loss_fn, Loss()):
        trainer = make_trainer(lambda loss=loss: (nn.Linear(4, 3), loss, []))
        train(trainer, BATCHES[:2])
        state = copy.deepcopy(trainer.state_dict())
        assert BESIDE not in state
        trainer.load_state_dict(state)


def test_a_rank_that_is_new_draws_other_numbers():
    trainer = make_trainer(KEPT["generator of torch"])
    before = trainer.model.generator.get_state()
    for name in KEPT:
        if name.startswith("generator"):
            make_trainer(KEPT[name])._step.state.beside.draw_apart(7)
    trainer._step.state.beside.draw_apart(7)
    assert not torch.equal(before, trainer.model.generator.get_state())


def trainer_of(model, loss_fn=cross_entropy):
    return Trainer(model, functools.partial(torch.optim.SGD, lr=0.1), loss_fn, device="cpu")


def taken_up(make):
    """Return a model and a loss that were trained, two that have their state, and the state."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(make())
    trained = trainer_of(*found[0])
    for batch in BATCHES[:3]:
        trained.step(batch)
    trained.evaluate(BATCHES[3:4])
    state = copy.deepcopy(trained.state_dict())
    trainer_of(*found[1]).load_state_dict(state)
    return *found, state


def test_the_normed_weight_is_not_put_where_the_weight_lies():
    """``spectral_norm`` begins with the weight in an attribute, and evaluations leave another."""

    def make():
        normed = nn.utils.spectral_norm(nn.Linear(4, 3))
        held = {"weight": normed.weight}

        def loss_fn(model, batch):
            loss = cross_entropy(model, batch)
            held["weight"] = model[0].weight.detach()
            return loss

        return nn.Sequential(normed, nn.Identity()), loss_fn

    trained, other, _ = taken_up(make)
    assert torch.equal(trained[0][0].weight_orig, other[0][0].weight_orig)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_what_the_model_does_not_save_is_left_as_it_is(kind):
    """It may belong to a number that is not saved, such as how far a table of angles reaches."""
    (model, _), (other, _), state = taken_up(lambda: (Recurrent(kind == "buffer"), cross_entropy))
    assert model.hidden.any()
    assert not other.hidden.any()
    assert BESIDE not in state


class TwoStates:
    """Two hidden states, which its steps replace; ``kind`` is how they begin."""

    def __init__(self, kind):
        self.h = self.c = torch.zeros(8, 3)
        if kind == "expanded":
            self.h, self.c = torch.zeros(1, 3).expand(8, 3), torch.zeros(8, 1).expand(8, 3)

    def __call__(self, model, batch):
        found = model(batch[0]) + self.h - 0.5 * self.c
        self.h, self.c = found.detach().sin(), found.detach().cos()
        return nn.functional.cross_entropy(found, batch[1])


@pytest.mark.parametrize("kind", ["one tensor", "expanded"])
def test_hidden_states_that_begin_as_one_memory_come_back_apart(kind):
    (_, trained), (_, other), _ = taken_up(lambda: (nn.Linear(4, 3), TwoStates(kind)))
    assert torch.equal(trained.h, other.h)
    assert torch.equal(trained.c, other.c)


HELD = {"x": torch.zeros(8, 4)}


@pytest.mark.parametrize("where", ["an attribute", "a global dictionary"])
def test_going_back_writes_nothing_into_a_batch_that_is_held(where):
    class Holding:
        held = torch.zeros(8, 4)

        def __init__(self):
            self.held = torch.zeros(8, 4)

        def __call__(self, model, batch):
            self.held = batch[0]
            return cross_entropy(model, batch)

    def loss_fn(model, batch):
        HELD["x"] = batch[0]
        return cross_entropy(model, batch)

    first, second = copy.deepcopy(BATCHES[:2])
    holding = Holding()
    trainer = trainer_of(nn.Linear(4, 3), holding if where == "an attribute" else loss_fn)
    trainer.step(first)
    state = copy.deepcopy(trainer.state_dict())
    assert len(state[BESIDE]) == 1
    trainer.step(second)
    trainer.load_state_dict(state)
    assert torch.equal(second[0], BATCHES[1][0])
    held = holding.held if where == "an attribute" else HELD["x"]
    assert torch.equal(held, BATCHES[0][0])


def test_what_another_trainer_trains_is_not_saved_without_gradients_either():
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    of_generator = trainer_of(generator, lambda model, batch: -critic(model(batch[0])).mean())
    of_critic = trainer_of(critic, lambda model, batch: model(generator(batch[0])).mean())
    for batch in BATCHES[:3]:
        of_generator.step(batch)
        of_critic.step(batch)
    for model in (generator, critic):
        model.zero_grad(set_to_none=True)
    assert BESIDE not in of_generator.state_dict()
    assert BESIDE not in of_critic.state_dict()


class Slotted:
    __slots__ = ("value",)

    def __getattr__(self, name):
        raise KeyError(name)


NESTED = [[list(range(256)) for _ in range(256)] for _ in range(64)]


def test_odd_objects_and_much_data_stop_nothing(monkeypatch):
    odd, looked_at = Slotted(), []
    is_dead = beside.is_dead
    monkeypatch.setattr(beside, "is_dead", lambda held: looked_at.append(1) or is_dead(held))

    def loss_fn(model, batch):
        assert odd
        assert NESTED
        return cross_entropy(model, batch)

    trainer = trainer_of(nn.Linear(4, 3), loss_fn)
    trainer.step(BATCHES[0])
    assert BESIDE not in trainer.state_dict()
    assert len(looked_at) < 10_000
