// The table of contents of the native part: every operator's schema, and nothing else.
//
// The kernels register themselves: cpu/*.cpp for CPU tensors, cuda/*.cu for CUDA tensors. Everything goes through the
// LibTorch stable ABI, so one build serves later torch releases and compiles in seconds.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(mpcompare, m) {
  // out = alpha op(a) op(b) + beta out, op(x) = x or x^T; see gemm.hpp for the contract.
  m.def(
      "gemm(Tensor a, Tensor b, Tensor(c!) out, *, bool trans_a=False, bool trans_b=False, "
      "float alpha=1.0, float beta=0.0) -> ()");
}
