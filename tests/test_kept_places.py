"""Where in a block results are kept."""

from __future__ import annotations

from torchfast.memory.block_costs import KeptInputs
from torchfast.memory.kept_calls import KeptPlaces
from torchfast.memory.kept_results import Result
from torchfast.memory.stretches import Stretch


def test_the_places_of_results():
    start, inside, behind = Stretch(), Stretch("a", 0, True), Stretch("a", 0)
    order = [start, inside, behind, Stretch("b.c", 0, True), Stretch("b.c", 0)]
    places = KeptPlaces.of((True, False, False, True), (inside, inside, start, behind), order)
    assert places.kept == {inside: (True, False), behind: (True,)}
    assert places.leaves == (("a", ["a"]), ("b.c", ["b", "c"]))
    assert KeptPlaces.of((False,), (inside,), order).leaves == ()


def test_the_places_of_inputs():
    layers = [Stretch(name, 0, is_inside=True) for name in ("q", "k")]
    behind = Stretch("k", 0)
    order = [Stretch(), layers[0], Stretch("q", 0), layers[1], behind]
    inputs = KeptInputs(behind, tuple(layers), Result("inputs", 1, 1.0), {})
    made_in = (*layers, behind)
    places = KeptPlaces.of((False, False, True, True), made_in, order, (), (2,), (inputs,))
    assert places.inputs == {behind}
    assert places.feeders == dict.fromkeys(layers, behind)
    assert places.noted == set(layers)
    assert [path for path, _ in places.leaves] == ["k", "q"]
    places = KeptPlaces.of((True, False, True, False), made_in, order, (), (2,), (inputs,))
    assert places.inputs == set()
    assert places.feeders == {}
