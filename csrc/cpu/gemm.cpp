// gemm on the CPU, and gemm_reference, the naive triple loop that the tests compare it with.

#include "multiply.hpp"

#include <torch/csrc/stable/library.h>

namespace {

void gemm(Tensor a, Tensor b, Tensor out, bool trans_a, bool trans_b, double alpha, double beta, bool fp16_sums) {
  const GemmShape s = check_gemm(a, b, out, trans_a, trans_b);
  STD_TORCH_CHECK(!fp16_sums, "gemm: fp16_sums needs a GPU");
  by_dtypes(a, out, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    multiply(s.M, s.N, s.K, trans_a ? columns_of<T>(a, s.lda) : rows_of<T>(a, s.lda),
             trans_b ? rows_of<T>(b, s.ldb) : columns_of<T>(b, s.ldb),
             Scale<C>{mutable_data<C>(out), s.ldc, static_cast<float>(alpha), static_cast<float>(beta)});
  });
}

// ---- reference

template <class T, class C>
void triple_loop(const GemmShape& s, View<T> a, View<T> b, C* c, float alpha, float beta) {
  for (int64_t i = 0; i < s.M; i++)
    for (int64_t j = 0; j < s.N; j++) {
      float sum = 0;
      for (int64_t k = 0; k < s.K; k++)
        sum += static_cast<float>(a.data[i * a.row + k * a.col]) * static_cast<float>(b.data[j * b.row + k * b.col]);
      C& out = c[i * s.ldc + j];
      out = static_cast<C>(beta == 0 ? alpha * sum : alpha * sum + beta * static_cast<float>(out));
    }
}

void gemm_reference(Tensor a, Tensor b, Tensor out, bool trans_a, bool trans_b, double alpha, double beta) {
  const GemmShape s = check_gemm(a, b, out, trans_a, trans_b);
  by_dtypes(a, out, [&](auto t, auto c) {
    using T = decltype(t);
    triple_loop(s, trans_a ? columns_of<T>(a, s.lda) : rows_of<T>(a, s.lda),
                trans_b ? rows_of<T>(b, s.ldb) : columns_of<T>(b, s.ldb), mutable_data<decltype(c)>(out),
                static_cast<float>(alpha), static_cast<float>(beta));
  });
}

int64_t workspace_bytes() { return mpcompare::workspace_bytes; }

int64_t amx() {
#ifdef HAS_AMX
  return amx_allowed() ? 1 : 2;
#else
  return 0;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CPU, m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm_reference", TORCH_BOX(&gemm_reference));
}

// These operators have no tensor argument that would choose a device.
STABLE_TORCH_LIBRARY_IMPL(mpcompare, CompositeExplicitAutograd, m) {
  m.impl("workspace_bytes", TORCH_BOX(&workspace_bytes));
  m.impl("amx", TORCH_BOX(&amx));
}
