// C = alpha op(A) op(B) + beta C by one cublasGemmEx call; the caller has checked the arguments (gemm.hpp).
//
// cuBLAS is column-major, and a row-major matrix read column by column is its own transpose. So the row-major product
// C = op(A) op(B) is asked for as C^T = op(B)^T op(A)^T: B first, M and N swapped, and every leading dimension and
// trans flag stays what it was.
#pragma once
#include "../gemm.hpp"

#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/accelerator.h>

namespace {

inline void check(cublasStatus_t status, const char* call) {
  STD_TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, call, ": ", cublasGetStatusString(status));
}

inline cudaDataType_t cuda_dtype(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Half: return CUDA_R_16F;
    case ScalarType::BFloat16: return CUDA_R_16BF;
    default: return CUDA_R_32F;  // the checks admit no other dtype
  }
}

inline int as_int(int64_t n) {
  STD_TORCH_CHECK(n <= INT_MAX, "gemm: cuBLAS takes sizes up to ", INT_MAX, ", got ", n);
  return static_cast<int>(n);
}

// Split-K partial sums in the 16-bit output type would break "accumulated in fp32", and cuBLAS may choose them: this
// forbids them for this call. The other math mode bits (torch's TF32 choice for fp32 operands) stay as torch set them.
class ForbidReducedPrecisionReduction {
 public:
  explicit ForbidReducedPrecisionReduction(cublasHandle_t handle) : handle_(handle) {
    check(cublasGetMathMode(handle_, &before_), "cublasGetMathMode");
    const int mode = static_cast<int>(before_) | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    check(cublasSetMathMode(handle_, static_cast<cublasMath_t>(mode)), "cublasSetMathMode");
  }
  ~ForbidReducedPrecisionReduction() { cublasSetMathMode(handle_, before_); }  // restores a mode that was accepted

 private:
  cublasHandle_t handle_;
  cublasMath_t before_{};
};

// Calls cublasGemmEx. fp16_sums is the ablation that also sums in fp16; all matrices, alpha and beta are fp16 then.
inline void cublas_gemm(const Tensor& a, const Tensor& b, Tensor& out, bool trans_a, bool trans_b, double alpha,
                        double beta, bool fp16_sums = false) {
  const int64_t M = out.size(0), N = out.size(1), K = a.size(trans_a ? 0 : 1);
  const torch::stable::accelerator::DeviceGuard device(out.get_device_index());
  // torch's handle, bound to the current stream, scalars read from the host. Its workspace is torch's choice: the
  // caching allocator's up to torch 2.14, cuBLAS's own after that unless TORCH_CUBLAS_WORKSPACE_CACHE=1.
  void* handle = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&handle));
  const auto cublas = static_cast<cublasHandle_t>(handle);
  const ForbidReducedPrecisionReduction fp32_sums(cublas);
  const float alpha_fp32 = static_cast<float>(alpha), beta_fp32 = static_cast<float>(beta);  // for COMPUTE_32F
  const __half alpha_fp16 = __float2half_rn(alpha_fp32), beta_fp16 = __float2half_rn(beta_fp32);  // for COMPUTE_16F
  const void* const one = fp16_sums ? static_cast<const void*>(&alpha_fp16) : &alpha_fp32;
  const void* const other = fp16_sums ? static_cast<const void*>(&beta_fp16) : &beta_fp32;
  check(cublasGemmEx(cublas, trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, trans_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                     as_int(N), as_int(M), as_int(K), one,
                     b.const_data_ptr(), cuda_dtype(b), as_int(leading_dimension(b)),
                     a.const_data_ptr(), cuda_dtype(a), as_int(leading_dimension(a)), other,
                     out.mutable_data_ptr(), cuda_dtype(out), as_int(leading_dimension(out)),
                     fp16_sums ? CUBLAS_COMPUTE_16F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
}

}  // namespace
