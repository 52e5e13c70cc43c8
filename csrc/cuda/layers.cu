// linear, weight_grad and linear_backward on CUDA: products by cublasLt, and one kernel of our own for the backward of
// a last layer with few outputs.

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

// ---- linear_backward of few outputs in one pass over z

constexpr int FEW = 16;        // largest number of outputs
constexpr int COLUMNS = 2;     // neighbouring columns of z that a thread owns
constexpr int TILE = 64;       // rows of da in shared memory at a time
constexpr int IN_FLIGHT = 8;   // rows of z that a thread has asked for before it needs the first

// The work on rows [begin, end) of z, begin = blockIdx.y rows, in columns j and j + 1:
//
//   dw_jk += z_ij da_ik      dz = sum_k da_ik w_jk      z_ij = z_ij <= 0 ? 0 : dz      dbias_j += z_ij, rounded
//
// The sums over this block's rows go to partials [gridDim.y][C + 1][h]: dw of output k in row k, dbias in row C. z has h
// columns, an even number. C is the number of outputs c, rounded up; outputs from c on are 0.
template <class T, int C>
__global__ void __launch_bounds__(THREADS, 2) few_outputs_kernel(const T* da, int64_t ldda, const T* w, int64_t ldw, T* z,
                                                                 int64_t ldz, int64_t n, int64_t h, int c, int64_t rows,
                                                                 float* partials) {
  using Pair = Pack<T, COLUMNS>;
  __shared__ __align__(16) float tile[TILE][C];
  const int64_t j = global_thread() * COLUMNS;
  const bool inside = j < h;
  float w_j[COLUMNS][C], dw[COLUMNS][C], dbias[COLUMNS];
#pragma unroll
  for (int q = 0; q < COLUMNS; q++) {
    dbias[q] = 0;
#pragma unroll
    for (int k = 0; k < C; k++) {
      dw[q][k] = 0;
      w_j[q][k] = inside && k < c ? widen(w[(j + q) * ldw + k]) : 0.0f;
    }
  }

  const int64_t begin = blockIdx.y * rows, end = begin + rows < n ? begin + rows : n;
  for (int64_t first = begin; first < end; first += TILE) {
    const int count = static_cast<int>(end - first < TILE ? end - first : TILE);
    __syncthreads();  // before the tile that others may still read is overwritten
    for (int e = threadIdx.x; e < count * C; e += THREADS) {
      const int r = e / C, k = e % C;
      tile[r][k] = k < c ? widen(da[(first + r) * ldda + k]) : 0.0f;
    }
    __syncthreads();
    if (!inside) continue;  // only the work is skipped: this thread still meets the barriers above

    for (int r0 = 0; r0 < count; r0 += IN_FLIGHT) {
      Pair old[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; u++)
        if (r0 + u < count) old[u] = *reinterpret_cast<const Pair*>(z + (first + r0 + u) * ldz + j);
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; u++) {
        if (r0 + u >= count) break;
        const float* da_i = tile[r0 + u];
        Pair updated;
#pragma unroll
        for (int q = 0; q < COLUMNS; q++) {
          const float z_ij = widen(old[u].x[q]);
          float dz = 0;
#pragma unroll
          for (int k = 0; k < C; k++) {
            dz += da_i[k] * w_j[q][k];
            dw[q][k] += z_ij * da_i[k];
          }
          updated.x[q] = z_ij <= 0 ? narrow<T>(0) : narrow<T>(dz);  // NaN <= 0 is false, as in torch
          dbias[q] += widen(updated.x[q]);
        }
        *reinterpret_cast<Pair*>(z + (first + r0 + u) * ldz + j) = updated;
      }
    }
  }

  if (!inside) return;
  float* mine = partials + blockIdx.y * (C + 1) * h + j;
#pragma unroll
  for (int q = 0; q < COLUMNS; q++) {
#pragma unroll
    for (int k = 0; k < C; k++) mine[k * h + q] = dw[q][k];
    mine[C * h + q] = dbias[q];
  }
}

// Adds up the partial sums of dw_jk and dbias_j, one thread each: k = C is dbias, k from c to C - 1 holds nothing.
template <class T, int C>
__global__ void __launch_bounds__(THREADS) few_outputs_sum_kernel(const float* partials, int64_t blocks, int64_t h, int c,
                                                                  T* dw, int64_t lddw, T* dbias) {
  for (int64_t e = global_thread(); e < (C + 1) * h; e += global_threads()) {
    const int64_t k = e / h, j = e % h;
    if (c <= k && k < C) continue;
    float sum = 0;
    for (int64_t b = 0; b < blocks; b++) sum += partials[b * (C + 1) * h + e];
    if (k == C)
      dbias[j] = narrow<T>(sum);
    else
      dw[j * lddw + k] = narrow<T>(sum);
  }
}

// ---- host

// Returns whether few_outputs_kernel can do the backward.
bool has_few_outputs(const Tensor& da, const Tensor& z) {
  const int64_t h = z.size(1);
  return da.size(1) <= FEW && h % COLUMNS == 0 && leading_dimension(z) % COLUMNS == 0 &&
         is_aligned(z.const_data_ptr(), COLUMNS * z.element_size());
}

template <class T, int C>
void few_outputs_backward(const Tensor& da, const Tensor& w, const Tensor& z, const Tensor& dw, const Tensor& dbias,
                          cudaStream_t stream) {
  const int64_t n = z.size(0), h = z.size(1), strips = ceil_div(h, THREADS * COLUMNS);
  const int c = static_cast<int>(da.size(1));
  // The grid has as many blocks as the GPU runs at a time: each has its own partial sums, so more would move more
  // bytes.
  int per_processor = 0, processors = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, few_outputs_kernel<T, C>, THREADS, 0));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, z.get_device_index()));
  const int64_t at_once = std::max<int64_t>(1, int64_t{per_processor} * processors / strips);
  const int64_t rows = ceil_div(n, std::min({at_once, ceil_div(n, IN_FLIGHT), MAX_ROW_BLOCKS}));
  const int64_t blocks = ceil_div(n, rows);
  const Tensor partials = torch::stable::new_empty(z, {blocks, C + 1, h}, ScalarType::Float);
  const dim3 grid(static_cast<unsigned>(strips), static_cast<unsigned>(blocks));
  few_outputs_kernel<T, C><<<grid, THREADS, 0, stream>>>(data<T>(da), leading_dimension(da), data<T>(w),
                                                         leading_dimension(w), mutable_data<T>(z), leading_dimension(z),
                                                         n, h, c, rows, mutable_data<float>(partials));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  few_outputs_sum_kernel<T, C><<<grid_of((C + 1) * h, THREADS), THREADS, 0, stream>>>(
      data<float>(partials), blocks, h, c, mutable_data<T>(dw), leading_dimension(dw), mutable_data<T>(dbias));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Computes out = op(a) op(b) by cublasLt, or by cuBLAS if cublasLt has no algorithm.
void matmul(const Tensor& a, const Tensor& b, Tensor out, bool trans_a, bool trans_b, Choices choices) {
  if (!lt_matmul(a, b, out, trans_a, trans_b, Store::plain, nullptr, choices))
    cublas_gemm(a, b, out, trans_a, trans_b, 1.0, 0.0);
}

void linear(Tensor x, Tensor w, Tensor bias, Tensor out, bool relu, bool search, bool tf32) {
  const auto [M, N, K, ldx, ldw, ld] = check_linear(x, w, bias, out);
  const auto by_lt = [&](Store store) {  // cublasLt takes a bias of the output's dtype only
    return out.scalar_type() == bias.scalar_type() &&
           lt_matmul(x, w, out, false, false, store, bias.const_data_ptr(), {search, tf32});
  };
  if (relu && by_lt(Store::bias_relu)) return;
  const bool has_bias = by_lt(Store::bias);
  const DeviceGuard device(out.get_device_index());
  const cudaStream_t stream = current_stream(out);
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
    if (has_few_outputs(da, z)) {
      const int64_t c = da.size(1);
      const auto backward = c <= 4    ? few_outputs_backward<T, 4>
                            : c <= 8  ? few_outputs_backward<T, 8>
                            : c <= 12 ? few_outputs_backward<T, 12>
                                      : few_outputs_backward<T, 16>;
      return backward(da, w, z, dw, dbias, stream);
    }
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
