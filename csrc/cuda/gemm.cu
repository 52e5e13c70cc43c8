// gemm on CUDA: one cublasGemmEx call, in cublas.hpp.

#include "cublas.hpp"

#include <torch/csrc/stable/library.h>

namespace {

void gemm(Tensor a, Tensor b, Tensor out, bool trans_a, bool trans_b, double alpha, double beta, bool fp16_sums) {
  check_gemm(a, b, out, trans_a, trans_b);
  STD_TORCH_CHECK(!fp16_sums || (a.scalar_type() == ScalarType::Half && out.scalar_type() == ScalarType::Half),
                  "gemm: fp16_sums needs a, b and out in fp16");
  cublas_gemm(a, b, out, trans_a, trans_b, alpha, beta, fp16_sums);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CUDA, m) { m.impl("gemm", TORCH_BOX(&gemm)); }
