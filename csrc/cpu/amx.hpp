// The micro-kernel on AMX tiles, for bf16 on Intel CPUs since Sapphire Rapids.
//
// A tile register holds 16 rows of 64 bytes. TDPBF16PS adds to C, 16 x 16 fp32, the product of A, 16 rows x 32 bf16, and
// B, 16 lanes of two bf16 neighbours along K x 16 columns. C is 2 x 2 tiles here, so each tile of A and B that is
// loaded is multiplied twice. Subnormal inputs count as 0 and subnormal results are flushed to 0, as by vdpbf16ps.
//
// The thin panel is row-major in steps of DEPTH lanes, 32 rows x 64 bytes. The wide panel has the layout of pack.hpp;
// its lanes are the rows of B's tiles. Both panels are filled up with zeros to a whole step.
#pragma once
#include "blocking.hpp"
#include "pack.hpp"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1

namespace {

// Returns whether this process may use tiles. Linux wants to be asked, since tiles enlarge the state that a context
// switch saves. If Linux refuses, or MPCOMPARE_AMX=0 is set, bf16 is multiplied on vector registers.
inline bool amx_allowed() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = [] {
    const char* wish = std::getenv("MPCOMPARE_AMX");
    return !(wish && std::strcmp(wish, "0") == 0) && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }();
  return allowed;
}

struct Tiles {
  static constexpr int MR = 32, NR = 32;
  static constexpr int64_t DEPTH = 16;  // lanes that one TDPBF16PS multiplies

  // A thread's configuration while it multiplies: eight tiles of 16 rows x 64 bytes. torch configures its own tiles.
  struct Session {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_in_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Config) == 64);
    Session() {
      static constexpr Config config;
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
  };

  // A panel of 512 lanes is 64 KB. 8 thin and 8 wide panels take 1 MB, and their sums 256 KB, of the 2 MB of L2.
  static Blocking blocking(int64_t lanes) {
    const int64_t steps = ceil_div(lanes, 512), step = ceil_div(ceil_div(lanes, steps), DEPTH) * DEPTH;
    if (steps == 1) return {8192, 2048, step, 8 * MR, 8};  // larger blocks, packed less often, since no sums wait
    return {1024, 1024, step, 8 * MR, 8};
  }

  static int64_t padded(int64_t k) { return ceil_div(k, 2 * DEPTH) * DEPTH; }
  static int64_t thin_stride(int64_t lanes) { return panel_stride<MR>(ceil_div(lanes, DEPTH) * DEPTH); }
  static int64_t wide_stride(int64_t lanes) { return panel_stride<NR>(ceil_div(lanes, DEPTH) * DEPTH); }

  // Packs row by row, DEPTH lanes of a row at a time, to
  // dst[panel * stride + (lane / DEPTH * MR + row) * DEPTH + lane % DEPTH].
  static void pack_thin(uint32_t* dst, View<bf16> x, int64_t r0, int64_t rows, int64_t k0, int64_t k) {
    const int64_t stride = panel_stride<MR>(padded(k)), panels = ceil_div(rows, MR);
    const bf16* src = x.data + r0 * x.row + k0 * x.col;
    if (x.col == 1) {  // K is contiguous: copy
      for (int64_t row = 0; row < panels * MR; row++) {
        uint32_t* to = dst + row / MR * stride + row % MR * DEPTH;
        for (int64_t j = 0; j < k; j += 2 * DEPTH, to += MR * DEPTH) {
          const uvec v = row < rows ? lanes_of_row(src + row * x.row + j, k - j) : uvec{};
          std::memcpy(to, &v, sizeof v);
        }
      }
      return;
    }
    for (int64_t j = 0; j < k; j += 2 * DEPTH)  // rows are neighbours in memory: transpose 16 rows x 16 lanes
      for (int64_t row = 0; row < panels * MR; row += VL) {
        uvec block[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) {
          const int64_t at = j + 2 * i;
          block[i] = row < rows && at < k ? lane_of_rows(src + row + at * x.col, x.col, rows - row, k - at) : uvec{};
        }
        transpose(block, std::make_integer_sequence<int, VL>{});
        uint32_t* to = dst + row / MR * stride + j / 2 * MR + row % MR * DEPTH;
        std::memcpy(to, block, sizeof block);
      }
  }

  static void pack_wide(uint32_t* dst, View<bf16> x, int64_t r0, int64_t rows, int64_t k0, int64_t k) {
    const int64_t stride = panel_stride<NR>(padded(k)), lanes = lanes_of(k, 2), panels = ceil_div(rows, NR);
    pack<NR>(dst, stride, x, r0, rows, k0, k);
    for (int64_t p = 0; p < panels; p++)
      std::fill(dst + p * stride + lanes * NR, dst + p * stride + padded(k) * NR, 0u);
  }

  // sums[MR][NR] (+)= a thin panel times a wide panel
  static void multiply(int64_t /*m*/, int64_t lanes, const uint32_t* thin, const uint32_t* wide, float* sums, bool add) {
    constexpr int64_t LD = NR * sizeof(float);
    float* below = sums + 16 * NR;
    asm volatile("" ::: "memory");  // GCC does not know that a tile load reads memory
    if (add) {
      _tile_loadd(0, sums, LD);
      _tile_loadd(1, sums + 16, LD);
      _tile_loadd(2, below, LD);
      _tile_loadd(3, below + 16, LD);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const int64_t kept = std::min(lanes, IN_L1 * DEPTH);
    int64_t l = 0;
    for (; l < kept; l += DEPTH) step<true>(thin + l * MR, wide + l * NR, sums + TILE + l * 4, add);
    for (; l < lanes; l += DEPTH) step<false>(thin + l * MR, wide + l * NR, sums + TILE + l * 4, add);
    _tile_stored(0, sums, LD);
    _tile_stored(1, sums + 16, LD);
    _tile_stored(2, below, LD);
    _tile_stored(3, below + 16, LD);
  }

  // tile[32][16] = up to 32 rows of A, contiguous along K, times a panel of 16 columns. A tile of A that would reach
  // past the end of a row or past the last row is copied first and filled up with zeros.
  static void multiply_rows(int64_t rows, int64_t K, const bf16* a, int64_t row, const uint32_t* panel, float* tile) {
    constexpr int64_t LINE = 64, AHEAD = 16 * DEPTH;  // AHEAD: distance of the prefetch, in elements
    _tile_zero(0);
    _tile_zero(1);
    asm volatile("" ::: "memory");
    for (int64_t k = 0; k < K; k += 2 * DEPTH, panel += DEPTH * 16) {
      _tile_loadd(6, panel, LINE);
      if (rows == 32 && k + 2 * DEPTH <= K) {
        for (int64_t r = 0; r < 32; r++) __builtin_prefetch(a + r * row + k + AHEAD);
        _tile_stream_loadd(4, a + k, row * sizeof(bf16));
        _tile_stream_loadd(5, a + 16 * row + k, row * sizeof(bf16));
      } else {
        alignas(64) bf16 padded[32][2 * DEPTH] = {};
        for (int64_t r = 0; r < rows; r++)
          std::memcpy(padded[r], a + r * row + k, std::min(2 * DEPTH, K - k) * sizeof(bf16));
        asm volatile("" ::"r"(padded) : "memory");
        _tile_loadd(4, padded[0], LINE);
        _tile_loadd(5, padded[16], LINE);
      }
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
    }
    _tile_stored(0, tile, LINE);
    _tile_stored(1, tile + 16 * 16, LINE);
  }

 private:
  // A thin panel is multiplied by several wide panels in turn. L2 cannot deliver both in time, so the first IN_L1 steps
  // of a thin panel, 36 KB, stay in L1, and everything else is loaded past L1.
  static constexpr int64_t IN_L1 = 18;
  static constexpr int64_t TILE = MR * NR;

  template <bool kept>
  static void step(const uint32_t* thin, const uint32_t* wide, const float* next, bool add) {
    constexpr int64_t LANE = NR * sizeof(uint32_t), ROW = DEPTH * sizeof(uint32_t);
    if (add)
      for (int i = 0; i < 64; i += 16) __builtin_prefetch(next + i);
    _tile_stream_loadd(6, wide, LANE);
    if constexpr (kept)
      _tile_loadd(4, thin, ROW);
    else
      _tile_stream_loadd(4, thin, ROW);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, wide + 16, LANE);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kept)
      _tile_loadd(5, thin + 16 * DEPTH, ROW);
    else
      _tile_stream_loadd(5, thin + 16 * DEPTH, ROW);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

}  // namespace
#endif
