"""Dimensions that change in several tensors of a batch are all marked as dynamic."""

from __future__ import annotations

import pytest
import torch

from torchfast.compiler.record import CompileRecord
from torchfast.compiler.steady_watch import SteadyWatch


@pytest.fixture
def record():
    with CompileRecord() as record:
        yield record


@pytest.mark.parametrize("make", [lambda ids, y: {"ids": ids, "y": y}, lambda ids, y: [y, (ids,)]])
def test_what_changes_with_the_tensor_that_a_recompile_names_is_marked_as_well(record, make):
    """As targets have the length of the tokens: left fixed, they would fix it for both."""

    def both(batch):
        ids, y = (batch["ids"], batch["y"]) if isinstance(batch, dict) else (batch[1][0], batch[0])
        return (ids * y).sum()

    torch._dynamo.reset()
    function = torch.compile(both, backend="eager", dynamic=False)
    watch = SteadyWatch(record, mark_dynamic=True)
    marked = []
    for size in range(6, 14):
        batch = make(torch.ones(2, size), torch.ones(2, size))
        marked.append(watch.mark({"batch": batch}))
        function(batch)
        watch.check()
    assert marked == [0, 0, *6 * [2]]
    assert len(watch.recompiles) == 0  # nobody said that the run is steady
    assert len(record.summary().recompiles) == 2  # the second size, and once with the marks


def test_a_batch_of_another_structure_has_no_marks_of_the_one_before(record):
    torch._dynamo.reset()
    function = torch.compile(lambda batch: sum(t.sum() for t in batch), backend="eager")
    watch = SteadyWatch(record, mark_dynamic=True)
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for size in (4, 5):
            batch = [torch.ones(2, size), torch.ones(size, 2)]
            watch.mark({"batch": batch})
            function(batch)
            watch.check()
    other = [torch.ones(3, 3), torch.ones(3, 3), torch.ones(3, 3)]
    assert watch.mark({"batch": other}) == len(watch.dimensions)
