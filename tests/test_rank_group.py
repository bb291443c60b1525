"""RankGroup: ranks draw the same conclusions, and hear of one that fails or dies."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

import ranks
from torchfast import RankError, TorchFastError
from torchfast._core import rank_group
from torchfast._core.rank_group import RankGroup, is_distributed


def test_one_process_is_a_group_of_its_own():
    with RankGroup.join() as group:
        assert not is_distributed()
        assert (group.rank, group.size, group.is_first) == (0, 1, True)
        assert group.gather("x") == ["x"]
        assert group.together(lambda: 3) == [3]
        assert group.least(7).wait() == 7
        assert group.each(-7).wait() == [-7]
        assert group.span(-7) == (-7, -7)
        with pytest.raises(KeyError):
            group.together({}.popitem)


def test_ranks_agree():
    def work(rank):
        assert is_distributed()
        with RankGroup.join() as group:
            assert group.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
            assert group.together(lambda: rank * 2) == [0, 2]
            first, second = group.least(5 - rank), group.least(rank)
            assert (first.wait(), second.wait()) == (4, 0)
            third, fourth = group.each(5 - 9 * rank), group.each(2**40 + rank)
            assert (third.wait(), fourth.wait()) == ([5, -4], [2**40, 2**40 + 1])
            assert group.span(3 - 7 * rank) == (-4, 3)
            assert group.span(2**40) == (2**40, 2**40)
            assert RankGroup.alone().gather(rank) == [rank]

            def fail_on_one():
                if rank == 1:
                    raise OSError("no space left")

            # The one that failed raises its own error, the others are told whose it was.
            kind = OSError if rank == 1 else RankError
            with pytest.raises(kind, match="no space left") as caught:
                group.together(fail_on_one)
            assert rank == 1 or "rank 1: OSError" in str(caught.value)
            assert group.gather(rank) == [0, 1]  # and the group still works
        with pytest.raises(RankError, match="cannot be reached"):
            group.gather(1)
        other = RankGroup.join()
        dist.barrier()  # or the other one may still be about to connect to this
        dist.destroy_process_group(other._group)  # of a user who destroys all, and closes then
        for say in (other.gather, other.least, other.each, other.span):
            with pytest.raises(RankError, match="cannot be reached"):
                say(1)
        other.close()
        other.close()
        assert issubclass(RankError, TorchFastError)

    ranks.run(work)


def test_a_rank_that_the_others_let_wait_says_so(monkeypatch, caplog):
    monkeypatch.setattr(rank_group, "_PATIENCE_S", 0.2)

    def work(rank):
        time.sleep(0.7 * rank)
        with RankGroup.join() as group:
            group.gather(rank, "be there")
            time.sleep(0.7 * rank)
            group.gather(rank, "load")
            group.gather(time.sleep(0.7 * rank))  # not a call of the user's
        return caplog.text

    first, second = ranks.run(work)
    assert first.count("rank 0 has waited 0.2 s for the other ranks to") == 2
    assert "to make a group, as" in first
    assert "to load; make, save, load and evaluate on all ranks" in first
    assert second == ""


def test_the_death_of_a_rank_is_heard_at_once():
    def work(rank):
        group = RankGroup.join()
        group.gather(rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(RankError, match="cannot be reached"):
            group.gather(rank)
        with pytest.raises(RankError, match="cannot be reached"):
            group.least(rank).wait()
        assert time.monotonic() - start < 10

    ranks.run(work, 2, ends={1: -signal.SIGKILL})


def test_the_helper_fails_where_a_rank_fails():
    with pytest.raises(AssertionError, match=r"rank 1:(?s:.)*ZeroDivisionError"):
        ranks.run(lambda rank: 1 / (1 - rank))
    with pytest.raises(AssertionError, match="rank 0:\nhas not ended in time"):
        ranks.run(lambda rank: time.sleep(30 * (1 - rank)), timeout_s=1.5, joined=False)
