"""Values that a step reads through objects of torch's, torchfast's and the standard library's.

A trainer's count of steps, a loader's data set, the value that processes share: a change between
two steps is noticed, and what of such an object no code reads is in nobody's way.
"""

from __future__ import annotations

import array
import configparser
import ctypes
import logging
import multiprocessing
import threading
import types
import weakref
from functools import partial

import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from host_values import ADAMW, CHANGED_AT, train
from models import DropoutNet, make_batches, mean_loss
from tape import Twins, counts, reasons
from torchfast import Trainer
from torchfast._core.compare import differences
from torchfast.graphs import library_objects
from torchfast.graphs.attributes import Attributes

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 16
EACH_STEP = partial(optim.lr_scheduler.ExponentialLR, gamma=0.9)
AT_SOME = partial(optim.lr_scheduler.MultiStepLR, milestones=[CHANGED_AT], gamma=0.1)
held_globally = None


class Held:
    """What holds a trainer, or another object, for the loss."""

    def __init__(self, trainer=None):
        self.trainer, self.num_steps = trainer, 0.5

    def by_count(self, model, batch):
        return mean_loss(model, batch) * (1.0 + self.trainer.num_steps)

    def by_epoch(self, model, batch):
        return mean_loss(model, batch) * (1.0 + self.trainer.lr_scheduler.last_epoch)

    def by_rate(self, model, batch):
        return mean_loss(model, batch) * (1.0 + self.trainer.lr_scheduler.get_last_lr()[0])

    def by_string(self, model, batch):
        return mean_loss(model, batch) * (1.0 + getattr(self.trainer, "num_steps"))  # noqa: B009

    def by_local(self, model, batch):
        mine = self.trainer
        return mean_loss(model, batch) * (1.0 + mine.num_steps)

    def by_model(self, model, batch):
        """Has a count of its own, by the name of the trainer's."""
        assert self.trainer.model is model
        return mean_loss(model, batch) * self.num_steps

    def by_device(self, model, batch):
        assert self.trainer.metrics is not None
        return mean_loss(model, batch.__class__(t.to(self.trainer.device) for t in batch))

    def by_none(self, model, batch):
        return mean_loss(model, batch)


class OwnTrainer(Trainer):
    """A trainer of the user's, whose count is the library's."""


class Proxied(Held):
    def __setattr__(self, name, value):
        super().__setattr__(name, weakref.proxy(value) if isinstance(value, Trainer) else value)


class Asking(DropoutNet):
    """A model that asks the trainer itself."""

    def forward(self, x):
        return super().forward(x) * (1.0 + self.trainer[0].num_steps)


def in_closure():
    trainer = None

    def loss_fn(model, batch):
        return mean_loss(model, batch) * (1.0 + trainer.num_steps)

    def put(value):
        nonlocal trainer
        trainer = value

    return loss_fn, put


def in_dict():
    held = {}
    loss_fn = lambda model, batch: mean_loss(model, batch) * (1.0 + held["trainer"].num_steps)  # noqa: E731
    return loss_fn, partial(held.__setitem__, "trainer")


def in_global():
    def loss_fn(model, batch):
        return mean_loss(model, batch) * (1.0 + held_globally.num_steps)

    return loss_fn, partial(globals().__setitem__, "held_globally")


def in_attribute(name, kind=Held):
    held = kind()
    return getattr(held, name), partial(setattr, held, "trainer")


def trained(make, plan, *, scheduler=EACH_STEP, net=DropoutNet, kind=Trainer):
    """Train with what the loss may ask the trainer for; return that, and all that it has left."""
    torch.manual_seed(0)
    loss_fn, put = make()
    model = net()
    trainer = kind(model, ADAMW, loss_fn, plan, lr_scheduler=scheduler)
    put(trainer)
    model.trainer = [trainer]  # a list is looked into
    torch.manual_seed(1)
    losses = [trainer.step(batch) for batch in make_batches(STEPS)]
    put(None)
    return trainer, [losses, model.state_dict(), trainer.optimizer.state_dict()]


def trained_alike(make, **options):
    _, expected = trained(make, "eager", **options)
    trainer, found = trained(make, "exact", **options)
    assert not differences(expected, found)
    return trainer


COUNTING = {
    "closure": in_closure,
    "dict": in_dict,
    "global": in_global,
    **{n: partial(in_attribute, n) for n in ("by_count", "by_string", "by_local")},
    **{n: partial(in_attribute, n) for n in ("by_epoch", "by_rate")},
    "proxy": partial(in_attribute, "by_count", Proxied),
}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_what_a_trainer_counts_is_read_in_each_step(make):
    trainer = trained_alike(make)
    assert counts(trainer)[1] <= 4
    assert "changed, again after" in reasons(trainer)[-1]


def test_so_it_is_of_a_trainer_of_the_users_and_by_the_model():
    trainer = trained_alike(in_closure, kind=OwnTrainer)
    assert "'num_steps' of TrainStep changed" in reasons(trainer)[-1]
    trainer = trained_alike(partial(in_attribute, "by_none"), net=Asking)
    assert "'num_steps' of TrainStep changed" in reasons(trainer)[-1]


def test_what_a_schedule_changes_at_some_step_makes_a_new_graph():
    """Of the rate alone: that the schedule counts is not read."""
    trainer = trained_alike(partial(in_attribute, "by_rate"), scheduler=AT_SOME)
    assert counts(trainer) == (1, STEPS - 3, 3, 2), reasons(trainer)


@pytest.mark.parametrize("name", ["by_none", "by_model", "by_device"])
@pytest.mark.parametrize("kind", [Held, Proxied])
def test_a_trainer_that_is_not_asked_for_its_numbers_is_in_nobodys_way(name, kind, monkeypatch):
    looks = []
    changed = Attributes.changed
    monkeypatch.setattr(Attributes, "changed", lambda self: looks.append(1) or changed(self))
    trainer = trained_alike(partial(in_attribute, name, kind))
    assert counts(trainer) == (1, STEPS - 3, 3, 1), reasons(trainer)
    assert len(looks) <= 2  # a look at everything is what each step could not pay for


def test_without_the_look_at_such_objects_they_would_train_wrong(monkeypatch):
    monkeypatch.setattr(library_objects, "_counts", lambda *_: False)
    _, expected = trained(in_closure, "eager")
    trainer, found = trained(in_closure, "exact")
    assert differences(expected, found)
    assert counts(trainer) == (1, STEPS - 3, 3, 1)


# --- What else libraries hold ---------------------------------------------------------------------


class Epochs(Dataset):
    def __init__(self):
        self.epoch = 1.0

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return make_batches(1)[0][0][0] + place

    def set_epoch(self, epoch):
        self.epoch = epoch


def of_sampler():
    sampler = DistributedSampler(Epochs(), num_replicas=1, rank=0)
    sampler.set_epoch(1)
    return lambda: sampler.epoch, sampler.set_epoch


def of_loader():
    loader = DataLoader(Epochs())
    return lambda: loader.dataset.epoch, loader.dataset.set_epoch


def of_sampler_of_loader():
    sampler = DistributedSampler(Epochs(), num_replicas=1, rank=0)
    loader = DataLoader(sampler.dataset, sampler=sampler)
    return lambda: 1 + loader.sampler.epoch, sampler.set_epoch


def of_processes():
    value = multiprocessing.Value("d", 1.0)
    return lambda: value.value, partial(setattr, value, "value")


def of_processes_without_lock():
    value = multiprocessing.RawValue("d", 1.0)
    return lambda: value.value, partial(setattr, value, "value")


def of_shared_array():
    values = multiprocessing.Array("d", [1.0, 2.0])
    return lambda: values[0], partial(values.__setitem__, 0)


def of_c():
    values = (ctypes.c_float * 2)(1.0, 2.0)
    return lambda: values[0], partial(values.__setitem__, 0)


def of_array():
    values = array.array("f", [1.0, 2.0])
    return lambda: values[0], partial(values.__setitem__, 0)


def of_thread():
    held = threading.local()
    held.weight = 1.0
    return lambda: held.weight, partial(setattr, held, "weight")


def of_object_of_thread():
    """The object is another one afterwards."""
    held = threading.local()
    held.config = types.SimpleNamespace(weight=1.0)
    return lambda: held.config.weight, lambda weight: setattr(
        held, "config", types.SimpleNamespace(weight=weight)
    )


def of_event():
    event = threading.Event()
    return lambda: 0.5 if event.is_set() else 1.0, lambda _: event.set()


def of_parser():
    config = configparser.ConfigParser()
    config["loss"] = {"weight": "1.0"}
    return lambda: float(config["loss"]["weight"]), lambda weight: config.set(
        "loss", "weight", str(weight)
    )


def of_logger():
    logger = logging.getLogger("torchfast.tests.library_objects")
    logger.setLevel(1)
    return lambda: logger.level, lambda _: logger.setLevel(2)


def of_optimizer():
    optimizer = optim.SGD([torch.ones(1)], lr=0.1)
    optimizer.weight = 1.0
    return lambda: optimizer.weight, partial(setattr, optimizer, "weight")


def of_module():
    config = module_of("config")
    return lambda: config.weight, partial(setattr, config, "weight")


def of_module_in_object():
    held = types.SimpleNamespace(config=module_of("config"))
    return lambda: held.config.weight, partial(setattr, held.config, "weight")


def of_function_of_module():
    config = module_of("config")
    source = "def scaled():\n    return weight\n"
    exec(compile(source, __file__, "exec"), vars(config))
    return lambda: config.scaled(), partial(setattr, config, "weight")


def module_of(name):
    module = types.ModuleType(name)
    module.__file__, module.weight = __file__, 1.0
    return module


OBJECTS = [
    *(of_sampler, of_loader, of_sampler_of_loader),
    *(of_processes, of_processes_without_lock, of_shared_array, of_c, of_array),
    *(of_thread, of_object_of_thread, of_event, of_parser, of_logger, of_optimizer),
    *(of_module, of_module_in_object, of_function_of_module),
]


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("make", OBJECTS)
def test_a_change_in_an_object_of_a_library_is_noticed(make, bare):
    read, put = make()
    loss_fn = lambda model, batch: mean_loss(model, batch) * read()  # noqa: E731
    twins = Twins(DropoutNet, ADAMW, loss_fn, bare=bare)
    assert train(twins, lambda _: put(2)) is None
    assert twins.counts == (1, 15, 3, 2), reasons(twins.captured)


def imported():
    import imported_config

    return imported_config.weight


def imported_from():
    from imported_config import weight

    return weight


def imported_function():
    from imported_config import scaled

    return scaled()


def imported_within():
    import imported_package.config as config

    return config.weight


def imported_by_parent():
    import imported_package.config

    return imported_package.config.weight


IMPORTING = [imported, imported_from, imported_function, imported_within, imported_by_parent]


@pytest.mark.parametrize("read", IMPORTING)
def test_a_change_in_a_module_that_the_function_imports_itself_is_noticed(
    read, tmp_path, monkeypatch
):
    source = "weight = 1.0\n\n\ndef scaled():\n    return weight\n"
    (tmp_path / "imported_config.py").write_text(source)
    (tmp_path / "imported_package").mkdir()
    (tmp_path / "imported_package" / "__init__.py").write_text("")
    (tmp_path / "imported_package" / "config.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import imported_config
    import imported_package.config

    for module in (imported_config, imported_package, imported_package.config):
        monkeypatch.delitem(__import__("sys").modules, module.__name__)
    loss_fn = lambda model, batch: mean_loss(model, batch) * read()  # noqa: E731

    def change(_):
        import imported_config
        import imported_package.config

        imported_config.weight = imported_package.config.weight = 0.5

    twins = Twins(DropoutNet, ADAMW, loss_fn)
    assert train(twins, change) is None
    assert twins.counts == (1, 15, 3, 2), reasons(twins.captured)
