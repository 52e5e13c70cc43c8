// linear, weight_grad and linear_backward on CUDA: products by cublasLt, and kernels of our own for a last layer with
// few outputs.

#include "few_outputs.hpp"
#include "lt.hpp"

#include <torch/csrc/stable/library.h>

namespace {

// ---- the eager path of linear

// out_ij = product_ij + bias_j, rounded, or the relu of it; NaN stays NaN. product may be out.
template <class T, class C>
__global__ void __launch_bounds__(THREADS) add_bias_kernel(const float* product, int64_t ldp, const T* bias, C* out,
                                                           int64_t ld, int64_t m, int64_t n, bool relu) {
  for (int64_t k = global_thread(); k < m * n; k += global_threads()) {
    const int64_t i = k / n, j = k % n;
    const float sum = product[i * ldp + j] + widen(bias[j]);
    out[i * ld + j] = narrow<C>(relu && sum < 0 ? 0 : sum);
  }
}

// x = max(x, 0); NaN stays NaN
template <class C>
__global__ void __launch_bounds__(THREADS) relu_kernel(C* x, int64_t ld, int64_t m, int64_t n) {
  for (int64_t k = global_thread(); k < m * n; k += global_threads()) {
    C& value = x[k / n * ld + k % n];
    if (widen(value) < 0) value = narrow<C>(0);
  }
}

// ---- host

// Computes out = op(a) op(b) by cublasLt, or by cuBLAS if cublasLt has no algorithm.
void matmul(const Tensor& a, const Tensor& b, Tensor out, bool trans_a, bool trans_b, Choices choices) {
  if (!lt_matmul(a, b, out, trans_a, trans_b, Store::plain, nullptr, choices))
    cublas_gemm(a, b, out, trans_a, trans_b, 1.0, 0.0);
}

void linear(Tensor x, Tensor w, Tensor bias, Tensor out, bool relu, bool search, bool tf32) {
  const auto [M, N, K, ldx, ldw, ld] = check_linear(x, w, bias, out);
  const DeviceGuard device(out.get_device_index());
  const cudaStream_t stream = current_stream(out);
  if (N <= FEW && has_vectors(x)) return few_outputs_linear(x, w, bias, out, relu, stream);
  const auto by_lt = [&](Store store) {  // cublasLt takes a bias of the output's dtype only
    return out.scalar_type() == bias.scalar_type() &&
           lt_matmul(x, w, out, false, false, store, bias.const_data_ptr(), {search, tf32});
  };
  if (relu && by_lt(Store::bias_relu)) return;
  const bool has_bias = by_lt(Store::bias);
  const unsigned grid = grid_of(M * N, THREADS);
  by_dtypes(bias, out, [&, M = M, N = N, ld = ld](auto t, auto o) {
    using T = decltype(t);
    using C = decltype(o);
    if (!has_bias) {
      // No document says that cuBLAS rounds alpha a b + beta c once, so the product is fp32 until the bias is in.
      const bool wide = out.scalar_type() == ScalarType::Float;
      Tensor product = wide ? out : torch::stable::new_empty(out, {M, N}, ScalarType::Float);
      cublas_gemm(x, w, product, false, false, 1.0, 0.0);
      add_bias_kernel<T, C><<<grid, THREADS, 0, stream>>>(data<float>(product), leading_dimension(product),
                                                          data<T>(bias), mutable_data<C>(out), ld, M, N, relu);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      return;
    }
    if (!relu) return;
    relu_kernel<C><<<grid, THREADS, 0, stream>>>(mutable_data<C>(out), ld, M, N);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void weight_grad(Tensor z, Tensor da, Tensor dw, bool search, bool tf32) {
  check_weight_grad(z, da, dw);
  matmul(z, da, dw, true, false, {search, tf32});
}

void linear_backward(Tensor da, Tensor w, Tensor z, Tensor dw, Tensor dbias, bool search, bool tf32) {
  check_linear_backward(da, w, z, dw, dbias);
  const DeviceGuard device(z.get_device_index());
  const cudaStream_t stream = current_stream(z);
  by_dtype(z, [&](auto t) {
    using T = decltype(t);
    if (has_few_outputs(da, z)) return few_outputs_backward<T>(da, w, z, dw, dbias, stream);
    matmul(z, da, dw, true, false, {search, tf32});
    const int64_t n = z.size(0), h = z.size(1), aligned = ceil_div(h, 8) * 8;  // cublasLt prefers rows 16 bytes apart
    Tensor padded = torch::stable::new_empty(z, {n, aligned});
    const Tensor dz = torch::stable::narrow(padded, 1, 0, h);
    matmul(da, w, dz, false, true, {search, tf32});
    column_sums<T>(z, data<T>(dz), aligned, dbias, stream);
  });
}

int64_t lt_workspace_bytes() { return lt_workspace; }
int64_t lt_unsupported_products() { return lt_fastest.unsolved(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("weight_grad", TORCH_BOX(&weight_grad));
  m.impl("linear_backward", TORCH_BOX(&linear_backward));
}

// These operators have no tensor argument that would choose a device.
STABLE_TORCH_LIBRARY_IMPL(mpcompare, CompositeExplicitAutograd, m) {
  m.impl("lt_workspace_bytes", TORCH_BOX(&lt_workspace_bytes));
  m.impl("lt_unsupported_products", TORCH_BOX(&lt_unsupported_products));
}
