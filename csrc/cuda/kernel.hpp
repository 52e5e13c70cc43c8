// The parts that the CUDA kernels share: conversions between dtypes, grid-stride loops, and sums.
//
// Every sum has an order that depends on the shapes (and the GPU) alone, without float atomics, so results repeat bit for
// bit. Kernels run on torch's current stream, and temporaries come from torch's allocator on that stream.
#pragma once
#include "../fused.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace {

using torch::stable::accelerator::DeviceGuard;

constexpr int THREADS = 256, WARP = 32, WARPS = THREADS / WARP;
constexpr int64_t MAX_BLOCKS = 1024;  // largest grid; loops with the grid as their stride do the rest

__host__ __device__ inline float widen(float x) { return x; }
__host__ __device__ inline float widen(__half x) { return __half2float(x); }
__host__ __device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T narrow(float x);  // rounds to nearest even; overflow becomes inf
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// N neighbouring elements, read or written at once; their address must be a multiple of their size.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T x[N];
};

__device__ inline int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t global_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// *out = combine of x over the block, in a fixed order. Called once by all THREADS threads.
template <class F>
__device__ void store_block_total(double x, F combine, double* out) {
  __shared__ double totals[THREADS];
  totals[threadIdx.x] = x;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) totals[threadIdx.x] = combine(totals[threadIdx.x], totals[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = totals[0];
}

// ---- host

inline cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the number of blocks for `count` pieces of work, `each` in a block: 1 to MAX_BLOCKS.
inline unsigned grid_of(int64_t count, int64_t each) {
  return static_cast<unsigned>(std::min(ceil_div(count, each), MAX_BLOCKS));
}

inline bool is_aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Calls f with a zero of x's dtype.
template <class F>
void by_dtype(const Tensor& x, F f) {
  switch (x.scalar_type()) {
    case ScalarType::Half: return f(__half{});
    case ScalarType::BFloat16: return f(__nv_bfloat16{});
    default: return f(float{});  // the checks admit no other dtype
  }
}

// Calls f with a zero of x's dtype T and a zero of y's dtype, which is T or fp32.
template <class F>
void by_dtypes(const Tensor& x, const Tensor& y, F f) {
  by_dtype(x, [&](auto t) { y.scalar_type() == ScalarType::Float ? f(t, float{}) : f(t, t); });
}

// ---- column sums

constexpr int64_t MAX_ROW_BLOCKS = 128;

// First half: partials[b, j] = sum of x_ij over the rows of row block b = blockIdx.y. A thread block is WARPS rows of WARP
// columns; the loop over columns has the grid as its stride. With dz, x_ij first becomes x_ij <= 0 ? 0 : dz_ij.
template <class T>
__global__ void __launch_bounds__(THREADS) column_sums_kernel(T* x, int64_t ld, const T* dz, int64_t lddz,
                                                              int64_t m, int64_t n, int64_t rows, float* partials) {
  __shared__ float sums[WARPS][WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int64_t begin = blockIdx.y * rows, end = begin + rows < m ? begin + rows : m;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * WARP; first < n;
       first += static_cast<int64_t>(gridDim.x) * WARP) {
    const int64_t j = first + lane;
    float sum = 0;
    if (j < n)
      for (int64_t i = begin + warp; i < end; i += WARPS) {
        T& value = x[i * ld + j];
        if (dz != nullptr) value = widen(value) <= 0 ? narrow<T>(0) : dz[i * lddz + j];
        sum += widen(value);
      }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && j < n) {
      for (int w = 1; w < WARPS; w++) sum += sums[w][lane];
      partials[blockIdx.y * n + j] = sum;
    }
    __syncthreads();  // before the next columns overwrite sums
  }
}

// Second half: dbias_j = sum_b partials[b, j]
template <class T>
__global__ void __launch_bounds__(THREADS) add_partials_kernel(const float* partials, int64_t blocks, int64_t n,
                                                               T* dbias) {
  for (int64_t j = global_thread(); j < n; j += global_threads()) {
    float sum = 0;
    for (int64_t b = 0; b < blocks; b++) sum += partials[b * n + j];
    dbias[j] = narrow<T>(sum);
  }
}

// dbias_j = sum_i x_ij; with dz, x is masked first, in place.
template <class T>
void column_sums(const Tensor& x, const T* dz, int64_t lddz, const Tensor& dbias, cudaStream_t stream) {
  const int64_t m = x.size(0), n = x.size(1);
  const int64_t rows = ceil_div(m, std::min(ceil_div(m, WARPS), MAX_ROW_BLOCKS)), row_blocks = ceil_div(m, rows);
  const Tensor partials = torch::stable::new_empty(x, {row_blocks, n}, ScalarType::Float);
  const dim3 grid(grid_of(n, WARP), static_cast<unsigned>(row_blocks));
  column_sums_kernel<T><<<grid, THREADS, 0, stream>>>(mutable_data<T>(x), leading_dimension(x), dz, lddz, m, n,
                                                      rows, mutable_data<float>(partials));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  add_partials_kernel<T><<<grid_of(n, THREADS), THREADS, 0, stream>>>(data<float>(partials), row_blocks, n,
                                                                      mutable_data<T>(dbias));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
