"""What stands around the blocks is compiled too, and the blocks once, as before."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from torchfast import ClosedError, CompiledModule, CompileOptions, Plan, Trainer
from torchfast.compiler.conversion import FrameConversion
from torchfast.testing import assert_parity

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(8, 8, generator=GENERATOR), torch.randn(8, 4, generator=GENERATOR))
    for _ in range(11)
]
CALL_FUNCTION = UnspecializedNNModuleVariable.call_function


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.linear(self.norm(x)).relu())


class Scaled(nn.Module):
    """A module of the user's own, outside of the blocks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = Scaled()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(8, 4)

    def forward(self, x, targets=None):
        logits = self.head(self.trunk(x))
        return logits if targets is None else (logits - targets).square().mean()


def loss_outside(model, batch):
    inputs, targets = batch
    return F.huber_loss(model(inputs), targets)


def loss_inside(model, batch):
    return model(*batch)


class Graphs:
    """A backend that notes what is in each graph, and runs it as it is."""

    def __init__(self):
        self.ops = []

    def __call__(self, graph, inputs):
        targets = (getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes)
        self.ops.append(set(targets))
        return graph.forward

    def having(self, op):
        return [ops for ops in self.ops if op in ops]


def trained(loss_fn, batches=BATCHES, model=None, **options):
    torch.manual_seed(0)
    model = model or Deep()
    plan = Plan(compile=CompileOptions(**options)) if options else Plan.preset("eager")
    trainer = Trainer(model, optim.SGD(model.parameters(), lr=0.1), loss_fn, plan)
    torch.manual_seed(1)
    return trainer, [trainer.step(batch) for batch in batches]


def report_of(trainer):
    return [d for d in trainer.report().decisions if d.lever == "compile"]


@pytest.mark.parametrize("loss_fn", [loss_outside, loss_inside])
def test_it_trains_the_same(loss_fn):
    result = assert_parity(
        Deep,
        partial(optim.AdamW, lr=0.01),
        loss_fn,
        BATCHES,
        Plan(compile=CompileOptions(backend="eager", regions="blocks")),
        accumulate=2,
        max_grad_norm=1.0,
    )
    assert result.loss_error == result.update_error == 0.0
    assert result.report.counters["compile_graphs"] > 2
    assert result.report.counters.get("compile_graph_breaks", 0) == 0
    assert not [d for d in result.report.stepped_aside if d.lever == "compile"]


def test_the_loss_is_one_graph_and_the_blocks_are_in_none_of_them():
    graphs = Graphs()
    trainer, _ = trained(loss_outside, backend=graphs, regions="blocks")
    (loss,) = graphs.having("huber_loss")
    assert not {"layer_norm", "dropout"} & loss
    # Twice, as inputs of later blocks need a gradient; once for all three, as ever.
    assert len(graphs.having("layer_norm")) == len(graphs.having("dropout")) == 2
    assert len(graphs.having("rsqrt")) == 1  # behind the loop, in a class of the user's own
    assert any("what stands around them (loss_outside): compiled" in d.detail
               for d in report_of(trainer))  # fmt: skip


def test_a_loss_inside_of_the_model_is_one_graph_with_the_head():
    graphs = Graphs()
    trained(loss_inside, backend=graphs, regions="blocks")
    (loss,) = [ops for ops in graphs.having("square") if "sub" in ops]
    assert "linear" in loss
    assert "layer_norm" not in loss


def test_each_graph_belongs_to_one_region():
    graphs = Graphs()
    trainer, _ = trained(loss_outside, backend=graphs, regions="blocks")
    assert trainer.report().counters["compile_graphs"] == len(graphs.ops)


@pytest.mark.parametrize("regions", ["whole", ("trunk.blocks.*",)])
def test_it_is_for_blocks_only(regions):
    trainer, _ = trained(loss_outside, backend="eager", regions=regions)
    assert not [d for d in report_of(trainer) if "around" in d.detail]


def test_a_step_in_which_there_is_nothing_else_is_not_warned_of(caplog):
    class Only(Trunk):
        def forward(self, x, targets):
            for block in self.blocks:
                x = block(x)
            return (x.mean() - targets).square().mean()

    trainer, _ = trained(loss_inside, model=Only(), backend="eager", regions="blocks")
    assert not [r for r in caplog.records if r.name.startswith("torchfast")]
    aside = [d.detail for d in report_of(trainer) if d.outcome == "left alone"]
    (told,) = aside
    assert told.startswith("what stands around them (loss_inside): no graph came of it: ")
    assert "move the loop to a method of its own" in told


def test_a_break_of_the_users_own_is_told_once():
    def broken(model, batch):
        loss = loss_outside(model, batch)
        loss.item()
        return loss * 2.0

    trainer, losses = trained(broken, backend="eager", regions="blocks")
    _, plain = trained(broken)
    assert losses == plain
    breaks = [d.detail for d in report_of(trainer) if "graph break" in d.detail]
    assert ["loss.item()" in text for text in breaks] == [True]
    assert trainer.report().counters["compile_graph_breaks"] == 1


@pytest.mark.parametrize("options", [{}, {"on_failure": "raise"}, {"fullgraph": True}], ids=str)
def test_what_cannot_be_compiled_runs_as_it_is(options, caplog):
    class Fails(Graphs):
        def __call__(self, graph, inputs):
            run = super().__call__(graph, inputs)
            if "huber_loss" in self.ops[-1]:
                raise NotImplementedError("no such kernel")
            return run

    trainer, losses = trained(loss_outside, backend=Fails(), regions="blocks", **options)
    _, plain = trained(loss_outside)
    assert losses == plain
    assert trainer.report().counters["compile_compiled"] == 3  # the blocks
    said = [r.message for r in caplog.records if r.name.startswith("torchfast")]
    assert ["no such kernel" in text for text in said] == [True]
    aside = [d for d in trainer.report().stepped_aside if d.lever == "compile"]
    assert "what stands around them" in aside[0].detail
    assert UnspecializedNNModuleVariable.call_function is CALL_FUNCTION


def test_hooks_of_the_model_and_of_blocks_run():
    seen = []
    model = Deep()
    model.register_forward_hook(lambda *_: seen.append("model"))
    model.trunk.blocks[1].register_forward_hook(lambda *_: seen.append("block"))
    trained(loss_outside, batches=BATCHES[:4], model=model, backend="eager", regions="blocks")
    assert seen == ["block", "model"] * 4


def test_shapes_train_and_eval_may_change():
    def losses(**options):
        trainer, found = trained(loss_outside, batches=[], **options)
        for number, (inputs, targets) in enumerate(BATCHES):
            trainer.model.train(number < 6)
            size = (8, 5, 8, 3)[number % 4]
            found.append(trainer.step((inputs[:size], targets[:size])).item())
        return found

    assert losses(backend="eager", regions="blocks") == losses()


def test_after_close_the_users_own_compile_compiles():
    """Torch keeps functions that it has left alone; they have to be free again."""
    model = Deep()
    trainer, _ = trained(loss_outside, model=model, backend="eager", regions="blocks")
    trainer.close()
    graphs = Graphs()
    torch.compile(model.trunk, backend=graphs)(BATCHES[0][0])
    assert len(graphs.having("layer_norm")) == 1
    assert "rsqrt" in graphs.having("layer_norm")[0]  # in one piece, past the loop


def test_what_others_compiled_of_the_model_stays_theirs():
    model = Deep()
    graphs = Graphs()
    own = torch.compile(model.trunk, backend=graphs)
    own(BATCHES[0][0])
    trainer, _ = trained(loss_outside, model=model, backend="eager", regions="blocks")
    trainer.close()
    own(BATCHES[0][0])
    assert len(graphs.having("layer_norm")) == 1
    assert _debug_get_cache_entry_list(Trunk.forward.__code__)


class Flat(nn.Module):
    """A model whose loop stands in its own forward, which cannot be compiled around the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_what_is_left_alone_is_so_for_this_one_only():
    model = Flat()
    trainer, _ = trained(loss_outside, model=model, backend="eager", regions="blocks")
    for other in (model, Flat()):
        graphs = Graphs()
        torch.compile(other, backend=graphs)(BATCHES[0][0])
        (whole,) = graphs.ops  # in one piece, the blocks too
        assert {"layer_norm", "linear"} <= whole
    trainer.step(BATCHES[0])  # and it is not closed yet


@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_what_was_left_alone_is_not_tried_again(is_compiled_before, monkeypatch):
    model, tried = Flat(), []
    if is_compiled_before:
        torch.compile(model, backend="eager")(BATCHES[0][0])
    converted = FrameConversion._converted

    def noting(conversion, frame, *rest):
        tried.append(frame.f_code.co_name)
        return converted(conversion, frame, *rest)

    monkeypatch.setattr(FrameConversion, "_converted", noting)
    trainer, _ = trained(
        loss_outside, model=model, batches=BATCHES[:2], backend="eager", regions="blocks"
    )
    assert tried.count("forward") == 1
    tried.clear()
    trainer.step(BATCHES[2])
    assert not tried


def test_an_exception_in_the_first_step_leaves_nothing_eager():
    class UnusableError(Exception):
        pass

    def checked(model, batch):
        loss = F.huber_loss(model(batch[0]), batch[1])
        if batch[0].shape[0] == 5:
            raise UnusableError
        return loss

    graphs = Graphs()
    trainer, _ = trained(checked, batches=[], backend=graphs, regions="blocks")
    with pytest.raises(UnusableError):
        trainer.step((BATCHES[0][0][:5], BATCHES[0][1][:5]))
    trainer.step(BATCHES[0])
    assert len(graphs.having("huber_loss")) == 1


def test_what_nobody_closes_keeps_no_model_alive():
    trainer, _ = trained(loss_outside, backend="eager", regions="blocks")
    model = weakref.ref(trainer.model)
    parameter = weakref.ref(trainer.model.head.weight)
    del trainer
    for _ in range(2):  # what the first sets free may lie in cycles
        gc.collect()
    assert model() is None
    assert parameter() is None


def test_the_tracer_is_left_as_it_was():
    trained(loss_outside, backend="eager", regions="blocks")
    assert UnspecializedNNModuleVariable.call_function is CALL_FUNCTION


def test_in_a_loop_of_ones_own():
    model, graphs = Deep(), Graphs()
    with CompiledModule(model, regions="blocks", backend=graphs) as compiled:
        step = compiled.around(loss_outside)
        step(model, BATCHES[0]).backward()
        assert len(graphs.having("huber_loss")) == 1
        assert "what stands around them" in str(compiled.report())
        number = len(graphs.ops)
        compiled.suspend()
        step(model, (BATCHES[0][0][:5], BATCHES[0][1][:5])).backward()
        assert len(graphs.ops) == number  # nor the blocks along with the rest
        compiled.resume()
        step(model, BATCHES[0]).backward()
        assert len(graphs.ops) == number
    assert step(model, BATCHES[0]).requires_grad
    assert len(graphs.ops) == number


def test_what_is_asked_of_a_handle_that_is_closed_or_suspended():
    model, graphs = Deep(), Graphs()
    compiled = CompiledModule(model, regions="blocks", backend=graphs)
    compiled.suspend()
    step = compiled.around(loss_outside)
    step(model, BATCHES[0]).backward()
    assert not graphs.ops  # nor the blocks along with the rest
    compiled.resume()
    step(model, BATCHES[0]).backward()
    assert len(graphs.having("huber_loss")) == 1
    compiled.close()
    with pytest.raises(ClosedError, match="this CompiledModule is closed"):
        compiled.around(loss_outside)


@pytest.mark.parametrize("last_words", ["close", "drop"])
def test_handles_that_overlap_free_what_they_compiled(last_words):
    """The last one of them, as torch frees all versions of a function or none."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(weakref.ref(graph))
        return graph.forward

    def handle():
        model = Deep()
        compiled = CompiledModule(model, regions="blocks", backend=backend)
        compiled.around(loss_outside)(model, BATCHES[0]).backward()
        return compiled

    handles = [handle() for _ in range(3)]
    handles[0].close()
    assert len(_debug_get_cache_entry_list(loss_outside.__code__)) == 3  # as two are in use
    if last_words == "close":
        handles[1].close()
    else:
        handles[1] = None
        gc.collect()
    handles[2].close()
    handles.clear()
    for _ in range(2):  # what the first sets free may lie in cycles
        gc.collect()
    assert not [graph for graph in graphs if graph() is not None]


@pytest.mark.parametrize("loss_fn", [loss_outside, loss_inside])
def test_where_compiling_is_forbidden_what_is_left_alone_still_runs(loss_fn):
    """As in a capture: the loop over the blocks has no compiled code, and needs none."""
    torch.manual_seed(0)
    model, plain = Deep(), Deep()
    plain.load_state_dict(model.state_dict())
    plan = Plan(compile=CompileOptions(regions="blocks", backend="eager"))
    losses = {}
    for name, net, of in (("compiled", model, plan), ("plain", plain, Plan())):
        torch.manual_seed(1)
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        with Trainer(net.eval(), optimizer, loss_fn, of, device="cpu") as trainer:
            for module in net.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            losses[name] = [trainer.step(batch) for batch in BATCHES[:3]]
            before = trainer.report().counters.get("compile_graphs")
            with torch.compiler.set_stance("fail_on_recompile"):
                losses[name] += [trainer.step(batch) for batch in BATCHES[3:6]]
            assert trainer.report().counters.get("compile_graphs") == before
    assert losses["compiled"] == losses["plain"]


def test_where_compiling_is_forbidden_nothing_is_compiled():
    trainer = Trainer(
        Deep(),
        partial(optim.SGD, lr=0.1),
        loss_outside,
        Plan(compile=CompileOptions(regions="blocks", backend="eager")),
        device="cpu",
    )
    with trainer:
        with (
            torch.compiler.set_stance("fail_on_recompile"),
            pytest.raises(RuntimeError, match="fail_on_recompile"),
        ):
            trainer.step(BATCHES[0])
        for batch in BATCHES[:3]:
            trainer.step(batch)
        before = trainer.report().counters["compile_graphs"]
        other = tuple(part.double() for part in BATCHES[3])
        trainer.model.double()
        with (
            torch.compiler.set_stance("fail_on_recompile"),
            pytest.raises(RuntimeError, match=r"fail_on_recompile|[Rr]ecompil"),
        ):
            trainer.step(other)
        assert trainer.report().counters["compile_graphs"] == before
        assert torch.compiler.is_compiling() is False
        trainer.step(other)
        assert trainer.report().counters["compile_graphs"] > before
