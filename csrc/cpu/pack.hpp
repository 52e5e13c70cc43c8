// Packing copies a block of a matrix into panels that the micro-kernel reads from front to back.
//
// A panel holds R rows (columns, for B). It is a sequence of lanes along K, each R numbers of 32 bits. A number is one
// fp32 value (fp16 is widened here, exactly) or, if the CPU multiplies bf16 itself, two bf16 neighbours along K.
#pragma once
#include "dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mpcompare {  // named, so that all files share one workspace

// Bytes that the Buffers of all threads hold now.
inline std::atomic<int64_t> workspace_bytes{0};

// Scratch memory that is kept from call to call, on huge pages if the system has them.
class Buffer {
 public:
  ~Buffer() { release(); }
  uint32_t* at_least(int64_t lanes) {  // returns nullptr if there is no memory
    constexpr size_t PAGE = size_t{2} << 20;
    const size_t bytes = (lanes * sizeof(uint32_t) + PAGE - 1) / PAGE * PAGE;
    if (bytes > bytes_) {
      release();
      data_ = static_cast<uint32_t*>(std::aligned_alloc(PAGE, bytes));
      bytes_ = data_ ? bytes : 0;
      workspace_bytes += bytes_;
#ifdef MADV_HUGEPAGE
      if (data_) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
    }
    return data_;
  }

 private:
  void release() {
    std::free(data_);
    workspace_bytes -= bytes_;
  }

  uint32_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// All scratch memory of a thread, shared by every dtype and epilogue: about 10 MB with AVX-512.
struct Workspace {
  Buffer thin, wide, sums;  // the packed blocks and the fp32 sums of a block of C
  Buffer shared;            // memory that the threads of one call share
};
inline Workspace& workspace() {
  static thread_local Workspace instance;
  return instance;
}

}  // namespace mpcompare

namespace {

// A matrix as rows x K, whatever its layout: element (r, k) is data[r * row + k * col]; row or col is 1.
template <class T>
struct View {
  const T* data;
  int64_t row, col;
};

template <class T>
constexpr int PER_LANE = std::is_same_v<T, bf16> && HAS_BF16_DOT ? 2 : 1;  // elements of T in a lane

// Transposes a VL x VL block held in VL registers: log2(VL) rounds of interleaving row i with row i + VL / 2.
template <int... i>
inline void transpose(uvec (&x)[VL], std::integer_sequence<int, i...>) {
#pragma GCC unroll 4
  for (int round = 1; round < VL; round *= 2) {
    uvec y[VL];
#pragma GCC unroll 8
    for (int r = 0; r < VL / 2; r++) {
      y[2 * r] = __builtin_shufflevector(x[r], x[r + VL / 2], (i / 2 + i % 2 * VL)...);
      y[2 * r + 1] = __builtin_shufflevector(x[r], x[r + VL / 2], (i / 2 + i % 2 * VL + VL / 2)...);
    }
#pragma GCC unroll 16
    for (int r = 0; r < VL; r++) x[r] = y[r];
  }
}

// Returns one lane of VL rows, of which n exist; k elements are left along K.
template <class T>
inline uvec lane_of_rows(const T* p, int64_t col, int64_t n, int64_t k) {
  for (int i = 0; i < PER_LANE<T>; i++) __builtin_prefetch(p + (8 * PER_LANE<T> + i) * col);
  if constexpr (PER_LANE<T> == 1)
    return bits(load(p, n));
  else
    return (bits(load(p, n)) >> 16) | (k > 1 ? bits(load(p + col, n)) : uvec{});
}

// Returns VL lanes of one row, contiguous along K; k elements are left.
template <class T>
inline uvec lanes_of_row(const T* p, int64_t k) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + 512);
  if constexpr (PER_LANE<T> == 1) {
    return bits(load(p, k));
  } else {
    if (k >= 2 * VL) return read<uvec>(p);
    uvec lanes = {};
    std::memcpy(&lanes, p, k * sizeof(T));
    return lanes;
  }
}

// The number of lanes of k elements.
inline int64_t lanes_of(int64_t k, int per_lane) { return ceil_div(k, per_lane); }
// Elements from one panel to the next. Whole vectors are stored, so the last lane of a panel may run over by up to VL.
template <int R>
constexpr int64_t panel_stride(int64_t lanes) {
  return lanes * R + VL;
}

// Packs `rows` rows from r0 and k elements from k0: dst[panel * stride + lane * R + row], zeros where there is no row.
template <int R, class T>
void pack(uint32_t* dst, int64_t stride, View<T> x, int64_t r0, int64_t rows, int64_t k0, int64_t k) {
  constexpr int PK = PER_LANE<T>;
  const int64_t lanes = lanes_of(k, PK), panels = ceil_div(rows, R);
  const T* src = x.data + r0 * x.row + k0 * x.col;
  auto put = [](uint32_t* p, uvec v) { std::memcpy(p, &v, sizeof v); };
  if (x.row == 1) {  // rows are neighbours in memory: read along them
    for (int64_t l = 0; l < lanes; l++)
      for (int64_t p = 0; p < panels; p++)
        for (int r = 0; r < R; r += VL) {
          const int64_t row = p * R + r;
          put(dst + p * stride + l * R + r,
              row < rows ? lane_of_rows(src + row + l * PK * x.col, x.col, rows - row, k - l * PK) : uvec{});
        }
    return;
  }
  for (int64_t p = 0; p < panels; p++)  // K is contiguous: read along it, transpose VL x VL at a time
    for (int64_t l = 0; l < lanes; l += VL)
      for (int r = 0; r < R; r += VL) {
        uvec block[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) {
          const int64_t row = p * R + r + i;
          block[i] = r + i < R && row < rows ? lanes_of_row(src + row * x.row + l * PK, k - l * PK) : uvec{};
        }
        transpose(block, std::make_integer_sequence<int, VL>{});
        for (int i = 0; i < VL && l + i < lanes; i++) put(dst + p * stride + (l + i) * R + r, block[i]);
      }
}

}  // namespace
