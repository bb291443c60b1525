"""Recompute leaves caches of keys and values out of a call, silently, unless one is missed."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recomputed import make_or_skip
from torchfast import Recompute
from torchfast.memory.kv_caches import holds_past

MESSAGE = "was called with a cache of keys and values that an earlier call left empty"


class Cache:
    """As those of transformers: keys and values of each layer."""

    def __init__(self):
        self.tokens = {}

    def get_seq_length(self, layer=0):
        return self.tokens[layer].shape[1] if layer in self.tokens else 0

    def update(self, tokens, layer):
        earlier = self.tokens.get(layer)
        both = tokens if earlier is None else torch.cat((earlier, tokens), 1)
        self.tokens[layer] = both
        return both


class Remembers(nn.Module):
    def __init__(self, layer_idx=0):
        super().__init__()
        self.line, self.layer_idx = nn.Linear(4, 4), layer_idx

    def forward(self, x, place=None, *, cache=None):
        layer = self.layer_idx if place is None else place
        past = x if cache is None else cache.update(x, layer)
        return x + torch.tanh(self.line(past)).mean(1, keepdim=True)


class Decoder(nn.Module):
    def __init__(self, rounds=None):
        super().__init__()
        self.blocks = nn.ModuleList(Remembers(number) for number in range(3))
        self.rounds = rounds

    def forward(self, x, cache=None):
        cache = Cache() if cache is None else cache
        for number in range(self.rounds or 1):
            for block in self.blocks:
                place = None if self.rounds is None else 3 * number + block.layer_idx
                x = block(x, place, cache=cache)
        return x, cache


def first_segment(model):
    return model(torch.ones(2, 3, 4, requires_grad=True))


def test_a_cache_that_nobody_uses_again_is_left_out_silently():
    model = Decoder()
    with Recompute(model) as recompute:
        for _ in range(3):
            x, cache = first_segment(model)
            x.sum().backward()
            assert cache.get_seq_length() == 0
        gone = recompute._kinds[0].left_out
        assert len(gone) == 1
        del cache
        gc.collect()
        assert len(gone) == 0


@pytest.mark.parametrize("state", ["train", "eval", "no_grad"])
def test_a_cache_that_was_left_empty_is_not_taken_for_a_full_one(state):
    model = Decoder()
    with Recompute(model):
        _, cache = first_segment(model)
        model.train(state != "eval")
        with (
            torch.set_grad_enabled(state != "no_grad"),
            pytest.raises(RuntimeError, match=rf"block blocks\.0 {MESSAGE}"),
        ):
            model(torch.ones(2, 3, 4), cache)


def test_a_cache_that_was_filled_without_gradients_is_used():
    model = Decoder()
    expected, _ = model(torch.ones(2, 3, 4), first_segment(model)[1])
    with Recompute(model):
        first_segment(model)[0].sum().backward()
        with torch.no_grad():
            _, cache = first_segment(model)
        assert torch.equal(model(torch.ones(2, 3, 4), cache)[0], expected)


def test_a_block_that_is_used_at_several_depths():
    model = Decoder(rounds=2)
    with Recompute(model):
        x, cache = first_segment(model)
        x.sum().backward()
        with pytest.raises(RuntimeError, match=MESSAGE):
            model(torch.ones(2, 3, 4), cache)


def test_a_block_that_somebody_else_runs_again_gets_the_same_cache():
    model = Decoder()
    with Recompute(model):
        x = torch.ones(2, 3, 4, requires_grad=True)
        checkpoint(model, x, Cache(), use_reentrant=False)[0].sum().backward()


def test_two_segments_of_a_model_of_transformers():
    model, _, batch = make_or_skip("llama")
    with Recompute(model.train()):
        first = model(batch[:, :8], use_cache=True)
        with pytest.raises(RuntimeError, match=rf"block model\.layers\.0 {MESSAGE}"):
            model(batch[:, 8:], past_key_values=first.past_key_values)
        for _ in range(2):
            model(batch, labels=batch).loss.backward()


# --- which layer is asked for, and how -----------------------------------------------------------


class HybridCache(Cache):
    """Has keys of odd layers alone, and a state of the others, as transformers has for Jamba."""

    def get_seq_length(self, layer=0):
        if layer and not layer % 2:
            raise ValueError(f"layer {layer} does not track its length")
        return super().get_seq_length(layer or 1)  # the first that has keys

    def has_previous_state(self, layer):
        assert not layer % 2
        return layer in self.tokens


class SilentCache(HybridCache):
    has_previous_state = None


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_a_layer_that_has_a_state_in_place_of_keys(what):
    model = Decoder()
    with Recompute(model, what) as recompute:
        for _ in range(2):
            x, cache = model(torch.ones(2, 3, 4, requires_grad=True), HybridCache())
            x.sum().backward()
        assert cache.tokens == {}
        assert recompute._kinds[0].num_with_past == 0
        with torch.no_grad():
            _, cache = model(torch.ones(2, 3, 4), HybridCache())
        model(torch.ones(2, 3, 4), cache)[0].sum().backward()
        assert recompute._kinds[0].num_with_past == 3
        assert all(cache.tokens[layer].shape[1] == 6 for layer in range(3))


def test_a_layer_of_which_a_cache_tells_nothing_runs_as_it_is():
    model = Decoder()
    with Recompute(model) as recompute:
        _, cache = model(torch.ones(2, 3, 4, requires_grad=True), SilentCache())
        assert list(cache.tokens) == [2]
        assert recompute._kinds[0].num_with_past == 1


def test_what_is_compiled_with_a_cache_stays_so_beside_eager_calls(fresh_dynamo):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    def filled():
        cache = Cache()
        cache.tokens = {layer: torch.ones(2, 3, 4) for layer in range(3)}
        return cache

    model, x = Decoder(), torch.ones(2, 3, 4)
    with Recompute(model) as recompute:
        fast = torch.compile(model, backend=backend)
        fast(x, filled())
        assert "ran as they are in what is compiled: they were" in str(recompute.decisions())
        for _ in range(4):
            model(x, filled())
            fast(x, filled())
    assert len(compiled) == 1
    assert "ran as they are in 12 calls: they were" in str(recompute.decisions())


def test_each_block_asks_for_its_own_layer():
    model = Decoder()
    with Recompute(model, ("blocks.1", "blocks.2")) as recompute:
        # The block in front of them puts its tokens there, and runs as ever.
        x, cache = first_segment(model)
        x.sum().backward()
        assert list(cache.tokens) == [0]
        assert recompute._kinds[0].num_with_past == 0
        assert recompute._kinds[0].num_recomputed == 2


def test_the_layer_may_be_known_to_a_part_of_a_block():
    model = Decoder()
    with Recompute(model, ("blocks.2",)):
        cache = Cache()
        cache.update(torch.ones(2, 3, 4), 2)
        assert holds_past(nn.Sequential(nn.Tanh(), model.blocks[2]), (), {"cache": cache})
        assert not holds_past(nn.Sequential(nn.Tanh(), model.blocks[1]), (), {"cache": cache})
        assert not holds_past(nn.Tanh(), (), {"cache": cache})  # it is of no layer: the first


def test_a_block_that_goes_well_with_a_cache_runs_as_it_is():
    model = Decoder()
    for block in model.blocks:
        block._can_checkpoint_with_cache = True
    with Recompute(model) as recompute:
        _, cache = first_segment(model)
        assert sorted(cache.tokens) == [0, 1, 2]
        assert recompute._kinds[0].num_with_past == 3


class Asked(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.seen = nn.Linear(4, 4), []

    def forward(self, x, **others):
        self.seen.append(others)
        return torch.tanh(self.line(x))


@pytest.mark.parametrize("use_cache", [True, False, None])
def test_a_block_without_its_cache_is_told_to_use_none(use_cache):
    block = Asked()
    with Recompute(nn.Sequential(block), ("0",)):
        x = torch.ones(2, 4)
        block(x, past=Cache(), use_cache=use_cache).sum().backward()
        expected = {"past": None, "use_cache": False if use_cache else use_cache}
        assert block.seen == [expected, expected]
        block(x, use_cache=True).sum().backward()  # there is none to leave out
        assert block.seen[2:] == [{"use_cache": True}] * 2


def test_a_hybrid_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.JambaConfig(
        **sizes, vocab_size=50, intermediate_size=64, num_key_value_heads=2, num_experts=2,
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.JambaForCausalLM(config).train()
    batch = torch.randint(1, 50, (2, 8))
    model(batch, labels=batch, use_cache=False).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with Recompute(model) as recompute:
        model(batch, labels=batch).loss.backward()
        assert sum(kind.num_recomputed for kind in recompute._kinds) == 4
    assert all(map(torch.equal, expected, (p.grad for p in model.parameters())))
