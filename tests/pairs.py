"""Products of parameters, thinned where what they would show is shown by pairs."""

from __future__ import annotations

import pytest


def in_pairs(names, left, right, whole):
    """Return a mark that runs a test over names and two choices of two values each.

    Each name meets each value of both choices, and each two values meet at half of the names, in
    turns. Only the names of `whole`, one of each kind, are run with all four.

    Args:
        names: The first parameter's values, called ``name``.
        left: The name and the two values of the second.
        right: The name and the two values of the third.
        whole: The names that are run with everything.
    """
    (left_name, (a, b)), (right_name, (c, d)) = left, right
    assert set(whole) <= set(names)
    cells = []
    for number, name in enumerate(names):
        straight, crossed = [(a, c), (b, d)], [(a, d), (b, c)]
        chosen = straight if number % 2 == 0 else crossed
        cells += [(name, *pair) for pair in (straight + crossed if name in whole else chosen)]
    return pytest.mark.parametrize(("name", left_name, right_name), cells)
