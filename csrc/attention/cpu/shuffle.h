// What needs lanes of different vectors: transposing, reducing 16 rows at once, gathering.
#pragma once

#include "attention/cpu/simd.h"

namespace sb {
namespace SB_ISA {
namespace {

#if SB_ISA_INDEX == 2

// Row i of x becomes column i: out[c * ld + i] = lane c of x[i].
inline void Transpose16(const Vec* x, float* out, int64_t ld) {
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = x[i].part[0];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i + 0] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  // Now lane l of r[4 g + i] holds column 4 l + i of rows 4 g .. 4 g + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xdd);
    _mm512_storeu_ps(out + i * ld, _mm512_shuffle_f32x4(a, b, 0x88));
    _mm512_storeu_ps(out + (i + 8) * ld, _mm512_shuffle_f32x4(a, b, 0xdd));
    _mm512_storeu_ps(out + (i + 4) * ld, _mm512_shuffle_f32x4(c, d, 0x88));
    _mm512_storeu_ps(out + (i + 12) * ld, _mm512_shuffle_f32x4(c, d, 0xdd));
  }
}

// Where row r must stand in the argument of ReduceRows.
constexpr int Slot(int r) { return r % 4 * 4 + r / 4; }

// Lane r of the result is op over the 16 lanes of v[Slot(r)]: 15 steps in place of 16 horizontal
// reductions.
template <class Op>
inline Vec ReduceRows(Vec* rows, Op op) {
  __m512 v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = rows[i].part[0];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = op(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
              _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    v[i] = op(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
              _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
  const __m512 x = op(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 y = op(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  return {{op(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee))}};
}

// Lane i < n is base[index[i]], the others 0.
inline Vec Gather(const float* base, const int32_t* index, int n) {
  const __mmask16 m = reg::FirstLanes(n);
  return {{_mm512_mask_i32gather_ps(_mm512_setzero_ps(), m, _mm512_maskz_loadu_epi32(m, index),
                                    base, 4)}};
}
inline void Scatter(float* base, const int32_t* index, int n, Vec x) {
  const __mmask16 m = reg::FirstLanes(n);
  _mm512_mask_i32scatter_ps(base, m, _mm512_maskz_loadu_epi32(m, index), x.part[0], 4);
}
inline void StoreFirst(float* p, int n, Vec x) {
  _mm512_mask_storeu_ps(p, reg::FirstLanes(n), x.part[0]);
}

#else

// Row i of x becomes column i: out[c * ld + i] = lane c of x[i].
inline void Transpose16(const Vec* x, float* out, int64_t ld) {
  alignas(64) float t[16][16];
  for (int i = 0; i < 16; ++i) Store(t[i], x[i]);
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < 16; ++i) out[c * ld + i] = t[i][c];
}

// Where row r must stand in the argument of ReduceRows.
constexpr int Slot(int r) { return r; }

// Lane r of the result is op over the 16 lanes of v[Slot(r)].
template <class Op>
inline Vec ReduceRows(Vec* rows, Op op) {
  alignas(64) float t[16][16];
  for (int i = 0; i < 16; ++i) Store(t[i], rows[i]);
  alignas(64) float columns[16][16];
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < 16; ++i) columns[c][i] = t[i][c];
  Vec r = Load(columns[0]);
  for (int c = 1; c < 16; ++c) {
    const Vec x = Load(columns[c]);
    r = Each([&](int i) { return op(r.part[i], x.part[i]); });
  }
  return r;
}

// Lane i < n is base[index[i]], the others 0.
inline Vec Gather(const float* base, const int32_t* index, int n) {
  alignas(64) float t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = base[index[i]];
  return Load(t);
}
inline void Scatter(float* base, const int32_t* index, int n, Vec x) {
  alignas(64) float t[16];
  Store(t, x);
  for (int i = 0; i < n; ++i) base[index[i]] = t[i];
}
inline void StoreFirst(float* p, int n, Vec x) {
  alignas(64) float t[16];
  Store(t, x);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}

#endif

}  // namespace
}  // namespace SB_ISA
}  // namespace sb
