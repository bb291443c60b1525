"""Which parts of a model are compiled, and what is said about it."""

from __future__ import annotations

import pytest
from torch import nn

from torchfast.compiler.regions import WHOLE_LIMIT, choose_regions


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)


class Block(nn.Module):
    def __init__(self, layer_idx=0):
        super().__init__()
        self.attn = Attention()
        self.line = nn.Linear(8, 8)
        self.layer_idx = layer_idx


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.blocks = nn.ModuleList(Block(n) for n in range(depth))
        self.head = nn.Linear(8, 4)


def paths(choice):
    return [kind.paths for kind in choice.kinds]


def test_blocks():
    choice = choose_regions(Net(), "blocks")
    assert paths(choice) == [("blocks.0", "blocks.1", "blocks.2")]
    assert str(choice) == (
        "3 blocks of Block, compiled once and reused: blocks.0 to blocks.2 (by repeated blocks)"
    )
    assert not choice.is_whole


def test_whole():
    choice = choose_regions(Net(), "whole")
    assert paths(choice) == [("",)]
    assert choice.is_whole
    assert str(choice) == "the whole model (Net) (as asked)"


def test_blocks_where_nothing_repeats_is_whole_and_says_so():
    choice = choose_regions(nn.Linear(2, 2), "blocks")
    assert choice.is_whole
    assert "no blocks repeat" in str(choice)


def test_auto_goes_by_the_number_of_layers():
    # Each block has two layers, and there are two around them.
    at_limit, beyond = (Net((WHOLE_LIMIT - 2) // 2 + n) for n in (0, 1))
    assert choose_regions(at_limit).is_whole
    assert f"{WHOLE_LIMIT} layers, small enough" in str(choose_regions(at_limit))
    choice = choose_regions(beyond)
    assert len(choice.kinds[0].paths) == WHOLE_LIMIT // 2
    assert f"{WHOLE_LIMIT + 2} layers, too many" in str(choice)


def test_auto_is_whole_where_a_large_model_has_no_blocks():
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(WHOLE_LIMIT + 1))
    assert choose_regions(model).is_whole


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        (("blocks.*",), [("blocks.0", "blocks.1", "blocks.2")]),
        (("blocks.1",), [("blocks.1",)]),
        (("blocks.*.attn",), [("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")]),
        (("head", "blocks.[01]"), [("blocks.0", "blocks.1"), ("head",)]),
        ((Attention,), [("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")]),
        ((Block, "head"), [("blocks.0", "blocks.1", "blocks.2"), ("head",)]),
        (("Attention",), [("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")]),  # from JSON
        (("Module",), [("",)]),  # as the class itself would
    ],
)
def test_named(regions, expected):
    assert paths(choose_regions(Net(), regions)) == expected


def test_the_outer_contains_the_inner():
    choice = choose_regions(Net(), (Attention, "blocks.*"))
    assert paths(choice) == [("blocks.0", "blocks.1", "blocks.2")]
    assert "blocks.0.attn, blocks.1.attn, blocks.2.attn as parts" in str(choice)
    assert paths(choose_regions(Net(), (Net, Block))) == [("",)]


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        (("layers.h",), r"no module of the model matches; there are '\w+'(, '[\w.]+'){4}, \.\.\.$"),
        (("block.0",), r"regions names 'block.0', which no module.*; did you mean 'blocks.0'"),
        (("*.2.3.4.5",), "which no module of the model matches"),
        ((nn.LSTM,), "regions names the class LSTM, of which the model has no module"),
        (("block.*",), r"no module of the model matches; did you mean 'blocks\.\*'"),
        (("blocks",), r"a ModuleList, which cannot be called.*'blocks\.\*'"),
        ((nn.ModuleList,), r"has 'blocks', which cannot be called; its members can: 'blocks\.\*'"),
        (("ModuleList",), r"the class ModuleList, of which the model has 'blocks', which cannot"),
    ],
)
def test_what_is_not_there_is_an_error(regions, words):
    with pytest.raises(ValueError, match=words):
        choose_regions(Net(), regions)


def test_a_list_with_a_forward_of_its_own_can_be_named():
    class Chain(nn.ModuleList):
        def forward(self, x):
            for module in self:
                x = module(x)
            return x

    model = nn.Sequential(Chain([Block(), nn.ModuleList()]), nn.ModuleList())
    assert paths(choose_regions(model, (nn.ModuleList,))) == [("0",)]
    assert paths(choose_regions(model, ("0",))) == [("0",)]


def test_what_repeats_inside_is_named():
    layers = [nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 8)) for _ in range(2)]
    named = [Wrapper(layer) for layer in layers]
    choice = choose_regions(nn.Sequential(*named), "blocks")
    assert paths(choice) == [("0", "1")]
    assert "with the Block inside them" in str(choice)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
