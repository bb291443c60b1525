"""A compiled model is the same object, computes the same, and is given back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from torchfast.compiler import CompiledModule, CompileOptions, compile_callable
from torchfast.compiler.in_place import Region

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self, width=8, layer_idx=0, reads_idx=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.layer_idx = layer_idx
        self.reads_idx = reads_idx

    def forward(self, x):
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        return y * (1 + self.layer_idx) if self.reads_idx else y


class Net(nn.Module):
    def __init__(self, depth=4, reads_idx=False):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8, i, reads_idx) for i in range(depth))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 16)

    def forward(self, tokens):
        images = tokens.float().view(-1, 3, 4, 4)
        return self.head(self.body(images).mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


def tokens(rows=2):
    return torch.arange(rows * 48).reshape(rows, 48) % 16


def compiled(model, **kwargs):
    return CompiledModule(model, **{"backend": "aot_eager", "regions": "blocks"} | kwargs)


def losses_and_grads(model, steps=2):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(2 + step)).float().pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses, [p.grad for p in model.parameters()]


def assert_trains_the_same(model, handle_of):
    eager = copy.deepcopy(model)
    expected = losses_and_grads(eager)
    with handle_of(model) as handle:
        actual = losses_and_grads(model)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert set(handle.status.values()) == {"compiled"}
    return handle


@pytest.mark.parametrize(
    ("make", "regions"),
    [(Net, "blocks"), (Net, "whole"), (ConvNet, "whole"), (Encoder, "blocks")],
)
def test_training_is_the_same(make, regions):
    assert_trains_the_same(make(), lambda m: compiled(m, regions=regions))


def test_training_through_inductor_is_the_same(tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    eager = copy.deepcopy(model := Net(depth=2))
    # One thread leaves no pool of processes behind. By torch's own patch: pytest's puts the setting
    # back by deleting it, after which torch says that it does not exist.
    with (
        config.patch(compile_threads=1),
        CompiledModule(model, regions="blocks") as handle,
    ):
        loss = model(tokens()).pow(2).mean()
        loss.backward()
        eager(tokens()).pow(2).mean().backward()
        grads, expected = ([p.grad for p in m.parameters()] for m in (model, eager))
        torch.testing.assert_close(grads, expected)
        assert set(handle.status.values()) == {"compiled"}


def tiny(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=3, n_head=2, vocab_size=16, n_positions=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=32, vocab_size=16, num_key_value_heads=1
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        **sizes, intermediate_size=32, vocab_size=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_transformers_train_the_same(name):
    torch.manual_seed(0)
    model = tiny(name)
    eager = copy.deepcopy(model)
    with compiled(model) as handle:
        for twin in (model, eager):
            for _ in range(2):
                twin(input_ids=tokens(), labels=tokens()).loss.backward()
        assert len(handle.regions) == 3
        assert set(handle.status.values()) == {"compiled"}
    for (path, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=path)


def test_equal_blocks_share_their_code():
    model = Net(depth=24)
    with compiled(model) as handle:
        losses_and_grads(model, steps=1)
        assert handle.report().counters["graphs"] == 1
        # The first block's input needs no gradient now, that of the others does.
        model.embed.requires_grad_(False)
        model(tokens()).sum().backward()
        assert handle.report().counters["graphs"] == 2
        assert handle.report().counters["kinds"] == 1


def test_each_kind_has_code_of_its_own():
    # With one code object the ninth kind would reach torch's limit and run eagerly.
    widths = range(8, 20)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in widths))
    with compiled(model, regions=("*",)) as handle:
        model(torch.ones(2, 8))
        assert set(handle.status.values()) == {"compiled"}
        assert handle.report().counters["graphs"] == handle.report().counters["kinds"] == 12


def test_blocks_that_read_their_index_do_not_reach_the_limit():
    model = Net(depth=12, reads_idx=True)
    with compiled(model) as handle:
        losses_and_grads(model, steps=1)
        assert set(handle.status.values()) == {"compiled"}
        assert handle.report().counters["graphs"] == 12


def test_modules_of_torch_are_really_compiled():
    for module, x in (
        (nn.Linear(4, 4), torch.ones(2, 4)),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8), torch.ones(2, 3, 4)),
    ):
        with compiled(module, regions="whole") as handle:
            module(x)
            assert handle.report().counters["graphs"] == 1
            assert handle.status == {"": "compiled"}


def appearance(model):
    return type(model), repr(model), [*model.state_dict()], [n for n, _ in model.named_modules()]


def test_the_object_stays_what_it_is():
    model = Net()
    before = appearance(model)
    with compiled(model) as handle:
        model(tokens())
        assert appearance(model) == before
        assert handle.model is model
        assert isinstance(model, Net)
        assert not any("_orig_mod" in name for name in model.state_dict())


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_eager_and_their_own(kind):
    model = Net()
    with compiled(model, regions="whole") as handle:
        expected = model(tokens())
        if kind == "deepcopy":
            twin = copy.deepcopy(model)
        elif kind == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert not any(isinstance(v, Region) for m in twin.modules() for v in vars(m).values())
        torch.testing.assert_close(twin(tokens()), expected)
        nn.init.zeros_(twin.head.weight)
        nn.init.zeros_(twin.head.bias)
        assert not twin(tokens()).any()
        assert handle.status == {"": "compiled"}


def test_copies_that_take_every_attribute_are_eager_too():
    class Greedy(Net):
        def __getstate__(self):
            return self.__dict__.copy()

    with compiled(model := Greedy(), regions="whole"):
        model(tokens())
        twin = copy.deepcopy(model)
        nn.init.zeros_(twin.head.weight)
        nn.init.zeros_(twin.head.bias)
        assert not twin(tokens()).any()


@pytest.mark.parametrize("early", [True, False], ids=["before", "after the first call"])
@pytest.mark.parametrize("inner", [False, True], ids=["of the region", "inside"])
@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward"])
def test_hooks_run(hook, inner, early):
    model, seen = Net(depth=2), []

    def note(*args):
        seen.append(hook)

    with compiled(model):
        if not early:
            model(tokens()).sum().backward()
        module = model.blocks[1].up if inner else model.blocks[1]
        handle = getattr(module, f"register_{hook}_hook")(note)
        model(tokens()).sum().backward()
        assert len(seen) == 1
        model(tokens()).sum().backward()
        assert len(seen) == 2
        handle.remove()
        model(tokens()).sum().backward()
        assert len(seen) == 2


def test_a_hook_that_changes_the_output_does_so():
    model = Net(depth=2)
    eager = copy.deepcopy(model)
    with compiled(model):
        model(tokens())
        for twin in (model, eager):
            twin.blocks[0].register_forward_hook(lambda module, args, output: output * 3)
        torch.testing.assert_close(model(tokens()), eager(tokens()))


def test_global_hooks_run_and_the_regions_eagerly(caplog):
    model, seen = Net(depth=2), []
    with compiled(model) as handle:
        model(tokens())
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append(type(module).__name__)
        )
        try:
            model(tokens())
            model(tokens())
        finally:
            hook.remove()
        assert seen.count("LayerNorm") == 4
        told = [r.getMessage() for r in caplog.records if r.name.startswith("torchfast")]
        assert len(told) == 1
        assert "global module hooks" in told[0]
        assert "global module hooks" in str(handle.report())


def test_train_and_eval_are_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(64, 4)
    with compiled(model, regions="whole"):
        assert (model(x) == 0).any()
        model.eval()
        assert not (model(x) == 0).any()
        model.train()
        assert (model(x) == 0).any()


def test_replaced_parameters_and_loaded_state_are_used():
    model, other = Net(), Net()
    with compiled(model):
        model(tokens())
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(tokens()), other(tokens()))
        model.load_state_dict(other.state_dict(), assign=True)
        torch.testing.assert_close(model(tokens()), other(tokens()))


def test_close_takes_everything_back():
    model = Net()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    handle = compiled(model)
    model(tokens())
    assert any(isinstance(v, Region) for m in model.modules() for v in vars(m).values())
    handle.close()
    handle.close()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert handle.is_closed
    with compiled(model):  # and it can be had again
        model(tokens())


def test_close_restores_the_users_own_compile():
    model = Net()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model.compile(backend=backend)
    theirs = model._compiled_call_impl
    handle = compiled(model, regions="whole")
    model(tokens())
    assert not calls
    assert "set aside until close()" in str(handle.report())
    handle.close()
    assert model._compiled_call_impl is theirs
    model(tokens())
    assert len(calls) == 1


def test_close_leaves_what_the_user_compiled_since():
    model = Net()
    handle = compiled(model, regions="whole")
    model.compile(backend="eager")
    theirs = model._compiled_call_impl
    handle.close()
    assert model._compiled_call_impl is theirs


def test_a_second_handle_and_a_wrapped_model_are_refused():
    model = Net()
    with compiled(model):
        with pytest.raises(ValueError, match="compiled by another CompiledModule already"):
            compiled(model, regions="whole")
        with pytest.raises(ValueError, match="compiled by another CompiledModule already"):
            compiled(model.blocks[0], regions="whole")
    with pytest.raises(ValueError, match="model is compiled already: OptimizedModule is what"):
        compiled(torch.compile(model, backend="eager"))
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    with pytest.raises(ValueError, match=r"its module blocks\.1 is what torch.compile returned"):
        compiled(model)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
        compiled(lambda x: x)


def test_the_handle_does_not_keep_the_model():
    model = Net()
    handle = compiled(model)
    model(tokens()).sum().backward()
    alive = weakref.ref(model.blocks[0])
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="no longer exists"):
        handle(tokens())
    handle.close()


def test_the_class_is_not_patched():
    with compiled(Net()) as handle:
        assert "_compiled_call_impl" not in vars(Net)
        assert vars(nn.Module)["_compiled_call_impl"] is None
        other = Net()
        other(tokens())
        assert set(handle.status.values()) == {"not called"}


class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.ran = []

    @torch.compiler.disable
    def forward(self, x):
        self.ran.append(torch.compiler.is_compiling())
        return self.line(x)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), Disabled()

    def forward(self, x):
        return self.inner(self.before(x)) * 2


def test_disabled_parts_are_respected():
    model = Around()
    with compiled(model, regions="whole") as handle:
        for _ in range(3):
            model(torch.ones(2, 8))
        assert model.inner.ran == [False] * 3
        assert handle.status == {"": "compiled"}


def test_a_model_of_which_nothing_is_compiled_is_not_called_compiled():
    # Torch leaves the frame of Sequential alone, and with the graph break that is all there is.
    for model in (Disabled(), nn.Sequential(nn.Linear(8, 8), Disabled())):
        with compiled(model, regions="whole") as handle:
            model(torch.ones(2, 8))
            model(torch.ones(2, 8))
            assert handle.status[""].startswith("eager: ")
            assert handle.decisions()[0].outcome == "stepped aside"


def mean_loss(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def test_a_callable_is_compiled_with_its_loss():
    model = Net()
    eager = copy.deepcopy(model)
    loss_fn = compile_callable(mean_loss, CompileOptions(backend="aot_eager", fullgraph=True))
    assert loss_fn.status == "not called"
    for twin, function in ((model, loss_fn), (eager, mean_loss)):
        function(twin, tokens()).backward()
    torch.testing.assert_close(model.head.weight.grad, eager.head.weight.grad)
    assert loss_fn.status == "compiled"
    assert loss_fn.report().counters["graphs"] == 1
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss_fn.close()
    loss_fn(model, tokens(5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_regions_inside_of_a_compiled_callable_are_parts_of_it():
    model = Net()
    with compiled(model) as handle:
        loss_fn = compile_callable(mean_loss, CompileOptions(backend="aot_eager", fullgraph=True))
        torch.testing.assert_close(loss_fn(model, tokens()), mean_loss(model, tokens()))
        assert loss_fn.report().counters["graphs"] == 1
        assert handle.report().counters["graphs"] == 1


def test_a_callable_that_is_compiled_or_none_is_refused():
    options = CompileOptions(backend="eager")
    with pytest.raises(ValueError, match="function mean_loss is compiled already"):
        compile_callable(torch.compile(mean_loss, backend="eager"), options)
    with pytest.raises(TypeError, match="function must be callable as"):
        compile_callable(3, options)


def test_two_models_do_not_make_each_others_sizes_dynamic():
    # Torch remembers sizes by the name of the code: the second model would be compiled for any.
    shapes = []

    def backend(graph, inputs):
        shapes.append([type(i).__name__ for i in inputs if not isinstance(i, torch.Tensor)])
        return graph.forward

    for rows in (2, 3, 4):
        model = Net(depth=1)
        with compiled(model, regions="whole", backend=backend):
            model(tokens(rows))
    assert shapes == [[], [], []]
