// linear and linear_backward of a layer with few outputs, as the last one, in one pass over its input.
//
// Each element of the input takes part in few operations, so a pass should take no longer than its bytes do. In 16 bits
// it does: tensor cores multiply. The 8 elements that a lane loads at once go to its registers of a tile as they are,
// because the order of the elements that are summed, and of the columns of a tile, is free.
#pragma once
#include "mma.hpp"

namespace {

constexpr int FEW = 16;  // largest number of outputs

// ---- linear in 16 bits

constexpr int LINEAR_ROWS = 32;              // rows of a block
constexpr int SLICE = 32, STEP = 2 * SLICE;  // inputs: of 4 lanes with a vector each, and of a warp's loads at a time

// The weights as few_outputs_linear_kernel takes them, in words: packed [slice][tile of 8 outputs][lane][4]. Lane
// 4 g + t has inputs 8 t to 8 t + 7 of the slice, output g of the tile. Inputs from K on and outputs from N on are 0.
template <class T>
__global__ void __launch_bounds__(THREADS) pack_weights_kernel(const T* w, int64_t ldw, int64_t K, int64_t N, int tiles,
                                                               uint32_t* packed, int64_t words) {
  for (int64_t e = global_thread(); e < words; e += global_threads()) {
    const int64_t word = e % 4, lane = e / 4 % WARP, tile = e / 4 / WARP % tiles, slice = e / 4 / WARP / tiles;
    const int64_t k = slice * SLICE + lane % 4 * VECTOR + 2 * word, n = tile * 8 + lane / 4;
    const auto at = [&](int64_t i) { return i < K && n < N ? w[i * ldw + n] : narrow<T>(0); };
    packed[e] = word_of(at(k), at(k + 1));
  }
}

// out = x w + bias, or the relu of it, for LINEAR_ROWS rows; N <= 8 TILES. Warp q sums over the steps q, q + WARPS, ...
template <class T, class C, int TILES>
__global__ void __launch_bounds__(THREADS, 2) few_outputs_linear_kernel(const T* x, int64_t ldx, const Vector* packed,
                                                                        const T* bias, C* out, int64_t ld, int64_t M,
                                                                        int64_t N, int64_t K, bool relu) {
  __shared__ float sums[WARPS][LINEAR_ROWS][FEW];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * LINEAR_ROWS;
  float sum[2][TILES][4] = {};  // sums of rows 0..15 and 16..31
  for (int64_t k0 = warp * STEP; k0 < K; k0 += WARPS * STEP) {
    Vector rows[4][2], weights[2][TILES];  // rows[v]: row g + 8 v
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t k = k0 + half * SLICE + t * VECTOR;
#pragma unroll
      for (int v = 0; v < 4; v++) {
        const int64_t i = first + g + 8 * v;
        rows[v][half] = load_vector(x + i * ldx + k, i < M && k < K);
      }
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        weights[half][tile] = packed[((k0 / SLICE + half) * TILES + tile) * WARP + lane];
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int p = 0; p < VECTOR / 2; p += 2)  // words p and p + 1 of each lane: 16 inputs
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const Vector &upper = rows[2 * m][half], &lower = rows[2 * m + 1][half];
          const uint32_t a[4] = {upper.x[p], lower.x[p], upper.x[p + 1], lower.x[p + 1]};
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) {
            const uint32_t b[2] = {weights[half][tile].x[p], weights[half][tile].x[p + 1]};
            mma(T{}, sum[m][tile], a, b);
          }
        }
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums[warp][16 * m + g + e / 2 * 8][8 * tile + 2 * t + e % 2] = sum[m][tile][e];
  __syncthreads();
  for (int e = threadIdx.x; e < LINEAR_ROWS * FEW; e += THREADS) {
    const int64_t i = first + e / FEW, j = e % FEW;
    if (i >= M || j >= N) continue;
    float total = 0;
    for (int q = 0; q < WARPS; q++) total += sums[q][e / FEW][j];
    total += widen(bias[j]);
    out[i * ld + j] = narrow<C>(relu && total < 0 ? 0 : total);  // NaN < 0 is false
  }
}

// ---- linear_backward in 16 bits

constexpr int STRIP = 8 * VECTOR;                 // columns of z that a warp owns: 8 to a lane
constexpr int TILE = 64;                          // rows of da in shared memory at a time
constexpr int ROW_WORDS = 12, OUTPUT_WORDS = 36;  // from one row of them to the next: no two lanes meet in a bank

// The work on rows [begin, end) of z, begin = blockIdx.y rows, in the columns of a block:
//
//   dw_jk += z_ij da_ik      dz = sum_k da_ik w_jk      z_ij = z_ij <= 0 ? 0 : dz      dbias_j += z_ij, rounded
//
// The sums over this block's rows go to partials [gridDim.y][c + 1][h]: dw of output k in row k, dbias in row c. z has
// h columns, a multiple of 8. A warp takes 16 rows at a time, and lane 4 g + t has columns 8 g to 8 g + 7 of rows 2t,
// 2t+1, 2t+8 and 2t+9: its elements of B in dw^T = da^T z, and of D in dz^T = w da^T, if column g of tile q stands for
// column 8 g + q.
template <class T>
__global__ void __launch_bounds__(THREADS, 2) few_outputs_backward_kernel(const T* da, int64_t ldda, const T* w,
                                                                          int64_t ldw, T* z, int64_t ldz, int64_t n,
                                                                          int64_t h, int c, int64_t rows,
                                                                          float* partials) {
  __shared__ uint32_t by_row[TILE][ROW_WORDS];       // da_ik, a word for two outputs
  __shared__ uint32_t by_output[FEW][OUTPUT_WORDS];  // da_ik, a word for two rows
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
  const int64_t strip = (static_cast<int64_t>(blockIdx.x) * WARPS + warp) * STRIP, j = strip + g * VECTOR;
  const bool inside = strip < h;  // the same for a whole warp

  uint32_t w_j[4][4];  // A of dz^T = w da^T: rows are columns 2u of the lanes, then columns 2u + 1
#pragma unroll
  for (int u = 0; u < 4; u++)
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int64_t column = j + 2 * u + r % 2;
      const int k = 2 * t + r / 2 * 8;
      const auto at = [&](int k) { return j < h && k < c ? w[column * ldw + k] : narrow<T>(0); };
      w_j[u][r] = word_of(at(k), at(k + 1));
    }
  float dw[VECTOR][4] = {}, dbias[VECTOR] = {};

  const int64_t begin = blockIdx.y * rows, end = begin + rows < n ? begin + rows : n;
  const int count = static_cast<int>(end - begin), own = j < h ? count - 2 * t : 0;  // rows, and rows from 2t on
  Vector old[4], next[4];
  T* at = z + (begin + 2 * t) * ldz + j;  // r = 0..3 are the lane's rows of 16, from here on
  const auto row = [](int r) { return r % 2 + r / 2 * 8; };
  const auto load = [&](const T* from, int left) {
#pragma unroll
    for (int r = 0; r < 4; r++) next[r] = load_vector(from + row(r) * ldz, row(r) < left);
  };
  load(at, own);
  for (int first = 0; first < count; first += TILE) {
    __syncthreads();  // before the tile that others may still read is overwritten
    const auto da_at = [&](int i, int k) {
      return first + i < count && k < c ? da[(begin + first + i) * ldda + k] : narrow<T>(0);
    };
    for (int e = threadIdx.x; e < TILE * FEW / 2; e += THREADS) {
      const int i = e / (FEW / 2), outputs = e % (FEW / 2), k = e % FEW, pair = e / FEW;
      by_row[i][outputs] = word_of(da_at(i, 2 * outputs), da_at(i, 2 * outputs + 1));
      by_output[k][pair] = word_of(da_at(2 * pair, k), da_at(2 * pair + 1, k));
    }
    __syncthreads();
    if (!inside) continue;  // only the work is skipped: this warp still meets the barriers above

    for (int r0 = 0; r0 < TILE && first + r0 < count; r0 += 16, at += 16 * ldz) {
#pragma unroll
      for (int r = 0; r < 4; r++) old[r] = next[r];
      const int left = own - first - r0;
      load(at + 16 * ldz, left - 16);  // under way while these 16 rows are computed

      const uint32_t(&upper)[OUTPUT_WORDS] = by_output[g], (&lower)[OUTPUT_WORDS] = by_output[g + 8];
      const int pair = r0 / 2 + t;
      const uint32_t da_t[4] = {upper[pair], lower[pair], upper[pair + 4], lower[pair + 4]};
#pragma unroll
      for (int q = 0; q < VECTOR; q++) {
        const auto halves = [&](int r) {
          const uint32_t x = old[r].x[q / 2], y = old[r + 1].x[q / 2];
          return q % 2 == 0 ? low_halves(x, y) : high_halves(x, y);
        };
        const uint32_t z_q[2] = {halves(0), halves(2)};
        mma(T{}, dw[q], da_t, z_q);
      }

#pragma unroll
      for (int v = 0; v < 2; v++) {  // rows 0..7, then 8..15
        const uint32_t(&da_i)[ROW_WORDS] = by_row[r0 + 8 * v + g];
        const uint32_t da_rows[2] = {da_i[t], da_i[t + 4]};
#pragma unroll
        for (int u = 0; u < 4; u++) {
          float dz[4] = {};  // columns 2u of both rows, then 2u + 1
          mma(T{}, dz, w_j[u], da_rows);
#pragma unroll
          for (int s = 0; s < 2; s++) {
            uint32_t& word = old[2 * v + s].x[u];
            const float2 z_ij = widen_word(T{}, word);  // NaN <= 0 is false, as in torch
            word = narrow_word(T{}, z_ij.x <= 0 ? 0 : dz[s], z_ij.y <= 0 ? 0 : dz[2 + s]);
            const float2 rounded = widen_word(T{}, word);
            dbias[2 * u] += rounded.x;
            dbias[2 * u + 1] += rounded.y;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 4; r++)
        if (row(r) < left) *reinterpret_cast<Vector*>(at + row(r) * ldz) = old[r];
    }
  }

  if (!inside) return;
  float* const mine = partials + blockIdx.y * (c + 1) * h;
#pragma unroll
  for (int q = 0; q < VECTOR; q++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int64_t k = g + e / 2 * 8, column = strip + (2 * t + e % 2) * VECTOR + q;
      if (k < c && column < h) mine[k * h + column] = dw[q][e];
    }
    float sum = dbias[q];  // over the lanes with the same columns
    for (int mask = 1; mask < 4; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (t == 0 && j < h) mine[c * h + j + q] = sum;
  }
}

// ---- linear_backward in fp32

constexpr int COLUMNS = 2;    // neighbouring columns of z that a thread owns
constexpr int IN_FLIGHT = 8;  // rows of z that a thread has asked for before it needs the first

// As few_outputs_backward_kernel, in columns j and j + 1 of z. h is even. C is c, rounded up; outputs from c on are 0.
template <int C>
__global__ void __launch_bounds__(THREADS, 2) few_outputs_kernel(const float* da, int64_t ldda, const float* w,
                                                                 int64_t ldw, float* z, int64_t ldz, int64_t n,
                                                                 int64_t h, int c, int64_t rows, float* partials) {
  using Pair = Pack<float, COLUMNS>;
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
      w_j[q][k] = inside && k < c ? w[(j + q) * ldw + k] : 0.0f;
    }
  }

  const int64_t begin = blockIdx.y * rows, end = begin + rows < n ? begin + rows : n;
  for (int64_t first = begin; first < end; first += TILE) {
    const int count = static_cast<int>(end - first < TILE ? end - first : TILE);
    __syncthreads();  // before the tile that others may still read is overwritten
    for (int e = threadIdx.x; e < count * C; e += THREADS) {
      const int r = e / C, k = e % C;
      tile[r][k] = k < c ? da[(first + r) * ldda + k] : 0.0f;
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
          const float z_ij = old[u].x[q];
          float dz = 0;
#pragma unroll
          for (int k = 0; k < C; k++) {
            dz += da_i[k] * w_j[q][k];
            dw[q][k] += z_ij * da_i[k];
          }
          updated.x[q] = z_ij <= 0 ? 0 : dz;  // NaN <= 0 is false, as in torch
          dbias[q] += updated.x[q];
        }
        *reinterpret_cast<Pair*>(z + (first + r0 + u) * ldz + j) = updated;
      }
    }
  }

  if (!inside) return;
  float* mine = partials + blockIdx.y * (c + 1) * h + j;
#pragma unroll
  for (int q = 0; q < COLUMNS; q++) {
#pragma unroll
    for (int k = 0; k < C; k++)
      if (k < c) mine[k * h + q] = dw[q][k];
    mine[c * h + q] = dbias[q];
  }
}

// ---- both

// Adds up the partial sums of dw_jk and dbias_j, one thread each.
template <class T>
__global__ void __launch_bounds__(THREADS) few_outputs_sum_kernel(const float* partials, int64_t blocks, int64_t h,
                                                                  int c, T* dw, int64_t lddw, T* dbias) {
  const int64_t count = (c + 1) * h;
  for (int64_t e = global_thread(); e < count; e += global_threads()) {
    const int64_t k = e / h, j = e % h;
    float sum = 0;
    for (int64_t b = 0; b < blocks; b++) sum += partials[b * count + e];
    if (k == c)
      dbias[j] = narrow<T>(sum);
    else
      dw[j * lddw + k] = narrow<T>(sum);
  }
}

// ---- host

void few_outputs_linear(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& out, bool relu,
                        cudaStream_t stream) {
  const int64_t M = x.size(0), K = x.size(1), N = w.size(1);
  const int tiles = N <= 8 ? 1 : 2;
  const int64_t words = ceil_div(K, STEP) * STEP * tiles * 8 / 2;
  const Tensor packed = torch::stable::new_empty(x, {words}, ScalarType::Int);
  by_dtypes(bias, out, [&](auto t, auto o) {
    using T = decltype(t);
    using C = decltype(o);
    if constexpr (sizeof(T) == 2) {
      pack_weights_kernel<T><<<grid_of(words, THREADS), THREADS, 0, stream>>>(
          data<T>(w), leading_dimension(w), K, N, tiles, mutable_data<uint32_t>(packed), words);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
      const auto kernel = tiles == 1 ? few_outputs_linear_kernel<T, C, 1> : few_outputs_linear_kernel<T, C, 2>;
      kernel<<<static_cast<unsigned>(ceil_div(M, LINEAR_ROWS)), THREADS, 0, stream>>>(
          data<T>(x), leading_dimension(x), data<Vector>(packed), data<T>(bias), mutable_data<C>(out),
          leading_dimension(out), M, N, K, relu);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}

// Returns whether few_outputs_backward can do the backward.
bool has_few_outputs(const Tensor& da, const Tensor& z) {
  if (da.size(1) > FEW) return false;
  if (z.scalar_type() != ScalarType::Float) return has_vectors(z);
  return z.size(1) % COLUMNS == 0 && leading_dimension(z) % COLUMNS == 0 &&
         is_aligned(z.const_data_ptr(), COLUMNS * sizeof(float));
}

template <class T>
using BackwardKernel = void (*)(const T* da, int64_t ldda, const T* w, int64_t ldw, T* z, int64_t ldz, int64_t n,
                                int64_t h, int c, int64_t rows, float* partials);

template <class T>
void few_outputs_backward(const Tensor& da, const Tensor& w, const Tensor& z, const Tensor& dw, const Tensor& dbias,
                          cudaStream_t stream) {
  const int64_t n = z.size(0), h = z.size(1);
  const int c = static_cast<int>(da.size(1));
  BackwardKernel<T> kernel = nullptr;
  int64_t columns = 0, in_flight = 0;  // columns of a block, and rows that it should have at least
  if constexpr (sizeof(T) == 2) {
    kernel = few_outputs_backward_kernel<T>, columns = WARPS * STRIP, in_flight = 16;
  } else {
    columns = THREADS * COLUMNS, in_flight = IN_FLIGHT;
    kernel = c <= 4    ? few_outputs_kernel<4>
             : c <= 8  ? few_outputs_kernel<8>
             : c <= 12 ? few_outputs_kernel<12>
                       : few_outputs_kernel<16>;
  }
  // The grid has as many blocks as the GPU runs at a time: each has its own partial sums, so more would move more
  // bytes.
  int per_processor = 0, processors = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, THREADS, 0));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, z.get_device_index()));
  const int64_t strips = ceil_div(h, columns);
  const int64_t at_once = std::max<int64_t>(1, int64_t{per_processor} * processors / strips);
  const int64_t rows = ceil_div(n, std::min({at_once, ceil_div(n, in_flight), MAX_ROW_BLOCKS}));
  const int64_t blocks = ceil_div(n, rows);
  const Tensor partials = torch::stable::new_empty(z, {blocks, c + 1, h}, ScalarType::Float);
  const dim3 grid(static_cast<unsigned>(strips), static_cast<unsigned>(blocks));
  kernel<<<grid, THREADS, 0, stream>>>(data<T>(da), leading_dimension(da), data<T>(w), leading_dimension(w),
                                       mutable_data<T>(z), leading_dimension(z), n, h, c, rows,
                                       mutable_data<float>(partials));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  few_outputs_sum_kernel<T><<<grid_of((c + 1) * h, THREADS), THREADS, 0, stream>>>(
      data<float>(partials), blocks, h, c, mutable_data<T>(dw), leading_dimension(dw), mutable_data<T>(dbias));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
