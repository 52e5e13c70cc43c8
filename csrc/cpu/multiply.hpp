// C = A B^T on the CPU, in the blocked scheme of BLIS (Van Zee and van de Geijn, 2015).
//
//   pack.hpp        copies blocks of both operands into panels that are read front to back
//   vectors.hpp     the micro-kernel: a tile of C in vector registers
//   amx.hpp         the micro-kernel for bf16 where the CPU has AMX: a tile of C in tile registers
//   multiply        the loops: which block, which thread, which tile
//   Scale           an epilogue, which takes a finished tile: it scales and stores the tile; others are in layers.cpp
//
// C is cut into blocks and each block belongs to one thread, so threads never wait for each other, and every element of C
// is summed in the same order for any number of threads.
#pragma once
#include "../fused.hpp"
#include "amx.hpp"
#include "dispatch.hpp"
#include "vectors.hpp"

#include <omp.h>
#include <torch/csrc/stable/ops.h>

namespace {

// ---- loops

// tile[2][ld] = two rows of A times the n rows of B, which are packed as vectors along K: a dot product each.
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

// Computes C = A B^T, a dot product along K for each element, if C has at most MR columns and the rows of A are
// contiguous. A is read once, front to back, two rows at a time; B comes from L2.
template <class T, class Epilogue>
void multiply_by_rows(int64_t M, int64_t N, int64_t K, View<T> a, View<T> b, const Epilogue& epilogue) {
  constexpr int PK = PER_LANE<T>, LD = (MR + VL - 1) / VL * VL;
  const int64_t groups = ceil_div(K, VL * PK);
  uint32_t* packed = mpcompare::workspace().shared.at_least(groups * N * VL);
  STD_TORCH_CHECK(packed, "gemm: no memory for the packed operand");
  std::fill(packed, packed + groups * N * VL, 0u);
  for (int64_t k = 0; k < K; k++)  // element (n, k) is number k % (VL PK) of vector (k / (VL PK), n)
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

// Computes the tiles of C = A B^T with one micro-kernel. If `swapped`, thin is B and wide is A, and tiles are
// transposed.
template <class Kernel, class T, class Epilogue>
void multiply_blocks(int64_t rows, int64_t columns, int64_t K, View<T> thin, View<T> wide, Blocking size, bool swapped,
                     const Epilogue& epilogue) {
  constexpr int PK = PER_LANE<T>, MR = Kernel::MR, NR = Kernel::NR, TILE = MR * NR;
  const int64_t lanes = lanes_of(K, PK);

  // Blocks are nearly equal, and their number is a multiple of the number of threads if C has that many tiles.
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const int64_t tiles_t = ceil_div(rows, MR), tiles_w = ceil_div(columns, NR);
  int64_t blocks_w = ceil_div(columns, size.wide), blocks_t = ceil_div(rows, size.thin);
  blocks_w = std::max(blocks_w, std::min(tiles_w, ceil_div(threads, blocks_t)));
  blocks_t = std::max(blocks_t, std::min(tiles_t, ceil_div(threads, blocks_w)));
  while (blocks_t * blocks_w % threads != 0 && blocks_t < tiles_t) blocks_t++;  // equally many for every thread
  const int64_t block_t = ceil_div(tiles_t, blocks_t) * MR, block_w = ceil_div(tiles_w, blocks_w) * NR;
  blocks_t = ceil_div(rows, block_t), blocks_w = ceil_div(columns, block_w);
  const int64_t step = std::min(lanes, size.lanes);
  const bool in_steps = step < lanes;  // the sums of a whole block then wait for the last step

  bool out_of_memory = false;  // an exception must not leave the parallel region
#pragma omp parallel num_threads(threads)
  {
    [[maybe_unused]] const typename Kernel::Session session;
    mpcompare::Workspace& memory = mpcompare::workspace();
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks_t * blocks_w; block++) {
      const int64_t t0 = block / blocks_w * block_t, w0 = block % blocks_w * block_w;
      const int64_t nt = std::min(block_t, rows - t0), nw = std::min(block_w, columns - w0);
      uint32_t* packed_t = memory.thin.at_least(ceil_div(size.thin_at_a_time, MR) * Kernel::thin_stride(step) + VL);
      uint32_t* packed_w = memory.wide.at_least(ceil_div(block_w, NR) * Kernel::wide_stride(step) + VL);
      float* sums = reinterpret_cast<float*>(
          memory.sums.at_least(in_steps ? ceil_div(block_t, MR) * ceil_div(block_w, NR) * TILE : TILE));
      if (!packed_t || !packed_w || !sums) {
#pragma omp atomic write
        out_of_memory = true;
        continue;
      }

      for (int64_t l0 = 0; l0 < lanes; l0 += step) {
        const int64_t k0 = l0 * PK, k = std::min(step * PK, K - k0), now = lanes_of(k, PK);
        const bool last = l0 + step >= lanes;
        Kernel::pack_wide(packed_w, wide, w0, nw, k0, k);
        for (int64_t s = 0; s < nt; s += size.thin_at_a_time) {
          const int64_t ns = std::min(size.thin_at_a_time, nt - s);
          Kernel::pack_thin(packed_t, thin, t0 + s, ns, k0, k);
          const int64_t panels_t = ceil_div(ns, MR), panels_w = ceil_div(nw, NR);
          for (int64_t first = 0; first < panels_w; first += size.wide_panels) {
            const int64_t group = std::min(size.wide_panels, panels_w - first);
            for (int64_t tile = 0; tile < panels_t * group; tile++) {
              const int64_t p = tile / group, q = first + tile % group;
              const int64_t i = t0 + s + p * MR, j = w0 + q * NR;
              const int64_t m = std::min<int64_t>(MR, t0 + nt - i), n = std::min<int64_t>(NR, w0 + nw - j);
              float* sum = sums + (in_steps ? (s / MR + p) * panels_w + q : 0) * TILE;
              const uint32_t *panel_t = packed_t + p * Kernel::thin_stride(now),
                             *panel_w = packed_w + q * Kernel::wide_stride(now);
              if (last && !swapped) epilogue.fetch(i, j, m, n);
              Kernel::multiply(m, now, panel_t, panel_w, sum, l0 > 0);
              if (!last) continue;
              if (swapped) {
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
    }
  }
  STD_TORCH_CHECK(!out_of_memory, "gemm: no memory for the packed blocks");
}

#ifdef HAS_AMX
// multiply_by_rows on tile registers, 32 rows of A at a time, which are read where they lie.
template <class Epilogue>
void multiply_by_tile_rows(int64_t M, int64_t N, int64_t K, View<bf16> a, View<bf16> b, const Epilogue& epilogue) {
  const int64_t lanes = Tiles::padded(K), stride = panel_stride<16>(lanes);
  uint32_t* packed = mpcompare::workspace().shared.at_least(stride);
  STD_TORCH_CHECK(packed, "gemm: no memory for the packed operand");
  pack<16>(packed, stride, b, 0, N, 0, K);
  std::fill(packed + lanes_of(K, 2) * 16, packed + lanes * 16, 0u);

  const int threads = static_cast<int>(torch::stable::get_num_threads());
#pragma omp parallel num_threads(threads)
  {
    const Tiles::Session session;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < M; i += 32) {
      const int64_t rows = std::min<int64_t>(32, M - i);
      alignas(64) float tile[32 * 16];
      Tiles::multiply_rows(rows, K, a.data + i * a.row, a.row, packed, tile);
      epilogue(i, 0, rows, N, tile, 16);
    }
  }
}
#endif

// Calls epilogue(i, j, m, n, tile, ld) once for every tile of C = A B^T, with views A M x K and B N x K. The fp32 sum
// of C[i + r, j + c] is tile[r * ld + c], r < m, c < n. Rows of the tile may be read up to the next multiple of VL.
// epilogue.fetch(i, j, m, n) is called before a tile is summed, and may prefetch what the epilogue is going to read.
template <class T, class Epilogue>
void multiply(int64_t M, int64_t N, int64_t K, View<T> a, View<T> b, const Epilogue& epilogue) {
  const int64_t lanes = lanes_of(K, PER_LANE<T>);
  const bool skinny = N <= MR;
#ifdef HAS_AMX
  if constexpr (std::is_same_v<T, bf16>)
    if (amx_allowed()) {
      if (N <= 16 && a.col == 1) return multiply_by_tile_rows(M, N, K, a, b, epilogue);
      if (!skinny) return multiply_blocks<Tiles>(M, N, K, a, b, Tiles::blocking(lanes), false, epilogue);
    }
#endif
  if (skinny && a.col == 1) return multiply_by_rows(M, N, K, a, b, epilogue);
  // C is skinny and the columns of A are contiguous: A becomes the wide operand, so that no part of a vector is wasted.
  if (skinny) return multiply_blocks<Vectors<T>>(N, M, K, b, a, Vectors<T>::blocking(lanes, true), true, epilogue);
  multiply_blocks<Vectors<T>>(M, N, K, a, b, Vectors<T>::blocking(lanes, false), false, epilogue);
}

// ---- operands and epilogue

// Views of a stored matrix as rows x K of the product: by its rows, or by its columns.
template <class T>
View<T> rows_of(const Tensor& x, int64_t ld) {
  return {data<T>(x), ld, 1};
}
template <class T>
View<T> columns_of(const Tensor& x, int64_t ld) {
  return {data<T>(x), 1, ld};
}

// The number of rows of C that are read before any of them is written. If rows are a multiple of 4 KB apart, the CPU
// mistakes a load for one from the row that was just stored, and waits. L1 holds this many lines at such a distance.
constexpr int64_t ROWS = 8;

// Prefetches rows of C while the sums of their tile are computed: into L2, because in L1 they may all share one set.
template <class C>
inline void fetch_rows(const C* c, int64_t ldc, int64_t m, int64_t n) {
  for (int64_t r = 0; r < m; r++)
    for (int64_t q = 0; q < n; q += 64 / sizeof(C)) __builtin_prefetch(c + r * ldc + q, 0, 2);
}

// The epilogue C = alpha sum + beta C; C is not read if beta = 0.
template <class C>
struct Scale {
  C* c;
  int64_t ldc;
  float alpha, beta;
  void fetch(int64_t i, int64_t j, int64_t m, int64_t n) const {
    if (beta != 0) fetch_rows(c + i * ldc + j, ldc, m, n);
  }
  void operator()(int64_t i, int64_t j, int64_t m, int64_t n, const float* tile, int64_t ld) const {
    C* first = c + i * ldc + j;
    for (int64_t r0 = 0; r0 < m; r0 += ROWS)
      for (int64_t q = 0; q < n; q += VL) {
        const int64_t rows = std::min(ROWS, m - r0);
        vec old[ROWS];
        if (beta != 0)
          for (int64_t r = 0; r < rows; r++) old[r] = load(first + (r0 + r) * ldc + q, n - q);
        for (int64_t r = 0; r < rows; r++) {
          vec v = alpha * load(tile + (r0 + r) * ld + q);
          if (beta != 0) v += beta * old[r];
          store(first + (r0 + r) * ldc + q, v, n - q);
        }
      }
  }
};

}  // namespace
