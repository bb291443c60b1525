"""Repeated blocks are found by what they are, at any depth, in a fixed order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchfast._core.blocks import abbreviated, count_layers, find_blocks


class Block(nn.Module):
    def __init__(self, width=8, **attributes):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.drop = nn.Dropout(attributes.pop("p", 0.1))
        for name, value in attributes.items():
            setattr(self, name, value)


class Other(Block):
    pass


class Holder(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def found(model):
    return [(group.class_name, group.paths) for group in find_blocks(model)]


def blocks(*attributes):
    return [Block(**a) for a in attributes]


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda modules: nn.Sequential(*modules)])
def test_blocks_in_a_list(kind):
    model = Holder(embed=nn.Embedding(4, 8), layers=kind(blocks({}, {}, {})))
    assert found(model) == [("Block", ("layers.0", "layers.1", "layers.2"))]


def test_blocks_in_a_dict():
    model = Holder(layers=nn.ModuleDict({"b": Block(), "a": Block()}))
    assert found(model) == [("Block", ("layers.b", "layers.a"))]


@pytest.mark.parametrize(
    "other",
    [
        Block(width=9),
        Block(p=0.2),
        Block(num_heads=2),
        Block(eps=1e-5),
        Block(act=torch.relu),
        Block(kernels=(1, 2)),
        Block().half(),
        Other(),
    ],
    ids=["shape", "dropout", "heads", "eps", "function", "tuple", "dtype", "class"],
)
def test_what_differs_is_another_group(other):
    attributes = {"num_heads": 1, "eps": 1e-6, "kernels": (1, 1)}
    own = {name: attributes[name] for name in vars(other) if name in attributes}
    model = nn.ModuleList([Block(**own), Block(**own), other])
    groups = found(model)
    assert groups[0] == ("Block", ("0", "1"))
    if type(other) is Block:
        assert groups[1:] == [("Block", ("2",))]
    else:
        assert groups[1:] == []


def test_a_buffer_and_its_dtype_are_looked_at():
    one, two, three = blocks({}, {}, {})
    for block, dtype in ((one, torch.float32), (two, torch.float32), (three, torch.float64)):
        block.register_buffer("scale", torch.ones(1, dtype=dtype))
    assert found(nn.ModuleList([one, two, three])) == [("Block", ("0", "1")), ("Block", ("2",))]


def test_a_counter_does_not_split_but_is_named():
    model = nn.ModuleList(Holder(attn=Block(layer_idx=n), layer_idx=n) for n in range(3))
    (group,) = find_blocks(model)
    assert group.paths == ("0", "1", "2")
    assert group.counters == ("layer_idx",)


@pytest.mark.parametrize(
    "values", [("dilation", (1, 2, 3)), ("layer_idx", (0, 1, 1)), ("layer_id", (0, 2, 4))]
)
def test_other_ints_do_split(values):
    name, numbers = values
    model = nn.ModuleList([*blocks(*({name: n} for n in numbers)), Block(p=0.5), Block(p=0.5)])
    assert len(find_blocks(model)) > 2


def test_the_outermost_list_is_taken_and_the_inner_named():
    def layer():
        return Holder(experts=nn.ModuleList(Other() for _ in range(4)), norm=nn.LayerNorm(8))

    (group,) = find_blocks(Holder(layers=nn.ModuleList([layer(), layer()])))
    assert group.paths == ("layers.0", "layers.1")
    assert group.nested == ("Other",)


def test_stages_that_differ_are_passed_through():
    stages = [
        Holder(blocks=nn.ModuleList(Block(width) for _ in range(2)), down=nn.Linear(width, width))
        for width in (8, 16)
    ]
    model = Holder(layers=nn.ModuleList(stages))
    assert found(model) == [
        ("Block", ("layers.0.blocks.0", "layers.0.blocks.1")),
        ("Block", ("layers.1.blocks.0", "layers.1.blocks.1")),
    ]


def test_blocks_that_all_differ_are_groups_of_one():
    model = Holder(layers=nn.ModuleList(blocks({"p": 0.1}, {"p": 0.2})))
    assert found(model) == [("Block", ("layers.0",)), ("Block", ("layers.1",))]


def test_equal_blocks_of_several_lists_are_one_group():
    model = Holder(a=nn.Sequential(*blocks({}, {})), b=nn.Sequential(*blocks({}, {})))
    assert found(model) == [("Block", ("a.0", "a.1", "b.0", "b.1"))]


def test_a_block_that_stands_at_several_places_is_one():
    block = Block()
    (group,) = find_blocks(nn.ModuleList([block, block, block]))
    assert group.paths == ("0",)
    assert group.num_uses == 3


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()),
        Holder(one=Block(), two=Block()),
        nn.ModuleList([Block(), nn.LayerNorm(8)]),
        nn.ModuleList(nn.Linear(2, 2) for _ in range(3)),
        nn.ModuleList(),
    ],
)
def test_nothing_repeats(model):
    assert find_blocks(model) == ()


def test_chains_of_blocks_are_passed_through():
    chains = [nn.Sequential(*blocks({}, {}, {})) for _ in range(2)]
    assert found(nn.Sequential(*chains)) == [
        ("Block", tuple(f"{i}.{j}" for i in "01" for j in "012"))
    ]


def test_the_layers_of_torchs_own_encoder():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert found(model) == [("TransformerEncoderLayer", ("layers.0", "layers.1", "layers.2"))]


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride)
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None


def test_a_resnet_whose_first_blocks_differ():
    model = Holder(
        layer1=nn.Sequential(*(BasicBlock(8, 8) for _ in range(3))),
        layer2=nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16), BasicBlock(16, 16)),
    )
    assert found(model) == [
        ("BasicBlock", ("layer1.0", "layer1.1", "layer1.2")),
        ("BasicBlock", ("layer2.0",)),
        ("BasicBlock", ("layer2.1", "layer2.2")),
    ]


def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 32,
    }  # fmt: skip
    with torch.device("meta"):
        match name:
            case "gpt2":
                config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=16)
                return transformers.GPT2LMHeadModel(config)
            case "llama":
                config = transformers.LlamaConfig(**sizes, vocab_size=16)
                return transformers.LlamaForCausalLM(config)
            case "bert":
                return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=16))
            case "vit":
                return transformers.ViTModel(transformers.ViTConfig(**sizes))
            case "mixtral":
                config = transformers.MixtralConfig(**sizes, vocab_size=16, num_local_experts=2)
                return transformers.MixtralForCausalLM(config)
            case _:
                config = transformers.T5Config(
                    d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, vocab_size=16
                )
                return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("name", "block", "path"),
    [
        ("gpt2", "GPT2Block", "transformer.h"),
        ("llama", "LlamaDecoderLayer", "model.layers"),
        ("bert", "BertLayer", "encoder.layer"),
        ("vit", "ViTLayer", None),
        ("mixtral", "MixtralDecoderLayer", "model.layers"),
    ],
)
def test_models_of_transformers(name, block, path):
    (group,) = find_blocks(of_transformers(name))
    assert group.class_name == block
    assert len(group.paths) == 3
    assert path is None or group.paths == tuple(f"{path}.{n}" for n in range(3))


def test_t5_whose_first_blocks_differ():
    groups = find_blocks(of_transformers("t5"))
    assert {group.class_name for group in groups} == {"T5Block"}
    assert [group.paths for group in groups] == [
        ("encoder.block.0",), ("encoder.block.1", "encoder.block.2"),
        ("decoder.block.0",), ("decoder.block.1", "decoder.block.2"),
    ]  # fmt: skip


class Empty(Block):
    def __len__(self):
        return 0


def test_blocks_whose_length_is_zero():
    model = Holder(layers=nn.ModuleList(Empty() for _ in range(3)))
    assert found(model) == [("Empty", ("layers.0", "layers.1", "layers.2"))]


@pytest.mark.parametrize("wrap", [torch.compile, torch.compiler.disable])
def test_a_module_that_torch_has_wrapped_has_no_length(wrap):
    model = Holder(layers=nn.ModuleList(blocks({}, {}, {})), part=wrap(nn.Linear(4, 4)))
    assert found(model) == [("Block", ("layers.0", "layers.1", "layers.2"))]


def test_layers_are_counted_at_every_place():
    block = Block()
    assert count_layers(block) == 2
    assert count_layers(nn.ModuleList([block, block])) == 4
    assert count_layers(nn.Linear(2, 2)) == 1


def test_paths_are_abbreviated():
    assert abbreviated(["h.0", "h.1"]) == "h.0, h.1"
    assert abbreviated(["h.0", "h.1", "h.2", "h.4"]) == "h.0 to h.2, h.4"
    assert abbreviated(["a.0", "b.1"]) == "a.0, b.1"
    assert abbreviated([f"m.{n}" for n in range(0, 40, 2)]).endswith("m.8, ..., m.38")


class Masked(nn.Linear):
    """A layer with a forward of its own, and nothing within."""

    def forward(self, x):
        return super().forward(x).relu()


def test_layers_derived_from_those_of_torch_are_no_blocks():
    layers = [Masked(8, 8), nn.ReLU(), Masked(8, 8), nn.ReLU()]
    assert found(nn.Sequential(*layers)) == []
    chains = [nn.Sequential(Masked(8, 16), nn.ReLU(), Masked(16, 8)) for _ in range(2)]
    assert found(nn.Sequential(*chains)) == [("Sequential", ("0", "1"))]
