"""The report names what torch runs; the choice is the one that was made."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from torchfast.memory import attention, attention_backends, attention_report


def query(**options):
    return torch.randn(2, 3, 16, 8, **options)


def ran(q, **options):
    """Return which operation really ran."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        F.scaled_dot_product_attention(q, q, q, **options)
    names = {event.name for event in profiler.events()}
    if "aten::_scaled_dot_product_flash_attention_for_cpu" in names:
        return "flash"
    assert "aten::_scaled_dot_product_attention_math" in names
    return "math"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"dropout_p": 0.5},
        {"attn_mask": torch.ones(16, 16)},
        {"attn_mask": torch.ones(16, 16, requires_grad=True)},
    ],
)
def test_it_is_what_runs(options):
    q = query(requires_grad=True)
    assert attention_report(q, q, q, **options).backend == ran(q, **options)


@pytest.mark.parametrize("name", ["flash", "math"])
def test_the_choice_is_what_runs(name):
    q = query()
    with attention_backends(name):
        assert attention_report(q, q, q).backend == name == ran(q)
    with attention_backends("math", "flash"):
        assert attention_report(q, q, q).backend in {"math", "flash"}


def test_the_report_in_words_and_as_data():
    q = query()
    report = attention_report(q, q, q, dropout_p=0.1)
    assert report.backend == "math"
    assert report.num_bytes == 2 * 3 * 16 * 16 * 4
    assert str(report).startswith("attention on cpu runs math, which writes a matrix of 0.0 MB")
    assert "not flash: Both fused kernels do not support non-zero dropout." in str(report)
    assert "not cudnn: torch has no such kernel on cpu" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["device"] == "cpu"


def test_what_torch_warns_of_is_the_reason():
    def choose():
        for said in (
            "Memory efficient kernel not used because:",
            "Memory Efficient attention has been runtime disabled.",
            "Flash attention kernel not used because:",
            "Head dim too wide.",
            "Head dim too wide.",
            "CuDNN attention kernel not used because:",
            "cuDNN attention has been runtime disabled.",
        ):
            warnings.warn(f"{said} (Triggered internally at sdp.cpp:1.)", stacklevel=1)
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")

    assert attention._why_not("flash", choose) == ("Head dim too wide.",)
    with attention_backends("math"):
        (said,) = attention._why_not("flash", choose)
    assert "switched off" in said


def test_where_nothing_can_run_the_report_says_so():
    query = torch.randn(1, 2, 16, 8)
    with attention_backends("efficient"):
        report = attention_report(query, query, query)
        with pytest.raises(RuntimeError, match="No viable backend"):
            F.scaled_dot_product_attention(query, query, query)
    assert report.backend == "none"
    assert report.usable == ()
    assert set(report.reasons) == {"flash", "cudnn", "efficient"}
    assert "runs none, as no back-end that is switched on can" in str(report)

    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        attention._chosen(fails)


REFUSED = {
    "another width": lambda q: (q, torch.randn(2, 3, 16, 4), q),
    "fewer heads": lambda q: (q, q[:, :1].expand(2, 2, 16, 8), q[:, :1].expand(2, 2, 16, 8)),
    "ints": lambda q: (q.int(), q.int(), q.int()),
    "another dtype": lambda q: (q, q.bfloat16(), q),
    "a mask of another shape": lambda q: (q, q, q, {"attn_mask": torch.ones(3, 3)}),
    "a mask of one dimension": lambda q: (q, q, q, {"attn_mask": torch.zeros(16)}),
    "a mask of ints": lambda q: (q, q, q, {"attn_mask": torch.ones(16, 16, dtype=torch.int64)}),
    "a dropout above one": lambda q: (q, q, q, {"dropout_p": 2.0}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_has_no_back_end(case):
    q, k, v, *more = REFUSED[case](query())
    options = more[0] if more else {}
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        F.scaled_dot_product_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="scaled_dot_product_attention refuses this call: "):
        attention_report(q, k, v, **options)


def test_under_autocast_torch_casts_first():
    q = query()
    with torch.autocast("cpu", torch.bfloat16):
        F.scaled_dot_product_attention(q, q, q.bfloat16())
        assert attention_report(q, q, q.bfloat16()).backend


def test_a_mask_of_a_class_of_its_own_is_torchs_affair():
    q = query()
    mask = causal_lower_right(16, 16)
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert attention_report(q, q, q, attn_mask=mask).backend


def test_a_report_is_no_call_to_whoever_counts():
    q = query()
    with FlopCounterMode(display=False) as counter:
        attention_report(q, q, q)
    assert counter.get_total_flops() == 0


def test_heads_that_share_keys_are_allowed_where_that_is_said():
    q, kv = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    assert attention_report(q, kv, kv, enable_gqa=True).backend in ("flash", "math")


def test_arguments():
    with pytest.raises(TypeError, match="dropout_p must be a number >= 0, got 'x'"):
        attention_report(*[torch.ones(1, 1, 2, 8)] * 3, dropout_p="x")
    with pytest.raises(TypeError, match="key must be a tensor, got 'k'"):
        attention_report(query(), "k", query())
    with pytest.raises(ValueError, match="query, key and value must be"):
        attention_report(*[torch.ones(2, 3, 4)] * 3)
    with pytest.raises(ValueError, match="did you mean 'flash'"), attention_backends("flesh"):
        pass
    with pytest.raises(ValueError, match="give at least one of"), attention_backends():
        pass


@pytest.fixture
def first_choice(monkeypatch):
    """Let torch put cuDNN first at the first choice of the process, as it does on some devices."""
    before = torch._C._get_sdp_priority_order()
    cudnn_first = [int(SDPBackend.CUDNN_ATTENTION)]
    cudnn_first += [number for number in before if number not in cudnn_first]

    def chosen(*args):
        torch._C._set_sdp_priority_order(cudnn_first)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "_fused_sdp_choice", chosen)
    attention._choose_once.cache_clear()
    yield tuple(cudnn_first)
    attention._choose_once.cache_clear()
    torch._C._set_sdp_priority_order(before)


def test_an_order_is_noted_once_torch_has_made_it(first_choice):
    noted = attention.attention_state()
    assert noted[1] == first_choice
    torch._C._set_sdp_priority_order(first_choice[::-1])
    assert attention.attention_state()[1] == first_choice[::-1]  # which is not made again


def test_a_given_order_is_not_undone_by_the_first_choice(first_choice):
    with attention_backends("math", "flash"):
        order = torch._C._get_sdp_priority_order()
        assert order[:2] == [int(SDPBackend.MATH), int(SDPBackend.FLASH_ATTENTION)]
        attention.attention_state()  # what a block notes
        assert torch._C._get_sdp_priority_order() == order
    assert tuple(torch._C._get_sdp_priority_order()) == first_choice


def test_a_choice_that_fails_stops_no_block(first_choice, monkeypatch):
    chosen = torch._fused_sdp_choice

    def fails(*args):
        chosen(*args)
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")

    monkeypatch.setattr(torch, "_fused_sdp_choice", fails)
    assert attention.attention_state()[1] == first_choice
