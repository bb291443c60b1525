"""`mode="auto"` in a plan: each way is tried at the first step, and the fastest is taken."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import optim
from torch._dynamo.callback import callback_handler
from torch._inductor.exc import InvalidCxxCompiler
from torch.nn.modules.module import register_module_forward_pre_hook

from compiled_training import BATCHES, Deep, compiled_in, counter
from models import mean_loss
from stepping import make_trainer
from torchfast import CompiledModule, CompileOptions, Plan, Trainer
from torchfast._core.compare import differences
from torchfast._core.errors import ClosedError
from torchfast.compiler import measuring, mode_search
from torchfast.compiler.candidates import ModeChoice
from torchfast.compiler.receipts import CandidateResult, Receipt
from torchfast.compiler.store import CacheStore

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture
def searching(monkeypatch):
    """Search by trying each way once; return what was tried, and let the test name the choice."""
    tried = []
    choice = ["whole: default"]

    def choices(device, *, has_blocks, outer_graph):
        regions = ["blocks", "whole"] if has_blocks else ["whole"]
        ways = [ModeChoice(f"{r}: default", "default", r) for r in regions]
        return [ModeChoice("eager", None, None), *ways]

    def search(candidates, work, *, key, budget_s, **kwargs):
        # The reference first, and twice: at the second forward it is looked at calls of attention,
        # and what is compiled meanwhile would be compiled again.
        for _ in range(2):
            with candidates[0].in_force():
                work()
        for _ in range(2):
            for candidate in candidates:
                with candidate.in_force():
                    loss = float(work())
                    tried.append((candidate.name, loss, candidate.failure()))
        ratios = dict.fromkeys(("ratio", "ratio_low", "ratio_high"), 1.0)
        results = [CandidateResult(name=c.name, status="measured", **ratios) for c in candidates]
        return Receipt(
            key=key,
            model_name="Deep",
            candidates=tuple(results),
            choice=choice[0],
            why="the test says so",
            notes=(),
            budget_s=budget_s,
            elapsed_s=0.0,
            created="2026-01-01T00:00:00Z",
        )

    monkeypatch.setattr(mode_search, "mode_choices", choices)
    monkeypatch.setattr(mode_search, "search", search)
    # What the inductor takes seconds for.
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, *, backend, **kwargs: compile_(f, backend="eager", **kwargs)
    )
    return tried, choice


@pytest.mark.parametrize("wanted", ["eager", "whole: default", "blocks: default"])
def test_auto_tries_each_way_and_takes_the_fastest(searching, wanted):
    tried, choice = searching
    choice[0] = wanted
    torch.manual_seed(0)
    model = Deep()
    plain = copy.deepcopy(model)
    trainers = [
        Trainer(net, optim.SGD(net.parameters(), lr=0.1), mean_loss, plan)
        for net, plan in (
            (model, Plan(compile=CompileOptions(mode="auto"))),
            (plain, "eager"),
        )
    ]
    assert "decided on at the first step" in compiled_in(trainers[0])[0].detail
    for batch in BATCHES:
        first, second = (trainer.step(batch) for trainer in trainers)
        assert torch.equal(first, second)
    names = ["eager", "blocks: default", "whole: default"]
    assert [name for name, _, _ in tried] == names * 2
    assert len({loss for _, loss, _ in tried}) == 1
    assert {failure for _, _, failure in tried} == {None}
    assert f"mode 'auto' took {wanted}, measured now" in compiled_in(trainers[0])[0].detail
    has_regions = any("_compiled_call_impl" in vars(m) for m in model.modules())
    assert has_regions == (wanted == "blocks: default")
    assert (counter(trainers[0], "graphs") > 0) == (wanted != "eager")
    trainers[0].close()
    assert not any("_compiled_call_impl" in vars(m) for m in model.modules())


def test_the_next_run_begins_with_the_answer(searching, tmp_path):
    tried, _ = searching
    plan = Plan(compile=CompileOptions(mode="auto", cache=str(tmp_path)))
    for run in range(2):
        trainer = make_trainer(plan=plan)
        trainer.step(BATCHES[0])
        assert bool(tried) == (run == 0)
        assert ("from its receipt" in str(trainer.report())) == (run == 1)
        assert counter(trainer, "graphs") == 1
        trainer.close()
        tried.clear()


@pytest.mark.parametrize("wanted", ["eager", "whole: default", "blocks: default"])
def test_only_the_choice_is_kept_in_the_cache(searching, tmp_path, monkeypatch, wanted):
    """What this process compiled is all in its entry, and would be in each of the others' again."""
    _, choice = searching
    choice[0] = wanted
    kept = []
    monkeypatch.setattr(CacheStore, "save", lambda store, key: kept.append(dict(key.work)))
    plan = Plan(compile=CompileOptions(mode="auto", cache=str(tmp_path)))
    with make_trainer(net=Deep, plan=plan) as trainer:
        for batch in BATCHES * 4:
            trainer.step(batch)
    whole = {'"whole"' in str(work) for work in kept}
    assert whole == {"eager": set(), "whole: default": {True}, "blocks: default": {False}}[wanted]


def weighted_loss(weight):
    return lambda model, batch: weight * mean_loss(model, batch)


@pytest.mark.parametrize("other", [mean_loss, weighted_loss(3.0)], ids=["code", "value"])
def test_another_loss_does_not_begin_with_the_answer(searching, tmp_path, other):
    tried, _ = searching
    plan = Plan(compile=CompileOptions(mode="auto", cache=str(tmp_path)))
    for loss_fn, is_known in ((weighted_loss(2.0), False), (other, False), (other, True)):
        with make_trainer(loss_fn=loss_fn, plan=plan) as trainer:
            trainer.step(BATCHES[0])
            assert bool(tried) != is_known
            assert ("from its receipt" in str(trainer.report())) == is_known
        tried.clear()


def test_a_compiled_module_measures_anew_for_another_loss(searching, tmp_path):
    tried, _ = searching
    for weight, is_known in ((2.0, False), (3.0, False), (3.0, True)):
        torch.manual_seed(0)
        model = Deep()
        with CompiledModule(model, mode="auto", cache=tmp_path) as compiled:
            compiled.search(weighted_loss(weight), BATCHES[0])
            assert bool(tried) != is_known
        tried.clear()


def test_a_compiled_module_measures_anew_for_what_else_is_asked(searching, tmp_path):
    tried, choice = searching
    named = {"regions": ("blocks.*",)}
    for options, is_known in (
        (named, False),
        ({"regions": ("blocks.0",)}, False),
        ({"regions": "whole"}, False),
        ({"regions": "whole", "dynamic": True}, False),
        ({"regions": "whole", "budget_s": 900.0}, False),
        (named, True),
        (named | {"on_failure": "raise"}, True),
    ):
        torch.manual_seed(0)
        choice[0] = "whole: default" if options["regions"] == "whole" else "regions: default"
        with CompiledModule(model := Deep(), mode="auto", cache=tmp_path, **options) as compiled:
            compiled.search(mean_loss, BATCHES[0])
            assert bool(tried) != is_known, (options, model)
        tried.clear()


def test_the_answer_is_found_where_the_folder_has_gone(searching, tmp_path):
    """Nodes that share a folder may see it under different paths."""
    tried, _ = searching
    here, there = tmp_path / "here", tmp_path / "there"
    for path, is_known in ((here, False), (there, True)):
        if is_known:
            here.replace(there)
        plan = Plan(compile=CompileOptions(mode="auto", cache=str(path)))
        with make_trainer(plan=plan) as trainer:
            trainer.step(BATCHES[0])
            assert bool(tried) != is_known
        tried.clear()


def test_what_steps_change_of_a_loss_does_not_make_it_another(searching, tmp_path):
    class Counting:
        def __init__(self):
            self.num_calls = 0

        def __call__(self, model, batch):
            self.num_calls += 1
            return mean_loss(model, batch)

    tried, _ = searching
    plan = Plan(compile=CompileOptions(mode="auto", cache=str(tmp_path)))
    for is_known in (False, True):
        loss_fn = Counting()
        trainer = make_trainer(loss_fn=loss_fn, plan=plan)
        if is_known:
            trainer.evaluate([BATCHES[0]])
            assert loss_fn.num_calls == 1
        trainer.step(BATCHES[0])
        assert bool(tried) != is_known
        trainer.close()
        tried.clear()


def test_auto_measures_the_regions_that_were_asked_for(searching):
    tried, _ = searching
    model = Deep()
    plan = Plan(compile=CompileOptions(mode="auto", regions="whole"))
    make_trainer(net=lambda: model, plan=plan).step(BATCHES[0])
    assert {name for name, _, _ in tried} == {"eager", "whole: default"}


def test_auto_is_asked_again_after_an_error_of_the_users(searching):
    class BrokenError(Exception):
        pass

    def broken(model, batch):
        if is_broken:
            raise BrokenError
        return mean_loss(model, batch)

    is_broken = True
    trainer = make_trainer(loss_fn=broken, plan=Plan(compile=CompileOptions(mode="auto")))
    with measuring():
        pass  # who is left of other tests, and was reset, listens again from here on
    listening = len(callback_handler.start_callbacks)
    with pytest.raises(BrokenError):
        trainer.step(BATCHES[0])
    assert "decided on at the first step" in compiled_in(trainer)[0].detail
    assert len(callback_handler.start_callbacks) == listening
    is_broken = False
    trainer.step(BATCHES[0])
    assert "mode 'auto' took" in compiled_in(trainer)[0].detail


def test_auto_is_decided_in_the_first_half_of_a_step_too(searching):
    tried, _ = searching
    trainer = make_trainer(plan=Plan(compile=CompileOptions(mode="auto")))
    trainer.forward_backward(BATCHES[0])
    trainer.update()
    assert tried
    assert counter(trainer, "graphs") == 1


# -- In a loop of one's own ------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["eager", "whole: default", "blocks: default"])
def test_a_compiled_module_becomes_what_its_search_finds(searching, wanted):
    tried, choice = searching
    choice[0] = wanted
    torch.manual_seed(0)
    model = Deep()
    plain = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    compiled = CompiledModule(model, mode="auto", regions="auto")
    assert compiled.regions == ()
    assert "decided on by search" in str(compiled.report())
    model(BATCHES[0][0])
    assert not compiled.is_compiled

    receipt = compiled.search(mean_loss, BATCHES[0])
    assert receipt.choice == wanted
    assert [name for name, _, _ in tried] == ["eager", "blocks: default", "whole: default"] * 2
    assert {failure for _, _, failure in tried} == {None}
    assert differences(before, model.state_dict()) == []
    paths = {"eager": (), "whole: default": ("",)}
    assert compiled.regions == paths.get(wanted, ("blocks.0", "blocks.1", "blocks.2"))
    assert f"mode 'auto' took {wanted}, measured now" in compiled.explanation

    standing = [path for path, m in model.named_modules() if "_compiled_call_impl" in vars(m)]
    assert tuple(standing) == compiled.regions
    model.zero_grad()  # which a real search would have put back
    step = compiled.around(mean_loss)
    for batch in BATCHES:
        losses = [function(net, batch) for function, net in ((step, model), (mean_loss, plain))]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        compiled.after_step()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert compiled.is_compiled == (wanted != "eager")
    assert (compiled.report().counters.get("graphs", 0) > 0) == (wanted != "eager")
    with pytest.raises(ValueError, match=r"search.* finds out what mode='auto' is to be, once"):
        compiled.search(mean_loss, BATCHES[0])
    compiled.close()
    assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
    with pytest.raises(ClosedError):
        compiled.search(mean_loss, BATCHES[0])


@pytest.mark.parametrize("wanted", ["eager", "blocks: default"])
def test_what_is_to_stand_around_may_be_asked_for_before_the_search(
    searching, wanted, caplog, monkeypatch
):
    _, choice = searching
    choice[0] = wanted
    compile_ = torch.compile
    modes = []
    monkeypatch.setattr(
        torch, "compile", lambda f, *, mode=None, **kw: modes.append(mode) or compile_(f, **kw)
    )
    model = Deep()
    with CompiledModule(model, mode="auto") as compiled:
        step = compiled.around(mean_loss)
        expected = step(model, BATCHES[0])
        compiled.search(step, BATCHES[0])
        assert torch.equal(step(model, BATCHES[0]), expected)
        assert "runs eagerly" not in caplog.text
        assert "auto" not in modes
        assert ("(mean_loss): compiled in" in str(compiled.report())) == (wanted != "eager")


def test_a_compiled_module_begins_with_the_answer_of_an_earlier_one(searching, tmp_path):
    tried, _ = searching
    for run in range(2):
        torch.manual_seed(0)
        model = Deep()
        with CompiledModule(model, mode="auto", cache=tmp_path) as compiled:
            compiled.search(mean_loss, BATCHES[0])
            assert bool(tried) == (run == 0)
            assert ("from its receipt" in compiled.explanation) == (run == 1)
            assert compiled.regions == ("",)
        tried.clear()


def test_an_error_in_a_search_leaves_the_model_eager_and_the_search_to_come(searching):
    model = Deep()
    with CompiledModule(model, mode="auto") as compiled:
        with pytest.raises(ZeroDivisionError):
            compiled.search(lambda model, batch: 1 / 0, BATCHES[0])
        with pytest.raises(TypeError, match="loss_fn"):
            compiled.search(None, BATCHES[0])
        assert not any("_compiled_call_impl" in vars(m) for m in model.modules())
        compiled.search(mean_loss, BATCHES[0])
        assert compiled.regions == ("",)


def test_what_another_mode_compiles_is_not_searched():
    model = Deep()
    with (
        CompiledModule(model, backend="eager") as compiled,
        pytest.raises(ValueError, match="this is compiled as 'default'"),
    ):
        compiled.search(mean_loss, BATCHES[0])


# -- No answer -------------------------------------------------------------------------------------


@pytest.fixture
def really(monkeypatch):
    """Search for real, with a backend of the test's; count the searches."""
    state = SimpleNamespace(num_searches=0, backend="eager")
    search, compile_ = mode_search.search, torch.compile

    def counted(*args, **kwargs):
        state.num_searches += 1
        return search(*args, **kwargs)

    def compiled_by(function, *, backend, mode=None, **options):
        return compile_(function, backend=state.backend, **options)

    monkeypatch.setattr(mode_search, "search", counted)
    monkeypatch.setattr(torch, "compile", compiled_by)
    return state


def searched(kind, folder, **options):
    """Search in a handle or in a plan; return what is said of it."""
    if kind == "handle":
        model = Deep()
        with CompiledModule(model, mode="auto", cache=folder, **options) as compiled:
            compiled.search(mean_loss, BATCHES[0])
            return compiled.decisions()[0]
    plan = Plan(compile=CompileOptions(mode="auto", cache=str(folder), **options))
    with make_trainer(net=Deep, plan=plan) as trainer:
        trainer.step(BATCHES[0])
        return compiled_in(trainer)[0]


@pytest.mark.parametrize("kind", ["handle", "plan"])
def test_a_budget_that_does_not_suffice_is_no_answer(really, tmp_path, caplog, kind):
    for run in (1, 2):
        caplog.clear()
        decision = searched(kind, tmp_path, budget_s=1e-3)
        assert really.num_searches == run
        assert decision.outcome == "stepped aside"
        assert "found no answer, so eager is in force" in decision.detail
        assert "nothing could be compared with eager within budget_s=0.001" in decision.detail
        assert "whole: default and" in decision.detail
        assert "left out: no time was left to compile it" in decision.detail
        assert "the next run searches again" in caplog.text
    assert [*tmp_path.glob("receipt-*.json")] == []


@contextmanager
def global_hooks():
    hook = register_module_forward_pre_hook(lambda *_: None)
    yield
    hook.remove()


def switched_off():
    return torch._dynamo.config.patch(disable=True)


@pytest.mark.parametrize(
    ("off", "words"),
    [(global_hooks, "global module hooks"), (switched_off, "the compiler is switched off")],
)
def test_a_compiler_that_is_off_for_now_is_no_answer(really, tmp_path, off, words):
    with off():
        decision = searched("handle", tmp_path, budget_s=60.0)
    assert "nothing could be compared with eager: " in decision.detail
    assert f"not now: the whole model (Deep) runs eagerly: {words}" in decision.detail
    assert "budget_s" not in decision.detail
    decision = searched("handle", tmp_path, budget_s=5.0)
    assert "mode 'auto' took" in decision.detail


def test_what_the_machine_lacks_now_is_no_answer(really, tmp_path):
    def without_a_compiler(graph, inputs):
        raise InvalidCxxCompiler

    sound, really.backend = really.backend, without_a_compiler
    decision = searched("handle", tmp_path, budget_s=60.0)
    assert "nothing could be compared with eager: " in decision.detail
    assert "not now: " in decision.detail
    assert "No working C++ compiler found" in decision.detail
    really.backend = sound
    assert "measured now" in searched("handle", tmp_path, budget_s=60.0).detail
    assert really.num_searches == 2


def test_ways_that_all_fail_are_an_answer(really, tmp_path):
    def broken(graph, inputs):
        raise RuntimeError("no kernel")

    really.backend = broken
    for when in ("measured now", "from its receipt"):
        decision = searched("handle", tmp_path, budget_s=60.0)
        assert decision.outcome == "applied"
        assert when in decision.detail
        assert "nothing but eager ran and was right: " in decision.detail
        assert "failed: " in decision.detail
        assert "RuntimeError: no kernel" in decision.detail
    assert really.num_searches == 1
