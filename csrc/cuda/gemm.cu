// gemm on CUDA: one cublasGemmEx call, in cublas.hpp.

#include "cublas.hpp"

#include <torch/csrc/stable/library.h>

namespace {

void gemm(Tensor a, Tensor b, Tensor out, bool trans_a, bool trans_b, double alpha, double beta) {
  check_gemm(a, b, out, trans_a, trans_b);
  cublas_gemm(a, b, out, trans_a, trans_b, alpha, beta);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CUDA, m) { m.impl("gemm", TORCH_BOX(&gemm)); }
