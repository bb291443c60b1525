"""In how many parts ranks run a step: what each wants, and what the smallest can make."""

from __future__ import annotations

import torch

from torchfast.memory.split_ranks import SplitRanks, Wish
from torchfast.memory.splitting import split, split_evenly


class Heard:
    """Other ranks that say what a test wants."""

    is_told, rank = False, 0

    def __init__(self, *others):
        self.others = others

    def all_agree(self, yes):
        return False

    def gather(self, value):
        return [value, *self.others]


def test_a_rank_with_fewer_samples_bounds_what_is_begun_with():
    other = Wish(wanted=(8, 1), most=(8, 5))
    begun = SplitRanks(Heard(other)).begin((torch.zeros(3), torch.zeros(4)), None)
    assert begun.counts == (3, 1)
    assert begun.is_split
    assert not begun.has_fitted


def test_even_parts_are_no_larger_than_halves():
    for num in range(2, 40):
        batch = torch.arange(num)
        for limit in range(2, num + 1):
            halves = split(batch, limit).parts
            even = split_evenly(batch, len(halves))
            assert max(map(len, even.parts)) <= max(map(len, halves)) < limit
            assert torch.equal(torch.cat(even.parts), batch)
