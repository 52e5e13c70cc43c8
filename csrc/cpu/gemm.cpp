// gemm on the CPU, in the blocked scheme of BLIS (Van Zee and van de Geijn, 2015).
//
// C is cut into blocks and each block belongs to one thread, so threads never wait for each other and every element of C
// is summed in the same order whatever their number: the result does not depend on the thread count.
//
//   block of C, mb x nb      fp32 sums, kept until all of K is in; then scaled, rounded once and stored
//     step of KB along K     pack mb x KB of A and KB x nb of B, widened to fp32, into consecutive panels
//       tile, MR x NR        the micro-kernel: as many accumulators as the CPU has vector registers
//
// 16-bit values widen to fp32 exactly, and so do their products (bf16's within fp32's range), so one fp32 kernel serves
// every storage.

#include "../gemm.hpp"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <new>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16, MR = 14, NV = 2;  // 28 accumulators, 2 of B, 1 of A: 31 of 32 registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int VL = 8, MR = 6, NV = 2;  // 12 + 2 + 1 of 16
#elif defined(__ARM_NEON)
constexpr int VL = 4, MR = 8, NV = 3;  // 24 + 3 + 1 of 32
#else
constexpr int VL = 4, MR = 4, NV = 2;
#endif
constexpr int NR = NV * VL;
typedef float vec __attribute__((vector_size(VL * sizeof(float)), aligned(sizeof(float)), may_alias));

constexpr int64_t KB = 256;   // a panel of B, KB x NR, stays in L1 (32 KB with AVX-512)
constexpr int64_t MB = 512;   // the block of A, MB x KB, stays in L2 (512 KB)
constexpr int64_t NB = 2048;  // the block of B, KB x NB, and the sums, MB x NB, come from L3 (2 + 4 MB)

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A stored matrix seen as rows x K, whatever its layout: element (r, k) is data[r * row + k * col].
template <class T>
struct View {
  const T* data;
  int64_t row, col;
};

// Packs rows [r0, r0 + rows) and columns [k0, k0 + k) into panels of R rows, zero padded:
// panel p holds element (p R + r, l) at dst[(p k + l) R + r].
template <int R, class T>
void pack(float* dst, View<T> x, int64_t r0, int64_t rows, int64_t k0, int64_t k) {
  for (int64_t p = 0; p < rows; p += R) {
    const T* src = x.data + (r0 + p) * x.row + k0 * x.col;
    const int64_t n = std::min<int64_t>(R, rows - p);
    for (int64_t l = 0; l < k; l++, dst += R) {
      if (n == R)
        for (int r = 0; r < R; r++) dst[r] = static_cast<float>(src[r * x.row + l * x.col]);
      else
        for (int r = 0; r < R; r++) dst[r] = r < n ? static_cast<float>(src[r * x.row + l * x.col]) : 0.0f;
    }
  }
}

// sums[MR][NR] += A panel (k x MR) times B panel (k x NR): k rank-1 updates of a tile that lives in registers.
// The unroll pragmas make `acc` registers; without them it goes through the stack.
void micro_kernel(int64_t k, const float* a, const float* b, float* sums) {
  vec acc[MR][NV];
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) acc[i][j] = *reinterpret_cast<const vec*>(sums + i * NR + j * VL);
  for (int64_t l = 0; l < k; l++, a += MR, b += NR) {
    vec row[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) row[j] = *reinterpret_cast<const vec*>(b + j * VL);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) acc[i][j] += a[i] * row[j];
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) *reinterpret_cast<vec*>(sums + i * NR + j * VL) = acc[i][j];
}

// C[i, j] = alpha sum + beta C[i, j] for the m x n corner of a tile; C is not read where beta = 0.
template <class C>
void store_tile(const float* sums, C* c, int64_t ldc, int64_t m, int64_t n, float alpha, float beta) {
  for (int64_t i = 0; i < m; i++, c += ldc, sums += NR) {
    if (beta == 0)
      for (int64_t j = 0; j < n; j++) c[j] = static_cast<C>(alpha * sums[j]);
    else
      for (int64_t j = 0; j < n; j++) c[j] = static_cast<C>(alpha * sums[j] + beta * static_cast<float>(c[j]));
  }
}

template <class T, class C>
void gemm_blocks(const GemmShape& s, View<T> a, View<T> b, C* c, float alpha, float beta) {
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  // Near-equal blocks, at most MB x NB, and at least as many as threads where the matrix has that many tiles.
  int64_t blocks_m = ceil_div(s.M, MB), blocks_n = ceil_div(s.N, NB);
  const int64_t tiles_m = ceil_div(s.M, MR), tiles_n = ceil_div(s.N, NR);
  blocks_n = std::max(blocks_n, std::min(tiles_n, ceil_div(threads, blocks_m)));
  blocks_m = std::max(blocks_m, std::min(tiles_m, ceil_div(threads, blocks_n)));
  const int64_t mb = ceil_div(tiles_m, blocks_m) * MR, nb = ceil_div(tiles_n, blocks_n) * NR;
  blocks_m = ceil_div(s.M, mb), blocks_n = ceil_div(s.N, nb);

  bool out_of_memory = false;  // an exception must not leave the parallel region
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < blocks_m * blocks_n; block++) {
    const int64_t i0 = block / blocks_n * mb, j0 = block % blocks_n * nb;
    const int64_t m = std::min(mb, s.M - i0), n = std::min(nb, s.N - j0);
    static thread_local std::vector<float> packed_a, packed_b, sums;
    try {
      packed_a.resize(mb * KB);
      packed_b.resize(nb * KB);
      sums.assign(mb * nb, 0.0f);
    } catch (const std::bad_alloc&) {
#pragma omp atomic write
      out_of_memory = true;
      continue;
    }
    for (int64_t k0 = 0; k0 < s.K; k0 += KB) {
      const int64_t k = std::min(KB, s.K - k0);
      pack<MR>(packed_a.data(), a, i0, m, k0, k);
      pack<NR>(packed_b.data(), b, j0, n, k0, k);
      for (int64_t j = 0; j < n; j += NR)
        for (int64_t i = 0; i < m; i += MR)
          micro_kernel(k, &packed_a[i * k], &packed_b[j * k], &sums[j * mb + i * NR]);
    }
    for (int64_t j = 0; j < n; j += NR)
      for (int64_t i = 0; i < m; i += MR)
        store_tile(&sums[j * mb + i * NR], c + (i0 + i) * s.ldc + j0 + j, s.ldc, std::min<int64_t>(MR, m - i),
                   std::min<int64_t>(NR, n - j), alpha, beta);
  }
  STD_TORCH_CHECK(!out_of_memory, "gemm: no memory for the packed blocks");
}

template <class T>
void gemm_of(const GemmShape& s, const Tensor& a, const Tensor& b, Tensor& out, bool trans_a, bool trans_b, float alpha,
             float beta) {
  const View<T> rows_of_a{static_cast<const T*>(a.const_data_ptr()), trans_a ? 1 : s.lda, trans_a ? s.lda : 1};
  const View<T> columns_of_b{static_cast<const T*>(b.const_data_ptr()), trans_b ? s.ldb : 1, trans_b ? 1 : s.ldb};
  if (out.scalar_type() == ScalarType::Float)
    gemm_blocks(s, rows_of_a, columns_of_b, static_cast<float*>(out.mutable_data_ptr()), alpha, beta);
  else
    gemm_blocks(s, rows_of_a, columns_of_b, static_cast<T*>(out.mutable_data_ptr()), alpha, beta);
}

void gemm(Tensor a, Tensor b, Tensor out, bool trans_a, bool trans_b, double alpha, double beta) {
  const GemmShape s = check_gemm(a, b, out, trans_a, trans_b);
  const float alpha_fp32 = static_cast<float>(alpha), beta_fp32 = static_cast<float>(beta);
  switch (a.scalar_type()) {
    case ScalarType::Half: return gemm_of<c10::Half>(s, a, b, out, trans_a, trans_b, alpha_fp32, beta_fp32);
    case ScalarType::BFloat16: return gemm_of<c10::BFloat16>(s, a, b, out, trans_a, trans_b, alpha_fp32, beta_fp32);
    default: return gemm_of<float>(s, a, b, out, trans_a, trans_b, alpha_fp32, beta_fp32);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(mpcompare, CPU, m) { m.impl("gemm", TORCH_BOX(&gemm)); }
