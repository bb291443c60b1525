"""What an account says to try: what is wasted first, then what the largest category needs."""

from __future__ import annotations

import pytest
from torch import nn

from allocator_blocks import FAR, MB, block, moment_of, segment
from torchfast import OffloadOptions
from torchfast.memory.account import look
from torchfast.memory.advice import advice
from torchfast.memory.owners import Owner

FACTS = {"precision": "as_given", "out_of_memory": "raise", "cuda_graph": True}


def advised(
    *blocks,
    facts=FACTS,
    stage="forward",
    owners=(),
    model=None,
    pool=(0, 0),
    num_samples=None,
    **figures,
):
    now = moment_of(segment(*blocks, pool=pool), **figures)
    found = look(now, owners, [], model or nn.Identity())
    return advice(found, now, stage, facts, num_samples)


def test_waste_comes_first():
    told = advised(
        block(FAR, 4 * MB),
        block(FAR + 4 * MB, 4 * MB, "inactive"),
        requested_bytes=2 * MB,
        total_bytes=100 * MB,
        free_bytes=10 * MB,
        limit_bytes=50 * MB,
    )
    assert "nvidia-smi" in told[0]
    assert "per_process_memory_fraction" in told[1]
    assert "allocator='variable-shapes'" in told[2]
    assert "precision='bf16'" in told[3]
    assert "accumulate=2" in told[4]


def test_a_request_that_no_piece_adds_up_to_is_no_fragmentation():
    told = advised(block(FAR, 4 * MB), block(FAR + 4 * MB, MB, "inactive"), requested_bytes=2 * MB)
    assert not any("variable-shapes" in text for text in told)


def test_only_what_the_plan_has_is_advised():
    told = advised(block(FAR, MB))
    assert not any("recompute" in text for text in told)
    told = advised(block(FAR, MB), facts=FACTS | {"recompute": False, "precision": "bf16"})
    assert any("Plan(recompute='blocks')" in text for text in told)
    assert not any("bf16" in text for text in told)
    told = advised(block(FAR, MB), facts=FACTS | {"recompute": "selective"})
    assert any("not only what is cheap: Plan(recompute='blocks')" in text for text in told)


@pytest.mark.parametrize(("num_samples", "is_told"), [(None, True), (2, True), (1, False)])
def test_one_sample_is_not_to_be_halved(num_samples, is_told):
    told = advised(block(FAR, MB), num_samples=num_samples)
    assert any("accumulate=2 and half the batch" in text for text in told) == is_told
    assert any("out_of_memory='split'" in text for text in told) == is_told


def test_offloading_that_sends_more_is_advised():
    both = OffloadOptions(activations="auto", optimizer=True)
    for offload, more in (("auto", "activations"), (both, "all"), ("activations", None)):
        told = advised(block(FAR, MB), facts=FACTS | {"offload": offload})
        found = [text.split(": ")[-1] for text in told if "not only what hides" in text]
        assert found == ([] if more is None else [f"Plan(offload={more!r})"])


def test_offloading_that_takes_a_little_time_is_advised_before_that_of_all():
    """In the options that the plan has, but for those that have it already."""
    both = OffloadOptions(activations="auto", optimizer=True)
    told = advised(block(FAR, MB), facts=FACTS | {"offload": both})
    found = [text for text in told if "on the host" in text]
    plan = "Plan(offload=OffloadOptions(activations='auto', optimizer=True, max_slowdown=0.05))"
    assert found[0].endswith(f"no longer than 5% of its time: {plan}")
    assert found[1].endswith("Plan(offload='all')")
    slower = OffloadOptions(activations="auto", max_slowdown=0.1)
    told = advised(block(FAR, MB), facts=FACTS | {"offload": slower})
    assert [text for text in told if "on the host" in text] == [
        "all activations on the host, not only what hides and may be waited for: "
        "Plan(offload='activations')"
    ]


def test_logits_and_states_and_graphs():
    logits = Owner(FAR, MB, "", "", "(8, 512, 50257) float32")
    now = moment_of(segment(block(FAR, MB)))
    told = advice(look(now, [], [logits], nn.Identity()), now, "forward", FACTS)
    assert "linear_cross_entropy" in told[0]
    state = Owner(FAR, MB, "optimizer state", "", "(8, 512, 50257) float32")
    told = advised(block(FAR, MB), owners=[state], stage="update")
    assert "adamw8bit" in told[0]
    assert (
        "Plan(shard='fsdp')" in advised(block(FAR, MB), owners=[state], facts={"shard": "ddp"})[-1]
    )
    assert "more devices" in advised(block(FAR, MB), owners=[state], facts={"shard": "fsdp"})[-1]
    assert "max_graphs" in advised(block(FAR, MB), pool=(0, 1))[0]
    assert not any("linear_cross_entropy" in text for text in told)


def test_parameters_may_go_to_the_host():
    weight = Owner(FAR, MB, "parameters", "weight", "")

    def told(**facts):
        return advised(block(FAR, MB), owners=[weight], facts=facts, stage="backward")[-1]

    assert "Plan(offload='parameters')), or Plan(shard='fsdp')" in told(offload=None, shard=None)
    assert "Plan(offload='parameters')" in told(offload="activations", shard=None)
    assert "offload" not in told(offload=None, shard="ddp")
    assert "offload" not in told(offload="parameters", shard=None)
    options = OffloadOptions(parameters=("experts.*",), activations=False)
    assert "offload" not in told(offload=options, shard=None)
    assert "offload" not in told()  # no plan
