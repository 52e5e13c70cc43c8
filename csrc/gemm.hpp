// The contract of gemm, checked once for every device:  C = alpha op(A) op(B) + beta C.
//
//   op(A)  M x K   op(B)  K x N   C  M x N,   op(X) = X, or X^T where trans_x is set
//
// - Row-major: element (i, j) lies at data[i * ld + j]. The columns must be contiguous (stride 1); rows may be further
//   apart than their length, so a block of rows or columns of a larger matrix is accepted without a copy.
// - A and B share one storage dtype (fp32, fp16, bf16); C has that dtype or fp32. From its first to its last byte,
//   C must not reach into A or B.
// - Products are accumulated in fp32 whatever the storage; C is rounded once, when it is written.
// - beta = 0 never reads C, so an uninitialised C is fine. NaN and inf in A, B (and C, if read) propagate,
//   unless alpha is 0, where cuBLAS need not read A and B.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <climits>
#include <cstdint>
#include <cstdlib>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct GemmShape {
  int64_t M, N, K;        // sizes of the product, after op()
  int64_t lda, ldb, ldc;  // elements from one stored row to the next
};

// Returns the number of elements between the starts of two rows. The stride of a single row may be anything, so for a
// single row the result is its length.
inline int64_t leading_dimension(const Tensor& x) { return x.size(0) == 1 ? x.size(1) : x.stride(0); }

inline bool is_row_major(const Tensor& x) {
  return (x.size(1) == 1 || x.stride(1) == 1) && leading_dimension(x) >= x.size(1);
}

// Returns the number of bytes from the first to the last element, gaps between the rows of a matrix included.
inline int64_t span_bytes(const Tensor& x) {
  const int64_t elements = x.is_contiguous() ? x.numel() : (x.size(0) - 1) * leading_dimension(x) + x.size(1);
  return elements * static_cast<int64_t>(x.element_size());
}

inline bool overlap(const Tensor& x, const Tensor& y) {
  const auto* px = static_cast<const char*>(x.const_data_ptr());
  const auto* py = static_cast<const char*>(y.const_data_ptr());
  return px < py + span_bytes(y) && py < px + span_bytes(x);
}

// Checks the arguments of gemm and returns their shape.
inline GemmShape check_gemm(const Tensor& a, const Tensor& b, const Tensor& out, bool trans_a, bool trans_b) {
  for (const Tensor* x : {&a, &b, &out}) {
    STD_TORCH_CHECK(x->dim() == 2, "gemm: expected three matrices, got a tensor of ", x->dim(), " dimensions");
    STD_TORCH_CHECK(x->size(0) > 0 && x->size(1) > 0, "gemm: empty matrix of ", x->size(0), " x ", x->size(1));
    STD_TORCH_CHECK(is_row_major(*x), "gemm: a matrix of ", x->size(0), " x ", x->size(1), " has strides (", x->stride(0),
                    ", ", x->stride(1), "); rows must be contiguous, pass trans_a / trans_b instead of a transposed view");
  }
  const ScalarType dtype = a.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "gemm: a must be fp32, fp16 or bf16");
  STD_TORCH_CHECK(b.scalar_type() == dtype, "gemm: a and b must have the same dtype");
  STD_TORCH_CHECK(out.scalar_type() == dtype || out.scalar_type() == ScalarType::Float,
                  "gemm: out must have the dtype of a and b, or fp32");
  STD_TORCH_CHECK(a.get_device_index() == out.get_device_index() && b.get_device_index() == out.get_device_index(),
                  "gemm: a, b and out must be on the same device");

  const int64_t M = a.size(trans_a ? 1 : 0), K = a.size(trans_a ? 0 : 1);
  const int64_t K_b = b.size(trans_b ? 1 : 0), N = b.size(trans_b ? 0 : 1);
  STD_TORCH_CHECK(K == K_b, "gemm: op(a) is ", M, " x ", K, " but op(b) is ", K_b, " x ", N);
  STD_TORCH_CHECK(out.size(0) == M && out.size(1) == N, "gemm: out is ", out.size(0), " x ", out.size(1),
                  ", expected ", M, " x ", N);
  STD_TORCH_CHECK(!overlap(a, out) && !overlap(b, out), "gemm: out must not overlap a or b");
  return {M, N, K, leading_dimension(a), leading_dimension(b), leading_dimension(out)};
}

}  // namespace
