// A thin layer over SIMD: VL fp32 lanes at a time, loaded from and stored to fp32, fp16 or bf16.
//
// Arithmetic on `vec` is GCC's and Clang's vector extension: +, *, <, ?: work lane by lane, so one source serves AVX-512,
// AVX2, NEON and plain code. Only operations that the extension lacks are written for each CPU: fp16 conversion, the
// square root and the bf16 dot product.
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {  // internal linkage: builds for different CPUs may meet in one process

using fp16 = c10::Half;
using bf16 = c10::BFloat16;

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vec __attribute__((vector_size(VL * 4)));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef uint16_t hvec __attribute__((vector_size(VL * 2)));
typedef double dvec __attribute__((vector_size(VL * 4)));  // half as many lanes

inline uvec bits(vec x) { return reinterpret_cast<uvec>(x); }
inline vec floats(uvec x) { return reinterpret_cast<vec>(x); }

template <class V, class T>
inline V read(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// ---- VL numbers at p, widened to fp32 (exact) or rounded to nearest even

inline vec load(const float* p) { return read<vec>(p); }
inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

inline vec load(const bf16* p) { return floats(__builtin_convertvector(read<hvec>(p), uvec) << 16); }
inline void store(bf16* p, vec v) {
  const uvec u = bits(v), nan = reinterpret_cast<uvec>(v != v);
  // Half a unit in the last place is added, or one bit less than that if the last place is even.
  const uvec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const hvec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), hvec);
  std::memcpy(p, &h, sizeof h);
}

#if defined(__AVX512F__)
inline vec load(const fp16* p) { return reinterpret_cast<vec>(_mm512_cvtph_ps(read<__m256i>(p))); }
inline void store(fp16* p, vec v) {
  const __m256i h = _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &h, sizeof h);
}
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
inline vec load(const fp16* p) { return reinterpret_cast<vec>(_mm256_cvtph_ps(read<__m128i>(p))); }
inline void store(fp16* p, vec v) {
  const __m128i h = _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &h, sizeof h);
}
#elif defined(__ARM_NEON)
inline vec load(const fp16* p) { return reinterpret_cast<vec>(vcvt_f32_f16(read<float16x4_t>(p))); }
inline void store(fp16* p, vec v) {
  const float16x4_t h = vcvt_f16_f32(reinterpret_cast<float32x4_t>(v));
  std::memcpy(p, &h, sizeof h);
}
#else
inline vec load(const fp16* p) {
  vec v;
  for (int i = 0; i < VL; i++) v[i] = static_cast<float>(p[i]);
  return v;
}
inline void store(fp16* p, vec v) {
  for (int i = 0; i < VL; i++) p[i] = static_cast<fp16>(v[i]);
}
#endif

// ---- only the first n numbers at p: the others read as 0, and are not written

template <class T>
inline vec load(const T* p, int64_t n) {
  if (n >= VL) return load(p);
  T padded[VL] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <class T>
inline void store(T* p, vec v, int64_t n) {
  if (n >= VL) return store(p, v);
  T padded[VL];
  store(padded, v);
  std::memcpy(p, padded, n * sizeof(T));
}

// ---- whole-vector helpers

inline vec relu(vec v) { return v < 0 ? vec{} : v; }  // NaN < 0 is false: NaN stays NaN, as in torch

inline float sum(vec v) {
  float total = 0;
  for (int i = 0; i < VL; i++) total += v[i];
  return total;
}

inline double sum(dvec v) {
  double total = 0;
  for (int i = 0; i < VL / 2; i++) total += v[i];
  return total;
}

inline vec square_root(vec v) {
#if defined(__AVX512F__)
  return reinterpret_cast<vec>(_mm512_sqrt_ps(reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  return reinterpret_cast<vec>(_mm256_sqrt_ps(reinterpret_cast<__m256>(v)));
#elif defined(__x86_64__)
  return reinterpret_cast<vec>(_mm_sqrt_ps(reinterpret_cast<__m128>(v)));
#elif defined(__aarch64__)
  return reinterpret_cast<vec>(vsqrtq_f32(reinterpret_cast<float32x4_t>(v)));
#else
  for (int i = 0; i < VL; i++) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

// Converts the first and the second half of the lanes to double.
inline void widen(vec v, dvec* first, dvec* second) {
#if defined(__AVX512F__)  // GCC 12 would convert four quarters and put them together
  const __m512d both = reinterpret_cast<__m512d>(v);
  *first = reinterpret_cast<dvec>(_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_castpd512_pd256(both))));
  *second = reinterpret_cast<dvec>(_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(both, 1))));
#else
  typedef float half __attribute__((vector_size(VL * 2)));
  half h[2];
  std::memcpy(h, &v, sizeof v);
  *first = __builtin_convertvector(h[0], dvec);
  *second = __builtin_convertvector(h[1], dvec);
#endif
}

// Returns acc + a.lo * b.lo + a.hi * b.hi in every lane, each holding two bf16, by the CPU's bf16 instruction. x86's
// instruction takes subnormal inputs for 0 and flushes subnormal results: numbers below 1.2e-38 in bf16 as in fp32.
#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_DOT = true;
inline vec dot2(vec acc, uvec a, uvec b) {
  return reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a),
                                                reinterpret_cast<__m512bh>(b)));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool HAS_BF16_DOT = true;
inline vec dot2(vec acc, uvec a, uvec b) {
  return reinterpret_cast<vec>(vbfdotq_f32(reinterpret_cast<float32x4_t>(acc), reinterpret_cast<bfloat16x8_t>(a),
                                           reinterpret_cast<bfloat16x8_t>(b)));
}
#else
constexpr bool HAS_BF16_DOT = false;
inline vec dot2(vec acc, uvec, uvec) { return acc; }  // never called
#endif

}  // namespace
