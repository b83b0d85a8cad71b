// AVX-512 (F, BW, DQ, VL): one register holds all 16 lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace sb {
namespace SB_ISA {
namespace {

// The register tile of the matrix products: rows, and columns in units of 16.
constexpr int kTileM = 6;
constexpr int kTileN = 4;

namespace reg {

using Float = __m512;
using Mask = __mmask16;
constexpr int kLanes = 16;

inline Float Load(const float* p) { return _mm512_loadu_ps(p); }
inline Float Load(const Bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Float Load(const Fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void Store(float* p, Float x) { _mm512_storeu_ps(p, x); }
inline void Store(Bf16* p, Float x) {  // to nearest even; NaN stays NaN
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
inline void Store(Fp16* p, Float x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Float Set1(float x) { return _mm512_set1_ps(x); }
inline Float Add(Float a, Float b) { return _mm512_add_ps(a, b); }
inline Float Sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
inline Float Mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
inline Float Fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
inline Float Max(Float a, Float b) { return _mm512_max_ps(a, b); }
inline Float Min(Float a, Float b) { return _mm512_min_ps(a, b); }
inline Mask FirstLanes(int n) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(n), lane);
}
inline Float Select(Mask m, Float yes, Float no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Mask Greater(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Float AddWhere(Mask m, Float a, Float b) { return _mm512_mask_add_ps(a, m, a, b); }
inline uint32_t GreaterBits(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// p * 2^whole, or 0 where x < -126: a denormal result of vscalefps takes a microcode assist.
inline Float TimesPowerOf2(Float p, Float whole, Float /*shifted*/, Float x) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p,
                                whole);
}

}  // namespace reg
}  // namespace
}  // namespace SB_ISA
}  // namespace sb
