// AVX2 with FMA and F16C: two registers hold the 16 lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace sb {
namespace SB_ISA {
namespace {

// The register tile of the matrix products: rows, and columns in units of 16.
constexpr int kTileM = 6;
constexpr int kTileN = 1;

namespace reg {

using Float = __m256;
using Mask = __m256;
constexpr int kLanes = 8;

inline Float Load(const float* p) { return _mm256_loadu_ps(p); }
inline Float Load(const Bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Float Load(const Fp16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void Store(float* p, Float x) { _mm256_storeu_ps(p, x); }
inline void Store(Bf16* p, Float x) {  // to nearest even; NaN stays NaN
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline void Store(Fp16* p, Float x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Float Set1(float x) { return _mm256_set1_ps(x); }
inline Float Add(Float a, Float b) { return _mm256_add_ps(a, b); }
inline Float Sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
inline Float Mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
inline Float Fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
inline Float Max(Float a, Float b) { return _mm256_max_ps(a, b); }
inline Float Min(Float a, Float b) { return _mm256_min_ps(a, b); }
inline Mask FirstLanes(int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
}
inline Float Select(Mask m, Float yes, Float no) { return _mm256_blendv_ps(no, yes, m); }
inline Mask Greater(Float a, Float b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Float AddWhere(Mask m, Float a, Float b) { return _mm256_add_ps(a, _mm256_and_ps(m, b)); }
inline uint32_t GreaterBits(Float a, Float b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
// p * 2^whole, or 0 where x < -126; the low bits of `shifted` are the whole number.
inline Float TimesPowerOf2(Float p, Float /*whole*/, Float shifted, Float x) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  const Float r = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  const Float normal = _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), r);
  return _mm256_blendv_ps(normal, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

}  // namespace reg
}  // namespace
}  // namespace SB_ISA
}  // namespace sb
