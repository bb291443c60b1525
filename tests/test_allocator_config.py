"""`AllocatorConfig`: what it accepts, how it is written and read, and which variable wins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warm_python
from torchfast import AllocatorConfig, UnsupportedDeviceError
from torchfast.memory.allocator_config import PRESETS
from torchfast.memory.allocator_environment import VARIABLES
from torchfast.memory.allocator_keys import KEYS

POWERS = st.sampled_from([2**i for i in range(8)])
SHARES = st.floats(1e-9, 1, exclude_max=True)
RESERVES = SHARES | st.sampled_from(["40G", "1.5G"])
DIVISIONS = st.lists(
    st.sampled_from([2**i for i in range(16)]), min_size=1, max_size=4, unique=True
).flatmap(
    lambda intervals: st.tuples(*[st.sampled_from([0, 1, 2, 8])] * len(intervals)).map(
        lambda numbers: dict(zip(sorted(intervals), numbers, strict=True)) | {">": 4}
    )
)
VALUES = {
    "large_segment_size_mb": st.integers(11, 60),
    "max_split_size_mb": st.integers(60, 2**43),
    "max_non_split_rounding_mb": st.integers(60, 10_000),
    "garbage_collection_threshold": SHARES,
    "roundup_power2_divisions": POWERS | DIVISIONS,
    "expandable_segments": st.booleans(),
    "expandable_segments_reserve": RESERVES,
    "expandable_segments_reserve_by_class": st.dictionaries(
        st.text("abc_1", min_size=1), RESERVES, min_size=1, max_size=3
    ),
    "release_lock_on_cudamalloc": st.booleans(),
    "per_process_memory_fraction": SHARES | st.sampled_from([0.0, 1.0]),
    "throw_on_cudamalloc_oom": st.booleans(),
    "graph_capture_record_stream_reuse": st.booleans(),
    "pinned_use_background_threads": st.booleans(),
    "pinned_max_round_threshold_mb": st.integers(0, 10_000),
    "pinned_max_cached_size_mb": st.integers(0, 10_000),
    "pinned_use_cuda_host_register": st.booleans(),
    "pinned_num_register_threads": POWERS,
    "pinned_reserve_segment_size_mb": st.integers(1, 10_000),
    "pinned_free_catch_all": st.booleans(),
    "backend": st.just("native"),
}
CONFIGS = st.fixed_dictionaries({}, optional=VALUES).map(lambda kw: AllocatorConfig(**kw))


def test_every_key_is_a_field_and_is_drawn():
    fields = set(AllocatorConfig.__dataclass_fields__)
    assert fields == set(KEYS) == set(VALUES)


@given(CONFIGS)
def test_texts_are_read_back(config):
    assert AllocatorConfig.parse(config.to_text()) == config
    assert hash(AllocatorConfig.parse(config.to_text())) == hash(config)


@given(CONFIGS)
@settings(max_examples=50)
def test_environments_are_read_back(config):
    environ = config.to_env(version="2.15")
    assert AllocatorConfig.from_env(environ) == config


# What the parser of the torch in use says. A build without CUDA knows the common keys only.
COMMON = [name for name, key in KEYS.items() if not key.cuda_only and key.since <= (2, 13)]


# Where there is CUDA, torch would go by them from then on, and it keeps some for good.
without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None or not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="changes settings that torch would go by, or this torch does not tell them",
)


@pytest.fixture
def torch_settings():
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before)


@without_cuda
@given(st.fixed_dictionaries({}, optional={name: VALUES[name] for name in COMMON}))
@settings(max_examples=50)
def test_torch_takes_what_is_written(chosen):
    before = torch._C._accelerator_getAllocatorSettings()
    try:
        torch._C._accelerator_setAllocatorSettings(AllocatorConfig(**chosen).to_text())
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


@without_cuda
@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:5",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:5e-324",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[100:1]",
        "large_segment_size_mb:10",
        "large_segment_size_mb:30,max_split_size_mb:20",
        "max_non_split_rounding_mb:5",
        "expandable_segments:true",
    ],
)
def test_what_torch_refuses_is_refused_before(text, torch_settings):
    with pytest.raises((ValueError, IndexError)):  # torch's words are not the point
        torch_settings(text)
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        AllocatorConfig.parse(text)


@pytest.mark.parametrize(
    "name", ["roundup_power2_divisions", "expandable_segments_reserve_by_class"]
)
def test_pairs_will_do_for_a_mapping_and_nothing_else(name):
    pairs = [("side", 0.5)] if name.endswith("class") else [(256, 2), (">", 4)]
    config = AllocatorConfig(**{name: pairs})
    assert (
        config == AllocatorConfig(**{name: dict(pairs)}) == AllocatorConfig(**{name: tuple(pairs)})
    )
    for wrong in (pairs[0], ["side"], [(1, 2, 3)]):
        with pytest.raises(
            TypeError, match=f"{name} must be a mapping such as .*, or its pairs, got"
        ):
            AllocatorConfig(**{name: wrong})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:-1", "must be >= 11, got -1"),
        ("max_split_size_mb:20.5", "must be an int >= 11, got 20.5"),
        ("max_split_size_mb:99999999999999999", "must be <= 8796093022208"),
        ("max_split_size_mb 20", "cannot be read from 'max_split_size_mb20' on"),
        ("expandable_segments:True;max_split_size_mb:30", "cannot be read from"),
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("backend:malloc", "must be one of ['native', 'cudaMallocAsync']"),
        ("roundup_power2_divisions:[256]", "entries are written as 256:2"),
        ("roundup_power2_divisions:[512:1,256:2]", "must rise, with '>' as the last"),
        ("roundup_power2_divisions:[]", "has no interval"),
        ("pinned_num_register_threads:256", "must be a power of two up to 128, got 256"),
        ("pinned_num_register_threads:3", "must be a power of two up to 128, got 3"),
        ("pinned_reserve_segment_size_mb:0", "must be >= 1, got 0"),
        ("per_process_memory_fraction:1.5", "must be in [0, 1], got 1.5"),
        ("expandable_segments_reserve:40M", "such as '40G', got '40M'"),
        ("expandable_segments_reserve:0", "must be above 0"),
    ],
)
def test_what_torch_takes_wrongly_is_refused(text, message):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - compared below
        AllocatorConfig.parse(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"expandable_segments": 1}, TypeError, "must be True or False"),
        ({"max_split_size_mb": True}, TypeError, "must be an int"),
        ({"per_process_memory_fraction": "0.5"}, TypeError, r"must be a number in \[0, 1\]"),
        ({"garbage_collection_treshold": 0.5}, TypeError, "garbage_collection_threshold"),
        ({"expandable_segments_reserve_by_class": 3}, TypeError, "must be a mapping of classes"),
        ({"expandable_segments_reserve_by_class": {"a,b": 0.5}}, ValueError, "must be a word"),
        ({"expandable_segments_reserve": True}, TypeError, "must be a share"),
        (
            {"backend": "cudaMallocAsync", "expandable_segments": True},
            ValueError,
            "does not look at expandable_segments",
        ),
        ({"large_segment_size_mb": 30, "max_split_size_mb": 20}, ValueError, "which is 30, got 20"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        AllocatorConfig(**arguments)


def test_the_drivers_allocator_keeps_pinned_settings():
    config = AllocatorConfig(backend="cudaMallocAsync", pinned_use_background_threads=True)
    assert config.to_text() == "backend:cudaMallocAsync,pinned_use_background_threads:True"


def test_names_of_rocm_are_understood():
    text = "release_lock_on_hipmalloc:True,pinned_use_hip_host_register:True"
    assert AllocatorConfig.parse(text) == AllocatorConfig(
        release_lock_on_cudamalloc=True, pinned_use_cuda_host_register=True
    )
    assert AllocatorConfig(backend="hipMallocAsync").backend == "cudaMallocAsync"


def test_what_is_printed_says_what_is_set():
    config = AllocatorConfig(expandable_segments=True, max_split_size_mb=64)
    assert repr(config) == "AllocatorConfig(max_split_size_mb=64, expandable_segments=True)"
    assert repr(AllocatorConfig()) == "AllocatorConfig()"


@pytest.mark.parametrize("name", [n for n, key in KEYS.items() if key.since > (2, 11)])
def test_a_version_that_lacks_a_key_is_named(name):
    value = {"expandable_segments_reserve": 0.5}.get(name, 64 if name.endswith("_mb") else True)
    value = {"a": 0.5} if name.endswith("class") else value
    config = AllocatorConfig(**{name: value})
    major, minor = KEYS[name].since
    assert config.to_env(version=f"{major}.{minor}.1+cu130")
    with pytest.raises(ValueError, match=rf"{name} is known to torch {major}\.{minor} and later"):
        config.to_env(version=f"{major}.{minor - 1}")


def test_a_version_that_is_none():
    with pytest.raises(ValueError, match=r"version must be written as '2\.13', got 'new'"):
        AllocatorConfig().to_env(version="new")
    with pytest.raises(TypeError, match=r"version must be written as '2\.13', got 211 \(int\)"):
        AllocatorConfig().to_env(version=211)


def test_a_device_that_lacks_a_key_is_named():
    AllocatorConfig(expandable_segments=True).check_device("xpu")
    with pytest.raises(UnsupportedDeviceError, match="release_lock_on_cudamalloc is a setting of"):
        AllocatorConfig(release_lock_on_cudamalloc=True).check_device("xpu")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1"])
def test_presets_fit_the_version(name, version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    config = AllocatorConfig.preset(name)
    assert config.to_env()
    assert config.settings
    assert not config.remarks
    assert (config.pinned_max_round_threshold_mb is not None) == (
        name == "long-runs" and version > "2.12"
    )


def test_a_preset_is_changed_by_more():
    config = AllocatorConfig.preset("variable-shapes", expandable_segments=False)
    assert config.settings == {"expandable_segments": False}
    with pytest.raises(ValueError, match="did you mean 'graphs'"):
        AllocatorConfig.preset("graph")


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("garbage_collection_threshold:0.5", "does nothing without per_process_memory_fraction"),
        ("max_split_size_mb:40,expandable_segments:True", "all blocks are split"),
        ("expandable_segments_reserve:0.5", "without expandable_segments=True"),
        ("pinned_num_register_threads:8", "without pinned_use_cuda_host_register=True"),
        ("pinned_max_cached_size_mb:1,pinned_max_round_threshold_mb:2", "not rounded up either"),
        (
            "expandable_segments:True,graph_capture_record_stream_reuse:True",
            "NCCL_GRAPH_REGISTER=0",
        ),
        ("roundup_power2_divisions:[256:1,1024:4]", "after 256"),
    ],
)
def test_remarks(text, remark):
    [said] = AllocatorConfig.parse(text).remarks
    assert remark in said


def test_what_needs_no_remark():
    text = "per_process_memory_fraction:0.9,garbage_collection_threshold:0.5,"
    text += "pinned_use_cuda_host_register:True,pinned_num_register_threads:8,"
    text += "roundup_power2_divisions:[256:1,512:2,>:4]"
    assert AllocatorConfig.parse(text).remarks == ()


def test_merged_keeps_what_is_not_named():
    before = AllocatorConfig.parse("max_split_size_mb:40,expandable_segments:True")
    after = before.merged(AllocatorConfig(expandable_segments=False, max_split_size_mb=50))
    assert after.settings == {"max_split_size_mb": 50, "expandable_segments": False}
    assert before.merged(AllocatorConfig()) == before


# --- which variable wins ------------------------------------------------------------------------

TEXTS = ("max_split_size_mb:30", "max_split_size_mb:40", "", None)


@pytest.mark.parametrize("cuda", TEXTS)
@pytest.mark.parametrize("plain", TEXTS)
def test_the_winner_is_torchs(cuda, plain):
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell its settings")
    texts = dict(zip(VARIABLES, (cuda, None, plain), strict=True))
    environ = {name: text for name, text in texts.items() if text is not None}
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    # Torch reads the variables when it is first asked, which the process that forks never does.
    told = warm_python.run(
        "import torch\nprint(torch._C._accelerator_getAllocatorSettings())\n",
        env=clean | environ,
        check=True,
    ).stdout.strip()
    found = AllocatorConfig.environment(environ)
    assert found.text == told
    assert AllocatorConfig.from_env(environ).to_text() == told
    if cuda is not None and plain is not None:
        assert f"PYTORCH_ALLOC_CONF={plain!r} is ignored" in str(found)
        assert found.winner == "PYTORCH_CUDA_ALLOC_CONF"


def test_an_environment_that_cannot_be_read_is_named():
    with pytest.raises(ValueError, match="PYTORCH_ALLOC_CONF names 'nonsense'"):
        AllocatorConfig.from_env({"PYTORCH_ALLOC_CONF": "nonsense:3"})


def test_an_allocator_that_is_off_is_said():
    found = AllocatorConfig.environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert "turns the allocator off" in str(found)
    assert "no variable" in str(found)


def test_the_pages_table_names_every_key():
    page = Path(__file__).parent.parent / "docs" / "how-it-works" / "allocator.md"
    text = page.read_text(encoding="utf-8")
    for name, key in KEYS.items():
        since = "" if key.since == (2, 11) else f"{key.since[0]}.{key.since[1]}"
        assert f"| ``{name}`` | {since} |".replace("|  |", "| |") in text, name


def test_what_is_read_and_merged_is_of_the_right_kind():
    with pytest.raises(TypeError, match=r"the text must be a str such as .*, got 5"):
        AllocatorConfig.parse(5)
    with pytest.raises(TypeError, match=r"other must be an AllocatorConfig, got 'x' \(str\)"):
        AllocatorConfig().merged("x")
