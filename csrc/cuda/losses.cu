// cross_entropy and mse on CUDA.

#include "kernel.hpp"

#include <torch/csrc/stable/library.h>

namespace {

__device__ void store_block_sum(double x, double* out) {
  store_block_total(x, [](double a, double b) { return a + b; }, out);
}

// Block k < c: dbias_k = sum_b columns[k, b]. The last block: loss = sum_b losses[b] / count.
template <class T>
__global__ void __launch_bounds__(THREADS) finish_kernel(const float* columns, const double* losses, int64_t blocks,
                                                         int64_t c, double count, T* dbias, float* loss) {
  const int64_t k = blockIdx.x;
  double sum = 0;
  for (int64_t b = threadIdx.x; b < blocks; b += THREADS) sum += k < c ? columns[k * blocks + b] : losses[b];
  __shared__ double total;
  store_block_sum(sum, &total);
  if (threadIdx.x != 0) return;  // thread 0 wrote total itself
  if (k < c)
    dbias[k] = narrow<T>(static_cast<float>(total));
  else
    *loss = static_cast<float>(total / count);
}

__device__ float warp_max(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}
__device__ float warp_sum(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// One warp takes a row. fmaxf drops NaN, but exp(NaN - max) keeps it. The sums over this block's rows go to losses and,
// if c <= WARP, to columns [c][gridDim.x], of the rounded dlogits.
template <class T, class L>
__global__ void __launch_bounds__(THREADS) cross_entropy_kernel(const L* logits, const int64_t* y, LossShape s,
                                                                const float* loss_scale, T* dlogits,
                                                                double* losses, float* columns) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const float scale = static_cast<float>(*loss_scale / static_cast<double>(s.n));
  double loss = 0;   // sum over this warp's rows, in lane 0
  float column = 0;  // sum of column `lane` over them
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * WARPS + warp; i < s.n;
       i += static_cast<int64_t>(gridDim.x) * WARPS) {
    const L* row = logits + i * s.ld;
    float top = -INFINITY, total = 0;
    for (int64_t j = lane; j < s.c; j += WARP) top = fmaxf(top, widen(row[j]));
    top = warp_max(top);
    for (int64_t j = lane; j < s.c; j += WARP) total += expf(widen(row[j]) - top);
    total = warp_sum(total);
    const int64_t label = y[i];
    const bool valid = 0 <= label && label < s.c;
    for (int64_t j = lane; j < s.c; j += WARP) {
      const float p = expf(widen(row[j]) - top) / total;
      const T rounded = narrow<T>(valid ? (p - (j == label ? 1.0f : 0.0f)) * scale : NAN);
      dlogits[i * s.ldg + j] = rounded;
      column += widen(rounded);
    }
    if (lane == 0) loss += valid ? logf(total) - (widen(row[label]) - top) : NAN;
  }
  __shared__ double of_warps[WARPS];
  __shared__ float columns_of_warps[WARPS][WARP];
  if (lane == 0) of_warps[warp] = loss;
  columns_of_warps[warp][lane] = column;
  __syncthreads();
  if (warp != 0) return;
  for (int q = 1; q < WARPS; q++) {
    loss += of_warps[q];
    column += columns_of_warps[q][lane];
  }
  if (lane == 0) losses[blockIdx.x] = loss;
  if (columns != nullptr && lane < s.c) columns[static_cast<int64_t>(lane) * gridDim.x + blockIdx.x] = column;
}

// y has rows of c elements.
template <class T, class L>
__global__ void __launch_bounds__(THREADS) mse_kernel(const L* output, const float* y, LossShape s,
                                                      const float* loss_scale, T* doutput, double* partials) {
  const int64_t count = s.n * s.c;
  const float scale = static_cast<float>(2.0 * *loss_scale / (static_cast<double>(s.n) * static_cast<double>(s.c)));
  double loss = 0;
  for (int64_t k = global_thread(); k < count; k += global_threads()) {
    const int64_t i = k / s.c, j = k % s.c;
    const float d = widen(output[i * s.ld + j]) - y[k];
    loss += d * d;
    doutput[i * s.ldg + j] = narrow<T>(d * scale);
  }
  store_block_sum(loss, &partials[blockIdx.x]);
}

// ---- host

void cross_entropy(Tensor logits, Tensor y, Tensor dlogits, Tensor dbias, Tensor loss, Tensor loss_scale) {
  const LossShape s = check_cross_entropy(logits, y, dlogits, dbias, loss, loss_scale);
  const DeviceGuard device(loss.get_device_index());
  const cudaStream_t stream = current_stream(loss);
  const unsigned grid = grid_of(s.n, WARPS);
  const int64_t blocks = grid, c = s.c <= WARP ? s.c : 0;  // c: columns that the kernels of the loss add up
  const Tensor losses = torch::stable::new_empty(loss, {blocks}, ScalarType::Double);
  const Tensor columns = torch::stable::new_empty(loss, {std::max<int64_t>(c, 1), blocks}, ScalarType::Float);
  by_dtypes(dlogits, logits, [&](auto t, auto l) {
    using T = decltype(t);
    using L = decltype(l);
    cross_entropy_kernel<T, L><<<grid, THREADS, 0, stream>>>(
        data<L>(logits), data<int64_t>(y), s, data<float>(loss_scale), mutable_data<T>(dlogits),
        mutable_data<double>(losses), c > 0 ? mutable_data<float>(columns) : nullptr);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    finish_kernel<T><<<static_cast<unsigned>(c + 1), THREADS, 0, stream>>>(
        data<float>(columns), data<double>(losses), blocks, c, static_cast<double>(s.n), mutable_data<T>(dbias),
        mutable_data<float>(loss));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (c == 0) column_sums<T>(dlogits, nullptr, 0, dbias, stream);
  });
}

void mse(Tensor output, Tensor y, Tensor doutput, Tensor dbias, Tensor loss, Tensor loss_scale) {
  const LossShape s = check_mse(output, y, doutput, dbias, loss, loss_scale);
  const DeviceGuard device(loss.get_device_index());
  const cudaStream_t stream = current_stream(loss);
  const unsigned grid = grid_of(s.n * s.c, THREADS);
  const Tensor partials = torch::stable::new_empty(loss, {static_cast<int64_t>(grid)}, ScalarType::Double);
  by_dtypes(doutput, output, [&](auto t, auto l) {
    using T = decltype(t);
    using L = decltype(l);
    mse_kernel<T, L><<<grid, THREADS, 0, stream>>>(data<L>(output), data<float>(y), s, data<float>(loss_scale),
                                                   mutable_data<T>(doutput), mutable_data<double>(partials));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    const double count = static_cast<double>(s.n) * static_cast<double>(s.c);
    finish_kernel<T><<<1, THREADS, 0, stream>>>(nullptr, data<double>(partials), partials.size(0), 0, count, nullptr,
                                                mutable_data<float>(loss));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    column_sums<T>(doutput, nullptr, 0, dbias, stream);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CUDA, m) {
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("mse", TORCH_BOX(&mse));
}
