// linear, weight_grad and linear_backward on the CPU: products whose epilogues do more than store.
//
// The column sums of linear_backward are added thread by thread, in double, so their last bit may depend on the number
// of threads.

#include "multiply.hpp"

#include <torch/csrc/stable/library.h>

#include <vector>

namespace {

// The epilogue C = sum + bias, or C = relu(sum + bias).
template <class T, class C>
struct Bias {
  C* c;
  int64_t ldc;
  const T* bias;
  bool with_relu;
  void fetch(int64_t, int64_t, int64_t, int64_t) const {}
  void operator()(int64_t i, int64_t j, int64_t m, int64_t n, const float* tile, int64_t ld) const {
    for (int64_t q = 0; q < n; q += VL) {
      const vec b = load(bias + j + q, n - q);
      for (int64_t r = 0; r < m; r++) {
        const vec v = load(tile + r * ld + q) + b;
        store(c + (i + r) * ldc + j + q, with_relu ? relu(v) : v, n - q);
      }
    }
  }
};

// The epilogue Z = sum where Z > 0, else 0, with the column sums of the new, rounded Z. They are added in fp32 within a
// tile, and in double over the tiles of a thread.
template <class T>
struct MaskAndSum {
  T* z;
  int64_t ldz;
  double* sums;  // [threads][N], zero at the start
  int64_t N;
  void fetch(int64_t i, int64_t j, int64_t m, int64_t n) const { fetch_rows(z + i * ldz + j, ldz, m, n); }
  void operator()(int64_t i, int64_t j, int64_t m, int64_t n, const float* tile, int64_t ld) const {
    double* mine = sums + omp_get_thread_num() * N + j;
    for (int64_t q = 0; q < n; q += VL) {
      vec column = {};
      for (int64_t r0 = 0; r0 < m; r0 += ROWS) {
        const int64_t rows = std::min(ROWS, m - r0);
        T* first = z + (i + r0) * ldz + j + q;
        vec old[ROWS];
        for (int64_t r = 0; r < rows; r++) old[r] = load(first + r * ldz, n - q);
        for (int64_t r = 0; r < rows; r++) {
          T* p = first + r * ldz;
          store(p, old[r] <= 0 ? vec{} : load(tile + (r0 + r) * ld + q), n - q);  // NaN <= 0 is false, as in torch
          column += load(p, n - q);
        }
      }
      for (int64_t c = 0; c < std::min<int64_t>(VL, n - q); c++) mine[q + c] += column[c];
    }
  }
};

void linear(Tensor x, Tensor w, Tensor bias, Tensor out, bool relu, bool /*search*/, bool /*tf32*/) {
  const GemmShape s = check_linear(x, w, bias, out);
  by_dtypes(x, out, [&](auto t, auto c) {
    using T = decltype(t);
    using C = decltype(c);
    multiply(s.M, s.N, s.K, rows_of<T>(x, s.lda), columns_of<T>(w, s.ldb),
             Bias<T, C>{mutable_data<C>(out), s.ldc, data<T>(bias), relu});
  });
}

template <class T>
void weight_grad_of(const Tensor& z, const Tensor& da, const Tensor& dw) {
  multiply(z.size(1), da.size(1), z.size(0), columns_of<T>(z, leading_dimension(z)),
           columns_of<T>(da, leading_dimension(da)), Scale<T>{mutable_data<T>(dw), leading_dimension(dw), 1, 0});
}

void weight_grad(Tensor z, Tensor da, Tensor dw, bool /*search*/, bool /*tf32*/) {
  check_weight_grad(z, da, dw);
  by_dtype(z, [&](auto t) { weight_grad_of<decltype(t)>(z, da, dw); });
}

void linear_backward(Tensor da, Tensor w, Tensor z, Tensor dw, Tensor dbias, bool /*search*/, bool /*tf32*/) {
  const GemmShape s = check_linear_backward(da, w, z, dw, dbias);
  by_dtype(da, [&](auto t) {
    using T = decltype(t);
    weight_grad_of<T>(z, da, dw);
    // The shared buffer of the workspace is not used: multiply_by_rows may need it at the same time.
    const int64_t threads = torch::stable::get_num_threads();
    std::vector<double> partial(threads * s.N);
    double* sums = partial.data();
    multiply(s.M, s.N, s.K, rows_of<T>(da, s.lda), rows_of<T>(w, s.ldb),
             MaskAndSum<T>{mutable_data<T>(z), s.ldc, sums, s.N});
    for (int64_t thread = 1; thread < threads; thread++)
      for (int64_t j = 0; j < s.N; j++) sums[j] += sums[thread * s.N + j];
    for (int64_t j = 0; j < s.N; j++) mutable_data<T>(dbias)[j] = static_cast<T>(static_cast<float>(sums[j]));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("weight_grad", TORCH_BOX(&weight_grad));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}
