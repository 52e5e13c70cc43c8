// C = A B^T on the CPU, in the blocked scheme of BLIS (Van Zee and van de Geijn, 2015).
//
//   pack.hpp        copies blocks of both operands into panels that are read front to back
//   micro_kernel    a tile of C in registers: one operand broadcast number by number, the other read as vectors
//   multiply        the loops: which block, which thread, which tile
//   Scale           an epilogue, what happens to a finished tile: here it is scaled and stored; others are in layers.cpp
//
// C is cut into blocks and each block belongs to one thread, so threads never wait for each other, and every element of C
// is summed in the same order whatever their number.
#pragma once
#include "../fused.hpp"
#include "dispatch.hpp"
#include "pack.hpp"

#include <omp.h>
#include <torch/csrc/stable/ops.h>

namespace {

// A tile is MR x NR: MR rows of the thin operand, NR = NV vectors of the wide one. MR * NV sums, NV vectors of the wide
// operand and one broadcast fill the registers: 28 + 2 + 1 of 32 (AVX-512), 12 + 2 + 1 of 16 (AVX2), 24 + 3 + 1 of 32.
#if defined(__AVX512F__)
constexpr int MR = 14, NV = 2;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int MR = 6, NV = 2;
#elif defined(__ARM_NEON)
constexpr int MR = 8, NV = 3;
#else
constexpr int MR = 4, NV = 2;
#endif
constexpr int NR = NV * VL, TILE = MR * NR;

// ---- micro-kernel: sums[m][NR] (+)= thin panel (lanes x MR, m of them used) times wide panel (lanes x NR)

// The unroll pragmas make `acc` registers; without them it goes through the stack.
template <int PK, int m>
void micro_kernel(int64_t lanes, const uint32_t* thin, const uint32_t* wide, float* sums, bool add) {
  vec acc[m][NV];
#pragma GCC unroll 16
  for (int i = 0; i < m; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[i][j] = add ? load(sums + i * NR + j * VL) : vec{};
  for (; lanes > 0; lanes--, thin += MR, wide += NR) {
    uvec w[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) w[j] = read<uvec>(wide + j * VL);
#pragma GCC unroll 16
    for (int i = 0; i < m; i++) {
      const uvec t = uvec{} + thin[i];
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++)
        if constexpr (PK == 1)
          acc[i][j] += floats(t) * floats(w[j]);
        else
          acc[i][j] = dot2(acc[i][j], t, w[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < m; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(sums + i * NR + j * VL, acc[i][j]);
}

using MicroKernel = void (*)(int64_t, const uint32_t*, const uint32_t*, float*, bool);
template <int PK, int... m>
MicroKernel micro_kernel_for(int64_t rows, std::integer_sequence<int, m...>) {
  static constexpr MicroKernel table[] = {micro_kernel<PK, m + 1>...};
  return table[rows - 1];
}

// ---- loops

// How large a block of C a thread owns, how much of K is packed at a time, and how many thin rows are packed at a time.
// With AVX-512: a wide panel of 256 lanes is 32 KB (L1), 12 thin panels 168 KB (L2), the wide block and the sums of a
// block 1 + 4 MB (L3).
struct Blocking {
  int64_t thin, wide, lanes, thin_at_a_time;
};

inline Blocking blocking(int64_t lanes, bool skinny) {
  if (skinny) return {MR, 1024, 64, MR};  // the wide operand is read once: along memory, in long runs
  return {73 * MR, lanes <= 64 ? 8192 : 1024, 256, 12 * MR};
}

// Two rows of A times the n rows of B, packed as vectors along K: tile[2][ld], each a dot product.
template <class T, int n>
void two_rows(int64_t K, const T* first, const T* second, const uint32_t* b, float* tile, int64_t ld) {
  constexpr int PK = PER_LANE<T>;
  vec acc[2][n] = {};
  for (int64_t k = 0; k < K; k += VL * PK) {
    const uvec x = lanes_of_row(first + k, K - k), y = lanes_of_row(second + k, K - k);
#pragma GCC unroll 16
    for (int j = 0; j < n; j++, b += VL) {
      const uvec w = read<uvec>(b);
      if constexpr (PK == 1) {
        acc[0][j] += floats(x) * floats(w);
        acc[1][j] += floats(y) * floats(w);
      } else {
        acc[0][j] = dot2(acc[0][j], x, w);
        acc[1][j] = dot2(acc[1][j], y, w);
      }
    }
  }
  for (int r = 0; r < 2; r++)
    for (int j = 0; j < n; j++) tile[r * ld + j] = sum(acc[r][j]);
}

template <class T>
using TwoRows = void (*)(int64_t, const T*, const T*, const uint32_t*, float*, int64_t);
template <class T, int... n>
TwoRows<T> two_rows_for(int64_t columns, std::integer_sequence<int, n...>) {
  static constexpr TwoRows<T> table[] = {two_rows<T, n + 1>...};
  return table[columns - 1];
}

// C = A B^T where C has at most MR columns and the rows of A are contiguous: a dot product along K for each element. A is
// read once, front to back, two rows at a time; B comes from L2.
template <class T, class Epilogue>
void multiply_by_rows(int64_t M, int64_t N, int64_t K, View<T> a, View<T> b, const Epilogue& epilogue) {
  constexpr int PK = PER_LANE<T>, LD = (MR + VL - 1) / VL * VL;
  const int64_t groups = ceil_div(K, VL * PK);
  uint32_t* packed = mpcompare::workspace().shared.at_least(groups * N * VL);
  STD_TORCH_CHECK(packed, "gemm: no memory for the packed operand");
  std::fill(packed, packed + groups * N * VL, 0u);
  for (int64_t k = 0; k < K; k++)  // element (n, k) at vector (k / (VL PK), n), number k % (VL PK) in it
    for (int64_t n = 0; n < N; n++) {
      const T value = b.data[n * b.row + k * b.col];
      uint32_t* vector = packed + (k / (VL * PK) * N + n) * VL;
      if constexpr (PK == 1)
        reinterpret_cast<float*>(vector)[k % VL] = static_cast<float>(value);
      else
        reinterpret_cast<T*>(vector)[k % (VL * PK)] = value;
    }

  const TwoRows<T> kernel = two_rows_for<T>(N, std::make_integer_sequence<int, MR>{});
  const int threads = static_cast<int>(torch::stable::get_num_threads());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < M; i += 2) {
    const int64_t rows = std::min<int64_t>(2, M - i);
    const T* first = a.data + i * a.row;
    float tile[2 * LD];
    kernel(K, first, first + (rows - 1) * a.row, packed, tile, LD);
    epilogue(i, 0, rows, N, tile, LD);
  }
}

// Calls epilogue(i, j, m, n, tile, ld) once for every tile of C = A B^T, A M x K and B N x K as views: tile[r * ld + c]
// is the sum of C[i + r, j + c], r < m, c < n, in fp32. Rows of the tile may be read up to the next multiple of VL.
template <class T, class Epilogue>
void multiply(int64_t M, int64_t N, int64_t K, View<T> a, View<T> b, const Epilogue& epilogue) {
  constexpr int PK = PER_LANE<T>;
  const bool skinny = N <= MR;
  if (skinny && a.col == 1) return multiply_by_rows(M, N, K, a, b, epilogue);
  // Skinny, and A's columns are contiguous: A becomes the wide operand, so that no part of a vector is wasted.
  const View<T> thin = skinny ? b : a, wide = skinny ? a : b;
  const int64_t rows = skinny ? N : M, columns = skinny ? M : N;
  const int64_t lanes = lanes_of(K, PK);
  const Blocking size = blocking(lanes, skinny);

  // Near-equal blocks, a multiple of the number of threads where C has that many tiles.
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const int64_t tiles_t = ceil_div(rows, MR), tiles_w = ceil_div(columns, NR);
  int64_t blocks_w = ceil_div(columns, size.wide), blocks_t = ceil_div(rows, size.thin);
  blocks_w = std::max(blocks_w, std::min(tiles_w, ceil_div(threads, blocks_t)));
  blocks_t = std::max(blocks_t, std::min(tiles_t, ceil_div(threads, blocks_w)));
  while (blocks_t * blocks_w % threads != 0 && blocks_t < tiles_t) blocks_t++;  // as many for every thread
  const int64_t block_t = ceil_div(tiles_t, blocks_t) * MR, block_w = ceil_div(tiles_w, blocks_w) * NR;
  blocks_t = ceil_div(rows, block_t), blocks_w = ceil_div(columns, block_w);
  const int64_t step = std::min(lanes, size.lanes), stride_t = panel_stride<MR>(step), stride_w = panel_stride<NR>(step);
  const bool in_steps = step < lanes;  // then the sums of a whole block wait for the last step

  bool out_of_memory = false;  // an exception must not leave the parallel region
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < blocks_t * blocks_w; block++) {
    mpcompare::Workspace& memory = mpcompare::workspace();
    const int64_t t0 = block / blocks_w * block_t, w0 = block % blocks_w * block_w;
    const int64_t nt = std::min(block_t, rows - t0), nw = std::min(block_w, columns - w0);
    uint32_t* packed_t = memory.thin.at_least(ceil_div(size.thin_at_a_time, MR) * stride_t + VL);
    uint32_t* packed_w = memory.wide.at_least(ceil_div(block_w, NR) * stride_w + VL);
    float* sums = reinterpret_cast<float*>(
        memory.sums.at_least(in_steps ? ceil_div(block_t, MR) * ceil_div(block_w, NR) * TILE : TILE));
    if (!packed_t || !packed_w || !sums) {
#pragma omp atomic write
      out_of_memory = true;
      continue;
    }

    for (int64_t l0 = 0; l0 < lanes; l0 += step) {
      const int64_t k0 = l0 * PK, k = std::min(step * PK, K - k0), now = lanes_of(k, PK);
      pack<NR>(packed_w, wide, w0, nw, k0, k);
      for (int64_t s = 0; s < nt; s += size.thin_at_a_time) {
        const int64_t ns = std::min(size.thin_at_a_time, nt - s);
        pack<MR>(packed_t, thin, t0 + s, ns, k0, k);
        const int64_t panels_t = ceil_div(ns, MR), panels_w = ceil_div(nw, NR);
        for (int64_t tile = 0; tile < panels_t * panels_w; tile++) {
          // A wide panel stays in L1 while the thin ones pass; with little work a tile, rather write C along its rows.
          const bool along_rows = lanes <= 64;
          const int64_t p = along_rows ? tile / panels_w : tile % panels_t;
          const int64_t q = along_rows ? tile % panels_w : tile / panels_t;
          const int64_t i = t0 + s + p * MR, j = w0 + q * NR;
          const int64_t m = std::min<int64_t>(MR, t0 + nt - i), n = std::min<int64_t>(NR, w0 + nw - j);
          float* sum = in_steps ? sums + ((s / MR + p) * panels_w + q) * TILE : sums;
          const MicroKernel kernel = micro_kernel_for<PK>(m, std::make_integer_sequence<int, MR>{});
          kernel(now, packed_t + p * panel_stride<MR>(now), packed_w + q * panel_stride<NR>(now), sum, l0 > 0);
          if (l0 + step < lanes) continue;
          if (skinny) {
            constexpr int LD = (MR + VL - 1) / VL * VL;
            float turned[NR * LD];
            for (int64_t c = 0; c < n; c++)
              for (int64_t r = 0; r < m; r++) turned[c * LD + r] = sum[r * NR + c];
            epilogue(j, i, n, m, turned, LD);
          } else {
            epilogue(i, j, m, n, sum, NR);
          }
        }
      }
    }
  }
  STD_TORCH_CHECK(!out_of_memory, "gemm: no memory for the packed blocks");
}

// ---- operands and epilogue

// A stored matrix as rows x K of the product: its rows, or its columns.
template <class T>
View<T> rows_of(const Tensor& x, int64_t ld) {
  return {data<T>(x), ld, 1};
}
template <class T>
View<T> columns_of(const Tensor& x, int64_t ld) {
  return {data<T>(x), 1, ld};
}

// C = alpha sum + beta C; C is not read where beta = 0.
template <class C>
struct Scale {
  C* c;
  int64_t ldc;
  float alpha, beta;
  void operator()(int64_t i, int64_t j, int64_t m, int64_t n, const float* tile, int64_t ld) const {
    for (int64_t r = 0; r < m; r++)
      for (int64_t q = 0; q < n; q += VL) {
        C* p = c + (i + r) * ldc + j + q;
        vec v = alpha * load(tile + r * ld + q);
        if (beta != 0) v += beta * load(p, n - q);
        store(p, v, n - q);
      }
  }
};

}  // namespace
