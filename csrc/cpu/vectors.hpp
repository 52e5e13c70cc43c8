// The micro-kernel on vector registers: one operand is broadcast number by number, the other is read as vectors.
#pragma once
#include "blocking.hpp"
#include "pack.hpp"

namespace {

// A tile is MR x NR: MR rows of the thin operand, and NR rows of the wide one, which are NV vectors. MR * NV sums, NV
// vectors of the wide operand and one broadcast fill the registers: 28 + 2 + 1 of 32 (AVX-512), 12 + 2 + 1 of 16
// (AVX2), 24 + 3 + 1 of 32 (NEON).
#if defined(__AVX512F__)
constexpr int MR = 14, NV = 2;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int MR = 6, NV = 2;
#elif defined(__ARM_NEON)
constexpr int MR = 8, NV = 3;
#else
constexpr int MR = 4, NV = 2;
#endif
constexpr int NR = NV * VL;

// sums[m][NR] (+)= thin panel (lanes x MR, m of them used) times wide panel (lanes x NR).
// The unroll pragmas keep `acc` in registers; without them it goes through the stack.
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

// The interface that multiply.hpp expects of a micro-kernel.
template <class T>
struct Vectors {
  static constexpr int MR = ::MR, NR = ::NR;
  struct Session {};  // state that a thread needs while it multiplies: none

  // With AVX-512 a wide panel of 256 lanes is 32 KB (L1), 12 thin panels are 168 KB (L2), the wide block and the sums
  // of a block 1 + 4 MB (L3). If a tile is little work, C is written along its rows instead.
  static Blocking blocking(int64_t lanes, bool skinny) {
    if (skinny) return {MR, 1024, 64, MR, 1};  // the wide operand is read once: along memory, in long runs
    const bool along_rows = lanes <= 64;
    return {73 * MR, along_rows ? 8192 : 1024, 256, 12 * MR, along_rows ? 8192 : 1};
  }

  static int64_t thin_stride(int64_t lanes) { return panel_stride<MR>(lanes); }
  static int64_t wide_stride(int64_t lanes) { return panel_stride<NR>(lanes); }
  static void pack_thin(uint32_t* dst, View<T> x, int64_t r0, int64_t rows, int64_t k0, int64_t k) {
    pack<MR>(dst, thin_stride(lanes_of(k, PER_LANE<T>)), x, r0, rows, k0, k);
  }
  static void pack_wide(uint32_t* dst, View<T> x, int64_t r0, int64_t rows, int64_t k0, int64_t k) {
    pack<NR>(dst, wide_stride(lanes_of(k, PER_LANE<T>)), x, r0, rows, k0, k);
  }
  // sums[MR][NR] (+)= m rows of a thin panel times a wide panel
  static void multiply(int64_t m, int64_t lanes, const uint32_t* thin, const uint32_t* wide, float* sums, bool add) {
    micro_kernel_for<PER_LANE<T>>(m, std::make_integer_sequence<int, MR>{})(lanes, thin, wide, sums, add);
  }
};

}  // namespace
