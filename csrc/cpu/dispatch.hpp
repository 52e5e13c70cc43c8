// The step from a tensor's dtype, which the checks have admitted, to a C++ type, and the loop over vectors.
#pragma once
#include "../gemm.hpp"
#include "vector.hpp"

namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(i, VL) for each whole vector of [begin, end), then f(i, rest) for the elements that are left.
template <class F>
inline void for_vectors(int64_t begin, int64_t end, F f) {
  for (; begin + VL <= end; begin += VL) f(begin, VL);
  if (begin < end) f(begin, end - begin);
}

// Calls f with a zero of x's dtype.
template <class F>
void by_dtype(const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case ScalarType::Half: return f(fp16{});
    case ScalarType::BFloat16: return f(bf16{});
    default: return f(float{});
  }
}

// Calls f with a zero of x's dtype T and a zero of y's dtype, which is T or fp32.
template <class F>
void by_dtypes(const Tensor& x, const Tensor& y, const F& f) {
  by_dtype(x, [&](auto t) { y.scalar_type() == ScalarType::Float ? f(t, float{}) : f(t, t); });
}

}  // namespace
