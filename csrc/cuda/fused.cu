// linear, relu_backward, cross_entropy, mse and sgd on CUDA: correct and plain, one kernel a step of the formula.
//
// Every sum has an order that depends on the shapes alone, without float atomics, so results repeat bit for bit.
// Kernels run on torch's current stream; temporaries come from its allocator, on that stream too.

#include "../fused.hpp"
#include "cublas.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int THREADS = 256, WARP = 32, WARPS = THREADS / WARP;
constexpr int64_t MAX_BLOCKS = 1024;     // of a grid; loops with the grid as their stride do the rest
constexpr int64_t MAX_ROW_BLOCKS = 128;  // of column sums

__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T narrow(float x);  // to nearest even, overflow to inf
template <>
__device__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

__device__ int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ int64_t global_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// ---- elementwise, on an m x n matrix with rows ld apart

// out_ij = bias_j
template <class T, class C>
__global__ void __launch_bounds__(THREADS) fill_rows_kernel(C* out, int64_t ld, const T* bias, int64_t m, int64_t n) {
  for (int64_t k = global_thread(); k < m * n; k += global_threads())
    out[k / n * ld + k % n] = narrow<C>(widen(bias[k % n]));
}

// x = max(x, 0); NaN stays NaN
template <class C>
__global__ void __launch_bounds__(THREADS) relu_kernel(C* x, int64_t ld, int64_t m, int64_t n) {
  for (int64_t k = global_thread(); k < m * n; k += global_threads()) {
    C& value = x[k / n * ld + k % n];
    if (widen(value) < 0) value = narrow<C>(0);
  }
}

// z = z <= 0 ? 0 : dz, dz contiguous
template <class T>
__global__ void __launch_bounds__(THREADS) mask_kernel(T* z, int64_t ld, const T* dz, int64_t m, int64_t n) {
  for (int64_t k = global_thread(); k < m * n; k += global_threads()) {
    T& value = z[k / n * ld + k % n];
    value = widen(value) <= 0 ? narrow<T>(0) : dz[k];
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS) sgd_kernel(int64_t count, float* master, float* velocity, T* params,
                                                      const T* grad, float lr, float momentum, float inv_scale) {
  for (int64_t i = global_thread(); i < count; i += global_threads()) {
    float v = inv_scale * widen(grad[i]);
    if (velocity != nullptr) velocity[i] = v = momentum * velocity[i] + v;
    master[i] -= lr * v;
    if (params != nullptr) params[i] = narrow<T>(master[i]);
  }
}

// ---- sums

// *out = sum of x over the block, in a fixed order. Called once by all THREADS threads.
__device__ void store_block_sum(double x, double* out) {
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = x;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = sums[0];
}

// loss = sum of partials / count, by one block
__global__ void __launch_bounds__(THREADS) mean_kernel(const double* partials, int64_t blocks, double count,
                                                       float* loss) {
  double sum = 0;
  for (int64_t b = threadIdx.x; b < blocks; b += THREADS) sum += partials[b];
  __shared__ double total;
  store_block_sum(sum, &total);
  if (threadIdx.x == 0) *loss = static_cast<float>(total / count);  // thread 0 wrote total itself
}

// Column sums, first half: partials[b, j] = sum of x_ij over the rows of row block b = blockIdx.y. A thread block is
// WARPS rows of WARP columns; the columns' loop has the grid as its stride.
template <class T>
__global__ void __launch_bounds__(THREADS) column_sums_kernel(const T* x, int64_t ld, int64_t m, int64_t n,
                                                              int64_t rows, float* partials) {
  __shared__ float sums[WARPS][WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int64_t begin = blockIdx.y * rows, end = begin + rows < m ? begin + rows : m;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * WARP; first < n;
       first += static_cast<int64_t>(gridDim.x) * WARP) {
    const int64_t j = first + lane;
    float sum = 0;
    if (j < n)
      for (int64_t i = begin + warp; i < end; i += WARPS) sum += widen(x[i * ld + j]);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && j < n) {
      for (int w = 1; w < WARPS; w++) sum += sums[w][lane];
      partials[blockIdx.y * n + j] = sum;
    }
    __syncthreads();  // before the next columns overwrite sums
  }
}

// Column sums, second half: dbias_j = sum_b partials[b, j]
template <class T>
__global__ void __launch_bounds__(THREADS) add_partials_kernel(const float* partials, int64_t blocks, int64_t n,
                                                               T* dbias) {
  for (int64_t j = global_thread(); j < n; j += global_threads()) {
    float sum = 0;
    for (int64_t b = 0; b < blocks; b++) sum += partials[b * n + j];
    dbias[j] = narrow<T>(sum);
  }
}

// ---- losses

__device__ float warp_max(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
__device__ float warp_sum(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// One warp a row. fmaxf drops NaN, exp(NaN - max) does not.
template <class T, class L>
__global__ void __launch_bounds__(THREADS) cross_entropy_kernel(const L* logits, const int64_t* y, int64_t n, int64_t c,
                                                                float scale, T* dlogits, double* partials) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  double loss = 0;  // of this warp's rows, in lane 0
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * WARPS + warp; i < n;
       i += static_cast<int64_t>(gridDim.x) * WARPS) {
    const L* row = logits + i * c;
    float top = -INFINITY, total = 0;
    for (int64_t j = lane; j < c; j += WARP) top = fmaxf(top, widen(row[j]));
    top = warp_max(top);
    for (int64_t j = lane; j < c; j += WARP) total += expf(widen(row[j]) - top);
    total = warp_sum(total);
    const int64_t label = y[i];
    const bool valid = 0 <= label && label < c;
    for (int64_t j = lane; j < c; j += WARP) {
      const float p = expf(widen(row[j]) - top) / total;
      dlogits[i * c + j] = narrow<T>(valid ? (p - (j == label ? 1.0f : 0.0f)) * scale : NAN);
    }
    if (lane == 0) loss += valid ? logf(total) - (widen(row[label]) - top) : NAN;
  }
  store_block_sum(loss, &partials[blockIdx.x]);
}

template <class T, class L>
__global__ void __launch_bounds__(THREADS) mse_kernel(const L* output, const float* y, int64_t count, float scale,
                                                      T* doutput, double* partials) {
  double loss = 0;
  for (int64_t k = global_thread(); k < count; k += global_threads()) {
    const float d = widen(output[k]) - y[k];
    loss += d * d;
    doutput[k] = narrow<T>(d * scale);
  }
  store_block_sum(loss, &partials[blockIdx.x]);
}

// ---- host

cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Enough blocks for `count` pieces of work, `each` a block; 1 to MAX_BLOCKS.
unsigned grid_of(int64_t count, int64_t each) {
  return static_cast<unsigned>(std::min(ceil_div(count, each), MAX_BLOCKS));
}

// f(zero of x's dtype)
template <class F>
void by_dtype(const Tensor& x, F f) {
  switch (x.scalar_type()) {
    case ScalarType::Half: return f(__half{});
    case ScalarType::BFloat16: return f(__nv_bfloat16{});
    default: return f(float{});  // the checks admit no other dtype
  }
}

// f(zero of x's dtype T, zero of y's: T or fp32)
template <class F>
void by_dtypes(const Tensor& x, const Tensor& y, F f) {
  by_dtype(x, [&](auto t) { y.scalar_type() == ScalarType::Float ? f(t, float{}) : f(t, t); });
}

template <class T>
void column_sums(const Tensor& x, const Tensor& dbias, cudaStream_t stream) {
  const int64_t m = x.size(0), n = x.size(1);
  const int64_t rows = ceil_div(m, std::min(ceil_div(m, WARPS), MAX_ROW_BLOCKS)), row_blocks = ceil_div(m, rows);
  const Tensor partials = torch::stable::new_empty(x, {row_blocks, n}, ScalarType::Float);
  const dim3 grid(grid_of(n, WARP), static_cast<unsigned>(row_blocks));
  column_sums_kernel<T><<<grid, THREADS, 0, stream>>>(data<T>(x), leading_dimension(x), m, n, rows,
                                                      mutable_data<float>(partials));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  add_partials_kernel<T><<<grid_of(n, THREADS), THREADS, 0, stream>>>(data<float>(partials), row_blocks, n,
                                                                      mutable_data<T>(dbias));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void mean(const Tensor& partials, double count, const Tensor& loss, cudaStream_t stream) {
  mean_kernel<<<1, THREADS, 0, stream>>>(data<double>(partials), partials.size(0), count, mutable_data<float>(loss));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void linear(Tensor x, Tensor w, Tensor bias, Tensor out, bool relu) {
  const auto [M, N, K, ldx, ldw, ld] = check_linear(x, w, bias, out);
  const DeviceGuard device(out.get_device_index());
  const cudaStream_t stream = current_stream(out);
  const unsigned grid = grid_of(M * N, THREADS);
  by_dtypes(bias, out, [&, M = M, N = N, ld = ld](auto t, auto o) {
    using T = decltype(t);
    using C = decltype(o);
    // Rows of bias, exact in C, then + x w by beta = 1: one rounding.
    fill_rows_kernel<T, C><<<grid, THREADS, 0, stream>>>(mutable_data<C>(out), ld, data<T>(bias), M, N);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    cublas_gemm(x, w, out, false, false, 1.0, 1.0);
    if (!relu) return;
    relu_kernel<C><<<grid, THREADS, 0, stream>>>(mutable_data<C>(out), ld, M, N);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void relu_backward(Tensor da, Tensor w, Tensor z, Tensor dbias) {
  const auto [M, N, K, ldda, ldw, ld] = check_relu_backward(da, w, z, dbias);
  const DeviceGuard device(z.get_device_index());
  const cudaStream_t stream = current_stream(z);
  Tensor dz = torch::stable::new_empty(z, {M, N});
  cublas_gemm(da, w, dz, false, true, 1.0, 0.0);
  by_dtype(z, [&, M = M, N = N, ld = ld](auto t) {
    using T = decltype(t);
    mask_kernel<T><<<grid_of(M * N, THREADS), THREADS, 0, stream>>>(mutable_data<T>(z), ld, data<T>(dz), M, N);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    column_sums<T>(z, dbias, stream);
  });
}

void cross_entropy(Tensor logits, Tensor y, Tensor dlogits, Tensor dbias, Tensor loss, double loss_scale) {
  const LossShape s = check_cross_entropy(logits, y, dlogits, dbias, loss);
  const DeviceGuard device(loss.get_device_index());
  const cudaStream_t stream = current_stream(loss);
  const unsigned grid = grid_of(s.n, WARPS);
  const Tensor partials = torch::stable::new_empty(loss, {static_cast<int64_t>(grid)}, ScalarType::Double);
  const double count = static_cast<double>(s.n);
  const float scale = static_cast<float>(loss_scale / count);
  by_dtypes(dlogits, logits, [&](auto t, auto l) {
    using T = decltype(t);
    using L = decltype(l);
    cross_entropy_kernel<T, L><<<grid, THREADS, 0, stream>>>(data<L>(logits), data<int64_t>(y), s.n, s.c, scale,
                                                             mutable_data<T>(dlogits), mutable_data<double>(partials));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    column_sums<T>(dlogits, dbias, stream);
  });
  mean(partials, count, loss, stream);
}

void mse(Tensor output, Tensor y, Tensor doutput, Tensor dbias, Tensor loss, double loss_scale) {
  const LossShape s = check_mse(output, y, doutput, dbias, loss);
  const DeviceGuard device(loss.get_device_index());
  const cudaStream_t stream = current_stream(loss);
  const unsigned grid = grid_of(s.n * s.c, THREADS);
  const Tensor partials = torch::stable::new_empty(loss, {static_cast<int64_t>(grid)}, ScalarType::Double);
  const double count = static_cast<double>(s.n) * static_cast<double>(s.c);
  const float scale = static_cast<float>(2 * loss_scale / count);
  by_dtypes(doutput, output, [&](auto t, auto l) {
    using T = decltype(t);
    using L = decltype(l);
    mse_kernel<T, L><<<grid, THREADS, 0, stream>>>(data<L>(output), data<float>(y), s.n * s.c, scale,
                                                   mutable_data<T>(doutput), mutable_data<double>(partials));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    column_sums<T>(doutput, dbias, stream);
  });
  mean(partials, count, loss, stream);
}

void sgd(Tensor master, std::optional<Tensor> velocity, std::optional<Tensor> params, Tensor grad, double lr,
         double momentum, double inv_scale) {
  const int64_t count = check_sgd(master, velocity, params, grad, momentum);
  const DeviceGuard device(master.get_device_index());
  const cudaStream_t stream = current_stream(master);
  by_dtype(grad, [&](auto t) {
    using T = decltype(t);
    sgd_kernel<T><<<grid_of(count, THREADS), THREADS, 0, stream>>>(
        count, mutable_data<float>(master), mutable_data<float>(velocity), mutable_data<T>(params), data<T>(grad),
        static_cast<float>(lr), static_cast<float>(momentum), static_cast<float>(inv_scale));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("relu_backward", TORCH_BOX(&relu_backward));
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("mse", TORCH_BOX(&mse));
  m.impl("sgd", TORCH_BOX(&sgd));
}
