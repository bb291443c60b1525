"""Recompute leaves caches of keys and values out of a call, silently, unless one is missed."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recomputed import make_or_skip
from torchfast import Recompute

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
