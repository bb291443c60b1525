"""What kernels do, told by their names."""

import pytest

from torchfast.profiling import kernels

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute"


@pytest.mark.parametrize(
    ("name", "category", "cores"),
    [
        ("ampere_sgemm_128x64_nn", "matmul", "no"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize", "matmul", "no"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4", "matmul", "yes"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", "matmul", "no"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5>", "matmul", "yes"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", "matmul", "yes"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "matmul", "yes"),
        (GEMM, "matmul", "yes"),
        ("void gemv2T_kernel_val<int, int, float, float>", "matmul", "no"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution", "yes"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float>", "layout", "unknown"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention", "yes"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "communication", "unknown"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_c",
            "cast",
            "unknown",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMath",
            "optimizer",
            "unknown",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>",
            "elementwise",
            "unknown",
        ),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", "reduction", "unknown"),
        ("triton_poi_fused_add_mul_0", "triton", "unknown"),
        ("triton_poi_fused_addmm_gelu_1", "triton", "unknown"),
        ("triton_red_fused_mm_native_layer_norm_bf16_2", "triton", "unknown"),
        ("triton_per_fused__scaled_dot_product_flash_attention_convolution_3", "triton", "unknown"),
        ("triton_poi_fused_convert_element_type_convolution_4", "triton", "unknown"),
        ("triton_for_fused_nccl_5", "triton", "unknown"),
        ("triton_tem_fused_addmm_convert_element_type_0", "matmul", "unknown"),
        ("triton_mm_7", "matmul", "unknown"),
        ("triton_tem_fused_flex_attention_0", "attention", "unknown"),
        ("triton_tem_fused_convolution_0", "convolution", "unknown"),
        ("something_of_somebody", "other", "unknown"),
    ],
)  # fmt: skip
def test_names_of_kernels(name, category, cores):
    assert kernels.category(name) == category
    assert kernels.tensor_cores(name) == cores


def test_only_float32_without_tensor_cores_is_an_fp32_product():
    assert kernels.is_fp32_product("ampere_sgemm_128x64_nn")
    assert kernels.is_fp32_product("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8")
    assert not kernels.is_fp32_product("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128")
    assert not kernels.is_fp32_product(GEMM)
    assert not kernels.is_fp32_product("vectorized_elementwise_kernel<float>")
