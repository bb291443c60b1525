"""What a kernel does, told by its name.

A trace knows a kernel only by the name that its compiler gave it. Libraries build those names to a
scheme, and the scheme tells what matters here: a matrix product or not, on tensor cores or not, in
which type. The patterns below are those of cuBLAS, CUTLASS, cuDNN, NCCL, FlashAttention, Triton as
torch.compile uses it, and torch's own kernels. A name that none of them fits is "other"; nothing is
guessed of it.
"""

from __future__ import annotations

import functools
import re
from typing import Final, Literal

Category = Literal[
    "matmul",
    "convolution",
    "attention",
    "communication",
    "copy",
    "cast",
    "layout",
    "optimizer",
    "reduction",
    "norm",
    "elementwise",
    "embedding",
    "triton",
    "other",
]
TensorCores = Literal["yes", "no", "unknown"]

# A kernel below this takes less time than its launch does on the host (some 5 µs with a profiler
# on, 2 to 4 without), so a row of such kernels waits for the host.
TINY_US: Final = 5.0
# What does the arithmetic of a model; the rest moves data.
ARITHMETIC: Final = frozenset({"matmul", "convolution", "attention"})

_CATEGORIES: Final[tuple[tuple[Category, str], ...]] = (
    # Inductor names a kernel by all the operators that it was made from, products that it does not
    # do itself among them; what it does is told by the letters before: pointwise, a reduction, a
    # loop over parameters. Its products are made from templates.
    ("triton", r"^triton_(poi|red|per|for)_"),
    ("attention", r"^triton_tem_.*attention"),
    ("convolution", r"^triton_tem_.*convolution"),
    ("matmul", r"^triton_(tem|mm|bmm)_"),
    ("communication", r"nccl|nvshmem|rccl|symm_mem|one_shot_all|two_shot_all|multimem"),
    ("attention", r"flash|fmha|attention|mem_eff|efficient_attn|cudnn_generated_fort_native_sdpa"),
    ("layout", r"nchwtonhwc|nhwctonchw|converttensor_kernel|nchw2nhwc|nhwc2nchw"),
    ("convolution", r"fprop|dgrad|wgrad|conv|winograd|implicit_gemm|depthwise"),
    (
        "optimizer",
        r"multi_tensor_apply|fused(adam|sgd|adagrad)|adamw?_|lpnormfunctor",
    ),
    ("matmul", r"gemm|gemv|nvjet|cutlass|cublas|matmul|splitk"),
    ("cast", r"(bfloat16|float16|float8\w*)_copy_kernel"),
    ("norm", r"layer_?norm|group_?norm|batch_?norm|rms_?norm|bn_(fw|bw)|_norm_"),
    ("copy", r"direct_copy_kernel|copy_device_to_device|catarray|^memcpy|^memset"),
    (
        "embedding",
        r"embedding|index_?select|gather|scatter|indexing_backward|index_(put|elementwise)",
    ),
    ("triton", r"^triton_"),
    ("reduction", r"reduce|softmax|nll_loss|cub::|welford|sort|scan"),
    ("elementwise", r"elementwise|vectorized|fill|dropout|pointwise|distribution"),
)
# Before the others: names that say that a product is not done on tensor cores.
_NOT_TENSOR: Final = (
    r"simt|ffma|(?<![a-z0-9])[sd]gemm|gemv|gemmsn|f32f32_f32f32_f32|f64|winograd|_scudnn_|"
    r"implicit_convolve_sgemm|depthwise"
)
_TENSOR: Final = (
    r"tensorop|s16816|s1688|h16816|h1688|s161616|i16832|hmma|imma|wgmma|_mma_|nvjet|"
    r"xmma|bf16|fp16|f16|tf32|e4m3|e5m2|gmma|flash|warpspecialized|_h?s?884|cudnn_generated_fort"
)
_FP32_PRODUCT: Final = (
    r"simt_s|ffma|(?<![a-z0-9])sgemm|f32f32_f32f32_f32|gemmsn.*float|_scudnn_|implicit_convolve_sgemm|"
    r"simt_sgemm"
)
_FUSED_UPDATE: Final = r"fused(adam|sgd|adagrad)|fused_(adam|sgd|adagrad)"


@functools.lru_cache(maxsize=65536)
def category(name: str) -> Category:
    """Return what kind of work a kernel of this name does.

    Example:
        >>> category("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn")
        'matmul'
    """
    lowered = name.lower()
    for found, pattern in _CATEGORIES:
        if re.search(pattern, lowered):
            # A copy that loads one type and stores another is a cast; torch says so in the name.
            if found == "copy" and "loadwithcast" in lowered:
                return "cast"
            return found
    return "other"


@functools.lru_cache(maxsize=65536)
def tensor_cores(name: str) -> TensorCores:
    """Return whether a kernel that does arithmetic runs it on tensor cores, if its name tells.

    Example:
        >>> tensor_cores("ampere_sgemm_128x64_nn")
        'no'
    """
    lowered = name.lower()
    if category(name) not in ARITHMETIC:
        return "unknown"
    if re.search(_NOT_TENSOR, lowered):
        return "no"
    return "yes" if re.search(_TENSOR, lowered) else "unknown"


def is_fp32_product(name: str) -> bool:
    """Return whether a kernel multiplies in float32 without tensor cores."""
    return category(name) in ARITHMETIC and bool(re.search(_FP32_PRODUCT, name.lower()))


def is_fused_update(name: str) -> bool:
    """Return whether a kernel is an optimizer's fused update."""
    return bool(re.search(_FUSED_UPDATE, name.lower()))


def is_pageable_copy(name: str) -> bool:
    """Return whether a copy goes to or from host memory that is not pinned."""
    return name.startswith("Memcpy") and "Pageable" in name


def copy_direction(name: str) -> str:
    """Return ``"HtoD"``, ``"DtoH"``, ``"DtoD"``, ``"PtoP"`` or an empty string."""
    found = re.search(r"Memcpy\s*(HtoD|DtoH|DtoD|PtoP)", name)
    return found[1] if found else ""


@functools.lru_cache(maxsize=65536)
def short(name: str, limit: int = 72) -> str:
    """Return a kernel's name without its template arguments and what its compiler added.

    Example:
        >>> short("void at::native::(anonymous namespace)::foo<float, 4>(float*, int)")
        'foo<...>'
    """
    text = re.sub(r"^void\s+", "", name).replace("(anonymous namespace)::", "")
    functor = re.search(r"([A-Za-z_]\w*?(?:Functor|_kernel_cuda|_kernel_impl|Ops?))\b", text)
    head = re.split(r"[<(]", text, maxsplit=1)[0].strip()
    if head and head != text:
        tail = head.rsplit("::", 1)[-1] or head
        inside = functor[1] if functor and functor[1] not in tail else "..."
        text = f"{tail}<{inside}>" if "<" in name else tail
    return text if len(text) <= limit else text[: limit - 3] + "..."
