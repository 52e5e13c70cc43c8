// A product by the tensor cores, over the lanes of a warp:  D = A B + D, A 16 x 16, B 16 x 8, D 16 x 8.
//
// A and B are fp16 or bf16, their products are exact, and D and the sums are fp32. Lane 4 g + t holds
//
//   a[0] = A[g, 2t] A[g, 2t+1]   a[1]: row g+8   a[2]: columns + 8   a[3]: both
//   b[0] = B[2t, g] B[2t+1, g]   b[1]: rows + 8
//   d[0], d[1] = D[g, 2t], D[g, 2t+1]            d[2], d[3]: row g+8
//
// A word of a and b has two elements, the first in its low half.
#pragma once
#include "kernel.hpp"

namespace {

__device__ inline void mma(__half, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma(__nv_bfloat16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline uint32_t bits_of(__half x) { return __half_as_ushort(x); }
__device__ inline uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

// The two elements of a word, as fp32.
__device__ inline float2 widen_word(__half, uint32_t word) {
  return {__half2float(__ushort_as_half(static_cast<unsigned short>(word))),
          __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)))};
}
__device__ inline float2 widen_word(__nv_bfloat16, uint32_t word) {
  return {__bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(word))),
          __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(word >> 16)))};
}

// The word of two elements, rounded as narrow does.
__device__ inline uint32_t narrow_word(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return bits_of(__low2half(pair)) | bits_of(__high2half(pair)) << 16;
}
__device__ inline uint32_t narrow_word(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return bits_of(__low2bfloat16(pair)) | bits_of(__high2bfloat16(pair)) << 16;
}

template <class T>
__device__ uint32_t word_of(T low, T high) {
  return bits_of(low) | bits_of(high) << 16;
}
// The low halves, or the high halves, of two words.
__device__ inline uint32_t low_halves(uint32_t x, uint32_t y) { return (x & 0xffff) | y << 16; }
__device__ inline uint32_t high_halves(uint32_t x, uint32_t y) { return x >> 16 | (y & 0xffff0000); }

constexpr int VECTOR = 8;  // 16-bit elements in a load of 16 bytes
using Vector = Pack<uint32_t, VECTOR / 2>;

// Loads 8 neighbouring elements, or zeros where there are none.
template <class T>
__device__ Vector load_vector(const T* x, bool exists) {
  Vector v{};
  if (exists) v = *reinterpret_cast<const Vector*>(x);
  return v;
}

// Returns whether x is a 16-bit matrix whose rows are vectors.
inline bool has_vectors(const Tensor& x) {
  return x.scalar_type() != ScalarType::Float && x.size(1) % VECTOR == 0 && leading_dimension(x) % VECTOR == 0 &&
         is_aligned(x.const_data_ptr(), sizeof(Vector));
}

}  // namespace
