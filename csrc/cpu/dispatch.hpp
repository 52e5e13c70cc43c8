// From a tensor's dtype, which the checks have admitted, to a C++ type; and what all kernels count with.
#pragma once
#include "../gemm.hpp"
#include "vector.hpp"

namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(i, VL) for whole vectors of [begin, end), then f(i, rest).
template <class F>
inline void for_vectors(int64_t begin, int64_t end, F f) {
  for (; begin + VL <= end; begin += VL) f(begin, VL);
  if (begin < end) f(begin, end - begin);
}

// f(zero of x's dtype)
template <class F>
void by_dtype(const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Half: return f(fp16{});
    case ScalarType::BFloat16: return f(bf16{});
    default: return f(float{});
  }
}

// f(zero of x's dtype T, zero of y's: T or fp32)
template <class F>
void by_dtypes(const Tensor& x, const Tensor& y, const F& f) {
  by_dtype(x, [&](auto t) { y.scalar_type() == ScalarType::Float ? f(t, float{}) : f(t, t); });
}

}  // namespace
